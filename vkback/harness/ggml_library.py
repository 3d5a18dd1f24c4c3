"""Cases of the suite on another backend: a library of ggml (libggml-cpu.so, libggml-vulkan.so, ...) by its C interface.

The values, the references, the guard words and the verdicts are the suite's own. The library runs in a process of its own
(`GgmlSuite`): an assertion that fails there ends that process, and the case, but not the run.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from math import sqrt
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from vkback import quants
from vkback.device import Capabilities
from vkback.errors import VkbackError
from vkback.evaluate.judge import ggml_limit, judge
from vkback.graph import Tensor
from vkback.harness.cases import context_of, find_case
from vkback.harness.ggml_ops import FUNCTIONS, axes_of, outputs_of, shape4
from vkback.harness.result import CaseResult
from vkback.harness.runner import GUARD, GUARD_WORD, GuardError, OverwriteError, expected
from vkback.harness.suite import Run, judged
from vkback.ops.case import Array, Case, Problem, Tolerance
from vkback.ops.case_line import CaseLineError, line_of
from vkback.ops.general import DTYPES
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.view import View
from vkback.tuning.lookup import Tuning

TIMEOUT_S = 900.0
"""For a case: compiling the library's shaders on a CPU driver is part of it."""

SIGMAS = 12.0
"""An element may be off by so many times the rms of the error that NMSE allows. Errors of rounding do not get there in a million of them;
a wrong element or row does."""

C_TYPES = {"T": "void *", "f": "float", "i": "int", "b": "bool", "l": "int64_t", "z": "size_t", "s": "int *"}

CDEF = """
struct ggml_init_params { size_t mem_size; void * mem_buffer; bool no_alloc; };
void * ggml_init(struct ggml_init_params params);
void ggml_free(void * ctx);
size_t ggml_tensor_overhead(void);
size_t ggml_graph_overhead(void);
void * ggml_new_tensor(void * ctx, int type, int n_dims, const int64_t * ne);
size_t ggml_nbytes(const void * tensor);
size_t ggml_type_size(int type);
void * ggml_new_graph(void * ctx);
void ggml_build_forward_expand(void * graph, void * tensor);
void ggml_soft_max_add_sinks(void * a, void * sinks);
void ggml_flash_attn_ext_add_sinks(void * a, void * sinks);
size_t ggml_backend_reg_dev_count(void * reg);
void * ggml_backend_reg_dev_get(void * reg, size_t index);
void * ggml_backend_dev_init(void * device, const char * params);
const char * ggml_backend_dev_name(void * device);
const char * ggml_backend_dev_description(void * device);
void * ggml_backend_get_default_buffer_type(void * backend);
size_t ggml_backend_buft_get_alignment(void * buft);
size_t ggml_backend_buft_get_alloc_size(void * buft, const void * tensor);
void * ggml_backend_buft_alloc_buffer(void * buft, size_t size);
void * ggml_backend_buffer_get_base(void * buffer);
void ggml_backend_buffer_free(void * buffer);
int ggml_backend_tensor_alloc(void * buffer, void * tensor, void * addr);
int ggml_backend_view_init(void * tensor);
void ggml_backend_tensor_set(void * tensor, const void * data, size_t offset, size_t size);
void ggml_backend_tensor_get(const void * tensor, void * data, size_t offset, size_t size);
bool ggml_backend_supports_op(void * backend, const void * op);
int ggml_backend_graph_compute(void * backend, void * graph);
void * ggml_backend_init(void);
""" + "\n".join(f"void * {name}(void *{''.join(f', {C_TYPES[c]}' for c in signature)});" for name, signature in FUNCTIONS.items())
"""What is used of ggml.h and ggml-backend.h (ggml 0.27); tensors and all else as pointers."""


class LibraryError(VkbackError):
    """A library that cannot be used, with what it lacks."""


def type_ids() -> dict[str, int]:
    """Numbers of ggml's types."""
    from gguf import GGMLQuantizationType

    return {each.name: int(each) for each in GGMLQuantizationType}


