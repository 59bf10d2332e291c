"""Autoencoder with PyTorch Lightning: checkpoints, early stopping, learning-rate monitor and a callback of our own."""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Signals(Dataset):
    """Sums of sines, made on the fly."""

    def __init__(self, count, length, seed):
        g = torch.Generator().manual_seed(seed)
        self.frequencies = torch.rand(count, 3, generator=g) * 8 + 1
        self.time = torch.linspace(0, 1, length)

    def __len__(self):
        return len(self.frequencies)

    def __getitem__(self, index):
        waves = [torch.sin(2 * torch.pi * f * self.time) for f in self.frequencies[index]]
        return torch.stack(waves).mean(0)


class GradientNorm(Callback):
    """Log the total norm of the gradients before each update."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        norms = [p.grad.norm() for p in pl_module.parameters() if p.grad is not None]
        pl_module.log("grad_norm", torch.stack(norms).norm())


class AutoEncoder(L.LightningModule):
    def __init__(self, length, hidden, latent, lr):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(
            nn.Linear(length, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, latent)
        )
        self.decoder = nn.Sequential(
            nn.Linear(latent, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, length)
        )

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.decoder(self.encoder(batch)), batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self.decoder(self.encoder(batch)), batch), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_epochs", type=int, default=4)
    parser.add_argument("--signals", type=int, default=3200)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=256)
    args = parser.parse_args()
    L.seed_everything(0)
    train = DataLoader(Signals(args.signals, 256, 0), batch_size=args.batch_size, shuffle=True)
    val = DataLoader(Signals(256, 256, 1), batch_size=args.batch_size)
    model = AutoEncoder(256, args.hidden, 8, 1e-3)
    trainer = L.Trainer(
        max_epochs=args.max_epochs,
        accelerator="auto",
        devices=1,
        logger=CSVLogger("lightning_logs"),
        log_every_n_steps=1,
        gradient_clip_val=1.0,
        callbacks=[
            ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True),
            EarlyStopping(monitor="val_loss", patience=3),
            LearningRateMonitor(logging_interval="step"),
            GradientNorm(),
        ],
    )
    trainer.fit(model, train, val)
    print(f"final loss {trainer.callback_metrics['train_loss_epoch'].item():.6f}")


if __name__ == "__main__":
    main()
