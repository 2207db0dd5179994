//! `distctl tune`: what messages take here, measured anew and kept.

use std::sync::Arc;

use dist_collectives::{Communicator, CostModel, KeptCosts};
use dist_transport::tcp::{Config, TcpTransport};

use crate::Error;
use crate::output::print;
use crate::run::{Forward, Job, Outcome};

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// How many processes; inside a job this is the job's size, else 2 unless said otherwise
    #[arg(short = 'n', long, value_name = "N", value_parser = crate::parse::ranks)]
    ranks: Option<usize>,
    /// One JSON object instead of a sentence
    #[arg(long)]
    json: bool,
}

const RANKS_DEFAULT: usize = 2;

/// Measures the job that this process is a rank of; alone, starts one.
pub(crate) fn run(arguments: &Arguments) -> Result<Outcome, Error> {
    if std::env::var_os("RANK").is_some() {
        return measure(arguments);
    }
    let ranks = arguments.ranks.unwrap_or(RANKS_DEFAULT);
    Job::of_this_command(ranks)?.run(Arc::new(Forward::untagged()))
}

fn measure(arguments: &Arguments) -> Result<Outcome, Error> {
    let Some(kept) = KeptCosts::of_user() else {
        return Err(Error::Usage("DIST_COSTS=off keeps no costs".to_owned()));
    };
    let transport = TcpTransport::join(&Config::from_env()?)?;
    let medium = transport.medium().name();
    let mut comm = Communicator::new(transport);
    let costs = comm.tune_again(&kept, medium)?;
    if comm.rank() != 0 {
        return Ok(Outcome::Success);
    }
    let text = if arguments.json {
        json(&comm, medium, costs, &kept)
    } else {
        sentences(&comm, medium, costs, &kept)
    };
    print(&text)?;
    Ok(Outcome::Success)
}

fn json(comm: &Communicator, medium: &str, costs: CostModel, kept: &KeptCosts) -> String {
    let line = serde_json::json!({
        "transport": medium,
        "ranks": comm.world_size(),
        "round_ps": costs.round_ps,
        "byte_ps": costs.byte_ps,
        "reduced_byte_ps": costs.reduced_byte_ps,
        "file": kept.path(),
    });
    format!("{line}\n")
}

fn sentences(comm: &Communicator, medium: &str, costs: CostModel, kept: &KeptCosts) -> String {
    let CostModel { round_ps, byte_ps, reduced_byte_ps } = costs;
    let gigabytes = |byte_ps: u64| 1000.0 / byte_ps as f64;
    let file = kept.path().map_or("nowhere".to_owned(), |path| format!("in {}", path.display()));
    format!(
        "{} ranks, transport {medium}: a round takes {:.1} µs, a link moves {:.2} GB/s, a core reduces {:.1} GB/s; kept {file}\n",
        comm.world_size(),
        round_ps as f64 / 1e6,
        gigabytes(byte_ps),
        gigabytes(reduced_byte_ps),
    )
}
