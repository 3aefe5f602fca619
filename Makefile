# Two commands for a newcomer: `make demo` and `make test`. Both make .venv first.
# TORCH is the one place where torch is pinned. It is installed before everything else, so that no other
# package can pull in another build; the library itself supports torch >= 2.11.
TORCH  := torch==2.13.0
PYTHON := python3
BIN    := .venv/bin

# One thread per test worker: two workers on two cores, and the same sums on every machine.
TEST   := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest

.PHONY: demo test test-all bench check docs release fix fuzz clean

demo: .venv/installed
	$(BIN)/leangrad demo

# Every test; of those whose cases differ little and take long, every n-th case. All of them: `make test-all`.
test: .venv/installed
	$(TEST) -n 2 --dist worksteal -q

test-all: .venv/installed
	$(TEST) -n 2 --dist worksteal -q --all

# Everything side by side, as far as a CPU can tell. The pages quote its rows.
bench: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks --workers 2 --write side_by_side_cpu
	$(BIN)/python -m benchmarks --readme

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, and a look at it in a real browser where there is Chromium; build/pictures has what was seen.
docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(TEST) -q --all tests/site tests/report

# What users install: both packages are built, and the wheel is tried in an environment that has nothing else.
release: .venv/installed
	rm -rf dist build/release
	mkdir -p build
	$(BIN)/python -m build --outdir dist . > build/release.log 2>&1 || { cat build/release.log; exit 1; }
	$(PYTHON) -m venv build/release
	build/release/bin/pip install --quiet $(TORCH)
	build/release/bin/pip install --quiet dist/*.whl
	cd build/release && bin/leangrad --version && bin/leangrad doctor && bin/leangrad demo --steps 3

fix: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

fuzz: .venv/installed
	LEANGRAD_FUZZ=large $(TEST) -q -n 2 --dist worksteal -m fuzz

.venv/installed: pyproject.toml Makefile
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable ".[dev,trainers]"
	touch $@

.venv/installed-docs: .venv/installed
	$(BIN)/pip install --quiet --editable ".[docs]"
	touch $@

clean:
	rm -rf .venv site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
