"""Old names that a field has better words for are not used anywhere: not in code, tables, docs, or kept results."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

OLD_NAMES = {
    r"(?i)hand[- _]?over|\bhand(s|ed|ing)?[ _]over": "barrier-free stages; a producer, its consumer",
    r"\bHANDED\b|\bAWAIT\b|(?i:\bawait(s|ed|ing)?\b(?! [\w.]+[(;]))": "SENTINEL, SPIN_UNTIL; waits for (as a keyword it may stay)",
    r"\bEMPTY\b|(?i:\bemptied\b|never_empty)": "SENTINEL; filled with SENTINEL, not_sentinel",
    r"(?i)\bword[- ]by[- ]word\b": "fine-grained, by spin-wait on a sentinel",
    r"(?i)\bjoined (stage|product|launch)|\b(stages?|products?) (is|are|not) joined\b": "barrier-free",
    r"(?i)\bgave[ _]up\b|\bgiv(e|es|en|ing)[ _]up\b": "times out",
    r"(?i)adjoin": 'lane_order = "strided" or "blocked"',
    r"(?i)\bbends?\b|\bbent\b|\bunbent\b": "adjusted",
    r"(?i)\bby_hand\b|rows_by_hand|\b(answered|given) by hand\b": "overrides",
    r"\bFixed\(": "Overrides",
    r"(?i)\blaps?\b|\blap_of\b": "Measurement",
    r"(?i)(?<!hill)(?<!hill.)\bclimb|\bto_the_top\b": "hill_climb",
    r"\bPath2\b": "Path",
    r"(?i)\basked for ahead\b": "software prefetch",
    r"\bclass Form\b": "a class named after what it holds",
    r"\b(A_)?TURNED\b|\b\w+_turned\b": "transposed; of RoPE rotated",
    r"\bK_WARPS\b|\bROW_WARPS\b": "subgroups, as Vulkan says (warp_m is CUTLASS's name of a size and may stay)",
    r"\b(LEAST|MOST)_[A-Z]": "MIN_, MAX_",
    r"\bAPART\b|\bstore_apart\b|\bplace_apart\b": "STORE_F32; staged rows; unaliased",
    r"\b(UNIT_)?EIGHTS\b|\b[kv]_eight\b|\bcache_eights\b": "K_ALIGNED, UNITS_ALIGNED; load_k8, load_v8",
    r"code_book|CODE_BOOK": "codebook",
    r"\bWAYS?\b|\b(Gemm|Prompt|Repack)?Way\b|\b(main|plain|matrix|latent)_way\b|\bprompt_ways?\b": "kernel",
    r"\.way\b": "kernel, also as a parameter of [[attention]]",
    r"(?i)\bways? (of|to) (multiply|comput)|\bby a way\b": "kernel, algorithm",
    r"(?i)\blies? anyhow\b|\blying anyhow\b|anyhow_|_anyhow|\banyhow\(": "any strides",
    r"\b_?Lies\b|\bLIES\b|\blies\.|\blies =|lie_elsewhere": "layout",
    r"\b_?Asked\b|\bSaid\b|\bclass Made\b|\bclass Kept\b|\bdef _?(told|further|alone|behind)\b": "a name for what it holds or does",
    r"\bfurther(=| =|:)": "extra_keys, optional, more_prompts: what they are",
    r"\bown_table\b|\bOwnTable\b": "device_table, DeviceTable",
    r"\bcopies[./]boxes\b|\bBoxed\b|\bboxed_|\bbox_copy\b|(?i:\bboxes of (values|f32|floats))": "strided copies",
    r"(?i)\bthe peer\b|\bpeer's\b|\bpeer_(cases?|lines|nmse|cpu|gpt_oss|rows|weights|spec)\b|\bbench_peer\b": "ggml, llama.cpp",
    r"(?<![\"\w])jobs?(?![\"\w])|\b(Gemm|Prompt|Attention)?Jobs?\b|\b\w+_jobs?\b|\bjobs?_\w+": "problem, task, request",
    r"(?i)\brows? (of )?(a|one|its|each) slot\b|\bthread's slot\b|\bslot's (lanes|rows)\b": "row group",
    r"\bwho (rotates|rounds|packs|repacks|chooses the|overrides)\b|\bwhoever (makes|waits|reads)": "which kernel",
    r"(?i)\b(when|is|be) (it is )?first asked for\b|\btold what is\b|\bcan be said\b|\bare told\b": "reported, requested",
    r"(?i)\btok(ens?)?/s\b(?! total=)": "t/s, as in the tables (`[metrics] tok/s total=` is the form of a profile's log)",
}
"""Regular expressions, each with what to write instead."""

NOT_OURS = ("tests/data/war_of_the_worlds.txt", "vkback/shader/shaderc/LICENSES")


def texts() -> dict[str, str]:
    """Tracked text files by name, but this one and those that others wrote."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no checkout of git")
    found = {}
    for name in listed.decode().rstrip("\0").split("\0"):
        path = REPOSITORY / name
        if name in NOT_OURS or path == Path(__file__).resolve() or not path.is_file():
            continue
        raw = path.read_bytes()
        if b"\0" not in raw:
            found[name] = raw.decode("utf-8")
    return found


