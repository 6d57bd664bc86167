//! Lists objects in S3 and compatible services.

use reqwest::{Client, Url};
use rusty_s3::actions::{ListObjectsV2, S3Action as _};
use rusty_s3::{Bucket, Credentials, UrlStyle};

use super::error::Error;
use super::parts::all_parts;
use super::source::{File, Location, S3Object, SIGNED_FOR, SourceCredentials, checked_path};

/// Number of S3 objects whose keys begin with the given prefix.
///
/// If exceeded: `ovfleet-server fetch` fails with exit code 13.
const OBJECTS_MAX: usize = 10_000;
/// Size of a page of an S3 object list.
///
/// If exceeded: `ovfleet-server fetch` fails with exit code 13.
const PAGE_BYTES_MAX: usize = 16 << 20;

/// The address of an S3 service.
#[derive(Clone, Copy, Debug)]
pub(crate) struct S3Endpoint<'a> {
    pub(crate) endpoint: Option<&'a str>,
    pub(crate) region: &'a str,
}

/// Returns the objects that `object` names in the form BUCKET/KEY or BUCKET/PREFIX/. If the key names a part of a split
/// model, the result contains all parts.
pub(crate) async fn files(
    client: &Client,
    credentials: &SourceCredentials,
    server: S3Endpoint<'_>,
    object: &str,
) -> Result<Vec<File>, Error> {
    let wrong = |problem: String| Error::Wrong(format!("s3: {problem}"));
    let (bucket, key) = object
        .split_once('/')
        .ok_or_else(|| wrong(format!("{object:?} must be BUCKET/KEY or BUCKET/PREFIX/")))?;
    let (endpoint, style) = match server.endpoint {
        Some(endpoint) => (endpoint.to_owned(), UrlStyle::Path),
        None => (format!("https://s3.{}.amazonaws.com", server.region), UrlStyle::VirtualHost),
    };
    let url =
        Url::parse(&endpoint).map_err(|error| wrong(format!("{endpoint:?} is not a valid URL: {error}")))?;
    let bucket = Bucket::new(url, style, bucket.to_owned(), server.region.to_owned()).map_err(|error| {
        wrong(format!("the URL of the bucket {bucket:?} at {endpoint:?} is invalid: {error}"))
    })?;
    let keys = match (&credentials.access_key, &credentials.secret_key, &credentials.session_token) {
        (Some(key), Some(secret), Some(token)) => Some(Credentials::new_with_token(key, secret, token)),
        (Some(key), Some(secret), None) => Some(Credentials::new(key, secret)),
        (None, None, None) => None,
        _ => return Err(wrong("the credentials need both accessKeyId and secretAccessKey".to_owned())),
    };
    let file = |key: &str, path: &str, bytes| {
        let object = S3Object { bucket: bucket.clone(), keys: keys.clone(), key: key.to_owned() };
        Ok(File { path: checked_path(path)?, location: Location::S3(object), bytes, sha256: None })
    };
    if !key.is_empty() && !key.ends_with('/') {
        let files = all_parts(key)?;
        return files.iter().map(|key| file(key, key.rsplit('/').next().unwrap_or(key), None)).collect();
    }
    let mut files = Vec::new();
    for (found, bytes) in list(client, &bucket, keys.as_ref(), key).await? {
        // Skip objects whose keys end with a slash: S3 consoles create them for empty directories.
        match found.strip_prefix(key) {
            Some(path) if !path.is_empty() && !path.ends_with('/') => files.push(file(&found, path, bytes)?),
            _ => {}
        }
    }
    if files.is_empty() {
        return Err(wrong(format!("no files have the prefix {key:?}")));
    }
    Ok(files)
}

async fn list(
    client: &Client,
    bucket: &Bucket,
    keys: Option<&Credentials>,
    prefix: &str,
) -> Result<Vec<(String, Option<u64>)>, Error> {
    let mut found = Vec::new();
    let mut next: Option<String> = None;
    loop {
        let mut action = bucket.list_objects_v2(keys);
        action.with_prefix(prefix);
        if let Some(next) = &next {
            action.with_continuation_token(next.clone());
        }
        let url = action.sign(SIGNED_FOR);
        let failed = |error: reqwest::Error| Error::transport(url.as_str(), &error);
        let mut answer = client.get(url.clone()).send().await.map_err(failed)?;
        if let Some(error) = Error::status(url.as_str(), answer.status(), keys.is_some()) {
            return Err(error);
        }
        let mut body = Vec::new();
        while let Some(chunk) = answer.chunk().await.map_err(failed)? {
            body.extend_from_slice(&chunk);
            if body.len() > PAGE_BYTES_MAX {
                return Err(Error::Wrong(format!(
                    "s3: a page of the object list is longer than {PAGE_BYTES_MAX} bytes"
                )));
            }
        }
        let page = ListObjectsV2::parse_response(&String::from_utf8_lossy(&body))
            .map_err(|error| Error::Wrong(format!("s3: the response is not a list of objects: {error}")))?;
        found.extend(page.contents.into_iter().map(|object| (object.key.to_string(), object.size)));
        if found.len() > OBJECTS_MAX {
            return Err(Error::Wrong(format!(
                "s3: more than {OBJECTS_MAX} objects have the prefix {prefix:?}"
            )));
        }
        match page.next_continuation_token {
            Some(token) => next = Some(token.to_string()),
            None => return Ok(found),
        }
    }
}
