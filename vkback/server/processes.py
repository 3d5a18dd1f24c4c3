"""The processes of a server on several cards: one `vkback serve` a card, on a port of this machine alone, started anew where one ends."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

log = logging.getLogger("vkback.server")

LISTENS = re.compile(rb"Uvicorn running on http://127\.0\.0\.1:(\d+)")
AGAIN_S = (0.5, 2.0, 8.0, 30.0)
"""Before a process that has ended is started again, the first time and later."""
END_S = 8.0


@dataclass
class CardProcess:
    """One card. port: where its process listens; None while it does not. Keep `run` going in a task of its own.

    command  of the process
    up       called when it listens; down: when it has ended, with why
    """

    index: int
    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    up: Callable[[int], None]
    down: Callable[[int, str], None]
    port: int | None = None
    starts: int = 0
    said: str = ""
    process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Start it, and again where it ends, until this task is cancelled."""
        try:
            while True:
                code = await self._once()
                self.port = None
                self.down(self.index, f"its process has ended with exit code {code}")
                await asyncio.sleep(AGAIN_S[min(self.starts, len(AGAIN_S)) - 1])
        finally:
            await self._end()

    async def _once(self) -> int:
        self.starts += 1
        self.process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **self.env},
            start_new_session=True,
        )
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            if (found := LISTENS.search(line)) and self.port is None:
                self.port = int(found[1])
                self.up(self.index)
            elif not line.startswith(b"INFO:"):  # of uvicorn
                self.said = line.decode("utf-8", "replace").rstrip()
                print(f"{self.name}: {self.said}", file=sys.stderr, flush=True)
        return await self.process.wait()

    async def _end(self) -> None:
        process = self.process
        if process is None or process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), END_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
