# `make train` and `make test` on a fresh machine: Python 3.11+, a C++ compiler and make are all they need.
PYTHON ?= python3
WORKERS ?= 3
NOTEBOOKS ?= cache
BIN := .venv/bin

.PHONY: train test test-long check tables matrix docs clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test]'
	touch $@

train: .venv/installed
	$(BIN)/funcppo train clans:1500:0 --set prover.hard_negative_fraction=0.5 --out runs/clans --overwrite
	$(BIN)/funcppo predict runs/clans "clan(p146, X)" --known --explain --k 1

# Without bytecode on disk each of the many processes that tests start would compile the package anew: a second each.
test: .venv/installed
	@command -v swipl >/dev/null || echo "note: SWI-Prolog (swipl) is not installed: the tests that compare with it will be skipped"
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 15

# Hours: all examples of properties, long tests, browsers, an older PyTorch, and campaigns of kills and of mutated input.
OLD_TORCH ?= 2.10.0
test-long: .venv/installed .venv-$(OLD_TORCH)/installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 15 -m "long or not long" --hypothesis-profile long
	$(BIN)/python experiments/checks/fuzz_parsers.py --out runs/fuzz_parsers.json
	$(BIN)/python experiments/checks/kill_campaign.py --out runs/kill_campaign.json
	$(BIN)/python experiments/checks/kill_campaign.py --processes 1 2 4 --kills 50 --out runs/kill_campaign_processes.json
	$(BIN)/python experiments/checks/older_pytorch.py .venv-$(OLD_TORCH)/bin/python --out runs/older_pytorch.json

check: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/python experiments/checks/readability.py

# Rewrite the numbers in README.md, INVESTIGATION.md and docs/ from the committed results.
tables: .venv/installed
	$(BIN)/python experiments/tables.py

# `make matrix` runs every cell and compares; `make matrix TORCH=2.9.1` does so in an environment of its own.
# MATRIX="--jobs 4 --only 6/" are arguments.
matrix: .venv$(addprefix -,$(TORCH))/installed
	.venv$(addprefix -,$(TORCH))/bin/python experiments/full_step_matrix.py $(MATRIX)

.venv-%/installed:
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install --quiet torch==$* optree numpy
	touch $@

# The documentation as a site, in docs/_build/html. Its notebooks are run, unless NOTEBOOKS=off.
docs: .venv/installed
	$(BIN)/pip install --quiet -c constraints.txt -e '.[all,docs]'
	$(BIN)/sphinx-build -q -W --keep-going -D nb_execution_mode=$(NOTEBOOKS) -b html docs docs/_build/html

clean:
	rm -rf .venv .venv-* runs
