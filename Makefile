# The commands that users and contributors start from. Each prints what it does.
BIN := target/x86_64-unknown-linux-gnu/release
DEMO ?=
# Scenarios of dayfly-bench. Without a choice: those that take minutes rather than hours.
BENCHES := birth chain scale death fork jobs trace faults dns linux numa
BENCH ?= $(BENCHES)
OPTIONS ?=
# Tests of make long, by name.
LONG ?= a_daemon_killed_at_every_step a_thousand_clients a_silent_machine of_qemu lazy:: \
	liar:: tour:: whatever_runs_beside twenty_vms_on_a_full_disk twenty_debian

.PHONY: help setup build demo test long bench lint clean

help:
	@echo "make demo    build, bake a Debian machine, start 40 copies of it, show the figures"
	@echo "make test    every test, and rustfmt: unit, microguest on /dev/kvm, stock kernels"
	@echo "             natively or in the machine"
	@echo "make long    tests of minutes: the daemon killed at every step, 1,000 clients that go"
	@echo "             away, full disks, README's tour; over an hour on two cores (LONG=NAME for"
	@echo "             one of them)"
	@echo "make bench   every short benchmark: dayfly-bench $(BENCHES)"
	@echo "             BENCH='death fork' for some, OPTIONS='--full' if each has it; also"
	@echo "             store: two hours under emulation; root, and Debian's mirror the first time"
	@echo "             (OPTIONS=--resume goes on, OPTIONS='--images 2 --workloads copy' is short)"
	@echo "             restore, prefetch: likewise, an hour and a half"
	@echo "             soak: 10,000 births and deaths with kills; fails if anything is left"
	@echo "             dayfly-bench SCENARIO --help shows the options of each"
	@echo "make lint    rustfmt, clippy, cargo-deny"
	@echo "make setup   install what is missing from Debian's packages"

setup:
	@scripts/setup

build: setup
	@echo "build: cargo build --release (about two minutes the first time)"
	@cargo build --release --workspace --bins

demo: build
	@$(BIN)/dayfly-demo $(DEMO)

test: setup
	@scripts/test

# These tests are ignored by `make test`. One command builds programs and tests, as there.
long: setup
	@cargo build --release --workspace --bins --tests --examples
	cargo test --release --workspace --no-fail-fast --lib --test kills --test machine --test e2e \
		-- --ignored --nocapture --test-threads=1 $(LONG)

bench: build
	@set -e; for scenario in $(BENCH); do $(BIN)/dayfly-bench $$scenario $(OPTIONS); done

lint:
	cargo fmt --all --check
	cargo clippy --release --workspace --all-targets -- -D warnings
	scripts/deny

clean:
	cargo clean
