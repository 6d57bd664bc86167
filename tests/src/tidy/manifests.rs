//! Rules about the manifests of crates, such as the names of the crates and their allowed dependencies.

use toml::{Table, Value};

use super::{Finding, Tree};

/// The dependencies that each crate may have within the workspace, including those of its tests and its build script.
/// Crates that are not listed are not allowed.
const EDGES: [(&str, &[&str]); 16] = [
    ("operator", &["operator-api", "process", "proto", "tests"]),
    ("operator-api", &[]),
    ("process", &[]),
    ("proto", &[]),
    // The router uses `server-images` to read the headers of images, and `server-scheduler` only in an example that
    // simulates routing policies.
    ("router", &["process", "proto", "server-images", "server-scheduler"]),
    (
        "server",
        &[
            "process",
            "proto",
            "server-engine",
            "server-gguf",
            "server-guidance",
            "server-images",
            "server-openai",
            "server-openvino",
            "server-parsers",
            "server-scheduler",
            "server-text",
        ],
    ),
    ("server-engine", &["server-scheduler"]),
    ("server-gguf", &[]),
    // The scheduler is used only in tests, for the stop criteria of the sampler.
    ("server-guidance", &["server-engine", "server-scheduler"]),
    ("server-images", &[]),
    ("server-openai", &[]),
    ("server-openvino", &["server-engine", "server-gguf", "server-images", "server-scheduler"]),
    ("server-parsers", &[]),
    ("server-scheduler", &[]),
    ("server-text", &["server-gguf"]),
    ("tests", &[]),
];

/// The external dependencies that are allowed outside of tests in crates that deliberately have few: the pure core, and
/// the types for serialization.
const OUTSIDE: [(&str, &[&str]); 6] = [
    ("server-gguf", &["thiserror"]),
    ("server-guidance", &["llguidance", "parking_lot", "serde_json", "thiserror", "toktrie"]),
    ("server-images", &["image", "serde_json", "sha2", "thiserror"]),
    ("server-openai", &["serde", "serde_json", "serde_path_to_error"]),
    ("server-parsers", &["serde_json"]),
    ("server-scheduler", &["xxhash-rust"]),
];

/// External crates for network protocols and command lines, and the crates of the workspace that may use them outside
/// of tests.
const PROTOCOLS: [(&str, &[&str]); 6] = [
    ("axum", &["operator", "router", "server", "tests"]),
    ("clap", &["operator", "process", "router", "server"]),
    ("kube", &["operator", "operator-api", "router", "tests"]),
    ("tonic", &["operator", "proto", "router", "server"]),
    ("tonic-prost", &["proto", "router", "server"]),
    ("tower", &["operator", "router", "server"]),
];

/// The directories of the crates of the workspace, or an empty list if there is no valid `Cargo.toml`.
#[must_use]
pub fn members(tree: &Tree) -> Vec<String> {
    let root = tree.file("Cargo.toml").and_then(|file| file.text.parse::<Table>().ok()).unwrap_or_default();
    let members = at(&root, &["workspace", "members"]).and_then(Value::as_array).into_iter().flatten();
    members.filter_map(Value::as_str).map(str::to_owned).collect()
}

/// Whether the workspace has a crate with this name.
pub(super) fn is_crate(name: &str) -> bool {
    EDGES.iter().any(|(known, _)| *known == name)
}

/// Checks the manifests of the workspace.
#[must_use]
pub fn manifests(tree: &Tree) -> Vec<Finding> {
    let Some(root) = tree.file("Cargo.toml") else { return vec![Finding::new("Cargo.toml", "missing")] };
    let Ok(root) = root.text.parse::<Table>() else {
        return vec![Finding::new("Cargo.toml", "not valid TOML")];
    };
    let members = members(tree);

    let mut findings = workspace(&root);
    for file in tree.files.iter().filter(|file| file.path.ends_with("/Cargo.toml")) {
        let directory = file.path.trim_end_matches("/Cargo.toml");
        let manifest = file.text.parse::<Table>();
        if manifest.as_ref().is_ok_and(|manifest| is_fuzz(directory, manifest)) {
            findings.extend(stale_lock(tree, directory));
            continue;
        }
        if !members.iter().any(|member| member == directory) {
            findings.push(Finding::new(&file.path, "not a member of the workspace"));
        }
        match manifest {
            Ok(manifest) => {
                findings.extend(package(&file.path, directory, &manifest));
                findings.extend(doc_tests(tree, directory, &manifest));
            }
            Err(error) => findings.push(Finding::new(&file.path, error.to_string())),
        }
    }
    findings
}

