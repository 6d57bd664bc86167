//! What may follow a beam: the most probable tokens, after all that changes logits but nothing that draws.

use super::{Choice, Sampler, Unsampled, adjust, adjusts, allowed, scan, select};
use crate::search::{Candidate, Options};

impl Sampler {
    /// The `count` most probable tokens, most probable first (fewer if fewer have any probability), with their log
    /// probabilities among all that bias, penalties, bans and a guide leave; temperature, `top_k`, `top_p` and `min_p` do
    /// nothing.
    ///
    /// # Errors
    /// As [`Self::sample`].
    pub(crate) fn options(
        &mut self,
        logits: &[f32],
        choice: &Choice<'_>,
        count: u32,
    ) -> Result<Options, Unsampled> {
        let top = choice.sampling.logprobs.map(|count| self.logprobs(logits, 0, count).top);
        if choice.allowed.is_none() {
            scan::peak(logits).ok_or(Unsampled::NotFinite)?;
        }
        let own_sum = self.log_sum(logits);
        let mut adjusted = std::mem::take(&mut self.adjusted);
        adjusted.clear();
        let judged = if choice.allowed.is_some() || adjusts(choice) {
            adjusted.extend_from_slice(logits);
            adjust(&mut adjusted, choice);
            if let Some(set) = choice.allowed {
                allowed::ban_others(&mut adjusted, set);
            }
            &adjusted
        } else {
            logits
        };
        let sum = match scan::peak(judged) {
            None => Err(Unsampled::NotFinite),
            Some(peak) if peak.value == f32::NEG_INFINITY => Err(Unsampled::NothingLeft),
            Some(_) => Ok(self.log_sum(judged)),
        };
        select::top(judged, count as usize, &mut self.candidates);
        self.adjusted = adjusted;
        let sum = sum?;
        self.candidates.sort_unstable_by(select::more_probable);
        let candidates = self.candidates.iter().map(|kept| Candidate {
            token: kept.token,
            logprob: (f64::from(kept.logit) - sum) as f32,
            own: (f64::from(logits[kept.token as usize]) - own_sum) as f32,
        });
        Ok(Options { candidates: candidates.collect(), top, is_complete: false })
    }
}
