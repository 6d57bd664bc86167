//! Tests of the objects that `desired` renders for validated resources, with snapshots in `snapshots/`.
//! `UPDATE_EXPECT=1 cargo test -p operator --test desired` updates the snapshots; review the changes.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::sync::Arc;

use expect_test::expect_file;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::api::DynamicObject;
use operator::desired::flags::{self, Expansion};
use operator::desired::release::UpgradePermission;
use operator::desired::{DesiredState, desired};
use operator::manifest::{Kind, Manifest, digest};
use operator::observe::ObservedState;
use operator::pod::PodState;
use operator::source::ModelSourceKey;
use operator::valid_deployment::ValidDeployment;
use operator::validate::{Defaults, PodUser, validate};
use operator_api::{AccessMode, Disruption, LlmDeployment, MediaSources, PodTemplate, Tracing};
use serde_json::{Value, json};

mod release;

const FIXTURES: [&str; 5] = ["small", "full", "claim", "image", "per-pod"];

fn fixture(name: &str) -> LlmDeployment {
    let path = format!("{}/tests/fixtures/{name}.yaml", env!("CARGO_MANIFEST_DIR"));
    serde_yaml::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn valid(object: &LlmDeployment, observed: &ObservedState) -> ValidDeployment {
    let mut defaults = Defaults::with_images("ovfleet/server:1", "ovfleet/router:1");
    defaults.image_pull_policy = Some("IfNotPresent".to_owned());
    validate(object, observed, &defaults).unwrap()
}

fn render(object: &LlmDeployment, observed: &ObservedState) -> DesiredState {
    desired(&valid(object, observed), observed, UpgradePermission::Granted)
}

/// The observed state after the fetch Job of `resources`, if there is one, has completed.
fn after_fetch(resources: &DesiredState) -> ObservedState {
    let mut observed = ObservedState { has_service_monitors: true, ..ObservedState::default() };
    for manifest in resources.manifests.iter().filter(|manifest| manifest.kind == Kind::Job) {
        let mut job: DynamicObject = serde_json::from_value(manifest.body.clone()).unwrap();
        job.data["status"] = json!({"conditions": [{"type": "Complete", "status": "True"}]});
        observed.owned = BTreeMap::from([((Kind::Job, manifest.name.clone()), Arc::new(job))]);
    }
    observed
}

fn deployment<'a>(resources: &'a DesiredState, name: &str) -> &'a Value {
    let found = resources
        .manifests
        .iter()
        .find(|manifest| manifest.kind == Kind::Deployment && manifest.name == name);
    &found.unwrap().body
}

#[test]
fn rendered_objects_match_the_snapshots() {
    for name in FIXTURES {
        let object = fixture(name);
        let first =
            render(&object, &ObservedState { has_service_monitors: true, ..ObservedState::default() });
        let resources = render(&object, &after_fetch(&first));
        let mut text = String::new();
        for manifest in resources.replica_token.iter().chain(&resources.manifests) {
            text += "---\n";
            text += &serde_yaml::to_string(&manifest.body).unwrap();
        }
        expect_file![format!("{}/tests/snapshots/{name}.yaml", env!("CARGO_MANIFEST_DIR"))].assert_eq(&text);
    }
}

/// The server would reject such a flag as given twice if the user could also set it.
#[test]
fn flags_that_the_operator_sets_are_reserved() {
    for name in FIXTURES {
        let object = fixture(name);
        let first = render(&object, &ObservedState::default());
        let resources = render(&object, &after_fetch(&first));
        let server = deployment(&resources, &format!("{name}-server"));
        let args = server["spec"]["template"]["spec"]["containers"][0]["args"].as_array().unwrap();
        let args = args.iter().map(|argument| argument.as_str().unwrap());
        for argument in
            args.filter(|argument| !object.spec.engine.extra_args.iter().any(|own| own == argument))
        {
            let flag = argument.split('=').next().unwrap();
            let is_known = operator_api::RESERVED_SERVER_FLAGS.iter().any(|(reserved, _)| *reserved == flag);
            assert!(is_known, "{name}: {flag}");
        }
    }
}

