//! Decides when a resource is reconciled again: with backoff after a failure, or after a pause if no watch reports the
//! event that the resource waits for.

use std::sync::Arc;
use std::time::Duration;

use kube::runtime::controller::Action;
use kube::{Resource, ResourceExt as _};
use operator_api::LlmDeployment;
use rand::RngExt as _;

use super::context::Context;
use super::error::Error;
use crate::apply::{ApplyFailure, ApplyResult};
use crate::desired::release::{UpgradePermission, UpgradeStep};
use crate::watch::StoredDeployment;

/// The pause before a resource that waits for an upgrade slot is reconciled again.
const UPGRADE_RETRY_PAUSE: Duration = Duration::from_secs(10);
/// The pause before a resource whose objects were rejected is reconciled again. The cause may be outside of the
/// resource, such as an object of another owner or an admission policy, and no watch reports that the cause was
/// removed.
const REJECTION_RETRY_PAUSE: Duration = Duration::from_secs(180);
/// The shortest pause after a failed reconcile, without jitter.
const BACKOFF_MIN: Duration = Duration::from_millis(500);
/// The longest pause after a failed reconcile, without jitter.
const BACKOFF_MAX: Duration = Duration::from_secs(120);

/// Retries a failed reconcile with exponential backoff and jitter.
#[expect(clippy::needless_pass_by_value, reason = "the controller requires this signature")]
pub(super) fn retry_later(object: Arc<StoredDeployment>, error: &Error, context: Arc<Context>) -> Action {
    let failures = context.with_memory(object.as_ref(), |memory| {
        memory.failures = memory.failures.saturating_add(1);
        memory.failures
    });
    let pause = BACKOFF_MIN.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(BACKOFF_MAX);
    let pause = pause.mul_f64(rand::rng().random_range(0.75..1.25));
    let chain = process::error::chain(error);
    let name = object.name_any();
    tracing::warn!(
        name,
        namespace = object.namespace(),
        error = chain,
        ?pause,
        "the reconcile will be retried"
    );
    Action::requeue(pause)
}

impl Context {
    /// Returns when the resource is reconciled again if nothing changes until then.
    pub(super) fn next_action(&self, object: &LlmDeployment, applied: &ApplyResult) -> Result<Action, Error> {
        self.check_failures(object, &applied.failures)?;
        let pause = next_pause(applied, self.config.load_interval);
        Ok(pause.map_or_else(Action::await_change, Action::requeue))
    }

    /// Logs transient failures and returns an error if there are any, so that the reconcile is retried.
    pub(super) fn check_failures(
        &self,
        object: &impl Resource,
        failures: &[ApplyFailure],
    ) -> Result<(), Error> {
        let transient = failures.iter().filter(|failure| !failure.source.is_permanent());
        for failure in transient.clone() {
            let (namespace, name) = (object.namespace(), object.name_any());
            let error = process::error::chain(failure);
            tracing::warn!(namespace, name, error, "failed to change an object");
        }
        match transient.count() {
            0 => {}
            failures => return Err(Error::Apply(failures)),
        }
        self.with_memory(object, |memory| memory.failures = 0);
        Ok(())
    }
}

/// The pause after which a resource without transient failures is reconciled again if nothing changes until then;
/// `None` to wait for a change.
fn next_pause(applied: &ApplyResult, load_interval: Option<Duration>) -> Option<Duration> {
    let jittered = |pause: Duration, range| pause.mul_f64(rand::rng().random_range(range));
    let awaits_slot = matches!(
        applied.desired.upgrade,
        UpgradeStep::Wait(UpgradePermission::AwaitsSlot | UpgradePermission::AwaitsLists)
    );
    let is_serving = applied.valid.server.replicas > 0
        && applied.observed.pods.iter().any(|pod| pod.is_routable == Some(true));
    let pauses = [
        awaits_slot.then(|| jittered(UPGRADE_RETRY_PAUSE, 0.75..1.25)),
        (!applied.failures.is_empty()).then(|| jittered(REJECTION_RETRY_PAUSE, 0.75..1.25)),
        load_interval.filter(|_| is_serving).map(|interval| jittered(interval, 1.0..1.2)),
    ];
    pauses.into_iter().flatten().min()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;
    use crate::apply::FailureCause;
    use crate::desired::desired;
    use crate::observe::ObservedState;
    use crate::pod::PodState;
    use crate::validate::{Defaults, validate};

    /// Returns the result of an apply that caused these failures and that was based on the observed `pods`.
    fn applied(failures: Vec<ApplyFailure>, pods: Vec<PodState>) -> ApplyResult {
        let object = json!({
            "apiVersion": "ovfleet.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": "chat", "namespace": "models", "uid": "1"},
            "spec": {"model": {"source": {"pvc": {"claim": "models"}}}},
        });
        let object: LlmDeployment = serde_json::from_value(object).unwrap();
        let observed = ObservedState { pods, ..ObservedState::default() };
        let valid = validate(&object, &observed, &Defaults::with_images("s", "r")).unwrap();
        let desired = desired(&valid, &observed, UpgradePermission::Granted);
        ApplyResult { valid, desired, objects: BTreeMap::new(), observed, failures }
    }

    #[test]
    fn a_rejected_object_is_applied_again_after_some_minutes() {
        let rejected = || {
            let name = "chat-server".to_owned();
            vec![ApplyFailure { verb: "apply", kind: "Deployment", name, source: FailureCause::NameTaken }]
        };
        let minutes = Duration::from_secs(60)..Duration::from_secs(300);
        let pause = next_pause(&applied(rejected(), vec![]), None).unwrap();
        assert!(minutes.contains(&pause), "{pause:?}");
        assert_eq!(next_pause(&applied(vec![], vec![]), None), None);
        // If the resource is reconciled more often for another reason, the shorter pause applies.
        let replica = PodState { is_routable: Some(true), ..PodState::default() };
        let interval = Some(Duration::from_secs(30));
        let pause = next_pause(&applied(rejected(), vec![replica]), interval).unwrap();
        assert!(pause < Duration::from_secs(60), "{pause:?}");
    }
}
