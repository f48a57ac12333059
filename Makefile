# python3 (3.11 to 3.13) and make are all that is assumed; everything else is installed from the locks in requirements/.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# What is installed for the quick tests, the demonstration, and all tests, which have what both have.
QUICK  := $(VENV)/.ready-quick
DEMO   := $(VENV)/.ready-demo
READY  := $(VENV)/.ready-test
WORKERS ?= 4
# Empty: an environment without pyspark, and no tests of the Spark consumers.
SPARK  ?= 1

# Bytecode is kept: the tests start thousands of processes, each of which would compile it anew.
unexport PYTHONDONTWRITEBYTECODE

BENCH := $(or $(OUT),bench-results)

.PHONY: help demo test test-long test-long-status postgres-19 test-of quick properties coverage pythons torture league bench check lint types fix hooks lock dist release docs docs-serve docs-version generate house \
  test-image test-kube clean
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z][a-z0-9-]*\):[^#]*## \(.*\)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) \
	  | while IFS='|' read -r target text; do printf '  make %-11s %s\n' "$$target" "$$text"; done
	@echo 'Needs python3 (3.11 to 3.13); each target first installs the pinned packages that it needs into $(VENV).'

demo: $(DEMO) ## the whole product under load: kill the primary, fail over, compare the four copies
	@$(BIN)/slotbridge demo $(DEMO_OPTIONS)

# WORKERS processes with servers of their own, which wait for most of the time.
# A file's tests stay together and share what they make. Their order and their random data are the same
# each time. POSTGRES=17.10, or POSTGRES=/usr/lib/postgresql/17/bin, runs them on that.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder
ON_SERVERS = CONTAINERS=$(CONTAINERS) SLOTBRIDGE_POSTGRES=$(POSTGRES) $(PYTEST)
test: $(READY) ## one test of each promise on real PostgreSQL, Kafka and Spark, and all quick tests
	@$(ON_SERVERS) --randomly-seed=1 -m "not long" $(PYTEST_OPTIONS)

# In another order and with other random data each time.
test-long: $(READY) ## all tests: each kill, fault and case, in any order (SHARD=2/6: a sixth of them)
	@$(ON_SERVERS) --shard $(or $(SHARD),1/1) $(PYTEST_OPTIONS)

# PostgreSQL 19 of Debian experimental, unpacked once (tools/get-postgres.sh): PYTEST_OPTIONS="-m since_19", or all.
POSTGRES_19 := .cache/postgres-19/root/usr/lib/postgresql/19/bin
$(POSTGRES_19)/postgres:
	@tools/get-postgres.sh 19 $(CURDIR)/.cache/postgres-19
	@chmod a+rx .cache
postgres-19: $(READY) $(POSTGRES_19)/postgres ## make test on PostgreSQL 19
	@$(MAKE) --no-print-directory test POSTGRES=$(CURDIR)/$(POSTGRES_19)

test-long-status: $(READY) ## which shards of test-long passed, at which commit
	@$(BIN)/python -m tests.shards status

# The tests that need no server, and neither build nor type-check everything: PYTHON=/usr/bin/python3.12 VENV=folder
# They wait for nothing, so that each processor has one worker.
quick: WORKERS = $(shell nproc 2>/dev/null || echo 2)
quick: $(QUICK) ## the tests that need no server (some 80 CPU-seconds)
	@$(PYTEST) -m "not servers and not slow and not long" $(if $(SPARK),,--ignore tests/spark_consumers --ignore tests/promises/tables) $(PYTEST_OPTIONS)

test-of: $(READY) ## the tests of one module (MODULE=services/bridge/sink/topics.py)
	@CONTAINERS=$(CONTAINERS) SLOTBRIDGE_POSTGRES=$(POSTGRES) $(BIN)/python -m tests.of_module $(MODULE) $(PYTEST_OPTIONS)

properties: $(QUICK) ## the property tests with new examples, 2,000 of each (PYTEST_OPTIONS=-k name)
	@HYPOTHESIS_PROFILE="new examples" $(PYTEST) -m "hypothesis and not servers" $(PYTEST_OPTIONS)

# What the tests without servers cover, in their own processes. COVER=all: with those that need servers.
coverage: $(if $(filter all,$(COVER)),$(READY),$(QUICK)) ## print what the quick tests cover, module by module (COVER=all: all tests)
	@$(PYTEST) $(if $(filter all,$(COVER)),,-m "not servers and not slow and not long") \
	  --cov slotbridge --cov schemas --cov services --cov spark_consumers --cov-report term:skip-covered $(PYTEST_OPTIONS)

pythons: $(QUICK) ## the tests without servers on every other supported Python of this machine
	@MAKE=$(MAKE) $(BIN)/python -m tools.interpreters

# Faults from seeds, every transaction accounted for (tests/torture): SEED=1 MINUTES=3, or SEEDS=1-40; BROKERS=3.
# KILLS=200 FAILOVERS=5: one run within snapshots, until the bridge got so many.
# POSTGRES=17.5: on that one, without two-phase decoding. SABOTAGE=all (3,5; words of a name): is a bridge with a
# deliberate mistake found?
torture: $(READY) ## faults from a seed, every transaction accounted for (SEED=1 MINUTES=3)
ifdef SABOTAGE
	@$(BIN)/python -m tests.torture.mutation "$(SABOTAGE)" $(if $(BROKERS),--brokers $(BROKERS)) $(TORTURE_OPTIONS)
else
	@$(BIN)/python -m tests.torture --seed $(or $(SEED),1) --minutes $(or $(MINUTES),3) \
	  $(if $(SEEDS),--seeds $(SEEDS)) $(if $(POSTGRES),--postgres $(POSTGRES)) $(if $(BROKERS),--brokers $(BROKERS)) $(if $(KILLS),--kills $(KILLS) --failovers $(or $(FAILOVERS),5)) $(TORTURE_OPTIONS)
endif

# The same faults for Slotbridge and Debezium, one checker (tests/league): SEEDS=1-3, LEAGUE_OPTIONS="--faults 15".
league: $(READY) ## what Slotbridge and Debezium lose, repeat and tear under the same faults
	@$(BIN)/python -m tests.league --seeds $(or $(SEEDS),1-3) $(LEAGUE_OPTIONS)

# make bench [QUICK=1] [WORKLOADS=a,c]: contenders in turn over the same WAL (benchmarks/race)
# make bench LATENCY=1: latency over offered load; GROWTH=1: over relations, sizes, backlog; SOAK=1
bench: $(READY) ## measurements beside Debezium over the same WAL (QUICK=1: a short one)
	@$(BIN)/python -m benchmarks.$(or $(if $(LATENCY),race.latency),$(if $(GROWTH),growth),$(if $(SOAK),soak),race) $(if $(QUICK),--quick) $(if $(WORKLOADS),--workloads $(WORKLOADS)) \
	  --out $(BENCH) $(BENCH_OPTIONS)

check: $(READY) lint types ## ruff and mypy

lint: $(QUICK) ## ruff alone
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(READY) ## mypy alone
	@$(BIN)/mypy

fix: $(QUICK) ## format the code and mend what ruff can mend
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

# The hooks of .pre-commit-config.yaml run from $(VENV); pre-commit itself comes from PATH.
hooks: $(READY) ## run the pre-commit checks at every commit (needs pre-commit)
	@pre-commit install

# One environment, which grows by need: each stage adds what its lock pins. The tests' has all.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	  || { echo "slotbridge needs Python 3.11 to 3.13; pass PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) \
	  || { echo "python3 can't make a virtual environment (Debian: install python3-venv)" >&2; exit 2; }

INSTALL := requirements/install.py requirements/build.txt pyproject.toml setup.py $(wildcard services/bridge/compiled/*.p[yx]*)
$(VENV)/.ready-%: requirements/%.txt $(INSTALL) | $(VENV)/bin/python
	@$(BIN)/python requirements/install.py $* $(if $(SPARK),,--without-spark)
	@touch $@ $(if $(filter test,$*),$(QUICK) $(DEMO))

# Images for a container engine, built and run (tests/image; docs/start/install.md). Without an engine, root on
# Debian gets one: apt-get install docker.io debootstrap.
test-image: $(READY) ## build the container images and run them
	@IMAGE=1 $(BIN)/python -m pytest -p no:randomly -n 0 tests/image $(PYTEST_OPTIONS)

# The chart on a real Kubernetes node, which is built from Go modules at the first run (root, Go; tests/kube).
test-kube: $(READY) ## install the chart on a real Kubernetes node
	@KUBE=1 $(BIN)/python -m pytest -p no:randomly -n 0 -s -o faulthandler_timeout=0 tests/kube $(PYTEST_OPTIONS)

# sdist and wheel in dist/. The wheel is built from the sdist, so that the sdist is proven whole, and
# auditwheel gives it the oldest manylinux tag that its compiled part allows (one Python version:
# that of PYTHON). Without a compiler the wheel is of this machine alone, and the command fails.
DIST    ?= .cache/dist
DIST_TO ?= dist
dist: ## sdist and wheel in dist/ (those of PYTHON)
	@$(MAKE) --no-print-directory VENV=$(DIST)/venv $(DIST)/venv/.ready-dist
	@rm -rf $(DIST_TO) $(DIST)/out && mkdir -p $(DIST_TO) $(DIST)/out
	@echo "building the sdist, and the wheel from it (half a minute)"
	@$(DIST)/venv/bin/python -c 'from setuptools import build_meta; build_meta.build_sdist("$(DIST)/out")' > $(DIST)/sdist.log
	@$(DIST)/venv/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	  --wheel-dir $(DIST)/out $(DIST)/out/slotbridge-*.tar.gz
	@PATH="$(CURDIR)/$(DIST)/venv/bin:$$PATH" $(DIST)/venv/bin/auditwheel repair --wheel-dir $(DIST_TO) $(DIST)/out/slotbridge-*.whl \
	  2> $(DIST)/auditwheel.log || { cat $(DIST)/auditwheel.log >&2; exit 1; }
	@mv $(DIST)/out/slotbridge-*.tar.gz $(DIST_TO)/
	@ls -1 $(DIST_TO)

# All that a release has (tools/release.py). Images are built apart: the notes say how.
release: $(QUICK) ## sdist, wheels for each Python of this machine, chart, SBOM, notes and sums in dist/
	@MAKE=$(MAKE) $(BIN)/python -m tools.release

# What is made from the settings' classes and the chart's values: needed after a change of either.
generate: $(READY) ## what is made from the settings' classes: docs, examples, JSON Schema, chart
	@$(BIN)/python -m tools.generate

house: $(QUICK) ## what the house weighs: lines, settings, names, rooms, sentences (HOUSE_OPTIONS=--json)
	@$(BIN)/python -m tools.house $(HOUSE_OPTIONS)

# The site (mkdocs.yml), with MkDocs in an environment of its own. SITE_URL: where it will be served.
SITE := .cache/site-tools
$(SITE)/.ready: requirements/docs.txt
	@$(PYTHON) -m venv $(SITE)
	@$(SITE)/bin/pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements/docs.txt
	@touch $@
docs: $(SITE)/.ready ## build the documentation as a site in .cache/site; a dead link fails
	@$(SITE)/bin/mkdocs build --quiet
	@echo .cache/site/index.html
docs-serve: $(SITE)/.ready ## show the documentation at localhost:8000 while one writes
	@$(SITE)/bin/mkdocs serve --no-strict
# Commits the site of this version to the branch gh-pages, beside those of other versions; pushes nothing.
docs-version: $(SITE)/.ready ## add this version's site to the branch gh-pages
	@PATH="$(CURDIR)/$(SITE)/bin:$$PATH" mike deploy --update-aliases \
	  "$$(sed -n 's/^version = "\([0-9]*\.[0-9]*\).*/\1/p' pyproject.toml)" latest

# Pin anew after a change of pyproject.toml (needs uv). All have the versions of test.txt.
COMPILE := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
  --no-emit-index-url --no-annotate
PINNED := $(COMPILE) -c requirements/test.txt pyproject.toml
EXTRAS := --extra otel --extra openlineage --extra expressions --extra s3
lock: ## pin the dependencies anew (needs uv)
	$(COMPILE) requirements/build.in -o requirements/build.txt
	$(COMPILE) requirements/dist.in -o requirements/dist.txt
	$(COMPILE) requirements/sbom.in -o requirements/sbom.txt
	$(COMPILE) requirements/docs.in -o requirements/docs.txt
	$(COMPILE) -c requirements/build.txt --all-extras --group test pyproject.toml -o requirements/test.txt
	$(PINNED) $(EXTRAS) --extra spark --group quick -o requirements/quick.txt
	$(PINNED) --extra spark --extra local -o requirements/demo.txt
	$(PINNED) $(EXTRAS) -o requirements/run.txt
	$(PINNED) --extra local -o requirements/local.txt

clean: ## remove environment, caches and builds
	rm -rf $(VENV) .cache build services/bridge/compiled/*.so