/// Kubernetes replaces `$(NAME)` and `$$` in the arguments of containers.
#[test]
fn only_additional_flags_refer_to_environment_variables() {
    let args_of = |resources: &DesiredState, name: &str, containers: &str| {
        let container = &template(resources, name)["spec"][containers][0];
        serde_json::from_value::<Vec<String>>(container["args"].clone()).unwrap()
    };
    let mut object = fixture("claim");
    let spec = &mut object.spec;
    spec.model.name = Some("$(HOME)".to_owned());
    spec.model.source.pvc.as_mut().unwrap().path = Some("$(HOME)/a$$b.gguf".to_owned());
    spec.engine.plugin_config = BTreeMap::from([("CACHE_DIR".to_owned(), "$(HOME)".to_owned())]);
    spec.engine.extra_args = vec!["--cache-dir=$(HOME)".to_owned()];
    spec.observability.tracing = Some(Tracing { endpoint: "http://$(HOST):4317".to_owned() });
    spec.router.extra_args = vec!["--hang-timeout=$(TIMEOUT)".to_owned()];
    let resources = render(&object, &ObservedState::default());
    let server = args_of(&resources, "claim-server", "containers");
    let router = args_of(&resources, "claim-router", "containers");
    for flag in [
        "--model=/model/$$(HOME)/a$$$$b.gguf",
        "--model-name=$$(HOME)",
        "--plugin-config=CACHE_DIR=$$(HOME)",
        "--cache-dir=$(HOME)",
    ] {
        assert!(server.iter().any(|argument| argument == flag), "{flag}: {server:?}");
    }
    for flag in ["--otlp-endpoint=http://$$(HOST):4317", "--hang-timeout=$(TIMEOUT)"] {
        assert!(router.iter().any(|argument| argument == flag), "{flag}: {router:?}");
    }

    let mut object = fixture("small");
    object.spec.model.source.hf.as_mut().unwrap().files = vec!["$(HOME)*.gguf".to_owned()];
    let resources = render(&object, &ObservedState::default());
    let fetch = args_of(&resources, "small-server", "initContainers");
    for flag in ["--hf-file=$$(HOME)*.gguf", "--hf-revision=$(OVFLEET_HF_REVISION)"] {
        assert!(fetch.iter().any(|argument| argument == flag), "{flag}: {fetch:?}");
    }
    // The arguments of child processes are not expanded.
    let valid = valid(&object, &ObservedState::default());
    let fetch = flags::source(valid.files.fetched().unwrap(), Expansion::None);
    assert!(fetch.iter().any(|argument| argument == "--hf-file=$(HOME)*.gguf"), "{fetch:?}");
}

#[test]
fn rendering_is_deterministic() {
    for name in FIXTURES {
        let object = fixture(name);
        let [a, b] = [(); 2].map(|()| render(&object, &ObservedState::default()));
        assert_eq!(format!("{:?}", a.manifests), format!("{:?}", b.manifests), "{name}");
    }
}

#[test]
fn replicas_are_created_after_the_model_is_fetched() {
    let object = fixture("full");
    let resources = render(&object, &ObservedState::default());
    let is_server = |name: &str| name == "full-server";
    assert!(
        !resources
            .manifests
            .iter()
            .any(|manifest| manifest.kind == Kind::Deployment && is_server(&manifest.name))
    );
    let resources = render(&object, &after_fetch(&resources));
    assert!(
        resources
            .manifests
            .iter()
            .any(|manifest| manifest.kind == Kind::Deployment && is_server(&manifest.name))
    );
}

/// The objects of a kind after `resources` were applied.
fn live(resources: &DesiredState, kind: Kind) -> BTreeMap<(Kind, String), Arc<DynamicObject>> {
    let of_kind = resources.manifests.iter().filter(|manifest| manifest.kind == kind);
    let object = |manifest: &Manifest| Arc::new(serde_json::from_value(manifest.body.clone()).unwrap());
    of_kind.map(|manifest| ((kind, manifest.name.clone()), object(manifest))).collect()
}

