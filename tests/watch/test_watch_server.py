"""The page's data over HTTP, and who gets it."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
from made_runs import append_steps, parsed, write_run
from starlette.testclient import TestClient
from test_report_browser import contrast

from frameworm.errors import EnvironmentSetupError
from frameworm.watch import catalogue, run, server, sharing
from frameworm.watch.catalogue import Catalogue, Row
from frameworm.watch.exposition import exposition
from frameworm.watch.security import host_names, is_loopback
from frameworm.watch.server import Service, WatchServer, make_app

TOKEN = "a-token-of-some-length"
EVIL = '<script>alert(1)</script>"><img src=x onerror=alert(1)>\u001b[31m'
PATHS = (
    "/",
    "/static/app.js",
    "/static/none.js",
    "/api/runs",
    "/api/runs/none",
    "/api/runs/none/series",
    "/api/stream",
    "/metrics",
    "/nothing",
    "/static/../server.py",
)


@pytest.fixture(autouse=True)
def _always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "SCAN_S", 0.0)
    monkeypatch.setattr(run, "SHORTEST_REFRESH_S", 0.0)
    monkeypatch.setattr(run, "REFRESH_S", 60.0)  # whole, though others may have the cores
    monkeypatch.setattr(run, "SHORTEST_BUSY_S", 0.0)


def client(root: Path, *, known: bool = True, host: str = "127.0.0.1:7007") -> TestClient:
    headers = {"Authorization": f"Bearer {TOKEN}"} if known else {}
    app = make_app(Catalogue(root), TOKEN, "127.0.0.1", 7007)
    return TestClient(app, base_url=f"http://{host}", headers=headers)


def first_id(page: TestClient) -> str:
    found: str = page.get("/api/runs").json()["runs"][0]["id"]
    return found


@pytest.mark.parametrize("path", PATHS)
def test_without_the_token_everything_is_the_same_403(tmp_path: Path, path: str) -> None:
    write_run(tmp_path, "secret-name", steps=10)
    page = client(tmp_path, known=False)
    refused = page.get("/")
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Cookie": "frameworm_watch_7007=wrong"},
        {"Cookie": "a=\xff"},
    ):
        for asked in (
            path,
            f"{path}?token=",
            f"{path}?token={TOKEN[:-1]}",
            f"{path}?token={TOKEN}x",
            f"{path}?token=%00",
        ):
            answer = page.get(asked, headers={name: value.encode("latin-1") for name, value in headers.items()})
            assert (answer.status_code, answer.content) == (403, refused.content)
            assert "set-cookie" not in answer.headers
            assert "secret" not in answer.text


def test_the_token_opens_the_page_and_becomes_a_cookie(tmp_path: Path) -> None:
    page = client(tmp_path, known=False)
    answer = page.get(f"/?token={TOKEN}")
    assert answer.status_code == 200
    assert "<title>frameworm watch</title>" in answer.text
    name, _, rest = answer.headers["set-cookie"].partition("=")
    assert name == "frameworm_watch_7007"
    assert rest.split("; ") == [TOKEN, "Path=/", "HttpOnly", "SameSite=Strict"]
    assert page.get("/api/runs").status_code == 200, "by the cookie"
    assert "set-cookie" not in page.get("/api/runs").headers


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:7007", 200),
        ("localhost:1234", 200),
        ("LOCALHOST", 200),
        ("[::1]:7007", 200),
        ("10.0.0.5:7007", 200),
        ("evil.example:7007", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example:7007", 403),
        ("", 403),
        ("0x7f000001", 403),
    ],
)
def test_names_that_others_own_are_refused(tmp_path: Path, host: str, status: int) -> None:
    assert client(tmp_path).get("/api/runs", headers={"Host": host}).status_code == status


def test_names_of_this_machine_belong_to_a_server_that_others_can_reach() -> None:
    import socket

    assert socket.gethostname().lower() in host_names("0.0.0.0")
    assert host_names("127.0.0.1") == {"localhost", "127.0.0.1"}
    assert is_loopback("127.1.2.3")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("example.org")


@pytest.mark.parametrize("path", PATHS[:6])
def test_every_answer_is_guarded_by_its_headers(tmp_path: Path, path: str) -> None:
    for known in (True, False):
        headers = client(tmp_path, known=known).get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'self';")
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert headers["x-frame-options"] == "DENY"
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(tmp_path: Path, method: str) -> None:
    assert client(tmp_path).request(method, "/api/runs").status_code == 405
    assert client(tmp_path, known=False).request(method, "/api/runs").status_code == 403


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/%2e%2e/server.py",
        "/static//etc/passwd",
        "/static/uplot/LICENSE",
        "/static/%00",
        "/api/runs/..%2f..%2fetc",
        "/api/runs/%2fetc%2fpasswd",
        "/api/runs/a%00b",
        "/api/runs/../../etc/passwd/log",
    ],
)
def test_paths_lead_nowhere(tmp_path: Path, path: str) -> None:
    write_run(tmp_path, "a", steps=10)
    assert client(tmp_path).get(path).status_code == 404


def test_a_run_as_the_page_wants_it(tmp_path: Path) -> None:
    write_run(tmp_path, "a", steps=300, ranks=2, slow_rank=1)
    page = client(tmp_path)
    run_id = first_id(page)
    head: Any = parsed(page.get(f"/api/runs/{run_id}").text)
    assert (head["name"], head["status"], head["verdict"], head["ranks"]) == ("a", "completed", "input bound", 2)
    assert {"label": "samples/s", "value": "3,200"} in head["figures"]
    assert {"label": "MFU", "value": "31.0%"} in head["figures"]
    (finding,) = head["findings"]
    assert finding["remedies"] == ["read with more workers demo (data.num_workers: 4)"]
    assert [item["step"] for item in head["checkpoints"]] == [300, 200, 100]
    assert [item["step"] for item in head["validation"]] == [100, 200, 300]
    assert {"checkpoint", "epoch"} <= {item["kind"] for item in head["events"]}
    assert head["logs"] == ["train.log"]
    series: Any = parsed(page.get(f"/api/runs/{run_id}/series?bins=50").text)
    assert len(series["x"]) == 50
    assert {"mean", "min", "max"} == set(series["channels"]["loss"])
    assert series["samples_factor"] == 2.0
    machine: Any = parsed(page.get(f"/api/runs/{run_id}/system").text)
    assert set(machine) == {"0", "1"}
    ranks: Any = parsed(page.get(f"/api/runs/{run_id}/ranks?columns=10").text)
    assert len(ranks["rows"]) == 2
    assert page.get(f"/api/runs/{run_id}/log?name=train.log").text == "starting demo\nepoch 1\n"


@pytest.mark.parametrize("query", ["bins=-5", "bins=1e99", "bins=nan", "first=x&last=y", "first=inf", "first=9&last=1"])
def test_questions_that_make_no_sense_are_survived(tmp_path: Path, query: str) -> None:
    write_run(tmp_path, "a", steps=30)
    page = client(tmp_path)
    answer = page.get(f"/api/runs/{first_id(page)}/series?{query}")
    assert answer.status_code == 200
    parsed(answer.text)


@pytest.mark.parametrize(
    "name", ["../b/train.log", "/etc/passwd", "config.yaml", "link.log", "outside.log", "", "a\0b.log"]
)
def test_logs_are_those_of_the_run(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path / "root", "a", steps=10)
    write_run(tmp_path / "root", "b", steps=10)
    (tmp_path / "outside.log").write_text("secret")
    (folder / "link.log").symlink_to(tmp_path / "outside.log")
    page = client(tmp_path / "root")
    run_id = next(row["id"] for row in page.get("/api/runs").json()["runs"] if row["name"] == "a")
    answer = page.get(f"/api/runs/{run_id}/log", params={"name": name})
    assert answer.status_code == 404
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/..%2fserver.py",
        "/static/%2e%2e/server.py",
        "/static/%2fetc%2fpasswd",
        "/static//etc/passwd",
        "/static/..%252fserver.py",
        "/static/app.js%00",
        "/static/uplot",
        "/api/runs/..%2f..%2fetc",
        "/api/runs/%2e%2e",
        "/api/runs/a/log",
        "/api/runs//log?name=train.log",
        "//etc/passwd",
        "/..",
    ],
)
def test_no_path_leads_out(tmp_path: Path, path: str) -> None:
    """With the token, and sent as it stands: clients tidy paths up."""
    write_run(tmp_path, "a", steps=10)
    raw, _, query = path.partition("?")
    scope = {
        "type": "http",
        "method": "GET",
        "path": urllib.parse.unquote(raw),
        "raw_path": raw.encode(),
        "query_string": query.encode(),
        "headers": [(b"host", b"127.0.0.1:7007"), (b"authorization", f"Bearer {TOKEN}".encode())],
    }
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(make_app(Catalogue(tmp_path), TOKEN, "127.0.0.1", 7007)(scope, receive, send))
    assert sent[0]["status"] in (307, 404)
    assert b"root:" not in sent[1]["body"]
    assert b"import" not in sent[1]["body"]


def test_hostile_words_stay_words(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "<img src=x onerror=alert(1)>", steps=20, word=EVIL)
    (folder / "train.log").write_bytes(b"\xff\xfe<script>\0\x1b[31m")
    page = client(tmp_path)
    run_id = first_id(page)
    for path in ("/api/runs", f"/api/runs/{run_id}"):
        answer = page.get(path)
        assert answer.headers["content-type"] == "application/json"
        parsed(answer.text)
    assert page.get(f"/api/runs/{run_id}/log?name=train.log").headers["content-type"].startswith("text/plain")


def test_a_run_that_is_gone(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", steps=20)
    page = client(tmp_path)
    run_id = first_id(page)
    shutil.rmtree(folder)
    for path in ("", "/series", "/system", "/ranks", "/log?name=train.log"):
        assert page.get(f"/api/runs/{run_id}{path}").status_code == 404


def test_prometheus_reads_the_table(tmp_path: Path) -> None:
    write_run(tmp_path, "a", steps=60, finished=False)
    write_run(tmp_path, 'b "\\\n', steps=20)
    answer = client(tmp_path).get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    assert 'frameworm_run_running{run="a"} 1.0' in lines
    assert 'frameworm_run_steps{run="a"} 60' in lines
    assert r'frameworm_run_running{run="b \"\\\n"} 0.0' in lines
    assert 'frameworm_run_info{run="a",status="running",model="text_classifier",verdict="padding_waste"} 1' in lines
    assert all(re.fullmatch(r"#.*|\w+\{.*\} \S+", line) for line in lines)


def test_numbers_of_prometheus() -> None:
    row = Row("1", "a", "running", None, None, None, math.nan, math.inf, None)
    text = exposition([row])
    assert 'frameworm_run_loss{run="a"} NaN\n' in text
    assert 'frameworm_run_samples_per_second{run="a"} +Inf\n' in text
    assert "frameworm_run_steps{" not in text


def test_changes_come_as_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "TICK_S", 0.05)
    monkeypatch.setattr(sharing, "MOST_TICK_S", 0.05)
    folder = write_run(tmp_path, "a", steps=50, finished=False)
    service = Service(Catalogue(tmp_path))

    async def follow() -> list[dict[str, Any]]:
        (row,) = service.catalogue.rows()
        stream = service.feeds.follow(row.id)
        found = []

        async def following(name: str, value: object) -> dict[str, Any]:
            async for text in stream:
                if text.startswith("event: run\n"):
                    head: dict[str, Any] = json.loads(text.partition("data: ")[2])
                    if head.get(name) == value:  # its verdict may come later
                        return head
            raise AssertionError("the stream has ended")

        found.append(await asyncio.wait_for(following("steps", 50), 60))
        append_steps(folder, 51, 60)
        found.append(await asyncio.wait_for(following("steps", 60), 60))
        shutil.rmtree(folder)
        found.append(await asyncio.wait_for(following("status", "gone"), 60))
        await stream.aclose()  # type: ignore[attr-defined]
        return found

    before, after, gone = asyncio.run(follow())
    assert (before["status"], before["steps"]) == ("running", 50)
    assert after["steps"] == 60
    assert after["version"] > before["version"]
    assert gone["status"] == "gone"
    assert service.feeds.followers == 0


def test_streams_are_not_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_STREAMS", 0)
    assert client(tmp_path).get("/api/stream").status_code == 503


def test_no_file_of_the_page_comes_from_elsewhere() -> None:
    files = server._static_files()
    assert {"index.html", "app.js", "style.css", "uplot/uPlot.iife.min.js"} <= set(files)
    own = {name: content.decode() for name, content in files.items() if not name.startswith("uplot/")}
    for name, text in own.items():
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "https://"):
            assert word not in text, f"{name} has {word}"
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "style=" not in own["index.html"]


def test_texts_and_curves_stand_out_from_their_ground() -> None:
    style = server._static_files()["style.css"].decode()
    schemes = [dict(re.findall(r"--([\w-]+): (#\w{6})", part)) for part in re.findall(r":root \{(.*?)\}", style, re.S)]
    assert len(schemes) == 2
    for colours in schemes:
        for ground in ("page", "card"):
            for text in ("ink", "soft", "warn", "critical", "good", "curve-a"):
                assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        for curve in "abcdefgh":
            assert contrast(colours[f"curve-{curve}"], colours["card"]) >= 3, curve


@pytest.mark.parametrize("token", ["short", "with spaces in it, and long", "umlaut-ä-and-long-enough", ""])
def test_tokens_that_are_refused(tmp_path: Path, token: str) -> None:
    with pytest.raises(EnvironmentSetupError, match="--token"):
        WatchServer(tmp_path, port=0, token=token)


def test_addresses(tmp_path: Path) -> None:
    first = WatchServer(tmp_path, port=0)
    try:
        assert first.url == f"http://127.0.0.1:{first.port}/?token={first.token}"
        assert len(first.token) >= 40
        with pytest.raises(EnvironmentSetupError, match="--port"):
            WatchServer(tmp_path, port=first.port)
        with pytest.raises(EnvironmentSetupError, match="--host"):
            WatchServer(tmp_path, host="no.such.host.invalid", port=0)
    finally:
        first.socket.close()


AUTOGROUP = "/autogroup-7 nice 0\n"


@pytest.mark.parametrize(("owns", "within", "after"), [(True, "10", "0"), (False, AUTOGROUP, AUTOGROUP)])
def test_its_session_yields_processors_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owns: bool, within: str, after: str
) -> None:
    file = tmp_path / "autogroup"
    file.write_text(AUTOGROUP)
    monkeypatch.setattr(server.os, "nice", lambda niceness: niceness)
    monkeypatch.setattr(server, "_has_session", lambda: owns)
    with server.low_priority(file):
        assert file.read_text() == within
    assert file.read_text() == after
