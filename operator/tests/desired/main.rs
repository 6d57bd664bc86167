//! Resources to objects, through the real `validate` and `desired`: `UPDATE_EXPECT=1 cargo test -p operator --test
//! desired` writes what has changed into `snapshots/`, where it is read before it is believed.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::sync::Arc;

use expect_test::expect_file;
use kube::api::DynamicObject;
use operator::desired::{Resources, desired};
use operator::manifest::{Kind, Manifest, digest};
use operator::observe::Observed;
use operator::pod::PodState;
use operator::validate::{Defaults, PodUser, ValidDeployment, validate};
use operator_api::LlmDeployment;
use serde_json::{Value, json};

mod release;

const FIXTURES: [&str; 5] = ["small", "full", "claim", "image", "per-pod"];

fn fixture(name: &str) -> LlmDeployment {
    let path = format!("{}/tests/fixtures/{name}.yaml", env!("CARGO_MANIFEST_DIR"));
    serde_yaml::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn valid(object: &LlmDeployment, observed: &Observed) -> ValidDeployment {
    let mut defaults = Defaults::with_images("ovfleet/server:1", "ovfleet/router:1");
    defaults.image_pull_policy = Some("IfNotPresent".to_owned());
    validate(object, observed, &defaults).unwrap()
}

fn made(object: &LlmDeployment, observed: &Observed) -> Resources {
    desired(&valid(object, observed), observed)
}

/// What is seen once the fetch Job of `resources`, if it has one, has done its work.
fn fetched(resources: &Resources) -> Observed {
    let mut observed = Observed { monitors: true, ..Observed::default() };
    for manifest in resources.manifests.iter().filter(|manifest| manifest.kind == Kind::Job) {
        let mut job: DynamicObject = serde_json::from_value(manifest.body.clone()).unwrap();
        job.data["status"] = json!({"conditions": [{"type": "Complete", "status": "True"}]});
        observed.owned = BTreeMap::from([((Kind::Job, manifest.name.clone()), Arc::new(job))]);
    }
    observed
}

fn deployment<'a>(resources: &'a Resources, name: &str) -> &'a Value {
    let found = resources
        .manifests
        .iter()
        .find(|manifest| manifest.kind == Kind::Deployment && manifest.name == name);
    &found.unwrap().body
}

#[test]
fn objects_are_as_in_the_snapshots() {
    for name in FIXTURES {
        let object = fixture(name);
        let first = made(&object, &Observed { monitors: true, ..Observed::default() });
        let resources = made(&object, &fetched(&first));
        let mut text = String::new();
        for manifest in resources.replica_token.iter().chain(&resources.manifests) {
            text += "---\n";
            text += &serde_yaml::to_string(&manifest.body).unwrap();
        }
        expect_file![format!("{}/tests/snapshots/{name}.yaml", env!("CARGO_MANIFEST_DIR"))].assert_eq(&text);
    }
}

/// A flag given twice is one that the server refuses.
#[test]
fn what_the_operator_sets_may_not_be_among_the_further_flags() {
    for name in FIXTURES {
        let object = fixture(name);
        let first = made(&object, &Observed::default());
        let resources = made(&object, &fetched(&first));
        let server = deployment(&resources, &format!("{name}-server"));
        let args = server["spec"]["template"]["spec"]["containers"][0]["args"].as_array().unwrap();
        let args = args.iter().map(|argument| argument.as_str().unwrap());
        for argument in
            args.filter(|argument| !object.spec.engine.extra_args.iter().any(|own| own == argument))
        {
            let flag = argument.split('=').next().unwrap();
            let is_known = operator_api::TAKEN_FLAGS.iter().any(|(taken, _)| *taken == flag);
            assert!(is_known, "{name}: {flag}");
        }
    }
}

#[test]
fn the_same_leads_to_the_same_to_the_byte() {
    for name in FIXTURES {
        let object = fixture(name);
        let [a, b] = [(); 2].map(|()| made(&object, &Observed::default()));
        assert_eq!(format!("{:?}", a.manifests), format!("{:?}", b.manifests), "{name}");
    }
}

