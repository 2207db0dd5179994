//! `distctl bench`: measures the time of a collective and checks its results.

mod exact;
mod line;
mod measure;
mod operation;
mod sample;
mod start;

use dist_collectives::tuning::{
    Algorithm, CostCache, Operation as Collective, Ownership, crossovers_from_env,
};
use dist_collectives::{Communicator, DType, ReduceOp, ReductionOrder};
use dist_transport::process::{Config, Medium, ProcessTransport};

use crate::Error;
use crate::outcome::Outcome;
use crate::output::{print, say};
use crate::parse::{TransportName, same_name};
use crate::run::in_a_job;
use line::{MeasuredLine, Table};
use operation::Operation;
use start::Start;

/// The sizes in bytes that are measured by default.
const BYTES_DEFAULT: &str = "8,1K,64K,1M,16M,128M";

#[derive(Debug, clap::Args)]
pub(crate) struct BenchArguments {
    /// Operation to measure
    #[arg(value_name = "OP", value_parser = Operation::parser())]
    operation: Operation,
    /// Number of processes [default: 2; inside a job, the size of the job]
    #[arg(short = 'n', long, value_name = "N", value_parser = crate::parse::ranks)]
    ranks: Option<usize>,
    /// Transport of messages [default: DIST_TRANSPORT, or auto]
    #[arg(long, value_enum)]
    transport: Option<TransportName>,
    /// Sizes of each rank's input, for example 8,1K,1M
    #[arg(long, value_delimiter = ',', default_value = BYTES_DEFAULT, value_parser = crate::parse::bytes)]
    bytes: Vec<usize>,
    /// Type of the elements
    #[arg(long, default_value = "f32", value_parser = crate::parse::dtype())]
    dtype: DType,
    /// Reduction
    #[arg(long, default_value = "sum", value_parser = crate::parse::reduce_op())]
    op: ReduceOp,
    /// Name of the algorithm, or auto to choose by size and number of ranks; an unknown name lists all names
    #[arg(long, default_value = "auto", value_name = "NAME")]
    algorithm: String,
    /// Order of the reduction
    #[arg(long, default_value = "canonical", value_parser = crate::parse::order())]
    order: ReductionOrder,
    /// Memory that an all_reduce works on, and that reduce_scatter, all_gather and all_to_all read
    #[arg(long, value_enum, default_value = "private")]
    buffers: BufferKind,
    /// Start of a sample on all ranks
    #[arg(long, value_enum, default_value = "barrier")]
    start: Start,
    /// Maximum number of samples of each size
    #[arg(long, value_name = "N", default_value_t = 21, value_parser = clap::value_parser!(u32).range(1..=1000))]
    samples: u32,
    #[command(flatten)]
    switches: Switches,
}

/// The memory that an `all_reduce` works on. For `reduce_scatter`, `all_gather` and `all_to_all` it is the
/// memory of the input. Other operations always work on the caller's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum BufferKind {
    /// A buffer of the operation in ordinary memory
    Private,
    /// A buffer of the operation in memory that the ranks of a host share
    Shared,
    /// A slice of the caller, into which no other rank may write
    Borrowed,
}

impl BufferKind {
    fn name(self) -> &'static str {
        match self {
            Self::Private => "private",
            Self::Shared => "shared",
            Self::Borrowed => "borrowed",
        }
    }

    fn ownership(self) -> Ownership {
        match self {
            Self::Private => Ownership::Owned,
            Self::Shared => Ownership::Allocated,
            Self::Borrowed => Ownership::Borrowed,
        }
    }
}

#[derive(Debug, clap::Args)]
struct Switches {
    /// Rewrite buffers of 64 KiB and more before each call, outside the measured time
    #[arg(long)]
    touch: bool,
    /// Check a result before each measurement; if it is wrong, the point is not measured
    #[arg(long)]
    check: bool,
    /// Print one JSON object per line instead of a table
    #[arg(long)]
    json: bool,
}

/// Measures in the job of which this process is a rank. Outside a job, starts one.
pub(crate) fn run(arguments: &BenchArguments) -> Result<Outcome, Error> {
    in_a_job(arguments.ranks, |ranks| arguments.plan(ranks), |config, plan| measure(arguments, config, plan))
}

fn measure(arguments: &BenchArguments, config: &Config, plan: BenchPlan) -> Result<Outcome, Error> {
    let medium = arguments.transport.map_or(config.medium(), TransportName::medium);
    let transport = ProcessTransport::join(&config.clone().with_medium(medium))?;
    let medium = transport.medium();
    let plan = BenchPlan { medium, ..plan };
    let mut comm = Communicator::new(transport);
    comm.set_crossovers(crossovers_from_env()?);
    comm.tune(CostCache::for_user().as_ref(), medium.name())?;
    comm.set_order(arguments.order);
    let mut report =
        BenchReport { rank: comm.rank(), json: arguments.switches.json, table: Table::default() };
    measure::points(&plan, comm, &mut report)
}

