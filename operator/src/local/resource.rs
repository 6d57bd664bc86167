//! Reading a resource from a file, and refusing what the API server would refuse: fields that there are not, and values
//! that break a rule. Pure.

use anyhow::{Context as _, bail, ensure};
use operator_api::LlmDeployment;
use serde::Deserialize as _;
use serde_json::Value;

/// The one LLMDeployment in `text`.
///
/// # Errors
/// There is none or more than one, or it is wrong.
pub(super) fn read(text: &str) -> anyhow::Result<LlmDeployment> {
    let mut found = None;
    for document in serde_yaml::Deserializer::from_str(text) {
        let document = Value::deserialize(document).context("it is no YAML")?;
        if document["kind"] == "LLMDeployment" {
            ensure!(found.is_none(), "it has more than one LLMDeployment");
            found = Some(document);
        }
    }
    let Some(document) = found else { bail!("it has no LLMDeployment") };
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
        let object = read(&format!("kind: Namespace\n---{GOOD}")).unwrap();
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
            let error = format!("{:#}", read(&text).unwrap_err());
            assert!(error.contains(said), "{said}: {error}");
        }
    }
}
