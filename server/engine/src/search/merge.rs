//! Merges descending lists of scores into one, as far as it is read.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// The scores of several sources, the greatest first and of equals that of the first source first. Each source is in
/// descending order. It reads one score of each source, and another for each score that it yields.
pub(super) struct Merge<I> {
    sources: Vec<I>,
    heads: BinaryHeap<Next>,
}

/// A score, and where it is from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Next {
    pub(super) score: f64,
    pub(super) source: usize,
    /// Its place among the scores of its source.
    pub(super) place: usize,
}

impl<I: Iterator<Item = f64>> Merge<I> {
    pub(super) fn new(sources: impl Iterator<Item = I>) -> Self {
        let mut sources: Vec<I> = sources.collect();
        let first =
            |(source, scores): (usize, &mut I)| scores.next().map(|score| Next { score, source, place: 0 });
        let heads = sources.iter_mut().enumerate().filter_map(first).collect();
        Self { sources, heads }
    }
}

impl<I: Iterator<Item = f64>> Iterator for Merge<I> {
    type Item = Next;

    fn next(&mut self) -> Option<Next> {
        let best = self.heads.pop()?;
        if let Some(score) = self.sources[best.source].next() {
            self.heads.push(Next { score, source: best.source, place: best.place + 1 });
        }
        Some(best)
    }
}

impl Ord for Next {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then_with(|| other.source.cmp(&self.source))
    }
}

impl PartialOrd for Next {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Next {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Next {}

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
            let places = |(source, scores): (usize, &Vec<f64>)| {
                let scores = scores.iter().enumerate();
                scores.map(|(place, &score)| (score, source, place)).collect::<Vec<_>>()
            };
            let mut all: Vec<(f64, usize, usize)> = sources.iter().enumerate().flat_map(places).collect();
            all.sort_by(|a, b| b.0.total_cmp(&a.0));
            let most = rng.random_range(0..=all.len());
            let read = Cell::new(0);
            let counting =
                sources.iter().map(|scores| scores.iter().copied().inspect(|_| read.set(read.get() + 1)));
            let merged: Vec<_> =
                Merge::new(counting).take(most).map(|next| (next.score, next.source, next.place)).collect();
            assert_eq!(merged, all[..most]);
            assert!(read.get() <= sources.len() + most, "{} were read for {most}", read.get());
        }
    }
}
