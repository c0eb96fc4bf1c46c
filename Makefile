# Everything runs in .venv, made from the pinned versions in requirements.txt.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

.PHONY: install train test test-all lint format bench pins

install: .venv/installed

.venv/installed: pyproject.toml requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint requirements.txt --editable '.[dev]'
	touch $@

train: install  ## make train ARGS="env=rware"
	$(BIN)/python mava/systems/ff_mappo.py $(ARGS)

test: install
	$(BIN)/python -m pytest -n auto --maxprocesses 4 $(ARGS)

test-all: install  ## with the slow tests
	$(BIN)/python -m pytest -n auto --maxprocesses 4 -m "" $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python benchmarks/throughput.py $(ARGS)

pins: install  ## needs uv; makes requirements.txt anew for all Pythons and platforms
	uv pip compile --universal --python-version 3.11 --all-extras --no-emit-index-url \
		--no-emit-find-links --no-annotate --no-header pyproject.toml --output-file requirements.txt
