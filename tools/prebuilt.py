"""Builds the SPIR-V of shaders/prebuilt, for which a GLSL compiler must know GL_KHR_cooperative_matrix (shaderc 2024 or newer).

    python tools/prebuilt.py            compile all and write the manifest
    python tools/prebuilt.py --check    only say which modules are missing or older than their source; status 1 if any
"""

from __future__ import annotations

import argparse
import sys

from vkback.ops import attention_prompt, mat_mul
from vkback.paths import shader_root
from vkback.shader import ShaderLibrary
from vkback.shader.prebuilt import FOLDER, stale, write


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    variants = [*mat_mul.prebuilt_variants(), *attention_prompt.prebuilt_variants()]
    if args.check:
        old = stale(shader_root(), variants)
        for name in old:
            print(f"missing or stale: {name}")
        return int(bool(old))
    write(shader_root(), variants, ShaderLibrary())
    files = list((shader_root() / FOLDER).glob("*.spv"))
    print(f"{len(files)} modules, {sum(f.stat().st_size for f in files) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
