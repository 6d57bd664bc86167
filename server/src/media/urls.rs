//! Decides which references to images the server follows. This module is pure: it resolves no names and reads no files.

use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

use reqwest::Url;

use super::addresses::{AddressPolicy, is_never_allowed};
use super::error::MediaError;

/// Length of a URL or path of an image.
///
/// If exceeded: 400, `invalid_image_url`.
pub(super) const REFERENCE_BYTES_MAX: usize = 8192;
/// The ports that an entry of `--allowed-media-domains` without a port allows.
const DEFAULT_PORTS: [u16; 2] = [80, 443];
/// The value of `--allowed-media-domains` that allows all hosts.
const ALL: &str = "all";

/// A request's reference to an image.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Reference {
    /// An `http:` or `https:` URL.
    Web(Url),
    /// The absolute path of a file, which may contain `..`.
    File(PathBuf),
}

impl Reference {
    /// Parses a reference. An absolute path is not a URL, so its `%` and `?` are characters of file names.
    ///
    /// # Errors
    /// The reference is too long, or it is neither a URL with a supported scheme nor an absolute path.
    pub(super) fn parse(text: &str) -> Result<Self, MediaError> {
        if text.len() > REFERENCE_BYTES_MAX {
            return Err(MediaError::ReferenceTooLong { bytes_max: REFERENCE_BYTES_MAX });
        }
        if text.starts_with('/') {
            return Ok(Self::File(text.into()));
        }
        let url = Url::parse(text).map_err(|_| MediaError::InvalidReference)?;
        match url.scheme() {
            "http" | "https" => Ok(Self::Web(url)),
            // `to_file_path` fails for a URL with a host other than `localhost`, which would refer to another machine.
            "file" => url.to_file_path().map(Self::File).map_err(|()| MediaError::InvalidReference),
            scheme => Err(MediaError::UnsupportedScheme { scheme: scheme.to_owned() }),
        }
    }
}

/// An entry of `--allowed-media-domains`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MediaDomain {
    /// All hosts, on the default ports.
    All,
    /// One host, in the form of [`Url::host_str`] without a trailing dot.
    Host {
        /// The name or address of the host.
        host: String,
        /// The allowed port. `None` stands for the default ports of HTTP and HTTPS.
        port: Option<u16>,
    },
}

impl FromStr for MediaDomain {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || {
            format!(
                "{text:?} is not a host: use a name or address, optionally followed by a port from 1 to 65535 \
                 (default: 80 and 443), such as images.example.com, minio.storage.svc:9000 or [2001:db8::1]; {ALL:?} \
                 allows all hosts on ports 80 and 443"
            )
        };
        let text = text.trim();
        if text == ALL {
            return Ok(Self::All);
        }
        let (name, port) = match text.rsplit_once(':') {
            Some((name, port)) if !port.ends_with(']') => (name, Some(port)),
            _ => (text, None),
        };
        let is_number = |port: &&str| !port.is_empty() && port.bytes().all(|digit| digit.is_ascii_digit());
        let port = match port {
            Some(port) => {
                let number = Some(port).filter(is_number).and_then(|port| port.parse().ok());
                Some(number.filter(|number| *number > 0).ok_or_else(invalid)?)
            }
            None => None,
        };
        // Hosts are compared literally, so a wildcard would match no URL.
        if name.contains(['/', '\\', '@', '?', '#', '*', '%']) || name.contains(char::is_whitespace) {
            return Err(invalid());
        }
        let url = Url::parse(&format!("http://{name}/")).map_err(|_| invalid())?;
        if url.port().is_some() {
            return Err(invalid());
        }
        let host = url.host_str().map(without_root).filter(|host| !host.is_empty()).ok_or_else(invalid)?;
        Ok(Self::Host { host: host.to_owned(), port })
    }
}

/// Decides which URLs the server fetches, including the targets of redirects.
#[derive(Clone, Debug, Default)]
pub(super) struct UrlPolicy {
    pub(super) domains: Vec<MediaDomain>,
    pub(super) addresses: AddressPolicy,
}

impl UrlPolicy {
    /// Checks a URL. The addresses of a name are checked when the name is resolved.
    ///
    /// # Errors
    /// The policy does not allow the URL.
    pub(super) fn check(&self, url: &Url) -> Result<(), MediaError> {
        if self.domains.is_empty() {
            return Err(MediaError::UrlsDisabled);
        }
        let (Some(host), Some(port), "http" | "https") =
            (url.host_str(), url.port_or_known_default(), url.scheme())
        else {
            return Err(MediaError::UnsupportedScheme { scheme: url.scheme().to_owned() });
        };
        if !url.username().is_empty() || url.password().is_some() {
            return Err(MediaError::Credentials);
        }
        self.check_host(without_root(host), port)?;
        match address(host) {
            Some(address) if is_never_allowed(address) => Err(MediaError::AddressNeverAllowed { address }),
            Some(address) if !self.addresses.permits(address) => {
                Err(MediaError::AddressNotAllowed { address })
            }
            _ => Ok(()),
        }
    }

