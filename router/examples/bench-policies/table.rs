//! The result as a table, and what was promised held against it.

use std::path::Path;

use crate::arena::{Arena, Competitor, Score};
use crate::workload::{KINDS, Kind};

/// What `kv` is promised to do.
const UNDER_ROUND_ROBIN: f64 = 0.7;
const BEST_OF: usize = 5;
const NEAR_ORACLE: f64 = 1.1;
const NEAR_ORACLE_OF: usize = 4;
/// More fair shares of the requests on one replica than this is a collapse. (The oracle comes to 1.9: where half of
/// the requests have a cached beginning, these cost a fraction.)
const HOTTEST_MAX: f64 = 2.0;

pub(crate) struct Table {
    arena: Arena,
    competitors: Vec<Competitor>,
    /// For each kind of traffic, the scores in the order of the competitors.
    scores: Vec<Vec<Score>>,
}

impl Table {
    pub(crate) fn new(arena: &Arena, competitors: Vec<Competitor>) -> Self {
        // Each kind is a world of its own, so the threads change nothing but how long it takes.
        let scores = std::thread::scope(|scope| {
            let competitors = &competitors;
            let runs = KINDS.map(|kind| scope.spawn(move || arena.scores(kind, competitors)));
            runs.map(|run| run.join().expect("a run ends")).into()
        });
        Self { arena: arena.clone(), competitors, scores }
    }

    pub(crate) fn markdown(&self) -> String {
        let names: Vec<_> = KINDS.iter().map(|kind| kind.name()).collect();
        let Arena { replicas, requests, seeds } = &self.arena;
        let mut text = format!(
            "{replicas} replicas, {requests} requests of each kind, {} seeds (medians). Each cell: time to the \
             first token in ms, 99th percentile and, after the stroke, median; **bold**: the best but for the \
             oracle.\n\n| policy | {} |\n|---|{}\n",
            seeds.len(),
            names.join(" | "),
            "---|".repeat(names.len()),
        );
        for (index, competitor) in self.competitors.iter().enumerate() {
            let cells = (0..KINDS.len()).map(|kind| {
                let Score { p99, p50, .. } = self.scores[kind][index];
                let cell = format!("{:.0}", p99 * 1e3);
                let cell = if self.is_best(kind, index) { format!("**{cell}**") } else { cell };
                format!("{cell} / {:.0}", p50 * 1e3)
            });
            text += &format!("| {} | {} |\n", competitor.name(), cells.collect::<Vec<_>>().join(" | "));
        }
        text += "\nOf `kv`, `round-robin` and the oracle: the busiest replica's requests in fair shares (1 is \
                 even; the worst seed); prompt tokens found in a cache; time between tokens, the 99th percentile \
                 of the answers.\n\n";
        text += &format!("| policy | {} |\n|---|{}\n", names.join(" | "), "---|".repeat(names.len()));
        for (index, competitor) in self.competitors.iter().enumerate() {
            if !["kv", "round-robin", "oracle"].contains(&competitor.name()) {
                continue;
            }
            let cells = self.scores.iter().map(|scores| {
                let Score { hottest, cached, between, .. } = scores[index];
                format!("{hottest:.2}, {:.0} %, {:.0} ms", cached * 100.0, between * 1e3)
            });
            text += &format!("| {} | {} |\n", competitor.name(), cells.collect::<Vec<_>>().join(" | "));
        }
        text
    }

    /// The promises that are not kept.
    pub(crate) fn missed(&self) -> Vec<String> {
        let kv = self.index("kv");
        let oracle = self.index("oracle");
        let mut missed = Vec::new();
        for (kind, scores) in KINDS.iter().zip(&self.scores) {
            for other in ["round-robin", "least-requests"] {
                let ratio = scores[kv].p99 / scores[self.index(other)].p99;
                if matches!(kind, Kind::Bimodal | Kind::Bursty) && ratio > UNDER_ROUND_ROBIN {
                    missed.push(format!("{}: {ratio:.2} of {other}", kind.name()));
                }
            }
            if scores[kv].hottest > HOTTEST_MAX {
                missed.push(format!("{}: {:.2} fair shares on a replica", kind.name(), scores[kv].hottest));
            }
        }
        let best = (0..KINDS.len()).filter(|&kind| self.is_best(kind, kv)).count();
        if best < BEST_OF {
            missed.push(format!("best on {best} kinds"));
        }
        let is_near = |scores: &&Vec<Score>| scores[kv].p99 <= NEAR_ORACLE * scores[oracle].p99;
        let near = self.scores.iter().filter(is_near).count();
        if near < NEAR_ORACLE_OF {
            missed.push(format!("near the oracle on {near} kinds"));
        }
        missed
    }

    fn index(&self, name: &str) -> usize {
        self.competitors.iter().position(|it| it.name() == name).expect("it takes part")
    }

    fn is_best(&self, kind: usize, index: usize) -> bool {
        if self.competitors[index] == Competitor::Oracle {
            return false;
        }
        let others = self.competitors.iter().zip(&self.scores[kind]);
        let best = others.filter(|(it, _)| **it != Competitor::Oracle).map(|(_, score)| score.p99);
        self.scores[kind][index].p99 <= best.fold(f64::MAX, f64::min)
    }
}

/// Puts `markdown` between the marks of `docs/performance/results.md`.
pub(crate) fn update(markdown: &str) -> Result<(), String> {
    const BEGIN: &str = "<!-- bench-policies: begin -->\n";
    const END: &str = "<!-- bench-policies: end -->";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/performance/results.md");
    let failed = |error: std::io::Error| format!("failed to update {}: {error}", path.display());
    let text = std::fs::read_to_string(&path).map_err(failed)?;
    let marks = (text.find(BEGIN), text.find(END));
    let (Some(begin), Some(end)) = marks else { return Err(format!("{} has no marks", path.display())) };
    let text = format!("{}{markdown}{}", &text[..begin + BEGIN.len()], &text[end..]);
    std::fs::write(&path, text).map_err(failed)
}
