# Needs make and Python >= 3.11. Everything else is installed into $(VENV) from requirements.lock.
# With an active conda environment (environment.yml), `make all VENV=` uses its python and installs nothing.

VENV ?= .venv
PROFILE ?= embedded
TORCH_INDEX ?=

PYTHON := $(if $(VENV),$(VENV)/bin/python,python)
# What the environment was made from; it is made again when this changes, and shared by clones that agree on it.
STAMP := $(VENV)/smartlib.stamp
WANTED := cat requirements.lock pyproject.toml
PIP := PYTHONPATH= $(PYTHON) -m pip --disable-pip-version-check
# This clone's smartlib, also where the environment was made for another clone.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

# The newest Python that can make an environment. Each is run: a name on the path may be a stand-in that fails.
FIND_PYTHON = for python in python3.13 python3.12 python3.11 python3; do \
        if $$python -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
            if $$python -c 'import ensurepip' 2>/dev/null; then echo $$python; exit 0; fi; \
            found=$$python; \
        fi; \
    done; \
    if [ -n "$$found" ]; then \
        echo "$$found cannot make an environment: its venv lacks ensurepip (on Debian and Ubuntu: apt-get install python3-venv)" >&2; \
    else \
        echo 'No Python >= 3.11 with venv found (on Debian and Ubuntu: apt-get install python3 python3-venv)' >&2; \
    fi; \
    exit 1

.PHONY: help env all test verify grid plan export bench zoo lock lint clean find-python

help: ## list the targets
	@echo 'Usage: make TARGET [VENV=.venv] [PROFILE=embedded|public|paper] [FORCE=1] [TORCH_INDEX=address]'
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-8s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo 'make env TORCH_INDEX=ADDRESS takes torch and torchvision from that index, and leaves out the CUDA packages:'
	@echo 'for a CPU-only torch on Linux give the address of the CPU wheels that pytorch.org/get-started shows.'
	@echo 'With an active conda environment made from environment.yml, add VENV= (nothing) to use it.'

# Compared by content, so that a fresh clone (whose files are all new) takes a shared environment as it is.
env: ## make the environment (done by the other targets where it is needed)
ifeq ($(VENV),)
	@$(PYTHON) -c 'import sys; from importlib.util import find_spec as find; \
	    sys.exit(sys.version_info < (3, 11) or not (find("papermill") and find("ipykernel") and find("torch")))' || \
	    { echo 'VENV= needs an active environment made from environment.yml, with Python >= 3.11' >&2; exit 1; }
else
	@$(WANTED) | cmp -s - $(STAMP) || $(MAKE) --no-print-directory install
endif

all: env ## run the notebooks that are out of date, refresh notebooks/ and figures/
ifeq ($(PROFILE),paper)
	$(PYTHON) -m smartlib.data.vision extract
endif
	$(PYTHON) -m smartlib.experiments.notebooks build --profile $(PROFILE)

test: lint ## linter, unit tests, doctests
	$(PYTHON) -m pytest -n 2

verify: env ## run the notebooks afresh, check records at random, compare with the committed numbers
	$(PYTHON) -m smartlib.experiments.notebooks verify

grid: env ## compute the records of all experiments that are missing; FORCE=1 computes all anew (25 minutes on two cores)
	$(if $(FORCE),SMARTLIB_FORCE=$(FORCE)) $(PYTHON) -m smartlib.experiments.grid run --profile $(PROFILE)

plan: env ## what PROFILE=paper would download, under which licences, and how long it takes here (no network)
	@$(PYTHON) -m smartlib.data.vision plan

export: env ## write all records as one tidy table: build/records.csv
	@mkdir -p build
	$(PYTHON) -m smartlib.experiments.grid export build/records.csv

bench: env ## measure what calibrators, metrics and extraction cost (about half an hour)
	$(PYTHON) -m smartlib.experiments.cost
	$(PYTHON) -m smartlib.data.vision bench

zoo: env ## train the shipped models again (hours; continues where it stopped)
	$(PYTHON) -m smartlib.data.training

lint: env ## ruff: rules and formatting
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

lock: env ## resolve requirements.lock again from pyproject.toml (keeps pins that still fit)
	$(PYTHON) -m uv pip compile --quiet --universal --python-version 3.11 --all-extras --no-annotate \
	    --custom-compile-command 'make lock' --output-file requirements.lock pyproject.toml

clean: ## remove what runs leave behind: build/, caches (not the environment)
	rm -rf build smartlib.egg-info .pytest_cache .ruff_cache .hypothesis
	find smartlib tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Takes up where an interrupted one stopped.
install:
	@test -x $(PYTHON) && $(PIP) --version >/dev/null 2>&1 || \
	    { python=$$($(FIND_PYTHON)) && "$$python" -m venv $(VENV); }
ifeq ($(TORCH_INDEX),)
	$(PIP) install -r requirements.lock
else
	@# A build for CPUs counts as the version that is pinned (2.0+cpu is 2.0), so pip fetches no second torch, and it
	@# asks for none of the CUDA packages, which are therefore left out of the rest.
	grep -E '^(torch|torchvision)==' requirements.lock > $(VENV)/torch.txt
	grep -vE '^(torch|torchvision|triton|nvidia-[a-z0-9-]+|cuda-[a-z]+)==' requirements.lock > $(VENV)/rest.txt
	$(PIP) install --no-deps --index-url $(TORCH_INDEX) -r $(VENV)/torch.txt
	$(PIP) install -r $(VENV)/rest.txt
endif
	$(PIP) install --no-deps --no-build-isolation --quiet -e .
	@$(WANTED) > $(STAMP)

find-python:
	@$(FIND_PYTHON)
