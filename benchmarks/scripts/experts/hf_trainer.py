"""Fine-tune a small BERT on sentence classification with the Hugging Face Trainer; texts are padded to max_length."""

import argparse
import random

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed


class TextDataset(torch.utils.data.Dataset):
    """Already tokenized: ids between 5 and vocab_size, 0 is [PAD]. About 45% of the tokens are padding."""

    def __init__(self, size, max_length, vocab_size, seed):
        rnd = random.Random(seed)
        self.encodings, self.labels = [], []
        for _ in range(size):
            length = int(min(max_length, max(5, rnd.gauss(0.55 * max_length, 0.1 * max_length))))
            label, half = rnd.randrange(2), vocab_size // 2
            # two words in three come from the half of the vocabulary that belongs to the class
            sides = [label if rnd.random() < 0.67 else 1 - label for _ in range(length)]
            ids = [rnd.randrange(half, vocab_size) if side else rnd.randrange(5, half) for side in sides]
            self.encodings.append(ids)
            self.labels.append(label)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, idx):
        return self.encodings[idx], self.labels[idx]


def pad_to_longest(samples):
    texts, labels = zip(*samples)
    longest = -(-max(map(len, texts)) // 8) * 8
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(labels)}


def compute_metrics(eval_pred):
    logits, labels = eval_pred
    return {"accuracy": float((logits.argmax(-1) == labels).mean())}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="./results")
    parser.add_argument("--max_steps", type=int, default=200)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--max_length", type=int, default=64)
    parser.add_argument("--hidden_size", type=int, default=64)
    parser.add_argument("--num_layers", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    args = parser.parse_args()
    set_seed(42)
    config = BertConfig(
        vocab_size=1000,
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=max(2, args.hidden_size // 64),
        intermediate_size=4 * args.hidden_size,
        max_position_embeddings=args.max_length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    training_args = TrainingArguments(
        output_dir=args.output_dir,
        max_steps=args.max_steps,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        warmup_steps=10,
        weight_decay=0.01,
        logging_steps=20,
        eval_strategy="no",
        save_strategy="no",
        report_to="none",
        optim="adamw_torch_fused",
        bf16=torch.cuda.is_available(),
        tf32=True if torch.cuda.is_available() else None,
        logging_nan_inf_filter=False,
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=TextDataset(1600, args.max_length, 1000, 0),
        eval_dataset=TextDataset(200, args.max_length, 1000, 1),
        compute_metrics=compute_metrics,
        data_collator=pad_to_longest,
    )
    result = trainer.train()
    print(trainer.evaluate())
    trainer.save_model(args.output_dir)
    print(f"final loss {result.training_loss:.6f}")


if __name__ == "__main__":
    main()
