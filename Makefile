# Every target is complete in itself: it makes the virtual environment that it needs.
#
#   make demo     plan a real quantized checkpoint, load it, run it, compare it with its original
#   make test     the test suite
#   make lint types imports docs-check     the other gates;  make corpus  the checkpoints in $OMNIPLAT_CORPUS
#   make vllm     the tests inside the real vLLM, in an environment of their own (tests/vllm/environment.sh)
#   make fix      format and apply the linter's safe fixes;  make clean

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
PYTEST_ARGS ?=
# A file of tests shares its engine process: it stays in one worker.
VLLM_RUN ?= -m pytest -n $(JOBS) --dist loadfile tests/vllm

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
INPUTS := pyproject.toml constraints.txt Makefile
EXAMPLE := examples/hunyuan-image3-mxfp4-mxfp8

.PHONY: demo test corpus vllm lint types imports docs-check fix check clean
.DEFAULT_GOAL := test

demo: $(VENV)/.with-cpu
	$(BIN)/omniplat plan $(EXAMPLE)/checkpoint
	$(BIN)/omniplat run $(EXAMPLE)/checkpoint --reference $(EXAMPLE)/original

# One thread in each worker: two processes of pytest-xdist share the cores already.
test: $(VENV)/.with-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --ignore=tests/corpus --ignore=tests/cases $(PYTEST_ARGS)

corpus: $(VENV)/.with-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) tests/corpus tests/cases $(PYTEST_ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python docs/generate.py --corpus --check

# The environment may be shared by several checkouts, so this one is not installed in it but laid beside it: its
# entry points come from there, its code from here.
vllm:
	python=$$(bash tests/vllm/environment.sh) && site=$$(mktemp -d) && trap 'rm -rf "$$site"' EXIT && \
	"$$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --target "$$site" . && \
	OMP_NUM_THREADS=1 VLLM_LOGGING_LEVEL=ERROR PYTHONPATH="$$PWD:$$site" "$$python" $(VLLM_RUN) $(PYTEST_ARGS)

lint: $(VENV)/.with-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.with-dev
	$(BIN)/mypy

imports: $(VENV)/.with-dev
	$(BIN)/lint-imports --no-cache

# Pages under docs/ that a command writes must be what it would write now.
docs-check: $(VENV)/.with-dev
	@if [ -f docs/generate.py ]; then $(BIN)/python docs/generate.py --check; else echo "no generated pages yet"; fi

check: lint types imports docs-check test

fix: $(VENV)/.with-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.with-cpu: $(INPUTS) | $(BIN)/python
	$(INSTALL) --editable ".[cpu]"
	@touch $@

$(VENV)/.with-dev: $(INPUTS) | $(BIN)/python
	$(INSTALL) --editable ".[cpu,dev]"
	@touch $@ $(VENV)/.with-cpu

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .coverage .coverage.*
