"""Hugging Face models without padding: the same losses and gradients, refusals in words, and nothing left behind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from frameworm import Trainer
from frameworm.config.load import load_config_from_mapping
from frameworm.data.batches.real_tokens import MASK, PLAN, PaddingPlanner
from frameworm.data.prefetch import move_batch
from frameworm.engine.gate import Gate
from frameworm.engine.job import Ingredients, build_job
from frameworm.engine.lockstep import FollowingGate, LeadingGate, Plan
from frameworm.engine.model.padding_free import NAME, ModelAttention, switchable, take_plan, widest_input
from frameworm.engine.optim.schedule import NoSchedule
from frameworm.engine.session import run_job
from frameworm.errors import ConfigError
from frameworm.guard.agreement import ROUNDING_UNITS, judge_agreement
from frameworm.hardware.resolve import resolve_here
from frameworm.models.attention import varlen_attention
from frameworm.models.workloads import Workload
from frameworm.numerics.dropout import DropoutOff
from frameworm.numerics.sample_hash import batch_hash
from frameworm.tune.facts import workload_facts

transformers = pytest.importorskip("transformers", reason="transformers is not part of the base install")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

VOCABULARY, LONGEST, SAMPLES = 60, 32, 6
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": LONGEST,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GROUPED = {**SIZES, "num_key_value_heads": 2}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": LONGEST}
DISTIL = {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4}


def made(model: str, config: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return getattr(transformers, model)(getattr(transformers, config)(**ids, **settings)).train()


def bert(**changes: Any) -> Any:
    return made("BertForSequenceClassification", "BertConfig", **{**SIZES, **NO_DROPOUT, "num_labels": 2, **changes})


def llama() -> Any:
    return made("LlamaForCausalLM", "LlamaConfig", **GROUPED, use_cache=False)


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "bert": (bert, "class"),
    "bert, a class per token": (
        lambda: made("BertForTokenClassification", "BertConfig", **SIZES, **NO_DROPOUT),
        "tokens",
    ),
    "distilbert": (
        lambda: made(
            "DistilBertForSequenceClassification",
            "DistilBertConfig",
            **DISTIL,
            max_position_embeddings=LONGEST,
            dropout=0.0,
            attention_dropout=0.0,
            seq_classif_dropout=0.0,
        ),
        "class",
    ),
    "modernbert, local attention": (
        lambda: made("ModernBertForSequenceClassification", "ModernBertConfig", **SIZES, local_attention=8),
        "class",
    ),
    "llama, grouped heads": (llama, "next"),
    "mistral, a window": (
        lambda: made("MistralForCausalLM", "MistralConfig", **GROUPED, sliding_window=6),
        "next",
    ),
    "gpt2": (
        lambda: made("GPT2LMHeadModel", "GPT2Config", **GPT2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
        "next",
    ),
}


def batch_of(kind: str, seed: int = 0, left: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 22, (SAMPLES,), generator=generator)
    width = int(lengths.max())
    places = torch.arange(width)
    real = places >= width - lengths[:, None] if left else places < lengths[:, None]
    ids = torch.randint(5, VOCABULARY, (SAMPLES, width), generator=generator) * real
    ignored = torch.full_like(ids, -100)
    labels = {
        "class": ids[:, 0] % 2,
        "tokens": torch.where(real, ids % 2, ignored),
        "next": torch.where(real, ids, ignored),
        "padding counts": ids,
    }[kind]
    return {"input_ids": ids, MASK: real.long(), "labels": labels}


def gradients(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss: Tensor = model(**take_plan(batch)).loss
    loss.backward()
    found = {name: item.grad.clone() for name, item in model.named_parameters() if item.grad is not None}
    return loss.detach(), found


def planner() -> PaddingPlanner:
    return PaddingPlanner(widen=True, widest=LONGEST)


@contextmanager
def without_padding(model: nn.Module, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    plan = planner()
    planned = plan(batch)
    with ModelAttention(model, plan, captured=False) as attention:
        attention.check(planned, lambda given: model(**take_plan(given)).loss)
        yield planned


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_the_padded_model(name: str) -> None:
    build, kind = MODELS[name]
    model, batch = build().double(), batch_of(kind)  # some compute their loss in fp32 all the same
    expected, before = gradients(model, batch)
    with without_padding(model, batch) as planned:
        assert planned[MASK].shape[1] > batch[MASK].shape[1], "widened"
        found, after = gradients(model, planned)
    assert torch.allclose(found, expected, rtol=1e-6)
    size = max(float(item.norm()) for item in before.values())
    assert before.keys() == after.keys()
    for parameter, item in before.items():
        assert float((after[parameter] - item).norm()) < 1e-6 * size, parameter


def test_blocks_see_only_real_tokens() -> None:
    model, batch = bert(), batch_of("class")
    seen: list[tuple[int, ...]] = []
    handles = [
        layer.intermediate.register_forward_pre_hook(lambda module, given: seen.append(tuple(given[0].shape)))
        for layer in model.bert.encoder.layer
    ]
    with without_padding(model, batch) as planned:
        seen.clear()
        model(**take_plan(planned))
    for handle in handles:
        handle.remove()
    assert seen == [(1, len(planned[PLAN]["places"]), 32)] * 3
    assert len(planned[PLAN]["places"]) < batch[MASK].numel()


def test_left_padding_is_padding() -> None:
    model = made("BertForTokenClassification", "BertConfig", **SIZES, **NO_DROPOUT).double()
    batch = batch_of("tokens", left=True)
    expected, _ = gradients(model, batch)
    with without_padding(model, batch) as planned:
        found, _ = gradients(model, planned)
    assert torch.allclose(found, expected, rtol=1e-10)


class Own(nn.Module):
    """A classifier of somebody's own on top of a Hugging Face model, pooled over real tokens."""

    def __init__(self, masked: bool = True) -> None:
        super().__init__()
        self.encoder = made("BertModel", "BertConfig", **SIZES, **NO_DROPOUT)
        self.head = nn.Linear(32, 2)
        self.masked = masked

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        hidden = self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask.unsqueeze(2).to(hidden.dtype) if self.masked else torch.ones_like(hidden[..., :1])
        scores = self.head((hidden * weight).sum(1) / weight.sum(1))
        return transformers.utils.ModelOutput(loss=nn.functional.cross_entropy(scores, labels))


