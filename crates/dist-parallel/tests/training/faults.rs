//! The reports of groups and training steps for every kind of fault: equal on all survivors, by the deadline.

use std::error::Error as StdError;
use std::time::Duration;

use dist_collectives::{Communicator, Error, ReduceOp};
use dist_groups::Group;
use dist_parallel::checkpoint::{Checkpoints, Chunk, ShardMetadata, Shards, Slice};
use dist_parallel::fsdp::{Fsdp, FsdpOptions, ShardingStrategy};
use dist_parallel::local_sgd::{LocalSgd, LocalSgdOptions};
use dist_parallel::{BoxError, Ddp, FloatType, ParamInfo, Sequence, Values, ValuesMut};
use dist_transport::Cause;
use dist_transport::sim::{Directions, Fault, Link, Network, SimTransport, When};
use rstest::rstest;

use crate::ddp::{optimizer, options};
use crate::plain::{Bag, Rows, batch, model};

const SECOND: Duration = Duration::from_secs(1);
const TIMEOUT: Duration = Duration::from_secs(10);
const WORLD: usize = 4;

/// The time until which a rank ran, and its error: the culprit, by its number in the world, and the cause.
type End = (Duration, Option<(usize, &'static str)>);

/// The program of every rank, for `rounds` rounds or until a fault.
type Program = fn(&mut Communicator, usize) -> Result<(), BoxError>;

/// Sums in two groups of two, and in the world.
fn groups(world: &mut Communicator, rounds: usize) -> Result<(), BoxError> {
    let first = world.rank() / 2 * 2;
    let mut pair = Group::new(world, &[first, first + 1])?.expect("every rank is in one of the pairs");
    for _ in 0..rounds {
        let mut sum = [1_u32; 5];
        pair.all_reduce(&mut sum, ReduceOp::Sum)?;
        world.all_reduce(&mut sum, ReduceOp::Sum)?;
        assert_eq!(sum, [8; 5], "no wrong sum is given");
    }
    Ok(())
}

fn whole(world: &mut Communicator, rounds: usize) -> Result<(), BoxError> {
    let mut ddp = Ddp::new(world.fork()?, model(7), options(64))?;
    let mut optimizer = optimizer("sgd");
    for round in 0..rounds {
        ddp.step(2 * WORLD, batch(round))?;
        ddp.update(&mut *optimizer)?;
    }
    Ok(())
}

fn sharded(world: &mut Communicator, rounds: usize) -> Result<(), BoxError> {
    shared_by(ShardingStrategy::FullShard, world, rounds)
}

/// Trains in two groups of two that the caller does not know.
fn hybrid(world: &mut Communicator, rounds: usize) -> Result<(), BoxError> {
    shared_by(ShardingStrategy::HybridShard { shard_degree: 2 }, world, rounds)
}

fn shared_by(strategy: ShardingStrategy, world: &mut Communicator, rounds: usize) -> Result<(), BoxError> {
    let mut fsdp = Fsdp::new(world.fork()?, model(7), &FsdpOptions::new(strategy))?;
    let mut optimizer = optimizer("sgd");
    for round in 0..rounds {
        fsdp.step(2 * WORLD, batch(round))?;
        fsdp.update(&mut *optimizer)?;
    }
    Ok(())
}

/// Trains each rank alone, except for synchronisation points.
fn apart(world: &mut Communicator, rounds: usize) -> Result<(), BoxError> {
    let infos = vec![ParamInfo::new("some", [7], FloatType::F32)];
    let mut local = LocalSgd::new(world.fork()?, Bag::new(infos, 1), LocalSgdOptions::average(2))?;
    for _ in 0..2 * rounds {
        local.step_with(|_| Ok(0.0))?;
    }
    Ok(())
}

/// Runs a program with a fault in the middle of it.
fn ends(program: Program, shares: bool, seed: u64, fault: Fault) -> Vec<Option<End>> {
    let network = Network::new(WORLD).with_seed(seed).with_memory_link(Link::new(SECOND / 1000, 1 << 30));
    let network = if shares { network.with_shared_memory() } else { network };
    let network = network.with_fault(When::At(SECOND / 50), fault).with_clock(3, 60 * SECOND, 0);
    let outcome = network.try_run(move |transport: SimTransport| {
        let mut world = Communicator::new(transport);
        world.set_timeout(TIMEOUT);
        let told = program(&mut world, 40).err().map(|error| culprit(&*error));
        (world.runtime().now(), told)
    });
    let outcome = outcome.unwrap();
    assert!(!outcome.faults.is_empty(), "the fault has happened");
    let clocks = |rank: usize| if rank == 3 { 60 * SECOND } else { Duration::ZERO };
    let results = outcome.results.into_iter().enumerate();
    results.map(|(rank, end)| end.map(|(time, told)| (time.saturating_sub(clocks(rank)), told))).collect()
}

/// Returns the rank that an error names, by its number in the world, and the cause.
fn culprit(error: &(dyn StdError + 'static)) -> (usize, &'static str) {
    let mut chain = std::iter::successors(Some(error), |&error| error.source());
    let error = chain.find_map(communication).expect("communication failed");
    let cause = match error {
        Error::Aborted { cause: Cause::Died, .. } => "died",
        Error::Aborted { cause: Cause::Silent, .. } => "silent",
        Error::Aborted { cause: Cause::CoordinatorLost, .. } => "coordinator lost",
        Error::Aborted { cause: Cause::TimedOut { .. }, .. } => "timed out",
        Error::Aborted { cause: Cause::Protocol, .. } => "protocol",
        Error::Aborted { cause: Cause::Unreachable { .. }, .. } => "unreachable",
        Error::Transport { .. } if error.is_timeout() => "timed out",
        Error::Transport { .. } => "protocol",
        other => panic!("{other:?}"),
    };
    (error.peer().expect("an error names a rank"), cause)
}

fn communication<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a Error> {
    error.downcast_ref().or_else(|| error.downcast_ref::<Box<Error>>().map(AsRef::as_ref))
}

/// The expected report of a fault.
#[derive(Debug, Clone, Copy)]
enum Told {
    /// None: it only takes time.
    Nothing,
    /// This rank and cause, by this time.
    Culprit(usize, &'static str, Duration),
    /// A rank took too long, at the deadline; the same on all.
    Timeout,
    /// One of these ranks and another one cannot reach each other, by this time; the same on all.
    Unreachable([usize; 2], Duration),
}

#[rstest]
#[case::death(Fault::Kill { rank: 2 }, Told::Culprit(2, "died", SECOND))]
#[case::death_with_the_coordinator(Fault::Kill { rank: 0 }, Told::Culprit(0, "coordinator lost", SECOND))]
#[case::death_of_the_coordinator(Fault::CoordinatorDeath, Told::Culprit(0, "coordinator lost", SECOND))]
#[case::stall(Fault::Stall { rank: 2, lasts: None }, Told::Culprit(2, "silent", Duration::from_secs(3)))]
#[case::short_stall(Fault::Stall { rank: 2, lasts: Some(SECOND) }, Told::Nothing)]
#[case::slowness(Fault::Slow { rank: 1, pause: Duration::from_millis(10) }, Told::Nothing)]
#[case::delay(Fault::Delay { from: 3, to: 2, by: SECOND, lasts: SECOND }, Told::Nothing)]
#[case::long_delay(Fault::Delay { from: 3, to: 2, by: 6 * TIMEOUT, lasts: SECOND }, Told::Timeout)]
#[case::loss(Fault::Loss { from: 3, to: 2, one_in: 20, lasts: 60 * SECOND }, Told::Nothing)]
#[case::unheard(
    Fault::Partition { from: vec![2], to: vec![0, 1, 3], directions: Directions::One, lasts: None },
    Told::Culprit(2, "silent", Duration::from_secs(3)),
)]
#[case::short_partition(
    Fault::Partition { from: vec![2], to: vec![0, 1, 3], directions: Directions::Both, lasts: Some(SECOND) },
    Told::Nothing,
)]
#[case::no_way_between_two(
    Fault::Partition { from: vec![3], to: vec![2], directions: Directions::Both, lasts: None },
    Told::Unreachable([2, 3], Duration::from_secs(3)),
)]
#[case::changed_header(Fault::Corrupt { from: 3, to: 2, byte: 0 }, Told::Culprit(3, "protocol", SECOND))]
fn every_survivor_reports(
    #[case] fault: Fault,
    #[case] expected: Told,
    #[values(groups, whole, sharded, hybrid, apart)] program: Program,
    #[values(false, true)] shares: bool,
    #[values(0, 1)] seed: u64,
) {
    let ends = ends(program, shares, seed, fault);
    let first = ends.iter().flatten().next().expect("a rank survives").1;
    for (rank, end) in ends.into_iter().enumerate() {
        let Some((time, told)) = end else {
            // A rank that died or stands still forever reports nothing.
            assert!(matches!(expected, Told::Culprit(victim, ..) if victim == rank), "rank {rank}");
            continue;
        };
        match expected {
            Told::Nothing => assert_eq!(told, None, "rank {rank}"),
            Told::Culprit(culprit, cause, by) => {
                assert_eq!(told, Some((culprit, cause)), "rank {rank}");
                assert!(time <= by, "rank {rank} was told at {time:?}");
            }
            Told::Timeout => {
                assert_eq!((told, told.map(|told| told.1)), (first, Some("timed out")), "rank {rank}");
                assert!((TIMEOUT..TIMEOUT + SECOND).contains(&time), "rank {rank} was told at {time:?}");
            }
            Told::Unreachable(ends, by) => {
                assert_eq!((told, told.map(|told| told.1)), (first, Some("unreachable")), "rank {rank}");
                assert!(told.is_some_and(|(culprit, _)| ends.contains(&culprit)), "rank {rank}: {told:?}");
                assert!(time <= by, "rank {rank} was told at {time:?}");
            }
        }
    }
}

