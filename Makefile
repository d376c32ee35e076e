# Two commands do everything on a fresh machine: `make demo` and `make test`. `make` alone lists the rest.
SHELL := /bin/sh
.DEFAULT_GOAL := help

# make test PYTHON=python3.13: the same with another interpreter, in an environment of its own.
VENV := $(if $(filter command,$(origin PYTHON)),.venv-$(notdir $(PYTHON)),.venv)
BIN := $(VENV)/bin
# make demo DAYS=31 START=2013-01-01 PACE=0.5; any other option through ARGS="..."
DEMO_ARGS = $(if $(DAYS),--days $(DAYS)) $(if $(START),--start $(START)) $(if $(PACE),--pace $(PACE)) $(ARGS)
TOOLS = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/tidegate/bin
LOCK = uv pip compile --universal --generate-hashes --no-emit-index-url --no-emit-package tidegate-kernel --python-version 3.11 --extra demo --extra kafka --extra postgres --extra cluster --group dev pyproject.toml -o requirements.lock

# Some images tell Python to keep no bytecode. Then each process compiles all that it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help
help: ## this list
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Run

.PHONY: demo
demo: venv java warm ## the whole shape on real flights: Airflow, Spark, MinIO, a kill, a recovery, a summary (DAYS= START= PACE=)
	$(BIN)/tidegate demo $(DEMO_ARGS)

.PHONY: up
up: venv java ## start MinIO and Airflow and leave them running
	$(BIN)/tidegate up $(ARGS)

.PHONY: down
down: venv ## stop them again
	$(BIN)/tidegate down $(ARGS)

##@ Check

.PHONY: test
test: venv java warm ## every test but the slow ones (ARGS="-m unit" for the fast ones)
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

.PHONY: e2e
e2e: venv java warm ## the slow end-to-end tests: outages, restores, the whole demo on two days of flights
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "slow and e2e and not kafka" $(ARGS)

.PHONY: kafka
kafka: venv java warm ## a real Kafka broker (44 MB of jars, fetched once): drivers and broker killed, every offset once
	$(BIN)/python -m pytest -m kafka $(ARGS)

.PHONY: yarn
yarn: venv java warm ## drivers on a real YARN (106 MB of jars, fetched once), compared with local runs; ends with "N of N on YARN" (ARGS="launch")
	$(BIN)/python -m tests.e2e.yarn_runs $(ARGS)

.PHONY: kubernetes
kubernetes: venv java warm ## executors as pods of a real API server, with the chart's rights (Go >= 1.24.3; 20 minutes once); ends with "N of N on Kubernetes" (ARGS="launch")
	@mkdir -p $(TOOLS)
	test -x $(TOOLS)/etcd || go build -C tests/infra/kubernetes -o $(TOOLS)/etcd go.etcd.io/etcd/server/v3
	test -x $(TOOLS)/kube-apiserver || go build -C tests/infra/kubernetes -o $(TOOLS)/kube-apiserver k8s.io/kubernetes/cmd/kube-apiserver
	$(BIN)/python -m tests.e2e.kubernetes_runs $(ARGS)

.PHONY: cluster-faults
cluster-faults: venv java warm ## executors of a real cluster killed while they write; ends with "N faults, 0 differences" (ARGS="job-1")
	$(BIN)/python -m tests.e2e.cluster_faults $(ARGS)

.PHONY: routes
routes: venv java warm ## flights through objects, landing and Kafka, each killed in the middle: the same windows (ARGS="--days 3")
	$(BIN)/python -m tests.e2e.routes $(ARGS)

.PHONY: quality-rows
quality-rows: venv java warm ## the faults of quality and recovery that a review found, each with its tests; ends with "N passed, N failed"
	$(BIN)/python -m tests.quality_rows

.PHONY: faults
faults: venv java ## the test of each fault that the review of e3dab94 found (ARGS="--on e3dab94" shows that each is red there); "N of N ids, N passed, 0 failed"
	$(BIN)/python -m tests.faults $(ARGS)

