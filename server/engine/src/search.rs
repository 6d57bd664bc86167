//! Beam search: which continuations of a prompt go on together, and which of them are results. It decides nothing
//! else: it sees no logits, knows no blocks, and is told the candidates of each beam.
//!
//! The search is that of openvino_genai (which is the one of `transformers`, Wolf et al. 2020, over the groups of Diverse
//! Beam Search, Vijayakumar et al. 2016), so that the same model gives the same results:
//!
//! - A beam's score is the sum of its tokens' log probabilities. Of the `2B` best continuations of a group's `B` beams
//!   those that end are results if they are among the first `B`; the first `B` others go on.
//! - A result's score is divided by the number of its tokens to the power of `length_penalty`. A group keeps `B` results.
//! - A group has ended when [`SearchEnd`] says so, by the best beam *before* the step; all have when there are as
//!   many tokens as there may be, and what goes on then is a result too.
//!
//! ```text
//! see(slot, options) for each beam ─► advance ─► moves: slot 2 goes on from slot 0 with token 17, … ─► close
//! ```
//!
//! A beam lives in one of the request's sequences, its *slot*. There are always as many slots as beams at most: one that
//! has no beam at the moment computes what the best one does, so that it is level when it is needed.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use server_scheduler::{FinishReason, StopCriteria, TokenId};

use crate::request::{TokenLogprob, TokenLogprobs};
use merge::{Merge, Next};

mod merge;
#[cfg(test)]
mod tests;

/// How the sequences of a request search for the most probable texts together. Their number is the width.
#[derive(Clone, Debug)]
pub struct Beams {
    /// How many of the results are told, best first: no more than the width. Events carry which.
    pub results: u32,
    /// Groups, of as many beams each, that see to it that they differ. Divides the width.
    pub groups: u32,
    /// A result's score is divided by its length to the power of this.
    pub length_penalty: f32,
    /// Subtracted from the log probability of a token for each beam of an earlier group that takes it in the same step.
    pub diversity_penalty: f32,
    /// When a group has ended that has as many results as beams.
    pub end: SearchEnd,
    /// Ends a beam by its text.
    pub stops: Option<Arc<dyn TextStop>>,
}

/// When a group has ended that has as many results as beams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SearchEnd {
    /// At once.
    Early,
    /// When the best beam, ended as it is, is no better than the worst result.
    Heuristic,
    /// When the best beam can become no better than the worst result.
    Never,
}

/// Ends beams by their text, of which the engine knows nothing.
pub trait TextStop: fmt::Debug + Send + Sync {
    /// How many of the last tokens it has to see.
    fn tokens(&self) -> usize;
    /// Whether a text ends with the last of these tokens, which are the last ones of a beam.
    fn ends(&self, tokens: &[TokenId]) -> bool;
}

impl Beams {
    /// The name of the first field that has no meaning for so many beams, if there is one.
    pub(crate) fn invalid(&self, width: u32) -> Option<&'static str> {
        let valid = [
            ("results", (1..=width).contains(&self.results)),
            ("groups", self.groups > 0 && width.is_multiple_of(self.groups)),
            ("length_penalty", self.length_penalty.is_finite()),
            ("diversity_penalty", self.diversity_penalty.is_finite()),
        ];
        valid.into_iter().find(|(_, valid)| !valid).map(|(name, _)| name)
    }
}

/// What may follow a beam.
#[derive(Clone, Debug, Default)]
pub(crate) struct Options {
    /// Most probable first, at least [`Search::options`] of them if there are as many.
    pub(crate) candidates: Vec<Candidate>,
    /// The most probable ones of the model's own distribution, if they are to be told.
    pub(crate) top: Option<Vec<TokenLogprob>>,
    /// Whether nothing can follow: it is complete as it is.
    pub(crate) is_complete: bool,
}

/// A token that may follow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    pub(crate) token: TokenId,
    /// By which the beam is judged.
    pub(crate) logprob: f32,
    /// In the model's own distribution.
    pub(crate) own: f32,
}

/// What a slot goes on with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Move {
    pub(crate) slot: u32,
    /// From whose tokens: its own, or those of a slot that goes on from its own.
    pub(crate) from: u32,
    pub(crate) token: TokenId,
    /// Whether a beam lives in it.
    pub(crate) is_beam: bool,
}

