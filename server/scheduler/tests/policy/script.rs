//! Runs the commands of an expectation on a scheduler, and compares the resulting batches and events with the
//! expectation. The commands are the lines that begin with `> `:
//!
//! ```text
//! submit 1,2 abcd max=3     sequences 1 and 2 continue the prompt "abcd" (a letter is a token, a*9 is nine)
//!        min=1 stop=xy      the other stop criteria
//!        seed=7             the prefix seed of the request
//!        adapter=1          the adapter that computes the request
//!        tenant=2           the tenant to which the request belongs
//!        scores=prompt      the logits of the prompt are needed
//!        lockstep=yes       the sequences advance in lockstep
//!        image=A@2+4        the four tokens from position 2 on are those of image A
//!        spans=whole        the tokens of an image attend to each other
//! provide A                  image A has been encoded
//! cancel A                   image A cannot be encoded
//! encoder 5                  the encoder receives images while it has fewer than 5 tokens
//! step 1=x                  a step in which sequence 1 samples x and all others sample z
//! step 2<1=x                … sequence 2 continues from the tokens of 1
//! draft 1 xy                sequence 1 may have these drafts in the next step,
//! step 1=1z                 of which one is accepted, and z is sampled after it
//! step 1=?                  sequence 1 is suspended: its next token is not known yet
//! resume 1=x                the next token of sequence 1 is x
//! steps 9                   nine steps, of which only the events are printed
//! schedule                  the first half of a step,
//! commit 1=x                and the second
//! fail                      a step that fails, or the second half of one
//! abort 1
//! load
//! images                    the load of the encoder and of its cache
//! ```
//! The line `1: 8+4 [0 3 2] -> 1,2` means that the step computes 4 tokens of sequence 1 after 8 computed ones, that the
//! keys and values of the sequence are in the blocks 0, 3 and 2, and that a token is then sampled for each of the
//! sequences 1 and 2. With ` scores 8+3`, the logits of the three tokens from position 8 on are needed.

use std::fmt::Write;

use expect_test::Expect;
use server_scheduler::{
    Batch, BlockHash, CacheSize, Event, ImageDigest, ImageLimits, ImageSpan, NewRequest, SampledToken,
    Scheduler, SchedulerConfig, SequenceId, SpanAttention, StopCriteria, TokenId,
};

/// A small configuration with enough room for the tests that do not set their own limits.
pub(crate) fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_num_batched_tokens: 16,
        max_chunk_tokens: 16,
        max_itl: None,
        max_num_seqs: 8,
        max_queue: 8,
        max_model_len: 64,
        prefix_caching: true,
        kv_eviction_tokens: None,
    }
}

/// The size of the cache that goes with [`config`].
pub(crate) fn cache() -> CacheSize {
    CacheSize { block_tokens: 4, blocks_total: 16 }
}

pub(crate) fn check(config: SchedulerConfig, expect: Expect) {
    check_in_cache(cache(), config, expect);
}

/// The image limits that the tests use.
const IMAGE_LIMITS: ImageLimits = ImageLimits { rows_max: 12, max_num_encoder_input_tokens: 1024 };

#[expect(clippy::needless_pass_by_value, reason = "expect! reads better without a borrow")]
pub(crate) fn check_in_cache(cache: CacheSize, config: SchedulerConfig, expect: Expect) {
    let mut run = Run {
        scheduler: Scheduler::new(config, cache),
        batch: Batch::default(),
        in_flight: false,
        quiet: false,
        drafts: Vec::new(),
        ids: Vec::new(),
        out: String::new(),
    };
    run.scheduler.set_image_limits(IMAGE_LIMITS);
    let commands: Vec<_> = expect.data().lines().filter_map(|line| line.trim().strip_prefix("> ")).collect();
    assert!(!commands.is_empty(), "the expectation contains no command (a line that begins with \"> \")");
    for command in commands {
        run.line(command);
        run.scheduler.check_invariants();
    }
    expect.assert_eq(&run.out);
}

