//! A draft model together with its target model on the real runtime: two graphs, two caches, one block table.

use std::path::Path;
use std::sync::mpsc::channel;

use server_engine::{
    Clock, DraftModelParams, DraftRunner, Engine, EngineConfig, EngineOptions, Event, ModelRunner, Request,
    Sampling, SchedulerConfig, StepReport, StopCriteria, TokenId,
};
use server_gguf::TensorType;
use server_openvino::load_pair;

use crate::reference::{EXACT, config, load_file, recipe};

const REQUESTS: u32 = 6;
const TOKENS: u32 = 70;

fn engine_config() -> EngineConfig {
    EngineConfig {
        scheduler: SchedulerConfig {
            max_num_batched_tokens: 64,
            max_chunk_tokens: 24,
            max_num_seqs: 8,
            max_queue: 64,
            max_model_len: 256,
            prefix_caching: true,
            kv_eviction_tokens: None,
            max_itl: None,
        },
        // The simulated time does not advance, so every draft is worth its cost.
        clock: Clock::simulated(),
    }
}

/// Submits several requests at once, some of which have prompts with a common prefix. Returns the generated tokens, and
/// the numbers of proposed and accepted draft tokens.
fn said(model: &Path, draft: Option<&Path>, sampling: &Sampling) -> (Vec<Vec<TokenId>>, [u32; 2]) {
    let (sender, reports) = channel();
    let observer = Box::new(move |report: &StepReport| drop(sender.send(report.clone())));
    let runner: Box<dyn ModelRunner>;
    let engine = match draft {
        Some(draft) => {
            let [of_model, of_draft] = [model, draft].map(|path| config(path, &EXACT));
            let [model, draft] = load_pair(&of_model, &of_draft, &mut |_| {}).unwrap();
            assert_eq!(model.1.layout.blocks_total, draft.1.layout.blocks_total);
            let bytes = model.1.layout.block_bytes + draft.1.layout.block_bytes;
            assert!(bytes * u64::from(model.1.layout.blocks_total) <= of_model.kv_cache_bytes.unwrap());
            runner = Box::new(model.0);
            let draft = DraftRunner { runner: Box::new(draft.0), max_model_len: 256 };
            let extras = EngineOptions { draft: Some(draft), ..EngineOptions::default() };
            Engine::start_with_options(engine_config(), runner, extras, observer).unwrap()
        }
        None => {
            runner = Box::new(load_file(model, &EXACT).unwrap().0);
            Engine::start(engine_config(), runner, observer).unwrap()
        }
    };
    let streams: Vec<_> = (0..REQUESTS)
        .map(|which| {
            let prompt: Vec<TokenId> =
                (0..40 + which * 5).map(|place| (place * place + which % 2 * 17) % 288).collect();
            let stop = StopCriteria { stop_token_ids: Vec::new(), max_tokens: TOKENS, min_tokens: 0 };
            let request = Request {
                num_sequences: 1 + which % 2,
                draft: Some(DraftModelParams { num_draft_tokens: 4, confidence_threshold: 0.0 }),
                ..Request::new(prompt, sampling.clone(), stop)
            };
            (engine.handle().submit(request).unwrap(), 1 + which % 2)
        })
        .collect();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let mut all = Vec::new();
    for (mut stream, sequences) in streams {
        let mut tokens = vec![Vec::new(); sequences as usize];
        while let Some(event) = runtime.block_on(stream.next()) {
            match event {
                Event::Token { index, token, .. } => tokens[index as usize].push(token),
                Event::Failed(failure) => panic!("{failure}"),
                _ => {}
            }
        }
        all.extend(tokens);
    }
    engine.shutdown().unwrap();
    let counts = reports.iter().fold([0, 0], |[drafted, accepted], report| {
        [drafted + report.drafted_tokens, accepted + report.accepted_tokens]
    });
    (all, counts)
}

#[test]
fn a_model_is_always_right_as_its_own_draft_model_and_another_seldom_and_both_change_nothing() {
    let files = [recipe("llama", TensorType::Q8_0), recipe("qwen2", TensorType::Q8_0)].map(|recipe| {
        let file = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
        recipe.write(file.path());
        file
    });
    let [model, other] = files.each_ref().map(|file| file.path());
    let drawn = Sampling { temperature: 1.0, seed: 7, ..Sampling::greedy() };
    for sampling in [Sampling::greedy(), drawn] {
        let (expected, none) = said(model, None, &sampling);
        assert!(expected.iter().all(|tokens| tokens.len() == TOKENS as usize) && none == [0, 0]);
        let (own, [drafted, accepted]) = said(model, Some(model), &sampling);
        assert_eq!(own, expected);
        assert!(drafted > 300 && accepted == drafted, "{accepted} of {drafted}");
        let (others, [drafted, accepted]) = said(model, Some(other), &sampling);
        assert_eq!(others, expected);
        assert!(drafted > 100 && accepted < drafted / 2, "{accepted} of {drafted}");
    }
}