#[rstest]
fn a_rank_that_is_cut_off_believes_the_coordinator_lost(
    #[values(groups, whole, sharded, hybrid, apart)] program: Program,
    #[values(0, 1)] seed: u64,
) {
    let fault =
        Fault::Partition { from: vec![2], to: vec![0, 1, 3], directions: Directions::Both, lasts: None };
    for (rank, end) in ends(program, false, seed, fault).into_iter().enumerate() {
        let (time, told) = end.expect("no rank died");
        assert_eq!(
            told,
            Some(if rank == 2 { (0, "coordinator lost") } else { (2, "silent") }),
            "rank {rank}"
        );
        assert!(time <= 3 * SECOND, "rank {rank} was told at {time:?}");
    }
}

/// Returns the error's answers: the rank that it is about, and whether a deadline has passed.
macro_rules! answers {
    ($result:expr) => {
        $result.map(drop).map_err(|error| (error.peer(), error.is_timeout()))
    };
}

type Answers = (Option<usize>, bool);

/// One call of each layer that needs the other rank.
type Layer = fn(&mut Communicator) -> Result<(), Answers>;

const LAYERS: [Layer; 7] = [
    |world| answers!(world.barrier()),
    |world| {
        let members = [0, 1];
        let mut group = Group::new(world, &members).unwrap().unwrap();
        answers!(group.all_reduce(&mut [1_u32], ReduceOp::Sum).map_err(dist_groups::Error::from))
    },
    |world| answers!(Ddp::new(world.fork().unwrap(), model(7), options(64))),
    |world| {
        let options = FsdpOptions::new(ShardingStrategy::FullShard);
        answers!(Fsdp::new(world.fork().unwrap(), model(7), &options))
    },
    |world| {
        let infos = vec![ParamInfo::new("some", [7], FloatType::F32)];
        answers!(LocalSgd::new(world.fork().unwrap(), Bag::new(infos, 1), LocalSgdOptions::average(2)))
    },
    |world| {
        // A trainer passes on an error of the user's code, which came from another communicator.
        let mut other = world.fork().unwrap();
        let mut alone = world.subgroup(&[world.rank()]).unwrap().unwrap();
        let mut ddp = Ddp::new(alone.fork().unwrap(), model(7), options(64)).unwrap();
        answers!(ddp.step_with(1, |_, _, _| {
            other.barrier()?;
            Ok(0.0)
        }))
    },
    |world| {
        let mut alone = world.subgroup(&[world.rank()]).unwrap().unwrap();
        let ddp = Ddp::new(alone.fork().unwrap(), model(7), options(64)).unwrap();
        let mut both = Both { ddp, world: world.fork().unwrap() };
        let directory = tempfile::tempdir().unwrap();
        answers!(Checkpoints::at(directory.path()).with_timeout(TIMEOUT).save(&mut both, None, 1))
    },
];

