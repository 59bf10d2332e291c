"""Any model's wide head and the cross-entropy after it, computed without holding the logits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameworm.engine.memory.dry_run import DryRun
from frameworm.engine.model.fused_head import Logits, find_heads, fused_heads, head_notes
from frameworm.engine.trainer import Trainer
from frameworm.errors import ConfigError, ModelError
from frameworm.models import linear_loss

WORDS = 4100
Loss = Callable[[Tensor, Tensor], Tensor]


class Decoder(nn.Module):
    """A small model of words; `tied` shares the embedding's weight with the head."""

    def __init__(self, bias: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        result: Tensor = self.head(torch.tanh(self.layer(self.embedding(tokens))))
        return result


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(WORDS, (2, 7), generator=generator) for _ in range(2))
    targets[0, :3] = -100
    return tokens, targets


def seen(logits: Tensor, targets: Tensor) -> Tensor:
    """A loss that looks at the logits without gradients, as a metric does."""
    with torch.no_grad():
        assert logits.argmax(-1).shape == targets.shape
    return F.cross_entropy(logits.view(-1, WORDS), targets.view(-1))


def hooked(logits: Tensor, targets: Tensor) -> Tensor:
    logits.register_hook(lambda gradient: 2 * gradient)
    return F.cross_entropy(logits.view(-1, WORDS), targets.view(-1))


def marked(logits: Tensor, targets: Tensor) -> Tensor:
    logits[0, 0] = 1.0
    return F.cross_entropy(logits.view(-1, WORDS), targets.view(-1))


FUSED: dict[str, Loss] = {
    "view": lambda logits, targets: F.cross_entropy(logits.view(-1, WORDS), targets.view(-1)),
    "shift": lambda logits, targets: F.cross_entropy(
        logits[..., :-1, :].contiguous().float().view(-1, logits.size(-1)), targets[..., 1:].reshape(-1)
    ),
    "sum": lambda logits, targets: (
        F.cross_entropy(logits.reshape(14, -1), targets.view(-1), reduction="sum") / (targets != -100).sum()
    ),
    "transposed": lambda logits, targets: F.cross_entropy(logits.transpose(1, 2), targets),
    "permuted": lambda logits, targets: nn.CrossEntropyLoss()(logits.permute(0, 2, 1), targets),
    "flattened": lambda logits, targets: nn.CrossEntropyLoss()(torch.flatten(logits, 0, 1), targets.flatten()),
    "masked": lambda logits, targets: F.cross_entropy(logits[targets != -100], targets[targets != -100]),
    "another ignored": lambda logits, targets: F.cross_entropy(
        input=logits.view(-1, WORDS), target=targets.view(-1).clamp(min=0), ignore_index=0
    ),
    "metric": seen,
}
FULL: dict[str, tuple[Loss, str]] = {
    "smoothing": (
        lambda logits, targets: F.cross_entropy(logits.view(-1, WORDS), targets.view(-1), label_smoothing=0.1),
        "label smoothing",
    ),
    "each": (
        lambda logits, targets: F.cross_entropy(logits.view(-1, WORDS), targets.view(-1), reduction="none").sum(),
        "without mean or sum",
    ),
    "capped": (lambda logits, targets: FUSED["view"](torch.tanh(logits / 30) * 30, targets), "div"),
    "in place": (lambda logits, targets: FUSED["view"](logits.mul_(2), targets), "mul_"),
    "set": (marked, "__setitem__"),
    "by hand": (
        lambda logits, targets: F.nll_loss(logits.log_softmax(-1).view(-1, WORDS), targets.view(-1)),
        "log_softmax",
    ),
    "hooked": (hooked, "register_hook"),
    "part of the words": (
        lambda logits, targets: F.cross_entropy(logits[..., :50].flatten(0, 1), targets.flatten().clamp(max=49)),
        "__getitem__",
    ),
}


def loss_and_gradients(model: nn.Module, loss_of: Loss) -> list[Tensor]:
    tokens, targets = data()
    model.zero_grad()
    loss = loss_of(model(tokens), targets)
    loss.backward()
    return [loss.detach(), *(item.grad.clone() for item in model.parameters() if item.grad is not None)]