def test_a_model_inside_of_somebodys_own() -> None:
    model, batch = Own().double(), batch_of("class")
    expected, _ = gradients(model, batch)
    with without_padding(model, batch) as planned:
        found, _ = gradients(model, planned)
    assert torch.allclose(found, expected, rtol=1e-10)
    assert [type(part).__name__ for part in switchable(model)] == ["BertModel"]
    assert widest_input(model) == LONGEST


class HasNone(nn.Module):
    """Repeats a block and takes a mask, but is not of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(3))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        hidden = self.table(input_ids)
        for block in self.blocks:
            hidden = block(hidden, src_key_padding_mask=attention_mask == 0)
        return transformers.utils.ModelOutput(loss=nn.functional.cross_entropy(hidden[:, 0], labels))


REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "targets of padding": (llama, "padding counts", "its loss depends on what its blocks return for padding"),
    "pooled over padding": (
        lambda: Own(masked=False),
        "class",
        "its loss depends on what its blocks return for padding",
    ),
    "position bias": (
        lambda: made("T5ForConditionalGeneration", "T5Config", **T5, decoder_start_token_id=0),
        "next",
        "its attention has a position_bias",
    ),
    "softcap": (
        lambda: made("Gemma2ForCausalLM", "Gemma2Config", **GROUPED, head_dim=8),
        "next",
        "its attention has a softcap",
    ),
    "attention of its own": (
        lambda: made("DebertaV2ForSequenceClassification", "DebertaV2Config", **SIZES),
        "class",
        "its attention cannot be chosen",
    ),
    "not of transformers": (HasNone, "class", "its attention cannot be chosen"),
    "one layer for all": (
        lambda: made("AlbertForSequenceClassification", "AlbertConfig", **SIZES, embedding_size=16),
        "class",
        "it repeats no block",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_go_without_padding_is_refused_in_words(name: str) -> None:
    build, kind, reason = REFUSED[name]
    model = build()
    chosen = [part.config._attn_implementation for part in switchable(model)]
    classes = [type(part) for part in model.modules()]
    with pytest.raises(ConfigError, match=reason), without_padding(model, batch_of(kind)):
        pass
    assert [part.config._attn_implementation for part in switchable(model)] == chosen
    assert [type(part) for part in model.modules()] == classes


def test_the_first_look_leaves_no_trace() -> None:
    model, batch = bert(hidden_dropout_prob=0.2), batch_of("class")
    random, state = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    with without_padding(model, batch):
        assert model.config._attn_implementation == NAME
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(item, state[name]) for name, item in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert all(item.grad is None for item in model.parameters())
    assert model.config._attn_implementation == "sdpa"


class NoReading(TorchDispatchMode):
    """Fails where the host asks for a value: on a GPU it would wait there, and a captured step may not."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is not torch.ops.aten._local_scalar_dense.default, "the host reads a value"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MODELS)