/// A trainer whose checkpoints have two ranks.
struct Both {
    ddp: Ddp<Sequence<Rows>>,
    world: Communicator,
}

impl Shards for Both {
    fn infos(&self) -> &[ParamInfo] {
        self.ddp.infos()
    }
    fn parameters(&self) -> ShardMetadata<Chunk> {
        self.ddp.parameters()
    }
    fn slices(&self) -> ShardMetadata<Slice> {
        self.ddp.slices()
    }
    fn read(&self, chunk: Chunk, f: &mut dyn FnMut(Values<'_>)) -> dist_parallel::Result<()> {
        self.ddp.read(chunk, f)
    }
    fn write(&mut self, chunk: Chunk, f: &mut dyn FnMut(ValuesMut<'_>)) -> dist_parallel::Result<()> {
        self.ddp.write(chunk, f)
    }
    fn loaded(&mut self) -> dist_parallel::Result<()> {
        self.ddp.loaded()
    }
    fn communicator_mut(&mut self) -> &mut Communicator {
        &mut self.world
    }
}

/// Rank 1 comes a minute late, or dies before the call.
#[rstest]
fn an_error_of_every_layer_names_the_rank_and_distinguishes_timeouts(
    #[values(0, 1, 2, 3, 4, 5, 6)] layer: usize,
    #[values(false, true)] is_late: bool,
) {
    let network = Network::new(2).with_external_coordinator();
    let network =
        if is_late { network } else { network.with_fault(When::At(SECOND), Fault::Kill { rank: 1 }) };
    let outcome = network.try_run(move |transport: SimTransport| {
        let mut world = Communicator::new(transport);
        world.set_timeout(TIMEOUT);
        if world.rank() == 1 {
            world.runtime().clone().sleep(6 * TIMEOUT);
        }
        LAYERS[layer](&mut world)
    });
    let results = outcome.unwrap().results;
    assert_eq!(results[0], Some(Err((Some(1), is_late))));
}
