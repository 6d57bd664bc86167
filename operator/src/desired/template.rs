//! Pod templates and the Deployments that contain them.

use serde_json::{Value, json};

use super::merge::merge;
use crate::manifest::{Manifest, digest};
use crate::names::{Component, INPUTS, Owner, SOURCE, TEMPLATE};

#[derive(Debug)]
pub(super) struct PodTemplate {
    pub(super) body: Value,
    /// The hash of the template, which is also a label of its pods.
    pub(super) hash: String,
}

impl PodTemplate {
    /// Renders a template with the given pod spec, into which `overlay` is merged.
    pub(super) fn render(owner: &Owner, component: Component, spec: &Value, overlay: Option<&Value>) -> Self {
        let mut body = json!({"metadata": {"labels": {}, "annotations": {}}, "spec": spec});
        if let Some(overlay) = overlay {
            merge(&mut body, overlay);
        }
        // The labels are merged last, so that the overlay cannot change them.
        merge(&mut body["metadata"]["labels"], &owner.labels(component));
        let hash = digest(&body);
        body["metadata"]["labels"][TEMPLATE] = json!(hash);
        Self { body, hash }
    }
}

/// A Deployment as this version of the operator renders it.
#[derive(Debug)]
pub(super) struct RenderedDeployment {
    pub(super) manifest: Manifest,
    /// The hash of its pod template.
    pub(super) template_hash: String,
    /// The digest of the settings that its pod template is rendered from.
    pub(super) inputs: String,
    /// The digest that earlier versions of the operator computed for the same settings, if it may differ.
    pub(super) former_inputs: Option<String>,
}

impl RenderedDeployment {
    pub(super) fn new(mut manifest: Manifest, template_hash: String, inputs: &str) -> Self {
        manifest.body["metadata"]["annotations"][INPUTS] = json!(inputs);
        Self { manifest, template_hash, inputs: inputs.to_owned(), former_inputs: None }
    }

    /// Records the source of the model in an annotation of the Deployment and of its pods. The hash of the template
    /// does not include the annotation, so it is the same as in releases without the annotation.
    pub(super) fn set_source(&mut self, key: &str) {
        let body = &mut self.manifest.body;
        body["metadata"]["annotations"][SOURCE] = json!(key);
        body["spec"]["template"]["metadata"]["annotations"][SOURCE] = json!(key);
    }
}
