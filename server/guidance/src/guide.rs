//! A compiled form, and how far a sequence has come in it.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use llguidance::Matcher;
use server_engine::{GuideError, GuideState, Progress, TokenSet};

use crate::Preface;
use crate::error::told;
use crate::limits::LANE_STARTS_MAX;
use crate::preface::Prefaced;

/// A compiled form. Clones are the same one; sequences share what is learnt of it.
#[derive(Clone)]
pub struct Guide {
    compiled: Arc<Compiled>,
    preface: Option<Arc<Preface>>,
}

struct Compiled {
    /// As it was compiled: nothing has been learnt.
    start: Matcher,
    end: u32,
    lanes: Mutex<Lanes>,
}

/// What is learnt of a form while it is followed, is learnt in one of several places: whoever computes in one, waits
/// for others there.
struct Lanes {
    lanes: Vec<Option<Lane>>,
    turn: usize,
}

struct Lane {
    matcher: Matcher,
    starts: usize,
}

impl fmt::Debug for Guide {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Guide").field("preface", &self.preface).finish_non_exhaustive()
    }
}

impl Guide {
    pub(crate) fn new(start: Matcher, end: u32, lanes: usize) -> Self {
        let lanes = Lanes { lanes: (0..lanes).map(|_| None).collect(), turn: 0 };
        Self { compiled: Arc::new(Compiled { start, end, lanes: Mutex::new(lanes) }), preface: None }
    }

    /// The same form after free text.
    #[must_use]
    pub fn after(self, preface: Preface) -> Self {
        Self { preface: Some(Arc::new(preface)), ..self }
    }

    fn state(&self) -> State {
        let Compiled { start, end, lanes } = &*self.compiled;
        // A lane is whole whatever panicked.
        let mut lanes = lanes.lock().unwrap_or_else(PoisonError::into_inner);
        let turn = (lanes.turn + 1) % lanes.lanes.len();
        lanes.turn = turn;
        let lane = lanes.lanes[turn].take().filter(|lane| lane.starts < LANE_STARTS_MAX);
        let mut lane = lane.unwrap_or_else(|| Lane { matcher: start.deep_clone(), starts: 0 });
        lane.starts += 1;
        let matcher = lane.matcher.clone();
        lanes.lanes[turn] = Some(lane);
        State { matcher, end: *end }
    }
}

impl server_engine::Guide for Guide {
    fn start(&self) -> Result<Box<dyn GuideState>, GuideError> {
        let state = self.state();
        Ok(match &self.preface {
            None => Box::new(state),
            Some(preface) => Box::new(Prefaced::new(Arc::clone(preface), state)),
        })
    }
}

/// How far a sequence has come in a form.
#[derive(Clone)]
pub(crate) struct State {
    matcher: Matcher,
    end: u32,
}

impl fmt::Debug for State {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("State").field("stopped", &self.matcher.is_stopped()).finish_non_exhaustive()
    }
}

impl State {
    /// Nothing can follow.
    fn is_over(&self) -> bool {
        self.matcher.is_stopped() && self.matcher.stop_reason().is_ok()
    }
}

impl GuideState for State {
    fn allow(&mut self, allowed: &mut TokenSet) -> Result<Progress, GuideError> {
        if self.is_over() {
            return Ok(Progress::Ended);
        }
        let may_end = self.matcher.is_accepting().map_err(failed)?;
        let mask = match self.matcher.compute_mask() {
            Ok(mask) => mask,
            // It is found out now that nothing can follow.
            Err(_) if may_end && self.is_over() => return Ok(Progress::Ended),
            Err(error) => return Err(failed(error)),
        };
        allowed.insert_words(mask.as_slice());
        allowed.remove(self.end);
        Ok(if may_end { Progress::MayEnd } else { Progress::Open })
    }

    fn commit(&mut self, token: u32) -> Result<Progress, GuideError> {
        self.matcher.consume_token(token).map_err(failed)?;
        Ok(if self.is_over() { Progress::Ended } else { Progress::Open })
    }

    fn fork(&self) -> Box<dyn GuideState> {
        Box::new(self.clone())
    }
}

fn failed(error: impl fmt::Display) -> GuideError {
    GuideError(told(error))
}
