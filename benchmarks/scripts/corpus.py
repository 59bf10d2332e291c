"""The scripts of `originals/` and `experts/`: how each is started, how long a short run is and how it ends."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

HERE = Path(__file__).parent
RANKS = 2


@dataclass(frozen=True)
class Script:
    """One script of the corpus."""

    name: str
    habit: str
    short: tuple[str, ...]
    """Arguments that leave it a few steps; without them it trains for some hundred."""
    always: tuple[str, ...] = ()
    """Arguments it cannot do without."""
    gpu: tuple[str, ...] = ()
    """Arguments that give a GPU enough to do; the defaults are made for two CPU cores."""
    ranks: int = 1
    """More than one: torchrun starts it."""
    requires: tuple[str, ...] = ()
    ending: Literal["trains", "crashes", "asks", "leaves", "never trains", "too short"] = "trains"
    """What becomes of it: `asks` reads standard input, `leaves` goes on in a process of its own."""
    expert: Literal["same", "random", None] = "same"
    """Whether the expert's version computes the same losses, draws other random numbers, or does not exist."""

    @property
    def original(self) -> Path:
        """The script as its author wrote it."""
        return HERE / "originals" / f"{self.name}.py"

    @property
    def tuned_by_hand(self) -> Path:
        """The expert's version."""
        return HERE / "experts" / f"{self.name}.py"

    def missing(self) -> list[str]:
        """Libraries it needs that are not installed."""
        return [name for name in self.requires if importlib.util.find_spec(name) is None]

    def command(self, file: Path, more: Sequence[str] = (), through: Sequence[str] = ()) -> list[str]:
        """Command line that runs `file`, the original or the expert's; `through` goes between Python and the file."""
        launcher = [sys.executable]
        if self.ranks > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        return [*launcher, *through, str(file), *self.always, *more]


SCRIPTS = (
    Script(
        "image_classifier",
        "plain loop; images are normalised one by one in the data set, no loader workers",
        ("--epochs", "1", "--train-size", "256"),
        gpu=("--width", "64", "--batch-size", "256", "--train-size", "51200"),
    ),
    Script(
        "amp_resnet",
        "autocast and GradScaler (on a GPU), unscale and clip, OneCycle schedule, loss.item() each step",
        ("--epochs", "1", "--steps-per-epoch", "8"),
        gpu=("--width", "64", "--blocks", "3", "-b", "256", "--steps-per-epoch", "200"),
    ),
    Script(
        "dcgan",
        "GAN with two optimizers, as in the tutorial: all at module level, three .item() calls a step",
        ("--niter", "1", "--batches", "8"),
        gpu=("--ngf", "64", "--ndf", "64", "--batchSize", "128", "--batches", "200"),
    ),
    Script("lbfgs_sequence", "LBFGS with a closure, LSTM cells unrolled in Python, float64", ("--steps", "6")),
    Script(
        "gpt_accumulation",
        "nanoGPT style: four micro-batches to a step, batches drawn by hand, no DataLoader",
        ("--max_iters", "6"),
        gpu=("--n_layer", "12", "--n_head", "12", "--n_embd", "768", "--block_size", "512", "--batch_size", "8"),
    ),
    Script(
        "mid_epoch_eval",
        "validates every 40 steps in the middle of an epoch",
        ("--max-steps", "12", "--eval-every", "5"),
    ),
    Script(
        "padded_tagger",
        "sampler and collate function of its own; every batch is padded to --max-len (60% padding)",
        ("--epochs", "1", "--sentences", "200"),
        gpu=("--dim", "512", "--layers", "6", "--max-len", "256", "--batch-size", "64", "--sentences", "6400"),
    ),
    Script(
        "yaml_tabular",
        "argparse and a YAML config with overrides; rows are collated one by one",
        ("--set", "train.epochs=1", "--set", "data.rows=2560"),
        always=("--config", str(HERE / "originals" / "yaml_tabular.yaml")),
    ),
    Script(
        "hf_trainer",
        "Hugging Face Trainer, BERT, texts padded to max_length (45% padding)",
        ("--max_steps", "30"),
        gpu=("--hidden_size", "768", "--num_layers", "12", "--max_length", "256", "--batch_size", "32"),
        requires=("transformers", "accelerate"),
    ),
    Script(
        "peft_lora",
        "LoRA adapters of PEFT in a plain loop; the optimizer is given frozen weights too",
        ("--num_epochs", "1", "--examples", "64"),
        gpu=("--hidden_size", "1024", "--num_layers", "12", "--seq_len", "256", "--examples", "3200"),
        requires=("peft", "transformers"),
    ),
    Script(
        "trl_sft",
        "SFTTrainer of TRL; activation checkpointing that is not needed, lengths rounded up to 64",
        ("--max_steps", "6"),
        gpu=("--hidden_size", "1024", "--num_layers", "12"),
        requires=("trl", "datasets", "transformers"),
    ),
    Script(
        "lightning_callbacks",
        "Lightning with four callbacks; logs every step; signals are made one by one",
        ("--max_epochs", "1", "--signals", "512"),
        requires=("lightning",),
    ),
    Script(
        "accelerate_clip",
        "Accelerate: accumulation, clipping, schedule; gathers the loss and reads it each step",
        ("--num_train_epochs", "1", "--train_size", "256"),
        gpu=("--dim", "768", "--depth", "12", "--per_device_train_batch_size", "256", "--train_size", "25600"),
        requires=("accelerate",),
    ),
    Script(
        "ddp_torchrun",
        "DDP by torchrun with find_unused_parameters, accumulation without no_sync, an all-reduce of every loss",
        ("--epochs", "1", "--samples", "512"),
        ranks=RANKS,
    ),
    Script(
        "fsdp2_torchrun",
        "FSDP2 by torchrun on gloo: each layer sharded by itself, gathered again for backward",
        ("--steps", "8"),
        ranks=RANKS,
    ),
    Script(
        "compiled_already",
        "torch.compile and a fused optimizer are there: little is left",
        ("--steps", "8"),
        expert=None,
    ),
    Script("reinforce", "policy gradient; environment steps in Python, no DataLoader", ("--episodes", "8")),
    Script(
        "diffusion_ema",
        "diffusion, U-Net, moving average of the weights kept in a Python loop over state_dict()",
        ("--train-steps", "8"),
        gpu=("--channels", "128", "--image-size", "32", "--batch-size", "64"),
    ),
    Script(
        "save_in_finally",
        "saves in `finally:` and on SIGTERM, whatever happens",
        ("--epochs", "1", "--samples", "1024"),
    ),
    Script(
        "random_augmentation",
        "the data set draws from random, numpy and torch",
        ("--epochs", "1", "--samples", "640"),
        expert="random",
    ),
    Script(
        "log_every_step",
        "loss, accuracy and norms of every step go through .item() into a CSV file",
        ("--epochs", "1", "--clips", "320"),
        gpu=("--channels", "128", "--batch-size", "256", "--clips", "51200"),
        requires=("tqdm",),
    ),
    Script("crash_midway", "raises after 120 steps", ("--bad", "12"), ending="crashes", expert=None),
    Script("three_steps", "three steps, then done", (), ending="too short", expert=None),
    Script("asks_stdin", "asks a question on standard input first", ("--steps", "8"), ending="asks", expert=None),
    Script("daemonises", "goes into the background and returns", ("--steps", "8"), ending="leaves", expert=None),
    Script(
        "no_training", "runs a model and never trains it", ("--documents", "200"), ending="never trains", expert=None
    ),
)
