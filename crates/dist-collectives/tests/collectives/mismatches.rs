//! Every rank detects calls that differ, even if the messages of these calls never meet.

use std::time::Duration;

use dist_collectives::transport::{Chain, Transport};
use dist_collectives::{Communicator, Element, Error, Pending, ReduceOp, algorithms::binomial};
use dist_transport::{Cause, sim};
use fastrand::Rng;
use rstest::rstest;

use crate::worlds::{self, Network};

type Program = fn(&mut Communicator) -> Result<(), Error>;

fn gather(comm: &mut Communicator, root: usize) -> Result<(), Error> {
    let own = if comm.rank() == root { 7 * comm.world_size() } else { 0 };
    comm.gather(&[1_i64; 7], &mut vec![0; own], root)
}

fn scatter(comm: &mut Communicator, root: usize) -> Result<(), Error> {
    let own = if comm.rank() == root { 10 * comm.world_size() } else { 0 };
    comm.scatter(&vec![1.0_f32; own], &mut [0.0; 10], root)
}

fn sum(comm: &mut Communicator) -> Result<(), Error> {
    comm.all_reduce(&mut [1.0_f32; 2], ReduceOp::Sum)
}

/// Runs `usual` on every rank except `deviating`, which runs `unusual`, and then `later` 300 times. Returns for
/// each rank the number of successful `later` calls, and the error.
fn errors(
    network: Network,
    (world_size, deviating): (usize, usize),
    (usual, unusual, later): (Program, Program, Program),
) -> Vec<(usize, Error)> {
    worlds::run(network, world_size, move |mut comm| {
        let program = if comm.rank() == deviating { unusual } else { usual };
        if let Err(error) = program(&mut comm) {
            return (0, error);
        }
        for succeeded in 0..300 {
            if let Err(error) = later(&mut comm) {
                return (succeeded, error);
            }
        }
        panic!("rank {} noticed nothing", comm.rank());
    })
}

