"""The same kind of classifier under Lightning, with a validation after each epoch."""

from __future__ import annotations

import logging
import tempfile
import warnings

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    """Two layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 2))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Loss of a batch."""
        return F.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        """Loss of a held-out batch."""
        self.log("val_loss", F.cross_entropy(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW on everything."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train for two epochs and print the loss."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(1280, 64)
    labels = (inputs[:, :8].sum(1) > 0).long()
    train = DataLoader(TensorDataset(inputs[:960], labels[:960]), 32, shuffle=True)
    held_out = DataLoader(TensorDataset(inputs[960:], labels[960:]), 160)
    model = Classifier()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(model, train, held_out)
    print(f"steps {trainer.global_step}, validation loss {float(trainer.callback_metrics['val_loss']):.6f}")
    print(f"checksum {sum(item.double().sum().item() for item in model.parameters()):.12f}")


if __name__ == "__main__":
    main()
