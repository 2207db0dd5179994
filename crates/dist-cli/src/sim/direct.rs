//! Direct schedules: predicted times among ranks that share the memory of a host, and files with the costs of
//! that memory.

use std::fs;
use std::path::Path;
use std::time::Duration;

use dist_algos::direct::{
    Crossovers, DirectAlgorithm, DirectCase, DirectCollective, DirectCosts, DirectPlan, Ownership,
};
use dist_algos::{AlgorithmTable, Partition, Source};
use dist_collectives::tuning::Operation;
use dist_transport::shm_group::{GroupLayout, MemoryCosts, Reach};
use serde::{Deserialize, Serialize};

use super::fit;
use crate::Error;
use crate::quantity::rounded;

/// The prediction for a direct algorithm.
#[derive(Debug, Clone, Copy)]
pub(super) struct Prediction {
    pub(super) algorithm: &'static DirectAlgorithm,
    /// `true` if the library would choose it for borrowed memory.
    pub(super) chosen: bool,
    pub(super) seconds: f64,
}

/// Maximum number of ranks on a host, because each rank waits for every other.
pub(super) const RANKS_MAX: usize = 1024;

/// Predicts every direct algorithm of an operation with `bytes` bytes of input on each rank. Returns none if
/// it has none.
pub(super) fn predict(
    table: AlgorithmTable<'_>,
    operation: Operation,
    ranks: usize,
    bytes: usize,
    pace: &DirectCosts,
) -> Vec<Prediction> {
    let Some(collective) = collective(operation) else { return Vec::new() };
    let of_operation = table.direct().filter(|algorithm| algorithm.collective == collective.kind());
    let prediction = |algorithm: &'static DirectAlgorithm| {
        let whole = whole(operation, ranks, bytes)?;
        let (shared, ownership) = (GroupLayout::on_host(Reach::Write), Ownership::Borrowed);
        let crossovers = Crossovers::default();
        let case = DirectCase { world_size: ranks, bytes: whole, ownership, shared: &shared, crossovers };
        let chosen = table.suggest_direct(collective.kind(), &case);
        let size = if whole.is_multiple_of(4) { 4 } else { 1 };
        let partition = Partition::new(whole / size, size, algorithm.parts(ranks))?;
        let block_bytes = (algorithm.block_bytes)(whole);
        let plan = DirectPlan::new(
            (collective, algorithm),
            ranks,
            partition.chunk_bytes_max(),
            block_bytes,
            shared,
        )?;
        let seconds = plan.duration(partition, Some(partition), pace).as_secs_f64();
        Some(Prediction { algorithm, chosen: chosen == Some(algorithm), seconds })
    };
    of_operation.filter(|_| (2..=RANKS_MAX).contains(&ranks)).filter_map(prediction).collect()
}

/// Returns the direct collective of an operation, with root 0.
fn collective(operation: Operation) -> Option<DirectCollective> {
    match operation {
        Operation::ReduceScatter => Some(DirectCollective::ReduceScatter { of: Source::Input }),
        Operation::AllGather => Some(DirectCollective::AllGather { of: Source::Input }),
        _ => DirectCollective::all(0).into_iter().find(|collective| collective.name() == operation.name()),
    }
}

/// Returns the bytes of the buffer that contains a rank's input.
fn whole(operation: Operation, ranks: usize, bytes: usize) -> Option<usize> {
    match operation {
        Operation::Barrier => Some(0),
        Operation::AllGather => bytes.checked_mul(ranks),
        _ => Some(bytes),
    }
}

/// The costs of shared memory in a file: one JSON object.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DirectCostFile {
    post_ns: f64,
    wait_ns: f64,
    notice_ns: f64,
    copied_byte_ns: f64,
    viewed_byte_ns: f64,
    #[serde(default)]
    attach_ns: f64,
    #[serde(default)]
    attached_byte_ns: f64,
}

/// Bytes of an operand that are reduced at a time if the operand is in another rank's memory and was not
/// copied to a slot.
const PIECE_BYTES: usize = 128 << 10;
/// Largest cost in a file, in nanoseconds.
const NS_MAX: f64 = 1e12;