#[test]
fn a_fetch_removes_former_sources_except_for_those_that_replicas_use() {
    let mut object = fixture("full");
    let cleanup_flags = |resources: &DesiredState| {
        let job = resources.manifests.iter().find(|manifest| manifest.kind == Kind::Job)?;
        let args = job.body["spec"]["template"]["spec"]["containers"][0]["args"].as_array().unwrap();
        let of_former =
            |arg: &&Value| arg.as_str().unwrap().starts_with("--keep=") || *arg == "--remove-previous";
        Some(args.iter().filter(of_former).map(|arg| arg.as_str().unwrap().to_owned()).collect::<Vec<_>>())
    };
    let first = render(&object, &ObservedState::default());
    assert_eq!(cleanup_flags(&first).unwrap(), ["--remove-previous"]);
    let served = render(&object, &after_fetch(&first));
    let key = source_of(deployment(&served, "full-server")).unwrap();

    // The source changes while a replica of a former source is still being deleted.
    object.spec.model.source.s3.as_mut().unwrap().key = "other/".to_owned();
    let replica = |source| PodState {
        component: "server".to_owned(),
        is_terminating: true,
        source,
        ..PodState::default()
    };
    let mut observed = ObservedState {
        owned: live(&served, Kind::Deployment),
        pods: vec![replica(ModelSourceKey::Shared("0123456789".to_owned()))],
        ..ObservedState::default()
    };
    observed.owned.extend(live(&served, Kind::Job));
    assert_eq!(
        cleanup_flags(&render(&object, &observed)),
        None,
        "the Job of the former source must be deleted first"
    );
    observed.owned.retain(|(kind, _), _| *kind != Kind::Job);
    let next = render(&object, &observed);
    let mut keep = vec!["--keep=0123456789".to_owned(), format!("--keep={key}")];
    keep.sort();
    assert_eq!(cleanup_flags(&next).unwrap(), [vec!["--remove-previous".to_owned()], keep].concat());

    // The arguments of an existing Job do not change when the replicas change.
    let pods = std::mem::replace(&mut observed.pods, vec![replica(ModelSourceKey::Unknown)]);
    observed.owned.extend(live(&next, Kind::Job));
    assert_eq!(cleanup_flags(&render(&object, &observed)), cleanup_flags(&next));
    observed.owned.retain(|(kind, _), _| *kind != Kind::Job);
    assert_eq!(
        cleanup_flags(&render(&object, &observed)).unwrap(),
        [""; 0],
        "the source of one replica is unknown"
    );
    observed.pods = pods;
    observed.pods[0].is_finished = true;
    assert_eq!(
        cleanup_flags(&render(&object, &observed)).unwrap(),
        ["--remove-previous".to_owned(), format!("--keep={key}")]
    );
}

/// The desired state of `full` with its first source, and with another source that is being fetched.
fn refetching(change: impl FnOnce(&mut LlmDeployment)) -> (DesiredState, DesiredState) {
    let mut object = fixture("full");
    object.spec.rollout.pause = false;
    let first = render(&object, &ObservedState::default());
    let served = render(&object, &after_fetch(&first));
    object.spec.model.source.s3.as_mut().unwrap().key = "other/".to_owned();
    change(&mut object);
    let observed = ObservedState { owned: live(&served, Kind::Deployment), ..ObservedState::default() };
    (served, render(&object, &observed))
}

#[test]
fn scaling_and_suspending_work_while_the_next_model_is_fetched() {
    for (change, replicas) in [
        ((|object| object.spec.replicas = 7) as fn(&mut LlmDeployment), 7),
        (|object| object.spec.suspend = true, 0),
    ] {
        let (served, next) = refetching(change);
        let (before, after) = (deployment(&served, "full-server"), deployment(&next, "full-server"));
        assert_eq!(after["spec"]["replicas"], replicas);
        assert_eq!(
            after["spec"]["template"], before["spec"]["template"],
            "replicas still serve the previous model"
        );
        let inputs = |deployment: &Value| deployment["metadata"]["annotations"]["ovfleet.dev/inputs"].clone();
        assert_eq!(
            inputs(after),
            inputs(before),
            "the digest of the settings that the live template was rendered from"
        );
    }
}

