//! The last picks and what they were judged by, for who wants to know why. Bounded.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::SystemTime;

use crate::fleet::Fleet;
use crate::policy::{Demand, Terms};
use crate::replicas::Replica;

/// Picks that are remembered.
const PICKS_MAX: usize = 128;
/// Candidates that are remembered of each, the chosen one among them.
const JUDGED_MAX: usize = 16;

/// The last picks, the oldest first.
#[derive(Debug, Default)]
pub struct Recent(VecDeque<Pick>);

/// A pick.
#[derive(Debug)]
pub struct Pick {
    /// When.
    pub at: SystemTime,
    /// For a model of which replicas.
    pub fleet: Arc<Fleet>,
    /// What was asked for.
    pub demand: Demand,
    /// The candidates, the chosen one first.
    pub judged: Vec<Judged>,
    /// How many there were.
    pub candidates: usize,
}

impl Pick {
    pub(super) fn new(
        fleet: &Arc<Fleet>,
        demand: &Demand,
        (replicas, terms): (&[Arc<Replica>], &[Terms]),
        chosen: usize,
    ) -> Self {
        let others = (0..replicas.len()).filter(|&index| index != chosen);
        let judged = std::iter::once(chosen).chain(others).take(JUDGED_MAX);
        let judged =
            judged.map(|index| Judged { replica: Arc::clone(&replicas[index]), terms: terms[index] });
        Self {
            at: SystemTime::now(),
            fleet: Arc::clone(fleet),
            demand: *demand,
            judged: judged.collect(),
            candidates: replicas.len(),
        }
    }
}

/// A candidate.
#[derive(Debug)]
pub struct Judged {
    /// Which.
    pub replica: Arc<Replica>,
    /// By what.
    pub terms: Terms,
}

impl Recent {
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
