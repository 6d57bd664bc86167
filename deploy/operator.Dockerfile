# The operator.
# From the root of the tree: docker build -f deploy/operator.Dockerfile -t ovfleet/operator:dev .
# Both base images are pinned by digest, so that the same tree makes the same image; `docker buildx imagetools inspect NAME`
# prints the digest of a newer one. The OpenVINO runtime is for x86-64, so images are for no other platform.
ARG PLATFORM=linux/amd64
ARG BUILD_IMAGE=rust:1.95-bookworm@sha256:6258907abe69656e41cd992e0b705cdcfabcbbe3db374f92ed2d47121282d4a1
# C and C++ libraries and CA certificates, no shell. Another one of glibc 2.36 or newer will do.
ARG BASE_IMAGE=gcr.io/distroless/cc-debian12:nonroot@sha256:9dac0a79194e45a7da0158a9c6da57b217585af0786db3845d1f0ec1a0dd182f

FROM --platform=${PLATFORM} ${BUILD_IMAGE} AS build
WORKDIR /src
COPY . .
# Compiled dependencies outlive the build in caches of the builder, apart for each product.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target,id=ovfleet-operator \
    cargo build --release --locked --package operator && deploy/stage operator target/release /out

FROM --platform=${PLATFORM} ${BASE_IMAGE} AS operator
COPY --from=build /out/ /
USER 65532:65532
EXPOSE 8080
ENTRYPOINT ["/usr/local/bin/ovfleet-operator"]