/// A program whose ranks make different calls, so that the messages of the calls are never received by each
/// other.
struct NeverMet {
    world_size: usize,
    /// The rank that makes the other call.
    odd_one: usize,
    /// The calls of all other ranks, of that rank, and afterwards of all ranks.
    programs: (Program, Program, Program),
    /// The names of the first two.
    names: [&'static str; 2],
}

const NEVER_MET: &[NeverMet] = &[
    NeverMet {
        world_size: 2,
        odd_one: 1,
        programs: (|comm| scatter(comm, 0), |comm| gather(comm, 0), sum),
        names: ["scatter", "gather"],
    },
    NeverMet {
        world_size: 4,
        odd_one: 3,
        programs: (
            |comm| comm.broadcast(&mut [1_u8; 5], 0),
            |comm| comm.reduce(&mut [1_u8; 5], ReduceOp::Sum, 0),
            |comm| comm.barrier(),
        ),
        names: ["broadcast", "reduce"],
    },
    NeverMet {
        world_size: 8,
        odd_one: 4,
        programs: (|comm| comm.broadcast(&mut [1_u8; 5], 1), |comm| gather(comm, 1), sum),
        names: ["broadcast", "gather"],
    },
];

#[test]
fn calls_whose_messages_never_meet_are_reported_by_the_next_call() {
    for network in [Network::SHARING, NETWORKS].concat() {
        for &NeverMet { world_size, odd_one, programs, names } in NEVER_MET {
            let errors = errors(network, (world_size, odd_one), programs);
            for (rank, (succeeded, error)) in errors.iter().enumerate() {
                let text = error.to_string();
                assert_eq!(*succeeded, 0, "rank {rank}, {network:?}: {text}");
                assert!(error.peer().is_some() && !error.is_timeout(), "rank {rank}, {network:?}: {text}");
                // A rank that detects the difference in the current call only names that call.
                let named = names.iter().any(|name| text.contains(name));
                assert!(named, "rank {rank}, {network:?}: {text}");
            }
        }
    }
}

const NETWORKS: &[Network] = &[
    Network::Simulated,
    #[cfg(feature = "tcp")]
    Network::Tcp,
];

#[test]
fn a_child_reports_a_call_that_differed_on_its_parent() {
    for network in [Network::SharedMemory(3), Network::Simulated] {
        let texts = worlds::run(network, 2, |mut comm| {
            let first: Program =
                if comm.rank() == 0 { |comm| scatter(comm, 0) } else { |comm| gather(comm, 0) };
            first(&mut comm).unwrap();
            let mut child = comm.fork().unwrap();
            sum(&mut child).unwrap_err().to_string()
        });
        for text in texts {
            assert!(text.contains(": an earlier call differed: 2 calls before this one, "), "{text}");
            assert!(text.contains("called scatter") && text.contains("called gather"), "{text}");
        }
    }
}

#[test]
fn the_error_of_differing_calls_names_the_arguments() {
    for network in Network::SHARING {
        let texts = worlds::run(*network, 2, |mut comm| {
            sum(&mut comm).unwrap();
            // Each rank is its own root and only sends.
            let root = comm.rank();
            comm.with_algorithm(&binomial::BROADCAST).broadcast(&mut [1_u8; 5], root).unwrap();
            sum(&mut comm).unwrap_err().to_string()
        });
        let hint = ": an earlier call differed: the call before this one, both called broadcast, but with different arguments";
        assert!(texts.iter().all(|text| text.contains(hint)), "{texts:?}");
    }
}

#[rstest]
fn a_collective_that_one_rank_starts_meets_the_one_that_another_calls(
    #[values(2, 3)] world_size: usize,
    #[values(0, 1)] calls_before: usize,
) {
    for network in [Network::SHARING, NETWORKS].concat() {
        worlds::run(network, world_size, move |mut comm| {
            for _ in 0..calls_before {
                sum(&mut comm).unwrap();
            }
            let mut called = vec![comm.rank() as f32; 2];
            let sums = if comm.rank() == 1 {
                let pending = comm.start_all_reduce(called, ReduceOp::Sum);
                comm.barrier().unwrap();
                pending.wait().unwrap().into_vec()
            } else {
                comm.all_reduce(&mut called, ReduceOp::Sum).unwrap();
                comm.start_barrier().wait().unwrap();
                called
            };
            assert_eq!(sums, [(world_size * (world_size - 1) / 2) as f32; 2], "{network:?}");
        });
    }
}

#[rstest]
fn a_collective_that_one_rank_starts_while_another_calls_a_different_one_is_reported(
    #[values(2, 3)] world_size: usize,
) {
    for network in [Network::SHARING, NETWORKS].concat() {
        let errors = worlds::run(network, world_size, move |mut comm| {
            if comm.rank() == 1 {
                let pending = comm.start_all_reduce(vec![1.0_f32; 2], ReduceOp::Sum);
                return Error::from(pending.wait().unwrap_err());
            }
            comm.barrier().unwrap_err()
        });
        for (rank, error) in errors.iter().enumerate() {
            let text = error.to_string();
            assert!(!error.is_timeout(), "rank {rank}, {network:?}: {text}");
            assert!(
                text.contains("all_reduce") && text.contains("barrier"),
                "rank {rank}, {network:?}: {text}"
            );
        }
    }
}

/// Each rank starts its operations at another position among its calls.
#[test]
fn the_order_of_starts_and_calls_counts() {
    for network in [Network::Simulated, Network::SharedMemory(5)] {
        let errors = worlds::run(network, 2, |mut comm| {
            let start = |comm: &mut Communicator| comm.start_all_reduce(vec![1_u32; 3], ReduceOp::Sum);
            let first = (comm.rank() == 0).then(|| start(&mut comm));
            let called = comm.barrier();
            let pending = first.unwrap_or_else(|| start(&mut comm));
            called.and(pending.wait().map(drop).map_err(Error::from)).unwrap_err().to_string()
        });
        assert!(errors.iter().all(|text| text.contains("all_reduce")), "{errors:?}");
    }
}

/// The lists that the ranks of a world pass in one call, and the text of every rank's error about two of them.
const LISTS: &[(&[&[usize]], [&str; 2])] = &[
    (&[&[0, 1], &[1, 0]], ["[0, 1]", "[1, 0]"]),
    (&[&[1, 0], &[0, 1]], ["[0, 1]", "[1, 0]"]),
    (&[&[0, 1], &[0, 1, 2], &[2]], ["[0, 1, 2]", "ranks ["]),
    (&[&[0, 2], &[1], &[2, 0]], ["[0, 2]", "[2, 0]"]),
    (&[&[0, 1], &[2], &[2]], ["[0, 1]", "[2]"]),
];

#[test]
fn ranks_with_different_member_lists_get_both_lists() {
    for network in [Network::SHARING, NETWORKS, &[Network::Threads]].concat() {
        for &(lists, said) in LISTS {
            let texts = worlds::run(network, lists.len(), move |mut world| {
                let group = world.subgroup(lists[world.rank()]).unwrap();
                let done = group.map_or(Ok(()), |mut group| sum(&mut group));
                let error = done.and_then(|()| world.barrier()).unwrap_err();
                assert!(!error.is_timeout(), "{network:?}, {lists:?}: {error:?}");
                Chain(&error).to_string()
            });
            for text in texts {
                assert!(said.iter().all(|said| text.contains(said)), "{network:?}, {lists:?}: {text}");
            }
        }
    }
}

/// A fork of a fork, and a fork that is created after others.
#[test]
fn lists_that_differ_are_found_in_groups_of_groups() {
    for network in [Network::SHARING, NETWORKS].concat() {
        let texts = worlds::run(network, 2, |mut world| {
            let mut inner = world.fork().unwrap();
            let _unused = inner.subgroup(&[inner.rank()]).unwrap();
            let members = if inner.rank() == 0 { [0, 1] } else { [1, 0] };
            let mut group = inner.subgroup(&members).unwrap().unwrap();
            Chain(&sum(&mut group).unwrap_err()).to_string()
        });
        for text in texts {
            assert!(text.contains("[0, 1]") && text.contains("[1, 0]"), "{network:?}: {text}");
        }
    }
}

fn closed_without_receiving(network: Network, world_size: usize) -> Vec<Result<(), Error>> {
    worlds::run(network, world_size, |mut comm| {
        sum(&mut comm).unwrap();
        match comm.rank() {
            0 => {
                comm.send(&[1_u8; 3], 1)?;
                comm.with_tag(1).send(&[1_u8], 1)?;
            }
            // The message without a tag has come before this one. Over sockets it could otherwise come after the last
            // message of the barrier.
            1 => comm.with_tag(1).recv(&mut [0_u8], 0)?,
            _ => {}
        }
        comm.close()
    })
}

#[test]
fn a_message_that_was_never_received_is_reported_when_the_communicator_is_closed() {
    for network in [Network::SHARING, NETWORKS].concat() {
        for world_size in [2, 3] {
            let closed = closed_without_receiving(network, world_size);
            for (rank, closed) in closed.into_iter().enumerate() {
                match closed {
                    Err(Error::Unread { peer: 0 }) if rank == 1 => {}
                    Ok(()) if rank != 1 => {}
                    // A barrier by messages detects this one first.
                    Err(Error::Mismatch { .. } | Error::Aborted { cause: Cause::Mismatch { .. }, .. })
                        if !Network::SHARING.contains(&network) => {}
                    other => panic!("rank {rank} of {world_size}, {network:?}: {other:?}"),
                }
            }
        }
    }
}

#[test]
fn a_last_call_that_differs_is_reported_when_the_communicator_is_closed() {
    for network in [Network::SHARING, NETWORKS].concat() {
        let closed = worlds::run(network, 2, |mut comm| {
            sum(&mut comm).unwrap();
            let pending = comm.start_barrier();
            let last: Program =
                if comm.rank() == 0 { |comm| scatter(comm, 0) } else { |comm| gather(comm, 0) };
            last(&mut comm).unwrap();
            drop(pending);
            comm.close().unwrap_err()
        });
        for error in closed {
            let text = error.to_string();
            assert!(text.contains("scatter") || text.contains("gather"), "{network:?}: {text}");
        }
        let closed = worlds::run(network, 3, |mut comm| {
            sum(&mut comm)?;
            gather(&mut comm, 2)?;
            comm.close()
        });
        assert!(closed.iter().all(Result::is_ok), "{network:?}: {closed:?}");
    }
}

/// One step of a program that all ranks execute.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Step {
    kind: u32,
    len: usize,
    root: usize,
    of_integers: bool,
    /// `true` if the operation is started and waited for.
    started: bool,
    /// `true` if a new fork executes it.
    on_fork: bool,
}

