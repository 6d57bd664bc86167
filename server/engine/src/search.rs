//! Beam search: decides which beams continue, and which of them become results. It receives the candidates of each
//! beam, and has no access to logits or blocks.
//!
//! The search is that of openvino_genai, so that the same model produces the same results. It is the search of
//! `transformers` (Wolf et al., 2020) with the groups of Diverse Beam Search (Vijayakumar et al., 2016):
//!
//! - A beam's score is the sum of its tokens' log probabilities. The continuations of a group's `B` beams are ranked by
//!   score. Those that end become results if they are among the first `B`. The first `B` that do not end continue.
//! - A result's score is divided by the number of its tokens to the power of `length_penalty`. A group has at most `B`
//!   results.
//! - A group ends if none of its beams continues, or according to [`EarlyStopping`], judged by the best beam *before*
//!   the step. All groups end at the maximum number of tokens, and beams that have not ended then become results.
//!
//! ```text
//! add_candidates(slot, …) for each beam ─► advance ─► moves: slot 2 continues slot 0 with token 17, … ─► finish_step
//! ```
//!
//! A beam occupies one of the request's sequences, its *slot*. A slot without a beam computes the same tokens as the
//! best beam, so that the slot has the same length when a beam needs it.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use server_scheduler::{FinishReason, StopCriteria, TokenId};

use crate::logprobs::{TokenLogprob, TokenLogprobs};
use merge::{Merge, MergedScore};

mod merge;
#[cfg(test)]
mod tests;

/// The parameters of a beam search. The width is the number of sequences of the request.
#[derive(Clone, Debug)]
pub struct BeamSearch {
    /// The number of results that the client receives, best first, at most the width.
    pub num_results: u32,
    /// The number of groups into which the beams are divided, so that the groups find different texts. It must divide
    /// the width.
    pub num_groups: u32,
    /// The score of a result is divided by its length to the power of this number.
    pub length_penalty: f32,
    /// The value subtracted from the log probability of a token for each beam of an earlier group that has the same
    /// token in the same step.
    pub diversity_penalty: f32,
    /// The condition under which a group with as many results as beams ends.
    pub early_stopping: EarlyStopping,
    /// The stop strings, which end a beam when they occur in its text.
    pub stop_strings: Option<Arc<dyn TextStop>>,
}

/// The condition under which a group with as many results as beams ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EarlyStopping {
    /// The group ends immediately.
    Immediate,
    /// The group ends when the best beam, with its current length, is not better than the worst result.
    Heuristic,
    /// The group ends when the best beam cannot become better than the worst result.
    Never,
}

/// Decides from the text of beams whether they end, because the engine has no access to texts.
pub trait TextStop: fmt::Debug + Send + Sync {
    /// Whether a beam ends with `token`. `before` yields the previous tokens of the beam, last first.
    fn ends(&self, token: TokenId, before: &mut dyn Iterator<Item = TokenId>) -> bool;
}

impl BeamSearch {
    /// The name of the first parameter that is invalid for this width, if there is one.
    pub(crate) fn invalid_parameter(&self, width: u32) -> Option<&'static str> {
        let valid = [
            ("num_results", (1..=width).contains(&self.num_results)),
            ("num_groups", self.num_groups > 0 && width.is_multiple_of(self.num_groups)),
            ("length_penalty", self.length_penalty.is_finite()),
            ("diversity_penalty", self.diversity_penalty.is_finite()),
        ];
        valid.into_iter().find(|(_, valid)| !valid).map(|(name, _)| name)
    }
}

/// The candidates for the next token of a beam.
#[derive(Clone, Debug, Default)]
pub(crate) struct Candidates {
    /// The candidates, most probable first: at most [`Search::num_candidates`].
    pub(crate) tokens: Vec<Candidate>,
    /// The most probable tokens in the model's own distribution, if they were requested.
    pub(crate) top: Option<Vec<TokenLogprob>>,
    /// Whether the beam is complete because no token can follow.
    pub(crate) is_complete: bool,
}

/// A candidate for the next token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    pub(crate) token: TokenId,
    /// The log probability that is added to the score of the beam.
    pub(crate) logprob: f32,
    /// The log probability in the model's own distribution.
    pub(crate) model_logprob: f32,
}

