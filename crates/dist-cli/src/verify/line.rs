//! The results as rows of a table and as lines of JSON. docs/book/src/distctl-output.md describes the fields.

use dist_algos::Order;
use serde::Serialize;

/// What is proven of one algorithm. The fields and their order are a contract with whoever reads them.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Line {
    pub(super) operation: &'static str,
    pub(super) algorithm: &'static str,
    /// World sizes up to the bound that were proven, or hosts.
    pub(super) worlds: usize,
    /// Proofs: one for each world size and root, or for each of the schedules on two levels.
    pub(super) proofs: usize,
    pub(super) orders: Orders,
    /// World sizes beyond the bound that were proven.
    pub(super) larger: Vec<usize>,
    pub(super) largest: Option<Bound>,
    pub(super) wrong: Option<String>,
}

/// In how many of the worlds an algorithm reduces in which order.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct Orders {
    pub(super) canonical: usize,
    pub(super) uniform: usize,
    pub(super) any: usize,
}

/// The cost in the largest world up to the bound, beside the least that there can be. Bytes are in units of the
/// buffer.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Bound {
    pub(super) ranks: usize,
    pub(super) rounds: usize,
    pub(super) rounds_min: usize,
    pub(super) buffers: f64,
    pub(super) buffers_min: f64,
    pub(super) sent: f64,
}

/// How the verifier fared against changed schedules.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Mutants {
    pub(super) mutants: usize,
    pub(super) rejected: usize,
    pub(super) survivors: Vec<String>,
}

impl Line {
    pub(super) const HEADER: &str = "\
operation       algorithm             worlds  proofs  ranks  rounds  least  buffers   least    sent  \
order                        larger worlds
";

    /// An algorithm of which nothing is proven so far.
    pub(super) fn new(operation: &'static str, algorithm: &'static str) -> Self {
        Self {
            operation,
            algorithm,
            worlds: 0,
            proofs: 0,
            orders: Orders::default(),
            larger: Vec::new(),
            largest: None,
            wrong: None,
        }
    }

    pub(super) fn json(&self) -> String {
        serde_json::to_string(self).expect("a line has only numbers and text") + "\n"
    }

    pub(super) fn row(&self) -> String {
        let Self { operation, algorithm, worlds, proofs, .. } = self;
        let mut row = format!("{operation:<15} {algorithm:<20} {worlds:>7} {proofs:>7}");
        if self.largest.is_none() {
            row += &" ".repeat(46);
        }
        if let Some(Bound { ranks, rounds, rounds_min, buffers, buffers_min, sent }) = self.largest {
            row += &format!(
                " {ranks:>6} {rounds:>7} {rounds_min:>6} {buffers:>8.3} {buffers_min:>7.3} {sent:>7.3}"
            );
        }
        let larger: Vec<String> = self.larger.iter().map(usize::to_string).collect();
        row += &format!("  {:<28} {}", self.orders.text(), larger.join(" "));
        let mut row = row.trim_end().to_owned() + "\n";
        if let Some(wrong) = &self.wrong {
            row += &format!("  wrong: {wrong}\n");
        }
        row
    }
}

impl Orders {
    /// Counts one more proof.
    pub(super) fn add(&mut self, order: Option<Order>) {
        match order {
            Some(Order::Canonical) => self.canonical += 1,
            Some(Order::Uniform) => self.uniform += 1,
            Some(_) => self.any += 1,
            None => {}
        }
    }

    /// Such as `canonical, 3 uniform`: without a number where all worlds are the same.
    fn text(self) -> String {
        let counts = [("canonical", self.canonical), ("uniform", self.uniform), ("any", self.any)]
            .map(|(name, count)| (count > 0).then(|| format!("{count} {name}")));
        let counts: Vec<String> = counts.into_iter().flatten().collect();
        counts.join(", ")
    }
}

impl Mutants {
    /// Counts so many more, of which so many were rejected; the others are named.
    pub(super) fn add(
        &mut self,
        mutants: usize,
        rejected: usize,
        survivors: impl IntoIterator<Item = String>,
    ) {
        self.mutants += mutants;
        self.rejected += rejected;
        self.survivors.extend(survivors);
    }

    /// Whether at least 99 % were rejected, of at least one.
    pub(super) const fn is_enough(&self) -> bool {
        self.mutants > 0 && self.rejected * 100 >= self.mutants * 99
    }

    pub(super) fn json(&self) -> String {
        serde_json::to_string(self).expect("a line has only numbers and text") + "\n"
    }

    pub(super) fn text(&self) -> String {
        let Self { mutants, rejected, survivors } = self;
        let percent = *rejected as f64 * 100.0 / (*mutants).max(1) as f64;
        let mut text = format!("\n{rejected} of {mutants} changed schedules rejected: {percent:.2} %\n");
        let swaps = survivors.iter().filter(|survivor| survivor.contains("SwappedWithNext")).count();
        if swaps > 0 {
            text += &format!("{swaps} that passed only do two steps in the other order\n");
        }
        for survivor in survivors.iter().filter(|survivor| !survivor.contains("SwappedWithNext")) {
            text += &format!("passed: {survivor}\n");
        }
        text
    }
}
