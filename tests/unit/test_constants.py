"""Constants of kernels, and so the kernels' hashes, have the same bits whatever the processor, the C library, the locale and the hash seed.

Each environment is a process of its own. A C library whose pow, exp and log are off by one bit stands for those of other systems; numpy
without all that it chooses by processor, for other processors.
"""

from __future__ import annotations

import decimal
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain_numpy import plain_numpy
from processes import run_program

from vkback.constants import LOG2_E, PI, exact, log, power
from vkback.ops.rope.angles import DEFAULTS, fixed_point, mscale
from vkback.ops.soft_max import slopes

ROOT = Path(__file__).parents[2]

YARN = {"ext_factor": 1.0, "freq_scale": 1 / 32, "n_ctx_orig": 4096}
TABLES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"n_dims": 64}, "36eb7a89341fb789"),
    ({"n_dims": 128, "freq_base": 500000.0}, "432ecf907ecf2001"),
    ({"n_dims": 128, "freq_base": 1e6}, "80d1f37eb3129350"),
    ({"n_dims": 96, "attn_factor": 1.1902380943}, "e8435bc3e03583c3"),
    ({"n_dims": 64, "freq_base": 150000.0, **YARN}, "bf4e17cb65d8f39b"),
    ({"n_dims": 64, "freq_scale": 0.025, "ext_factor": 1.0, "n_ctx_orig": 4096, "attn_factor": 0.7305}, "a83f722ad71fb2f1"),
    ({"n_dims": 20, "freq_scale": 1.4245, "ext_factor": 0.7465, "n_ctx_orig": 0}, "4a96b1d45af0e8b8"),
)
"""Params beside the defaults, and the beginning of the SHA-256 of their magnitude and frequencies."""


def table_hash(params: Mapping[str, Any]) -> str:
    given = {**DEFAULTS, **params}
    return hashlib.sha256(json.dumps([mscale(given), *fixed_point(given)]).encode()).hexdigest()[:16]


@pytest.mark.parametrize(("params", "recorded"), TABLES, ids=lambda value: value if isinstance(value, str) else None)
def test_tables_are_as_recorded(params: dict[str, Any], recorded: str) -> None:
    assert table_hash(params) == recorded


def test_frequencies_are_the_nearest_fractions() -> None:
    """Of a base whose powers are rational, by whole numbers: 16^(-2 * 2i / 8) = 4^-i."""
    turn = Fraction(int(PI * 10**40), 10**40) * 2
    wanted = [round(Fraction(1, 4**i) / turn * 2**64) for i in range(4)]
    assert fixed_point({**DEFAULTS, "n_dims": 8, "freq_base": 256.0}) == wanted


def test_constants_are_nearest_doubles() -> None:
    with exact():
        assert float(1 / log(2.0)) == LOG2_E
        assert float(PI) == np.pi
    assert slopes(8, 8.0)[1] == 0.5 and slopes(12, 8.0)[1:] == (0.5, float(np.sqrt(0.5)))
    assert mscale({**DEFAULTS, "ext_factor": 1.0, "freq_scale": 0.25}) == pytest.approx(1 + 0.1 * np.log(4), rel=1e-15)


def test_the_callers_decimal_context_changes_nothing() -> None:
    with decimal.localcontext(decimal.Context(prec=5, rounding=decimal.ROUND_UP)):
        here = power(3.0, 1.0, 3), log(3.0), table_hash({"n_dims": 34, "freq_base": 10001.0})
    assert here == (power(3.0, 1.0, 3), log(3.0), table_hash({"n_dims": 34, "freq_base": 10001.0}))


