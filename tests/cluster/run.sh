#!/usr/bin/env bash
# run.sh COMMAND...: runs COMMAND for each file tests/tests/node_*.rs, with its name instead of the argument TEST. The tests
# spend most of their time waiting, so two nodes share the files: each takes the next one that no node has taken.
set -euo pipefail
cd "$(dirname "$0")/../.."

nodes=2

if [[ "${1:-}" == --share ]]; then
  taken=$2
  shift 2
  for file in tests/tests/node_*.rs; do
    name=$(basename "$file" .rs)
    mkdir "$taken/$name" 2>/dev/null || continue
    "${@/#TEST/$name}"
  done
  exit
fi

mkdir -p .deps/node
taken=$(mktemp -d "$PWD/.deps/node/taken.XXXXXX")
runs=()
trap '((${#runs[@]} == 0)) || kill "${runs[@]}" 2>/dev/null || true; wait; rm -rf "$taken"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

for ((node = 1; node <= nodes; node++)); do
  tests/cluster/node.sh tests/cluster/run.sh --share "$taken" "$@" > >(sed -u "s/^/node $node: /") 2>&1 &
  runs+=($!)
done
status=0
for run in "${runs[@]}"; do wait "$run" || status=1; done
exit "$status"
