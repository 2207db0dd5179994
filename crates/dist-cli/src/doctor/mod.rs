//! `distctl doctor`: reports the environment of the ranks and the speed between them, with advice.

mod machine;
mod ranks;

use std::fmt;

use dist_transport::process::Config;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::outcome::Outcome;
use crate::output::print;
use crate::run::in_a_job;
use ranks::{MachineReport, MeasuredLink, speed};

#[derive(Debug, clap::Args)]
pub(crate) struct DoctorArguments {
    /// Number of processes [default: 2; inside a job, the size of the job]
    #[arg(short = 'n', long, value_name = "N", value_parser = crate::parse::ranks)]
    ranks: Option<usize>,
    /// Print one JSON object per line instead of a table
    #[arg(long)]
    json: bool,
}

/// A finding about one machine or about the ranks. The fields and their order are a stable contract.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Finding {
    check: String,
    /// The machine, by the lowest rank on it.
    rank: usize,
    found: String,
    /// The action that improves it, if there is one.
    advice: Option<String>,
}

impl Finding {
    fn new(check: &str, found: impl Into<String>) -> Self {
        Self { check: check.to_owned(), rank: 0, found: found.into(), advice: None }
    }

    fn but(self, advice: impl Into<String>) -> Self {
        Self { advice: Some(advice.into()), ..self }
    }

    /// Returns the finding, with this advice if something is wrong.
    fn but_if(self, wrong: bool, advice: impl Into<String>) -> Self {
        if wrong { self.but(advice) } else { self }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = if self.advice.is_some() { '!' } else { ' ' };
        writeln!(f, "{mark} rank {:<4} {:<11} {}", self.rank, self.check, self.found)?;
        self.advice.iter().try_for_each(|advice| writeln!(f, "{:24}{advice}", ""))
    }
}

/// Examines the job of which this process is a rank. Outside a job, starts one.
pub(crate) fn run(arguments: &DoctorArguments) -> Result<Outcome, Error> {
    in_a_job(arguments.ranks, |_| Ok(()), |config, ()| report(arguments, config))
}

fn report(arguments: &DoctorArguments, config: &Config) -> Result<Outcome, Error> {
    let Some(MachineReport { findings, leaders, links }) = ranks::look_around(config)? else {
        return Ok(Outcome::Success);
    };
    let text: String = if arguments.json {
        findings.iter().map(|finding| serde_json::to_string(finding).expect("it is text") + "\n").collect()
    } else {
        findings.iter().map(Finding::to_string).chain([matrix(&leaders, &links)]).collect()
    };
    print(&text)?;
    Ok(Outcome::Success)
}

/// Returns a table of the links between hosts, if there are several: a row and a column for the first rank of each.
fn matrix(leaders: &[usize], links: &[MeasuredLink]) -> String {
    if leaders.len() < 2 {
        return String::new();
    }
    let mut text = "\n  between hosts: one way for 8 bytes, and speed at 1 MiB\n".to_owned();
    let heads = leaders.iter().map(|rank| format!("{:>22}", format!("rank {rank}")));
    text += &format!("{:11}{}\n", "", heads.collect::<String>());
    for row in leaders {
        let cells = leaders.iter().map(|column| {
            let link =
                links.iter().find(|link| [link.low, link.high] == [*row.min(column), *row.max(column)]);
            let cell =
                link.map_or("-".to_owned(), |link| format!("{:.1} us {}", link.us, speed(link.gb_per_s)));
            format!("{cell:>22}")
        });
        text += &format!("  {:9}{}\n", format!("rank {row}"), cells.collect::<String>());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_between_hosts_are_a_matrix() {
        let link = |low: usize, high: usize, us| {
            let link =
                serde_json::json!({ "low": low, "high": high, "way": "TCP", "us": us, "gb_per_s": 1.25 });
            serde_json::from_value::<MeasuredLink>(link).unwrap()
        };
        let links = [link(0, 1, 0.3), link(0, 2, 31.2), link(0, 4, 40.0), link(2, 4, 1000.0)];
        let text = matrix(&[0, 2, 4], &links);
        let lines: Vec<Vec<&str>> =
            text.lines().skip(2).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["rank", "0", "rank", "2", "rank", "4"]);
        assert_eq!(
            lines[2],
            ["rank", "2", "31.2", "us", "1.25", "GB/s", "-", "1000.0", "us", "1.25", "GB/s"]
        );
        assert_eq!(lines[3].len(), lines[2].len());
        assert_eq!(matrix(&[0], &links), "");
    }
}
