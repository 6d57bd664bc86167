#!/usr/bin/env bash
# Builds the server of llama.cpp for this machine into .deps/llama/, from the sources in a Python package. The first run
# takes about ten minutes.
set -euo pipefail
cd "$(dirname "$0")/../.."
directory=.deps/llama
# The sources have the MIT license. Neither this repository nor any release contains them.
requirement='llama-cpp-python==0.3.36 --hash=sha256:832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e'

if [[ -f "$directory/.stamp" && "$(<"$directory/.stamp")" == "$requirement" ]]; then exit 0; fi
scripts/need cmake g++ python3 pip
echo "building llama.cpp into $directory (about ten minutes)" >&2
rm -rf "$directory"
mkdir -p "$directory/source"
echo "$requirement" >"$directory/requirements.txt"
python3 -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python --require-hashes \
  --dest "$directory" --requirement "$directory/requirements.txt"
tar xzf "$directory"/*.tar.gz -C "$directory/source" --strip-components=1
cmake -S "$directory/source/vendor/llama.cpp" -B "$directory/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
  -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_UI=OFF >"$directory/cmake.log" 2>&1 ||
  { tail -20 "$directory/cmake.log" >&2; exit 1; }
cmake --build "$directory/build" --parallel "$(nproc)" --target llama-server llama-quantize >>"$directory/cmake.log" 2>&1 ||
  { tail -20 "$directory/cmake.log" >&2; exit 1; }
echo "$requirement" >"$directory/.stamp"
