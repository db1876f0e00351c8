PYTHON ?= python3
BIN := .venv/bin

DEVICES := h200 h200x2 h200x4 h100 h100x2

.PHONY: smoke course lint test test-all compiled pages mutants format lock clean

smoke: .venv/installed  ## train a tiny GPT on the CPU: under a minute
	$(BIN)/python train.py +experiment=smoke
	@printf '%s\n' '' 'Try next, after: source .venv/bin/activate' \
		'  python -m scripts.doctor                               # which kernels run here and give right results' \
		'  python train.py -m +experiment=smoke attn=eager,sdpa   # swap a kernel, and compare' \
		'  python train.py kernels=triton attn=triton             # GPT-2 124M, on an NVIDIA GPU'

course: .venv/installed  ## run every rung of course/: on a CPU in Triton's interpreter
	$(BIN)/python -m scripts.course

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

test: lint  ## lint, and the tests to run after a change
	$(BIN)/python -m pytest -m "not exhaustive"

test-all: lint  ## lint, and every test
	$(BIN)/python -m pytest

compiled: .venv/installed  ## compile our Triton kernels for each kind of GPU, and write the tables of what they need
	$(BIN)/python -m tests.kernels.compiled
	$(BIN)/python -m scripts.report

pages: .venv/installed  ## write the page of each device in results/, and a list of them, into out/pages
	rm -rf out/pages
	mkdir -p out
	cp -R results out/pages
	cp lab/report/pages.html out/pages/index.html
	for device in $(DEVICES); do $(BIN)/python -m scripts.report out/pages/$$device || exit 1; done

mutants: .venv/installed  ## change one line of the program at a time: a test must fail
	$(BIN)/python -m tests.mutants

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: hotswap needs Python 3.11 or newer; make PYTHON=python3.11")'
	@echo "Installing PyTorch with its CUDA libraries, and the other packages of pyproject.toml, into .venv."
	@echo "This happens once. It downloads about 3 GB and takes some four minutes."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"  # the first pip with --group
	$(BIN)/python -m pip install --no-compile --editable . --group dev
	@# pip compiles all of 17,000 files on one core. Some files are for other versions of Python, and do not compile
	$(BIN)/python -m compileall -qq -j 0 -x '/tests?/|/testing/|/transformers/models/' .venv/lib || true
	touch $@

lock: .venv/installed  ## write requirements.lock: the newest versions that fit together, on every platform
	$(BIN)/python -m pip install --quiet uv
	@# PyTorch stays at 2.13, so that CI tests an older version than a fresh environment has
	echo "torch<2.14" | $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --all-extras \
		--group dev --no-annotate --no-emit-index-url --custom-compile-command "make lock" \
		--output-file requirements.lock pyproject.toml -

clean:
	rm -rf .venv .cache out build *.egg-info
