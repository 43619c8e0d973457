# Every target sets up what it needs (virtual environment, cluster binaries) and may be repeated or interrupted.
SHELL := /bin/sh
VENV ?= .venv
NXD_VENV ?= .venv-nxd
DOCS_VENV ?= .venv-docs
MUTANTS_VENV ?= .venv-mutants
COVERAGE_VENV ?= .venv-coverage
FUZZ_VENV ?= .venv-fuzz
TRACKERS_VENV ?= .venv-trackers
TRL_VENV ?= .venv-trl
PROGRAMS_VENV ?= .venv-programs
TASKS_VENV ?= .venv-tasks
BIN := $(VENV)/bin
CLUSTER ?= local
# Number of parallel test processes, twice that of processors, because tests wait for nearly half of their time. 0: one
# process, in which --pdb and -s work.
LANES ?= 4
IN_LANES = -n $(LANES) --dist loadgroup --no-loadscope-reorder
TRIALS ?= 20
ARGS ?=
# The pinned helm renders the plain install, not the one on PATH.
TOOLS = HELM="$$($(BIN)/trainium-devcluster binaries --helm | tail -n 1)/helm"
# Tests that start no training process and no cluster.
FAST = tests/unit/contract tests/unit/docs tests/unit/operator tests/unit/packages tests/unit/plan tests/unit/tuning
# Programs of fake ranks, which import each other as workers import a user's code; one fails to import on purpose.
FAKES = fake_check fake_figures fake_lockstep fake_pairing fake_rank
export OMP_NUM_THREADS ?= 1
# Keep compiled code, in any environment: otherwise each lane would compile the 350 files of tests, for nine seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup binaries demo program programs tune test test-fast test-long test-cluster test-versions test-nxd test-trackers test-trl test-tasks check docs format generate bench bench-check faults explore mutants coverage fuzz parity proof soak bench-training clean

help:  ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 16

setup:  ## Virtual environment with pinned packages
	@scripts/setup.sh $(VENV) $(WITH_BINARIES) $(ALSO)

binaries: setup  ## Control-plane programs, kubectl and helm (download, else build; cached)
	@$(BIN)/trainium-devcluster binaries

demo: binaries  ## A Llama model trained through faults on a real control plane (ARGS="--keep" leaves the cluster up)
	@$(BIN)/python -m trainium_devcluster.demo $(ARGS)

program: binaries  ## A script of TRL with the elastic line, through killed ranks, a lost node and resizes (ARGS="--keep" leaves the cluster up)
	@scripts/tool_venv.sh $(TRL_VENV) $(abspath $(BIN))/python scripts/trl_requirements.txt
	@$(TRL_VENV)/bin/python -m trainium_devcluster.program $(ARGS)

programs: binaries  ## Thirteen programs of others through all faults, for half an hour; writes docs/program-runs.md (ARGS="--resume" keeps what ran)
	@scripts/tool_venv.sh $(PROGRAMS_VENV) $(abspath $(BIN))/python scripts/programs_requirements.txt
	@$(PROGRAMS_VENV)/bin/python -m benchmarks.program_recovery --program all --document --out out/programs $(ARGS)

tune: binaries  ## LoRA on a base model through faults, merged, answers before and after (ARGS="--keep" leaves the cluster up, --dpo: pairs)
	@$(BIN)/python -m trainium_devcluster.tune $(ARGS)

test: binaries  ## The tests of each change, on development clusters of their own, in LANES processes
	@$(BIN)/trainium-devcluster binaries --fleet >/dev/null || echo "without kwok the tests of fleets are skipped"
	@$(BIN)/trainium-devcluster binaries --helm --s3 --definition >/dev/null
	@$(BIN)/python -m pytest $(IN_LANES) $(ARGS)

test-fast: setup  ## The tests of pure functions, in a minute or two
	@$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not cluster" $(FAST) $(ARGS)

test-long: binaries  ## What needs minutes: long tests, then property tests with TRIALS times as many examples, random ones
	@$(BIN)/trainium-devcluster binaries --kueue >/dev/null || echo "without Kueue the tests of queues are skipped"
	@code=0; $(BIN)/python -m pytest $(IN_LANES) --ring=night $(ARGS) || code=$$?; \
	TRAINIUM_TRIALS=$(TRIALS) $(BIN)/python -m pytest -n 2 --ring=all tests/unit tests/wire -m hypothesis $(ARGS) || code=$$?; \
	exit $$code

test-cluster: setup  ## Cluster tests on CLUSTER=local, kind or existing (docs/testing.md)
	@$(BIN)/python -m pytest tests/cluster --ring=all --cluster=$(CLUSTER) $(ARGS)

test-versions: export TRAINIUM_KUBERNETES = 1.37
test-versions: setup  ## The cluster tests on Kubernetes 1.37 (`make test` has 1.36)
	@$(BIN)/trainium-devcluster binaries >/dev/null
	@$(BIN)/python -m pytest $(IN_LANES) tests/cluster --ring=all $(ARGS)

test-nxd:  ## The nxd backend on the real neuronx-distributed, torch and torch_xla 2.9 (NXD_SRC=<its checkout>/src)
	@test -d "$(NXD_SRC)/neuronx_distributed" || { echo "NXD_SRC is to be the src folder of a checkout of neuronx-distributed (docs/backends.md)" >&2; exit 2; }
	@scripts/nxd_environment.sh $(NXD_VENV)
	@NXD_SRC="$(NXD_SRC)" PJRT_DEVICE=CPU $(NXD_VENV)/bin/python -m pytest tests/nxd $(ARGS)

