//! Determines the source of an object's model, if the model is fetched into a volume that all replicas mount. The
//! volume has a directory for each source, and a fetch removes the directories that no replica uses.
//!
//! Fetch Jobs, and the Deployment and the pods of replicas, have the key of their source as an annotation. Earlier
//! releases did not set the annotation. Adding it to a pod template would restart all replicas, so objects of those
//! releases retain their templates, and the source is read from the arguments of their containers (`former_release`).

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::DynamicObject;

use crate::names::SOURCE;

/// The path at which the model's volume is mounted.
pub const MODEL_PATH: &str = "/model";

/// The source of an object's model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ModelSourceKey {
    /// The source is unknown.
    #[default]
    Unknown,
    /// The model is not in a shared volume.
    NotShared,
    /// The model is in the directory with this name in the shared volume.
    Shared(String),
}

/// Returns the source of the model that a fetch Job fetches or that the Deployment of the replicas serves.
#[must_use]
pub fn source_of_object(object: &DynamicObject) -> ModelSourceKey {
    annotated(object.annotations()).unwrap_or_else(|| former_release::source_of_object(object))
}

/// Returns the source of the model that the pod of a replica serves.
#[must_use]
pub fn source_of_pod(pod: &Pod) -> ModelSourceKey {
    annotated(pod.annotations()).unwrap_or_else(|| former_release::source_of_pod(pod))
}

fn annotated(annotations: &BTreeMap<String, String>) -> Option<ModelSourceKey> {
    annotations.get(SOURCE).cloned().map(ModelSourceKey::Shared)
}

/// Determines the source for objects of releases that did not set the annotation. Once upgrades from these releases are
/// no longer supported, this module can be removed: an object without the annotation then has no shared volume.
mod former_release {
    use k8s_openapi::api::core::v1::Pod;
    use kube::api::DynamicObject;
    use serde_json::Value;

    use super::{MODEL_PATH, ModelSourceKey};

    pub(super) fn source_of_object(object: &DynamicObject) -> ModelSourceKey {
        let containers = object.data.pointer("/spec/template/spec/containers").and_then(Value::as_array);
        let arguments = containers.into_iter().flatten().filter_map(|container| container["args"].as_array());
        source_in(arguments.flatten().filter_map(Value::as_str))
    }

    pub(super) fn source_of_pod(pod: &Pod) -> ModelSourceKey {
        let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
        source_in(containers.flat_map(|container| container.args.iter().flatten()).map(String::as_str))
    }

    /// Finds the source in the arguments of a server, `--model=/model/KEY/current`, or of a fetch, `--into=/model/KEY`.
    fn source_in<'a>(mut arguments: impl Iterator<Item = &'a str>) -> ModelSourceKey {
        let found = arguments.find_map(|argument| match argument.strip_prefix("--model=") {
            Some(path) => Some(directory(path).and_then(|directory| directory.strip_suffix("/current"))),
            None => argument.strip_prefix("--into=").map(directory),
        });
        match found {
            None => ModelSourceKey::Unknown,
            Some(None) => ModelSourceKey::NotShared,
            Some(Some(key)) => ModelSourceKey::Shared(key.to_owned()),
        }
    }

    /// The part of a path below the mounted volume.
    fn directory(path: &str) -> Option<&str> {
        path.strip_prefix(MODEL_PATH)?.strip_prefix('/')
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn source(annotations: &Value, args: &Value) -> ModelSourceKey {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "annotations": annotations},
            "spec": {"containers": [{"name": "server", "args": args}, {"name": "sidecar"}]},
        });
        source_of_pod(&serde_json::from_value(pod).unwrap())
    }

    #[test]
    fn the_source_is_the_annotation_or_in_the_arguments_of_a_former_release() {
        let shared = |key: &str| ModelSourceKey::Shared(key.to_owned());
        let none = json!({});
        assert_eq!(source(&json!({SOURCE: "ab"}), &json!(["--model=/model/cd/current"])), shared("ab"));
        assert_eq!(source(&none, &json!(["--port=1", "--model=/model/cd/current"])), shared("cd"));
        assert_eq!(source(&none, &json!(["fetch", "--into=/model/cd"])), shared("cd"));
        assert_eq!(source(&none, &json!(["--model=/model/current"])), ModelSourceKey::NotShared);
        assert_eq!(source(&none, &json!(["--model=/model/a.gguf"])), ModelSourceKey::NotShared);
        assert_eq!(source(&none, &json!(["--port=1"])), ModelSourceKey::Unknown);
    }
}
