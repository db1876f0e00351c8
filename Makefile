PYTHON ?= python3
BIN := .venv/bin

.PHONY: smoke test test-all format clean

smoke: .venv/installed  ## train a tiny GPT on the CPU: under a minute
	$(BIN)/python train.py +experiment=smoke

test: .venv/installed  ## lint, and the tests to run after a change: 4 minutes on two cores
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -m "not exhaustive"

test-all: test  ## and the exhaustive tests: 10 minutes in all
	$(BIN)/python -m pytest -m exhaustive

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