def test_a_step_without_padding_reads_no_value(name: str) -> None:
    build, kind = MODELS[name]
    model, batch = build(), batch_of(kind)
    with without_padding(model, batch) as planned, NoReading():
        gradients(model, planned)


def masks_of_compiled(model: nn.Module, batch: dict[str, Any]) -> list[bool]:
    """Whether attention is given a mask, which the flash kernels do not take, at each place of the compiled model."""
    found: list[bool] = []

    def look(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        calls = [node for node in graph.graph.nodes if node.target is nn.functional.scaled_dot_product_attention]
        found.extend(node.kwargs.get("attn_mask") is not None for node in calls)
        return graph.forward

    torch.compiler.reset()
    torch.compile(model, backend=look)(**take_plan(batch))
    return found


@pytest.mark.slow
def test_a_captured_model_without_masks_is_given_none_when_it_is_compiled() -> None:
    batch = {name: item for name, item in batch_of("next").items() if name != MASK}
    model = llama()
    with ModelAttention(model, None, captured=True):
        assert masks_of_compiled(model, batch) == [False] * 3
    assert len(masks_of_compiled(model, batch)) == 3


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("name", ["bert", "llama, grouped heads", "mistral, a window"])
def test_captured_models_make_their_masks_without_reading(name: str, masked: bool) -> None:
    build, kind = MODELS[name]
    model, batch = build().double(), batch_of(kind)
    if not masked:
        batch = {key: item for key, item in batch.items() if key != MASK}
    expected, before = gradients(model, batch)
    if name.startswith("llama") or (masked and name == "bert"):
        with pytest.raises(AssertionError, match="reads a value"), NoReading():
            gradients(model, batch)
    attention = ModelAttention(model, None, captured=True)
    with attention, NoReading():
        found, after = gradients(model, batch)
    assert torch.allclose(found, expected, rtol=1e-12)
    assert all(torch.allclose(after[key], item, rtol=1e-7, atol=1e-12) for key, item in before.items())
    assert attention.note is not None
    assert model.config._attn_implementation == "sdpa"


def test_nothing_is_switched_where_nothing_asks_for_it() -> None:
    model = bert()
    attention = ModelAttention(model, None, captured=False)
    with attention:
        assert model.config._attn_implementation == "sdpa"
    assert attention.note is None


@pytest.mark.slow
@pytest.mark.long
def test_attention_weights_are_dropped_as_often_as_in_the_padded_model() -> None:
    model, batch = bert(attention_probs_dropout_prob=0.3), batch_of("class")

    def figures(given: dict[str, Any]) -> Tensor:
        losses = torch.stack([model(**take_plan(given)).loss.detach() for _ in range(600)]).double()
        return torch.stack([losses.mean(), losses.std()])

    expected = figures(batch)
    with without_padding(model, batch) as planned:
        found = figures(planned)
        off = DropoutOff(model)
        off.start()
        quiet = figures(planned)
        off.stop()
    error = float(expected[1]) / 600**0.5
    assert quiet[1] < 1e-6, "a comparison switches it off"
    assert abs(float(found[0] - expected[0])) < 6 * error
    assert 0.8 < float(found[1] / expected[1]) < 1.25


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_unequal_samples_beside_one_by_one(causal: bool, window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 0, 9, 1]
    query = torch.randn(15, 4, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 15, 2, 8, generator=generator, dtype=torch.float64)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    found = varlen_attention(query, key, value, offsets, 9, causal=causal, scale=0.3, window=window)
    for begin, end in offsets.unfold(0, 2, 1).tolist():
        scores = torch.einsum("qhd,khd->hqk", query[begin:end], key[begin:end].repeat_interleave(2, 1)) * 0.3
        apart = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        hidden = (apart < 0) & causal | (apart.abs() >= (window or 99))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, value[begin:end].repeat_interleave(2, 1))
        assert torch.allclose(found[begin:end], expected)


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.lengths = torch.randint(4, LONGEST + 1, (count,), generator=generator).tolist()
        self.ids = torch.randint(5, VOCABULARY, (count, LONGEST), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index, : self.lengths[index]], "labels": self.ids[index, 0] % 2}