def hits(files: dict[str, str]) -> list[str]:
    """ "file:line: what was found (what to write)", names of files included."""
    patterns = [(re.compile(old, re.M), new) for old, new in OLD_NAMES.items()]
    found = []
    for name, text in files.items():
        near = [(old, new) for old, new in patterns if old.search(f"{name}\n{text}")]  # most are nowhere in it: lines are not looked at
        for number, line in enumerate([name, *text.splitlines()] if near else ()):
            found += [f"{name}:{number}: {m[0]} -> {new}" for old, new in near for m in old.finditer(line)]
    return found


def test_old_names_are_found_nowhere() -> None:
    found = hits(texts())
    assert not found, "\n".join(["old names:", *found])


@pytest.mark.parametrize(
    "line",
    [
        "stages hand over",
        "a hand-over",
        "handover = 1",
        "HANDED(x)",
        "AWAIT(w)",
        "it awaits x",
        "EMPTY",
        "word by word",
        "joined stages",
        "the wait gave up",
        "given_up",
        "ADJOIN=1",
        "bent: lanes",
        "def bends(",
        "rows_by_hand",
        "by_hand.py",
        "Fixed(tables)",
        "Lap(3)",
        "climb.to_the_top()",
        "Path2",
        "x asked for ahead",
        "class Form:",
        "shape.way == 1",
        "WAYS = ()",
        "way: GemmWay",
        "main_way(x)",
        "two ways to multiply",
        "operands lie anyhow",
        "rows_anyhow(x)",
        "lies = 3",
        "class _Asked:",
        "def told(x):",
        "call(further=())",
        "OwnTable(device)",
        "ops/copies/boxes.py",
        "as the peer spells it",
        "peer_nmse = 1",
        "its jobs are",
        "prompt_job(x)",
        "PromptJob",
        "two rows a slot",
        "measured when first asked for",
        "on_wait: told what is waited for",
        "who packs activations",
        "whoever makes it",
    ],
)
def test_each_old_name_is_seen(line: str) -> None:
    assert hits({"a.py": line})


@pytest.mark.parametrize(
    "line",
    [
        "overlap, absent",
        "handed the file to",
        "hill_climb(points), a hill climb",
        "test_welch_by_hand",
        "queue.Empty, empty()",
        "by way of subnormal f16, either way, on the way",
        "math_way",
        "the bytes lie end to end; it lies in [0, 1)",
        "a row a chosen slot of experts; who speaks",
        "falls further; further inputs",
        '"jobs": part.noun, --peer FOLDER, "peer_line": 1',
    ],
)
def test_other_words_are_left_alone(line: str) -> None:
    assert not hits({"a.py": line})
