//! A compiled form, and how far a sequence has come in it.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use llguidance::TokenParser;
use llguidance::api::StopReason;
use llguidance::panic_utils::catch_unwind;
use server_engine::{GuideError, GuideState, Hold, Progress, TokenSet};

use crate::Preface;
use crate::cache::Forms;
use crate::error::told;
use crate::lane::Lane;
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
    start: Lane,
    end: u32,
    lanes: Mutex<Lanes>,
    /// Gone with the compiler.
    forms: Weak<Forms>,
}

/// What is learnt of a form while it is followed, is learnt in one of several places: whoever computes in one, waits
/// for others there.
struct Lanes {
    lanes: Vec<Option<Arc<Lane>>>,
    turn: usize,
}

impl fmt::Debug for Guide {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Guide").field("preface", &self.preface).finish_non_exhaustive()
    }
}

impl Guide {
    /// The guide of a form that begins at `start`.
    pub(crate) fn new(start: TokenParser, end: u32, forms: &Arc<Forms>) -> Self {
        let lanes = Lanes { lanes: vec![None; forms.limits.lanes], turn: 0 };
        let compiled = Compiled {
            start: Lane::new(start, Arc::clone(&forms.memory)),
            end,
            lanes: Mutex::new(lanes),
            forms: Arc::downgrade(forms),
        };
        Self { compiled: Arc::new(compiled), preface: None }
    }

    /// The same form after free text.
    #[must_use]
    pub fn after(self, preface: Preface) -> Self {
        Self { preface: Some(Arc::new(preface)), ..self }
    }

    /// Whether nobody else has it, so that its memory is free when this one is dropped.
    pub(crate) fn is_idle(&self) -> bool {
        Arc::strong_count(&self.compiled) == 1
    }
}

impl Compiled {
    /// A lane to start in. One that is broken, large, or has had many sequences is left to those that are in it.
    fn lane(&self) -> Arc<Lane> {
        let bytes_max = self.forms.upgrade().map_or(0, |forms| forms.limits.lane_bytes_max);
        // A lane is whole whatever panicked.
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        let turn = (lanes.turn + 1) % lanes.lanes.len();
        lanes.turn = turn;
        let is_fit = |lane: &Arc<Lane>| {
            !lane.is_broken() && lane.bytes() <= bytes_max && lane.starts() < LANE_STARTS_MAX
        };
        let lane = lanes.lanes[turn].take().filter(is_fit);
        let lane = lane.unwrap_or_else(|| Arc::new(self.start.copy()));
        lanes.lanes[turn] = Some(Arc::clone(&lane));
        lane
    }

    /// Whether a lane has to stop growing: all lexers take more memory than they may although what nobody uses is let go of,
    /// and this one takes more than its share. So all together never take more than twice what they may.
    fn is_too_large(&self, lane: &Lane) -> bool {
        let Some(forms) = self.forms.upgrade() else { return false };
        if forms.memory.bytes() <= forms.limits.lexer_bytes_max {
            return false;
        }
        let bytes_max = forms.limits.lexer_bytes_max;
        forms.cache().let_go_of_idle(&forms, forms.limits.cached_lexer_bytes_max);
        forms.memory.bytes() > bytes_max && lane.bytes() >= forms.memory.share(bytes_max)
    }
}

impl server_engine::Guide for Guide {
    fn start(&self) -> Result<Box<dyn GuideState>, GuideError> {
        let state = State::new(Arc::clone(&self.compiled));
        Ok(match &self.preface {
            None => Box::new(state),
            Some(preface) => Box::new(Prefaced::new(Arc::clone(preface), state)),
        })
    }
}

/// How far a sequence has come in a form.
#[derive(Clone)]
pub(crate) struct State {
    parser: TokenParser,
    lane: Arc<Lane>,
    compiled: Arc<Compiled>,
    /// What came so far, to be read again in another lane.
    tokens: Vec<u32>,
    /// Whether the parser has not taken all of it.
    is_behind: bool,
}

impl fmt::Debug for State {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("State").field("tokens", &self.tokens.len()).finish_non_exhaustive()
    }
}

impl State {
    fn new(compiled: Arc<Compiled>) -> Self {
        let lane = compiled.lane();
        Self { parser: lane.begin(), lane, compiled, tokens: Vec::new(), is_behind: false }
    }

