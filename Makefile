# Two commands from a fresh machine: `make demo` and `make test`. Both make their own .venv.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: help demo quick test test-all test-gpu test-clients test-page test-arm check bench docs readme release clean

help: ## List the targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: .venv/ready ## Answer a prompt with the embedded models and show what speculation did.
	$(BIN)/outrider run --chat --show --temperature 0 "Mia reads 8 pages every day. How many pages does Mia read in 5 days?"

quick: .venv/ready ## Run the fast tests of core, verify, caches, engine and drafting.
	$(PYTEST) tests/core tests/verify tests/models/cache tests/engine tests/drafting

test: check ## Lint, type-check and run the fast tests.
	$(PYTEST)

test-all: check ## Lint, type-check and run all tests but the heavy ones.
	$(PYTEST) -m "not heavy"

test-gpu: .venv/ready ## Run the tests that need a GPU.
	$(BIN)/python -m pytest -n 4 --gpu tests/gpu

test-clients: .venv/ready ## Try the client packages of other projects, in an environment of their own, on a server.
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/pip install --quiet --disable-pip-version-check --requirement tests/clients/requirements.txt
	tests/clients/run.sh $(BIN)/python .venv-clients/bin/python

test-page: .venv/ready ## Test the server's pages in Chromium: that of the machine, or one that Playwright downloads.
	$(BIN)/pip install --quiet --disable-pip-version-check playwright
	command -v chromium google-chrome >/dev/null || $(BIN)/playwright install chromium
	$(BIN)/python -m pytest tests/serve/test_page.py tests/serve/test_serve.py tests/serve/test_videos.py -k "page or browser"

test-arm: .venv/ready ## Test the kernels for ARM processors in an emulator (Debian: g++-aarch64-linux-gnu qemu-user-static).
	tests/arm/run.sh $(BIN)/python

check: .venv/ready ## Lint and type-check.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/ready ## Benchmark the embedded models against plain decoding.
	$(BIN)/outrider bench

docs: .venv/ready ## Build the documentation site in site/. A broken link fails.
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[docs]"
	$(BIN)/python docs/generate_cli.py
	$(BIN)/python docs/generate_models.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

readme: .venv/ready ## Regenerate the example output in README.md.
	$(BIN)/python docs/update_readme.py

release: ## Build the source archive and the wheels in dist/, and try the wheel of this machine in a fresh environment.
	scripts/release.sh --python $(PYTHON)

# The CPU build of torch comes first. A looser request may pull gigabytes of CUDA packages.
.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch .venv/ready

clean: ## Remove the virtual environment and build files.
	rm -rf .venv build dist site *.egg-info
