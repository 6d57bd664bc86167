//! Where files come from: what every source is turned into, and the one that is only a file on a web server.

use std::path::Path;
use std::time::Duration;

use reqwest::{Client, RequestBuilder, Url};

use super::Error;

/// Size of a file with a credential.
///
/// Beyond it: `server fetch` fails with exit code 13.
const CREDENTIAL_BYTES_MAX: usize = 64 << 10;

/// A file that is to be fetched.
#[derive(Clone, Debug)]
pub(crate) struct File {
    /// Its path among the model's files.
    pub(crate) path: String,
    /// Where it is.
    pub(crate) place: Place,
    /// Its size, if the source tells.
    pub(crate) bytes: Option<u64>,
    /// Its SHA-256, if that is known.
    pub(crate) sha256: Option<String>,
}

/// Where a file is, and how it is asked for.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    /// On a web server.
    Web { url: Url, login: Login },
    /// In S3: an address is good for a while, so each attempt has its own.
    S3(super::s3::Object),
}

/// What is shown to a web server.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Login {
    Nobody,
    Token(String),
    Password(String, String),
}

impl std::fmt::Debug for Login {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(if *self == Self::Nobody { "Nobody" } else { "(secret)" })
    }
}

impl Place {
    /// Its address now.
    pub(crate) fn url(&self) -> Url {
        match self {
            Self::Web { url, .. } => url.clone(),
            Self::S3(object) => object.url(),
        }
    }

    /// A request for it.
    pub(crate) fn request(&self, client: &Client) -> RequestBuilder {
        let request = client.get(self.url());
        match self {
            Self::Web { login, .. } => login.show(request),
            Self::S3(_) => request,
        }
    }

    pub(crate) fn has_credentials(&self) -> bool {
        match self {
            Self::Web { login, .. } => *login != Login::Nobody,
            Self::S3(object) => object.has_credentials(),
        }
    }
}

impl Login {
    pub(crate) fn show(&self, request: RequestBuilder) -> RequestBuilder {
        match self {
            Self::Nobody => request,
            Self::Token(token) => request.bearer_auth(token),
            Self::Password(name, password) => request.basic_auth(name, Some(password)),
        }
    }
}

/// What a folder of credentials holds.
#[derive(Clone, Default)]
pub(crate) struct Credentials {
    pub(crate) token: Option<String>,
    pub(crate) username: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) access_key: Option<String>,
    pub(crate) secret_key: Option<String>,
    pub(crate) session_token: Option<String>,
}

impl Credentials {
    /// Reads them.
    ///
    /// # Errors
    /// A file is there and cannot be read.
    pub(crate) fn load(folder: Option<&Path>) -> Result<Self, Error> {
        let Some(folder) = folder else { return Ok(Self::default()) };
        let read = |name: &str| {
            let path = folder.join(name);
            match std::fs::read_to_string(&path) {
                Ok(text) if text.len() > CREDENTIAL_BYTES_MAX => {
                    Err(Error::Wrong(format!("{} is too large for a credential", path.display())))
                }
                Ok(text) => Ok(Some(text.trim().to_owned()).filter(|text| !text.is_empty())),
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

    /// What to show to a web server.
    pub(crate) fn login(&self) -> Login {
        match (&self.token, &self.username, &self.password) {
            (Some(token), ..) => Login::Token(token.clone()),
            (None, Some(name), Some(password)) => Login::Password(name.clone(), password.clone()),
            _ => Login::Nobody,
        }
    }
}

/// A file on a web server.
///
/// # Errors
/// `url` is none.
pub(crate) fn web(url: &str, credentials: &Credentials) -> Result<File, Error> {
    let url = Url::parse(url).map_err(|error| Error::Wrong(format!("{url:?} is no address: {error}")))?;
    let name = url.path_segments().and_then(|mut parts| parts.next_back()).unwrap_or_default();
    let path = if name.is_empty() { "model".to_owned() } else { checked_path(name)? };
    Ok(File { path, place: Place::Web { url, login: credentials.login() }, bytes: None, sha256: None })
}

/// A path that stays where it is put.
///
/// # Errors
/// It leads elsewhere.
pub(crate) fn checked_path(path: &str) -> Result<String, Error> {
    let is_good = |part: &str| !matches!(part, "" | "." | "..") && !part.contains(['\\', '\0']);
    if path.len() > 1024 || !path.split('/').all(is_good) {
        return Err(Error::Wrong(format!("the source names a file {path:?}, which is no path")));
    }
    Ok(path.to_owned())
}

/// Who asks. Silence longer than `idle` is an error.
///
/// # Errors
/// The system's certificates cannot be read.
pub(crate) fn client(idle: Duration) -> Result<Client, Error> {
    /// Time in which `server fetch` connects to a source; `--idle-timeout` applies if it is shorter.
    ///
    /// Beyond it: the attempt fails; see `--attempts`.
    const CONNECT: Duration = Duration::from_secs(15);
    // Fails if there is one already, which is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Client::builder()
        .connect_timeout(CONNECT.min(idle))
        .read_timeout(idle)
        .user_agent(concat!("ovfleet/", env!("CARGO_PKG_VERSION")))
        .build()
        .map_err(|error| Error::Wrong(format!("failed to prepare for requests: {error}")))
}
