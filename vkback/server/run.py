"""The server as a process: uvicorn on the application, its log, and its end."""

from __future__ import annotations

import logging
import socket
import sys
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from vkback.server.worker import Worker

DRAIN_S = 5
"""How long replies that are ended may take to reach their clients."""


class EndingServer(uvicorn.Server):
    """On a request to end, it first ends the worker's requests: their streams close with an error event. uvicorn alone would wait for them,
    and then cut them off."""

    def __init__(self, config: uvicorn.Config, worker: Worker) -> None:
        super().__init__(config)
        self._worker = worker

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Signals after the first change nothing: with a second SIGINT uvicorn would leave the application where it is, and starlette print
        the traceback of that."""
        if not self.should_exit:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._worker.end()
        await super().shutdown(sockets)


def run_app(app: Starlette, worker: Worker, host: str, port: int, *, colours: bool = False) -> None:
    """Serve until SIGINT or SIGTERM comes, which are raised again then. colours: of the log."""
    config = uvicorn.Config(
        app, host=host, port=port, access_log=False, server_header=False, timeout_graceful_shutdown=DRAIN_S, use_colors=colours
    )
    EndingServer(config, worker).run()


def log_to_stderr() -> None:
    """A line for each request, and for what goes wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    log = logging.getLogger("vkback.server")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers[:] = [handler]
