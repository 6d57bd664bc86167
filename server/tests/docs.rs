//! The reference in `docs/` is generated from the code: `UPDATE_EXPECT=1 cargo test -p server --test docs`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use clap::{Arg, CommandFactory as _};
use expect_test::expect_file;
use server::{App, Args, Limits, Metrics};
use tower::ServiceExt as _;

#[test]
fn the_flags_are_described() {
    let mut text = String::from(
        "# Flags of the server\n\nGenerated from `server --help`. Each can also be given by its environment variable.\n",
    );
    let command = Args::command();
    let mut sections: Vec<(String, Vec<&Arg>)> = Vec::new();
    for argument in command.get_arguments().filter(|argument| argument.get_env().is_some()) {
        let heading = argument.get_help_heading().unwrap_or("Model").to_owned();
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
    expect_file!["../../docs/reference/flags-server.md"].assert_eq(&text);
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

#[tokio::test]
async fn the_metrics_are_described() {
    let metrics = Metrics::new("MODEL", "BACKEND");
    let limits = Limits {
        body_bytes_max: 1,
        requests_max: 1,
        connections_max: 1,
        read_timeout: Duration::from_secs(1),
    };
    let app = App::new(limits, metrics.clone());
    // A family shows itself once it has a member.
    let bad = Request::post("/v1/completions").body(Body::from("{")).expect("a request");
    server::router(app.clone()).oneshot(bad).await.expect("an answer");
    let scrape = metrics.scrape(&app);
    let mut kinds = BTreeMap::new();
    let mut text =
        String::from("# Metrics of the server\n\nGenerated from what `/metrics` says of itself.\n\n");
    text.push_str("| name | type | |\n|---|---|---|\n");
    for line in scrape.lines() {
        if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            kinds.insert(name.to_owned(), kind.to_owned());
        }
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            text.push_str(&format!("| `{name}` | KIND-OF-{name} | {} |\n", help.trim_end_matches('.')));
        }
    }
    for (name, kind) in kinds {
        // What OpenMetrics adds to the names of samples.
        let suffix = match kind.as_str() {
            "counter" => "_total",
            "info" => "_info",
            _ => "",
        };
        text = text.replace(&format!("`{name}` | KIND-OF-{name} |"), &format!("`{name}{suffix}` | {kind} |"));
    }
    expect_file!["../../docs/reference/metrics.md"].assert_eq(&text);
}