/// The annotation of a Deployment, a Job or a pod template that contains the source of the model.
fn source_of(object: &Value) -> Option<&str> {
    object["metadata"]["annotations"]["ovfleet.dev/source"].as_str()
}

/// Removes the annotations that contain the source of the model, as if an earlier release of the operator had created
/// the objects.
fn without_source(observed: &mut ObservedState) {
    for object in observed.owned.values_mut() {
        let object = Arc::make_mut(object);
        object.metadata.annotations.as_mut().unwrap().remove("ovfleet.dev/source");
        if let Some(annotations) = object.data.pointer_mut("/spec/template/metadata/annotations") {
            annotations.as_object_mut().unwrap().remove("ovfleet.dev/source");
        }
    }
}

#[test]
fn objects_of_a_former_release_get_the_source_without_restarts_and_fetches() {
    let object = fixture("full");
    let observed = after_fetch(&render(&object, &ObservedState::default()));
    let before = render(&object, &observed);
    let key = source_of(deployment(&before, "full-server")).unwrap();
    assert_eq!(source_of(template(&before, "full-server")), Some(key));
    let mut observed = ObservedState { owned: observed.owned, ..ObservedState::default() };
    observed.owned.extend(live(&before, Kind::Deployment));
    without_source(&mut observed);

    let after = render(&object, &observed);
    assert_eq!(source_of(deployment(&after, "full-server")), Some(key));
    let live_template = &observed.deployment("full-server").unwrap().data["spec"]["template"];
    assert_eq!(template(&after, "full-server"), live_template, "no replica restarts");
    let jobs: Vec<_> = after.manifests.iter().filter(|manifest| manifest.kind == Kind::Job).collect();
    assert_eq!(source_of(&jobs[0].body), Some(key));
    assert!(jobs.len() == 1 && observed.job(&jobs[0].name).is_some(), "nothing is fetched again");

    // If the template changes anyway, it gets the annotation with the source.
    let mut object = object;
    object.spec.engine.max_num_seqs = 7;
    assert_eq!(source_of(template(&render(&object, &observed), "full-server")), Some(key));
}

#[test]
fn another_image_does_not_repeat_a_complete_fetch() {
    let mut object = fixture("full");
    let first = render(&object, &ObservedState::default());
    let observed = after_fetch(&first);
    let job = |resources: &DesiredState| {
        let jobs: Vec<_> =
            resources.manifests.iter().filter(|manifest| manifest.kind == Kind::Job).cloned().collect();
        jobs
    };
    object.spec.engine.image = Some("example/server:2".to_owned());
    object.spec.placement.tolerations.clear();
    let resources = render(&object, &observed);
    assert_eq!(job(&resources).len(), 1);
    assert_eq!(job(&resources)[0].name, job(&first)[0].name);
    assert_eq!(
        job(&resources)[0].body["spec"]["template"],
        job(&first)[0].body["spec"]["template"],
        "the template of a Job is immutable"
    );
    // The image of an incomplete Job can be corrected.
    let next = render(&object, &ObservedState { has_service_monitors: true, ..ObservedState::default() });
    assert_ne!(job(&next)[0].name, job(&first)[0].name);
}

fn template<'a>(resources: &'a DesiredState, name: &str) -> &'a Value {
    &deployment(resources, name)["spec"]["template"]
}

#[test]
fn a_volume_of_one_node_places_the_fetch_and_the_replicas_together() {
    let mut object = fixture("full");
    object.spec.model.cache.as_mut().unwrap().access_mode = AccessMode::ReadWriteOnce;
    let first = render(&object, &ObservedState::default());
    let resources = render(&object, &after_fetch(&first));
    for manifest in resources.manifests.iter().chain(&first.manifests) {
        let is_concerned = manifest.kind == Kind::Job || manifest.name == "full-server";
        let Some(pod) = manifest.body.pointer("/spec/template/spec").filter(|_| is_concerned) else {
            continue;
        };
        let affinity = &pod["affinity"];
        assert!(affinity["nodeAffinity"].is_object(), "the affinity of the resource");
        let term = &affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0];
        assert_eq!(term["labelSelector"]["matchExpressions"][0]["values"], json!(["fetch", "server"]));
    }
}

