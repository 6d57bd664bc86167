//! Tests that the Helm charts render with Helm 3 and Helm 4, validate their values, and grant only the listed
//! permissions. These tests need no node; the node tests install the charts.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use anyhow::{Context as _, bail};
use expect_test::expect_file;
use serde_json::{Value, json};
use tests::cluster::ControlPlane;

const HELMS: [&str; 2] = ["helm3", "helm4"];
/// Kinds of the Prometheus Operator, whose custom resource definitions the API server of the tests does not have.
const FOREIGN: &str = "ServiceMonitor,PrometheusRule";
/// The tested installations: a name for messages, and the arguments.
const WAYS: [(&str, &[&str]); 3] = [
    ("plain", &[]),
    ("everything", &["--values", "tests/tests/charts/everything.yaml"]),
    ("namespaced", &["--values", "tests/tests/charts/namespaced.yaml"]),
];

fn tool(name: &str) -> anyhow::Result<Command> {
    let path = tests::root().join(".deps/tools/bin").join(name);
    if !path.is_file() {
        bail!("{} does not exist: run scripts/tools charts", path.display());
    }
    let mut command = Command::new(path);
    command.current_dir(tests::root()).env("HOME", std::env::temp_dir());
    Ok(command)
}

fn helm(helm: &str, arguments: &[&str]) -> anyhow::Result<Output> {
    tool(helm)?.args(arguments).output().context("failed to run helm")
}

