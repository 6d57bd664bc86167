#!/bin/sh
# Makes the Python environment of the routers that `make bench-router` compares with in .deps/venv-routers, unless
# it is there and of these requirements. PYTHON names the interpreter (3.9 or newer).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
venv=$here/../../.deps/venv-routers
stamp=$venv/requirements.installed

if cmp -s "$here/requirements-routers.txt" "$stamp"; then
  exit 0
fi
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] < (3, 9))'; then
  echo "setup_routers.sh: $python is older than Python 3.9; set PYTHON to one that is not" >&2
  exit 1
fi
echo "making the Python environment of the other routers in .deps/venv-routers (about 190 MB)" >&2
rm -rf "$venv"
mkdir -p "$(dirname "$venv")"
"$python" -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
  --require-hashes -r "$here/requirements-routers.txt"
cp "$here/requirements-routers.txt" "$stamp"
