"""A model and dataset hub on loopback that speaks the real one's protocol to the real clients."""

import hashlib
import json
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]  # path -> content


@dataclass
class Repo:
    commits: dict[str, Files]  # the last one is `main`
    tags: dict[str, str] = field(default_factory=dict)  # name -> commit
    gated: bool = False

    def commit(self, revision):
        if revision == "main":
            return list(self.commits)[-1]
        commit = self.tags.get(revision, revision)
        return commit if commit in self.commits else None


@dataclass
class Hub:
    repos: dict[tuple[str, str], Repo]  # (kind, id); whatever is not there may be private, for all the answer says
    address: str = ""
    requests: list[str] = field(default_factory=list)  # method and path of all that came
    downloads: Counter[str] = field(default_factory=Counter)  # file name -> how often its content was sent
    hangs_up: bool = False  # on whoever calls
    breaks_off: Counter[str] = field(default_factory=Counter)  # file name -> how often it will be sent by half


@contextmanager
def serve(repos):
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
        self.hub.requests.append(f"{self.command} {self.path}")
        if self.hub.hangs_up:
            self.close_connection = True
            return None
        # /[api/]<kind>s/<owner>/<name>/<verb>/<revision>/<path>; a model's files have no kind in their address.
        parts = unquote(urlsplit(self.path).path).strip("/").removeprefix("api/").split("/")
        kind = parts.pop(0).removesuffix("s") if parts[0] in ("datasets", "models") else "model"
        owner, name, verb, revision, *path = (*parts, "", "", "", "")[: max(4, len(parts))]
        repo = self.hub.repos.get((kind, f"{owner}/{name}"))
        if repo is None:
            return self._error(404, "RepoNotFound")
        commit = repo.commit(revision or "main")
        if commit is None:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if verb == "resolve" and repo.gated:
            return self._error(401, "GatedRepo", "Access to this repository is restricted.")
        if verb == "resolve":
            return self._file("/".join(path), repo.commits[commit], {"X-Repo-Commit": commit})
        if verb in ("revision", ""):
            siblings = [{"rfilename": name} for name in repo.commits[commit]]
            return self._json({"id": f"{owner}/{name}", "sha": commit, "siblings": siblings})
        if verb == "tree":
            recursive = "recursive=true" in self.path.lower()
            return self._json(_tree(repo.commits[commit], "/".join(path), recursive))
        return self._error(404, "EntryNotFound")

    do_HEAD = do_GET

    def _file(self, path, files, headers):
        content = files.get(path)
        if content is None:
            return self._error(404, "EntryNotFound", headers=headers)
        start, stop, status = 0, len(content), 200
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop, status = int(first), min(int(last or stop - 1) + 1, stop), 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        sent, name = None, path.split("/")[-1]
        if self.command == "GET":
            self.hub.downloads[name] += 1
            if self.hub.breaks_off[name] > 0:
                self.hub.breaks_off[name] -= 1
                sent = (stop - start) // 2
        headers |= {"ETag": f'"{_git_blob(content)}"', "Accept-Ranges": "bytes"}
        return self._send(status, content[start:stop], headers, sent)

    def _json(self, value):
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status, code, message="", headers=None):
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": message or code, **(headers or {})})

    def _send(self, status, body, headers, sent=None):
        """Of the body `sent` bytes and then nothing more; all of it if None."""
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:sent])
        if sent is not None:
            self.close_connection = True

    def log_message(self, format, *args):
        pass


def _git_blob(content):
    """Git's name of a file, which is its etag."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _tree(files, folder, recursive):
    """What lies in a folder, or anywhere under it."""
    prefix = f"{folder}/" if folder else ""
    entries = {}
    for name, content in files.items():
        inside = name.removeprefix(prefix)
        if name.startswith(prefix) and "/" in inside:
            sub = prefix + inside.split("/")[0]
            entries[sub] = {"type": "directory", "path": sub, "oid": _git_blob(sub.encode()), "size": 0}
        if name.startswith(prefix) and (recursive or "/" not in inside):
            entries[name] = {"type": "file", "path": name, "oid": _git_blob(content), "size": len(content)}
    return list(entries.values())
