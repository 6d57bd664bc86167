//! Tests draft models: their proposals and the state of their cache change only the number of steps.

use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use server_engine::sim::{SimCosts, SimFault, SimFaultKind, SimRunner};
use server_engine::{
    CacheLayout, DraftCounts, DraftModelParams, DraftRunner, Engine, EngineHandle, EngineOptions, Event,
    Logits, ModelRunner, PromptLookup, Request, RunError, Sampling, StartError, StepReport,
};
use server_scheduler::Batch;
use tokio::task::JoinSet;

use crate::drafts::{costs, counts, events, of_few_words, output_events};
use crate::guides::{check, one_of_many};
use crate::support::{Setup, VOCABULARY, outcome, prompt, request, sampled, settled};

/// A draft model that equals the target model, except that it proposes wrong tokens at a configurable rate.
struct NoisyDraftRunner {
    inner: SimRunner,
    /// Number of wrong tokens per thousand tokens.
    wrong: u64,
    logits: Vec<f32>,
}

impl ModelRunner for NoisyDraftRunner {
    fn layout(&self) -> CacheLayout {
        self.inner.layout()
    }

    fn run(&mut self, batch: &Batch) -> Result<Logits<'_>, RunError> {
        let CacheLayout { vocabulary, .. } = self.layout();
        assert!(
            batch.tokens.iter().all(|&token| token < vocabulary),
            "the draft model gets only tokens of its vocabulary"
        );
        assert!(batch.sequences.iter().all(|row| row.num_draft_tokens == 0 && row.scored_tokens.is_empty()));
        let logits = self.inner.run(batch)?;
        self.logits.clear();
        for row in logits.rows() {
            let first = self.logits.len();
            self.logits.extend_from_slice(row);
            if u64::from(row[0].to_bits()).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32
                < (self.wrong << 32) / 1000
            {
                self.logits[first..].rotate_right(1);
            }
        }
        Ok(Logits::new(&self.logits, vocabulary))
    }
}

/// The differences between the draft model and the target model.
#[derive(Clone, Default)]
struct DraftDifferences {
    wrong: u64,
    costs: SimCosts,
    faults: Vec<SimFault>,
    vocabulary: Option<u32>,
    tokens_max: Option<u32>,
}

fn draft(setup: &Setup, differences: DraftDifferences) -> DraftRunner {
    let mut sim = setup.sim.clone();
    sim.costs = differences.costs;
    sim.faults = differences.faults;
    sim.vocabulary = differences.vocabulary.unwrap_or(sim.vocabulary);
    let inner = SimRunner::new(sim, setup.engine.clock.clone());
    let runner = Box::new(NoisyDraftRunner { inner, wrong: differences.wrong, logits: Vec::new() });
    DraftRunner { runner, max_model_len: differences.tokens_max.unwrap_or(u32::MAX) }
}

fn drafted(draft: DraftRunner) -> EngineOptions {
    EngineOptions { draft: Some(draft), ..EngineOptions::default() }
}

fn start(setup: Setup, differences: DraftDifferences) -> (Engine, Receiver<StepReport>) {
    let (sender, reports) = channel();
    let observer = Box::new(move |report: &StepReport| drop(sender.send(report.clone())));
    let draft = draft(&setup, differences);
    let runner = Box::new(setup.runner());
    (Engine::start_with_options(setup.engine, runner, drafted(draft), observer).unwrap(), reports)
}

fn rule(tokens_max: u32) -> Option<DraftModelParams> {
    Some(DraftModelParams { num_draft_tokens: tokens_max, confidence_threshold: 0.0 })
}

