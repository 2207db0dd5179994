//! `distctl doctor`: what ranks find where they run, and what would make them faster or fail.

mod machine;
mod ranks;

use std::fmt;

use dist_transport::process::Config;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::outcome::Outcome;
use crate::output::print;
use crate::run::in_a_job;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Number of processes [default: 2; inside a job, the size of the job]
    #[arg(short = 'n', long, value_name = "N", value_parser = crate::parse::ranks)]
    ranks: Option<usize>,
    /// Print one JSON object per line instead of a table
    #[arg(long)]
    json: bool,
}

/// Something that was found out, of one machine or of the ranks. The fields and their order are a contract with whoever
/// reads them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Finding {
    check: String,
    /// The machine, by the lowest rank on it.
    rank: usize,
    found: String,
    /// What to do about it, if it is not as it should be.
    advice: Option<String>,
}

impl Finding {
    fn new(check: &str, found: impl Into<String>) -> Self {
        Self { check: check.to_owned(), rank: 0, found: found.into(), advice: None }
    }

    fn but(self, advice: impl Into<String>) -> Self {
        Self { advice: Some(advice.into()), ..self }
    }

    /// The same with this advice if something is wrong.
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

/// Looks around in the job that this process is a rank of; alone, starts one.
pub(crate) fn run(arguments: &Arguments) -> Result<Outcome, Error> {
    in_a_job(arguments.ranks, |_| Ok(()), |config, ()| report(arguments, config))
}

fn report(arguments: &Arguments, config: &Config) -> Result<Outcome, Error> {
    let findings = ranks::look_around(config)?;
    let text: String = if arguments.json {
        findings.iter().map(|finding| serde_json::to_string(finding).expect("it is text") + "\n").collect()
    } else {
        findings.iter().map(Finding::to_string).collect()
    };
    print(&text)?;
    Ok(Outcome::Success)
}
