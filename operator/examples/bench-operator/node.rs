//! Simulates a kubelet, which writes the status of pods, and the routers of each resource, which report their replicas.
//! The routers of each resource listen on a separate loopback address, and the operator connects to it as in a cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use futures_util::stream::BoxStream;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Client, ResourceExt as _};
use operator::manifest::Kind;
use operator::ports::GRPC_PORT;
use operator_api::LlmDeployment;
use proto::v1alpha1::router_server::{Router, RouterServer};
use proto::v1alpha1::{PodReference, RouterReplica, RouterReplicas, RoutingState, WatchReplicasRequest};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

/// Maximum number of pods whose statuses are written at the same time.
const CONCURRENCY: usize = 16;

/// The interval at which a router reports.
const REPORT_INTERVAL: std::time::Duration = std::time::Duration::from_millis(100);

/// The running replicas, by the name of their resource.
type RunningReplicas = Arc<Mutex<BTreeMap<String, BTreeSet<String>>>>;

/// A simulated node, with the kubelet and the routers.
#[derive(Debug)]
pub(crate) struct Node {
    namespace: String,
    resources: usize,
}

/// Returns the name of a resource.
pub(crate) fn name(number: usize) -> String {
    format!("chat-{number}")
}

/// The address of all pods of a resource, on which its routers listen.
fn address(number: usize) -> Ipv4Addr {
    const EACH: usize = 250;
    let part = |number: usize| u8::try_from(number).unwrap_or(u8::MAX);
    Ipv4Addr::new(127, 83, part(number / EACH), part(number % EACH + 1))
}

impl Node {
    /// Starts the simulation for the given number of resources in `namespace`.
    ///
    /// # Errors
    /// The process cannot listen on an address, for example because the address is in use.
    pub(crate) async fn start(
        client: &Client,
        namespace: &str,
        resources: usize,
        tasks: &mut JoinSet<anyhow::Result<()>>,
    ) -> anyhow::Result<Self> {
        let running = RunningReplicas::default();
        for number in 0..resources {
            let address = address(number);
            let listener = TcpListener::bind((address, GRPC_PORT))
                .await
                .with_context(|| format!("failed to listen on {address}:{GRPC_PORT}"))?;
            let incoming = stream::unfold(listener, async |listener| {
                let accepted = listener.accept().await.map(|(connection, _)| connection);
                Some((accepted, listener))
            });
            let routers =
                Routers { namespace: namespace.to_owned(), resource: name(number), running: running.clone() };
            let server = Server::builder().add_service(RouterServer::new(routers));
            tasks.spawn(async move { Ok(server.serve_with_incoming(incoming).await?) });
        }
        let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
        tasks.spawn(async move {
            let seen = watcher(pods.clone(), watcher::Config::default()).default_backoff().applied_objects();
            seen.try_for_each_concurrent(CONCURRENCY, async |pod| {
                // If the update fails because the pod has been changed, the watch reports the pod again. A pod that has
                // been deleted needs no update.
                let _ = update_status(&pods, &pod, &running).await;
                Ok(())
            })
            .await
            .context("the watch of pods failed")
        });
        Ok(Self { namespace: namespace.to_owned(), resources })
    }

    /// Waits until all resources are ready.
    pub(crate) async fn all_ready(&self, resources: &Api<LlmDeployment>) -> anyhow::Result<()> {
        let mut ready = BTreeSet::new();
        let mut seen = watcher(resources.clone(), watcher::Config::default())
            .default_backoff()
            .applied_objects()
            .boxed();
        while ready.len() < self.resources {
            let object = seen.try_next().await?.context("the watch of LLMDeployments has ended")?;
            let conditions = object.status.iter().flat_map(|status| &status.conditions);
            if conditions.into_iter().any(|known| known.type_ == "Ready" && known.status == "True") {
                ready.insert(object.name_any());
            }
        }
        Ok(())
    }