test-trackers: binaries  ## Runs in MLflow (its server, with a database; also a job with faults) and Weights & Biases
	@$(BIN)/trainium-devcluster binaries --helm >/dev/null
	@scripts/tool_venv.sh $(TRACKERS_VENV) $(abspath $(BIN))/python scripts/trackers_requirements.txt
	@$(TRACKERS_VENV)/bin/python -m pytest tests/unit/trainer/trackers tests/cluster/training/test_trackers.py $(ARGS)

test-trl: setup  ## Elastic trainers of TRL: SFT, DPO, GRPO and reward models on real processes (docs/program-library.md)
	@scripts/tool_venv.sh $(TRL_VENV) $(abspath $(BIN))/python scripts/trl_requirements.txt
	@$(TRL_VENV)/bin/python -m pytest tests/unit/worker/test_elastic_trl.py tests/unit/worker/test_trl_examples.py $(ARGS)

test-tasks: binaries  ## Models measured by lm-eval, also at milestones of a job; answers of a real server (docs/evaluate.md)
	@$(BIN)/trainium-devcluster binaries --helm >/dev/null
	@scripts/tool_venv.sh $(TASKS_VENV) $(abspath $(BIN))/python scripts/tasks_requirements.txt
	@$(TASKS_VENV)/bin/python -m pytest --ring=all tests/unit/evaluate/test_tasks.py tests/unit/evaluate/test_endpoint.py tests/cluster/training/test_milestones.py $(ARGS)

check: setup  ## Lint, format, types, import rules, generated files
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@MYPYPATH=tests/wire/agent/fakes:tests/wire/agent $(BIN)/mypy $(FAKES:%=-m %) -m agent_factory
	@$(BIN)/lint-imports
	@$(TOOLS) $(BIN)/python -m scripts.generate --check
	@$(BIN)/python scripts/doc_outputs.py --check
	@$(BIN)/python scripts/line_limits.py

docs:  ## The documentation site, strict, into out/site: opens without a server or a network
	@scripts/site/docs_site.sh $(DOCS_VENV) out/site

format: setup  ## Format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

generate: setup  ## Write the CRD, manifests, reference pages and outputs on pages that are derived from the code
	@$(TOOLS) $(BIN)/python -m scripts.generate
	@$(BIN)/python scripts/doc_outputs.py

explore: setup  ## Explore small models of the plan exhaustively (ARGS="--depth 3")
	@$(BIN)/python -m tests.unit.plan.explorer $(ARGS)

mutants: setup  ## Small faults in a copy of the plan's code: which ones do its tests see? (ARGS="'trainium_operator.plan.view*'")
	@scripts/tool_venv.sh $(MUTANTS_VENV) $(abspath $(BIN))/python scripts/mutants_requirements.txt
	@scripts/mutants.sh $(MUTANTS_VENV) $(ARGS)

coverage: setup  ## Branches of plan, checkpoint and agent that their tests take (ARGS=plan)
	@scripts/tool_venv.sh $(COVERAGE_VENV) $(abspath $(BIN))/python scripts/coverage_requirements.txt
	@scripts/coverage.sh $(COVERAGE_VENV) $(ARGS)

fuzz: setup  ## Hostile input for coordinator, watched objects and jobs' fields (ARGS="--inputs 1000000 --seed 1 --targets spec")
	@scripts/tool_venv.sh $(FUZZ_VENV) $(abspath $(BIN))/python scripts/fuzz_requirements.txt
	@$(FUZZ_VENV)/bin/python scripts/fuzz.py $(ARGS)

bench: binaries  ## All benchmarks: a table, and JSON under out/bench
	@$(BIN)/python -m benchmarks.run $(ARGS)
	@$(BIN)/python -m benchmarks.report

bench-check: binaries  ## Fleet and coordinator benchmarks, quick, held to their thresholds
	@$(BIN)/python -m benchmarks.run fleet coordinator --quick
	@$(BIN)/python -m benchmarks.check

faults: binaries  ## The fault table: faults injected into real training (CLUSTER=existing: what kubelets decide)
	@$(BIN)/python -m benchmarks.faults --cluster=$(CLUSTER) $(ARGS)

bench-training: setup  ## Training speed and memory beside transformers.Trainer (PEER_PYTHON=VENV/bin/python)
	@$(BIN)/python -m benchmarks.training_speed $(ARGS)

parity: setup  ## Loss curves and exported models against transformers, in every layout: docs/parity.md (ARGS="--rows tp2")
	@$(BIN)/python -m benchmarks.parity $(ARGS)

soak: binaries  ## Real training through all faults of the table for hours, and a search for leaks (ARGS="--rows 1,2 --runs 60")
	@$(BIN)/python -m benchmarks.faults --leaks --no-document --out out/soak --results out/soak/results $(ARGS)

proof: setup  ## Kills at 200 seeded points of training and checkpoints: benchmarks/proof/recovery-proof.md (ARGS="--uneven", "--tuning --points 10")
	@$(BIN)/python -m benchmarks.proof --document benchmarks/proof/recovery-proof.md $(ARGS)

clean:  ## Remove what the targets made here (caches in the home folder stay)
	@test ! -x $(BIN)/trainium-devcluster || $(BIN)/trainium-devcluster down --all
	@rm -rf $(VENV) $(NXD_VENV) $(DOCS_VENV) $(MUTANTS_VENV) $(COVERAGE_VENV) $(FUZZ_VENV) $(TRACKERS_VENV) $(TRL_VENV) $(PROGRAMS_VENV) $(TASKS_VENV) out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# Programs of the cluster that are prepared during the installation of packages: `with-binaries` and options of
# `trainium-devcluster binaries`, for the targets below and their prerequisites.
WITH_BINARIES =
ALSO =
binaries: WITH_BINARIES = with-binaries
check generate: WITH_BINARIES = with-binaries --helm
test: ALSO = --fleet
test-long: ALSO = --kueue
