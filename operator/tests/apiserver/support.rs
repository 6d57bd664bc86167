//! The cluster that most tests of this program share, an operator in it, and functions that wait for a state.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::wait::{await_condition, conditions::is_crd_established};
use kube::{Client, CustomResourceExt as _, ResourceExt};
use operator::admin::Admin;
use operator::controller;
use operator::manifest::Kind;
use operator::metrics::Metrics;
use operator::run::{Config, Services, manage};
use operator::validate::Defaults;
use operator_api::LlmDeployment;
use process::trace::Tracer;
use serde_json::{Value, json};
use tests::cluster::ControlPlane;
use tokio::sync::OnceCell;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::kubelet::{Kubelet, Routers};

/// The maximum time to wait for a state. It suffices even on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(90);
/// The interval at which a state is checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(25);
/// The user as which the operator connects. This user has only the permissions that the chart grants the operator.
pub(crate) const OPERATOR: &str = "operator";

static CLUSTER: OnceCell<ControlPlane> = OnceCell::const_new();

/// Returns the cluster, in which the custom resource definition is established.
pub(crate) async fn cluster() -> &'static ControlPlane {
    CLUSTER.get_or_try_init(|| start(operator_api::crd())).await.unwrap()
}

/// Starts a cluster with this definition of LLMDeployment.
pub(crate) async fn start(definition: CustomResourceDefinition) -> anyhow::Result<ControlPlane> {
    let mut cluster = ControlPlane::start().await?;
    install(&cluster.client().await?, &definition).await?;
    // The garbage collector lists the kinds of the API server when it starts and every 30 seconds. If it started before
    // the definition was installed, tests would wait that long for the objects of a deleted resource to be deleted.
    cluster.start_controllers().await?;
    Ok(cluster)
}

/// Creates this definition of LLMDeployment, waits until it is established, and grants the operator its permissions.
pub(crate) async fn install(client: &Client, definition: &CustomResourceDefinition) -> anyhow::Result<()> {
    let definitions = Api::all(client.clone());
    definitions.create(&PostParams::default(), definition).await?;
    await_condition(definitions, LlmDeployment::crd_name(), is_crd_established()).await?;
    grant(client, OPERATOR, &permissions()?).await
}

/// Returns the permissions that the chart grants the operator.
pub(crate) fn permissions() -> anyhow::Result<Vec<Value>> {
    let chart = tests::root().join("charts/ovfleet/templates/_helpers.tpl");
    let text = std::fs::read_to_string(chart)?;
    let begin = "{{- define \"ovfleet.rules\" -}}";
    let rules = text.split(begin).nth(1).and_then(|rest| rest.split("{{- end }}").next()).unwrap();
    let mut rules: Vec<Value> = serde_yaml::from_str(rules)?;
    let leases = json!({"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "patch", "update"]});
    rules.push(leases);
    Ok(rules)
}

/// Grants permissions to a user.
pub(crate) async fn grant(client: &Client, user: &str, rules: &[Value]) -> anyhow::Result<()> {
    let role: ClusterRole = serde_json::from_value(json!({"metadata": {"name": user}, "rules": rules}))?;
    Api::<ClusterRole>::all(client.clone()).create(&PostParams::default(), &role).await?;
    let binding: ClusterRoleBinding = serde_json::from_value(json!({
        "metadata": {"name": user},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": user},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
    }))?;
    Api::<ClusterRoleBinding>::all(client.clone()).create(&PostParams::default(), &binding).await?;
    Ok(())
}

/// A namespace with its own operator and kubelet.
pub(crate) struct Stage {
    pub(crate) client: Client,
    pub(crate) namespace: String,
    pub(crate) metrics: Metrics,
    pub(crate) kubelet: Kubelet,
    tasks: JoinSet<anyhow::Result<()>>,
}

impl Stage {
    pub(crate) async fn new(name: &str) -> Self {
        let cluster = cluster().await;
        let client = cluster.client().await.unwrap();
        let namespace = tests::cluster::namespace(&client, name).await.unwrap();
        let kubelet = Kubelet::start(&client, &namespace);
        let metrics = Metrics::default();
        let mut tasks = JoinSet::new();
        let operator = operator(&namespace, None, &metrics, kubelet.routers()).await;
        tasks.spawn(operator);
        Self { client, namespace, metrics, kubelet, tasks }
    }

    pub(crate) fn resources(&self) -> Api<LlmDeployment> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    pub(crate) fn objects(&self, kind: Kind) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), &self.namespace, &kind.api_resource())
    }

    /// Applies a resource as `kubectl apply --server-side --force-conflicts` does.
    pub(crate) async fn apply(&self, name: &str, spec: Value) -> kube::Result<LlmDeployment> {
        let patch = json!({
            "apiVersion": "ovfleet.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": name},
            "spec": spec,
        });
        self.resources().patch(name, &PatchParams::apply("user").force(), &Patch::Apply(&patch)).await
    }

    /// Waits until the status is current and a condition has the expected status. `expected` has the form `Ready=True`.
    pub(crate) async fn until(&self, name: &str, expected: &str) -> LlmDeployment {
        let (condition, expected_status) = expected.split_once('=').unwrap();
        let mut last = Value::Null;
        let seen = eventually(async || {
            let object = self.resources().get(name).await.unwrap();
            last = json!(object.status);
            let status = object.status.as_ref()?;
            let is_current = Some(status.observed_generation) == object.metadata.generation;
            let holds = status
                .conditions
                .iter()
                .any(|known| known.type_ == condition && known.status == expected_status);
            (is_current && holds).then_some(object)
        })
        .await;
        seen.unwrap_or_else(|| panic!("{name} does not reach {expected}: {last:#}"))
    }

    /// Fails if the operator has stopped.
    pub(crate) fn check(&mut self) {
        if let Some(ended) = self.tasks.try_join_next() {
            panic!("the operator has stopped: {ended:?}");
        }
    }

    /// Returns the objects in the namespace that any LLMDeployment owns, except Secrets and ServiceMonitors, each as
    /// `KIND NAME`, such as `Service chat`.
    pub(crate) async fn owned(&self) -> Vec<String> {
        let mut found = Vec::new();
        for kind in Kind::BUILT_IN {
            let list = self.objects(kind).list(&Default::default()).await.unwrap();
            let owned = list
                .items
                .into_iter()
                .filter(|object| object.owner_references().iter().any(|owner| owner.kind == "LLMDeployment"));
            found.extend(owned.map(|object| format!("{} {}", kind.name(), object.name_any())));
        }
        found
    }
}

