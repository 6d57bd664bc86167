//! Rejects requests that violate requirements of HTTP/1.1 that `hyper` does not check, because a proxy and the server
//! could interpret such a request differently.

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderMap, Version, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};

use crate::error::Error;

/// Returns `router`, restricted to requests that conform to HTTP/1.1.
pub(crate) fn conforming(router: Router) -> Router {
    router.layer(middleware::from_fn(check_request))
}

async fn check_request(request: Request, next: Next) -> Response {
    match check(request.version(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(problem) => {
            let mut response = Error::MalformedHttp(problem).into_response();
            let close = header::HeaderValue::from_static("close");
            response.headers_mut().insert(header::CONNECTION, close);
            response
        }
    }
}

fn check(version: Version, headers: &HeaderMap) -> Result<(), &'static str> {
    match headers.get_all(header::HOST).iter().count() {
        0 if version == Version::HTTP_11 => return Err("the Host header field is missing"),
        0 | 1 => {}
        _ => return Err("the request has more than one Host header field"),
    }
    let codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    let mut codings = codings.flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    let is_chunked = codings.next().is_none_or(|coding| coding.trim_ascii().eq_ignore_ascii_case(b"chunked"));
    if !is_chunked || codings.next().is_some() {
        return Err("the only supported transfer coding is chunked, which must be applied only once");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderName, HeaderValue};

    use super::*;

    #[test]
    fn ambiguous_requests_are_rejected() {
        let checked = |version, fields: &[(&'static str, &'static str)]| {
            let fields = fields
                .iter()
                .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
            let mut headers = HeaderMap::new();
            for (name, value) in fields {
                headers.append(name, value);
            }
            check(version, &headers)
        };
        assert_eq!(checked(Version::HTTP_11, &[("host", "a")]), Ok(()));
        assert_eq!(checked(Version::HTTP_10, &[]), Ok(()));
        assert_eq!(checked(Version::HTTP_11, &[("host", "a"), ("transfer-encoding", " Chunked")]), Ok(()));
        assert!(checked(Version::HTTP_11, &[]).unwrap_err().contains("missing"));
        assert!(
            checked(Version::HTTP_10, &[("host", "a"), ("host", "a")]).unwrap_err().contains("more than one")
        );
        for coding in ["gzip, chunked", "gzip", "identity", "chunked, gzip", "chunked, chunked", "chunked,"] {
            let refused = checked(Version::HTTP_11, &[("host", "a"), ("transfer-encoding", coding)]);
            assert!(refused.unwrap_err().contains("chunked"), "{coding}");
        }
        let coding = ("transfer-encoding", "chunked");
        let refused = checked(Version::HTTP_11, &[("host", "a"), coding, coding]);
        assert!(refused.unwrap_err().contains("only once"));
    }
}
