"""From a config to a model with its data, and what is said when that cannot be."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from frameworm.config.schema import Config, GPTModelConfig
from frameworm.errors import CheckpointError, ConfigError, DataError
from frameworm.models.gpt import GPT
from frameworm.models.text_classifier import TextClassifier
from frameworm.models.weight_files import load_weights
from frameworm.models.workloads import Workload, build_workload

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY: dict[str, Any] = {"d_model": 8, "n_heads": 2, "num_layers": 1, "max_seq_len": 16}


def config(data_cache_dir: Path, **settings: Any) -> Config:
    data = {"cache_dir": str(data_cache_dir), **settings.pop("data", {})}
    return Config.model_validate({"model": TINY, "data": data, **settings})


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the user's own, as the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path / "own_workload.py"
    for name in [name for name in sys.modules if name.startswith("own_workload")]:
        del sys.modules[name]


def own(name: str = "build", **model: Any) -> Config:
    return Config.model_validate({"workload": f"own_workload:{name}", "model": model})


def test_text_classifier_takes_its_sizes_from_the_data(data_cache_dir: Path) -> None:
    workload = build_workload(config(data_cache_dir))
    assert isinstance(workload.model, TextClassifier)
    assert workload.model.head.out_features == 4
    assert workload.loss_fn is None
    batch = workload.train_data.__getitems__([0, 1, 2])
    logits = workload.model(batch["input_ids"], batch["lengths"])
    assert logits.shape == (3, 4)
    assert len(workload.val_data) == 1_000
    assert int(batch["input_ids"].max()) < workload.model.token_embedding.num_embeddings


def test_gpt_over_text(tmp_path: Path, data_cache_dir: Path) -> None:
    (tmp_path / "a.txt").write_text("some words " * 50)
    settings = config(data_cache_dir, workload="gpt", data={"dataset": "text", "root": str(tmp_path)})
    workload = build_workload(settings)
    assert isinstance(workload.model, GPT)
    assert workload.model.token_embedding.num_embeddings == 320  # 257 bytes, up to a multiple of 64
    assert workload.model(**workload.train_data.__getitems__([0, 1])).shape == ()
    settings.model = GPTModelConfig(**TINY, vocab_size=300)
    padded = build_workload(settings).model
    assert isinstance(padded, GPT)
    assert padded.token_embedding.num_embeddings == 300


@pytest.mark.slow
def test_weights_depend_on_the_seed_alone(data_cache_dir: Path) -> None:
    def weights(seed: int) -> torch.Tensor:
        model = build_workload(config(data_cache_dir, seed=seed, data={"dataset": "generated"})).model
        assert isinstance(model, TextClassifier)
        return model.head.weight

    first = weights(0)
    torch.rand(3)
    state = torch.get_rng_state()
    assert torch.equal(weights(0), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(weights(1), first)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"vocab_size": 10}, r"model\.vocab_size: 10 is less than the \d+ tokens of the tokenizer"),
        ({"num_classes": 2}, r"model\.num_classes: 2 is less than the 4 classes of the data set"),
    ],
)
def test_sizes_below_what_the_data_needs(data_cache_dir: Path, sizes: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_workload(config(data_cache_dir, model={**TINY, **sizes}))


def test_data_errors_pass_through(data_cache_dir: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        build_workload(config(data_cache_dir, data={"dataset": "ag_news", "root": "gone"}))


def test_own_function_with_a_workload(module: Path) -> None:
    module.write_text(
        "from torch import nn\nfrom frameworm.models.workloads import Workload\n"
        "def build(config):\n"
        "    return Workload(nn.Linear(config.model.width, 1), [1, 2], collate_fn=list)\n"
    )
    workload = build_workload(own(width=3))
    assert isinstance(workload.model, nn.Linear)
    assert workload.model.in_features == 3
    assert workload.collate_fn is list
    assert torch.equal(build_workload(own(width=3)).model.weight, workload.model.weight)


@pytest.mark.parametrize("extra", ["", ", len"])
def test_own_function_with_a_tuple(module: Path, extra: str) -> None:
    module.write_text(f"from torch import nn\ndef build(config):\n    return nn.Linear(2, 1), [1], [2]{extra}\n")
    workload = build_workload(own())
    assert workload == Workload(workload.model, [1], [2], len if extra else None)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("build = 3", "own_workload:build is a int, not a function"),
        ("def buld(config): ...", r"own_workload \(.*own_workload\.py\) has no function build; did you mean buld"),
        ("def build(config): ...", "returned NoneType; expected a Workload.* or a tuple"),
        ("def build(config): return (1, 2)", "returned a tuple of 2; expected"),
        ("def build(config): return (1, [2], None)", "returned a int as the model; expected"),
        (
            "import torch\ndef build(config): return torch.nn.Linear(1, 1), 5, None",
            "returned a int as train_data, which is neither a data set nor a loader",
        ),
    ],
)
def test_own_function_that_does_not_fit(module: Path, body: str, says: str) -> None:
    module.write_text(body)
    with pytest.raises(ConfigError, match=says):
        build_workload(own())


def test_own_module_not_found(module: Path) -> None:
    with pytest.raises(ConfigError, match=rf"there is no module own_workload for .*looked for in {module.parent}"):
        build_workload(own())
    module.write_text("")
    with pytest.raises(ConfigError, match=r"there is no module own_workload\.inner"):
        build_workload(Config(workload="own_workload.inner:build"))


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("import a_package_that_is_not_there", ModuleNotFoundError),
        ("def build(config):\n    raise KeyError('mine')", KeyError),
        ("def build(config):\n    import a_package_that_is_not_there", ModuleNotFoundError),
        ("1 / 0", ZeroDivisionError),
    ],
)
def test_own_errors_are_not_touched(module: Path, body: str, error: type[Exception]) -> None:
    module.write_text(body)
    with pytest.raises(error):
        build_workload(own())


@pytest.fixture
def saved(data_cache_dir: Path, tmp_path: Path) -> Path:
    model = build_workload(config(data_cache_dir, seed=5, data={"dataset": "generated"})).model
    path = tmp_path / "weights.safetensors"
    save_file({name: weight.clone() for name, weight in model.state_dict().items()}, path)
    return path


@pytest.mark.slow
def test_init_from(data_cache_dir: Path, saved: Path) -> None:
    settings = config(data_cache_dir, seed=5, model={**TINY, "init_from": str(saved)})
    with torch.no_grad():
        weights = {name: weight + 1 for name, weight in load_file(saved).items()}
    save_file(weights, saved)
    for name, weight in build_workload(settings).model.state_dict().items():
        assert torch.equal(weight, weights[name])


def test_init_from_another_model(data_cache_dir: Path, saved: Path) -> None:
    def fails(change: dict[str, torch.Tensor | None], says: str) -> None:
        weights = {**load_file(saved), **change}
        other = saved.with_name("other.safetensors")
        save_file({name: weight for name, weight in weights.items() if weight is not None}, other)
        with pytest.raises(CheckpointError, match=says):
            build_workload(config(data_cache_dir, seed=5, model={**TINY, "init_from": str(other)}))

    fails({"head.bias": None}, r"other\.safetensors lacks head\.bias")
    fails({"extra": torch.zeros(1)}, r"holds extra, which this model does not have")
    fails({"head.bias": torch.zeros(7)}, r"head\.bias has the shape \[7\] in .* and \[4\] in this model")


@pytest.mark.parametrize(("rows", "fits"), [(257, True), (300, True), (320, True), (256, False), (321, False)])
def test_init_from_with_another_padding(tmp_path: Path, data_cache_dir: Path, rows: int, fits: bool) -> None:
    """Rows beyond the tokenizer's 257 are filling: weights with more or fewer of them are the same model's."""
    (tmp_path / "a.txt").write_text("some words " * 50)
    weights = GPT(rows, **TINY).state_dict()
    save_file({name: weight.clone() for name, weight in weights.items()}, tmp_path / "weights.safetensors")
    settings = config(
        data_cache_dir,
        workload="gpt",
        model={**TINY, "init_from": str(tmp_path / "weights.safetensors")},
        data={"dataset": "text", "root": str(tmp_path / "a.txt")},
    )
    if not fits:
        with pytest.raises(CheckpointError, match=rf"token_embedding.weight has the shape \[{rows}, 8\]"):
            build_workload(settings)
        return
    own = build_workload(settings).model.state_dict()
    assert own["token_embedding.weight"].shape == (320, 8)
    assert torch.equal(own["token_embedding.weight"][:rows], weights["token_embedding.weight"])
    assert torch.equal(own["norm.weight"], weights["norm.weight"])


def test_packed_needs_a_model_that_takes_it(module: Path, data_cache_dir: Path) -> None:
    body = "from torch import nn\nclass Own(nn.Linear):\n    pass\ndef build(config):\n    return Own(2, 1), [1], [2]\n"
    module.write_text(body)
    settings = own()
    settings.data.batching = "packed"
    with pytest.raises(
        ConfigError, match=r"data\.batching: Own does not take packed .*bucketed.*accepts_packed = True"
    ):
        build_workload(settings)
    module.write_text(body.replace("pass", "accepts_packed = True"))
    del sys.modules["own_workload"]
    assert build_workload(settings).train_data == [1]
    settings = config(data_cache_dir, workload="gpt", data={"dataset": "text", "root": "gone", "batching": "packed"})
    with pytest.raises(ConfigError, match="GPT does not take packed batches"):
        build_workload(settings)


def test_init_from_no_such_file(data_cache_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.init_from: .*gone does not exist"):
        build_workload(config(data_cache_dir, model={**TINY, "init_from": str(tmp_path / "gone")}))
    (tmp_path / "text").write_text("no weights here")
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        load_weights(nn.Linear(1, 1), tmp_path / "text")


def test_shared_weights_need_one_name(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(3, 2)
            self.head = nn.Linear(2, 3, bias=False)
            self.head.weight = self.embedding.weight

    path = tmp_path / "tied.safetensors"
    save_file({"embedding.weight": torch.ones(3, 2)}, path)
    model = Tied()
    load_weights(model, path)
    assert model.head.weight is model.embedding.weight
    assert (model.head.weight == 1).all()


def test_example_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    settings = Config.model_validate({"workload": "examples.cnn_workload:build", "model": {"width": 8}})
    workload = build_workload(settings)
    images, labels = workload.train_data.tensors
    optimizer = torch.optim.AdamW(workload.model.parameters(), lr=5e-3)
    torch.manual_seed(0)
    for rows in torch.randperm(len(images)).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(workload.model(images[rows]), labels[rows]).backward()
        optimizer.step()
    images, labels = workload.val_data.tensors
    assert float((workload.model(images).argmax(1) == labels).float().mean()) > 0.6
