# The commands that users and contributors start from. Each prints what it does.
BIN := target/x86_64-unknown-linux-gnu/release
DEMO ?=
# Scenarios of dayfly-bench. Without a choice: those that take minutes rather than hours.
BENCHES := birth chain scale death fork jobs trace faults dns linux numa
BENCH ?= $(BENCHES)
OPTIONS ?=
# Tests of make long, by name.
LONG ?= a_daemon_killed_at_every_step a_thousand_clients

.PHONY: help setup build demo test long bench lint clean

help:
	@echo "make demo    build, bake a Debian machine, start 40 copies of it, show the figures"
	@echo "make test    every test: unit, microguest on bare /dev/kvm, and stock kernels natively"
	@echo "             or in the machine"
	@echo "make long    what make test runs a part of: the daemon killed at every step, and 1,000"
	@echo "             clients that go away; half an hour on two cores (LONG=NAME for one of them)"
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

# The end-to-end tests mostly wait for the machine's guests and take as long as all other tests, so
# both run at once. The other tests are all targets whose names do not begin with e2; there are no
# documentation tests. Every cargo command covers the whole workspace, and one command builds
# programs and tests, because a different set of features would build the crates again.
test: setup
	@echo "test: building programs and tests (about ten minutes the first time)"
	@cargo build --release --workspace --bins --tests --examples
	@echo "test: stock kernels end to end, natively or in the machine; at the same time unit and"
	@echo "test: property tests, and the microguest on /dev/kvm (shown afterwards)"
	@mkdir -p target/test; \
	cargo test --release --workspace --no-fail-fast --lib --bins --test '[!e]*' --test 'e[!2]*' \
		>target/test/units.log 2>&1 & units=$$!; \
	trap 'kill $$units' INT TERM; \
	cargo test --release --workspace --test e2e; status=$$?; \
	wait $$units || status=$$?; cat target/test/units.log; \
	for home in target/e2e/home target/e2e/second/home; do \
		[ ! -e $$home ] || DAYFLY_HOME=$$home $(BIN)/dayfly machine stop; \
	done; \
	[ $$status = 0 ] || awk '/^failures:/ { on = 1 } /^test result:/ { on = 0 } \
		on && !/^ +([0-9]+: |at )/' target/test/units.log; \
	exit $$status

# These tests are ignored by `make test`. One command builds programs and tests, as there.
long: setup
	@cargo build --release --workspace --bins --tests --examples
	cargo test --release --workspace --lib --test kills -- --ignored --nocapture --test-threads 1 \
		$(LONG)

bench: build
	@set -e; for scenario in $(BENCH); do $(BIN)/dayfly-bench $$scenario $(OPTIONS); done

lint:
	cargo fmt --all --check
	cargo clippy --release --workspace --all-targets -- -D warnings
	@cargo deny --version >/dev/null 2>&1 || { \
		echo "lint: building cargo-deny (once)"; \
		cargo install --locked --target-dir target/cargo-deny cargo-deny; \
	}
	cargo deny --offline check licenses bans sources

clean:
	cargo clean
