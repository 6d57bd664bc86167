//! Runs a script against a scheduler and writes down what it does.
//!
//! ```text
//! submit 1,2 abcd max=3     sequences 1 and 2 continue the prompt "abcd" (a letter is a token, a*9 is nine)
//!        min=1 stop=xy      the rest of the stop rule
//!        root=7             what its first block follows
//!        adapter=1          what it is computed with besides
//!        tenant=2           whose request it is
//!        scores=prompt      the logits of the prompt are wanted
//!        go=in-step         they take their tokens together
//! step 1=x                  a step, in which sequence 1 samples x; those not named sample z
//! step 2<1=x                … sequence 2 goes on from the tokens of 1
//! draft 1 xy                the next row of sequence 1 may have these drafts,
//! step 1=1z                 of which one is accepted, and z sampled after it
//! step 1=?                  sequence 1 is suspended: its next token is not known yet
//! resume 1=x                it is x
//! steps 9                   as many steps, of which only events are written down
//! schedule                  the first half of a step,
//! commit 1=x                and the second
//! fail                      a step that fails, or the second half of one
//! abort 1
//! load
//! ```
//! A row `1: 8+4 [0 3 2] -> 1,2` computes 4 tokens of sequence 1 after 8 others, in the blocks 0, 3 and 2, and
//! sequences 1 and 2 sample from it. With ` scores 8+3` the logits of three tokens from the eighth on are wanted.

use std::fmt::Write;

use expect_test::Expect;
use server_scheduler::{
    Batch, BlockHash, Event, NewRequest, Sampled, Scheduler, SchedulerConfig, SequenceId, StopRule, TokenId,
};

/// Small enough to see, with room for what is not about room.
pub(crate) fn config() -> SchedulerConfig {
    SchedulerConfig {
        block_tokens: 4,
        blocks_total: 16,
        batch_tokens_max: 16,
        chunk_tokens_max: 16,
        step_time_max: None,
        sequences_max: 8,
        waiting_max: 8,
        sequence_tokens_max: 64,
        prefix_caching: true,
        sequence_blocks_max: None,
    }
}

#[expect(clippy::needless_pass_by_value, reason = "expect! reads better without a borrow")]
pub(crate) fn check(config: SchedulerConfig, script: &str, expect: Expect) {
    let mut run = Run {
        scheduler: Scheduler::new(config),
        batch: Batch::default(),
        in_flight: false,
        quiet: false,
        drafts: Vec::new(),
        out: String::new(),
    };
    for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
        run.line(line);
        run.scheduler.check_invariants();
    }
    expect.assert_eq(&run.out);
}

struct Run {
    scheduler: Scheduler,
    batch: Batch,
    in_flight: bool,
    quiet: bool,
    /// Of the next batch.
    drafts: Vec<(SequenceId, Vec<TokenId>)>,
    out: String,
}

impl Run {
    fn line(&mut self, line: &str) {
        let (command, rest) = line.split_once(' ').unwrap_or((line, ""));
        self.write(&format!("> {line}"));
        match command {
            "submit" => self.submit(rest),
            "abort" => self.scheduler.abort(SequenceId(number(rest))),
            "schedule" => self.schedule(),
            "draft" => {
                let (id, text) = rest.split_once(' ').expect("drafts");
                let (id, drafts) = (SequenceId(number(id)), tokens(text));
                self.scheduler.propose(id, drafts.len() as u32);
                self.drafts.push((id, drafts));
            }
            "commit" => self.commit(rest),
            "resume" => self.resume(rest),
            "step" => {
                self.schedule();
                self.commit(rest);
            }
            "steps" => {
                self.quiet = true;
                for _ in 0..number(rest) {
                    self.schedule();
                    self.commit("");
                }
                self.quiet = false;
            }
            "fail" => {
                if !self.in_flight {
                    self.schedule();
                }
                self.in_flight = false;
                let dropped = self.scheduler.fail(&self.batch);
                self.write(&format!("dropped {}", ids(&dropped)));
            }
            "load" => {
                let load = self.scheduler.load();
                self.write(&format!(
                    "blocks {} active {} evictable {} free, sequences {} running {} waiting, {} tokens, \
                     {} preemptions",
                    load.blocks_active,
                    load.blocks_evictable,
                    load.blocks_free,
                    load.running,
                    load.waiting,
                    load.uncomputed_tokens,
                    load.preemptions_total
                ));
            }
            other => panic!("unknown command {other}"),
        }
    }

