# All set-up happens inside this tree: .venv, .venv-bench, .venv-serve and .cache are made on demand and ignored by git.
PYTHON ?= python3
BIN := .venv/bin
BENCH ?=
QUICK ?=
WRITE ?=
PYTEST_ARGS ?=
# One more than there are cores: some tests wait for other processes.
PYTEST_WORKERS ?= $(shell $(PYTHON) -c 'import os; print(os.cpu_count() + 1)')

export NUMBA_CACHE_DIR := $(CURDIR)/.cache/numba
export DPSTREAM_BENCH_CACHE ?= $(CURDIR)/.cache/bench
export MPLCONFIGDIR := $(CURDIR)/.cache/matplotlib
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Without bytecode every process that a test starts would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test everything golden stored long deploy-long lint format bench bench-peers .venv-bench serve-test .venv-serve servers spark browser docs clean
.NOTPARALLEL:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: .venv/.core ## set up the core in .venv and take a tour: a live private query, a kill, a series, the ledger
	@echo "demo: a tour of half a minute"
	@$(BIN)/dpstream demo
	@echo "(source .venv/bin/activate puts dpstream on your path)"

test: .venv/.dev ## set up .venv and run every test whose components are present; the rest is listed at the end
	@echo "test: running every test whose components are present"
	@$(BIN)/python -m pytest --numprocesses $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder --durations 10 $(PYTEST_ARGS)

everything: ## set up every component, then check all there is: style, types and every test (.ci/run)
	@.ci/run

golden: .venv/.dev ## compare what fixed runs publish and charge with the stored digests (WRITE=1 stores new ones)
	@echo "golden: $(if $(WRITE),writing,checking) tests/golden/digests.json"
ifeq ($(WRITE),)
	@$(BIN)/python -m pytest --quiet --numprocesses 2 tests/golden
else
	@DPSTREAM_GOLDEN_WRITE=1 $(BIN)/python -m pytest --quiet --numprocesses 0 --capture no \
		--ignore tests/golden/test_changelog.py tests/golden
endif

stored: .venv/.dev ## store a state and a ledger of this version, which every later one must take up
	@echo "stored: writing the folder of this version in tests/stored/"
	@$(BIN)/python -m tests.stored.write

# Tests of which `make test` does a fixed part.
LONG = $(shell grep -l 'from tests.support.long import' -r tests --include 'test_*.py' | sort)

long: .venv/.dev ## run the long forms of tests, of which `make test` does a part
	@echo "long: every case of $(LONG)"
	@DPSTREAM_LONG=1 $(BIN)/python -m pytest --numprocesses $(PYTEST_WORKERS) $(LONG) $(PYTEST_ARGS)

deploy-long: .venv/.dev ## build and run the image, render and validate the chart: ten minutes the first time (as root)
	@echo "deploy-long: everything in deploy/"
	@.ci/deploy --all
	@DPSTREAM_LONG=1 DPSTREAM_REQUIRE_ALL=1 $(BIN)/python -m pytest --timeout 1800 tests/deploy $(PYTEST_ARGS)

lint: .venv/.dev ## check style, types and who imports whom
	@echo "lint: ruff, mypy --strict, import-linter"
	@$(BIN)/ruff check
	@$(BIN)/ruff check --quiet --config .ci/ruff-everywhere.toml
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: .venv/.dev ## rewrite the code in the project's style
	@$(BIN)/ruff check --fix-only --quiet
	@$(BIN)/ruff format

bench: .venv/.dev .venv-bench/.stamp ## measure against the peers (BENCH=name for one bench, QUICK=1 for a short run)
	@echo "bench: measuring $(or $(BENCH),everything)$(if $(QUICK), in a short run)"
	@$(BIN)/dpstream bench $(BENCH) $(if $(QUICK),--quick)

bench-peers: .venv-bench/.stamp ## set up .venv-bench, the environment of the libraries the benches compare with
.venv-bench: .venv-bench/.stamp

serve-test: .venv-serve/.stamp ## set up .venv-serve, the environment of the tool that asks a server everything its OpenAPI allows
.venv-serve: .venv-serve/.stamp

servers: .venv/.servers ## add what speaks to Kafka, NATS, PostgreSQL, Delta Lake and object stores to .venv; .ci/servers installs the servers
spark: .venv/.spark ## add Spark to .venv (it needs a Java 17 or 21), for its engine and the tests of it
browser: .venv/.browser ## add what drives a browser to .venv; the tests of the page need it, and .ci/browser

docs: .venv/.dev ## build the documentation into site/
	@echo "docs: building site/"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

clean: ## remove environments, caches and everything built
	@echo "clean: removing environments, caches and everything built"
	@rm -rf .venv .venv-bench .venv-serve .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache build dist site
	@find src benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call make_venv,folder): make the environment unless it is there.
define make_venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	echo "dpstream needs Python 3.11 or newer, but PYTHON=$(PYTHON) is $$($(PYTHON) --version 2>&1 || true);" \
	"name another one: make PYTHON=python3.11 ..." >&2; exit 1; }
@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
endef

.venv/.core: pyproject.toml constraints.txt
	@echo "setting up .venv (core)"
	$(call make_venv,.venv)
	@$(BIN)/python -m pip install -q -c constraints.txt -e .
	@touch $@

.venv/.dev: pyproject.toml constraints.txt
	@echo "setting up .venv (core and development tools)"
	$(call make_venv,.venv)
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch .venv/.core $@

.venv/.servers: .venv/.dev
	@echo "setting up .venv (connectors)"
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[connectors]'
	@touch $@

.venv/.spark: .venv/.dev
	@echo "setting up .venv (Spark)"
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[spark]'
	@touch $@

.venv/.browser: .venv/.dev
	@echo "setting up .venv (what drives a browser)"
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[browser]'
	@touch $@

.venv-bench/.stamp: constraints-bench.txt
	@echo "setting up .venv-bench (the peers)"
	$(call make_venv,.venv-bench)
	@.venv-bench/bin/python -m pip install -q -c constraints-bench.txt 'opendp[polars]' diffprivlib pipeline-dp pyspark
	@touch $@

.venv-serve/.stamp: constraints-serve.txt
	@echo "setting up .venv-serve (schemathesis)"
	$(call make_venv,.venv-serve)
	@.venv-serve/bin/python -m pip install -q -c constraints-serve.txt schemathesis
	@touch $@
