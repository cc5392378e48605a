# `make train` and `make test` on a fresh machine: Python 3.11+, a C++ compiler and make are all they need.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test check clean

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

clean:
	rm -rf .venv runs
