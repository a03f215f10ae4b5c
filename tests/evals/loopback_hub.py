"""A model and dataset hub on loopback that speaks the real one's protocol to the real clients."""

import hashlib
import json
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

Files = dict[str, bytes]  # path -> content

LARGE = (".parquet", ".safetensors")  # kept apart, as the real hub keeps them (Git LFS)


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

    def large(self, digest):
        """A large file by its SHA-256."""
        commits = [files for repo in self.repos.values() for files in repo.commits.values()]
        large = [file for files in commits for file in files.items() if file[0].endswith(LARGE)]
        return next((file for file in large if sha256(file[1]) == digest), None)


@contextmanager
def serve(repos):
    hub = Hub(repos)
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub})) as server:
        hub.address = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield hub
        server.shutdown()


def sha256(content):
    return hashlib.sha256(content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self):
        self.hub.requests.append(f"{self.command} {self.path}")
        if self.hub.hangs_up:
            self.close_connection = True
            return None
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[0] == "large":
            found = self.hub.large(parts[1])
            return self._content(*found, {}) if found else self._error(404, "EntryNotFound")
        # /[api/]<kind>s/<owner>/<name>/<verb>/<revision>/<path>; a model's files have no kind in their address.
        if parts[0] == "api":
            parts = parts[1:]
        kind = parts.pop(0).removesuffix("s") if parts[0] in ("datasets", "models") else "model"
        owner, name, verb, revision, *path = (*parts, "", "", "", "")[: max(4, len(parts))]
        repo = self.hub.repos.get((kind, f"{owner}/{name}"))
        if repo is None:
            return self._error(404, "RepoNotFound")
        commit = repo.commit(revision or "main")
        if commit is None:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if verb == "resolve":
            return self._resolve(repo, commit, "/".join(path))
        if verb in ("revision", ""):
            siblings = [{"rfilename": name} for name in repo.commits[commit]]
            return self._json({"id": f"{owner}/{name}", "sha": commit, "siblings": siblings})
        if verb == "tree":
            recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() == "true"
            return self._json(_tree(repo.commits[commit], "/".join(path), recursive))
        return self._error(404, "EntryNotFound")

    do_HEAD = do_GET

    def _resolve(self, repo, commit, path):
        content = repo.commits[commit].get(path)
        at = {"X-Repo-Commit": commit}
        if repo.gated:
            self._error(401, "GatedRepo", "Access to this repository is restricted.")
        elif content is None:
            self._error(404, "EntryNotFound", headers=at)
        elif path.endswith(LARGE):
            digest = sha256(content)
            linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
            # To another host than the hub's, or the client takes what is there for the hub's own answer.
            elsewhere = self.hub.address.replace("127.0.0.1", "localhost")
            self._send(302, b"", {"Location": f"{elsewhere}/large/{digest}", **linked, **at})
        else:
            self._content(path, content, at)

    def _content(self, path, content, headers):
        start, stop, status = 0, len(content), 200
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop, status = int(first), min(int(last or stop - 1) + 1, stop), 206
            headers = {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        headers = {"ETag": f'"{_git_blob(content)}"', "Accept-Ranges": "bytes", **headers}
        name = path.split("/")[-1]
        if self.command == "GET":
            self.hub.downloads[name] += 1
            if self.hub.breaks_off[name] > 0:
                self.hub.breaks_off[name] -= 1
                self._send(status, content[start:stop], headers, sent=(stop - start) // 2)
                return
        self._send(status, content[start:stop], headers)

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
        if not name.startswith(prefix):
            continue
        if "/" in inside:
            sub = prefix + inside.split("/")[0]
            entries[sub] = {"type": "directory", "path": sub, "oid": _git_blob(sub.encode()), "size": 0}
        if recursive or "/" not in inside:
            entries[name] = {"type": "file", "path": name, "oid": _git_blob(content), "size": len(content)}
            if name.endswith(LARGE):
                entries[name]["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 130}
    return list(entries.values())