def assert_close(ours: list[Tensor], plain: list[Tensor], tolerance: float) -> None:
    assert len(ours) == len(plain)
    for one, other in zip(ours, plain):
        assert one.dtype == other.dtype
        assert torch.allclose(one, other, atol=tolerance * max(1.0, other.abs().max().item()), rtol=0)


@pytest.mark.parametrize("name", FUSED)
def test_a_loss_without_logits_is_the_plain_one(name: str) -> None:
    torch.manual_seed(0)
    model = Decoder(bias=name != "shift", tied=name in ("view", "shift"))
    plain = loss_and_gradients(model, FUSED[name])
    with fused_heads(model, True) as uses:
        ours = loss_and_gradients(model, FUSED[name])
    assert uses[0].fused
    assert_close(ours, plain, 1e-6)
    notes = head_notes(uses)
    assert ("argmax" in notes[0]) if name == "metric" else not notes


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("name", ["view", "shift", "transposed"])
def test_in_bf16_it_is_as_exact_as_the_plain_loss(name: str) -> None:
    torch.manual_seed(0)
    model = Decoder()
    exact = loss_and_gradients(copy.deepcopy(model).double(), FUSED[name])
    with torch.autocast("cpu", torch.bfloat16):
        plain = loss_and_gradients(model, FUSED[name])
        with fused_heads(model, True) as uses:
            ours = loss_and_gradients(model, FUSED[name])
    assert uses[0].fused
    for one, other, wanted in zip(ours, plain, exact, strict=True):
        assert one.dtype == other.dtype
        assert (one - wanted).norm() <= 1.5 * (other - wanted).norm() + 1e-6 * wanted.norm()


@pytest.mark.parametrize("name", FULL)
def test_any_other_use_gets_the_real_logits(name: str) -> None:
    torch.manual_seed(0)
    model = Decoder()
    loss_of, reason = FULL[name]
    plain = loss_and_gradients(model, loss_of)
    with fused_heads(model, True) as uses:
        ours = loss_and_gradients(model, loss_of)
        tokens, _ = data()
        assert type(model(tokens)) is Tensor, "real logits were needed, and are put off again"
    assert not uses[0].fused
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))
    assert "changed nothing" in head_notes(uses)[0]
    assert reason in head_notes(uses)[0]


def test_evaluation_and_fp64_copies_see_real_logits_and_the_model_stays() -> None:
    model, (tokens, _) = Decoder(), data()
    with fused_heads(model, True):
        assert type(model(tokens)) is Logits
        assert type(copy.deepcopy(model).double()(tokens)) is Tensor
        with torch.no_grad():
            assert type(model(tokens)) is Tensor
        assert type(model.eval()(tokens)) is Tensor
        copied = copy.deepcopy(model.train())
        with torch.no_grad():
            model.head.weight.zero_()
        assert copied(tokens).detach().abs().sum() > 0, "the copy computes with the original's weight"
    assert "forward" not in vars(model.head)


def test_a_frozen_head_gets_no_gradient() -> None:
    model = Decoder()
    model.head.requires_grad_(False)
    plain = loss_and_gradients(model, FUSED["view"])
    with fused_heads(model, True) as uses:
        ours = loss_and_gradients(model, FUSED["view"])
    assert uses[0].fused
    assert_close(ours, plain, 1e-6)


def test_code_that_torch_keeps_from_us_still_gets_values_and_gradients() -> None:
    """As DDP does with a model's output: an autograd function, whose inputs nobody can catch."""

    class Sink(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor) -> Tensor:
            return logits.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0]

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return FUSED["view"](Sink.apply(logits), targets)  # type: ignore[no-untyped-call]

    model = Decoder()
    plain = loss_and_gradients(model, loss_of)
    with fused_heads(model, True):
        ours = loss_and_gradients(model, loss_of)
    assert_close(ours, plain, 1e-6)


def test_logits_changed_after_a_part_was_taken_are_refused() -> None:
    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        part = logits[:, :-1]
        logits.mul_(2)
        return FUSED["view"](part, targets[:, 1:])

    model = Decoder()
    with fused_heads(model, True), pytest.raises(ModelError, match="changed in place"):
        loss_and_gradients(model, loss_of)