#[test]
fn replicas_of_the_former_model_stay_until_the_next_one_is_fetched() {
    let object = fixture("full");
    let resources = made(&object, &Observed::default());
    let is_server = |name: &str| name == "full-server";
    assert!(!resources.manifests.iter().any(|made| made.kind == Kind::Deployment && is_server(&made.name)));
    let resources = made(&object, &fetched(&resources));
    assert!(resources.manifests.iter().any(|made| made.kind == Kind::Deployment && is_server(&made.name)));
}

/// The objects of `resources` of a kind, as they are once they were applied.
fn live(resources: &Resources, kind: Kind) -> BTreeMap<(Kind, String), Arc<DynamicObject>> {
    let of_kind = resources.manifests.iter().filter(|manifest| manifest.kind == kind);
    let object = |manifest: &Manifest| Arc::new(serde_json::from_value(manifest.body.clone()).unwrap());
    of_kind.map(|manifest| ((kind, manifest.name.clone()), object(manifest))).collect()
}

#[test]
fn a_fetch_removes_former_sources_but_for_those_that_replicas_use() {
    let mut object = fixture("full");
    let told = |resources: &Resources| {
        let job = resources.manifests.iter().find(|manifest| manifest.kind == Kind::Job)?;
        let args = job.body["spec"]["template"]["spec"]["containers"][0]["args"].as_array().unwrap();
        let of_former =
            |arg: &&Value| arg.as_str().unwrap().starts_with("--keep=") || *arg == "--remove-former";
        Some(args.iter().filter(of_former).map(|arg| arg.as_str().unwrap().to_owned()).collect::<Vec<_>>())
    };
    let first = made(&object, &Observed::default());
    assert_eq!(told(&first).unwrap(), ["--remove-former"]);
    let served = made(&object, &fetched(&first));
    let template = &deployment(&served, "full-server")["spec"]["template"]["spec"]["containers"][0]["args"];
    let path =
        template.as_array().unwrap().iter().find_map(|arg| arg.as_str()?.strip_prefix("--model=/model/"));
    let key = path.unwrap().strip_suffix("/current").unwrap();

    // Another source, while a replica of one before still ends.
    object.spec.model.source.s3.as_mut().unwrap().key = "other/".to_owned();
    let replica = |model: Option<&str>| PodState {
        component: "server".to_owned(),
        is_terminating: true,
        model: model.map(str::to_owned),
        ..PodState::default()
    };
    let mut observed = Observed {
        owned: live(&served, Kind::Deployment),
        pods: vec![replica(Some("/model/0123456789/current"))],
        ..Observed::default()
    };
    observed.owned.extend(live(&served, Kind::Job));
    assert_eq!(told(&made(&object, &observed)), None, "the Job of the former source has to go first");
    observed.owned.retain(|(kind, _), _| *kind != Kind::Job);
    let next = made(&object, &observed);
    let mut keep = vec!["--keep=0123456789".to_owned(), format!("--keep={key}")];
    keep.sort();
    assert_eq!(told(&next).unwrap(), [vec!["--remove-former".to_owned()], keep].concat());

    // The Job is what it was made as, whatever replicas do meanwhile.
    let pods = std::mem::replace(&mut observed.pods, vec![replica(None)]);
    observed.owned.extend(live(&next, Kind::Job));
    assert_eq!(told(&made(&object, &observed)), told(&next));
    observed.owned.retain(|(kind, _), _| *kind != Kind::Job);
    assert_eq!(
        told(&made(&object, &observed)).unwrap(),
        [""; 0],
        "of one replica it is not known what it serves"
    );
    observed.pods = pods;
    observed.pods[0].is_finished = true;
    assert_eq!(
        told(&made(&object, &observed)).unwrap(),
        ["--remove-former".to_owned(), format!("--keep={key}")]
    );
}

