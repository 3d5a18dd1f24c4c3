"""The one base of all errors a user may see: who speaks, what was expected, what came, what to do."""

from __future__ import annotations

from typing import ClassVar


class VkbackError(Exception):
    """Base of every error raised on bad input or a failing device. Its text is complete by itself. exit_code: of a command it ends."""

    exit_code: ClassVar[int] = 1
