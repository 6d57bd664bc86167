#!/usr/bin/env bash
# run.sh PROGRAM... -- ARGUMENT...: runs the tests that the arguments select from the given test programs. The arguments
# are those of a test program: parts of test names, and options such as --ignored. The tests spend most of their time
# waiting, so several nodes run in parallel, and each runs the next test that no other node has started. The programs
# run without Cargo, because Cargo would wait while another Cargo process builds.
set -euo pipefail
cd "$(dirname "$0")/../.."

nodes=3

if [[ "${1:-}" == --share ]]; then
  shared=$2
  shift 2
  status=0
  cd tests
  while read -r program test; do
    started=$shared/$(basename "$program").$test
    if ! mkdir "$started" 2>/dev/null; then
      [[ -d $started ]] || exit 1
      continue
    fi
    "$program" "$@" --exact "$test" </dev/null || status=1
  done <"$shared/tests"
  exit $status
fi

programs=()
while [[ "$1" != -- ]]; do
  programs+=("$1")
  shift
done
shift
((${#programs[@]})) || {
  echo "run.sh: no test program was built" >&2
  exit 1
}
options=()
for argument in "$@"; do [[ $argument != -* ]] || options+=("$argument"); done

mkdir -p .deps/node
shared=$(mktemp -d "$PWD/.deps/node/shared.XXXXXX")
runs=()
# The trap also removes $shared, without which no node starts another test.
trap '((${#runs[@]} == 0)) || kill "${runs[@]}" 2>/dev/null || true; rm -rf "$shared"; wait' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

for program in "${programs[@]}"; do
  "$program" --list "$@" | sed -n "s|^\(.*\): test$|$program \1|p"
done >"$shared/tests"
[[ -s $shared/tests ]] || {
  echo "run.sh: the arguments select no test: $*" >&2
  exit 1
}

for ((node = 1; node <= nodes; node++)); do
  tests/cluster/node.sh tests/cluster/run.sh --share "$shared" "${options[@]}" > >(sed -u "s/^/node $node: /") 2>&1 &
  runs+=($!)
done
status=0
for run in "${runs[@]}"; do wait "$run" || status=1; done
exit "$status"
