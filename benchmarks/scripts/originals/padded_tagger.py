"""Sequence tagger with a class-balancing sampler and a collate function that pads to --max-len."""

import argparse
import random

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Dataset, Sampler

PAD, IGNORE = 0, -100


class Corpus(Dataset):
    def __init__(self, n, vocab, max_len, seed=0):
        rnd = random.Random(seed)
        self.samples = []
        for _ in range(n):
            length = min(max_len, max(4, int(rnd.gauss(0.4 * max_len, 0.08 * max_len))))
            words = [rnd.randrange(1, vocab) for _ in range(length)]
            tags = [(w % 7 + (words[i - 1] % 3 if i else 0)) % 5 for i, w in enumerate(words)]
            self.samples.append((words, tags))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        return self.samples[i]


class BalancedSampler(Sampler):
    """As many sentences that start with an even word as with an odd one, in random order."""

    def __init__(self, corpus, seed):
        self.groups = [[], []]
        for i, (words, _) in enumerate(corpus.samples):
            self.groups[words[0] % 2].append(i)
        self.rnd = random.Random(seed)

    def __len__(self):
        return 2 * min(map(len, self.groups))

    def __iter__(self):
        n = min(map(len, self.groups))
        order = self.rnd.sample(self.groups[0], n) + self.rnd.sample(self.groups[1], n)
        self.rnd.shuffle(order)
        return iter(order)


class PadCollate:
    def __init__(self, max_len):
        self.max_len = max_len

    def __call__(self, batch):
        words = torch.full((len(batch), self.max_len), PAD)
        tags = torch.full((len(batch), self.max_len), IGNORE)
        for row, (w, t) in enumerate(batch):
            words[row, : len(w)] = torch.tensor(w)
            tags[row, : len(t)] = torch.tensor(t)
        return words, tags


class Tagger(nn.Module):
    def __init__(self, vocab, dim, heads, layers, max_len):
        super().__init__()
        self.words = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.positions = nn.Embedding(max_len, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(dim, 5)

    def forward(self, words):
        x = self.words(words) + self.positions(torch.arange(words.shape[1], device=words.device))
        return self.out(self.encoder(x, src_key_padding_mask=words == PAD))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--sentences", type=int, default=1600)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--max-len", type=int, default=64)
    ap.add_argument("--dim", type=int, default=64)
    ap.add_argument("--layers", type=int, default=2)
    args = ap.parse_args()
    torch.manual_seed(0)
    dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    corpus = Corpus(args.sentences, 500, args.max_len)
    loader = DataLoader(
        corpus, args.batch_size, sampler=BalancedSampler(corpus, 1), collate_fn=PadCollate(args.max_len), drop_last=True
    )
    net = Tagger(500, args.dim, 4, args.layers, args.max_len).to(dev)
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
    ce = nn.CrossEntropyLoss(ignore_index=IGNORE)
    for epoch in range(args.epochs):
        total = 0.0
        for words, tags in loader:
            words, tags = words.to(dev), tags.to(dev)
            opt.zero_grad()
            loss = ce(net(words).flatten(0, 1), tags.flatten())
            loss.backward()
            clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            total += loss.item()
        print(f"epoch {epoch}  mean loss {total / len(loader):.5f}")
        torch.save(net.state_dict(), f"tagger-{epoch}.pt")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
