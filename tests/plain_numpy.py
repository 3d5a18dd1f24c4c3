"""The environment in which numpy takes none of the code that it chooses by processor, as on one that has only what every one has.

python plain_numpy.py prints the value of NPY_DISABLE_CPU_FEATURES.
"""

from __future__ import annotations

import importlib

import numpy as np


def plain_numpy() -> dict[str, str]:
    """Environment variables. The names are those of this build of numpy: it warns of others, and fails for those it needs."""
    core = "_core" if hasattr(np, "_core") else "core"
    return {"NPY_DISABLE_CPU_FEATURES": " ".join(importlib.import_module(f"numpy.{core}._multiarray_umath").__cpu_dispatch__)}


if __name__ == "__main__":
    print(*plain_numpy().values())
