//! Reading a resource from a file, with what the command line says otherwise, and refusing what the API server would
//! refuse: fields that there are not, and values that break a rule. Pure.

use anyhow::{Context as _, bail, ensure};
use operator_api::LlmDeployment;
use serde::Deserialize as _;
use serde_json::{Map, Value};

/// The one LLMDeployment in `text`, with `settings` (`engine.kvCache.size=2Gi`) in place of what its spec says.
///
/// # Errors
/// There is none or more than one, or it is wrong.
pub(super) fn read(text: &str, settings: &[String]) -> anyhow::Result<LlmDeployment> {
    let mut found = None;
    for document in serde_yaml::Deserializer::from_str(text) {
        let document = Value::deserialize(document).context("it is no YAML")?;
        if document["kind"] == "LLMDeployment" {
            ensure!(found.is_none(), "it has more than one LLMDeployment");
            found = Some(document);
        }
    }
    let Some(mut document) = found else { bail!("it has no LLMDeployment") };
    for setting in settings {
        set(&mut document["spec"], setting).with_context(|| format!("--set {setting}"))?;
    }
    let mut object: LlmDeployment =
        serde_json::from_value(document.clone()).context("it is not what an LLMDeployment looks like")?;
    let known = serde_json::to_value(&object).context("failed to compare it")?;
    if let Some(path) = unknown(&document["spec"], &known["spec"], "spec") {
        bail!("there is no field {path}");
    }
    ensure!(object.metadata.name.is_some(), "metadata.name is missing");
    object.metadata.namespace.get_or_insert_with(|| "local".to_owned());
    if let Err(errors) = object.validate_cel() {
        bail!("{errors}");
    }
    Ok(object)
}

/// Sets a field to a value, written `PATH=VALUE` with the value in YAML. An empty one takes away what is there.
fn set(spec: &mut Value, setting: &str) -> anyhow::Result<()> {
    let (path, value) = setting.split_once('=').context("it is not FIELD=VALUE")?;
    let value: Value = serde_yaml::from_str(value).context("the value is no YAML")?;
    let mut parts: Vec<&str> = path.trim().split('.').collect();
    let last = parts.pop().filter(|last| !last.is_empty()).context("it names no field")?;
    let mut at = spec;
    for part in parts {
        let Value::Object(members) = at else { bail!("{part} is in nothing that has fields") };
        at = members.entry(part).or_insert(Value::Null);
        if at.is_null() {
            *at = Value::Object(Map::new());
        }
    }
    let Value::Object(members) = at else { bail!("{last} is in nothing that has fields") };
    if value.is_null() {
        members.remove(last);
    } else {
        members.insert(last.to_owned(), value);
    }
    Ok(())
}

/// The first field that was given and is not known: what is known has been kept.
fn unknown(given: &Value, known: &Value, path: &str) -> Option<String> {
    match (given, known) {
        (Value::Object(given), Value::Object(known)) => given.iter().find_map(|(name, value)| {
            let path = format!("{path}.{name}");
            match known.get(name) {
                Some(known) => unknown(value, known, &path),
                None if is_empty(value) => None,
                None => Some(path),
            }
        }),
        (Value::Array(given), Value::Array(known)) => {
            let items = given.iter().zip(known).enumerate();
            items
                .map(|(at, (given, known))| (format!("{path}[{at}]"), given, known))
                .find_map(|(path, given, known)| unknown(given, known, &path))
        }
        _ => None,
    }
}

/// What is left out when it is written again.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Object(members) => members.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
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
    fn what_is_wrong_is_said() {
        for (text, said) in [
            ("kind: Namespace".to_owned(), "no LLMDeployment"),
            (format!("{GOOD}---{GOOD}"), "more than one"),
            (format!("{GOOD}  replica: 2\n"), "there is no field spec.replica"),
            (
                format!("{GOOD}  engine: {{kvCache: {{sise: 1Gi}}}}\n"),
                "there is no field spec.engine.kvCache.sise",
            ),
            (format!("{GOOD}  rollout: {{maxSurge: 0}}\n"), "may not both be 0"),
            (GOOD.replace("pvc: {claim: models}", ""), "exactly one of"),
            (GOOD.replace("chat", "9-chat"), "must begin with a letter"),
            (format!("{GOOD}  replicas: many\n"), "not what an LLMDeployment"),
        ] {
            let error = format!("{:#}", read(&text, &[]).unwrap_err());
            assert!(error.contains(said), "{said}: {error}");
        }
    }

    #[test]
    fn what_the_command_line_says_counts_and_is_held_to_the_same_rules() {
        let read = |settings: &[&str]| {
            let settings: Vec<String> = settings.iter().map(|&setting| setting.to_owned()).collect();
            read(&format!("{GOOD}  engine: {{maxNumSeqs: 8}}\n"), &settings)
        };
        let object = read(&[
            "engine.kvCache.size=2Gi",
            "engine.maxNumSeqs=",
            "engine.extraArgs=[--weights=compact]",
            "model.name='7'",
        ])
        .unwrap();
        let engine = &object.spec.engine;
        assert_eq!(engine.kv_cache.size.as_ref().map(|size| size.0.as_str()), Some("2Gi"));
        assert_eq!(
            (engine.max_num_seqs, engine.extra_args.as_slice()),
            (256, &["--weights=compact".to_owned()][..])
        );
        assert_eq!(object.spec.model.name.as_deref(), Some("7"));
        for (setting, said) in [
            ("engine.kvCache.sise=2Gi", "there is no field spec.engine.kvCache.sise"),
            ("rollout.maxSurge=0", "may not both be 0"),
            ("replicas", "--set replicas: it is not FIELD=VALUE"),
            ("replicas.more=1", "more is in nothing that has fields"),
            (".=1", "names no field"),
            ("engine.extraArgs=[--port=1]", "may not have --port: the operator sets it"),
            ("engine.maxNumSeqs=[", "the value is no YAML"),
        ] {
            let error = format!("{:#}", read(&["replicas=1", setting]).unwrap_err());
            assert!(error.contains(said), "{said}: {error}");
        }
    }
}
