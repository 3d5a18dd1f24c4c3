"""Old names that a field has better words for are not used anywhere: not in code, tables, docs, or kept results."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

OLD_NAMES = {
    r"(?i)hand[- _]?over|\bhand(s|ed|ing)?[ _]over": "barrier-free stages; a producer, its consumer",
    r"\bHANDED\b|\bAWAIT\b": "SENTINEL, SPIN_UNTIL",
    r"(?i)\bawait(s|ed|ing)?\b(?! [\w.]+[(;])": "waits for (as a keyword it may stay)",
    r"\bEMPTY\b": "SENTINEL",
    r"(?i)\bemptied\b|never_empty": "filled with SENTINEL, not_sentinel",
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
    r"\bLEAST_[A-Z]|\bMOST_[A-Z]": "MIN_, MAX_",
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
    r"\bcopies[./]boxes\b|\bBoxed\b|\bboxed_|\bbox_copy\b": "strided copies",
    r"(?i)\bboxes of (values|f32|floats)": "strided copies",
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


def stems(old: str) -> list[str]:
    """Of each alternative of an expression the longest text that all it finds has in it, in lower case where case does not count."""
    plain = re.sub(r"\[[^]]*\][?*+]?|\\.[?*+]?", "\0", old.removeprefix("(?i)"))
    while (inner := re.sub(r"\([^()]*\)[?*+]?", "\0", plain)) != plain:
        plain = inner
    found = [max(re.split(r"\0|[.+]|\w[?*]", alternative), key=len) for alternative in plain.split("|")]
    return [stem.lower() for stem in found] if old.startswith("(?i)") else found


def lines_with(text: str, stem: str) -> Iterator[int]:
    """Numbers of the lines that have the stem in them, the first is 0."""
    number = begun = 0
    while (at := text.find(stem, begun)) >= 0:
        number += text.count("\n", begun, at)
        yield number
        number, begun = number + 1, text.find("\n", at) + 1
        if not begun:
            return


def hits(files: dict[str, str]) -> list[str]:
    """ "file:line: what was found (what to write)", names of files included. Expressions look at lines that have one of their stems."""
    patterns = [(re.compile(old), stems(old), old.startswith("(?i)"), new) for old, new in OLD_NAMES.items()]
    found = []
    for name, body in files.items():
        text = f"{name}\n{body}"
        lower, lines = text.lower(), text.split("\n")
        for old, parts, any_case, new in patterns:
            for number in sorted({number for part in parts for number in lines_with(lower if any_case else text, part)}):
                found += [f"{name}:{number}: {m[0]} -> {new}" for m in old.finditer(lines[number])]
    return found


def test_a_stem_is_in_all_that_its_alternative_finds() -> None:
    assert stems(r"(?i)\bA(b|c)d? Efg+\b|[A-Z]xy_z?\.path\(") == [" efg", "path"]
    assert stems(r"Ab(?! \w(c|def))|\\ghi.") == ["Ab", "ghi"]
    assert all(len(stem) >= 3 for old in OLD_NAMES for stem in stems(old)), "so short that most lines have it"


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
