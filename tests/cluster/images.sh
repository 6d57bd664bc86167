#!/usr/bin/env bash
# images.sh DIRECTORY PRODUCT...: builds an image of each product from the binaries in DIRECTORY, such as
# target/release, and writes the images to .deps/node/images/ as Docker archives, which the test node imports. It builds
# the last stages of the Dockerfiles in deploy/ unchanged, on a Debian base image that it creates, because no image
# registry is available. The build stages would only compile the binaries again, so the script checks only that these
# stages find their sources.
set -euo pipefail
cd "$(dirname "$0")/../.."

binaries=$1
shift
tag=e2e
base=.deps/node/base
images=.deps/node/images
# The programs need the C and C++ libraries and the CA certificates, which the base image of the Dockerfiles also
# contains. The check of the build stages needs a shell.
packages=libstdc++6,libgcc-s1,ca-certificates,dash,coreutils,python3-minimal

say() { echo "images: $*" >&2; }

missing=0
for tool in mmdebstrap buildah gcc; do
  command -v $tool >/dev/null || {
    say "missing: $tool (Debian, Ubuntu: $tool)"
    missing=1
  }
done
((missing == 0)) || exit 1

# An image archive contains a tar archive of the root file system and two small JSON files.
archive() { # rootfs.tar, image, entry point, output
  local directory digest
  directory=$(mktemp -d)
  mv "$1" "$directory/layer.tar"
  digest=$(sha256sum "$directory/layer.tar" | cut -d' ' -f1)
  cat >"$directory/config.json" <<JSON
{"architecture": "amd64", "os": "linux", "config": {"Entrypoint": $3, "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]},
 "rootfs": {"type": "layers", "diff_ids": ["sha256:$digest"]}, "history": [{"created_by": "images.sh"}]}
JSON
  echo "[{\"Config\": \"config.json\", \"RepoTags\": [\"$2\"], \"Layers\": [\"layer.tar\"]}]" >"$directory/manifest.json"
  tar -C "$directory" -cf "$4.partial" manifest.json config.json layer.tar
  rm -rf "$directory"
  mv "$4.partial" "$4"
}

make_pause() {
  local directory
  directory=$(mktemp -d)
  gcc -static -Os -s -o "$directory/pause" tests/cluster/node/pause.c
  tar -C "$directory" -cf $base/pause.rootfs pause
  rm -rf "$directory"
  archive $base/pause.rootfs localhost/pause:1 '["/pause"]' $base/pause.tar
}

make_base() {
  # The maintainer scripts of the packages do not run, so their output is created here.
  # shellcheck disable=SC2016 # the hook's own variable
  mmdebstrap --quiet --variant=extract --include="$packages" --extract-hook='
    cat "$1"/usr/share/ca-certificates/mozilla/*.crt >"$1/etc/ssl/certs/ca-certificates.crt"
    ln -sf dash "$1/bin/sh"
    rm -rf "$1"/usr/share/doc "$1"/usr/share/man "$1"/usr/share/locale "$1"/var/cache/apt "$1"/var/lib/apt
  ' bookworm $base/debian.rootfs.tar
  archive $base/debian.rootfs.tar localhost/base:1 '[]' $base/debian.tar
}

build() {
  buildah --root "$PWD/.deps/node/buildah" --runroot "$scratch/buildah" --storage-driver overlay "$@"
}

# Checks the build stage without its RUN instructions: every file that it copies must exist, and the copy of the sources
# must not contain .git, .deps or target.
check_build_stage() { # product
  {
    sed '/^FROM .*${BASE_IMAGE}/,$d' "deploy/$1.Dockerfile" | sed -E -e ':join' -e '/\\$/{N;s/\\\n//;b join' -e '}' -e '/^RUN /d'
    echo 'RUN test -f Cargo.lock -a -f rust-toolchain.toml -a -x deploy/stage -a ! -e .git -a ! -e .deps -a ! -e target'
  } >"$scratch/$1.build.Dockerfile"
  build bud --quiet --pull=never --isolation chroot --build-arg BUILD_IMAGE=localhost/base:1 \
    --file "$scratch/$1.build.Dockerfile" . >"$scratch/log" 2>&1 || {
    cat "$scratch/log" >&2
    say "the build stage of deploy/$1.Dockerfile failed to find its sources"
    return 1
  }
  build rmi "$(tail -n 1 "$scratch/log")" >/dev/null
}

make_image() { # product
  local product=$1
  check_build_stage "$product"
  # Only the last stage of the Dockerfile is built. It copies from $scratch/$product (--build-context) instead of from
  # the build stage.
  {
    grep -E '^ARG (BASE_IMAGE|PLATFORM)=' "deploy/$product.Dockerfile"
    # shellcheck disable=SC2016 # literal text of the file
    sed -n '/^FROM .*${BASE_IMAGE}/,$p' "deploy/$product.Dockerfile"
  } >"$scratch/$product.Dockerfile"
  deploy/stage "$product" "$binaries" "$scratch/$product/out"
  build bud --quiet --pull=never --isolation chroot --build-arg BASE_IMAGE=localhost/base:1 \
    --build-context "build=$scratch/$product" --file "$scratch/$product.Dockerfile" \
    --tag "localhost/ovfleet/$product:$tag" "$scratch/empty" >"$scratch/log" 2>&1 || {
    cat "$scratch/log" >&2
    return 1
  }
  rm -f "$images/$product.tar"
  build push --quiet "localhost/ovfleet/$product:$tag" \
    "docker-archive:$PWD/$images/$product.tar:localhost/ovfleet/$product:$tag"
}

started=$EPOCHREALTIME
mkdir -p $base $images
[[ -e $base/pause.tar ]] || make_pause
[[ -e $base/debian.tar ]] || make_base
scratch=$(mktemp -d)
mkdir "$scratch/empty"
trap 'rm -rf "$scratch"' EXIT
build inspect --type image localhost/base:1 >/dev/null 2>&1 ||
  build pull --quiet "docker-archive:$PWD/$base/debian.tar" >/dev/null
for product in "$@"; do make_image "$product"; done
say "built $* in $(awk "BEGIN {printf \"%.1f\", $EPOCHREALTIME - $started}") s"
