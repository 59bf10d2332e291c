"""What is exported is what was trained, in forms that other libraries load."""

from __future__ import annotations

import copy
import json
import logging
import weakref
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from sharding_cases import Net, Tied
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from frameworm import Trainer
from frameworm.engine.export import export_weights
from frameworm.engine.pretrained import PRETRAINED, shape_of
from frameworm.engine.run import export_run, run
from frameworm.engine.weight_formats import Outgoing, parse_size, write_safetensors
from frameworm.errors import CheckpointError, ConfigError, ModelError, RunFolderError
from frameworm.models.dcp_files import read_dcp
from frameworm.models.weight_files import load_weights, open_weights

DEADLINE_S = 100.0
# torch's own, about what is asked of it here: to read and write without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trainer_of(model: nn.Module, **settings: Any) -> Trainer:
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=None, device="cpu", **settings)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: item.clone() for name, item in model.state_dict().items()}


def assert_same(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, item in expected.items():
        assert torch.equal(found[name], item), name


def test_sizes() -> None:
    assert [parse_size(text) for text in ("5GB", "500 mb", "2GiB", 17)] == [5 * 10**9, 5 * 10**8, 2**31, 17]
    for wrong in ("5 parsecs", "GB", "0", "-1GB"):
        with pytest.raises(ConfigError, match="give a size such as 5GB"):
            parse_size(wrong)


@pytest.mark.parametrize("name", ["folder", "net.safetensors"])
def test_large_weights_become_several_files_that_any_reader_takes(tmp_path: Path, name: str) -> None:
    model = Net(buffers=True)
    trainer = trainer_of(model)
    trainer.export(tmp_path / name, max_shard_size=500)
    folder = tmp_path / "folder" if name == "folder" else tmp_path
    (index,) = folder.glob("*.safetensors.index.json")
    places = json.loads(index.read_text())["weight_map"]
    files = sorted(set(places.values()))
    assert len(files) > 2
    assert all(f"-of-{len(files):05d}" in file for file in files)
    for file in files:
        tensors = load_file(folder / file)
        assert set(tensors) == {key for key, place in places.items() if place == file}
        assert len(tensors) == 1 or sum(item.nbytes for item in tensors.values()) <= 500
    assert_same({key: item.read() for key, item in open_weights(index).items()}, values(model))
    other = Net(buffers=True)
    load_weights(other, index if name != "folder" else folder)
    assert_same(values(other), values(model))


def test_one_tensor_is_held_at_a_time(tmp_path: Path) -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    about = {f"layer{number}": (torch.Size([100]), torch.float32) for number in range(5)}

    def read(name: str) -> torch.Tensor:
        assert sum(item() is not None for item in held) <= 1, "that before may still have its name"
        tensor = torch.full((100,), float(name[-1]))
        held.append(weakref.ref(tensor))
        return tensor

    write_safetensors(tmp_path / "out", Outgoing(about, read), {}, 1_000)
    assert [len(load_file(path)) for path in sorted((tmp_path / "out").glob("*.safetensors"))] == [2, 2, 1]
    assert torch.equal(open_weights(tmp_path / "out")["layer3"].read(1, 2), torch.full((2,), 3.0))


def test_one_file_under_the_limit_with_another_type(tmp_path: Path) -> None:
    model = Net(buffers=True)
    trainer_of(model).export(tmp_path / "out", dtype="bf16")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    for name, item in load_file(tmp_path / "out" / "model.safetensors").items():
        own = model.state_dict()[name]
        assert torch.equal(item, own.bfloat16() if own.is_floating_point() else own)
    with pytest.raises(RunFolderError, match="exists"):
        trainer_of(model).export(tmp_path / "out")
    with pytest.raises(RunFolderError, match="pickle"):
        trainer_of(model).export(tmp_path / "out.pt")
    with pytest.raises(ModelError, match="no method save_pretrained"):
        trainer_of(model).export(tmp_path / "new", format="pretrained")


def test_a_dcp_folder_goes_out_and_comes_back(tmp_path: Path) -> None:
    model = Net(buffers=True)
    trainer_of(model).export(tmp_path / "dcp", format="dcp")
    theirs = {name: torch.zeros_like(item) for name, item in values(model).items()}
    dcp.load(theirs, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_same(theirs, values(model))
    other = Net(buffers=True)
    load_weights(other, tmp_path / "dcp")
    assert_same(values(other), values(model))
    third = Net(buffers=True)
    trainer_of(third).load(tmp_path / "dcp")
    assert_same(values(third), values(model))


def test_a_dcp_folder_of_another_training(tmp_path: Path) -> None:
    """As torchtitan and others write it: nested, with an optimizer, numbers, and tensors that are no plain rows."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    head = model.state_dict() | {"head.weight": model.head.weight.detach().t().contiguous().t()}
    state = {"model": head, "optimizer": optimizer.state_dict(), "step": 3, "empty": torch.zeros(0, 4)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    other = Net()
    load_weights(other, tmp_path / "dcp")
    assert_same(values(other), values(model))
    assert read_dcp(tmp_path / "dcp")["empty"].read().shape == (0, 4)


class Odd(nn.Module):
    """Tensors of many types, one without dimensions and one without content."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("step", torch.tensor(7))
        self.register_buffer("small", torch.randn(4).to(torch.float8_e4m3fn))
        self.register_buffer("wide", torch.randn(2, dtype=torch.float64))
        self.register_buffer("empty", torch.zeros(0, 3))


@pytest.mark.parametrize("form", ["dcp", "safetensors"])
def test_every_type_goes_out_and_comes_back(tmp_path: Path, form: str) -> None:
    model, other = Odd(), Odd()
    trainer_of(model).export(tmp_path / form, format=form)
    load_weights(other, tmp_path / form)
    found, expected = (
        {name: item.double() if item.dtype == torch.float8_e4m3fn else item for name, item in values(one).items()}
        for one in (other, model)
    )
    assert_same(found, expected)


def test_a_dcp_folder_cannot_run_anything(tmp_path: Path) -> None:
    import os
    import pickle

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(CheckpointError, match="cannot be read as a torch"):
        open_weights(tmp_path / "dcp")
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "real", no_dist=True)
    index = tmp_path / "real" / ".metadata"
    whole = index.read_bytes()
    for change in (whole[:-20], whole.replace(b"__0_0.distcp", b"../../secret"), b"", b"\x80\x04N."):
        index.write_bytes(change)
        with pytest.raises(CheckpointError):
            open_weights(tmp_path / "real")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "module._orig_mod.", "student.body."])
