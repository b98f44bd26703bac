# From a fresh clone: `make demo`. Every target makes what it needs in .venv first.

SYSTEM_PYTHON ?= python3
VENV := .venv
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip --disable-pip-version-check
TORCH := $(shell sed -n 's/^torch==.*/&/p' constraints.txt)
TRL_VENV := .venv-trl
TRL_VERSION := 1.16.0
PYTEST := $(PYTHON) -u -m pytest
INPUTS := pyproject.toml constraints.txt

.PHONY: help setup demo demo-smollm2 test check static format bench bench-trl certify certify-trl learn clean
.DELETE_ON_ERROR:

help: ## List the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' Makefile | expand -t 16

setup: $(VENV)/dev.stamp ## Install everything for development into .venv

$(VENV)/bin/python:
	$(SYSTEM_PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python >= 3.11 is needed")'
	$(SYSTEM_PYTHON) -m venv $(VENV)

# torch comes first and with its exact pin, so that no later resolution replaces its build.
$(VENV)/demo.stamp: $(INPUTS) | $(VENV)/bin/python
	$(PIP) install -q $(TORCH)
	$(PIP) install -q -c constraints.txt -e '.[demo]'
	touch $@

$(VENV)/dev.stamp: $(INPUTS) | $(VENV)/bin/python
	$(PIP) install -q $(TORCH)
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/demo.stamp

demo: $(VENV)/demo.stamp ## A small model learns addition in about four minutes
	$(VENV)/bin/nexrl launch recipe/arithmetic

demo-smollm2: $(VENV)/dev.stamp ## SmolLM2-135M answers sums better and better
	$(VENV)/bin/nexrl launch recipe/smollm2_arithmetic

test: $(VENV)/dev.stamp ## Every test but whole demo runs
	$(PYTEST) -m 'not demo' --durations=15

check: static ## Format, lint, strict types and the fast tests
	$(PYTEST) -q -m 'not slow and not demo'

static: $(VENV)/dev.stamp ## Format, lint and strict types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

format: $(VENV)/dev.stamp ## Rewrite files as `make check` wants them
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

bench: $(VENV)/dev.stamp ## Numbers of bench/README.md that need no other environment
	$(PYTHON) bench/loop.py --json
	$(PYTHON) bench/trainer_overhead.py --json
	$(PYTHON) bench/engine.py --json
	$(PYTHON) bench/bare_grpo.py --json

$(TRL_VENV)/stamp: constraints.txt Makefile
	$(SYSTEM_PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/python -m pip --disable-pip-version-check install -q $(TORCH)
	$(TRL_VENV)/bin/python -m pip --disable-pip-version-check install -q trl==$(TRL_VERSION)
	touch $@

bench-trl: $(VENV)/dev.stamp $(TRL_VENV)/stamp ## Side by side with TRL, in an environment of its own
	$(PYTHON) bench/trl_side_by_side.py --trl-python $(TRL_VENV)/bin/python

certify: $(VENV)/dev.stamp ## Every algorithm against its reference; writes docs/certificate.md
	$(PYTHON) -m tests.certify

certify-trl: $(VENV)/dev.stamp $(TRL_VENV)/stamp ## The same, beside TRL's own losses on the same tensors
	$(PYTHON) -m tests.certify.trl_comparison --trl-python $(TRL_VENV)/bin/python
	$(PYTHON) -m tests.certify

learn: $(VENV)/dev.stamp ## A short run of every preset on the tiny model; writes docs/learn.svg
	$(PYTHON) bench/learn.py

clean: ## Remove environments, caches and build products; runs stay
	rm -rf $(VENV) $(TRL_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
