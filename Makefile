# Every target does all of its own set-up: a fresh clone needs Python 3.11 and nothing else.

PYTHON      ?= python3        ## the interpreter that makes .venv
TORCH       ?= torch==2.13.0  ## what pip installs first
TORCH_INDEX ?=                ## the package index to take it from: name one with CPU builds to spare yourself CUDA
ARGS        ?=                ## more arguments for run, demo, chat, bench, load, chaos, train
PYTEST_ARGS ?=                ## more arguments for pytest, such as -k tree

BIN   := .venv/bin
STAMP := .venv/.stamp
PIP   := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup run demo chat bench load chaos train test lint types layers pytest chart format proto clean

help:  ## this manual
	@awk -F ':.*## ' '/^[a-z]+:.*## /  {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@awk -F ' *[?]= *|## ' '/^[A-Z_]+ *[?]=/ {sub(/ +$$/, "", $$2); printf "  %-14s %s%s\n", $$1, $$3, $$2 ? " (" $$2 ")" : ""}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## .venv with everything; a second call does nothing
	@:

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("Paceline needs Python 3.11: make PYTHON=python3.11")'
	@echo "Installing into .venv, a few minutes the first time"
	@$(PYTHON) -m venv .venv
	@$(PIP) $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@$(PIP) --editable '.[dev]'
	@touch $@

run: setup  ## serve the demo model on this machine
	@$(BIN)/paceline serve $(ARGS)

demo: setup  ## the same tokens, sooner: shown and measured
	@$(BIN)/paceline demo $(ARGS)

chat: setup  ## talk to a running server
	@$(BIN)/paceline chat $(ARGS)

bench: setup  ## our speed beside others': make bench ARGS=baseline
	@$(BIN)/paceline bench $(ARGS)

load: setup  ## 500 streams and more against stacks of our own: every token checked
	@$(BIN)/python -m loadtests $(ARGS)

train: setup  ## train the demo models again
	@$(BIN)/paceline train $(ARGS)

chaos: setup  ## five minutes of random kills under load: no token lost, none changed
	@$(BIN)/python -m loadtests.chaos $(ARGS)

test: lint types layers pytest  ## everything CI checks

lint: setup  ## ruff: rules and format
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet

types: setup  ## mypy, strict
	@$(BIN)/mypy

layers: setup  ## import-linter: who may import whom
	@$(BIN)/lint-imports --no-logo

pytest: setup  ## the tests alone
	@$(BIN)/pytest $(PYTEST_ARGS)

chart: setup  ## the Helm chart with every combination of its main values
	@$(BIN)/python -m tests.deploy.combinations

format: setup  ## ruff: repair what it can
	@$(BIN)/ruff check --fix --quiet
	@$(BIN)/ruff format --quiet

proto: setup  ## write paceline/v1 again from proto/
	@$(BIN)/python proto/generate.py

clean:  ## remove everything that make made
	@rm -rf .venv .venv-peers .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
