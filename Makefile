# Everything runs in an environment of its own; nothing outside this directory is touched, but for
# the caches of pip and of compiled objects.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
JOBS ?= 3

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
INSTALL := $(PIP) install -qq --no-compile --constraint constraints.txt
PLUGINS := $(patsubst plugins/%/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
EDITABLE := $(foreach plugin,$(PLUGINS),--editable plugins/$(plugin)[test])

export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONPATH
# Hundreds of processes import what one has compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all test-slow pyg-suite lint format kernels docs wheel peers bench gpu gpu-sanitize clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    train GraphSAGE on a generated graph, beside PyG, and draw a picture"
	@echo "make test    what every change must pass: linters, types, layers, tests, plugins, examples"
	@echo "make test-all    the same, and then the exhaustive tests: three times as long"
	@echo "make lint    the linters alone        make format   mend what they can"
	@echo "make docs    the documentation site, in build/docs"
	@echo "make kernels compile csrc/            make wheel    a wheel that holds what it compiles to"
	@echo "make peers   torch-sparse and torch-cluster from source, to compare with: half an hour"
	@echo "make pyg-suite PYG=/path/to/pytorch_geometric    PyG's own tests of loaders and layers, on ours"
	@echo "make bench   the numbers of docs/benchmarks/"
	@echo "make gpu     build, check and measure on a GPU, with the python3 that is there, into GPU_OUT;"
	@echo "make gpu-sanitize    then memory accesses of its kernels"
	@echo "make clean   remove what was made here"
	@echo "PYTHON=python3.12 and VENV=directory choose the interpreter and the environment, JOBS=4 how"
	@echo "many processes run tests"

# The demo runs no kernel that nvcc would spend a minute on; a GPU's NVRTC compiles what it needs.
demo: export PYG_SCALE_CUDA ?= nvrtc
demo: $(VENV)/.demo kernels
	$(BIN)/python examples/train_sage.py

# The environment #################################################################################

# An environment that is there already is somebody's, unless it was made here.
$(VENV)/.pyg_scale:
	@test ! -e $(VENV) || { echo "$(VENV) is there and was not made here: try make VENV=.venv-demo" >&2; exit 1; }
	@test -n "$(PYTHON)" || { echo "there is no python3 on the PATH: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or later is needed, $(PYTHON) is older: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/.pyg_scale
	@echo "installing torch and PyG into $(VENV): a minute, or as long as the download takes"
	$(INSTALL) --editable ".[plot]"
	@touch $@

$(VENV)/.bench: $(VENV)/.demo plugins/pyg-scale-bench/pyproject.toml
	$(INSTALL) --editable plugins/pyg-scale-bench
	@touch $@

# One environment for all builds, as each of its own takes seconds.
$(VENV)/.test: $(VENV)/.demo $(wildcard plugins/*/pyproject.toml)
	@echo "installing what tests need into $(VENV): half a minute"
	$(INSTALL) hatchling editables
	$(INSTALL) --no-build-isolation --editable ".[dev]" $(EDITABLE)
	@touch $@

# Not by its script: make test installs the package again meanwhile.
kernels: $(VENV)/.demo
	$(BIN)/python -m pyg_scale.cli build

# Testing #########################################################################################

# There are more processes than cores, and some wait: torch's threads must not spin meanwhile. A
# process that a test ends is not replaced, as pytest-xdist would wait for ever for what it had.
PYTEST := $(BIN)/python -m pytest
PARALLEL := --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test test-slow: export PYG_SCALE_KERNELS = require
test test-slow: export OMP_WAIT_POLICY = passive
test:
	$(MAKE) --jobs 2 lint kernels
	$(PYTEST) $(PARALLEL) -m "not slow" tests plugins

# Of one plugin.
test-%: $(VENV)/.test
	$(PYTEST) -q -m "not slow" plugins/$*

# Exhaustive matrices, whole runs of benchmarks, minutes of faults, the documentation site: what a
# change seldom breaks.
test-slow: $(VENV)/.test $(VENV)/.docs kernels
	$(PYTEST) $(PARALLEL) -m slow tests plugins

test-all:
	$(MAKE) test
	$(MAKE) test-slow

# Of a checkout of PyG, of the version that is installed.
PYG_TESTS := loader/test_neighbor_loader.py loader/test_link_neighbor_loader.py \
  loader/test_hgt_loader.py loader/test_zip_loader.py loader/test_cache.py \
  loader/test_imbalanced_sampler.py utils/test_trim_to_layer.py \
  $(patsubst %,loader/test_%.py,cluster graph_saint shadow random_node_loader ibmb_loader \
  dynamic_batch_sampler prefetch temporal_dataloader mixin utils)
PYG_WALK_TESTS := nn/models/test_node2vec.py nn/models/test_metapath2vec.py \
  transforms/test_rooted_subgraph.py utils/test_dropout.py
PYG_CONV_TESTS := $(patsubst %,nn/conv/test_%_conv.py,gcn sage gin graph gat gatv2 transformer rgcn) \
  nn/models/test_basic_gnn.py nn/test_to_hetero_transformer.py
PYG_SUITE = $(BIN)/python -m pytest -q -rsx -o addopts= -p tests.parity.pyg_suite

pyg-suite: export PYG_SCALE_KERNELS = require
pyg-suite: $(VENV)/.test kernels
	@test -d "$(PYG)/test/loader" || \
	  { echo "make pyg-suite PYG=/path/to/pytorch_geometric: a checkout of its repository" >&2; exit 1; }
	$(PYG_SUITE) --drop-in=loaders $(PYG_TESTS:%=$(PYG)/test/%)
	$(PYG_SUITE) --drop-in=compat $(PYG_TESTS:%=$(PYG)/test/%) \
	  $(PYG)/test/sampler/test_sampler_neighbor_sampler.py $(PYG_WALK_TESTS:%=$(PYG)/test/%)
	$(BIN)/python -m tests.parity.pyg_examples $(PYG)
	$(PYG_SUITE) --drop-in=convs $(PYG_CONV_TESTS:%=$(PYG)/test/%)

CSRC := $(wildcard $(foreach kind,cpp h cu cuh,csrc/*.$(kind) csrc/*/*.$(kind)))

lint: $(VENV)/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/clang-format --dry-run --Werror $(CSRC)

format: $(VENV)/.test
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CSRC)

