# Every target sets up what it needs on a machine with Python >= 3.10, Rust and a C linker. The
# first run fetches torch and DeepSpeed into .venv (minutes). Later runs redo only what changed,
# which the stamps (.venv/.tools, .venv/.installed, target/wheels/.ARCH) record.
#   ARGS='...' is passed on: make demo ARGS='--text FILE', make test-python ARGS='-k adam'
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(abspath $(VENV))/bin
HOST := $(shell uname -m)
AARCH64 := aarch64-unknown-linux-gnu

X86_64 := x86_64-unknown-linux-gnu

RUST := Cargo.toml Cargo.lock $(shell find rust -name '*.rs')
PACKAGE := $(RUST) pyproject.toml README.md LICENSE \
  $(shell find python -name '*.py' -o -name '*.pyi' -o -name '*.json' -o -name py.typed)

.PHONY: help dev test lint lint-rust lint-python test-rust test-python test-versions \
  fingerprints shuttle asan-lib asan tsan format demo bench \
  bench-codec bench-offload wheel stubs aarch64-toolchain aarch64-test

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# The compiler takes one core for the wheel, and minutes. The other one fetches packages and lints
# meanwhile. Then Rust and Python tests run side by side, and the failures of both are seen.
test: $(VENV)/.tools ## all that CI runs
	$(MAKE) target/wheels/.$(HOST) & wheel=$$!; \
	  $(MAKE) lint-rust $(VENV)/.requirements || { kill $$wheel; exit 1; }; \
	  wait $$wheel
	$(MAKE) test-rust shuttle $(if $(filter x86_64,$(HOST)),asan-lib) & rust=$$!; \
	  python=0; $(MAKE) lint-python test-python || python=$$?; \
	  wait $$rust && exit $$python

# ---- environment -------------------------------------------------------------------------------

# The interpreter and what builds the extension. A young pip: dependency groups need 25.1.
$(VENV)/.tools: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install -q --disable-pip-version-check --group build
	touch $@

# What the package's tests and lints import beside it.
$(VENV)/.requirements: $(VENV)/.tools
	$(BIN)/python -m pip install -q --disable-pip-version-check --group lint --group test
	touch $@

# The package, in place, with all that its tests and its demo import. The extension is the wheel's:
# it is compiled once, and the tests run what ships. The Python files are the tree's.
$(VENV)/.installed: $(RUST) $(VENV)/.requirements
	$(MAKE) target/wheels/.$(HOST)
	$(BIN)/python -m pip uninstall -q --disable-pip-version-check --yes stepwell
	$(BIN)/python -m pip install -q --disable-pip-version-check --group lint --group test \
	  "$$(echo target/wheels/stepwell-*_$(HOST).whl)[demo]"
	site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'); \
	  mv $$site/stepwell/_core.abi3.so python/stepwell/_core.abi3.so; \
	  rm -r $$site/stepwell; echo $(CURDIR)/python > $$site/stepwell.pth
	touch $@

# Compiled in parts, with the same bits. What needs the extension that ships puts it back.
dev: ## the extension as of now, in place, within a minute
	test -x $(BIN)/stepwell || $(MAKE) $(VENV)/.installed
	VIRTUAL_ENV=$(abspath $(VENV)) \
	  $(BIN)/maturin develop --quiet --profile quick --locked --skip-install
	rm -f $(VENV)/.installed

# ---- checks ------------------------------------------------------------------------------------

# The library alone, and all targets with the extension and the benchmarks.
lint-rust: $(VENV)/.tools target/stubs/stepwell/_core.pyi ## rustfmt, clippy, rustdoc
	cargo fmt --check
	cargo clippy -q --locked --lib -- -D warnings
	PYO3_PYTHON=$(BIN)/python \
	  cargo clippy -q --locked --all-targets --features python,bench -- -D warnings
	PYO3_PYTHON=$(BIN)/python RUSTDOCFLAGS='-D warnings' \
	  cargo doc -q --locked --no-deps --features python

lint: lint-rust lint-python ## both

