//! The last picks and what they were judged by, for who wants to know why. Bounded, and without allocation
//! once it is full.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::SystemTime;

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
    /// For which model.
    pub model: String,
    /// What was asked for.
    pub demand: Demand,
    /// The candidates, the chosen one first.
    pub judged: Vec<Judged>,
    /// How many there were.
    pub candidates: usize,
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

    pub(super) fn record(
        &mut self,
        model: &str,
        demand: &Demand,
        (replicas, terms): (&[Arc<Replica>], &[Terms]),
        chosen: usize,
    ) {
        let mut pick =
            if self.0.len() < PICKS_MAX { None } else { self.0.pop_front() }.unwrap_or_else(|| Pick {
                at: SystemTime::UNIX_EPOCH,
                model: String::new(),
                demand: Demand::default(),
                judged: Vec::with_capacity(JUDGED_MAX),
                candidates: 0,
            });
        pick.at = SystemTime::now();
        pick.model.clear();
        pick.model.push_str(model);
        pick.demand = *demand;
        pick.candidates = replicas.len();
        pick.judged.clear();
        let others = (0..replicas.len()).filter(|&index| index != chosen);
        let judged = std::iter::once(chosen).chain(others).take(JUDGED_MAX);
        pick.judged.extend(
            judged.map(|index| Judged { replica: Arc::clone(&replicas[index]), terms: terms[index] }),
        );
        self.0.push_back(pick);
    }
}
