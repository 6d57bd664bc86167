//! Merges sorted lists of scores lazily.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Yields the scores of several sources in descending order. Among equal scores, that of the earlier source comes
/// first. Each source must be in descending order. The iterator reads one score from each source, and at most one more
/// for each score that it yields.
pub(super) struct Merge<I> {
    sources: Vec<I>,
    heads: BinaryHeap<MergedScore>,
}

/// A score and its source.
#[derive(Clone, Copy, Debug)]
pub(super) struct MergedScore {
    pub(super) score: f64,
    pub(super) source: usize,
    /// The index among the scores of its source.
    pub(super) index: usize,
}

impl<I: Iterator<Item = f64>> Merge<I> {
    pub(super) fn new(sources: impl Iterator<Item = I>) -> Self {
        let mut sources: Vec<I> = sources.collect();
        let first = |(source, scores): (usize, &mut I)| {
            scores.next().map(|score| MergedScore { score, source, index: 0 })
        };
        let heads = sources.iter_mut().enumerate().filter_map(first).collect();
        Self { sources, heads }
    }
}

impl<I: Iterator<Item = f64>> Iterator for Merge<I> {
    type Item = MergedScore;

    fn next(&mut self) -> Option<MergedScore> {
        let best = self.heads.pop()?;
        if let Some(score) = self.sources[best.source].next() {
            self.heads.push(MergedScore { score, source: best.source, index: best.index + 1 });
        }
        Some(best)
    }
}

impl Ord for MergedScore {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then_with(|| other.source.cmp(&self.source))
    }
}

impl PartialOrd for MergedScore {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for MergedScore {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for MergedScore {}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use rand::rngs::StdRng;
    use rand::{RngExt as _, SeedableRng as _};

    use super::*;

    #[test]
    fn it_yields_what_a_stable_sort_of_all_would_and_reads_no_more_than_it_needs() {
        let mut rng = StdRng::seed_from_u64(1);
        for _ in 0..500 {
            let mut sources: Vec<Vec<f64>> = (0..rng.random_range(0..9))
                .map(|_| (0..rng.random_range(0..20)).map(|_| f64::from(rng.random_range(0..9))).collect())
                .collect();
            sources.iter_mut().for_each(|scores| scores.sort_by(|a, b| b.total_cmp(a)));
            let indexed = |(source, scores): (usize, &Vec<f64>)| {
                let scores = scores.iter().enumerate();
                scores.map(|(place, &score)| (score, source, place)).collect::<Vec<_>>()
            };
            let mut all: Vec<(f64, usize, usize)> = sources.iter().enumerate().flat_map(indexed).collect();
            all.sort_by(|a, b| b.0.total_cmp(&a.0));
            let most = rng.random_range(0..=all.len());
            let read = Cell::new(0);
            let counting =
                sources.iter().map(|scores| scores.iter().copied().inspect(|_| read.set(read.get() + 1)));
            let merged: Vec<_> =
                Merge::new(counting).take(most).map(|next| (next.score, next.source, next.index)).collect();
            assert_eq!(merged, all[..most]);
            assert!(read.get() <= sources.len() + most, "{} scores were read to yield {most}", read.get());
        }
    }
}