/// A text that was found.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Found {
    pub(crate) tokens: Vec<(TokenId, Option<Box<TokenLogprobs>>)>,
    pub(crate) reason: FinishReason,
}

/// A search in progress.
#[derive(Debug)]
pub(crate) struct Search {
    beams: Beams,
    stop: StopCriteria,
    groups: Vec<Group>,
    /// The tokens of all beams there ever were: as many as the width at most for each step.
    nodes: Vec<Node>,
    generated: u32,
    /// By slot.
    options: Vec<Option<Options>>,
    moves: Vec<Move>,
}

/// A token of a beam, and which one it follows.
#[derive(Debug)]
struct Node {
    parent: Option<u32>,
    token: TokenId,
    logprobs: Option<Box<TokenLogprobs>>,
}

#[derive(Debug)]
struct Group {
    slots: Range<u32>,
    /// Best first.
    ongoing: Vec<Beam>,
    results: Vec<Ended>,
    has_ended: bool,
}

#[derive(Clone, Copy, Debug)]
struct Beam {
    slot: u32,
    tail: Option<u32>,
    score: f64,
}

#[derive(Debug)]
struct Ended {
    tail: Option<u32>,
    score: f64,
    reason: FinishReason,
}

/// A continuation of a beam. Without a token it ends as it is.
#[derive(Debug)]
struct Continuation {
    parent: Beam,
    token: Option<(Candidate, Option<Box<TokenLogprobs>>)>,
    score: f64,
}

/// The continuations of beams, best first and the first of equals first. The options of each beam are in that order
/// already, so they are merged: what is not asked for is neither sorted nor made.
fn merged(options: &[(Beam, Options)]) -> impl Iterator<Item = Continuation> {
    let scores = options.iter().map(|(parent, options)| {
        let alone = options.is_complete.then_some(parent.score);
        let candidates = if options.is_complete { &[][..] } else { &options.candidates };
        let candidates = candidates.iter().map(|candidate| parent.score + f64::from(candidate.logprob));
        alone.into_iter().chain(candidates)
    });
    Merge::new(scores).map(|Next { score, source, place }| {
        let (parent, Options { candidates, top, is_complete }) = &options[source];
        let token = (!is_complete).then(|| {
            let candidate = candidates[place];
            let chosen = TokenLogprob { token: candidate.token, logprob: candidate.own };
            (candidate, top.clone().map(|top| Box::new(TokenLogprobs { chosen, top })))
        });
        Continuation { parent: *parent, token, score }
    })
}

impl Search {
    /// A search at the end of its prompt, with a width that `beams.groups` divides. `stop` is when beams end.
    pub(crate) fn new(beams: Beams, width: u32, stop: StopCriteria) -> Self {
        let size = width / beams.groups;
        let group = |index| {
            let slots = index * size..(index + 1) * size;
            let first = Beam { slot: slots.start, tail: None, score: 0.0 };
            Group { slots, ongoing: vec![first], results: Vec::new(), has_ended: false }
        };
        Self {
            groups: (0..beams.groups).map(group).collect(),
            beams,
            stop,
            nodes: Vec::new(),
            generated: 0,
            options: (0..width).map(|_| None).collect(),
            moves: Vec::new(),
        }
    }

    /// Whether a beam lives in a slot, whose options [`Self::advance`] has to know.
    pub(crate) fn has_beam(&self, slot: u32) -> bool {
        let groups = self.groups.iter().filter(|group| !group.has_ended);
        groups.flat_map(|group| &group.ongoing).any(|beam| beam.slot == slot)
    }

    /// How many candidates of a beam are looked at: the best of what is left when others' tokens cost more.
    pub(crate) fn options(&self) -> u32 {
        let (width, size) = (self.options.len() as u32, self.size());
        2 * size + if self.beams.diversity_penalty == 0.0 { 0 } else { width - size }
    }

    /// What may follow the beam in a slot.
    pub(crate) fn see(&mut self, slot: u32, options: Options) {
        self.options[slot as usize] = Some(options);
    }

