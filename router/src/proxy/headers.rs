//! Which headers pass the router, in either direction: all but those that are between two neighbours only.

use http::{HeaderMap, HeaderName, HeaderValue, header};

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

/// A client's headers as a replica gets them. `hides_key`: the key was for the router.
pub(super) fn for_replica(mut headers: HeaderMap, hides_key: bool, trace: Option<HeaderValue>) -> HeaderMap {
    strip(&mut headers);
    // The body is here already, and nobody waits to be asked for it.
    headers.remove(header::EXPECT);
    // That of the body as it is sent is set when it is.
    headers.remove(header::CONTENT_LENGTH);
    headers.remove(header::HOST);
    // Nobody but the router numbers what it sends.
    headers.remove(DISPATCH);
    if hides_key {
        headers.remove(header::AUTHORIZATION);
    }
    if let Some(trace) = trace {
        headers.insert(TRACEPARENT, trace);
    }
    headers
}

/// A replica's headers as a client gets them.
pub(super) fn for_client(headers: &mut HeaderMap, replica: &HeaderValue) {
    strip(headers);
    headers.insert(REPLICA, replica.clone());
}

fn strip(headers: &mut HeaderMap) {
    if let Some(connection) = headers.get(header::CONNECTION) {
        // What it names is between neighbours too. Nearly always that is nothing.
        let named: Vec<HeaderName> = connection
            .to_str()
            .unwrap_or_default()
            .split(',')
            .filter_map(|name| name.trim().parse().ok())
            .collect();
        for name in named {
            headers.remove(name);
        }
    }
    for name in HOP_BY_HOP {
        headers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_what_is_for_the_replica_and_keeps_what_was_for_the_router() {
        let given = [
            ("connection", "keep-alive, x-secret-hop"),
            ("x-secret-hop", "1"),
            ("transfer-encoding", "chunked"),
            ("authorization", "Bearer k"),
            ("host", "router"),
            ("x-ovfleet-dispatch", "0/1"),
            ("x-mine", "kept"),
        ];
        let given: HeaderMap = given
            .into_iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
            .collect();
        let kept = for_replica(given.clone(), true, Some(HeaderValue::from_static("t")));
        let names: Vec<&str> = kept.keys().map(HeaderName::as_str).collect();
        assert_eq!(names.len(), 2, "{names:?}");
        assert!(kept.contains_key("x-mine") && kept.contains_key("traceparent"));
        assert!(for_replica(given, false, None).contains_key("authorization"));
    }
}
