//! Creating the Secret with the replica token: once for each resource, with a token that nobody has seen.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use k8s_openapi::api::core::v1::Secret;
use kube::Client;
use kube::api::{Api, PostParams};
use rand::RngExt as _;
use serde_json::json;

use super::FIELD_MANAGER;
use crate::desired::replica_token::KEY;
use crate::manifest::Manifest;

/// Bytes of a token. In hexadecimal it has twice as many characters.
const TOKEN_BYTES: usize = 32;

/// The identities of the resources whose Secret is known to exist. Clones share them. It may be lost without harm: a Secret
/// that exists is not created again, as its name is taken.
#[derive(Clone, Debug, Default)]
pub struct ReplicaTokens(Arc<Mutex<HashSet<String>>>);

impl ReplicaTokens {
    fn existing(&self) -> MutexGuard<'_, HashSet<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the Secret of the resource with this identity is known to exist.
    pub(super) fn exists(&self, uid: &str) -> bool {
        self.existing().contains(uid)
    }

    /// Takes note that it does.
    pub(super) fn insert(&self, uid: &str) {
        self.existing().insert(uid.to_owned());
    }

    /// Forgets the resources that are not among `present`.
    pub fn retain(&self, present: &HashSet<String>) {
        self.existing().retain(|uid| present.contains(uid));
    }
}

/// Creates `secret` with a random token, unless a Secret with its name exists: then that one stays as it is.
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

/// 256 random bits, in hexadecimal. The generator is cryptographic and seeded by the operating system.
fn random_token() -> String {
    let bytes: [u8; TOKEN_BYTES] = rand::rng().random();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_differ_and_routers_and_replicas_accept_them() {
        let tokens: HashSet<String> = (0..100).map(|_| random_token()).collect();
        assert_eq!(tokens.len(), 100);
        for token in tokens {
            proto::replica_token::ReplicaTokens::parse(&token).unwrap();
        }
    }
}
