"""What goes wrong is one line: who speaks, what came, what was expected, what to do. Nothing hangs, nothing is left half done."""

from __future__ import annotations

import dataclasses
import os
import re
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_kit import lose
from make_gguf import llama_metadata, llama_tensors, write_gguf
from processes import run_program

from vkback.cli import main, vkbench
from vkback.device import Device, DeviceLost, Heap, OutOfDeviceMemory
from vkback.device import instance as instance_module
from vkback.device.query import read_physical_device
from vkback.engine.engine import Engine, EngineError
from vkback.engine.load_options import LoadOptions
from vkback.engine.sampler import Sampler
from vkback.errors import ModelError
from vkback.models import GgufError, GgufFile
from vkback.models.architecture import ARCHITECTURES
from vkback.ops.lowering import PlanError
from vkback.paths import builtin_model
from vkback.tuning import lookup as tuning

REPOSITORY = Path(__file__).resolve().parents[2]
DENSE = builtin_model("demo-dense")

Refused = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command line that must fail with one line on stderr; what the line says after `error: `."""

    def run(entry: Callable[[], Any], *args: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", ["vkback", *map(str, args)])
        with pytest.raises(SystemExit) as e:
            entry()
        return only_error(int(e.value.code or 0), capsys.readouterr().err)

    return run


def only_error(code: int, err: str) -> str:
    lines = [line for line in err.splitlines() if not line.startswith(("vkback: no GPU found", "vkback: a context of "))]
    assert code in (1, 2) and len(lines) == 1, err
    said, _, text = lines[0].partition(": error: ")
    assert said in ("vkback", "vkbench") and text
    return text


def in_a_process(*args: str | Path, before: str = "", **env: str) -> str:
    """The error of a command in a process of its own. before: Python that runs first."""
    program = f"{before}\nimport sys\nfrom vkback.cli.main import main\nsys.argv = ['vkback', *sys.argv[1:]]\nmain()\n"
    full = {**os.environ, "PYTHONPATH": str(REPOSITORY), **env}
    command = [sys.executable, "-c", program, *map(str, args)]
    done = run_program(command, env=full)
    assert done.stdout == ""
    return only_error(done.returncode, done.stderr)


def run(model: str | Path, *more: str | Path) -> tuple[str | Path, ...]:
    return ("run", "-p", "It was", "-n", "4", "-m", model, *more)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("runn", "No such command 'runn'. Did you mean 'run'? vkback --help tells more"),
        ("run", "no text to continue; give one, as vkback run 'Once upon a time', -p TEXT, -f FILE, or -p - for stdin"),
        ("run -p x -n -3", "vkback run --help tells more"),
        ("plan --tokns 3", "No such option: --tokns. Did you mean --tokens? vkback plan --help tells more"),
        ("synth", "synth needs a name and a file"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    line: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["vkback", *line.split()])
    with pytest.raises(SystemExit) as e:
        main.main()
    assert e.value.code == 2
    assert said in only_error(2, capsys.readouterr().err)


# --- files --------------------------------------------------------------------------------------------------------------------------


def changed(tmp_path: Path, change: Callable[[bytearray], None]) -> Path:
    """The built-in dense model with some of its bytes changed."""
    data = bytearray(DENSE.read_bytes())
    change(data)
    path = tmp_path / "changed.gguf"
    path.write_bytes(data)
    return path


def test_a_truncated_file(tmp_path: Path, refused: Refused) -> None:
    path = changed(tmp_path, lambda data: data.__delitem__(slice(len(data) - 1000, None)))
    said = refused(main.main, *run(path))
    assert said.startswith(f"[gguf] {path}: truncated: tensor ") and "Fetch it again" in said


def test_a_file_that_is_none(tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"<html>not found</html>" * 10)
    assert refused(main.main, *run(path)).startswith(f"[gguf] {path}: not a GGUF file")


def test_an_unknown_tensor_type(tmp_path: Path, refused: Refused) -> None:
    def change(data: bytearray) -> None:
        name = b"blk.0.ffn_down.weight"
        at = data.index(name) + len(name)
        dims = struct.unpack_from("<I", data, at)[0]
        struct.pack_into("<I", data, at + 4 + 8 * dims, 99)

    said = refused(main.main, *run(changed(tmp_path, change)))
    assert "tensor 'blk.0.ffn_down.weight' has type 99" in said


def test_an_unknown_architecture(tmp_path: Path, refused: Refused) -> None:
    path = write_gguf(tmp_path / "m.gguf", "rwkv6", {}, llama_tensors())
    known = ", ".join(sorted(ARCHITECTURES))
    assert refused(main.main, *run(path)) == (
        f"[gguf] {path}: architecture 'rwkv6' is not supported: vkback has no models with a WKV recurrence yet; supported are {known}"
    )


@pytest.mark.vulkan
@pytest.mark.parametrize(("name", "type"), [("blk.0.attn_q.weight", "F64"), ("blk.1.ffn_norm.weight", "I16")])
def test_a_type_without_a_kernel(name: str, type: str, tmp_path: Path, refused: Refused) -> None:
    tensors = llama_tensors()
    dtype = {"F64": np.float64, "I16": np.int16}[type]
    path = write_gguf(tmp_path / "m.gguf", "llama", llama_metadata(), tensors | {name: (type, tensors[name][1].astype(dtype))})
    said = refused(vkbench.main, "tg2", "-m", path, "-r", "1")
    assert said.startswith(f"[gguf] {path}: tensor {name} has type {type}, which has no kernel; types with one are ")
    assert "Q4_K" in said


# --- machines -----------------------------------------------------------------------------------------------------------------------


def test_no_driver() -> None:
    said = in_a_process(*run(DENSE), VK_DRIVER_FILES="/nonexistent", VK_ICD_FILENAMES="/nonexistent")
    assert said.startswith("[device] the Vulkan loader ") and "apt install libvulkan1 mesa-vulkan-drivers" in said


@pytest.mark.vulkan
def test_no_compiler_and_an_empty_cache(tmp_path: Path) -> None:
    hidden = (
        "import vkback.shader.compiler as c; c.LIBRARIES, c.own_compiler = (), lambda: None; c.ctypes.util.find_library = lambda n: None\n"
        "import vkback.shader.library as l; l.Shipped = lambda root: None"
    )
    said = in_a_process(*run(DENSE), before=hidden, PATH=str(tmp_path), VKBACK_CACHE=str(tmp_path / "cache"))
    assert said.startswith("[shader] ") and "is not in the cache, and there is no GLSL compiler. Install wasmtime with pip" in said


@pytest.fixture
def doctored(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Changes fields of the capabilities of every device there is."""

    def change(**fields: Any) -> None:
        read = read_physical_device

        def doctor(*args: Any) -> Any:
            found = read(*args)
            return dataclasses.replace(found, caps=dataclasses.replace(found.caps, **fields))

        monkeypatch.setattr(instance_module, "read_physical_device", doctor)

    return change