/// What `full` leads to while the replicas of its former source still run.
fn refetching(change: impl FnOnce(&mut LlmDeployment)) -> (Resources, Resources) {
    let mut object = fixture("full");
    object.spec.rollout.pause = false;
    let first = made(&object, &Observed::default());
    let served = made(&object, &fetched(&first));
    object.spec.model.source.s3.as_mut().unwrap().key = "other/".to_owned();
    change(&mut object);
    let observed = Observed { owned: live(&served, Kind::Deployment), ..Observed::default() };
    (served, made(&object, &observed))
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
        assert_eq!(after["spec"]["template"], before["spec"]["template"], "the former model is served on");
        let inputs = |deployment: &Value| deployment["metadata"]["annotations"]["ovfleet.dev/inputs"].clone();
        assert_eq!(inputs(after), inputs(before), "what the template was made from, not what is to come");
    }
}

#[test]
fn another_image_does_not_fetch_again_what_was_fetched() {
    let mut object = fixture("full");
    let first = made(&object, &Observed::default());
    let observed = fetched(&first);
    let job = |resources: &Resources| {
        let jobs: Vec<_> =
            resources.manifests.iter().filter(|made| made.kind == Kind::Job).cloned().collect();
        jobs
    };
    object.spec.engine.image = Some("example/server:2".to_owned());
    object.spec.placement.tolerations.clear();
    let resources = made(&object, &observed);
    assert_eq!(job(&resources).len(), 1);
    assert_eq!(job(&resources)[0].name, job(&first)[0].name);
    assert_eq!(
        job(&resources)[0].body["spec"]["template"],
        job(&first)[0].body["spec"]["template"],
        "a Job's template cannot be changed"
    );
    // While it is not complete, a wrong image can be corrected.
    let next = made(&object, &Observed { monitors: true, ..Observed::default() });
    assert_ne!(job(&next)[0].name, job(&first)[0].name);
}

fn template<'a>(resources: &'a Resources, name: &str) -> &'a Value {
    &deployment(resources, name)["spec"]["template"]
}

#[test]
fn a_volume_of_one_node_brings_the_fetch_and_the_replicas_together() {
    let mut object = fixture("full");
    object.spec.model.cache.as_mut().unwrap().access_mode = operator_api::AccessMode::ReadWriteOnce;
    let first = made(&object, &Observed::default());
    let resources = made(&object, &fetched(&first));
    for manifest in resources.manifests.iter().chain(&first.manifests) {
        let is_concerned = manifest.kind == Kind::Job || manifest.name == "full-server";
        let Some(pod) = manifest.body.pointer("/spec/template/spec").filter(|_| is_concerned) else {
            continue;
        };
        let affinity = &pod["affinity"];
        assert!(affinity["nodeAffinity"].is_object(), "the resource's own");
        let term = &affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0];
        assert_eq!(term["labelSelector"]["matchExpressions"][0]["values"], json!(["fetch", "server"]));
    }
}

#[test]
fn whoever_scrapes_reaches_the_metrics_and_not_the_api() {
    let object = fixture("full");
    let first = made(&object, &Observed { monitors: true, ..Observed::default() });
    let resources = made(&object, &fetched(&first));
    let policy = resources
        .manifests
        .iter()
        .find(|made| made.kind == Kind::NetworkPolicy && made.name == "full-server")
        .unwrap();
    let ingress = policy.body["spec"]["ingress"].as_array().unwrap();
    let from_anywhere: Vec<&Value> = ingress.iter().filter(|rule| rule["from"].is_null()).collect();
    assert_eq!(from_anywhere, [&json!({"ports": [{"port": 8081, "protocol": "TCP"}]})]);
    let monitor = resources.manifests.iter().find(|made| made.kind == Kind::ServiceMonitor).unwrap();
    assert_eq!(monitor.body["spec"]["endpoints"][0]["port"], "admin");
    assert_eq!(monitor.body["metadata"]["labels"]["release"], "prometheus");
    for name in ["full-server", "full-router"] {
        let container = &template(&resources, name)["spec"]["containers"][0];
        for probe in ["startupProbe", "readinessProbe", "livenessProbe"] {
            assert_eq!(container[probe]["httpGet"]["port"], "admin", "{name} {probe}");
        }
    }
    let services = resources.manifests.iter().filter(|made| made.kind == Kind::Service);
    let with_metrics = services.filter(|made| {
        made.body["spec"]["ports"].as_array().unwrap().iter().any(|port| port["name"] == "admin")
    });
    assert_eq!(
        with_metrics.map(|made| made.name.as_str()).collect::<Vec<_>>(),
        ["full-replicas", "full-router"]
    );
}

