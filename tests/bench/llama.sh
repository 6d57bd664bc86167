#!/usr/bin/env bash
# Builds the server of llama.cpp for this machine into .deps/llama/, from the sources in a Python package. The first run
# takes minutes.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=.deps/llama
# The sources have the MIT license. Neither this repository nor any release contains them.
requirement='llama-cpp-python==0.3.36 --hash=sha256:832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e'

if [[ -f "$folder/.stamp" && "$(<"$folder/.stamp")" == "$requirement" ]]; then exit 0; fi
scripts/need cmake g++ python3 pip
echo "building llama.cpp into $folder (about ten minutes)" >&2
rm -rf "$folder"
mkdir -p "$folder/source"
echo "$requirement" >"$folder/requirements.txt"
python3 -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python --require-hashes \
  --dest "$folder" --requirement "$folder/requirements.txt"
tar xzf "$folder"/*.tar.gz -C "$folder/source" --strip-components=1
cmake -S "$folder/source/vendor/llama.cpp" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
  -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_UI=OFF >"$folder/cmake.log" 2>&1 ||
  { tail -20 "$folder/cmake.log" >&2; exit 1; }
cmake --build "$folder/build" --parallel "$(nproc)" --target llama-server llama-quantize >>"$folder/cmake.log" 2>&1 ||
  { tail -20 "$folder/cmake.log" >&2; exit 1; }
echo "$requirement" >"$folder/.stamp"
