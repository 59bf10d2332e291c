# Every target sets up .venv by itself; once it is there, that costs nothing.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Of the equivalence campaign: another seed trains other cells.
CELLS ?= 1000
SEED ?= 1
# One more than there are cores: many tests wait for processes to start or for delays they injected.
JOBS ?= $(shell echo $$(( $$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2) + 1 )))

# Tests start hundreds of processes of ours; each would compile all it imports where bytecode is not kept.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help setup demo test test-slow equivalence kernels lint format bench campaign docs clean
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/:/' | column -t -s:

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "setting up .venv (once; torch takes a minute or two)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' torch==2.13.0
	@touch $@

setup: $(STAMP)  ## create .venv with everything needed

demo: $(STAMP)  ## train the built-in model on the built-in data, then let it be made faster, which takes two or three minutes
	@$(BIN)/frameworm train --config configs/quickstart.yaml
	@echo
	@$(BIN)/frameworm tune --config configs/quickstart.yaml --budget 3m --out "$$(mktemp -d)/tune"

test: $(STAMP)  ## the tests that take seconds at most, in parallel: some minutes
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not timing and not cluster" tests

test-slow: $(STAMP)  ## all other tests, clusters beside them; what measures delays comes last, alone: half an hour
	@log=$$(mktemp); trap 'rm -f "$$log"' EXIT; export OMP_NUM_THREADS=1; \
	$(BIN)/python -m pytest -m "cluster and not timing" tests > "$$log" 2>&1 & cluster=$$!; \
	failed=0; $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "slow and not timing and not cluster" tests || failed=1; \
	wait $$cluster || failed=1; cat "$$log"; exit $$failed
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m timing tests

equivalence: $(STAMP)  ## train 250 ways beside a plain loop and write docs/equivalence.md: about ten minutes
	@OMP_NUM_THREADS=1 $(BIN)/python tests/equivalence/table.py

kernels: $(STAMP)  ## the tests of the Triton kernels where there is no GPU, in triton's interpreter
	@test -d .venv/triton || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --target .venv/triton triton==3.9.0
	@PYTHONPATH=.venv/triton TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) \
	  $$(grep -l triton_here -r tests --include='test_*.py')

lint: $(STAMP)  ## ruff, mypy (strict) and the rules of the house
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_architecture.py tests/test_public_api.py

format: $(STAMP)  ## let ruff tidy the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(STAMP)  ## write docs/config.md from the schema
	@$(BIN)/python -m frameworm.config.docs > docs/config.md

bench: $(STAMP)  ## the benchmarks; results go to benchmarks/results/
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]' torch==2.13.0
	@$(BIN)/python benchmarks/overhead.py

campaign: $(STAMP)  ## long checks, about four hours: verdicts, kills, uploads, streams, faults, proofs, powersgd, guard, fuzzing, equivalence, a soak
	@$(BIN)/python benchmarks/diagnosis.py
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/crash_campaign.py --kills 1000
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/upload_campaign.py --kills 200
	@CAMPAIGN=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/parallel/compression/test_compression_hook.py -k again_and_again
	@CAMPAIGN=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s tests/guard/test_guard_real_runs.py
	@CAMPAIGN=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --timeout 1800 tests/engine/test_engine_fuzz.py
	@$(BIN)/python benchmarks/elastic_campaign.py --kills 20
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/proof.py --device cpu --jobs 2
	@$(BIN)/python benchmarks/fault_campaign.py --runs 1000
	@CAMPAIGN=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) tests/benchmarks/test_benchmark_scripts.py
	@CAMPAIGN=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/data/samples/test_data_division.py tests/engine/test_engine_streams.py
	@CAMPAIGN=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --timeout 3600 tests/equivalence/test_equivalence_drawn.py
	@OMP_NUM_THREADS=1 $(BIN)/python tests/equivalence/table.py --check --cells $(CELLS) --seed $(SEED)
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py --minutes 30

clean:  ## remove what the targets made
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache build dist
