"""TextCNN sentence classifier that validates every few steps and keeps the best weights."""

import argparse
import copy
import pathlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset


class TextCNN(nn.Module):
    """Kim (2014): convolutions of several widths over word vectors, max over time."""

    def __init__(self, vocab, dim, filters, classes):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        self.convs = nn.ModuleList([nn.Conv1d(dim, filters, k, padding=k // 2) for k in (3, 5, 7)])
        self.fc = nn.Linear(3 * filters, classes)

    def forward(self, tokens):
        x = self.embed(tokens).transpose(1, 2)
        return self.fc(torch.cat([F.relu(conv(x)).amax(-1) for conv in self.convs], 1))


def sentences(n, length, vocab, seed):
    g = torch.Generator().manual_seed(seed)
    words = torch.randint(1, vocab, (n, length), generator=g)
    labels = (words < 50).sum(1).clamp(max=3)
    return TensorDataset(words, labels)


def evaluate(model, dataset, device):
    loader = DataLoader(dataset, sampler=BatchSampler(SequentialSampler(dataset), 200, False), batch_size=None)
    model.eval()
    total, correct = 0.0, 0
    with torch.inference_mode():
        for tokens, labels in loader:
            tokens, labels = tokens.to(device), labels.to(device)
            logits = model(tokens)
            total += F.cross_entropy(logits, labels, reduction="sum")
            correct += (logits.argmax(-1) == labels).sum()
    model.train()
    return total.item() / len(dataset), correct.item() / len(dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-steps", type=int, default=240)
    parser.add_argument("--eval-every", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=4000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--filters", type=int, default=32)
    parser.add_argument("--save-dir", type=pathlib.Path, default=pathlib.Path("outputs"))
    args = parser.parse_args()

    torch.manual_seed(3)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args.save_dir.mkdir(parents=True, exist_ok=True)
    train = sentences(3200, 40, args.vocab, 0)
    valid = sentences(400, 40, args.vocab, 1)
    torch.set_float32_matmul_precision("high")
    model = TextCNN(args.vocab, args.dim, args.filters, 4).to(device)
    if device == "cuda":
        model.compile()  # no faster on a CPU
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    # whole batches are indexed at once, in the order that shuffle=True gives
    loader = DataLoader(train, sampler=BatchSampler(RandomSampler(train), args.batch_size, False), batch_size=None)

    step, best, best_state = 0, float("inf"), None
    while step < args.max_steps:
        for tokens, labels in loader:
            tokens, labels = tokens.to(device), labels.to(device)
            loss = F.cross_entropy(model(tokens), labels)
            model.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % args.eval_every == 0:
                val_loss, val_acc = evaluate(model, valid, device)
                print(f"step {step:5d} | train {loss.item():.4f} | valid {val_loss:.4f} | acc {val_acc:.3f}")
                if val_loss < best:
                    best, best_state = val_loss, copy.deepcopy(model.state_dict())
                    torch.save(best_state, args.save_dir / "textcnn-best.pt")
            if step >= args.max_steps:
                break
    print(f"final train loss: {loss.item():.6f}")


if __name__ == "__main__":
    main()
