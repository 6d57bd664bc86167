//! Decides which headers the router forwards, removes and adds, in both directions.

use std::net::IpAddr;

use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Version, header};
use memchr::memmem;
use proto::replica_token;

/// Headers that apply only to one connection (RFC 9110, 7.6.1), whether or not `Connection` lists them.
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
const REPLICA_TOKEN: HeaderName = HeaderName::from_static(replica_token::HEADER);
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

pub(super) fn remove_hop_by_hop(headers: &mut HeaderMap) {
    // In most messages, `Connection` lists no other headers, so this list is empty and allocates nothing.
    let listed: Vec<HeaderName> = headers.get_all(header::CONNECTION).iter().flat_map(listed).collect();
    for name in HOP_BY_HOP.iter().chain(&listed) {
        headers.remove(name);
    }
}

/// The names in a `Connection` header, except `keep-alive` and `close`.
fn listed(connection: &HeaderValue) -> impl Iterator<Item = HeaderName> {
    let names = connection.to_str().unwrap_or_default().split(',').map(str::trim);
    names
        .filter(|name| !name.eq_ignore_ascii_case("keep-alive") && !name.eq_ignore_ascii_case("close"))
        .filter_map(|name| name.parse().ok())
}

/// The entries of this router for the `Via` header, one for each protocol version of a request. Each entry contains the
/// version and the name of the router.
#[derive(Debug)]
pub(crate) struct Via {
    name: String,
    http_1_0: HeaderValue,
    http_1_1: HeaderValue,
    http_2: HeaderValue,
}

impl Via {
    /// Creates the entries of the router with this ID.
    pub(crate) fn new(router: u64) -> Self {
        let name = format!("ovfleet-{router:016x}");
        let entry = |version: &str| {
            let entry = HeaderValue::try_from(format!("{version} {name}"));
            entry.expect("invariant: letters, digits and dashes are a header value")
        };
        Self { http_1_0: entry("1.0"), http_1_1: entry("1.1"), http_2: entry("2"), name }
    }

    fn entry(&self, version: Version) -> &HeaderValue {
        match version {
            Version::HTTP_10 => &self.http_1_0,
            Version::HTTP_2 => &self.http_2,
            _ => &self.http_1_1,
        }
    }

    /// Whether a request has already passed through this router.
    pub(super) fn has_passed(&self, headers: &HeaderMap) -> bool {
        let mut entries = headers.get_all(header::VIA).iter();
        entries.any(|entry| memmem::find(entry.as_bytes(), self.name.as_bytes()).is_some())
    }
}

/// The values that, together with the client's headers, determine the headers of a request to a replica.
#[derive(Clone, Debug)]
pub(super) struct ForwardingContext<'a> {
    pub(super) client_address: IpAddr,
    pub(super) request_id: &'a HeaderValue,
    pub(super) via: &'a Via,
    /// Whether to remove the client's API key, because it is meant for the router.
    pub(super) hides_key: bool,
    /// The trace header that replaces the client's trace header.
    pub(super) trace: Option<HeaderValue>,
    pub(super) has_body: bool,
}

/// The headers of a request to a replica, except those that depend on the replica.
pub(super) fn for_replica(parts: &mut Parts, forwarding: ForwardingContext<'_>) -> HeaderMap {
    let ForwardingContext { client_address, request_id, via, hides_key, trace, has_body } = forwarding;
    let mut headers = std::mem::take(&mut parts.headers);
    remove_hop_by_hop(&mut headers);
    // The body has arrived, so `Expect` is obsolete and the length is known. `Host` must name the replica. A client
    // must not be able to set the headers with which the router numbers its requests and authenticates itself.
    for name in [header::EXPECT, header::CONTENT_LENGTH, header::HOST, DISPATCH, REPLICA_TOKEN] {
        headers.remove(name);
    }
    if hides_key {
        headers.remove(header::AUTHORIZATION);
    }
    if let Some(trace) = trace {
        headers.insert(TRACEPARENT, trace);
    }
    if !has_body && !matches!(parts.method, Method::GET | Method::HEAD) {
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from_static("0"));
    }
    headers.insert(REQUEST_ID, request_id.clone());
    headers.append(header::VIA, via.entry(parts.version).clone());
    let forwarded_for = forwarded_for(&headers, client_address);
    headers.insert(FORWARDED_FOR, forwarded_for);
    headers
}

/// The value of `X-Forwarded-For`: the addresses that the client sent in this header, followed by the address of the
/// client.
fn forwarded_for(headers: &HeaderMap, client_address: IpAddr) -> HeaderValue {
    let mut all = Vec::new();
    for value in headers.get_all(FORWARDED_FOR) {
        all.extend_from_slice(value.as_bytes());
        all.extend_from_slice(b", ");
    }
    all.extend_from_slice(client_address.to_canonical().to_string().as_bytes());
    HeaderValue::from_bytes(&all).expect("invariant: header values and an address are a header value")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passed(headers: &[(&str, &str)], hides_key: bool, trace: Option<HeaderValue>) -> Vec<String> {
        let mut request = http::Request::post("/v1/chat/completions?a=b");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let (mut parts, ()) = request.body(()).unwrap().into_parts();
        let forwarding = ForwardingContext {
            client_address: "::ffff:192.0.2.1".parse().unwrap(),
            request_id: &HeaderValue::from_static("id"),
            via: &Via::new(0xab),
            hides_key,
            trace,
            has_body: false,
        };
        let headers = for_replica(&mut parts, forwarding);
        let mut lines: Vec<String> =
            headers.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect();
        lines.sort();
        lines
    }

    #[test]
    fn headers_for_the_router_are_removed_and_all_others_are_passed_on() {
        let given = [
            ("connection", "keep-alive, x-secret-hop"),
            ("x-secret-hop", "1"),
            ("transfer-encoding", "chunked"),
            ("authorization", "Bearer k"),
            ("host", "router"),
            ("expect", "100-continue"),
            ("content-length", "8"),
            ("x-ovfleet-dispatch", "0/1"),
            ("x-ovfleet-replica-token", "a guess"),
            ("x-request-id", "given"),
            ("x-forwarded-for", "203.0.113.7"),
            ("traceparent", "old"),
            ("via", "1.0 fred"),
            ("x-mine", "kept"),
            ("x-mine", "twice"),
        ];
        assert_eq!(
            passed(&given, true, Some(HeaderValue::from_static("new"))),
            [
                "content-length: 0",
                "traceparent: new",
                "via: 1.0 fred",
                "via: 1.1 ovfleet-00000000000000ab",
                "x-forwarded-for: 203.0.113.7, 192.0.2.1",
                "x-mine: kept",
                "x-mine: twice",
                "x-request-id: id",
            ]
        );
        let lines = passed(&given, false, None);
        assert!(lines.contains(&"authorization: Bearer k".to_owned()), "{lines:?}");
        assert!(lines.contains(&"traceparent: old".to_owned()), "{lines:?}");
    }

    #[test]
    fn a_request_that_has_passed_this_router_is_recognized() {
        let via = Via::new(7);
        let with =
            |value: &'static str| HeaderMap::from_iter([(header::VIA, HeaderValue::from_static(value))]);
        assert!(via.has_passed(&with("1.1 other, 2 ovfleet-0000000000000007")));
        for other in ["", "1.1 ovfleet-0000000000000008", "1.1 ovfleet"] {
            assert!(!via.has_passed(&with(other)), "{other}");
        }
    }
}
