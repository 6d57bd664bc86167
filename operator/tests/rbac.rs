//! Compares the operator's permissions in the chart with an expected list, so that the test fails if a permission is
//! added or removed.

use expect_test::expect;
use serde_json::Value;

#[test]
fn the_operator_has_these_rights_and_cannot_read_or_change_secrets() {
    let chart = concat!(env!("CARGO_MANIFEST_DIR"), "/../charts/ovfleet/templates/_helpers.tpl");
    let text = std::fs::read_to_string(chart).unwrap();
    let rules = text
        .split("{{- define \"ovfleet.rules\" -}}")
        .nth(1)
        .and_then(|rest| rest.split("{{- end }}").next());
    let rules: Vec<Value> = serde_yaml::from_str(rules.unwrap()).unwrap();
    let list = |value: &Value| {
        let items = value.as_array().unwrap().iter().map(|item| item.as_str().unwrap());
        items.collect::<Vec<_>>().join(",")
    };
    let mut lines = String::new();
    for rule in &rules {
        let (groups, resources, verbs) =
            (list(&rule["apiGroups"]), list(&rule["resources"]), list(&rule["verbs"]));
        if resources.contains("secrets") {
            assert_eq!((resources.as_str(), verbs.as_str()), ("secrets", "create"));
        }
        for forbidden in [
            "*",
            "pods/exec",
            "pods/attach",
            "pods/portforward",
            "pods/proxy",
            "escalate",
            "bind",
            "impersonate",
        ] {
            assert!(
                !format!(",{resources},{verbs},{groups},").contains(&format!(",{forbidden},")),
                "{forbidden}"
            );
        }
        lines += &format!("{groups} {resources}: {verbs}\n");
    }
    expect![[r#"
        ovfleet.dev llmdeployments: get,list,watch
        ovfleet.dev llmdeployments/status: patch
        ovfleet.dev llmdeployments/finalizers: update
         configmaps,persistentvolumeclaims,serviceaccounts,services: get,list,watch,create,patch,delete
         secrets: create
        apps deployments: get,list,watch,create,patch,delete
        batch jobs: get,list,watch,create,patch,delete
        policy poddisruptionbudgets: get,list,watch,create,patch,delete
        networking.k8s.io networkpolicies: get,list,watch,create,patch,delete
        rbac.authorization.k8s.io roles,rolebindings: get,list,watch,create,patch,delete
        monitoring.coreos.com servicemonitors: get,list,watch,create,patch,delete
         pods: get,list,watch
         pods/status: patch
        discovery.k8s.io endpointslices: get,list,watch
        events.k8s.io events: create,patch
         events: list,watch
    "#]]
    .assert_eq(&lines);
}
