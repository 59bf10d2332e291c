# Every target sets up .venv by itself; once it is there, that costs nothing.
PYTHON ?= python3
TORCH ?= 2.13.0
BIN := .venv/bin
STAMP := .venv/.installed
# Of the equivalence campaign: another seed trains other cells.
CELLS ?= 1000
SEED ?= 1
# Of the slow tests: 2/3 is the second third of them.
PART ?= 1/1
# More options for the tests, such as --reruns 2 on a machine that others use too.
PYTEST_OPTIONS ?=
# One more than there are cores: many tests wait for processes to start or for delays they injected.
JOBS ?= $(shell echo $$(( $$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2) + 1 )))

# What `make check` runs, floor by floor: files that judge much in a second or two, start no process and train no model.
OF_EVERY_FLOOR := tests/test_architecture.py tests/test_public_api.py tests/test_project_files.py \
  tests/config/test_config_load.py tests/records/test_records_store.py tests/records/test_records_schema.py \
  tests/diagnose/rules/test_diagnose_rules.py tests/diagnose/machine/test_diagnose_machine.py \
  tests/scaling/test_scaling_predict.py tests/scaling/test_scaling_memory.py tests/guard/test_guard_regression.py \
  tests/report/kit/test_report_tables.py tests/launch/test_launch_environment.py tests/launch/test_launch_plan.py \
  tests/hardware/test_hardware_devices.py tests/hardware/test_hardware_fingerprint.py \
  tests/data/batches/test_data_equal_samples.py tests/data/test_data_position.py \
  tests/torch_private/test_private_tensors.py tests/torch_private/test_private_optimizers.py \
  tests/parallel/test_parallel_strategy.py tests/observe/test_observe_monitor.py \
  tests/models/test_models_gpt.py tests/numerics/test_numerics_state.py \
  tests/engine/step/test_engine_loss.py tests/engine/checkpoint/test_engine_checkpoint.py \
  tests/attach/trial/test_trial_provenance.py tests/tune/search/test_tune_noise.py \
  tests/watch/test_watch_files.py tests/watch/test_watch_bins.py tests/cli/test_cli_memory.py tests/golden/test_golden_help.py

# Tests start hundreds of processes of ours; each would compile all it imports where bytecode is not kept.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help setup demo check test test-slow build equivalence kernels lint format bench campaign docs clean
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/:/' | column -t -s:

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "setting up .venv (once; torch takes a minute or two)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' torch==$(TORCH)
	@touch $@

setup: $(STAMP)  ## create .venv with everything needed

demo: $(STAMP)  ## train the built-in model on the built-in data, then let it be made faster, which takes two or three minutes
	@$(BIN)/frameworm train --config configs/quickstart.yaml
	@echo
	@$(BIN)/frameworm tune --config configs/quickstart.yaml --budget 3m --out "$$(mktemp -d)/tune"

check: $(STAMP)  ## before a commit, under a minute: ruff, mypy, the rules of the house, and the quickest telling tests of every floor
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@log=$$(mktemp); trap 'rm -f "$$log"' EXIT; $(BIN)/mypy > "$$log" 2>&1 & types=$$!; failed=0; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow and not timing and not cluster" \
	  $(OF_EVERY_FLOOR) || failed=1; \
	wait $$types || failed=1; cat "$$log"; exit $$failed

test: $(STAMP)  ## the tests that take seconds at most, in parallel: some minutes
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_OPTIONS) -n $(JOBS) --dist worksteal \
	  -m "not slow and not timing and not cluster" tests

# The files with tests of a kind: reading all others first takes minutes.
having = $$(grep -rlE "mark\.($(1))\b" tests --include='test_*.py')

test-slow: $(STAMP)  ## the others, one case of each, clusters beside them; what measures delays last, alone: half an hour
	@log=$$(mktemp); trap 'rm -f "$$log"' EXIT; export OMP_NUM_THREADS=1; \
	$(BIN)/python -m pytest $(PYTEST_OPTIONS) -m "cluster and not long and not timing" $(call having,cluster) > "$$log" 2>&1 & \
	cluster=$$!; failed=0; $(BIN)/python -m pytest $(PYTEST_OPTIONS) -n $(JOBS) --dist worksteal --slow-cases 1 --slow-part $(PART) \
	  -m "slow and not long and not timing and not cluster" $(call having,slow) || failed=1; \
	wait $$cluster || failed=1; cat "$$log"; exit $$failed
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_OPTIONS) -m timing $(call having,timing)

equivalence: $(STAMP)  ## train 250 ways beside a plain loop and write docs/equivalence.md: about ten minutes
	@OMP_NUM_THREADS=1 $(BIN)/python tests/equivalence/table.py

kernels: $(STAMP)  ## the tests of the Triton kernels where there is no GPU, in triton's interpreter
	@test -d .venv/triton || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --target .venv/triton triton==3.9.0
	@PYTHONPATH=.venv/triton TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_OPTIONS) -q -n $(JOBS) \
	  $$(grep -l triton_here -r tests --include='test_*.py')

lint: $(STAMP)  ## ruff, mypy (strict) and the rules of the house
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_architecture.py tests/test_public_api.py

format: $(STAMP)  ## let ruff tidy the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(STAMP)  ## write docs/config.md from the schema, then build the site into build/site
	@$(BIN)/python -m frameworm.config.docs > docs/config.md
	@test -x $(BIN)/mkdocs || $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]' torch==$(TORCH)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "built: build/site/index.html"

bench: $(STAMP)  ## the benchmarks; results go to benchmarks/results/
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]' torch==$(TORCH)
	@$(BIN)/python benchmarks/overhead.py

campaign: $(STAMP)  ## long checks, about five hours: all slow tests, verdicts, kills, uploads, streams, faults, proofs, powersgd, guard, fuzzing, equivalence, a soak
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "(slow or long) and not timing and not cluster" tests
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "cluster and long" tests/engine
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

build:  ## a wheel and a source distribution, in dist/
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check build
	@rm -rf dist
	@$(BIN)/python -m build --outdir dist

clean:  ## remove what the targets made
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache build dist
