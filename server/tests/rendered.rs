//! Tests that the server's parser accepts the server's command lines in the operator's snapshots.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;

use clap::Parser as _;
use serde::Deserialize as _;
use serde_yaml::Value;
use server::{Args, Command};

const TOKEN_FILE: &str = "/etc/ovfleet-replica-token/token";

/// Returns the containers with this name in all pod templates of the operator's snapshots, each with the path of its
/// snapshot.
fn containers(name: &str) -> Vec<(String, Value)> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../operator/tests/snapshots");
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        for object in serde_yaml::Deserializer::from_str(&text) {
            let object = Value::deserialize(object).unwrap();
            for list in ["containers", "initContainers"] {
                let containers = object["spec"]["template"]["spec"][list].as_sequence();
                let named = containers.into_iter().flatten().filter(|container| container["name"] == name);
                found.extend(named.map(|container| (path.display().to_string(), container.clone())));
            }
        }
    }
    found
}

fn parse(program: &[&str], arguments: &Value) -> Args {
    let arguments = arguments.as_sequence().unwrap().iter().map(|argument| argument.as_str().unwrap());
    Args::try_parse_from(program.iter().copied().chain(arguments)).unwrap()
}

#[test]
fn servers_accept_their_arguments_and_need_the_replica_token() {
    let containers = containers("server");
    assert_eq!(containers.len(), 5, "each snapshot has a server");
    for (snapshot, container) in containers {
        let args = parse(&["server"], &container["args"]);
        assert_eq!(args.replica_token_file.as_deref(), Some(Path::new(TOKEN_FILE)), "{snapshot}");
        assert!(args.admin_port.is_some(), "{snapshot}: probes have no token");

        let drain = parse(&[], &container["lifecycle"]["preStop"]["exec"]["command"]);
        let Some(Command::Drain(drain)) = drain.command else { panic!("{snapshot}: not a drain") };
        assert_eq!(drain.replica_token_file.as_deref(), Some(Path::new(TOKEN_FILE)), "{snapshot}");
    }
}

#[test]
fn containers_that_fetch_models_accept_their_arguments() {
    let containers = containers("fetch");
    assert_eq!(containers.len(), 3, "two snapshots fetch in the pod and one in a Job");
    for (snapshot, container) in containers {
        let args = parse(&["server"], &container["args"]);
        assert!(matches!(args.command, Some(Command::Fetch(_))), "{snapshot}");
    }
}

#[test]
fn servers_accept_the_sources_of_images_that_the_operator_accepts() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../operator/tests/fixtures/media-sources.yaml");
    let examples: Value = serde_yaml::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    for (field, flag) in
        [("allowedDomains", "--allowed-media-domains"), ("allowedNetworks", "--allowed-media-networks")]
    {
        for (list, is_accepted) in [("valid", true), ("invalid", false)] {
            for entry in examples[field][list].as_sequence().unwrap() {
                let argument = format!("{flag}={}", entry.as_str().unwrap());
                let result = Args::try_parse_from(["server", "--backend=sim", argument.as_str()]);
                assert_eq!(result.is_ok(), is_accepted, "{argument}");
            }
        }
    }
}
