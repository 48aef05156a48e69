# powerguard: `make help` lists the targets. Everything lives in .venv; `make clean` removes it.
PY      ?= python3
VENV    ?= .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.made
# The CPU build that CI uses. `make TORCH=torch` takes whatever PyPI offers (a CUDA build on Linux).
TORCH   ?= $(shell ./.make/pick-torch)
JSON    ?=

.DEFAULT_GOAL := help
.PHONY: help setup setup-node setup-nut setup-frameworks check lint test test-nodes fast drill hil-virtual bench bench-disk golden clean

help:           ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

setup: $(STAMP)/dev   ## a virtual environment with everything that tests and drills need

$(STAMP)/venv: | .make/apt
	@./.make/apt python "$(PY)"
	@test -x $(BIN)/python || { echo "setup: making $(VENV) with $(PY)"; $(PY) -m venv $(VENV); }
	@mkdir -p $(STAMP) && touch $@

$(STAMP)/torch: $(STAMP)/venv
	@echo "setup: installing $(TORCH) numpy (a minute or two, about 1 GB)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --progress-bar on "$(TORCH)" numpy
	@touch $@

$(STAMP)/drill: $(STAMP)/torch pyproject.toml
	@echo "setup: installing powerguard[node,train,drill] from this folder"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[node,train,drill]'
	@touch $@

$(STAMP)/dev: $(STAMP)/drill pyproject.toml
	@echo "setup: installing the test tools"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $$($(BIN)/python .make/group.py dev snmp frameworks)
	@touch $@

setup-nut:      ## real NUT, fio, file-system tools and systemd's containers through apt, where that is possible
	@./.make/apt nut
	@./.make/apt systemd

setup-frameworks: $(STAMP)/dev   ## DeepSpeed and torchtitan too, for the tests of their adapters
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check $$($(BIN)/python .make/group.py frameworks-more)

check: $(STAMP)/dev   ## ruff, mypy --strict, import contracts, fast tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -q -m "not slow and not e2e and not nut and not root"

lint: $(STAMP)/dev    ## the first four of check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

fast: $(STAMP)/dev    ## fast tests only
	$(BIN)/python -m pytest -q -m "not slow and not e2e and not nut and not root"

test: setup-nut $(STAMP)/dev   ## sets up, then all tests, real parts included
	$(BIN)/ruff check --quiet .
	$(BIN)/lint-imports --no-logo
	@$(BIN)/mypy & types=$$!; $(BIN)/python -m pytest; tests=$$?; wait $$types && exit $$tests

hil-virtual: setup-nut $(STAMP)/dev   ## power cuts of real file systems, SNMP UPSes, a virtual machine: all that can run here
	@./.make/apt vm
	$(BIN)/python -m hil.virtual

test-nodes: setup-nut $(STAMP)/dev   ## a job over three hosts (network namespaces, root): every failure, real gloo ranks
	POWERGUARD_TEST_NODES=1 $(BIN)/python -m pytest -q tests/nodes

drill: $(STAMP)/drill   ## sets up, then a blackout on this machine: simulated UPS, real daemon, real ranks
	$(BIN)/powerguard drill blackout $(if $(JSON),--json)

drill-all: $(STAMP)/drill   ## every scenario there is, in a simulated world and on real processes, each with a line
	$(BIN)/powerguard drill all $(if $(JSON),--json)

bench: $(STAMP)/dev   ## each benchmark prints one JSON line
	@for b in benchmarks/bench_*.py; do echo "== $$b"; $(BIN)/python $$b --json || exit 1; done

bench-disk: $(STAMP)/dev  ## saving, loading and blocked time against the disk's own limit, in 12 minutes; on a quiet machine
	$(BIN)/python benchmarks/bench_flush.py --json --state "700 tensors" --minutes 3
	$(BIN)/python benchmarks/bench_flush.py --json --ranks 2
	$(BIN)/python benchmarks/bench_load.py --json --minutes 3
	$(BIN)/python benchmarks/bench_snapshot.py --json --rounds 5
	$(BIN)/python benchmarks/bench_flush.py --json --state "3000 tensors" --state small --minutes 4

golden: $(STAMP)/dev   ## rewrites the golden stories; commit only what you understand and want
	$(BIN)/python -m powerguard.sim.scenario --rewrite tests/scenarios

SIM_RUNS ?= 20000
SIM_JOBS ?= 1
sim-agree: $(STAMP)/dev   ## SIM_RUNS=20000 runs of a job over several nodes while everything fails; prints seeds
	$(BIN)/python -m powerguard.sim.agree --runs $(SIM_RUNS) --jobs $(SIM_JOBS) $(if $(JSON),--json)

clean:          ## removes what make made
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
