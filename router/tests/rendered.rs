//! Uses the code of the router to parse the command lines and options that the operator renders.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ffi::OsString;
use std::path::Path;

use router::args::Args;
use router::args::KeyIsolation;
use router::config::CommandLine;
use serde::Deserialize as _;
use serde_yaml::Value;

/// The options of the routers of a resource, from its snapshot.
fn rendered(name: &str) -> Args {
    let path = format!("{}/../operator/tests/snapshots/{name}.yaml", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    let objects: Vec<Value> =
        serde_yaml::Deserializer::from_str(&text).map(|object| Value::deserialize(object).unwrap()).collect();
    let object = |kind: &str| {
        let router = format!("{name}-router");
        objects.iter().find(|object| object["kind"] == kind && object["metadata"]["name"] == *router).unwrap()
    };
    let container = &object("Deployment")["spec"]["template"]["spec"]["containers"][0];
    let arguments = container["args"].as_sequence().unwrap().iter().map(|word| word.as_str().unwrap());
    let line = CommandLine::new(["router"].into_iter().chain(arguments).map(OsString::from));
    let options = object("ConfigMap")["data"]["router.yaml"].as_str().unwrap();
    line.with_file(Path::new("router.yaml"), options).unwrap()
}

#[test]
fn the_arguments_that_the_operator_renders_match_the_resource() {
    for name in ["small", "full", "claim", "image", "per-pod"] {
        let args = rendered(name);
        let token = args.replica_token_file.unwrap();
        assert_eq!(token, Path::new("/etc/ovfleet-replica-token/token"), "{name}");
        let isolation = if name == "full" { KeyIsolation::Name } else { KeyIsolation::Key };
        assert_eq!(args.key_isolation, isolation, "{name}");
    }
}