#[test]
fn the_platform_may_choose_the_user() {
    for (pod_user, wanted) in [(PodUser::Fixed, json!(65532)), (PodUser::Platform, Value::Null)] {
        let object = fixture("small");
        let mut defaults = Defaults::with_images("s", "r");
        defaults.pod_user = pod_user;
        let valid = validate(&object, &Observed::default(), &defaults).unwrap();
        let resources = desired(&valid, &Observed::default());
        for name in ["small-server", "small-router"] {
            let context = &template(&resources, name)["spec"]["securityContext"];
            assert_eq!(context["runAsUser"], wanted);
            assert_eq!(context["fsGroup"].is_null(), wanted.is_null() || name == "small-router");
            assert_eq!(context["runAsNonRoot"], true);
        }
    }
}

#[test]
fn nothing_restarts_without_a_cause_in_what_it_runs() {
    let object = fixture("small");
    let hash = |change: fn(&mut LlmDeployment)| {
        let mut object = object.clone();
        change(&mut object);
        let resources = made(&object, &Observed::default());
        let of = |name| digest(&deployment(&resources, name)["spec"]["template"]);
        (of("small-server"), of("small-router"))
    };
    let same = hash(|_| {});
    for change in [
        (|object| object.spec.replicas = 5) as fn(&mut LlmDeployment),
        |object| object.spec.router.replicas = 3,
        |object| object.spec.router.queue.max_requests = 7,
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

/// The restricted Pod Security Standard, as its documentation lists it.
#[test]
fn every_pod_meets_the_restricted_standard() {
    for name in FIXTURES {
        let object = fixture(name);
        let first = made(&object, &Observed::default());
        let resources = made(&object, &fetched(&first));
        let pods = resources.manifests.iter().filter_map(|made| made.body.pointer("/spec/template/spec"));
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
fn only_the_router_has_an_account_token_and_secrets_are_mounted_where_they_are_needed_only() {
    let object = fixture("full");
    let first = made(&object, &Observed::default());
    let resources = made(&object, &fetched(&first));
    let mut secrets = BTreeMap::new();
    for made in &resources.manifests {
        let Some(pod) = made.body.pointer("/spec/template/spec") else { continue };
        assert_eq!(pod["automountServiceAccountToken"], made.name == "full-router", "{}", made.name);
        let volumes = pod["volumes"].as_array().unwrap().iter();
        let mounted: Vec<&str> =
            volumes.filter_map(|volume| volume["secret"]["secretName"].as_str()).collect();
        secrets.insert(made.name.split("-fetch").next().unwrap().to_owned(), mounted);
    }
    assert_eq!(
        secrets,
        BTreeMap::from([
            ("full".to_owned(), vec!["s3-keys"]),
            ("full-router".to_owned(), vec!["fleet-token", "keys"]),
            ("full-server".to_owned(), vec!["fleet-token"]),
        ])
    );
    let roles = resources.manifests.iter().filter(|made| made.kind == Kind::Role);
    let rules: Vec<&Value> = roles.map(|made| &made.body["rules"]).collect();
    let slices = json!([{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}]);
    assert_eq!(rules, [&slices]);
}

#[test]
fn what_cannot_be_carried_out_is_refused_with_the_field() {
    let refusal = |change: fn(&mut LlmDeployment)| {
        let mut object = fixture("small");
        change(&mut object);
        let defaults = Defaults::with_images("", "");
        let invalid = validate(&object, &Observed::default(), &defaults).unwrap_err();
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
    let (_, message) = refusal(|object| object.spec.rollout.min_ready_seconds = 600);
    assert!(message.contains("rollout.minReadySeconds"), "{message}");
}
