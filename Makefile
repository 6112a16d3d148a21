# make check: lint, types, contracts and the fast tests, in a minute. make test: the same with all tests but the longest.
# make long: the longest tests, whose main cases shorter ones hold (about ten minutes); before a release.
# make demo: the main job on real images, killed and damaged on purpose. make coverage: which lines the fast tests run.
# make demo-bucket: kills, damage and an outage against a real S3 server. make demo-nodes: nodes that are lost.
# make demo-recovery: `lastgood run` on two nodes; a rank killed, one hung, a NaN, a node lost; a timeline as a picture.
# make prove: the long campaigns (hours on 2 cores). Reports land in lab/reports/.
# make bench: the figures, hours on 2 cores (docs/bench.md); it resumes where it stopped. TRACES=FILE... replays those.
# make gpu: on a CUDA machine, tests and a short bench, under eight minutes. Both land in benchmarks/results/.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: check demo demo-bucket demo-nodes demo-recovery test types suite coverage long prove bench gpu clean

# Three workers on two cores: a third of the time a test waits for a timeout, a lock or a process that starts.
# Without the restart of a worker that died: after it pytest-xdist may wait for ever. The order is that of conftest.py.
WORKERS := -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart=0
FAST := tests $(WORKERS) -m "not slow" --hypothesis-profile=check

check: .venv/.ready
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy --no-error-summary
	@contracts=$$($(BIN)/lint-imports --no-logo) || { echo "$$contracts"; exit 1; }
	@$(BIN)/python -m pytest $(FAST)

coverage: .venv/.ready
	$(BIN)/python -m pytest $(FAST) --cov --cov-report=term

demo: .venv/.ready
	$(BIN)/python demo/run.py

demo-bucket: .venv/.ready
	$(BIN)/python demo/bucket.py

demo-nodes: .venv/.ready
	$(BIN)/python demo/nodes.py

demo-recovery: .venv/.ready
	$(BIN)/python demo/recovery.py

# compileall: where the environment forbids bytecode, each of the many processes that tests start would make its own.
# mypy has one process and takes a minute: it runs beside the tests.
test: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m compileall -q src lab tests
	@$(MAKE) --no-print-directory --jobs=2 types suite

types:
	$(BIN)/mypy

suite:
	$(BIN)/python -m pytest $(WORKERS) -m "not long"

long: .venv/.ready
	$(BIN)/python -m pytest $(WORKERS) -m long

prove: long
	$(BIN)/python -m lastgood_lab.campaigns.crash_model
	$(BIN)/python -m lastgood_lab.campaigns.mutation
	$(BIN)/python -m lastgood_lab.campaigns.syscalls
	$(BIN)/python -m lastgood_lab.campaigns.syscalls --tier slots
	$(BIN)/python -m lastgood_lab.campaigns.syscalls --tier mmap
	$(BIN)/python -m lastgood_lab.campaigns.kills
	$(BIN)/python -m lastgood_lab.campaigns.kills --tier slots
	$(BIN)/python -m lastgood_lab.campaigns.kills --tier memory
	$(BIN)/python -m lastgood_lab.campaigns.memory_kills
	$(BIN)/python -m lastgood_lab.campaigns.memory_soak
	$(BIN)/python -m lastgood_lab.campaigns.memory_soak --copies
	$(BIN)/python -m lastgood_lab.campaigns.node_commit
	$(BIN)/python -m lastgood_lab.campaigns.node_commit --parity --schedules 100000
	$(BIN)/python -m lastgood_lab.campaigns.node_commit --late --schedules 100000
	$(BIN)/python -m lastgood_lab.campaigns.node_commit --in-flight --schedules 100000
	$(BIN)/python -m lastgood_lab.campaigns.nodes
	$(BIN)/python -m lastgood_lab.campaigns.ranks
	$(BIN)/python -m lastgood_lab.campaigns.requests
	$(BIN)/python -m lastgood_lab.campaigns.two_writers
	$(BIN)/python -m lastgood_lab.campaigns.places_damage
	$(BIN)/python -m lastgood_lab.campaigns.wire_fuzz
	$(BIN)/python -m lastgood_lab.campaigns.wire_fuzz_tls
	$(BIN)/python -m lastgood_lab.campaigns.false_alarms
	$(BIN)/python -m lastgood_lab.campaigns.recovery
	$(BIN)/python -m lastgood_lab.campaigns.recovery --nodes 2

RESULTS := benchmarks/results

bench: .venv/.ready
	$(BIN)/lastgood bench durable --out $(RESULTS)
	$(BIN)/lastgood bench restore --out $(RESULTS)
	$(BIN)/lastgood bench memory --out $(RESULTS)
	$(BIN)/lastgood bench objects --out $(RESULTS)
	$(BIN)/lastgood bench size --out $(RESULTS)
	$(BIN)/lastgood bench tensors --out $(RESULTS)
	$(BIN)/lastgood bench guard --out $(RESULTS)
	$(BIN)/lastgood bench ranks --out $(RESULTS)
	$(BIN)/lastgood bench interval --out $(RESULTS) --models all --scale 0.25 --work 0.1
	$(if $(TRACES),$(BIN)/lastgood bench goodput --out $(RESULTS) $(addprefix --trace ,$(TRACES)))

gpu: .venv/.ready
	@$(BIN)/python -c "import sys, torch; torch.cuda.is_available() or sys.exit('make gpu: torch.cuda.is_available() is false here; nothing was run')"
	$(BIN)/python -m pytest -m gpu
	$(BIN)/lastgood bench gpu --out $(RESULTS)

# torch first and alone: the version that the constraints pin must be there before anything asks for a newer one.
.venv/.ready: pyproject.toml lab/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]' --editable ./lab
	touch $@

clean:
	rm -rf .venv demo-out build lab/build src/*.egg-info lab/src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
