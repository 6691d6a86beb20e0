"""A Hub on 127.0.0.1 that speaks the endpoints huggingface_hub uses to publish and to load, and fails when told to.

    with LoopbackHub({"hf_token": "me"}) as hub:
        hub.fail("commit", status=503)
        ... a process with HF_ENDPOINT=hub.address ...

Uploads follow the LFS protocol, which the client takes with HF_HUB_DISABLE_XET=1, or Xet, its default; what came by Xet
is known by its hash and not put together again, so it can be committed but not loaded. The server listens on loopback
only, refuses large bodies, drops idle connections, and stops by itself after `lifetime` seconds.
"""

import base64
import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LARGEST_BODY = 64 * 2**20


@dataclass(frozen=True)
class Blob:
    content: bytes
    lfs: bool
    announced: str | None = None  # its SHA-256, if the content stays in Xet's storage

    @property
    def oid(self):
        if self.announced:
            return self.announced
        if self.lfs:
            return hashlib.sha256(self.content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


@dataclass
class Repo:
    owner: str
    private: bool
    branches: dict = field(default_factory=dict)  # name → commit
    commits: dict = field(default_factory=dict)  # commit → (summary, files)

    def commit(self, branch, summary, files):
        contents = sorted((name, blob.oid) for name, blob in files.items())
        sha = hashlib.sha1(f"{len(self.commits)} {branch} {contents}".encode()).hexdigest()
        self.commits[sha] = (summary, dict(files))
        self.branches[branch] = sha
        return sha

    def files(self, revision="main"):
        return self.commits[self.branches.get(revision, revision)][1]


@dataclass
class Fault:
    """`after`: do what was asked, then fail to say so. `drop`: close the connection in place of an answer."""

    times: int
    status: int | None = None
    drop: bool = False
    after: bool = False
    message: str = "a fault was injected"


class LoopbackHub:
    """`tokens`: whose each one is. `requests`: (endpoint, method, path, token) of everything that was asked."""

    def __init__(self, tokens, lifetime=300):
        self.tokens, self.repos, self.storage = tokens, {}, {}  # storage: contents by SHA-256
        self.xorbs, self.shards = {}, []  # Xet's: chunks by hash, and which files they make
        self.faults, self.requests, self.ignored = {}, [], set()
        self.lock = threading.RLock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        self._timer = threading.Timer(lifetime, self.stop)
        self._timer.daemon = True

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self._timer.start()
        return self

    def __exit__(self, *_):
        self._timer.cancel()
        self.stop()

    def stop(self):
        self.server.shutdown()
        self.server.server_close()  # who still asks is refused, and does not wait

    def reset(self):
        for state in (self.repos, self.storage, self.xorbs, self.shards, self.faults, self.requests, self.ignored):
            state.clear()

    def fail(self, endpoint, status=None, *, times=10**6, **how):
        assert endpoint in Handler.ROUTES
        self.faults[endpoint] = Fault(times, status, **how)

    def create(self, name, owner=None, private=False):
        repo = self.repos[name] = Repo(owner or name.partition("/")[0], private)
        repo.commit("main", "initial commit", {".gitattributes": Blob(b"*.safetensors filter=lfs\n", False)})
        return repo

    def count(self, endpoint):
        return sum(asked[0] == endpoint for asked in self.requests)


class Answer(Exception):
    """Ends a request."""

    def __init__(self, status, document=None, content=None, **headers):
        self.status, self.headers = status, {k.replace("_", "-"): v for k, v in headers.items()}
        self.content = json.dumps(document if document is not None else {}).encode() if content is None else content


def refuse(status, message, code=None):
    return Answer(status, {"error": message}, X_Error_Message=message, **({"X_Error_Code": code} if code else {}))


class Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"
    timeout = 10

    ROUTES: ClassVar = {  # {} is one part of a path
        "create": ("POST", "/api/repos/create"),
        "validate": ("POST", "/api/validate-yaml"),
        "info": ("GET", "/api/models/{}/{}"),
        "revision": ("GET", "/api/models/{}/{}/revision/{}"),
        "refs": ("GET", "/api/models/{}/{}/refs"),
        "tree": ("GET", "/api/models/{}/{}/tree/{}(?:/.*)?"),
        "branch": ("POST", "/api/models/{}/{}/branch/{}"),
        "preupload": ("POST", "/api/models/{}/{}/preupload/{}"),
        "commit": ("POST", "/api/models/{}/{}/commit/{}"),
        "batch": ("POST", r"/{}/{}\.git/info/lfs/objects/batch"),
        "put": ("PUT", "/storage/{}"),
        "verify": ("POST", "/storage/{}/verify"),
        "xet_token": ("GET", "/api/models/{}/{}/xet-write-token/{}"),
        "xet_chunk": ("GET", "/cas/v1/chunks/default/{}"),
        "xet_xorb": ("POST", "/cas/v1/xorbs/default/{}"),
        "xet_shard": ("POST", "/cas/v1/shards"),
        "resolve": ("GET", "/{}/{}/resolve/{}/(.+)"),
    }

    def log_message(self, *_):
        pass

    def handle_any(self):
        path = urlsplit(self.path).path
        method = "GET" if self.command == "HEAD" else self.command
        endpoint, parts = next(
            (
                (name, list(map(unquote, found.groups())))
                for name, (verb, pattern) in self.ROUTES.items()
                if verb == method and (found := re.fullmatch(pattern.replace("{}", "([^/]+)"), path))
            ),
            ("unknown", []),
        )
        size = int(self.headers.get("Content-Length") or 0)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        with self.hub.lock:
            self.hub.requests.append((endpoint, self.command, self.path, token))
            fault = self.hub.faults.get(endpoint)
            if fault and fault.times > 0:
                fault.times -= 1
            else:
                fault = None
        try:
            if size > LARGEST_BODY:
                self.close_connection = True
                raise refuse(413, "too large")
            self.body = self.read_body(size)
            if fault and not fault.after:
                raise refuse(fault.status or 500, fault.message)
            if endpoint == "unknown":
                raise refuse(404, f"no such endpoint: {self.command} {path}")
            with self.hub.lock:
                self.user = self.user_of(token, endpoint)
                getattr(self, f"on_{endpoint}")(*parts)
        except Answer as answer:
            if fault and fault.drop:
                self.close_connection = True
            elif fault and fault.after:
                self.reply(refuse(fault.status or 500, fault.message))
            else:
                self.reply(answer)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def read_body(self, size):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(size)
        chunks = []
        while chunk := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(chunk))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def reply(self, answer):
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.content)

    # Who may do what

    def user_of(self, token, endpoint):
        if token is None or endpoint in ("put", "verify", "xet_chunk", "xet_xorb", "xet_shard"):
            return None
        if token not in self.hub.tokens:
            raise refuse(401, "Invalid credentials in Authorization header")
        return self.hub.tokens[token]

    def repo(self, owner, name, write=False):
        repo = self.hub.repos.get(f"{owner}/{name}")
        if repo is None or (repo.private and self.user != repo.owner):
            raise refuse(404, "Repository not found", "RepoNotFound")
        if write and self.user != repo.owner:
            raise refuse(403, "You don't have the rights to write to this repository")
        return repo

    def at(self, repo, revision):
        sha = repo.branches.get(revision, revision)
        if sha not in repo.commits:
            raise refuse(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha

    # Repositories

    def on_create(self):
        asked = json.loads(self.body)
        name = f"{asked['organization'] or self.user}/{asked['name']}"
        if self.user is None:
            raise refuse(401, "Invalid username or password.")
        if self.user != name.partition("/")[0]:
            raise refuse(
                403, f"You don't have the rights to create a model under the namespace {asked['organization']!r}"
            )
        if name in self.hub.repos:
            raise refuse(409, "You already created this model repo")
        self.hub.create(name, self.user, asked.get("visibility") == "private" or bool(asked.get("private")))
        raise Answer(200, {"url": f"{self.hub.address}/{name}", "name": name})

    def on_info(self, owner, name):
        self.on_revision(owner, name, "main")

    def on_revision(self, owner, name, revision):
        repo = self.repo(owner, name)
        sha = self.at(repo, revision)
        siblings = [{"rfilename": path} for path in sorted(repo.commits[sha][1])]
        raise Answer(200, {"id": f"{owner}/{name}", "sha": sha, "private": repo.private, "siblings": siblings})

    def on_refs(self, owner, name):
        branches = self.repo(owner, name).branches
        rows = [{"name": b, "ref": f"refs/heads/{b}", "targetCommit": sha} for b, sha in branches.items()]
        raise Answer(200, {"branches": rows, "tags": [], "converts": []})

    def on_branch(self, owner, name, branch):
        repo = self.repo(owner, name, write=True)
        if branch in repo.branches:
            raise refuse(409, f"Reference already exists: {branch}")
        repo.branches[branch] = repo.branches["main"]
        raise Answer(200)

    def on_tree(self, owner, name, revision):
        repo = self.repo(owner, name)
        files = repo.commits[self.at(repo, revision)][1]
        folder = unquote(urlsplit(self.path).path.partition(f"/tree/{revision}")[2]).strip("/")
        recursive = parse_qs(urlsplit(self.path).query).get("recursive", [""])[0].lower() in ("true", "1")
        found = []
        for path, blob in sorted(files.items()):
            inside = not folder or path.startswith(f"{folder}/")
            if inside and (recursive or "/" not in path[len(folder) :].lstrip("/")):
                lfs = {"lfs": {"oid": blob.oid, "size": len(blob.content), "pointerSize": 130}} if blob.lfs else {}
                found.append({"type": "file", "path": path, "size": len(blob.content), "oid": blob.oid, **lfs})
        if folder and not found:
            raise refuse(404, f"{folder} does not exist", "EntryNotFound")
        raise Answer(200, found)

    def on_resolve(self, owner, name, revision, path):
        repo = self.repo(owner, name)
        sha = self.at(repo, revision)
        blob = repo.commits[sha][1].get(path)
        if blob is None:
            raise Answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound", X_Repo_Commit=sha)
        linked = {"X_Linked_Etag": f'"{blob.oid}"', "X_Linked_Size": str(len(blob.content))} if blob.lfs else {}
        headers = {"X_Repo_Commit": sha, "ETag": f'"{blob.oid}"', "Content_Type": "application/octet-stream", **linked}
        raise Answer(200, content=blob.content, **headers)

    # Uploading

    def on_validate(self):
        content = json.loads(self.body)["content"]
        try:
            metadata = yaml.safe_load(content.split("---\n")[1])
            for model in metadata.get("model-index", []):
                for result in model["results"]:
                    _ = result["task"]["type"], result["dataset"]["type"], result["dataset"]["name"]
                    if not all("type" in metric and "value" in metric for metric in result["metrics"]):
                        raise KeyError("metric")
        except (IndexError, KeyError, yaml.YAMLError) as error:
            raise Answer(400, {"errors": [{"message": f"invalid: {error}"}], "warnings": []}) from error
        raise Answer(200, {"errors": [], "warnings": []})

    def on_preupload(self, owner, name, revision):
        repo = self.repo(owner, name, write=True)
        files = repo.commits[self.at(repo, revision)][1]
        answers = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith((".safetensors", ".png")) else "regular",
                "shouldIgnore": file["path"] in self.hub.ignored,
                "oid": files[file["path"]].oid if file["path"] in files else None,
            }
            for file in json.loads(self.body)["files"]
        ]
        raise Answer(200, {"files": answers})

    def on_batch(self, owner, name):
        self.repo(owner, name, write=True)
        asked, objects = json.loads(self.body), []
        for wanted in asked["objects"]:
            href = f"{self.hub.address}/storage/{wanted['oid']}"
            new = wanted["oid"] not in self.hub.storage
            actions = {"actions": {"upload": {"href": href}, "verify": {"href": f"{href}/verify"}}} if new else {}
            objects.append({"oid": wanted["oid"], "size": wanted["size"], **actions})
        raise Answer(200, {"transfer": "xet" if "xet" in asked["transfers"] else "basic", "objects": objects})

    def on_put(self, oid):
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise refuse(400, "the content is not what was announced")
        self.hub.storage[oid] = self.body
        raise Answer(200)

    def on_verify(self, oid):
        if oid not in self.hub.storage:
            raise refuse(404, "not uploaded")
        raise Answer(200)

    def on_xet_token(self, owner, name, revision):
        self.repo(owner, name, write=True)
        told = {"casUrl": f"{self.hub.address}/cas", "accessToken": "a-token-of-Xet", "exp": int(time.time()) + 600}
        names = ("X_Xet_Cas_Url", "X_Xet_Access_Token", "X_Xet_Token_Expiration")  # older clients look here
        raise Answer(200, told, **dict(zip(names, map(str, told.values()), strict=True)))

    def on_xet_chunk(self, key):
        raise refuse(404, "this chunk is new")

    def on_xet_xorb(self, key):
        self.hub.xorbs[key] = self.body
        raise Answer(200, {"was_inserted": True})

    def on_xet_shard(self):
        self.hub.shards.append(self.body)
        raise Answer(200, {"result": 1})

    def uploaded(self, oid, path):
        if oid in self.hub.storage:
            return Blob(self.hub.storage[oid], True)
        digest = bytes.fromhex(oid)
        in_shards = b"".join(digest[i : i + 8][::-1] for i in range(0, 32, 8))  # four little-endian numbers
        if not any(in_shards in shard for shard in self.hub.shards):
            raise refuse(400, f"{path} was never uploaded")
        return Blob(b"", True, oid)

    def on_commit(self, owner, name, revision):
        repo = self.repo(owner, name, write=True)
        lines = [json.loads(line) for line in self.body.splitlines()]
        header = lines[0]["value"]
        if header.get("parentCommit") not in (None, repo.branches[revision]):
            raise refuse(412, "A commit has happened since. Please refresh and try again.")
        files = dict(repo.files(revision))
        for line in lines[1:]:
            path = line["value"]["path"]
            if line["key"] == "file":
                files[path] = Blob(base64.b64decode(line["value"]["content"]), False)
            elif line["key"] == "lfsFile":
                files[path] = self.uploaded(line["value"]["oid"], path)
            elif line["key"] == "deletedFile":
                del files[path]
        sha = repo.commit(revision, header["summary"], files)
        commit = {"commitOid": sha, "commitUrl": f"{self.hub.address}/{owner}/{name}/commit/{sha}"}
        raise Answer(200, {"success": True, **commit})