#[test]
fn the_pod_template_adds_affinity_terms_and_changes_none() {
    const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";
    let terms = |object: &LlmDeployment| {
        let first = render(object, &ObservedState::default());
        let resources = render(object, &after_fetch(&first));
        let affinity = &template(&resources, "full-server")["spec"]["affinity"];
        affinity["podAffinity"][REQUIRED].as_array().unwrap().clone()
    };
    let mut object = fixture("full");
    object.spec.model.cache.as_mut().unwrap().access_mode = AccessMode::ReadWriteOnce;
    let mut expected = terms(&object);
    let added = json!({
        "topologyKey": expected[0]["topologyKey"],
        "labelSelector": {"matchLabels": {"app": "cache"}},
    });
    let spec = json!({"affinity": {"podAffinity": {REQUIRED: [added]}}});
    object.spec.pod_template = Some(PodTemplate { spec: Some(spec), ..PodTemplate::default() });
    expected.push(added);
    assert_eq!(terms(&object), expected);
}

#[test]
fn replicas_that_share_the_volume_of_one_node_can_be_evicted_together() {
    let budget = |access_mode: AccessMode, disruption: Disruption| {
        let mut object = fixture("full");
        object.spec.model.cache.as_mut().unwrap().access_mode = access_mode;
        object.spec.disruption = disruption;
        let resources = render(&object, &ObservedState::default());
        let is_budget = |manifest: &&Manifest| {
            manifest.kind == Kind::PodDisruptionBudget && manifest.name == "full-server"
        };
        let mut spec = resources.manifests.iter().find(is_budget).unwrap().body["spec"].clone();
        spec.as_object_mut()
            .unwrap()
            .retain(|field, _| ["minAvailable", "maxUnavailable"].contains(&field.as_str()));
        spec
    };
    let limited = Disruption { min_available: Some(IntOrString::Int(2)), max_unavailable: None };
    assert_eq!(budget(AccessMode::ReadWriteMany, Disruption::default()), json!({"maxUnavailable": 1}));
    assert_eq!(budget(AccessMode::ReadWriteOnce, Disruption::default()), json!({"maxUnavailable": "100%"}));
    assert_eq!(budget(AccessMode::ReadWriteOnce, limited), json!({"minAvailable": 2}));
}

/// The images are built for one architecture.
#[test]
fn pods_run_on_nodes_with_the_architecture_of_the_images() {
    for (chosen, architecture) in [(None, "amd64"), (Some("arm64"), "arm64")] {
        let mut object = fixture("full");
        let spec = &mut object.spec;
        if let Some(chosen) = chosen {
            for selector in [&mut spec.placement.node_selector, &mut spec.router.placement.node_selector] {
                selector.insert("kubernetes.io/arch".to_owned(), chosen.to_owned());
            }
        }
        let first = render(&object, &ObservedState::default());
        let resources = render(&object, &after_fetch(&first));
        let pods =
            resources.manifests.iter().filter_map(|manifest| manifest.body.pointer("/spec/template/spec"));
        let selectors: Vec<&Value> = pods.map(|pod| &pod["nodeSelector"]).collect();
        let count = |labels: Value| selectors.iter().filter(|selector| ***selector == labels).count();
        let replica = json!({"disk": "fast", "kubernetes.io/arch": architecture});
        let router = json!({"tier": "front", "kubernetes.io/arch": architecture});
        // The pod that fetches the model has the placement of the replicas.
        assert_eq!((count(replica), count(router)), (2, 1), "{selectors:?}");
    }
}

