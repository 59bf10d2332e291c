"""Reading configs: precedence, the three sources and the message of every mistake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from frameworm.config.load import (
    default_cache_dir,
    dump_config,
    load_config,
    load_config_from_mapping,
    load_config_from_text,
)
from frameworm.config.schema import Config, CustomModelConfig, GPTModelConfig, GPUConfig, TrainingConfig
from frameworm.errors import ConfigError


def load_text(tmp_path: Path, text: str, *overrides: str, **environ: str) -> Config:
    """Load a config file of that text."""
    file = tmp_path / "x.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config(file, overrides, environ)


def messages(tmp_path: Path, text: str, *overrides: str, **environ: str) -> list[str]:
    """The lines of the error, with the folder taken out."""
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text, *overrides, **environ)
    return str(caught.value).replace(f"{tmp_path}/", "").split("\n")


BAD_FILES = [
    # unknown keys
    ("training:\n  bogus: 1\n", "x.yaml:2: training.bogus: unknown key; nearest is training.betas"),
    ("seed: 1\nlr: 3\n", "x.yaml:2: lr: unknown key; did you mean training.lr?"),
    ("modle: {}\n", "x.yaml:1: modle: unknown key; did you mean model?"),
    ("model:\n  d_modle: 64\n", "x.yaml:2: model.d_modle: unknown key; did you mean model.d_model?"),
    (
        "data:\n  mixed_precision: off\n",
        "x.yaml:2: data.mixed_precision: unknown key; did you mean gpu.mixed_precision?",
    ),
    ("training: {learning_rate: 1}\n", "x.yaml:1: training.learning_rate: unknown key; did you mean training.lr?"),
    (
        "training:\n  early_stop:\n    patince: 2\n",
        "x.yaml:3: training.early_stop.patince: unknown key; did you mean training.early_stop.patience?",
    ),
    ("gpu:\n\n  off: 3\n", "x.yaml:3: gpu.off: unknown key; nearest is gpu.tf32"),
    ("1: 2\n", "x.yaml:1: 1: unknown key; nearest is name"),
    (
        "workload: gpt\nmodel: {dim_feedforward: 5}\ndata: {dataset: text, root: x}\n",
        "x.yaml:2: model.dim_feedforward: unknown key; nearest is model.init_from",
    ),
    # types, ranges and words
    ("training:\n  epochs: three\n", "x.yaml:2: training.epochs: expected a whole number, 1 or more, got 'three'"),
    ("training:\n  epochs: true\n", "x.yaml:2: training.epochs: expected a whole number, 1 or more, got true"),
    ("training:\n  epochs: 1.5\n", "x.yaml:2: training.epochs: expected a whole number, 1 or more, got 1.5"),
    ("training:\n  epochs: '3'\n", "x.yaml:2: training.epochs: expected a whole number, 1 or more, got '3'"),
    ("training:\n  epochs:\n", "x.yaml:2: training.epochs: expected a whole number, 1 or more, got nothing"),
    ("training:\n  lr: [1]\n", "x.yaml:2: training.lr: expected a number above 0, got a list of 1"),
    ("training:\n  lr: .nan\n", "x.yaml:2: training.lr: expected a number above 0, got nan"),
    ("training:\n  lr: {a: 1}\n", "x.yaml:2: training.lr: expected a number above 0, got a mapping"),
    ("model: {dropout: 1.0}\n", "x.yaml:1: model.dropout: expected a number from 0 to below 1, got 1.0"),
    (
        "model:\n  num_layers: -1\n",
        "x.yaml:2: model.num_layers: expected a whole number, 1 or more, got -1",
    ),
    (
        "training:\n  micro_batch: atuo\n",
        "x.yaml:2: training.micro_batch: expected auto or a whole number, 1 or more, got 'atuo'; did you mean auto?",
    ),
    (
        "training:\n  micro_batch: 0\n",
        "x.yaml:2: training.micro_batch: expected auto or a whole number, 1 or more, got 0",
    ),
    (
        "training:\n  schedule: cosin\n",
        "x.yaml:2: training.schedule: expected one of onecycle, cosine, linear, constant, wsd, got 'cosin'; "
        "did you mean cosine?",
    ),
    (
        "gpu: {mixed_precision: int8}\n",
        "x.yaml:1: gpu.mixed_precision: expected one of auto, bf16, fp16, off, got 'int8'; nearest is auto",
    ),
    ("data: {shuffle: 1}\n", "x.yaml:1: data.shuffle: expected true or false, got 1"),
    (
        "data: {pin_memory: maybe}\n",
        "x.yaml:1: data.pin_memory: expected auto, true or false, got 'maybe'; nearest is false",
    ),
    ("name: 12\n", "x.yaml:1: name: expected text, got 12; put it in quotes"),
    ("name: a b\n", "x.yaml:1: name: 'a b' must consist of letters, digits, '.', '_' and '-' and not begin with a dot"),
    ("name: " + "n" * 101, "x.yaml:1: name: 101 characters are too many for a folder's name; use at most 100"),
    ("training: {betas: [0.5]}\n", "x.yaml:1: training.betas: expected two numbers from 0 to below 1, got a list of 1"),
    (
        "observe:\n  sinks:\n  - jsonl\n  - tensorbord\n",
        "x.yaml:4: observe.sinks[1]: expected one of jsonl, tensorboard, got 'tensorbord'; did you mean tensorboard?",
    ),
    (
        "training: {early_stop: 3}\n",
        "x.yaml:1: training.early_stop: expected off or a section with keys such as metric, patience, min_delta, got 3",
    ),
    ("gpu: 5\n", "x.yaml:1: gpu: expected a section with keys such as device, device_ids, memory_fraction, got 5"),
    ("model: off\n", "x.yaml:1: model: expected a section with keys such as d_model, n_heads, num_layers, got false"),
    # workloads and data sets
    (
        "workload: text_clasifier\n",
        "x.yaml:1: workload: expected one of text_classifier, gpt or package.module:function, got 'text_clasifier'; "
        "did you mean text_classifier?",
    ),
    ("workload: 'my model:run'\n", "x.yaml:1: workload: 'my model:run' is not of the form package.module:function"),
    (
        "data: {dataset: agnews}\n",
        "x.yaml:1: data.dataset: expected one of generated, ag_news, imdb, text or hf:NAME, got 'agnews'; "
        "did you mean ag_news?",
    ),
    (
        "data:\n  dataset: imdb\n",
        "x.yaml:2: data.root: imdb needs the folder with the IMDB csv files or aclImdb; set data.root",
    ),
    (
        "data:\n  root: y\n  dataset: text\n",
        "x.yaml:3: data.dataset: text has no classes to learn; use ag_news, imdb, generated or hf:NAME, "
        "or set workload: gpt",
    ),
    (
        "name: a\nworkload: gpt\n",
        "x.yaml:2: data.dataset: the gpt workload reads text files, not generated; "
        "set data.dataset: text and data.root",
    ),
    # combinations
    (
        "model:\n  d_model: 100\n  n_heads: 3\n",
        "x.yaml:3: model.n_heads: n_heads 3 does not divide d_model 100; nearest n_heads that do: 2 or 4",
    ),
    (
        "model:\n  d_model: 102\n",
        "x.yaml:2: model.d_model: n_heads 4 does not divide d_model 102; nearest n_heads that do: 3 or 6",
    ),
    (
        "training:\n  micro_batch: 2\n  batch_size: 4\n",
        "x.yaml:3: training.batch_size: batch_size 4 contradicts micro_batch 2; both mean the samples per forward pass "
        "on one device, so keep one of them",
    ),
    (
        "training:\n  lr_scaling: linear\n",
        "x.yaml:2: training.lr_scaling: linear needs training.base_batch, the global batch that lr was chosen for",
    ),
    (
        "gpu: {device: cpu}\nparallel:\n  strategy: dp\n",
        "x.yaml:3: parallel.strategy: dp spreads one process over GPUs and gpu.device is cpu; use single or ddp",
    ),
    (
        "parallel: {backend: nccl}\ngpu: {device: cpu}\n",
        "x.yaml:1: parallel.backend: nccl talks between GPUs and gpu.device is cpu; use gloo or auto",
    ),
    (
        "gpu: {device_ids: [1, 1]}\n",
        "x.yaml:1: gpu.device_ids: expected each GPU once and at least one, got [1, 1]",
    ),
    (
        "parallel:\n  strategy: dp\n  compression: int8\n",
        "x.yaml:3: parallel.compression: compression int8 cannot be combined with strategy dp; "
        "use ddp, or compression: off",
    ),
    (
        "memory: {checkpoint_modules: [Block]}\n",
        "x.yaml:1: memory.checkpoint_modules: checkpoint_modules names modules to recompute and "
        "activation_checkpointing is off; set full or selective",
    ),
    (
        "data: {batching: bucketed, shuffle: false}\n",
        "x.yaml:1: data.batching: 'bucketed' reorders the samples, but shuffle is off; turn it on",
    ),
    (
        "data: {balance: true, shuffle: off}\n",
        "x.yaml:1: data.balance: true reorders the samples, but shuffle is off; turn it on",
    ),
    (
        "data: {batching: bucketed, balance: true}\n",
        "x.yaml:1: data.balance: bucketed steps differ in length on purpose; leave balance off, or use packed",
    ),
    (
        "data: {resident: true, batching: packed}\ngpu: {device: cpu}\n",
        "x.yaml:1: data.resident: true puts packed batches together on a GPU and gpu.device is cpu; use auto",
    ),
    (
        "data: {batching: packed}\nparallel: {strategy: dp}\n",
        "x.yaml:1: data.batching: dp cuts batches apart by samples, which packed batches do not allow; use ddp, or "
        "bucketed",
    ),
    (
        "gpu: {capture: step, device: cpu}\n",
        "x.yaml:1: gpu.capture: step records CUDA graphs and gpu.device is cpu; use off or auto",
    ),
    (
        "parallel: {strategy: dp, bucket_cap_mb: 10}\n",
        "x.yaml:1: parallel.bucket_cap_mb: bucket_cap_mb is about DDP's buckets, which strategy dp does not have; "
        "leave it out, or use ddp",
    ),
    (
        "parallel: {sync_every: 4, strategy: single}\n",
        "x.yaml:1: parallel.sync_every: sync_every averages whole models, which strategy single does not do; use ddp, "
        "or sync_every: 1",
    ),
    (
        "parallel: {sync_every: 4, compression: int4}\n",
        "x.yaml:1: parallel.sync_every: with sync_every above 1 no gradients are sent for int4 to make smaller; use "
        "one of them",
    ),
    (
        "parallel: {sync_every: 4, check_replicas: 6}\n",
        "x.yaml:1: parallel.check_replicas: models agree only every 4 steps (sync_every); use a multiple of that",
    ),
    # sharding
    (
        "gpu: {compile_model: true}\nparallel: {strategy: zero2}\n",
        "x.yaml:1: gpu.compile_model: a compiled model cannot be divided by strategy zero2; leave it out, or use zero1",
    ),
    (
        "gpu: {capture: step}\nparallel: {strategy: dp}\n",
        "x.yaml:1: gpu.capture: step records the work of one device and strategy dp works on several; use ddp, or "
        "capture: off",
    ),
    (
        "gpu: {capture: step}\nparallel: {strategy: zero3, offload_optimizer: true}\n",
        "x.yaml:1: gpu.capture: step records what a GPU does and offload_optimizer updates on the host; use off or "
        "auto",
    ),
    (
        "gpu: {capture: step}\nparallel: {find_unused_parameters: true}\n",
        "x.yaml:1: gpu.capture: find_unused_parameters asks the GPU in every step, which step cannot record; use off "
        "or auto",
    ),
    (
        "gpu: {capture: step}\nparallel: {compression: int8, rounding: stochastic}\n",
        "x.yaml:1: gpu.capture: stochastic rounding draws by the number of the step, which step would record; use "
        "rounding: nearest",
    ),
    (
        "gpu: {channels_last: true}\nparallel: {strategy: zero3}\n",
        "x.yaml:1: gpu.channels_last: strategy zero3 lays parameters out by itself; leave it out, or use zero1",
    ),
    (
        "parallel: {strategy: ddp, offload_optimizer: true}\n",
        "x.yaml:1: parallel.offload_optimizer: true keeps what zero2 and zero3 divide in host memory and strategy is "
        "ddp; use zero2 or zero3",
    ),
    (
        "gpu: {device: cpu}\nparallel: {strategy: zero3, offload_optimizer: true}\n",
        "x.yaml:2: parallel.offload_optimizer: true frees a GPU's memory and gpu.device is cpu; leave it out",
    ),
    (
        "memory: {on_oom: halve_micro_batch}\nparallel: {strategy: zero3}\n",
        "x.yaml:1: memory.on_oom: a step under strategy zero3 cannot be taken back on all ranks; use stop, or zero1",
    ),
    (
        "memory: {on_oom: halve_micro_batch}\nparallel: {strategy: ddp, compression: bf16}\n",
        "x.yaml:1: memory.on_oom: a step under compression cannot be taken back on all ranks; use stop, or "
        "compression: off",
    ),
    (
        "gpu: {mixed_precision: fp16}\nparallel: {strategy: zero3, offload_optimizer: true}\n",
        "x.yaml:2: parallel.offload_optimizer: the loss scale of fp16 lives on the GPU and gradients would not; use "
        "bf16",
    ),
    # YAML
    ("seed: 1\nseed: 2\n", "x.yaml:2: seed: given twice, first on line 1; keep one of them"),
    (
        "training:\n  lr: 1\n  epochs: 2\n  lr: 2\n",
        "x.yaml:4: training.lr: given twice, first on line 2; keep one of them",
    ),
    ("seed: 1\nname: [a\n", "x.yaml:3: not valid YAML: expected ',' or ']', but got '<stream end>'"),
    (
        "training:\n\tlr: 1\n",
        "x.yaml:2: not valid YAML: found character '\\t' that cannot start any token; indent with spaces",
    ),
    ("seed: 1\nname: \x07\n", "x.yaml:2: the character U+0007 is not allowed in YAML"),
    ('name: "\\UFFFFFFFF"\n', "x.yaml:1: not valid YAML: an invalid escape or number"),
    ("seed: 1\n---\nseed: 2\n", "x.yaml:2: not valid YAML: but found another document"),
    (
        "name: !!python/name:os.system x\n",
        "x.yaml:1: name: the tag !!python/name:os.system is not allowed; write a plain value",
    ),
    (
        "model: &m {d_model: 64}\ngpu: {<<: *m}\n",
        "x.yaml:2: gpu.<<: merge keys are not supported; write the settings out",
    ),
    ("? [a, b]\n: 1\n", "x.yaml:1: a key must be a single word"),
]


@pytest.mark.parametrize(("text", "message"), BAD_FILES)
def test_a_mistake_in_the_file_gives_one_line_with_place_key_and_remedy(
    tmp_path: Path, text: str, message: str
) -> None:
    assert messages(tmp_path, text) == [message]


def test_compression_cannot_be_combined_with_zero3(tmp_path: Path) -> None:
    assert messages(tmp_path, "parallel:\n  strategy: zero3\n  compression: int8\n") == [
        "x.yaml:3: parallel.compression: compression int8 cannot be combined with strategy zero3; "
        "use ddp, or compression: off",
    ]


WHAT = "a config is a mapping of sections such as model, data and training; `frameworm init quickstart` writes one"


@pytest.mark.slow(cases="all")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f"x.yaml: the file is empty; {WHAT}"),
        ("# only a comment\n", f"x.yaml: the file is empty; {WHAT}"),
        ("- a\n", f"x.yaml:1: expected a mapping, got a list of 1; {WHAT}"),
        ("hello\n", f"x.yaml:1: expected a mapping, got 'hello'; {WHAT}"),
        ("&a [*a]\n", "x.yaml:1: too large or nested too deeply for a config"),
        ("[" * 5000, "x.yaml:1: too large or nested too deeply for a config"),
    ],
)
def test_a_file_that_is_no_mapping(tmp_path: Path, text: str, message: str) -> None:
    assert message in messages(tmp_path, text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text("{}")
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    for name, message in [
        ("quikstart.yaml", f"no such file; did you mean {tmp_path}/quickstart.yaml?"),
        ("zzzzzz", "no such file"),
        ("none/x.yaml", "no such file"),
        ("none/quickstart.yaml", "no such file; `frameworm init quickstart` writes quickstart.yaml"),
        (".", "this is a folder; give a config file in it"),
        ("latin.yaml", "not UTF-8 text (byte 0xe9 at 9); save it as UTF-8"),
    ]:
        with pytest.raises(ConfigError) as caught:
            load_config(tmp_path / name, environ={})
        assert str(caught.value) == f"{tmp_path / name}: {message}"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config("a\0b", environ={})


def test_aliases_cannot_blow_up(tmp_path: Path) -> None:
    lines = ["workload: a:b", "model:", "  a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    assert all("too large" in line for line in messages(tmp_path, "\n".join(lines)))


def test_all_problems_are_told_at_once_in_the_order_of_their_places(tmp_path: Path) -> None:
    found = messages(
        tmp_path,
        "gpu: {tf23: 1}\ntraining:\n  lr: 0\n  epochs: 0\nmodel: {n_head: 2}\n",
        "training.eps=x",
        FRAMEWORM_SED="1",
    )
    assert [line.split(": ")[:2] for line in found] == [
        ["x.yaml:1", "gpu.tf23"],
        ["x.yaml:3", "training.lr"],
        ["x.yaml:4", "training.epochs"],
        ["x.yaml:5", "model.n_head"],
        ["FRAMEWORM_SED", "sed"],
        ["--set training.eps=x", "training.eps"],
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.bogus=1", "training.bogus: unknown key; nearest is training.betas"),
        ("trainig.lr=1", "trainig.lr: unknown key; did you mean training.lr?"),
        ("lr=1", "lr: unknown key; did you mean training.lr?"),
        ("training.lr", "expected key=value, as in training.lr=3e-4"),
        ("=1", "expected key=value, as in training.lr=3e-4"),
        ("training.lr.x=1", "training.lr.x: unknown key; did you mean training.lr?"),
        ("training.lr=fast", "training.lr: expected a number above 0, got 'fast'"),
        ("training.lr=", "training.lr: expected a number above 0, got nothing"),
        ("training.betas=[1", "training.betas: not valid YAML: expected ',' or ']', but got '<stream end>'"),
        (
            "observe.sinks=[json]",
            "observe.sinks[0]: expected one of jsonl, tensorboard, got 'json'; did you mean jsonl?",
        ),
        ("model={d_modle: 3}", "model.d_modle: unknown key; did you mean model.d_model?"),
        ("gpu=3", "gpu: expected a section with keys such as device, device_ids, memory_fraction, got 3"),
        ("model.d_model=66", "model.d_model: n_heads 4 does not divide d_model 66; nearest n_heads that do: 3 or 6"),
        ("observe.trace=windows", "observe.trace: expected one of off, window, got 'windows'; did you mean window?"),
    ],
)
def test_a_mistake_in_an_override(tmp_path: Path, override: str, message: str) -> None:
    found = messages(tmp_path, "model: {n_heads: 4}\n", override)
    assert [line.split(": ", 1)[1] if line.startswith(f"--set {override}: ") else line for line in found] == [
        f"{override.split(': ', 1)[1]}: {message}" if ": " in override else message
    ]


def test_a_line_break_in_an_override_stays_on_one_line(tmp_path: Path) -> None:
    assert len(messages(tmp_path, "{}", "training.l\nr=1")) == 1


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        (
            "FRAMEWORM_TRAINING_BOGUS",
            "training.bogus: unknown key; nearest is FRAMEWORM_TRAINING_BETAS (training.betas)",
        ),
        ("FRAMEWORM_LR", "lr: unknown key; did you mean FRAMEWORM_TRAINING_LR (training.lr)?"),
        (
            "FRAMEWORM_TRAINING__EPOCH",
            "training.epoch: unknown key; did you mean FRAMEWORM_TRAINING_EPOCHS (training.epochs)?",
        ),
        (
            "FRAMEWORM_MODEL_D_MODLE",
            "model.d_modle: unknown key; did you mean FRAMEWORM_MODEL_D_MODEL (model.d_model)?",
        ),
        ("FRAMEWORM_TRAINING_LR", "training.lr: expected a number above 0, got 'x'"),
        ("FRAMEWORM_GPU_DEVICE", "gpu.device: expected one of auto, cpu, cuda, got 'x'; nearest is auto"),
    ],
)
def test_a_mistake_in_a_variable(tmp_path: Path, variable: str, message: str) -> None:
    assert messages(tmp_path, "{}", **{variable: "x"}) == [f"{variable}: {message}"]


def test_override_beats_variable_beats_file_beats_default(tmp_path: Path) -> None:
    text = "training: {epochs: 2, lr: 2, eps: 2}\n"
    config = load_text(
        tmp_path,
        text,
        "training.epochs=4",
        "training.epochs=5",
        FRAMEWORM_TRAINING_EPOCHS="3",
        FRAMEWORM_TRAINING__LR="3e0",
    )
    training = config.training
    assert (training.epochs, training.lr, training.eps, training.momentum) == (5, 3.0, 2.0, 0.9)


def test_variables_reach_settings_of_every_depth(tmp_path: Path) -> None:
    config = load_text(
        tmp_path,
        "{}",
        FRAMEWORM_SEED="7",
        FRAMEWORM_NAME="2024",
        FRAMEWORM_DATA_CACHE_DIR="/c",
        FRAMEWORM_TRAINING_EARLY_STOP_PATIENCE="9",
        FRAMEWORM_OBSERVE__SINKS="[tensorboard]",
        FRAMEWORM_MODEL_D_MODEL="64",
        FRAMEWORM_GPU_MIXED_PRECISION="off",
    )
    assert config.seed == 7
    assert config.name == "2024"
    assert config.data.cache_dir == "/c"
    assert config.training.early_stop is not None
    assert config.training.early_stop.patience == 9
    assert config.observe.sinks == ["tensorboard"]
    assert config.model.d_model == 64  # type: ignore[union-attr]
    assert config.gpu.mixed_precision == "off"


def test_variables_that_are_no_settings_are_left_alone(tmp_path: Path) -> None:
    plain = load_text(tmp_path, "{}", HOME="/h")
    others = {"FRAMEWORM_DATA": "/d", "FRAMEWORM_INTERNAL_X": "1", "FRAMEWORM_SEED": "", "FRAMEWORMS": "1", "LR": "2"}
    assert load_text(tmp_path, "{}", HOME="/h", **others) == plain


def test_the_process_environment_is_read_unless_another_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRAMEWORM_SEED", "11")
    (tmp_path / "x.yaml").write_text("seed: 1")
    assert load_config(tmp_path / "x.yaml").seed == 11
    assert load_config(tmp_path / "x.yaml", environ={}).seed == 1
    assert load_config_from_mapping({"seed": 1}).seed == 11


def test_variable_names_are_unambiguous() -> None:
    from frameworm.config.keys import key_tree
    from frameworm.config.overrides import variable_name
    from frameworm.config.schema import MODEL_SECTIONS

    for section in MODEL_SECTIONS.values():
        names = [variable_name(path) for path in key_tree(Config, section)]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("written", ["3e-4", "3.0e-4", "0.0003", "+3E-4", ".0003", "3_0e-5"])
def test_spellings_of_a_number(tmp_path: Path, written: str) -> None:
    assert load_text(tmp_path, f"training: {{lr: {written}}}").training.lr == pytest.approx(3e-4)
    assert load_text(tmp_path, "{}", f"training.lr={written}").training.lr == pytest.approx(3e-4)


@pytest.mark.parametrize("written", ["off", "false", "no", "'off'"])
def test_spellings_of_off(tmp_path: Path, written: str) -> None:
    config = load_text(
        tmp_path,
        f"gpu: {{mixed_precision: {written}, capture: {written}}}\nparallel: {{compression: {written}}}\n"
        f"training: {{clip_norm: {written}, lr_scaling: {written}, early_stop: {written}}}\n"
        f"checkpoint: {{every_steps: {written}}}\nmemory: {{activation_checkpointing: {written}}}\n",
    )
    assert (config.gpu.mixed_precision, config.gpu.capture, config.parallel.compression) == ("off", "off", "off")
    assert (config.training.clip_norm, config.training.early_stop, config.checkpoint.every_steps) == (None, None, None)
    assert (config.training.lr_scaling, config.memory.activation_checkpointing) == ("none", "off")


def test_the_example_of_the_contract_loads(tmp_path: Path) -> None:
    config = load_text(
        tmp_path,
        """\
