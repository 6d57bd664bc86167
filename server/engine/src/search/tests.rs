use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::*;

const VOCABULARY: u32 = 6;
/// The token that ends a text.
const END: TokenId = 0;

/// Returns the log probabilities of the token after `text`, which depend on all tokens of `text`.
fn model(seed: u64, text: &[TokenId]) -> Vec<f32> {
    let mut state = crate::hash::mix(seed);
    for &token in text {
        state = crate::hash::mix(state ^ u64::from(token));
    }
    let mut rng = StdRng::seed_from_u64(state);
    let logits: Vec<f64> = (0..VOCABULARY).map(|_| rng.random_range(-3.0..3.0)).collect();
    let sum = logits.iter().map(|logit| logit.exp()).sum::<f64>().ln();
    logits.iter().map(|logit| (logit - sum) as f32).collect()
}

#[derive(Clone, Debug)]
struct Case {
    seed: u64,
    width: u32,
    params: BeamSearch,
    stop: StopCriteria,
}

fn case(seed: u64) -> Case {
    let mut rng = StdRng::seed_from_u64(seed);
    let groups = [1, 1, 2, 3][rng.random_range(0..4)];
    let width = groups * rng.random_range(1..4);
    let end =
        [EarlyStopping::Immediate, EarlyStopping::Heuristic, EarlyStopping::Never][rng.random_range(0..3)];
    let params = BeamSearch {
        num_results: rng.random_range(1..=width),
        num_groups: groups,
        length_penalty: [0.0, 0.5, 1.0, 2.0, -1.0][rng.random_range(0..5)],
        diversity_penalty: [0.0, 0.7][rng.random_range(0..2)],
        early_stopping: end,
        stop_strings: None,
    };
    let stop = StopCriteria { stop_token_ids: vec![END], max_tokens: rng.random_range(1..9), min_tokens: 0 };
    Case { seed, width, params, stop }
}

/// Returns the parameters of a search with one group.
fn params(num_results: u32, early_stopping: EarlyStopping) -> BeamSearch {
    BeamSearch {
        num_results,
        num_groups: 1,
        length_penalty: 1.0,
        diversity_penalty: 0.0,
        early_stopping,
        stop_strings: None,
    }
}

/// Runs a search, recording the text of each slot independently of the search, and returns the results.
fn search_results(case: &Case) -> Vec<(Vec<TokenId>, FinishReason)> {
    let mut search = Search::new(case.params.clone(), case.width, case.stop.clone());
    let mut texts = vec![Vec::new(); case.width as usize];
    let mut steps = 0;
    loop {
        for slot in (0..case.width).filter(|&slot| search.has_beam(slot)).collect::<Vec<_>>() {
            let mut candidates: Vec<Candidate> = (0..)
                .zip(model(case.seed, &texts[slot as usize]))
                .map(|(token, logprob)| Candidate { token, logprob, model_logprob: logprob })
                .collect();
            candidates.sort_by(|a, b| b.logprob.total_cmp(&a.logprob));
            candidates.truncate(search.num_candidates() as usize);
            search.add_candidates(slot, Candidates { tokens: candidates, top: None, is_complete: false });
        }
        let moves = search.advance().to_vec();
        steps += 1;
        if search.finish_step(&[]) {
            break;
        }
        let before = texts.clone();
        for to in &moves {
            let from = moves.iter().find(|from| from.slot == to.parent).expect("a parent continues");
            assert_eq!(from.parent, from.slot, "a parent continues its own tokens");
            texts[to.slot as usize].clone_from(&before[to.parent as usize]);
            texts[to.slot as usize].push(to.token);
        }
        assert!(moves.iter().all(|to| to.is_beam == search.has_beam(to.slot)));
    }
    assert!(steps <= case.stop.max_tokens);
    let tokens =
        |result: SearchResult| (result.tokens.into_iter().map(|(token, _)| token).collect(), result.reason);
    search.results().into_iter().map(tokens).collect()
}