/// Renders the chart with `arguments`.
fn render(version: &str, arguments: &[&str]) -> anyhow::Result<String> {
    let fixed = ["template", "fleet", "charts/ovfleet", "--namespace", "ovfleet", "--kube-version", "1.35"];
    let output = helm(version, &[&fixed, arguments].concat())?;
    if !output.status.success() {
        bail!("{version} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8(output.stdout)?)
}

fn objects(text: &str) -> anyhow::Result<Vec<Value>> {
    use serde::Deserialize as _;
    let mut objects = Vec::new();
    for document in serde_yaml::Deserializer::from_str(text) {
        let object = Value::deserialize(document)?;
        if !object.is_null() {
            objects.push(object);
        }
    }
    Ok(objects)
}

fn field<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

#[test]
fn helm_lint_finds_no_problems() -> anyhow::Result<()> {
    for version in HELMS {
        for chart in ["charts/ovfleet", "charts/ovfleet-crds"] {
            let output = helm(version, &["lint", "--strict", "--kube-version", "1.35", chart])?;
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success(), "{version} {chart}: {said}");
        }
    }
    Ok(())
}

#[test]
fn both_helms_render_the_same() -> anyhow::Result<()> {
    for (way, arguments) in WAYS {
        let name = |object: &Value| {
            format!(
                "{} {}/{}",
                field(object, "/kind"),
                field(object, "/metadata/namespace"),
                field(object, "/metadata/name")
            )
        };
        let by_name = |version| -> anyhow::Result<BTreeMap<String, Value>> {
            Ok(objects(&render(version, arguments)?)?
                .into_iter()
                .map(|object| (name(&object), object))
                .collect())
        };
        assert_eq!(by_name("helm3")?, by_name("helm4")?, "{way}");
    }
    Ok(())
}

/// `helm upgrade --reuse-values` renders this chart with the values of the installed release, whose chart may be older.
#[test]
fn the_values_of_the_previous_chart_still_render() -> anyhow::Result<()> {
    for version in HELMS {
        let text = render(version, &["--set", "upgrades=null"])?;
        assert!(!text.contains("--max-concurrent-upgrades"), "{version}: the operator's default applies");
    }
    Ok(())
}

/// Writes a strict schema of each kind of the API server, in the file layout of kubeconform.
fn write_schemas(open_api: &Value, directory: &Path) -> anyhow::Result<()> {
    let mut definitions = open_api["definitions"].clone();
    for definition in
        definitions.as_object_mut().context("the OpenAPI document has no definitions")?.values_mut()
    {
        if definition.get("properties").is_some() {
            definition["additionalProperties"] = json!(false);
        }
        // The schema declares only the type string, although the format allows both strings and integers.
        if definition["format"] == "int-or-string" {
            *definition = json!({"type": ["string", "integer"]});
        }
    }
    let text = definitions.to_string().replace("#/definitions/", "all.json#/definitions/");
    std::fs::write(directory.join("all.json"), format!("{{\"definitions\":{text}}}"))?;
    for (name, definition) in open_api["definitions"].as_object().into_iter().flatten() {
        for kind in definition["x-kubernetes-group-version-kind"].as_array().into_iter().flatten() {
            let (group, version, kind) =
                (field(kind, "/group"), field(kind, "/version"), field(kind, "/kind"));
            let group = group.split('.').next().filter(|group| !group.is_empty());
            let suffix = group.map_or_else(|| version.to_owned(), |group| format!("{group}-{version}"));
            let all = directory.join("all.json");
            let schema = json!({"$ref": format!("file://{}#/definitions/{name}", all.display())});
            let file = format!("{}-{suffix}.json", kind.to_lowercase());
            std::fs::write(directory.join(file), schema.to_string())?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn rendered_objects_match_the_schemas_of_the_api_server() -> anyhow::Result<()> {
    let plane = ControlPlane::start().await?;
    let request = http::Request::get("/openapi/v2").body(Vec::new())?;
    let open_api: Value = plane.client().await?.request(request).await?;
    let schemas = tempfile::tempdir()?;
    write_schemas(&open_api, schemas.path())?;
    let location = format!("{}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json", schemas.path().display());
    let check = |text: &str| -> anyhow::Result<Output> {
        use std::io::Write as _;
        let arguments = ["-strict", "-summary", "-skip", FOREIGN, "-schema-location", &location];
        let mut child =
            tool("kubeconform")?.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        child.stdin.take().context("no input")?.write_all(text.as_bytes())?;
        Ok(child.wait_with_output()?)
    };
    for (way, arguments) in WAYS {
        let output = check(&render("helm4", arguments)?)?;
        assert!(output.status.success(), "{way}: {}", String::from_utf8_lossy(&output.stdout));
    }
    // The check finds an invalid object.
    let right = render("helm4", &[])?;
    let wrong = right.replace("serviceAccountName:", "serviceAcountName:");
    assert!(!check(&wrong)?.status.success());
    Ok(())
}

#[tokio::test]
async fn samples_and_objects_in_pages_are_valid() -> anyhow::Result<()> {
    let plane = ControlPlane::start().await?;
    let kubectl = |arguments: &[&str]| -> anyhow::Result<Output> {
        Ok(plane.kubectl(arguments)?.current_dir(tests::root()).output()?)
    };
    for arguments in [
        ["apply", "--server-side", "--filename", "crds/llmdeployments.yaml"],
        ["wait", "--for=condition=Established", "--timeout=60s", "crd/llmdeployments.ovfleet.dev"],
    ] {
        let output = kubectl(&arguments)?;
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    for entry in tests::root().join("deploy/samples").read_dir()? {
        let path = entry?.path();
        let path = path.to_string_lossy();
        let output = kubectl(&["apply", "--dry-run=server", "--validate=strict", "--filename", &path])?;
        assert!(output.status.success(), "{path}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let objects = objects_in_pages()?;
    assert!(objects.len() > 8, "the pages show {} objects", objects.len());
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("object.yaml");
    for (page, object) in objects {
        std::fs::write(&file, object.to_string())?;
        let path = file.to_string_lossy();
        let output = kubectl(&["apply", "--dry-run=server", "--validate=strict", "--filename", &path])?;
        assert!(output.status.success(), "{page}: {}\n{object}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// Returns the Kubernetes objects in the README, the tutorials and the how-to guides whose kinds the API server knows,
/// each with the path of its page. A block that contains only a `spec` becomes an LLMDeployment with this `spec`.
fn objects_in_pages() -> anyhow::Result<Vec<(String, Value)>> {
    // The API server of the test has no definitions of the other kinds in the pages, such as HTTPRoute.
    const KINDS: [&str; 3] = ["LLMDeployment", "HorizontalPodAutoscaler", "Ingress"];
    const PLACEHOLDERS: [(&str, &str); 3] =
        [("OWNER/NAME", "owner/name"), ("NAMESPACE", "namespace"), ("NAME", "name")];
    let tree = tests::tidy::Tree::read(&tests::root())?;
    let is_for_users = |path: &str| {
        path == "README.md"
            || ["docs/tutorials/", "docs/how-to/"].iter().any(|directory| path.starts_with(directory))
    };
    let mut objects = Vec::new();
    for page in tree.files.iter().filter(|file| is_for_users(&file.path)) {
        for block in page.text.split("```yaml\n").skip(1) {
            let (block, _) = block
                .split_once("```")
                .with_context(|| format!("{}: a code block is not closed", page.path))?;
            let text =
                PLACEHOLDERS.iter().fold(block.to_owned(), |text, (name, value)| text.replace(name, value));
            let mut object: Value = serde_yaml::from_str(&text).with_context(|| page.path.clone())?;
            let is_part = object.as_object().is_some_and(|object| object.keys().eq(["spec"]));
            if is_part {
                object["apiVersion"] = json!("ovfleet.dev/v1alpha1");
                object["kind"] = json!("LLMDeployment");
                object["metadata"] = json!({"name": "chat"});
                if object["spec"]["model"]["source"].is_null() {
                    object["spec"]["model"]["source"] = json!({"hf": {"repo": "owner/name"}});
                }
            }
            if object["kind"].as_str().is_some_and(|kind| KINDS.contains(&kind)) {
                objects.push((page.path.clone(), object));
            }
        }
    }
    Ok(objects)
}

#[test]
fn unknown_values_are_rejected() -> anyhow::Result<()> {
    for version in HELMS {
        for (wrong, named) in [
            ("image.tg=x", "tg"),
            ("watch.namespaces=x", "namespaces"),
            ("watch.namespaces[0]=Not_A_Name", "namespaces"),
            ("log.format=xml", "format"),
            ("replicas=-1", "replicas"),
            ("networkPolicy.apiServerPorts[0]=0", "apiServerPorts"),
            ("upgrades.maxConcurrent=0", "maxConcurrent"),
            // The span exporter does not support TLS, so the operator would not start.
            ("tracing.endpoint=https://collector:4317", "endpoint"),
        ] {
            let error = render(version, &["--set", wrong]).expect_err(wrong).to_string();
            assert!(error.contains(named), "{version} {wrong}: {error}");
        }
    }
    Ok(())
}

/// A NetworkPolicy applies to the ports of the API server's endpoints: 443 or 6443 on most clusters, 8443 on minikube
/// and 16443 on MicroK8s.
#[test]
fn the_operator_reaches_the_api_server_of_common_clusters() -> anyhow::Result<()> {
    for version in HELMS {
        let ports = ports_to_any_address(version, &[])?;
        for port in [443, 6443, 8443, 16443] {
            assert!(ports.contains(&port), "{version} {port}: {ports:?}");
        }
    }
    Ok(())
}

#[test]
fn the_operator_reaches_the_port_of_its_trace_collector() -> anyhow::Result<()> {
    for version in HELMS {
        let others = ports_to_any_address(version, &[])?;
        for (endpoint, port) in [
            ("http://collector:4317", 4317),
            ("http://[2001:db8::1]:4317", 4317),
            ("http://collector.tracing/a:9/b", 80),
            ("http://[2001:db8::1]", 80),
            ("http://name:123@collector", 80),
        ] {
            let ports =
                ports_to_any_address(version, &["--set-string", &format!("tracing.endpoint={endpoint}")])?;
            let added: Vec<&u64> = ports.difference(&others).collect();
            assert_eq!(added, [&port], "{version} {endpoint}");
        }
    }
    Ok(())
}

/// Returns the TCP ports to which the operator's NetworkPolicy allows connections regardless of the address.
fn ports_to_any_address(version: &str, arguments: &[&str]) -> anyhow::Result<BTreeSet<u64>> {
    let objects = objects(&render(version, arguments)?)?;
    let policy =
        objects.iter().find(|object| object["kind"] == "NetworkPolicy").context("no NetworkPolicy")?;
    // A rule without `to` applies to any address.
    let rules = policy["spec"]["egress"].as_array().into_iter().flatten();
    let ports = rules.filter(|rule| rule["to"].is_null()).flat_map(|rule| rule["ports"].as_array()).flatten();
    Ok(ports.filter(|port| port["protocol"] == "TCP").filter_map(|port| port["port"].as_u64()).collect())
}

#[test]
fn a_namespaced_install_creates_no_cluster_scoped_objects() -> anyhow::Result<()> {
    let objects = objects(&render("helm4", WAYS[2].1)?)?;
    let namespaces: BTreeSet<&str> =
        objects.iter().map(|object| field(object, "/metadata/namespace")).collect();
    assert_eq!(namespaces, BTreeSet::from(["ovfleet", "team-a", "team-b"]));
    for object in &objects {
        assert!(!field(object, "/kind").starts_with("Cluster"), "{object}");
    }
    Ok(())
}

#[test]
fn openshift_chooses_the_user_of_the_operator() -> anyhow::Result<()> {
    let user = |arguments: &[&str]| -> anyhow::Result<Value> {
        let objects = objects(&render("helm4", arguments)?)?;
        let deployment =
            objects.iter().find(|object| object["kind"] == "Deployment").context("no Deployment")?;
        Ok(deployment["spec"]["template"]["spec"]["securityContext"]["runAsUser"].clone())
    };
    assert_eq!(user(&[])?, json!(65532));
    assert_eq!(user(&["--api-versions", "security.openshift.io/v1"])?, Value::Null);
    Ok(())
}

/// The images are built for one architecture.
#[test]
fn the_operator_runs_on_nodes_with_the_architecture_of_its_image() -> anyhow::Result<()> {
    let cases: [(&[&str], Value); 3] = [
        (&[], json!({"kubernetes.io/arch": "amd64"})),
        (&["--set", "nodeSelector.disk=fast"], json!({"disk": "fast", "kubernetes.io/arch": "amd64"})),
        (&["--set", r"nodeSelector.kubernetes\.io/arch=arm64"], json!({"kubernetes.io/arch": "arm64"})),
    ];
    for version in HELMS {
        for (arguments, selector) in &cases {
            let objects = objects(&render(version, arguments)?)?;
            let deployment =
                objects.iter().find(|object| object["kind"] == "Deployment").context("no Deployment")?;
            let pod = &deployment["spec"]["template"]["spec"];
            assert_eq!(&pod["nodeSelector"], selector, "{version} {arguments:?}");
        }
    }
    Ok(())
}

#[test]
fn empty_values_and_names_like_numbers_render_valid_objects() -> anyhow::Result<()> {
    let empty = ["image.pullPolicy", "log.level", "log.format"].map(|value| format!("--set={value}=null"));
    let mut arguments = vec!["--namespace=7", "--set-string=watch.namespaces={123}"];
    arguments.extend(empty.iter().map(String::as_str));
    for version in HELMS {
        let objects = objects(&render(version, &arguments)?)?;
        let namespaces = objects.iter().filter_map(|object| object["metadata"].get("namespace"));
        assert!(namespaces.clone().count() > 0);
        assert!(namespaces.clone().all(|namespace| namespace == "7" || namespace == "123"));
        let args = objects
            .iter()
            .find_map(|object| object.pointer("/spec/template/spec/containers/0/args")?.as_array().cloned());
        let args = args.context("no operator")?;
        assert!(args.iter().all(|arg| arg.as_str().is_some_and(|arg| !arg.ends_with('='))), "{args:?}");
        let no_ports = ["--set=networkPolicy.enabled=true,networkPolicy.apiServerPorts=null"];
        assert!(render(version, &no_ports).is_err(), "a rule without ports would allow all of them");
    }
    Ok(())
}

#[test]
fn the_operator_can_change_its_own_lease_only() -> anyhow::Result<()> {
    let objects = objects(&render("helm4", &[])?)?;
    let rules = objects.iter().filter(|object| object["kind"] == "Role");
    let rules = rules.flat_map(|role| role["rules"].as_array().cloned().unwrap_or_default());
    for rule in rules.filter(|rule| rule["resources"] == json!(["leases"])) {
        let is_create = rule["verbs"] == json!(["create"]);
        assert!(is_create || rule["resourceNames"] == json!(["fleet"]), "{rule}");
    }
    Ok(())
}

#[test]
fn a_copy_of_the_chart_of_the_definition_is_self_contained() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let chart = directory.path().join("ovfleet-crds");
    let copied = Command::new("cp")
        .args(["-R", "-P", "charts/ovfleet-crds"])
        .arg(&chart)
        .current_dir(tests::root())
        .status()?;
    assert!(copied.success());
    for version in HELMS {
        let output =
            helm(version, &["template", "crds", &chart.to_string_lossy(), "--kube-version", "1.35"])?;
        assert!(output.status.success(), "{version}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(String::from_utf8_lossy(&output.stdout).contains("kind: CustomResourceDefinition"));
    }
    Ok(())
}

/// Alerts and panels about requests and replicas must not aggregate over several LLMDeployments.
#[test]
fn alerts_and_panels_are_for_each_model() -> anyhow::Result<()> {
    let read = |file: &str| std::fs::read_to_string(tests::root().join("charts/ovfleet").join(file));
    let alerts: Value = serde_yaml::from_str(&read("alerts/ovfleet.yaml")?)?;
    let dashboard: Value = serde_json::from_str(&read("dashboards/ovfleet.json")?)?;
    let mut expressions = Vec::new();
    for rule in alerts["groups"][0]["rules"].as_array().into_iter().flatten() {
        expressions.push(field(rule, "/expr").to_owned());
    }
    for panel in dashboard["panels"].as_array().into_iter().flatten() {
        let targets = panel["targets"].as_array().into_iter().flatten();
        expressions.extend(targets.map(|target| field(target, "/expr").to_owned()));
    }
    assert!(expressions.len() > 40, "{expressions:#?}");
    for expression in expressions.iter().filter(|expression| !expression.contains("ovfleet_operator_")) {
        // An expression that does not aggregate retains all labels.
        assert!(
            expression.contains("llmdeployment") || !expression.contains("sum"),
            "{expression} aggregates over all models"
        );
    }
    Ok(())
}

/// For each alert, test vectors show when it fires, with which text, and when it does not fire.
#[test]
fn alerts_fire_only_under_their_conditions() -> anyhow::Result<()> {
    const VECTORS: &str = "tests/tests/charts/alerts.yaml";
    let output = tool("promtool")?.args(["test", "rules", VECTORS]).output()?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let read = |file: &str| std::fs::read_to_string(tests::root().join(file));
    let rules: Value = serde_yaml::from_str(&read("charts/ovfleet/alerts/ovfleet.yaml")?)?;
    let vectors: Value = serde_yaml::from_str(&read(VECTORS)?)?;
    let tests = vectors["tests"].as_array().into_iter().flatten();
    let tests: Vec<&Value> = tests.flat_map(|test| test["alert_rule_test"].as_array()).flatten().collect();
    for rule in rules["groups"][0]["rules"].as_array().into_iter().flatten() {
        let of_rule = || tests.iter().filter(|test| test["alertname"] == rule["alert"]);
        let fires = |test: &&&Value| test["exp_alerts"].as_array().is_some_and(|alerts| !alerts.is_empty());
        assert!(of_rule().any(|test| fires(&test)), "no test vector shows that {} fires", rule["alert"]);
        assert!(
            of_rule().any(|test| !fires(&test)),
            "no test vector shows when {} does not fire",
            rule["alert"]
        );
    }
    Ok(())
}

#[test]
fn uninstalling_retains_the_resource_definition() -> anyhow::Result<()> {
    let objects = objects(&render("helm4", &[])?)?;
    let crd = objects.iter().find(|object| object["kind"] == "CustomResourceDefinition").context("no CRD")?;
    assert_eq!(crd["metadata"]["annotations"]["helm.sh/resource-policy"], "keep");
    Ok(())
}

#[test]
fn operator_replicas_set_by_others_are_not_reverted() -> anyhow::Result<()> {
    let replicas = |arguments: &[&str]| -> anyhow::Result<Value> {
        let objects = objects(&render("helm4", arguments)?)?;
        let deployment =
            objects.iter().find(|object| object["kind"] == "Deployment").context("no Deployment")?;
        Ok(deployment["spec"]["replicas"].clone())
    };
    assert_eq!(replicas(&[])?, Value::Null);
    assert_eq!(replicas(&["--set", "replicas=3"])?, json!(3));
    Ok(())
}

/// Lists each role and, on one line for each resource, the verbs that it permits.
fn rights(objects: &[Value]) -> String {
    let mut lines = Vec::new();
    for role in objects.iter().filter(|object| field(object, "/kind").ends_with("Role")) {
        lines.push(format!("{} {}", field(role, "/kind"), field(role, "/metadata/name")));
        for rule in role["rules"].as_array().into_iter().flatten() {
            let words = |name: &str| -> Vec<&str> {
                rule[name].as_array().into_iter().flatten().filter_map(Value::as_str).collect()
            };
            for group in words("apiGroups") {
                for resource in words("resources") {
                    lines.push(format!(
                        "  {resource} ({}): {}",
                        if group.is_empty() { "core" } else { group },
                        words("verbs").join(" ")
                    ));
                }
            }
        }
    }
    lines.join("\n") + "\n"
}

#[test]
fn permissions_are_those_listed_and_none_is_dangerous() -> anyhow::Result<()> {
    let rights = rights(&objects(&render("helm4", &[])?)?);
    for forbidden in ["pods/exec", "pods/attach", "*", "escalate", "bind ", "impersonate", "nodes"] {
        assert!(!rights.contains(forbidden), "the rights include {forbidden}:\n{rights}");
    }
    // The operator creates the Secret with the replica token, but never reads it.
    for right in rights.lines().filter(|right| right.contains("secrets")) {
        assert_eq!(right, "  secrets (core): create");
    }
    expect_file!["charts/rights.txt"].assert_eq(&rights);
    Ok(())
}

#[test]
fn dashboard_and_alerts_use_metrics_that_exist() -> anyhow::Result<()> {
    let mut known = BTreeSet::new();
    for entry in tests::root().join("docs/reference").read_dir()? {
        let path = entry?.path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("metrics")) {
            known.extend(metric_names(&std::fs::read_to_string(path)?));
        }
    }
    for file in ["dashboards/ovfleet.json", "alerts/ovfleet.yaml"] {
        let text = std::fs::read_to_string(tests::root().join("charts/ovfleet").join(file))?;
        let used = metric_names(&text);
        assert!(used.len() > 5, "{file} uses {used:?}");
        for name in used {
            let base = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
            assert!(known.contains(&name) || base.is_some_and(|base| known.contains(base)), "{file}: {name}");
        }
    }
    Ok(())
}

#[test]
fn every_alert_has_a_runbook_and_a_row_in_the_reference() -> anyhow::Result<()> {
    let read = |path: &str| std::fs::read_to_string(tests::root().join(path));
    let rules = read("charts/ovfleet/alerts/ovfleet.yaml")?;
    let alerts: BTreeSet<&str> =
        rules.lines().filter_map(|line| line.trim_start().strip_prefix("- alert: ")).collect();
    assert!(alerts.len() > 5, "{alerts:?}");
    let runbooks = read("docs/how-to/runbooks.md")?;
    let headings: BTreeSet<&str> = runbooks.lines().filter_map(|line| line.strip_prefix("## ")).collect();
    assert_eq!(headings, alerts, "the headings of the runbooks are the names of the alerts");
    let reference = read("docs/reference/alerts.md")?;
    let rows: BTreeSet<&str> = reference
        .lines()
        .filter_map(|line| line.strip_prefix("| [")?.split_once(']').map(|(name, _)| name))
        .collect();
    assert_eq!(rows, alerts, "the reference lists each alert once");
    Ok(())
}

fn metric_names(text: &str) -> BTreeSet<String> {
    text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_')
        .filter(|word| {
            ["server", "router", "operator"]
                .iter()
                .any(|product| word.starts_with(&format!("ovfleet_{product}_")))
        })
        .map(str::to_owned)
        .collect()
}
