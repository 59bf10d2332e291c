"""Supervised fine-tuning of a small Qwen2 with TRL's SFTTrainer on question-answer pairs."""

import argparse
import random
import sys

try:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed
    from trl import SFTConfig, SFTTrainer
except ImportError as error:
    sys.exit(f"this script needs trl, datasets and transformers: pip install trl ({error})")


def build_tokenizer(words):
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def build_dataset(words, size):
    rnd = random.Random(0)
    rows = []
    for _ in range(size):
        question = [rnd.choice(words) for _ in range(rnd.randint(4, 40))]
        rows.append({"prompt": " ".join(question), "completion": " " + " ".join(reversed(question[-8:]))})
    return Dataset.from_list(rows)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_steps", type=int, default=150)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--hidden_size", type=int, default=64)
    parser.add_argument("--num_layers", type=int, default=2)
    parser.add_argument("--output_dir", default="sft-output")
    args = parser.parse_args()
    set_seed(0)
    words = [f"w{i}" for i in range(400)]
    tokenizer = build_tokenizer(words)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=2 * args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=max(2, args.hidden_size // 64),
        num_key_value_heads=max(2, args.hidden_size // 64),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    training_args = SFTConfig(
        output_dir=args.output_dir,
        max_steps=args.max_steps,
        per_device_train_batch_size=args.per_device_train_batch_size,
        learning_rate=1e-3,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        bf16=False,
        gradient_checkpointing=True,
        optim="adamw_torch",
        pad_to_multiple_of=64,
    )
    trainer = SFTTrainer(
        model=Qwen2ForCausalLM(config),
        args=training_args,
        train_dataset=build_dataset(words, 1200),
        processing_class=tokenizer,
    )
    result = trainer.train()
    trainer.save_model(args.output_dir)
    print(f"final loss {result.training_loss:.6f}")


if __name__ == "__main__":
    main()