lint-python: $(VENV)/.installed target/stubs/stepwell/_core.pyi ## ruff, mypy, stubs
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	@diff -u python/stepwell/_core.pyi target/stubs/stepwell/_core.pyi \
	  || { echo 'python/stepwell/_core.pyi is stale. hint: make stubs'; exit 1; }
	$(BIN)/python -m mypy.stubtest \
	  --mypy-config-file <(printf '[mypy]\nfollow_imports = skip\n') stepwell._core

# Without the feature `python`: no libpython is linked. The library's own tests are those of
# asan-lib, where there is an address sanitizer.
test-rust: ## the Rust tests
	cargo test --locked $(if $(filter x86_64,$(HOST)),,--lib) --test '*' --bench volume
	cargo test --locked --doc

test-python: $(VENV)/.installed target/wheels/.$(HOST) ## the Python tests (ARGS='-k ...')
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# An installation from source, and the releases of DeepSpeed and torch that are supported beside
# those of `make test`. Weekly, and before a release: minutes each, and gigabytes for torch.
# ARGS='deepspeed' leaves torch out.
test-versions: $(VENV)/.installed ## the tests on older DeepSpeed and torch (ARGS='deepspeed')
	STEPWELL_TEST_SOURCE=1 $(BIN)/python -m pytest tests/test_package.py -k source_installs
	$(BIN)/python tests/versions/run.py $(ARGS)

# After a change of what a class of `deepspeed/zero/` overrides or calls.
fingerprints: $(VENV)/.installed ## digests of DeepSpeed's methods, from its sources
	mkdir -p target/deepspeed
	$(BIN)/python tests/versions/fingerprints.py

# The crew, the fork gate and the engine's queues, with the locks and threads of a model checker in
# place of the standard library's (rust/sync/): thousands of orders per test.
shuttle: ## the tests of the threads under a model checker
	cargo test -q --locked --features shuttle --lib -- ::model:: $(ARGS)

# The compiler's sanitizers, which the stable compiler has and does not offer yet. The standard
# library is not instrumented. Few cases: instrumented code is slow, and writing out a backtrace
# takes longer than tests of failures wait.
sanitize = RUSTC_BOOTSTRAP=1 RUST_BACKTRACE=0 PROPTEST_CASES=$${PROPTEST_CASES:-4} \
  RUSTFLAGS='$(RUSTFLAGS) -Zsanitizer=$(1) -Cunsafe-allow-abi-mismatch=sanitizer' \
  cargo test -q --locked --profile checked --target $(X86_64) --target-dir target/$(1)-sanitizer
ASAN_TESTS := deferred downloads generations jobs memory offload slots volume
TSAN_TESTS := deferred downloads generations jobs offload shared_threads

asan-lib: export PROPTEST_CASES ?= 256
asan-lib: ## the library's own tests under the address sanitizer
	$(call sanitize,address) --lib $(ARGS)

asan: ## those and the Rust tests of memory (minutes to compile)
	$(call sanitize,address) --lib $(addprefix --test ,$(ASAN_TESTS)) $(ARGS)

# What it cannot know of the standard library is suppressed.
tsan: export RUSTFLAGS += --cfg thread_sanitizer
tsan: export TSAN_OPTIONS ?= suppressions=$(CURDIR)/tests/tsan-suppressions.txt
tsan: ## the Rust tests of threads under the thread sanitizer (minutes to compile)
	$(call sanitize,thread) --features baseline-only \
	  --lib $(addprefix --test ,$(TSAN_TESTS)) $(ARGS)

format: $(VENV)/.tools ## rewrite the sources as `make lint` wants them
	cargo fmt
	$(BIN)/python -m pip install -q --disable-pip-version-check --group lint
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# ---- runs --------------------------------------------------------------------------------------

demo: $(VENV)/.installed ## train a small Llama on DeepSpeed, with Stepwell and with torch
	$(BIN)/stepwell demo $(ARGS)

bench: $(VENV)/.installed ## Criterion, then against DeepSpeedCPUAdam and torch, then imports
	cargo bench --locked --features bench
	$(BIN)/python benches/adam.py $(ARGS)
	$(BIN)/python benches/import_time.py

