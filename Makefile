# make demo   train a GPT on four virtual devices          make bench      ratios against DDP, FSDP2, DTensor
# make test   lint, types, doctests, the whole suite       make test-deep  whole test matrices, 20,000 random programs
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt
EDITABLE := --config-settings editable_mode=compat
WORKERS ?= 2

.PHONY: demo test test-deep bench lint clean

demo: $(VENV)/.demo
	$(RUN) examples/train_gpt.py

test: $(VENV)/.test lint
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS)

test-deep: $(VENV)/.test
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS) --deep

lint: $(VENV)/.test
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

bench: $(VENV)/.test
	$(RUN) -m benchmarks

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) $(EDITABLE) -e .
	@touch $@

$(VENV)/.test: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) $(EDITABLE) -e .[test]
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
