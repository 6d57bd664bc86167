//! Which headers pass the router, in either direction: all but those that are between two neighbours only.

use http::request::Parts;
use http::{HeaderName, HeaderValue, Method, header};

/// Between two neighbours only (RFC 9110, 7.6.1), whatever `Connection` says.
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

pub(super) const DISPATCH: HeaderName = HeaderName::from_static("x-ovfleet-dispatch");
pub(super) const REPLICA: HeaderName = HeaderName::from_static("x-ovfleet-replica");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Whether a header is between two neighbours only.
pub(super) fn is_hop_by_hop(name: &HeaderName) -> bool {
    HOP_BY_HOP.contains(name)
}

/// The further headers that a `Connection` header makes such ones. Nearly always that is none.
pub(super) fn named(connection: &HeaderValue) -> impl Iterator<Item = HeaderName> {
    let names = connection.to_str().unwrap_or_default().split(',').map(str::trim);
    names
        .filter(|name| !name.eq_ignore_ascii_case("keep-alive") && !name.eq_ignore_ascii_case("close"))
        .filter_map(|name| name.parse().ok())
}

/// The head of a client's request as a replica gets it, but for what depends on the replica and the blank line that
/// ends it. `hides_key`: the key was for the router. `body_bytes`: of the body, which is here already.
pub(super) fn for_replica(
    parts: &Parts,
    hides_key: bool,
    trace: Option<&HeaderValue>,
    body_bytes: usize,
) -> Vec<u8> {
    /// Of most heads.
    const BYTES: usize = 512;
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
    let mut head = Vec::with_capacity(BYTES);
    for piece in [parts.method.as_str(), " ", path, " HTTP/1.1\r\n"] {
        head.extend_from_slice(piece.as_bytes());
    }
    let named: Vec<HeaderName> = parts.headers.get_all(header::CONNECTION).iter().flat_map(named).collect();
    for (name, value) in &parts.headers {
        let is_the_routers = match *name {
            // That nobody waits to be asked for the body is because it is here; its length, and the host, are told
            // by who sends it; and nobody but the router numbers what it sends.
            header::EXPECT | header::CONTENT_LENGTH | header::HOST => true,
            header::AUTHORIZATION => hides_key,
            _ => *name == DISPATCH || (trace.is_some() && *name == TRACEPARENT),
        };
        if !is_the_routers && !is_hop_by_hop(name) && !named.contains(name) {
            line(&mut head, name.as_str(), value.as_bytes());
        }
    }
    if let Some(trace) = trace {
        line(&mut head, TRACEPARENT.as_str(), trace.as_bytes());
    }
    if body_bytes > 0 || !matches!(parts.method, Method::GET | Method::HEAD) {
        line(&mut head, header::CONTENT_LENGTH.as_str(), HeaderValue::from(body_bytes).as_bytes());
    }
    head
}

/// Writes a header.
pub(super) fn line(head: &mut Vec<u8>, name: &str, value: &[u8]) {
    head.reserve(name.len() + value.len() + 4);
    head.extend_from_slice(name.as_bytes());
    head.extend_from_slice(b": ");
    head.extend_from_slice(value);
    head.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(headers: &[(&str, &str)], hides_key: bool, trace: Option<&HeaderValue>) -> String {
        let mut request = http::Request::post("/v1/chat/completions?a=b");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let (parts, ()) = request.body(()).unwrap().into_parts();
        String::from_utf8(for_replica(&parts, hides_key, trace, 7)).unwrap()
    }

    #[test]
    fn passes_what_is_for_the_replica_and_keeps_what_was_for_the_router() {
        let given = [
            ("connection", "keep-alive, x-secret-hop"),
            ("x-secret-hop", "1"),
            ("transfer-encoding", "chunked"),
            ("authorization", "Bearer k"),
            ("host", "router"),
            ("expect", "100-continue"),
            ("content-length", "8"),
            ("x-ovfleet-dispatch", "0/1"),
            ("traceparent", "old"),
            ("x-mine", "kept"),
            ("x-mine", "twice"),
        ];
        let trace = HeaderValue::from_static("new");
        assert_eq!(
            head(&given, true, Some(&trace)),
            "POST /v1/chat/completions?a=b HTTP/1.1\r\nx-mine: kept\r\nx-mine: twice\r\ntraceparent: new\r\n\
             content-length: 7\r\n"
        );
        let kept = head(&given, false, None);
        assert!(
            kept.contains("authorization: Bearer k\r\n") && kept.contains("traceparent: old\r\n"),
            "{kept}"
        );
    }
}
