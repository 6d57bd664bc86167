//! The candidates for the next token of a beam: the most probable tokens after bias, penalties and bans.

use super::scan::{self, Blocks};
use super::{SampleError, Sampler, SamplingContext, adjust, adjusts, allowed, select};
use crate::search::{Candidate, Candidates};

impl Sampler {
    /// Returns the `count` most probable tokens, most probable first, or fewer if fewer have a probability above zero.
    /// Their log probabilities are normalized over the tokens that remain after bias, penalties, bans and a guide.
    /// Temperature, `top_k`, `top_p` and `min_p` have no effect.
    ///
    /// # Errors
    /// The same as for [`Self::sample`].
    pub(crate) fn candidates(
        &mut self,
        logits: &[f32],
        context: &SamplingContext<'_>,
        count: u32,
    ) -> Result<Candidates, SampleError> {
        let top = context.sampling.logprobs.map(|count| self.logprobs(logits, 0, count).top);
        let is_finite = scan::peak(logits, &mut self.maxima).is_some();
        if !is_finite && context.allowed.is_none() {
            return Err(SampleError::NotFinite);
        }
        let model_sum = self.log_sum(logits);
        let (mut adjusted, mut masked) = (std::mem::take(&mut self.adjusted), std::mem::take(&mut self.kept));
        let mut remaining = logits;
        if adjusts(context) {
            adjusted.clear();
            adjusted.extend_from_slice(logits);
            adjust(&mut adjusted, context);
            remaining = &adjusted;
        }
        if let Some(set) = context.allowed {
            allowed::mask(remaining, set, &mut masked);
            remaining = &masked;
        }
        let sum = match scan::peak(remaining, &mut self.maxima) {
            None => Err(SampleError::NotFinite),
            Some(peak) if peak.value == f32::NEG_INFINITY => Err(SampleError::NoTokenLeft),
            Some(_) => Ok(self.log_sum(remaining)),
        };
        let blocks = Blocks { logits: remaining, maxima: &self.maxima };
        select::top(blocks, count as usize, &mut self.candidates);
        (self.adjusted, self.kept) = (adjusted, masked);
        let sum = sum?;
        self.candidates.sort_unstable_by(select::more_probable);
        let candidates = self.candidates.iter().map(|kept| Candidate {
            token: kept.token,
            logprob: (f64::from(kept.logit) - sum) as f32,
            model_logprob: (f64::from(logits[kept.token as usize]) - model_sum) as f32,
        });
        Ok(Candidates { tokens: candidates.collect(), top, is_complete: false })
    }
}
