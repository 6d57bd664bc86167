//! A mock of S3 with one bucket, for tests that fetch models. It lists the objects page by page, and serves them with
//! support for range requests. Every request must be signed with AWS Signature Version 4 in the query parameters.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

use crate::mock::{MockServer, hex, range_start, sha256};

/// The number of objects per page of a listing. It is so small that a listing of a few objects has several pages.
const PAGE_OBJECTS: usize = 2;

/// The AWS credentials that requests must be signed with.
#[derive(Clone, Debug)]
pub struct Credentials {
    /// The ID of the access key.
    pub access_key_id: String,
    /// The secret access key, which signs the requests.
    pub secret_access_key: String,
    /// The session token of temporary credentials.
    pub session_token: Option<String>,
}

/// A mock S3 service that runs until it is dropped.
#[derive(Debug)]
pub struct S3 {
    server: MockServer,
}

/// A bucket and the credentials for it.
#[derive(Debug)]
pub struct Bucket {
    /// The name of the bucket.
    pub name: String,
    /// The AWS region of the bucket.
    pub region: String,
    /// The credentials that give access to the bucket.
    pub credentials: Credentials,
    /// The content of each object, by its key.
    pub objects: BTreeMap<String, Vec<u8>>,
}

impl S3 {
    /// Serves `bucket` on a free port of `host`.
    ///
    /// # Errors
    /// This machine does not have the address `host`.
    pub async fn start(host: &str, bucket: Bucket) -> anyhow::Result<Self> {
        let routes = Router::new().route("/{*path}", get(respond)).with_state(Arc::new(bucket));
        Ok(Self { server: MockServer::start(host, routes).await? })
    }

    /// The URL to configure as the endpoint of the service.
    #[must_use]
    pub fn url(&self) -> String {
        self.server.url()
    }
}

async fn respond(
    State(bucket): State<Arc<Bucket>>,
    Path(path): Path<String>,
    Query(query): Query<BTreeMap<String, String>>,
    uri: Uri,
    headers: HeaderMap,
) -> Response {
    if let Err(code) = bucket.check(&uri, &query, &headers) {
        return refusal(StatusCode::FORBIDDEN, code);
    }
    let Some(key) = path.strip_prefix(&bucket.name) else {
        return refusal(StatusCode::NOT_FOUND, "NoSuchBucket");
    };
    match key.strip_prefix('/') {
        None | Some("") if query.contains_key("list-type") => bucket.list(&query).into_response(),
        Some(key) => bucket.object(key, &headers),
        None => refusal(StatusCode::BAD_REQUEST, "InvalidRequest"),
    }
}

