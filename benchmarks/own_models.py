"""Models that frameworm has never seen, for tuner.py: `workload: own_models:cnn` and `own_models:bert`.

Random images and random words; the model, the data and the plain loop are what a user would have before frameworm.
"""

from __future__ import annotations

from typing import Any

import torch
from live import Gate
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from frameworm.config.load import load_config
from frameworm.config.schema import Config
from frameworm.models.workloads import Workload, build_workload

CLASSES = 10


class ConvolutionalNetwork(nn.Module):
    """Four blocks of two convolutions with batch normalisation, each halving the image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for scale in (1, 2, 4, 8):
            for _ in range(2):
                layers += [nn.Conv2d(channels, width * scale, 3, padding=1, bias=False), nn.BatchNorm2d(width * scale)]
                layers.append(nn.ReLU())
                channels = width * scale
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Images to logits."""
        logits: Tensor = self.head(self.features(images).mean((2, 3)))
        return logits


def cnn(config: Config) -> Workload:
    """A CNN on random images with a tint for each class; `model.width`, `.size` and `.samples` give its size."""
    given = config.model.model_extra or {}
    size, samples = int(given.get("size", 64)), int(given.get("samples", 8192))
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(samples, 3, size, size, generator=generator)
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    # Something to learn: where a loss cannot fall, no curve tells whether learning is as it was.
    images += torch.randn(CLASSES, 3, 1, 1, generator=generator)[labels]
    return Workload(ConvolutionalNetwork(int(given.get("width", 64))), TensorDataset(images, labels))


class Sentences(Dataset[dict[str, Tensor]]):
    """Random words of random length, the first of which tells the class, padded to the longest as tokenizers do."""

    def __init__(self, samples: int, length: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.words = torch.randint(10, vocabulary, (samples, length), generator=generator)
        lengths = torch.randint(length // 8, length + 1, (samples, 1), generator=generator)
        self.mask = (torch.arange(length) < lengths).long()
        self.labels = torch.randint(2, (samples,), generator=generator)
        self.words[:, 0] = 10 + self.labels  # something to learn, as above

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "input_ids": self.words[index] * self.mask[index],
            "attention_mask": self.mask[index],
            "labels": self.labels[index],
        }


def bert(config: Config) -> Workload:
    """BERT for classification with random weights, from `transformers`; `model.layers` gives its depth."""
    from transformers import BertConfig, BertForSequenceClassification

    given = config.model.model_extra or {}
    width = int(given.get("width", 768))
    shape = BertConfig(
        num_hidden_layers=int(given.get("layers", 12)),
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=width // 64,
        # Dropout draws differently under other kernels; both sides go without.
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    length, samples = int(given.get("length", 128)), int(given.get("samples", 8192))
    return Workload(BertForSequenceClassification(shape), Sentences(samples, length, shape.vocab_size))


def plain_loop(gate: Gate, path: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """What its author would write first: fp32, AdamW, a DataLoader with two workers, one step after the other."""
    config = load_config(path, overrides)
    torch.manual_seed(config.seed)
    workload = build_workload(config)
    device = gate.device
    model = workload.model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.training.lr)
    loader = DataLoader(
        workload.train_data,
        config.training.global_batch,
        shuffle=True,
        drop_last=True,
        num_workers=2 if device.type == "cuda" else 0,
        pin_memory=device.type == "cuda",
        persistent_workers=device.type == "cuda",
    )
    loss: Tensor | None = None
    while gate.open:
        for batch in gate.batches(loader):
            optimizer.zero_grad(set_to_none=True)
            if isinstance(batch, dict):
                loss = model(**{name: value.to(device, non_blocking=True) for name, value in batch.items()}).loss
            else:
                images, labels = (value.to(device, non_blocking=True) for value in batch)
                loss = nn.functional.cross_entropy(model(images), labels)
            assert loss is not None
            loss.backward()
            optimizer.step()
    return {"loss": None if loss is None else float(loss)}
