//! Parts of the schema that several types have in common.

/// Returns the schema of the resources of a container. It limits the size of the maps, because the API server limits
/// the cost of the rules about their items.
pub(crate) fn resources(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
    use schemars::JsonSchema as _;
    let mut schema = k8s_openapi::api::core::v1::ResourceRequirements::json_schema(generator).to_value();
    for map in ["limits", "requests"] {
        schema["properties"][map]["maxProperties"] = 16.into();
        schema["properties"][map]["additionalProperties"] =
            serde_json::json!({"x-kubernetes-int-or-string": true, "maxLength": 32});
        schema["properties"][map]["x-kubernetes-validations"] = rules(&[(
            "self.all(name, isQuantity(string(self[name])))",
            "must be quantities, such as 500m for CPU or 8Gi for memory",
        )]);
    }
    schema["x-kubernetes-validations"] = rules(&[(
        "!has(self.requests) || !has(self.limits) || self.requests.all(name, !(name in self.limits) || \
         !isQuantity(string(self.requests[name])) || !isQuantity(string(self.limits[name])) || \
         quantity(string(self.requests[name])).compareTo(quantity(string(self.limits[name]))) <= 0)",
        "requests must not exceed limits",
    )]);
    schemars::Schema::try_from(schema).unwrap_or_default()
}

/// Returns the schema of an object with any fields. The API server validates the fields when the operator applies them
/// as part of a pod template.
pub(crate) fn any_object(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({"type": "object", "x-kubernetes-preserve-unknown-fields": true})
}

/// Returns the schema of a number or percentage of the replicas.
pub(crate) fn amount_of_replicas(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    amount(
        "string(self).matches('^[0-9]{1,9}$') ? self == int(string(self)) : string(self).matches('^(100|[1-9]?[0-9])%$')",
        "must be a number of replicas, such as 1, or a percentage up to 100%, such as 25%; a number must not be in quotes",
    )
}

/// Returns the schema of a number or percentage of additional replicas, which may be more than 100%.
pub(crate) fn amount_of_additional_replicas(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    amount(
        "string(self).matches('^[0-9]{1,9}$') ? self == int(string(self)) : string(self).matches('^(0|[1-9][0-9]{0,8})%$')",
        "must be a number of replicas, such as 1, or a percentage, such as 25%; a number must not be in quotes",
    )
}

/// Returns the schema of an `IntOrString` with a rule. `IntOrString` has 32 bits, but its schema has no limits, and
/// kube would make the field nullable: the API server would then store a null instead of the default.
fn amount(rule: &str, message: &str) -> schemars::Schema {
    schemars::json_schema!({
        "x-kubernetes-int-or-string": true,
        "nullable": false,
        "maxLength": 16,
        "x-kubernetes-validations": rules(&[(rule, message)]),
    })
}

/// Returns validation rules: pairs of an expression that must be true and the message if it is false.
pub(crate) fn rules(rules: &[(&str, &str)]) -> serde_json::Value {
    rules.iter().map(|(rule, message)| serde_json::json!({"rule": rule, "message": message})).collect()
}
