//! How sources of replicas are written.

use std::fmt;
use std::net::Ipv6Addr;
use std::str::FromStr;

/// A replica by its address: HOST:PORT/GRPC_PORT.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FixedReplica {
    /// An IP address or a name.
    pub host: String,
    /// Of its API.
    pub port: u16,
    /// Of its load reports.
    pub grpc_port: Option<u16>,
}

/// A name whose every address is a replica: NAME:PORT/GRPC_PORT.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DnsName(pub FixedReplica);

/// A Kubernetes Service: NAMESPACE/NAME or NAME.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServiceName {
    /// Its namespace; the router's own if it is not given.
    pub namespace: Option<String>,
    /// Its name.
    pub name: String,
}

pub(super) fn with_port(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

impl FromStr for FixedReplica {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no address of a replica: write HOST:PORT/GRPC_PORT");
        let port = |text: &str| text.parse().ok().filter(|&port: &u16| port > 0).ok_or_else(wrong);
        let (address, grpc_port) = match text.split_once('/') {
            Some((address, grpc_port)) => (address, Some(port(grpc_port)?)),
            None => (text, None),
        };
        let (host, http_port) = address.rsplit_once(':').ok_or_else(wrong)?;
        let host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            Some(host) => host.parse::<Ipv6Addr>().map_err(|_| wrong())?.to_string(),
            None => host.to_owned(),
        };
        let named = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '.' | '-' | '_');
        if host.is_empty() || !(host.contains(':') || host.chars().all(named)) {
            return Err(wrong());
        }
        Ok(Self { host, port: port(http_port)?, grpc_port })
    }
}

impl fmt::Display for FixedReplica {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&with_port(&self.host, self.port))?;
        self.grpc_port.map_or(Ok(()), |port| write!(formatter, "/{port}"))
    }
}

impl FromStr for DnsName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse().map(Self)
    }
}

impl fmt::Display for DnsName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

impl FromStr for ServiceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let label = |text: &str| {
            let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
            !text.is_empty() && text.len() <= 63 && text.bytes().all(allowed)
        };
        let (namespace, name) = match text.split_once('/') {
            Some((namespace, name)) => (Some(namespace), name),
            None => (None, text),
        };
        if label(name) && namespace.is_none_or(label) {
            Ok(Self { namespace: namespace.map(str::to_owned), name: name.to_owned() })
        } else {
            Err(format!("{text:?} is no Service: write NAMESPACE/NAME or NAME"))
        }
    }
}

impl fmt::Display for ServiceName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.namespace {
            Some(namespace) => write!(formatter, "{namespace}/{}", self.name),
            None => formatter.write_str(&self.name),
        }
    }
}