.PHONY: fields
fields: venv ## every field of a spec, the code that reads it and a test that names it; ends with "N fields, 0 without a reader or a test"
	$(BIN)/python -m tests.spec.field_effects

.PHONY: changes
changes: venv ## each field of a spec and each row of the table of changes, deployed while a driver runs, is stopped, crashes or fails; ends with "N cells (A applied, R refused), 0 differences"
	$(BIN)/python -m tests.spec.change_matrix

.PHONY: team
team: venv java warm ## follows docs/how-to and the tutorial on a real Spark, MinIO and cluster; ends with "N of 12" (ARGS=back-up.md)
	$(BIN)/python -m tests.team $(ARGS)

.PHONY: git-bundle
git-bundle: venv java warm ## a stream whose code Airflow's git bundle checks out, through many commits and deleted folders (24 kB, fetched once)
	$(BIN)/python -m pytest -n0 -m long tests/e2e/test_git_bundle.py tests/e2e/test_git_deploys.py $(ARGS)

.PHONY: quality-proof
quality-proof: venv ## every preset in every trouble, on every surface and in the checks; ends with "N cells, N differences, N not applicable"
	$(BIN)/python -m tests.quality_proof

.PHONY: check
check: lint typecheck imports docs-check ## between two commits, at most 5 minutes: these, and the unit tests that the change against main concerns
	$(BIN)/python -m tests.ci.changed_tests

.PHONY: lint
lint: venv ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: typecheck
typecheck: venv ## mypy, strict
	$(BIN)/mypy

.PHONY: imports
imports: venv ## who may import whom
	$(BIN)/lint-imports

.PHONY: docs-check
docs-check: venv ## the pages that follow from the code are current, and every link and citation leads somewhere
	$(BIN)/python docs/generate.py --check
	$(BIN)/python -m pytest -n0 -q tests/docs tests/spec/test_preset_examples.py -m "unit and not slow"
	@echo "docs: options, errors, presets, citations up to date"

.PHONY: soak
soak: venv ## simulate crashes, races, faults of store, catalog, sinks and jobs (SECONDS=60 SEED=0), ends with "N schedules, M violations"
	$(BIN)/python -m tests.simulation.soak --seconds $(or $(SECONDS),60) --seed $(or $(SEED),0) $(ARGS)

.PHONY: search
search: venv ## new random worlds for the properties of event time, at low priority (EXAMPLES=2000); what it finds becomes a test
	HYPOTHESIS=search TIDEGATE_EXAMPLES=$(or $(EXAMPLES),2000) nice -n 19 $(BIN)/python -m pytest -n0 --timeout=0 \
		tests/eventtime tests/oracle/test_agreement.py tests/oracle/test_edges.py $(ARGS)

