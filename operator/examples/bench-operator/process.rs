//! Reads the resource usage of the operator from the kernel, and the amount of its work from its metrics.

use anyhow::Context as _;
use tests::http;

/// Number of clock ticks per second. Linux reports processor time in clock ticks.
const TICKS: f64 = 100.0;

/// The resource usage and the amount of work of the operator up to a point in time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sample {
    /// Processor time in seconds.
    pub(crate) processor: f64,
    /// The current and the maximum memory in MiB.
    pub(crate) memory: [f64; 2],
    /// The numbers of API calls for objects, for statuses of resources, and for pods.
    pub(crate) calls: [f64; 3],
    /// The number of reconciles.
    pub(crate) reconciles: f64,
}

impl Sample {
    /// Takes a sample of process `id`, whose metrics are at `address`.
    pub(crate) async fn take(id: u32, address: &str) -> anyhow::Result<Self> {
        let read = |name: &str| {
            let path = format!("/proc/{id}/{name}");
            std::fs::read_to_string(&path).with_context(|| format!("failed to read {path}"))
        };
        let stat = read("stat")?;
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
        let ticks = |at: usize| fields.get(at).and_then(|text| text.parse::<f64>().ok()).unwrap_or(0.0);
        let status = read("status")?;
        let kib = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
            line.trim().trim_end_matches(" kB").parse::<f64>().unwrap_or(0.0)
        };
        let page = http::get(&format!("http://{address}/metrics")).await?;
        let page = page.body.as_str().context("the response to GET /metrics is not text")?.to_owned();
        let mut calls = [0.0; 3];
        for line in page.lines().filter_map(|line| line.strip_prefix("ovfleet_operator_api_calls_total{")) {
            let value: f64 = line.rsplit(' ').next().and_then(|text| text.parse().ok()).unwrap_or(0.0);
            let at = match line {
                _ if line.contains("kind=\"LLMDeployment\"") => 1,
                _ if line.contains("kind=\"Pod\"") => 2,
                _ => 0,
            };
            calls[at] += value;
        }
        Ok(Self {
            processor: (ticks(11) + ticks(12)) / TICKS,
            memory: [kib("VmRSS:") / 1024.0, kib("VmHWM:") / 1024.0],
            calls,
            reconciles: http::metric(&page, "ovfleet_operator_reconciles_total").unwrap_or(0.0),
        })
    }
}
