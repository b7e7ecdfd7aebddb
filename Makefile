# `make run` and `make test` need Python 3.11 or newer, make and a C library; everything else goes into .venv.
# Another interpreter: make PYTHON=python3.12 run

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input
PYTEST := $(BIN)/python -m pytest
PARALLEL := -n auto --dist worksteal

PROMPT ?= Explain what an engine is, in two sentences.
ARGS ?=

# Stamps: an installation is repeated when pyproject.toml changes, and not otherwise.
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
RAY_STAMP := $(VENV)/.installed-ray

.PHONY: help setup run serve test fmt lint types check docs faults soak interop interop-core ray-test bench bench-check bench-publish ci clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(RUN_STAMP) ## complete a prompt with the default model; PROMPT="…" ARGS="--max-tokens 20"
	@$(BIN)/enginewire run "$(PROMPT)" $(ARGS)

serve: $(RUN_STAMP) ## serve the default model at http://127.0.0.1:8000; ARGS="--port 0"
	@$(BIN)/enginewire serve $(ARGS)

test: $(DEV_STAMP) ## run the test suite, side by side if it is more than a few; ARGS="-k name" ARGS="-x -n 0"
	@$(BIN)/enginewire pull
	$(PYTEST) $(PARALLEL) -m "not slow" $(ARGS)

setup: $(DEV_STAMP) ## make .venv with everything that development needs

fmt: $(DEV_STAMP) ## format the code and sort the imports
	$(BIN)/ruff check --select I --fix --quiet .
	$(BIN)/ruff format .

lint: $(DEV_STAMP) ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV_STAMP) ## check types, twice
	$(BIN)/mypy
	$(BIN)/pyright

check: lint types ## everything that takes seconds: style, types, layering, unit and contract tests, golden bytes
	$(PYTEST) $(PARALLEL) -q -m "not model and not slow" tests/unit tests/vectors tests/property tests/contract $(ARGS)

docs: $(DEV_STAMP) ## rewrite the generated tables, check the documents, run their examples
	$(BIN)/python docs/generate.py
	$(PYTEST) -q tests/unit/test_docs.py $(ARGS)

faults: $(DEV_STAMP) ## kill, stop, starve and confuse engines and clients
	$(PYTEST) $(PARALLEL) -q tests/faults $(ARGS)

soak: $(DEV_STAMP) ## the tests that take minutes: half an hour of chaos among them; ENGINEWIRE_SOAK_MINUTES=5
	@$(BIN)/enginewire pull
	$(PYTEST) -m slow $(ARGS)

interop: $(DEV_STAMP) ## against real vLLM 0.25.1 and 0.32.0, made in your cache if missing (11 GB); ARGS="-k 0.25.1"
	@$(BIN)/enginewire pull
	tests/interop/setup_vllm.sh 0.25.1 0.32.0
	$(PYTEST) tests/interop $(ARGS)

interop-core: $(DEV_STAMP) ## the part of it that .ci/run runs
	@$(BIN)/enginewire pull
	tests/interop/setup_vllm.sh 0.25.1 0.32.0
	$(PYTEST) -m core tests/interop $(ARGS)

ray-test: $(RAY_STAMP) ## engines on a Ray cluster of three nodes, simulated here; installs it into .venv
	$(PYTEST) tests/ray $(ARGS)

bench: $(DEV_STAMP) ## all benchmarks, against vLLM too where make interop has made one; ARGS="--quick" ARGS="client llm"
	@$(BIN)/enginewire pull
	@benchmarks/setup_llama.sh
	$(BIN)/python benchmarks/run.py $(ARGS)

bench-check: $(DEV_STAMP) ## the quick benchmarks; fails if a ratio is far below that of the last full run
	@$(BIN)/enginewire pull
	@benchmarks/setup_llama.sh
	$(BIN)/python benchmarks/run.py --check $(ARGS)

bench-publish: $(VENV)/pyvenv.cfg ## make the last figures the committed ones: benchmarks/RESULTS.md and its charts
	$(PIP) install 'matplotlib>=3.8'
	$(BIN)/python benchmarks/run.py --publish

ci: ## what continuous integration runs
	.ci/run

clean: ## remove .venv and everything else that is made here; fetched models stay in your cache
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/pyvenv.cfg:
	@command -v "$(PYTHON)" >/dev/null || { \
		echo "make: $(PYTHON) was not found; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; \
		exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: Python 3.11 or newer is needed, $(PYTHON) is $$("$(PYTHON)" -V 2>&1);" \
			"name another: make PYTHON=python3.12" >&2; exit 1; }
	@echo "Making $(VENV) …"
	@"$(PYTHON)" -m venv "$(VENV)" || { rm -rf "$(VENV)"; exit 1; }

$(RUN_STAMP): $(VENV)/pyvenv.cfg pyproject.toml
	@echo "Installing enginewire, the OpenVINO engine and the server into $(VENV) (once, about a minute) …"
	@$(PIP) install --editable '.[openvino,notebook,serve]'
	@touch $@

$(DEV_STAMP): $(VENV)/pyvenv.cfg pyproject.toml
	@echo "Installing enginewire and its development tools into $(VENV) (once, a minute or two) …"
	@$(PIP) install --editable '.[dev]'
	@touch $@ $(RUN_STAMP)

$(RAY_STAMP): $(DEV_STAMP) pyproject.toml
	@echo "Installing Ray into $(VENV) (once; 300 MB) …"
	@$(PIP) install --editable '.[dev,ray]'
	@touch $@