#[test]
fn only_the_metrics_are_reachable_from_everywhere() {
    let object = fixture("full");
    let first = render(&object, &ObservedState { has_service_monitors: true, ..ObservedState::default() });
    let resources = render(&object, &after_fetch(&first));
    let policy = resources
        .manifests
        .iter()
        .find(|manifest| manifest.kind == Kind::NetworkPolicy && manifest.name == "full-server")
        .unwrap();
    let ingress = policy.body["spec"]["ingress"].as_array().unwrap();
    let from_anywhere: Vec<&Value> = ingress.iter().filter(|rule| rule["from"].is_null()).collect();
    assert_eq!(from_anywhere, [&json!({"ports": [{"port": 8081, "protocol": "TCP"}]})]);
    let monitor = resources.manifests.iter().find(|manifest| manifest.kind == Kind::ServiceMonitor).unwrap();
    assert_eq!(monitor.body["spec"]["endpoints"][0]["port"], "admin");
    assert_eq!(monitor.body["metadata"]["labels"]["release"], "prometheus");
    for name in ["full-server", "full-router"] {
        let container = &template(&resources, name)["spec"]["containers"][0];
        for probe in ["startupProbe", "readinessProbe", "livenessProbe"] {
            assert_eq!(container[probe]["httpGet"]["port"], "admin", "{name} {probe}");
        }
    }
    let services = resources.manifests.iter().filter(|manifest| manifest.kind == Kind::Service);
    let with_metrics = services.filter(|manifest| {
        manifest.body["spec"]["ports"].as_array().unwrap().iter().any(|port| port["name"] == "admin")
    });
    assert_eq!(
        with_metrics.map(|manifest| manifest.name.as_str()).collect::<Vec<_>>(),
        ["full-replicas", "full-router"]
    );
}

#[test]
fn replicas_may_open_connections_to_fetch_images() {
    let egress = |media: MediaSources| {
        let mut object = fixture("image");
        object.spec.engine.media = media;
        let resources = render(&object, &ObservedState::default());
        let is_server =
            |manifest: &&Manifest| manifest.kind == Kind::NetworkPolicy && manifest.name == "image-server";
        resources.manifests.iter().find(is_server).unwrap().body["spec"]["egress"].clone()
    };
    assert_eq!(egress(MediaSources::default()), json!([]));
    let allowed_domains = vec!["images.example.com".to_owned()];
    assert_eq!(egress(MediaSources { allowed_domains, ..MediaSources::default() }), json!([{}]));
}

#[test]
fn the_platform_can_assign_the_user() {
    for (pod_user, expected) in [(PodUser::Fixed, json!(65532)), (PodUser::Platform, Value::Null)] {
        let object = fixture("small");
        let mut defaults = Defaults::with_images("s", "r");
        defaults.pod_user = pod_user;
        let valid = validate(&object, &ObservedState::default(), &defaults).unwrap();
        let resources = desired(&valid, &ObservedState::default(), UpgradePermission::Granted);
        for name in ["small-server", "small-router"] {
            let context = &template(&resources, name)["spec"]["securityContext"];
            assert_eq!(context["runAsUser"], expected);
            assert_eq!(context["fsGroup"].is_null(), expected.is_null() || name == "small-router");
            assert_eq!(context["runAsNonRoot"], true);
        }
    }
}

#[test]
fn the_time_to_start_follows_the_memory_limit_and_fits_into_the_fields_of_kubernetes() {
    let times = |memory: &str| {
        let mut object = fixture("small");
        object.spec.resources.limits =
            Some(BTreeMap::from([("memory".to_owned(), Quantity(memory.to_owned()))]));
        let resources = render(&object, &ObservedState::default());
        let server = &deployment(&resources, "small-server")["spec"];
        let probe = &server["template"]["spec"]["containers"][0]["startupProbe"];
        (probe["failureThreshold"].as_i64().unwrap(), server["progressDeadlineSeconds"].as_i64().unwrap())
    };
    assert_eq!(times("5G").0, 120 + 100);
    assert_eq!(times("+5000000k"), times("5G"));
    let (threshold, deadline) = times("1E");
    assert_eq!(threshold, 7 * 24 * 3600);
    assert!(i32::try_from(deadline).is_ok(), "{deadline}");
}

