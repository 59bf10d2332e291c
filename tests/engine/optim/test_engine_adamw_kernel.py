"""The one-pass update does what torch's clipping and AdamW do, on the same state."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from frameworm.engine.optim import adamw_kernel
from frameworm.engine.optim.adamw_kernel import FusedUpdate, GatherGradients
from frameworm.engine.optim.half_weights import HalfWeights
from frameworm.errors import ModelError, StateError
from triton_here import DEVICE, INTERPRETED, needs_gpu, needs_kernels

SHAPES: list[tuple[int, ...]] = [(1,), (3,), (65537,), (64, 128), (), (2048,), (0, 4), (8192,)]


def on_gpu(test: Callable[..., None]) -> Any:
    return needs_kernels(pytest.mark.gpu(needs_gpu(test)))


@pytest.fixture(autouse=True)
def _device_types(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(adamw_kernel, "_DEVICE_TYPES", ("cpu",))


def _parameters(shapes: list[tuple[int, ...]] | None = None, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE)) for shape in shapes or SHAPES]


def _optimizer(parameters: list[nn.Parameter], lr: float | Tensor = 0.01, **settings: Any) -> torch.optim.AdamW:
    half = len(parameters) // 2
    groups = [
        {"params": parameters[:half], "weight_decay": 0.1},
        {"params": parameters[half:], "weight_decay": 0.0, "betas": (0.8, 0.95), "eps": 1e-6},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, fused=True, **settings)


def _set_gradients(parameters: list[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * scale).to(DEVICE)


def _torch_step(
    optimizer: torch.optim.Optimizer, clip_norm: float | None, skip_bad: bool = False, factor: float = 1.0
) -> Tensor | None:
    """What the update is to be equal to; the gradients are left as they were."""
    held = [item for group in optimizer.param_groups for item in group["params"] if item.grad is not None]
    before = [item.grad for item in held]
    for item in held:
        item.grad = item.grad * factor
    norm = None
    if clip_norm is not None:
        norm = get_total_norm([item.grad for item in held])
        clip_grads_with_norm_(held, clip_norm, norm)
    if norm is None or not skip_bad or bool(torch.isfinite(norm)):
        optimizer.step()
    for item, gradient in zip(held, before):
        item.grad = gradient
    return norm


def _close(found: Tensor, expected: Tensor, rtol: float = 1e-6, atol: float = 1e-7) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, equal_nan=True)


def _same(found: torch.optim.Optimizer, expected: torch.optim.Optimizer, atol: float = 1e-7) -> None:
    """Parameters and state of both are equal to rounding, step counts exactly."""
    for ours, theirs in zip(found.param_groups, expected.param_groups):
        for mine, other in zip(ours["params"], theirs["params"]):
            _close(mine.detach(), other.detach(), atol=atol)
            assert found.state[mine].keys() == expected.state[other].keys()
            for name, value in expected.state[other].items():
                if name == "step":
                    assert torch.equal(found.state[mine][name], value)
                    assert found.state[mine][name].dtype == value.dtype
                elif value.numel() > 0:
                    # Terms of the first moment cancel: its error is that of the largest.
                    error = float(value.abs().max()) * 3e-7 if name == "exp_avg" else 0.0
                    _close(found.state[mine][name], value, rtol=5e-5, atol=error)
                    assert found.state[mine][name].stride() == value.stride()


def _pair(**settings: Any) -> tuple[list[nn.Parameter], torch.optim.AdamW, FusedUpdate, list[nn.Parameter], Any]:
    ours, theirs = _parameters(), _parameters()
    optimizer = _optimizer(ours, **settings)
    return ours, optimizer, FusedUpdate(optimizer, ours), theirs, _optimizer(theirs, **settings)


@needs_kernels
@pytest.mark.parametrize("many", [False, True])
def test_gradients_are_gathered_as_torch_copies_them(many: bool) -> None:
    """Of both dtypes, from any address, laid out as the parameter; more than one launch takes."""
    shapes = SHAPES + ([(5,)] * 140 if many else [])
    generator = torch.Generator().manual_seed(3)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    begins = [sum(sizes[:index]) for index in range(len(sizes))]
    message, expected = (torch.full((sum(sizes),), 7.0, device=DEVICE) for _ in range(2))
    places = [message[begin : begin + size].view(shape) for begin, size, shape in zip(begins, sizes, shapes)]
    gradients = []
    for index, shape in enumerate(shapes):
        values = torch.randn(sizes[index] + 1, generator=generator).to(DEVICE)
        values = values.bfloat16() if index % 3 == 1 else values
        gradients.append(values[index % 2 : index % 2 + sizes[index]].view(shape))
    assert GatherGradients(places)(gradients, 1 / 3)
    torch.cat([item.flatten().float() for item in gradients], out=expected).mul_(1 / 3)
    assert torch.equal(message, expected)


@needs_kernels
def test_gradients_laid_out_otherwise_are_left_to_torch() -> None:
    place = torch.zeros(4, 6, device=DEVICE)
    gather = GatherGradients([place])
    for gradient in (torch.ones(6, 4, device=DEVICE).t(), torch.ones(4, 6, device=DEVICE, dtype=torch.float16)):
        assert not gather([gradient], 0.5)
    assert not place.any()
    assert gather([torch.ones(4, 6, device=DEVICE)], 0.5)
    assert (place == 0.5).all()


@needs_kernels
@pytest.mark.parametrize("clip_norm", [None, 1.0, 1e6])
@pytest.mark.parametrize("factor", [None, 0.25])
def test_equals_torch(clip_norm: float | None, factor: float | None) -> None:
    ours, optimizer, update, theirs, expected = _pair()
    multiplier = None if factor is None else torch.tensor(factor, device=DEVICE)
    for step in range(4):
        for parameters in (ours, theirs):
            _set_gradients(parameters, step)
            if step == 1:
                parameters[2].grad = parameters[3].grad = None
        given = [None if item.grad is None else item.grad.clone() for item in ours]
        for group in (*optimizer.param_groups, *expected.param_groups):
            group["lr"] = 0.01 * (step + 1)
        norm, skipped = update(clip_norm, False, multiplier)
        expected_norm = _torch_step(expected, clip_norm, factor=1.0 if factor is None else factor)
        assert skipped is None
        if expected_norm is None:
            assert norm is None
        else:
            assert norm is not None
            assert (norm.shape, norm.dtype) == ((), torch.float32)
            _close(norm, expected_norm)
        for item, gradient in zip(ours, given):
            assert gradient is None or torch.equal(item.grad, gradient), "gradients are not ours to change"
    _same(optimizer, expected)
    assert optimizer.state[ours[0]]["step"] == 4
    assert optimizer.state[ours[2]]["step"] == 3, "without a gradient a parameter makes no step"


@needs_kernels
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_bad_gradients_change_nothing(bad: float) -> None:
    ours, optimizer, update, theirs, expected = _pair()
    for step in range(3):
        for parameters in (ours, theirs):
            _set_gradients(parameters, step)
        if step in (0, 2):
            ours[2].grad[70] = theirs[2].grad[70] = bad  # type: ignore[index]
        norm, skipped = update(1.0, True)
        assert norm is not None
        assert skipped is not None
        assert float(skipped) == (step != 1)
        _close(norm, _torch_step(expected, 1.0, skip_bad=True))  # type: ignore[arg-type]
    for mine, other in zip(ours, theirs):
        _close(mine.detach(), other.detach())
        assert optimizer.state[mine]["step"] == 1
    assert not optimizer.state[ours[3]]["exp_avg"].isnan().any()


@needs_kernels
def test_bad_gradients_spoil_everything_when_not_skipped() -> None:
    ours, _, update, theirs, expected = _pair()
    for parameters in (ours, theirs):
        _set_gradients(parameters, 0)
        parameters[2].grad[70] = float("nan")  # type: ignore[index]
    update(1.0, False)
    _torch_step(expected, 1.0)
    for mine, other in zip(ours, theirs):
        assert torch.equal(mine.isnan(), other.isnan())
    assert ours[0].isnan().all()


@needs_kernels
def test_torch_can_take_over_and_give_back() -> None:
    ours, optimizer, update, theirs, expected = _pair()
    for step in range(8):
        _set_gradients(ours, step)
        _set_gradients(theirs, step)
        _torch_step(expected, 1.0)
        if step % 3 == 1:
            _torch_step(optimizer, 1.0)
        else:
            update(1.0, True)
        if step == 4:  # a new optimizer goes on from the saved state
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = _optimizer(ours)
            optimizer.load_state_dict(saved)
            update = FusedUpdate(optimizer, ours)
        if step == 6:  # the same optimizer gets other tensors as state
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _same(optimizer, expected)


@needs_kernels
def test_state_that_counts_on_the_host_is_brought_over() -> None:
    ours, optimizer, update, theirs, expected = _pair()
    for step in range(2):
        for parameters in (ours, theirs):
            _set_gradients(parameters, step)
        update(1.0, True)
        _torch_step(expected, 1.0)
        for item in ours:
            optimizer.state[item]["step"] = optimizer.state[item]["step"].cpu().double()
    for item in ours:
        optimizer.state[item]["step"] = optimizer.state[item]["step"].to(DEVICE).float()
    _same(optimizer, expected)


@needs_kernels
def test_learning_rates_as_tensors_and_changed_settings() -> None:
    rates = [torch.tensor(0.01, device=DEVICE), torch.tensor(0.01, dtype=torch.float64, device=DEVICE)]
    ours, optimizer, update, theirs, expected = _pair()
    for both in (optimizer, expected):
        for group, rate in zip(both.param_groups, rates):
            group["lr"] = rate
    for step in range(3):
        rates[0].fill_(0.01 * (step + 1))
        rates[1].fill_(0.02 * (step + 1))
        for parameters, both in ((ours, optimizer), (theirs, expected)):
            _set_gradients(parameters, step)
            both.param_groups[0].update(betas=(0.5 + step / 10, 0.99), weight_decay=step / 10)
        update(1.0, True)
        for group, rate in zip(expected.param_groups, rates):
            group["lr"] = float(rate)
        _torch_step(expected, 1.0)
    _same(optimizer, expected)


@needs_kernels
def test_more_tensors_than_one_launch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw_kernel, "_TENSORS_PER_LAUNCH", 3)
    ours, optimizer, update, theirs, expected = _pair()
    for step, clip_norm in enumerate((1.0, None)):
        for parameters in (ours, theirs):
            _set_gradients(parameters, step)
        update(clip_norm, True)
        _torch_step(expected, clip_norm)
    _same(optimizer, expected)


@needs_kernels
def test_layouts() -> None:
    """Parameters in another order of dimensions, gradients in another than theirs, memory that is not aligned."""
    pairs = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(4, 3, 5, 5, generator=generator).to(DEVICE).to(memory_format=torch.channels_last)
        odd = torch.randn(9001, generator=generator).to(DEVICE)[1:]
        parameters = [nn.Parameter(images), nn.Parameter(odd)]
        pairs.append((parameters, torch.optim.AdamW(parameters, lr=0.1, fused=True)))
    (ours, optimizer), (theirs, expected) = pairs
    update = FusedUpdate(optimizer, ours)
    for step in range(2):
        for parameters in (ours, theirs):
            _set_gradients(parameters, step)
        theirs[0].grad = theirs[0].grad.to(memory_format=torch.channels_last)  # type: ignore[union-attr]
        update(1.0, True)
        _torch_step(expected, 1.0)
    _same(optimizer, expected)


@needs_kernels
@pytest.mark.parametrize(("clip_norm", "bad"), [(1.0, False), (None, False), (1.0, True)])
def test_gradients_and_weights_in_half_precision(clip_norm: float | None, bad: bool) -> None:
    """Equal to the bit to the same gradients in fp32; the weights in half precision are the parameters, cast."""
    ours, optimizer, _, theirs, expected = _pair()
    holder = nn.Module()
    for index, parameter in enumerate(ours):
        holder.register_parameter(f"p{index}", parameter)
    halves = HalfWeights([(holder, f"p{index}") for index in range(1, len(ours))], torch.bfloat16)
    update, other = FusedUpdate(optimizer, ours, halves), FusedUpdate(expected, theirs)
    for step in range(3):
        _set_gradients(theirs, step)
        for index, (parameter, their) in enumerate(zip(ours, theirs)):
            assert their.grad is not None
            their.grad = their.grad.bfloat16().float()
            if bad and step == 1 and index == 2:
                their.grad[5] = float("inf")
            half = halves.beside(parameter)
            in_fp32 = half is None or (index == 4 and step != 2)  # accumulated: the gradient is fp32, the weight not
            parameter.grad = their.grad.clone() if in_fp32 else None
            if half is not None:
                half.grad = None if in_fp32 else their.grad.bfloat16()
        found = update(clip_norm, True, torch.tensor(0.5, device=DEVICE))
        wanted = other(clip_norm, True, torch.tensor(0.5, device=DEVICE))
        for one, another in zip(found, wanted):
            assert (one is None) == (another is None)
            assert one is None or another is None or torch.equal(one, another)
    for parameter, their in zip(ours, theirs):
        assert torch.equal(parameter.nan_to_num(7.0), their.nan_to_num(7.0))
        half = halves.beside(parameter)
        if half is None:
            continue
        written, cast = half.detach().float().nan_to_num(7.0), parameter.detach().bfloat16().float().nan_to_num(7.0)
        if INTERPRETED:  # the interpreter cuts off instead of rounding
            torch.testing.assert_close(written, cast, rtol=2.0**-7, atol=0.0)
        else:
            assert torch.equal(written, cast)


@needs_kernels
def test_without_any_gradient() -> None:
    ours, optimizer, update, _, _ = _pair()
    norm, skipped = update(1.0, True)
    assert norm is not None
    assert skipped is not None
    assert (float(norm), float(skipped)) == (0.0, 0.0)
    assert not optimizer.state[ours[0]]


@needs_kernels
def test_schedulers_of_torch_see_the_steps() -> None:
    ours, optimizer, update, _, _ = _pair()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    _set_gradients(ours, 0)
    update(1.0, True)
    scheduler.step()  # warnings are errors here


@needs_kernels
def test_sparse_gradients_are_refused() -> None:
    parameter = _parameters([(4, 4)])[0]
    update = FusedUpdate(torch.optim.AdamW([parameter], fused=True), [parameter])
    parameter.grad = torch.eye(4, device=DEVICE).to_sparse()
    with pytest.raises(ModelError, match="sparse"):
        update(1.0, True)


class _Own(torch.optim.AdamW):
    pass


def _hooked(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters, fused=True)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda parameters: torch.optim.SGD(parameters), "SGD"),
        (lambda parameters: torch.optim.Adam(parameters, fused=True), "Adam, not"),
        (lambda parameters: _Own(parameters, fused=True), "_Own"),
        (lambda parameters: torch.optim.AdamW(parameters), "fused=True"),
        (lambda parameters: torch.optim.AdamW(parameters, fused=True, amsgrad=True), "amsgrad"),
        (lambda parameters: torch.optim.AdamW(parameters, fused=True, maximize=True), "maximize"),
        (lambda parameters: torch.optim.AdamW(parameters, fused=True, eps=0.0), "eps"),
        (lambda parameters: torch.optim.AdamW(parameters[:1], fused=True), "same parameters"),
        (_hooked, "hooks"),
    ],
)
def test_what_is_not_supported(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adamw_kernel, "_DEVICE_TYPES", (DEVICE.type,))
    parameters = _parameters([(2,), (3, 4)])
    optimizer = make(parameters)
    assert reason in str(FusedUpdate.supports(optimizer, parameters, DEVICE))
    with pytest.raises(ModelError, match="cannot be used"):
        FusedUpdate(optimizer, parameters)


@pytest.mark.parametrize(
    ("parameter", "reason"),
    [
        (torch.zeros(4, dtype=torch.bfloat16), "bfloat16"),
        (torch.zeros(4, 4)[:, :2], "one piece"),
        (torch.zeros(1).expand(3), "one piece"),
    ],
)
def test_parameters_that_are_not_supported(parameter: Tensor, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw_kernel, "_DEVICE_TYPES", ("cpu",))
    parameters = [nn.Parameter(parameter)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    assert reason in str(FusedUpdate.supports(optimizer, parameters, torch.device("cpu")))


def test_the_cpu_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw_kernel, "_DEVICE_TYPES", ("cuda",))
    parameters = [nn.Parameter(torch.zeros(3))]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    assert "cpu" in str(FusedUpdate.supports(optimizer, parameters, torch.device("cpu")))


@pytest.mark.slow
def test_triton_is_imported_late_and_its_absence_is_the_reason() -> None:
    code = """
