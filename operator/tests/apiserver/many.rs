//! Many resources at once: how long they take, and what that costs.

use std::time::Instant;

use futures_util::future::join_all;
use kube::api::ListParams;
use operator::manifest::Kind;
use serde_json::json;

use crate::support::{Stage, eventually, smallest};

const COUNT: usize = 300;

/// Processor time of this process, in seconds.
fn processor_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    let ticks: f64 = fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap();
    ticks / 100.0
}

fn resident_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
}

#[tokio::test]
#[ignore = "takes a minute, and states numbers instead of judging them"]
async fn three_hundred_resources_become_what_they_should() {
    let stage = Stage::new("many").await;
    let before = (resident_mib(), processor_seconds());
    let begun = Instant::now();
    let spec = || {
        let mut spec = smallest();
        spec["replicas"] = json!(0);
        spec
    };
    let created = (0..COUNT).map(|number| {
        let stage = &stage;
        async move { stage.apply(&format!("chat-{number}"), spec()).await.unwrap() }
    });
    join_all(created).await;
    eprintln!("{COUNT} created in {:.1?}", begun.elapsed());
    let settled = async || {
        let list = stage.resources().list(&ListParams::default()).await.unwrap();
        let done = list.items.iter().filter(|object| {
            let status = object.status.as_ref();
            status.is_some_and(|status| {
                status.conditions.iter().any(|known| known.type_ == "ReplicasReady" && known.status == "True")
                    && status
                        .conditions
                        .iter()
                        .any(|known| known.type_ == "RouterReady" && known.status == "True")
            })
        });
        (done.count() == COUNT).then_some(())
    };
    eventually(settled).await.expect("all settle");
    let took = begun.elapsed();
    let mut calls = 0;
    for kind in Kind::BUILT_IN {
        calls += stage.metrics.calls("apply", kind.name()) + stage.metrics.calls("get", kind.name());
    }
    let statuses = stage.metrics.calls("apply_status", "LLMDeployment");
    eprintln!(
        "{COUNT} settled {took:.1?} after the first was created; for each {:.1} calls for objects and {:.1} for the \
         status; {} MiB more, {:.1} s of processor (the tests' kubelet included)",
        calls as f64 / COUNT as f64,
        statuses as f64 / COUNT as f64,
        resident_mib() - before.0,
        processor_seconds() - before.1,
    );
}
