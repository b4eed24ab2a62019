"""A local server that answers the client library of the hub as the Hugging Face Hub does.

Files of 1,024 bytes and more are LFS objects on a CDN with another host name. A test plants faults
for a path; each request for the path takes the next fault.
"""

from __future__ import annotations

import functools
import hashlib
import json
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@functools.lru_cache(maxsize=100)
def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class Fault:
    """A fault in the answer to one request for a file's bytes.

    Kinds: "status" answers with the HTTP status `value`; "cut" closes the connection after `value`
    bytes of the answer; "flip" changes bit 0 of byte `value` of the file; "wait" pauses after
    `value` bytes of the answer until `event` is set; "none" is no fault.
    """

    kind: str
    value: int = 0
    event: threading.Event = field(default_factory=threading.Event)


class Transfer(NamedTuple):
    """A request for a file's bytes, as the server received it."""

    path: str
    start: int  # first byte of the requested range


@dataclass
class FakeHub:
    """The server with the files of one repository. It runs during a `with` block."""

    repo: str
    files: dict[str, bytes]
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)

    def __enter__(self) -> FakeHub:
        handler = type("Handler", (HubHandler,), {"hub": self})
        self.server = Server(("127.0.0.1", 0), handler)
        self.port = self.server.server_address[1]
        serve, options = self.server.serve_forever, {"poll_interval": 0.02}
        threading.Thread(target=serve, kwargs=options, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def describe_file(self, path: str) -> dict[str, object]:
        """Return a file's entry in the hub's list of files."""
        content = self.files[path]
        entry = {"type": "file", "path": path, "size": len(content)}
        if len(content) < 1024:
            return {**entry, "oid": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()}
        # The oid of an LFS file is that of its pointer in git, not a checksum of the content. It is
        # wrong here, so that a client fails if it compares the content with it.
        lfs = {"oid": sha256(content), "size": len(content), "pointerSize": 134}
        return {**entry, "oid": "0" * 40, "lfs": lfs}


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # tests kill clients in the middle of an answer, which is not an error here


class HubHandler(BaseHTTPRequestHandler):
    """Answers the requests for a repository's data, list of files, and files."""

    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        path, api = unquote(urlsplit(self.path).path), f"/api/datasets/{self.hub.repo}"
        resolve = f"/datasets/{self.hub.repo}/resolve/{COMMIT}/"
        if path == api:
            self.answer_json({"id": self.hub.repo, "sha": COMMIT, "private": False, "tags": []})
        elif path.startswith(f"{api}/tree/{COMMIT}"):
            folder = path.removeprefix(f"{api}/tree/{COMMIT}").strip("/")
            names = [name for name in self.hub.files if name.startswith(folder)]
            self.answer_json([self.hub.describe_file(name) for name in names])
        elif path.startswith(resolve):
            self.resolve(path.removeprefix(resolve))
        elif path.startswith("/cdn/"):
            self.send_file(path.removeprefix("/cdn/"))
        else:
            self.answer(404, X_Error_Code="EntryNotFound")

    def answer_json(self, value: object) -> None:
        self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def resolve(self, path: str) -> None:
        """Send a small file, or redirect to the CDN for an LFS file."""
        if path not in self.hub.files:
            self.answer(404, X_Error_Code="EntryNotFound")
            return
        if "lfs" in self.hub.describe_file(path):
            self.answer(302, Location=f"http://localhost:{self.hub.port}/cdn/{path}")
        else:
            self.send_file(path)

    def send_file(self, path: str) -> None:
        """Send the bytes of a file, or the requested range of them, with the next planted fault."""
        content = self.hub.files[path]
        planted = self.hub.faults.get(path)
        fault = planted.pop(0) if planted else Fault("none")
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        if fault.kind == "status":
            self.answer(fault.value)
            return
        if fault.kind == "flip":
            flipped = bytes([content[fault.value] ^ 1])
            content = content[: fault.value] + flipped + content[fault.value + 1 :]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        self.hub.transfers.append(Transfer(path, start))
        self.send_body(content[start:], fault)

    def send_body(self, body: bytes, fault: Fault) -> None:
        end = min(fault.value, len(body)) if fault.kind in ("cut", "wait") else len(body)
        self.wfile.write(body[:end])
        self.wfile.flush()
        if fault.kind == "wait":
            fault.event.wait()
            self.wfile.write(body[end:])
        elif fault.kind == "cut":
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
