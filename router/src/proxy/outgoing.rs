//! Builds the request that the router sends to replicas for a client's request.

use http::{HeaderMap, HeaderValue, Method, Request, Uri, header};

use super::headers;
use super::request_body::RequestBody;
use super::retry_safety::RetrySafety;
use crate::dispatch::Placement;
use crate::endpoint::Endpoint;
use crate::replicas::Replicas;

/// A request that the router sends to replicas.
pub(super) struct OutgoingRequest {
    pub(super) endpoint: Endpoint,
    pub(super) request_id: HeaderValue,
    pub(super) method: Method,
    pub(super) uri: Uri,
    /// The headers that do not depend on the replica.
    pub(super) headers: HeaderMap,
    pub(super) body: RequestBody,
    pub(super) retry_safety: RetrySafety,
    pub(super) is_stream: bool,
    /// Whether only the router requested the usage. If so, the client must not receive it.
    pub(super) hides_usage: bool,
    /// Whether a replica computes the answer and its usage.
    pub(super) is_computed: bool,
    /// The number of bytes of the prompt, including its tools and instructions. It is 0 if the prompt has images, whose
    /// number of tokens does not depend on their size in bytes, or continues stored turns, whose size is unknown.
    pub(super) prompt_bytes: usize,
    /// The number of sequences that the replica generates.
    pub(super) choices: u32,
}

impl OutgoingRequest {
    /// The request to the replica of `placement`, which is one of `replicas`.
    pub(super) fn to_replica(&self, placement: &Placement, replicas: &Replicas) -> Request<RequestBody> {
        let mut request = Request::new(self.body.clone());
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.uri.clone();
        let headers = request.headers_mut();
        *headers = self.headers.clone();
        headers.insert(header::HOST, placement.replica.authority.clone());
        if let Ok(dispatch) = HeaderValue::try_from(placement.header()) {
            headers.insert(headers::DISPATCH, dispatch);
        }
        replicas.authenticate(headers);
        request
    }
}
