"""Variational autoencoder; whatever happens, the weights are saved at the end."""

import argparse
import signal
import sys

import torch
from torch import nn
from torch.nn import functional as F


class VAE(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.fc1 = nn.Linear(784, hidden)
        self.fc21, self.fc22 = nn.Linear(hidden, 20), nn.Linear(hidden, 20)
        self.fc3, self.fc4 = nn.Linear(20, hidden), nn.Linear(hidden, 784)

    def forward(self, x):
        h1 = F.relu(self.fc1(x))
        mu, logvar = self.fc21(h1), self.fc22(h1)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.fc4(F.relu(self.fc3(z))), mu, logvar


def loss_function(recon, x, mu, logvar):
    bce = F.binary_cross_entropy_with_logits(recon, x, reduction="sum")
    return (bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())) / len(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=6400)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=400)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    digits = (torch.rand(10, 784) > 0.8).float()
    data = digits[torch.randint(10, (args.samples,))]
    loader = torch.utils.data.DataLoader(data, args.batch_size, shuffle=True)
    model = VAE(args.hidden).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    history = []
    try:
        for epoch in range(args.epochs):
            for batch in loader:
                batch = batch.to(device)
                optimizer.zero_grad()
                recon, mu, logvar = model(batch)
                loss = loss_function(recon, batch, mu, logvar)
                loss.backward()
                history.append(loss.item())
                optimizer.step()
            print(f"====> Epoch: {epoch} Average loss: {sum(history[-len(loader) :]) / len(loader):.4f}")
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        torch.save({"model": model.state_dict(), "history": history}, "vae.pt")
        print(f"saved vae.pt after {len(history)} steps")
    print(f"final loss {history[-1]:.6f}")


if __name__ == "__main__":
    main()
