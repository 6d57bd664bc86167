//! Checks the sources of images as the server does when it starts: pods with an entry that the server refuses would
//! never become ready, and a pattern in the schema cannot express all rules. This module is pure.
//!
//! `operator/tests/fixtures/media-sources.yaml` contains examples. A test of the operator and a test of the server read
//! it, so that both programs accept the same entries.

use ipnet::IpNet;
use reqwest::Url;

/// The entry of `allowedDomains` that allows all hosts.
const ALL: &str = "all";

/// Checks an entry of `allowedDomains`. The error describes what is wrong.
pub(super) fn check_domain(text: &str) -> Result<(), String> {
    if is_domain(text.trim()) {
        return Ok(());
    }
    Err(format!(
        "{text:?} is not a host: use a name or address, optionally followed by a port from 1 to 65535 \
         (default: 80 and 443), such as images.example.com, minio.storage.svc:9000 or [2001:db8::1]; {ALL:?} \
         allows all hosts on ports 80 and 443"
    ))
}

/// Whether the text is a host, with or without a port, or allows all hosts. The server's `MediaDomain` has the same
/// rules.
fn is_domain(text: &str) -> bool {
    if text == ALL {
        return true;
    }
    let (name, port) = match text.rsplit_once(':') {
        Some((name, port)) if !port.ends_with(']') => (name, Some(port)),
        _ => (text, None),
    };
    if port.is_some_and(|port| !is_port(port)) {
        return false;
    }
    // Wildcards are not supported: a host that contains `*` would match no URL.
    if name.contains(['/', '\\', '@', '?', '#', '*', '%']) || name.contains(char::is_whitespace) {
        return false;
    }
    let Ok(url) = Url::parse(&format!("http://{name}/")) else { return false };
    let has_host = url.host_str().is_some_and(|host| !host.strip_suffix('.').unwrap_or(host).is_empty());
    url.port().is_none() && has_host
}

fn is_port(text: &str) -> bool {
    let port: Option<u16> = text.parse().ok();
    text.bytes().all(|digit| digit.is_ascii_digit()) && port.is_some_and(|port| port > 0)
}

/// Checks an entry of `allowedNetworks`, a network in CIDR notation. The error describes what is wrong.
pub(super) fn check_network(text: &str) -> Result<(), String> {
    let network: IpNet = text.trim().parse().map_err(|_| {
        format!("{text:?} is not a network: use an address and a prefix length, e.g. 10.0.0.0/8 or fd00::/8")
    })?;
    let first = network.trunc();
    if first == network {
        Ok(())
    } else {
        Err(format!("{text:?} has bits set after its prefix of {} bits: use {first}", network.prefix_len()))
    }
}
