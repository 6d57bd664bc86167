//! Defines the files of a source and their locations, and implements the source for a single URL.

use std::io::Read as _;
use std::path::Path;
use std::time::Duration;

use process::error::chain;
use reqwest::{Client, RequestBuilder, Url};
use rusty_s3::actions::S3Action as _;
use rusty_s3::{Bucket, Credentials};

use super::error::Error;
use super::parts::all_parts;

/// Size of a file in the directory given by `--credentials`.
///
/// If exceeded: `ovfleet-server fetch` fails with exit code 13.
const CREDENTIAL_BYTES_MAX: usize = 64 << 10;
/// The validity period of a signed URL. A request with the URL must begin within this time.
pub(super) const SIGNED_FOR: Duration = Duration::from_secs(15 * 60);

/// The files of a source, and their revision.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) files: Vec<File>,
    /// The commit of the files, if the source has commits.
    pub(crate) revision: Option<String>,
}

impl Source {
    /// Returns a source without commits.
    pub(crate) fn of(files: Vec<File>) -> Self {
        Self { files, revision: None }
    }
}

/// A file to fetch.
#[derive(Clone, Debug)]
pub(crate) struct File {
    /// The path of the file relative to the directory of the model's files.
    pub(crate) path: String,
    /// The location of the file.
    pub(crate) location: Location,
    /// The size of the file in bytes, if the source lists it.
    pub(crate) bytes: Option<u64>,
    /// The SHA-256 digest of the file, if it is known.
    pub(crate) sha256: Option<String>,
}

/// The location of a file, and the credentials for it.
#[derive(Clone, Debug)]
pub(crate) enum Location {
    /// A URL.
    Web { url: Url, credentials: HttpCredentials },
    /// An object in S3. A new URL is signed for each attempt, because signatures expire.
    S3(S3Object),
}

#[derive(Clone)]
pub(crate) struct S3Object {
    pub(super) bucket: Bucket,
    pub(super) keys: Option<Credentials>,
    pub(super) key: String,
}

impl std::fmt::Debug for S3Object {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "s3://{}/{}", self.bucket.name(), self.key)
    }
}

impl S3Object {
    pub(crate) fn url(&self) -> Url {
        self.bucket.get_object(self.keys.as_ref(), &self.key).sign(SIGNED_FOR)
    }

    pub(crate) fn has_credentials(&self) -> bool {
        self.keys.is_some()
    }
}

/// The credentials for a web server.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum HttpCredentials {
    Anonymous,
    Token(String),
    Password(String, String),
}

impl std::fmt::Debug for HttpCredentials {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(if *self == Self::Anonymous { "Anonymous" } else { "(secret)" })
    }
}

impl Location {
    /// Returns the URL for a request that begins now.
    pub(crate) fn url(&self) -> Url {
        match self {
            Self::Web { url, .. } => url.clone(),
            Self::S3(object) => object.url(),
        }
    }

    /// Returns a request for the file.
    pub(crate) fn request(&self, client: &Client) -> RequestBuilder {
        let request = client.get(self.url());
        match self {
            Self::Web { credentials, .. } => credentials.add_to(request),
            Self::S3(_) => request,
        }
    }

    pub(crate) fn has_credentials(&self) -> bool {
        match self {
            Self::Web { credentials, .. } => *credentials != HttpCredentials::Anonymous,
            Self::S3(object) => object.has_credentials(),
        }
    }
}

impl HttpCredentials {
    /// Adds the credentials to a request.
    pub(crate) fn add_to(&self, request: RequestBuilder) -> RequestBuilder {
        match self {
            Self::Anonymous => request,
            Self::Token(token) => request.bearer_auth(token),
            Self::Password(name, password) => request.basic_auth(name, Some(password)),
        }
    }
}

/// The credentials in the directory given by `--credentials`.
#[derive(Clone, Default)]
pub(crate) struct SourceCredentials {
    pub(crate) token: Option<String>,
    pub(crate) username: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) access_key: Option<String>,
    pub(crate) secret_key: Option<String>,
    pub(crate) session_token: Option<String>,
}

