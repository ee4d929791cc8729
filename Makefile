# make figures   measure what this machine can measure, draw every figure, write every table
# make quick     a minute: the tests for what differs from main, and ruff; BASE=revision: from there
# make test      the tests: each kernel compiled for one architecture, a sample of the planted faults
# make test-all  every kernel for every architecture it is made for, with every option; all faults
# make test-torch  with torch, its build for CPUs: gradients, rings of processes
# make test-mlir   with numba-cuda-mlir, the other compiler: kernels that it compiles
# make browser   the page explore.html in Chromium, where there is one
# make tutorials a notebook of each tutorial, with its outputs, in build/tutorials
# make docs      the guide, the option reference and the API reference, in build/docs
# make lint      ruff, mypy, also over calls of users, docstrings by numpydoc, commit subjects
# make sanitize  compute-sanitizer over the kernels in every layout and with every option; needs a GPU
# make ptx       BASE=revision: whether every kernel has the PTX that it had there
# make clean     remove .venv and everything generated that git does not track
# Each makes .venv first when it is missing or setup.cfg has changed.

PYTHON ?= python3
JOBS ?= auto
VENV := .venv
, := ,
RUN := $(VENV)/bin/python

# CUDA wheels that fit the driver: cu12 for a 12.x driver, cu13 for a newer one or none.
ifndef WHEELS
WHEELS := $(if $(filter 12,$(shell nvidia-smi 2>/dev/null | \
	sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p')),cu12,cu13)
endif
ifeq ($(filter 1cu12 1cu13,$(words $(WHEELS))$(strip $(WHEELS))),)
$(error WHEELS must be cu12 or cu13, got "$(WHEELS)")
endif

# Two processes run the tests, and each finds on disk what the other has compiled.
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

# The first run compiles side by side; the others find the kernels on disk. Memcheck leaves out driver
# calls that fail: cuda.core makes one as it opens a memory pool.
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

# Bytecode is written here, on all cores; not of what is never or seldom imported (UNUSED).
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