/// Submits concurrent requests to the first engine. Some of them are dropped and, if `has_lookup` is true, some also
/// use prompt lookup. Compares the output of each remaining request with its output without drafts in the second
/// engine.
async fn compare(handles: [&EngineHandle; 2], rng: &mut StdRng, has_lookup: bool) -> DraftCounts {
    let mut tasks = JoinSet::new();
    for which in 0..60 {
        let tokens_max = rng.random_range(1..20);
        let mut request = Request { draft: rule(tokens_max), ..of_few_words(which, rng) };
        request.lookup = request.lookup.filter(|_| has_lookup && which % 3 == 0);
        if which % 7 == 0 {
            request.draft = None;
        }
        let mut stream = handles[0].submit(request.clone()).unwrap();
        let is_dropped = rng.random_bool(0.1);
        let alone = handles[1].clone();
        tasks.spawn(async move {
            if is_dropped {
                stream.next().await;
                return DraftCounts::default();
            }
            let together = events(stream).await;
            let plain = Request { lookup: None, draft: None, ..request };
            let alone = events(alone.submit(plain).unwrap()).await;
            assert_eq!(output_events(&together), output_events(&alone), "request {which}");
            counts(&together)
        });
    }
    let mut all = DraftCounts::default();
    while let Some(counts) = tasks.join_next().await {
        let DraftCounts { accepted, rejected } = counts.unwrap();
        all.accepted += accepted;
        all.rejected += rejected;
    }
    all
}