/// Checks that `lib.doctest` is false exactly for the crates whose documentation contains no example: even without
/// examples, rustdoc takes seconds to search a crate for them.
fn doc_tests(tree: &Tree, directory: &str, manifest: &Table) -> Option<Finding> {
    let is_tested = at(manifest, &["lib", "doctest"]).and_then(Value::as_bool) != Some(false);
    let sources = format!("{directory}/src/");
    let mut files =
        tree.files.iter().filter(|file| file.path.starts_with(&sources) && file.path.ends_with(".rs"));
    match (is_tested, files.find(|file| has_example(&file.text))) {
        (true, None) => {
            Some(Finding::new(&format!("{directory}/Cargo.toml"), "has no example: set lib.doctest to false"))
        }
        (false, Some(file)) => Some(Finding::new(
            &file.path,
            "has an example, which is not tested, because lib.doctest is false",
        )),
        _ => None,
    }
}

/// Whether a doc comment contains a code block that rustdoc tests or compiles.
fn has_example(source: &str) -> bool {
    let lines = source.lines().filter_map(|line| {
        let line = line.trim_start();
        line.strip_prefix("///").or_else(|| line.strip_prefix("//!"))
    });
    let fences = lines.filter_map(|line| line.trim_start().strip_prefix("```"));
    // Every second fence ends a block.
    fences.step_by(2).any(|attributes| {
        let first = attributes.split(',').next().unwrap_or_default();
        matches!(first, "" | "rust" | "no_run" | "should_panic" | "compile_fail")
    })
}

/// Whether a crate contains fuzz targets: such a crate is a separate workspace with other flags, and is never
/// published.
fn is_fuzz(directory: &str, manifest: &Table) -> bool {
    let says = |keys: &[&str], wanted| at(manifest, keys).and_then(Value::as_bool) == Some(wanted);
    directory.ends_with("/fuzz")
        && manifest.contains_key("workspace")
        && says(&["package", "metadata", "cargo-fuzz"], true)
        && says(&["package", "publish"], false)
}

/// Checks that the lock file of the fuzz targets lists the required dependencies of the workspace crates in it. No
/// other build reads that file, so a missing dependency would remain unnoticed until the next run of the fuzz targets.
fn stale_lock(tree: &Tree, directory: &str) -> Vec<Finding> {
    let path = format!("{directory}/Cargo.lock");
    let lock = tree.file(&path).and_then(|file| file.text.parse::<Table>().ok());
    let Some(lock) = lock else { return vec![Finding::new(&path, "missing, or not valid TOML")] };
    let packages = lock.get("package").and_then(Value::as_array).into_iter().flatten();
    let mut findings = Vec::new();
    for package in packages.filter_map(Value::as_table).filter(|package| !package.contains_key("source")) {
        let name = package.get("name").and_then(Value::as_str).unwrap_or_default();
        let manifest = tree.file(&format!("{}/Cargo.toml", name.replace('-', "/")));
        let Some(manifest) = manifest.and_then(|file| file.text.parse::<Table>().ok()) else { continue };
        let locked = package.get("dependencies").and_then(Value::as_array).into_iter().flatten();
        // The name includes the version if several versions are locked.
        let locked: Vec<&str> =
            locked.filter_map(Value::as_str).filter_map(|locked| locked.split(' ').next()).collect();
        let is_locked = |dependency: &str| locked.contains(&dependency);
        for dependency in required(&manifest).into_iter().filter(|dependency| !is_locked(dependency)) {
            let message = format!(
                "does not record that {name} depends on {dependency}: run `cargo update --workspace --manifest-path \
                 {directory}/Cargo.toml`"
            );
            findings.push(Finding::new(&path, message));
        }
    }
    findings
}