/// Returns an operator for a namespace, which runs while the future is polled.
pub(crate) async fn operator(
    namespace: &str,
    identity: Option<&str>,
    metrics: &Metrics,
    routers: Routers,
) -> impl Future<Output = anyhow::Result<()>> + use<> {
    let lease = identity.map(|identity| operator::leader::Config {
        namespace: namespace.to_owned(),
        name: "operator".to_owned(),
        identity: identity.to_owned(),
        duration: Duration::from_secs(2),
    });
    operator_with(namespace, metrics, routers, Settings { lease, ..Settings::default() }).await
}

/// The settings of the operator that tests can override.
pub(crate) struct Settings {
    pub(crate) lease: Option<operator::leader::Config>,
    pub(crate) tracer: Option<Tracer>,
    pub(crate) server_image: &'static str,
}

impl Default for Settings {
    fn default() -> Self {
        Self { lease: None, tracer: None, server_image: "ovfleet/server:1" }
    }
}

/// Returns an [`operator`] with these settings.
pub(crate) async fn operator_with(
    namespace: &str,
    metrics: &Metrics,
    routers: Routers,
    settings: Settings,
) -> impl Future<Output = anyhow::Result<()>> + use<> {
    operator_on(cluster().await, namespace, metrics, routers, settings).await
}

/// Returns an [`operator`] for a namespace of `cluster`.
pub(crate) async fn operator_on(
    cluster: &ControlPlane,
    namespace: &str,
    metrics: &Metrics,
    routers: Routers,
    settings: Settings,
) -> impl Future<Output = anyhow::Result<()>> + use<> {
    let client = cluster.client_for(OPERATOR, None).await.unwrap();
    let config = config(vec![namespace.to_owned()], settings);
    let metrics = metrics.clone();
    let services = Services { admin: Admin::new(metrics.clone()), metrics, pods: Arc::new(routers) };
    manage(client, config, services, CancellationToken::new())
}

/// Returns the configuration of an operator for these namespaces, or for all namespaces if the list is empty.
pub(crate) fn config(namespaces: Vec<String>, settings: Settings) -> Config {
    Config {
        namespaces,
        controller: controller::Config {
            defaults: Defaults::with_images(settings.server_image, "ovfleet/router:1"),
            load_interval: None,
            max_concurrent_reconciles: 8,
            max_concurrent_upgrades: 1,
            discovery_interval: Duration::from_millis(250),
            tracer: settings.tracer,
        },
        lease: settings.lease,
    }
}

/// Deletes the replicas in a namespace, and waits until the readiness gates of their replacements are set.
pub(crate) async fn replace_replicas(client: &Client, namespace: &str) {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let replicas = ListParams::default().labels("app.kubernetes.io/component=server");
    let former: Vec<_> = pods.list(&replicas).await.unwrap().items.iter().map(ResourceExt::uid).collect();
    assert!(!former.is_empty());
    pods.delete_collection(&DeleteParams::default(), &replicas).await.unwrap();
    let is_routable = |pod: &Pod| {
        let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
        let mut conditions = conditions.into_iter().flatten();
        conditions.any(|known| known.type_ == "ovfleet.dev/routable" && known.status == "True")
    };
    let are_replaced = async || {
        let present = pods.list(&replicas).await.unwrap().items;
        let is_done = present.iter().all(|pod| !former.contains(&pod.uid()) && is_routable(pod));
        (is_done && !present.is_empty()).then_some(())
    };
    eventually(are_replaced).await.expect("the replacements of the deleted replicas are routable");
}

/// Calls `check` until it returns a value or the time limit is exceeded.
pub(crate) async fn eventually<T>(mut check: impl AsyncFnMut() -> Option<T>) -> Option<T> {
    let end = tokio::time::Instant::now() + LIMIT;
    loop {
        if let Some(value) = check().await {
            return Some(value);
        }
        if tokio::time::Instant::now() > end {
            return None;
        }
        tokio::time::sleep(CHECK_INTERVAL).await;
    }
}

/// Returns the smallest valid spec.
pub(crate) fn smallest() -> Value {
    json!({"model": {"source": {"pvc": {"claim": "models"}}}})
}
