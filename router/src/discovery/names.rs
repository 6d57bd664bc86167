//! Parses the sources of replicas on the command line.

use std::fmt;
use std::net::Ipv6Addr;
use std::str::FromStr;

/// The address of a replica: HOST:PORT or HOST:PORT/GRPC_PORT.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FixedReplica {
    /// The IP address or the name of the host.
    pub host: String,
    /// The port of the replica's API.
    pub port: u16,
    /// The port of the replica's load reports, if it reports its load.
    pub grpc_port: Option<u16>,
}

/// A DNS name that resolves to the addresses of replicas: NAME:PORT or NAME:PORT/GRPC_PORT.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DnsName(pub FixedReplica);

/// A Kubernetes Service: NAMESPACE/NAME or NAME.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServiceName {
    /// The namespace of the Service, or `None` for the namespace of the router.
    pub namespace: Option<String>,
    /// The name of the Service.
    pub name: String,
}

/// The names of the ports of a Service.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PortNames {
    /// The name of the API port.
    pub http: String,
    /// The name of the port for load reports.
    pub grpc: String,
}

pub(super) fn with_port(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

impl FromStr for FixedReplica {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid =
            || format!("{text:?} is not the address of a replica: use HOST:PORT or HOST:PORT/GRPC_PORT");
        let port = |text: &str| text.parse().ok().filter(|&port: &u16| port > 0).ok_or_else(invalid);
        let (address, grpc_port) = match text.split_once('/') {
            Some((address, grpc_port)) => (address, Some(port(grpc_port)?)),
            None => (text, None),
        };
        let (host, http_port) = address.rsplit_once(':').ok_or_else(invalid)?;
        let host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            Some(host) => host.parse::<Ipv6Addr>().map_err(|_| invalid())?.to_string(),
            None => host.to_owned(),
        };
        let is_allowed = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '.' | '-' | '_');
        if host.is_empty() || !(host.contains(':') || host.chars().all(is_allowed)) {
            return Err(invalid());
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
        let replicas = text.parse().map(Self);
        replicas.map_err(|_| {
            format!("{text:?} is not a DNS name with ports: use NAME:PORT or NAME:PORT/GRPC_PORT")
        })
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
            Err(format!(
                "{text:?} is not the name of a Service: use NAMESPACE/NAME or NAME, each with 1 to 63 lowercase \
                 letters, digits and hyphens"
            ))
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
