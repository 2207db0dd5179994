//! The results as rows of a table and as lines of JSON. docs/book/src/distctl-output.md describes the fields.

use dist_algos::Order;
use dist_algos::verify::mutate::Score;
use serde::Serialize;

/// The proofs of one algorithm. The fields and their order are a stable contract.
#[derive(Debug, Clone, Serialize)]
pub(super) struct ProofLine {
    pub(super) operation: &'static str,
    pub(super) algorithm: &'static str,
    /// Number of proven world sizes, or layouts of hosts, up to the bound.
    pub(super) worlds: usize,
    /// Number of proofs: one for each world size and root, or for each two-level schedule.
    pub(super) proofs: usize,
    pub(super) orders: Orders,
    /// Proven world sizes above the bound.
    pub(super) larger: Vec<usize>,
    pub(super) largest: Option<Bound>,
    pub(super) wrong: Option<String>,
}

/// The result of one proof.
pub(super) enum Proven {
    /// A world up to the bound, or a layout of hosts.
    World { proofs: usize, orders: Orders, cost: Option<Bound> },
    /// A world of this size, which is above the bound.
    Larger(usize),
    /// Nothing, because the proof would take too long.
    LeftOut,
}

/// The numbers of worlds by the order in which an algorithm reduces.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct Orders {
    pub(super) canonical: usize,
    pub(super) uniform: usize,
    pub(super) any: usize,
}

/// The cost in the largest world up to the bound, and the lower bounds for any schedule. Bytes are in units
/// of the buffer.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Bound {
    pub(super) ranks: usize,
    pub(super) rounds: usize,
    pub(super) rounds_min: usize,
    pub(super) buffers: f64,
    pub(super) buffers_min: f64,
    pub(super) sent: f64,
}

/// The mutated schedules and how many of them the verifier rejected.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Mutants {
    pub(super) mutants: usize,
    pub(super) rejected: usize,
    pub(super) survivors: Vec<String>,
}

impl ProofLine {
    pub(super) const HEADER: &str = "\
operation       algorithm             worlds  proofs  ranks  rounds  least  buffers   least    sent  \
order                        larger worlds
";

    /// Creates the line of an algorithm without results.
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

    /// Adds the result of the next proof. Results after the first error are ignored.
    pub(super) fn add(&mut self, found: Result<Proven, String>) {
        match found {
            _ if self.wrong.is_some() => {}
            Ok(Proven::World { proofs, orders, cost }) => {
                self.worlds += 1;
                self.proofs += proofs;
                self.orders.add_all(orders);
                self.largest = cost.or(self.largest);
            }
            Ok(Proven::Larger(world_size)) => self.larger.push(world_size),
            Ok(Proven::LeftOut) => {}
            Err(error) => self.wrong = Some(error),
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
    /// Counts the orders of proofs; `None` if nothing is reduced.
    pub(super) fn of(orders: impl IntoIterator<Item = Option<Order>>) -> Self {
        let mut counts = Self::default();
        for order in orders.into_iter().flatten() {
            match order {
                Order::Canonical => counts.canonical += 1,
                Order::Uniform => counts.uniform += 1,
                _ => counts.any += 1,
            }
        }
        counts
    }

    fn add_all(&mut self, other: Self) {
        self.canonical += other.canonical;
        self.uniform += other.uniform;
        self.any += other.any;
    }

    /// Formats the counts, such as `canonical, 3 uniform`. An order that all worlds have is without a number.
    fn text(self) -> String {
        let counts = [("canonical", self.canonical), ("uniform", self.uniform), ("any", self.any)]
            .map(|(name, count)| (count > 0).then(|| format!("{count} {name}")));
        let counts: Vec<String> = counts.into_iter().flatten().collect();
        counts.join(", ")
    }
}

impl Mutants {
    /// Adds the mutants of one schedule. `name` returns the text for a mutant that was not rejected.
    pub(super) fn add<M>(&mut self, score: &Score<M>, name: impl FnMut(&M) -> String) {
        self.mutants += score.mutants;
        self.rejected += score.rejected();
        self.survivors.extend(score.survivors.iter().map(name));
    }

    /// Returns the sum.
    pub(super) fn sum(all: impl IntoIterator<Item = Self>) -> Self {
        all.into_iter().fold(Self::default(), |mut sum, other| {
            sum.mutants += other.mutants;
            sum.rejected += other.rejected;
            sum.survivors.extend(other.survivors);
            sum
        })
    }

    /// Returns `true` if there are mutants and at least 99 % of them were rejected.
    pub(super) const fn is_enough(&self) -> bool {
        self.mutants > 0 && self.rejected * 100 >= self.mutants * 99
    }

    pub(super) fn json(&self) -> String {
        serde_json::to_string(self).expect("a line has only numbers and text") + "\n"
    }

    pub(super) fn text(&self) -> String {
        let Self { mutants, rejected, survivors } = self;
        let percent = *rejected as f64 * 100.0 / (*mutants).max(1) as f64;
        let mut text = format!("\n{rejected} of {mutants} mutated schedules rejected: {percent:.2} %\n");
        let swaps = survivors.iter().filter(|survivor| survivor.contains("SwappedWithNext")).count();
        if swaps > 0 {
            text += &format!("{swaps} of the others only swap two steps\n");
        }
        for survivor in survivors.iter().filter(|survivor| !survivor.contains("SwappedWithNext")) {
            text += &format!("passed: {survivor}\n");
        }
        text
    }
}
