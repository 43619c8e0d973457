# Every target sets up what it needs (virtual environment, cluster binaries) and may be repeated or interrupted.
SHELL := /bin/sh
VENV ?= .venv
BIN := $(VENV)/bin
CLUSTER ?= local
ARGS ?=
# The pinned helm renders the plain install, whatever helm is on PATH.
TOOLS = HELM="$$($(BIN)/trainium-devcluster binaries 2>/dev/null | tail -n 1)/helm"
export OMP_NUM_THREADS ?= 1

.PHONY: help setup binaries demo test test-cluster check format generate bench clean

help:  ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 16

setup:  ## Virtual environment with pinned packages
	@scripts/setup.sh $(VENV)

binaries: setup  ## Control-plane programs, kubectl and helm (download, else build; cached)
	@$(BIN)/trainium-devcluster binaries

demo: binaries  ## A Llama model trained through faults on a real control plane (ARGS="--keep" leaves the cluster up)
	@$(BIN)/python -m trainium_devcluster.demo $(ARGS)

test: binaries  ## All tests, on a development cluster of their own
	@$(BIN)/python -m pytest $(ARGS)

test-cluster: setup  ## Cluster tests on CLUSTER=local, kind or existing (docs/testing.md)
	@$(BIN)/python -m pytest tests/cluster --cluster=$(CLUSTER) $(ARGS)

check: binaries  ## Lint, format, types, import rules, generated files
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(TOOLS) $(BIN)/python -m trainium_operator.generate --check

format: setup  ## Format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

generate: binaries  ## Write the CRD and the manifests that are derived from the code
	@$(TOOLS) $(BIN)/python -m trainium_operator.generate

bench: binaries  ## All benchmarks: a table, and JSON under out/bench
	@$(BIN)/python benchmarks/run.py $(ARGS)

clean:  ## Remove what the targets made here (caches in the home folder stay)
	@test ! -x $(BIN)/trainium-devcluster || $(BIN)/trainium-devcluster down --all
	@rm -rf $(VENV) out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
