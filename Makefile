# make test     the suite, in .venv (made on first use)
# make test-gpu the tests that need a GPU (two for some of them), and those of the fused kernels; with a build of torch for it
# make demo     a pretrained embedding model on long documents with each kind of attention: table, plot, models and cards in demo_out
# make compare  the same on real tasks, into compare_out: DATA and MODELS are folders; CONFIG is a file of recipes/compare
# make bench    time and memory of attention, whole models and generation on this machine: tables, plots, bench_out/*.json
# make readme   the parts of README.md, recipes/results/README.md and docs/reference that are generated from result files and models
# make docs     the guides and the API reference as a site, into site/index.html
# make dist     sdist and wheel, checked, into dist/
# make compat   the tests that touch transformers, with the oldest and the newest release of it, in fresh environments
# make upstream transformers' own tests of five models with every model patched, compared with a list of expected failures:
#               TRANSFORMERS is a checkout of the installed release, by default a clone in upstream_out; some 40 minutes
# make style    ruff and mypy, as CI runs them
# make format   let ruff repair what it can
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
CONFIG ?= transfer

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
	$(BIN)/python recipes/make_readme.py
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

# torch is installed alone and first: resolved together with the rest, it may drag in gigabytes of another build. What was
# installed is then the constraint for all that follows, so that an override of TORCH holds.
$(VENV)/.torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	$(PIP) install $(TORCH)
	{ grep -v '^torch==' constraints.txt; $(PIP) freeze | grep '^torch==' || true; } > $(VENV)/constraints.txt
	touch $@

$(VENV)/.base: $(VENV)/.torch pyproject.toml
	$(PIP) install -c $(VENV)/constraints.txt -e '.[bench]'
	touch $@

# A test loads a model with lm-eval, which needs one of the twenty packages that come with it to compute metrics.
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

# The reference is read from the sources, so this environment needs no torch.
$(DOCS)/.docs: requirements-docs.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip --disable-pip-version-check install -r requirements-docs.txt
	touch $@

$(DIST)/.dist:
	test -x $(DIST)/bin/python || $(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip --disable-pip-version-check install --quiet 'build>=1.2' 'twine>=6.1'
	touch $@
