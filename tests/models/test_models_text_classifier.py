"""The text classifier: padding is invisible, order is not."""

from __future__ import annotations

import pytest
import torch

from frameworm.errors import ModelError
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