impl SourceCredentials {
    /// Reads the credentials.
    ///
    /// # Errors
    /// A file exists but cannot be read or is too large.
    pub(crate) fn load(directory: Option<&Path>) -> Result<Self, Error> {
        let Some(directory) = directory else { return Ok(Self::default()) };
        let read = |name: &str| {
            let path = directory.join(name);
            let mut text = String::new();
            let size_max = CREDENTIAL_BYTES_MAX as u64 + 1;
            match std::fs::File::open(&path).and_then(|file| file.take(size_max).read_to_string(&mut text)) {
                Ok(size) if size > CREDENTIAL_BYTES_MAX => {
                    let problem = format!("{} is larger than {CREDENTIAL_BYTES_MAX} bytes", path.display());
                    Err(Error::Wrong(problem))
                }
                Ok(_) => Ok(Some(text.trim().to_owned()).filter(|text| !text.is_empty())),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
                Err(error) => Err(Error::disk("read", &path, error)),
            }
        };
        Ok(Self {
            token: read("token")?,
            username: read("username")?,
            password: read("password")?,
            access_key: read("accessKeyId")?,
            secret_key: read("secretAccessKey")?,
            session_token: read("sessionToken")?,
        })
    }

    /// Returns the credentials for a web server.
    pub(crate) fn http_credentials(&self) -> HttpCredentials {
        match (&self.token, &self.username, &self.password) {
            (Some(token), ..) => HttpCredentials::Token(token.clone()),
            (None, Some(name), Some(password)) => HttpCredentials::Password(name.clone(), password.clone()),
            _ => HttpCredentials::Anonymous,
        }
    }
}

/// Returns the file at a URL. If it is a part of a split model, returns all parts.
///
/// # Errors
/// `url` or the file name in it is invalid, or the file is a part of a model with too many parts.
pub(crate) fn web(url: &str, credentials: &SourceCredentials) -> Result<Vec<File>, Error> {
    let url =
        Url::parse(url).map_err(|error| Error::Wrong(format!("{url:?} is not a valid URL: {error}")))?;
    let file = |path: &String| {
        let mut url = url.clone();
        url.set_path(path);
        let name = path.rsplit('/').next().unwrap_or_default();
        let path = if name.is_empty() { "model".to_owned() } else { checked_path(name)? };
        let location = Location::Web { url, credentials: credentials.http_credentials() };
        Ok(File { path, location, bytes: None, sha256: None })
    };
    all_parts(url.path())?.iter().map(file).collect()
}

/// Returns the path if it is valid and does not lead out of its directory.
///
/// # Errors
/// The path is too long, has a component that is empty, `.` or `..`, or contains a backslash or a NUL character.
pub(crate) fn checked_path(path: &str) -> Result<String, Error> {
    let is_good = |part: &str| !matches!(part, "" | "." | "..") && !part.contains(['\\', '\0']);
    if path.len() > 1024 || !path.split('/').all(is_good) {
        return Err(Error::Wrong(format!(
            "{path:?} is not a valid file path (allowed: relative paths of up to 1024 bytes without backslashes, NUL \
             characters, or components that are empty, \".\" or \"..\")"
        )));
    }
    Ok(path.to_owned())
}

/// Returns an HTTP client. Requests fail if connecting takes too long or the source sends no data for longer than
/// `idle`.
///
/// # Errors
/// The client cannot be created, for example because the system's certificates cannot be read.
pub(crate) fn client(idle: Duration) -> Result<Client, Error> {
    /// Time within which `ovfleet-server fetch` must connect to a source; `--idle-timeout` applies if it is
    /// shorter.
    ///
    /// If exceeded: the attempt to list the files or to fetch a file fails (see `--attempts`).
    const CONNECT: Duration = Duration::from_secs(15);
    // Installing fails only if a provider is already installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Client::builder()
        .connect_timeout(CONNECT.min(idle))
        .read_timeout(idle)
        .user_agent(concat!("ovfleet/", env!("CARGO_PKG_VERSION")))
        .build()
        .map_err(|error| Error::Wrong(format!("failed to create the HTTP client: {}", chain(&error))))
}