/// The continuation of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Move {
    pub(crate) slot: u32,
    /// The slot whose tokens this one continues: itself, or a slot that continues its own tokens.
    pub(crate) parent: u32,
    pub(crate) token: TokenId,
    /// Whether the slot has a beam.
    pub(crate) is_beam: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SearchResult {
    pub(crate) tokens: Vec<(TokenId, Option<Box<TokenLogprobs>>)>,
    pub(crate) reason: FinishReason,
}

/// A search in progress.
#[derive(Debug)]
pub(crate) struct Search {
    params: BeamSearch,
    stop: StopCriteria,
    groups: Vec<Group>,
    /// The tokens of all beams and results so far: at most `2 * width` nodes for each step.
    nodes: Vec<Node>,
    generated: u32,
    /// The candidates of each slot for this step.
    candidates: Vec<Option<Candidates>>,
    moves: Vec<Move>,
}

/// A token of a beam, and the node before it.
#[derive(Debug)]
struct Node {
    parent: Option<u32>,
    token: TokenId,
    logprobs: Option<Box<TokenLogprobs>>,
}

#[derive(Debug)]
struct Group {
    slots: Range<u32>,
    /// The beams that have not ended, best first.
    ongoing: Vec<Beam>,
    results: Vec<EndedBeam>,
    has_ended: bool,
}

#[derive(Clone, Copy, Debug)]
struct Beam {
    slot: u32,
    tail: Option<u32>,
    score: f64,
}

#[derive(Debug)]
struct EndedBeam {
    tail: Option<u32>,
    score: f64,
    reason: FinishReason,
}

/// A continuation of a beam. Without a token, the beam is complete.
#[derive(Debug)]
struct Continuation {
    parent: Beam,
    token: Option<ContinuationToken>,
    score: f64,
}

#[derive(Debug)]
struct ContinuationToken {
    token: TokenId,
    logprobs: Option<Box<TokenLogprobs>>,
}

/// The continuations of beams, best first. The candidates of each beam are already sorted, so they are merged lazily.
fn merge_continuations(candidates: &[(Beam, Candidates)]) -> impl Iterator<Item = Continuation> {
    let scores = candidates.iter().map(|(parent, candidates)| {
        let complete = candidates.is_complete.then_some(parent.score);
        let tokens = if candidates.is_complete { &[][..] } else { &candidates.tokens };
        let scores = tokens.iter().map(|candidate| parent.score + f64::from(candidate.logprob));
        complete.into_iter().chain(scores)
    });
    Merge::new(scores).map(move |MergedScore { score, source, index }| {
        let (parent, Candidates { tokens, top, is_complete }) = &candidates[source];
        let token = (!is_complete).then(|| {
            let candidate = tokens[index];
            let chosen = TokenLogprob { token: candidate.token, logprob: candidate.model_logprob };
            let logprobs = top.clone().map(|top| Box::new(TokenLogprobs { chosen, top }));
            ContinuationToken { token: candidate.token, logprobs }
        });
        Continuation { parent: *parent, token, score }
    })
}

impl Search {
    /// Creates a search at the end of its prompt. `params` must be valid for the width. The beams end according to
    /// `stop`.
    pub(crate) fn new(params: BeamSearch, width: u32, stop: StopCriteria) -> Self {
        let size = width / params.num_groups;
        let group = |index| {
            let slots = index * size..(index + 1) * size;
            let first = Beam { slot: slots.start, tail: None, score: 0.0 };
            Group { slots, ongoing: vec![first], results: Vec::new(), has_ended: false }
        };
        Self {
            groups: (0..params.num_groups).map(group).collect(),
            params,
            stop,
            nodes: Vec::new(),
            generated: 0,
            candidates: (0..width).map(|_| None).collect(),
            moves: Vec::new(),
        }
    }

    /// Whether a slot has a beam, whose candidates [`Self::advance`] needs.
    pub(crate) fn has_beam(&self, slot: u32) -> bool {
        let groups = self.groups.iter().filter(|group| !group.has_ended);
        groups.flat_map(|group| &group.ongoing).any(|beam| beam.slot == slot)
    }

    /// The number of candidates that [`Self::advance`] needs for each beam. More are needed with a diversity penalty,
    /// because it can move later candidates to the front.
    pub(crate) fn num_candidates(&self) -> u32 {
        let (width, size) = (self.candidates.len() as u32, self.group_size());
        2 * size + if self.params.diversity_penalty == 0.0 { 0 } else { width - size }
    }

