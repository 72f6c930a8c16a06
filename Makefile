# Two commands: `make demo` and `make test`. Each sets up what it needs from a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-times test-slow test-perturbed test-avx2 test-portable compiled test-compiled cover surface lint measures format bench bench-all peers lock clean dist map site

demo: $(STAMP)
	$(BIN)/lockstep demo $(if $(KEEP),--keep)

# Two processes; tests of one file stay together, since they share servers, in the order of tests/conftest.py (not by
# the number of their tests). A process that dies ends the run: xdist would start another and may wait for ever for the
# tests that it lost.
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test: $(STAMP)
	$(BIN)/python -m pytest $(WORKERS)

# The default suite, and which of its files take longer than one may; on quiet cores.
test-times: $(STAMP)
	$(BIN)/python -m pytest $(WORKERS) --junitxml=$(VENV)/report.xml
	$(BIN)/python -m tools.slow_tests $(VENV)/report.xml

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m "slow or not slow"

# The default suite as other machines would have it: with an embedded model of other weights, which draws other tokens
# (SEED=n is another one), and on the kernels of processors with less.
test-perturbed: $(STAMP)
	$(BIN)/python -m tools.perturbed --seed $(or $(SEED),0) $(WORKERS)

test-avx2 test-portable: test-%: $(STAMP)
	LOCKSTEP_ISA=$* $(BIN)/python -m pytest $(WORKERS)

# A copy of the package with the compiled parts, away from the sources: PYTHONPATH=build/compiled runs it.
compiled: $(STAMP)
	$(BIN)/python hatch_build.py build/compiled

# The core and the replays as a wheel has them. The same tests as above, two minutes with the compilation: by hand.
test-compiled: compiled
	PYTHONPATH=build/compiled $(BIN)/python -m pytest tests/core tests/replay $(WORKERS)

# Every branch of the core; fails below 100 %.
cover: $(STAMP)
	$(BIN)/python -m pytest tests/core --cov=lockstep.core --cov-branch --cov-fail-under=100 -q

# What users see, as texts in tests/surface: written again after a change that is meant; read the difference.
surface: $(STAMP)
	LOCKSTEP_WRITE_SURFACE=1 $(BIN)/python -m pytest tests/surface -q

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tools.measures

# The measures of the codebase, with what each verb imports and the path of a chat request through the code.
measures: $(STAMP)
	$(BIN)/python -m tools.measures --verbs --trace

# The map of files in ARCHITECTURE.md, from the first sentences of their docstrings.
map: $(STAMP)
	$(BIN)/python -m tools.measures --map

# The site of the documents, in build/site; a warning ends it.
site: $(STAMP)
	$(BIN)/python -m tools.site

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A race against llama.cpp and OpenVINO GenAI on random weights of a real shape, at most twenty minutes; PEER_PYTHON=... is a
# Python that has llama-cpp-python and openvino-genai, PEER_FLAGS=... are further flags of `lockstep bench peers`.
PEER_MODEL := $(VENV)/smollm2-135m-q8_0.gguf
peers: $(STAMP)
	test -e $(PEER_MODEL) || $(BIN)/python -m tools.random_models gguf smollm2-135m Q8_0 $(PEER_MODEL)
	$(BIN)/lockstep bench peers $(PEER_MODEL) --peer-python $(or $(PEER_PYTHON),$(BIN)/python) \
		--result-filename $(VENV)/peers.json $(PEER_FLAGS)

# The short table, under three minutes, which another day's can be compared with: lockstep bench compare A B.
bench: $(STAMP)
	$(BIN)/python -m benchmarks.short $(or $(RESULT),$(VENV)/bench-$(shell date +%Y%m%d-%H%M%S).json)

bench-all: $(STAMP)
	$(BIN)/python -m benchmarks.scheduler
	$(BIN)/python -m benchmarks.sampling
	$(BIN)/python -m benchmarks.grammar
	$(BIN)/python -m benchmarks.engine
	$(BIN)/python -m benchmarks.worker
	$(BIN)/python -m benchmarks.turns
	$(BIN)/python -m benchmarks.recorder
	$(BIN)/python -m benchmarks.client
	$(BIN)/python -m benchmarks.streaming
	$(BIN)/python -m benchmarks.faults
	$(BIN)/python -m benchmarks.scaling pocket:// --max-prompt-tokens 2048 --prompts 32 200 1000

# What a release uploads, but for the wheels of other Pythons: sources, and a wheel of this machine.
dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist

# Plain requirement files with hashes and no download addresses. Extras stay in the names: without them pip picks the newest
# release of a package that another one requires with an extra, and refuses it because its hash is not listed.
lock: $(STAMP)
	$(BIN)/python -m pip install -q uv
	$(BIN)/uv pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes --no-strip-extras -q \
		--custom-compile-command "make lock" -o requirements/runtime.txt
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes --no-strip-extras -q \
		--custom-compile-command "make lock" -o requirements/dev.txt
	$(BIN)/uv pip compile --group release --universal --python-version 3.11 --generate-hashes --no-strip-extras -q \
		--custom-compile-command "make lock" -o requirements/release.txt
	$(BIN)/uv pip compile --group compiler --universal --python-version 3.11 --generate-hashes -q \
		--custom-compile-command "make lock" -o requirements/compiler.txt

NATIVE := src/lockstep/executors/native/cpp
$(STAMP): requirements/dev.txt requirements/compiler.txt pyproject.toml hatch_build.py $(wildcard $(NATIVE)/*.?pp)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/dev.txt
	test -n "$$CXX" || command -v g++ || command -v c++ || command -v clang++ || \
		$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/compiler.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
