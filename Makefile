PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH_ARGS ?=
TEST_ARGS ?=
MUTANTS ?=
LAB ?=
WINDOWS ?=
ARM ?=
SMOKE ?=
TEST_PROCESSES ?= 2

# Set in many containers. Each command that a test starts would compile the package's Python anew, half of the time of a start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help bench test test-all mutants lint smoke windows arm lab prebuilt prebuilt-ordinary wheel clean

help:
	@echo "make bench   set up what is missing, then benchmark the built-in models (BENCH_ARGS='tg128 -r 3')"
	@echo "make test    set up what is missing, then run the tests (TEST_ARGS='tests/cli/test_cli.py')"
	@echo "make test-all  the same with the tests that only cross what others run (docs/judging.md)"
	@echo "make mutants plant faults in a copy of the sources, each must fail a case of the quick suite (MUTANTS='norm-eps -j 1')"
	@echo "make lint    ruff (checks and format) and mypy"
	@echo "make smoke   every command of the documents once, cut down to seconds (SMOKE='run --encoding cp1252')"
	@echo "make windows as root: CPython for Windows under Wine: run, chat, serve, vkbench, tune, key tests, the quick suite (WINDOWS='--all': over an hour)"
	@echo "make arm     as root: Debian for 64-bit Arm, emulated by qemu, runs tests, ops and a first start (ARM='--only tests')"
	@echo "make lab     as root: the compilers of AMD, Qualcomm, Apple and NVK on our kernels, and two more CPU drivers (LAB='--only table --chips amd:navi31')"
	@echo "make prebuilt  shaders/prebuilt: the SPIR-V that needs a glslc with cooperative matrices (shaderc 2024 or newer)"
	@echo "make prebuilt-ordinary  shaders/prebuilt/ordinary: the SPIR-V of ordinary kernels, before a release"
	@echo "make wheel   dist/vkback-*.whl"
	@echo "make clean   remove build outputs and caches, keep $(VENV)"

bench:
	@PYTHON=$(PYTHON) VENV=$(VENV) tools/setup.sh
	$(BIN)/vkbench $(BENCH_ARGS)

# A file's tests share models and kernels, so that all of them go to one process.
test: WHICH := -m "not exhaustive"
test test-all:
	@PYTHON=$(PYTHON) VENV=$(VENV) tools/setup.sh test
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile $(WHICH) $(TEST_ARGS) || { status=$$?; [ $$status -ne 5 ] || echo "make $@: no test was collected" >&2; exit $$status; }

mutants:
	@PYTHON=$(PYTHON) VENV=$(VENV) tools/setup.sh test
	@$(BIN)/python tools/mutants.py $(MUTANTS)

lint:
	@PYTHON=$(PYTHON) VENV=$(VENV) tools/setup.sh dev
	$(BIN)/ruff check .
	$(BIN)/ruff check --preview --select PLW1514 .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

smoke:
	@PYTHON=$(PYTHON) VENV=$(VENV) tools/setup.sh test
	@$(BIN)/python tools/smoke.py $(SMOKE)

windows:
	@PYTHON=$(PYTHON) VENV=$(VENV) tools/setup.sh test
	@$(BIN)/python tools/windows.py $(WINDOWS)

arm:
	@PYTHON=$(PYTHON) VENV=$(VENV) tools/setup.sh test
	@$(BIN)/python tools/arm.py $(ARM)

lab:
	@$(PYTHON) tools/lab.py $(LAB)

prebuilt:
	@PYTHON=$(PYTHON) VENV=$(VENV) tools/setup.sh
	PYTHONPATH=. $(BIN)/python tools/prebuilt.py matrix

prebuilt-ordinary:
	@PYTHON=$(PYTHON) VENV=$(VENV) tools/setup.sh
	PYTHONPATH=. $(BIN)/python tools/prebuilt.py ordinary

wheel:
	@PYTHON=$(PYTHON) VENV=$(VENV) tools/setup.sh
	PYTHONPATH=. $(BIN)/python tools/prebuilt.py --check --release
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find vkback tests -name __pycache__ -type d -prune -exec rm -rf {} +
