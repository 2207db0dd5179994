//! `distctl sim`: predicts the times of collectives on a network that does not have to exist.

mod candidates;
mod compare;
mod direct;
mod fit;
mod line;
mod links;
mod messages;
mod model;
mod pipeline;
mod train;
mod world;

use std::path::PathBuf;

use dist_algos::ALGORITHMS;
use dist_collectives::ReductionOrder;
use dist_collectives::tuning::Operation;

use crate::Error;
use crate::outcome::Outcome;
use crate::output::print;
use crate::parse::same_name;
use crate::progress::Progress;
use candidates::Case;
use dist_algos::direct::DirectCosts;
use line::{PredictedLine, PredictedTable};
use world::{World, WorldArguments};

#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct SimArguments {
    #[command(subcommand)]
    other: Option<Other>,
    #[command(flatten)]
    collective: CollectiveArguments,
}

/// The subcommands other than the prediction of collectives.
#[derive(Debug, clap::Subcommand)]
enum Other {
    /// Predict the time of a training step for increasing numbers of ranks
    Train(train::TrainArguments),
    /// Show the timeline of a pipeline step: the action of each rank at each time
    Pipeline(pipeline::PipelineArguments),
    /// Compare measured with predicted times, from a model or from the best fit to the measurements
    Compare(compare::CompareArguments),
}

#[derive(Debug, clap::Args)]
struct CollectiveArguments {
    /// Operation to predict
    #[arg(value_name = "OP", required = true, value_parser = crate::operation::collective())]
    operation: Option<Operation>,
    /// Numbers of ranks, for example 8 or 2,64,1000000
    #[arg(long, value_name = "N", required = true, value_delimiter = ',', value_parser = ranks)]
    ranks: Vec<usize>,
    /// Sizes of each rank's input, for example 8,1K,1M
    #[arg(long, value_delimiter = ',', default_value = "1M", value_parser = crate::parse::bytes)]
    bytes: Vec<usize>,
    /// Name of the algorithm, all for all of them, or auto for the one that would be chosen
    #[arg(long, default_value = "all", value_name = "NAME")]
    algorithm: String,
    /// Order of the reduction; only algorithms that keep it are predicted
    #[arg(long, default_value = "canonical", value_parser = crate::parse::order())]
    order: ReductionOrder,
    #[command(flatten)]
    world: WorldArguments,
    /// File with the costs of work in shared memory; predicts direct schedules too, on one host
    #[arg(long, value_name = "FILE")]
    pace: Option<PathBuf>,
    /// Print one JSON object per line instead of a table
    #[arg(long)]
    json: bool,
}

/// Maximum number of ranks. Their clocks fit into memory.
const RANKS_MAX: usize = 10_000_000;

fn ranks(text: &str) -> Result<usize, String> {
    crate::parse::count(text, "ranks", 1..=RANKS_MAX)
}

/// Runs the selected prediction.
pub(crate) fn run(arguments: &SimArguments) -> Result<Outcome, Error> {
    let collective = &arguments.collective;
    match (&arguments.other, collective.operation) {
        (Some(Other::Train(arguments)), _) => train::run(arguments),
        (Some(Other::Pipeline(arguments)), _) => pipeline::run(arguments),
        (Some(Other::Compare(arguments)), _) => compare::run(arguments),
        (None, Some(operation)) => collectives(operation, collective),
        (None, None) => {
            Err(Error::Usage("name an operation or a command; distctl sim --help lists them".to_owned()))
        }
    }
}

/// Predicts and prints every point.
fn collectives(operation: Operation, arguments: &CollectiveArguments) -> Result<Outcome, Error> {
    let pace = arguments.pace.as_deref().map(direct::read).transpose()?;
    let progress = Progress::start()?;
    for &ranks in &arguments.ranks {
        let world = arguments.world.of(ranks)?;
        let pace = pace.as_ref().filter(|_| world.hosts() == 1);
        let sizes: &[usize] = if operation == Operation::Barrier { &[0] } else { &arguments.bytes };
        for &bytes in sizes {
            let lines = point(operation, arguments, (&world, pace), bytes, &progress)?;
            let text = if arguments.json {
                lines.iter().map(PredictedLine::json).collect()
            } else {
                PredictedTable { world: &world, lines: &lines }.to_string()
            };
            print(&text)?;
        }
    }
    Ok(Outcome::Success)
}

/// Predicts the selected algorithms for one number of ranks and one size.
fn point(
    operation: Operation,
    arguments: &CollectiveArguments,
    (world, pace): (&World, Option<&DirectCosts>),
    bytes: usize,
    progress: &Progress,
) -> Result<Vec<PredictedLine>, Error> {
    progress.doing(format!("predicting {operation} of {bytes} bytes on {} ranks", world.ranks()));
    let case = Case { operation, bytes, order: arguments.order.least(), world };
    let directs =
        pace.map_or(Vec::new(), |pace| direct::predict(ALGORITHMS, operation, world.ranks(), bytes, pace));
    let mut all = case.candidates(ALGORITHMS)?;
    // Ranks that share memory use direct schedules instead of messages.
    all.iter_mut().for_each(|candidate| candidate.chosen &= directs.is_empty());
    let wanted = |name: &str, chosen: bool| match arguments.algorithm.as_str() {
        "all" => true,
        "auto" => chosen,
        wanted => same_name(wanted, name),
    };
    let found: Vec<_> = all.iter().filter(|candidate| wanted(&candidate.name, candidate.chosen)).collect();
    let found_directs: Vec<_> =
        directs.iter().filter(|direct| wanted(direct.algorithm.name, direct.chosen)).collect();
    if found.is_empty() && found_directs.is_empty() {
        let direct_names = directs.iter().map(|direct| direct.algorithm.name);
        let names: Vec<_> = all.iter().map(|candidate| candidate.name.as_str()).chain(direct_names).collect();
        let text = format!(
            "{} on {} ranks has the algorithms all, auto, {}, but not {:?}",
            case.operation,
            world.ranks(),
            names.join(", "),
            arguments.algorithm
        );
        return Err(Error::Usage(text));
    }
    let mut lines = Vec::new();
    for candidate in found {
        let (name, ranks) = (&candidate.name, world.ranks());
        progress.doing(format!("predicting {operation} of {bytes} bytes on {ranks} ranks by {name}"));
        lines.push(PredictedLine::of(&case, candidate)?);
    }
    lines.extend(found_directs.into_iter().map(|direct| PredictedLine::of_direct(&case, direct)));
    line::mark_fastest(&mut lines);
    Ok(lines)
}
