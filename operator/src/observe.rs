//! Observes a resource: its objects and pods, from the caches of the watches, and the reports of its routers and
//! fetches. Everything is read from memory, so observing sends no requests and never waits.

use std::collections::BTreeMap;
use std::sync::Arc;

use kube::api::DynamicObject;
use kube::{Resource, ResourceExt as _};

use crate::manifest::Kind;
use crate::names::{Component, FETCHED, RETRY, UPGRADE};
use crate::pod::{FetchReport, PodState, Problem};
use crate::pod_reports::PodReports;
use crate::watch::Stores;

/// The observed state of a resource.
#[derive(Clone, Debug, Default)]
pub struct ObservedState {
    /// The objects that the resource owns.
    pub owned: BTreeMap<(Kind, String), Arc<DynamicObject>>,
    /// The pods of the resource, sorted by name.
    pub pods: Vec<PodState>,
    /// The reports of routers and fetches.
    pub pod_reports: PodReports,
    /// The reason why a Job could not create its last pod, by the name of the Job.
    pub job_failures: BTreeMap<String, Problem>,
    /// Whether the cluster has the kind ServiceMonitor.
    pub has_service_monitors: bool,
    /// The value of the annotation whose change makes the operator replace the fetch Job.
    pub retry: Option<String>,
    /// The release that the user has approved with an annotation of the resource.
    pub approved_release: Option<String>,
}

impl ObservedState {
    /// Returns the pods of a component.
    pub fn pods_of(&self, component: Component) -> impl Iterator<Item = &PodState> {
        self.pods.iter().filter(move |pod| pod.component == component.name())
    }

    /// Returns the Deployment called `name`.
    #[must_use]
    pub fn deployment(&self, name: &str) -> Option<&DynamicObject> {
        self.owned.get(&(Kind::Deployment, name.to_owned())).map(AsRef::as_ref)
    }

    /// Returns the Job called `name`.
    #[must_use]
    pub fn job(&self, name: &str) -> Option<&DynamicObject> {
        self.owned.get(&(Kind::Job, name.to_owned())).map(AsRef::as_ref)
    }

    /// Whether the Job called `name` has succeeded.
    #[must_use]
    pub fn is_job_complete(&self, name: &str) -> bool {
        self.has_job_condition(name, "Complete")
    }

    /// Whether the Job called `name` has failed permanently: Kubernetes will not retry it.
    #[must_use]
    pub fn is_job_failed(&self, name: &str) -> bool {
        self.has_job_condition(name, "Failed")
    }

    fn has_job_condition(&self, name: &str, condition: &str) -> bool {
        let conditions = self.job(name).and_then(|job| job.data.pointer("/status/conditions")?.as_array());
        conditions.into_iter().flatten().any(|known| known["type"] == condition && known["status"] == "True")
    }

    /// Returns the reason why the Job called `name` cannot create a pod, if it has no pod and has not finished.
    #[must_use]
    pub fn job_failure(&self, name: &str) -> Option<&Problem> {
        let has_pod = self.pods.iter().any(|pod| pod.job.as_deref() == Some(name));
        let has_finished = self.is_job_complete(name) || self.is_job_failed(name);
        self.job_failures.get(name).filter(|_| !has_pod && !has_finished)
    }

    /// Returns the report of a successful fetch by the Job called `name`: from its pod or, once the pod is deleted,
    /// from the Job's annotation.
    #[must_use]
    pub fn fetch_report(&self, name: &str) -> Option<FetchReport> {
        let pods = self.pods.iter().filter(|pod| pod.job.as_deref() == Some(name));
        let reported = pods.filter_map(|pod| pod.fetched.clone()).find(FetchReport::is_complete);
        reported.or_else(|| serde_json::from_str(self.job(name)?.annotations().get(FETCHED)?).ok())
    }
}

/// Returns the observed state of the resource `object`.
#[must_use]
pub fn observe(object: &impl Resource, stores: &Stores, pod_reports: PodReports) -> ObservedState {
    let annotation = |name: &str| object.annotations().get(name).cloned();
    let namespace = object.namespace().unwrap_or_default();
    let owned = stores.owned(&object.uid().unwrap_or_default());
    let jobs = owned.iter().filter(|((kind, _), _)| *kind == Kind::Job);
    let job_failures = jobs.filter_map(|((_, name), job)| {
        Some((name.clone(), stores.job_failure(&namespace, name, &job.uid()?)?))
    });
    ObservedState {
        job_failures: job_failures.collect(),
        owned,
        pods: stores.pods(&namespace, &object.name_any()),
        pod_reports,
        has_service_monitors: stores.has_service_monitors(),
        retry: annotation(RETRY),
        approved_release: annotation(UPGRADE),
    }
}
