//! Simulates a kubelet, which writes the status of pods, and the routers, which report their replicas.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::BoxStream;
use futures_util::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams};
use kube::{Client, ResourceExt as _};
use operator::pod_reports::{FetchProgress, PodClient, ReportedReplica, RouterReport};
use serde_json::{Value, json};
use tokio::task::JoinSet;

/// The interval at which statuses and reports are updated.
const UPDATE_INTERVAL: Duration = Duration::from_millis(20);

/// Routers that report the replicas that they have admitted.
#[derive(Clone, Debug, Default)]
pub(crate) struct Routers(Arc<Mutex<Admission>>);

#[derive(Debug, Default)]
struct Admission {
    /// The namespace and the name of each admitted pod.
    admitted: BTreeSet<(String, String)>,
    /// Whether the routers admit no replica.
    is_closed: bool,
    connections: u64,
}

impl Routers {
    fn with<T>(&self, change: impl FnOnce(&mut Admission) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Makes the routers admit no replica if `is_closed`, and all running replicas otherwise.
    pub(crate) fn close(&self, is_closed: bool) {
        self.with(|admission| admission.is_closed = is_closed);
    }

    fn report(&self) -> RouterReport {
        let replica = |(namespace, name): &(String, String)| ReportedReplica {
            pod: Some((namespace.clone(), name.clone())),
            is_ready: true,
            blocks_total: 10,
            ..ReportedReplica::default()
        };
        self.with(|admission| {
            let admitted = admission.admitted.iter().filter(|_| !admission.is_closed);
            RouterReport { replicas: admitted.map(replica).collect() }
        })
    }

    /// Returns the number of connections to the routers that have been opened so far.
    pub(crate) fn connections(&self) -> u64 {
        self.with(|admission| admission.connections)
    }
}

impl PodClient for Routers {
    fn watch_replicas<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Option<BoxStream<'static, RouterReport>>> {
        let routers = self.clone();
        self.with(|admission| admission.connections += 1);
        let reports = stream::unfold(None, move |last| {
            let routers = routers.clone();
            async move {
                loop {
                    let report = routers.report();
                    if last.as_ref() != Some(&report) {
                        return Some((report.clone(), Some(report)));
                    }
                    tokio::time::sleep(UPDATE_INTERVAL).await;
                }
            }
        });
        Box::pin(async move { Some(reports.boxed()) })
    }

    fn progress<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Option<FetchProgress>> {
        Box::pin(async { None })
    }
}

/// Updates the pods of a namespace until this value is dropped: pods that fetch a model end with the result that
/// [`Self::set_fetch_result`] sets, all other pods run, and pods that are being deleted are removed.
pub(crate) struct Kubelet {
    routers: Routers,
    /// The exit code and the report of the containers that fetch models.
    outcome: Arc<Mutex<Option<Value>>>,
    _task: JoinSet<()>,
}

impl Kubelet {
    pub(crate) fn start(client: &Client, namespace: &str) -> Self {
        let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
        let routers = Routers::default();
        let outcome = Arc::new(Mutex::new(None));
        let mut task = JoinSet::new();
        let (admitting, fetch) = (routers.clone(), outcome.clone());
        task.spawn(async move {
            loop {
                // If the API server is busy, the next iteration tries again.
                if let Ok(list) = pods.list(&ListParams::default()).await {
                    for pod in list.items {
                        let outcome = fetch.lock().unwrap_or_else(PoisonError::into_inner).clone();
                        let _ = update_status(&pods, &pod, &admitting, outcome).await;
                    }
                }
                tokio::time::sleep(UPDATE_INTERVAL).await;
            }
        });
        Self { routers, outcome, _task: task }
    }

    pub(crate) fn routers(&self) -> Routers {
        self.routers.clone()
    }

    /// Sets the exit code and the report of the containers that fetch models.
    pub(crate) fn set_fetch_result(&self, code: i32, report: Value) {
        let ended = json!({"exitCode": code, "message": report.to_string()});
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(ended);
    }
}

async fn update_status(
    pods: &Api<Pod>,
    pod: &Pod,
    routers: &Routers,
    fetched: Option<Value>,
) -> kube::Result<()> {
    let name = pod.name_any();
    let key = (pod.namespace().unwrap_or_default(), name.clone());
    let component = pod.labels().get("app.kubernetes.io/component").cloned().unwrap_or_default();
    if pod.metadata.deletion_timestamp.is_some() {
        routers.with(|admission| admission.admitted.remove(&key));
        let parameters = DeleteParams::default().grace_period(0);
        return pods.delete(&name, &parameters).await.map(drop);
    }
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    if matches!(phase, Some("Succeeded" | "Failed")) {
        return Ok(());
    }
    let status = match (component.as_str(), fetched) {
        ("fetch", None) => return Ok(()),
        ("fetch", Some(ended)) => {
            let is_good = ended["exitCode"] == 0;
            json!({
                "phase": if is_good { "Succeeded" } else { "Failed" },
                "containerStatuses": [container("fetch", json!({"terminated": ended}), Readiness::No)],
            })
        }
        (component, _) => {
            let status = pod.status.as_ref();
            let gates = pod.spec.iter().flat_map(|spec| spec.readiness_gates.iter().flatten());
            let is_open = |gate: &str| {
                let conditions = status.and_then(|status| status.conditions.as_ref()).into_iter().flatten();
                conditions.into_iter().any(|known| known.type_ == gate && known.status == "True")
            };
            let is_ready = gates.map(|gate| gate.condition_type.as_str()).all(is_open);
            if component == "server" {
                routers.with(|admission| admission.admitted.insert(key));
            }
            let condition = |name: &str, holds: bool| json!({"type": name, "status": if holds { "True" } else { "False" }, "lastTransitionTime": null});
            json!({
                "phase": "Running",
                "podIP": "127.0.0.1",
                "podIPs": [{"ip": "127.0.0.1"}],
                "conditions": [
                    condition("PodScheduled", true),
                    condition("Initialized", true),
                    condition("ContainersReady", true),
                    condition("Ready", is_ready),
                ],
                "containerStatuses": [container(component, json!({"running": {}}), Readiness::Yes)],
            })
        }
    };
    let patch = json!({"status": status});
    pods.patch_status(&name, &PatchParams::default(), &Patch::Strategic(patch)).await.map(drop)
}

#[derive(Clone, Copy, PartialEq)]
enum Readiness {
    Yes,
    No,
}

fn container(name: &str, state: Value, ready: Readiness) -> Value {
    json!({
        "name": name, "image": "image", "imageID": "", "restartCount": 0, "ready": ready == Readiness::Yes,
        "started": true, "state": state, "lastState": {},
    })
}
