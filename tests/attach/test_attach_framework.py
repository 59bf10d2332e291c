"""Scripts of each framework under `frameworm profile`: whose loop is recognised, and in whose words it answers."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

Cli = Callable[..., subprocess.CompletedProcess[str]]
LONG_S = 140
OURS = re.compile(r"\b(gpu|data|training|memory|parallel|checkpoint|observe)\.[a-z]+(_[a-z]+)*(: |=)")

# Texts of 8 to 120 words, each padded to the longest of its batch; nearly half of it is padding.
TEXTS = """
    import torch
    from torch.utils.data import DataLoader, Dataset


    class Texts(Dataset):
        def __init__(self):
            generator = torch.Generator().manual_seed(1)
            lengths = torch.randint(8, 120, (160,), generator=generator)
            self.words = [torch.randint(1, 100, (int(length),), generator=generator) for length in lengths]

        def __len__(self):
            return len(self.words)

        def __getitem__(self, index):
            return self.words[index]


    def collate(texts):
        ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        labels = torch.stack([(text[0] > 50).long() for text in texts])
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


    class Classifier(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words = torch.nn.Embedding(100, 64)
            layer = torch.nn.TransformerEncoderLayer(64, 2, 128, batch_first=True, dropout=0.1)
            self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = torch.nn.Linear(64, 2)

        def forward(self, input_ids, attention_mask, labels):
            states = self.layers(self.words(input_ids), src_key_padding_mask=attention_mask == 0)
            logits = self.head(states[:, 0])
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


    def loader():
        return DataLoader(Texts(), 4, collate_fn=collate, shuffle=True)


    torch.manual_seed(0)
    model = Classifier()
"""
END = """
    print(f"checksum {sum(item.double().sum().item() for item in model.parameters()):.15f}")
"""
# Frameworks that are imported and made, but whose loops do not train.
PLAIN = """
    try:
        import accelerate, lightning, transformers
        accelerate.Accelerator(cpu=True)
    except ImportError:
        pass
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in loader():
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
"""
TRAINER = """
    import tempfile
    from transformers import PrinterCallback, Trainer, TrainingArguments
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


    class Mine(Trainer):
        pass


    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, num_train_epochs=1, per_device_train_batch_size=4, save_strategy="no", use_cpu=True,
            report_to="none", disable_tqdm=True, logging_strategy="no", remove_unused_columns=False,
        )
        trainer = Mine(model, arguments, train_dataset=Texts(), data_collator=collate)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
"""
LIGHTNING = """
    import logging, warnings
    import lightning

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = model

        def training_step(self, batch, _):
            return self.inner(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)


    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), loader())
"""
ACCELERATE = """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    for batch in batches:
        optimizer.zero_grad()
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
"""


class Case(NamedTuple):
    package: str
    script: str
    loop: str | None
    remedy: str


CASES = {
    "torch": Case("torch", PLAIN, None, "batch_sampler="),
    "transformers": Case("transformers", TRAINER, "Trainer", "TrainingArguments("),
    "lightning": Case("lightning", LIGHTNING, "Trainer", "batch_sampler="),
    "accelerate": Case("accelerate", ACCELERATE, "Accelerator", "batch_sampler="),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_padding_is_named_in_the_words_of_the_script(name: str, cli: Cli, tmp_path: Path) -> None:
    case = CASES[name]
    pytest.importorskip(case.package)
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TEXTS) + textwrap.dedent(case.script) + textwrap.dedent(END))
    plain = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=LONG_S, cwd=tmp_path, check=True
    )
    done = cli("profile", "--out", tmp_path / "run", script, timeout_s=LONG_S, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr
    assert "checksum" in plain.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    framework = summary["framework"]
    assert (framework["name"], framework["loop"]) == (name, case.loop)
    assert 0.3 < summary["padding_waste"] < 0.6
    finding = next(item for item in summary["findings"] if item["code"] == "padding_waste")
    assert finding["severity"] in ("warning", "critical")
    assert finding["evidence"]["padding_beyond_longest_share"] == 0
    told = [remedy["text"] for remedy in finding["remedies"]]
    assert len(told) == 1
    assert case.remedy in told[0]
    shown = [done.stderr, *((tmp_path / "run" / file).read_text() for file in ("summary.txt", "report.html"))]
    for text in (*shown, *(remedy["text"] for item in summary["findings"] for remedy in item["remedies"])):
        assert not OURS.search(text), OURS.search(text)
    assert "padding_waste" in done.stderr
    check_options(framework, told[0])


def check_options(framework: dict[str, Any], remedy: str) -> None:
    """Options of the record, and those of a remedy, are options of the installed version."""
    names = set(re.findall(r"(\w+)=", remedy)) if framework["options"] else set()
    if framework["name"] == "transformers":
        import transformers

        known = {item.name for item in dataclasses.fields(transformers.TrainingArguments)}
        assert names
        assert names <= known
        assert framework["options"]["per_device_train_batch_size"] == 4
    elif framework["name"] == "lightning":
        import lightning

        known = set(inspect.signature(lightning.Trainer).parameters)
    elif framework["name"] == "accelerate":
        import accelerate

        known = set(inspect.signature(accelerate.Accelerator).parameters)
    else:
        known = set()
    assert set(framework["options"]) <= known
    assert bool(framework["options"]) == bool(known)
