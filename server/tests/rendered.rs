//! The command lines that the operator renders, read by the server itself.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;

use clap::Parser as _;
use serde::Deserialize as _;
use serde_yaml::Value;
use server::{Args, Command};

fn words(list: &Value) -> Vec<&str> {
    list.as_sequence().unwrap().iter().map(|word| word.as_str().unwrap()).collect()
}

#[test]
fn what_the_operator_renders_is_accepted_and_replicas_need_the_token() {
    let token = Some(Path::new("/etc/ovfleet-replica-token/token"));
    for name in ["small", "full", "claim", "image", "per-pod"] {
        let path = format!("{}/../operator/tests/snapshots/{name}.yaml", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(path).unwrap();
        let objects = serde_yaml::Deserializer::from_str(&text);
        let server = format!("{name}-server");
        let mut deployments = objects
            .map(|object| Value::deserialize(object).unwrap())
            .filter(|object| object["kind"] == "Deployment" && object["metadata"]["name"] == *server);
        let container = deployments.next().unwrap()["spec"]["template"]["spec"]["containers"][0].clone();

        let args = words(&container["args"]);
        let args = Args::try_parse_from(["server"].into_iter().chain(args)).unwrap();
        assert_eq!(args.replica_token_file.as_deref(), token, "{name}");
        assert!(args.admin_port.is_some(), "{name}: probes have no token");

        let drain = words(&container["lifecycle"]["preStop"]["exec"]["command"]);
        let Some(Command::Drain(drain)) = Args::try_parse_from(drain).unwrap().command else {
            panic!("{name}: not a drain")
        };
        assert_eq!(drain.replica_token_file.as_deref(), token, "{name}");
    }
}
