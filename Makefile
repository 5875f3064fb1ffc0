# `make train` and `make test` do all their own set-up in .venv; they need Python 3.11 or newer
# and a C++ compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TRAIN_ARGS ?=
TEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help train test newest lint format tables clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 10
	@echo 'PYTHON=python3.12 chooses the interpreter; TRAIN_ARGS and TEST_ARGS are passed on.'

train: $(INSTALLED)  ## train a small MoE eight times larger than its memory budget
	$(BIN)/overspill train nano $(TRAIN_ARGS)

test: lint  ## all checks: ruff, mypy, import-linter, pytest
	$(BIN)/python -m pytest $(TEST_ARGS)

newest: $(INSTALLED)  ## the tests of Hugging Face models against the newest transformers
	$(BIN)/python -m pip install --quiet --upgrade --target build/newest --no-deps transformers
	PYTHONPATH=build/newest $(BIN)/python -m pytest $(TEST_ARGS) tests/models/huggingface \
		tests/train/finetune tests/train/test_hf_trainer.py tests/docs/test_families.py \
		tests/docs/test_huggingface.py

lint: $(INSTALLED)  ## the checks that run nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)  ## put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

tables: $(INSTALLED)  ## write the tables of the docs from bench/results and the tests
	$(BIN)/python bench/tables.py --write $(wildcard README.md docs/benchmarks.md docs/finetuning.md)
	$(BIN)/python -m tests.docs.test_families --write

clean:  ## remove the environment and all caches; runs/ stays
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache \
		.import_linter_cache .hypothesis
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is touched last, so an installation that was interrupted is taken up again. torch goes
# first and alone: what comes after must live with the version pinned here.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"Overspill needs Python 3.11 or newer; name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@