const KINDS: u32 = 14;
/// Kinds from this number on have no started form here.
const MESSAGES: u32 = 12;

impl Step {
    fn random(rng: &mut Rng, world_size: usize) -> Self {
        Self {
            kind: rng.u32(0..KINDS),
            len: rng.usize(0..4) * rng.usize(1..30),
            root: rng.usize(0..world_size),
            of_integers: rng.bool(),
            started: rng.u8(0..5) == 0,
            on_fork: rng.u8(0..8) == 0,
        }
    }

    /// Returns another step that differs in a value on which all ranks must agree.
    fn mutated(self, rng: &mut Rng, world_size: usize) -> Self {
        loop {
            let other = match rng.u32(0..5) {
                0 => Self { len: self.len + 1, ..self },
                1 => Self { root: rng.usize(0..world_size), ..self },
                2 => Self { of_integers: !self.of_integers, ..self },
                _ => Self::random(rng, world_size),
            };
            if other.kind < MESSAGES && other.identity() != self.identity() {
                return other;
            }
        }
    }

    /// Returns the fields that make a difference.
    fn identity(self) -> impl PartialEq {
        let rooted = matches!(self.kind, 0..=3);
        let sized = !matches!(self.kind, 9 | 10);
        let typed = self.kind != 10;
        (
            self.kind,
            rooted.then_some(self.root),
            sized.then_some(self.len),
            typed.then_some(self.of_integers),
            self.on_fork,
        )
    }

