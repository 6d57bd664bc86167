# The commands of this repository; CI runs only these. `make` alone lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

CARGO ?= cargo
# Passed on to the program that a target runs, e.g. make run ARGS="--set engine.kvCache.size=1Gi".
ARGS ?=
# Where `make run` finds the programs that `make build` has built.
BIN ?= target/release
export MODEL PORT REPLICAS

# The tests that `make test` leaves out, which need more than it may ask for: linted all the same.
EXTRA_TESTS := tests/browser,tests/hostile,tests/node,tests/schema
CARGO_DENY_VERSION := 0.20.2
MDBOOK_VERSION := 0.5.4
SCRIPTS := .ci/run .ci/packages deploy/stage $(filter-out %.txt %.py,$(wildcard scripts/*)) $(wildcard tests/*/*.sh tests/*/*/*.sh)

.PHONY: help
help: ## List the targets.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | expand -t 16

.PHONY: fetch
fetch: ## Download the OpenVINO runtime and the sample model into .deps/, once, checked by sha256.
	@scripts/fetch

.PHONY: tools
tools: ## Build the pinned Kubernetes programs of the tests into .deps/tools/, once (minutes, needs Go).
	@scripts/tools node

.PHONY: build
build: fetch ## Build the server, the router and the operator, optimised, into target/release/.
	@scripts/need cargo g++
	@$(CARGO) build --release --locked --package server --package router --package operator

.PHONY: run
run: build ## Serve the sample model, as deploy/samples/smollm2.yaml says, on 127.0.0.1:8000. PORT, MODEL, REPLICAS and ARGS override.
	@name=$${MODEL%/}; name=$${name##*/}; name=$${name%.gguf}; \
	exec $(BIN)/operator local -f deploy/samples/smollm2.yaml --cache .deps/cache --port "$${PORT:-8000}" \
	  --model "$${MODEL:-.deps/models/SmolLM2-135M-Instruct.Q4_1.gguf}" $${name:+--set "model.name='$$name'"} \
	  $${REPLICAS:+--replicas "$$REPLICAS"} $(ARGS)

.PHONY: test
test: fetch ## Run all tests, those with the real model and the official clients included.
	@scripts/need cargo g++
	@scripts/clients
	@scripts/tools control-plane charts
	@$(CARGO) test --workspace --locked

.PHONY: sanitize
sanitize: fetch ## Run the native kernels under AddressSanitizer and UBSan, on every instruction set of this machine.
	@scripts/need g++
	@scripts/sanitize $(ARGS)

.PHONY: fuzz
fuzz: fetch ## Fuzz everything that strangers write, each target for SECONDS_EACH (60) seconds; TARGETS names some. Needs nightly Rust.
	@scripts/need cargo g++
	@scripts/fuzz

# By itself, since its time is fixed. It builds what `make test` builds.
.PHONY: schema
schema: fetch ## Check answers to made-up requests against /openapi.json, for SECONDS_EACH (120) from SEED (1), with schemathesis.
	@scripts/need cargo g++
	@scripts/schema
	@$(CARGO) test --workspace --locked --no-run --quiet
	@$(CARGO) test --workspace --locked --features tests/schema --test e2e_schema -- $(ARGS)

# By itself, since it needs a browser. It builds what `make test` builds: one after the other costs nothing.
.PHONY: console
console: fetch ## Test the router's console in headless Chromium; pictures of it are left under target/.
	@scripts/need cargo g++ chromium
	@$(CARGO) test --workspace --locked --no-run --quiet
	@$(CARGO) test --workspace --locked --features tests/browser --test e2e_console -- $(ARGS)

# Images hold what is shipped, unless PROFILE=dev names the programs that `make test` has built: that saves CI a second
# compilation of everything. The features are those of `make test`, so that no dependency is compiled again.
PROFILE ?= release
BUILT_release := target/release
BUILT_dev := target/debug
.PHONY: programs-release programs-dev
programs-release: build
programs-dev: fetch
	@$(CARGO) test --workspace --locked --no-run --quiet

.PHONY: e2e
e2e: programs-$(PROFILE) ## Install the chart on a real node and chat with real pods; needs root. ARGS go to the tests.
	@scripts/need cargo g++
	@scripts/clients
	@tests/cluster/images.sh $(BUILT_$(PROFILE)) server router operator
	@$(CARGO) test --workspace --locked --features tests/node --test 'node_*' --no-run
	@tests/cluster/node.sh $(CARGO) test --workspace --offline --locked --features tests/node --test 'node_*' -- \
	  --test-threads 1 $(ARGS)

# By itself, since it needs root for the memory limits. It builds what `make test` builds.
.PHONY: hostile
hostile: fetch ## Attack a real router and server, each limited to 2 GiB, while others use them; needs root. ARGS name attacks.
	@scripts/need cargo g++
	@$(CARGO) test --workspace --locked --no-run --quiet
	@$(CARGO) test --workspace --locked --features tests/hostile --test hostile -- $(ARGS)

.PHONY: lint
lint: fetch ## Check formatting, clippy, shell scripts, documentation links and dependencies; change nothing.
	@scripts/need cargo g++
	@$(CARGO) fmt --all --check
	@$(CARGO) clippy --workspace --all-targets --locked --features $(EXTRA_TESTS) -- -D warnings
	@$(MAKE) doc
	@scripts/shellcheck $(SCRIPTS)
	@if [[ -x .deps/bin/cargo-deny ]]; then $(MAKE) deny; \
	  else echo "lint: dependencies not checked: 'make deny' installs cargo-deny, later runs use it"; fi

.PHONY: fmt
fmt: ## Format the Rust code in place.
	@$(CARGO) fmt --all

# The examples need what tests need, so that dependencies have the features that clippy has checked them with: without
# them, half of the dependencies would be checked again.
.PHONY: doc
doc: fetch ## Build the API documentation; a broken link fails.
	@RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --lib --examples --features $(EXTRA_TESTS) --no-deps \
	  --locked --document-private-items

# Without optimization: mdBook is built in a third of the time, and builds the site in seconds.
.PHONY: docs
docs: ## Build the documentation site into target/docs/html and check its links; installs a pinned mdBook into .deps/ (a minute).
	@scripts/need cargo python3
	@[[ -x .deps/bin/mdbook && "$$(.deps/bin/mdbook --version)" == "mdbook v$(MDBOOK_VERSION)" ]] || \
	  $(CARGO) install --locked --force --quiet --debug --no-default-features --features search --version $(MDBOOK_VERSION) --root .deps mdbook
	@scripts/docs.py .deps/bin/mdbook

.PHONY: deny
deny: ## Check licences and sources of all dependencies; installs a pinned cargo-deny into .deps/ (minutes).
	@scripts/need cargo
	@[[ -x .deps/bin/cargo-deny ]] || $(CARGO) install --locked --version $(CARGO_DENY_VERSION) --root .deps cargo-deny
	@.deps/bin/cargo-deny --all-features --locked check bans licenses sources

# Both compare with openvino_genai in the same run, out of a Python environment of some 310 MB in .deps/.
.PHONY: engine-bench
engine-bench: fetch
	@scripts/need cargo g++ python3 venv
	@$(CARGO) build --release --locked --package server-openvino --example engine-bench
	@tests/bench/setup.sh peer

.PHONY: bench-engine
bench-engine: engine-bench ## Measure the engine beside openvino_genai's, alternating; ARGS go to the program.
	@.deps/venv-peer/bin/python tests/bench/bench_engine.py $(ARGS)

.PHONY: bench-engine-1b
bench-engine-1b: engine-bench ## The same with a model of a billion random weights; ARGS go to the program.
	@.deps/venv-peer/bin/python tests/bench/bench_engine.py --section bench-engine-1b --forms gguf --cases c1 c8 \
		--no-floor --model "$$(.deps/venv-peer/bin/python tests/bench/make_1b.py)" $(ARGS)

.PHONY: bench-http
bench-http: engine-bench build ## Measure the server over HTTP beside the engine in process; ARGS go to the program.
	@.deps/venv-peer/bin/python tests/bench/bench_http.py $(ARGS)

.PHONY: bench-llama
bench-llama: fetch build ## Measure the server beside llama.cpp's, over HTTP; builds the latter once. ARGS go to the program.
	@tests/bench/llama.sh
	@tests/bench/setup.sh peer
	@.deps/venv-peer/bin/python tests/bench/bench_llama.py $(ARGS)

.PHONY: bench-vllm
bench-vllm: fetch build ## Measure the server beside vLLM's on the CPU, over HTTP; installs the latter once (5 GB). ARGS go to the program.
	@tests/bench/setup.sh peer
	@tests/bench/setup.sh vllm
	@.deps/venv-peer/bin/python tests/bench/bench_vllm.py $(ARGS)

.PHONY: soak
soak: fetch build ## Half an hour of mixed load on one server: nothing grows, drifts or gets stuck. ARGS go to the program.
	@tests/bench/setup.sh peer
	@.deps/venv-peer/bin/python -u tests/bench/soak.py $(ARGS)

.PHONY: bench-guided
bench-guided: fetch build ## Measure guided requests beside the same without a guide; ARGS go to the program.
	@tests/bench/setup.sh peer
	@.deps/venv-peer/bin/python tests/bench/bench_guided.py $(ARGS)

.PHONY: bench-lookup
bench-lookup: fetch build ## Measure requests whose next tokens are guessed beside the same without; ARGS go to the program.
	@tests/bench/setup.sh peer
	@.deps/venv-peer/bin/python tests/bench/bench_lookup.py $(ARGS)

.PHONY: bench-adapters
bench-adapters: engine-bench ## Measure what LoRA adapters cost beside the same work without any; ARGS go to the program.
	@.deps/venv-peer/bin/python tests/bench/bench_adapters.py $(ARGS)

.PHONY: bench-draft
bench-draft: fetch build ## Measure what a draft model costs, and how often it has to be right to pay; ARGS go to the program.
	@tests/bench/setup.sh peer
	@$(CARGO) build --release --locked --package server-openvino --example draft-bench
	@.deps/venv-peer/bin/python tests/bench/bench_draft.py $(ARGS)

.PHONY: bench-spill
bench-spill: fetch build ## Measure prompts that are read back from disk beside computing them; ARGS go to the program.
	@tests/bench/setup.sh peer
	@.deps/venv-peer/bin/python tests/bench/bench_spill.py $(ARGS)

.PHONY: bench-policies
bench-policies: ## Let ways of picking a replica compete in a simulation; ARGS=--update writes the table.
	@scripts/need cargo
	@$(CARGO) run --release --locked --quiet --package router --example bench-policies -- $(ARGS)

.PHONY: bench-router
bench-router: ## Measure the router beside vllm-router and sglang-router; ARGS=--update writes the tables.
	@scripts/need cargo python3 venv
	@tests/bench/setup.sh routers
	@$(CARGO) build --release --locked --package router --bin router --example bench-router
	@target/release/examples/bench-router $(ARGS)

.PHONY: bench-operator
bench-operator: ## Create 300 resources on a real API server and state what they cost; ARGS=--update writes the table.
	@scripts/need cargo
	@scripts/tools control-plane
	@$(CARGO) build --release --locked --quiet --package operator --bin operator --example bench-operator
	@target/release/examples/bench-operator $(ARGS)

.PHONY: conformance
conformance: engine-bench build ## Compare tokens and perplexity with openvino_genai and with the dequantised model.
	@.deps/venv-peer/bin/python tests/conformance/conformance.py $(ARGS)

.PHONY: clean
clean: ## Remove what was built. What was fetched stays; `rm -r .deps` removes that too.
	@$(CARGO) clean
