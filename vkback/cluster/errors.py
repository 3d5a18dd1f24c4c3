"""What goes wrong between machines."""

from __future__ import annotations

import importlib.util

from vkback.errors import VkbackError


class ClusterError(VkbackError):
    """A cluster that cannot be reached, or that has lost what the work needs, with what to do."""


def require_distributed() -> None:
    """Raises ClusterError with the command that installs what is missing."""
    if importlib.util.find_spec("distributed") is None:
        raise ClusterError(
            "[hosts] several devices or machines need Dask distributed, which is missing. Install it with: pip install 'vkback[hosts]'"
        )