    fn perform(self, comm: &mut Communicator) -> Result<(), Error> {
        if self.on_fork {
            let mut fork = comm.fork()?;
            Self { on_fork: false, ..self }.perform(&mut fork)?;
            // The calls of a fork are compared in its own later calls.
            return fork.barrier();
        }
        if self.of_integers { self.perform_on(comm, 1_i64) } else { self.perform_on(comm, 1.0_f32) }
    }

    fn perform_on<T: Element>(self, comm: &mut Communicator, one: T) -> Result<(), Error> {
        let Self { len, root, started, .. } = self;
        let (rank, world_size) = (comm.rank(), comm.world_size());
        let zero = T::zeroed();
        let part = vec![one; len];
        let whole = vec![one; len * world_size];
        let at_root = |len: usize| if rank == root { vec![one; len] } else { Vec::new() };
        let counts: Vec<usize> = (0..world_size).map(|rank| len + rank % 2).collect();
        let own = vec![one; counts[rank]];
        let wait = |pending: Pending<_>| pending.wait().map(drop).map_err(Error::from);
        match (self.kind, started) {
            (0, false) => comm.broadcast(&mut part.clone(), root),
            (0, true) => wait(comm.start_broadcast(part, root)),
            (1, false) => comm.reduce(&mut part.clone(), ReduceOp::Sum, root),
            (1, true) => wait(comm.start_reduce(part, ReduceOp::Sum, root)),
            (2, false) => comm.gather(&part, &mut at_root(len * world_size), root),
            (2, true) => wait(comm.start_gather(part, root)),
            (3, false) => comm.scatter(&at_root(len * world_size), &mut vec![zero; len], root),
            (3, true) => wait(comm.start_scatter(at_root(len * world_size), len, root)),
            (4, false) => comm.all_reduce(&mut part.clone(), ReduceOp::Sum),
            (4, true) => wait(comm.start_all_reduce(part, ReduceOp::Sum)),
            (5, false) => comm.all_gather(&part, &mut whole.clone()),
            (5, true) => wait(comm.start_all_gather(part)),
            (6, false) => comm.reduce_scatter(&whole, &mut part.clone(), ReduceOp::Max),
            (6, true) => wait(comm.start_reduce_scatter(whole, ReduceOp::Max)),
            (7, false) => comm.all_to_all(&whole, &mut whole.clone()),
            (7, true) => wait(comm.start_all_to_all(whole)),
            (8, false) => comm.all_gather_v(&own, &counts, &mut vec![zero; counts.iter().sum()]),
            (8, true) => wait(comm.start_all_gather_v(own, counts)),
            // The ranks only agree on the type here; each rank sends any amount.
            (9, _) => {
                let sent: Vec<usize> = (0..world_size).map(|to| len + (rank + to) % 2).collect();
                let input = vec![one; sent.iter().sum()];
                comm.all_to_all_v(&input, &sent, &mut vec![zero; sent.iter().sum()], &sent)
            }
            (10, false) => comm.barrier(),
            (10, true) => comm.start_barrier().wait().map_err(Error::from),
            (11, false) => comm.scan(&mut part.clone(), ReduceOp::Sum),
            (11, true) => wait(comm.start_scan(part, ReduceOp::Sum)),
            // Only two ranks, or only this rank, take part in these calls.
            (12, _) if world_size == 1 => Ok(()),
            (12, _) => match (rank, (root + 1) % world_size) {
                (_, to) if rank == root => comm.send(&part, to),
                (rank, to) if rank == to => comm.recv(&mut part.clone(), root),
                _ => Ok(()),
            },
            _ => {
                let (right, left) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
                comm.send_recv(&part, right, &mut part.clone(), left)
            }
        }
    }
}

