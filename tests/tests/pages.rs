//! Runs the code blocks that the pages mark as tested, as a reader would run them.

use tests::cluster::ControlPlane;
use tests::pages::{Example, api_command, directory, examples};
use tests::process::{ExitReport, Process};
use tests::server::{START_LIMIT, Server};
use tests::tidy::Scene;

/// Installs the chart and creates an LLMDeployment, for pages that assume an existing installation.
const INSTALL: &str = "set -e
helm4 install ovfleet charts/ovfleet --namespace ovfleet --create-namespace
kubectl apply --filename assistant.yaml
kubectl create secret generic assistant-replica-token --from-literal=token=0123456789abcdef0123456789abcdef
kubectl label secret assistant-replica-token \
  app.kubernetes.io/managed-by=ovfleet-operator app.kubernetes.io/instance=assistant";
/// Creates the namespaces to which the page about the installation refers.
const NAMESPACES: &str = "set -e; kubectl create namespace team-a; kubectl create namespace team-b";
/// Reports every LLMDeployment as ready, in place of the operator.
const REPORT_READY: &str = "
kubectl wait --for=create crd/llmdeployments.ovfleet.dev --timeout=5m
kubectl wait --for=condition=Established crd/llmdeployments.ovfleet.dev --timeout=5m
kubectl get llmd --watch --output name | while read -r name; do
  kubectl patch \"$name\" --subresource=status --type=merge --patch \"$STATUS\"
done";
/// The reported status. `kubectl wait` ignores a status whose observed generation is less than the generation of the
/// resource, which every change of the spec increments.
const STATUS: &str = r#"{"status": {"phase": "Ready", "observedGeneration": 1000, "release": {"state": "Waiting", "available": "sha256-1"},
  "conditions": [{"type": "Ready", "status": "True", "reason": "Ready", "message": "",
    "lastTransitionTime": "2026-01-01T00:00:00Z"}]}}"#;

fn examples_with(scene: Scene) -> Vec<Example> {
    let examples: Vec<Example> = examples().into_iter().filter(|example| example.scene == scene).collect();
    assert!(!examples.is_empty(), "no block is tested with {scene:?}");
    examples
}

#[test]
fn blocks_work_with_a_server_of_the_sample_model() {
    // The server has the model name that `make run` uses, because the blocks contain that name.
    let server = Server::named().unwrap();
    examples_with(Scene::Server).iter().for_each(|example| example.run_with_server(server.address()));
}

#[test]
fn blocks_work_with_the_server_that_their_page_starts() {
    let starts = examples_with(Scene::Programs);
    for example in examples_with(Scene::ServerOfPage) {
        let start = starts.iter().find(|start| start.page == example.page);
        let mut command = start.expect("an earlier block starts the server").server().unwrap();
        let server = Server::from_command(&mut command).unwrap();
        example.run_with_server(server.address());
    }
}

#[test]
fn blocks_that_start_programs_work() {
    let directory = directory().unwrap();
    examples_with(Scene::Programs).iter().for_each(|example| example.run_programs(directory.path()));
}

/// Every page has its own API server, because pages install the same charts.
#[tokio::test]
async fn blocks_work_with_an_api_server() {
    let examples = examples_with(Scene::ApiServer);
    for page in examples.chunk_by(|a, b| a.page == b.page) {
        let plane = ControlPlane::start().await.unwrap();
        let directory = directory().unwrap();
        let command = || api_command(directory.path(), plane.kubeconfig());
        let is_installing = page.iter().any(|example| example.installs_the_chart());
        let setup = if is_installing { NAMESPACES } else { INSTALL };
        let setup = Process::start(command().args(["-c", setup])).unwrap();
        let ExitReport { status, output } = setup.wait(START_LIMIT).unwrap();
        assert!(status.success(), "{output}");
        let operator = Process::start(command().args(["-c", REPORT_READY]).env("STATUS", STATUS)).unwrap();
        page.iter().for_each(|example| example.run_with_api_server(directory.path(), plane.kubeconfig()));
        drop(operator);
    }
}
