# Everything runs from .venv, which the first target creates. `make help` lists the targets.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TOOLS := build/tools
# Only install packages that a lock names, and only with the hashes in the lock.
INSTALL := install -q --no-deps --require-hashes
INSTALL_CUDA = $(PIP) $(INSTALL) -r deploy/locks/torch-cuda.lock
INSTALL_CPU = $(PIP) $(INSTALL) -r deploy/locks/torch-cpu.lock || { echo "pip finds no CPU build of torch in its indexes (PIP_EXTRA_INDEX_URL): installing the CUDA build"; $(INSTALL_CUDA); }
# `make install CUDA=1` installs the CUDA build of fbgemm. Later targets keep the installed build.
CUDA ?= $(if $(wildcard $(VENV)/.installed-fbgemm-gpu),1,0)
FBGEMM := $(if $(filter 1,$(CUDA)),fbgemm-gpu,fbgemm-gpu-cpu)
STAMP := $(VENV)/.installed-$(FBGEMM)
# All tests of a file run in one worker, which sets up their shared fixtures once. Files run in order, quick ones
# last. There is one worker more than CI has cores, because tests also wait for threads and processes.
WORKERS ?= 3
# Always write bytecode, whatever the environment says, because tests start hundreds of processes.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help install demo unit test nightly stress check bench soak attacks test-gpu bench-gpu protos docs lock audit sbom format clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

install: $(STAMP)  ## install everything into .venv (CUDA=1 for GPUs)

demo: install  ## run the whole path: service, trainer of two ranks, two replicas
	$(BIN)/deltasync demo $(ARGS)

# Unit tests never wait, so a third worker would only repeat the collection.
unit: WORKERS = 2
unit: install  ## run the tests that start no process and open no socket
	$(PYTEST) tests/unit $(ARGS)

test: check  ## lint, types, layers, unit and integration tests (WORKERS=0: in one process)
	$(PYTEST) $(ARGS)

# The trainer's tests also run on the newest TorchRec, with the FBGEMM that fits the installed torch.
NIGHTLY = -m 'nightly or not nightly' --hypothesis-profile nightly
nightly: check build/torchrec-next  ## run all tests with twenty times the examples, the trainer's also on the next TorchRec
	$(PYTEST) $(NIGHTLY) $(ARGS)
	$(MAKE) stress
	PYTHONPATH=build/torchrec-next $(BIN)/python -W ignore -c 'import torchrec; assert "torchrec-next" in torchrec.__file__; print("TorchRec", torchrec.__version__)'
	PYTHONPATH=$(CURDIR)/build/torchrec-next $(PYTEST) -m 'nightly or not nightly' tests/unit/trainer tests/integration/trainer $(ARGS)

# Each round has a seed of its own: SEED or the time, then the next numbers. Busy machines need longer than usual.
ROUNDS ?= 1
TESTS ?= tests/integration
STRESS = --timeout 990 -p tests.support.stress
stress: install  ## run the integration tests in random order while threads race (ROUNDS=1 SEED=... TESTS=...)
	@seed=$(if $(filter file,$(origin SEED)),$$(date +%s),$(SEED)); for round in $$(seq $(ROUNDS)); do \
		echo "round $$round of $(ROUNDS): SEED=$$seed"; \
		STRESS_SEED=$$seed $(PYTEST) $(STRESS) $(TESTS) $(ARGS) || { echo "repeat it with: make stress SEED=$$seed"; exit 1; }; \
		seed=$$((seed + 1)); done

build/torchrec-next: deploy/locks/torchrec-next.lock | $(STAMP)
	rm -rf $@ && $(PIP) $(INSTALL) --target $@ -r $<
	touch $@

# mypy takes one core. Meanwhile the other one compiles the tests and kernels, which each worker would do otherwise.
check: install  ## lint, format, types, layers
	@$(MAKE) --no-print-directory --output-sync -j2 types lint compiled

.PHONY: types lint compiled
types:
	$(BIN)/mypy
lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/buf lint protos
compiled:
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --collect-only -qq >/dev/null || $(BIN)/python -m pytest --collect-only -q

bench: install  ## print the benchmarks
	@set -e; for name in $$($(BIN)/python -m tests.bench --list); do $(BIN)/python -m tests.bench $$name $(ARGS); done

SECONDS ?= 300
SEED ?= 0
soak: install  ## inject random faults into a running system, and compare the rows (SECONDS=300 SEED=0)
	$(BIN)/python -m tests.soak --seconds $(SECONDS) --seed $(SEED) $(ARGS)

