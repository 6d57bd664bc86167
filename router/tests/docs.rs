//! The reference in `docs/` is generated from the code: `UPDATE_EXPECT=1 cargo test -p router --test docs`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Instant;

use clap::{Arg, CommandFactory as _, Parser as _};
use expect_test::expect_file;
use proto::v1alpha1::Load;
use router::discovery::DiscoveredReplica;
use router::{App, Args};

#[test]
fn the_flags_are_described() {
    let mut text = String::from(
        "# Flags of the router\n\nFor operators of routers: every flag of `ovfleet-router`, with its environment variable and its default.\nGenerated from \
         `ovfleet-router --help`. Each can also be given by its environment \
         variable. All except `--config`\ncan be given in the file that `--config` names, as a key without the leading dashes.\n",
    );
    let command = Args::command();
    let mut sections: Vec<(String, Vec<&Arg>)> = Vec::new();
    for argument in command.get_arguments().filter(|argument| argument.get_env().is_some()) {
        let heading = argument.get_help_heading().unwrap_or("Configuration").to_owned();
        match sections.iter_mut().find(|(known, _)| *known == heading) {
            Some((_, arguments)) => arguments.push(argument),
            None => sections.push((heading, vec![argument])),
        }
    }
    for (heading, arguments) in sections {
        let _ = write!(text, "\n## {heading}\n\n| flag | environment | default | |\n|---|---|---|---|\n");
        for argument in arguments {
            text.push_str(&row(argument));
        }
    }
    expect_file!["../../docs/reference/flags-router.md"].assert_eq(&text);
}

fn row(argument: &Arg) -> String {
    let long = argument.get_long().expect("every argument is a flag");
    let environment = argument.get_env().map(|name| name.to_string_lossy()).unwrap_or_default();
    let default: Vec<_> = argument.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    let default = if default.is_empty() { String::new() } else { format!("`{}`", default.join(" ")) };
    let help = argument.get_long_help().or(argument.get_help()).map(ToString::to_string).unwrap_or_default();
    let mut help = help.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|");
    for value in argument.get_possible_values().iter().filter(|_| argument.get_action().takes_values()) {
        let meaning = value.get_help().map(ToString::to_string).unwrap_or_default();
        let end = if help.ends_with('.') { "" } else { "." };
        let _ = write!(help, "{end} `{}`: {meaning}", value.get_name());
    }
    format!("| `--{long}` | `{environment}` | {default} | {help} |\n")
}

#[test]
fn the_metrics_are_described() {
    let args = Args::try_parse_from(["router"]).expect("no option is required");
    let app = App::new(args, None);
    // A family is listed only if it has a member.
    let found = DiscoveredReplica {
        http: ([127, 0, 0, 1], 1).into(),
        grpc: None,
        name: "replica".to_owned(),
        pod: None,
    };
    let new = app.dispatch().replicas.update(&[found]).added;
    app.dispatch().replicas.observe(&new[0], Load { report: 1, ..Load::default() }, Instant::now());
    app.metrics().record_request("models", "ok", http::StatusCode::OK);
    app.metrics().record_retry("connect");
    let scrape = app.scrape();
    let mut kinds = BTreeMap::new();
    let mut helps = Vec::new();
    for line in scrape.lines() {
        if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            kinds.insert(name, kind);
        }
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            helps.push((name, help.trim_end_matches('.')));
        }
    }
    let mut text = String::from(
        "# Metrics of the router\n\nFor builders of dashboards and alerts: every metric of a router.\nGenerated from the output of `/metrics`.\n\n",
    );
    text.push_str("| name | type | |\n|---|---|---|\n");
    for (name, help) in helps {
        // OpenMetrics adds these suffixes to the names of samples.
        let suffix = match kinds[name] {
            "counter" => "_total",
            "info" => "_info",
            _ => "",
        };
        let _ = writeln!(text, "| `{name}{suffix}` | {} | {help} |", kinds[name]);
    }
    expect_file!["../../docs/reference/metrics-router.md"].assert_eq(&text);
}
