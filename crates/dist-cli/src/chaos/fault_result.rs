//! The result of one fault, from the reports of the ranks.

use std::time::Duration;

use serde::Serialize;

use super::plan::{FaultPlan, Kind};
use super::rank::{End, RankReport};

/// One fault and its consequences. The fields and their order are a stable contract.
#[derive(Debug, Clone, Serialize)]
pub(super) struct FaultResult {
    pub(super) fault: u64,
    pub(super) kind: Kind,
    pub(super) victim: usize,
    /// Successful calls on all ranks together.
    pub(super) calls: usize,
    /// For each other rank, the time from the fault to the error of its call, in milliseconds.
    pub(super) heard_ms: Vec<f64>,
    /// Everything that is wrong.
    pub(super) wrong: Vec<String>,
}

impl FaultResult {
    /// Judges the reports of all ranks.
    pub(super) fn of(fault: u64, plan: &FaultPlan, reports: &[Vec<RankReport>]) -> Self {
        let FaultPlan { kind, victim, .. } = *plan;
        let mut result = Self { fault, kind, victim, calls: 0, heard_ms: Vec::new(), wrong: Vec::new() };
        let at = reports.iter().flatten().find_map(|report| match report {
            RankReport::Fault { at } => Some(*at),
            _ => None,
        });
        let Some(at) = at else {
            result.wrong.push("the fault did not happen".to_owned());
            return result;
        };
        for (rank, reports) in reports.iter().enumerate() {
            if reports.iter().any(|report| matches!(report, RankReport::Hang)) {
                result.wrong.push(format!("rank {rank} hung in a call after its deadline"));
            }
            let end = reports
                .iter()
                .find_map(|report| if let RankReport::End(end) = report { Some(end) } else { None });
            match end {
                Some(end) => result.judge(rank, end, at),
                None if rank == victim && kind != Kind::Stall => {}
                None => result.wrong.push(format!("rank {rank} ended without a report")),
            }
        }
        result
    }

    fn judge(&mut self, rank: usize, end: &End, at: Duration) {
        let Self { kind, victim, .. } = *self;
        self.calls += end.calls;
        if end.wrong > 0 {
            self.wrong.push(format!("{} of rank {rank}'s {} results are wrong", end.wrong, end.calls));
        }
        match &end.error {
            None if kind == Kind::Stall => {}
            None => self.wrong.push(format!("rank {rank} did not detect the fault")),
            Some(error) if kind == Kind::Stall => {
                self.wrong.push(format!("rank {rank} failed, although no rank had died: {}", error.text));
            }
            Some(error) => {
                self.heard_ms.push(end.at.saturating_sub(at).as_secs_f64() * 1e3);
                if error.timed_out {
                    self.wrong
                        .push(format!("rank {rank} detected the fault only at its deadline: {}", error.text));
                } else if error.rank != Some(victim) {
                    self.wrong.push(format!("rank {rank} does not name rank {victim}: {}", error.text));
                }
            }
        }
    }

    pub(super) fn is_right(&self) -> bool {
        self.wrong.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::super::rank::ReportedError;
    use super::*;

    const AT: Duration = Duration::from_millis(500);

    fn plan(kind: Kind) -> FaultPlan {
        FaultPlan { kind, victim: 1, after: Duration::ZERO, stall: Duration::ZERO, calls: 0 }
    }

    fn end(named: Option<usize>, wrong: usize) -> RankReport {
        let reported =
            |rank| ReportedError { rank: Some(rank), text: "it died".to_owned(), timed_out: rank == 2 };
        let at = AT + Duration::from_millis(3);
        RankReport::End(End { at, calls: 10, wrong, error: named.map(reported) })
    }

    #[rstest]
    #[case(Kind::Kill, vec![], end(Some(1), 0), None)]
    #[case(Kind::Kill, vec![], end(Some(0), 0), Some("rank 2 does not name rank 1: it died"))]
    #[case(Kind::Stop, vec![], end(Some(2), 0), Some("rank 2 detected the fault only at its deadline: it died"))]
    #[case(Kind::Kill, vec![], end(None, 0), Some("rank 2 did not detect the fault"))]
    #[case(Kind::Kill, vec![], end(Some(1), 3), Some("3 of rank 2's 10 results are wrong"))]
    #[case(Kind::Kill, vec![], RankReport::Hang, Some("rank 2 hung in a call after its deadline; rank 2 ended without a report"))]
    #[case(Kind::Stall, vec![], end(None, 0), Some("rank 1 ended without a report"))]
    #[case(Kind::Stall, vec![end(None, 0)], end(None, 0), None)]
    #[case(Kind::Stall, vec![end(None, 0)], end(Some(1), 0), Some("rank 2 failed, although no rank had died: it died"))]
    fn every_error_in_the_reports_is_named(
        #[case] kind: Kind,
        #[case] victim: Vec<RankReport>,
        #[case] other: RankReport,
        #[case] expected: Option<&str>,
    ) {
        let first = if kind == Kind::Stall { end(None, 0) } else { end(Some(1), 0) };
        let reports = [vec![RankReport::Fault { at: AT }, first], victim, vec![other]];
        let result = FaultResult::of(0, &plan(kind), &reports);
        assert_eq!(result.wrong.join("; "), expected.unwrap_or_default());
        assert_eq!(result.is_right(), expected.is_none());
        assert!(result.heard_ms.iter().all(|&ms| (ms - 3.0).abs() < 1e-9), "{result:?}");
    }

    #[test]
    fn a_job_without_its_fault_is_wrong() {
        let result = FaultResult::of(0, &plan(Kind::Kill), &[vec![end(Some(1), 0)], vec![]]);
        assert_eq!(result.wrong, ["the fault did not happen"]);
    }
}
