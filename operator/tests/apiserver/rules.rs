//! Tests the rules of the schema against a real API server, with valid and invalid values, and checks the messages.

use futures_util::{StreamExt as _, stream};
use kube::api::{Api, PostParams};
use operator_api::LlmDeployment;
use serde_json::{Map, Value, json};

use crate::support::{cluster, smallest};

/// The smallest spec, with the values of `changes` at their paths.
fn with(changes: &[(&str, Value)]) -> Value {
    let mut spec = smallest();
    for (path, value) in changes {
        let mut at = &mut spec;
        for part in path.split('.') {
            at = &mut at[part];
        }
        *at = value.clone();
    }
    spec
}

fn http() -> Value {
    json!({"http": {"url": "https://host/model.gguf"}})
}

#[tokio::test]
async fn valid_values_are_accepted_and_invalid_ones_rejected_with_a_message() {
    let client = cluster().await.client().await.unwrap();
    let namespace = tests::cluster::namespace(&client, "rules").await.unwrap();
    let api: Api<LlmDeployment> = Api::namespaced(client.clone(), &namespace);
    let resource = kube::core::ApiResource::erase::<LlmDeployment>(&());
    let raw: Api<kube::api::DynamicObject> = Api::namespaced_with(client, &namespace, &resource);
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    let create = async |name: &str, spec: &Value| {
        let object = json!({
            "apiVersion": "ovfleet.dev/v1alpha1", "kind": "LLMDeployment", "metadata": {"name": name}, "spec": spec,
        });
        let object = serde_json::from_value(object).unwrap();
        raw.create(&dry, &object).await.map(drop).map_err(|error| error.to_string())
    };
    for (changes, message) in invalid() {
        let spec = with(&changes);
        let error = create("chat", &spec).await.expect_err(message);
        assert!(error.contains(message), "{changes:?}: {error}");
    }
    for changes in valid() {
        if let Err(error) = create("chat", &with(&changes)).await {
            panic!("{changes:?}: {error}");
        }
    }
    for (name, message) in
        [("9-lives", "must begin with a letter"), (&*"a".repeat(41), "at most 40 characters")]
    {
        assert!(create(name, &smallest()).await.unwrap_err().contains(message));
    }
    // The defaults of the schema equal those of the Rust types.
    let object: LlmDeployment = serde_json::from_value(json!({
        "apiVersion": "ovfleet.dev/v1alpha1", "kind": "LLMDeployment", "metadata": {"name": "chat"}, "spec": smallest(),
    }))
    .unwrap();
    let stored = raw.create(&dry, &serde_json::from_value(json!({
        "apiVersion": "ovfleet.dev/v1alpha1", "kind": "LLMDeployment", "metadata": {"name": "chat"}, "spec": smallest(),
    })).unwrap()).await.unwrap();
    let stored: LlmDeployment = serde_json::from_value(serde_json::to_value(stored).unwrap()).unwrap();
    assert_eq!(stored.spec, object.spec);
    drop(api);
}

/// Checks the sizes in `fixtures/sizes.yaml`. The operator would refuse a resource with a size that only the API server
/// accepts.
#[tokio::test]
async fn the_sizes_that_the_operator_accepts_are_accepted_and_no_others() {
    let client = cluster().await.client().await.unwrap();
    let namespace = tests::cluster::namespace(&client, "sizes").await.unwrap();
    let api: Api<LlmDeployment> = Api::namespaced(client, &namespace);
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    let create = async |size: &str| {
        let object = json!({
            "apiVersion": "ovfleet.dev/v1alpha1", "kind": "LLMDeployment", "metadata": {"name": "chat"},
            "spec": with(&[("engine.kvCache", json!({"size": size}))]),
        });
        let object = serde_json::from_value(object).unwrap();
        api.create(&dry, &object).await.map(drop).map_err(|error| error.to_string())
    };
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/sizes.yaml");
    let sizes: Value = serde_yaml::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    for size in sizes["valid"].as_object().unwrap().keys() {
        assert_eq!(create(size).await, Ok(()), "{size}");
    }
    for size in sizes["invalid"].as_array().unwrap() {
        let error = create(size.as_str().unwrap()).await.expect_err("the size is invalid");
        assert!(error.contains("engine.kvCache.size must be a positive number of bytes"), "{size}: {error}");
    }
}