OTHER_LIBM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <math.h>
#include <string.h>
static double off(double x) {
    unsigned long long bits;
    memcpy(&bits, &x, 8);
    return (bits & 0xffffff) == 0 || !isfinite(x) ? x : nextafter(x, INFINITY); /* powers of two and small integers are right everywhere */
}
#define ONE(name) double name(double x) { \\
    static double (*real)(double); if (!real) real = dlsym(RTLD_NEXT, #name); return off(real(x)); }
ONE(exp) ONE(exp2) ONE(expm1) ONE(log) ONE(log2) ONE(log10) ONE(log1p) ONE(sin) ONE(cos) ONE(tan) ONE(tanh) ONE(cbrt) ONE(erf)
double pow(double x, double y) {
    static double (*real)(double, double); if (!real) real = dlsym(RTLD_NEXT, "pow"); return off(real(x, y)); }
"""
"""Stands for another C library: each result that is not a short number is the next double."""


Digests = dict[str, str]


def digests(which: str | Path, environment: Mapping[str, str], locale: str = "") -> tuple[Digests, list[str]]:
    """Of a process of its own, as tests/kernel_digests.py has them; and those that have a constant which none before had."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), **environment}
    program = [sys.executable, str(ROOT / "tests" / "kernel_digests.py"), locale, str(which)]
    ran = run_program(program, env=env, timeout=900)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    return found["digests"], found["telling"]


def other_c_library(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that has it; empty where there is none to be had."""
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        print("not with another C library: it needs LD_PRELOAD and a C compiler")
        return {}
    source, library = tmp_path / "libm.c", tmp_path / "libm.so"
    source.write_text(OTHER_LIBM, encoding="utf-8")
    run_program([compiler, "-O1", "-fno-builtin", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    off = [sys.executable, "-c", "import math; print(math.pow(10000, 0.3), math.log(3))"]
    own, other = (run_program(off, env=os.environ | more).stdout for more in ({}, {"LD_PRELOAD": str(library)}))
    if own == other:
        print("not with another C library: this Python has its mathematics built in")
        return {}
    return {"LD_PRELOAD": str(library)}


def decimal_commas(tmp_path: Path) -> tuple[dict[str, str], str]:
    """The environment of a process in German, and its locale, which glibc's `localedef` makes where it is not installed; empty where it
    cannot."""
    maker = shutil.which("localedef")
    if maker is None or not Path("/usr/share/i18n/locales/de_DE").is_file():
        print("not with decimal commas: it needs localedef and the sources of glibc's locales")
        return {}, ""
    run_program([maker, "-i", "de_DE", "-f", "UTF-8", tmp_path / "de_DE.UTF-8"])
    return {"LOCPATH": str(tmp_path)}, "de_DE.UTF-8"


def judge(which: str | Path, usual: Digests, tmp_path: Path) -> None:
    """All in one process, since none may change a bit. Each alone, where one of them does: the first that fails is the one."""
    library, (commas, locale) = other_c_library(tmp_path), decimal_commas(tmp_path)
    if digests(which, {**plain_numpy(), **library, **commas, "PYTHONHASHSEED": "1"}, locale)[0] == usual:
        return
    for environment, language in (({"PYTHONHASHSEED": "1"}, ""), (plain_numpy(), ""), ({**plain_numpy(), **library}, ""), (commas, locale)):
        found, _ = digests(which, environment, language)
        assert found.keys() == usual.keys()
        assert not [name for name, value in found.items() if value != usual[name]]
    pytest.fail("no one of them changes kernels, all together do")


def test_kernels_of_another_processor_c_library_locale_and_hash_seed(tmp_path: Path) -> None:
    """Of all models and ops as few cases as have every constant of every kernel."""
    usual, telling = digests("most", {"PYTHONHASHSEED": "0"})
    assert sum(name.startswith("nvidia") for name in usual) > 1000 and len(telling) > 200
    assert any("tiny-gpt-oss of 16 tokens" in name for name in usual)
    names = tmp_path / "names.json"
    names.write_text(json.dumps(telling), encoding="utf-8")
    judge(names, {name: usual[name] for name in telling}, tmp_path)


@pytest.mark.exhaustive
def test_all_kernels_of_another_processor_c_library_locale_and_hash_seed(tmp_path: Path) -> None:
    """All models and ops on two devices."""
    judge("all", digests("all", {"PYTHONHASHSEED": "0"})[0], tmp_path)
