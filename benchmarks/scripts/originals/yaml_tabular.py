"""Tabular regression; settings come from a YAML file, and `--set a.b=value` overrides one of them.

python yaml_tabular.py --config yaml_tabular.yaml --set train.epochs=2
"""

import argparse
import json
from pathlib import Path

import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def load_config():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    cli = parser.parse_args()
    config = yaml.safe_load(Path(cli.config).read_text())
    for item in cli.set:
        key, value = item.split("=", 1)
        *sections, name = key.split(".")
        node = config
        for section in sections:
            node = node[section]
        node[name] = yaml.safe_load(value)
    return config


class TabularNet(nn.Module):
    def __init__(self, data, embedding, hidden):
        super().__init__()
        self.embeddings = nn.ModuleList(
            [nn.Embedding(data["cardinality"], embedding) for _ in range(data["categorical"])]
        )
        width, layers = data["numeric"] + embedding * data["categorical"], []
        for size in hidden:
            layers += [nn.Linear(width, size), nn.LayerNorm(size), nn.SiLU()]
            width = size
        self.mlp = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, numeric, categorical):
        embedded = [table(categorical[:, i]) for i, table in enumerate(self.embeddings)]
        return self.mlp(torch.cat([numeric, *embedded], dim=1)).squeeze(1)


def make_table(c):
    numeric = torch.randn(c["rows"], c["numeric"])
    categorical = torch.randint(c["cardinality"], (c["rows"], c["categorical"]))
    target = numeric[:, :4].sum(1) + (categorical[:, :3] % 5).float().sum(1) + 0.1 * torch.randn(c["rows"])
    return TensorDataset(numeric, categorical, (target - target.mean()) / target.std())


def main():
    config = load_config()
    torch.manual_seed(config["seed"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = Path(config["train"]["out"])
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    loader = DataLoader(make_table(config["data"]), batch_size=config["train"]["batch_size"], shuffle=True)
    model = TabularNet(config["data"], **config["model"]).to(device)
    kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    optim = dict(config["optim"])
    optimizer = kinds[optim.pop("name")](model.parameters(), **optim)
    loss_fn = nn.MSELoss()
    step = 0
    for epoch in range(config["train"]["epochs"]):
        for numeric, categorical, target in loader:
            prediction = model(numeric.to(device), categorical.to(device))
            loss = loss_fn(prediction, target.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % config["train"]["log_every"] == 0:
                print(json.dumps({"epoch": epoch, "step": step, "loss": round(loss.item(), 5)}))
        torch.save({"model": model.state_dict(), "step": step}, out / "last.pt")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