/// The operator cannot manage a resource that it cannot decode, so the schema must reject it.
#[tokio::test]
async fn every_value_that_the_schema_accepts_can_be_decoded() {
    let client = cluster().await.client().await.unwrap();
    let namespace = tests::cluster::namespace(&client, "decode").await.unwrap();
    let resource = kube::core::ApiResource::erase::<LlmDeployment>(&());
    let raw: Api<kube::api::DynamicObject> = Api::namespaced_with(client, &namespace, &resource);
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    let definition = serde_json::to_value(operator_api::crd()).unwrap();
    let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
    let specs = extremes(schema).into_iter().map(|change| {
        let mut spec = smallest();
        overlay(&mut spec, change);
        spec
    });
    let outcomes = specs.map(async |spec| {
        let object = json!({
            "apiVersion": "ovfleet.dev/v1alpha1", "kind": "LLMDeployment", "metadata": {"name": "chat"}, "spec": spec,
        });
        let stored = raw.create(&dry, &serde_json::from_value(object).unwrap()).await.ok()?;
        let decoded = serde_json::from_value::<LlmDeployment>(serde_json::to_value(stored).unwrap());
        Some(decoded.map(drop).map_err(|error| format!("{error}: {spec}")))
    });
    let outcomes: Vec<_> = stream::iter(outcomes).buffer_unordered(16).collect().await;
    let accepted: Vec<_> = outcomes.iter().flatten().collect();
    assert!(accepted.len() > 100 && accepted.len() < outcomes.len(), "{}/{}", accepted.len(), outcomes.len());
    let failed: Vec<_> = accepted.into_iter().filter_map(|outcome| outcome.as_ref().err()).collect();
    assert!(failed.is_empty(), "{failed:#?}");
}

/// Returns values for a schema: null, extreme numbers where the schema permits a number, and objects that have such a
/// value in one field and otherwise only the required fields.
fn extremes(schema: &Value) -> Vec<Value> {
    let numbers = [i64::MIN, -3_000_000_000, -1, 3_000_000_000, i64::MAX].map(Value::from);
    let mut values = vec![Value::Null];
    if schema["x-kubernetes-int-or-string"] == true {
        values.extend([json!("many"), json!("3000000000"), json!("3000000000%")]);
    }
    if schema["x-kubernetes-int-or-string"] == true || schema["type"] == "integer" {
        values.extend(numbers);
    }
    if schema["items"].is_object() {
        values.extend(extremes(&schema["items"]).into_iter().map(|item| json!([item])));
    }
    if schema["additionalProperties"].is_object() {
        values
            .extend(extremes(&schema["additionalProperties"]).into_iter().map(|value| json!({"cpu": value})));
    }
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        values.extend(extremes(property).into_iter().map(|value| {
            let mut object = minimal(schema, name);
            object[name] = value;
            object
        }));
    }
    values
}

/// Returns the smallest valid value of the field `name` with this schema.
fn minimal(schema: &Value, name: &str) -> Value {
    if let Some(first) = schema["enum"].as_array().and_then(|values| values.first()) {
        return first.clone();
    }
    match (schema["type"].as_str(), name) {
        (Some("string"), "repo") => json!("owner/name"),
        (Some("string"), "url" | "endpoint") => json!("https://host/model"),
        (Some("string"), "operator") => json!("Exists"),
        (Some("string"), _) => json!("abc"),
        (Some("boolean"), _) => json!(false),
        (Some("array"), _) => json!([]),
        (Some("object"), _) => {
            let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
            let field = |name: &str| (name.to_owned(), minimal(&schema["properties"][name], name));
            Value::Object(required.map(field).collect::<Map<_, _>>())
        }
        _ => json!(1),
    }
}

