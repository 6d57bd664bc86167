//! Measures the cost of draft tokens: the times of the model's steps with and without drafts, and those of the draft
//! model's steps. Both models use the same block table. The times determine the acceptance rate above which drafts are
//! worthwhile. `--cut FILE` instead writes a draft model that consists of the first layers of the model.

use std::io::Write as _;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context as _;
use clap::Parser;
use serde_json::json;
use server_engine::ModelRunner;
use server_gguf::GgufFile;
use server_gguf::write::GgufWriter;
use server_openvino::{Config, OpenVinoRunner, load_pair};
use server_scheduler::{Batch, BlockId, ScheduledSequence, SequenceId};

/// Measures step times and prints them as JSON.
#[derive(Debug, Parser)]
struct Args {
    /// A GGUF file, or the directory of an OpenVINO IR.
    #[arg(long)]
    model: PathBuf,
    /// The draft model. The default is the model itself.
    #[arg(long)]
    draft: Option<PathBuf>,
    /// Write the first layers of a GGUF model to this file instead of measuring.
    #[arg(long)]
    cut: Option<PathBuf>,
    /// Number of layers that `--cut` writes.
    #[arg(long, default_value_t = 3)]
    layers: u32,
    /// Numbers of sequences in a step.
    #[arg(long, num_args = 1.., default_values_t = [1, 8, 32])]
    rows: Vec<u32>,
    /// Number of past tokens of each sequence.
    #[arg(long, default_value_t = 256)]
    past: u32,
    /// Number of steps of each kind. The result is the median of their times.
    #[arg(long, default_value_t = 41)]
    steps: u32,
    /// A property for the device's plugin, `KEY=VALUE`. Repeatable.
    #[arg(long)]
    plugin_config: Vec<String>,
}

/// The numbers of draft tokens for which steps of the model are measured, per sequence.
const DRAFTS: [u32; 4] = [0, 1, 2, 4];

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    if let Some(to) = &args.cut {
        return cut(&args.model, to, args.layers);
    }
    let config = config(&args)?;
    let draft = args.draft.clone().unwrap_or_else(|| args.model.clone());
    let draft = Config { model: draft, ..config.clone() };
    let [mut model, mut draft] = load_pair(&config, &draft, &mut |_| {})?.map(|(runner, _)| runner);
    let mut measured = Vec::new();
    for &rows in &args.rows {
        for runner in [&mut model, &mut draft] {
            // Fill the cache with arbitrary tokens, because the times of the steps below do not depend on its content.
            for sequence in 0..rows {
                let step =
                    Step { past: 0, count: args.past, ..Step::new(&args, runner, sequence..sequence + 1) };
                runner.run(&step.batch())?;
            }
        }
        let mut steps = DRAFTS.map(|_| Vec::new());
        let mut runs = Vec::new();
        for _ in 0..args.steps {
            for (times, drafts) in steps.iter_mut().zip(DRAFTS) {
                let step = Step { count: 1 + drafts, drafts, ..Step::new(&args, &model, 0..rows) };
                times.push(step.timed(&mut model)?);
            }
            runs.push(Step::new(&args, &draft, 0..rows).timed(&mut draft)?);
        }
        measured.push(json!({
            "rows": rows,
            "step_seconds": steps.map(median),
            "drafts": DRAFTS,
            "run_seconds": median(runs),
        }));
    }
    writeln!(std::io::stdout(), "{}", serde_json::to_string(&measured)?)?;
    Ok(())
}

fn config(args: &Args) -> anyhow::Result<Config> {
    let plugin_config = args
        .plugin_config
        .iter()
        .map(|one| one.split_once('=').with_context(|| format!("--plugin-config {one} is not KEY=VALUE")))
        .map(|one| one.map(|(key, value)| (key.to_owned(), value.to_owned())))
        .collect::<anyhow::Result<_>>()?;
    Ok(Config { plugin_config, kv_cache_bytes: Some(1 << 30), ..Config::new(args.model.clone()) })
}

/// A step that computes `count` tokens of each sequence, after its `past` tokens that are in the KV cache. The last
/// `drafts` tokens of each sequence are drafts.
struct Step {
    sequences: Range<u32>,
    past: u32,
    count: u32,
    drafts: u32,
    block_tokens: u32,
    /// Number of blocks of each sequence.
    blocks: u32,
}

impl Step {
    fn new(args: &Args, runner: &OpenVinoRunner, sequences: Range<u32>) -> Self {
        let block_tokens = runner.layout().block_tokens;
        let blocks = (args.past + 1 + DRAFTS[DRAFTS.len() - 1]).div_ceil(block_tokens);
        Self { sequences, past: args.past, count: 1, drafts: 0, block_tokens, blocks }
    }

    /// Runs the step, and returns its time in seconds.
    fn timed(&self, runner: &mut OpenVinoRunner) -> anyhow::Result<f64> {
        let batch = self.batch();
        let started = Instant::now();
        runner.run(&batch)?;
        Ok(started.elapsed().as_secs_f64())
    }

    fn batch(&self) -> Batch {
        let &Self { past, count, drafts, .. } = self;
        let mut batch = Batch::default();
        for sequence in self.sequences.clone() {
            let (tokens, blocks) = (batch.tokens.len() as u32, batch.blocks.len() as u32);
            batch
                .tokens
                .extend((past..past + count).map(|position| 100 + (sequence * 31 + position * 7) % 400));
            let used = (past + count).div_ceil(self.block_tokens);
            batch.blocks.extend((0..used).map(|block| BlockId(sequence * self.blocks + block)));
            batch.samples.push(SequenceId::new(sequence.into(), 0));
            batch.sequences.push(ScheduledSequence {
                id: SequenceId::new(sequence.into(), 0),
                computed_tokens: past,
                tokens: tokens..tokens + count,
                blocks: blocks..blocks + used,
                samples: batch.samples.len() as u32 - 1..batch.samples.len() as u32,
                scored_tokens: 0..0,
                num_draft_tokens: drafts,
                evicted_tokens: 0,
                adapter: 0,
            });
        }
        batch
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Writes a new model that consists of the first layers of a model. It has the same vocabulary, and sometimes predicts
/// the same tokens.
fn cut(model: &Path, to: &Path, layers: u32) -> anyhow::Result<()> {
    let file = GgufFile::open(model)?;
    let architecture = file.architecture().context("the model does not specify its architecture")?;
    let mut writer = GgufWriter::new(architecture);
    for (key, value) in file.metadata() {
        writer.metadata(key, value.clone());
    }
    writer.metadata(&format!("{architecture}.block_count"), layers);
    for tensor in file.tensors() {
        let layer = tensor.name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        let is_kept = layer.is_none_or(|(layer, _)| layer.parse::<u32>().is_ok_and(|layer| layer < layers));
        if is_kept {
            let mut bytes = Vec::new();
            file.read_tensor(&tensor.name, &mut bytes)?;
            writer.tensor(&tensor.name, &tensor.shape, tensor.kind, bytes);
        }
    }
    writer.write(to).with_context(|| format!("failed to write {}", to.display()))
}
