//! The resource `LLMDeployment`: a model, served by replicas behind a router.
//!
//! The types, their documentation, defaults and rules are the schema: what the API server refuses or fills in is
//! written here and nowhere else. This crate holds data. It has no client, starts nothing and decides nothing;
//! what a resource leads to is the operator's business.

mod engine;
mod model;
mod period;
mod placement;
mod rollout;
mod router;
mod spec;
mod status;

pub use engine::{Engine, KvCache, KvPrecision};
pub use model::{
    AccessMode, Cache, CacheMode, Format, HttpSource, HuggingFaceSource, LocalReference, Model, OciSource,
    PvcSource, S3Source, Source,
};
pub use period::{NoPeriod, Period};
pub use placement::Placement;
pub use rollout::{Disruption, Drain, Rollout};
pub use router::{Policy, Queue, Retry, Router, Service, ServiceType, Timeouts};
pub use spec::{
    Access, KeysReference, LlmDeployment, LlmDeploymentSpec, LogLevel, Metrics, Observability, PodMetadata,
    PodTemplate, Security, Tracing,
};
pub use status::{CacheState, CacheStatus, LlmDeploymentStatus, Phase, conditions};

/// The API group.
pub const GROUP: &str = "ovfleet.dev";

/// The custom resource definition, as it is in `crds/`.
#[must_use]
pub fn crd() -> k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition {
    <LlmDeployment as kube::CustomResourceExt>::crd()
}

/// Text of which anything is accepted that the API server accepts in its place in a pod.
pub(crate) fn any_object(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({"type": "object", "x-kubernetes-preserve-unknown-fields": true})
}

/// Rules in the words of the API server: what must hold, and what is said where it does not.
pub(crate) fn rules(rules: &[(&str, &str)]) -> serde_json::Value {
    rules.iter().map(|(rule, message)| serde_json::json!({"rule": rule, "message": message})).collect()
}
