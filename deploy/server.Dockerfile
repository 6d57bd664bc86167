# Builds the image of the server with the OpenVINO runtime. The server serves a mounted model; `ovfleet-server fetch` downloads models.
# Run this in the root of the repository: docker build -f deploy/server.Dockerfile -t ovfleet/server:dev .
# Both base images are pinned by digest, so that all builds of a commit start from the same images;
# `docker buildx imagetools inspect NAME` prints the digest of a newer image. Images are for x86-64 only, as is the pinned
# OpenVINO runtime.
ARG PLATFORM=linux/amd64
ARG BUILD_IMAGE=rust:1.95-bookworm@sha256:6258907abe69656e41cd992e0b705cdcfabcbbe3db374f92ed2d47121282d4a1
# The base contains the C and C++ libraries and CA certificates, and no shell. Any base with glibc 2.36 or newer works.
ARG BASE_IMAGE=gcr.io/distroless/cc-debian12:nonroot@sha256:9dac0a79194e45a7da0158a9c6da57b217585af0786db3845d1f0ec1a0dd182f

FROM --platform=${PLATFORM} ${BUILD_IMAGE} AS build
RUN apt-get update && apt-get install --yes --no-install-recommends python3-pip && rm -rf /var/lib/apt/lists/*
WORKDIR /src
# This step precedes the copy of the sources, so that changed sources do not cause another download. The image does not
# contain the sample model, which only tests need.
COPY scripts/fetch scripts/need scripts/wheels.txt scripts/
RUN scripts/fetch openvino
COPY . .
# The builder caches compiled dependencies between builds, separately for each product.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target,id=ovfleet-server \
    cargo build --release --locked --package server && deploy/stage server target/release /out

FROM --platform=${PLATFORM} ${BASE_IMAGE} AS server
COPY --from=build /out/ /
USER 65532:65532
EXPOSE 8000 50051 8081
ENTRYPOINT ["/usr/local/bin/ovfleet-server"]
