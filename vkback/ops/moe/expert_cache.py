"""A cache of experts in device memory, which the device keeps itself (shaders/moe/expert_cache.comp, expert_copy.comp).

EXPERT_CACHE looks the chosen experts up, and gives those that are missing the slots that were used the longest ago:
ids I32 [n, n_used], table I32 (`table_words`) -> slots I32 [n, n_used], moves I32 [n * n_used, 2], the table, in place

EXPERT_COPY copies experts into slots:
w [n_expert, m, k], moves I32 [.., 2], cached [slots, m, k] -> cached, in place. Biases are F32 [n_expert * m], and [slots * m].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from vkback import quants
from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.cost import Cost
from vkback.ops.dispatch import Arg, Dispatch, ceil_div, pack_push
from vkback.ops.ggml_words import sized
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, register
from vkback.ops.storage import nbytes
from vkback.ops.workgroup import workgroup_size
from vkback.shader import Variant

HEAD = 4
"""Words of a table before its experts."""

RUN, WANTED, FOUND = range(3)
"""Words of the head: runs so far, experts that they wanted, those of them that were there."""

MAX_CHOSEN = 1024
"""Choices of a run, at most: each is compared with those before it."""

EACH = 4
"""Words that a thread copies."""

COPY_THREADS = 256


def table_words(n_expert: int, slots: int) -> int:
    """Words of the table of a cache; zeros say that it is empty."""
    return HEAD + n_expert + 2 * slots


def bytes_in_slots(w: Tensor, n_expert: int, slots: int) -> int:
    """Bytes of the slots for a tensor of experts."""
    return nbytes(cached_tensor(w, n_expert, slots, ""))


def cached_tensor(w: Tensor, n_expert: int, slots: int, name: str) -> Tensor:
    """The slots for a tensor of experts, of its type."""
    shape = (slots, *w.shape[1:]) if len(w.shape) > 1 else (w.shape[0] // n_expert * slots,)
    return Tensor(name, w.type, shape, w.kind)


def copy_problem(w: Tensor, n_expert: int) -> str:
    """Why experts of a tensor cannot be copied; "" when they can."""
    if any(size % 4 for _, size in _planes(w, n_expert)):
        return f"{w}: an expert's planes are no whole words"
    return ""


def _planes(w: Tensor, n_expert: int) -> list[tuple[int, int]]:
    """Byte at which each plane begins, and the bytes of an expert there."""
    if len(w.shape) == 1:
        return [(0, 4 * w.shape[0] // n_expert)]
    rows = prod(w.shape[:-1])
    return [(p.offset, p.row_bytes * rows // n_expert) for p in quants.layout(w.type, rows, w.shape[-1]).planes]


@register
class ExpertCache(Op):
    """See the module's text. params: n_expert, slots."""

    name = "EXPERT_CACHE"

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        return {}

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        ids, table = np.asarray(inputs[0]).ravel(), np.array(inputs[1], np.int64)
        n_expert, slots = params["n_expert"], params["slots"]
        slot_of, expert_of, last_use = np.split(table[HEAD:], [n_expert, n_expert + slots])
        run = table[RUN] + 1
        distinct = list(dict.fromkeys(ids.tolist()))
        missing = [e for e in distinct if not slot_of[e]]
        kept = {slot_of[e] - 1 for e in distinct if slot_of[e]}
        oldest = sorted((s for s in range(slots) if s not in kept), key=lambda s: (last_use[s], s))
        moves = np.full((ids.size, 2), -1, np.int64)
        for i, (expert, slot) in enumerate(zip(missing, oldest, strict=False)):
            if expert_of[slot]:
                slot_of[expert_of[slot] - 1] = 0
            slot_of[expert], expert_of[slot] = slot + 1, expert + 1
            moves[i] = expert, slot
        found = slot_of[ids] - 1
        last_use[found] = run
        head = [run, table[WANTED] + len(distinct), table[FOUND] + len(distinct) - len(missing), table[3]]
        after = np.concatenate([head, slot_of, expert_of, last_use])
        return [np.asarray(each, np.int32) for each in (found.reshape(inputs[0].shape), moves, after)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        (ids, table), (found, moves, _) = node.inputs, node.outputs
        n_expert, slots, chosen = node.params["n_expert"], node.params["slots"], ids.elements
        if not 1 <= chosen <= min(slots, MAX_CHOSEN) or table.elements != table_words(n_expert, slots):
            raise PlanError(
                f"[EXPERT_CACHE] {node.name}: {chosen} choices, {slots} slots and {table}; expected at most as many choices as slots "
                f"(and {MAX_CHOSEN}), and {table_words(n_expert, slots)} words"
            )
        need, room = 4 * (2 * slots + 5 * chosen), ctx.caps.max_shared_memory
        if need > room:
            raise PlanError(f"[EXPERT_CACHE] {node.name}: {slots} slots need {need} bytes of shared memory, {ctx.caps.name} has {room}")
        wg = workgroup_size(ctx.caps, 256, max(slots, chosen))
        return [
            Dispatch(
                kernel=Variant.of("moe/expert_cache.comp", {"WG_SIZE": wg, "N_EXPERT": n_expert, "SLOTS": slots, "CHOSEN": chosen}),
                args=(Arg(ids), Arg(table, "rw"), Arg(found, "w"), Arg(moves, "w")),
                push=b"",
                groups=(1, 1, 1),
                op=node.op,
                label=node.name,
                nbytes=nbytes(table) + sum(map(nbytes, (ids, found, moves))),
            )
        ]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(0.0, 0.0, "whole numbers are right or wrong")

    def cases(self) -> Iterator[Case]:
        for n_expert, slots, n, used, runs in (
            (7, 3, 1, 3, 0),
            (7, 3, 1, 3, 5),
            (8, 8, 1, 2, 20),
            (128, 40, 1, 8, 30),
            (128, 64, 4, 8, 9),
            (512, 300, 1, 10, 99),
            (60, 33, 8, 4, 3),
        ):
            yield self.build_case(n_expert, slots, n, used, runs)
        yield self.build_case(16, 12, 3, 4, 0)  # tokens that want the same missing expert
        for runs, seed in ((7, 18), (10, 19)):  # the expert that was used the longest ago is one of those wanted
            yield self.build_case(8, 4, 1, 2, runs, seed)

    def full_cases(self) -> Iterator[Case]:
        for n_expert, slots, n, used in ((4, 1, 1, 1), (32, 31, 7, 4), (128, 128, 16, 8), (256, 97, 3, 8)):
            for runs in (0, 1, 2, 50):
                yield self.build_case(n_expert, slots, n, used, runs, seed=2)

    def perf_cases(self) -> Iterator[Case]:
        for slots, n in ((32, 1), (64, 1), (96, 1), (64, 8)):
            yield self.build_case(128, slots, n, 8, 50)

    def build_case(self, n_experts: int, slots: int, n_token: int, n_used: int, runs: int, seed: int = 1) -> Case:
        """A table as so many runs before have left it. Few experts are chosen often, the others rarely."""
        if not 1 <= n_used <= n_experts or n_token * n_used > slots:
            raise CaseLineError(f"{self.name}: n_token={n_token}, n_used={n_used}: expected at most {slots} choices, the slots")
        sized((n_experts, slots))
        params = {"n_expert": n_experts, "slots": slots}

        def make(rng: np.random.Generator) -> Problem:
            often = 1.0 / np.arange(1, n_experts + 1)

            def choice() -> Array:
                rows = [rng.choice(n_experts, n_used, replace=False, p=often / often.sum()) for _ in range(n_token)]
                return np.array(rows, np.int32)

            held = np.zeros(table_words(n_experts, slots), np.int32)
            for _ in range(runs):
                held = self.reference([choice(), held], params)[2]
            ids = Tensor("ids", "I32", (n_token, n_used), "input")
            table = Tensor("table", "I32", held.shape, "state")
            outputs = (Tensor("slots", "I32", ids.shape), Tensor("moves", "I32", (ids.elements, 2)), table)
            return Problem(Node(self.name, (ids, table), outputs, params), {"ids": choice(), "table": held})

        sizes = {"n_experts": n_experts, "slots": slots, "n_token": n_token, "n_used": n_used, "runs": runs}
        return Case(self.name, {**sizes, "seed": seed}, make, seed)


@register
class ExpertCopy(Op):
    """See the module's text. params: n_expert."""

    name = "EXPERT_COPY"
    weight_type = "type"

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        return {}

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        w, moves, cached = inputs
        after = np.array(cached, np.float64)
        experts = np.asarray(w, np.float64).reshape(params["n_expert"], -1)
        held = after.reshape(-1, experts.shape[1])
        for expert, slot in np.asarray(moves).reshape(-1, 2).tolist():
            if expert >= 0:
                held[slot] = experts[expert]
        return [held.reshape(after.shape)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        w, moves, cached = node.inputs
        n_expert = node.params["n_expert"]
        if problem := copy_problem(w, n_expert):
            raise PlanError(f"[EXPERT_COPY] {node.name}: {problem}")
        slots = cached.elements * n_expert // w.elements
        source, target = _planes(w, n_expert), _planes(cached, slots)
        width = 4 if any(size % 16 for _, size in source) else 16
        words = sum(size for _, size in source) // width
        wg = workgroup_size(ctx.caps, COPY_THREADS, words)
        copies = moves.elements // 2
        moved = copies * words * width
        return [
            Dispatch(
                kernel=Variant.of("moe/expert_copy.comp", {"WG_SIZE": wg, "EACH": EACH, "WIDTH": width, "PLANES": len(source)}),
                args=(Arg(w), Arg(moves), Arg(cached, "rw")),
                push=pack_push(
                    words,
                    *(begin // width for begin, _ in source),
                    *(begin // width for begin, _ in target),
                    *(size // width for _, size in source),
                ),
                groups=(ceil_div(words, wg * EACH), copies, 1),
                op=node.op,
                label=node.name,
                nbytes=2 * moved,
            )
        ]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(0.0, 0.0, "bytes are copied")

    def cases(self) -> Iterator[Case]:
        for i, kind in enumerate(("Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL", "MXFP4", "TQ1_0", "F16")):
            yield self.build_case(kind, n_experts=6, slots=4, m=96, k=256, copies=1 + i % 3)
        yield self.build_case("Q8_0", n_experts=5, slots=3, m=6, k=64, copies=3)  # planes of no whole 16 bytes
        yield self.build_case("F32", n_experts=5, slots=3, m=33, k=0, copies=2)

    def full_cases(self) -> Iterator[Case]:
        for kind in quants.WEIGHT_TYPES:
            yield self.build_case(kind, n_experts=7, slots=5, m=64, k=512, copies=3, seed=2)

    def perf_cases(self) -> Iterator[Case]:
        for copies in (0, 1, 8):
            yield self.build_case("Q4_K", n_experts=16, slots=8, m=1536, k=2048, copies=copies)

    def build_case(self, type: str, n_experts: int, slots: int, m: int, k: int, copies: int, seed: int = 1) -> Case:
        """Experts of m rows of k weights; k=0: biases. One copy more is none."""
        kind = type.upper()
        if kind not in quants.WEIGHT_TYPES or (not k and kind != "F32") or not 0 <= copies <= min(slots, n_experts):
            raise CaseLineError(f"{self.name}: type={type}, copies={copies}: expected a type of weights, F32 with k=0, and as many slots")
        sized((n_experts, m, max(k, 1)))

        def make(rng: np.random.Generator) -> Problem:
            shape = (n_experts, m, k) if k else (n_experts * m,)
            w = Tensor("w", kind, shape, "weight")
            cached = cached_tensor(w, n_experts, slots, "cached")
            values: dict[str, Array] = {
                t.name: quants.random_blocks(kind, prod(t.shape[:-1]), k, rng, std=0.5) if k else rng.standard_normal(t.shape, np.float32)
                for t in (w, cached)
            }
            moves = np.full((copies + 1, 2), -1, np.int32)
            moves[:copies] = np.stack([rng.permutation(n_experts)[:copies], rng.permutation(slots)[:copies]], axis=1)
            values["moves"] = moves
            node = Node(self.name, (w, Tensor("moves", "I32", moves.shape, "input"), cached), (cached,), {"n_expert": n_experts})
            return Problem(node, values)

        sizes = {"n_experts": n_experts, "slots": slots, "m": m, "k": k, "copies": copies}
        return Case(self.name, {"type": type, **sizes, "seed": seed}, make, seed)
