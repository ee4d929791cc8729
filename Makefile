# make figures     measure what this machine can measure, draw all figures, write all tables
# make quick       run the tests for the files that differ from main, and ruff (about a minute);
#                  make quick BASE=revision compares with another revision
# make test        run the tests: each kernel is compiled for one architecture, and a sample of the
#                  planted faults is tried
# make test-all    run all tests: each kernel for all its architectures and options, all faults
# make test-torch  run the tests that need torch (build for CPUs): gradients, rings of processes
# make test-mlir   run the tests of kernels that numba-cuda-mlir, the other compiler, compiles
# make browser     test the page explore.html in Chromium, if it is installed
# make tutorials   write a notebook of each tutorial, with its outputs, to build/tutorials
# make docs        write the guide, the option reference and the API reference to build/docs
# make lint        run ruff and mypy, also over example calls of users; check docstrings by
#                  numpydoc, and commit subjects
# make sanitize    run compute-sanitizer over the kernels in all layouts and with all options
#                  (needs a GPU)
# make ptx         BASE=revision: test whether all kernels have the same PTX as at a revision
# make clean       remove .venv and all generated files that git does not track
# Each goal first makes .venv if it is missing or if setup.cfg has changed.

PYTHON ?= python3
JOBS ?= auto
VENV := .venv
, := ,
RUN := $(VENV)/bin/python

# The CUDA wheels that fit the driver: cu12 for a driver of CUDA 12, else cu13.
ifndef WHEELS
WHEELS := $(if $(filter 12,$(shell nvidia-smi 2>/dev/null | \
	sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p')),cu12,cu13)
endif
ifeq ($(filter 1cu12 1cu13,$(words $(WHEELS))$(strip $(WHEELS))),)
$(error WHEELS must be cu12 or cu13, got "$(WHEELS)")
endif

# Let Python write bytecode: several processes run the tests, and share the bytecode on disk.
unexport PYTHONDONTWRITEBYTECODE

SOURCES := fa_numba experiments tests .ci

.PHONY: figures quick test test-all test-torch test-mlir browser tutorials docs lint sanitize ptx clean
.DELETE_ON_ERROR:

figures: $(VENV)/.run-$(WHEELS)
	@$(RUN) -m experiments all
	@$(RUN) -m experiments report

quick: $(VENV)/.lint-$(WHEELS)
	@$(RUN) .ci/quick.py --jobs $(JOBS) $(addprefix --base ,$(BASE))

test: $(VENV)/.dev-$(WHEELS)
	@$(RUN) -m pytest -q -n $(JOBS) $(TESTS)

test-all: $(VENV)/.dev-$(WHEELS)
	@$(RUN) -m pytest -q -n $(JOBS) -m "slow or not slow" $(TESTS)

test-torch: $(VENV)/.torch-$(WHEELS)
	@$(RUN) -m pytest -q -n $(JOBS) -m "slow or not slow" -k "torch or gloo" $(TESTS)

test-mlir: $(VENV)/.mlir-$(WHEELS)
	@$(RUN) -m pytest -q -n $(JOBS) -m "slow or not slow" tests/device/test_mlir.py

browser: $(VENV)/.browser-$(WHEELS)
	@$(RUN) -m pytest -q -rs -m browser tests/experiments/test_explore_browser.py

tutorials: $(VENV)/.tutorials-$(WHEELS)
	@$(RUN) .ci/tutorials.py

docs: $(VENV)/.docs-$(WHEELS)
	@$(RUN) .ci/docs.py

lint: $(VENV)/.lint-$(WHEELS)
	@$(RUN) -m ruff check $(SOURCES)
	@$(RUN) -m ruff format --check $(SOURCES)
	@$(RUN) -m mypy
	@$(RUN) -m mypy .ci/user_calls.py
	@$(RUN) .ci/check_docstrings.py
	@$(RUN) .ci/check_subjects.py

# The first run compiles the kernels in parallel. The other runs find the kernels on disk. Memcheck
# does not report failing driver calls, because cuda.core makes one when it opens a memory pool.
SANITIZED := -m pytest -q -m gpu -k "layouts or packed or all_options" tests/kernels/test_calls.py

sanitize: $(VENV)/.dev-$(WHEELS)
	@$(RUN) $(SANITIZED) -n $(JOBS)
	@for tool in "memcheck --report-api-errors no" racecheck; do \
		compute-sanitizer --tool $$tool --error-exitcode 1 $(RUN) $(SANITIZED) -p no:xdist || exit 1; \
	done

ptx: $(VENV)/.dev-$(WHEELS)
	@$(RUN) tests/compare_ptx.py $(or $(BASE),$(error name a revision: make ptx BASE=HEAD))

clean:
	rm -rf $(VENV) build dist *.egg-info figures/quick figures/filtered figures/partial .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(wildcard $(SOURCES)) -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	"fa_numba needs Python 3.11 or newer, but %s is %d.%d; choose one: make PYTHON=/path/to/python3" \
	% (sys.executable, *sys.version_info[:2]))'
	$(PYTHON) -m venv --without-pip $(VENV)

# After an installation, write the bytecode on all cores. UNUSED lists folders of modules that are
# seldom imported, and are left out.
SCIPY := stats|optimize|sparse|signal|integrate|interpolate|io|spatial|ndimage|cluster|fft
UNUSED := tests?|pip|setuptools|pkg_resources|fontTools|lexers|distutils|scipy/($(SCIPY))
define install
	$(PYTHON) .ci/install.py $(VENV) $(WHEELS),$(1)
	@$(RUN) -m compileall -q -j 0 -x '/($(UNUSED))/' $(VENV)/lib fa_numba experiments >/dev/null || true
	@touch $@
endef

$(VENV)/.run-$(WHEELS): setup.cfg pyproject.toml | $(VENV)/bin/python
	$(call install,experiments)

$(VENV)/.dev-$(WHEELS): setup.cfg pyproject.toml | $(VENV)/bin/python
	$(call install,experiments$(,)test)
	@touch $(VENV)/.run-$(WHEELS)

$(VENV)/.torch-$(WHEELS): setup.cfg pyproject.toml | $(VENV)/bin/python
	$(call install,experiments$(,)test$(,)test-torch)
	@touch $(VENV)/.run-$(WHEELS) $(VENV)/.dev-$(WHEELS)

$(VENV)/.mlir-$(WHEELS): setup.cfg pyproject.toml | $(VENV)/bin/python
	$(call install,experiments$(,)test$(,)mlir)
	@touch $(VENV)/.run-$(WHEELS) $(VENV)/.dev-$(WHEELS)

$(VENV)/.browser-$(WHEELS): setup.cfg pyproject.toml | $(VENV)/bin/python
	$(call install,experiments$(,)test$(,)browser)
	@touch $(VENV)/.run-$(WHEELS) $(VENV)/.dev-$(WHEELS)

$(VENV)/.tutorials-$(WHEELS): setup.cfg pyproject.toml | $(VENV)/bin/python
	$(call install,experiments$(,)tutorials)
	@touch $(VENV)/.run-$(WHEELS)

$(VENV)/.docs-$(WHEELS): setup.cfg pyproject.toml | $(VENV)/bin/python
	$(call install,experiments$(,)docs)
	@touch $(VENV)/.run-$(WHEELS)

$(VENV)/.lint-$(WHEELS): setup.cfg pyproject.toml | $(VENV)/bin/python
	$(call install,experiments$(,)test$(,)lint)
	@touch $(VENV)/.run-$(WHEELS) $(VENV)/.dev-$(WHEELS)
