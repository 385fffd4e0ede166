# dayfly: the commands of the front door. Each says what it does while it does it.
BIN := target/x86_64-unknown-linux-gnu/release
DEMO ?=
BENCH ?=
STORE ?=

.PHONY: help setup build demo test bench lint clean

help:
	@echo "make demo    build, bake a Debian machine, start 40 copies of it, show the figures"
	@echo "make test    every test: unit, microguest on bare /dev/kvm, stock kernels natively or in the machine"
	@echo "make bench   births, scale, deep chains, deaths against a C program with nothing to spare; jobs beside idle VMs; a trace in bursts;"
	@echo "             boot against clone of a stock Linux; whose CPUs free memory, in a machine with memory nodes"
	@echo "             (BENCH=birth|scale|chain|faults|death|fork|jobs|trace|birth-linux|numa for one)"
	@echo "             BENCH=store: what snapshots take in the store, of workloads and of 28 images; needs root and Debian's mirror the first"
	@echo "             time, about two hours under emulation (STORE=--resume goes on, STORE='--images 2 --workloads copy' is short)"
	@echo "             BENCH=restore, BENCH=prefetch: what clones wait for whose memory has not arrived, with what stock guests touch; likewise, an hour and a half"
	@echo "             BENCH=soak: 10,000 births and deaths with kills from outside; fails where anything is left"
	@echo "make lint    rustfmt, clippy, cargo-deny"
	@echo "make setup   install what is missing from Debian's packages"

setup:
	@scripts/setup

build: setup
	@echo "build: cargo build --release (about two minutes the first time)"
	@cargo build --release --workspace --bins

demo: build
	@$(BIN)/dayfly-demo $(DEMO)

# The end-to-end tests mostly wait for the machine's guests, and take as long as all others: both run at once, chosen from the whole workspace (by
# themselves they would have everything built again, with fewer features). What is run beside them are all targets but those whose names begin with e2; there
# are no documentation tests. Programs and tests are built by one command: features of what only tests use would have every crate above them built twice.
test: setup
	@echo "test: building programs and tests (about ten minutes the first time)"
	@cargo build --release --workspace --bins --tests --examples
	@echo "test: stock kernels end to end, natively or in the machine; beside them unit and property tests, and the microguest on /dev/kvm (shown afterwards)"
	@mkdir -p target/test; \
	cargo test --release --workspace --no-fail-fast --lib --bins --test '[!e]*' --test 'e[!2]*' >target/test/units.log 2>&1 & units=$$!; \
	trap 'kill $$units' INT TERM; \
	cargo test --release --workspace --test e2e; status=$$?; \
	wait $$units || status=$$?; cat target/test/units.log; \
	for home in target/e2e/home target/e2e/second/home; do \
		[ ! -e $$home ] || DAYFLY_HOME=$$home $(BIN)/dayfly machine stop; \
	done; \
	[ $$status = 0 ] || awk '/^failures:/ { on = 1 } /^test result:/ { on = 0 } on && !/^ +([0-9]+: |at )/' target/test/units.log; exit $$status

# birth-linux has a program of its own: it needs stock kernels, natively or in the machine; numa has one that starts a machine with
# several memory nodes, beside what this host has of them; store, restore and prefetch have some that make machines of their own, and only
# run when asked for.
BARE := $(filter-out birth-linux numa store restore prefetch,$(BENCH))
comma := ,
empty :=
RESTORE := $(subst $(empty) $(empty),$(comma),$(strip $(filter restore prefetch,$(BENCH))))
NUMA := $(BIN)/dayfly-bench numa --out target/bench/native && $(BIN)/dayfly-bench-numa

bench: build
	@$(if $(BENCH),$(if $(BARE),$(BIN)/dayfly-bench $(BARE),:),$(BIN)/dayfly-bench)
	@$(if $(BENCH),$(if $(filter birth-linux,$(BENCH)),$(BIN)/dayfly-bench-linux,:),$(BIN)/dayfly-bench-linux)
	@$(if $(BENCH),$(if $(filter numa,$(BENCH)),$(NUMA),:),$(NUMA))
	@$(if $(filter store,$(BENCH)),$(BIN)/dayfly-bench-store $(STORE),:)
	@$(if $(RESTORE),$(BIN)/dayfly-bench-restore --benches $(RESTORE),:)

lint:
	cargo fmt --all --check
	cargo clippy --release --workspace --all-targets -- -D warnings
	@cargo deny --version >/dev/null 2>&1 || { echo "lint: building cargo-deny (once)"; cargo install --locked --target-dir target/cargo-deny cargo-deny; }
	cargo deny --offline check licenses bans sources

clean:
	cargo clean
