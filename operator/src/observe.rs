//! What there is: the objects and pods of a resource, from the watches' stores, and what routers and fetches say when
//! they are asked. It touches the cluster and changes nothing in it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kube::api::DynamicObject;
use kube::{Resource as _, ResourceExt as _};
use operator_api::LlmDeployment;
use serde_json::Value;

use crate::desired::names::{Component, FETCHED, RETRY};
use crate::fleet::{Ask, Told};
use crate::manifest::Kind;
use crate::pod::{FetchReport, PodState};
use crate::watch::Stores;

/// What there is.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// The objects that the resource owns.
    pub owned: BTreeMap<(Kind, String), Arc<DynamicObject>>,
    /// Its pods, in the order of their names.
    pub pods: Vec<PodState>,
    /// What routers and fetches say.
    pub told: Told,
    /// Whether the cluster knows ServiceMonitors.
    pub monitors: bool,
    /// What the resource's annotation says whose change makes a failed fetch begin again.
    pub retry: Option<String>,
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

    /// What the Job called `name` has fetched: from its pod or, once that is gone, from what was noted of it.
    #[must_use]
    pub fn fetched(&self, name: &str) -> Option<FetchReport> {
        let pods = self.pods.iter().filter(|pod| pod.job.as_deref() == Some(name));
        let told = pods.filter_map(|pod| pod.fetched.clone()).find(FetchReport::is_complete);
        told.or_else(|| {
            let job = self.owned.get(&(Kind::Job, name.to_owned()))?;
            serde_json::from_str(job.annotations().get(FETCHED)?).ok()
        })
    }
}

/// How much is asked of routers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sample {
    /// What must be known to go on.
    Needed,
    /// How busy they are, too.
    All,
}

/// Looks.
pub async fn observe(object: &LlmDeployment, stores: &Stores, ask: &dyn Ask, sample: Sample) -> Observed {
    let uid = object.uid().unwrap_or_default();
    let namespace = object.namespace().unwrap_or_default();
    let name = object.name_any();
    let mut observed = Observed {
        owned: stores.owned(&uid),
        pods: stores.pods(&namespace, &name),
        told: Told::default(),
        monitors: stores.has_monitors(),
        retry: object.meta().annotations.as_ref().and_then(|annotations| annotations.get(RETRY).cloned()),
    };
    observed.told = crate::fleet::ask(ask, &observed.pods, sample).await;
    observed
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
