#!/bin/sh
# Makes the Python environment of the conformance tests and the benchmarks in .deps/venv-peer, unless it is
# there and of these requirements. PYTHON names the interpreter (3.11 to 3.13).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
venv=$here/../../.deps/venv-peer
stamp=$venv/requirements.installed

if cmp -s "$here/requirements.txt" "$stamp"; then
  exit 0
fi
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
  echo "setup.sh: $python is not Python 3.11, 3.12 or 3.13; set PYTHON to one that is" >&2
  exit 1
fi
echo "making the Python environment of the peer in .deps/venv-peer (about 310 MB)" >&2
rm -rf "$venv"
mkdir -p "$(dirname "$venv")"
"$python" -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
  --require-hashes -r "$here/requirements.txt"
cp "$here/requirements.txt" "$stamp"
