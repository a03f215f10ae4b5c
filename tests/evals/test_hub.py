"""The hub: a server on loopback that speaks its protocol to the real clients, and no server at all."""

import hashlib
import io
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
import pytest
from pyarrow import parquet

Repos = dict[tuple[str, str], dict[str, bytes]]  # (kind, id) -> path -> content

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NOWHERE = "http://127.0.0.1:9"  # the discard port: nobody listens

ROWS = ["", " = Robert <unk> = \n", "", " Robert is an English film , television and theatre actor . \n"]
WIKITEXT_CARD = b"""---
configs:
- config_name: wikitext-2-raw-v1
  data_files:
  - split: test
    path: wikitext-2-raw-v1/test-*
  - split: validation
    path: wikitext-2-raw-v1/validation-*
- config_name: numbers
  data_files:
  - split: test
    path: numbers/test-*
---
"""


def as_parquet(columns: dict[str, list[object]]) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pa.table(columns), file)
    return file.getvalue()


class Hub(BaseHTTPRequestHandler):
    """HEAD and GET of files by `resolve`, with ranges; the API's `revision` and `tree`. One commit in each repo."""

    protocol_version = "HTTP/1.1"
    repos: Repos

    def do_GET(self) -> None:
        kind, repo, verb, path = self._parse()
        files = self.repos.get((kind, repo))
        if files is None:
            self._error("RepoNotFound")
        elif verb == "resolve" and path in files:
            self._file(files[path])
        elif verb == "resolve":
            self._error("EntryNotFound")
        elif verb == "revision":
            self._json({"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})
        elif verb == "tree":
            recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() == "true"
            self._json(tree(files, path, recursive))
        else:
            self._error("EntryNotFound")

    do_HEAD = do_GET

    def _parse(self) -> tuple[str, str, str, str]:
        """/[api/]<kind>s/<owner>/<name>/<verb>/<revision>/<path>; models have no kind in the address of a file."""
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[0] == "api":
            parts = parts[1:]
        kind = parts.pop(0).removesuffix("s") if parts[0] in ("datasets", "models") else "model"
        owner, name, verb, _, *path = (*parts, "", "", "", "")[: max(4, len(parts))]
        return kind, f"{owner}/{name}", verb, "/".join(path)

    def _file(self, content: bytes) -> None:
        start, stop, status = 0, len(content), 200
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop, status = int(first), min(int(last or stop - 1) + 1, stop), 206
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "Accept-Ranges": "bytes"}
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        self._send(status, content[start:stop], headers)

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, code: str) -> None:
        self._send(404, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        headers = {**headers, "X-Repo-Commit": COMMIT, "Content-Length": str(len(body))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def tree(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict[str, object]]:
    """What lies in a folder, or anywhere under it."""
    prefix = f"{folder}/" if folder else ""
    entries: dict[str, dict[str, object]] = {}
    for name, content in files.items():
        if not name.startswith(prefix):
            continue
        inside = name.removeprefix(prefix)
        if "/" in inside:
            sub = prefix + inside.split("/")[0]
            entries[sub] = {"type": "directory", "path": sub, "oid": COMMIT, "size": 0}
        if recursive or "/" not in inside:
            oid = hashlib.sha1(content).hexdigest()
            entries[name] = {"type": "file", "path": name, "oid": oid, "size": len(content)}
    return list(entries.values())


@pytest.fixture(scope="session")
def hub(model_folder: Path) -> Iterator[str]:
    """The address of a hub with WikiText (a few lines of it) and a model."""
    Hub.repos = {
        ("dataset", "Salesforce/wikitext"): {
            "README.md": WIKITEXT_CARD,
            "wikitext-2-raw-v1/test-00000-of-00001.parquet": as_parquet({"text": ROWS}),
            "wikitext-2-raw-v1/validation-00000-of-00001.parquet": as_parquet({"text": ["Only this . \n"]}),
            "numbers/test-00000-of-00001.parquet": as_parquet({"n": [1, 2]}),
        },
        ("model", "someone/tiny-qwen2"): {file.name: file.read_bytes() for file in model_folder.iterdir()},
    }
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture
def run(in_fresh_process: Callable[..., list[Any]], model_folder: Path, tmp_path: Path) -> Callable[..., list[Any]]:
    """`flash-eval perplexity ARGUMENTS` for each list of arguments, with a cache that lasts for the test."""

    def run(hub: str, *runs: list[object]) -> list[Any]:
        always = ["perplexity", "--model", model_folder, "--context", 32]
        return in_fresh_process(*(always + run for run in runs), HF_ENDPOINT=hub, HF_HOME=str(tmp_path / "hf"))

    return run


def results(outcomes: list[Any], *files: Path) -> list[dict[str, Any]]:
    assert [(outcome.exit_code, outcome.stderr) for outcome in outcomes] == [(0, "")] * len(outcomes)
    return [json.loads(file.read_text()) for file in files]


def test_wikitext(hub: str, run: Callable[..., list[Any]], tmp_path: Path) -> None:
    """From the hub, and then from the cache, with the hub gone: the same text, and the revision still known."""
    first, second, third = tmp_path / "1.json", tmp_path / "2.json", tmp_path / "3.json"
    outcomes = run(
        hub,
        ["--dataset", "wikitext", "--json", first],
        ["--dataset", "wikitext", "--split", "validation", "--json", second],
    ) + run(NOWHERE, ["--dataset", "wikitext", "--json", third])
    online, validation, offline = results(outcomes, first, second, third)

    text = " = Robert <unk> = \n \n Robert is an English film , television and theatre actor . \n"
    expected = {
        "name": "Salesforce/wikitext wikitext-2-raw-v1 test",
        "revision": COMMIT,
        "fingerprint": f"sha256:{hashlib.sha256(text.encode()).hexdigest()}",
        "documents": 1,
        "words": len(text.split()),
        "bytes": len(text.encode()),
    }
    for result in (online, offline):
        assert result["dataset"].items() >= expected.items()
        assert result["settings"]["detokenised"]
    assert online["off"]["ppl"] == offline["off"]["ppl"]
    assert validation["words"] == 3


def test_hub_model(hub: str, run: Callable[..., list[Any]], text_file: Path, tmp_path: Path) -> None:
    """The same figures as from its folder; with the hub gone it comes from the cache."""
    local, first, second = (tmp_path / name for name in ("local.json", "1.json", "2.json"))
    repo = ["--dataset", text_file, "--model", "someone/tiny-qwen2"]
    outcomes = run(hub, [*repo, "--json", first])
    outcomes += run(NOWHERE, [*repo, "--json", second], ["--dataset", text_file, "--json", local])
    folder, *from_hub = results(outcomes, local, first, second)
    for result in from_hub:
        assert result["model"].items() >= {"name": "tiny-qwen2", "revision": COMMIT}.items()
        assert result["off"]["ppl"] == folder["off"]["ppl"]


def test_what_the_hub_does_not_have(hub: str, run: Callable[..., list[Any]]) -> None:
    says = {
        ("--dataset", "wikitext", "--split", "nonsense"): 'Unknown split "nonsense"',
        ("--dataset", "wikitext", "--config", "nonsense"): "BuilderConfig 'nonsense' not found",
        ("--dataset", "wikitext", "--text-column", "page"): "no column 'page'; it has: text",
        ("--dataset", "wikitext", "--config", "numbers", "--text-column", "n"): "holds int64, not text",
        ("--dataset", "Salesforce/wikitext"): "Config name is missing",
        ("--dataset", "someone/nothing"): "the hub has no dataset of that name",
        ("--dataset", "some one"): "neither a local path nor a hub id",
        ("--model", "someone/nothing"): "the hub has no model of that name",
    }
    for (arguments, message), outcome in zip(says.items(), run(hub, *map(list, says)), strict=True):
        assert (outcome.exit_code, outcome.stdout) == (2, ""), arguments
        [line] = outcome.stderr.splitlines()
        assert line.startswith("Error: ")
        assert message in line


def test_no_network_and_nothing_cached(run: Callable[..., list[Any]]) -> None:
    """Soon, in one line, with two commands that need neither."""
    works = {
        ("--dataset", "wikitext"): ("dataset Salesforce/wikitext", "--dataset FILE.txt"),
        ("--dataset", "someone/text"): ("dataset someone/text", "--dataset FILE.txt"),
        ("--model", "someone/tiny-qwen2"): ("model someone/tiny-qwen2", "--model FOLDER"),
    }
    for (what, option), outcome in zip(works.values(), run(NOWHERE, *map(list, works)), strict=True):
        assert (outcome.exit_code, outcome.stdout) == (2, "")
        assert outcome.stderr == (
            f"Error: {what} is neither a local path nor in the cache, and the hub cannot be reached; "
            f"without a network use `flash-eval perplexity` or `flash-eval perplexity {option}`\n"
        )
        assert outcome.seconds < 10  # the clients' own retries take more than 20
