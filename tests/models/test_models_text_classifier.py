"""The text classifier: padding is invisible, order is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from frameworm.errors import ModelError
from frameworm.models import text_classifier
from frameworm.models.text_classifier import TextClassifier


@pytest.fixture
def model() -> TextClassifier:
    torch.manual_seed(0)
    return TextClassifier(
        vocab_size=50,
        num_classes=3,
        d_model=16,
        n_heads=2,
        num_layers=2,
        dim_feedforward=32,
        max_seq_len=12,
        dropout=0.1,
    ).eval()


@pytest.fixture
def texts() -> list[torch.Tensor]:
    return [torch.tensor([3, 4, 5]), torch.tensor([7]), torch.tensor([9, 8, 7, 6, 5])]


def padded(texts: list[torch.Tensor], width: int, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    input_ids = torch.full((len(texts), width), pad)
    for row, text in enumerate(texts):
        input_ids[row, : len(text)] = text
    return input_ids, torch.tensor([len(text) for text in texts])


@pytest.mark.parametrize(("width", "pad"), [(5, 0), (12, 0), (12, 49)])
def test_result_does_not_depend_on_padding(
    model: TextClassifier, texts: list[torch.Tensor], width: int, pad: int
) -> None:
    alone = torch.cat([model(text.unsqueeze(0), torch.tensor([len(text)])) for text in texts])
    assert torch.allclose(model(*padded(texts, width, pad)), alone, atol=1e-5)


def test_gradients_do_not_depend_on_padding(model: TextClassifier, texts: list[torch.Tensor]) -> None:
    def gradients(width: int) -> list[torch.Tensor]:
        model.zero_grad()
        model(*padded(texts, width, 0)).pow(2).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    for narrow, wide in zip(gradients(5), gradients(12), strict=True):
        assert torch.allclose(narrow, wide, atol=1e-5)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize(("residual", "expected"), [("fp32", torch.float32), ("half", torch.bfloat16)])
@pytest.mark.parametrize("is_packed", [False, True])
def test_the_stream_is_in_the_numbers_asked_for(residual: Any, expected: torch.dtype, is_packed: bool) -> None:
    torch.manual_seed(0)
    model = TextClassifier(50, 3, 16, 2, 2, 32, max_seq_len=8, dropout=0.0, residual=residual)
    seen: list[torch.dtype] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    tokens = torch.randint(1, 50, (2, 8))
    lengths = torch.tensor([8, 8])
    plain = model(tokens, lengths)
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        if is_packed:
            borders = torch.tensor([0, 8, 16, 16, 16], dtype=torch.int32)
            result = model(tokens.flatten(), offsets=borders, positions=torch.arange(8).repeat(2))
        else:
            result = model(tokens, lengths)
    assert set(seen) == {expected}
    assert torch.allclose(result.float(), plain, atol=0.05)


LONGEST = 6
Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def small(dropout: float = 0.0) -> TextClassifier:
    torch.manual_seed(0)
    return TextClassifier(50, 3, 16, 2, 2, 32, max_seq_len=LONGEST, dropout=dropout)


def packed(texts: list[torch.Tensor], batch: int, capacity: int, pad: int = 0) -> Packed:
    """Texts end to end, then empty ones up to `batch`, then a tail in pieces of at most `LONGEST` tokens."""
    lengths = [len(text) for text in texts] + [0] * (batch - len(texts))
    tail = capacity - sum(lengths)
    pieces = [min(LONGEST, tail - start) for start in range(0, tail, LONGEST)]
    pieces += [0] * (-(-capacity // LONGEST) - len(pieces))
    input_ids = torch.cat([*texts, torch.full((tail,), pad)])
    offsets = torch.tensor([0, *lengths, *pieces]).cumsum(0).int()
    positions = torch.cat([*(torch.arange(length) for length in lengths), torch.arange(tail) % LONGEST])
    return input_ids, offsets, positions


def all_gradients(model: TextClassifier, logits: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    torch.nn.functional.cross_entropy(logits, torch.arange(len(logits)) % 3).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=8),
    missing=st.integers(0, 3),
    spare=st.integers(0, 15),
    membership=st.sampled_from([0, 2**26]),
)
def test_packed_equals_padded(lengths: list[int], missing: int, spare: int, membership: int) -> None:
    model = small()
    generator = torch.Generator().manual_seed(sum(lengths))
    texts = [torch.randint(1, 50, (length,), generator=generator) for length in lengths]
    expected = model(*padded(texts, max(lengths), 0))
    input_ids, offsets, positions = packed(texts, len(texts) + missing, sum(lengths) + spare)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_classifier, "_LARGEST_MEMBERSHIP", membership)
        logits = model(input_ids=input_ids, offsets=offsets, positions=positions)
    assert logits.shape == (len(texts) + missing, 3)
    assert torch.allclose(logits[: len(texts)], expected, atol=1e-5)
    ours = all_gradients(model, logits[: len(texts)])
    for one, other in zip(ours, all_gradients(model, expected), strict=True):
        assert (one - other).abs().max() <= 1e-5 * max(1.0, float(other.abs().max()))


def test_packed_with_missing_texts_stays_finite() -> None:
    model = small(dropout=0.3)
    input_ids, offsets, positions = packed([torch.tensor([3, 4])], 4, 9)
    logits = model(input_ids, offsets=offsets, positions=positions)
    labels = torch.tensor([1, -100, -100, -100])
    torch.nn.functional.cross_entropy(logits, labels).backward()
    assert torch.isfinite(logits).all()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters() if parameter.grad is not None)
    assert model.token_embedding.weight.grad is not None
    used = model.token_embedding.weight.grad.any(1).nonzero().flatten()
    assert used.tolist() == [3, 4]


def test_packed_ignores_the_tail() -> None:
    model = small()
    texts = [torch.tensor([3, 4]), torch.tensor([5])]
    first, second = (packed(texts, 2, 17, pad) for pad in (0, 7))
    assert torch.equal(
        model(first[0], offsets=first[1], positions=first[2]), model(second[0], offsets=second[1], positions=second[2])
    )


def test_packed_dropout_only_in_training() -> None:
    model = small(dropout=0.3)
    input_ids, offsets, positions = packed([torch.tensor([3, 4, 5])], 1, 4)
    assert not torch.equal(
        model(input_ids, offsets=offsets, positions=positions), model(input_ids, offsets=offsets, positions=positions)
    )
    model.eval()
    expected = model(torch.tensor([[3, 4, 5]]), torch.tensor([3]))
    assert torch.allclose(model(input_ids, offsets=offsets, positions=positions), expected, atol=1e-5)


def test_packed_has_no_host_synchronisation() -> None:
    with torch.device("meta"):
        model = small()
        logits = model(
            torch.zeros(13, dtype=torch.long),
            offsets=torch.zeros(8, dtype=torch.int32),
            positions=torch.zeros(13, dtype=torch.long),
        )
    assert logits.shape == (4, 3)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_packed_equals_padded_under_autocast() -> None:
    model = small()
    texts = [torch.tensor([3, 4, 5, 6, 7, 8]), torch.tensor([7])]
    input_ids, offsets, positions = packed(texts, 2, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(*padded(texts, 6, 0))
        logits = model(input_ids, offsets=offsets, positions=positions)
    assert logits.dtype == expected.dtype == torch.bfloat16
    assert torch.allclose(logits, expected, atol=2e-2)


@pytest.mark.slow
def test_packed_compiles_in_one_graph() -> None:
    model = small()
    input_ids, offsets, positions = packed([torch.tensor([3, 4]), torch.tensor([5])], 3, 8)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = model(input_ids, offsets=offsets, positions=positions)
    assert torch.allclose(compiled(input_ids, offsets=offsets, positions=positions), expected, atol=1e-6)


def test_batch_that_is_neither() -> None:
    model = small()
    with pytest.raises(ModelError, match="give lengths with a padded batch, or offsets and positions"):
        model(torch.ones(1, 3, dtype=torch.long))
    with pytest.raises(ModelError, match=r"leave no text beside the tail of 12 tokens; pack .* max_seq_len, 6"):
        model(
            torch.ones(12, dtype=torch.long),
            offsets=torch.zeros(3, dtype=torch.int32),
            positions=torch.zeros(12, dtype=torch.long),
        )


def test_order_matters(model: TextClassifier) -> None:
    forwards, backwards = torch.tensor([[3, 4, 5]]), torch.tensor([[5, 4, 3]])
    length = torch.tensor([3])
    assert not torch.allclose(model(forwards, length), model(backwards, length), atol=1e-4)


def test_dropout_only_in_training(model: TextClassifier) -> None:
    batch = padded([torch.tensor([3, 4, 5])], 3, 0)
    assert torch.equal(model(*batch), model(*batch))
    model.train()
    assert not torch.equal(model(*batch), model(*batch))


def test_too_long_a_batch(model: TextClassifier) -> None:
    with pytest.raises(ModelError, match=r"13 tokens long, the model takes 12 \(model\.max_seq_len\)"):
        model(torch.ones(1, 13, dtype=torch.long), torch.tensor([13]))


def test_forward_has_no_host_synchronisation() -> None:
    """On the meta device there are no values: a look at one raises."""
    with torch.device("meta"):
        model = TextClassifier(vocab_size=50, num_classes=3)
        logits = model(torch.zeros(2, 7, dtype=torch.long), torch.ones(2, dtype=torch.long))
    assert logits.shape == (2, 3)


def test_learns_a_rule_of_order() -> None:
    """Whether token 1 comes before token 2: the same words in both classes."""
    torch.manual_seed(0)
    model = TextClassifier(
        vocab_size=8, num_classes=2, d_model=32, n_heads=2, num_layers=1, dim_feedforward=32, max_seq_len=6, dropout=0.0
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    rows = torch.stack([torch.randperm(5)[:4] for _ in range(600)]) + 1
    rows = rows[((rows == 1).any(1)) & ((rows == 2).any(1))]
    labels = ((rows == 1).float().argmax(1) < (rows == 2).float().argmax(1)).long()
    lengths = torch.full((len(rows),), 4)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(rows, lengths), labels).backward()
        optimizer.step()
    assert float((model(rows, lengths).argmax(1) == labels).float().mean()) > 0.95


def test_a_batch_without_padding_needs_no_mask_and_gives_the_same(
    model: TextClassifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, lengths = torch.randint(1, 50, (4, 6)), torch.full((4,), 6)
    masks = []
    attention = F.scaled_dot_product_attention

    def noted(*args: Any, attn_mask: Any = None, **kwargs: Any) -> Any:
        masks.append(attn_mask is not None)
        return attention(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    results = []
    for full in (True, False):
        if not full:
            monkeypatch.setattr(text_classifier, "_are_full", lambda lengths, length: False)
        model.zero_grad()
        scores = model(tokens, lengths)
        scores.square().sum().backward()
        results.append([scores.detach(), *(item.grad for item in model.parameters() if item.grad is not None)])
    assert masks == [False, False, True, True]
    for mine, masked in zip(*results):
        torch.testing.assert_close(mine, masked, rtol=1e-6, atol=1e-6)
