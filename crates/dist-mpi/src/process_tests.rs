//! The promises of every transport, kept by this one over processes and the installed library.
//!
//! `cargo xtask mpi` starts the test with `mpirun -n 4`. MPI can be initialised only once in a process, so one test
//! checks all promises. Each program gets a communicator of its own among the first processes, and each process runs
//! the program of its own rank.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use dist_transport::Transport;
use dist_transport::conformance::{self, Fabric, Processes, TransportProgram};
use dist_transport::shm_group::Reach;
use mpi::datatype::PartitionMut;
use mpi::topology::{Color, Communicator, SimpleCommunicator};
use mpi::traits::CommunicatorCollectives;
use mpi::{Count, Threading, initialize_with_threading};

use crate::MpiTransport;
use crate::library::{self, index};
use crate::world::World;

const MORE_RANKS: &str = "needs more than 4 ranks";

/// The promises that are left out, by the beginning of their names, each with the reason.
const LEFT_OUT: &[(&str, &str)] = &[
    ("forks::a_group_of_a_group_is_translated_twice", MORE_RANKS),
    ("forks::one_call_makes_several_groups_that_share_no_rank", MORE_RANKS),
    ("forks::an_error_in_a_group_ends_the_job_and_names_ranks_of_the_world", MORE_RANKS),
    ("many_messages::peers_without_a_message_are_returned_without_harm", MORE_RANKS),
];

/// The number of programs that ran.
static PROGRAMS: AtomicUsize = AtomicUsize::new(0);

/// A fabric of processes with messages only.
struct ProcessesWithMessages;

impl Fabric for ProcessesWithMessages {
    fn finds_circles(&self) -> bool {
        false
    }

    fn run(&self, _: u64, world_size: usize, program: TransportProgram) {
        run(world_size, &program, None, |world| Ok(MpiTransport::new(world)));
    }

    fn shared_memory(&self) -> Option<Reach> {
        None
    }

    fn processes(&self) -> Option<&dyn Processes> {
        Some(&Mpi)
    }
}

/// A fabric of processes with messages and shared memory.
struct ProcessesWithMemory;

impl Fabric for ProcessesWithMemory {
    fn run(&self, _: u64, world_size: usize, program: TransportProgram) {
        run(world_size, &program, None, |world| {
            let due = world.runtime.deadline(Duration::from_secs(60)).into();
            MpiTransport::with_shared_memory(world, &due)
        });
    }

    fn shared_memory(&self) -> Option<Reach> {
        Some(Reach::Slots)
    }

    fn processes(&self) -> Option<&dyn Processes> {
        Some(&Mpi)
    }
}

/// A fabric of processes with messages, whose collectives the library executes.
struct ProcessesWithLibrary;

impl Fabric for ProcessesWithLibrary {
    fn finds_circles(&self) -> bool {
        false
    }

    fn run(&self, _: u64, world_size: usize, program: TransportProgram) {
        run(world_size, &program, Some(1), |world| Ok(MpiTransport::new(world)));
    }

    fn has_native(&self) -> bool {
        true
    }

    fn shared_memory(&self) -> Option<Reach> {
        None
    }

    fn processes(&self) -> Option<&dyn Processes> {
        Some(&Mpi)
    }
}

/// The processes of the launcher.
struct Mpi;

impl Processes for Mpi {
    fn count(&self) -> usize {
        index(SimpleCommunicator::world().size())
    }

    fn all_gather(&self, own: &[u8]) -> Vec<Vec<u8>> {
        // An empty slice would have the address by which Open MPI means MPI_IN_PLACE.
        let own = [own, &[0]].concat();
        let world = SimpleCommunicator::world();
        let mut counts: Vec<Count> = vec![0; self.count()];
        world.all_gather_into(&Count::try_from(own.len()).unwrap(), &mut counts[..]);
        let starts: Vec<Count> = (0..counts.len()).map(|rank| counts[..rank].iter().sum()).collect();
        let mut all = vec![0_u8; index(counts.iter().sum())];
        world.all_gather_varcount_into(
            &own[..],
            &mut PartitionMut::new(&mut all[..], &counts[..], &starts[..]),
        );
        let parts = starts.iter().zip(&counts);
        parts.map(|(&start, &count)| all[index(start)..][..index(count) - 1].to_vec()).collect()
    }
}

/// Runs a program on the first `world_size` processes. A panic on one of them ends the test in all processes.
fn run(
    world_size: usize,
    program: &TransportProgram,
    native_from: Option<usize>,
    join: fn(Arc<World>) -> dist_transport::Result<MpiTransport>,
) {
    PROGRAMS.fetch_add(1, Ordering::Relaxed);
    let is_member = index(SimpleCommunicator::world().rank()) < world_size;
    let result = if is_member {
        let world =
            library::spawn(move |started| library::serve(&split(true).unwrap(), native_from, started))
                .unwrap();
        catch_unwind(AssertUnwindSafe(|| {
            let transport: Box<dyn Transport> = Box::new(join(world).unwrap());
            program(transport);
        }))
    } else {
        assert!(split(false).is_none());
        Ok(())
    };
    let panics = Mpi.all_gather(result.as_ref().err().map_or("", |panic| text(&**panic)).as_bytes());
    result.unwrap_or_else(|panic| resume_unwind(panic));
    for (rank, panic) in panics.iter().enumerate() {
        assert!(panic.is_empty(), "rank {rank} has panicked: {}", String::from_utf8_lossy(panic));
    }
}

/// Splits the processes of the launcher, and returns the communicator of the members.
fn split(is_member: bool) -> Option<SimpleCommunicator> {
    let color = if is_member { Color::with_value(0) } else { Color::undefined() };
    SimpleCommunicator::world().split_by_color(color)
}

fn text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without text")
}

/// Checks a promise with shared memory and without it, or with collectives of the library if it is about them.
fn check(promise: &str) {
    let is_of_memory =
        ["shm_group::", "exposed::", "_in_shared_memory"].iter().any(|part| promise.contains(part));
    let fabrics: &[&'static dyn Fabric] = match is_of_memory {
        true => &[&ProcessesWithMemory],
        false if promise.starts_with("native::") => &[&ProcessesWithLibrary],
        false => &[&ProcessesWithMessages, &ProcessesWithMemory],
    };
    let before = PROGRAMS.load(Ordering::Relaxed);
    fabrics.iter().for_each(|&fabric| conformance::check(promise, fabric));
    assert!(
        PROGRAMS.load(Ordering::Relaxed) > before,
        "{promise} ran no program, state a reason in LEFT_OUT"
    );
}

#[test]
#[ignore = "cargo xtask mpi starts it with mpirun -n 4"]
fn the_promises_hold_over_processes() {
    let (universe, level) = initialize_with_threading(Threading::Multiple).unwrap();
    assert!(level >= Threading::Multiple, "{level:?}");
    assert_eq!(Mpi.count(), 4, "start it with mpirun -n 4");
    let is_left_out = |promise: &str| LEFT_OUT.iter().any(|(name, _)| promise.starts_with(name));
    conformance::promises().filter(|promise| !is_left_out(promise)).for_each(check);
    drop(universe);
}