struct Run {
    scheduler: Scheduler,
    batch: Batch,
    in_flight: bool,
    quiet: bool,
    /// The drafts for the next batch.
    drafts: Vec<(SequenceId, Vec<TokenId>)>,
    /// The numbers by which the commands refer to sequences, each with the ID of its sequence.
    ids: Vec<(u64, SequenceId)>,
    out: String,
}

impl Run {
    fn line(&mut self, line: &str) {
        let (command, rest) = line.split_once(' ').unwrap_or((line, ""));
        self.write(&format!("> {line}"));
        match command {
            "submit" => self.submit(rest),
            "abort" => self.scheduler.abort(self.id(rest)),
            "schedule" => self.schedule(),
            "draft" => {
                let (id, text) = rest.split_once(' ').expect("drafts");
                let (id, drafts) = (self.id(id), tokens(text));
                self.scheduler.set_num_draft_tokens(id, drafts.len() as u32);
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
                let removed = self.scheduler.fail(&self.batch);
                self.write(&format!("dropped {}", self.names(&removed)));
            }
            "encoder" => {
                let max_num_encoder_input_tokens = number(rest) as u32;
                self.scheduler.set_image_limits(ImageLimits { max_num_encoder_input_tokens, ..IMAGE_LIMITS });
            }
            "provide" => self.scheduler.provide_image(image(rest)),
            "cancel" => {
                let names = self.names(&self.scheduler.sequences_with_image(image(rest)));
                self.scheduler.cancel_image(image(rest));
                self.write(&format!("needed by {names}"));
            }
            "images" => {
                let load = self.scheduler.load();
                self.write(&format!(
                    "{} image tokens unencoded, {} encoded, {} hits, {} misses",
                    load.unencoded_image_tokens,
                    load.encoded_image_tokens,
                    load.image_cache_hits_total,
                    load.image_cache_misses_total
                ));
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
        let names: Vec<u64> = words.next().into_iter().flat_map(|ids| ids.split(',')).map(number).collect();
        self.ids.extend((0..).zip(&names).map(|(index, &name)| (name, SequenceId::new(names[0], index))));
        let prompt = words.next().map(tokens).unwrap_or_default();
        let stop = StopCriteria { max_tokens: 1, ..StopCriteria::default() };
        let mut request = NewRequest::new(names[0], names.len() as u32, prompt, stop);
        for word in words {
            match word.split_once('=').expect("a value") {
                ("max", value) => request.stop.max_tokens = number(value) as u32,
                ("min", value) => request.stop.min_tokens = number(value) as u32,
                ("stop", value) => request.stop.stop_token_ids = tokens(value),
                ("seed", value) => request.prefix_seed = BlockHash(number(value)),
                ("adapter", value) => request.adapter = number(value) as u32,
                ("tenant", value) => request.tenant = u128::from(number(value)),
                ("scores", value) => request.scores_prompt = value == "prompt",
                ("lockstep", value) => request.lockstep = value == "yes",
                ("image", value) => request.images.spans.push(span(value)),
                ("spans", "whole") => request.images.attention = SpanAttention::Bidirectional,
                (other, _) => panic!("unknown word {other}"),
            }
        }
        if let Err(rejection) = self.scheduler.submit(request) {
            self.write(&format!("{rejection:?}"));
        }
    }

    fn schedule(&mut self) {
        self.scheduler.schedule(&mut self.batch);
        self.in_flight = true;
        for request in self.scheduler.drain_image_requests() {
            let (image, name) = (char::from(request.digest.0[0]), self.names(&[request.sequence]));
            self.write(&format!("image {image} is needed by {name}"));
        }
        for evicted in self.scheduler.drain_evicted_images() {
            self.write(&format!("image {} is evicted", char::from(evicted.0[0])));
        }
        let drafts = std::mem::take(&mut self.drafts);
        for sequence in &self.batch.sequences {
            let range = self.batch.drafts_of(sequence);
            if let Some((_, drafts)) = drafts.iter().find(|(id, _)| *id == sequence.id) {
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
        for sequence in &batch.sequences {
            let blocks: Vec<_> =
                batch.block_table_of(sequence).iter().map(|block| block.0.to_string()).collect();
            let (name, computed) = (self.names(&[sequence.id]), sequence.computed_tokens);
            let mut line = format!("{name}: {computed}+{} [{}]", sequence.tokens.len(), blocks.join(" "));
            if !sequence.scored_tokens.is_empty() {
                let first = computed + sequence.scored_tokens.start - sequence.tokens.start;
                write!(line, " scores {first}+{}", sequence.scored_tokens.len())
                    .expect("writing to a string succeeds");
            }
            if sequence.num_draft_tokens > 0 {
                write!(line, " drafts {}", sequence.num_draft_tokens).expect("writing to a string succeeds");
            }
            if sequence.adapter > 0 {
                write!(line, " adapter {}", sequence.adapter).expect("writing to a string succeeds");
            }
            if !sequence.samples.is_empty() {
                write!(line, " -> {}", self.names(batch.samples_of(sequence)))
                    .expect("writing to a string succeeds");
            }
            self.write(&line);
        }
        if batch.sequences.is_empty() {
            self.write("nothing");
        }
        self.batch = batch;
    }

    fn commit(&mut self, rest: &str) {
        let given: Vec<_> = rest.split(' ').filter_map(|word| word.split_once('=')).collect();
        let token = |&id: &SequenceId| {
            let mut sampled = SampledToken::new(id, TokenId::from(b'z'));
            for (name, letter) in &given {
                let (name, parent) = name.split_once('<').unwrap_or((name, name));
                if self.id(name) == id {
                    let (accepted, letter) = letter.split_at(letter.len() - 1);
                    let accepted_drafts = if accepted.is_empty() { 0 } else { number(accepted) as u32 };
                    let parent = self.id(parent);
                    let token = (letter != "?").then(|| tokens(letter)[0]);
                    sampled = SampledToken { parent, accepted_drafts, token, ..sampled };
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
            let (name, parent) = name.split_once('<').unwrap_or((name, name));
            let parent = self.id(parent);
            SampledToken { parent, ..SampledToken::new(self.id(name), tokens(letter)[0]) }
        });
        let sampled: Vec<_> = sampled.collect();
        let mut events = Vec::new();
        self.scheduler.resume(&sampled, &mut events);
        self.write_events(&events);
    }

    fn write_events(&mut self, events: &[Event]) {
        for event in events {
            match event {
                Event::Started { sequence, cached_tokens } => {
                    self.write(&format!("{} started, {cached_tokens} cached", self.names(&[*sequence])));
                }
                Event::Finished { sequence, reason } => {
                    self.write(&format!("{} finished, {reason:?}", self.names(&[*sequence])));
                }
            }
        }
    }

    /// The ID of the sequence with this number. `submit` can reuse the number of a sequence that has ended.
    fn id(&self, name: &str) -> SequenceId {
        let name = number(name);
        let id = self.ids.iter().rfind(|(other, _)| *other == name);
        id.map_or(SequenceId::new(name, 0), |(_, id)| *id)
    }

    /// The numbers by which the commands refer to these sequences, separated by commas.
    fn names(&self, ids: &[SequenceId]) -> String {
        let name = |id: &SequenceId| {
            self.ids.iter().rfind(|(_, other)| other == id).expect("the sequence was submitted").0
        };
        ids.iter().map(|id| name(id).to_string()).collect::<Vec<_>>().join(",")
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

/// The digest of the image with this name, a letter.
fn image(name: &str) -> ImageDigest {
    ImageDigest([name.as_bytes()[0]; 32])
}

fn span(text: &str) -> ImageSpan {
    let (name, range) = text.split_once('@').expect("an image and its positions");
    let (start, num_tokens) = range.split_once('+').expect("a position and a length");
    let (start, num_tokens) = (number(start) as u32, number(num_tokens) as u32);
    ImageSpan { digest: image(name), start, num_tokens, first_row: 0 }
}

fn number(text: &str) -> u64 {
    text.parse().expect("a number")
}