@pytest.mark.vulkan
def test_a_device_without_timeline_semaphores(doctored: Callable[..., None], refused: Refused) -> None:
    doctored(timeline_semaphore=False)
    said = refused(main.main, *run(DENSE))
    assert said.startswith("[device] ") and "vkback needs timelineSemaphore, which it does not offer. Update the driver or" in said


@pytest.mark.vulkan
def test_a_driver_without_hardware(doctored: Callable[..., None], refused: Refused) -> None:
    doctored(name="Null hardware (RADV NAVI21)")
    said = refused(main.main, *run(DENSE))
    assert said.startswith("[device] Null hardware (RADV NAVI21) only compiles kernels (RADV's null device has no hardware); this needs a ")


@pytest.mark.vulkan
@pytest.mark.parametrize(("size", "what"), [(1 << 20, "KV cache"), (5 << 20, "weights")])
def test_too_little_memory(size: int, what: str, doctored: Callable[..., None], refused: Refused, device: Device) -> None:
    doctored(heaps=tuple(Heap(size, h.device_local) for h in device.caps.heaps))
    said = refused(main.main, *run(DENSE, "--ctx", "1024", "-ngl", "all"))
    assert said.startswith("memory check failed: VK_ERROR_OUT_OF_DEVICE_MEMORY: asked ")
    assert f"free, for {what}. {'A smaller context (--ctx, ctx=) takes less' if what == 'KV cache' else '-ngl N keeps'}" in said


@pytest.mark.vulkan
def test_a_context_beyond_what_a_buffer_holds(doctored: Callable[..., None], refused: Refused) -> None:
    doctored(max_storage_buffer_range=1 << 27)
    said = refused(main.main, *run(DENSE, "--ctx", "10000000"))
    assert "cache_k_l0 F16[2, 10000000, 64]" in said and "2560000000 bytes" in said and "Use a smaller context" in said


