//! Tests of the states of pods.

use serde_json::{Value, json};

use super::*;

fn state(status: &Value) -> PodState {
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "status": status});
    pod_state(&serde_json::from_value(pod).unwrap())
}

fn container(name: &str, state: &Value, last: &Value) -> Value {
    json!({
        "name": name, "image": "image", "imageID": "", "ready": false, "restartCount": 1,
        "state": state, "lastState": last,
    })
}

/// The state of a pod with an init container called `fetch` that has the status `fetch` and a port called `port`.
fn fetch_state(port: &str, fetch: &Value) -> PodState {
    let ports = json!([{"name": port, "containerPort": 8080}]);
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"},
        "spec": {"containers": [], "initContainers": [{"name": "fetch", "ports": ports}]},
        "status": {"initContainerStatuses": [fetch]},
    });
    pod_state(&serde_json::from_value(pod).unwrap())
}

#[test]
fn an_image_that_cannot_be_pulled_has_the_same_message_for_both_reasons() {
    let waiting = |reason: &str, message: &str| {
        let waiting = json!({"waiting": {"reason": reason, "message": message}});
        state(&json!({"containerStatuses": [container("server", &waiting, &json!({}))]}))
    };
    let first = waiting("ErrImagePull", "rpc error: not found");
    assert_eq!(first, waiting("ImagePullBackOff", "Back-off pulling image"));
    assert_eq!(
        first.problem.unwrap().message,
        "the image image of the container \"server\" cannot be pulled"
    );
}

#[test]
fn the_message_about_an_image_names_the_pull_secrets() {
    let waiting = json!({"waiting": {"reason": "ErrImagePull", "message": "401 Unauthorized"}});
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"},
        "spec": {"containers": [], "imagePullSecrets": [{"name": "registry"}]},
        "status": {"containerStatuses": [container("server", &waiting, &json!({}))]},
    });
    let problem = pod_state(&serde_json::from_value(pod).unwrap()).problem.unwrap();
    assert!(problem.message.contains("with the Secret \"registry\", which must exist"), "{problem:?}");
}

#[test]
fn the_image_of_a_volume_is_distinguished_from_the_image_of_the_container() {
    let waiting = |image: &str| {
        let message = format!("Back-off pulling image \"{image}\": ErrImagePull: failed to pull");
        let waiting = json!({"waiting": {"reason": "ImagePullBackOff", "message": message}});
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"},
            "spec": {"containers": [], "volumes": [{"name": "model", "image": {"reference": "models/m:1"}}]},
            "status": {"containerStatuses": [container("server", &waiting, &json!({}))]},
        });
        pod_state(&serde_json::from_value(pod).unwrap()).problem.unwrap().message
    };
    assert_eq!(waiting("models/m:1"), "the image models/m:1 of the volume \"model\" cannot be pulled");
    assert_eq!(waiting("image"), "the image image of the container \"server\" cannot be pulled");
}

#[test]
fn a_crashing_container_has_the_same_message_while_it_runs_and_while_it_waits() {
    let ended = json!({"terminated": {"exitCode": 1, "message": "x\nerror: no model\n"}});
    let at = |present: &Value, last: &Value| {
        state(&json!({"containerStatuses": [container("server", present, last)]})).problem
    };
    let running = at(&json!({"running": {}}), &ended);
    assert_eq!(running, at(&json!({"waiting": {"reason": "CrashLoopBackOff"}}), &ended));
    assert_eq!(running, at(&ended, &json!({})));
    assert_eq!(running.unwrap().message, "server: no model (exit code 1)");
}

#[test]
fn the_report_of_a_fetch_is_the_termination_message() {
    let message = json!({"reason": "DigestMismatch", "message": "another file", "bytes": 7}).to_string();
    let ended = json!({"terminated": {"exitCode": 11, "message": message}});
    let waiting = json!({"waiting": {"reason": "CrashLoopBackOff"}});
    let pod = fetch_state("progress", &container("fetch", &waiting, &ended));
    let report = pod.fetched.unwrap();
    assert_eq!((report.reason.as_str(), report.bytes, report.is_complete()), ("DigestMismatch", 7, false));
    let killed = json!({"terminated": {"exitCode": 137, "message": "gone"}});
    let pod = fetch_state("progress", &container("fetch", &killed, &json!({})));
    assert_eq!(pod.fetched.unwrap().message, "gone (exit code 137)");
}

#[test]
fn a_container_of_the_user_called_fetch_does_not_fetch_the_model() {
    let running = container("fetch", &json!({"running": {}}), &json!({}));
    let is_fetching = ["progress", "http"].map(|port| fetch_state(port, &running).is_fetching);
    assert_eq!(is_fetching, [true, false]);
    let ended = container("fetch", &json!({"terminated": {"exitCode": 3}}), &json!({}));
    let pod = fetch_state("http", &ended);
    assert_eq!(pod.fetched, None);
    assert_eq!(pod.problem.unwrap().reason, "Crashing");
}

#[test]
fn a_claim_that_is_not_bound_is_named() {
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"},
        "spec": {"containers": [], "volumes": [
            {"name": "model", "persistentVolumeClaim": {"claimName": "models"}},
            {"name": "keys", "secret": {"secretName": "keys"}},
        ]},
        "status": {"conditions": [{
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            "message": "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found",
        }]},
    });
    let problem = |pod: &Value| pod_state(&serde_json::from_value(pod.clone()).unwrap()).problem.unwrap();
    let message = problem(&pod).message;
    assert!(message.starts_with("the PersistentVolumeClaim \"models\" must exist"), "{message}");
    pod["spec"]["volumes"][1] = json!({"name": "data", "persistentVolumeClaim": {"claimName": "data"}});
    let message = problem(&pod).message;
    assert!(message.starts_with("the PersistentVolumeClaims \"models\", \"data\" must exist"), "{message}");
}

#[test]
fn the_volumes_that_containers_wait_for_are_named() {
    let waiting = json!({"waiting": {"reason": "ContainerCreating"}});
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"},
        "spec": {"containers": [], "volumes": [{"name": "keys", "secret": {"secretName": "my-keys"}}]},
        "status": {"containerStatuses": [container("router", &waiting, &json!({}))]},
    });
    let awaits = |pod: &Value| pod_state(&serde_json::from_value(pod.clone()).unwrap()).awaits;
    assert!(awaits(&pod).unwrap().contains("the Secret \"my-keys\""));
    pod["status"]["containerStatuses"][0]["state"] = json!({"running": {}});
    assert_eq!(awaits(&pod), None);
}

#[test]
fn a_server_starts_until_its_startup_probe_has_succeeded() {
    let mut server = container("server", &json!({"running": {}}), &json!({}));
    let is_starting = |server: &Value| state(&json!({"containerStatuses": [server]})).is_starting;
    assert!(is_starting(&server));
    server["started"] = json!(true);
    assert!(!is_starting(&server));
}