    /// Sets the candidates for the next token of the beam in a slot.
    pub(crate) fn add_candidates(&mut self, slot: u32, candidates: Candidates) {
        self.candidates[slot as usize] = Some(candidates);
    }

    /// Advances all beams by a token. The candidates of all beams must be set. Returns the continuations of the slots
    /// of groups that have not ended.
    pub(crate) fn advance(&mut self) -> &[Move] {
        self.moves.clear();
        let mut used = Vec::new();
        for index in 0..self.groups.len() {
            if !self.groups[index].has_ended {
                self.advance_group(index, &mut used);
            }
        }
        self.generated += 1;
        self.candidates.fill_with(|| None);
        &self.moves
    }

    /// Finishes a step. `complete` contains the slots of the beams after which no token is allowed. Returns whether the
    /// search has ended.
    pub(crate) fn finish_step(&mut self, complete: &[u32]) -> bool {
        if self.generated >= self.stop.max_tokens {
            for index in 0..self.groups.len() {
                self.end_group(index, complete);
            }
        }
        self.groups.iter().all(|group| group.has_ended)
    }

    /// The number of results that were requested.
    pub(crate) fn num_results(&self) -> u32 {
        self.params.num_results
    }

    /// The results, best first. There can be fewer than requested if guides or bans exclude further ones.
    pub(crate) fn results(&self) -> Vec<SearchResult> {
        let mut ended: Vec<&EndedBeam> = self.groups.iter().flat_map(|group| &group.results).collect();
        // The sort is stable, so that earlier results precede later ones with equal scores.
        ended.sort_by(|a, b| b.score.total_cmp(&a.score));
        let results = ended.into_iter().take(self.params.num_results as usize).map(|ended| {
            let mut tokens: Vec<_> =
                self.path(ended.tail).map(|node| (node.token, node.logprobs.clone())).collect();
            tokens.reverse();
            SearchResult { tokens, reason: ended.reason }
        });
        results.collect()
    }

    /// The number of beams in a group.
    fn group_size(&self) -> u32 {
        self.candidates.len() as u32 / self.params.num_groups
    }

    /// Advances a group. `used` contains the new tokens of the beams of earlier groups, and receives those of this
    /// group.
    fn advance_group(&mut self, index: usize, used: &mut Vec<TokenId>) {
        let size = self.group_size() as usize;
        let best = self.groups[index].ongoing[0];
        let candidates = self.take_candidates(index, used);
        let mut children = Vec::with_capacity(size);
        for (rank, continuation) in merge_continuations(&candidates).enumerate() {
            if children.len() == size {
                break;
            }
            match &continuation.token {
                Some(next) if !self.ends(&continuation.parent, next.token) => {
                    children.push(continuation);
                }
                _ if rank < size => {
                    let tail = self.push(continuation.parent.tail, continuation.token);
                    let length = self.generated + u32::from(tail != continuation.parent.tail);
                    self.add_result(index, tail, continuation.score, length, FinishReason::Stop);
                }
                _ => {}
            }
        }
        used.extend(children.iter().filter_map(|child| child.token.as_ref()).map(|next| next.token));
        self.groups[index].has_ended = children.is_empty() || self.is_done(index, best);
        if !self.groups[index].has_ended {
            self.assign_slots(index, children);
        }
    }

    /// The candidates of each beam of a group, best first after the diversity penalty.
    fn take_candidates(&mut self, index: usize, used: &[TokenId]) -> Vec<(Beam, Candidates)> {
        let candidates_max = 2 * self.group_size() as usize;
        let penalty = self.params.diversity_penalty;
        let mut counts: HashMap<TokenId, u32> = HashMap::new();
        if penalty != 0.0 {
            used.iter().for_each(|&token| *counts.entry(token).or_default() += 1);
        }
        let beams = self.groups[index].ongoing.iter().map(|&parent| {
            let candidates = self.candidates[parent.slot as usize].take();
            let mut candidates = candidates.expect("invariant: the candidates of all beams are set");
            if !counts.is_empty() {
                for candidate in &mut candidates.tokens {
                    let count = counts.get(&candidate.token).copied().unwrap_or(0);
                    candidate.logprob -= penalty * count as f32;
                }
                candidates.tokens.sort_by(|a, b| b.logprob.total_cmp(&a.logprob));
            }
            candidates.tokens.truncate(candidates_max);
            (parent, candidates)
        });
        beams.collect()
    }

