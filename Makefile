# Every target sets up its own virtual environment (.venv) first; nothing but Python (>= 3.10) and make is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint bench accuracy train clean

demo: $(STAMP)
	$(BIN)/snapstream demo

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Ratios against peers and against what the memory of this machine can deliver; about 30 minutes, on a quiet machine.
bench: $(STAMP)
	$(BIN)/python benchmarks/engine.py

# What each cache policy keeps of the shipped model's answers.
accuracy: $(STAMP)
	$(BIN)/python benchmarks/accuracy.py

# Trains the shipped retrieval model anew.
train: $(STAMP)
	$(BIN)/python training/train_retrieval_model.py --output src/snapstream/assets/retrieval

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