bench-codec: $(VENV)/.installed ## what moments held as bf16 or q8 change in 500 steps of training
	$(BIN)/python benches/codec.py $(ARGS)

# Without a GPU: ARGS='--size tiny --sequence-length 64'.
bench-offload: $(VENV)/.installed ## training steps with the state in host memory, against DeepSpeed
	$(BIN)/stepwell bench offload $(ARGS)

# ---- the package -------------------------------------------------------------------------------

stubs: target/stubs/stepwell/_core.pyi ## python/stepwell/_core.pyi from the Rust signatures
	cp $< python/stepwell/_core.pyi

target/stubs/stepwell/_core.pyi: $(RUST) $(VENV)/.tools
	$(BIN)/maturin generate-stubs --quiet --locked --interpreter $(BIN)/python \
	  --features stubs --out target/stubs
	touch $@

wheel: target/wheels/.$(HOST) ## manylinux wheels: this machine's, and aarch64's where Rust has it
	@if [ -n "$(aarch64_rustc)" ]; then $(MAKE) target/wheels/.aarch64; \
	else echo 'no aarch64 wheel: no Rust standard library for it.' \
	  'hint: rustup target add $(AARCH64), or make aarch64-toolchain'; fi
	@ls -l target/wheels/*.whl

# zig links against glibc 2.28 whatever this machine has. The builder's folders are kept out of
# panic messages.
target/wheels/.%: $(PACKAGE) $(VENV)/.tools
	rm -f target/wheels/stepwell-*_$*.whl
	cargo_home=$${CARGO_HOME:-$$HOME/.cargo}; PATH="$(BIN):$$PATH" \
	RUSTFLAGS="--remap-path-prefix=$$cargo_home=cargo --remap-path-prefix=$(CURDIR)=stepwell" \
	  $(BIN)/maturin build --release --strip --locked --zig --compatibility manylinux_2_28 \
	  --interpreter $(BIN)/python \
	  --target $*-unknown-linux-gnu --target-dir target/wheel-$* --out target/wheels
	touch $@

# ---- aarch64 on another machine ----------------------------------------------------------------

# The compiler that has a standard library for aarch64: rustup's, or Debian's beside it.
aarch64_rustc = $(firstword $(foreach rustc,rustc /usr/bin/rustc,$(if $(wildcard \
  $(shell $(rustc) --print target-libdir --target $(AARCH64) 2>/dev/null)/libstd-*.rlib),$(rustc))))
target/wheels/.aarch64: export RUSTC = $(aarch64_rustc)

aarch64-toolchain: ## install on Debian (root) what aarch64-test takes
	dpkg --add-architecture arm64
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	  rustc-web libstd-rust-web-dev libstd-rust-web-dev:arm64 \
	  gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user >/dev/null

# Linked statically: a dynamically linked program hangs at thread creation in this emulator. Few
# cases: it is slow. Tests of the host (its memory maps, affinity, fork, lanes) are left out: there
# the emulator would be tested.
AARCH64_TESTS := \
  $(filter-out downloads generations jobs memory offload pool volume,$(notdir \
  $(patsubst %.rs,%,$(patsubst %/main.rs,%,$(wildcard tests/*.rs tests/*/main.rs)))))
aarch64-test: export RUSTC = $(aarch64_rustc)
aarch64-test: export PROPTEST_CASES ?= 8
aarch64-test: ## the Rust tests of the arithmetic on NEON, emulated
	@[ -n "$(aarch64_rustc)" ] && command -v qemu-aarch64 >/dev/null \
	  && command -v aarch64-linux-gnu-gcc >/dev/null \
	  || { echo 'needs a Rust standard library, a linker and an emulator for aarch64.' \
	    'hint: make aarch64-toolchain'; exit 1; }
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER=qemu-aarch64 \
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTFLAGS='-C target-feature=+crt-static' \
	  cargo test --locked --target $(AARCH64) --target-dir target/aarch64 \
	  --lib $(addprefix --test ,$(AARCH64_TESTS)) $(ARGS)
