//! Merges one JSON value into another, such as the user's `podTemplate` into the rendered pod template.

use serde_json::Value;

/// The members that identify the items of a list, in order of preference. `mountPath` comes first, because the `name`
/// of a volume mount is the name of its volume, which may have several mounts.
const KEYS: [&str; 4] = ["mountPath", "name", "containerPort", "topologyKey"];
/// The member with the required terms of pod affinity or anti-affinity. A pod must satisfy all of them, and several may
/// have the same topology key: merging these would combine their selectors and so change their meaning.
const REQUIRED_TERMS: &str = "requiredDuringSchedulingIgnoredDuringExecution";

/// Merges `overlay` into `base`. Objects are merged by member. Lists are merged by the member that identifies their
/// items, if all items have it; new items are appended. Required terms of pod affinity and anti-affinity are appended
/// without merging. Any other value of `overlay` replaces that of `base`.
pub(super) fn merge(base: &mut Value, overlay: &Value) {
    match (base, overlay) {
        (Value::Object(base), Value::Object(overlay)) => {
            for (name, value) in overlay {
                match (base.get_mut(name), value) {
                    (Some(Value::Array(terms)), Value::Array(added)) if name == REQUIRED_TERMS => {
                        terms.extend(added.iter().cloned());
                    }
                    (Some(present), value) => merge(present, value),
                    (None, value) => drop(base.insert(name.clone(), value.clone())),
                }
            }
        }
        (Value::Array(base), Value::Array(overlay)) => match key(base, overlay) {
            Some(key) => {
                for item in overlay {
                    match base.iter_mut().find(|present| present[key] == item[key]) {
                        Some(present) => merge(present, item),
                        None => base.push(item.clone()),
                    }
                }
            }
            None => *base = overlay.clone(),
        },
        (base, overlay) => *base = overlay.clone(),
    }
}

/// The member that identifies the items of both lists.
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
    fn lists_of_named_items_are_merged_by_name_and_others_replaced() {
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
        merge(&mut base, &overlay);
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

    #[test]
    fn volume_mounts_are_merged_by_path() {
        let mut base = json!([{"name": "tmp", "mountPath": "/tmp"}]);
        merge(
            &mut base,
            &json!([{"name": "tmp", "mountPath": "/a", "subPath": "a"}, {"name": "tmp", "mountPath": "/b"}]),
        );
        let mut expected = json!([
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "tmp", "mountPath": "/a", "subPath": "a"},
            {"name": "tmp", "mountPath": "/b"},
        ]);
        assert_eq!(base, expected);
        // The overlay can replace the volume that is mounted at a path.
        merge(&mut base, &json!([{"name": "scratch", "mountPath": "/tmp"}]));
        expected[0]["name"] = json!("scratch");
        assert_eq!(base, expected);
    }
}