import sys
import torch
from frameworm.engine.optim import adamw_kernel
assert "frameworm.engine.optim.adamw_triton" not in sys.modules
sys.modules["triton"] = None
adamw_kernel._DEVICE_TYPES = ("cpu",)
parameters = [torch.nn.Parameter(torch.zeros(3))]
optimizer = torch.optim.AdamW(parameters, fused=True)
print(adamw_kernel.FusedUpdate.supports(optimizer, parameters, torch.device("cpu")))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=150, capture_output=True, text=True)
    assert "triton is not installed" in done.stdout


@needs_kernels
def test_supported() -> None:
    parameters = _parameters()
    frozen = nn.Parameter(torch.zeros(2, device=DEVICE, dtype=torch.float64), requires_grad=False)
    optimizer = _optimizer([*parameters, frozen])
    assert FusedUpdate.supports(optimizer, parameters, torch.device(DEVICE.type)) is None


class _Graph:
    """A small model's backward and update, captured as the engine would."""

    def __init__(self, optimizer: torch.optim.AdamW, update: FusedUpdate, parameters: list[nn.Parameter]) -> None:
        self.optimizer = optimizer
        self.inputs = [torch.zeros_like(item) for item in parameters]
        self._parameters = parameters
        self._update = update
        self.graph = torch.cuda.CUDAGraph()

    def _step(self) -> None:
        loss = torch.stack([(item * given).sum() for item, given in zip(self._parameters, self.inputs)]).sum()
        loss.backward()
        self.norm, self.skipped = self._update(1.0, True)
        for item in self._parameters:
            item.grad = None

    def capture(self, steps: Iterator[int]) -> None:
        """Three steps on a side stream, then the capture, which makes none."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for step in steps:
                self.give(step)
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self.graph, stream=stream):
            self._step()

    def give(self, step: int, bad: float | None = None) -> list[Tensor]:
        """The gradients of the next step."""
        generator = torch.Generator().manual_seed(step)
        for place in self.inputs:
            place.copy_(torch.randn(place.shape, generator=generator))
        if bad is not None:
            self.inputs[2][70] = bad
        return self.inputs


@on_gpu
def test_fifty_steps_equal_the_fused_kernel_of_torch() -> None:
    ours, optimizer, update, theirs, expected = _pair()
    for step in range(50):
        for parameters in (ours, theirs):
            _set_gradients(parameters, step, 0.1 if step % 3 else 10.0)
        norm, _ = update(1.0, True)
        expected_norm = _torch_step(expected, 1.0)
        assert norm is not None
        assert expected_norm is not None
        _close(norm, expected_norm, atol=0)
    _same(optimizer, expected, atol=5e-7)


@on_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_host_never_waits() -> None:
    ours, optimizer, update, _, _ = _pair()
    assert FusedUpdate.supports(optimizer, ours, DEVICE) is None  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3):
            for item in ours:
                item.grad = torch.ones_like(item)
            optimizer.param_groups[0].update(lr=0.01 * step, betas=(0.5 + step / 10, 0.99))
            update(1.0, True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_gpu
@pytest.mark.parametrize("as_tensor", [True, False])
def test_in_a_graph_with_a_changing_learning_rate_and_bad_gradients(as_tensor: bool) -> None:
    ours, theirs = _parameters(), _parameters()
    rate: float | Tensor = torch.tensor(0.01, device=DEVICE) if as_tensor else 0.01
    optimizer, expected = _optimizer(ours, lr=rate), _optimizer(theirs)
    update = FusedUpdate(optimizer, ours)
    captured = _Graph(optimizer, update, ours)
    captured.capture(iter(range(3)))
    for step in range(30):
        bad = float("inf") if step in (5, 6, 20) else None
        lr = 0.01 * (1 + step % 7) if step >= 3 else 0.01
        for group in expected.param_groups:
            group["lr"] = lr
        for item, gradient in zip(theirs, captured.give(step, bad)):
            item.grad = gradient.clone()
        norm = _torch_step(expected, 1.0, skip_bad=True)
        if step < 3:
            continue  # made before the capture
        if isinstance(rate, Tensor):
            rate.fill_(lr)
        else:
            for group in optimizer.param_groups:
                group["lr"] = lr
            update.refresh_rates()
        captured.graph.replay()
        assert float(captured.skipped) == (bad is not None)
        _close(captured.norm, norm, atol=0)
    for mine, other in zip(ours, theirs):
        _close(mine.detach(), other.detach(), atol=5e-7)
        assert float(optimizer.state[mine]["step"]) == 27
    # An ordinary step between replays leaves the graph as it was.
    _set_gradients(ours, 99)
    update(1.0, True)
    for item in ours:
        item.grad = None
    captured.graph.replay()
    assert float(optimizer.state[ours[0]]["step"]) == 29


@on_gpu
def test_a_capture_without_a_step_before_is_refused() -> None:
    ours, _, update, _, _ = _pair()
    _set_gradients(ours, 0)

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=DEVICE)  # torch warns about empty graphs
            update(1.0, True)

    with pytest.raises(StateError, match="outside"):
        capture()
    torch.cuda.synchronize()
    update(1.0, True)