/// Sets the fields of `change` in `object`. The source of the model is replaced, because there must be only one.
fn overlay(object: &mut Value, change: Value) {
    let Value::Object(change) = change else {
        *object = change;
        return;
    };
    for (name, value) in change {
        let is_replaced = object[&name].is_null() || name == "source" && value != json!({});
        if is_replaced {
            object[&name] = value;
        } else {
            overlay(&mut object[&name], value);
        }
    }
}

/// Returns changes that the schema must reject, each with a part of the expected message.
fn invalid() -> Vec<(Vec<(&'static str, Value)>, &'static str)> {
    let pinned = json!({"cpuPinning": true});
    vec![
        (vec![("model.source", json!({}))], "exactly one of hf, http, s3, oci and pvc"),
        (
            vec![("model.source.http", json!({"url": "https://host/a"}))],
            "exactly one of hf, http, s3, oci and pvc",
        ),
        (
            vec![("model.source", json!({"http": {"url": "ftp://host/a"}}))],
            "must be a URL that begins with http",
        ),
        (
            vec![("model.source", json!({"http": {"url": "https://host/a", "sha256": "beef"}}))],
            "must be a SHA-256",
        ),
        (vec![("model.source", json!({"hf": {"repo": "model"}}))], "OWNER/NAME"),
        (vec![("model.source.pvc.path", json!("/model"))], "must be a relative path"),
        (vec![("model.source.pvc.path", json!("a/../../b"))], "must stay inside the volume"),
        (
            vec![("model.source", json!({"oci": {"image": "registry/a:1", "path": "a/../b"}}))],
            "must stay inside the volume or image",
        ),
        (vec![("model.cache", json!({"mode": "shared", "size": "1Gi"}))], "model.cache must be omitted"),
        (
            vec![("model.source", http()), ("model.cache", json!({"mode": "shared"}))],
            "model.cache.size is required",
        ),
        (
            vec![("model.source", http()), ("model.cache", json!({"size": "much"}))],
            "must be a positive number of bytes",
        ),
        (vec![("model.credentialsSecretRef", json!({"name": "a"}))], "applies only to fetched models"),
        (
            vec![
                ("model.source", http()),
                ("model.fetch", json!({"env": {"SSL_CERT_FILE": "/ca"}, "caBundle": {"configMap": "a"}})),
            ],
            "because model.fetch.caBundle sets it",
        ),
        (
            vec![("model.source", http()), ("model.fetch", json!({"env": {"OVFLEET_HF_REVISION": "main"}}))],
            "must not contain OVFLEET_HF_REVISION",
        ),
        (vec![("model.aliases", json!(["a", "a"]))], "Duplicate value"),
        (vec![("model.format", json!("onnx"))], "Unsupported value"),
        (vec![("model.format", json!("gguf"))], "model.format must be omitted"),
        (
            vec![
                ("model.source", json!({"oci": {"image": "registry/a:1"}})),
                ("model.format", json!("gguf")),
            ],
            "model.format must be omitted",
        ),
        (
            vec![("engine.kvCache", json!({"size": "0"}))],
            "engine.kvCache.size must be a positive number of bytes",
        ),
        (
            vec![("engine.kvCache", json!({"size": "100m"}))],
            "engine.kvCache.size must be a positive number of bytes",
        ),
        (
            vec![("engine.kvCache", json!({"size": "8 GB"}))],
            "engine.kvCache.size must be a positive number of bytes",
        ),
        (
            vec![
                ("engine.kvCache", json!({"size": "8Gi"})),
                ("resources", json!({"limits": {"memory": "8Gi"}})),
            ],
            "must be less than resources.limits.memory",
        ),
        (vec![("engine.kvCache", json!({"precision": "u2"}))], "Unsupported value"),
        (vec![("engine.extraArgs", json!(["--port=1"]))], "must not contain --port: the operator sets it"),
        (vec![("engine.extraArgs", json!(["--model"]))], "must not contain --model: use model.source"),
        (
            vec![("engine.extraArgs", json!(["--max-itl=50ms", "--log=debug"]))],
            "must not contain --log: use observability.logLevel",
        ),
        (vec![("engine.extraArgs", json!(["fetch"]))], "must be one flag, with its value after ="),
        (vec![("engine.maxNumSeqs", json!(0))], "should be greater than or equal to 1"),
        (vec![("placement", pinned.clone())], "requires memory and a whole number of CPUs"),
        (
            vec![
                ("placement", pinned.clone()),
                ("resources", json!({"limits": {"cpu": "1500m", "memory": "1Gi"}})),
            ],
            "requires memory and a whole number of CPUs",
        ),
        (
            vec![
                ("placement", pinned),
                ("resources", json!({"limits": {"cpu": "2", "memory": "1Gi"}, "requests": {"cpu": "1"}})),
            ],
            "resources.requests equal to resources.limits",
        ),
        (vec![("replicas", json!(-1))], "should be greater than or equal to 0"),
        (vec![("rollout", json!({"maxSurge": 0}))], "must not both be 0"),
        (vec![("rollout", json!({"maxSurge": "0%", "maxUnavailable": "0%"}))], "must not both be 0"),
        (vec![("rollout", json!({"maxSurge": 3_000_000_000_u32}))], "must be a number of replicas"),
        (vec![("rollout", json!({"maxUnavailable": -1}))], "must be a number of replicas"),
        (vec![("disruption", json!({"minAvailable": "half"}))], "must be a number of replicas"),
        (vec![("disruption", json!({"maxUnavailable": 3_000_000_000_u32}))], "must be a number of replicas"),
        (vec![("rollout", json!({"maxSurge": "1"}))], "a number must not be in quotes"),
        (
            vec![("rollout", json!({"maxSurge": "00%", "maxUnavailable": "0%"}))],
            "must be a number of replicas",
        ),
        (vec![("rollout", json!({"maxUnavailable": "00"}))], "a number must not be in quotes"),
        (vec![("rollout", json!({"maxUnavailable": "150%"}))], "a percentage up to 100%"),
        (vec![("disruption", json!({"minAvailable": "1"}))], "a number must not be in quotes"),
        (vec![("disruption", json!({"maxUnavailable": "101%"}))], "a percentage up to 100%"),
        (vec![("drain", json!({"timeout": "10 minutes"}))], "must be a whole number and a unit"),
        (vec![("engine.device", json!("TPU"))], "must be CPU, GPU, a numbered device"),
        (vec![("engine.device", json!("AUTO:CPU,NPU"))], "NPU is not supported"),
        (vec![("engine.extraArgs", json!(["--max-itll=50ms"]))], "has no flag --max-itll"),
        (vec![("engine.extraArgs", json!(["50ms", "--max-itll"]))], "has no flag --max-itll"),
        (vec![("router", json!({"extraArgs": ["--policy=kv"]}))], "use router.policy"),
        (vec![("router", json!({"extraArgs": ["--nothing=1"]}))], "has no flag --nothing"),
        (
            vec![("resources", json!({"limits": {"memory": "1Gi"}, "requests": {"memory": "2Gi"}}))],
            "requests must not exceed limits",
        ),
        (
            vec![("router", json!({"resources": {"limits": {"cpu": 1}, "requests": {"cpu": "1500m"}}}))],
            "requests must not exceed limits",
        ),
        (vec![("resources", json!({"limits": {"memory": "much"}}))], "must be quantities"),
        (vec![("model.name", json!("a b"))], "must not contain whitespace or commas"),
        (vec![("model.aliases", json!(["a", "b,c"]))], "must not contain whitespace or commas"),
        (vec![("upgradePolicy", json!("Never"))], "Unsupported value"),
        (vec![("model.fetch", json!({"env": {"A": "b"}}))], "model.fetch must be omitted"),
        (vec![("disruption", json!({"minAvailable": 1, "maxUnavailable": 1}))], "must not set both"),
        (vec![("router", json!({"replicas": 0}))], "should be greater than or equal to 1"),
        (vec![("router", json!({"policy": "best"}))], "Unsupported value"),
        (vec![("router", json!({"keyIsolation": "tenant"}))], "Unsupported value"),
        (vec![("router", json!({"extraArgs": ["--key-isolation=none"]}))], "use router.keyIsolation"),
        (
            vec![("router", json!({"extraArgs": ["--replica-token-file=/etc/token"]}))],
            "use security.replicaTokenSecretRef",
        ),
        (
            vec![("engine.extraArgs", json!(["--replica-token-file=/etc/token"]))],
            "use security.replicaTokenSecretRef",
        ),
        (
            vec![("security", json!({"replicaTokenSecretRef": {"name": "Not A Name"}}))],
            "must be the name of an object",
        ),
        (
            vec![("router", json!({"service": {"nodePort": 30000}}))],
            "requires the type NodePort or LoadBalancer",
        ),
        (vec![("access", json!({"requestsPerMinute": 1}))], "require access.apiKeysSecretRef, because"),
        // With this endpoint, the routers would not start.
        (
            vec![("observability", json!({"tracing": {"endpoint": "https://collector:4317"}}))],
            "must be a URL that begins with http://, because",
        ),
    ]
}

/// Returns changes that the schema must accept.
fn valid() -> Vec<Vec<(&'static str, Value)>> {
    vec![
        vec![],
        vec![("model.source.pvc.path", json!("a..b/c"))],
        vec![("model.source", json!({"hf": {"repo": "owner/name", "revision": "feature/x"}}))],
        vec![("model.source", http()), ("model.cache", json!({"mode": "shared", "size": 1000}))],
        vec![("model.source", http()), ("model.credentialsSecretRef", json!({"name": "a"}))],
        vec![("model.source", http()), ("model.format", json!("gguf"))],
        vec![("model.format", json!("auto"))],
        vec![("model.source", json!({"s3": {"bucket": "models", "key": "a/"}}))],
        vec![("model.source", json!({"oci": {"image": "registry/a@sha256:0"}}))],
        vec![
            ("engine.kvCache", json!({"size": "7.5Gi"})),
            ("resources", json!({"limits": {"memory": "8Gi"}})),
        ],
        vec![("engine.kvCache", json!({"size": "8Gi"})), ("resources", json!({"limits": {"cpu": 1}}))],
        vec![("engine.extraArgs", json!(["--max-itl=50ms", "--prompt-lookup"]))],
        // A custom image may accept other flags.
        vec![("engine", json!({"image": "mine:2", "extraArgs": ["--portable"]}))],
        vec![("engine.device", json!("HETERO:GPU.1,CPU"))],
        vec![("engine.device", json!("AUTO"))],
        vec![("engine.kvCache", json!({"precision": "u4"}))],
        vec![("engine.kvCache", json!({"size": "8e9"}))],
        vec![("router", json!({"extraArgs": ["--hang-timeout=20s"]}))],
        vec![("resources", json!({"limits": {"memory": "1Gi"}, "requests": {"memory": "1024Mi", "cpu": 1}}))],
        vec![
            ("placement", json!({"cpuPinning": true})),
            ("resources", json!({"limits": {"cpu": 2, "memory": "1Gi"}, "requests": {"cpu": "2000m"}})),
        ],
        vec![
            ("placement", json!({"cpuPinning": true})),
            ("resources", json!({"limits": {"cpu": "2000m", "memory": "1Gi"}})),
        ],
        vec![("rollout", json!({"maxSurge": 0, "maxUnavailable": 1}))],
        vec![("rollout", json!({"maxSurge": "25%", "maxUnavailable": "100%"}))],
        vec![("rollout", json!({"maxSurge": "150%", "maxUnavailable": "0%"}))],
        // The default applies.
        vec![("rollout", json!({"maxSurge": null, "maxUnavailable": null}))],
        vec![("disruption", json!({"minAvailable": "50%"}))],
        vec![("router", json!({"service": {"type": "NodePort", "nodePort": 30000}}))],
        vec![("access", json!({"apiKeysSecretRef": {"name": "a"}, "tokensPerMinute": 1}))],
        vec![("router", json!({"keyIsolation": "none"}))],
        vec![("security", json!({"replicaTokenSecretRef": {"name": "a"}}))],
        vec![("podTemplate", json!({"spec": {"anything": {"goes": true}}}))],
        vec![("replicas", json!(0)), ("suspend", json!(true))],
    ]
}
