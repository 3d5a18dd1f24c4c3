"""Command lines of llama-bench, which vkbench takes as they are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from vkback.cli.shell import Command, UsageError, takes_value

VALUED = (
    ("-b", "--batch-size"),
    ("-t", "--threads"),
    ("-C", "--cpu-mask"),
    ("--cpu-strict",),
    ("--poll",),
    ("--numa",),
    ("--prio",),
    ("-ngl", "--n-gpu-layers"),
    ("-sm", "--split-mode"),
    ("-mg", "--main-gpu"),
    ("-nkvo", "--no-kv-offload"),
    ("-mmp", "--mmap"),
    ("-dio", "--direct-io"),
    ("-lm", "--load-mode"),
    ("-lzm", "--lazy-mode"),
    ("-embd", "--embeddings"),
    ("-ot", "--override-tensor"),
    ("-nopo", "--no-op-offload"),
    ("--no-host",),
    ("--repack",),
    ("-fitt", "--fit-target"),
    ("-fitc", "--fit-ctx"),
)
"""Options of llama-bench that hold a value which means nothing to vkbench: the host computes nothing."""

FLAGS = (("-v", "--verbose"), ("--offline",))
"""The same of options without a value."""

FETCHING = (("-hfr",), ("-hff", "--hf-file"), ("-hft", "--hf-token"), ("-rpc", "--rpc"))
"""Options that name a part of a model or a device elsewhere; -hf is our own."""

_VALUED, _FLAGS, _FETCHING = (frozenset(name for names in group for name in names) for group in (VALUED, FLAGS, FETCHING))


class BenchCommand(Command):
    """vkbench: what llama-bench knows and has no meaning here is reported once on stderr, and left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            own = {name for param in self.get_params(ctx) if takes_value(param) for name in param.opts}
            args, dropped = without_llama_options(args, own)
            if dropped:
                verb = "means" if len(dropped) == 1 else "mean"
                print(f"vkbench: {', '.join(dropped)} {verb} nothing here", file=sys.stderr)
        return super().parse_args(ctx, args)


def without_llama_options(words: Sequence[str], own: set[str]) -> tuple[list[str], list[str]]:
    """A command line without what has no meaning here, and what was left out, each option once. own: options of vkbench, whose values are
    none. Raises UsageError for what would have to be fetched, and where a value is missing."""
    kept: list[str] = []
    dropped: dict[str, None] = {}
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if word == "--":
            kept += [word, *rest]
        elif name in _FETCHING:
            raise UsageError(
                f"{name}: vkbench runs local files on a device of this machine; give the model as -m FILE or -hf USER/REPO[:TYPE]"
            )
        elif name in _FLAGS:
            dropped[name] = None
        elif name in _VALUED:
            if not equals and next(rest, None) is None:
                raise UsageError(f"{name}: expected a value, as in llama-bench")
            dropped[name] = None
        else:
            kept.append(word)
            if name in own and not equals:
                kept += [value for value in [next(rest, None)] if value is not None]
    return kept, list(dropped)
