PYTHON ?= python3
BIN := .venv/bin

.PHONY: smoke test format clean

smoke: .venv/installed  ## train a tiny GPT on the CPU: under a minute
	$(BIN)/python train.py +experiment=smoke

test: .venv/installed  ## lint, and every test that this machine can run
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: hotswap needs Python 3.11 or newer; make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"  # the first pip with --group
	$(BIN)/python -m pip install --quiet . --group dev
	touch $@

clean:
	rm -rf .venv .cache out build *.egg-info
