"""A tiny BERT with random weights under transformers.Trainer, with an evaluation after each epoch."""

from __future__ import annotations

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Random words; the label says whether the first word comes from the upper half of the vocabulary."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(1, 100, (count, 16), generator=generator)
        self.labels = (self.words[:, 0] >= 50).long()

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[index], "labels": self.labels[index]}


def main() -> None:
    """Train for two epochs and print the losses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="a checkpoint after each epoch")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    set_seed(0)
    shape = BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    model = BertForSequenceClassification(shape)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            num_train_epochs=2,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=options.accumulation,
            learning_rate=1e-3,
            eval_strategy="epoch",
            save_strategy="epoch" if options.save else "no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(model, settings, train_dataset=Sentences(320, seed=1), eval_dataset=Sentences(64, seed=2))
        trainer.remove_callback(PrinterCallback)
        result = trainer.train()
        scores = trainer.evaluate()
    print(f"steps {result.global_step}, train loss {result.training_loss:.6f}, eval loss {scores['eval_loss']:.6f}")
    print(f"checksum {sum(item.double().sum().item() for item in model.parameters()):.12f}")


if __name__ == "__main__":
    main()
