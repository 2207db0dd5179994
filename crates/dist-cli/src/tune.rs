//! `distctl tune`: measures the costs of messages on this machine again and stores them.

use std::path::Path;

use dist_collectives::Communicator;
use dist_collectives::tuning::{CostCache, CostModel, LevelModels, TopologyKey};
use dist_transport::process::{Config, ProcessTransport};
use serde::Serialize;

use crate::Error;
use crate::outcome::Outcome;
use crate::output::print;
use crate::progress::Progress;
use crate::run::in_a_job;

#[derive(Debug, clap::Args)]
pub(crate) struct TuneArguments {
    /// Number of processes [default: 2; inside a job, the size of the job]
    #[arg(short = 'n', long, value_name = "N", value_parser = crate::parse::ranks)]
    ranks: Option<usize>,
    /// Print one JSON object instead of a sentence
    #[arg(long)]
    json: bool,
}

/// The JSON output. Its fields and their order are a stable contract.
#[derive(Debug, Serialize)]
struct TunedCosts<'a> {
    transport: &'static str,
    ranks: usize,
    round_ps: u64,
    byte_ps: u64,
    reduced_byte_ps: u64,
    /// The file that stores the costs, if any.
    file: Option<&'a Path>,
}

/// Measures in the job of which this process is a rank. Outside a job, starts one.
pub(crate) fn run(arguments: &TuneArguments) -> Result<Outcome, Error> {
    let cache = |_| {
        CostCache::for_user().ok_or_else(|| {
            Error::Usage("DIST_COSTS=off disables the file of costs: unset it to use distctl tune".to_owned())
        })
    };
    in_a_job(arguments.ranks, cache, |config, cache| measure(arguments, config, &cache))
}

fn measure(arguments: &TuneArguments, config: &Config, cache: &CostCache) -> Result<Outcome, Error> {
    let progress = (config.rank().index() == 0).then(Progress::start).transpose()?;
    let now = |what: &str| progress.iter().for_each(|progress| progress.doing(what));
    now("waiting for all ranks to join");
    let transport = ProcessTransport::join(config)?;
    now("measuring the costs of messages");
    let medium = transport.medium().name();
    let mut comm = Communicator::new(transport);
    let measured = match comm.measure_level_costs()? {
        Some(LevelModels { inside, across }) => {
            let [of_hosts, of_links] = TopologyKey::of_levels(medium, &comm.hosts());
            vec![(of_hosts, inside), (of_links, across)]
        }
        None => vec![(TopologyKey::new(medium, &comm.hosts()), comm.measure_costs()?)],
    };
    if comm.rank() != 0 {
        return Ok(Outcome::Success);
    }
    let written = measured.iter().try_for_each(|(key, costs)| cache.save(key, *costs));
    let (_, costs) = measured[measured.len() - 1];
    let file = cache.path().filter(|_| written.is_ok());
    let CostModel { round_ps, byte_ps, reduced_byte_ps } = costs;
    let line =
        TunedCosts { transport: medium, ranks: comm.world_size(), round_ps, byte_ps, reduced_byte_ps, file };
    print(&if arguments.json { line.json() } else { line.sentence() })?;
    match (written, cache.path()) {
        (Err(source), Some(path)) => Err(Error::Write { path: path.to_owned(), source }),
        _ => Ok(Outcome::Success),
    }
}

impl TunedCosts<'_> {
    fn json(&self) -> String {
        serde_json::to_string(self).expect("it is text and numbers") + "\n"
    }

    fn sentence(&self) -> String {
        let Self { transport, ranks, round_ps, byte_ps, reduced_byte_ps, file } = *self;
        let gigabytes = |byte_ps: u64| 1000.0 / byte_ps as f64;
        let file = file.map_or("nowhere".to_owned(), |path| format!("in {}", path.display()));
        format!(
            "{ranks} ranks, transport {transport}: a round takes {:.1} µs, a link moves {:.2} GB/s, a core reduces {:.1} GB/s; stored {file}\n",
            round_ps as f64 / 1e6,
            gigabytes(byte_ps),
            gigabytes(reduced_byte_ps),
        )
    }
}
