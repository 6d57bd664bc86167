# Builds the image of the operator.
# Run this in the root of the repository: docker build -f deploy/operator.Dockerfile -t ovfleet/operator:dev .
# Both base images are pinned by digest, so that all builds of a commit start from the same images;
# `docker buildx imagetools inspect NAME` prints the digest of a newer image. Images are for x86-64 only, as is the pinned
# OpenVINO runtime.
ARG PLATFORM=linux/amd64
ARG BUILD_IMAGE=rust:1.95-bookworm@sha256:6258907abe69656e41cd992e0b705cdcfabcbbe3db374f92ed2d47121282d4a1
# The base contains the C and C++ libraries and CA certificates, and no shell. Any base with glibc 2.36 or newer works.
ARG BASE_IMAGE=gcr.io/distroless/cc-debian12:nonroot@sha256:9dac0a79194e45a7da0158a9c6da57b217585af0786db3845d1f0ec1a0dd182f

FROM --platform=${PLATFORM} ${BUILD_IMAGE} AS build
WORKDIR /src
COPY . .
# The builder caches compiled dependencies between builds, separately for each product.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target,id=ovfleet-operator \
    cargo build --release --locked --package operator && deploy/stage operator target/release /out

FROM --platform=${PLATFORM} ${BASE_IMAGE} AS operator
COPY --from=build /out/ /
USER 65532:65532
EXPOSE 8080
ENTRYPOINT ["/usr/local/bin/ovfleet-operator"]
