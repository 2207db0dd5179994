//! Blocking operations allocate nothing after the first call of a kind and size, except lists that do not grow with
//! the buffers. These tests have their own binary, because the counting allocator is global.
#![cfg(all(feature = "sim", feature = "shm", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fmt;
use std::time::Duration;

use dist_collectives::transport::process::Medium;
use dist_collectives::{Buffer, Communicator, Config, Error, Message, ReduceOp, ReductionOrder, f16};
use dist_transport::forwarding::ForwardingTransport;
use dist_transport::process::Coordinator;
use dist_transport::runtime::Runtime;
use dist_transport::{
    Combine, Error as TransportError, Fingerprint, Inbox, Incoming, LazyDeadline, Outgoing, Transport, sim,
};
use rstest::rstest;

/// The inputs and outputs of all operations, allocated before the count begins.
struct Memory {
    long: Vec<f32>,
    other: Vec<f32>,
    counts: Vec<usize>,
    short: Vec<f32>,
    many: [Vec<f32>; 3],
    halves: Vec<f16>,
    half_part: Vec<f16>,
    half_buffer: Buffer<f16>,
}

type Program = fn(&mut Communicator, &mut Memory) -> Result<(), Error>;

const PROGRAMS: &[(&str, Program)] = &[
    ("all_reduce", |comm, memory| comm.all_reduce(&mut memory.long, ReduceOp::Sum)),
    ("all_reduce mean", |comm, memory| comm.all_reduce(&mut memory.long, ReduceOp::WeightedMean(0.5))),
    ("reduce_scatter", |comm, Memory { long, short, .. }| comm.reduce_scatter(long, short, ReduceOp::Mean)),
    ("reduce_scatter_in_place", |comm, Memory { long, .. }| {
        comm.reduce_scatter_in_place(long, ReduceOp::Sum).map(drop)
    }),
    ("all_reduce mean of f16", |comm, memory| comm.all_reduce(&mut memory.halves, ReduceOp::Mean)),
    ("all_reduce_buffer mean of f16", |comm, memory| {
        comm.all_reduce_buffer(&mut memory.half_buffer, ReduceOp::WeightedMean(0.5))
    }),
    ("reduce mean of f16", |comm, memory| comm.reduce(&mut memory.halves, ReduceOp::WeightedMean(0.5), 0)),
    ("reduce_scatter mean of f16", |comm, Memory { halves, half_part, .. }| {
        comm.reduce_scatter(halves, half_part, ReduceOp::Mean)
    }),
    ("reduce_scatter_in_place mean of f16", |comm, memory| {
        comm.reduce_scatter_in_place(&mut memory.halves, ReduceOp::Mean).map(drop)
    }),
    ("all_gather", |comm, Memory { long, short, .. }| comm.all_gather(short, long)),
    ("all_gather_in_place", |comm, memory| comm.all_gather_in_place(&mut memory.long)),
    ("broadcast", |comm, memory| comm.broadcast(&mut memory.long, 0)),
    ("reduce", |comm, memory| comm.reduce(&mut memory.long, ReduceOp::Sum, 0)),
    ("gather", |comm, Memory { long, short, .. }| {
        let output = if comm.rank() == 0 { long } else { &mut long[..0] };
        comm.gather(short, output, 0)
    }),
    ("scatter", |comm, Memory { long, short, .. }| comm.scatter(long, short, 0)),
    ("scan", |comm, memory| comm.scan(&mut memory.long, ReduceOp::Sum)),
    ("exclusive_scan", |comm, memory| comm.exclusive_scan(&mut memory.long, ReduceOp::Sum)),
    ("barrier", |comm, _| comm.barrier()),
    ("all_reduce_coalesced", |comm, memory| {
        let [one, two, three] = &mut memory.many;
        comm.all_reduce_coalesced(&mut [one, two, three], ReduceOp::Sum)
    }),
    ("broadcast_coalesced", |comm, memory| {
        let [one, two, three] = &mut memory.many;
        comm.broadcast_coalesced(&mut [one, two, three], 0)
    }),
    ("send_recv", |comm, Memory { long, short, .. }| {
        let Some((left, right)) = neighbours(comm) else { return Ok(()) };
        comm.send_recv(short, right, &mut long[..short.len()], left)
    }),
];

