"""LoRA on a small Llama with PEFT: only the adapters train, in a plain loop."""

import argparse
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

try:
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup
except ImportError as error:
    sys.exit(f"this script needs peft and transformers: pip install peft transformers ({error})")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_epochs", type=int, default=2)
    parser.add_argument("--examples", type=int, default=800)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--seq_len", type=int, default=32)
    parser.add_argument("--hidden_size", type=int, default=96)
    parser.add_argument("--num_layers", type=int, default=2)
    parser.add_argument("--lora_r", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--output_dir", default="lora-adapter")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=args.hidden_size,
        intermediate_size=2 * args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=max(2, args.hidden_size // 64),
        max_position_embeddings=args.seq_len,
    )
    model = LlamaForCausalLM(config)
    peft_config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=args.lora_r,
        lora_alpha=16,
        lora_dropout=0.0,
        target_modules=["q_proj", "v_proj"],
    )
    model = get_peft_model(model, peft_config)
    model.print_trainable_parameters()
    model = model.to(device)
    torch.set_float32_matmul_precision("high")
    for layer in model.get_base_model().model.layers:
        layer.compile()

    start = torch.randint(512, (args.examples, 1))
    tokens = (start + 3 * torch.arange(args.seq_len)) % 512
    train_dataloader = DataLoader(TensorDataset(tokens), shuffle=True, batch_size=args.batch_size)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=args.lr, fused=True)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=10, num_training_steps=len(train_dataloader) * args.num_epochs
    )
    for epoch in range(args.num_epochs):
        model.train()
        total_loss = 0
        for step, (batch,) in enumerate(train_dataloader):
            batch = batch.to(device)
            with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
                outputs = model(input_ids=batch, labels=batch, use_cache=False)
            loss = outputs.loss
            total_loss += loss.detach().float()
            loss.backward()
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        print(f"{epoch=}: train_loss={total_loss.item() / len(train_dataloader):.4f}")
    model.save_pretrained(args.output_dir)
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
