# make test     run the test suite in .venv, which is created on first use
# make test-gpu run the tests that need a GPU (some need two) and those of the fused kernels; needs a GPU build of torch
# make demo     compare attention mechanisms in a pretrained embedding model on long documents: table, plot, models and cards in demo_out
# make compare  compare them on real tasks, into compare_out; DATA and MODELS are folders, CONFIG is a file of recipes/compare
# make bench    measure time and memory of attention, whole models and generation on this machine: tables, plots, bench_out/*.json
# make readme   the parts of README.md, recipes/results/README.md and docs that are generated from result files and models
# make docs     build the documentation site, into site/index.html
# make dist     build and check sdist and wheel, into dist/
# make compat   run the tests of the integration with the oldest and the newest supported transformers, in fresh environments
# make upstream run transformers' own tests of five models with every model patched, and compare with a list of expected failures;
#               TRANSFORMERS is a checkout of the installed release, by default a clone in upstream_out; about 40 minutes
# make style    run ruff and mypy, as in CI
# make format   format and fix with ruff
# make clean    remove all environments, caches and build products
#
# Another torch, for instance a CUDA build: make test TORCH='torch==2.13.0 --index-url ...'
# Part of the suite:                        make test ARGS='tests/test_cli.py -k inspect'

PYTHON ?= python3
VENV ?= .venv
DOCS ?= .venv-docs
DIST ?= .venv-dist
TORCH ?= -c constraints.txt torch
WORKERS ?= 2
ARGS ?=
CONFIG ?= accuracy

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := test
.PHONY: test test-gpu compat upstream demo compare bench readme docs dist style format clean

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -rs tests/gpu tests/test_fused.py $(ARGS)
	$(BIN)/hf-rfattn doctor

compat:
	PYTHON=$(PYTHON) WORKERS=$(WORKERS) .ci/compat $(ARGS)

upstream: $(VENV)/.upstream
	$(BIN)/python .ci/upstream/upstream.py $(TRANSFORMERS:%=--checkout %) $(ARGS)

demo: $(VENV)/.demo
	HF_HUB_OFFLINE=1 $(BIN)/python recipes/demo.py $(ARGS)

compare: $(VENV)/.recipes
	HF_HUB_OFFLINE=1 $(BIN)/python recipes/compare.py recipes/compare/$(CONFIG).yaml --set data=$(DATA) $(MODELS:%=--set models=%) --output compare_out/$(CONFIG) $(ARGS)

bench: $(VENV)/.dev
	HF_HUB_OFFLINE=1 $(BIN)/hf-rfattn bench ops $(ARGS)
	HF_HUB_OFFLINE=1 $(BIN)/hf-rfattn bench model --model bert $(ARGS)
	HF_HUB_OFFLINE=1 $(BIN)/hf-rfattn bench model --model gpt2 --lengths 128,512,1024 $(ARGS)
	HF_HUB_OFFLINE=1 $(BIN)/hf-rfattn bench decode $(ARGS)

readme: $(VENV)/.recipes
	PYTHONPATH=.:recipes $(BIN)/python .ci/make_readme.py
	PYTHONPATH=tests $(BIN)/python -m support.reach_table --page docs/reference/models.md

# Not with --quiet: mkdocs then counts no warnings, and --strict lets broken links pass.
docs: $(DOCS)/.docs
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict

dist: $(DIST)/.dist
	rm -rf dist
	$(DIST)/bin/python -m build --quiet --outdir dist .
	$(DIST)/bin/python -m twine check --strict dist/*

style: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(DOCS) $(DIST) site build dist *.egg-info demo_out compare_out bench_out study_out upstream_out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch is installed first and separately: resolved together with the rest, pip may download gigabytes of another build. The
# installed version is then a constraint for everything else, so that an override of TORCH is kept.
$(VENV)/.torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	$(PIP) install $(TORCH)
	{ grep -v '^torch==' constraints.txt; $(PIP) freeze | grep '^torch==' || true; } > $(VENV)/constraints.txt
	touch $@

$(VENV)/.base: $(VENV)/.torch pyproject.toml
	$(PIP) install -c $(VENV)/constraints.txt -e '.[bench]'
	touch $@

# A test loads a model with lm-eval. For that, requests is the only one of its twenty dependencies that is needed.
$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP) install -c $(VENV)/constraints.txt -e '.[dev,recipes]'
	$(PIP) install -c $(VENV)/constraints.txt requests
	$(PIP) install -c $(VENV)/constraints.txt --no-deps lm-eval
	touch $(VENV)/.base $@

$(VENV)/.recipes: $(VENV)/.torch pyproject.toml
	$(PIP) install -c $(VENV)/constraints.txt -e '.[recipes]'
	touch $(VENV)/.base $@

$(VENV)/.demo: requirements-demo.txt $(VENV)/.recipes
	$(PIP) install --no-deps --require-hashes -r requirements-demo.txt
	touch $@

$(VENV)/.upstream: requirements-upstream.txt $(VENV)/.dev
	$(PIP) install -c $(VENV)/constraints.txt -r requirements-upstream.txt
	touch $@

# The API reference is generated from the sources, so this environment needs no torch.
$(DOCS)/.docs: requirements-docs.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip --disable-pip-version-check install -r requirements-docs.txt
	touch $@

$(DIST)/.dist:
	test -x $(DIST)/bin/python || $(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip --disable-pip-version-check install --quiet 'build>=1.2' 'twine>=6.1'
	touch $@
