//! A service like S3 with one bucket, for tests that fetch: objects, whole or in part, and lists of them, a few to a page.
//! Whoever asks has to have signed the address, with the keys that the service knows, as AWS describes it ("Signature
//! Version 4", with the signature in the query).

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::{OriginalUri, State};
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use sha2::{Digest as _, Sha256};
use tokio::task::JoinSet;

/// Objects on a page of a list: so few that a list has several.
const PAGE_OBJECTS: usize = 2;
/// Bytes of what HMAC works on at once, with SHA-256.
const HMAC_BLOCK_BYTES: usize = 64;

/// Who may ask.
#[derive(Clone, Debug)]
pub struct Keys {
    /// The access key's name.
    pub access: String,
    /// The secret.
    pub secret: String,
    /// What goes with keys that are lent.
    pub token: Option<String>,
}

/// A service that answers until it is dropped.
#[derive(Debug)]
pub struct S3 {
    address: SocketAddr,
    _server: JoinSet<()>,
}

#[derive(Debug)]
struct Bucket {
    name: String,
    region: String,
    keys: Keys,
    objects: BTreeMap<String, Vec<u8>>,
}

impl S3 {
    /// Serves `objects` as the bucket `name` of a region, on a free port of `host`.
    ///
    /// # Errors
    /// The address is not there.
    pub async fn start(
        host: &str,
        (name, region): (&str, &str),
        keys: Keys,
        objects: BTreeMap<String, Vec<u8>>,
    ) -> anyhow::Result<Self> {
        let bucket = Bucket { name: name.to_owned(), region: region.to_owned(), keys, objects };
        let pages = Router::new().fallback(answer).with_state(Arc::new(bucket));
        let listener = tokio::net::TcpListener::bind((host, 0)).await?;
        let address = listener.local_addr()?;
        let mut server = JoinSet::new();
        server.spawn(async move {
            drop(axum::serve(listener, pages).await);
        });
        Ok(Self { address, _server: server })
    }

    /// What to write as the service's endpoint.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

async fn answer(
    State(bucket): State<Arc<Bucket>>,
    OriginalUri(uri): OriginalUri,
    headers: HeaderMap,
) -> Response {
    let query = query(&uri);
    if let Err(code) = bucket.check(&uri, &query, &headers) {
        return refusal(StatusCode::FORBIDDEN, code);
    }
    let path = decode(uri.path());
    let Some(key) = path.strip_prefix(&format!("/{}", bucket.name)) else {
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
    /// Whether the address was signed by somebody who has the keys; if not, why, in S3's words.
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
        if of("X-Amz-Credential") != Some(&*format!("{}/{scope}", self.keys.access)) {
            return Err("InvalidAccessKeyId");
        }
        if of("X-Amz-Security-Token") != self.keys.token.as_deref() {
            return Err("InvalidToken");
        }
        // As it was sent: both sides have to encode it in the same way.
        let mut pairs: Vec<&str> = uri.query().unwrap_or_default().split('&').collect();
        pairs.retain(|pair| !pair.starts_with("X-Amz-Signature="));
        pairs.sort_unstable();
        let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
        let request =
            format!("GET\n{}\n{}\nhost:{host}\n\nhost\nUNSIGNED-PAYLOAD", uri.path(), pairs.join("&"));
        let text = format!("AWS4-HMAC-SHA256\n{date}\n{scope}\n{}", hex(&Sha256::digest(request)));
        let key = [day, &self.region, "s3", "aws4_request"]
            .into_iter()
            .fold(format!("AWS4{}", self.keys.secret).into_bytes(), |key, part| {
                hmac(&key, part.as_bytes()).to_vec()
            });
        let wanted = hex(&hmac(&key, text.as_bytes()));
        if signature == Some(&*wanted) { Ok(()) } else { Err("SignatureDoesNotMatch") }
    }

    fn list(&self, query: &BTreeMap<String, String>) -> String {
        let prefix = query.get("prefix").map_or("", String::as_str);
        let from = query.get("continuation-token").map_or("", String::as_str);
        let mut found = self.objects.iter().filter(|(key, _)| key.starts_with(prefix) && key.as_str() > from);
        let page: Vec<_> = found.by_ref().take(PAGE_OBJECTS).collect();
        let contents: String = page
            .iter()
            .map(|(key, object)| {
                format!(
                    "<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>\
                     <ETag>\"{}\"</ETag><Size>{}</Size><StorageClass>STANDARD</StorageClass></Contents>",
                    hex(&Sha256::digest(object)),
                    object.len()
                )
            })
            .collect();
        let next = match (found.next(), page.last()) {
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
        let mark = [(header::ETAG, format!("\"{}\"", hex(&Sha256::digest(object))))];
        let range = headers.get(header::RANGE).and_then(|range| range.to_str().ok());
        let from =
            range.and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok());
        match from {
            Some(from) if from < object.len() => {
                let range = format!("bytes {from}-{}/{}", object.len() - 1, object.len());
                let rest = object[from..].to_vec();
                (StatusCode::PARTIAL_CONTENT, mark, [(header::CONTENT_RANGE, range)], rest).into_response()
            }
            Some(_) => refusal(StatusCode::RANGE_NOT_SATISFIABLE, "InvalidRange"),
            None => (mark, object.clone()).into_response(),
        }
    }
}

/// The members of the query, decoded.
fn query(uri: &Uri) -> BTreeMap<String, String> {
    let pairs = uri.query().unwrap_or_default().split('&');
    pairs.filter_map(|pair| pair.split_once('=')).map(|(name, value)| (decode(name), decode(value))).collect()
}

fn decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut decoded = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let digits = text.get(at + 1..at + 3).and_then(|digits| u8::from_str_radix(digits, 16).ok());
        match (bytes[at], digits) {
            (b'%', Some(byte)) => {
                decoded.push(byte);
                at += 3;
            }
            (byte, _) => {
                decoded.push(byte);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// RFC 2104, with SHA-256.
fn hmac(key: &[u8], text: &[u8]) -> [u8; 32] {
    let mut block = [0; HMAC_BLOCK_BYTES];
    if key.len() > HMAC_BLOCK_BYTES {
        block[..32].copy_from_slice(&Sha256::digest(key));
    } else {
        block[..key.len()].copy_from_slice(key);
    }
    let inner = Sha256::new().chain_update(block.map(|byte| byte ^ 0x36)).chain_update(text).finalize();
    Sha256::new().chain_update(block.map(|byte| byte ^ 0x5c)).chain_update(inner).finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_code_is_that_of_the_rfc() {
        // RFC 4231, test cases 2 and 6.
        let code = hex(&hmac(b"Jefe", b"what do ya want for nothing?"));
        assert_eq!(code, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
        let code = hex(&hmac(&[0xaa; 131], b"Test Using Larger Than Block-Size Key - Hash Key First"));
        assert_eq!(code, "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
    }

    /// The example of AWS's documentation of signatures in the query.
    #[test]
    fn a_signature_is_the_one_of_the_documentation() {
        let bucket = Bucket {
            name: "examplebucket".to_owned(),
            region: "us-east-1".to_owned(),
            keys: Keys {
                access: "AKIAIOSFODNN7EXAMPLE".to_owned(),
                secret: "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY".to_owned(),
                token: None,
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
            bucket.check(&uri, &query(&uri), &HeaderMap::from_iter([host]))
        };
        let signature = "aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404";
        assert_eq!(check(signature), Ok(()));
        assert_eq!(check(&signature.replace('a', "b")), Err("SignatureDoesNotMatch"));
    }
}
