# `make demo` and `make test` need Python >= 3.11 and the package registries; they set up all the rest, once.

PYTHON := $(shell for python in python3.12 python3.11 python3 python; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null && { echo $$python; break; }; done)
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
VENV := .venv
BIN := $(VENV)/bin

export PIP_DISABLE_PIP_VERSION_CHECK := 1
.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-gpu lint clean

help:
	@echo 'make demo       fine-tune a small real Llama, ask it before and after, export it (minutes, on a CPU)'
	@echo 'make test       the tests'
	@echo 'make test-slow  the tests that take minutes'
	@echo 'make test-gpu   the tests that need a CUDA GPU, in PYTHON=... with a JAX for it'
	@echo 'make lint       ruff, mypy and the rules of who imports whom'
	@echo 'make clean      remove all that these made'

demo: $(VENV)/demo.stamp
	@JAX_PLATFORMS=cpu $(BIN)/python examples/demo.py

test: $(VENV)/test.stamp
	@JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-slow: $(VENV)/test.stamp
	@JAX_PLATFORMS=cpu $(BIN)/python -m pytest -m slow
	@JAX_PLATFORMS=cpu $(BIN)/python tests/eight_devices.py -m slow $$(grep -rl --include='test_*.py' eight_devices.run tests)

# In PYTHON's own environment, where `pip install -e '.[cuda12,test]'`, or cuda13, has put a JAX for the machine's driver.
test-gpu:
	@JAX_PLATFORMS=cuda,cpu $(PYTHON) -m pytest -m gpu

lint: $(VENV)/test.stamp
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis runs/demo

# A stamp is newer than pyproject.toml when its packages are installed. One pip call installs the product and its
# oracles together, so that the pin of torch binds what peft and bitsandbytes bring.
$(VENV)/test.stamp: EXTRAS := cpu,plan,test,oracle,lint,plot,tensorboard,notebook
$(VENV)/demo.stamp: EXTRAS := cpu
$(VENV)/%.stamp: pyproject.toml | $(BIN)/python
	@printf 'Installing zagora-jax[$(EXTRAS)] into $(VENV), once (a dot a package) '
	@$(BIN)/python -m pip install -e '.[$(EXTRAS)]' | awk '/^Collecting/ { printf "."; fflush() } END { print "" }'
	@touch $@

$(BIN)/python:
	@test -n '$(PYTHON)' || { echo 'No Python >= 3.11 found: install one, or name it: make demo PYTHON=/path/to/python3' >&2; exit 1; }
	@echo 'Making a virtual environment in $(VENV) with $(PYTHON)'
	@$(PYTHON) -m venv $(VENV)
