"""Files of named arrays, as numpy.savez writes them."""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

START = b"PK\x03\x04"
"""Of a zip archive."""

DAMAGE = (EOFError, KeyError, MemoryError, NotImplementedError, OverflowError, RuntimeError, struct.error, zipfile.BadZipFile, zlib.error)
"""What zipfile and numpy raise beside ValueError."""


def read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a file by name. Raises ValueError saying why it is none, or cannot be read."""
    try:
        with path.open("rb") as file:
            start = file.read(len(START))
        if start != START:  # numpy would take it for a pickle
            raise ValueError(f"it begins with {start!r}, expected {START!r}")
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except OSError as e:
        raise ValueError(e.strerror or str(e)) from e
    except DAMAGE as e:
        raise ValueError(f"it is damaged or cut short: {e}") from e
