"""Counts the FLOPs of a training step while it runs, without changing what it computes."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from frameworm.observe.flops.formulas import Work, has_values, pairs_of, type_name, work_of

_SOFTMAX = frozenset({"aten::_softmax", "aten::_safe_softmax"})
FORWARD, BACKWARD, NEITHER = "forward", "backward", "neither"
# Libraries whose operations have a formula here, or no arithmetic worth counting.
_KNOWN = {
    "aten",
    "prim",
    "prims",
    "c10d",
    "_c10d_functional",
    "fsdp",
    "profiler",
    "inductor",
    "torchvision",
    "frameworm",
}


@dataclass
class FlopCount:
    """FLOPs of the steps that were counted.

    Attributes:
        products: Everything but attention kernels; grows with the tokens that are computed, padding too.
        attention: By pairs of tokens, at the shapes computed.
        masked_attention: Likewise, where lengths or a mask have left padding out.
        by_type: All of it by the type of the numbers that are multiplied.
        shapes: FLOPs by batch, rows, inner width, columns and type of a matrix product.
        scores: By batch, rows and columns of the scores that a softmax was given: pairs that count, and all.
        uncounted: Operations of other libraries, for which there is no formula.
        problem: A formula that failed; the count is then not to be used.
    """

    products: float = 0.0
    attention: float = 0.0
    masked_attention: float = 0.0
    by_type: Counter[str] = field(default_factory=Counter)
    shapes: Counter[tuple[int, int, int, int, str]] = field(default_factory=Counter)
    scores: dict[tuple[int, int, int], tuple[float, float]] = field(default_factory=dict)
    uncounted: set[str] = field(default_factory=set)
    problem: str | None = None

    @property
    def total(self) -> float:
        """All FLOPs, at the shapes computed."""
        return self.products + self.attention + self.masked_attention

    @property
    def main_type(self) -> str | None:
        """The type in which most of it is computed."""
        return max(self.by_type, key=lambda name: self.by_type[name]) if self.by_type else None

    def add(self, work: Work) -> None:
        """Take one operation in."""
        if not work.by_pairs:
            self.products += work.flops
        elif work.real:
            self.masked_attention += work.flops
        else:
            self.attention += work.flops
        self.by_type[work.dtype] += work.flops  # type: ignore[assignment]
        if work.product is not None:
            self.shapes[(*work.product, work.dtype)] += work.flops  # type: ignore[assignment]

    def merge(self, other: FlopCount) -> None:
        """Add what another count found; both are settled."""
        self.products += other.products
        self.attention += other.attention
        self.masked_attention += other.masked_attention
        self.by_type.update(other.by_type)
        self.shapes.update(other.shapes)
        self.uncounted |= other.uncounted
        self.problem = self.problem or other.problem

    def settle(self) -> None:
        """Take written-out attention, whose products have the shape of the scores between them, for attention."""
        for (batch, rows, inner, columns, _), flops in self.shapes.items():
            matrices = ((rows, columns), (rows, inner), (inner, columns))
            keys = [(batch, *sizes) for one in matrices for sizes in (one, one[::-1])]
            pairs = next((self.scores[key] for key in keys if key in self.scores), None)
            if pairs is not None and batch > 1:
                self.products -= flops
                if pairs[0] < pairs[1]:
                    self.masked_attention += flops * pairs[0] / pairs[1]
                else:
                    self.attention += flops
        self.scores.clear()


class FlopCounter(TorchDispatchMode):
    """Looks at every operation that runs inside it, as torch's own FlopCounterMode does, and lets it run as it is.

    torch's counter takes operations apart to count them, counts causal attention in full, scores that attention
    computes again in backward, grouped convolutions' gradients many times over, and recomputed activations. This one
    counts what the model's arithmetic needs. Formulas that were given to torch's `register_flop_formula` are used too.

    Set `phase` to `forward` or `backward` while these run: what backward runs with gradients enabled is recomputed.
    """

    supports_higher_order_operators = True

    def __new__(cls) -> FlopCounter:
        """One that the compiler does not look into, where the compiler is loaded; asking would load it."""
        guarded = cls is FlopCounter and "torch._dynamo" in sys.modules
        return object.__new__(_guarded() if guarded else cls)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see __new__

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = FlopCount()
        self.phase = FORWARD

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Without this the compiler would give up on every function it meets in here, for good."""
        return True

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.count.settle()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        recomputes = self.phase == BACKWARD and torch.is_grad_enabled()
        if not recomputes and self.phase != NEITHER:
            try:
                self._see(function, args, kwargs or {}, result)
            except Exception as error:  # nothing that is counted is worth a training
                self.count.problem = f"{function}: {type(error).__name__}: {error}"
        return result

    def _see(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        schema = getattr(function, "_schema", None)
        if schema is None:
            name, arguments = str(function.name()), dict(zip(("query", "key", "value"), args))
        else:
            name, arguments = schema.name, _named(schema, args, kwargs)
        if name in _SOFTMAX and self.phase == FORWARD:
            self._see_scores(args[0])
            return
        work = work_of(name, arguments, result)
        if work is None and name.partition("::")[0] not in _KNOWN:
            work = self._registered(function, name, args, kwargs, result)
        if work is not None:
            self.count.add(work)

    def _see_scores(self, scores: torch.Tensor) -> None:
        """Which pairs of an attention that is written out in products and a softmax count."""
        if scores.dim() < 3 or not has_values(scores):
            return
        rows, columns = scores.shape[-2:]
        key = (scores.numel() // max(rows * columns, 1), rows, columns)
        pairs, total = self.count.scores.get(key, (0.0, 0.0))
        self.count.scores[key] = pairs + pairs_of(scores), total + scores.numel()

    def _registered(self, function: Any, name: str, args: Any, kwargs: Any, result: Any) -> Work | None:
        """By a formula that the user, or another library, has registered with torch."""
        from torch.utils.flop_counter import flop_registry  # late: it loads triton

        formula = flop_registry.get(getattr(function, "_overloadpacket", function))
        if formula is None:
            self.count.uncounted.add(name)
            return None
        tensors = [item for item in args if isinstance(item, torch.Tensor) and item.is_floating_point()]
        flops = formula(*args, **kwargs, out_val=result)
        return Work(float(flops), type_name(tensors[0]) if tensors else "fp32")


@functools.cache
def _guarded() -> type[FlopCounter]:
    dispatch = torch.compiler.disable(FlopCounter.__torch_dispatch__)
    return type("GuardedFlopCounter", (FlopCounter,), {"__torch_dispatch__": dispatch})


def _named(schema: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments by name; what was left out keeps its default, which no formula needs."""
    return {**{item.name: value for item, value in zip(schema.arguments, args)}, **kwargs}
