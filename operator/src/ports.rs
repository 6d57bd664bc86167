//! The ports of the pods that the operator creates and connects to.

/// The port of the HTTP API in the pods of servers and routers.
pub const HTTP_PORT: u16 = 8000;
/// The port of gRPC in the pods of servers and routers.
pub const GRPC_PORT: u16 = 50051;
/// The port of probes and metrics in the pods of servers and routers.
pub const ADMIN_PORT: u16 = 8081;
/// The port on which the container that fetches a model serves its progress.
pub const PROGRESS_PORT: u16 = 8080;
/// The name of [`PROGRESS_PORT`] in the spec of the container.
pub const PROGRESS_PORT_NAME: &str = "progress";
