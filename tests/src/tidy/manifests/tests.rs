//! Tests that each rule about crates finds a violation.

use super::super::{File, Tree};
use super::manifests;

const ROOT: &str = r#"
[workspace]
members = ["server/engine"]
[workspace.package]
version = "0.0.0"
publish = false
"#;

const ENGINE: &str = r#"
[package]
name = "server-engine"
version.workspace = true
edition.workspace = true
license.workspace = true
publish.workspace = true
rust-version.workspace = true
[lib]
doctest = false
[lints]
workspace = true
[dependencies]
server-scheduler.workspace = true
thiserror.workspace = true
"#;

fn check(root: &str, path: &str, manifest: &str) -> Vec<String> {
    let tree = Tree { files: vec![File::new("Cargo.toml", root), File::new(path, manifest)] };
    manifests(&tree).into_iter().map(|finding| finding.message).collect()
}

fn engine_with(dependencies: &str) -> Vec<String> {
    check(ROOT, "server/engine/Cargo.toml", &format!("{ENGINE}{dependencies}"))
}

#[test]
fn accepts_a_crate_that_follows_the_rules() {
    assert_eq!(engine_with(""), [""; 0]);
}

#[test]
fn documentation_is_tested_exactly_if_it_has_an_example() {
    let check = |manifest: &str, source: &str| {
        let files = [
            File::new("Cargo.toml", ROOT),
            File::new("server/engine/Cargo.toml", manifest),
            File::new("server/engine/src/lib.rs", source),
        ];
        manifests(&Tree { files: files.into() })
            .into_iter()
            .map(|finding| finding.message)
            .collect::<Vec<_>>()
    };
    let tested = ENGINE.replace("[lib]\ndoctest = false\n", "");
    let text = "//! A figure:\n//! ```text\n//! a -> b\n//! ```\n";
    assert_eq!(check(ENGINE, text), [""; 0]);
    assert_eq!(check(&tested, text), ["has no example: set lib.doctest to false"]);
    for fence in ["```", "```rust", "```no_run", "```should_panic,edition2024"] {
        let example = format!("{text}/// A function.\n/// {fence}\n/// f();\n/// ```\npub fn f() {{}}\n");
        assert_eq!(check(&tested, &example), [""; 0], "{fence}");
        assert!(check(ENGINE, &example)[0].contains("is not tested"), "{fence}");
    }
}

#[test]
fn finds_a_name_that_is_not_the_path() {
    let manifest = ENGINE.replace("\"server-engine\"", "\"server-text\"");
    let found = check(ROOT, "server/engine/Cargo.toml", &manifest);
    assert!(found[0].contains("its path requires \"server-engine\""), "{found:?}");
}

#[test]
fn finds_a_crate_outside_the_workspace_and_the_table() {
    let manifest = ENGINE.replace("server-engine", "server-extra");
    let found = check(ROOT, "server/extra/Cargo.toml", &manifest);
    assert_eq!(found.len(), 2, "{found:?}");
}

#[test]
fn fuzz_targets_are_exempt_from_all_rules_except_for_their_lock_file() {
    let manifest = "[package]\nname = \"server-engine-fuzz\"\npublish = false\n\
        [package.metadata]\ncargo-fuzz = true\n[workspace]\n";
    assert_eq!(check(ROOT, "server/engine/fuzz/Cargo.toml", manifest), ["missing, or not valid TOML"]);
    for wrong in [manifest.replace("[workspace]", ""), manifest.replace("publish = false", "")] {
        assert!(!check(ROOT, "server/engine/fuzz/Cargo.toml", &wrong).is_empty(), "{wrong}");
    }
    assert!(!check(ROOT, "server/engine/extra/Cargo.toml", manifest).is_empty());
}

#[test]
fn finds_a_lock_file_of_fuzz_targets_that_lacks_a_dependency() {
    let fuzz = "[package]\nname = \"server-fuzz\"\npublish = false\n[package.metadata]\ncargo-fuzz = true\n[workspace]\n";
    let lock = "[[package]]\nname = \"server-engine\"\ndependencies = [\n \"server-scheduler\",\n \"thiserror 2.0.1\",\n]\n\
        [[package]]\nname = \"thiserror\"\nsource = \"registry\"\n";
    for (lock, count) in [(lock.to_owned(), 0), (lock.replace("thiserror 2", "other 2"), 1)] {
        let files = [
            ("Cargo.toml", ROOT),
            ("server/engine/Cargo.toml", ENGINE),
            ("server/fuzz/Cargo.toml", fuzz),
            ("server/fuzz/Cargo.lock", &lock),
        ];
        let files = files.map(|(path, text)| File::new(path, text)).into();
        let found = manifests(&Tree { files });
        assert_eq!(found.len(), count, "{found:?}");
        assert!(found.iter().all(|finding| finding.message.contains("server-engine depends on thiserror")));
    }
}

#[test]
fn finds_fields_that_are_not_inherited_from_the_workspace() {
    let manifest = ENGINE
        .replace("version.workspace = true\nedition", "version = \"1.2.3\"\nedition")
        .replace("[lints]\nworkspace = true", "");
    assert_eq!(check(ROOT, "server/engine/Cargo.toml", &manifest).len(), 2);
    assert_eq!(check(&ROOT.replace("0.0.0", "1.0.0"), "server/engine/Cargo.toml", ENGINE).len(), 1);
    assert_eq!(check(&ROOT.replace("false", "true"), "server/engine/Cargo.toml", ENGINE).len(), 1);
}

#[test]
fn finds_edges_that_are_not_allowed_however_they_are_written() {
    for edge in [
        "server-openvino.workspace = true",
        "text = { package = \"server-text\", path = \"../text\" }",
        "[build-dependencies]\nserver-openai.workspace = true",
        "[dev-dependencies]\nserver.workspace = true",
        "[target.'cfg(unix)'.dependencies]\nserver-text.workspace = true",
    ] {
        assert_eq!(engine_with(edge).len(), 1, "{edge}");
    }
}

#[test]
fn finds_protocols_below_the_server() {
    assert_eq!(engine_with("axum.workspace = true"), ["server-engine may not use axum"]);
}

#[test]
fn finds_dependencies_that_the_pure_core_may_not_have() {
    let root = ROOT.replace("server/engine", "server/scheduler");
    let manifest = ENGINE.replace("server-engine", "server-scheduler").replace(
        "server-scheduler.workspace = true\nthiserror.workspace = true",
        "tokio.workspace = true\n[dev-dependencies]\nrand.workspace = true",
    );
    let found = check(&root, "server/scheduler/Cargo.toml", &manifest);
    assert_eq!(found, ["server-scheduler may not depend on tokio"]);
}