/// Operations that keep lists of messages in flight or of sizes, one entry per rank.
const WITH_LISTS: &[(&str, Program)] = &[
    ("all_to_all", |comm, Memory { long, other, .. }| comm.all_to_all(long, other)),
    ("batch", |comm, Memory { short, other, .. }| {
        let Some((left, right)) = neighbours(comm) else { return Ok(()) };
        let elements = &mut other[..short.len()];
        comm.batch(&mut [Message::send(right, short), Message::receive(left, elements)])
    }),
    ("all_gather_v", |comm, Memory { long, short, counts, .. }| comm.all_gather_v(short, counts, long)),
    ("reduce_scatter_v", |comm, Memory { long, short, counts, .. }| {
        comm.reduce_scatter_v(long, counts, short, ReduceOp::Sum)
    }),
    ("gather_v", |comm, Memory { long, short, counts, .. }| {
        let output = if comm.rank() == 0 { long } else { &mut long[..0] };
        comm.gather_v(short, counts, output, 0)
    }),
    ("scatter_v", |comm, Memory { long, short, counts, .. }| comm.scatter_v(long, counts, short, 0)),
    ("all_to_all_v", |comm, Memory { long, other, counts, .. }| {
        comm.all_to_all_v(long, counts, other, counts)
    }),
];

/// Returns the neighbours. A single rank has none: a message to itself is stored until it is received.
fn neighbours(comm: &Communicator) -> Option<(usize, usize)> {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    (world_size > 1).then(|| ((rank + world_size - 1) % world_size, (rank + 1) % world_size))
}

/// More than the lists of one call need per rank, and less than any part of the larger buffers.
const LIST_BYTES_MAX: u64 = 2048;

/// Calls everything until all memory is allocated, and then counts.
fn check(comm: &mut Communicator, order: ReductionOrder) {
    comm.set_order(order);
    for part in [0, 1, 100, 100_000] {
        let numbers = |len: usize| vec![1.0; len];
        let many = [part, 0, 2 * part].map(numbers);
        let whole = || numbers(part * comm.world_size());
        let counts = vec![part; comm.world_size()];
        let halves = vec![f16::ONE; part * comm.world_size()];
        let mut memory = Memory {
            long: whole(),
            other: whole(),
            counts,
            short: numbers(part),
            many,
            half_part: vec![f16::ONE; part],
            half_buffer: comm.alloc(halves.len()).unwrap(),
            halves,
        };
        for _ in 0..WARM_UP {
            for (_, program) in PROGRAMS.iter().chain(WITH_LISTS) {
                program(comm, &mut memory).unwrap();
            }
        }
        for (name, program) in PROGRAMS {
            let counted = counted(comm, &mut memory, *program);
            assert_eq!(counted.count_total, 0, "{name} of {part} elements: {} bytes", counted.bytes_total);
        }
        for (name, program) in WITH_LISTS {
            let bytes = counted(comm, &mut memory, *program).bytes_total;
            let bytes_max = LIST_BYTES_MAX * comm.world_size() as u64;
            assert!(bytes <= bytes_max, "{name} of {part} elements: {bytes} bytes");
        }
    }
}

/// A rank that waits for long reports it, which allocates nothing either.
#[rstest]
fn a_call_that_waits_for_long_allocates_nothing(
    #[values(Medium::Tcp, Medium::Shm)] medium: Medium,
    #[values(2, 3)] world_size: usize,
) {
    // The wait is reported after 100 ms.
    const LATE: Duration = Duration::from_millis(300);
    let check = |comm: &mut Communicator| {
        (0..WARM_UP).for_each(|_| comm.barrier().unwrap());
        if comm.rank() == 0 {
            Runtime::system().sleep(LATE);
        }
        let mut done = Ok(());
        let counted = allocation_counter::measure(|| done = comm.barrier());
        done.unwrap();
        assert_eq!(counted.count_total, 0, "{} bytes", counted.bytes_total);
    };
    let coordinator = Coordinator::start("127.0.0.1:0", world_size, "waits", None).unwrap();
    let address = coordinator.address().to_string();
    on_threads((0..world_size).map(|rank| {
        let config = Config::new(rank, world_size, &address).unwrap().with_job("waits");
        let config = config.with_external_coordinator().with_medium(medium);
        move || check(&mut Communicator::join(&config).unwrap())
    }));
}

fn counted(
    comm: &mut Communicator,
    memory: &mut Memory,
    program: Program,
) -> allocation_counter::AllocationInfo {
    let mut done = Ok(());
    let counted = allocation_counter::measure(|| done = program(comm, memory));
    done.unwrap();
    counted
}

/// The ranks of a world first contact their peers in different calls.
const WARM_UP: usize = 2;

#[rstest]
fn calls_between_processes_allocate_nothing(
    #[values(Medium::Tcp, Medium::Shm)] medium: Medium,
    #[values(1, 2, 3, 4, 5)] world_size: usize,
    #[values(ReductionOrder::Canonical, ReductionOrder::Any)] order: ReductionOrder,
) {
    let coordinator = Coordinator::start("127.0.0.1:0", world_size, "allocations", None).unwrap();
    let address = coordinator.address().to_string();
    on_threads((0..world_size).map(|rank| {
        let config = Config::new(rank, world_size, &address).unwrap().with_job("allocations");
        let config = config.with_external_coordinator().with_medium(medium);
        move || check(&mut Communicator::join(&config).unwrap(), order)
    }));
}