def pad(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {"input_ids": ids, MASK: (ids != 0).long(), "labels": torch.stack([row["labels"] for row in rows])}


def trained(**settings: Any) -> tuple[Any, Any]:
    model = bert()
    trainer = Trainer(model, torch.optim.AdamW(model.parameters(), 1e-3), run_dir=None, seed=0, **settings)
    loader = DataLoader(Texts(96), 16, collate_fn=pad)
    return trainer.train(loader, DataLoader(Texts(32), 16, collate_fn=pad), epochs=2), model


@pytest.fixture(scope="module")
def padded() -> tuple[Any, Any]:
    return trained()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"activation_checkpointing": "full"}, {"accumulation": 2}])
def test_a_run_trains_the_same_model(settings: dict[str, Any], padded: tuple[Any, Any]) -> None:
    expected, before = trained(**settings) if "accumulation" in settings else padded
    record, after = trained(padding_free=True, **settings)
    assert record.quality.train_loss == pytest.approx(expected.quality.train_loss, rel=1e-5)
    assert record.quality.val_loss == pytest.approx(expected.quality.val_loss, rel=1e-5)
    for one, other in zip(before.parameters(), after.parameters()):
        assert torch.allclose(one, other, atol=1e-5)
    assert any("were padding and were left out" in note for note in record.notes)
    assert after.config._attn_implementation == "sdpa"
    if settings != {"activation_checkpointing": "full"}:  # which stays
        assert type(after.bert.encoder.layer[0]) is type(before.bert.encoder.layer[0])


