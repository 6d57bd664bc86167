# The server with the OpenVINO runtime. It serves a model that is mounted, and fetches models (`server fetch`).
# From the root of the tree: docker build -f deploy/server.Dockerfile -t ovfleet/server:dev .
ARG BUILD_IMAGE=rust:1.95-bookworm
# C and C++ libraries and CA certificates, no shell. Another one of glibc 2.36 or newer will do.
ARG BASE_IMAGE=gcr.io/distroless/cc-debian12:nonroot

FROM ${BUILD_IMAGE} AS build
RUN apt-get update && apt-get install --yes --no-install-recommends python3-pip && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN make build && deploy/stage server target/release /out

FROM ${BASE_IMAGE}
COPY --from=build /out/ /
ENV LD_LIBRARY_PATH=/opt/openvino/libs
USER 65532:65532
EXPOSE 8000 50051
ENTRYPOINT ["/usr/local/bin/server"]