@pytest.mark.vulkan
def test_experts_beyond_what_a_buffer_holds(doctored: Callable[..., None], refused: Refused) -> None:
    doctored(max_storage_buffer_range=1 << 20)
    said = refused(main.main, *run("demo-moe", "--ctx", "64"))
    assert said.startswith("[plan] blk.0.ffn_gate_exps.weight+blk.0.ffn_up_exps.weight MXFP4[16, 512, 256]: its experts take ")
    assert said.endswith("the device binds at most 1048576 bytes at once")


@pytest.mark.vulkan
def test_a_tuning_row_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refused: Refused) -> None:
    rows = (REPOSITORY / "tuning" / "default.toml").read_text().split("\n\n")
    (tmp_path / "default.toml").write_text("\n\n".join(r for r in rows if "[[schedule]]" not in r))
    monkeypatch.setattr(tuning, "tuning_root", lambda: tmp_path)
    said = refused(main.main, *run(DENSE))
    assert said.startswith("[tuning] no row of family 'schedule' sets ") and "default.toml" in said


@pytest.mark.vulkan
def test_a_load_that_fails_leaves_nothing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def alive() -> dict[str, int]:
        return {kind: n for kind, n in device.live_objects().items() if kind in ("Arena", "Buffer", "Memory", "Commands", "DescriptorPool")}

    before = alive()
    tight = dataclasses.replace(device.caps, heaps=tuple(Heap(3 << 20, h.device_local) for h in device.caps.heaps))
    monkeypatch.setattr(device._memory, "_caps", tight)
    monkeypatch.setattr(device._memory, "_taken", [0] * len(tight.heaps))
    with pytest.raises(OutOfDeviceMemory, match="for weights"):
        Engine.open(DENSE, device, LoadOptions(ctx=64, n_gpu_layers="all"))
    monkeypatch.undo()
    assert alive() == before

    def fail(*_: object) -> None:
        raise OSError("a page of the file could not be read")

    monkeypatch.setattr("vkback.engine.weights.gather_rows", fail)
    with pytest.raises(OSError, match="a page of the file"):
        Engine.load(DENSE, device, n_ctx=64, progress=False)
    assert alive() == before


# --- requests -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(device: Device) -> Iterator[Engine]:
    with Engine.load(DENSE, device, n_ctx=32, progress=False) as loaded:
        yield loaded


@pytest.mark.vulkan
def test_a_prompt_beyond_the_context(engine: Engine, refused: Refused) -> None:
    engine.reset()
    for ask in (engine.prompt, engine.prompt_logits):
        with pytest.raises(EngineError, match=r"^\[engine\] prompt of 33 tokens after 0 does not fit the context of 32; load with a"):
            ask([1] * 33)
    assert engine.n_past == 0
    said = refused(main.main, "run", "-p", "word " * 20, "-m", DENSE, "--ctx", "8")
    assert said.startswith("[engine] prompt of ")
    assert said.endswith("does not fit the context of 8; load with a larger n_ctx (--ctx) or shorten it")


@pytest.mark.vulkan
def test_more_tokens_than_the_context_has_room_for(engine: Engine, refused: Refused) -> None:
    engine.reset()
    engine.prompt([1, 2, 3])
    with pytest.raises(EngineError, match=r"^\[engine\] generation of 30 tokens after 3 does not fit the context of 32"):
        next(engine.generate(1, 30))
    assert len(list(engine.generate(1, 29, stop_at_eos=False))) == 29


@pytest.mark.vulkan
@pytest.mark.parametrize("token", [-1, 4096, 1 << 40])
def test_a_token_id_out_of_range(token: int, engine: Engine) -> None:
    engine.reset()
    for ask in (
        lambda: engine.prompt([5, token]),
        lambda: engine.prompt_logits([5, token]),
        lambda: engine.decode_logits(token),
        lambda: next(engine.generate(token, 1)),
    ):
        with pytest.raises(EngineError, match=rf"^\[engine\] token [01] is {token}, expected an id in 0\.\.4095$"):
            ask()
    assert engine.n_past == 0


@pytest.mark.vulkan
def test_a_context_of_fewer_than_no_rows() -> None:
    with pytest.raises(ModelError, match=r"^\[model\] ctx is -1 \(int\), expected a whole number, 0 or more, or None$"):
        Engine.load(DENSE, n_ctx=-1)


