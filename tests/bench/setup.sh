#!/bin/sh
# Creates one of these Python environments in .deps/, unless it already exists with the same requirements:
#   peer     openvino_genai, for the conformance tests and all benchmarks in Python
#   routers  the other routers of `make bench-router`
#   vllm     vLLM on the CPU, for `make bench-vllm`
# The variable PYTHON sets the interpreter (default: python3).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
name=${1:-}
case $name in
peer) oldest=11 newest=13 size=310 ;;
routers) oldest=9 newest=99 size=190 ;;
vllm) oldest=11 newest=13 size=4700 ;;
*)
  echo "usage: setup.sh peer|routers|vllm" >&2
  exit 2
  ;;
esac
requirements=$here/requirements-$name.txt
venv=$here/../../.deps/venv-$name
stamp=$venv/requirements.installed

if cmp -s "$requirements" "$stamp"; then
  exit 0
fi
python=${PYTHON:-python3}
if ! "$python" -c "import sys; sys.exit(not (3, $oldest) <= sys.version_info[:2] <= (3, $newest))"; then
  echo "setup.sh: $python is not Python 3.$oldest to 3.$newest; set PYTHON to a supported version" >&2
  exit 1
fi
echo "creating the Python environment .deps/venv-$name (about $size MB)" >&2
rm -rf "$venv"
mkdir -p "$(dirname "$venv")"
"$python" -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
  --require-hashes -r "$requirements"
cp "$requirements" "$stamp"
