"""A server that speaks as much of the Hugging Face hub's API as uploads and downloads need."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0" * 39 + "1"
TOKEN = "hf_for_tests"


class Hub:
    """Runs while it is entered, on a free port of this machine.

    Attributes:
        files: Repository, then path: the content of every file that was committed.
        private: The repositories that were made private.
        requests: Every request, as `METHOD path`.
        url: Where it listens.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.stored: dict[str, bytes] = {}  # large files by their SHA-256
        self.requests: list[str] = []

    def __enter__(self) -> "Hub":
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *given: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *given: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._resolve(with_content=False)

    def do_GET(self) -> None:
        self._resolve(with_content=True)

    def do_PUT(self) -> None:
        content = self._body()
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(content).hexdigest() == oid
        self.hub.stored[oid] = content
        self._answer(200)

    def do_POST(self) -> None:
        body = self._body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid username or password."})
        elif self.path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given['organization']}/{given['name']}" if given.get("organization") else given["name"]
            self.hub.files.setdefault(name, {})
            if given.get("private") or given.get("visibility") == "private":  # older and newer libraries
                self.hub.private.add(name)
            self._answer(200, {"url": f"{self.hub.url}/{name}", "name": name})
        elif self.path == "/api/validate-yaml":
            sound = json.loads(body)["content"].startswith("---\nlibrary_name: stam\n")
            self._answer(200, {"errors": [] if sound else [{"message": "no header"}], "warnings": []})
        elif re.fullmatch(r"/api/models/(.+)/preupload/main", self.path):
            files = json.loads(body)["files"]
            mode = {True: "lfs", False: "regular"}
            told = [
                {
                    "path": each["path"],
                    "uploadMode": mode[each["path"].endswith(".safetensors")],
                    "shouldIgnore": False,
                }
                for each in files
            ]
            self._answer(200, {"files": told})
        elif re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", self.path):
            objects = [
                each | {"actions": {"upload": {"href": f"{self.hub.url}/lfs/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            self._answer(200, {"transfer": "basic", "objects": objects})
        elif match := re.fullmatch(r"/api/models/(.+)/commit/main", self.path):
            self._commit(match[1], body)
        else:
            self._answer(404, {"error": f"no {self.path}"})

    def _commit(self, name: str, body: bytes) -> None:
        for line in body.decode().splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                self.hub.files[name][value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.hub.files[name][value["path"]] = self.hub.stored[value["oid"]]
        url = f"{self.hub.url}/{name}/commit/{COMMIT}"
        self._answer(200, {"commitOid": COMMIT, "commitUrl": url, "success": True})

    def _resolve(self, with_content: bool) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/([^?]+)", self.path)
        content = self.hub.files.get(match[1], {}).get(match[2]) if match else None
        if content is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound" if match else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_content:
            self.wfile.write(content)

    def _body(self) -> bytes:
        self.hub.requests.append(f"{self.command} {self.path}")
        if self.headers.get("Transfer-Encoding") == "chunked":
            content = b""
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return content
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, told: object = None) -> None:
        content = json.dumps(told).encode() if told is not None else b""
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