def one_float(name: str, at: int, value: float, code: str = "f") -> Callable[[bytearray], None]:
    """Puts a number at a byte of a tensor of the dense model."""
    start = GgufFile.open(DENSE).tensors[name].offset + at
    return lambda data: struct.pack_into(f"<{code}", data, start, value)


@pytest.mark.vulkan
@pytest.mark.parametrize("value", [3e38, -3e38])
@pytest.mark.parametrize("norm", ["blk.2.ffn_norm.weight", "blk.3.ffn_norm.weight"])
def test_a_model_whose_logits_are_no_numbers(value: float, norm: str, tmp_path: Path, device: Device, refused: Refused) -> None:
    """Weights that are numbers, but so large that sums with them are none. Those that are none themselves are refused at the load."""
    path = changed(tmp_path, one_float(norm, 400, value))
    name = re.escape(str(path))
    said = rf"^\[engine\] {name}: logits are not numbers .*position \d+; the file is damaged or a kernel is wrong on this device: run"
    with Engine.load(path, device, n_ctx=64, progress=False) as engine:
        with pytest.raises(EngineError, match=said):
            engine.prompt_logits([1, 2])
        with pytest.raises(EngineError, match=said):
            engine.decode_logits(1)
        for sampler in (Sampler(), Sampler(temp=0.8)):
            engine.reset()
            with pytest.raises(EngineError, match=said):
                list(engine.generate(1, 20, sampler=sampler))
    assert "logits are not numbers" in refused(vkbench.main, "tg4", "-m", path, "-r", "1", "--read-rate", "0")


@pytest.mark.vulkan
def test_a_lost_device_ends_generation_and_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device.open(0)
    engine = Engine.load(DENSE, device, n_ctx=64, progress=False)
    made = []

    def generate() -> None:
        for token in engine.generate(1, 60, stop_at_eos=False):
            made.append(token)
            if len(made) == 9:
                lose(device, monkeypatch)

    with pytest.raises(DeviceLost, match=r"VK_ERROR_DEVICE_LOST: the device stopped; .*greedy x8.* Close this Device and open it again"):
        generate()
    assert made[:9] and len(made) < 60
    with pytest.raises(DeviceLost):
        engine.prompt([1])
    engine.close()
    device.close()
    assert device.live_objects() == {}


# --- nothing half done --------------------------------------------------------------------------------------------------------------


def test_ctrl_c_leaves_no_part_of_a_synthetic_model(tmp_path: Path) -> None:
    """The interrupt comes while pieces are being written."""
    interrupt = (
        "import os, signal\nfrom vkback.models import synth\nwrite = synth._Pieces.make\n"
        "def make(self, *piece):\n    signal.raise_signal(signal.SIGINT)\n    return write(self, *piece)\nsynth._Pieces.make = make\n"
    )
    program = f"{interrupt}import sys\nfrom vkback.cli.main import main\nsys.argv = ['vkback', *sys.argv[1:]]\nmain()\n"
    command = [sys.executable, "-c", program, "synth", "llama-1b-Q4_0", str(tmp_path / "m.gguf"), "--layers", "1"]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = run_program(command, env=env)
    assert done.returncode == 130 and "Traceback" not in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["vkback", "vkbench"])
def test_ctrl_c_while_a_command_is_imported(command: str) -> None:
    interrupt = (
        "import os, signal, sys\nclass Interrupt:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer':\n            signal.raise_signal(signal.SIGINT)\nsys.meta_path.insert(0, Interrupt())\n"
    )
    program = f"{interrupt}from vkback.cli import start\nstart.{command}()\n"
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = run_program([sys.executable, "-c", program, "--version"], env=env)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_broken_model_is_refused_before_a_device_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a device was opened")

    monkeypatch.setattr(Device, "open", fail)
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(GgufError):
        Engine.load(path)


@pytest.mark.vulkan
def test_a_model_that_cannot_be_planned_closes_the_device_it_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Device] = []
    real = Device.open

    def note(selector: Any = None) -> Device:
        opened.append(real(selector))
        return opened[0]

    monkeypatch.setattr(Device, "open", note)
    with pytest.raises(PlanError):
        Engine.load(DENSE, n_ctx=1 << 40)
    assert opened[0].live_objects() == {}
