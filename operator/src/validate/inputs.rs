//! Digests of the user's settings. They change when the user requests different pods, and not when another version of
//! the operator renders the same settings differently. This module is pure.

use operator_api::{CacheMode, Fetch, KeyIsolation, LlmDeploymentSpec, Model};
use serde::Serialize;
use serde_json::{Value, json};

use crate::manifest::{digest, to_json};
use crate::valid_deployment::InputDigests;

pub(super) fn input_digests(spec: &LlmDeploymentSpec) -> InputDigests {
    let mut shared = json!({
        "drain": settings(&spec.drain),
        "runAsUser": spec.security.run_as_user,
        "imagePullSecrets": spec.security.image_pull_secrets,
        "logLevel": spec.observability.log_level,
    });
    // A field that earlier schemas lacked is part of a digest only if it is set, so that the digests of resources that
    // do not set it remain the same.
    if let Some(reference) = &spec.security.replica_token_secret_ref {
        shared["replicaToken"] = to_json(reference);
    }
    let server = |model: &Model| {
        digest(&json!({
            "shared": shared,
            "model": model,
            "engine": settings(&spec.engine),
            "resources": settings(&spec.resources),
            "placement": settings(&spec.placement),
            "podTemplate": spec.pod_template,
        }))
    };
    let router = &spec.router;
    let mut router_inputs = json!({
        "shared": shared,
        "image": router.image,
        "resources": router.resources,
        "placement": settings(&router.placement),
        "extraArgs": router.extra_args,
        "podTemplate": router.pod_template,
        "apiKeys": spec.access.api_keys_secret_ref,
        "accessLog": spec.observability.access_log,
        "tracing": spec.observability.tracing,
    });
    // Routers of an earlier release cannot start with this option, so a change that sets it also performs the upgrade.
    if router.key_isolation != KeyIsolation::default() {
        router_inputs["keyIsolation"] = json!(router.key_isolation.name());
    }
    InputDigests {
        server: server(&rendered_settings(&spec.model)),
        former_server: server(&spec.model),
        router: digest(&router_inputs),
    }
}

/// Returns `model` with only the settings that affect the pod template of the replicas. With a shared cache, the size
/// and the StorageClass of its volume and the settings of the Job that fetches the model do not affect the template.
fn rendered_settings(model: &Model) -> Model {
    let mut model = model.clone();
    if let Some(fetch) = &mut model.fetch {
        fetch.service_account_annotations.clear();
    }
    if let Some(cache) = model.cache.as_mut().filter(|cache| cache.mode == CacheMode::Shared) {
        cache.size = None;
        cache.storage_class = None;
        model.credentials_secret_ref = None;
        model.fetch = None;
    }
    model.fetch = model.fetch.filter(|fetch| *fetch != Fetch::default());
    model
}

/// Returns `value` without the members that have their default value.
fn settings<T: Serialize + Default>(value: &T) -> Value {
    let mut settings = to_json(value);
    remove_defaults(&mut settings, &to_json(&T::default()));
    settings
}

fn remove_defaults(value: &mut Value, default: &Value) {
    let (Value::Object(members), Value::Object(defaults)) = (value, default) else { return };
    members.retain(|name, member| {
        let Some(default) = defaults.get(name) else { return true };
        remove_defaults(member, default);
        let is_empty = member.as_object().is_some_and(serde_json::Map::is_empty);
        !(is_empty || member == default)
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(more: &Value) -> LlmDeploymentSpec {
        let mut spec = json!({"model": {"source": {"pvc": {"claim": "models"}}}});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        serde_json::from_value(spec).unwrap()
    }

    #[test]
    fn members_with_their_default_value_are_removed() {
        let mut engine =
            json!({"maxNumSeqs": 8, "kvCache": {"prefixCaching": true, "size": "1Gi"}, "device": "CPU"});
        remove_defaults(
            &mut engine,
            &json!({"maxNumSeqs": 256, "kvCache": {"prefixCaching": true}, "device": "CPU"}),
        );
        assert_eq!(engine, json!({"maxNumSeqs": 8, "kvCache": {"size": "1Gi"}}));
    }

    #[test]
    fn the_digests_change_only_with_fields_that_pods_are_rendered_from() {
        let before = input_digests(&spec(&json!({})));
        for same in [
            json!({"replicas": 7}),
            json!({"engine": {"device": "CPU"}}),
            json!({"router": {"keyIsolation": "key"}}),
            json!({"router": {"queue": {"requests": 7}, "replicas": 3}}),
            json!({"rollout": {"maxSurge": 2}}),
            json!({"upgradePolicy": "Manual"}),
        ] {
            assert_eq!(input_digests(&spec(&same)), before, "{same}");
        }
        let server = input_digests(&spec(&json!({"engine": {"maxNumSeqs": 7}})));
        assert_eq!((server.server == before.server, server.router == before.router), (false, true));
        let router = input_digests(&spec(&json!({"router": {"image": "other"}})));
        assert_eq!((router.server == before.server, router.router == before.router), (true, false));
        let keys = input_digests(&spec(&json!({"router": {"keyIsolation": "name"}})));
        assert_eq!((keys.server == before.server, keys.router == before.router), (true, false));
        let token = input_digests(&spec(&json!({"security": {"replicaTokenSecretRef": {"name": "mine"}}})));
        assert_eq!((token.server == before.server, token.router == before.router), (false, false));
    }

    #[test]
    fn the_digest_of_a_fetched_model_depends_on_where_it_is_fetched() {
        let digest = |mode: &str, more: &Value| {
            let mut model = json!({
                "source": {"http": {"url": "http://host/m.gguf"}},
                "cache": {"mode": mode, "size": "1Gi"},
            });
            for (name, value) in more.as_object().unwrap() {
                model[name] = value.clone();
            }
            input_digests(&spec(&json!({"model": model}))).server
        };
        let of_fetch = [
            json!({"cache": {"mode": "shared", "size": "2Gi"}}),
            json!({"cache": {"mode": "shared", "size": "1Gi", "storageClass": "fast"}}),
            json!({"credentialsSecretRef": {"name": "a"}}),
            json!({"fetch": {"env": {"A": "b"}, "caBundle": {"configMap": "a"}}}),
        ];
        let of_pods = [
            json!({"cache": {"mode": "shared", "size": "1Gi", "accessMode": "ReadWriteOnce"}}),
            json!({"source": {"http": {"url": "http://host/n.gguf"}}}),
            json!({"format": "gguf"}),
            json!({"name": "a"}),
        ];
        let annotations = json!({"fetch": {"serviceAccountAnnotations": {"cloud/role": "models"}}});
        for mode in ["none", "perPod", "shared"] {
            let before = digest(mode, &json!({}));
            let is_same = |more: &Value| {
                let mut more = more.clone();
                if more["cache"].is_object() {
                    more["cache"]["mode"] = json!(mode);
                }
                digest(mode, &more) == before
            };
            assert!(is_same(&annotations), "{mode}");
            for change in &of_fetch {
                assert_eq!(is_same(change), mode == "shared", "{mode}: {change}");
            }
            for change in &of_pods {
                assert!(!is_same(change), "{mode}: {change}");
            }
        }
    }
}