def test_one_prefix_is_taken_off_or_put_before(tmp_path: Path, prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    from safetensors.torch import save_file

    model = Net()
    save_file({prefix + name: item for name, item in values(model).items()}, tmp_path / "w.safetensors")
    other = Net()
    with caplog.at_level("INFO", "frameworm"):
        load_weights(other, tmp_path / "w.safetensors")
    assert_same(values(other), values(model))
    assert f"without their prefix {prefix}" in caplog.text

    around = nn.Module()
    around.inner = Net()
    save_file(values(model), tmp_path / "plain.safetensors")
    load_weights(around, tmp_path / "plain.safetensors")
    assert_same(values(around.inner), values(model))


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state = values(Net())
    state["first.extra"] = state.pop("first.weight")
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks first\.weight, .* and holds first\.extra, which this model"):
        load_weights(Net(), tmp_path / "w.safetensors")
    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks .*, .*, .* and \d+ more, .* and holds x"):
        load_weights(Net(), tmp_path / "x.safetensors")
    (tmp_path / "pickles").mkdir()
    (tmp_path / "pickles" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pickles, such as pytorch_model\.bin, are not loaded"):
        load_weights(Net(), tmp_path / "pickles")
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "../secret.safetensors"}}))
    with pytest.raises(CheckpointError, match="out of its folder"):
        open_weights(index)


def test_a_processing_class_must_write_itself() -> None:
    with pytest.raises(ConfigError, match="no method save_pretrained"):
        trainer_of(Net(), processing_class=object())