.PHONY: conformance
conformance: venv ## cases of other systems' tests (FILES="a.json b.json" ENGINE=decider|oracle|spark), ends with "N passed, N failed, N skipped"
	$(BIN)/python -m tests.conformance $(or $(FILES),tests/conformance/cases/*.json) --engine $(or $(ENGINE),decider) $(ARGS)

.PHONY: agreement
agreement: venv java ## DuckDB, Spark SQL and the oracle against each other, ends with "N functions proven, M on Spark SQL, 0 differ"
	$(BIN)/python -m pytest -n0 -q -m "" tests/spark/test_random_pipelines.py tests/spark/test_agreement.py tests/spark/test_expression_tasks.py tests/spark/test_sessions.py
	$(BIN)/python -m tests.spark.engine_agreement

.PHONY: matrices
matrices: venv ## features against each other, such as restore x retention or streams x retention, ends with "N cells, N failed"
	$(BIN)/python -m tests.matrices

.PHONY: presets
presets: venv java warm ## the example of each preset on Spark, epoch by epoch against the oracle, ends with "6 of 6 exact on Spark"
	$(BIN)/python -m tests.conformance.presets_on_spark

.PHONY: rows-on-spark
rows-on-spark: venv java warm ## who moves the rows: pipelines behind counters, ends with "N of M pipelines: the driver touched 0 rows" (ARGS="rows-40 --masters standalone", ARGS="--spec FILE --input FOLDER", ARGS=--cheats)
	$(BIN)/python -m tests.rows_on_spark $(ARGS)

.PHONY: a11y
a11y: venv ## axe-core over every state of the Streams page, light, dark and phone, ends with "0 serious in N states" (PICTURES=folder; npm, chromium)
	$(BIN)/python -m tests.e2e.a11y $(if $(PICTURES),--pictures $(PICTURES)) $(ARGS)

.PHONY: incidents
incidents: venv java warm ## ten incidents of docs/incidents.md, recovered from the page in a real browser; ends with "N of 10 recovered" (chromium)
	$(BIN)/python -m tests.e2e.incidents $(ARGS)

.PHONY: costs
costs: venv ## requests, bytes, memory as history, members and rows grow (ARGS="--slots 100000"), ends with "N of N bounded"
	$(BIN)/python -m tests.bench.costs $(ARGS)

.PHONY: bench-seal
bench-seal: venv ## how long a seal takes against a local MinIO (p50, p95), and how many PUTs an epoch makes
	$(BIN)/python -m tests.checkpoints.bench_seal $(ARGS)

.PHONY: bench-cli
bench-cli: venv java ## how long --help, status, tables, row, list, validate, plan and 20 cases of test take, median of five, with the load
	$(BIN)/python -m tests.bench.cli $(ARGS)

.PHONY: bench-page
bench-page: venv ## seconds and bytes of the Streams page's answers with 50 streams and 10,000 epochs, with the load
	$(BIN)/python -m tests.bench.page $(ARGS)

.PHONY: bench-recovery
bench-recovery: venv ## from a driver's start to its first survey, against 10 MB to 1 GB of state and 10 to 10,000 epochs
	$(BIN)/python -m tests.checkpoints.bench_recovery $(ARGS)

.PHONY: chaos
chaos: venv java ## kill driver, JVM and MinIO at random moments; the tables must not show it (KILLS=50 SEED=0), about 20 s a kill
	$(BIN)/python -m tests.e2e.chaos --kills $(or $(KILLS),50) --seed $(or $(SEED),0)

.PHONY: jobs-proof
jobs-proof: venv java warm ## each kind of script x each disturbance, with a real Spark (ARGS="--cases a d --part 10 --record FILE"), some 40 s a cell: "N cells, 0 differences"; with KILLS=3 RESTORES=3 random ones over three kinds of state (ARGS="--apps clicks copy join windows --minio --checkpoints bucket"), half a minute per kill
	$(BIN)/python -m tests.sealed_queries.$(if $(KILLS)$(RESTORES),jobs_proof --kills $(or $(KILLS),3) --restores $(or $(RESTORES),3),jobs_matrix) --seed $(or $(SEED),1) $(ARGS)

.PHONY: jobs-soak
jobs-soak: venv ## simulate jobs with models of Spark and of sinks, and hunt planted bugs (WORLDS=200): "N histories, 0 violations; N planted bugs, 0 missed"
	$(BIN)/python -m tests.simulation.job_mutants --worlds $(or $(WORLDS),200)

.PHONY: bench-jobs
bench-jobs: venv java warm ## what sealing costs a job per batch; seconds of a kill and of restores (ARGS="--files 40 --rounds 3 --megabytes 1000")
	$(BIN)/python -m tests.sealed_queries.bench_jobs $(ARGS)

.PHONY: deploy-check
deploy-check: venv ## infra/deploy judged by helm, promtool and the code of Kubernetes, compose and docker build (Go >= 1.24.3; 20 minutes once)
	@mkdir -p $(TOOLS)
	test -x $(TOOLS)/helm || GOBIN=$(TOOLS) go install helm.sh/helm/v3/cmd/helm@v3.19.4
	go build -C tests/infra/deploycheck -o $(TOOLS)/deploycheck .
	test -x $(TOOLS)/promtool || go build -C tests/infra/promtool -o $(TOOLS)/promtool github.com/prometheus/prometheus/cmd/promtool
	$(BIN)/python -m pytest -n0 tests/infra/test_deploy_tools.py $(ARGS)

.PHONY: judge
judge: venv ## take each step of simulated runs, and of real kills, by the rules of the protocol; plant bugs (SECONDS=60 SEED=0 ARGS="--real 50"): "N runs, N steps, all taken"
	$(BIN)/python -m tests.simulation.judge_traces --seconds $(or $(SECONDS),60) --seed $(or $(SEED),0) $(ARGS)

.PHONY: mutants
mutants: venv ## plant bugs; the simulation must find each (SECONDS=60 for each bug)
	$(BIN)/python -m tests.simulation.mutants --seconds $(or $(SECONDS),60)

.PHONY: repro
repro: venv ## bring a fault of docs/track-record.md back and show what it does (N=A1), or run its test
	$(BIN)/python -m tests.simulation.repro $(N)

.PHONY: mutation
mutation: venv ## change the trusted core in N places, one at a time; the tests must notice (N=400 SEED=0), about an hour
	$(BIN)/python -m tests.mutation --count $(or $(N),400) --seed $(or $(SEED),0) $(ARGS)

.PHONY: bench-triggerer
bench-triggerer: venv ## 50 streams under one triggerer: its CPU and memory, time to notice ten losses (ARGS="--streams 50")
	$(BIN)/python -m tests.operators.bench_triggerer $(ARGS)

.PHONY: ci
ci: ## what CI runs: all of the above, and the tests against the built wheels
	.ci/run

##@ Measure

.PHONY: flights-year
flights-year: venv java ## a year of real flights through `tidegate run`, lag 0, 1h, 4h, 24h: late rows per airport, exactness, advice (ARGS="--lags 1h")
	$(BIN)/python -m tests.bench.flights_year $(ARGS)

.PHONY: bench
bench: venv java ## six jobs against plain Structured Streaming, Flink, Hazelcast and the batch limit (Maven; ROWS=20000000 ROUNDS=5 ARGS="W1 W5")
	$(BIN)/python -m tests.bench.suite --rows $(or $(ROWS),20000000) --rounds $(or $(ROUNDS),5) $(ARGS)

.PHONY: bench-windows
bench-windows: venv java ## throughput of windows against plain Structured Streaming, interleaved (ROWS=20000000 ROUNDS=5)
	$(BIN)/python -m tests.bench.rounds windows --rows $(or $(ROWS),20000000) --rounds $(or $(ROUNDS),5) $(ARGS)

.PHONY: bench-order
bench-order: venv java ## ordered release against the windows and plain Structured Streaming (ROWS= ROUNDS=)
	$(BIN)/python -m tests.bench.rounds order --rows $(or $(ROWS),20000000) --rounds $(or $(ROUNDS),5) $(ARGS)

.PHONY: bench-folds
bench-folds: venv java ## a reducer in one process, in one task and in groups of keys, over the same rows (ARGS="--rows 1000000 --keys 10000")
	$(BIN)/python -m tests.bench.folds $(ARGS)

.PHONY: bench-kafka
bench-kafka: venv java ## a topic of a real broker through windows, against plain Structured Streaming, interleaved (ROWS=10000000 ROUNDS=3)
	$(BIN)/python -m tests.bench.kafka --rows $(or $(ROWS),10000000) --rounds $(or $(ROUNDS),3) $(ARGS)

.PHONY: bench-latency
bench-latency: venv java ## from a row's arrival, on MinIO or in a topic, to its place in the Iceberg table (MINUTES=3 ARGS="minio:10000")
	$(BIN)/python -m tests.bench.latency --minutes $(or $(MINUTES),3) $(ARGS)

.PHONY: bench-workers
bench-workers: venv java ## rows per second and core on a cluster of one and of two workers, and what Spark's stages say of more (ARGS="--master yarn")
	$(BIN)/python -m tests.bench.workers $(ARGS)

.PHONY: bench-memory
bench-memory: venv java ## memory of the driver, its JVM and a worker over the rows of one epoch of 20 columns (ARGS="--rows 4000000 40000000 --jobs default")
	$(BIN)/python -m tests.bench.memory $(ARGS)

.PHONY: bench-splice
bench-splice: venv java ## what a merge costs against a full run (ROWS=20000000)
	$(BIN)/python -m tests.bench.splice --rows $(or $(ROWS),20000000) $(ARGS)

.PHONY: soak-real
soak-real: venv ## a real stream for hours, with kills and outages: memory, objects, requests, disk (HOURS=2 or MINUTES=20, SEED=1, ARGS=--leak): "N of 4 slopes flat"
	$(BIN)/python -m tests.e2e.soak_real --minutes $(or $(MINUTES),$(shell echo $$((60 * $(or $(HOURS),2))))) --seed $(or $(SEED),1) $(ARGS)

.PHONY: bench-quality
bench-quality: venv ## time and memory of the quality checks over 10,000 epochs in Iceberg tables (EPOCHS=10000)
	$(BIN)/python -m tests.bench.quality --epochs $(or $(EPOCHS),10000) $(ARGS)

.PHONY: bench-decider
bench-decider: venv ## time of one decision at 1,000 and 10,000 partitions
	$(BIN)/python -m tests.bench.decider

.PHONY: bench-whatif
bench-whatif: venv ## `tidegate whatif` over 40,000 epochs, and the bytes of surveys
	$(BIN)/python -m tests.bench.what_if

.PHONY: bench-jvm
bench-jvm: venv java ## spark.jvm: quick against throughput on small epochs, interleaved (ROUNDS=3)
	$(BIN)/python -m tests.bench.jvm --rounds $(or $(ROUNDS),3) $(ARGS)

.PHONY: shape
shape: venv ## size, names, docstrings and comments of the product; ends with "shape: N of 7 goals", fails unless N is 7
	@$(BIN)/python -m tests.shape

.PHONY: fresh-eyes
fresh-eyes: venv ## 40 random public docstrings without their code, for a reader to paraphrase (SEED=0)
	@$(BIN)/python -m tests.fresh_eyes --seed $(or $(SEED),0) $(ARGS)

##@ Make

.PHONY: venv
venv: ## the project's environment from requirements.lock
	@PYTHON="$(PYTHON)" infra/bootstrap.sh venv $(VENV)

.PHONY: java
java: # Spark needs it; one clear line if it is missing
	@infra/bootstrap.sh java

.PHONY: warm
warm: venv java # Spark's classes, archived once: every driver of the demo and the tests starts faster
	@$(BIN)/tidegate warm

.PHONY: docs
docs: venv ## write the reference pages (options, errors, alerts, output) again from the code
	$(BIN)/python docs/generate.py

.PHONY: site
site: venv ## build the documents as a site in build/docs/site, with search and a dark mode, which needs no network; takes the pictures of the Streams page (chromium)
	$(BIN)/python -m docs.site

.PHONY: wheel
wheel: venv ## build the wheels of tidegate and of its kernel into dist/
	$(BIN)/python -m build --wheel --no-isolation --outdir dist infra/kernel
	$(BIN)/python -m build --wheel --no-isolation

.PHONY: lock
lock: venv ## resolve the pins again (needs the network)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(LOCK)

.PHONY: clean
clean: ## remove caches and builds; keeps .venv and a running stack
	rm -rf dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache spark-warehouse metastore_db derby.log
