# The commands for development. CI runs its checks with the same commands. `make` without a target lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

CARGO ?= cargo
# Arguments for the program that a target runs, such as make run ARGS="--set engine.kvCache.size=1Gi".
ARGS ?=
# The directory of the programs that `make build` builds and `make run` starts.
BIN ?= target/release
export MODEL PORT REPLICAS

# Tests with additional requirements. `make test` does not run them, but `make lint` checks them.
EXTRA_TESTS := tests/browser,tests/hostile,tests/node,tests/pages,tests/schema
CARGO_DENY_VERSION := 0.20.2
MDBOOK_VERSION := 0.5.4
SCRIPTS := .ci/run .ci/packages deploy/stage $(filter-out %.txt %.py,$(wildcard scripts/*)) $(wildcard tests/*/*.sh tests/*/*/*.sh)

.PHONY: help
help: ## List the targets.
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/\1\t\2/' | expand -t 16

.PHONY: fetch
fetch: ## Download the OpenVINO runtime and the sample model into .deps/ and verify their SHA-256 checksums. Later runs do nothing unless the pinned versions have changed.
	@scripts/fetch

.PHONY: tools
tools: ## Build pinned versions of the programs that tests need, such as Kubernetes and Helm, into .deps/tools/. Requires Go. The first run takes several minutes.
	@scripts/tools node

.PHONY: build
build: fetch ## Build the server, the router and the operator into target/release/.
	@scripts/need cargo g++
	@$(CARGO) build --release --locked --package server --package router --package operator

.PHONY: run
run: build ## Serve the LLMDeployment in deploy/samples/smollm2.yaml on 127.0.0.1:8000, without Kubernetes. PORT, MODEL (a path) and REPLICAS override the defaults. ARGS is passed to ovfleet-operator local.
	@name=$${MODEL%/}; name=$${name##*/}; name=$${name%.gguf}; name=$${name%-00001-of-*}; \
	exec $(BIN)/ovfleet-operator local -f deploy/samples/smollm2.yaml --cache .deps/cache --port "$${PORT:-8000}" \
	  --model "$${MODEL:-.deps/models/SmolLM2-135M-Instruct.Q4_1.gguf}" $${name:+--set "model.name='$$name'"} \
	  $${REPLICAS:+--replicas "$$REPLICAS"} $(ARGS)

.PHONY: test
test: fetch ## Run the tests, including those that use the sample model and client libraries such as OpenAI's.
	@scripts/need cargo g++
	@scripts/clients
	@scripts/tools control-plane charts
	@$(CARGO) test --workspace --locked

.PHONY: sanitize
sanitize: fetch ## Test the native kernels with AddressSanitizer and UBSan, for every instruction set that this machine supports.
	@scripts/need g++
	@scripts/sanitize $(ARGS)

.PHONY: fuzz
fuzz: fetch ## Fuzz the parsers of untrusted input and the native operations for SECONDS_EACH (default: 60) seconds each. TARGETS selects targets. Requires nightly Rust.
	@scripts/need cargo g++
	@scripts/fuzz

# This is a separate target because it runs for a fixed time. It reuses the build of `make test`.
.PHONY: schema
schema: fetch ## Use schemathesis to check that responses to generated requests conform to /openapi.json. SECONDS_EACH (default: 120) is the duration in seconds, and SEED (default: 1) is the random seed.
	@scripts/need cargo g++
	@scripts/schema
	@$(CARGO) test --workspace --locked --no-run --quiet
	@$(CARGO) test --workspace --locked --features tests/schema --test e2e_schema -- $(ARGS)

# This is a separate target because it requires a browser. It reuses the build of `make test`.
.PHONY: console
console: fetch ## Test the router's console in headless Chromium. Screenshots are written to target/.
	@scripts/need cargo g++ chromium
	@$(CARGO) test --workspace --locked --no-run --quiet
	@$(CARGO) test --workspace --locked --features tests/browser --test e2e_console -- $(ARGS)

# The images contain the release programs or, with PROFILE=dev, the programs of `make test`, so that CI does not compile
# twice. programs-dev builds all packages, as `make test` does: with the features of fewer packages, Cargo would recompile
# dependencies.
PROFILE ?= release
BUILT_release := target/release
BUILT_dev := target/debug
.PHONY: programs-release programs-dev
programs-release: build
programs-dev: fetch
	@$(CARGO) test --workspace --locked --no-run --quiet

.PHONY: e2e
e2e: programs-$(PROFILE) ## Test the chart and the pods of LLMDeployments on a real Kubernetes node. Requires root. ARGS selects tests by name.
	@scripts/need cargo g++
	@scripts/clients
	@tests/cluster/images.sh $(BUILT_$(PROFILE)) server router operator
	@tests/cluster/run.sh $$($(CARGO) test --workspace --locked --features tests/node --test 'node_*' --no-run \
	  --message-format json-render-diagnostics | sed -n 's|.*"executable":"\([^"]*/node_[^"]*\)".*|\1|p' | sort) -- $(ARGS)

# This is a separate target because setting memory limits requires root. It reuses the build of `make test`.
.PHONY: hostile
hostile: fetch ## Attack a router and a server, each limited to 2 GiB of memory, while other clients use them. Requires root. ARGS selects attacks by name.
	@scripts/need cargo g++
	@$(CARGO) test --workspace --locked --no-run --quiet
	@$(CARGO) test --workspace --locked --features tests/hostile --test hostile -- $(ARGS)

.PHONY: lint
lint: fetch ## Check formatting, clippy lints, C++ code, shell scripts and API documentation without changing files. Also check dependencies if `make deny` has installed cargo-deny.
	@scripts/need cargo g++
	@$(CARGO) fmt --all --check
	@$(CARGO) clippy --workspace --all-targets --locked --features $(EXTRA_TESTS) -- -D warnings
	@$(MAKE) doc
	@scripts/shellcheck $(SCRIPTS)
	@scripts/clang
	@if [[ -x .deps/bin/cargo-deny ]]; then $(MAKE) deny; \
	  else echo "lint: skipped the check of dependencies; run 'make deny' once to install cargo-deny"; fi

.PHONY: fmt
fmt: ## Format the Rust and C++ code in place.
	@$(CARGO) fmt --all
	@scripts/clang --fix

# With `--examples`, the dependencies have the same features as for clippy. Without it, half of the dependencies would
# be checked again.
.PHONY: doc
doc: fetch ## Build the API documentation of the crates; broken links are errors.
	@RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --lib --examples --features $(EXTRA_TESTS) --no-deps \
	  --locked --document-private-items

.PHONY: docs
docs: docs-site fetch ## Build the documentation site, check its links, and run the commands on its pages.
	@scripts/need cargo g++ openssl
	@scripts/clients
	@scripts/tools control-plane charts
	@$(CARGO) test --workspace --locked --no-run --quiet
	@$(CARGO) test --workspace --locked --features tests/pages --test pages -- $(ARGS)

# Building mdBook without optimization takes a third of the time, and the result still builds the site in seconds.
.PHONY: docs-site
docs-site: ## Build the documentation site in target/docs/html and check its links. The first run installs mdBook into .deps/, which takes a minute.
	@scripts/need cargo python3
	@[[ -x .deps/bin/mdbook && "$$(.deps/bin/mdbook --version)" == "mdbook v$(MDBOOK_VERSION)" ]] || \
	  $(CARGO) install --locked --force --quiet --debug --no-default-features --features search --version $(MDBOOK_VERSION) --root .deps mdbook
	@scripts/docs.py .deps/bin/mdbook

.PHONY: deny
deny: ## Check the licenses and sources of all dependencies, and whether any of them is banned. The first run installs cargo-deny into .deps/, which takes several minutes.
	@scripts/need cargo
	@[[ -x .deps/bin/cargo-deny ]] || $(CARGO) install --locked --version $(CARGO_DENY_VERSION) --root .deps cargo-deny
	@.deps/bin/cargo-deny --all-features --locked check bans licenses sources

# The benchmarks of the engine compare it with openvino_genai, whose Python environment takes about 310 MB in .deps/.
.PHONY: engine-bench
engine-bench: fetch
	@scripts/need cargo g++ python3 venv
	@$(CARGO) build --release --locked --workspace --example engine-bench
	@tests/bench/setup.sh peer

.PHONY: bench-engine
bench-engine: engine-bench ## Compare the speed of the engine with that of openvino_genai. ARGS is passed to the benchmark.
	@.deps/venv-peer/bin/python tests/bench/bench_engine.py $(ARGS)

.PHONY: bench-engine-1b
bench-engine-1b: engine-bench ## Run bench-engine with a model of a billion random weights. ARGS is passed to the benchmark.
	@.deps/venv-peer/bin/python tests/bench/bench_engine.py --section bench-engine-1b --forms gguf --cases c1 c8 \
		--no-floor --model "$$(.deps/venv-peer/bin/python tests/bench/make_model.py 1b)" $(ARGS)

.PHONY: bench-engine-8b
bench-engine-8b: engine-bench ## Measure the load time, memory use and speed of models with up to 5 GB of random weights. ARGS is passed to the benchmark.
	@$(CARGO) build --release --locked --workspace --example read-bandwidth
	@.deps/venv-peer/bin/python tests/bench/bench_size.py $(ARGS)

.PHONY: bench-http
bench-http: engine-bench build ## Compare the speed of the server over HTTP with that of the engine without HTTP. ARGS is passed to the benchmark.
	@.deps/venv-peer/bin/python tests/bench/bench_http.py $(ARGS)

.PHONY: bench-images
bench-images: fetch build ## Compare the server with openvino_genai on requests with images. The first run installs PyTorch (5 GB). ARGS is passed to the benchmark.
	@tests/bench/setup.sh peer
	@tests/conformance/images/setup.sh environment
	@.deps/venv-peer/bin/python tests/bench/bench_images.py $(ARGS)

.PHONY: bench-llama
bench-llama: fetch build ## Compare the server with llama.cpp over HTTP. The first run builds llama.cpp. ARGS is passed to the benchmark.
	@tests/bench/llama.sh
	@tests/bench/setup.sh peer
	@.deps/venv-peer/bin/python tests/bench/bench_llama.py $(ARGS)

.PHONY: bench-vllm
bench-vllm: fetch build ## Compare the server with vLLM's CPU backend over HTTP. The first run installs vLLM (5 GB). ARGS is passed to the benchmark.
	@tests/bench/setup.sh peer
	@tests/bench/setup.sh vllm
	@.deps/venv-peer/bin/python tests/bench/bench_vllm.py $(ARGS)

.PHONY: soak
soak: fetch build ## Run a mixed load against one server for half an hour and check for leaks and stuck requests. ARGS is passed to the test.
	@tests/bench/setup.sh peer
	@.deps/venv-peer/bin/python -u tests/bench/soak.py $(ARGS)

.PHONY: bench-guided
bench-guided: fetch build ## Measure the cost of structured outputs. ARGS is passed to the benchmark.
	@tests/bench/setup.sh peer
	@.deps/venv-peer/bin/python tests/bench/bench_guided.py $(ARGS)

.PHONY: bench-lookup
bench-lookup: fetch build ## Measure the effect of n-gram speculative decoding (prompt lookup) on throughput. ARGS is passed to the benchmark.
	@tests/bench/setup.sh peer
	@.deps/venv-peer/bin/python tests/bench/bench_lookup.py $(ARGS)

.PHONY: bench-adapters
bench-adapters: engine-bench ## Measure the cost of LoRA adapters. ARGS is passed to the benchmark.
	@.deps/venv-peer/bin/python tests/bench/bench_adapters.py $(ARGS)

.PHONY: bench-draft
bench-draft: fetch build ## Measure the cost of a draft model and the acceptance rate at which it breaks even. ARGS is passed to the benchmark.
	@tests/bench/setup.sh peer
	@$(CARGO) build --release --locked --workspace --example draft-bench
	@.deps/venv-peer/bin/python tests/bench/bench_draft.py $(ARGS)

.PHONY: bench-spill
bench-spill: fetch build ## Compare the time to restore prompts from the disk cache with the time to compute them. ARGS is passed to the benchmark.
	@tests/bench/setup.sh peer
	@.deps/venv-peer/bin/python tests/bench/bench_spill.py $(ARGS)

.PHONY: bench-sampling
bench-sampling: ## Measure the time that the engine's thread spends between two runs of the model. ARGS is passed to the benchmark.
	@scripts/need cargo
	@$(CARGO) run --release --locked --quiet --package server-engine --example bench-sampling -- $(ARGS)

.PHONY: bench-policies
bench-policies: ## Compare routing policies in a simulation. ARGS=--update updates the tables in docs/performance/results.md.
	@scripts/need cargo
	@$(CARGO) run --release --locked --quiet --package router --example bench-policies -- $(ARGS)

.PHONY: bench-router
bench-router: ## Compare the router with vllm-router and sglang-router. ARGS=--update updates the tables in docs/performance/results.md.
	@scripts/need cargo python3 venv
	@tests/bench/setup.sh routers
	@$(CARGO) build --release --locked --package router --bin ovfleet-router --example bench-router
	@target/release/examples/bench-router $(ARGS)

.PHONY: bench-operator
bench-operator: ## Run the operator against a real API server and measure the cost of managing 300 LLMDeployments. ARGS=--update updates the table in docs/performance/results.md.
	@scripts/need cargo
	@scripts/tools control-plane
	@$(CARGO) build --release --locked --quiet --package operator --bin ovfleet-operator --example bench-operator
	@target/release/examples/bench-operator $(ARGS)

.PHONY: conformance
conformance: engine-bench build ## Compare the results of the engine and the server with those of openvino_genai and of a reference implementation with dequantized weights. ARGS is passed to the test.
	@.deps/venv-peer/bin/python tests/conformance/conformance.py $(ARGS)

.PHONY: clean
clean: ## Remove the build output. Downloads and installed tools are retained; `rm -r .deps` removes them.
	@$(CARGO) clean
