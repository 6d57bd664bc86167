# The router.
# From the root of the tree: docker build -f deploy/router.Dockerfile -t ovfleet/router:dev .
ARG BUILD_IMAGE=rust:1.95-bookworm
# C and C++ libraries and CA certificates, no shell. Another one of glibc 2.36 or newer will do.
ARG BASE_IMAGE=gcr.io/distroless/cc-debian12:nonroot

FROM ${BUILD_IMAGE} AS build
WORKDIR /src
COPY . .
RUN cargo build --release --locked --package router && deploy/stage router target/release /out

FROM ${BASE_IMAGE}
COPY --from=build /out/ /
USER 65532:65532
EXPOSE 8000
ENTRYPOINT ["/usr/local/bin/router"]