class Building:
    """A graph of one op on a backend. library: the functions."""

    def __init__(self, ffi: Any, library: Any, types: dict[str, int]) -> None:
        self.ffi, self.library, self._types = ffi, library, types
        size = 64 * library.ggml_tensor_overhead() + library.ggml_graph_overhead()
        self.context = library.ggml_init(ffi.new("struct ggml_init_params *", (size, ffi.NULL, True))[0])
        self.kept: list[tuple[Any, bytes | None, str]] = []
        """Tensors with memory of their own, what they hold, and their names."""
        self.views: list[Any] = []

    def leaf(self, tensor: Tensor, values: Array) -> Any:
        """A tensor that holds values."""
        made = self._new(tensor.type, shape4(tensor.shape))
        data = raw_bytes(tensor, values)
        if len(data) != self.library.ggml_nbytes(made):
            raise PlanError(f"{tensor}: {len(data)} bytes, ggml has {self.library.ggml_nbytes(made)} for it")
        self.kept.append((made, data, tensor.name))
        return made

    def empty(self, tensor: Tensor) -> Any:
        """A tensor that an op writes."""
        made = self._new(tensor.type, shape4(tensor.shape))
        self.kept.append((made, None, tensor.name))
        return made

    def view(self, tensor: Any, type: str, view: View) -> Any:
        """A view of such a tensor."""
        shown = view.four()
        order, axes = axes_of(shown)
        each = self.library.ggml_type_size(self._types[type])
        block = quants.quant(type).block_values if type in quants.QUANTS else 1
        if block > 1 and (order != (0, 1, 2, 3) or any(n % block for n in (view.offset, *shown.strides[:3]))):
            raise PlanError(f"a view of {type} whose rows are no whole blocks")
        steps = [s * each // block for s in shown.strides]
        for axis in range(2, -1, -1):  # of axes of length 1 ggml wants a stride, too
            slow, fast = order[axis], order[axis + 1]
            if shown.shape[slow] == 1:
                steps[slow] = steps[fast] * shown.shape[fast] if axis < 2 else max(1, shown.shape[fast] // block) * each
        ne = [shown.shape[axis] for axis in reversed(order)]
        nb = [steps[axis] for axis in reversed(order)][1:]
        made = self.library.ggml_view_4d(self.context, tensor, *ne, *nb, view.offset * each // block)
        self.views.append(made)
        if axes != (0, 1, 2, 3):
            made = self.library.ggml_permute(self.context, made, *axes)
            self.views.append(made)
        return made

    def op(self, name: str, *arguments: Any) -> Any:
        """An op; its result has memory of its own unless it is a view of an input."""
        given = [self.ffi.NULL if a is None else self.ffi.new("int[4]", a) if isinstance(a, list) else a for a in arguments]
        made = getattr(self.library, f"ggml_{name}")(self.context, *given)
        if name in ("cpy", "set_rows"):
            self.views.append(made)
        else:
            self.kept.append((made, None, "the result"))
        return made

    def _new(self, type: str, ne: list[int]) -> Any:
        if type not in self._types:
            raise PlanError(f"{type} is not a type of ggml")
        return self.library.ggml_new_tensor(self.context, self._types[type], 4, self.ffi.new("int64_t[4]", ne))


def raw_bytes(tensor: Tensor, values: Array) -> bytes:
    """Values as ggml has them in memory."""
    if values.dtype == np.uint8:
        return values.tobytes()
    if tensor.type == "BF16":
        words = np.ascontiguousarray(values, np.float32).view(np.uint32)
        return np.asarray(words >> 16, np.uint16).tobytes()
    if tensor.type not in DTYPES:
        raise PlanError(f"{tensor}: values of another form than ggml's")
    return np.ascontiguousarray(values, DTYPES[tensor.type]).tobytes()


def from_bytes(type: str, data: bytes, shape: tuple[int, ...]) -> Array:
    """The reverse, as float32 or integers; a quantized type decoded."""
    if type == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    if type in DTYPES:
        found = np.frombuffer(data, DTYPES[type]).reshape(shape)
        return found.astype(np.float32) if type == "F16" else found
    rows = np.frombuffer(data, np.uint8).reshape(-1, len(data) // max(1, int(np.prod(shape[:-1]))))
    return np.asarray(quants.decode(type, rows), np.float32).reshape(shape)


class GgmlLibrary:
    """An open library and a backend of its first device. Raises LibraryError."""

    def __init__(self, path: Path) -> None:
        import cffi

        self._ffi: Any = cffi.FFI()
        self._ffi.cdef(CDEF + "\n".join(f"void * ggml_backend_{name}_reg(void);" for name in REGISTRIES))
        try:
            self._lib = self._ffi.dlopen(str(path), 0x102 if sys.platform == "linux" else 0)  # now, and for the libraries behind it
            reg = self._registry(path)
        except (OSError, AttributeError) as e:
            raise LibraryError(f"--library {path}: {e}; expected a backend of ggml, as libggml-cpu.so or libggml-vulkan.so") from e
        if not reg or not self._lib.ggml_backend_reg_dev_count(reg):
            raise LibraryError(f"--library {path}: it finds no device (Vulkan's CPU drivers: GGML_VK_VISIBLE_DEVICES=0)")
        device = self._lib.ggml_backend_reg_dev_get(reg, 0)
        name = self._ffi.string(self._lib.ggml_backend_dev_name(device)).decode()
        about = self._ffi.string(self._lib.ggml_backend_dev_description(device)).decode()
        self.description = f"{name} ({about})"
        self._backend = self._lib.ggml_backend_dev_init(device, self._ffi.NULL)
        if not self._backend:
            raise LibraryError(f"--library {path}: {self.description} cannot be opened")
        self._types = type_ids()

    def _registry(self, path: Path) -> Any:
        """What the library registers: by the function of libraries that are loaded by name, else by its own."""
        names = ["ggml_backend_init", *(f"ggml_backend_{name}_reg" for name in REGISTRIES if REGISTRIES[name] in path.name)]
        for name in names:
            try:
                return getattr(self._lib, name)()
            except AttributeError:
                continue
        raise AttributeError(f"it has none of {', '.join(names)}")

    def run(self, problem: Problem, built: Callable[[], None] = lambda: None) -> dict[str, Array]:
        """The outputs of a problem's node by name. built: called when the graph is made, before it is computed.

        Raises PlanError where ggml has no such op or the backend does not take it, GuardError and OverwriteError as the suite does.
        """
        if problem.parts:
            raise PlanError("nodes that fill an output between them are vkback's own")
        build = Building(self._ffi, self._lib, self._types)
        try:
            result = outputs_of(problem.node, problem.values, build)
            built()
            return self._run(problem, build, result)
        finally:
            self._lib.ggml_free(build.context)

    def _run(self, problem: Problem, build: Building, result: Any) -> dict[str, Array]:
        lib, ffi = self._lib, self._ffi
        (output,) = {t.name: t for t in problem.node.outputs}.values()
        if not lib.ggml_backend_supports_op(self._backend, result):
            raise PlanError(f"[{problem.node.op}] this backend does not take it")
        buft = lib.ggml_backend_get_default_buffer_type(self._backend)
        align = max(GUARD, lib.ggml_backend_buft_get_alignment(buft))
        offsets, end = [], align
        for tensor, _, _ in build.kept:
            offsets.append(end)
            size = lib.ggml_backend_buft_get_alloc_size(buft, tensor)
            end += -(-(size + GUARD) // align) * align
        buffer = lib.ggml_backend_buft_alloc_buffer(buft, end)
        if not buffer:
            raise PlanError(f"[{problem.node.op}] {end} bytes cannot be allocated")
        try:
            base = ffi.cast("char *", lib.ggml_backend_buffer_get_base(buffer))
            block = build._new("I8", [end, 1, 1, 1])
            lib.ggml_backend_tensor_alloc(buffer, block, base)
            image = np.full(end // 4, GUARD_WORD["written"], np.uint32).view(np.uint8)
            sizes = [int(lib.ggml_nbytes(tensor)) for tensor, _, _ in build.kept]
            for (tensor, data, _), offset in zip(build.kept, offsets, strict=True):
                if lib.ggml_backend_tensor_alloc(buffer, tensor, base + offset):
                    raise PlanError(f"[{problem.node.op}] a tensor cannot be placed")
                if data is not None:
                    image[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
            for view in build.views:
                lib.ggml_backend_view_init(view)
            lib.ggml_backend_tensor_set(block, ffi.from_buffer(image), 0, end)
            graph = lib.ggml_new_graph(build.context)
            lib.ggml_build_forward_expand(graph, result)
            if status := lib.ggml_backend_graph_compute(self._backend, graph):
                raise LibraryError(f"[{problem.node.op}] ggml_backend_graph_compute gave {status}")
            after = np.empty(end, np.uint8)
            lib.ggml_backend_tensor_get(block, ffi.from_buffer(after), 0, end)
            self._check(problem, build, offsets, sizes, image, after)
            found = np.empty(int(lib.ggml_nbytes(result)), np.uint8)
            lib.ggml_backend_tensor_get(result, ffi.from_buffer(found), 0, found.nbytes)
        finally:
            lib.ggml_backend_buffer_free(buffer)
        return {output.name: from_bytes(output.type, found.tobytes(), output.shape)}

    def _check(self, problem: Problem, build: Building, offsets: list[int], sizes: list[int], before: Array, after: Array) -> None:
        """Nothing but results changed, and a tensor that an op writes in place."""
        changed = before != after
        place = {"CPY", "DUP", "SET_ROWS"}
        targets = {t.name for t in problem.node.outputs} if problem.node.op in place else set()
        for (_, data, name), offset, size in zip(build.kept, offsets, sizes, strict=True):
            if data is None or name in targets:
                changed[offset : offset + size] = False
            elif changed[offset : offset + size].any():
                count = int(np.count_nonzero(changed[offset : offset + size]))
                raise OverwriteError(f"[{problem.node.op}] {name}: {count} of its {size} bytes were changed, and it may only be read")
        if changed.any():
            first = int(np.flatnonzero(changed)[0])
            near = max((i for i, offset in enumerate(offsets) if offset <= first), default=0)
            beyond = first - offsets[near] - sizes[near]
            count, name = int(np.count_nonzero(changed)), build.kept[near][2]
            raise GuardError(f"[{problem.node.op}] {name}: {count} guard bytes were overwritten, the first {beyond} behind its end")


REGISTRIES = {"cpu": "cpu", "vk": "vulkan", "cuda": "cuda", "metal": "metal", "sycl": "sycl", "opencl": "opencl", "webgpu": "webgpu"}
"""Functions that register a backend, by what its file is called."""


# -- the process


def _serve(pipe: Connection, path: str, said: str) -> None:
    """Run the cases whose lines come. said: a file for what the library writes."""
    with open(said, "ab", buffering=0) as file:  # noqa: PTH123
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # Where an assertion fails in several threads at once, each of them would wait for a debugger to print a backtrace, and all for ever.
    os.environ["GGML_NO_BACKTRACE"] = "1"
    try:
        library = GgmlLibrary(Path(path))
        pipe.send(("open", library.description))
        while True:
            line = pipe.recv()
            try:
                pipe.send(("ran", library.run(find_case(line).build(), lambda: pipe.send(("built", "")))))
            except PlanError as e:
                pipe.send(("unsupported", str(e)))
            except VkbackError as e:
                pipe.send(("failed", str(e)))
            except Exception as e:  # a fault in one op's builder must not take the other cases with it
                pipe.send(("broken", f"{type(e).__name__}: {e}"))
    except VkbackError as e:
        pipe.send(("error", str(e)))
    except EOFError:
        pass


class GgmlSuite:
    """Runs cases on a library of ggml. A context manager. Raises LibraryError."""

    def __init__(self, path: Path) -> None:
        if not path.is_file() and path.parent != Path():  # a bare name is looked for by the system
            raise LibraryError(f"--library {path}: no such file; expected a backend of ggml, as libggml-cpu.so or libggml-vulkan.so")
        self._path = path
        self._said = tempfile.NamedTemporaryFile("rb", prefix="ggml-", suffix=".txt")  # noqa: SIM115  until `close`
        self._process: Any = None
        self._pipe: Any = None
        # The bounds are those of kernels that round activations to eight bits, as ggml's integer kernels do.
        caps = Capabilities.from_profile("nvidia_h200_linux")
        self._ctx = LowerContext(caps, Tuning.for_device(caps), "q8_1")
        self.description = ""
        self._start()

    def __enter__(self) -> GgmlSuite:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._said.close()

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, str(self._path), self._said.name), daemon=True)
        self._process.start()
        theirs.close()
        kind, text = self._answer()
        if kind != "open":
            raise LibraryError(f"--library {self._path}: {text}" if kind == "died" else text)
        self.description = text

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None

    def _answer(self) -> tuple[str, Any]:
        try:
            if not self._pipe.poll(TIMEOUT_S):
                self._stop()
                return "died", f"no answer within {TIMEOUT_S:.0f} s"
            kind, what = self._pipe.recv()
            return str(kind), what
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            self._stop()
            said = self._said.read().decode(errors="replace").strip().splitlines()
            asserted = [line for line in said if "ASSERT" in line or "rror" in line]
            return "died", f"the library ended its process (exit code {code}): {(asserted or said or ['without a word'])[-1].strip()}"

    def run(self, cases: Iterable[Case]) -> Iterator[CaseResult]:
        """Results in the order of the cases."""
        for case in cases:
            yield self.run_one(case).result

    def run_one(self, case: Case) -> Run:
        """One case with its values."""
        if self._process is None:
            self._start()
        self._pipe.send(case.line)
        kind, what = self._answer()
        if kind == "died":  # ggml asserts what its functions take while a graph is made: no fault of the backend
            kind = "unsupported"
        elif kind == "built":
            kind, what = self._answer()
        if kind in ("unsupported", "broken"):
            return Run(CaseResult(op=case.op, line=case.line, mode="test", supported=False, message=what))
        if kind != "ran":
            return Run(CaseResult(op=case.op, line=case.line, mode="test", passed=False, message=what, peer_limit=ggml_limit(case.op)))
        try:
            problem = case.build()
            ctx = context_of(case, self._ctx)
            (want,) = [e for e in expected(problem, ctx) if not e.label][:1]
        except (CaseLineError, PlanError) as e:
            return Run(CaseResult(op=case.op, line=case.line, mode="test", supported=False, message=str(e)))
        bound = allowed(case.op, want.tolerance)
        got, values = what[want.output], want.values
        if case.op in BY_INDEX:  # which of equal values comes first is left open
            got, values = picked(problem, got), picked(problem, values)
        verdict = judge(got, values, bound)
        return Run(judged(case, {want.name: verdict}, bound), problem, {want.output: want.values}, what)


BY_INDEX = ("ARGSORT", "ARGMAX")
"""Ops whose outputs are places in rows of their input."""


def picked(problem: Problem, indices: Array) -> Array:
    """The values at these places; NaN for places outside, and for those that come twice in a row."""
    x = np.asarray(problem.values[problem.node.inputs[0].name], np.float64)
    rows = x.reshape(-1, x.shape[-1])
    places = indices.reshape(len(rows), -1)
    inside = (places >= 0) & (places < rows.shape[1])
    found = np.where(inside, np.take_along_axis(rows, np.where(inside, places, 0), axis=1), np.nan)
    twice = [len(set(row)) < len(row) for row in places.tolist()]
    found[np.array(twice)] = np.nan
    return found


CONDITIONS = ("tuning", "range", "sync", "act", "exact")
"""Of cases, about vkback's own kernels alone."""


def distinct(cases: Iterable[Case]) -> list[Case]:
    """Cases without those that are the same for another backend."""
    found: dict[str, Case] = {}
    for case in cases:
        found.setdefault(line_of(case.op, {k: v for k, v in case.params.items() if k not in CONDITIONS}), case)
    return list(found.values())


def allowed(op: str, own: Tolerance) -> Tolerance:
    """The wider of what vkback and what llama.cpp's own test allow, and no element beyond what such errors make of one."""
    limit = ggml_limit(op)
    nmse = max(own.nmse, limit)
    return Tolerance(nmse, max(own.worst, SIGMAS * sqrt(nmse)), f"vkback's own bound, or NMSE {limit:.0e} as test-backend-ops")
