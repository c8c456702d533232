# Every target makes .venv when it is missing or older than what it was made from, and reuses it otherwise.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 4
# DeepSpeed and what it needs is kept apart from what this project needs.
# Tests on the asynchronous device of tests/device, which is built once (half a minute, needs g++).
ON_DEVICE := TEST_DEVICE=lag PATH="$(CURDIR)/$(BIN):$$PATH"
ON_DEVICE_FILES := $(patsubst %,tests/equivalence/test_%.py,models deferred_init)
MORE_ON_DEVICE := $(patsubst %,tests/equivalence/test_%.py,resume parameter_operations precision activation_checkpointing inference \
	from_pretrained foreign_training foreign_optimizers deferred_init_in_tiles loss_scaling activation_offload tiling)
PEERS := .venv-peers
PEERS_STAMP := $(PEERS)/.installed

.DEFAULT_GOAL := help
.PHONY: help train test test-all lint docs bench bench-peers numbers clean
# A target whose recipe failed half-way must not look up to date.
.DELETE_ON_ERROR:

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

train: $(STAMP) ## train a model whose states are six times its memory budget (a minute or two)
	$(BIN)/zero-infinity train --preset 5M --memory 9MiB --steps 100 --lr 2e-3

# Tests start hundreds of processes: with bytecode on disk none of them compiles what another one has compiled.
test test-all: export PYTHONDONTWRITEBYTECODE :=

test: $(STAMP) ## run the tests (WORKERS=4 processes)
	$(BIN)/pytest -n $(WORKERS) -m "not long" --durations=20 tests
	$(ON_DEVICE) $(BIN)/pytest -n $(WORKERS) -m "not long" tests/device $(ON_DEVICE_FILES)

# Also with examples of hypothesis that are drawn anew: what they find is a bug, and not always the last change's.
test-all: $(STAMP) ## the same, with long variants and random examples: world sizes, kills, limits
	HYPOTHESIS_PROFILE=random $(BIN)/pytest -n $(WORKERS) --durations=20 tests
	$(ON_DEVICE) $(BIN)/pytest -n $(WORKERS) tests/device $(ON_DEVICE_FILES) $(MORE_ON_DEVICE)

lint: $(STAMP) ## ruff, mypy, and the layers of the imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# A fresh environment, because the reference pages depend on docstrings and on --help, which Sphinx does not watch.
docs: $(STAMP) ## build the documentation into build/docs (no network; warnings are errors)
	$(BIN)/python docs/module_map.py
	COLUMNS=100 PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/sphinx-build --fail-on-warning --keep-going --fresh-env --quiet docs build/docs
	@echo "open build/docs/index.html"

bench: $(STAMP) ## the drive's speed, and a step against plain PyTorch (5 to 8 minutes; results in bench-out)
	directory=$$(mktemp -d) && trap 'rm -rf "$$directory"' EXIT && \
	$(BIN)/zero-infinity bench io "$$directory" && \
	$(BIN)/python -m benchmarks train --nvme "$$directory" --out bench-out

bench-peers: $(PEERS_STAMP) ## a step beside DeepSpeed, FSDP2 and mapped files (16 to 30 minutes; needs g++ and libaio's headers)
	@echo '#include <libaio.h>' | g++ -x c++ -fsyntax-only - || \
	echo "no g++ or no libaio.h (Debian: apt-get install g++ libaio-dev): DeepSpeed's rows will be errors"
	directory=$$(mktemp -d) && trap 'rm -rf "$$directory"' EXIT && \
	$(PEERS)/bin/python -m benchmarks peers --nvme "$$directory" --out bench-out

numbers: $(STAMP) ## keep what is in bench-out in docs/results, and write the tables of README.md and docs/numbers.md
	$(BIN)/python -m benchmarks numbers --take bench-out
	$(BIN)/python docs/draw_overview.py

clean: ## remove .venv and everything that tools leave behind
	rm -rf $(VENV) $(PEERS) build dist bench-out .hypothesis .mypy_cache .ruff_cache .import_linter_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find src -name '*.egg-info' -type d -prune -exec rm -rf {} +

# setuptools comes first and from the same pins, so that the package is built in .venv itself: pip then makes no
# second environment for it and resolves, and downloads, torch exactly once. Python 3.11's own setuptools is too old.
$(STAMP): pyproject.toml constraints.txt
	@echo "installing into $(VENV) (torch is large; the first time takes minutes)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e '.[dev,docs]'
	@touch $@

# Without isolation here, too: DeepSpeed imports torch while it is built.
$(PEERS_STAMP): pyproject.toml constraints.txt constraints-peers.txt
	@echo "installing into $(PEERS) (torch is large; the first time takes minutes)"
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet -c constraints.txt setuptools torch numpy
	$(PEERS)/bin/python -m pip install --quiet --no-build-isolation -c constraints.txt -c constraints-peers.txt -e '.[peers,plot]'
	@touch $@
