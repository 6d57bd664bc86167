//! The most recent picks with the scores of their candidates, for `/debug/picks`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::SystemTime;

use crate::policy::{Demand, Terms};
use crate::replica::Replica;
use crate::served_model::ServedModel;

/// Number of picks in the log.
const PICKS_MAX: usize = 128;
/// Number of candidates that the log stores for each pick, including the chosen one.
const CANDIDATES_MAX: usize = 16;

/// The most recent picks, the oldest first.
#[derive(Debug, Default)]
pub struct PickLog(VecDeque<Pick>);

/// A pick of a replica for a request.
#[derive(Debug)]
pub struct Pick {
    /// The time of the pick.
    pub at: SystemTime,
    /// The model that the request is for.
    pub served_model: Arc<ServedModel>,
    /// The estimated size of the request.
    pub demand: Demand,
    /// The candidates, the chosen one first. If there are many, the list contains only some of them.
    pub candidates: Vec<ScoredCandidate>,
    /// The total number of candidates.
    pub candidate_count: usize,
}

/// A candidate of a pick.
#[derive(Debug)]
pub struct ScoredCandidate {
    /// The replica that was a candidate.
    pub replica: Arc<Replica>,
    /// The terms of its score.
    pub terms: Terms,
}

impl Pick {
    /// Creates a pick of the candidate with the index `chosen`. `replicas` and `terms` have one entry for each
    /// candidate.
    pub(super) fn new(
        served_model: &Arc<ServedModel>,
        demand: &Demand,
        replicas: &[Arc<Replica>],
        terms: &[Terms],
        chosen: usize,
    ) -> Self {
        let others = (0..replicas.len()).filter(|&index| index != chosen);
        let logged = std::iter::once(chosen).chain(others).take(CANDIDATES_MAX);
        let scored =
            |index: usize| ScoredCandidate { replica: Arc::clone(&replicas[index]), terms: terms[index] };
        Self {
            at: SystemTime::now(),
            served_model: Arc::clone(served_model),
            demand: *demand,
            candidates: logged.map(scored).collect(),
            candidate_count: replicas.len(),
        }
    }
}

impl PickLog {
    /// The picks, the oldest first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Pick> {
        self.0.iter()
    }

    pub(super) fn record(&mut self, pick: Pick) {
        if self.0.len() == PICKS_MAX {
            self.0.pop_front();
        }
        self.0.push_back(pick);
    }
}
