"""Places in object storage: whole objects, harmless names, faults in words; and runs copied from there to be read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from frameworm.errors import MissingPackageError, RunFolderError, StorageError
from frameworm.records.objects.place import Place, check_url, is_url, safe_name
from frameworm.records.objects.runs import local_root, local_run, shown, source_of, whole_checkpoints
from frameworm.records.store import RunFolder, find_runs

SUMMARY = '{"name": "r", "status": "completed", "environment": {}, "batch": {"micro": 1, "accumulation": 1, '
SUMMARY += '"world_size": 1, "global": 1}, "schema_version": 1}'


@pytest.fixture(autouse=True)
def own_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of runs go to a folder of this test's."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))


@pytest.fixture(params=["file", "memory", pytest.param("s3", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return str(request.getfixturevalue("s3"))
    return f"{request.param}://{tmp_path}/far/runs/x"


def test_objects_come_back_as_they_were_put(url: str, tmp_path: Path) -> None:
    place = Place(url)
    assert place.find() == {}
    place.write("a.json", b"one")
    (tmp_path / "big").write_bytes(bytes(range(256)) * 999)
    place.put(tmp_path / "big", "checkpoints/step-00000002/rank-00000.safetensors")
    assert place.read("a.json", 10) == b"one"
    before = place.find()["a.json"]
    place.write("a.json", b"two!")
    assert place.find()["a.json"].stamp != before.stamp
    assert {name: facts.size_bytes for name, facts in place.find().items()} == {
        "a.json": 4,
        "checkpoints/step-00000002/rank-00000.safetensors": 256 * 999,
    }
    assert list(place.find("checkpoints")) == ["checkpoints/step-00000002/rank-00000.safetensors"]
    place.get("checkpoints/step-00000002/rank-00000.safetensors", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == (tmp_path / "big").read_bytes()
    place.remove("a.json")
    place.remove("a.json")
    with pytest.raises(StorageError, match=r"a\.json") as caught:
        place.read("a.json", 10)
    assert caught.value.missing
    assert not caught.value.unreachable


def test_an_object_that_is_too_large_is_not_read(url: str) -> None:
    Place(url).write("config.yaml", b"x" * 100)
    with pytest.raises(StorageError, match="larger than"):
        Place(url).read("config.yaml", 99)


@pytest.mark.parametrize(
    "name",
    ["../x", "a/../b", "/etc/passwd", "a//b", "", ".hidden", "a/.b", "a\nb", "a\0b", "-x", "~x", "a/" + "b" * 300],
)
def test_hostile_names_are_not_names(name: str) -> None:
    assert not safe_name(name)


def test_objects_with_hostile_names_are_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place("memory://hostile/run")
    place.write("config.yaml", b"name: r\n")
    root = "/hostile/run"
    listing = {
        f"{root}/{name}": {"name": f"{root}/{name}", "size": 3, "type": "file"}
        for name in (
            "../../escape",
            "..",
            "a/../../b",
            "checkpoints/step-00000001/../../../x",
            ".bashrc",
            "config.yaml",
        )
    }
    listing["/elsewhere/x"] = {"name": "/elsewhere/x", "size": 3, "type": "file"}
    monkeypatch.setattr(type(place._system), "find", lambda *args, **more: listing)
    assert list(place.find()) == ["config.yaml"]
    folder = local_run("memory://hostile/run")
    assert sorted(path.name for path in folder.iterdir()) == [".seen.json", ".storage.json", "config.yaml"]


def test_what_is_a_url() -> None:
    assert is_url("s3://bucket/x")
    assert is_url("memory://x")
    assert not is_url("runs/x")
    assert not is_url(Path("s3://bucket/x"))
    assert not is_url("C:/x")
    assert not is_url(None)
    assert check_url("s3://bucket/x//") == "s3://bucket/x"


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(StorageError, match="leave secrets") as caught:
        Place("s3://key:hunter2@bucket/x")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", ["s3://", "s3://bucket/..", "s3://bucket/runs/./"])
def test_a_url_without_a_name_is_refused(url: str) -> None:
    with pytest.raises(StorageError, match="names no folder"):
        Place(url)


def test_what_is_no_url_is_refused_in_words() -> None:
    with pytest.raises(StorageError, match="is not a URL"):
        Place("s3://[bucket/x")


def test_a_missing_package_names_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'frameworm\[s3\]'"):
        Place("s3://bucket/x")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'frameworm\[s3\]'"):
        Place("s3://bucket/x")


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(StorageError, match="Protocol not known: zz"):
        Place("zz://bucket/x")


def test_a_write_that_fails_leaves_the_old_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(f"file://{tmp_path}/far")
    place.write("a.json", b"old")
    monkeypatch.setattr(type(place._system), "mv", lambda *args: (_ for _ in ()).throw(OSError(28, "no space")))
    with pytest.raises(StorageError, match="no space"):
        place.write("a.json", b"new")
    assert [path.name for path in (tmp_path / "far").iterdir()] == ["a.json"]
    assert (tmp_path / "far" / "a.json").read_bytes() == b"old"


def test_a_call_that_does_not_return_is_not_waited_for(tmp_path: Path) -> None:
    import threading

    place, never = Place(f"file://{tmp_path}/far"), threading.Event()
    with pytest.raises(StorageError, match="not answered") as caught:
        place.within(0.05, never.wait)
    never.set()
    assert caught.value.unreachable
    with pytest.raises(ZeroDivisionError):
        place.within(60, lambda: 1 // 0)
    assert place.within(60, lambda: 3) == 3


def make_run(url: str, status: str = "completed") -> Place:
    place = Place(url)
    place.write("config.yaml", b"name: r\n")
    place.write("summary.json", SUMMARY.replace("completed", status).encode())
    place.write("checkpoints/step-00000010/rank-00000.safetensors", b"data")
    return place


def test_a_run_is_copied_to_be_read_and_only_what_changed_is_copied_again(url: str) -> None:
    place = make_run(url)
    folder = RunFolder.open(local_run(url))
    assert folder.read_summary().status == "completed"
    assert not folder.checkpoints.exists()  # only when a verb asks for one
    assert shown(folder) == url
    assert source_of(folder.path) == url
    config = folder.config.stat()
    place.write("summary.json", SUMMARY.replace("completed", "preempted").encode())
    assert RunFolder.open(local_run(url)).read_summary().status == "preempted"
    assert folder.config.stat().st_ino == config.st_ino


def test_runs_under_a_url_are_listed(url: str) -> None:
    make_run(f"{url}/a")
    make_run(f"{url}/b", "preempted")
    Place(url).write("c/notes.txt", b"no run")
    found = {shown(folder): folder.status() for folder in find_runs(local_root(url, few=True))}
    assert found == {f"{url}/a": "completed", f"{url}/b": "preempted"}
    for name in list(Place(f"{url}/a").find()):
        Place(f"{url}/a").remove(name)
    assert [shown(folder) for folder in find_runs(local_root(url))] == [f"{url}/b"]


@pytest.mark.parametrize("name", ["_debug-20260101-120000", "lr=1e-3, batch 8", "größe", "run (2)"])
def test_runs_are_listed_whatever_users_call_them(tmp_path: Path, name: str) -> None:
    url = f"file://{tmp_path}/far"
    make_run(f"{url}/{name}")
    assert [shown(folder) for folder in find_runs(local_root(url, few=True))] == [f"{url}/{name}"]


@pytest.mark.parametrize("few", [False, True])
def test_nothing_is_left_of_a_run_that_was_at_a_url_before(url: str, few: bool) -> None:
    place = make_run(f"{url}/a")
    place.write("notes.txt", b"old")

    def copied() -> RunFolder:
        return find_runs(local_root(url, few=few))[0] if few else RunFolder.open(local_run(f"{url}/a"))

    local_root(url)
    assert copied().status() == "completed"
    for name in list(place.find()):
        place.remove(name)
    place.write("config.yaml", b"name: another\n")
    assert copied().status() is None
    assert not (copied().path / "notes.txt").exists()


def test_a_url_without_a_run_is_refused(url: str) -> None:
    with pytest.raises(StorageError, match="holds no run"):
        local_run(url)
    assert find_runs(local_root(url)) == []


def test_a_path_stays_a_path(tmp_path: Path) -> None:
    assert local_run(tmp_path) == tmp_path
    assert local_root(str(tmp_path)) == tmp_path
    assert shown(RunFolder(tmp_path)) == str(tmp_path)


def test_a_checkpoint_counts_by_its_manifest(url: str) -> None:
    place = Place(url)
    for name in ("step-00000002", "step-00000010", "step-00000010.1", "step-x"):
        place.write(f"checkpoints/{name}/rank-00000.safetensors", b"data")
    for name in ("step-00000010.1", "step-00000002", "step-x", "step-00000012/.."):
        if name != "step-00000012/..":
            place.write(f"checkpoints/{name}/manifest.json", b"{}")
    assert whole_checkpoints(place) == ["step-00000002", "step-00000010.1"]


def test_copies_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(f"file://{tmp_path}/far/x")
    folder = local_run(f"file://{tmp_path}/far/x")
    private = folder.parents[2]
    assert private.stat().st_mode & 0o077 == 0
    private.chmod(0o777)
    with pytest.raises(RunFolderError, match="no place for a copy"):
        local_run(f"file://{tmp_path}/far/x")


@pytest.mark.slow
def test_an_unreachable_server_is_told_from_a_refusing_one(s3: str, object_storage: Any, monkeypatch: Any) -> None:
    with pytest.raises(StorageError, match="bucket does not exist") as refused:
        Place("s3://no-such-bucket/x").write("a", b"")
    assert not refused.value.unreachable
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(StorageError, match=r"credentials.*AWS_PROFILE") as refused:
        Place(s3).write("a", b"")
    assert not refused.value.unreachable
    for name, value in object_storage.variables(object_storage.module.free_port()).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StorageError, match="cannot be reached") as gone:
        Place(s3).write("a", b"")
    assert gone.value.unreachable