/// A valid set of measurements.
#[derive(Debug)]
struct BenchPlan {
    operation: Operation,
    /// Elements of each rank's input, for each point.
    lengths: Vec<usize>,
    dtype: DType,
    op: ReduceOp,
    algorithm: Option<Algorithm>,
    order: ReductionOrder,
    buffers: BufferKind,
    medium: Medium,
    start: Start,
    samples: u32,
    touch: bool,
    check: bool,
}

impl BenchArguments {
    fn plan(&self, world_size: usize) -> Result<BenchPlan, Error> {
        let (operation, dtype) = (self.operation, self.dtype);
        if operation.reduces() && !self.op.supports(dtype) {
            return Err(Error::Usage(format!("{} does not support {dtype}", self.op)));
        }
        if operation == Operation::Collective(Collective::Scan) && self.op == ReduceOp::Mean {
            return Err(Error::Usage("scan does not support mean".to_owned()));
        }
        if operation.between_two() && world_size < 2 {
            return Err(Error::Usage(format!("{operation} needs 2 ranks")));
        }
        let algorithm = self.algorithm(world_size)?;
        let mut lengths = Vec::new();
        for &bytes in &self.bytes {
            if bytes % dtype.size() != 0 {
                return Err(Error::Usage(format!(
                    "{bytes} bytes are not a whole number of {dtype} elements"
                )));
            }
            if bytes.checked_mul(world_size).is_none() {
                return Err(Error::Usage(format!(
                    "{bytes} bytes for each of {world_size} ranks are too many"
                )));
            }
            lengths.push(operation.input_len(bytes / dtype.size(), world_size));
        }
        if operation.is_barrier() {
            lengths = vec![0];
        }
        let Switches { touch, check, .. } = self.switches;
        if check && operation.reduces() && !exact::possible(dtype, self.op, world_size) {
            let text = format!(
                "--check needs exact results, and {} over {world_size} ranks is not exact in {dtype}",
                self.op
            );
            return Err(Error::Usage(text));
        }
        let (op, order, medium) = (self.op, self.order, Medium::default());
        let Self { buffers, start, samples, .. } = *self;
        Ok(BenchPlan {
            operation,
            lengths,
            dtype,
            op,
            algorithm,
            order,
            buffers,
            medium,
            start,
            samples,
            touch,
            check,
        })
    }

    fn algorithm(&self, world_size: usize) -> Result<Option<Algorithm>, Error> {
        if self.algorithm == "auto" {
            return Ok(None);
        }
        let known: Vec<_> = self.operation.algorithms();
        let Some(algorithm) = known.iter().find(|known| same_name(known.name(), &self.algorithm)) else {
            let names: Vec<_> = ["auto"].into_iter().chain(known.iter().map(|known| known.name())).collect();
            let text = format!(
                "{} has the algorithms {}, but not {:?}",
                self.operation,
                names.join(", "),
                self.algorithm
            );
            return Err(Error::Usage(text));
        };
        operation::check_algorithm(*algorithm, world_size, self.order)?;
        Ok(Some(*algorithm))
    }
}

/// The output of results, which rank 0 prints.
#[derive(Debug)]
struct BenchReport {
    rank: usize,
    json: bool,
    table: Table,
}

impl BenchReport {
    fn line(&mut self, line: &MeasuredLine) -> Result<(), Error> {
        if self.rank != 0 {
            return Ok(());
        }
        print(&if self.json { line.json() } else { self.table.rows(line) })
    }

    /// Prints that this rank's result is wrong.
    fn wrong(&self, what: &str) {
        // The exit code reports it too.
        say(&format!("check failed: {what}"));
    }
}

#[cfg(test)]
mod tests {
    use clap::{Args, FromArgMatches};

    use super::*;

    #[test]
    fn only_reductions_have_to_be_exact() {
        let plan = |operation| {
            let command = BenchArguments::augment_args(clap::Command::new("bench"));
            let arguments = ["bench", operation, "--dtype", "bf16", "--bytes", "8", "--check"];
            BenchArguments::from_arg_matches(&command.get_matches_from(arguments)).unwrap().plan(300)
        };
        assert!(plan("broadcast").is_ok() && plan("all_gather").is_ok() && plan("barrier").is_ok());
        assert!(plan("all_reduce").is_err() && plan("scan").is_err());
    }
}
