//! Reads and writes the status of a resource, and publishes events about its changes. The content of the status is
//! computed in [`crate::status`].

use kube::api::{Api, ApiResource, DynamicObject, Patch, PatchParams};
use kube::{Resource, ResourceExt as _};
use operator_api::{LlmDeployment, LlmDeploymentStatus};
use process::error::chain;
use serde_json::json;

use super::context::Context;
use super::error::Error;
use crate::client::objects_api;
use crate::events::transitions;
use crate::names::FIELD_MANAGER;
use crate::status::is_same_except_times;
use crate::watch::StoredDeployment;

impl Context {
    /// Returns the status that this controller wrote last or, if it has not written any, the status in `object`.
    pub(super) fn previous_status(&self, object: &LlmDeployment) -> Option<LlmDeploymentStatus> {
        self.with_memory(object, |memory| memory.status.clone()).or_else(|| object.status.clone())
    }

    /// Requests the status of a resource that cannot be decoded. Returns `None` if the resource has no status, or if
    /// the status cannot be decoded either.
    pub(super) async fn stored_status(
        &self,
        object: &StoredDeployment,
    ) -> Result<Option<LlmDeploymentStatus>, Error> {
        let api = self.resources_api(object);
        self.metrics.record_api_call("get", "LLMDeployment");
        let stored = api.get_opt(&object.name_any()).await.map_err(Error::ReadStatus)?;
        Ok(stored.and_then(|stored| serde_json::from_value(stored.data.get("status")?.clone()).ok()))
    }

    /// Writes the status if anything except its times has changed, and publishes events about the changes.
    pub(super) async fn write_status(
        &self,
        object: &impl Resource<DynamicType = ()>,
        previous: Option<LlmDeploymentStatus>,
        status: LlmDeploymentStatus,
    ) -> Result<(), Error> {
        if previous.as_ref().is_some_and(|previous| is_same_except_times(previous, &status)) {
            return Ok(());
        }
        let name = object.name_any();
        let api = self.resources_api(object);
        let patch = json!({
            "apiVersion": LlmDeployment::api_version(&()),
            "kind": LlmDeployment::kind(&()),
            "metadata": {"name": name, "uid": object.uid()},
            "status": status,
        });
        self.metrics.record_api_call("apply_status", "LLMDeployment");
        let parameters = PatchParams::apply(FIELD_MANAGER).force();
        match api.patch_status(&name, &parameters, &Patch::Apply(&patch)).await {
            // The resource was deleted, and perhaps recreated with the same name.
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => return Ok(()),
            result => drop(result.map_err(Error::WriteStatus)?),
        }
        if previous.as_ref().map(|previous| previous.phase) != Some(status.phase) {
            tracing::info!(
                name,
                namespace = object.namespace(),
                phase = status.phase.name(),
                "the phase has changed"
            );
        }
        let events = transitions(previous.as_ref(), &status);
        self.with_memory(object, |memory| memory.status = Some(status));
        let reference = object.object_ref(&());
        for event in events {
            self.metrics.record_event();
            if let Err(error) = self.recorder.publish(&event, &reference).await {
                tracing::warn!(error = chain(&error), "failed to publish an event");
            }
        }
        Ok(())
    }

    /// The API for the resources in the namespace of `object`.
    fn resources_api(&self, object: &impl Resource) -> Api<DynamicObject> {
        let kind = ApiResource::erase::<LlmDeployment>(&());
        objects_api(&self.applier.client, object.meta().namespace.as_deref(), &kind)
    }
}
