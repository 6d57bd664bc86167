use std::rc::Rc;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use server_scheduler::{Batch, Event, NewRequest, SampledToken, Scheduler, SchedulerConfig, StopCriteria};

use super::*;
use crate::arena::REPLICA;
use crate::engine::{Engine, EngineConfig, Outcome, Spec};
use crate::workload::{KINDS, mix, workload};

#[test]
fn the_default_policy_keeps_what_is_promised_of_it() {
    let arena = Arena { replicas: 8, requests: 1500, seeds: vec![11, 12, 13] };
    let table = Table::new(&arena, Competitor::all());
    assert_eq!(table.missed(), Vec::<String>::new(), "\n{}", table.markdown());
}

#[test]
fn a_seed_gives_the_same_result_again() {
    let arena = Arena { replicas: 4, requests: 200, seeds: vec![5] };
    for kind in KINDS {
        let scores = || format!("{:?}", arena.scores(kind, &Competitor::all()));
        assert_eq!(scores(), scores());
    }
}

#[test]
fn traffic_is_as_described() {
    for kind in KINDS {
        let requests = workload(kind, 8, REPLICA, 500, 3);
        assert!(requests.len() >= 500);
        for request in &requests {
            let Spec { blocks, prompt_tokens, output_tokens } = &*request.spec;
            assert_eq!(blocks.len() as u32, (prompt_tokens + output_tokens) / REPLICA.block_tokens);
            assert_eq!(request.chain.blocks() as u32, prompt_tokens / REPLICA.block_tokens);
            assert!(prompt_tokens.div_ceil(16) + output_tokens.div_ceil(16) < REPLICA.blocks_total);
        }
    }
}

/// The simulated replica against the server's scheduler: the same steps, over random prompts that share
/// beginnings, in a cache that is too small for all.
#[test]
fn the_simulated_replica_takes_the_steps_of_the_real_one() {
    for seed in 0..40 {
        compare(seed);
    }
}

fn compare(seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut draw = |below: u64| rng.next_u64() % below;
    let config = EngineConfig {
        block_tokens: 4,
        blocks_total: 40 + draw(60) as u32,
        batch_tokens_max: 32,
        chunk_tokens_max: 12,
        sequences_max: 6,
        ..REPLICA
    };
    let mut engine = Engine::new(config);
    let mut real = Scheduler::new(SchedulerConfig {
        block_tokens: config.block_tokens,
        blocks_total: config.blocks_total,
        max_num_batched_tokens: config.batch_tokens_max,
        max_chunk_tokens: config.chunk_tokens_max,
        max_itl: None,
        max_num_seqs: config.sequences_max,
        max_queue: 1000,
        max_model_len: config.blocks_total * config.block_tokens,
        prefix_caching: true,
        kv_eviction_tokens: None,
    });
    let mut texts: Vec<(Vec<u32>, usize)> = Vec::new();
    let mut batch = Batch::default();
    for step in 0..400 {
        if step < 300 && draw(3) == 0 {
            let text: Vec<u32> = (0..8 + draw(60)).map(|at| text_token(draw(2), at)).collect();
            let prompt = 4 + draw(text.len() as u64 - 5) as usize;
            submit(&mut engine, &mut real, &text, prompt, texts.len());
            texts.push((text, prompt));
        }
        assert_eq!(engine.is_idle(), real.is_idle(), "seed {seed}, step {step}");
        if engine.is_idle() {
            continue;
        }
        engine.begin_step();
        real.schedule(&mut batch);
        let (mine, its) = (engine.load(), real.load());
        let mine =
            (mine.active, mine.evictable, mine.running, mine.waiting, mine.uncomputed, mine.preemptions);
        let its = (
            its.blocks_active,
            its.blocks_evictable,
            its.running,
            its.waiting,
            its.uncomputed_tokens,
            its.preemptions_total,
        );
        assert_eq!(mine, its, "seed {seed}, step {step}");
        let mut outcomes = Vec::new();
        engine.end_step(&mut outcomes);
        let finished = commit(&mut real, &batch, &texts);
        let mine: Vec<usize> = outcomes
            .iter()
            .filter_map(|outcome| match outcome {
                Outcome::Finished { request } => Some(*request),
                Outcome::First { .. } => None,
            })
            .collect();
        assert_eq!(mine, finished, "seed {seed}, step {step}");
    }
}

/// Texts of two kinds of which the first forty tokens are the same within a kind.
fn text_token(any: u64, at: u64) -> u32 {
    if at < 40 { at as u32 } else { 1000 + (any * 500 + at) as u32 }
}

fn submit(engine: &mut Engine, real: &mut Scheduler, text: &[u32], prompt: usize, number: usize) {
    let mut parent = 0;
    let blocks = text.chunks_exact(4).map(|block| {
        parent = block.iter().fold(parent, |hash, &token| mix(hash ^ u64::from(token)));
        parent
    });
    let output_tokens = (text.len() - prompt) as u32;
    let spec = Spec { blocks: blocks.collect(), prompt_tokens: prompt as u32, output_tokens };
    engine.submit(number, Rc::new(spec));
    let stop = StopCriteria { stop_token_ids: Vec::new(), max_tokens: output_tokens, min_tokens: 0 };
    real.submit(NewRequest::new(number as u64, 1, text[..prompt].to_vec(), stop)).unwrap();
}

/// Every sequence goes on with its text.
fn commit(real: &mut Scheduler, batch: &Batch, texts: &[(Vec<u32>, usize)]) -> Vec<usize> {
    let mut sampled = Vec::new();
    for row in batch.sampling_sequences() {
        let at = row.computed_tokens as usize + row.tokens.len();
        for &id in batch.samples_of(row) {
            sampled.push(SampledToken::new(id, texts[id.request as usize].0[at]));
        }
    }
    let mut events = Vec::new();
    real.commit(batch, &sampled, &mut events);
    events
        .iter()
        .filter_map(|event| match event {
            Event::Finished { sequence, .. } => Some(sequence.request as usize),
            Event::Started { .. } => None,
        })
        .collect()
}