/// Reads the costs in a file.
pub(super) fn read(path: &Path) -> Result<DirectCosts, Error> {
    let text = fs::read_to_string(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
    let wrong = |reason: String| Error::Model { path: path.to_owned(), reason };
    let fields: DirectCostFile = serde_json::from_str(&text).map_err(|e| wrong(e.to_string()))?;
    let all = [
        ("post_ns", fields.post_ns),
        ("wait_ns", fields.wait_ns),
        ("notice_ns", fields.notice_ns),
        ("copied_byte_ns", fields.copied_byte_ns),
        ("viewed_byte_ns", fields.viewed_byte_ns),
        ("attach_ns", fields.attach_ns),
        ("attached_byte_ns", fields.attached_byte_ns),
    ];
    match all.into_iter().find(|(_, value)| !(0.0..=NS_MAX).contains(value)) {
        Some((name, value)) => {
            Err(wrong(format!("{name} is {value}, which is not a time from 0 to {NS_MAX} ns")))
        }
        None => Ok(fields.pace()),
    }
}

/// Returns the content of a file with these costs.
pub(super) fn json(pace: &DirectCosts) -> String {
    let ns = |picoseconds: u64| picoseconds as f64 / 1e3;
    let costs = &pace.costs;
    let fields = DirectCostFile {
        post_ns: ns(costs.signal_ps),
        wait_ns: ns(costs.wait_ps),
        notice_ns: rounded(pace.notice.as_secs_f64() * 1e9, 0),
        copied_byte_ns: ns(costs.copied_byte_ps),
        viewed_byte_ns: ns(costs.viewed_byte_ps),
        attach_ns: ns(costs.attach_ps),
        attached_byte_ns: ns(costs.attached_byte_ps),
    };
    serde_json::to_string(&fields).expect("a pace has only numbers") + "\n"
}

impl DirectCostFile {
    /// Creates costs without system calls, in the order of [`START`].
    const fn without_system([post_ns, wait_ns, notice_ns, copied_byte_ns, viewed_byte_ns]: [f64; 5]) -> Self {
        let (attach_ns, attached_byte_ns) = (0.0, 0.0);
        Self { post_ns, wait_ns, notice_ns, copied_byte_ns, viewed_byte_ns, attach_ns, attached_byte_ns }
    }

    fn pace(&self) -> DirectCosts {
        let costs = MemoryCosts {
            signal_ps: picoseconds(self.post_ns),
            wait_ps: picoseconds(self.wait_ns),
            copied_byte_ps: picoseconds(self.copied_byte_ns),
            viewed_byte_ps: picoseconds(self.viewed_byte_ns),
            attach_ps: picoseconds(self.attach_ns),
            attached_byte_ps: picoseconds(self.attached_byte_ns),
        };
        DirectCosts {
            costs,
            notice: Duration::from_secs_f64(self.notice_ns * 1e-9),
            piece_bytes: PIECE_BYTES,
        }
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "times are neither negative nor long"
)]
fn picoseconds(nanoseconds: f64) -> u64 {
    (nanoseconds * 1e3).round() as u64
}

/// Start of the search: signal, wait, notice, copied byte and viewed byte, in nanoseconds.
const START: [f64; 5] = [50.0, 20.0, 50.0, 0.1, 0.1];

/// Returns the costs whose predictions have the smallest sum of squared relative errors, which `error`
/// computes. The costs of system calls are not fitted.
pub(super) fn fit(error: impl Fn(&DirectCosts) -> f64) -> DirectCosts {
    let pace = |point| DirectCostFile::without_system(point).pace();
    pace(fit::search(START, |point| error(&pace(*point))))
}

#[cfg(test)]
mod tests {
    use dist_algos::ALGORITHMS;

    use super::*;

    fn pace(post_ns: f64, copied_byte_ns: f64) -> DirectCosts {
        DirectCostFile::without_system([post_ns, 0.0, 75.0, copied_byte_ns, 0.2]).pace()
    }

    #[test]
    fn predictions_agree_with_a_calculation_by_hand() {
        let (ranks, bytes) = (2, 1024);
        let all = predict(ALGORITHMS, Operation::AllReduce, ranks, bytes, &pace(20.0, 0.1));
        assert_eq!(all.len(), 4);
        // A rank copies its buffer into a slot, signals, and reads the other's slot. The sum is rounded down
        // to nanoseconds.
        let one_shot = all.iter().find(|one| one.algorithm.is_one_shot).unwrap();
        let expected = 1024.0 * 0.1 + 20.0 + 75.0 + 1024.0 * 0.2;
        assert!((one_shot.seconds * 1e9 - expected).abs() <= 1.0, "{one_shot:?}");
        assert!(one_shot.chosen && all.iter().filter(|one| one.chosen).count() == 1);
        assert!(predict(ALGORITHMS, Operation::Scan, ranks, bytes, &pace(20.0, 0.1)).is_empty());
        assert!(predict(ALGORITHMS, Operation::AllReduce, 1, bytes, &pace(20.0, 0.1)).is_empty());
    }

    #[test]
    fn the_costs_behind_the_times_are_fitted_and_written() {
        let truth = pace(30.0, 0.3);
        let times = |pace: &DirectCosts| {
            let all = [Operation::Barrier, Operation::AllReduce, Operation::Broadcast];
            let points = all.into_iter().flat_map(|op| [8, 4096, 1 << 20].map(|bytes| (op, bytes)));
            let seconds =
                points.flat_map(|(op, bytes)| predict(ALGORITHMS, op, 2, bytes, pace)).map(|one| one.seconds);
            seconds.collect::<Vec<_>>()
        };
        let expected = times(&truth);
        let found = fit(|pace| times(pace).iter().zip(&expected).map(|(a, b)| (a / b).ln().powi(2)).sum());
        for (got, expected) in times(&found).iter().zip(&expected) {
            assert!((got / expected - 1.0).abs() < 0.05, "{found:?}");
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pace");
        fs::write(&path, json(&found)).unwrap();
        assert_eq!(read(&path).unwrap(), found);
        fs::write(&path, r#"{"post_ns":-1,"wait_ns":1,"notice_ns":1,"copied_byte_ns":1,"viewed_byte_ns":1}"#)
            .unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("post_ns is -1"));
    }
}