/// Calls [`compare`] with several seeds. Returns the sum of the draft counts, and the number of preemptions.
async fn compare_all(differences: DraftDifferences, has_lookup: bool) -> (DraftCounts, u64) {
    let mut all = (DraftCounts::default(), 0);
    for seed in 0..5 {
        let mut rng = StdRng::seed_from_u64(seed);
        let (engine, _) = start(Setup::new(60), differences.clone());
        let alone = Setup::new(2000).start();
        let handle = engine.handle();
        let counts = compare([&handle, &alone.handle()], &mut rng, has_lookup).await;
        settled(&handle).await;
        all.0.accepted += counts.accepted;
        all.0.rejected += counts.rejected;
        all.1 += handle.load().borrow().load.preemptions_total;
        engine.shutdown().unwrap();
        alone.shutdown().unwrap();
    }
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_drafts_are_accepted_if_the_draft_model_is_the_model() {
    // Some requests have penalties, and some are preempted or dropped. Blocks are evicted, shared and copied. If the
    // cache of the draft model ever had the wrong content, a draft would be rejected.
    let (counts, preempted) = compare_all(DraftDifferences::default(), false).await;
    assert_eq!(counts.rejected, 0);
    assert!(counts.accepted > 5000 && preempted > 20, "{counts:?} {preempted}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drafts_of_a_draft_model_change_no_output() {
    for wrong in [300, 1000] {
        let (counts, preempted) =
            compare_all(DraftDifferences { wrong, ..DraftDifferences::default() }, false).await;
        assert!(counts.rejected > 500 && preempted > 20, "{counts:?} {preempted}");
        assert!(counts.accepted > 500 || wrong == 1000, "{counts:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drafts_of_lookup_and_a_draft_model_together_change_no_output() {
    let (counts, _) = compare_all(DraftDifferences { wrong: 200, ..DraftDifferences::default() }, true).await;
    assert!(counts.accepted > 1000 && counts.rejected > 500, "{counts:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failing_draft_model_costs_only_its_drafts() {
    let failing = |step| SimFault { step, kind: SimFaultKind::Step };
    let faults = (3..400).step_by(7).map(failing).collect();
    // A failed step leaves the cache of the draft model incomplete. The missing entries must not lead to
    // wrong drafts.
    let (counts, _) = compare_all(DraftDifferences { faults, ..DraftDifferences::default() }, false).await;
    assert!(counts.accepted > 1000 && counts.rejected == 0, "{counts:?}");
    let faults = vec![SimFault { step: 20, kind: SimFaultKind::Fatal }];
    let (counts, _) = compare_all(DraftDifferences { faults, ..DraftDifferences::default() }, false).await;
    assert!(counts.accepted < 1000 && counts.rejected == 0, "{counts:?}");
    let faults = vec![SimFault { step: 20, kind: SimFaultKind::NotANumber(0) }];
    compare_all(DraftDifferences { faults, ..DraftDifferences::default() }, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drafts_follow_the_guides() {
    let mut all = 0;
    for seed in 0..4 {
        let mut rng = StdRng::seed_from_u64(seed);
        let (engine, reports) =
            start(Setup::new(60), DraftDifferences { wrong: 100, ..DraftDifferences::default() });
        let alone = Setup::new(2000).start();
        let mut tasks = JoinSet::new();
        for which in 0..60 {
            let (plain, form) = one_of_many(which, &mut rng);
            if form.is_none() {
                continue;
            }
            let lookup =
                PromptLookup { max_ngram_size: 3, num_draft_tokens: 5, prediction: prompt(which, 30) };
            let lookup = which.is_multiple_of(2).then_some(lookup);
            let request = Request { lookup, draft: rule(4), ..plain.clone() };
            let stream = engine.handle().submit(request).unwrap();
            let alone = alone.handle();
            tasks.spawn(async move {
                let guessed = outcome(stream).await;
                check(&guessed, &plain, form.as_ref());
                let alone = outcome(alone.submit(plain).unwrap()).await;
                assert_eq!(
                    (guessed.tokens, guessed.reasons),
                    (alone.tokens, alone.reasons),
                    "request {which}"
                );
            });
        }
        tasks.join_all().await;
        settled(&engine.handle()).await;
        engine.shutdown().unwrap();
        all += reports.iter().map(|report| report.accepted_tokens).sum::<u32>();
    }
    // Drafts are dropped if the allowed tokens are not known in time, so the number of accepted drafts depends on the
    // machine.
    assert!(all > 0, "{all}");
}

/// Returns the step reports of a request that runs alone.
async fn steps(request: Request, target: SimCosts, differences: DraftDifferences) -> Vec<StepReport> {
    let mut setup = Setup::new(400);
    setup.sim.costs = target;
    let (engine, reports) = start(setup, differences);
    assert_eq!(outcome(engine.handle().submit(request).unwrap()).await.failure, None);
    engine.shutdown().unwrap();
    reports.iter().collect()
}

fn time(reports: &[StepReport]) -> f64 {
    reports.iter().map(|report| report.step_time).sum::<Duration>().as_secs_f64()
}

fn sum(reports: &[StepReport], of: fn(&StepReport) -> u32) -> u32 {
    reports.iter().map(of).sum()
}

#[tokio::test]
async fn a_fast_and_accurate_draft_model_saves_time() {
    for base in [request(&prompt(1, 20), 200), sampled(&prompt(1, 20), 200, 3)] {
        let differences = DraftDifferences { costs: costs(1, 0, 0), ..DraftDifferences::default() };
        let plain = steps(base.clone(), costs(10, 1, 0), differences.clone()).await;
        let guessed = steps(Request { draft: rule(5), ..base }, costs(10, 1, 0), differences).await;
        assert!(
            time(&guessed) < 0.6 * time(&plain),
            "{} s with drafts, {} s without",
            time(&guessed),
            time(&plain)
        );
        assert_eq!(sum(&guessed, |report| report.generated_tokens), 200);
        assert_eq!(sum(&guessed, |report| report.prefill_tokens), 20);
        let drafted = sum(&guessed, |report| report.drafted_tokens);
        assert_eq!(drafted, sum(&guessed, |report| report.accepted_tokens));
        assert_eq!(drafted as usize + guessed.len(), 200);
        assert!(
            guessed.iter().all(|report| (report.drafted_tokens > 0) <= (report.draft_time > Duration::ZERO))
        );
        assert!(plain.iter().all(|report| report.draft_time.is_zero()));
    }
}

#[tokio::test]
async fn a_wrong_or_slow_draft_model_is_soon_not_used() {
    let cases = [
        // The draft model is fast, but always wrong.
        (1000, costs(10, 1, 0), costs(1, 0, 0)),
        // The draft model is always wrong and nearly as slow as the model.
        (1000, costs(10, 1, 0), costs(9, 0, 0)),
        // The draft model is often wrong.
        (700, costs(10, 3, 0), costs(4, 0, 0)),
        // The draft model is always right, but as slow as the model.
        (0, costs(10, 1, 0), costs(10, 0, 0)),
        // Verifying a draft token takes nearly as long as generating a token.
        (300, costs(0, 9, 10), costs(1, 1, 1)),
        // The draft model is always wrong and reads the prompt slowly.
        (1000, costs(10, 1, 0), costs(1, 9, 0)),
    ];
    for (wrong, target, own) in cases {
        for prompt_tokens in [10, 1000] {
            let base = request(&prompt(1, prompt_tokens), 600);
            let differences = DraftDifferences { wrong, costs: own, ..DraftDifferences::default() };
            let plain = time(&steps(base.clone(), target, differences.clone()).await);
            let guessed = time(&steps(Request { draft: rule(5), ..base }, target, differences).await);
            assert!(
                guessed <= plain * 1.05,
                "{wrong} of 1000 drafts wrong, draft model {own:?}, target {target:?}: {guessed} s with drafts, \
                 {plain} s without"
            );
        }
    }
}

#[tokio::test]
async fn the_tokens_that_a_draft_model_has_read_are_not_part_of_its_cost() {
    // The draft model reads 16 tokens of the text, which shows the cost of reading. At this cost, the drafts are worth
    // reading the other 48 tokens, but they would not be worth reading all 64 tokens.
    let differences = DraftDifferences { costs: costs(10, 3, 0), ..DraftDifferences::default() };
    let request = Request { draft: rule(4), ..request(&prompt(1, 60), 28) };
    let reports = steps(request, costs(100, 0, 0), differences).await;
    assert!(sum(&reports, |report| report.accepted_tokens) > 0, "{reports:?}");
}

#[tokio::test]
async fn drafts_of_a_failed_request_do_not_count_as_accepted() {
    let mut setup = Setup::new(400);
    // In this step, both sequences have drafts. The logits of the first sequence are invalid.
    setup.sim.faults.push(SimFault { step: 8, kind: SimFaultKind::NotANumber(0) });
    let (engine, reports) = start(setup, DraftDifferences::default());
    let request = Request { num_sequences: 2, draft: rule(2), ..request(&prompt(1, 5), 60) };
    assert!(outcome(engine.handle().submit(request).unwrap()).await.failure.is_some());
    engine.shutdown().unwrap();
    let report = reports.iter().find(|report| report.requests_failed == 1).unwrap();
    assert_eq!((report.drafted_tokens, report.accepted_tokens, report.generated_tokens), (4, 0, 0));
}

#[tokio::test]
async fn drafts_below_the_confidence_threshold_are_not_computed() {
    let drafted = async |confidence_threshold| {
        let draft = Some(DraftModelParams { num_draft_tokens: 9, confidence_threshold });
        let request = Request { draft, ..request(&prompt(1, 20), 60) };
        sum(&steps(request, SimCosts::default(), DraftDifferences::default()).await, |report| {
            report.drafted_tokens
        })
    };
    let [any, some, none] = [drafted(0.0).await, drafted(0.06).await, drafted(1.0).await];
    assert!(any > some && some > 0 && none == 0, "{any} {some} {none}");
}

#[tokio::test]
async fn a_draft_model_with_a_smaller_vocabulary_skips_unknown_tokens() {
    for vocabulary in [VOCABULARY / 2, VOCABULARY + 50] {
        let differences = DraftDifferences { vocabulary: Some(vocabulary), ..DraftDifferences::default() };
        let few = Sampling { allowed_token_ids: Some((0..VOCABULARY / 3).collect()), ..Sampling::greedy() };
        let known: Vec<_> = prompt(1, 20).iter().map(|token| token % 100).collect();
        let known = Request { sampling: few, draft: rule(4), ..request(&known, 50) };
        let reports = steps(known.clone(), SimCosts::default(), differences.clone()).await;
        assert!(sum(&reports, |report| report.accepted_tokens) > 20);
        assert_eq!(sum(&reports, |report| report.drafted_tokens - report.accepted_tokens), 0);
        let others = Request { prompt: vec![VOCABULARY - 1; 20], ..known };
        let reports = steps(others, SimCosts::default(), differences).await;
        assert_eq!(sum(&reports, |report| report.drafted_tokens) > 0, vocabulary > VOCABULARY);
    }
}

#[tokio::test]
async fn texts_that_are_too_long_for_the_draft_model_get_no_drafts() {
    let differences = DraftDifferences { tokens_max: Some(50), ..DraftDifferences::default() };
    let request = Request { draft: rule(4), ..request(&prompt(1, 20), 100) };
    let reports = steps(request, SimCosts::default(), differences).await;
    let of = |reports: &[StepReport]| sum(reports, |report| report.drafted_tokens);
    assert!(of(&reports[..20]) > 10 && of(&reports[31..]) == 0);
}

#[test]
fn a_draft_model_with_an_incompatible_cache_is_rejected() {
    let refused = |blocks: u32, block_tokens: u32| {
        let setup = Setup::new(100);
        let mut other = Setup::new(blocks);
        other.sim.block_tokens = block_tokens;
        setup.start_with(drafted(draft(&other, DraftDifferences::default()))).err()
    };
    assert!(refused(100, 8).is_none() && refused(101, 8).is_none());
    for error in [refused(99, 8), refused(100, 16)] {
        assert!(matches!(error, Some(StartError::DraftCache { .. })), "{error:?}");
    }
}

/// Returns the probability of each sequence of three words, from the log probabilities of the model.
async fn expected(base: &Request, words: &[u32], temperature: f32) -> Vec<f64> {
    let engine = Setup::new(500).start();
    let mut probabilities = vec![(Vec::new(), 1.0)];
    for _ in 0..3 {
        let mut longer = Vec::new();
        for (said, probability) in probabilities {
            let prompt = [&base.prompt[..], &said].concat();
            let sampling = Sampling { logprobs: Some(VOCABULARY), ..Sampling::greedy() };
            let draft_request = Request { sampling, ..request(&prompt, 1) };
            let events = events(engine.handle().submit(draft_request).unwrap()).await;
            let Some(Event::Token { logprobs: Some(all), .. }) = events.get(1) else { panic!("{events:?}") };
            let weight = |word: &u32| {
                let found = all.top.iter().find(|top| top.token == *word).unwrap();
                f64::from(found.logprob / temperature).exp()
            };
            let total: f64 = words.iter().map(weight).sum();
            let extend = |word: &u32| ([&said[..], &[*word]].concat(), probability * weight(word) / total);
            longer.extend(words.iter().map(extend));
        }
        probabilities = longer;
    }
    probabilities.into_iter().map(|(_, probability)| probability).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drafts_preserve_the_sampling_distribution() {
    const REQUESTS: u64 = 1500;
    const SEQUENCES: u32 = 16;
    let words: Vec<u32> = vec![11, 57, 101, 160, 222, 280];
    let temperature = 4.0;
    let sampling =
        Sampling { temperature, allowed_token_ids: Some(words.clone().into()), ..Sampling::greedy() };
    // The first token is sampled when the prompt is computed; drafts are proposed for the second and the third token.
    let base = Request { sampling, num_sequences: SEQUENCES, draft: rule(2), ..request(&prompt(3, 20), 4) };
    let expected = expected(&base, &words, temperature).await;
    for wrong in [0, 400, 1000] {
        let (engine, reports) =
            start(Setup::new(3000), DraftDifferences { wrong, ..DraftDifferences::default() });
        let mut seen = vec![0.0; expected.len()];
        for seed in 0..REQUESTS {
            let sampling = Sampling { seed, ..base.sampling.clone() };
            let outcome =
                outcome(engine.handle().submit(Request { sampling, ..base.clone() }).unwrap()).await;
            for tokens in outcome.tokens {
                let place = |token: &u32| words.iter().position(|word| word == token).unwrap();
                seen[tokens[..3]
                    .iter()
                    .fold(0, |place_before, token| place_before * words.len() + place(token))] += 1.0;
            }
        }
        engine.shutdown().unwrap();
        let reports: Vec<_> = reports.iter().collect();
        let (drafted, accepted) =
            (sum(&reports, |report| report.drafted_tokens), sum(&reports, |report| report.accepted_tokens));
        assert!(drafted > 20_000 && (accepted == drafted) == (wrong == 0), "{accepted} of {drafted}");
        let total = (REQUESTS * u64::from(SEQUENCES)) as f64;
        let cells = || expected.iter().map(|probability| probability * total).zip(&seen);
        let distance = |(expected, seen): (f64, f64)| (seen - expected).powi(2) / expected;
        let rare: (f64, f64) = cells()
            .filter(|cell| cell.0 < 8.0)
            .fold((1e-9, 0.0), |all, cell| (all.0 + cell.0, all.1 + cell.1));
        let common: Vec<(f64, f64)> =
            cells().filter(|cell| cell.0 >= 8.0).map(|cell| (cell.0, *cell.1)).collect();
        let degrees = common.len() as f64;
        let chi_square: f64 =
            common.into_iter().map(distance).sum::<f64>() + if rare.0 > 8.0 { distance(rare) } else { 0.0 };
        // The tolerance is six standard deviations.
        assert!(
            degrees > 50.0 && chi_square < degrees + 6.0 * (2.0 * degrees).sqrt(),
            "chi-square is {chi_square} with {degrees} degrees of freedom"
        );
    }
}