fn random_program(rng: &mut Rng, world_size: usize) -> Vec<Step> {
    (0..rng.usize(1..12)).map(|_| Step::random(rng, world_size)).collect()
}

/// Runs each rank's program, and then a call that no program has.
fn run_programs(seed: u64, programs: Vec<Vec<Step>>) -> Vec<Result<(), Error>> {
    let network = sim::Network::new(programs.len()).with_seed(seed);
    let network = if seed.is_multiple_of(2) { network.with_shared_memory() } else { network };
    let outcome = network.run(move |transport| {
        let program = &programs[transport.rank().index()];
        let mut comm = Communicator::new(transport);
        comm.set_timeout(Duration::from_secs(5));
        program.iter().try_for_each(|step| step.perform(&mut comm))?;
        comm.all_reduce(&mut [1_u8; 3], ReduceOp::Xor)
    });
    outcome.results
}

#[test]
fn programs_that_agree_never_fail() {
    for seed in 0..300 {
        let rng = &mut Rng::with_seed(seed);
        let world_size = rng.usize(1..7);
        let program = random_program(rng, world_size);
        for (rank, result) in run_programs(seed, vec![program.clone(); world_size]).into_iter().enumerate() {
            assert!(result.is_ok(), "seed {seed}, rank {rank} of {world_size}: {result:?}\n{program:#?}");
        }
    }
}

#[test]
fn one_call_that_differs_is_reported_on_every_rank() {
    for seed in 0..600 {
        let rng = &mut Rng::with_seed(seed);
        let world_size = rng.usize(2..7);
        let program = random_program(rng, world_size);
        let (deviating, place) = (rng.usize(0..world_size), rng.usize(0..program.len()));
        let mut unusual = program.clone();
        match rng.u32(0..8) {
            0 if program[place].kind < MESSAGES => drop(unusual.remove(place)),
            1 => {
                let extra = program[place].mutated(rng, world_size);
                unusual.insert(place, extra);
            }
            _ => unusual[place] = program[place].mutated(rng, world_size),
        }
        let mut programs = vec![program.clone(); world_size];
        programs[deviating].clone_from(&unusual);
        for (rank, result) in run_programs(seed, programs).into_iter().enumerate() {
            assert!(
                result.is_err(),
                "seed {seed}, rank {rank} of {world_size} noticed nothing\n{program:#?}\nrank {deviating} at {place}: {unusual:#?}"
            );
        }
    }
}
