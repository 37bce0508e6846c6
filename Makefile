# `make demo` runs the main job on this machine. `make test` and `make test-all` are what the CI checks. All install what
# they need, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Another index for torch, a CUDA or CPU one: make demo TORCH_INDEX=https://...
PIP_INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# Compiled once, the tests' modules load in half the time, and so does each process that they start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo quick test laws test-all test-releases lint bench fuzz bench-service bench-mlflow gpu-check clean

help:
	@echo "make demo    profile a model, plan, run the plan and compare, on this machine"
	@echo "make test    linters, types, layering, and every law and one case of each feature"
	@echo "make quick   the library without processes: costs, schedules, plays, planners; up to a minute"
	@echo "make test-all   the rest: campaigns, every case, the other database, browsers, environments of their own"
	@echo "make test-releases   the split backward on the oldest and the newest torch, which it installs apart: 7 GB each"
	@echo "make fuzz    ten thousand generated requests against the API's description"
	@echo "make bench   the measurements of docs/benchmarks.md"
	@echo "make bench-service, make bench-mlflow   the service under load; beside MLflow, which is installed apart"
	@echo "make gpu-check   what a machine with a GPU shows, within nine minutes; PYTHON has torch, numpy and safetensors"
	@echo "make setup   only install, into $(VENV)"

$(STAMP): pyproject.toml constraints.txt
	@echo "installing into $(VENV): a minute or two, once"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet -c constraints.txt $(PIP_INDEX) -e '.[service,worker,dev]'
	@touch $@

setup: $(STAMP)

demo: $(STAMP)
	@$(BIN)/pipeplan demo $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

PYTEST := $(BIN)/python -m pytest -n 4 --dist worksteal

# mypy keeps one core busy: the linters run beside the tests.
test: $(STAMP)
	@$(MAKE) --no-print-directory --jobs=2 lint laws

laws: $(STAMP)
	$(PYTEST) -m "not campaign" $(ARGS)

QUICK := costs documents programs schedules simulation planners/two_bw planners/pipedream

quick: $(STAMP)
	$(PYTEST) -m "not campaign" --hypothesis-profile few $(QUICK:%=tests/pipeplan/%) $(ARGS)

test-all: $(STAMP)
	$(PYTEST) -m campaign $(ARGS)

test-releases: $(STAMP)
	PIPEPLAN_TEST_RELEASES=1 $(BIN)/python -m pytest -m campaign tests/worker_agent/engine/test_releases.py $(ARGS)

bench: $(STAMP)
	$(BIN)/python -m benchmarks.run $(ARGS)

fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz.run --max-examples 100 $(ARGS)

bench-service: $(STAMP)
	$(BIN)/python -m benchmarks.service

MLFLOW := .venv-mlflow
$(MLFLOW)/.installed:
	@$(PYTHON) -m venv $(MLFLOW)
	@$(MLFLOW)/bin/python -m pip install --quiet mlflow==3.17.2
	@touch $@

bench-mlflow: $(STAMP) $(MLFLOW)/.installed
	$(BIN)/python -m benchmarks.service_mlflow $(MLFLOW)/bin/python $(ARGS)

# It uses PYTHON as it is: no environment is made, nothing is fetched.
gpu-check:
	$(PYTHON) -m benchmarks.gpu_check $(ARGS)

clean:
	rm -rf $(VENV) $(MLFLOW) .mypy_cache .ruff_cache .pytest_cache .hypothesis
