# Everything runs from .venv, which is made on first use. `make help` lists the targets.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TOOLS := build/tools
# Nothing is installed that a lock does not name, or whose hash is another there.
INSTALL := install -q --no-deps --require-hashes
INSTALL_CUDA = $(PIP) $(INSTALL) -r deploy/locks/torch-cuda.lock
INSTALL_CPU = $(PIP) $(INSTALL) -r deploy/locks/torch-cpu.lock || { echo "torch's build for CPUs is in no index that pip knows (PIP_EXTRA_INDEX_URL): taking that for CUDA"; $(INSTALL_CUDA); }
# `make install CUDA=1` takes the CUDA build of fbgemm; what is installed stays what later targets use.
CUDA ?= $(if $(wildcard $(VENV)/.installed-fbgemm-gpu),1,0)
FBGEMM := $(if $(filter 1,$(CUDA)),fbgemm-gpu,fbgemm-gpu-cpu)
STAMP := $(VENV)/.installed-$(FBGEMM)
# A file's tests run in one worker, which makes what they share once; files go out in their order, quick ones last.
# One worker more than CI has cores, because tests also wait for threads and processes.
WORKERS ?= 3
# What is compiled is kept, also where the environment says otherwise: tests start hundreds of processes.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help install demo unit test nightly check bench soak attacks test-gpu bench-gpu protos docs lock audit sbom format clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

install: $(STAMP)  ## install everything into .venv (CUDA=1 for GPUs)

demo: install  ## run the whole path: service, trainer of two ranks, two replicas
	$(BIN)/deltasync demo $(ARGS)

# These never wait, so a third worker would only collect them once more.
unit: WORKERS = 2
unit: install  ## run the tests that start no process and open no socket
	$(PYTEST) tests/unit $(ARGS)

test: check  ## lint, types, layers, unit and integration tests (WORKERS=0: in one process)
	$(PYTEST) $(ARGS)

# The trainer's tests run on the newest TorchRec, too, with the FBGEMM that fits the torch at hand.
NIGHTLY = -m 'nightly or not nightly' --hypothesis-profile nightly
nightly: check build/torchrec-next  ## every test, with ten times the examples, and the trainer's on the next TorchRec
	$(PYTEST) $(NIGHTLY) $(ARGS)
	PYTHONPATH=build/torchrec-next $(BIN)/python -W ignore -c 'import torchrec; assert "torchrec-next" in torchrec.__file__; print("TorchRec", torchrec.__version__)'
	PYTHONPATH=$(CURDIR)/build/torchrec-next $(PYTEST) -m 'nightly or not nightly' tests/unit/trainer tests/integration/trainer $(ARGS)

build/torchrec-next: deploy/locks/torchrec-next.lock | $(STAMP)
	rm -rf $@ && $(PIP) $(INSTALL) --target $@ -r $<
	touch $@

check: install  ## lint, format, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint protos

bench: install  ## print the benchmarks
	@set -e; for name in $$($(BIN)/python -m tests.bench --list); do $(BIN)/python -m tests.bench $$name $(ARGS); done

SECONDS ?= 300
SEED ?= 0
soak: install  ## kill, freeze, cut and change everything, and compare the rows (SECONDS=300 SEED=0)
	$(BIN)/python -m tests.soak --seconds $(SECONDS) --seed $(SEED) $(ARGS)

attacks: install  ## attack a service, and write what happened into sync_service/docs/security.md
	$(BIN)/python -m tests.attacks --json build/attacks.json $(ARGS)
	$(BIN)/python -m tests.attacks --stranger --json build/attacks-roles.json $(ARGS)
	$(BIN)/python -m tests.attacks --table build/attacks.json build/attacks-roles.json --into sync_service/docs/security.md

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
	$(GPU_RUN) -m tests.bench tracker
	$(GPU_RUN) -m tests.bench pipelines --ranks $(GPU_RANKS)
	$(GPU_RUN) -m deltasync demo --ranks $(GPU_RANKS) $(ARGS)

protos: install  ## generate the stubs anew from the .proto files
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=protos --grpc_python_out=protos \
		--mypy_out=quiet:protos --mypy_grpc_out=quiet:protos protos/deltasync/v1/*.proto

docs: install  ## write the reference pages of sync_service/docs/reference anew from the code
	$(BIN)/python -m tests.support.reference

format: install  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Versions stay where they are wanted still; ARGS=--upgrade takes the newest.
lock: $(TOOLS)  ## write requirements.lock and deploy/locks/ anew from pyproject.toml
	$(TOOLS)/bin/python deploy/locks/lock.py $(ARGS)

audit: $(TOOLS)  ## look up known vulnerabilities of what is locked
	$(TOOLS)/bin/python deploy/locks/audit.py requirements.lock $(wildcard deploy/locks/*.lock)

# The same locks make the same files, with no time and no serial number in them.
SBOM_service = deploy/locks/service.lock
SBOM_trainer = deploy/locks/trainer.lock deploy/locks/torch-cuda.lock deploy/locks/fbgemm-gpu.lock
SBOM_development = requirements.lock deploy/locks/torch-cpu.lock deploy/locks/fbgemm-gpu-cpu.lock
sbom: $(foreach name,service trainer development,build/sbom/$(name).json)  ## list what the locks hold in build/sbom, as CycloneDX
build/sbom/%.json: requirements.lock $(wildcard deploy/locks/*.lock) pyproject.toml | $(STAMP)
	@mkdir -p build/sbom
	cat $(SBOM_$*) | PYTHONWARNINGS=ignore $(BIN)/cyclonedx-py requirements --output-reproducible --pyproject pyproject.toml -o $@ -

# Apart from .venv, which what they need would make larger.
$(TOOLS): deploy/locks/tools.lock
	rm -rf $@ && $(PYTHON) -m venv $@
	$@/bin/python -m pip --disable-pip-version-check $(INSTALL) -r $<
	touch $@

clean:  ## remove .venv, compiled kernels and what tools leave behind
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A lock holds all that its packages ask for, but fbgemm-gpu, whose files would overwrite those of fbgemm-gpu-cpu.
$(STAMP): requirements.lock deploy/locks/$(FBGEMM).lock deploy/locks/torch-cpu.lock deploy/locks/torch-cuda.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "deltasync needs Python 3.11: install python3.11 with its venv module, or name one with PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), deltasync needs Python 3.11: name one with PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) lacks its venv module: install python3.11-venv"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -e $@ || $(PIP) uninstall -q -y torch fbgemm-gpu fbgemm-gpu-cpu 2>/dev/null
	$(PIP) $(INSTALL) -r requirements.lock -r deploy/locks/$(FBGEMM).lock
	$(INSTALL_$(if $(filter 1,$(CUDA)),CUDA,CPU))
	$(PIP) install -q --no-deps --no-build-isolation -e .
	rm -f $(VENV)/.installed-* && touch $@
