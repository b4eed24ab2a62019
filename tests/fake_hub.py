"""A local server that answers the hub's client as the hub does:
repository info, paths-info, resolve, CDN, ranges.

Files of 1,024 bytes and more are stored as LFS objects: resolve redirects to the CDN, which lies on
another host name, and paths-info gives their SHA-256. Faults are planted by path and used up one a
request, unless they stay.
"""

from __future__ import annotations

import functools
import hashlib
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PIECE = 1 << 18  # bytes written at once


@functools.lru_cache(maxsize=100)
def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class Fault:
    """What goes wrong with a file's bytes.

    kind: status, cut, flip, short, long, whole (ranges are ignored),
          wait (until the event is set)
    value: a status, or a number of bytes from the start of the answer"""

    kind: str
    value: int = 0
    event: threading.Event | None = None


@dataclass
class Transfer:
    """One request for a file's bytes, as the server saw it."""

    path: str
    start: int  # first byte of the range that was asked for
    sent: int = 0


@dataclass
class FakeHub:
    repo: str
    files: dict[str, bytes]
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    lasting: dict[str, Fault] = field(default_factory=dict)
    # For the next API requests, instead of an answer.
    api_statuses: list[int] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)  # "METHOD path" of everything
    tokens: dict[str, set[str | None]] = field(
        default_factory=dict
    )  # host name -> authorization headers seen there
    observers: list[Callable[[Transfer], None]] = field(
        default_factory=list
    )  # called before each piece is sent
    observed: list[BaseException] = field(default_factory=list)  # what observers raised

    def __enter__(self) -> FakeHub:
        handler = type("Handler", (HubHandler,), {"hub": self})
        self.server = Server(("127.0.0.1", 0), handler)
        self.port = self.server.server_address[1]
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def description(self, path: str) -> dict[str, object]:
        """A file's entry in an answer of paths-info."""
        content = self.files[path]
        entry = {"type": "file", "path": path, "size": len(content)}
        if len(content) < 1024:
            return {**entry, "oid": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()}
        # An LFS file's oid is that of a pointer in git: nobody may compare the content with it.
        return {
            **entry,
            "oid": "0" * 40,
            "lfs": {"oid": sha256(content), "size": len(content), "pointerSize": 134},
        }

    def transfers_of(self, path: str) -> list[Transfer]:
        return [transfer for transfer in self.transfers if transfer.path == path]


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients of these tests are killed in the middle of an answer


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def see(self) -> str:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        host = self.headers["Host"].partition(":")[0]
        self.hub.tokens.setdefault(host, set()).add(self.headers.get("Authorization"))
        return path

    def api_fails(self) -> bool:
        if self.hub.api_statuses:
            self.answer(self.hub.api_statuses.pop(0))
            return True
        return False

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        path = self.see()
        if self.api_fails():
            return
        if path != f"/api/datasets/{self.hub.repo}/paths-info/{COMMIT}":
            self.answer(404)
            return
        entries = [
            self.hub.description(path) for path in parse_qs(body)["paths"] if path in self.hub.files
        ]
        self.answer(200, json.dumps(entries).encode(), Content_Type="application/json")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, resolve = self.see(), f"/datasets/{self.hub.repo}/resolve/{COMMIT}/"
        if path.startswith("/api/") and self.api_fails():
            return
        if path == f"/api/datasets/{self.hub.repo}":
            info = {
                "id": self.hub.repo,
                "sha": COMMIT,
                "private": False,
                "tags": [],
                "downloads": 0,
                "likes": 0,
            }
            self.answer(200, json.dumps(info).encode(), Content_Type="application/json")
        elif path.startswith(resolve):
            self.resolve(path.removeprefix(resolve))
        elif path.startswith("/cdn/"):
            self.send_file(path.removeprefix("/cdn/"))
        elif path.startswith("/api/"):
            self.answer(401, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        else:
            self.answer(404, X_Error_Code="EntryNotFound")

    def resolve(self, path: str) -> None:
        if path not in self.hub.files:
            self.answer(404, X_Error_Code="EntryNotFound")
            return
        entry = self.hub.description(path)
        if "lfs" not in entry:
            self.send_file(path)
            return
        self.answer(
            302,
            Location=f"http://localhost:{self.hub.port}/cdn/{path}",
            X_Repo_Commit=COMMIT,
            X_Linked_Size=str(entry["size"]),
            X_Linked_ETag=f'"{entry["lfs"]["oid"]}"',
        )

    def send_file(self, path: str) -> None:
        """The bytes, or the range of them that was asked for, with the planted fault."""
        content = self.hub.files[path]
        planted = self.hub.faults.get(path)
        fault = planted.pop(0) if planted else self.hub.lasting.get(path, Fault("none"))
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        if fault.kind == "whole" or "gzip" in self.headers.get("Accept-Encoding", ""):
            start = 0  # a CDN that may compress gives no ranges
        transfer = Transfer(path, start)
        self.hub.transfers.append(transfer)
        if fault.kind == "status":
            self.answer(fault.value)
            return
        if fault.kind == "flip":
            content = (
                content[: fault.value]
                + bytes([content[fault.value] ^ 1])
                + content[fault.value + 1 :]
            )
        if fault.kind in ("short", "long"):
            content = (
                content[: -fault.value] if fault.kind == "short" else content + bytes(fault.value)
            )
        if start and start >= len(content):
            self.answer(416, Content_Range=f"bytes */{len(content)}")
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.send_header("ETag", f'"{sha256(content)}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("X-Repo-Commit", COMMIT)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        self.send_body(content[start:], transfer, fault)

    def send_body(self, body: bytes, transfer: Transfer, fault: Fault) -> None:
        end = min(fault.value, len(body)) if fault.kind in ("cut", "wait") else len(body)
        self.send_pieces(body[:end], transfer)
        if fault.kind == "wait":
            self.wfile.flush()
            fault.event.wait()
            self.send_pieces(body[end:], transfer)
        elif fault.kind == "cut":
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    def send_pieces(self, body: bytes, transfer: Transfer) -> None:
        for at in range(0, len(body), PIECE):
            for observer in self.hub.observers:
                try:
                    observer(transfer)
                except BaseException as error:
                    # A handler's own thread swallows it; the test looks here.
                    self.hub.observed.append(error)
            self.wfile.write(body[at : at + PIECE])
            transfer.sent += len(body[at : at + PIECE])
