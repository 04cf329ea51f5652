# Two commands from a fresh machine: `make demo` and `make test`. Both make their own .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint bench clean

demo: .venv/ready
	$(BIN)/outrider run --chat --show --temperature 0 "Lena has 5 boxes with 12 pencils each. She gives away 17 pencils. How many are left?"

test: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist worksteal

bench: .venv/ready
	$(BIN)/outrider bench

# A CPU build of torch is taken first where the package index has one; a looser request may pull gigabytes of CUDA.
.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch .venv/ready

clean:
	rm -rf .venv build dist *.egg-info
