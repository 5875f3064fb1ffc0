# `make train` and `make test` create .venv and install everything there. They need Python 3.11 or
# newer and a C++ compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEV := $(VENV)/.dev
TRAIN_ARGS ?=
TEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help train test pytest newest lint format tables clean

help:  ## show this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 10
	@echo 'PYTHON=python3.12 selects the interpreter; TRAIN_ARGS and TEST_ARGS are passed to the commands.'

train: $(INSTALLED)  ## train a small MoE with an eighth of its experts on the compute device
	@echo 'Training nano: two to four minutes on two cores.'
	@$(BIN)/overspill train nano $(TRAIN_ARGS)
	@echo 'Next: source $(BIN)/activate, then the commands of README.md.'

# Kernels are compiled while pip installs; if that fails, the tests say why.
test:  ## run all checks in parallel: ruff, mypy, import-linter, pytest
	@PYTHONPATH=src $(PYTHON) tests/compile_ahead.py kernels 2> /dev/null & \
		$(MAKE) --no-print-directory -j2 $(DEV)
	@$(MAKE) --no-print-directory -j2 lint pytest

# Processes of tests share bytecode: each would compile all tests for 7 s. A process that has asked
# for GPUs cannot use them after a fork, and workers are forked: `pytest -m gpu` runs the GPU tests.
pytest: $(DEV)  ## run the tests
	CUDA_VISIBLE_DEVICES= PYTHONDONTWRITEBYTECODE= \
		$(BIN)/python -m pytest --workers auto $(TEST_ARGS)

newest: $(DEV)  ## test Hugging Face models with the newest transformers
	$(BIN)/python -m pip install --quiet --upgrade --target build/newest --no-deps transformers
	PYTHONPATH=build/newest $(BIN)/python -m pytest -m "not gpu" $(TEST_ARGS) tests/models/huggingface \
		tests/train/finetune tests/train/test_hf_trainer.py tests/docs/test_families.py \
		tests/docs/test_huggingface.py

# On a new machine the tests first wait for the compiler, which is not slowed down by a nice mypy.
lint: $(DEV)  ## run ruff, mypy and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	nice $(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEV)  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

tables: $(DEV)  ## write the tables and pictures of the docs from bench/results and from the tests
	$(BIN)/python bench/tables.py --write README.md docs/benchmarks.md docs/finetuning.md docs/pre-gates.md docs/multi-gpu.md docs/moe-layer.md docs/stages.md docs/quantized.md
	$(BIN)/python -m tests.docs.test_families --write
	$(BIN)/python bench/pregate_plot.py
	$(BIN)/python bench/quantized_memory.py --plot-only
	$(BIN)/python bench/mpipe.py draw
	$(BIN)/python bench/tiers_picture.py

clean:  ## remove the environment and all caches, but not runs/
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache \
		.import_linter_cache .hypothesis
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is touched last, so an interrupted installation is repeated. torch is installed first and
# alone: all other packages must accept the version in constraints.txt. Training needs none of the
# development tools; the trained model can be served. Most files of the packages are never imported:
# Python compiles those that are.
TORCH := $(VENV)/.torch
EARLY := $(VENV)/.early
PIP := $(BIN)/python -m pip install --no-compile -c constraints.txt
SHOW := @$(PYTHON) tests/pip_progress.py

# The pip that comes with Python 3.11 takes 9 s longer.
$(VENV)/.pip: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"Overspill needs Python 3.11 or newer; name one: make PYTHON=python3.12")'
	@echo 'Installing into $(VENV): PyTorch, transformers and others. This takes some minutes, of which' \
		'most is the download: 0.4 GB, and some GB more where PyTorch comes with CUDA.'
	@$(PYTHON) -m venv $(VENV)
	$(SHOW) pip $(PIP) --upgrade pip
	@touch $@

$(TORCH): $(VENV)/.pip
	$(SHOW) PyTorch $(PIP) --progress-bar raw torch "setuptools>=77"
	@touch $@

# Most of its time pip reads the pages of an index, one after the other: these are read while torch
# is installed. They need nothing that torch needs, so no package is installed twice.
$(EARLY): $(VENV)/.pip
	$(SHOW) "test tools" $(PIP) --progress-bar raw hypothesis matplotlib pytest-timeout regex ruff
	@touch $@

$(INSTALLED): $(TORCH)
	$(SHOW) "Overspill" $(PIP) --progress-bar raw --no-build-isolation -e ".[lora,serve]"
	@touch $@

# Bytecode is compiled meanwhile. If that fails, the tests compile it.
$(DEV): $(TORCH) $(EARLY)
	PYTHONPATH=src PYTHONDONTWRITEBYTECODE= $(BIN)/python tests/compile_ahead.py bytecode & \
		$(PYTHON) tests/pip_progress.py Overspill $(PIP) --progress-bar raw --no-build-isolation -e ".[dev]"
	@touch $(INSTALLED) $@
