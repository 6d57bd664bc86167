//! Tests that the reference in `docs/`, which is generated from the code, is up to date. To update it: `UPDATE_EXPECT=1
//! cargo test -p router --test docs`.

use std::time::Instant;

use clap::{CommandFactory as _, Parser as _};
use expect_test::expect_file;
use process::reference::{flag_sections, metric_table};
use proto::v1alpha1::Load;
use router::discovery::DiscoveredReplica;
use router::{App, Args};

#[test]
fn the_flags_are_described() {
    let mut text = String::from(
        "# Flags of the router\n\nFor operators of routers: every flag of `ovfleet-router`, with its environment variable and its default.\nGenerated from \
         `ovfleet-router --help`. Each flag can also be set by its environment variable. All flags except \
         `--config`\ncan also be set in the file given by `--config`, as a key without the leading dashes.\n",
    );
    text.push_str(&flag_sections(&Args::command(), "Configuration"));
    expect_file!["../../docs/reference/flags-router.md"].assert_eq(&text);
}

#[test]
fn the_metrics_are_described() {
    let args = Args::try_parse_from(["router"]).expect("no option is required");
    let app = App::new(args, None);
    // The registry lists a metric family only if the family has at least one series.
    let found = DiscoveredReplica {
        http: ([127, 0, 0, 1], 1).into(),
        grpc: None,
        name: "replica".to_owned(),
        pod: None,
    };
    let new = app.dispatcher().replicas.update(&[found]).added;
    app.dispatcher().replicas.observe(&new[0], Load { report: 1, ..Load::default() }, Instant::now());
    app.metrics().record_request("models", "ok", http::StatusCode::OK);
    app.metrics().record_retry("connect");
    let mut text = String::from(
        "# Metrics of the router\n\nFor builders of dashboards and alerts: every metric of a router.\nGenerated from the output of `/metrics`.\n\n",
    );
    text.push_str(&metric_table(&app.scrape()));
    expect_file!["../../docs/reference/metrics-router.md"].assert_eq(&text);
}
