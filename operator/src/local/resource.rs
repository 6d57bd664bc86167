//! Parses a resource and overrides its fields with settings from the command line. Like the API server, this module
//! rejects unknown fields, and values that violate a rule. This module is pure.

use anyhow::{Context as _, bail, ensure};
use operator_api::LlmDeployment;
use serde::Deserialize as _;
use serde_json::{Map, Value};

use crate::manifest::is_empty;

/// Reads the LLMDeployment in `text`. `settings`, such as `engine.kvCache.size=2Gi`, override fields of its spec.
///
/// # Errors
/// `text` does not contain exactly one LLMDeployment, or a setting or the LLMDeployment is invalid.
pub(super) fn read(text: &str, settings: &[String]) -> anyhow::Result<LlmDeployment> {
    let mut found = None;
    for document in serde_yaml::Deserializer::from_str(text) {
        let document = Value::deserialize(document).context("invalid YAML")?;
        if document["kind"] == "LLMDeployment" {
            ensure!(found.is_none(), "the file contains more than one LLMDeployment");
            found = Some(document);
        }
    }
    let Some(mut document) = found else { bail!("the file contains no LLMDeployment") };
    for setting in settings {
        set(&mut document["spec"], setting).with_context(|| format!("--set {setting}"))?;
    }
    let mut object: LlmDeployment =
        serde_json::from_value(document.clone()).context("invalid LLMDeployment")?;
    let known = serde_json::to_value(&object).context("failed to serialize the LLMDeployment")?;
    if let Some(path) = unknown_field(&document["spec"], &known["spec"], "spec") {
        bail!("unknown field {path}");
    }
    ensure!(object.metadata.name.is_some(), "metadata.name is missing");
    object.metadata.namespace.get_or_insert_with(|| "local".to_owned());
    if let Err(errors) = object.validate_cel() {
        bail!("{errors}");
    }
    Ok(object)
}

/// Applies a setting of the form `FIELD=VALUE`, with the value in YAML. An empty value removes the field.
fn set(spec: &mut Value, setting: &str) -> anyhow::Result<()> {
    let (path, value) = setting.split_once('=').context("a setting must have the form FIELD=VALUE")?;
    let value: Value = serde_yaml::from_str(value).context("the value is not valid YAML")?;
    let mut parts: Vec<&str> = path.trim().split('.').collect();
    let last = parts.pop().filter(|last| !last.is_empty()).context("the name of the field is empty")?;
    let mut at = spec;
    for part in parts {
        let Value::Object(members) = at else { bail!("the parent of {part} is not an object") };
        at = members.entry(part).or_insert(Value::Null);
        if at.is_null() {
            *at = Value::Object(Map::new());
        }
    }
    let Value::Object(members) = at else { bail!("the parent of {last} is not an object") };
    if value.is_null() {
        members.remove(last);
    } else {
        members.insert(last.to_owned(), value);
    }
    Ok(())
}

/// The path of the first non-empty field of `given` that is not in `known`, which has only the fields of the schema.
fn unknown_field(given: &Value, known: &Value, path: &str) -> Option<String> {
    match (given, known) {
        (Value::Object(given), Value::Object(known)) => given.iter().find_map(|(name, value)| {
            let path = format!("{path}.{name}");
            match known.get(name) {
                Some(known) => unknown_field(value, known, &path),
                None if is_empty(value) => None,
                None => Some(path),
            }
        }),
        (Value::Array(given), Value::Array(known)) => {
            let items = given.iter().zip(known).enumerate();
            items
                .map(|(at, (given, known))| (format!("{path}[{at}]"), given, known))
                .find_map(|(path, given, known)| unknown_field(given, known, &path))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "
apiVersion: ovfleet.dev/v1alpha1
kind: LLMDeployment
metadata: {name: chat}
spec:
  model:
    source: {pvc: {claim: models}}
";

    #[test]
    fn a_resource_among_other_documents_is_read_with_its_defaults() {
        let object = read(&format!("kind: Namespace\n---{GOOD}"), &[]).unwrap();
        assert_eq!((object.spec.replicas, object.spec.router.replicas), (1, 2));
    }

    #[test]
    fn mistakes_are_described() {
        for (text, message) in [
            ("kind: Namespace".to_owned(), "no LLMDeployment"),
            (format!("{GOOD}---{GOOD}"), "more than one"),
            (format!("{GOOD}  replica: 2\n"), "unknown field spec.replica"),
            (
                format!("{GOOD}  engine: {{kvCache: {{sise: 1Gi}}}}\n"),
                "unknown field spec.engine.kvCache.sise",
            ),
            (format!("{GOOD}  rollout: {{maxSurge: 0}}\n"), "must not both be 0"),
            (GOOD.replace("pvc: {claim: models}", ""), "exactly one of"),
            (GOOD.replace("chat", "9-chat"), "must begin with a letter"),
            (GOOD.replace("source:", "format: gguf\n    source:"), "model.format must be omitted"),
            (format!("{GOOD}  replicas: many\n"), "invalid LLMDeployment"),
        ] {
            let error = format!("{:#}", read(&text, &[]).unwrap_err());
            assert!(error.contains(message), "{message}: {error}");
        }
    }

    #[test]
    fn settings_override_the_file_and_obey_the_same_rules() {
        let read = |settings: &[&str]| {
            let settings: Vec<String> = settings.iter().map(|&setting| setting.to_owned()).collect();
            read(&format!("{GOOD}  engine: {{maxNumSeqs: 8}}\n"), &settings)
        };
        let object = read(&[
            "engine.kvCache.size=2Gi",
            "engine.maxNumSeqs=",
            "engine.extraArgs=[--max-itl=50ms]",
            "model.name='7'",
        ])
        .unwrap();
        let engine = &object.spec.engine;
        assert_eq!(engine.kv_cache.size.as_ref().map(|size| size.0.as_str()), Some("2Gi"));
        assert_eq!(
            (engine.max_num_seqs, engine.extra_args.as_slice()),
            (256, &["--max-itl=50ms".to_owned()][..])
        );
        assert_eq!(object.spec.model.name.as_deref(), Some("7"));
        for (setting, message) in [
            ("engine.kvCache.sise=2Gi", "unknown field spec.engine.kvCache.sise"),
            ("rollout.maxSurge=0", "must not both be 0"),
            ("replicas", "--set replicas: a setting must have the form FIELD=VALUE"),
            ("replicas.more=1", "the parent of more is not an object"),
            (".=1", "the name of the field is empty"),
            ("engine.extraArgs=[--port=1]", "must not contain --port: the operator sets it"),
            ("engine.extraArgs=[50ms, --max-itll]", "has no flag --max-itll"),
            ("engine.maxNumSeqs=[", "the value is not valid YAML"),
        ] {
            let error = format!("{:#}", read(&["replicas=1", setting]).unwrap_err());
            assert!(error.contains(message), "{message}: {error}");
        }
    }
}
