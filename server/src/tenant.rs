//! Determines the tenant of a request. The router derives the tenant from the client's API key, or from the name of the
//! key, and sends it in a header; stored objects, cached prompts and cached images of one tenant are invisible to all
//! other tenants.

use std::fmt;
use std::sync::Arc;

use axum::http::HeaderMap;
use server_engine::{ImageDigest, Request, RequestImages};
use sha2::{Digest as _, Sha256};

use crate::error::Error;

/// The header that names the tenant. Routers replace or remove any value that a client sends in this header.
const HEADER: &str = "x-ovfleet-tenant";
/// Number of hexadecimal digits of a tenant.
const DIGITS: usize = 32;

/// The owner of stored objects, cached prompts and cached images. All requests without the header belong to the default
/// tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tenant(u128);

impl Tenant {
    /// The owner of objects whose tenant is unknown.
    pub(crate) const NOBODY: Self = Self(u128::MAX);

    /// Returns the tenant that the headers name, or the default tenant if they name none.
    ///
    /// # Errors
    /// The header is malformed or repeated. An unknown tenant must not be mistaken for the default tenant.
    pub(crate) fn of(headers: &HeaderMap) -> Result<Self, Error> {
        let mut values = headers.get_all(HEADER).iter();
        let Some(value) = values.next() else { return Ok(Self::default()) };
        let tenant = value.to_str().ok().and_then(Self::parse).filter(|_| values.next().is_none());
        tenant.ok_or_else(|| {
            Error::invalid(
                HEADER,
                format!(
                    "must occur only once and consist of {DIGITS} hexadecimal digits that are neither all 0 nor all f"
                ),
            )
        })
    }

    /// Parses the format of [`fmt::Display`], with digits of either case. Returns `None` for anything else, for the
    /// default tenant, and for [`Self::NOBODY`], whose objects no request may access.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let is_hex = text.len() == DIGITS && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = is_hex.then(|| u128::from_str_radix(text, 16).ok())??;
        Some(Self(number)).filter(|tenant| *tenant != Self::default() && *tenant != Self::NOBODY)
    }

    /// Assigns these prompts to this tenant. As a result, the prefix cache and the cache of encoded images separate
    /// them from the prompts of other tenants, and tenants take turns in the queue.
    pub(crate) fn assign_prompts(self, prompts: &mut [Request]) {
        for prompt in prompts {
            prompt.cache_salt = self.salt(prompt.cache_salt);
            prompt.tenant = self.0;
            if let Some(images) = prompt.images.as_mut().filter(|_| prompt.cache_salt != 0) {
                salt_digests(Arc::make_mut(images), prompt.cache_salt);
            }
        }
    }

    /// Returns the salt of a prompt of this tenant, given the request's own salt. The hash is cryptographic, so that no
    /// client can choose a salt that collides with that of another tenant.
    fn salt(self, salt: u64) -> u64 {
        if self == Self::default() {
            return salt;
        }
        let mut hash = Sha256::new();
        hash.update(b"ovfleet cache salt");
        hash.update(self.0.to_be_bytes());
        hash.update(salt.to_be_bytes());
        let digest = hash.finalize();
        let first = digest.first_chunk().expect("invariant: SHA-256 has 32 bytes");
        u64::from_be_bytes(*first).max(1)
    }
}

/// Replaces the digests of images with hashes of the digests and the salt of their prompt. Otherwise, the time to the
/// first token would reveal whether a prompt with another salt contains the same image.
fn salt_digests(images: &mut RequestImages, salt: u64) {
    let salted = |ImageDigest(digest)| {
        let mut hash = Sha256::new();
        hash.update(b"ovfleet image digest");
        hash.update(salt.to_be_bytes());
        hash.update(digest);
        ImageDigest(hash.finalize().into())
    };
    for image in &mut images.inputs {
        let image = Arc::make_mut(image);
        image.digest = salted(image.digest);
    }
    for span in &mut images.prompt.spans {
        span.digest = salted(span.digest);
    }
}

impl fmt::Display for Tenant {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:032x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;
    use server_engine::{ImageInput, ImageSpan, PromptImages, SpanAttention};

    use super::*;

    fn of(values: &[&'static str]) -> Result<Tenant, Error> {
        let name = axum::http::HeaderName::from_static(HEADER);
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(name.clone(), HeaderValue::from_static(value));
        }
        Tenant::of(&headers)
    }

    const ONE: &str = "0123456789abcdef0123456789abcdef";

    #[test]
    fn reads_the_header_and_rejects_a_malformed_or_repeated_one() {
        assert_eq!(of(&[]), Ok(Tenant::default()));
        assert_eq!(of(&[ONE]).unwrap().to_string(), ONE);
        let malformed: [&[&str]; 7] = [
            &[""],
            &["0123"],
            &["00000000000000000000000000000000"],
            &["ffffffffffffffffffffffffffffffff"],
            &["0123456789abcdef0123456789abcdeg"],
            &["+123456789abcdef0123456789abcdef"],
            &[ONE, ONE],
        ];
        for values in malformed {
            assert!(matches!(of(values), Err(Error::Invalid { .. })), "{values:?}");
        }
    }

    #[test]
    fn salts_differ_by_tenant_and_by_requested_salt() {
        let tenants = [Tenant::default(), Tenant(1), Tenant(2)];
        let salts: std::collections::BTreeSet<u64> =
            tenants.iter().flat_map(|tenant| [0, 1, 2].map(|salt| tenant.salt(salt))).collect();
        assert_eq!(salts.len(), 9);
        assert_eq!(Tenant::default().salt(7), 7, "without tenants, salts are those of the requests");
        assert_eq!(Tenant(1).salt(7), Tenant(1).salt(7));
    }

    #[test]
    fn the_digests_of_images_differ_by_salt_and_those_of_spans_match() {
        let content: Arc<dyn std::any::Any + Send + Sync> = Arc::new(());
        let digest = ImageDigest([7; 32]);
        let input = Arc::new(ImageInput { digest, rows: 4, content });
        let span = ImageSpan { digest, start: 0, num_tokens: 4, first_row: 0 };
        let prompt = PromptImages { spans: vec![span], attention: SpanAttention::Causal };
        let original = RequestImages { inputs: vec![input], prompt, positions: None };
        let salted = [1, 2].map(|salt| {
            let mut images = original.clone();
            salt_digests(&mut images, salt);
            assert_eq!(images.inputs[0].digest, images.prompt.spans[0].digest);
            images.inputs[0].digest
        });
        assert_eq!(original.inputs[0].digest, digest, "the images of another request do not change");
        assert!(salted[0] != salted[1] && !salted.contains(&digest));
    }
}
