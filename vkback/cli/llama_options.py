"""Command lines of llama.cpp's programs, which the commands that do the same work take as they are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vkback.cli.shell import Command, UsageError, takes_value


@dataclass(frozen=True)
class Foreign:
    """Options of a program of llama.cpp that a command has not. An option of the command itself is never one of them.

    valued   hold a value, and mean nothing here: the host computes nothing, and what they choose is so or chosen by itself
    flags    the same without a value
    only     hold a value that means nothing if it is one of these; others are refused
    refused  would have to be obeyed, with what to do instead
    """

    valued: frozenset[str]
    flags: frozenset[str] = frozenset()
    only: dict[str, tuple[str, ...]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELSEWHERE = "models are local files on a device of this machine; give the model as -m FILE or -hf USER/REPO[:TYPE]"
"""Of options that name a part of a model or a device elsewhere."""

BENCH = Foreign(
    valued=_names(
        "-b --batch-size -t --threads -C --cpu-mask --cpu-strict --poll --numa --prio -sm --split-mode -mg "
        "--main-gpu -nkvo --no-kv-offload -mmp --mmap -dio --direct-io -lm --load-mode -lzm --lazy-mode -embd --embeddings -ot "
        "--override-tensor -nopo --no-op-offload --no-host --repack -fitt --fit-target -fitc --fit-ctx"
    ),
    flags=_names("-v --verbose --offline"),
    refused=dict.fromkeys(_names("-hfr -hff --hf-file -hft --hf-token -rpc --rpc"), ELSEWHERE),
)
"""llama-bench and llama-batched-bench, of which flags of other programs hold a value."""

TEXT = Foreign(
    valued=_names(
        "-b --batch-size -t --threads -tb --threads-batch -C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll -Cb "
        "--cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch --numa -lm --load-mode -lzm --lazy-mode "
        "-ngl --gpu-layers --n-gpu-layers -sm --split-mode -mg --main-gpu -ot --override-tensor -ncffn --n-cpu-ffn --moe-cache-mib "
        "-fit --fit -fitt --fit-target -fitc --fit-ctx -dt --defrag-thold --keep --log-colors -lv --verbosity --log-verbosity -ptc "
        "--print-token-count -fa --flash-attn -td --threads-draft -tbd --threads-batch-draft -ngld --gpu-layers-draft "
        "--n-gpu-layers-draft --spec-draft-ngl"
    ),
    flags=_names(
        "--mlock --mmap --no-mmap -dio --direct-io -ndio --no-direct-io -kvo --kv-offload -nkvo --no-kv-offload --repack -nr "
        "--no-repack --no-host --op-offload --no-op-offload --swa-full --check-tensors --perf --no-perf --log-disable --log-prefix "
        "--no-log-prefix --log-timestamps --no-log-timestamps -v --verbose --log-verbose --offline -bs --backend-sampling --warmup "
        "--no-warmup --no-context-shift --jinja --simple-io -co --color --no-mmproj --no-mmproj-auto"
    ),
    refused={
        **dict.fromkeys(_names("-hfr -hff --hf-file -hft --hf-token -rpc --rpc -mu --model-url -dr --docker-repo"), ELSEWHERE),
        **dict.fromkeys(("-mm", "--mmproj"), "images are not supported; leave it out"),
        "--context-shift": "a full context ends the text; give a larger -c",
        "--list-devices": "vkback devices lists them",
    },
)
"""llama-cli, llama-completion, llama-embedding, llama-perplexity and llama-imatrix."""

CONVERSATION = dict.fromkeys(_names("-cnv --conversation -i --interactive -if --interactive-first"), "vkback chat holds conversations")

RUN = Foreign(TEXT.valued, TEXT.flags | {"-no-cnv", "--no-conversation"}, TEXT.only, {**TEXT.refused, **CONVERSATION})

CHAT = Foreign(
    TEXT.valued,
    TEXT.flags | {*CONVERSATION},
    {"--reasoning-format": ("auto", "deepseek"), "--reasoning-budget": ("-1",)},
    {**TEXT.refused, **dict.fromkeys(("-no-cnv", "--no-conversation"), "vkback run continues a text")},
)

SERVE = Foreign(
    TEXT.valued
    | _names(
        "-cram --cache-ram --cache-reuse -ctxcp --ctx-checkpoints --swa-checkpoints -cms --checkpoint-min-step -sps "
        "--slot-prompt-similarity --sse-ping-interval --threads-http --kv-unified-per-slot --tags"
    ),
    TEXT.flags
    | _names(
        "-cb --cont-batching -kvu --kv-unified --cache-idle-slots --no-cache-idle-slots --metrics --slots --props --ui --webui "
        "--embedding --embeddings --rerank --reranking --reuse-port --prefill-assistant"
    ),
    {"--reasoning-format": ("auto", "deepseek"), "--reasoning-budget": ("-1",)},
    TEXT.refused,
)
"""llama-server."""


class LlamaCommand(Command):
    """A command that takes command lines of llama.cpp: what has no meaning here is reported once on stderr, and left out."""

    foreign: ClassVar[Foreign] = TEXT

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            params = [param for param in self.get_params(ctx) if param.param_type_name == "option"]
            own = {name: takes_value(param) for param in params for name in (*param.opts, *param.secondary_opts)}
            args, dropped = without_foreign(args, own, self.foreign, ctx.command_path)
            if dropped:
                verb = "means" if len(dropped) == 1 else "mean"
                print(f"{ctx.command_path.partition(' ')[0]}: {', '.join(dropped)} {verb} nothing here", file=sys.stderr)
        return super().parse_args(ctx, args)


class BenchCommand(LlamaCommand):
    """vkbench and vkbench batch."""

    foreign = BENCH


class RunCommand(LlamaCommand):
    foreign = RUN


class ChatCommand(LlamaCommand):
    foreign = CHAT


class ServeCommand(LlamaCommand):
    foreign = SERVE


def without_foreign(words: Sequence[str], own: dict[str, bool], foreign: Foreign, command: str) -> tuple[list[str], list[str]]:
    """A command line without what has no meaning here, and what was left out, each option once. own: options of the command, and whether
    they take a value. Raises UsageError for what would have to be obeyed, and where a value is missing."""
    kept: list[str] = []
    dropped: dict[str, None] = {}
    rest = iter(words)

    def value_of(name: str, given: str, equals: str) -> str:
        value = given if equals else next(rest, None)
        if value is None:
            raise UsageError(f"{name}: expected a value, as in llama.cpp")
        return value

    for word in rest:
        name, equals, given = word.partition("=")
        if word == "--":
            kept += [word, *rest]
        elif name in own:
            kept.append(word)
            if own[name] and not equals:
                kept += [value for value in [next(rest, None)] if value is not None]
        elif name in foreign.refused:
            raise UsageError(f"{name}: {foreign.refused[name]}")
        elif name in foreign.flags:
            dropped[name] = None
        elif name in foreign.valued:
            value_of(name, given, equals)
            dropped[name] = None
        elif name in foreign.only:
            if (value := value_of(name, given, equals)) not in foreign.only[name]:
                raise UsageError(f"{name} {value}: {command} knows {' and '.join(foreign.only[name])} alone; leave it out")
            dropped[name] = None
        else:
            kept.append(word)
    return kept, list(dropped)