name: ag_news
seed: 0
workload: text_classifier          # text_classifier | gpt | package.module:function for your own model and data
model:    {d_model: 256, n_heads: 8, num_layers: 4, dim_feedforward: 1024, max_seq_len: 256, dropout: 0.1}
data:     {dataset: ag_news, root: data/ag_news, num_workers: auto, batching: padded}   # padded | bucketed | packed
training: {epochs: 20, global_batch: 128, micro_batch: auto, optimizer: adamw, lr: 3.0e-4, schedule: onecycle,
           clip_norm: 1.0, lr_scaling: none}
gpu:      {mixed_precision: auto, compile_model: false, use_flash_attention: auto, benchmark: true,
           deterministic: false, memory_fraction: 0.9, capture: off, tf32: true}
memory:   {activation_checkpointing: off, max_memory_percent: 85, gc_threshold: 70, monitoring_interval: 30,
           enable_automatic_gc: true, cache_size_limit: 1073741824}
parallel: {strategy: auto, backend: auto, compression: off, bucket_cap_mb: 25, static_graph: auto}
checkpoint: {every_steps: 500, keep: 3, mode: async}
observe:  {sinks: [jsonl], trace: off}
""",
    )
    assert config.training.global_batch == 128
    assert config.data.root == "data/ag_news"


def test_an_empty_section_is_a_section_of_defaults(tmp_path: Path) -> None:
    empty = load_text(tmp_path, "training:\nmodel:\ngpu: {}\n", "gpu.tf32=off", HOME="/h")
    assert empty == load_text(tmp_path, "gpu: {tf32: false}", HOME="/h")


def test_an_override_can_open_a_section_that_the_file_turned_off(tmp_path: Path) -> None:
    config = load_text(tmp_path, "training: {early_stop: off}", "training.early_stop.patience=2")
    assert config.training.early_stop is not None
    assert config.training.early_stop.patience == 2
    assert (
        load_text(tmp_path, "training: {early_stop: {patience: 2}}", "training.early_stop=off").training.early_stop
        is None
    )


def test_overrides_of_text_take_it_as_it_is(tmp_path: Path) -> None:
    config = load_text(tmp_path, "{}", "name=2024", "data.root=*.csv", "data.tokenizer=a: b", "model.init_from=off")
    assert (config.name, config.data.root, config.data.tokenizer) == ("2024", "*.csv", "a: b")
    assert config.model.init_from is None


def test_the_workload_decides_the_model_section_wherever_it_is_given(tmp_path: Path) -> None:
    gpt = "data: {dataset: text, root: x}\n"
    for config in (
        load_text(tmp_path, gpt + "workload: gpt"),
        load_text(tmp_path, gpt, "workload=gpt"),
        load_text(tmp_path, gpt, FRAMEWORM_WORKLOAD="gpt"),
    ):
        assert isinstance(config.model, GPTModelConfig)
        assert config.model.d_model == 768


def test_an_own_workload_takes_any_model_keys_and_any_data(tmp_path: Path) -> None:
    config = load_text(
        tmp_path,
        "workload: my.models:build\nmodel: {width: 3, deep: {1: [a]}}\ndata: {dataset: mine}\n",
        "model.deep.rate=3e-4",
        FRAMEWORM_MODEL_HEIGHT="4",
    )
    assert isinstance(config.model, CustomModelConfig)
    assert config.model.model_extra == {"width": 3, "height": 4, "deep": {1: ["a"], "rate": 3e-4}}
    assert load_text(tmp_path, dump_config(config)) == config


def test_mappings_are_read_like_files() -> None:
    values = {"training": {"lr": 1, "betas": (0.5, 0.6)}, "data": {"root": Path("a/b")}, "gpu": GPUConfig(tf32=False)}
    config = load_config_from_mapping(values, ["training.lr=2", "gpu.benchmark=off"], {})
    assert (config.training.lr, config.training.betas, config.data.root) == (2.0, (0.5, 0.6), "a/b")
    assert (config.gpu.tf32, config.gpu.benchmark) == (False, False)
    assert values["training"] == {"lr": 1, "betas": (0.5, 0.6)}
    with pytest.raises(ConfigError) as caught:
        load_config_from_mapping({"training": {"epoch": 1}, "model": {"n_heads": 3}}, environ={})
    assert str(caught.value).split("\n") == [
        "model.n_heads: n_heads 3 does not divide d_model 128; nearest n_heads that do: 2 or 4",
        "training.epoch: unknown key; did you mean training.epochs?",
    ]


def test_sections_built_in_python_refuse_in_the_same_words() -> None:
    for build, message in [
        (lambda: GPUConfig(mixed_precison=True), "mixed_precison: unknown key; did you mean mixed_precision?"),
        (lambda: TrainingConfig(lr="x"), "lr: expected a number above 0, got 'x'"),
        (lambda: Config(model={"q": 1}), "model.q: unknown key; nearest is model.max_seq_len"),
        (
            lambda: Config(model=GPTModelConfig()),
            "model: GPTModelConfig does not belong to workload text_classifier, "
            "which takes a TextClassifierModelConfig",
        ),
    ]:
        with pytest.raises(ConfigError) as caught:
            build()  # type: ignore[no-untyped-call]
        assert str(caught.value) == message


def test_older_spellings_of_the_gpu_section() -> None:
    config = GPUConfig(device_ids=(0, 1), mixed_precision=True)  # type: ignore[arg-type]
    assert config.mixed_precision == "auto"
    assert config.device_ids == [0, 1]
    assert GPUConfig(mixed_precision=False).mixed_precision == "off"  # type: ignore[arg-type]


def test_the_cache_folder_is_the_users() -> None:
    assert default_cache_dir({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == "/c/frameworm"
    assert default_cache_dir({"XDG_CACHE_HOME": "relative", "HOME": "/h"}) == "/h/.cache/frameworm"
    assert load_config_from_mapping({}, environ={"HOME": "/h"}).data.cache_dir == "/h/.cache/frameworm"
    assert load_config_from_mapping({"data": {"cache_dir": "x"}}, environ={"HOME": "/h"}).data.cache_dir == "x"


@pytest.mark.parametrize("text", ["a\x85b", "\u2028", "3e-4", "off", " a ", "a\nb\n", "", "a: b", "#", "'\"", "1:30"])
def test_odd_texts_are_dumped_so_that_they_read_back(tmp_path: Path, text: str) -> None:
    config = load_config_from_mapping({"workload": "a:b", "model": {"x": [text], "y": {text: 1}}}, environ={})
    assert load_text(tmp_path, dump_config(config)) == config


def test_what_is_no_plain_value_cannot_be_dumped() -> None:
    config = Config(workload="a:b", model={"x": object()})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"model: <object object .* cannot be written"):
        dump_config(config)


def test_config_needs_no_torch() -> None:
    code = (
        "import sys, frameworm.config.load, frameworm.config.resolve; "
        "print(*(name for name in ('torch', 'numpy', 'rich') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


def test_checkpoint_dir_auto_is_not_a_folder_named_auto() -> None:
    """Other settings take auto: a user who writes it here does not mean a folder of that name."""
    with pytest.raises(ConfigError, match=r"checkpoint\.dir: auto is not offered: leave dir out .* or name a folder"):
        load_config_from_text("checkpoint: {dir: auto}", "here")
    assert load_config_from_text("checkpoint: {dir: ./auto}", "here").checkpoint.dir == "./auto"