    fn check_host(&self, host: &str, port: u16) -> Result<(), MediaError> {
        let allows_host = |domain: &&MediaDomain| match domain {
            MediaDomain::All => true,
            MediaDomain::Host { host: allowed, .. } => allowed == host,
        };
        let mut allowed = self.domains.iter().filter(allows_host).peekable();
        if allowed.peek().is_none() {
            return Err(MediaError::HostNotAllowed { host: host.to_owned() });
        }
        let allows_port = |domain: &MediaDomain| match domain {
            MediaDomain::Host { port: Some(allowed), .. } => *allowed == port,
            MediaDomain::All | MediaDomain::Host { port: None, .. } => DEFAULT_PORTS.contains(&port),
        };
        if !allowed.any(allows_port) {
            return Err(MediaError::PortNotAllowed { host: host.to_owned(), port });
        }
        Ok(())
    }
}

/// Returns the host without the trailing dot that makes a name absolute. The policy treats names with and without this
/// dot alike.
fn without_root(host: &str) -> &str {
    host.strip_suffix('.').unwrap_or(host)
}

/// Returns the address if the host of a URL is an IP address. [`Url`] has already converted decimal, octal, hexadecimal
/// and shortened forms of IPv4 addresses to the usual form.
fn address(host: &str) -> Option<IpAddr> {
    match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(v6) => v6.parse().ok().map(IpAddr::V6),
        None => host.parse().ok().map(IpAddr::V4),
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use rand::rngs::StdRng;
    use rand::{RngExt as _, SeedableRng as _};

    use super::*;

    fn policy(domains: &[&str]) -> UrlPolicy {
        let domains = domains.iter().map(|domain| domain.parse().unwrap()).collect();
        UrlPolicy { domains, addresses: AddressPolicy::default() }
    }

    /// Returns `ok` if the policy allows the URL, and otherwise the debug form of the error. If the text is not a web
    /// URL, returns the debug form of the result of parsing it.
    fn decision(policy: &UrlPolicy, text: &str) -> String {
        match Reference::parse(text) {
            Ok(Reference::Web(url)) => {
                policy.check(&url).map_or_else(|error| format!("{error:?}"), |()| "ok".to_owned())
            }
            other => format!("{other:?}"),
        }
    }

    #[test]
    fn references_are_web_urls_or_files() {
        let file = |path: &str| Reference::File(path.into());
        for (text, path) in [
            ("/a/b.png", "/a/b.png"),
            ("/a/100%?.png", "/a/100%?.png"),
            ("file:///a/b%20c.png", "/a/b c.png"),
            ("FILE:///a", "/a"),
            ("file:/a/b", "/a/b"),
            ("file://localhost/a", "/a"),
            ("file:///a/../../b", "/b"),
            ("file:///a/%2e%2e/b", "/b"),
            ("file:///a/..%2fb", "/a/../b"),
        ] {
            assert_eq!(Reference::parse(text).unwrap(), file(path), "{text}");
        }
        for text in
            ["", "a.png", "../a.png", "image.png?x", "file://host/a", "http://", "http:///", "http://a b/"]
        {
            let error = Reference::parse(text).unwrap_err();
            assert!(matches!(error, MediaError::InvalidReference), "{text}: {error:?}");
        }
        for text in ["ftp://a/b", "sftp://a/b", "gs://a/b", "data:image/png;base64,AA", "blob:x", "C:/a.png"]
        {
            let error = Reference::parse(text).unwrap_err();
            assert!(matches!(error, MediaError::UnsupportedScheme { .. }), "{text}: {error:?}");
        }
        let long = format!("http://a/{}", "x".repeat(REFERENCE_BYTES_MAX));
        assert!(matches!(Reference::parse(&long), Err(MediaError::ReferenceTooLong { .. })));
        assert!(Reference::parse(&long[..REFERENCE_BYTES_MAX]).is_ok());
    }

    #[test]
    fn only_the_listed_hosts_are_allowed() {
        let listed =
            policy(&["images.example.com", "Ümlaut.example", "9.9.9.9", "[2606:4700::1]", "a.example:9000"]);
        for allowed in [
            "http://images.example.com/a.png",
            "https://IMAGES.example.com./a?b#c",
            "https://images.example.com:443/",
            "http://images.example.com:443/",
            "http:images.example.com",
            "http://images%2eexample.com/",
            "https://xn--mlaut-jva.example/",
            "http://9.9.9.9/",
            "http://0x09090909/",
            "http://[2606:4700:0::0001]/",
            "http://a.example:9000/",
        ] {
            assert_eq!(decision(&listed, allowed), "ok", "{allowed}");
        }
        for (refused, reason) in [
            ("http://example.com/", "HostNotAllowed"),
            ("http://x.images.example.com/", "HostNotAllowed"),
            ("http://images.example.com.evil.test/", "HostNotAllowed"),
            ("http://evilimages.example.com/", "HostNotAllowed"),
            ("http://evil.test/images.example.com", "HostNotAllowed"),
            ("http://evil.test\\@images.example.com/", "HostNotAllowed"),
            ("http://evil.test#@images.example.com/", "HostNotAllowed"),
            ("http://evil.test?@images.example.com/", "HostNotAllowed"),
            ("http://images.example.com../", "HostNotAllowed"),
            ("http://9.9.9.10/", "HostNotAllowed"),
            ("http://user@images.example.com/", "Credentials"),
            ("http://:secret@images.example.com/", "Credentials"),
            ("http://images.example.com@evil.test/", "Credentials"),
            ("http://images.example.com:8080/", "PortNotAllowed"),
            ("http://images.example.com:22/", "PortNotAllowed"),
            ("http://a.example/", "PortNotAllowed"),
            ("https://a.example/", "PortNotAllowed"),
            ("http://a.example:9001/", "PortNotAllowed"),
        ] {
            let decision = decision(&listed, refused);
            assert!(decision.starts_with(reason), "{refused}: {decision}");
        }
        assert_eq!(decision(&policy(&[]), "http://images.example.com/"), "UrlsDisabled");
    }

    #[test]
    fn all_allows_every_public_host_on_the_default_ports() {
        let all = policy(&["all"]);
        for allowed in
            ["http://a.example/", "https://b.example/", "http://8.8.8.8/", "http://[2606:4700::1111]/"]
        {
            assert_eq!(decision(&all, allowed), "ok", "{allowed}");
        }
        assert!(decision(&all, "http://a.example:6379/").starts_with("PortNotAllowed"));
        for refused in [
            "http://127.0.0.1/",
            "http://127.1/",
            "http://2130706433/",
            "http://0x7f000001/",
            "http://0x7f.1/",
            "http://0177.0.0.1/",
            "http://017700000001/",
            "http://127.0.0.1./",
            "http://１２７.０.０.１/",
            "http://127%2e0%2e0%2e1/",
            "http://0/",
            "http://[::1]/",
            "http://[::]/",
            "http://[::ffff:127.0.0.1]/",
            "http://[::ffff:7f00:1]/",
            "http://[64:ff9b::10.0.0.1]/",
            "http://[2002:7f00:1::]/",
        ] {
            let decision = decision(&all, refused);
            assert!(decision.starts_with("AddressNotAllowed"), "{refused}: {decision}");
        }
        // A listed address that is not public must also be in an allowed network.
        let listed = policy(&["127.0.0.1:8080"]);
        assert!(decision(&listed, "http://127.0.0.1:8080/").starts_with("AddressNotAllowed"));
        let addresses = AddressPolicy { allowed_networks: vec!["127.0.0.0/8".parse().unwrap()] };
        assert_eq!(decision(&UrlPolicy { addresses, ..listed }, "http://127.0.0.1:8080/"), "ok");
    }

    #[test]
    fn the_message_for_an_address_that_no_flag_allows_names_no_flag() {
        let networks = vec!["0.0.0.0/0".parse().unwrap(), "::/0".parse().unwrap()];
        let everything = AddressPolicy { allowed_networks: networks };
        for policy in [policy(&["all"]), UrlPolicy { addresses: everything, ..policy(&["all"]) }] {
            for refused in [
                "http://169.254.169.254/latest/meta-data/",
                "http://2852039166/",
                "http://168.63.129.16/",
                "http://[0:0:0:0:0:ffff:a9fe:a9fe]/",
                "http://[fd00:ec2::254]/",
                "http://[fe80::1]/",
            ] {
                let error = policy.check(&Url::parse(refused).unwrap()).unwrap_err();
                assert!(matches!(error, MediaError::AddressNeverAllowed { .. }), "{refused}: {error:?}");
                assert!(!error.to_string().contains("--allowed-media-networks"), "{refused}: {error}");
            }
        }
    }

    /// Writes an IPv4 address in a random form that `inet_aton` and URL parsers accept: as one to four decimal, octal
    /// or hexadecimal numbers.
    fn spelled(address: Ipv4Addr, random: &mut StdRng) -> String {
        let [a, b, c, d] = address.octets().map(u32::from);
        let numbers = match random.random_range(1..=4) {
            1 => vec![address.to_bits()],
            2 => vec![a, address.to_bits() & 0xff_ffff],
            3 => vec![a, b, c << 8 | d],
            _ => vec![a, b, c, d],
        };
        let mut number = |number: &u32| match random.random_range(0..5) {
            0 => format!("{number:#x}"),
            1 => format!("0X{number:08X}"),
            2 => format!("0{number:o}"),
            3 => format!("000{number:o}"),
            _ => number.to_string(),
        };
        numbers.iter().map(&mut number).collect::<Vec<_>>().join(".")
    }

    #[test]
    fn every_spelling_of_an_address_gets_the_same_decision() {
        let seed = 0x6d65_6469_6133;
        println!("seed: {seed:#x}");
        let mut random = StdRng::seed_from_u64(seed);
        let all = policy(&["all"]);
        let (mut allowed, mut refused) = (0, 0);
        for _ in 0..20_000 {
            let private = [0x7f00_0001_u32, 0x0a00_0000, 0xa9fe_a9fe, 0xc0a8_0000];
            let bits = match random.random_bool(0.5) {
                true => private[random.random_range(0..4)] | random.random_range(0..0x100),
                false => random.random(),
            };
            let address = Ipv4Addr::from_bits(bits);
            let is_permitted = AddressPolicy::default().permits(address.into());
            if is_permitted {
                allowed += 1
            } else {
                refused += 1
            }
            let expected = match is_permitted {
                true => "ok",
                false if is_never_allowed(address.into()) => "AddressNeverAllowed",
                false => "AddressNotAllowed",
            };
            let dot = if random.random_bool(0.2) { "." } else { "" };
            for host in [spelled(address, &mut random) + dot, format!("[::ffff:{address}]")] {
                let decision = decision(&all, &format!("http://{host}/a.png"));
                assert!(decision.starts_with(expected), "{host} is {address}: {decision}");
            }
        }
        assert!(allowed > 4_000 && refused > 4_000, "{allowed} {refused}");
    }

    #[test]
    fn no_text_leads_to_another_host() {
        const PIECES: [&str; 24] = [
            "http:",
            "https:",
            "file:",
            "/",
            "//",
            "\\",
            "@",
            ":",
            "?",
            "#",
            ".",
            "%2e",
            "%00",
            "\t",
            "\n",
            " ",
            "80",
            "9000",
            "good.test",
            "evil.test",
            "127.0.0.1",
            "[::1]",
            "localhost",
            "user",
        ];
        let seed = 0x6d65_6469_6134;
        println!("seed: {seed:#x}");
        let mut random = StdRng::seed_from_u64(seed);
        let policy = policy(&["good.test"]);
        let mut allowed = 0;
        for _ in 0..20_000 {
            let mut text = if random.random_bool(0.7) { "http://".to_owned() } else { String::new() };
            for _ in 0..random.random_range(1..8) {
                text.push_str(PIECES[random.random_range(0..PIECES.len())]);
            }
            let Ok(Reference::Web(url)) = Reference::parse(&text) else { continue };
            if policy.check(&url).is_ok() {
                allowed += 1;
                assert!(matches!(url.host_str(), Some("good.test" | "good.test.")), "{text:?}");
                assert!(matches!(url.port_or_known_default(), Some(80 | 443)), "{text:?}");
                assert_eq!((url.username(), url.password()), ("", None), "{text:?}");
                // The HTTP client parses the text of the URL again and must get the same host.
                let uri: axum::http::Uri = url.as_str().parse().unwrap();
                assert_eq!(uri.host(), url.host_str(), "{text:?}");
            }
        }
        assert!(allowed > 100, "{allowed}");
    }

    #[test]
    fn domains_are_hosts_with_an_optional_port() {
        let host = |host: &str, port| MediaDomain::Host { host: host.to_owned(), port };
        for (text, expected) in [
            ("all", MediaDomain::All),
            ("Example.COM", host("example.com", None)),
            (" example.com. ", host("example.com", None)),
            ("example.com:80", host("example.com", Some(80))),
            ("minio:9000", host("minio", Some(9000))),
            ("127.1", host("127.0.0.1", None)),
            ("[::0001]", host("[::1]", None)),
            ("[::1]:8080", host("[::1]", Some(8080))),
        ] {
            assert_eq!(text.parse::<MediaDomain>().unwrap(), expected, "{text}");
        }
        for invalid in [
            "",
            ".",
            ":80",
            "a:",
            "a:0",
            "a:65536",
            "a:+1",
            "a:b",
            "::1",
            "[::1",
            "http://a",
            "a/b",
            "user@a",
            "a?",
            "a#",
            "*.a",
            "a b",
            "a\\b",
            "a:1:2",
            "256.256.256.256",
        ] {
            let error = invalid.parse::<MediaDomain>().unwrap_err();
            assert!(error.contains("is not a host"), "{invalid}: {error}");
        }
    }
}
