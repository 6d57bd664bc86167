//! Adds the tenant of a request to its headers, so that different tenants share neither stored responses nor cached
//! prompts on replicas. By default, each API key is a tenant (`--key-isolation`). The tenant is sent as a digest:
//! replicas and their logs never see a key.

use http::{HeaderMap, HeaderName, HeaderValue, header};
use sha2::{Digest as _, Sha256};

use crate::access::Client;
use crate::args::KeyIsolation;

/// The header that names the tenant to replicas.
pub(crate) const HEADER: HeaderName = HeaderName::from_static("x-ovfleet-tenant");
/// Number of bytes of the digest that identifies a tenant.
const BYTES: usize = 16;

/// Sets the header with the tenant, replacing any value that the client has sent. Requests without a key, and all
/// requests with `--key-isolation=none`, have no tenant.
pub(crate) fn set_header(headers: &mut HeaderMap, client: Option<&Client>, isolation: KeyIsolation) {
    headers.remove(&HEADER);
    // Otherwise, a client could have the header removed by listing it in `Connection`.
    remove_from_connection(headers);
    if let Some(tenant) = client.and_then(|client| tenant(headers, client, isolation)) {
        headers.insert(HEADER, tenant);
    }
}

fn tenant(headers: &HeaderMap, client: &Client, isolation: KeyIsolation) -> Option<HeaderValue> {
    let mut hash = Sha256::new();
    hash.update(b"ovfleet tenant\0");
    match isolation {
        KeyIsolation::None => return None,
        KeyIsolation::Name if is_named(client) => {
            hash.update(b"name\0");
            hash.update(client.name.as_bytes());
        }
        KeyIsolation::Key | KeyIsolation::Name => {
            hash.update(b"key\0");
            hash.update(key(headers));
        }
    }
    let digits: String = hash.finalize().iter().take(BYTES).map(|byte| format!("{byte:02x}")).collect();
    Some(HeaderValue::try_from(digits).expect("invariant: hexadecimal digits are a header value"))
}

/// Whether the client's name comes from the file with API keys. Generated names are based on line numbers, which can
/// belong to another client after the file has changed.
fn is_named(client: &Client) -> bool {
    let number = client.name.strip_prefix("key-");
    !number.is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The key of an authenticated request.
fn key(headers: &HeaderMap) -> &[u8] {
    const SCHEME: usize = "bearer ".len();
    let value = headers.get(header::AUTHORIZATION).map_or(&[][..], HeaderValue::as_bytes);
    value.get(SCHEME..).unwrap_or_default().trim_ascii()
}

fn remove_from_connection(headers: &mut HeaderMap) {
    let is_tenant = |name: &str| name.trim().eq_ignore_ascii_case(HEADER.as_str());
    let names = |value: &HeaderValue| value.to_str().unwrap_or_default().to_owned();
    let listed: Vec<String> = headers.get_all(header::CONNECTION).iter().map(names).collect();
    if !listed.iter().flat_map(|value| value.split(',')).any(is_tenant) {
        return;
    }
    let others: Vec<&str> =
        listed.iter().flat_map(|value| value.split(',')).filter(|name| !is_tenant(name)).collect();
    match HeaderValue::try_from(others.join(",")) {
        Ok(value) => headers.insert(header::CONNECTION, value),
        Err(_) => headers.remove(header::CONNECTION),
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(key: &str, name: &str, isolation: KeyIsolation) -> Option<String> {
        let authorization = HeaderValue::try_from(format!("Bearer {key}")).unwrap();
        let mut headers = HeaderMap::from_iter([
            (header::AUTHORIZATION, authorization),
            (HEADER, HeaderValue::from_static("00000000000000000000000000000001")),
        ]);
        headers.append(HEADER, HeaderValue::from_static("00000000000000000000000000000002"));
        let client = Client { id: 0, name: name.into() };
        set_header(&mut headers, (!name.is_empty()).then_some(&client), isolation);
        let mut values = headers.get_all(HEADER).iter().map(|value| value.to_str().unwrap().to_owned());
        let tenant = values.next();
        assert_eq!(values.next(), None);
        tenant
    }

    #[test]
    fn a_key_or_its_name_determines_the_tenant() {
        use KeyIsolation::{Key, Name};
        let alice = set("a", "alice", Key).unwrap();
        assert!(alice.len() == 32 && alice.bytes().all(|byte| byte.is_ascii_hexdigit()), "{alice}");
        assert_eq!(set("a", "other", Key), Some(alice.clone()), "the name does not matter");
        assert_ne!(set("b", "alice", Key), Some(alice));
        assert_eq!(set("a", "alice", Name), set("b", "alice", Name));
        assert_ne!(set("a", "alice", Name), set("a", "bob", Name));
        assert_ne!(set("a", "key-4", Name), set("b", "key-4", Name), "a line number is not a name");
        assert_ne!(set("key-x", "alice", Key), set("a", "key-x", Name));
        assert_eq!(set("a", "alice", KeyIsolation::None), None);
        assert_eq!(set("a", "", Key), None, "the header of the client is removed");
    }

    #[test]
    fn a_client_cannot_declare_the_tenant_a_hop_by_hop_header() {
        let mut headers = HeaderMap::new();
        for value in ["close, X-Ovfleet-Tenant", "x-mine ,x-ovfleet-tenant"] {
            headers.append(header::CONNECTION, HeaderValue::from_static(value));
        }
        set_header(&mut headers, None, KeyIsolation::Key);
        let connection: Vec<_> = headers.get_all(header::CONNECTION).iter().collect();
        assert_eq!(connection, ["close,x-mine "]);
    }
}