fn refusal(status: StatusCode, code: &str) -> Response {
    (status, format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code></Error>")).into_response()
}

impl Bucket {
    /// Checks the signature of a request, and returns an S3 error code if the request is not signed correctly.
    fn check(
        &self,
        uri: &Uri,
        query: &BTreeMap<String, String>,
        headers: &HeaderMap,
    ) -> Result<(), &'static str> {
        let of = |name: &str| query.get(name).map(String::as_str);
        let (date, signature) = (of("X-Amz-Date").ok_or("AccessDenied")?, of("X-Amz-Signature"));
        let day = date.get(..8).ok_or("AccessDenied")?;
        let scope = format!("{day}/{}/s3/aws4_request", self.region);
        if of("X-Amz-Credential") != Some(&*format!("{}/{scope}", self.credentials.access_key_id)) {
            return Err("InvalidAccessKeyId");
        }
        if of("X-Amz-Security-Token") != self.credentials.session_token.as_deref() {
            return Err("InvalidToken");
        }
        // Use the query as received, because the client signs the percent-encoded form that it sends.
        let mut pairs: Vec<&str> = uri.query().unwrap_or_default().split('&').collect();
        pairs.retain(|pair| !pair.starts_with("X-Amz-Signature="));
        pairs.sort_unstable();
        let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
        let request =
            format!("GET\n{}\n{}\nhost:{host}\n\nhost\nUNSIGNED-PAYLOAD", uri.path(), pairs.join("&"));
        let text = format!("AWS4-HMAC-SHA256\n{date}\n{scope}\n{}", sha256(request.as_bytes()));
        let key = [day, &self.region, "s3", "aws4_request"]
            .into_iter()
            .fold(format!("AWS4{}", self.credentials.secret_access_key).into_bytes(), |key, part| {
                hmac(&key, part.as_bytes())
            });
        let expected = hex(&hmac(&key, text.as_bytes()));
        if signature == Some(&*expected) { Ok(()) } else { Err("SignatureDoesNotMatch") }
    }

    fn list(&self, query: &BTreeMap<String, String>) -> String {
        let prefix = query.get("prefix").map_or("", String::as_str);
        let from = query.get("continuation-token").map_or("", String::as_str);
        let mut matches =
            self.objects.iter().filter(|(key, _)| key.starts_with(prefix) && key.as_str() > from);
        let page: Vec<_> = matches.by_ref().take(PAGE_OBJECTS).collect();
        let contents: String = page
            .iter()
            .map(|(key, object)| {
                format!(
                    "<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>\
                     <ETag>\"{}\"</ETag><Size>{}</Size><StorageClass>STANDARD</StorageClass></Contents>",
                    sha256(object),
                    object.len()
                )
            })
            .collect();
        let next = match (matches.next(), page.last()) {
            (Some(_), Some((last, _))) => format!("<NextContinuationToken>{last}</NextContinuationToken>"),
            _ => String::new(),
        };
        format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\
             <ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Name>{}</Name><Prefix>{prefix}</Prefix>\
             <KeyCount>{}</KeyCount><MaxKeys>{PAGE_OBJECTS}</MaxKeys><IsTruncated>{}</IsTruncated>{contents}{next}\
             </ListBucketResult>",
            self.name,
            page.len(),
            !next.is_empty()
        )
    }

    fn object(&self, key: &str, headers: &HeaderMap) -> Response {
        let Some(object) = self.objects.get(key) else { return refusal(StatusCode::NOT_FOUND, "NoSuchKey") };
        let etag = [(header::ETAG, format!("\"{}\"", sha256(object)))];
        match range_start(headers) {
            Some(from) if from < object.len() => {
                let range = format!("bytes {from}-{}/{}", object.len() - 1, object.len());
                let rest = object[from..].to_vec();
                (StatusCode::PARTIAL_CONTENT, etag, [(header::CONTENT_RANGE, range)], rest).into_response()
            }
            Some(_) => refusal(StatusCode::RANGE_NOT_SATISFIABLE, "InvalidRange"),
            None => (etag, object.clone()).into_response(),
        }
    }
}

fn hmac(key: &[u8], text: &[u8]) -> Vec<u8> {
    let code = Hmac::<Sha256>::new_from_slice(key).expect("invariant: a key may have any length");
    code.chain_update(text).finalize().into_bytes().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example in the AWS documentation of query parameter signatures.
    #[test]
    fn the_signature_matches_the_example_in_the_documentation() {
        let bucket = Bucket {
            name: "examplebucket".to_owned(),
            region: "us-east-1".to_owned(),
            credentials: Credentials {
                access_key_id: "AKIAIOSFODNN7EXAMPLE".to_owned(),
                secret_access_key: "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY".to_owned(),
                session_token: None,
            },
            objects: BTreeMap::new(),
        };
        let check = |signature: &str| {
            let uri: Uri = format!(
                "/test.txt?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F20130524%2F\
                 us-east-1%2Fs3%2Faws4_request&X-Amz-Date=20130524T000000Z&X-Amz-Expires=86400&\
                 X-Amz-SignedHeaders=host&X-Amz-Signature={signature}"
            )
            .parse()
            .unwrap();
            let host = (header::HOST, "examplebucket.s3.amazonaws.com".parse().unwrap());
            let Query(query) = Query::try_from_uri(&uri).unwrap();
            bucket.check(&uri, &query, &HeaderMap::from_iter([host]))
        };
        let signature = "aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404";
        assert_eq!(check(signature), Ok(()));
        assert_eq!(check(&signature.replace('a', "b")), Err("SignatureDoesNotMatch"));
    }
}