    /// Whether a beam ends with this token.
    fn ends(&self, beam: &Beam, token: TokenId) -> bool {
        if self.generated >= self.stop.min_tokens && self.stop.stop_token_ids.contains(&token) {
            return true;
        }
        let Some(stop_strings) =
            self.params.stop_strings.as_ref().filter(|_| self.generated >= self.stop.min_tokens)
        else {
            return false;
        };
        stop_strings.ends(token, &mut self.path(beam.tail).map(|node| node.token))
    }

    /// Assigns a slot to each child. The first child of a beam gets the beam's slot, so that no parent is overwritten.
    fn assign_slots(&mut self, index: usize, children: Vec<Continuation>) {
        let mut ongoing: Vec<Beam> = Vec::with_capacity(children.len());
        let mut moves: Vec<Move> = Vec::with_capacity(self.group_size() as usize);
        let mut unassigned = Vec::new();
        for Continuation { parent, token, score } in children {
            let token_id = token.as_ref().map_or(0, |next| next.token);
            let tail = self.push(parent.tail, token);
            let is_first = moves.iter().all(|other| other.parent != parent.slot);
            if is_first {
                moves.push(Move { slot: parent.slot, parent: parent.slot, token: token_id, is_beam: true });
            } else {
                unassigned.push((ongoing.len(), parent.slot, token_id));
            }
            ongoing.push(Beam { slot: parent.slot, tail, score });
        }
        let best = moves[0];
        let free =
            self.groups[index].slots.clone().filter(|slot| ongoing.iter().all(|beam| beam.slot != *slot));
        let mut unassigned = unassigned.into_iter();
        for slot in free.collect::<Vec<_>>() {
            moves.push(match unassigned.next() {
                Some((child, parent, token)) => {
                    ongoing[child].slot = slot;
                    Move { slot, parent, token, is_beam: true }
                }
                None => Move { slot, is_beam: false, ..best },
            });
        }
        self.groups[index].ongoing = ongoing;
        self.moves.extend(moves);
    }

    /// Whether a group has ended. `best` is its best beam before this step.
    fn is_done(&self, index: usize, best: Beam) -> bool {
        let results = &self.groups[index].results;
        if results.len() < self.group_size() as usize {
            return false;
        }
        let worst = results.iter().map(|ended| ended.score).fold(f64::INFINITY, f64::min);
        let length = match self.params.early_stopping {
            EarlyStopping::Immediate => return true,
            EarlyStopping::Never if self.params.length_penalty > 0.0 => self.stop.max_tokens,
            EarlyStopping::Heuristic | EarlyStopping::Never => self.generated,
        };
        worst >= self.normalized_score(best.score, length)
    }

    /// Ends a group that has reached the maximum number of tokens. Its beams become results.
    fn end_group(&mut self, index: usize, complete: &[u32]) {
        if std::mem::replace(&mut self.groups[index].has_ended, true) {
            return;
        }
        for beam in std::mem::take(&mut self.groups[index].ongoing) {
            let is_complete = complete.contains(&beam.slot);
            let reason = if is_complete { FinishReason::Stop } else { FinishReason::Length };
            self.add_result(index, beam.tail, beam.score, self.generated, reason);
        }
    }

    /// Adds a result with this number of tokens, if it is among the best of its group.
    fn add_result(&mut self, index: usize, tail: Option<u32>, score: f64, length: u32, reason: FinishReason) {
        let score = self.normalized_score(score, length);
        let size = self.group_size() as usize;
        let results = &mut self.groups[index].results;
        results.push(EndedBeam { tail, score, reason });
        if results.len() > size {
            let scores = results.iter().map(|ended| ended.score).enumerate();
            let worst = scores.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(index, _)| index);
            worst.map(|worst| results.remove(worst));
        }
    }

    fn normalized_score(&self, score: f64, length: u32) -> f64 {
        score / f64::from(length.max(1)).powf(f64::from(self.params.length_penalty))
    }

    fn push(&mut self, parent: Option<u32>, token: Option<ContinuationToken>) -> Option<u32> {
        let Some(ContinuationToken { token, logprobs }) = token else { return parent };
        self.nodes.push(Node { parent, token, logprobs });
        Some(self.nodes.len() as u32 - 1)
    }

    /// The nodes of a beam, last first.
    fn path(&self, tail: Option<u32>) -> impl Iterator<Item = &Node> {
        std::iter::successors(tail, |&node| self.nodes[node as usize].parent)
            .map(|node| &self.nodes[node as usize])
    }
}