def in_lock_step(gate: Gate, faulty: bool = False, **gpu: Any) -> None:
    """A run of a model with dropout."""
    config = load_config_from_mapping(
        {
            "workload": "a.b:c",
            "training": {"global_batch": 16, "epochs": 2, "max_steps": 12},
            "gpu": {"device": "cpu", "mixed_precision": "off", **gpu},
            "observe": {"progress": False, "sinks": []},
            "checkpoint": {"every_steps": None},
        },
        environ={},
    )
    model = bert(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    if faulty:
        model.bert.encoder.layer[1].register_forward_hook(lambda module, given, out: out * 1.001)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loader = DataLoader(Texts(192), 16, collate_fn=pad)
    given = Ingredients(model, optimizer, None, lambda total: NoSchedule(), loader, gate=gate, seed=5)
    run_job(build_job(resolve_here(config, 1), given))


@pytest.mark.slow
def test_wider_padding_trains_the_same_model() -> None:
    losses, widths = [], []
    for pad_to in ("longest", "few"):
        model = bert()
        model.register_forward_pre_hook(
            lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        config = load_config_from_mapping({"workload": "a.b:c", "data": {"pad_to": pad_to}, "gpu": {"device": "cpu"}})
        loader = DataLoader(Texts(96), 16, collate_fn=pad, drop_last=True)
        given = Ingredients(model, optimizer, None, lambda total: NoSchedule(), loader, seed=5)
        record = run_job(build_job(resolve_here(config, 1), given))
        losses.append(record.quality.train_loss)
        assert any("data.pad_to" in note for note in record.notes) is (pad_to == "few")
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    half = len(widths) // 2
    assert len(set(widths[half:])) < len(set(widths[:half]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.long
def test_compiled_blocks_pack_outside_of_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, mode=None: compile_(function, backend="aot_eager"))

    def run(**settings: Any) -> Any:
        torch._dynamo.reset()
        model = bert()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        trainer = Trainer(model, optimizer, run_dir=None, seed=0, device="cpu", padding_free=True, **settings)
        record = trainer.train(DataLoader(Texts(96), 16, collate_fn=pad, drop_last=True), epochs=1)
        return record, model

    expected, _ = run()
    record, model = run(compile_model=True, compile_scope="blocks")
    assert record.quality.train_loss == pytest.approx(expected.quality.train_loss, rel=1e-5)
    assert record.compilation is not None
    assert not [reason for reason in record.compilation.reasons if "_frameworm" in reason]
    assert record.compilation.recompilations <= 2, record.compilation.reasons  # other sizes, once
    assert all("_frameworm_inner" not in vars(module) for module in model.modules())
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("faulty", [False, True])
@pytest.mark.long
def test_a_proof_accepts_it_and_still_sees_faults(faulty: bool, tmp_path: Path) -> None:
    plan = Plan(str(tmp_path), (4, 5, 6, 8, 10), early=(1, 2), updates=(2, 4), unit=ROUNDING_UNITS["fp32"])
    leading, following = LeadingGate(plan), FollowingGate(plan)
    in_lock_step(leading)
    in_lock_step(following, faulty, padding_free=True)
    assert leading.random is True
    agreement = following.agreement()
    if not faulty:
        drawing = replace(plan, folder=str(tmp_path / "draws"), steps=(4,), early=(), updates=(), draws=16)
        Path(drawing.folder).mkdir()
        in_lock_step(LeadingGate(drawing))
        drawn = FollowingGate(drawing)
        in_lock_step(drawn, padding_free=True)
        agreement = replace(agreement, draws=drawn.agreement().draws)
    verdict = judge_agreement(agreement)
    assert verdict.passed is not faulty, verdict.detail


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", ["class", "next"])
def test_flash_kernels_agree_with_padded_attention_on_a_gpu(kind: str) -> None:
    model = (bert(hidden_size=64) if kind == "class" else llama()).cuda()
    batch = batch_of(kind)
    on_gpu = {name: item.cuda() for name, item in batch.items()}
    expected, before = gradients(model, on_gpu)
    plan = planner()
    planned = move_batch(plan(batch), "cuda")
    with ModelAttention(model, plan, captured=True) as attention:
        attention.check(planned, lambda given: model(**take_plan(given)).loss)
        with torch.autocast("cuda", torch.bfloat16):
            found, after = gradients(model, planned)
    assert torch.allclose(found.float(), expected.float(), rtol=0.02)
    size = max(float(item.norm()) for item in before.values())
    for parameter, item in before.items():
        assert float((after[parameter] - item).norm()) < 0.05 * size, parameter


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("compiled", [False, True])
def test_steps_without_padding_are_captured(dropout: float, compiled: bool) -> None:
    def run(**settings: Any) -> Any:
        model = bert(hidden_size=64, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        trainer = Trainer(model, optimizer, run_dir=None, seed=0, mixed_precision="bf16", device="cuda", **settings)
        return trainer.train(DataLoader(Texts(1600), 16, collate_fn=pad, drop_last=True), epochs=2)

    expected = run()
    record = run(padding_free=True, capture="step", compile_model=compiled)
    assert record.captured_steps, record.notes
    assert record.captured_steps > 100, record.notes
    tolerance = 0.02 if dropout == 0 else 0.1
    assert record.quality.train_loss == pytest.approx(expected.quality.train_loss, rel=tolerance)


@pytest.mark.gpu
@needs_gpu
def test_graphs_draw_new_dropout_in_every_replay() -> None:
    """Two replays of one captured attention drop different weights; the same seed drops the same."""
    query, key, value = (torch.randn(256, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    query.requires_grad_()
    offsets = torch.tensor([0, 100, 256], device="cuda", dtype=torch.int32)

    def compute() -> tuple[Tensor, Tensor]:
        mixed = varlen_attention(query, key, value, offsets, 256, causal=False, dropout=0.5)
        return mixed, torch.autograd.grad(mixed.float().square().sum(), query)[0]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = compute()
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append([item.clone() for item in outputs])
    assert not torch.equal(seen[0][0], seen[1][0])
    assert not torch.equal(seen[0][1], seen[1][1])


def vit() -> Any:
    sizes = {name: SIZES[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    config = transformers.ViTConfig(**sizes, intermediate_size=64, image_size=16, patch_size=8, num_labels=2)
    return transformers.ViTForImageClassification(config).train()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["masks", "words", "images"])
def test_models_that_only_make_masks_are_captured(kind: str, compiled: bool) -> None:
    model = {"masks": bert, "words": llama, "images": vit}[kind]()
    batches = [batch_of("class" if kind == "masks" else "next") for _ in range(40)]
    if kind == "words":
        batches = [{"input_ids": item["input_ids"], "labels": item["labels"]} for item in batches]
    if kind == "images":
        batches = [{"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.arange(4) % 2} for _ in range(40)]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    settings = {"compile_model": True, "compile_scope": "blocks"} if compiled else {}
    trainer = Trainer(model, optimizer, run_dir=None, device="cuda", capture="step", **settings)
    record = trainer.train(batches, epochs=1)
    assert record.captured_steps, record.notes
    assert record.captured_steps > 20, record.notes
    assert model.config._attn_implementation == "sdpa"


def test_a_run_of_another_kind_of_batch_is_refused_before_it_trains() -> None:
    model = nn.Linear(4, 2)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), run_dir=None, padding_free=True)
    with pytest.raises(ConfigError, match=r"gpu\.padding_free: batches must be dicts"):
        trainer.train([(torch.randn(3, 4), torch.tensor([0, 1, 0]))])


@pytest.mark.parametrize(
    "other", [{"data": {"batching": "packed"}}, {"parallel": {"strategy": "dp"}, "gpu": {"device_ids": [0]}}]
)
def test_settings_that_contradict_it_are_named(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"padding_free"):
        load_config_from_mapping({**other, "gpu": {**other.get("gpu", {}), "padding_free": True}})


def test_a_batch_holds_the_same_samples_with_and_without_a_plan() -> None:
    batch = batch_of("class")
    assert batch_hash(planner()(batch)) == batch_hash(batch)


def test_the_tuner_knows_how_much_padding_there_is() -> None:
    config = load_config_from_mapping(
        {"workload": "a.b:c", "training": {"micro_batch": 16, "global_batch": 16}}, environ={}
    )
    texts = Texts(96)
    share = workload_facts(config, Workload(bert(), texts, collate_fn=pad)).padding_share
    widest = max(texts.lengths[:16])
    assert share == pytest.approx(1 - sum(texts.lengths[:16]) / (16 * widest))
    assert workload_facts(config, Workload(HasNone(), texts, collate_fn=pad)).padding_share is None
    assert workload_facts(config, Workload(bert(), texts)).padding_share is None, "unequal samples, nothing to pad them"
