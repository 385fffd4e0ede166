# The commands that users and contributors start from. Each prints what it does.
BIN := target/x86_64-unknown-linux-gnu/release
DEMO ?=
# What `make build` builds. With `--bins --tests --examples` it builds what `make test` builds, so
# neither builds again what the other has built.
BUILD ?= --bins
# rustup's programs are found without its line in ~/.profile.
export PATH := $(or $(CARGO_HOME),$(HOME)/.cargo)/bin:$(PATH)
# Scenarios of dayfly-bench. Without a choice: those that take minutes rather than hours.
BENCHES := birth first chain scale death fork jobs trace faults dns linux numa
BENCH ?= $(BENCHES)
OPTIONS ?=
# Tests of make long, by name.
LONG ?= a_daemon_killed_at_every_step a_foreign_client a_silent_machine a_thousand_clients \
	again:: balloon:: docker_of_debian_runs egress:: \
	kernels_with_four_levels lazy:: liar:: modules_load_in mounts:: of_qemu tour:: \
	twenty_debian twenty_vms_on_a_full_disk volumes:: whatever_runs_beside zoo::

# Fuzzing: seconds of CPU time for each target, one target alone, targets at once (docs/fuzzing.md).
SECONDS ?= 60
TARGET ?=
JOBS ?= 1
FUZZ := target/fuzz-build/x86_64-unknown-linux-gnu/release/dayfly-fuzz
# The coverage that libFuzzer reads.
FUZZ_FLAGS := --cfg fuzzing -Cdebug-assertions -Coverflow-checks -Cpasses=sancov-module \
	-Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
	-Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares

.PHONY: help setup build install uninstall demo test long bench fuzz fuzz-build fuzz-planted \
	fuzz-corpus lint clean

help:
	@echo "make demo    build, bake a Debian machine, start 40 copies of it, show the figures"
	@echo "make install programs, manual pages, completions, systemd units (PREFIX=/usr/local);"
	@echo "             as root, after make build; make uninstall removes them"
	@echo "make test    every test, and make lint: unit, microguest on /dev/kvm, stock kernels"
	@echo "             natively or in the machine"
	@echo "make long    tests of minutes: the daemon killed at every step, 1,000 clients that go"
	@echo "             away, full disks, README's tour, schemathesis (PyPI), what make demo needs"
	@echo "             (root, Debian's mirror); over an hour on two cores (LONG=NAME for one of"
	@echo "             the tests)"
	@echo "make bench   every short benchmark: dayfly-bench $(BENCHES)"
	@echo "             BENCH='death fork' for some, OPTIONS='--full' if each has it; also"
	@echo "             store: two hours under emulation; root, and Debian's mirror the first time"
	@echo "             (OPTIONS=--resume goes on, OPTIONS='--images 2 --workloads copy' is short)"
	@echo "             restore, prefetch: likewise, an hour and a half"
	@echo "             io: disk and network against QEMU's; root, and the mirror the first time"
	@echo "             soak: 10,000 births and deaths with kills; fails if anything is left"
	@echo "             dayfly-bench SCENARIO --help shows the options of each"
	@echo "make fuzz    each target with libFuzzer, SECONDS=60 each; TARGET=NAME for one of them"
	@echo "             fuzz-planted: whether planted faults are found; fuzz-corpus: small corpora"
	@echo "make lint    rustfmt, clippy, cargo-deny"
	@echo "make setup   install what is missing from Debian's packages"

# `make demo` needs more of its user than a build does.
setup:
	@scripts/setup $(filter demo,$(MAKECMDGOALS))

build: setup
	@echo "build: cargo build --release (about six minutes on two cores the first time)"
	@cargo build --release --workspace $(BUILD)

# Not built here, because that belongs to the user who builds, not to root.
install:
	@scripts/install

uninstall:
	@scripts/install remove

demo: build
	@$(BIN)/dayfly-demo $(DEMO)

test: setup
	@scripts/test

LONG_TEST := cargo test --release --workspace --no-fail-fast --lib --test kills --test machine \
	--test mount --test guest_memory --test e2e -- --ignored

# These tests are ignored by `make test`. One command builds programs and tests, as there. A name
# that no test has is an error, because libtest passes without any test.
long: setup
	@cargo build --release --workspace --bins --tests --examples
	@tests=$$($(LONG_TEST) --list) || exit; \
	tests=$$(printf '%s\n' "$$tests" | sed -n 's/: test$$//p'); \
	for name in $(LONG); do \
		printf '%s\n' "$$tests" | grep -qF -- "$$name" || \
			{ echo "make long: no ignored test is named $$name" >&2; exit 1; }; \
	done
	scripts/schemathesis
	scripts/prerequisites
	$(LONG_TEST) --nocapture --test-threads=1 $(LONG)

bench: build
	@set -e; for scenario in $(BENCH); do $(BIN)/dayfly-bench $$scenario $(OPTIONS); done

# A separate target folder, because all crates are built with other flags.
fuzz-build:
	@CARGO_TARGET_DIR=target/fuzz-build RUSTFLAGS="$(FUZZ_FLAGS)" \
		cargo build --release -p dayfly-fuzz --features libfuzzer --bin dayfly-fuzz

FUZZ_RUN = $(FUZZ) $(1) --seconds $(SECONDS) --jobs $(JOBS) $(if $(TARGET),--target $(TARGET))

fuzz: fuzz-build
	@$(call FUZZ_RUN,run)

fuzz-planted: fuzz-build
	@$(call FUZZ_RUN,planted)

fuzz-corpus: fuzz-build
	@$(call FUZZ_RUN,minimise)

lint:
	cargo fmt --all --check
	cargo clippy --release --workspace --all-targets -- -D warnings
	scripts/deny

clean:
	cargo clean
