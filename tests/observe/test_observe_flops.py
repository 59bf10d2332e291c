"""FLOPs against formulas written by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from frameworm.models.gpt import GPT
from frameworm.observe.flops.counter import BACKWARD, FlopCount, FlopCounter

BATCH, LENGTH, WIDTH, LAYERS, VOCABULARY = 2, 64, 64, 2, 512
CAUSAL_PAIRS = LENGTH * (LENGTH + 1) / 2


def count(loss: Callable[[], Tensor]) -> FlopCount:
    with FlopCounter() as counter:
        value = loss()
        counter.phase = BACKWARD
        value.backward()
    assert counter.count.problem is None
    return counter.count


def transformer_flops(parameters: int, pairs: float = CAUSAL_PAIRS, layers: int = LAYERS) -> float:
    """Six FLOPs for every token and parameter, twelve for every pair and number of its vectors."""
    return BATCH * (6 * LENGTH * parameters + 12 * layers * WIDTH * pairs)


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH))


@pytest.mark.parametrize("fused_loss", [False, True])
def test_gpt(fused_loss: bool) -> None:
    model = GPT(VOCABULARY, WIDTH, 4, LAYERS, LENGTH, fused_loss=fused_loss)
    ids = tokens()
    found = count(lambda: model(ids, targets=ids))
    assert found.total == transformer_flops(LAYERS * 12 * WIDTH**2 + VOCABULARY * WIDTH)
    assert found.main_type == "fp32"


@pytest.mark.parametrize("dropout", [0.0, 0.1])  # with dropout, a CPU takes attention apart
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_hugging_face_gpt2(dropout: float, attention: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=4,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=attention,
    )
    model, ids = transformers.GPT2LMHeadModel(config), tokens()
    found = count(lambda: model(input_ids=ids, labels=ids).loss)
    expected = transformer_flops(LAYERS * 12 * WIDTH**2 + VOCABULARY * WIDTH)
    assert found.total == pytest.approx(expected, rel=0.02)
    assert found.attention + found.masked_attention > 0


def _llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=176,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def test_llama() -> None:
    model, ids = _llama(), tokens()
    found = count(lambda: model(input_ids=ids, labels=ids).loss)
    parameters = LAYERS * (3 * WIDTH**2 + 3 * WIDTH * 176) + VOCABULARY * WIDTH
    assert found.total == pytest.approx(transformer_flops(parameters), rel=0.02)


def test_attention_counts_real_tokens_where_a_mask_tells_them() -> None:
    model, ids = _llama(), tokens()
    mask = torch.ones_like(ids)
    mask[0, 16:] = 0
    found = count(lambda: model(input_ids=ids, labels=ids, attention_mask=mask).loss)
    assert found.attention == 0
    assert found.masked_attention == 12 * LAYERS * WIDTH * (CAUSAL_PAIRS + 16 * 17 / 2)


def test_vision_transformer() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=10,
    )
    model, images = transformers.ViTForImageClassification(config), torch.randn(BATCH, 3, 32, 32)
    found = count(lambda: model(pixel_values=images, labels=torch.zeros(BATCH, dtype=torch.long)).loss)
    patches, seen = 16, 17
    layers = 6 * seen * LAYERS * (4 * WIDTH**2 + 2 * WIDTH * 128) + 12 * LAYERS * WIDTH * seen**2
    patching = 4 * patches * 3 * 8 * 8 * WIDTH  # no gradient for the image
    assert found.total == pytest.approx(BATCH * (layers + patching + 6 * WIDTH * 10), rel=0.02)


def test_convolutions_with_groups_strides_and_transposed_ones() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, stride=2),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
        nn.Flatten(),
        nn.Linear(4 * 256, 10),
    )
    images = torch.randn(BATCH, 3, 16, 16)
    found = count(lambda: model(images).sum())
    first = 2 * 256 * 8 * 27
    others = 2 * (64 * 8 * 9 + 64 * 8 * 4 * 4 + 1024 * 10)
    assert found.total == BATCH * (2 * first + 3 * others)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_layers(bidirectional: bool) -> None:
    model = nn.LSTM(16, 32, num_layers=2, batch_first=True, bidirectional=bidirectional)
    inputs = torch.randn(BATCH, LENGTH, 16, requires_grad=True)
    found = count(lambda: model(inputs)[0].sum())
    matrices = sum(item.numel() for item in model.parameters() if item.dim() == 2)
    assert found.total == pytest.approx(6 * BATCH * LENGTH * matrices, rel=0.02)


def test_the_same_as_torch_where_torch_is_right() -> None:
    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 30, 16), nn.Linear(16, 4))
    inputs = torch.randn(BATCH, 4, 32)
    with FlopCounterMode(display=False) as torchs:
        model(inputs).sum().backward()
    assert count(lambda: model(inputs).sum()).total == torchs.get_total_flops()


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_do_not_count(reentrant: bool) -> None:
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    inputs = torch.randn(BATCH, WIDTH, requires_grad=True)

    def forward(recompute: bool) -> Tensor:
        hidden = inputs
        for layer in layers:
            hidden = checkpoint(layer, hidden, use_reentrant=reentrant) if recompute else layer(hidden)
        return hidden.sum()

    assert count(lambda: forward(True)).total == count(lambda: forward(False)).total > 0


def test_a_gradient_inside_forward_counts() -> None:
    """As a gradient penalty takes it."""
    layer = nn.Linear(8, 8, bias=False)
    inputs = torch.randn(4, 8, requires_grad=True)

    def loss() -> Tensor:
        (slope,) = torch.autograd.grad(layer(inputs).pow(2).sum(), inputs, create_graph=True)
        return slope.pow(2).sum()

    # Forward and its two gradients in the first place; four products more for the gradient of the gradient.
    assert count(loss).total >= 4 * 2 * 4 * 8 * 8


def test_look_ups_and_sparse_products_count_what_they_touch() -> None:
    table = nn.EmbeddingBag(10_000, 16, mode="sum")
    indices = torch.randint(0, 10_000, (BATCH, 4))
    assert count(lambda: table(indices).sum()).total == 0
    graph = torch.eye(50).to_sparse()
    features = torch.randn(50, 8, requires_grad=True)
    found = count(lambda: torch.sparse.mm(graph, features).sum())
    assert found.total == 2 * 2 * 50 * 8


def test_windows() -> None:
    query = torch.randn(1, 2, LENGTH, 8, requires_grad=True)
    band = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(-3)
    found = count(lambda: F.scaled_dot_product_attention(query, query, query, attn_mask=band).sum())
    assert found.total == 3 * 4 * 2 * 8 * float(band.sum())


def test_counting_changes_no_number() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.GELU(), nn.Linear(32, 4))
    inputs = torch.randn(8, 16)
    gradients = []
    for counted in (False, True):
        torch.manual_seed(1)
        model.zero_grad()
        if counted:
            count(lambda: model(inputs).square().sum())
        else:
            model(inputs).square().sum().backward()
        gradients.append([item.grad.clone() for item in model.parameters() if item.grad is not None])
    assert all(torch.equal(one, other) for one, other in zip(*gradients))


def test_compiled_code_stays_compiled_and_is_counted() -> None:
    layer = nn.Linear(8, 8)
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(len(inputs))
        forward: Callable[..., object] = graph.forward
        return forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda inputs: layer(inputs).sum(), backend=backend)
    inputs = torch.randn(4, 8)
    found = count(lambda: compiled(inputs))
    assert found.total == 2 * 2 * 4 * 8 * 8
    compiled(inputs)
    assert len(graphs) == 1


def test_operations_of_other_libraries_are_named_until_they_have_a_formula() -> None:
    @torch.library.custom_op("flops_test::twice", mutates_args=())
    def twice(inputs: Tensor) -> Tensor:
        return inputs * 2

    twice.register_autograd(lambda ctx, gradient: gradient * 2)
    inputs = torch.randn(4, requires_grad=True)
    assert count(lambda: twice(inputs).sum()).uncounted == {"flops_test::twice"}
    packet = torch.ops.flops_test.twice
    register_flop_formula(packet)(lambda shape, out_shape=None, **_: 100 * shape[0])
    try:
        found = count(lambda: twice(inputs).sum())
    finally:
        del flop_registry[packet]
    assert (found.total, found.uncounted) == (400, set())