attacks: install  ## attack a service, and write the results into sync_service/docs/security.md
	$(BIN)/python -m tests.attacks --json build/attacks.json $(ARGS)
	$(BIN)/python -m tests.attacks --stranger --json build/attacks-roles.json $(ARGS)
	$(BIN)/python -m tests.attacks --table build/attacks.json build/attacks-roles.json --into sync_service/docs/security.md

# GPU targets run in the unchanged environment of PYTHON if it is set, otherwise in .venv.
GPU_PYTHON = $(if $(filter file,$(origin PYTHON)),$(BIN)/python,$(PYTHON))
GPU_PATH := $(CURDIR)/build/gpu:$(CURDIR):$(CURDIR)/sync_service:$(CURDIR)/trainer:$(CURDIR)/protos
GPU_RUN = PYTHONPATH=$(GPU_PATH):$$PYTHONPATH $(GPU_PYTHON)
# With fewer GPUs than ranks, ranks train on the CPU.
GPU_RANKS ?= 1

build/gpu: FORCE
	@$(GPU_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(GPU_PYTHON): set PYTHON=... to Python 3.11 or later, or run 'make install CUDA=1'"; exit 1; }
	@$(GPU_PYTHON) tests/gpu/environment.py $@
FORCE:

test-gpu: build/gpu  ## run the tests that need a GPU, with your torch (PYTHON=...)
	$(GPU_RUN) -m pytest -c tests/gpu/gpu.ini --rootdir=$(CURDIR) --confcutdir=$(CURDIR) -m gpu tests/gpu $(ARGS)

bench-gpu: build/gpu  ## print the benchmarks of the tracker, the pipelines and the demo on a GPU
	$(GPU_RUN) -m tests.bench tracker
	$(GPU_RUN) -m tests.bench pipelines --ranks $(GPU_RANKS)
	$(GPU_RUN) -m deltasync demo --ranks $(GPU_RANKS) $(ARGS)

protos: install  ## generate the stubs from the .proto files
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=protos --grpc_python_out=protos \
		--mypy_out=quiet:protos --mypy_grpc_out=quiet:protos protos/deltasync/v1/*.proto

docs: install  ## generate the reference pages in sync_service/docs/reference from the code
	$(BIN)/python -m tests.support.reference

format: install  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Keeps locked versions that still satisfy pyproject.toml; ARGS=--upgrade locks the newest versions.
lock: $(TOOLS)  ## update requirements.lock and deploy/locks/ from pyproject.toml
	$(TOOLS)/bin/python deploy/locks/lock.py $(ARGS)

audit: $(TOOLS)  ## look up known vulnerabilities of all locked packages
	$(TOOLS)/bin/python deploy/locks/audit.py requirements.lock $(wildcard deploy/locks/*.lock)

# Reproducible: the files contain no time and no serial number.
SBOM_service = deploy/locks/service.lock
SBOM_trainer = deploy/locks/trainer.lock deploy/locks/torch-cuda.lock deploy/locks/fbgemm-gpu.lock
SBOM_development = requirements.lock deploy/locks/torch-cpu.lock deploy/locks/fbgemm-gpu-cpu.lock
sbom: $(foreach name,service trainer development,build/sbom/$(name).json)  ## list all locked packages in build/sbom, as CycloneDX
build/sbom/%.json: requirements.lock $(wildcard deploy/locks/*.lock) pyproject.toml | $(STAMP)
	@mkdir -p build/sbom
	cat $(SBOM_$*) | PYTHONWARNINGS=ignore $(BIN)/cyclonedx-py requirements --output-reproducible --pyproject pyproject.toml -o $@ -

# The tools have a separate environment, to keep their dependencies out of .venv.
$(TOOLS): deploy/locks/tools.lock
	rm -rf $@ && $(PYTHON) -m venv $@
	$@/bin/python -m pip --disable-pip-version-check $(INSTALL) -r $<
	touch $@

clean:  ## remove .venv, compiled kernels and caches of tools
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The locks include all dependencies except fbgemm-gpu, whose files would overwrite those of fbgemm-gpu-cpu.
$(STAMP): requirements.lock deploy/locks/$(FBGEMM).lock deploy/locks/torch-cpu.lock deploy/locks/torch-cuda.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "deltasync needs Python 3.11: install python3.11 with its venv module, or set PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), deltasync needs Python 3.11: set PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) lacks its venv module: install python3.11-venv"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -e $@ || $(PIP) uninstall -q -y torch fbgemm-gpu fbgemm-gpu-cpu 2>/dev/null
	$(PIP) $(INSTALL) -r requirements.lock -r deploy/locks/$(FBGEMM).lock
	$(INSTALL_$(if $(filter 1,$(CUDA)),CUDA,CPU))
	$(PIP) install -q --no-deps --no-build-isolation -e .
	rm -f $(VENV)/.installed-* && touch $@