def _exported_by_ranks(rank: int, world_size: int, strategy: str, folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Tied()
    data = TensorDataset(torch.randint(0, 11, (8, 5)), torch.randint(0, 11, (8, 5)))
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda output, target: nn.functional.cross_entropy(output.flatten(0, -2), target.flatten()),
        run_dir=None,
        device="cpu",
        strategy=strategy,
    )
    trainer.train(DataLoader(data, batch_size=2), epochs=1)
    trainer.export(folder / "dcp", format="dcp")
    trainer.export(folder / "files", format="safetensors", max_shard_size=300)
    before = {
        name: item.full_tensor() if hasattr(item, "full_tensor") else item.clone()
        for name, item in model.state_dict().items()
    }
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for source in ("dcp", "files"):
        trainer.load(folder / source)
        for name, item in model.state_dict().items():
            whole = item.full_tensor() if hasattr(item, "full_tensor") else item
            assert torch.equal(whole, before[name]), (source, name)
    return {name: item.cpu() for name, item in before.items()}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_two_ranks_write_what_one_reads_and_back(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, strategy: str
) -> None:
    first, second = run_ranks(_exported_by_ranks, args=(strategy, tmp_path), timeout_s=DEADLINE_S)
    assert_same(first, second)
    for source in ("dcp", "files"):
        model = Tied()
        load_weights(model, tmp_path / source)
        assert_same(values(model), first)
    theirs = {name: torch.zeros_like(item) for name, item in first.items()}
    dcp.load(theirs, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_same(theirs, first)


def tiny_gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def tokenizer_of(folder: Path) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    transformers = pytest.importorskip("transformers")
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "worm": 1, "frame": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")


@pytest.mark.slow
def test_transformers_load_what_is_exported(tmp_path: Path) -> None:
    """A model with tied weights, in one file and in several, with its tokenizer, as it is and in half precision."""
    transformers = pytest.importorskip("transformers")
    model = tiny_gpt2().eval()
    assert model.lm_head.weight is model.transformer.wte.weight
    trainer = trainer_of(model, processing_class=tokenizer_of(tmp_path))
    tokens = torch.randint(0, 64, (2, 8))
    expected = model(tokens).logits
    for name, options in (("whole", {}), ("parts", {"max_shard_size": "10KB"}), ("half", {"dtype": "bf16"})):
        trainer.export(tmp_path / name, **options)
        found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert (tmp_path / name / "generation_config.json").exists()
        if name == "half":
            assert found.dtype == torch.bfloat16
            assert torch.equal(found(tokens).logits, copy.deepcopy(model).bfloat16()(tokens).logits)
        else:
            assert torch.equal(found(tokens).logits, expected), name
        assert found.lm_head.weight is found.transformer.wte.weight
        assert transformers.AutoTokenizer.from_pretrained(tmp_path / name)("frame worm")["input_ids"] == [2, 1]
        # What is shared is written once.
        files = list((tmp_path / name).glob("*.safetensors"))
        assert sum(len(load_file(path)) for path in files) == len(dict(model.named_parameters()))
    assert (tmp_path / "parts" / "model.safetensors.index.json").exists()
    again = tiny_gpt2()
    load_weights(again, tmp_path / "parts")
    assert_same(values(again), values(model))


def _pretrained_by_ranks(rank: int, world_size: int, folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = tiny_gpt2()
    tokens = torch.randint(0, 64, (8, 6))
    data = [{"input_ids": item, "labels": item} for item in tokens]
    trainer = Trainer(
        model, torch.optim.AdamW(model.parameters()), run_dir=None, device="cpu", strategy="zero3", ema=0.5
    )
    trainer.train(DataLoader(data, batch_size=2), epochs=1)  # type: ignore[arg-type]
    trainer.export(folder / "trained", weights="trained")
    trainer.export(folder / "averaged")
    return {name: item.full_tensor() for name, item in model.state_dict().items()}


@pytest.mark.slow
def test_a_divided_model_is_exported_whole(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    trained, _ = run_ranks(_pretrained_by_ranks, args=(tmp_path,), timeout_s=DEADLINE_S)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert type(found).__name__ == "GPT2LMHeadModel"
    assert_same(values(found), trained)
    averaged = values(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "averaged"))
    assert not torch.equal(averaged["lm_head.weight"], trained["lm_head.weight"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft's, of transformers
def test_an_adapter_is_exported_as_one(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = tiny_gpt2()
    untouched = copy.deepcopy(base)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    for name, parameter in model.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter)
    trainer_of(model).export(tmp_path / "adapter")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        path.name for path in (tmp_path / "adapter").iterdir()
    }
    found = peft.PeftModel.from_pretrained(untouched, tmp_path / "adapter").eval()
    tokens = torch.randint(0, 64, (2, 8))
    assert torch.equal(found(tokens).logits, model.eval()(tokens).logits)


class Saver(nn.Module):
    """Writes itself as libraries do: some weights, under names of its own, with a config; it takes no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 4)
        self.head = nn.Linear(4, 3)
        self.again = self.head

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.again(self.base(inputs))

    def save_pretrained(self, folder: Path, **more: Any) -> None:
        """As `load_pretrained` below reads it."""
        (folder / "head").mkdir(parents=True)
        save_file({f"my.{name}": item for name, item in self.base.state_dict().items()}, folder / "my.safetensors")
        save_file(dict(self.head.state_dict()), folder / "head" / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"dtype": "float32", "width": 4}))


class Halver(Saver):
    """What it writes is not what it holds."""

    def save_pretrained(self, folder: Path, **more: Any) -> None:
        save_file({"half": self.state_dict()["base.weight"] / 2}, folder / "model.safetensors")


class Words:
    def save_pretrained(self, folder: Path) -> None:
        """As tokenizers do."""
        (folder / "words.txt").write_text("worm")


def trained_saver(model: nn.Module, run: Path, **settings: Any) -> Trainer:
    data = DataLoader(TensorDataset(torch.randn(8, 6), torch.randint(0, 3, (8,))), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, run_dir=run, device="cpu", processing_class=Words(), **settings)
    trainer.train(data)
    return trainer


def load_pretrained(folder: Path) -> dict[str, torch.Tensor]:
    base = {f"base.{name.removeprefix('my.')}": item for name, item in load_file(folder / "my.safetensors").items()}
    head = load_file(folder / "head" / "model.safetensors")
    names = {f"{part}.{name}": item for part in ("head", "again") for name, item in head.items()}
    return {**base, **names}


def test_a_run_is_exported_alone_as_its_model_writes_itself(tmp_path: Path) -> None:
    model = Saver()
    trainer = trained_saver(model, tmp_path / "run")
    assert not any("state_dict" in vars(part) for part in model.modules())
    done = export_run(tmp_path / "run", tmp_path / "out")
    model.save_pretrained(tmp_path / "own")
    for name in ("my.safetensors", "head/model.safetensors"):
        assert_same(load_file(tmp_path / "out" / name), load_file(tmp_path / "own" / name))
    assert_same(load_pretrained(tmp_path / "out"), values(model))
    assert (done.tensors, done.parameters) == (4, 6 * 4 + 4 + 4 * 3 + 3)
    assert (tmp_path / "out" / "words.txt").read_text() == "worm"
    export_run(tmp_path / "run", tmp_path / "half", dtype="bf16")
    trainer.export(tmp_path / "half-python", dtype="bf16")
    for folder in (tmp_path / "half", tmp_path / "half-python"):
        found = load_pretrained(folder)
        assert_same(found, {name: item.bfloat16() for name, item in values(model).items()})
        assert json.loads((folder / "config.json").read_text()) == {"dtype": "bfloat16", "width": 4}


def test_averages_are_exported_by_a_model_that_takes_no_weights(tmp_path: Path) -> None:
    model = Saver()
    trainer = trained_saver(model, tmp_path / "run", ema=0.5)
    trainer.export(tmp_path / "python")
    export_run(tmp_path / "run", tmp_path / "alone")
    with trainer.averaged_weights():
        averaged = values(model)
    assert not torch.equal(averaged["base.weight"], model.base.weight)
    for folder in (tmp_path / "python", tmp_path / "alone"):
        assert_same(load_pretrained(folder), averaged)


def test_a_compiled_model_keeps_what_it_writes(tmp_path: Path) -> None:
    model = Saver()
    wrapped = torch.compile(model, backend="eager")
    shape, plain = shape_of(wrapped), shape_of(model)  # type: ignore[arg-type]
    assert shape is not None
    assert plain is not None
    assert shape.weights["my.safetensors"] == {
        "my.weight": "_orig_mod.base.weight",
        "my.bias": "_orig_mod.base.bias",
    }
    assert plain.weights["my.safetensors"]["my.weight"] == "base.weight"


class Changer(Saver):
    """Does something to a weight on the way."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.square = nn.Linear(4, 4)
        self.change = change

    def save_pretrained(self, folder: Path, **more: Any) -> None:
        """Another value, in the same type."""
        save_file({"w": self.change(self.state_dict()["square.weight"]).contiguous()}, folder / "model.safetensors")


@pytest.mark.parametrize("change", [torch.t, lambda item: item[:3], lambda item: item[:, :1], lambda item: item + 1])
def test_weights_that_are_turned_cut_or_computed_with_are_not_kept(change: Any) -> None:
    assert shape_of(Changer(lambda item: item)) is not None
    assert shape_of(Changer(change)) is None


def test_numbers_are_not_kept_as_weights_of_another_form() -> None:
    class Pickler(Saver):
        def save_pretrained(self, folder: Path, **more: Any) -> None:
            super().save_pretrained(folder)
            torch.save(self.state_dict(), folder / "pytorch_model.bin")

    assert shape_of(Pickler()) is None


class Taker(Saver):
    """As models of transformers: it writes the weights that it is given."""

    def save_pretrained(self, folder: Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """All of them."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = self.state_dict() if state_dict is None else state_dict
        save_file({name: item.clone() for name, item in weights.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_a_compiled_model_is_exported_under_its_own_names(tmp_path: Path, dtype: str | None) -> None:
    model = Taker()
    trainer_of(torch.compile(model, backend="eager")).export(tmp_path / "out", dtype=dtype)  # type: ignore[arg-type]
    kind = torch.float32 if dtype is None else torch.bfloat16
    expected = {name: item.to(kind) for name, item in values(model).items()}
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), expected)


def test_a_url_is_no_path_to_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trained_saver(Net(), tmp_path / "run")
    for write in (
        lambda out: export_run(tmp_path / "run", out),
        lambda out: trainer_of(Net()).export(out),
        lambda out: trainer_of(Net()).save(out),
    ):
        with pytest.raises(RunFolderError, match="s3://bucket/out is a URL"):
            write("s3://bucket/out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_damaged_shape_is_named(tmp_path: Path) -> None:
    trained_saver(Saver(), tmp_path / "run")
    kept = tmp_path / "run" / PRETRAINED
    whole = kept.read_bytes()
    with zipfile.ZipFile(kept) as archive:
        begin = archive.infolist()[0].header_offset + 30 + len("weights.json")
    for place, change in ((begin, b"\xff\xff"), (whole.index(b"PK\1\2") + 8, b"\1")):  # garbled; encrypted
        kept.write_bytes(whole[:place] + change + whole[place + len(change) :])
        with pytest.raises(RunFolderError, match="cannot be read"):
            export_run(tmp_path / "run", tmp_path / "out")


def test_what_does_more_than_to_name_weights_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Halver()
    caplog.set_level(logging.INFO)
    trainer = trained_saver(model, tmp_path / "run")
    assert not (tmp_path / "run" / PRETRAINED).exists()
    assert any("Halver.save_pretrained does more" in record.getMessage() for record in caplog.records)
    with pytest.raises(ModelError, match="takes no state_dict"):
        trainer.export(tmp_path / "half", dtype="bf16")
    export_run(tmp_path / "run", tmp_path / "plain")
    assert_same(load_file(tmp_path / "plain" / "model.safetensors"), values(model))


@pytest.mark.parametrize("place", ["../out.txt", "/tmp/out.txt", "files"])
def test_a_kept_shape_leads_nowhere_else(tmp_path: Path, place: str) -> None:
    trained_saver(Saver(), tmp_path / "run")
    with zipfile.ZipFile(tmp_path / "run" / PRETRAINED, "w") as archive:
        archive.writestr("weights.json", '["no weights"]' if place == "files" else "{}")
        archive.writestr(f"files/{place}", "text")
    with pytest.raises(RunFolderError, match="cannot be read"):
        export_run(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    trained_saver(Saver(), tmp_path / "run")
    trained_saver(Net(), tmp_path / "other")
    (tmp_path / "run" / PRETRAINED).rename(tmp_path / "other" / PRETRAINED)
    with pytest.raises(ModelError, match=r"the weights have no base\.bias"):
        export_run(tmp_path / "other", tmp_path / "out")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft's, of transformers
def test_a_run_of_the_trainer_is_exported_alone_for_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    untouched = tiny_gpt2()
    model = copy.deepcopy(untouched)
    adapted = peft.get_peft_model(
        copy.deepcopy(untouched), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    )
    tokens = torch.randint(0, 64, (2, 8))
    data = [{"input_ids": tokens, "labels": tokens}] * 3
    for name, trained in (("model", model), ("adapter", adapted)):
        optimizer = torch.optim.AdamW((item for item in trained.parameters() if item.requires_grad), lr=1e-2)
        Trainer(
            trained, optimizer, run_dir=tmp_path / name, device="cpu", processing_class=tokenizer_of(tmp_path)
        ).train(data)
        export_run(tmp_path / name, tmp_path / f"{name}-out", max_shard_size="10KB")
        trained.eval()
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model-out")
    assert torch.equal(found(tokens).logits, model(tokens).logits)
    assert found.lm_head.weight is found.transformer.wte.weight
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "model-out")("frame worm")["input_ids"] == [2, 1]
    whole = peft.PeftModel.from_pretrained(untouched, tmp_path / "adapter-out").eval()
    assert torch.equal(whole(tokens).logits, adapted(tokens).logits)


WORKLOAD = """
import torch, transformers
from frameworm.models.workloads import Workload


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        tokens = (torch.arange(8) + index) % 64
        return {"input_ids": tokens, "labels": tokens}


def build(config):
    settings = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, n_positions=32)
    return Workload(transformers.GPT2LMHeadModel(settings), Samples())
"""


@pytest.mark.slow
def test_a_run_is_exported_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    from frameworm.config.load import load_config_from_mapping

    (tmp_path / "exported_workload.py").write_text(WORKLOAD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    named = "workload=exported_workload:build"
    settings = [named, "training.max_steps=3", "training.global_batch=4", "training.ema=0.5", "gpu.device=cpu"]
    run(load_config_from_mapping({}, [*settings, "checkpoint.every_steps=3"], environ={}), out=tmp_path / "run")
    for weights in ("trained", "ema"):
        export_run(tmp_path / "run", tmp_path / weights, [named], weights=weights, max_shard_size="5KB")
        found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / weights)
        export_weights(tmp_path / "run", tmp_path / f"{weights}.safetensors", weights=weights)
        stored = load_file(tmp_path / f"{weights}.safetensors")
        assert_same({name: stored[name] for name in found.state_dict()}, found.state_dict())
        alone = tmp_path / f"{weights}-alone"  # what the run keeps is enough, and the same to the byte
        export_run(tmp_path / "run", alone, weights=weights)
        again = transformers.AutoModelForCausalLM.from_pretrained(alone)
        assert_same(values(again), values(found))
        assert (alone / "config.json").read_bytes() == (tmp_path / weights / "config.json").read_bytes()
    (tmp_path / "run" / PRETRAINED).unlink()
    with pytest.raises(ConfigError, match="names code to run"):
        export_run(tmp_path / "run", tmp_path / "refused", form="pretrained")
    plain = export_run(tmp_path / "run", tmp_path / "plain", max_shard_size="5KB")
    assert plain.tensors == len(stored)
    assert (tmp_path / "plain" / "model.safetensors.index.json").exists()
    export_run(tmp_path / "run", tmp_path / "dcp", form="dcp", weights="ema")
    assert_same({name: item.read() for name, item in read_dcp(tmp_path / "dcp").items()}, stored)
