"""Training scripts that ship inside PyPI packages, unmodified, and what makes each of them a short run offline.

The file is taken from the installed package; models, tokenizers and data sets it would download are built in a folder.
`python benchmarks/scripts/packaged.py` says which are here; with a NAME it runs that one in a temporary folder.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Row = dict[str, object]
WORDS = [f"word{number}" for number in range(200)]
# Nothing of the hub, no telemetry, and the tokenizer's threads do not disturb what is measured.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1", "WANDB_MODE": "disabled"}


@dataclass(frozen=True)
class PackagedScript:
    """A script inside a package."""

    name: str
    path: str
    """Where it is: the package, then the file in its folder."""
    habit: str
    prepare: Callable[[Path, int], list[str]]
    """Writes what the script needs into the folder it will run in, and returns arguments for about so many steps."""
    requires: tuple[str, ...] = ()
    """Further modules it imports."""

    def missing(self) -> list[str]:
        """Modules that are not installed."""
        wanted = (self.path.partition("/")[0], *self.requires)
        return [name for name in wanted if importlib.util.find_spec(name) is None]

    def file(self) -> Path:
        """The installed file.

        Raises:
            FileNotFoundError: The package is not installed, or its installed version has no such script.
        """
        package, _, rest = self.path.partition("/")
        spec = importlib.util.find_spec(package)
        folders = (spec.submodule_search_locations or []) if spec else []
        for folder in folders:
            if (Path(folder) / rest).is_file():
                return Path(folder) / rest
        raise FileNotFoundError(
            f"{self.path} is not installed: {'no such script' if spec else f'pip install {package}'}"
        )

    def command(self, folder: Path, steps: int = 100) -> list[str]:
        """Prepare a folder and return the script with its arguments; run it in that folder, with ENVIRONMENT."""
        return [str(self.file()), *self.prepare(folder, steps)]


def no_arguments(folder: Path, steps: int) -> list[str]:
    """For scripts that bring their own data and take no options."""
    return []


def write_tokenizer(folder: Path) -> None:
    """Save a word-level tokenizer with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    vocabulary = {word: index for index, word in enumerate([*special.values(), *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    saved.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    saved.save_pretrained(folder)


def write_model(folder: Path, kind: str) -> str:
    """Save a small model with random weights and its tokenizer; returns the folder as an argument."""
    import transformers

    transformers.set_seed(0)
    shape = {"vocab_size": len(WORDS) + 3, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"intermediate_size": 128, "pad_token_id": 0, "max_position_embeddings": 512}
    if kind == "bert":
        model = transformers.BertForSequenceClassification(transformers.BertConfig(**shape))
    else:
        # A kind whose tokenizer is loaded as it was saved; some kinds bring rules of their own.
        config = transformers.StableLmConfig(**shape, num_key_value_heads=2, eos_token_id=1, num_labels=1)
        classes = {"causal": transformers.StableLmForCausalLM, "reward": transformers.StableLmForSequenceClassification}
        model = classes[kind](config)
    target = folder / f"tiny-{kind}"
    model.save_pretrained(target)
    write_tokenizer(target)
    return str(target)


def sentence(drawn: random.Random, longest: int = 30) -> str:
    """Some words."""
    return " ".join(drawn.choices(WORDS, k=drawn.randint(4, longest)))


def write_rows(file: Path, rows: list[Row]) -> None:
    """Save rows as JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def trl(kind: str, columns: Callable[[random.Random], Row], *more: str) -> Callable[[Path, int], list[str]]:
    """Arguments of a script of trl: a tiny model, a local data set with these columns, no evaluation, no reports."""

    def prepare(folder: Path, steps: int) -> list[str]:
        drawn = random.Random(0)
        write_rows(folder / "data" / "train.jsonl", [columns(drawn) for _ in range(8 * steps)])
        given = {
            "model_name_or_path": write_model(folder, kind),
            "dataset_name": str(folder / "data"),
            "output_dir": str(folder / "trained"),
            "max_steps": str(steps),
            "per_device_train_batch_size": "4",
            "learning_rate": "1e-3",
            "report_to": "none",
            "save_strategy": "no",
            "bf16": "false",
        }
        return [*(item for name, value in given.items() for item in (f"--{name}", value)), *more]

    return prepare


def glue(folder: Path) -> str:
    """Lay out `nyu-mll/glue` and its metric as local folders, which `load` takes before it asks the hub."""
    drawn = random.Random(0)
    data = folder / "nyu-mll" / "glue"
    for split, count in (("train", 320), ("validation", 64), ("test", 16)):
        rows: list[Row] = []
        for index in range(count):
            pair = {"sentence1": sentence(drawn), "sentence2": sentence(drawn)}
            rows.append({**pair, "label": drawn.randint(0, 1), "idx": index})
        write_rows(data / "mrpc" / f"{split}.jsonl", rows)
    files = "".join(f"  - split: {split}\n    path: mrpc/{split}.jsonl\n" for split in ("train", "validation", "test"))
    (data / "README.md").write_text(
        f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n", encoding="utf-8"
    )
    (folder / "glue").mkdir()
    (folder / "glue" / "glue.py").write_text(GLUE_METRIC, encoding="utf-8")
    return write_model(folder, "bert")


GLUE_METRIC = """
import datasets
import evaluate


class Glue(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="accuracy", citation="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": sum(int(a == b) for a, b in zip(predictions, references)) / len(predictions)}
"""


def performance(folder: Path, steps: int) -> list[str]:
    """20 steps make an epoch of 16 samples each."""
    epochs = max(1, round(steps / 20))
    return ["--model_name_or_path", glue(folder), "--output_dir", str(folder), "--num_epochs", str(epochs)]


def text(drawn: random.Random) -> Row:
    """A text to continue."""
    return {"text": sentence(drawn)}


def preference(drawn: random.Random) -> Row:
    """A prompt with a better and a worse answer."""
    return {"prompt": sentence(drawn), "chosen": f" {sentence(drawn)}", "rejected": f" {sentence(drawn)}"}


def judged(drawn: random.Random) -> Row:
    """A prompt with one answer, and whether it is a good one."""
    return {"prompt": sentence(drawn), "completion": f" {sentence(drawn)}", "label": drawn.random() < 0.5}


SCRIPTS = (
    PackagedScript(
        "accelerate-script",
        "accelerate/test_utils/scripts/test_script.py",
        "Accelerate's self-test: many short trainings of a regression, one after another",
        no_arguments,
    ),
    PackagedScript(
        "accelerate-sync",
        "accelerate/test_utils/scripts/test_sync.py",
        "two copies of a model trained side by side under accumulate() and no_sync()",
        no_arguments,
    ),
    PackagedScript(
        "accelerate-performance",
        "accelerate/test_utils/scripts/external_deps/test_performance.py",
        "BERT on MRPC under Accelerate, metrics after each epoch",
        performance,
        ("datasets", "evaluate", "transformers"),
    ),
    PackagedScript(
        "accelerate-checkpointing",
        "accelerate/test_utils/scripts/external_deps/test_checkpointing.py",
        "BERT on MRPC under Accelerate, the whole state saved after each epoch",
        performance,
        ("datasets", "evaluate", "transformers"),
    ),
    PackagedScript(
        "trl-sft",
        "trl/scripts/sft.py",
        "SFTTrainer from the command line",
        trl("causal", text),
        ("datasets",),
    ),
    PackagedScript(
        "trl-sft-lora",
        "trl/scripts/sft.py",
        "SFTTrainer with LoRA adapters",
        trl(
            "causal", lambda drawn: {"text": sentence(drawn)}, "--use_peft", "--lora_target_modules", "q_proj", "v_proj"
        ),
        ("datasets", "peft"),
    ),
    PackagedScript(
        "trl-dpo",
        "trl/scripts/dpo.py",
        "DPO: a frozen reference beside the model",
        trl("causal", preference),
        ("datasets",),
    ),
    PackagedScript(
        "trl-reward", "trl/scripts/reward.py", "reward model from preferences", trl("reward", preference), ("datasets",)
    ),
    PackagedScript(
        "trl-kto",
        "trl/scripts/kto.py",
        "KTO: answers marked good or bad",
        trl("causal", judged),
        ("datasets",),
    ),
)


def main() -> None:
    """List the scripts, or run one."""
    if len(sys.argv) == 1:
        for script in SCRIPTS:
            missing = script.missing()
            where = f"missing: {', '.join(missing)}" if missing else str(script.file())
            print(f"{script.name:24} {where}")
        return
    script = next(item for item in SCRIPTS if item.name == sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        steps = int(sys.argv[2]) if len(sys.argv) > 2 else 20
        command = [sys.executable, *script.command(Path(folder), steps)]
        sys.exit(subprocess.run(command, cwd=folder, env={**os.environ, **ENVIRONMENT}, check=False).returncode)


if __name__ == "__main__":
    main()
