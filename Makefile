# `make serve` and `make test` need nothing but a Python >= 3.12 (PYTHON=/path names one): scripts/setup.sh does the rest.
SHELL := bash
VENV_PYTHON := .venv/bin/python
ARGS ?=
export PYTHON

.PHONY: help serve test test-full test-gpu test-browser sanitize bench lint format lock reference clean

help: ## Say what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /make \1\t/' | expand -t 20

serve: ## Set up and start the server: make serve ARGS="--mode sparse --port 9000"
	@bash scripts/setup.sh serve
	@exec $(VENV_PYTHON) -m sparda_jax.serve $(ARGS)

test: lint ## Set up, lint, and run every test that is not marked slow
	$(VENV_PYTHON) -m pytest -n auto --maxprocesses 8 --dist worksteal --durations=15 -m "not slow" $(ARGS)

test-full: lint ## The same with the slow tests
	$(VENV_PYTHON) -m pytest -n auto --maxprocesses 8 --dist worksteal --durations=15 $(ARGS)

test-gpu: ## The tests marked gpu, on this machine's NVIDIA GPU
	@bash scripts/setup.sh serve
	@bash scripts/setup.sh dev
	$(VENV_PYTHON) -m pytest --gpu --durations=15 $(ARGS)

test-browser: ## The tests marked browser: the server's page in a headless Chromium (chromium and chromedriver on PATH)
	@bash scripts/setup.sh dev
	$(VENV_PYTHON) -m pytest --browser --durations=15 $(ARGS)

sanitize: ## The kernels' GPU tests under NVIDIA's compute-sanitizer: memcheck, then racecheck
	@bash scripts/setup.sh serve
	@bash scripts/setup.sh dev
	bash scripts/sanitize.sh $(ARGS)

bench: ## Time the kernels on this machine's NVIDIA GPU: make bench ARGS="--json FILE"
	@bash scripts/setup.sh serve
	$(VENV_PYTHON) -m sparda_jax.bench kernels $(ARGS)

lint: ## Set up and run ruff and pyright
	@bash scripts/setup.sh dev
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m pyright

format: ## Format the code and sort imports
	@bash scripts/setup.sh dev
	$(VENV_PYTHON) -m ruff check --fix .
	$(VENV_PYTHON) -m ruff format .

lock: ## Resolve pyproject.toml anew into requirements/*.lock (ARGS=--upgrade takes the newest releases)
	@bash scripts/setup.sh dev
	bash scripts/lock.sh $(VENV_PYTHON) $(ARGS)

reference: ## Write docs/reference.md anew from the code
	@bash scripts/setup.sh dev
	JAX_PLATFORMS=cpu $(VENV_PYTHON) -m tests.reference >docs/reference.md.new
	@mv docs/reference.md.new docs/reference.md

clean: ## Remove what make and the tests left: .venv, build results, caches
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .jax_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