    /// Takes a step, for which the options of all beams have been seen. Answers what the slots of the groups that go on
    /// take.
    pub(crate) fn advance(&mut self) -> &[Move] {
        self.moves.clear();
        let mut taken = Vec::new();
        for index in 0..self.groups.len() {
            if !self.groups[index].has_ended {
                self.advance_group(index, &mut taken);
            }
        }
        self.generated += 1;
        self.options.fill_with(|| None);
        &self.moves
    }

    /// Ends a step, after which nothing can follow the beams of these slots. True if the search has ended.
    pub(crate) fn close(&mut self, complete: &[u32]) -> bool {
        if self.generated >= self.stop.max_tokens {
            for index in 0..self.groups.len() {
                self.cut(index, complete);
            }
        }
        self.groups.iter().all(|group| group.has_ended)
    }

    /// How many texts are asked for.
    pub(crate) fn results(&self) -> u32 {
        self.beams.results
    }

    /// The best results, best first: fewer than are asked for where guides and bans leave no more.
    pub(crate) fn found(&self) -> Vec<Found> {
        let mut ended: Vec<&Ended> = self.groups.iter().flat_map(|group| &group.results).collect();
        // Stable: the first of equals.
        ended.sort_by(|a, b| b.score.total_cmp(&a.score));
        let found = ended.into_iter().take(self.beams.results as usize).map(|ended| {
            let mut tokens: Vec<_> =
                self.path(ended.tail).map(|node| (node.token, node.logprobs.clone())).collect();
            tokens.reverse();
            Found { tokens, reason: ended.reason }
        });
        found.collect()
    }

    /// Beams of a group.
    fn size(&self) -> u32 {
        self.options.len() as u32 / self.beams.groups
    }

    /// `taken` are the tokens that the beams of earlier groups have taken.
    fn advance_group(&mut self, index: usize, taken: &mut Vec<TokenId>) {
        let size = self.size() as usize;
        let best = self.groups[index].ongoing[0];
        let options = self.options_of(index, taken);
        let mut children = Vec::with_capacity(size);
        for (rank, continuation) in merged(&options).enumerate() {
            if children.len() == size {
                break;
            }
            match continuation.token {
                Some((candidate, _)) if !self.ends(&continuation.parent, candidate.token) => {
                    children.push(continuation);
                }
                _ if rank < size => {
                    let tail = self.push(continuation.parent.tail, continuation.token);
                    let length = self.generated + u32::from(tail != continuation.parent.tail);
                    self.end(index, (tail, continuation.score), length, FinishReason::Stop);
                }
                _ => {}
            }
        }
        taken.extend(children.iter().filter_map(|child| child.token.as_ref()).map(|(token, _)| token.token));
        self.groups[index].has_ended = children.is_empty() || self.is_done(index, best);
        if !self.groups[index].has_ended {
            self.settle(index, children);
        }
    }

    /// What may follow each of a group's beams, each best first.
    fn options_of(&mut self, index: usize, taken: &[TokenId]) -> Vec<(Beam, Options)> {
        let most = 2 * self.size() as usize;
        let penalty = self.beams.diversity_penalty;
        let mut times: HashMap<TokenId, u32> = HashMap::new();
        if penalty != 0.0 {
            taken.iter().for_each(|&token| *times.entry(token).or_default() += 1);
        }
        let beams = self.groups[index].ongoing.iter().map(|&parent| {
            let options = self.options[parent.slot as usize].take();
            let mut options = options.expect("invariant: the options of all beams have been seen");
            if !times.is_empty() {
                for candidate in &mut options.candidates {
                    let times = times.get(&candidate.token).copied().unwrap_or(0);
                    candidate.logprob -= penalty * times as f32;
                }
                options.candidates.sort_by(|a, b| b.logprob.total_cmp(&a.logprob));
            }
            options.candidates.truncate(most);
            (parent, options)
        });
        beams.collect()
    }

    /// Whether a beam ends with this token.
    fn ends(&self, beam: &Beam, token: TokenId) -> bool {
        if self.generated >= self.stop.min_tokens && self.stop.stop_token_ids.contains(&token) {
            return true;
        }
        let Some(stops) = self.beams.stops.as_ref().filter(|_| self.generated >= self.stop.min_tokens) else {
            return false;
        };
        let before = self.path(beam.tail).map(|node| node.token).take(stops.tokens().saturating_sub(1));
        let mut last: Vec<_> = std::iter::once(token).chain(before).collect();
        last.reverse();
        stops.ends(&last)
    }

