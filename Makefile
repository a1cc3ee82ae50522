# Everything runs from .venv, which is made on first use. `make help` lists the targets.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := 2.13.0
TORCHREC := 1.8.0
# `make install CUDA=1` takes the CUDA build of fbgemm; what is installed stays what later targets use.
CUDA ?= $(if $(wildcard $(VENV)/.installed-fbgemm-gpu),1,0)
FBGEMM := $(if $(filter 1,$(CUDA)),fbgemm-gpu,fbgemm-gpu-cpu)
STAMP := $(VENV)/.installed-$(FBGEMM)
# A file's tests run in one worker, which makes what they share once; files go out in their order, quick ones last.
# A worker more than CI has cores, for tests also wait: for threads, and for processes that start and end.
WORKERS ?= 3
# What is compiled is kept, also where the environment says otherwise: tests start hundreds of processes.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help install demo unit test check bench soak test-gpu bench-gpu protos lock format clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

install: $(STAMP)  ## install everything into .venv (CUDA=1 for GPUs)

demo: install  ## run the whole path: service, trainer of two ranks, two replicas
	$(BIN)/deltasync demo $(ARGS)

unit: install  ## run the tests that start no process
	$(PYTEST) tests/unit $(ARGS)

test: check  ## lint, check types and layers, run all tests (WORKERS=0: in one process)
	$(PYTEST) $(ARGS)

check: install  ## lint, format, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint protos

bench: install  ## print the benchmarks
	@set -e; for name in $$($(BIN)/deltasync bench --list); do $(BIN)/deltasync bench $$name $(ARGS); done

SECONDS ?= 300
SEED ?= 0
soak: install  ## kill, freeze, cut and change everything, and compare the rows (SECONDS=300 SEED=0)
	$(BIN)/deltasync soak --seconds $(SECONDS) --seed $(SEED) $(ARGS)

# On a machine with a GPU, by the environment of a PYTHON that is named, as it is, or else by .venv.
GPU_PYTHON = $(if $(filter file,$(origin PYTHON)),$(BIN)/python,$(PYTHON))
GPU_PATH := $(CURDIR)/build/gpu:$(CURDIR):$(CURDIR)/sync_service:$(CURDIR)/trainer:$(CURDIR)/protos
GPU_RUN = PYTHONPATH=$(GPU_PATH):$$PYTHONPATH $(GPU_PYTHON)
# Ranks train on a CPU where there are fewer GPUs.
GPU_RANKS ?= 1

build/gpu: FORCE
	@$(GPU_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(GPU_PYTHON): name a Python from 3.11 on with PYTHON=..., or 'make install CUDA=1'"; exit 1; }
	@$(GPU_PYTHON) tests/gpu/environment.py $@
FORCE:

test-gpu: build/gpu  ## run the tests that need a GPU, with your torch (PYTHON=...)
	$(GPU_RUN) -m pytest -c tests/gpu/gpu.ini --rootdir=$(CURDIR) --confcutdir=$(CURDIR) -m gpu tests/gpu $(ARGS)

bench-gpu: build/gpu  ## print the benchmarks of the tracker, the pipelines and the demo there
	$(GPU_RUN) -m deltasync bench tracker
	$(GPU_RUN) -m deltasync bench pipelines --ranks $(GPU_RANKS)
	$(GPU_RUN) -m deltasync demo --ranks $(GPU_RANKS) $(ARGS)

protos: install  ## generate the stubs anew from the .proto files
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=protos --grpc_python_out=protos \
		--mypy_out=quiet:protos --mypy_grpc_out=quiet:protos protos/deltasync/v1/*.proto

format: install  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock:  ## write requirements.lock anew from pyproject.toml
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	$(PYTHON) -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb')); \
		print(*p['project']['dependencies'], *p['project']['optional-dependencies']['service'], *sum(p['dependency-groups'].values(), []), sep='\n')" > build/lock/wanted.txt
	build/lock/bin/pip install -q torch==$(TORCH)
	build/lock/bin/pip install -q -r build/lock/wanted.txt
	build/lock/bin/pip freeze --exclude torch --exclude pip --exclude setuptools | grep -vE '^(nvidia|cuda|triton)' > requirements.lock

clean:  ## remove .venv and what tools leave behind
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# torch goes first and by itself; torchrec asks for fbgemm-gpu, whose files would overwrite the CPU build,
# so that both are installed without what they ask for, which requirements.lock holds.
$(STAMP): requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "deltasync needs Python 3.11: install python3.11 with its venv module, or name one with PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), deltasync needs Python 3.11: name one with PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) lacks its venv module: install python3.11-venv"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q torch==$(TORCH)
	$(PIP) install -q -r requirements.lock
	$(PIP) uninstall -q -y fbgemm-gpu fbgemm-gpu-cpu 2>/dev/null || true
	$(PIP) install -q --no-deps torchrec==$(TORCHREC) $(FBGEMM)==$(TORCHREC)
	$(PIP) install -q --no-deps --no-build-isolation -e .
	rm -f $(VENV)/.installed-* && touch $@
