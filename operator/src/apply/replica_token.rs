//! Creates the Secret with a random replica token, once for each resource.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use k8s_openapi::api::core::v1::Secret;
use kube::Client;
use kube::api::{Api, PostParams};
use rand::RngExt as _;
use serde_json::json;

use crate::desired::replica_token::KEY;
use crate::manifest::Manifest;
use crate::names::FIELD_MANAGER;

/// Number of random bytes of a token, which is written in hexadecimal.
const TOKEN_BYTES: usize = 32;

/// The UIDs of the resources whose Secret is known to exist. Clones share them. Losing them does no harm: an existing
/// Secret is not created again, because its name is taken.
#[derive(Clone, Debug, Default)]
pub struct ReplicaTokens(Arc<Mutex<HashSet<String>>>);

impl ReplicaTokens {
    fn uids(&self) -> MutexGuard<'_, HashSet<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the Secret of the resource with this UID is known to exist.
    pub(super) fn contains(&self, uid: &str) -> bool {
        self.uids().contains(uid)
    }

    /// Records that the Secret of the resource with this UID exists.
    pub(super) fn insert(&self, uid: &str) {
        self.uids().insert(uid.to_owned());
    }

    /// Forgets the resources whose UID is not in `present`.
    pub fn retain(&self, present: &HashSet<String>) {
        self.uids().retain(|uid| present.contains(uid));
    }
}

/// Creates `secret` with a random token. An existing Secret with this name is left unchanged.
pub(super) async fn create(client: &Client, namespace: &str, secret: &Manifest) -> kube::Result<()> {
    let mut body = secret.body.clone();
    body["stringData"] = json!({KEY: random_token()});
    let secret: Secret = serde_json::from_value(body).map_err(kube::Error::SerdeError)?;
    let api: Api<Secret> = Api::namespaced(client.clone(), namespace);
    let parameters = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
    match api.create(&parameters, &secret).await {
        Ok(_) => {
            tracing::info!(
                name = secret.metadata.name,
                namespace,
                "created the Secret with the replica token"
            );
            Ok(())
        }
        Err(kube::Error::Api(status)) if status.code == 409 && status.reason == "AlreadyExists" => Ok(()),
        Err(error) => Err(error),
    }
}

/// Returns 256 random bits in hexadecimal. The generator is cryptographic and seeded by the operating system.
fn random_token() -> String {
    let bytes: [u8; TOKEN_BYTES] = rand::rng().random();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_tokens_are_unique_and_valid() {
        let tokens: HashSet<String> = (0..100).map(|_| random_token()).collect();
        assert_eq!(tokens.len(), 100);
        for token in tokens {
            proto::replica_token::ReplicaTokens::parse(&token).unwrap();
        }
    }
}