/// A started operation is sent to the worker in a box, and its result returns through its own queue. Nothing else
/// is allocated, for any number of elements.
#[rstest]
fn started_operations_allocate_the_same_for_more_elements(
    #[values(Medium::Tcp, Medium::Shm)] medium: Medium,
    #[values(2, 3)] world_size: usize,
) {
    const CALLS: usize = 40;
    let call = |comm: &mut Communicator, buffer: &mut Buffer<f32>| {
        let elements = std::mem::replace(buffer, Buffer::from(Vec::new()));
        *buffer = comm.start_all_reduce(elements, ReduceOp::Sum).wait().unwrap();
    };
    let check = move |comm: &mut Communicator| {
        for len in [1, 100, 100_000] {
            let mut buffer = Buffer::from(vec![0.0; len]);
            (0..WARM_UP).for_each(|_| call(comm, &mut buffer));
            let counted = allocation_counter::measure(|| (0..CALLS).for_each(|_| call(comm, &mut buffer)));
            let bytes_max = CALLS * STARTED_BYTES_MAX;
            assert!(counted.bytes_total <= bytes_max as u64, "{} bytes", counted.bytes_total);
        }
    };
    let coordinator = Coordinator::start("127.0.0.1:0", world_size, "started", None).unwrap();
    let address = coordinator.address().to_string();
    on_threads((0..world_size).map(|rank| {
        let config = Config::new(rank, world_size, &address).unwrap().with_job("started");
        let config = config.with_external_coordinator().with_medium(medium);
        move || check(&mut Communicator::join(&config).unwrap())
    }));
}

/// The box, a queue for one result, and the memory to wake the waiting thread.
const STARTED_BYTES_MAX: usize = 4096;

/// The in-process network keeps a copy of every message until it is received. Nothing else is allocated.
#[rstest]
fn calls_in_one_process_allocate_what_its_network_allocates(
    #[values(1, 2, 3, 4, 5)] world_size: usize,
    #[values(ReductionOrder::Canonical, ReductionOrder::Any)] order: ReductionOrder,
) {
    let ranks = sim::network(&Runtime::system(), world_size).into_iter();
    on_threads(ranks.map(|transport| {
        let uncounted = Uncounted(Box::new(transport));
        move || check(&mut Communicator::new(uncounted), order)
    }));
}

fn on_threads(ranks: impl Iterator<Item = impl FnOnce() + Send + 'static>) {
    let runtime = Runtime::system();
    let tasks: Vec<_> = ranks.map(|rank| runtime.spawn("rank", rank).unwrap()).collect();
    for task in tasks {
        task.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }
}

/// A transport whose own allocations are not counted.
struct Uncounted(Box<dyn Transport>);

impl Uncounted {
    fn uncounted<T>(&mut self, call: impl FnOnce(&mut dyn Transport) -> T) -> T {
        let mut result = None;
        allocation_counter::opt_out(|| result = Some(call(&mut *self.0)));
        result.expect("the call was made")
    }
}

impl fmt::Debug for Uncounted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Uncounted")
    }
}

impl ForwardingTransport for Uncounted {
    type Inner = dyn Transport;

    fn inner(&self) -> &Self::Inner {
        &*self.0
    }

    fn inner_mut(&mut self) -> &mut Self::Inner {
        &mut *self.0
    }

    fn exchange(
        &mut self,
        send: Option<Outgoing<'_>>,
        receive: Option<Incoming<'_>>,
        due: &LazyDeadline<'_>,
    ) -> Result<(), TransportError> {
        self.uncounted(|transport| transport.exchange(send, receive, due))
    }

    fn exchange_in_place(
        &mut self,
        peer: usize,
        buffer: &mut [u8],
        combine: &mut Combine<'_>,
        due: &LazyDeadline<'_>,
    ) -> Result<(), TransportError> {
        self.uncounted(|transport| transport.exchange_in_place(peer, buffer, combine, due))
    }

    fn exchange_all(
        &mut self,
        sends: &[Outgoing<'_>],
        receives: &mut [Incoming<'_>],
        due: &LazyDeadline<'_>,
    ) -> Result<(), TransportError> {
        self.uncounted(|transport| transport.exchange_all(sends, receives, due))
    }

    fn exchange_matched(
        &mut self,
        sends: &[(Fingerprint, Outgoing<'_>)],
        inbox: &mut dyn Inbox,
        due: &LazyDeadline<'_>,
    ) -> Result<(), TransportError> {
        self.uncounted(|transport| transport.exchange_matched(sends, inbox, due))
    }

    fn fork(&mut self, members: &[usize]) -> Result<Option<Box<dyn Transport>>, TransportError> {
        Ok((*self.0).fork(members)?.map(|fork| -> Box<dyn Transport> { Box::new(Self(fork)) }))
    }
}
