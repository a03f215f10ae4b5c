"""A local stand-in for the Hugging Face Hub, which serves models and datasets to the Hub's real clients."""

import hashlib
import io
import json
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from pyarrow import parquet

Files = dict[str, bytes]  # path -> content


@dataclass
class Repo:
    commits: dict[str, Files]  # commit id -> files; the last commit is `main`
    tags: dict[str, str] = field(default_factory=dict)  # name -> commit
    gated: bool = False

    def commit(self, revision):
        commit = {"": list(self.commits)[-1], "main": list(self.commits)[-1], **self.tags}.get(revision, revision)
        return commit if commit in self.commits else None


@dataclass
class Hub:
    repos: dict[tuple[str, str], Repo]  # (kind, id) -> repository; all others get 404
    address: str = ""
    requests: list[str] = field(default_factory=list)  # the paths of all requests
    downloads: Counter[str] = field(default_factory=Counter)  # file name -> how often its content was sent
    hangs_up: bool = False  # whether the server closes each connection without an answer


def dataset(tables):
    """The files of a dataset: a Parquet file for each table, and a card that lists them.

    tables: maps "configuration/split" to {column name: values}.
    """
    configs, files = {}, {}
    for name, columns in tables.items():
        path, file = f"{name}-00000-of-00001.parquet", io.BytesIO()
        parquet.write_table(pa.table(columns), file)
        files[path] = file.getvalue()
        config, _, split = name.partition("/")
        about = configs.setdefault(config, {"config_name": config, "data_files": []})
        about["data_files"].append({"split": split, "path": path})
    return {"README.md": f"---\nconfigs: {json.dumps(list(configs.values()))}\n---\n".encode(), **files}


@contextmanager
def serve(repos):
    """Yields a Hub, which answers at its address until the block ends."""
    hub = Hub(repos)
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub})) as server:
        hub.address = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield hub
        server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self):
        self.hub.requests.append(self.path)
        if self.hub.hangs_up:
            self.close_connection = True
            return None
        # The path is /[api/]<kind>s/<owner>/<name>/<verb>/<revision>/<path>. URLs of a model's files lack `<kind>s/`.
        parts = unquote(urlsplit(self.path).path).strip("/").removeprefix("api/").split("/")
        kind = parts.pop(0).removesuffix("s") if parts[0] in ("datasets", "models") else "model"
        owner, name, verb, revision, *path = (*parts, "", "", "", "")[: max(4, len(parts))]
        path, repo = "/".join(path), self.hub.repos.get((kind, f"{owner}/{name}"))
        if repo is None:
            return self._send(404, {"X-Error-Code": "RepoNotFound"})
        commit = repo.commit(revision)
        if commit is None:
            return self._send(404, {"X-Error-Code": "RevisionNotFound"})
        files = repo.commits[commit]
        if verb in ("revision", ""):
            return self._json({"id": f"{owner}/{name}", "sha": commit, "siblings": [{"rfilename": f} for f in files]})
        if verb == "tree":
            tree = [{"type": "file", "path": f, "oid": _git_blob(x), "size": len(x)} for f, x in files.items()]
            return self._json([entry for entry in tree if entry["path"].startswith(path)])
        if repo.gated:
            return self._send(401, {"X-Error-Code": "GatedRepo"})
        if path not in files:
            return self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        self.hub.downloads[path.split("/")[-1]] += self.command == "GET"
        return self._send(200, {"X-Repo-Commit": commit, "ETag": f'"{_git_blob(files[path])}"'}, files[path])

    do_HEAD = do_GET

    def _json(self, value):
        self._send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _send(self, status, headers, body=b"{}"):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format, *args):
        pass


def _git_blob(content):
    """The hash by which git names a file. The hub uses it as the file's ETag."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
