"""Embeds documents with a model and writes their nearest neighbours: nothing is trained."""

import argparse
import json

import torch
from torch import nn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=50)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    encoder = nn.Sequential(nn.EmbeddingBag(5000, 128), nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 64))
    encoder = encoder.to(device).eval()
    documents = torch.randint(5000, (args.documents, 60))
    vectors = []
    with torch.inference_mode():
        for batch in documents.split(args.batch_size):
            vectors.append(nn.functional.normalize(encoder(batch.to(device)), dim=1))
        vectors = torch.cat(vectors)
        nearest = (vectors @ vectors.T).fill_diagonal_(-1).argmax(1).tolist()
    with open("neighbours.json", "w") as out:
        json.dump(nearest, out)
    print(f"wrote neighbours of {len(nearest)} documents")


if __name__ == "__main__":
    main()
