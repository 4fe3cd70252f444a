# make demo    the main job in two minutes          make test    every check and test that fits 15 minutes
# make demo-online    training on a stream, publishing and serving, in a minute
# They set up .venv by themselves, once. Another Python, without any set-up: make build-inplace PYTHON=python3
VENV_PYTHON := .venv/bin/python
PYTHON = $(VENV_PYTHON)
BUILD = build
JOBS := $(shell nproc)
# More workers than cores: tests wait for disks, ranks and timeouts. An idle worker takes tests of another.
WORKERS := $(shell echo $$(($(JOBS) + ($(JOBS) + 1) / 2)))
PYTEST = $(PYTHON) -m pytest -n $(WORKERS) --dist worksteal
TEST_PY = $(PYTEST) -m "not faults and not long"
# Evaluated when a recipe runs, after setup.
SCRIPTS = $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
CPP_TESTS = $(BUILD)/inplace/thermocline_tests

GENERATOR := $(if $(shell command -v ninja),-G Ninja)
CPP_FILES = $(wildcard csrc/*/*.cc csrc/*/*.h)
PY_FILES = $(wildcard src tests tools benchmarks baselines examples experiments)
comma := ,

CLANG = clang++
FUZZ_SECONDS = 300
FUZZ_PARSE_SOURCES = $(filter-out %_test.cc,$(wildcard csrc/data/parse*.cc)) csrc/data/columns.cc csrc/data/parse_fuzz_test.cc
FUZZ_STORE_SOURCES = $(filter-out %_test.cc,$(wildcard csrc/ssd/*.cc csrc/util/*.cc)) csrc/testing/mem_fs.cc \
  csrc/ssd/files_fuzz_test.cc

.PHONY: cpp-tests asan-tests tsan-tests asan-python-tests tsan-python-tests demo demo-online reproduce test build-inplace lint format test-cpp test-py test-faults test-long test-sanitize \
  test-tsan test-asan test-long-part soak programs fuzz fuzz-clang fuzz-parse fuzz-store bench clean commit-file iproute2 redis-server setup browser docs notebooks \
  wheels wheel-trial

demo: build-inplace
	$(PYTHON) examples/demo.py

demo-online: build-inplace
	$(PYTHON) examples/demo_online.py $(ARGS)

# The paper's experiments, full size; make reproduce ARGS=--quick takes minutes. Results: build/experiments.
reproduce: build-inplace
	$(PYTHON) -m experiments $(ARGS)

# The site of docs/, into build/site; a warning is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --site-dir $(BUILD)/site

# Runs docs/notebooks and stores what they print.
notebooks: build-inplace
	$(PYTHON) tools/notebooks.py

# The C++ tests need no Python: they are built while packages are installed. Lint and C++ tests run beside the build of
# the module, and print when they end. The Python tests start when all of this has succeeded.
test:
	@$(MAKE) -j 3 --no-print-directory setup cpp-tests programs
	@$(MAKE) -j 3 --no-print-directory --output-sync=target lint test-cpp build-inplace
	$(TEST_PY)

# Only the default Python is ours to install into; any other is taken as it is.
setup:
ifeq ($(PYTHON),$(VENV_PYTHON))
	@python3 -c 'import tomllib' 2> /dev/null || { echo "Thermocline needs Python 3.11 or newer as python3"; exit 1; }
	@python3 tools/venv.py
endif

# For the tests of the live page and of the report; where it cannot be installed, they are skipped and say so.
browser: | redis-server
ifeq ($(PYTHON),$(VENV_PYTHON))
	@python3 tools/browser.py
endif

# Where ccache is installed, objects of other checkouts are used again.
CCACHE := $(if $(shell command -v ccache),CMAKE_CXX_COMPILER_LAUNCHER=ccache CCACHE_BASEDIR="$(CURDIR)" CCACHE_NOHASHDIR=1)

# $(call build,TARGET,OPTIONS): the module or the tests. They share the objects of the library, which take most of the
# time. The lock: two builds must not run in one folder.
build = @mkdir -p $(BUILD)/inplace && flock $(BUILD)/inplace/.lock sh -c '$(CCACHE) cmake -S . -B $(BUILD)/inplace \
  $(GENERATOR) -DTHERMOCLINE_TESTS=ON $(2) > /dev/null && $(CCACHE) cmake --build $(BUILD)/inplace -j $(JOBS) --target $(1)'

build-inplace: setup
	$(call build,_core,-DTHERMOCLINE_BIND=ON \
	  -DPython_EXECUTABLE="$$($(PYTHON) -c "import sys; print(sys.executable)")")

lint: setup
	$(PYTHON) -m ruff check $(PY_FILES)
	$(PYTHON) -m ruff format --check $(PY_FILES)
	$(PYTHON) -m mypy
	PYTHONPATH=src:. $(SCRIPTS)/lint-imports --no-logo --no-cache
	$(SCRIPTS)/clang-format --dry-run -Werror $(CPP_FILES)

format: setup
	$(PYTHON) -m ruff check --fix $(PY_FILES)
	$(PYTHON) -m ruff format $(PY_FILES)
	$(SCRIPTS)/clang-format -i $(CPP_FILES)

# $(call configure_cpp,folder,options): library and tests, without Python.
configure_cpp = @cmake -S . -B $(1) $(GENERATOR) -DTHERMOCLINE_BIND=OFF -DTHERMOCLINE_TESTS=ON $(2) > /dev/null \
  && cmake --build $(1) -j $(JOBS)

# Without the module, unless this folder already builds it: a changed option would discard its objects.
cpp-tests: $(if $(wildcard $(BUILD)/inplace/CMakeCache.txt),setup)
	$(call build,thermocline_tests,$(if $(wildcard $(BUILD)/inplace/CMakeCache.txt),,-DTHERMOCLINE_BIND=OFF))

test-cpp: cpp-tests
	$(CPP_TESTS) --skip Faults

# $(call install_debian,COMMAND,PACKAGE,WHAT): installs a package of the system unless its command is there.
install_debian = @command -v $(1) > /dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && \
	  { timeout 120 apt-get install -qq -y $(2) || { timeout 120 apt-get update -qq && \
	  timeout 120 apt-get install -qq -y $(2); }; } > /dev/null 2>&1; } || \
	  echo "$(2) is not here and cannot be installed: $(3) will be skipped"

# For tests of several machines, which are network namespaces. Without it they are skipped, and say so.
iproute2:
	$(call install_debian,tc,iproute2,tests of several machines)

redis-server: | iproute2
	$(call install_debian,redis-server,redis-server,tests of the Redis writer)

# Programs of the system that tests use, one after another: apt-get runs once at a time.
programs: iproute2 redis-server browser

test-py: build-inplace programs
	$(TEST_PY)

test-faults: build-inplace cpp-tests iproute2
	$(CPP_TESTS) Faults
	$(PYTEST) -m faults
	$(PYTHON) tests/faults/mutants.py
	$(PYTHON) tests/faults/mutants_python.py

test-long: build-inplace cpp-tests
	THERMOCLINE_LONG=1 $(CPP_TESTS)
	THERMOCLINE_LONG=1 $(PYTEST) -m "faults or long" --timeout 0

# A part of test-long, test-sanitize and the planted bugs of at most 55 minutes; the same command continues. KINDS: see
# tests/faults/long_run.py; cpp, asan, tsan, asan-python and tsan-python build what they need. Results, which git tracks:
# benchmarks/results/long-run.jsonl.
KINDS = cpp py mutants mutants-python
SHARD = 1/1
test-long-part: build-inplace $(patsubst %,%-tests,$(filter cpp asan tsan asan-python tsan-python,$(KINDS)))
	$(PYTHON) tests/faults/long_run.py $(KINDS) --shard $(SHARD) --build $(BUILD) $(ARGS)

# Hours of training with faults, compared with uninterrupted runs; continues an unfinished soak. Report: build/soak, and
# with ARGS="--keep benchmarks/results" a copy that git tracks.
HOURS = 2
soak: build-inplace
	PYTHONPATH=src $(PYTHON) tests/soak/main.py --hours $(HOURS) --folder $(BUILD)/soak $(ARGS)

asan-tests:
	$(call configure_cpp,$(BUILD)/asan,-DTHERMOCLINE_SANITIZE=address$(comma)undefined)

tsan-tests:
	$(call configure_cpp,$(BUILD)/tsan,-DTHERMOCLINE_SANITIZE=thread)

# TSan of GCC 12 aborts under high address-space randomisation: setarch turns that off.
test-sanitize: asan-tests tsan-tests
	UBSAN_OPTIONS=print_stacktrace=1 $(BUILD)/asan/thermocline_tests
	setarch -R $(BUILD)/tsan/thermocline_tests

# $(call sanitized_module,folder,kind): the module, built with a sanitizer.
sanitized_module = @cmake -S . -B $(1) $(GENERATOR) -DTHERMOCLINE_SANITIZE=$(2) -DTHERMOCLINE_INPLACE=OFF \
  -DPython_EXECUTABLE="$$($(PYTHON) -c 'import sys; print(sys.executable)')" > /dev/null \
  && cmake --build $(1) -j $(JOBS) --target _core

tsan-python-tests: setup
	$(call sanitized_module,$(BUILD)/tsan-python,thread)

asan-python-tests: setup
	$(call sanitized_module,$(BUILD)/asan-python,address)

# Python tests on such a module; ARGS: other tests.
test-tsan: tsan-python-tests
	$(PYTHON) tests/faults/sanitized_python.py thread $(BUILD)/tsan-python/_core*.so $(ARGS)

test-asan: asan-python-tests
	$(PYTHON) tests/faults/sanitized_python.py address $(BUILD)/asan-python/_core*.so $(ARGS)

# fuzz-parse: the parsers; fuzz-store: every file of a store. Inputs that fail are written to $(BUILD)/fuzz; they belong
# into the corpus.
FUZZ_FLAGS = -std=c++20 -O1 -g -Wall -Wextra -Icsrc -DTHERMOCLINE_LIBFUZZER -fsanitize=fuzzer,address,undefined \
  -fno-sanitize-recover=all
fuzz: fuzz-parse fuzz-store

fuzz-clang:
	@command -v $(CLANG) > /dev/null || { echo "make fuzz needs libFuzzer, which comes with clang (Debian: apt-get install \
	  clang); $(CLANG) is not here. Without it, make test-cpp runs the corpus and seeded mutations of it."; exit 1; }

$(BUILD)/fuzz/%.o: csrc/%.cc $(wildcard csrc/*/*.h)
	@mkdir -p $(@D)
	$(CLANG) $(FUZZ_FLAGS) -c $< -o $@

fuzz-parse: fuzz-clang $(FUZZ_PARSE_SOURCES:csrc/%.cc=$(BUILD)/fuzz/%.o)
	@mkdir -p $(BUILD)/fuzz/found-parse
	$(CLANG) $(FUZZ_FLAGS) $(filter %.o,$^) -o $(BUILD)/fuzz/fuzz_parse
	$(BUILD)/fuzz/fuzz_parse -max_total_time=$(FUZZ_SECONDS) -max_len=2000 -artifact_prefix=$(BUILD)/fuzz/ \
	  $(BUILD)/fuzz/found-parse tests/data/corpus

RUN_FUZZ_STORE = $(BUILD)/fuzz/fuzz_store -max_total_time=$(FUZZ_SECONDS) -max_len=66 -len_control=0 \
  -malloc_limit_mb=256 -artifact_prefix=$(BUILD)/fuzz/ $(BUILD)/fuzz/found-store tests/tiers/store_corpus
fuzz-store: fuzz-clang $(FUZZ_STORE_SOURCES:csrc/%.cc=$(BUILD)/fuzz/%.o)
	@mkdir -p $(BUILD)/fuzz/found-store
	$(CLANG) $(FUZZ_FLAGS) $(filter %.o,$^) -pthread -o $(BUILD)/fuzz/fuzz_store
	THERMOCLINE_FUZZ_DECODE=1 $(RUN_FUZZ_STORE)
	$(RUN_FUZZ_STORE)

bench: build-inplace
	for file in $(wildcard benchmarks/ssd.py benchmarks/mem.py benchmarks/read.py); do $(PYTHON) $$file --quick || exit 1; done

# sdist and wheels in dist/, tested in new environments; minutes, and downloads of build tools.
wheels:
	python3 tools/wheels.py $(ARGS)

# The wheels of dist/ as a new user uses them, with torch: README, ports of examples/, an own CSV file; minutes.
wheel-trial:
	python3 tools/wheel_trial.py $(ARGS)

# For a machine without this repository: benchmarks record this commit. Git ignores benchmarks/COMMIT: copy it, too.
commit-file: setup
	@$(PYTHON) benchmarks/common.py

clean:
	rm -rf $(BUILD) .venv .venv.lock src/thermocline/core/_core*.so