    /// Nothing can follow.
    fn is_over(&self) -> bool {
        let reason = self.parser.stop_reason();
        reason != StopReason::NotStopped && reason.is_ok()
    }

    /// Reads all that came so far in another lane.
    fn move_to(&mut self, lane: Arc<Lane>) -> Result<(), GuideError> {
        self.parser = lane.begin();
        self.lane = lane;
        let _guard = self.lane.lock();
        for &token in &self.tokens {
            consume(&mut self.parser, token).map_err(|error| failed(&self.parser, error))?;
        }
        self.is_behind = false;
        Ok(())
    }

    fn allow_here(&mut self, allowed: &mut TokenSet) -> Result<Progress, GuideError> {
        if self.is_over() {
            return Ok(Progress::Ended);
        }
        let parser = &mut self.parser;
        let may_end = catch_unwind(AssertUnwindSafe(|| Ok(parser.is_accepting())));
        let may_end = may_end.map_err(|error| failed(parser, error))?;
        let mask = match catch_unwind(AssertUnwindSafe(|| parser.compute_mask())) {
            Ok(mask) => mask,
            // It is found out now that nothing can follow.
            Err(_) if self.is_over() => {
                return Ok(if may_end { Progress::Ended } else { Progress::Open });
            }
            Err(error) => return Err(failed(&self.parser, error)),
        };
        allowed.insert_words(mask.as_slice());
        allowed.remove(self.compiled.end);
        Ok(if may_end { Progress::MayEnd } else { Progress::Open })
    }
}

impl GuideState for State {
    fn allow(&mut self, allowed: &mut TokenSet) -> Result<Progress, GuideError> {
        let guard = self.lane.lock();
        let progress = if self.is_behind || self.lane.is_broken() {
            Err(None)
        } else {
            self.allow_here(allowed).map_err(Some)
        };
        let progress = match progress {
            Ok(progress) => progress,
            Err(error) => {
                // Whoever shares the lane finds out now, rather than by failing too.
                self.lane.set_broken();
                drop(guard);
                // It may have been the fault of others. By itself it shows whether it was its own.
                let lane = match error {
                    None => self.compiled.lane(),
                    Some(_) => Arc::new(self.compiled.start.copy()),
                };
                self.move_to(lane)?;
                let _guard = self.lane.lock();
                let progress = self.allow_here(allowed);
                if progress.is_err() {
                    self.lane.set_broken();
                }
                progress?
            }
        };
        self.lane.measure();
        if self.compiled.is_too_large(&self.lane) {
            self.lane.set_broken();
            return Err(GuideError::TooComplex("it takes more memory than there is for forms".to_owned()));
        }
        Ok(progress)
    }

    fn commit(&mut self, token: u32) -> Result<Progress, GuideError> {
        self.tokens.push(token);
        if self.is_behind || self.lane.is_broken() {
            self.is_behind = true;
        } else if consume(&mut self.parser, token).is_err() {
            // It is tried again elsewhere, and on another thread: that can take long.
            self.lane.set_broken();
            self.is_behind = true;
        }
        Ok(if !self.is_behind && self.is_over() { Progress::Ended } else { Progress::Open })
    }

    fn try_hold(&self) -> Option<Hold> {
        self.lane.try_lock().map(|guard| Box::new(guard) as Hold)
    }

    fn fork(&self) -> Box<dyn GuideState> {
        Box::new(self.clone())
    }
}

/// Has a parser take a token. The error says what the parser says.
fn consume(parser: &mut TokenParser, token: u32) -> Result<(), String> {
    let consumed = catch_unwind(AssertUnwindSafe(|| {
        let backtracked = parser.consume_token(token)?;
        parser.check_stop()?;
        Ok(backtracked)
    }));
    match consumed {
        Ok(0) => Ok(()),
        Ok(_) => Err("it would have to go back".to_owned()),
        Err(error) => Err(format!("{error:#}")),
    }
}

/// Whether a parser has stopped because a limit was reached.
pub(crate) fn is_too_complex(parser: &TokenParser) -> bool {
    matches!(parser.stop_reason(), StopReason::LexerTooComplex | StopReason::ParserTooComplex)
}

fn failed(parser: &TokenParser, error: impl fmt::Display) -> GuideError {
    let problem = told(error);
    if is_too_complex(parser) { GuideError::TooComplex(problem) } else { GuideError::Failed(problem) }
}