#[test]
fn pods_restart_only_if_their_settings_change() {
    let object = fixture("small");
    let hash = |change: fn(&mut LlmDeployment)| {
        let mut object = object.clone();
        change(&mut object);
        let resources = render(&object, &ObservedState::default());
        let of = |name| digest(&deployment(&resources, name)["spec"]["template"]);
        (of("small-server"), of("small-router"))
    };
    let same = hash(|_| {});
    for change in [
        (|object| object.spec.replicas = 5) as fn(&mut LlmDeployment),
        |object| object.spec.router.replicas = 3,
        |object| object.spec.router.queue.requests = 7,
        |object| object.spec.router.policy = operator_api::Policy::RoundRobin,
        |object| object.spec.rollout.min_ready_seconds = 7,
        |object| object.spec.router.service.port = 81,
        |object| object.metadata.generation = Some(99),
        |object| object.metadata.labels = Some(BTreeMap::from([("a".to_owned(), "b".to_owned())])),
    ] {
        assert_eq!(hash(change), same);
    }
    let (server, router) = hash(|object| object.spec.engine.max_num_seqs = 1);
    assert_eq!((server == same.0, router == same.1), (false, true));
    let (server, router) = hash(|object| object.spec.observability.access_log = true);
    assert_eq!((server == same.0, router == same.1), (true, false));
}

/// Checks the rules of the restricted Pod Security Standard.
#[test]
fn every_pod_meets_the_restricted_standard() {
    for name in FIXTURES {
        let object = fixture(name);
        let first = render(&object, &ObservedState::default());
        let resources = render(&object, &after_fetch(&first));
        let pods =
            resources.manifests.iter().filter_map(|manifest| manifest.body.pointer("/spec/template/spec"));
        for pod in pods {
            let context = &pod["securityContext"];
            assert_eq!(context["runAsNonRoot"], true);
            assert_eq!(context["seccompProfile"]["type"], "RuntimeDefault");
            assert_ne!(context["runAsUser"], 0);
            for field in ["hostNetwork", "hostPID", "hostIPC"] {
                assert!(pod[field].is_null(), "{name}: {field}");
            }
            let containers =
                ["containers", "initContainers"].into_iter().filter_map(|list| pod[list].as_array());
            for container in containers.flatten() {
                let context = &container["securityContext"];
                assert_eq!(context["allowPrivilegeEscalation"], false);
                assert_eq!(context["capabilities"], json!({"drop": ["ALL"]}));
                assert_eq!(context["readOnlyRootFilesystem"], true);
                assert!(container["ports"].as_array().unwrap().iter().all(|port| port["hostPort"].is_null()));
            }
            let allowed = ["configMap", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "secret"];
            for volume in pod["volumes"].as_array().unwrap() {
                let kind = volume.as_object().unwrap().keys().find(|key| *key != "name").unwrap();
                assert!(allowed.contains(&kind.as_str()), "{name}: {kind}");
            }
        }
    }
}

#[test]
fn only_routers_have_an_account_token_and_secrets_are_mounted_only_where_they_are_needed() {
    let object = fixture("full");
    let first = render(&object, &ObservedState::default());
    let resources = render(&object, &after_fetch(&first));
    let mut secrets = BTreeMap::new();
    for manifest in &resources.manifests {
        let Some(pod) = manifest.body.pointer("/spec/template/spec") else { continue };
        assert_eq!(pod["automountServiceAccountToken"], manifest.name == "full-router", "{}", manifest.name);
        let volumes = pod["volumes"].as_array().unwrap().iter();
        let mounted: Vec<&str> =
            volumes.filter_map(|volume| volume["secret"]["secretName"].as_str()).collect();
        secrets.insert(manifest.name.split("-fetch").next().unwrap().to_owned(), mounted);
    }
    assert_eq!(
        secrets,
        BTreeMap::from([
            ("full".to_owned(), vec!["s3-keys"]),
            ("full-router".to_owned(), vec!["fleet-token", "keys"]),
            ("full-server".to_owned(), vec!["fleet-token"]),
        ])
    );
    let roles = resources.manifests.iter().filter(|manifest| manifest.kind == Kind::Role);
    let rules: Vec<&Value> = roles.map(|manifest| &manifest.body["rules"]).collect();
    let slices = json!([{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}]);
    assert_eq!(rules, [&slices]);
}