    fn submit(&mut self, rest: &str) {
        let mut words = rest.split(' ');
        let sequences = words.next().into_iter().flat_map(|ids| ids.split(','));
        let sequences = sequences.map(|id| SequenceId(number(id))).collect();
        let prompt = words.next().map(tokens).unwrap_or_default();
        let stop = StopRule { tokens_max: 1, ..StopRule::default() };
        let mut request = NewRequest::new(sequences, prompt, stop);
        for word in words {
            match word.split_once('=').expect("a value") {
                ("max", value) => request.stop.tokens_max = number(value) as u32,
                ("min", value) => request.stop.tokens_min = number(value) as u32,
                ("stop", value) => request.stop.tokens = tokens(value),
                ("root", value) => request.root = BlockHash(number(value)),
                ("adapter", value) => request.adapter = number(value) as u32,
                ("tenant", value) => request.tenant = u128::from(number(value)),
                ("scores", value) => request.scores_prompt = value == "prompt",
                ("go", value) => request.in_step = value == "in-step",
                (other, _) => panic!("unknown word {other}"),
            }
        }
        if let Err(rejected) = self.scheduler.submit(request) {
            self.write(&format!("{rejected:?}"));
        }
    }

    fn schedule(&mut self) {
        self.scheduler.schedule(&mut self.batch);
        self.in_flight = true;
        let drafts = std::mem::take(&mut self.drafts);
        for row in &self.batch.rows {
            let range = self.batch.row_drafts(row);
            if let Some((_, drafts)) = drafts.iter().find(|(id, _)| *id == row.sequence) {
                let count = range.len();
                self.batch.tokens[range].copy_from_slice(&drafts[..count]);
            }
        }
        if self.quiet {
            return;
        }
        let batch = std::mem::take(&mut self.batch);
        for copy in &batch.copies {
            self.write(&format!("copy {} to {}", copy.from.0, copy.to.0));
        }
        for row in &batch.rows {
            let blocks: Vec<_> = batch.row_blocks(row).iter().map(|block| block.0.to_string()).collect();
            let mut line =
                format!("{}: {}+{} [{}]", row.sequence.0, row.past, row.tokens.len(), blocks.join(" "));
            if !row.scored.is_empty() {
                let first = row.past + row.scored.start - row.tokens.start;
                write!(line, " scores {first}+{}", row.scored.len()).expect("a string takes all");
            }
            if row.drafts > 0 {
                write!(line, " drafts {}", row.drafts).expect("a string takes all");
            }
            if row.adapter > 0 {
                write!(line, " adapter {}", row.adapter).expect("a string takes all");
            }
            if !row.samples.is_empty() {
                write!(line, " -> {}", ids(batch.row_samples(row))).expect("a string takes all");
            }
            self.write(&line);
        }
        if batch.rows.is_empty() {
            self.write("nothing");
        }
        self.batch = batch;
    }

    fn commit(&mut self, rest: &str) {
        let given: Vec<_> = rest.split(' ').filter_map(|word| word.split_once('=')).collect();
        let token = |&id: &SequenceId| {
            let mut sampled = Sampled::new(id, TokenId::from(b'z'));
            for (name, letter) in &given {
                let (name, from) = name.split_once('<').unwrap_or((name, name));
                if number(name) == id.0 {
                    let (accepted, letter) = letter.split_at(letter.len() - 1);
                    let accepted = if accepted.is_empty() { 0 } else { number(accepted) as u32 };
                    let from = SequenceId(number(from));
                    let token = (letter != "?").then(|| tokens(letter)[0]);
                    sampled = Sampled { from, accepted, token, ..sampled };
                }
            }
            sampled
        };
        let sampled: Vec<_> = self.batch.samples.iter().map(token).collect();
        let mut events = Vec::new();
        self.scheduler.commit(&self.batch, &sampled, &mut events);
        self.in_flight = false;
        self.write_events(&events);
    }

    fn resume(&mut self, rest: &str) {
        let sampled = rest.split(' ').filter_map(|word| word.split_once('=')).map(|(name, letter)| {
            let (name, from) = name.split_once('<').unwrap_or((name, name));
            let from = SequenceId(number(from));
            Sampled { from, ..Sampled::new(SequenceId(number(name)), tokens(letter)[0]) }
        });
        let mut events = Vec::new();
        self.scheduler.resume(&sampled.collect::<Vec<_>>(), &mut events);
        self.write_events(&events);
    }

    fn write_events(&mut self, events: &[Event]) {
        for event in events {
            match event {
                Event::Started { sequence, cached_tokens } => {
                    self.write(&format!("{} started, {cached_tokens} cached", sequence.0));
                }
                Event::Finished { sequence, reason } => {
                    self.write(&format!("{} finished, {reason:?}", sequence.0));
                }
            }
        }
    }

    fn write(&mut self, line: &str) {
        self.out.push_str(line);
        self.out.push('\n');
    }
}

fn tokens(text: &str) -> Vec<TokenId> {
    let mut tokens: Vec<TokenId> = Vec::new();
    for part in text.split('+') {
        let (letters, times) = part.split_once('*').unwrap_or((part, "1"));
        for _ in 0..number(times) {
            tokens.extend(letters.bytes().map(TokenId::from));
        }
    }
    tokens
}

fn number(text: &str) -> u64 {
    text.parse().expect("a number")
}

fn ids(ids: &[SequenceId]) -> String {
    ids.iter().map(|id| id.0.to_string()).collect::<Vec<_>>().join(",")
}
