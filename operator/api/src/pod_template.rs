//! Settings that are merged into pod templates.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::schema::any_object;

/// An object that is merged into a pod template.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PodTemplate {
    /// Labels and annotations to add.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<PodMetadata>,
    /// Fields of the pod's `spec`. Objects are merged. Lists of named items (containers, volumes, environment
    /// variables) are merged by name, volume mounts by path, ports by name or number, and topology spread constraints
    /// by topology key. Required terms of pod affinity and anti-affinity are added to those of the operator. Other lists
    /// and values replace those of the operator.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "any_object")]
    pub spec: Option<serde_json::Value>,
}

/// Labels and annotations of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PodMetadata {
    /// Labels to add to the pods. Labels that the operator sets cannot be changed.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations to add to the pods.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}
