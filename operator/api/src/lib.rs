//! The resource `LLMDeployment`, which describes a model, its replicas and the routers in front of them.
//!
//! The schema is generated from the types, their documentation, defaults and rules: all defaults and rules that the
//! API server applies are defined here. This crate has no client and no reconcile logic; the operator decides which
//! objects it creates for a resource.

mod engine;
mod flags;
mod formats;
mod model;
mod period;
mod placement;
mod pod_template;
mod rollout;
mod router;
mod schema;
mod spec;
mod status;

pub use engine::{Engine, KvCache, KvPrecision, MediaSources, RESERVED_SERVER_FLAGS};
pub use flags::{ROUTER_FLAGS, SERVER_FLAGS};
pub use model::{
    AccessMode, CaBundle, Cache, CacheMode, Fetch, Format, HttpSource, HuggingFaceSource, LocalReference,
    Model, OciSource, PvcSource, S3Source, Source,
};
pub use period::{InvalidPeriod, Period};
pub use placement::Placement;
pub use pod_template::{PodMetadata, PodTemplate};
pub use rollout::{Disruption, Drain, Rollout};
pub use router::{
    KeyIsolation, Policy, Queue, RESERVED_ROUTER_FLAGS, Retry, Router, RouterPlacement, Service, ServiceType,
    Timeouts,
};
pub use spec::{
    Access, KeysReference, LlmDeployment, LlmDeploymentSpec, LogLevel, Metrics, Observability, Security,
    TokenReference, Tracing, UpgradePolicy,
};
pub use status::{
    CacheState, CacheStatus, LlmDeploymentStatus, Phase, ReleaseStatus, UpgradeState, conditions,
};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps,
};

/// Returns the custom resource definition, which `crds/` contains.
///
/// # Panics
/// Never: the added part is a valid schema.
#[must_use]
pub fn crd() -> CustomResourceDefinition {
    let mut definition = <LlmDeployment as kube::CustomResourceExt>::crd();
    // If the name had no maximum length, the API server would estimate that the validation rules for the name are too
    // expensive, and reject the definition.
    let metadata = serde_json::json!({
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 63}},
    });
    let metadata: JSONSchemaProps =
        serde_json::from_value(metadata).expect("invariant: the literal is a schema");
    for version in &mut definition.spec.versions {
        let schema = version.schema.as_mut().and_then(|schema| schema.open_api_v3_schema.as_mut());
        if let Some(properties) = schema.and_then(|schema| schema.properties.as_mut()) {
            properties.insert("metadata".to_owned(), metadata.clone());
            properties.values_mut().for_each(normalize);
        }
    }
    definition
}

/// Declares every list without a list type as atomic, so that server-side apply replaces it as a whole. Limits the
/// range of 32-bit integers, because the API server does not enforce the format. Removes `nullable: false`, which is
/// the default and which the API server does not store.
fn normalize(schema: &mut JSONSchemaProps) {
    use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
        JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
    };
    if schema.type_.as_deref() == Some("array") {
        schema.x_kubernetes_list_type.get_or_insert_with(|| "atomic".to_owned());
    }
    if schema.format.as_deref() == Some("int32") {
        schema.minimum.get_or_insert(f64::from(i32::MIN));
        schema.maximum.get_or_insert(f64::from(i32::MAX));
    }
    schema.nullable = schema.nullable.filter(|is_nullable| *is_nullable);
    schema.properties.iter_mut().flatten().for_each(|(_, property)| normalize(property));
    if let Some(JSONSchemaPropsOrArray::Schema(items)) = &mut schema.items {
        normalize(items);
    }
    if let Some(JSONSchemaPropsOrBool::Schema(values)) = &mut schema.additional_properties {
        normalize(values);
    }
}