def test_heads_are_wide_layers_that_no_block_repeats() -> None:
    blocks = nn.ModuleList(nn.Linear(4, 5000) for _ in range(2))
    model = nn.ModuleDict({"blocks": blocks, "decoder": Decoder(), "small": nn.Linear(4, 10)})
    assert list(find_heads(model)) == ["decoder.head"]
    with pytest.raises(ConfigError, match=r"has no nn\.Linear"), fused_heads(nn.Linear(2, 10), True):
        pass


def test_the_logits_are_never_held_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss, "LOGITS_BYTES", 2**20)
    model = Decoder()
    tokens = torch.zeros(8, 1024, dtype=torch.int64)
    whole_bytes = tokens.numel() * WORDS * 4
    with fused_heads(model, True), torch.profiler.profile(profile_memory=True) as profile:
        FUSED["view"](model(tokens), tokens).backward()
    largest = max(event.cpu_memory_usage for event in profile.events() or [])
    assert 0 < largest < whole_bytes / 2


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_learns_the_same_and_leaves_the_model_as_it_was(accumulation: int) -> None:
    def trained(**settings: Any) -> tuple[Any, nn.Module]:
        torch.manual_seed(0)
        model = Decoder(tied=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        trainer = Trainer(model, optimizer, run_dir=None, accumulation=accumulation, **settings)
        return trainer.train([data()] * 4, [data()], epochs=2), model

    usual, plain = trained()
    fused, model = trained(fused_loss=True)
    assert fused.losses == pytest.approx(usual.losses, rel=1e-5)
    assert fused.quality.val_loss == pytest.approx(usual.quality.val_loss, rel=1e-5)
    assert_close([item.detach() for item in model.parameters()], [item.detach() for item in plain.parameters()], 1e-5)
    assert not [note for note in fused.notes if "fused_loss" in note]
    assert "forward" not in vars(model.head)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch, at any graph break
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_ends_at_its_head(backend: str) -> None:
    model = Decoder()
    plain = loss_and_gradients(model, FUSED["shift"])
    torch._dynamo.reset()
    with fused_heads(model, True, compiled=True) as uses:
        model.compile(backend=backend)
        for _ in range(2):
            ours = loss_and_gradients(model, FUSED["shift"])
    assert uses[0].fused
    assert_close(ours, plain, 1e-6)


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
@pytest.mark.parametrize("more", [{}, {"num_items_in_batch": torch.tensor(9)}], ids=["mean", "of several batches"])
def test_models_of_a_library(kind: str, more: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "Llama": {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
        "GPT2": {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "resid_pdrop": 0, "embd_pdrop": 0},
    }[kind]
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(vocab_size=WORDS, attn_pdrop=0, **ends, **sizes)
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{kind}{head}")(config).train()
    tokens, targets = data()

    def gradients() -> list[Tensor]:
        model.zero_grad()
        output = model(input_ids=tokens, labels=targets, **more)
        output.loss.backward()
        assert output.logits.shape == (2, 7, WORDS)
        return [output.loss.detach(), *(item.grad.clone() for item in model.parameters())]

    plain = gradients()
    with fused_heads(model, True) as uses:
        ours = gradients()
    assert [(use.name, use.fused, use.needed_for) for use in uses] == [("lm_head", True, None)]
    assert_close(ours, plain, 1e-6)


def test_a_plan_of_the_memory_knows_that_logits_are_not_held() -> None:
    def whole(fused_loss: bool) -> int:
        run = DryRun(Decoder(), batch_of, loss, device="cuda", fused_loss=fused_loss)
        return sum(vars(run.step(64, 1).fresh).values())

    def batch_of(samples: int) -> tuple[Tensor, Tensor]:
        tokens = torch.empty(samples, 128, dtype=torch.int64, device="meta")
        return tokens, tokens

    loss = FUSED["view"]
    logits_bytes = 64 * 128 * WORDS * 4
    assert whole(False) > 2 * logits_bytes
    assert whole(True) < whole(False) / 1.9
