#!/bin/sh
# Makes the tiny vision-language models in .deps/models/vision, and the Python environments that this requires, unless
# they are up to date. Phi-4-multimodal needs other versions of the packages than the other families, so it has its own
# environment, .deps/venv-vision-phi; the other families use .deps/venv-vision. With the argument `environment`, the
# script creates only .deps/venv-vision. Each environment takes 5.3 GB, because it contains torch with its CUDA
# libraries.
set -eu
cd "$(dirname "$0")/../../.."
here=tests/conformance/images
models=.deps/models/vision

environment() { # name requirements [pip options]
  venv=.deps/venv-$1
  requirements=$here/$2
  shift 2
  if cmp -s "$requirements" "$venv/requirements.installed"; then return; fi
  echo "creating the Python environment $venv (about 5300 MB)" >&2
  rm -rf "$venv"
  python3 -m venv "$venv"
  # docopt, which num2words needs, has no wheel.
  "$venv/bin/pip" install --quiet --disable-pip-version-check --only-binary=:all: --no-binary=docopt -r "$requirements" "$@"
  cp "$requirements" "$venv/requirements.installed"
}

environment vision requirements.txt --constraint $here/constraints.txt
if [ "${1:-}" = environment ]; then exit 0; fi
stamp=$(cat $here/make_models.py $here/remote_models.py $here/requirements*.txt | sha256sum | cut -d' ' -f1)
if [ "$(cat $models/made-by 2>/dev/null)" = "$stamp" ]; then exit 0; fi
environment vision-phi requirements-phi.txt
rm -rf $models
mkdir -p $models
.deps/venv-vision/bin/python $here/make_models.py $models
.deps/venv-vision-phi/bin/python $here/make_models.py $models phi4_multimodal
echo "$stamp" >$models/made-by
