# `make train` and `make test` on a fresh machine: Python 3.11+, a C++ compiler and make are all they need.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test check matrix clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test]'
	touch $@

train: .venv/installed
	$(BIN)/funcppo train countries_s3 --out runs/countries_s3 --overwrite

test: .venv/installed
	$(BIN)/python -m pytest

check: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

# `make matrix` runs every cell and compares; `make matrix TORCH=2.9.1` does so in an environment of its own.
# MATRIX="--jobs 4 --only 6/" are arguments.
matrix: .venv$(addprefix -,$(TORCH))/installed
	.venv$(addprefix -,$(TORCH))/bin/python experiments/full_step_matrix.py $(MATRIX)

.venv-%/installed:
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install --quiet torch==$* optree numpy
	touch $@

clean:
	rm -rf .venv .venv-* runs
