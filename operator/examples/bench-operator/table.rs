//! Formats the result as a table.

use std::time::Duration;

use crate::process::Sample;

/// The measured figures.
#[derive(Debug)]
pub(crate) struct Figures {
    pub(crate) resources: usize,
    /// The total number of objects that the resources own, excluding Secrets and pods.
    pub(crate) objects: usize,
    /// The time until all resources were created.
    pub(crate) created: Duration,
    /// The time until all resources were ready.
    pub(crate) converged: Duration,
    pub(crate) idle: Duration,
    /// Samples taken before the first resource was created, once all resources were ready, and at the start and the end
    /// of the idle time.
    pub(crate) samples: [Sample; 4],
}

impl Figures {
    pub(crate) fn markdown(&self) -> String {
        let [before, after, calm, last] = &self.samples;
        let count = self.resources as f64;
        let idle = self.idle.as_secs_f64();
        let calls = |at: usize| (after.calls[at] - before.calls[at]) / count;
        let idle_calls: f64 = (0..3).map(|at| last.calls[at] - calm.calls[at]).sum();
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let in_idleness = format!("processor usage of the idle operator over {idle:.0} s");
        let rows = [
            ("time until all resources were created", format!("{:.1} s", self.created.as_secs_f64())),
            ("time until all resources were `Ready`", format!("{:.1} s", self.converged.as_secs_f64())),
            ("objects owned by a resource", format!("{:.1}", self.objects as f64 / count)),
            (
                "API calls per resource until then: for its objects, its status, the gates of its pods",
                format!("{:.1}, {:.1}, {:.1}", calls(0), calls(1), calls(2)),
            ),
            (
                "reconciles per resource until then",
                format!("{:.1}", (after.reconciles - before.reconciles) / count),
            ),
            (
                "processor time of the operator until then",
                format!("{:.1} s", after.processor - before.processor),
            ),
            (
                "memory of the operator: without resources, with all resources, maximum",
                format!("{:.0}, {:.0}, {:.0} MiB", before.memory[0], last.memory[0], last.memory[1]),
            ),
            (
                in_idleness.as_str(),
                format!("{:.2}% of one processor", (last.processor - calm.processor) / idle * 100.0),
            ),
            ("API calls in that time, for all resources", format!("{idle_calls:.0}")),
        ];
        let mut text = format!(
            "{} LLMDeployments with one replica and one router each, created at the same time. The operator shares \
             {processors} processors with the API server, etcd and the controllers.\n\n| | |\n|---|---|\n",
            self.resources
        );
        for (name, value) in &rows {
            text.push_str(&format!("| {name} | {value} |\n"));
        }
        text
    }
}
