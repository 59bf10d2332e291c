"""A training step without values: finds what a model would hold on a device by running it on fake tensors.

Forward, loss and backward run as in training, on tensors that have a shape and a device but no memory. A ledger sees
every operation, and the creation and release of every storage. So what is kept for backward, the peak, and what the
peak consists of come from the model itself, including its checkpointing and precision. It needs no GPU and almost no
memory, and takes about as long as a step takes to launch on a CPU.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from frameworm.engine.memory.dry_device import hidden_workspace, pretended_device, replaced
from frameworm.engine.model import activations
from frameworm.engine.model.fused_head import fuse_heads
from frameworm.engine.step.loss import LossFunction
from frameworm.errors import ConfigError, FramewormError, ModelError
from frameworm.observe.flops.counter import BACKWARD, FlopCount, FlopCounter
from frameworm.parallel.units import find_units
from frameworm.scaling.memory_model import CheckpointingName, Peak, StepMemory
from frameworm.scaling.memory_shapes import ModelShapes, block
from frameworm.torch_private.execution import run_backward
from frameworm.torch_private.tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    TorchDispatchMode,
    sparse_indices,
    sparse_values,
    storage_id,
    tree_leaves,
    tree_map,
)

_fake_log = logging.getLogger(FakeTensorMode.__module__)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_TAGS = ("activations", "weight_copies", "loss", "workspace", "gradients")
# The compiler recomputes cheap operations, but our own operations are opaque to it.
_OPAQUE = frozenset({"frameworm::feed_forward"})


class Ledger(TorchDispatchMode):
    """Tracks every live storage that operations create, by its purpose."""

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._outside: set[int] = set()  # parameters and batches
        self._live: dict[int, tuple[int, str]] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self.held = dict.fromkeys(_TAGS, 0)
        self.peak = dict(self.held)
        self.peak_beside_gradients = dict(self.held)
        self.phase = "activations"  # purpose of new storages

    def leave_out(self, tensors: Any) -> None:
        """Exclude tensors that are counted elsewhere; call before anything else is counted."""
        for tensor in _tensors(tensors):
            key = storage_id(tensor)
            self._outside.add(key)
            if key in self._live:
                self._gone(key)
        self.peak = dict(self.held)
        self.peak_beside_gradients = dict(self.held)

    @property
    def total(self) -> int:
        """Bytes held now."""
        return sum(self.held.values())

    def mark(self, tensor: Tensor, tag: str) -> None:
        """Change the purpose of a tensor's storages."""
        for storage in _storages(tensor):
            key = storage_id(storage)
            if key in self._live:
                size, before = self._live[key]
                self.held[before] -= size
                self.held[tag] += size
                self._live[key] = (size, tag)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.name().split(".")[0]
        tag = self.phase
        if name == "aten::_to_copy" and storage_id(args[0]) in self._outside and tag != "workspace":
            tag = "weight_copies"
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                for storage in _storages(tensor):
                    self._note(storage, tag)
        hidden = hidden_workspace(name, args, self._device)
        self.peak = self._larger(self.peak, {**self.held, "workspace": self.held["workspace"] + hidden})
        beside = {**self.held, "workspace": self.held["workspace"] + hidden, "gradients": 0}
        self.peak_beside_gradients = self._larger(self.peak_beside_gradients, beside)
        return result

    @staticmethod
    def _larger(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
        return other if sum(other.values()) > sum(one.values()) else one

    def _note(self, storage: torch.UntypedStorage, tag: str) -> None:
        key = storage_id(storage)
        if key in self._outside or key in self._live:
            return
        size = block(storage.nbytes(), self._device)
        self._live[key] = (size, tag)
        self.held[tag] += size
        self._references[key] = weakref.ref(storage, functools.partial(self._gone, key))

    def _gone(self, key: int, _reference: Any = None) -> None:
        size, tag = self._live.pop(key)
        del self._references[key]
        self.held[tag] -= size


class DryRun:
    """Runs a model without values.

    Args:
        model: The model, which is not changed; with real, meta or fake tensors.
        make_batch: Creates a batch with a given number of samples; only shapes and dtypes matter, tensors may be on
            `meta`.
        loss_fn: As for `Trainer`.
        device: `cpu` or `cuda`, which need not be present.
        precision: off, bf16 or fp16.
        checkpointing: As `memory.activation_checkpointing`.
        checkpoint_modules: As `memory.checkpoint_modules`.
        compiled: Whether the model will be compiled, so that cheap operations are recomputed instead of kept. An
            estimate, since the compiler is not run.
        flash_attention: Whether attention may use flash kernels.
        half_layers: Whether layers have parameters and inputs in half precision, as zero2 and zero3 gather and call
            them; autocast then only applies outside the layers.
        make_validation: Like `make_batch` for validation batches; None if they are like training batches.
        fused_loss: As `training.fused_loss`.

    Raises:
        ConfigError: If the layers to recompute cannot be found, or there is no head for a fused loss.
    """

    def __init__(
        self,
        model: nn.Module,
        make_batch: Callable[[int], Any],
        loss_fn: Callable[..., Any] | None = None,
        *,
        device: str = "cuda",
        precision: str = "off",
        checkpointing: CheckpointingName = "off",
        checkpoint_modules: list[str] | None = None,
        compiled: bool = False,
        flash_attention: bool = True,
        half_layers: bool = False,
        make_validation: Callable[[int], Any] | None = None,
        fused_loss: bool = False,
    ) -> None:
        self.device = device
        self.shapes = shapes_of(model)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._make_batch = make_batch
        self._make_validation = make_validation or make_batch
        self._dtype = _DTYPES.get(precision)
        self._flash = flash_attention
        self._kept = activations._KEPT
        units = find_units(model) if half_layers and self._dtype is not None else []
        with self._mode:
            self.model = fake_copy(model, self._dtype, units)
        if fused_loss:
            fuse_heads(self.model)
        if compiled and checkpointing == "off":
            self._kept |= _OPAQUE
            with contextlib.suppress(ConfigError):  # a model whose layers are not found counts as not compiled
                activations.apply(self.model, "selective", checkpoint_modules, whole=True)
        else:
            activations.apply(self.model, checkpointing, checkpoint_modules)
        self._loss_function = LossFunction(self.model, loss_fn)

    def step(self, micro_batch: int, validation_batch: int | None = None) -> StepMemory:
        """Compute what a step with this micro-batch holds.

        Args:
            micro_batch: Number of samples of the training batch.
            validation_batch: Number of samples of a validation batch; None without validation.

        Raises:
            ModelError: If the model reads values, which a dry run does not have.
        """
        ledger = Ledger(self.device)
        with self._running(ledger):
            batch = self._fake_batch(self._make_batch(micro_batch))
            ledger.leave_out([*self.model.parameters(), *self.model.buffers(), batch])
            self.model.train()
            hooks = self._watch(ledger)
            try:
                kept = self._micro_batch(ledger, batch)
            finally:
                for hook in hooks:
                    hook.remove()
                for parameter in self.model.parameters():
                    parameter.grad = None
            size = sum(block(_nbytes(item), self.device) for item in _tensors(batch))
            # If gradients already exist, each new one is held only until it is added.
            fresh, repeat = Peak(**ledger.peak), Peak(**ledger.peak_beside_gradients)
            validation = 0 if validation_batch is None else self._validate(validation_batch)
        return StepMemory(micro_batch, kept, fresh, repeat, validation, size)

    def count_flops(self, samples: int = 1) -> FlopCount:
        """Count the model's FLOPs in a micro-batch: forward and backward, without recomputation for checkpointing.

        Raises:
            ModelError: If the model reads values, which a dry run does not have.
        """
        counter = FlopCounter()
        with self._running(Ledger(self.device)), counter:
            batch = self._fake_batch(self._make_batch(samples))
            self.model.train()
            try:
                self._micro_batch(Ledger(self.device), batch, counter)
            finally:
                for parameter in self.model.parameters():
                    parameter.grad = None
        return counter.count

    def _micro_batch(self, ledger: Ledger, batch: Any, counter: FlopCounter | None = None) -> int:
        """Run forward and backward; return the bytes held in between."""
        ledger.phase = "activations"
        with self._autocast():
            loss = self._loss_function(self.model, batch).loss
        kept = ledger.total
        ledger.phase = "workspace"
        if counter is not None:
            counter.phase = BACKWARD
        # Like loss.backward(), which as a torch function would recompute outside the pretended device.
        run_backward(loss)
        return kept

    def _validate(self, samples: int) -> int:
        ledger = Ledger(self.device)
        batch = self._fake_batch(self._make_validation(samples))
        ledger.leave_out([*self.model.parameters(), *self.model.buffers(), batch])
        self.model.eval()
        with ledger, torch.no_grad(), self._autocast():
            self._loss_function(self.model, batch)
        return sum(ledger.peak.values()) + sum(block(_nbytes(item), self.device) for item in _tensors(batch))

    @contextlib.contextmanager
    def _running(self, ledger: Ledger) -> Iterator[None]:
        flash = torch.backends.cuda.flash_sdp_enabled()
        torch.backends.cuda.enable_flash_sdp(self._flash)
        try:
            with (
                warnings.catch_warnings(),
                pretended_device(self.device),
                replaced(activations, "_KEPT", self._kept),
                replaced(_fake_log, "disabled", True),  # failures are raised and reported in one line
                self._mode,
                ledger,
            ):
                warnings.simplefilter("ignore")
                yield
        except FramewormError:
            raise
        except Exception as error:  # anything that the model does and fake tensors cannot
            if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
                reason = f"decides by values ({error.func})"
            else:
                first = (str(error).strip() or "no reason given").splitlines()[0]
                reason = f"does not run on tensors without values ({type(error).__name__}: {first})"
            raise ModelError(
                f"{type(self.model).__name__} {reason}, so its memory cannot be planned without running it; give "
                "--params instead of --config, or measure it with `frameworm profile`"
            ) from error
        finally:
            torch.backends.cuda.enable_flash_sdp(flash)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast("cpu", dtype=self._dtype)

    def _fake_batch(self, batch: Any) -> Any:
        def fake(item: Any) -> Any:
            return torch.empty_like(item, device="cpu") if isinstance(item, Tensor) else item

        return _mapped(fake, batch)

    def _watch(self, ledger: Ledger) -> list[Any]:
        """Register hooks that tell the ledger where the layers end and which storages become gradients."""
        layers = layers_of(self.model)

        def after_layers(*_: Any) -> None:
            if ledger.phase == "activations":
                ledger.phase = "loss"

        hooks: list[Any] = [(layers[-1] if layers else self.model).register_forward_hook(after_layers)]
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                hooks.append(
                    parameter.register_post_accumulate_grad_hook(lambda item: ledger.mark(item.grad, "gradients"))
                )
        return hooks


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model: the entries of its ModuleLists."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and module not in inside:
            found += [layer for layer in module if layer not in found]
            inside.update(inner for layer in module for inner in layer.modules())
    return found


def shapes_of(model: nn.Module) -> ModelShapes:
    """Return the sizes of a model's parameters and buffers, by the unit that zero2 and zero3 gather."""
    seen: set[Tensor] = set()
    units = []
    for part in [*find_units(model), model]:
        own = [item for item in part.parameters() if item.requires_grad and item not in seen]
        seen.update(own)
        units.append(tuple(tuple(item.shape) for item in own))
    fixed = [*model.buffers(), *(item for item in model.parameters() if not item.requires_grad)]
    width = max((item.element_size() for item in model.parameters() if item.requires_grad), default=4)
    layers = tuple(unit for unit in units[:-1] if unit)
    return ModelShapes((*layers, units[-1]), sum(_nbytes(item) for item in fixed), width)


def fake_copy(model: nn.Module, dtype: torch.dtype | None = None, units: Sequence[nn.Module] = ()) -> nn.Module:
    """Copy a module without values, with its units in another dtype; call inside a fake tensor mode."""
    memo: dict[int, Any] = {}
    changed = {id(parameter) for unit in units for parameter in unit.parameters()}
    for parameter in model.parameters():
        empty = torch.empty(parameter.shape, dtype=dtype if id(parameter) in changed else parameter.dtype)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
    result = copy.deepcopy(model, memo)
    for unit in units:
        memo[id(unit)].register_forward_pre_hook(functools.partial(_cast_inputs, dtype), with_kwargs=True)
    return result


def _cast_inputs(dtype: torch.dtype | None, _unit: nn.Module, args: Any, kwargs: Any) -> Any:
    """Cast a unit's inputs as fully_shard does before it calls a unit with its own dtype."""

    def cast(item: Any) -> Any:
        return item.to(dtype) if isinstance(item, Tensor) and item.is_floating_point() else item

    return tree_map(cast, args), tree_map(cast, kwargs)


def _mapped(function: Callable[[Any], Any], batch: Any) -> Any:
    """Apply a function to a batch's tensors; mappings become dicts, as the loss needs nothing else."""
    if isinstance(batch, Mapping):
        return {name: _mapped(function, value) for name, value in batch.items()}
    return tree_map(function, batch)


def _tensors(batch: Any) -> list[Tensor]:
    return [item for item in tree_leaves(batch) if isinstance(item, Tensor)]


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """Return a tensor's storages; a sparse one, such as a sparse embedding's gradient, contains two tensors."""
    if tensor.layout == torch.sparse_coo:
        return [part.untyped_storage() for part in (sparse_indices(tensor), sparse_values(tensor))]
    return [tensor.untyped_storage()]


def _nbytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()
