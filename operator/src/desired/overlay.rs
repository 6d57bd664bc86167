//! Laying what the user gave for a pod over what the operator made of it.

use operator_api::PodTemplate;
use serde_json::Value;

use super::pod::json_of;

/// By which member the things of a list are told apart, in the order of preference.
const KEYS: [&str; 4] = ["name", "mountPath", "containerPort", "topologyKey"];

/// Lays `overlay` over `base`. Objects are merged; lists whose things all have a key of their own are merged by it,
/// new things at the end; everything else is replaced.
pub(super) fn lay_over(base: &mut Value, overlay: &Value) {
    match (base, overlay) {
        (Value::Object(base), Value::Object(overlay)) => {
            for (name, value) in overlay {
                match base.get_mut(name) {
                    Some(present) => lay_over(present, value),
                    None => drop(base.insert(name.clone(), value.clone())),
                }
            }
        }
        (Value::Array(base), Value::Array(overlay)) => match key(base, overlay) {
            Some(key) => {
                for item in overlay {
                    match base.iter_mut().find(|present| present[key] == item[key]) {
                        Some(present) => lay_over(present, item),
                        None => base.push(item.clone()),
                    }
                }
            }
            None => *base = overlay.clone(),
        },
        (base, overlay) => *base = overlay.clone(),
    }
}

/// Lays what the user gave for a pod over a template.
pub(super) fn lay_template_over(template: &mut Value, overlay: &PodTemplate) {
    if let Some(metadata) = &overlay.metadata {
        lay_over(&mut template["metadata"], &json_of(metadata));
    }
    if let Some(spec) = &overlay.spec {
        lay_over(&mut template["spec"], spec);
    }
}

fn key(base: &[Value], overlay: &[Value]) -> Option<&'static str> {
    let mut items = base.iter().chain(overlay).peekable();
    items.peek()?;
    let items: Vec<&Value> = items.collect();
    KEYS.into_iter().find(|key| items.iter().all(|item| item.get(key).is_some()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lists_of_named_things_are_merged_by_name_and_others_replaced() {
        let mut base = json!({
            "containers": [{"name": "server", "args": ["a"], "env": [{"name": "A", "value": "1"}]}],
            "keep": 1,
        });
        let overlay = json!({
            "containers": [
                {"name": "server", "args": ["b"], "env": [{"name": "B", "value": "2"}]},
                {"name": "side"},
            ],
            "hostNetwork": false,
        });
        lay_over(&mut base, &overlay);
        assert_eq!(
            base,
            json!({
                "containers": [
                    {
                        "name": "server",
                        "args": ["b"],
                        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
                    },
                    {"name": "side"},
                ],
                "keep": 1,
                "hostNetwork": false,
            })
        );
    }
}