# Documentation ###################################################################################

$(VENV)/.docs: $(VENV)/.demo
	@echo "installing Sphinx into $(VENV)"
	$(INSTALL) --editable ".[docs]"
	@touch $@

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going -q -b html -d build/doctrees docs build/docs
	@echo "the documentation is in build/docs/index.html"

# Shipping and comparing ##########################################################################

wheel: $(VENV)/.test
	PYG_SCALE_BUILD_KERNELS=1 $(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*abi3*.whl

peers: $(VENV)/.test
	@echo "compiling torch-sparse and torch-cluster from source: this takes half an hour on two cores"
	$(INSTALL) setuptools wheel
	$(INSTALL) --no-build-isolation torch-scatter torch-sparse torch-cluster

bench: $(VENV)/.bench kernels
	$(BIN)/pyg-scale bench loader --options --json docs/benchmarks/loader.json \
	  --png docs/benchmarks/loader.png --report docs/benchmarks/loader.md

# With what is installed: a machine with a GPU has its own torch, and perhaps no network. The
# benchmarks are found by their path. What is lacking of other packages may be in a directory,
# GPU_SITE. Results go to GPU_OUT as they come. Kernels are nvcc's if it is there; those of formulas
# are always NVRTC's, which PYG_SCALE_CUDA=1 would forbid.
GPU_PYTHON ?= python3
GPU_OUT ?= docs/benchmarks
GPU_BUILD := $(if $(shell command -v nvcc),1,nvrtc)
GPU_PATH := .:plugins/pyg-scale-bench/src$(if $(GPU_SITE),:$(GPU_SITE))
GPU := PYTHONPATH=$(GPU_PATH) PYG_SCALE_KERNELS=require $(GPU_PYTHON)

gpu:
	$(GPU) -c 'import torch; assert torch.cuda.is_available(), "torch sees no GPU"'
	PYG_SCALE_CUDA=$(GPU_BUILD) $(GPU) -m pyg_scale.cli build
	mkdir -p $(GPU_OUT) && rm -f $(GPU_OUT)/gpu-tests.txt
	failed=0; \
	$(GPU) -m pyg_scale_bench gpu --nvrtc --seconds 300 --json $(GPU_OUT)/gpu.json \
	  --report $(GPU_OUT)/gpu.md || failed=1; \
	! $(GPU) -c 'import pytest, pytest_timeout' 2>/dev/null || \
	  $(GPU) -m pytest -v -m cuda --continue-on-collection-errors $(shell grep -rl 'mark.cuda' tests) \
	  >$(GPU_OUT)/gpu-tests.txt 2>&1 || failed=1; \
	! test -e $(GPU_OUT)/gpu-tests.txt || tail -n 40 $(GPU_OUT)/gpu-tests.txt; \
	exit $$failed

# After make gpu: memory accesses of all ops, in minutes of their own.
gpu-sanitize:
	$(GPU) -m pyg_scale_bench gpu --check-only --sanitize --json $(GPU_OUT)/gpu-sanitize.json \
	  --report $(GPU_OUT)/gpu-sanitize.md

clean:
	test ! -e $(VENV)/.pyg_scale || rm -rf $(VENV)
	rm -rf dist build pyg_scale/ops/_kernels.abi3.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find pyg_scale csrc tests plugins examples -name __pycache__ -type d -prune -exec rm -rf {} +