/// The dependencies that a crate has on every platform and with every set of features.
fn required(manifest: &Table) -> Vec<String> {
    let kinds =
        ["dependencies", "build-dependencies"].into_iter().filter_map(|kind| manifest.get(kind)?.as_table());
    let is_optional = |value: &Value| value.get("optional").and_then(Value::as_bool) == Some(true);
    let name = |(name, value): (&String, &Value)| {
        value.get("package").and_then(Value::as_str).unwrap_or(name).to_owned()
    };
    kinds.flatten().filter(|(_, value)| !is_optional(value)).map(name).collect()
}

fn workspace(root: &Table) -> Vec<Finding> {
    let mut findings = Vec::new();
    if at(root, &["workspace", "package", "version"]).and_then(Value::as_str) != Some("0.0.0") {
        findings.push(Finding::new("Cargo.toml", "workspace.package.version is not 0.0.0"));
    }
    if at(root, &["workspace", "package", "publish"]).and_then(Value::as_bool) != Some(false) {
        findings.push(Finding::new("Cargo.toml", "workspace.package.publish is not false"));
    }
    findings
}

fn package(path: &str, directory: &str, manifest: &Table) -> Vec<Finding> {
    let mut findings = Vec::new();
    let name = at(manifest, &["package", "name"]).and_then(Value::as_str).unwrap_or_default();
    if name != directory.replace('/', "-") {
        let message =
            format!("the crate is named {name:?}, but its path requires {:?}", directory.replace('/', "-"));
        findings.push(Finding::new(path, message));
    }
    for key in ["version", "edition", "license", "publish", "rust-version"] {
        if at(manifest, &["package", key, "workspace"]).and_then(Value::as_bool) != Some(true) {
            findings.push(Finding::new(path, format!("package.{key} is not inherited from the workspace")));
        }
    }
    if at(manifest, &["lints", "workspace"]).and_then(Value::as_bool) != Some(true) {
        findings.push(Finding::new(path, "lints are not inherited from the workspace"));
    }
    findings.extend(edges(path, name, manifest));
    findings
}

fn edges(path: &str, name: &str, manifest: &Table) -> Vec<Finding> {
    let Some((_, allowed)) = EDGES.iter().find(|(from, _)| *from == name) else {
        return vec![Finding::new(
            path,
            format!("the crate {name:?} is not in the table of allowed dependencies (EDGES)"),
        )];
    };
    let outside = OUTSIDE.iter().find(|(from, _)| *from == name).map(|(_, outside)| *outside);
    let mut findings = Vec::new();
    for (dependency, development) in dependencies(manifest) {
        let ours = is_crate(&dependency);
        if ours && !allowed.contains(&dependency.as_str()) {
            findings.push(Finding::new(path, format!("{name} may not depend on {dependency}")));
        }
        if ours || development {
            continue;
        }
        if outside.is_some_and(|outside| !outside.contains(&dependency.as_str())) {
            findings.push(Finding::new(path, format!("{name} may not depend on {dependency}")));
        }
        if PROTOCOLS.iter().any(|(of, users)| *of == dependency && !users.contains(&name)) {
            findings.push(Finding::new(path, format!("{name} may not use {dependency}")));
        }
    }
    findings
}

/// The crate name of each dependency, and whether it is a development dependency.
fn dependencies(manifest: &Table) -> Vec<(String, bool)> {
    let targets = manifest.get("target").and_then(Value::as_table);
    let mut found = Vec::new();
    for table in std::iter::once(manifest)
        .chain(targets.into_iter().flat_map(Table::values).filter_map(Value::as_table))
    {
        for kind in ["dependencies", "build-dependencies", "dev-dependencies"] {
            for (name, value) in table.get(kind).and_then(Value::as_table).into_iter().flatten() {
                let renamed = value.get("package").and_then(Value::as_str);
                found.push((renamed.unwrap_or(name).to_owned(), kind == "dev-dependencies"));
            }
        }
    }
    found
}

fn at<'a>(table: &'a Table, keys: &[&str]) -> Option<&'a Value> {
    let (first, rest) = keys.split_first()?;
    let value = table.get(*first)?;
    if rest.is_empty() { Some(value) } else { at(value.as_table()?, rest) }
}

#[cfg(test)]
mod tests;
