"""A Hugging Face Hub in miniature: one repository over HTTP on this machine, which can refuse, break off and lie."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """files: of the repository NAME. token: what a client must bring. break_off: bytes after which the next long answer
    ends, and every other one is refused from then on. lie: files whose listed checksum is wrong. sizes: what is listed
    instead of the true size. asked: paths and ranges, in order, HEAD requests left out."""

    NAME = "acme/tiny"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.token = ""
        self.break_off = 0
        self.lie: set[str] = set()
        self.sizes: dict[str, int] = {}
        self.asked: list[tuple[str, str]] = []  # path, range
        self.url = ""

    def listing(self) -> dict[str, Any]:
        """The model's description, with its files."""
        siblings = []
        for name, data in self.files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": self.sizes.get(name, len(data))}
            told = data + b"!" if name in self.lie else data
            entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(told) + told).hexdigest()
            if name.endswith((".safetensors", ".gguf")):
                digest = hashlib.sha256(told).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        return {"id": self.NAME, "modelId": self.NAME, "sha": COMMIT, "siblings": siblings}


def handler_of(hub: Hub) -> type[BaseHTTPRequestHandler]:
    """Answers for one hub."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            hub.asked.append((self.path, self.headers.get("range", "")))
            self.answer(body=True)

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def answer(self, *, body: bool) -> None:
            if hub.token and self.headers.get("authorization") != f"Bearer {hub.token}":
                return self.reply(401, b"", {"x-error-code": "GatedRepo"} if hub.token == "gated" else {}, body=body)
            path = self.path.partition("?")[0]
            listed = re.fullmatch(rf"/api/models/{hub.NAME}(?:/revision/([^/]+))?", path)
            wanted = re.fullmatch(rf"/{hub.NAME}/resolve/{COMMIT}/(.+)", path)
            if listed and listed[1] in (None, "main", COMMIT):
                return self.reply(200, json.dumps(hub.listing()).encode(), {}, body=body)
            if listed:
                return self.reply(404, b"", {"x-error-code": "RevisionNotFound"}, body=body)
            if wanted and wanted[1] in hub.files:
                return self.file(hub.files[wanted[1]], body=body)
            return self.reply(404, b"", {"x-error-code": "RepoNotFound"}, body=body)

        def file(self, data: bytes, *, body: bool) -> None:
            etag = hashlib.sha256(data).hexdigest()
            headers = {"etag": f'"{etag}"', "x-repo-commit": COMMIT, "accept-ranges": "bytes"}
            found = re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", ""))
            start = int(found[1]) if found else 0
            if start:
                headers["content-range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self.reply(206 if start else 200, data[start:], headers, body=body)

        def reply(self, status: int, data: bytes, headers: dict[str, str], *, body: bool) -> None:
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body and hub.break_off and len(data) > hub.break_off:
                data, hub.break_off, hub.token = data[: hub.break_off], 0, "nobody's"
            if body:
                self.wfile.write(data)

    return Handler


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A running hub; its address is `url`."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(hub))
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
