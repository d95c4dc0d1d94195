# `make demo` and `make test` create the environment themselves; a second run finds it ready.
# TORCH_BACKEND=cpu (or cu126, ...) takes another build of torch than the default one.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

BIN := .venv/bin
TORCH_BACKEND ?=
SOAK ?=
RATES ?=
STAMP := .venv/ready$(addprefix -,$(TORCH_BACKEND))
NEW_ENOUGH := import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c '$(NEW_ENOUGH)' 2>/dev/null && { echo $$p; break; }; done)

.PHONY: help env demo test test-slow test-all soak rates lint lock schemas clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18

env: $(STAMP) ## create or update the environment in .venv from requirements.txt

demo: $(STAMP) ## score example events on this machine: no Kafka, no GPU
	$(BIN)/processor demo

test: lint ## linters, types, and the tests that need nothing
	$(BIN)/pytest -n 2 --dist loadfile

test-slow: $(STAMP) ## the tests that need Kafka, the model or minutes
	$(BIN)/pytest -m '(kafka or slow) and not gpu'

test-all: test test-slow ## all tests but those that need a GPU

soak: $(STAMP) ## faults at random on real Kafka for 20 minutes; SOAK="--seed 1" repeats a plan
	$(BIN)/python -m tests.kafka.soak $(SOAK)

rates: $(STAMP) ## records per second and latency on real Kafka, without and with the model
	$(BIN)/python -m tests.kafka.rates --engine 48 $(RATES)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lock: $(BIN)/uv ## pin every dependency with its hashes in requirements.txt
	$(BIN)/uv pip compile pyproject.toml --universal --all-extras --generate-hashes \
		--no-emit-index-url --no-header --no-annotate --quiet -o requirements.txt

schemas: $(STAMP) ## write the published JSON Schemas
	$(BIN)/processor schema --write schemas

clean: ## remove the environment and all caches
	rm -rf .venv .cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache \
		build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The installer comes from the lock too, hash and all.
$(BIN)/uv:
	@[ -n "$(PYTHON)" ] || { echo "Python 3.11 or newer with venv is needed: install it, or set PYTHON" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	awk '/^[^ ]/ { keep = /^uv==/ } keep' requirements.txt > .venv/uv.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r .venv/uv.txt

$(STAMP): requirements.txt pyproject.toml | $(BIN)/uv
ifeq ($(TORCH_BACKEND),)
	$(BIN)/uv pip install --python $(BIN)/python --require-hashes --compile-bytecode -r requirements.txt
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --no-build-isolation -e .
else # the lock holds the hashes of the default build of torch only, so versions alone are pinned
	$(BIN)/uv pip install --python $(BIN)/python --torch-backend $(TORCH_BACKEND) --no-verify-hashes --compile-bytecode \
		-c requirements.txt -b requirements.txt -e '.[demo,dev]'
endif
	@rm -f .venv/ready*
	@touch $@
