"""`python -m vkback.cluster SCHEDULER DEVICE NAME [once]`: one worker, as vkback/cluster/launch.py starts it."""

from __future__ import annotations

import sys

from vkback.cluster.worker import serve

if __name__ == "__main__":
    serve(*sys.argv[1:4], once="once" in sys.argv[4:])
