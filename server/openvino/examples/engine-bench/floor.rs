//! `floor`: runs the model on the batches of the scheduler, without sampling.

use std::collections::BTreeMap;
use std::time::Instant;

use serde_json::{Value, json};
use server_engine::{ModelRunner, SchedulerConfig};
use server_scheduler::{Batch, Event, NewRequest, SampledToken, Scheduler, StopCriteria};

use crate::scenario::{Generate, Work};
use crate::{Args, Runner};

pub(crate) fn run(args: &Args, mut runner: Runner, scenario: &Generate) -> anyhow::Result<Value> {
    steps(args, &mut runner, &scenario.warmup)?;
    let (steps, output_tokens) = steps(args, &mut runner, &scenario.requests)?;
    let seconds: f64 = steps.iter().sum();
    let nodes = node_times(&runner)?;
    Ok(json!({ "steps": steps, "seconds": seconds, "output_tokens": output_tokens, "nodes": nodes }))
}

/// The mean execution times of the nodes of a step, summed by operation and kernel.
fn node_times(runner: &Runner) -> anyhow::Result<Value> {
    let mut sums = BTreeMap::<(String, String), (usize, f64)>::new();
    for node in runner.node_times()? {
        let (count, seconds) = sums.entry((node.kind, node.kernel)).or_default();
        *count += 1;
        *seconds += node.time.as_secs_f64();
    }
    let row = |((kind, kernel), (count, seconds))| json!({ "kind": kind, "kernel": kernel, "count": count, "seconds": seconds });
    Ok(sums.into_iter().map(row).collect())
}

fn steps(args: &Args, runner: &mut Runner, work: &[Work]) -> anyhow::Result<(Vec<f64>, usize)> {
    let mut scheduler = Scheduler::new(config(args, runner), runner.layout().size());
    let mut produced = vec![0; work.len()];
    let mut submitted = vec![false; work.len()];
    let mut ended = vec![false; work.len()];
    let (mut steps, mut batch, mut sampled, mut events) =
        (Vec::new(), Batch::default(), Vec::new(), Vec::new());
    loop {
        for (index, one) in work.iter().enumerate() {
            let due = one.arrival.is_none_or(|arrival| {
                let other = arrival.after_request;
                ended[other] || produced[other] >= arrival.tokens
            });
            if due && !submitted[index] {
                submitted[index] = true;
                submit(&mut scheduler, index, one)?;
            }
        }
        scheduler.schedule(&mut batch);
        if batch.sequences.is_empty() {
            return Ok((steps, produced.iter().sum()));
        }
        let started = Instant::now();
        runner.run(&batch)?;
        steps.push(started.elapsed().as_secs_f64());
        sampled.clear();
        for id in &batch.samples {
            // The tokens are arbitrary but not all equal.
            let index = id.request as usize;
            sampled.push(SampledToken::new(*id, 100 + (index * 31 + produced[index] * 7) as u32 % 400));
            produced[index] += 1;
        }
        scheduler.commit(&batch, &sampled, &mut events);
        for event in events.drain(..) {
            if let Event::Finished { sequence, .. } = event {
                ended[sequence.request as usize] = true;
            }
        }
    }
}

fn submit(scheduler: &mut Scheduler, index: usize, work: &Work) -> anyhow::Result<()> {
    let stop = StopCriteria { stop_token_ids: Vec::new(), max_tokens: work.max_tokens, min_tokens: 0 };
    let request = NewRequest::new(index as u64, 1, work.prompt.clone(), stop);
    scheduler
        .submit(request)
        .map_err(|rejected| anyhow::anyhow!("request {index} was rejected: {rejected:?}"))
}

pub(crate) fn config(args: &Args, runner: &Runner) -> SchedulerConfig {
    let layout = runner.layout();
    SchedulerConfig {
        max_num_batched_tokens: args.max_num_batched_tokens,
        max_chunk_tokens: args.max_chunk_tokens,
        // The batches must not depend on measured times.
        max_itl: None,
        max_num_seqs: args.max_num_seqs,
        max_queue: 4096,
        max_model_len: layout.block_tokens * (layout.blocks_total - 1),
        prefix_caching: !args.no_prefix_caching,
        kv_eviction_tokens: None,
    }
}