/// Returns the results of a straightforward implementation of the search's definition, with whole texts.
fn expected(case: &Case) -> Vec<(Vec<TokenId>, FinishReason)> {
    type Text = (Vec<TokenId>, f64);
    let BeamSearch {
        num_groups: groups,
        length_penalty,
        diversity_penalty,
        early_stopping: end,
        num_results: results,
        ..
    } = case.params;
    let size = (case.width / groups) as usize;
    let judged = |score: f64, length: usize| score / (length.max(1) as f64).powf(f64::from(length_penalty));
    let mut ongoing: Vec<Vec<Text>> = vec![vec![(Vec::new(), 0.0)]; groups as usize];
    let mut ended: Vec<Vec<(Vec<TokenId>, f64, FinishReason)>> = vec![Vec::new(); groups as usize];
    for length in 1..=case.stop.max_tokens as usize {
        let mut used: Vec<TokenId> = Vec::new();
        for group in 0..groups as usize {
            if ongoing[group].is_empty() {
                continue;
            }
            let mut all: Vec<Text> = Vec::new();
            for (text, score) in &ongoing[group] {
                let mut next: Vec<(TokenId, f32)> = (0..).zip(model(case.seed, text)).collect();
                for (token, logprob) in &mut next {
                    *logprob -=
                        diversity_penalty * used.iter().filter(|other| *other == token).count() as f32;
                }
                next.sort_by(|a, b| b.1.total_cmp(&a.1));
                for (token, logprob) in next.into_iter().take(2 * size) {
                    all.push(([&text[..], &[token]].concat(), score + f64::from(logprob)));
                }
            }
            all.sort_by(|a, b| b.1.total_cmp(&a.1));
            let best = ongoing[group][0].clone();
            let mut children: Vec<Text> = Vec::new();
            for (rank, (text, score)) in all.into_iter().enumerate() {
                if children.len() == size {
                    break;
                }
                if text.last() != Some(&END) {
                    children.push((text, score));
                } else if rank < size {
                    ended[group].push((text, judged(score, length), FinishReason::Stop));
                    ended[group].sort_by(|a, b| b.1.total_cmp(&a.1));
                    ended[group].truncate(size);
                }
            }
            used.extend(children.iter().filter_map(|child| child.0.last()));
            let worst = ended[group].last().map_or(0.0, |ended| ended.1);
            let is_full = ended[group].len() == size;
            let reach = match end {
                EarlyStopping::Immediate => f64::NEG_INFINITY,
                EarlyStopping::Never if length_penalty > 0.0 => judged(best.1, case.stop.max_tokens as usize),
                _ => judged(best.1, length - 1),
            };
            ongoing[group] = if is_full && worst >= reach { Vec::new() } else { children };
        }
    }
    for (ongoing, ended) in ongoing.into_iter().zip(&mut ended) {
        for (text, score) in ongoing {
            let score = judged(score, text.len());
            ended.push((text, score, FinishReason::Length));
        }
        ended.sort_by(|a, b| b.1.total_cmp(&a.1));
        ended.truncate(size);
    }
    let mut all = ended.concat();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    all.into_iter().take(results as usize).map(|(text, _, reason)| (text, reason)).collect()
}

#[test]
fn agrees_with_the_definition() {
    let mut ends = [0, 0];
    for seed in 0..4000 {
        let case = case(seed);
        let results = search_results(&case);
        assert_eq!(results, expected(&case), "{case:?}");
        for (_, reason) in results {
            ends[usize::from(reason == FinishReason::Stop)] += 1;
        }
    }
    assert!(ends.iter().all(|&count| count > 500), "{ends:?}");
}

