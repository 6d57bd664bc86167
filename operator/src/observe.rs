//! What there is: the objects and pods of a resource, from the stores of the watches, and what its routers and fetches have
//! reported. All of it is in memory: observing asks nobody and waits for nobody.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kube::ResourceExt as _;
use kube::api::DynamicObject;
use operator_api::LlmDeployment;
use serde_json::Value;

use crate::desired::names::{Component, FETCHED, RETRY, UPGRADE};
use crate::desired::release::Permission;
use crate::fleet::PodReports;
use crate::manifest::Kind;
use crate::pod::{FetchReport, PodState, Problem};
use crate::watch::Stores;

/// What there is.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// The objects that the resource owns.
    pub owned: BTreeMap<(Kind, String), Arc<DynamicObject>>,
    /// Its pods, in the order of their names.
    pub pods: Vec<PodState>,
    /// What routers and fetches have reported.
    pub pod_reports: PodReports,
    /// Why Jobs could not create their last pod, by the name of the Job.
    pub job_failures: BTreeMap<String, Problem>,
    /// Whether the cluster knows ServiceMonitors.
    pub monitors: bool,
    /// The value of the resource's annotation whose change makes a failed fetch begin again.
    pub retry: Option<String>,
    /// The value of the resource's annotation that approves a release.
    pub approved_release: Option<String>,
    /// Whether an upgrade may begin.
    pub upgrade: Permission,
}

impl Observed {
    /// Pods of a part.
    pub fn pods_of(&self, component: Component) -> impl Iterator<Item = &PodState> {
        self.pods.iter().filter(move |pod| pod.component == component.name())
    }

    /// Whether the Job called `name` has done its work.
    #[must_use]
    pub fn job_complete(&self, name: &str) -> bool {
        self.job_condition(name, "Complete")
    }

    /// Whether the Job called `name` has given up.
    #[must_use]
    pub fn job_failed(&self, name: &str) -> bool {
        self.job_condition(name, "Failed")
    }

    fn job_condition(&self, name: &str, condition: &str) -> bool {
        let job = self.owned.get(&(Kind::Job, name.to_owned()));
        let conditions = job.and_then(|job| job.data.pointer("/status/conditions")?.as_array());
        conditions.into_iter().flatten().any(|known| known["type"] == condition && known["status"] == "True")
    }

    /// Why the Job called `name` cannot create a pod, if it has none and cannot.
    #[must_use]
    pub fn job_failure(&self, name: &str) -> Option<&Problem> {
        let has_pod = self.pods.iter().any(|pod| pod.job.as_deref() == Some(name));
        let is_over = self.job_complete(name) || self.job_failed(name);
        self.job_failures.get(name).filter(|_| !has_pod && !is_over)
    }

    /// What the Job called `name` has fetched: from its pod or, once that is gone, from what was noted of it.
    #[must_use]
    pub fn fetched(&self, name: &str) -> Option<FetchReport> {
        let pods = self.pods.iter().filter(|pod| pod.job.as_deref() == Some(name));
        let reported = pods.filter_map(|pod| pod.fetched.clone()).find(FetchReport::is_complete);
        reported.or_else(|| {
            let job = self.owned.get(&(Kind::Job, name.to_owned()))?;
            serde_json::from_str(job.annotations().get(FETCHED)?).ok()
        })
    }
}

/// Looks.
#[must_use]
pub fn observe(object: &LlmDeployment, stores: &Stores, pod_reports: PodReports) -> Observed {
    let annotation = |name: &str| object.annotations().get(name).cloned();
    let namespace = object.namespace().unwrap_or_default();
    let owned = stores.owned(&object.uid().unwrap_or_default());
    let jobs = owned.iter().filter(|((kind, _), _)| *kind == Kind::Job);
    let job_failures = jobs.filter_map(|((_, name), job)| {
        Some((name.clone(), stores.job_failure(&namespace, name, &job.uid()?)?))
    });
    Observed {
        job_failures: job_failures.collect(),
        owned,
        pods: stores.pods(&namespace, &object.name_any()),
        pod_reports,
        monitors: stores.has_monitors(),
        retry: annotation(RETRY),
        approved_release: annotation(UPGRADE),
        upgrade: Permission::default(),
    }
}

/// The names of pods that wait for a router's word: they work, and nobody has admitted them yet.
#[must_use]
pub fn awaiting(pods: &[PodState]) -> BTreeSet<&str> {
    let servers = pods.iter().filter(|pod| pod.component == Component::Server.name());
    let waiting =
        servers.filter(|pod| pod.containers_ready && !pod.is_terminating && pod.is_routable != Some(true));
    waiting.map(|pod| pod.name.as_str()).collect()
}

/// A number in the status of an object.
#[must_use]
pub fn count(object: &Value, pointer: &str) -> i32 {
    object.pointer(pointer).and_then(Value::as_i64).and_then(|count| i32::try_from(count).ok()).unwrap_or(0)
}
