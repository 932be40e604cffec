# One command each, on a fresh clone: whatever is missing is installed first, into an environment of its own.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: serve test lint venv

serve: venv
	$(BIN)/lockstep serve

test: venv
	$(BIN)/python -m pytest

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

venv: $(VENV)/.installed

# pip reads dependency groups since 25.1; the one that comes with Python may be older. setuptools warns of every
# editable install that names may be shadowed by folders of the working directory: here they are those folders.
$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --editable . --group dev
	touch $@