#[test]
fn a_search_over_all_texts_finds_the_most_probable_one() {
    for seed in 0..50 {
        let stop = StopCriteria { stop_token_ids: vec![END], max_tokens: 3, min_tokens: 0 };
        let params = BeamSearch { length_penalty: 0.0, ..params(1, EarlyStopping::Never) };
        let case = Case { seed, width: 150, params, stop };
        let mut texts = vec![(Vec::new(), 0.0)];
        let mut best: (f64, Vec<TokenId>) = (f64::NEG_INFINITY, Vec::new());
        for length in 1..=3 {
            let mut longer = Vec::new();
            for (text, score) in texts {
                for (token, logprob) in (0..).zip(model(seed, &text)) {
                    let next = ([&text[..], &[token]].concat(), score + f64::from(logprob));
                    if token != END && length < 3 {
                        longer.push(next);
                    } else if next.1 > best.0 {
                        best = (next.1, next.0);
                    }
                }
            }
            texts = longer;
        }
        assert_eq!(search_results(&case)[0].0, best.1, "seed {seed}");
    }
}

#[test]
fn a_slot_without_a_beam_follows_the_best_beam() {
    let stop = StopCriteria { stop_token_ids: vec![END], max_tokens: 9, min_tokens: 0 };
    let mut search = Search::new(params(2, EarlyStopping::Heuristic), 2, stop);
    let options = |tokens: &[(TokenId, f32)]| Candidates {
        tokens: tokens
            .iter()
            .map(|&(token, logprob)| Candidate { token, logprob, model_logprob: logprob })
            .collect(),
        ..Candidates::default()
    };
    let to = |slot, from, token, is_beam| Move { slot, parent: from, token, is_beam };
    search.add_candidates(0, options(&[(5, -0.1)]));
    assert_eq!(search.advance(), [to(0, 0, 5, true), to(1, 0, 5, false)]);
    search.add_candidates(0, options(&[(3, -0.5), (4, -0.6)]));
    assert_eq!(search.advance(), [to(0, 0, 3, true), to(1, 0, 4, true)]);
    search.add_candidates(0, options(&[(1, -2.0)]));
    search.add_candidates(1, options(&[(1, -0.1), (2, -0.2)]));
    assert_eq!(search.advance(), [to(1, 1, 1, true), to(0, 1, 2, true)]);
    // One beam is complete: it becomes a result without a further token.
    search.add_candidates(0, Candidates { is_complete: true, ..Candidates::default() });
    search.add_candidates(1, options(&[(END, -0.1)]));
    assert_eq!(search.advance(), []);
    assert!(search.finish_step(&[]));
    let texts: Vec<Vec<TokenId>> = search
        .results()
        .into_iter()
        .map(|result| result.tokens.into_iter().map(|(token, _)| token).collect())
        .collect();
    assert_eq!(texts, [vec![5, 4, 1, END], vec![5, 4, 2]]);
}

/// Ends a beam whose last tokens equal the stored tokens.
#[derive(Debug)]
struct StopTokens(Vec<TokenId>);

impl TextStop for StopTokens {
    fn ends(&self, token: TokenId, before: &mut dyn Iterator<Item = TokenId>) -> bool {
        let last = std::iter::once(token).chain(before).take(self.0.len());
        last.eq(self.0.iter().rev().copied())
    }
}

#[test]
fn a_stop_string_ends_a_beam() {
    let stop_strings: Option<Arc<dyn TextStop>> = Some(Arc::new(StopTokens(vec![2, 3])));
    let params = BeamSearch { stop_strings, ..params(1, EarlyStopping::Immediate) };
    let stop = StopCriteria { stop_token_ids: vec![END], max_tokens: 9, min_tokens: 2 };
    let mut search = Search::new(params, 1, stop);
    for token in [2, 3, 2] {
        search.add_candidates(
            0,
            Candidates {
                tokens: vec![Candidate { token, logprob: -0.1, model_logprob: -0.1 }],
                ..Candidates::default()
            },
        );
        assert_eq!(search.advance(), [Move { slot: 0, parent: 0, token, is_beam: true }]);
    }
    search.add_candidates(
        0,
        Candidates {
            tokens: vec![Candidate { token: 3, logprob: -0.1, model_logprob: -0.1 }],
            ..Candidates::default()
        },
    );
    assert_eq!(search.advance(), []);
    assert!(search.finish_step(&[]));
    assert_eq!(search.results()[0].reason, FinishReason::Stop);
    assert_eq!(search.results()[0].tokens.len(), 4);
}