#[test]
fn invalid_resources_are_rejected_with_the_field() {
    let refusal = |change: fn(&mut LlmDeployment)| {
        let mut object = fixture("small");
        change(&mut object);
        let defaults = Defaults::with_images("", "");
        let invalid = validate(&object, &ObservedState::default(), &defaults).unwrap_err();
        (invalid.reason(), invalid.to_string())
    };
    let (reason, message) =
        refusal(|object| object.spec.drain.timeout = operator_api::Period("soon".to_owned()));
    assert_eq!(reason, "InvalidField");
    assert!(message.starts_with("drain.timeout: \"soon\" is not a duration"), "{message}");
    let (_, message) =
        refusal(|object| object.spec.drain.timeout = operator_api::Period("9999999h".to_owned()));
    assert!(message.contains("longer than a year"), "{message}");
    let (reason, _) = refusal(|object| object.spec.model.source.hf = None);
    assert_eq!(reason, "InvalidSource");
    let (_, message) = refusal(|object| object.spec.engine.kv_cache.size = Some(Quantity("100m".to_owned())));
    assert_eq!(message, "engine.kvCache.size: \"100m\" is not a positive number of bytes, such as 8Gi");
    let (_, message) = refusal(|object| object.spec.rollout.min_ready_seconds = 600);
    assert!(message.contains("rollout.minReadySeconds"), "{message}");
    let (_, message) = refusal(|object| {
        object.spec.engine.media.allowed_domains = vec!["all".to_owned()];
        object.spec.engine.media.allowed_networks = vec!["10.0.0.1/8".to_owned()];
    });
    assert_eq!(
        message,
        "engine.media.allowedNetworks: \"10.0.0.1/8\" has bits set after its prefix of 8 bits: use 10.0.0.0/8"
    );
}

/// Checks the sizes in `fixtures/sizes.yaml`.
#[test]
fn sizes_are_whole_numbers_of_bytes_of_at_least_one() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/sizes.yaml");
    let sizes: Value = serde_yaml::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let bytes_of = |size: &str| {
        let mut object = fixture("small");
        object.spec.engine.kv_cache.size = Some(Quantity(size.to_owned()));
        let valid = validate(&object, &ObservedState::default(), &Defaults::with_images("", ""));
        valid.map(|valid| valid.server.engine.kv_cache_size).map_err(|error| error.to_string())
    };
    for (size, bytes) in sizes["valid"].as_object().unwrap() {
        assert_eq!(bytes_of(size), Ok(bytes.as_u64()), "{size}");
    }
    for size in sizes["invalid"].as_array().unwrap() {
        let size = size.as_str().unwrap();
        let error = bytes_of(size).unwrap_err();
        assert!(error.starts_with(&format!("engine.kvCache.size: {size:?} is not a ")), "{error}");
    }
}

#[test]
fn sources_of_images_that_the_server_refuses_are_rejected() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/media-sources.yaml");
    let examples: Value = serde_yaml::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let error_of = |field: &str, entry: &str| {
        let mut object = fixture("small");
        let media = &mut object.spec.engine.media;
        match field {
            "allowedDomains" => media.allowed_domains = vec![entry.to_owned()],
            "allowedNetworks" => media.allowed_networks = vec![entry.to_owned()],
            other => panic!("unknown field {other}"),
        }
        let defaults = Defaults::with_images("", "");
        validate(&object, &ObservedState::default(), &defaults).err().map(|error| error.to_string())
    };
    for (field, examples) in examples.as_object().unwrap() {
        let entries =
            |list: &str| examples[list].as_array().unwrap().iter().map(|entry| entry.as_str().unwrap());
        for entry in entries("valid") {
            assert_eq!(error_of(field, entry), None, "{field}: {entry}");
        }
        for entry in entries("invalid") {
            let error = error_of(field, entry).unwrap_or_default();
            assert!(error.starts_with(&format!("engine.media.{field}: {entry:?} ")), "{entry}: {error}");
        }
    }
}
