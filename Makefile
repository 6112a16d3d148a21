# make demo: the main job on real images, killed and damaged on purpose.   make test: lint, types, contracts, tests.
# make prove: the long campaigns (hours on 2 cores). make bench: the figures. Reports land in prove/ and benchmarks/.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test prove bench clean

demo: .venv/.ready
	$(BIN)/python demo/run.py

test: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n 2 --dist loadfile

prove: .venv/.ready
	$(BIN)/python prove/crash_model.py
	$(BIN)/python prove/mutation.py
	$(BIN)/python prove/syscalls.py
	$(BIN)/python prove/kills.py

bench: .venv/.ready
	$(BIN)/python benchmarks/durable.py

# torch first and alone: the version that the constraints pin must be there before anything asks for a newer one.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv demo-out build src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
