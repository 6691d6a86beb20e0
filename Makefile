# make test     the suite, in .venv (made on first use)
# make demo     a real pretrained BERT with each mechanism: tables, plots and demo_out/result.json
# make bench    time and memory of generation on this machine: tables, a plot and bench_out/decode.json
# make compat   the tests that touch transformers, with the oldest and the newest release of it, in fresh environments
# make style    ruff and mypy, as CI runs them
# make format   let ruff repair what it can
# make clean    remove .venv, caches and build products
#
# Another torch, for instance a CUDA build: make test TORCH='torch==2.13.0 --index-url ...'
# Part of the suite:                        make test ARGS='tests/test_cli.py -k inspect'

PYTHON ?= python3
VENV ?= .venv
TORCH ?= -c constraints.txt torch
WORKERS ?= 2
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := test
.PHONY: test compat demo bench style format clean

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

compat:
	PYTHON=$(PYTHON) WORKERS=$(WORKERS) .ci/compat $(ARGS)

demo: $(VENV)/.demo
	HF_HUB_OFFLINE=1 $(BIN)/python recipes/demo.py $(ARGS)

bench: $(VENV)/.dev
	HF_HUB_OFFLINE=1 $(BIN)/hf-rfattn bench decode $(ARGS)

style: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info demo_out bench_out study_out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch is installed alone and first: resolved together with the rest, it may drag in gigabytes of another build. What was
# installed is then the constraint for all that follows, so that an override of TORCH holds.
$(VENV)/.torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	$(PIP) install $(TORCH)
	{ grep -v '^torch==' constraints.txt; $(PIP) freeze | grep '^torch==' || true; } > $(VENV)/constraints.txt
	touch $@

$(VENV)/.base: $(VENV)/.torch pyproject.toml
	$(PIP) install -c $(VENV)/constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP) install -c $(VENV)/constraints.txt -e '.[dev,recipes]'
	touch $(VENV)/.base $@

$(VENV)/.demo: requirements-demo.txt $(VENV)/.base
	$(PIP) install --no-deps --require-hashes -r requirements-demo.txt
	touch $@
