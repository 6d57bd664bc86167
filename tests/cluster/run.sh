#!/usr/bin/env bash
# run.sh COMMAND... -- ARGUMENT...: runs COMMAND for each test of the files tests/tests/node_*.rs that the arguments
# select, replacing FILE with the name of the file. The arguments are those of a test program: parts of names, and
# options such as --ignored. The tests spend most of their time waiting, so several nodes run in parallel, and each runs
# the next test that no other node has started.
set -euo pipefail
cd "$(dirname "$0")/../.."

nodes=3

if [[ "${1:-}" == --share ]]; then
  shared=$2
  shift 2
  status=0
  while read -r file test; do
    if ! mkdir "$shared/$file.$test" 2>/dev/null; then
      [[ -d $shared/$file.$test ]] || exit 1
      continue
    fi
    "${@/#FILE/$file}" --exact "$test" </dev/null || status=1
  done <"$shared/tests"
  exit $status
fi

command=()
while [[ "$1" != -- ]]; do
  command+=("$1")
  shift
done
shift
options=()
for argument in "$@"; do [[ $argument != -* ]] || options+=("$argument"); done

mkdir -p .deps/node
shared=$(mktemp -d "$PWD/.deps/node/shared.XXXXXX")
runs=()
# Without the directory, no further test starts.
trap '((${#runs[@]} == 0)) || kill "${runs[@]}" 2>/dev/null || true; rm -rf "$shared"; wait' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

for file in tests/tests/node_*.rs; do
  file=$(basename "$file" .rs)
  "${command[@]/#FILE/$file}" --quiet -- --list "$@" | sed -n "s/^\(.*\): test$/$file \1/p"
done >"$shared/tests"
[[ -s $shared/tests ]] || {
  echo "run.sh: the arguments select no test: $*" >&2
  exit 1
}

for ((node = 1; node <= nodes; node++)); do
  tests/cluster/node.sh tests/cluster/run.sh --share "$shared" "${command[@]}" -- "${options[@]}" > >(sed -u "s/^/node $node: /") 2>&1 &
  runs+=($!)
done
status=0
for run in "${runs[@]}"; do wait "$run" || status=1; done
exit "$status"
