//! The resource `LLMDeployment`: a model, served by replicas behind a router.
//!
//! The types, their documentation, defaults and rules are the schema: what the API server refuses or fills in is
//! written here and nowhere else. This crate holds data. It has no client, starts nothing and decides nothing;
//! what a resource leads to is the operator's business.

mod engine;
mod flags;
mod formats;
mod model;
mod period;
mod placement;
mod rollout;
mod router;
mod spec;
mod status;

pub use engine::{Engine, KvCache, KvPrecision, TAKEN_FLAGS};
pub use flags::{ROUTER_FLAGS, SERVER_FLAGS};
pub use model::{
    AccessMode, CaBundle, Cache, CacheMode, Fetch, Format, HttpSource, HuggingFaceSource, LocalReference,
    Model, OciSource, PvcSource, S3Source, Source,
};
pub use period::{NoPeriod, Period};
pub use placement::Placement;
pub use rollout::{Disruption, Drain, Rollout};
pub use router::{
    KeyIsolation, Policy, Queue, Retry, Router, RouterPlacement, Service, ServiceType, TAKEN_ROUTER_FLAGS,
    Timeouts,
};
pub use spec::{
    Access, KeysReference, LlmDeployment, LlmDeploymentSpec, LogLevel, Metrics, Observability, PodMetadata,
    PodTemplate, Security, TokenReference, Tracing, UpgradePolicy,
};
pub use status::{
    CacheState, CacheStatus, LlmDeploymentStatus, Phase, ReleaseStatus, UpgradeState, conditions,
};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps,
};

/// The API group.
pub const GROUP: &str = "ovfleet.dev";

/// The custom resource definition, as it is in `crds/`.
///
/// # Panics
/// Never: what is added to the types' own schema is one.
#[must_use]
pub fn crd() -> CustomResourceDefinition {
    let mut definition = <LlmDeployment as kube::CustomResourceExt>::crd();
    // Rules about the name need a bound on its length, or the API server takes them to be too expensive.
    let metadata = serde_json::json!({
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 63}},
    });
    let metadata: JSONSchemaProps = serde_json::from_value(metadata).expect("invariant: it is a schema");
    for version in &mut definition.spec.versions {
        let schema = version.schema.as_mut().and_then(|schema| schema.open_api_v3_schema.as_mut());
        if let Some(properties) = schema.and_then(|schema| schema.properties.as_mut()) {
            properties.insert("metadata".to_owned(), metadata.clone());
            properties.values_mut().for_each(complete_list_types);
        }
    }
    definition
}

/// Declares every list that declares nothing else as atomic: server-side apply replaces it as a whole.
fn complete_list_types(schema: &mut JSONSchemaProps) {
    use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
        JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
    };
    if schema.type_.as_deref() == Some("array") {
        schema.x_kubernetes_list_type.get_or_insert_with(|| "atomic".to_owned());
    }
    schema.properties.iter_mut().flatten().for_each(|(_, property)| complete_list_types(property));
    if let Some(JSONSchemaPropsOrArray::Schema(items)) = &mut schema.items {
        complete_list_types(items);
    }
    if let Some(JSONSchemaPropsOrBool::Schema(values)) = &mut schema.additional_properties {
        complete_list_types(values);
    }
}

/// Resources as in a container, with bounds: rules about what is in a map need one on its size.
pub(crate) fn resources(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
    use schemars::JsonSchema as _;
    let mut schema = k8s_openapi::api::core::v1::ResourceRequirements::json_schema(generator).to_value();
    for map in ["limits", "requests"] {
        schema["properties"][map]["maxProperties"] = 16.into();
        schema["properties"][map]["additionalProperties"] =
            serde_json::json!({"x-kubernetes-int-or-string": true, "maxLength": 32});
        schema["properties"][map]["x-kubernetes-validations"] = rules(&[(
            "self.all(name, isQuantity(string(self[name])))",
            "must be quantities, such as 500m CPUs or 8Gi of memory",
        )]);
    }
    schema["x-kubernetes-validations"] = rules(&[(
        "!has(self.requests) || !has(self.limits) || self.requests.all(name, !(name in self.limits) || \
         !isQuantity(string(self.requests[name])) || !isQuantity(string(self.limits[name])) || \
         quantity(string(self.requests[name])).compareTo(quantity(string(self.limits[name]))) <= 0)",
        "requests must not exceed limits",
    )]);
    schemars::Schema::try_from(schema).unwrap_or_default()
}

/// Text of which anything is accepted that the API server accepts in its place in a pod.
pub(crate) fn any_object(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({"type": "object", "x-kubernetes-preserve-unknown-fields": true})
}

/// Rules in the words of the API server: what must hold, and what is said where it does not.
pub(crate) fn rules(rules: &[(&str, &str)]) -> serde_json::Value {
    rules.iter().map(|(rule, message)| serde_json::json!({"rule": rule, "message": message})).collect()
}