    /// Gives each child a slot: the first of a parent its parent's, so that nobody loses what another goes on from.
    fn settle(&mut self, index: usize, children: Vec<Continuation>) {
        let mut ongoing: Vec<Beam> = Vec::with_capacity(children.len());
        let mut moves: Vec<Move> = Vec::with_capacity(self.size() as usize);
        let mut waiting = Vec::new();
        for Continuation { parent, token, score } in children {
            let taken = token.as_ref().map_or(0, |(candidate, _)| candidate.token);
            let tail = self.push(parent.tail, token);
            let is_first = moves.iter().all(|other| other.from != parent.slot);
            if is_first {
                moves.push(Move { slot: parent.slot, from: parent.slot, token: taken, is_beam: true });
            } else {
                waiting.push((ongoing.len(), parent.slot, taken));
            }
            ongoing.push(Beam { slot: parent.slot, tail, score });
        }
        let best = moves[0];
        let free =
            self.groups[index].slots.clone().filter(|slot| ongoing.iter().all(|beam| beam.slot != *slot));
        let mut waiting = waiting.into_iter();
        for slot in free.collect::<Vec<_>>() {
            moves.push(match waiting.next() {
                Some((child, from, token)) => {
                    ongoing[child].slot = slot;
                    Move { slot, from, token, is_beam: true }
                }
                None => Move { slot, is_beam: false, ..best },
            });
        }
        self.groups[index].ongoing = ongoing;
        self.moves.extend(moves);
    }

    /// Whether a group has ended, by its best beam before this step.
    fn is_done(&self, index: usize, best: Beam) -> bool {
        let results = &self.groups[index].results;
        if results.len() < self.size() as usize {
            return false;
        }
        let worst = results.iter().map(|ended| ended.score).fold(f64::INFINITY, f64::min);
        let length = match self.beams.end {
            SearchEnd::Early => return true,
            SearchEnd::Never if self.beams.length_penalty > 0.0 => self.stop.max_tokens,
            SearchEnd::Heuristic | SearchEnd::Never => self.generated,
        };
        worst >= self.judged(best.score, length)
    }

    /// What goes on in a group that has as many tokens as it may is a result.
    fn cut(&mut self, index: usize, complete: &[u32]) {
        if std::mem::replace(&mut self.groups[index].has_ended, true) {
            return;
        }
        for beam in std::mem::take(&mut self.groups[index].ongoing) {
            let is_complete = complete.contains(&beam.slot);
            let reason = if is_complete { FinishReason::Stop } else { FinishReason::Length };
            self.end(index, (beam.tail, beam.score), self.generated, reason);
        }
    }

    /// A result of so many tokens, if it is among the best of its group.
    fn end(&mut self, index: usize, (tail, score): (Option<u32>, f64), length: u32, reason: FinishReason) {
        let score = self.judged(score, length);
        let size = self.size() as usize;
        let results = &mut self.groups[index].results;
        results.push(Ended { tail, score, reason });
        if results.len() > size {
            let scores = results.iter().map(|ended| ended.score).enumerate();
            let worst = scores.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(place, _)| place);
            worst.map(|worst| results.remove(worst));
        }
    }

    fn judged(&self, score: f64, length: u32) -> f64 {
        score / f64::from(length.max(1)).powf(f64::from(self.beams.length_penalty))
    }

    fn push(
        &mut self,
        parent: Option<u32>,
        token: Option<(Candidate, Option<Box<TokenLogprobs>>)>,
    ) -> Option<u32> {
        let Some((Candidate { token, .. }, logprobs)) = token else { return parent };
        self.nodes.push(Node { parent, token, logprobs });
        Some(self.nodes.len() as u32 - 1)
    }

    /// The tokens of a beam, the last first.
    fn path(&self, tail: Option<u32>) -> impl Iterator<Item = &Node> {
        std::iter::successors(tail, |&node| self.nodes[node as usize].parent)
            .map(|node| &self.nodes[node as usize])
    }
}
