"""A server that speaks as much of Hugging Face's API as a download needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Repositories by name, each with files; gets: paths that were asked for by GET."""

    url: str = ""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gets: list[str] = field(default_factory=list)


@contextmanager
def served_hub(repos: dict[str, dict[str, bytes]] | None = None) -> Iterator[Hub]:
    """One on the loopback address, while the context lasts."""
    made = Hub(repos=repos or {})

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self) -> None:
            made.gets.append(self.path)
            self._any()

        def do_HEAD(self) -> None:
            self._any()

        def _any(self) -> None:
            path = self.path.partition("?")[0].strip("/")
            if path.startswith("api/models/"):
                repo = "/".join(path.split("/")[2:4])
                if repo not in made.repos:
                    return self._answer(404, b"{}", X_Error_Code="RepoNotFound")
                info = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in made.repos[repo]]}
                return self._answer(200, json.dumps(info).encode(), Content_Type="application/json")
            user, name, _, _, *rest = path.split("/")
            content = made.repos.get(f"{user}/{name}", {}).get("/".join(rest))
            if content is None:
                return self._answer(404, b"", X_Error_Code="EntryNotFound")
            etag = f'"{hashlib.sha256(content).hexdigest()}"'
            return self._answer(200, content, ETag=etag, X_Repo_Commit=COMMIT, Accept_Ranges="bytes")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def hub_environment(url: str, home: Path) -> Mapping[str, str]:
    """Variables of a process that downloads from there, into a cache below `home`."""
    return {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
