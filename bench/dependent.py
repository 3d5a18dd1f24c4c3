"""Times dependent GEMV chains, barrier-free where the tables say so, and with barriers.

    python bench/dependent.py [--quant Q4_K,Q6_K] [--shape 14336x4096] [--ids 128x8] [VARIANT...]

A round is norm and GEMV [m, k], then GEMV [k, m]; with --ids EXPERTSxUSED a router before them (vkback/timing/dependent.py). A line
each for the tables and every variant of them (rows as in bench/one_token.py): microseconds a round, and in brackets, for each GEMV, how
far above plain reads of the same bytes, launch after launch with barriers. `schedule : sync=sentinel` tries barrier-free stages where the
tables have none.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from vkback.device import Device
from vkback.ops.lowering import LowerContext
from vkback.shader import ShaderLibrary
from vkback.timing.dependent import DependentChain
from vkback.timing.launches import Measurement
from vkback.timing.read_rate import MIN_READ, measure_read_rate, plain_read_us
from vkback.tuning.lookup import Tuning, with_overrides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", metavar="VARIANT")
    parser.add_argument("--quant", default="Q4_K")
    parser.add_argument("--shape", default="14336x4096")
    parser.add_argument("--ids", default="0x0")
    args = parser.parse_intermixed_args()
    experts, used = map(int, args.ids.split("x"))
    library = ShaderLibrary()
    with Device.open() as device:
        tables = Tuning.for_device(device.caps)
        variants = ["", *args.variants]
        contexts = [LowerContext(device.caps, with_overrides(tables, text)) for text in variants]
        print(f"{device.caps.name}, driver {device.caps.driver_info}: read rate {measure_read_rate(device, library).gb_s:.0f} GB/s")
        for quant in args.quant.split(","):
            for shape in args.shape.split(","):
                m, k = map(int, shape.split("x"))
                with DependentChain(device, library, quant, m, k, experts=experts, used=used) as dependent:
                    dependent.compile(contexts)
                    found = [dependent.time(ctx) for ctx in contexts]
                floors = [plain_read_us(device, library, max(nbytes, MIN_READ)) for nbytes in dependent.nbytes]
                title = f"{quant} {shape}, {used} of {experts} experts" if experts else f"{quant} {shape}"
                reads = " + ".join(f"{f:.2f}" for f in floors)
                print(f"{title}: {sum(dependent.nbytes) / 1e6:.1f} MB, plain reads {reads} us")
                for text, t in zip(variants, found, strict=True):
                    barrier_free = f"barrier-free {against(floors, t.barrier_free)}, " if t.barrier_free else ""
                    wrong = f" WRONG: {t.wrong}" if t.wrong else ""
                    print(f"  {barrier_free}barriers {against(floors, t.barriers)}: {text or 'tables'}{wrong}", flush=True)


def against(floors: Sequence[float], found: Measurement) -> str:
    """A round's time, and what one GEMV takes longer than its plain read."""
    return f"{found.us:.2f} ± {found.spread_us:.2f} us ({(found.us - sum(floors)) / len(floors):+.2f})"


if __name__ == "__main__":
    main()