    /// Returns the total number of objects that the resources own, excluding Secrets and pods.
    pub(crate) async fn owned(&self, client: &Client) -> anyhow::Result<usize> {
        let mut count = 0;
        for kind in Kind::BUILT_IN {
            let api: Api<DynamicObject> =
                Api::namespaced_with(client.clone(), &self.namespace, &kind.api_resource());
            let list = api.list_metadata(&ListParams::default()).await?;
            let is_owned = |owners: &[k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference]| {
                owners.iter().any(|owner| owner.kind == "LLMDeployment")
            };
            count += list.items.iter().filter(|object| is_owned(object.owner_references())).count();
        }
        Ok(count)
    }
}

/// The routers of a resource, which admit every running replica.
#[derive(Clone, Debug)]
struct Routers {
    namespace: String,
    resource: String,
    running: RunningReplicas,
}

impl Routers {
    fn report(&self) -> RouterReplicas {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let replica = |name: &String| RouterReplica {
            name: name.clone(),
            pod: Some(PodReference {
                namespace: self.namespace.clone(),
                name: name.clone(),
                uid: String::new(),
            }),
            state: RoutingState::Ready.into(),
            blocks_total: 10,
            ..RouterReplica::default()
        };
        let replicas = running.get(&self.resource).into_iter().flatten().map(replica).collect();
        RouterReplicas { replicas, ..RouterReplicas::default() }
    }
}

#[tonic::async_trait]
impl Router for Routers {
    type WatchReplicasStream = BoxStream<'static, Result<RouterReplicas, Status>>;

    async fn watch_replicas(
        &self,
        _: Request<WatchReplicasRequest>,
    ) -> Result<Response<Self::WatchReplicasStream>, Status> {
        let reports = stream::unfold((self.clone(), false), async |(routers, is_later)| {
            if is_later {
                tokio::time::sleep(REPORT_INTERVAL).await;
            }
            Some((Ok(routers.report()), (routers, true)))
        });
        Ok(Response::new(reports.boxed()))
    }
}

async fn update_status(pods: &Api<Pod>, pod: &Pod, running: &RunningReplicas) -> anyhow::Result<()> {
    let pod_name = pod.name_any();
    if pod.metadata.deletion_timestamp.is_some() {
        pods.delete(&pod_name, &DeleteParams::default().grace_period(0)).await?;
        return Ok(());
    }
    let label = |name: &str| pod.labels().get(name).cloned().unwrap_or_default();
    let (component, resource) = (label("app.kubernetes.io/component"), label("app.kubernetes.io/instance"));
    let number: usize = resource.rsplit('-').next().and_then(|number| number.parse().ok()).unwrap_or(0);
    let status = pod.status.as_ref();
    let holds = |name: &str| {
        let conditions = status.and_then(|status| status.conditions.as_ref()).into_iter().flatten();
        conditions.into_iter().any(|known| known.type_ == name && known.status == "True")
    };
    let mut gates = pod.spec.iter().flat_map(|spec| spec.readiness_gates.iter().flatten());
    let is_ready = gates.all(|gate| holds(&gate.condition_type));
    if holds("ContainersReady") && holds("Ready") == is_ready {
        return Ok(());
    }
    if component == "server" {
        let mut running = running.lock().unwrap_or_else(PoisonError::into_inner);
        running.entry(resource).or_default().insert(pod_name.clone());
    }
    let condition = |name: &str, holds: bool| json!({"type": name, "status": if holds { "True" } else { "False" }, "lastTransitionTime": null});
    let address = address(number).to_string();
    let patch = json!({"status": {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": [
            condition("PodScheduled", true),
            condition("Initialized", true),
            condition("ContainersReady", true),
            condition("Ready", is_ready),
        ],
        "containerStatuses": [{
            "name": component, "image": "image", "imageID": "", "restartCount": 0, "ready": true, "started": true,
            "state": {"running": {}}, "lastState": {},
        }],
    }});
    pods.patch_status(&pod_name, &PatchParams::default(), &Patch::Strategic(patch)).await?;
    Ok(())
}
