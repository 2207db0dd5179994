//! The promises of every transport, kept by this one over a library in memory. Each rank is a thread with a world of
//! its own.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dist_transport::conformance::{Fabric, TransportProgram};
use dist_transport::runtime::Task;
use dist_transport::shm_group::Reach;
use dist_transport::store::{StoreOperation, StoreRequest};
use dist_transport::{Abort, Cause, ChannelId, Fingerprint, Incoming, Outgoing, Runtime, Sink, Transport};

use crate::MpiTransport;
use crate::records::WaitReport;
use crate::store;
use crate::wire::{Buffer, Completions, IN_FLIGHT_MAX, Kind, Packet, Tag, Wire};
use crate::world::{CORE_WORDS, Placement, World};

type Inbox = Arc<Mutex<Vec<(usize, Tag, Packet)>>>;

/// A wire whose packets are messages between threads. Neighbours in the queue of one sender change places, as
/// packets of MPI may.
#[derive(Clone)]
struct MemoryWire {
    rank: usize,
    inboxes: Vec<Inbox>,
    /// The packets that are on their way to each rank, as this wire states.
    in_flight: usize,
}

impl Wire for MemoryWire {
    fn send(&mut self, to: usize, tag: Tag, buffer: Buffer, bytes: usize) -> io::Result<()> {
        let packet = Packet { kind: tag.kind, buffer, bytes };
        let mut inbox = self.inboxes[to].lock().unwrap();
        inbox.push((self.rank, tag, packet));
        let last = inbox.len() - 1;
        if last > 0 && tag.number.is_multiple_of(2) {
            inbox.swap(last, last - 1);
        }
        Ok(())
    }

    fn poll(&mut self, completions: &mut Completions) -> io::Result<()> {
        completions.arrived.append(&mut self.inboxes[self.rank].lock().unwrap());
        Ok(())
    }

    fn in_flight_to(&self, _: usize) -> usize {
        self.in_flight
    }

    fn in_flight(&self) -> usize {
        0
    }

    fn close(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Creates a world of ranks on these hosts. No thread owns the library, so only the test lets it work.
fn unserved_worlds(hosts: &[u64]) -> Vec<Arc<World>> {
    let size = hosts.len();
    let inboxes: Vec<Inbox> = (0..size).map(|_| Inbox::default()).collect();
    let mut cores = [0; CORE_WORDS];
    cores[0] = 1;
    let placement: Vec<_> = hosts.iter().map(|&host| Placement { host, cores }).collect();
    let create = |rank| {
        let wire = MemoryWire { rank, inboxes: inboxes.clone(), in_flight: 0 };
        Arc::new(World::new(Box::new(wire), rank, placement.clone(), None))
    };
    (0..size).map(create).collect()
}

/// Starts a world of ranks on these hosts, with one thread per rank that owns the library.
fn worlds(hosts: &[u64]) -> Vec<Arc<World>> {
    let worlds = unserved_worlds(hosts);
    for world in &worlds {
        let served = world.clone();
        let task = world.runtime.spawn("dist-mpi", move || assert!(served.serve())).unwrap();
        world.set_service(task);
    }
    worlds
}

/// A timeout of rank 1 of 4, which has waited for rank 2.
const TIMEOUT: Abort = Abort { cause: Cause::timed_out(), rank: 2, reporter: 1, call: CALL };
const CALL: Fingerprint = Fingerprint([1; Fingerprint::SIZE]);

#[test]
fn a_rank_that_waits_for_another_one_is_not_named_if_rank_0_decides_late() {
    let worlds = unserved_worlds(&[0; 4]);
    let waits = WaitReport { waits_for: 3, calls: vec![CALL] };
    worlds[2].report_wait(ChannelId::WORLD, Some(&waits));
    worlds[0].progress(&mut worlds[0].lock());
    worlds[1].propose(&mut worlds[1].lock(), TIMEOUT);
    // On a busy machine rank 0 may get no core for this long.
    let runtime = &worlds[1].runtime;
    let late = runtime.deadline(Duration::from_millis(200));
    while !runtime.expired(late) {
        worlds[1].progress(&mut worlds[1].lock());
        assert_eq!(worlds[1].decided(), None);
    }
    worlds[0].progress(&mut worlds[0].lock());
    worlds[1].progress(&mut worlds[1].lock());
    assert_eq!(worlds[1].decided(), Some(&Abort { rank: 3, ..TIMEOUT }));
}

/// The time limit of the waits that an abort ends.
const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn an_abort_on_another_host_wakes_a_rank_that_waits_for_a_message_of_its_own_host() {
    let program: TransportProgram = Arc::new(|mut transport| {
        let group = transport.fork(&[0, 1]).unwrap();
        let (rank, due) = (transport.rank().index(), transport.runtime().deadline(LIMIT).into());
        // Rank 2 aborts when the others have joined.
        for from in [0, 1] {
            let send = (rank == from).then_some(Outgoing { to: 2, parts: &[&[1]] });
            let receive = Incoming { from, len: 1, sink: Sink::Into(&mut [0]) };
            transport.exchange(send, (rank == 2).then_some(receive), &due).unwrap();
        }
        match (rank, group) {
            (0, Some(mut group)) => {
                let receive = Incoming { from: 1, len: 1, sink: Sink::Into(&mut [0]) };
                let error = group.exchange(None, Some(receive), &due).unwrap_err();
                assert_eq!(error.peer(), Some(2), "{error}");
            }
            (1, _) => {
                while transport.aborted().is_none() {
                    transport.runtime().yield_now();
                }
            }
            _ => transport.abort(Cause::gave_up("no more data")),
        }
    });
    run(&[0, 0, 1], &program, with_memory);
}

#[test]
fn rank_0_is_named_if_it_does_not_decide_about_a_timeout() {
    let worlds = unserved_worlds(&[0; 4]);
    worlds[1].propose(&mut worlds[1].lock(), TIMEOUT);
    assert_eq!(worlds[1].await_decision(), Abort { rank: 0, ..TIMEOUT });
}

#[test]
fn rank_0_replies_to_a_process_before_its_last_packet_to_it() {
    let worlds = unserved_worlds(&[0; 2]);
    let advance = |world: &World| world.progress(&mut world.lock());
    worlds[0].leave_job();
    advance(&worlds[1]);
    let request = StoreRequest { key: "key".to_owned(), operation: StoreOperation::Get };
    let deadline = worlds[1].runtime.deadline(Duration::ZERO);
    assert_eq!(store::request(&worlds[1], &request, deadline), Ok(None));
    worlds[1].leave_job();
    advance(&worlds[1]);
    assert!(!worlds[1].lock().is_over(), "a reply may be on its way");
    worlds.iter().for_each(|world| advance(world));
    assert!(worlds.iter().all(|world| world.lock().is_over()));
}

#[test]
fn a_request_is_not_sent_while_rank_0_takes_no_packets() {
    let mut wire =
        MemoryWire { rank: 1, inboxes: vec![Inbox::default(), Inbox::default()], in_flight: IN_FLIGHT_MAX };
    let sent = wire.inboxes[0].clone();
    let placement = unserved_worlds(&[0; 2])[1].placement.clone();
    let mut request = |in_flight| {
        wire.in_flight = in_flight;
        let world = World::new(Box::new(wire.clone()), 1, placement.clone(), None);
        let request = StoreRequest { key: "key".to_owned(), operation: StoreOperation::Wait };
        let deadline = world.runtime.deadline(Duration::ZERO);
        assert_eq!(store::request(&world, &request, deadline), Ok(None));
        sent.lock().unwrap().drain(..).map(|(_, tag, _)| tag.kind).collect::<Vec<_>>()
    };
    assert_eq!(request(IN_FLIGHT_MAX), []);
    assert_eq!(request(0), [Kind::StoreRequest, Kind::CancelRequest]);
}

#[test]
fn rank_0_serves_the_store_until_all_have_left() {
    let program: TransportProgram = Arc::new(|transport| {
        let (rank, store) = (transport.rank().index(), transport.store().unwrap());
        drop(transport);
        if rank == 0 {
            return drop(store);
        }
        store.set(&format!("of {rank}"), b"").unwrap();
        (1..3).for_each(|other| drop(store.wait(&format!("of {other}")).unwrap()));
    });
    run(&[0; 3], &program, |world| Box::new(MpiTransport::new(world)));
    run(&[0; 3], &program, with_memory);
}

fn run(hosts: &[u64], program: &TransportProgram, join: fn(Arc<World>) -> Box<dyn Transport>) {
    let runtime = Runtime::system();
    let start = |world: Arc<World>| -> Task<()> {
        let program = program.clone();
        runtime.spawn("rank", move || program(join(world))).unwrap()
    };
    let tasks: Vec<_> = worlds(hosts).into_iter().map(start).collect();
    for result in tasks.into_iter().map(Task::join).collect::<Vec<_>>() {
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }
}

/// A fabric with messages only.
struct Messages;

impl Fabric for Messages {
    fn finds_circles(&self) -> bool {
        false
    }

    fn run(&self, _: u64, world_size: usize, program: TransportProgram) {
        run(&vec![0; world_size], &program, |world| Box::new(MpiTransport::new(world)));
    }

    fn run_on(&self, _: u64, hosts: &[u64], program: TransportProgram) {
        run(hosts, &program, |world| Box::new(MpiTransport::new(world)));
    }

    fn shared_memory(&self) -> Option<Reach> {
        None
    }
}

fn with_memory(world: Arc<World>) -> Box<dyn Transport> {
    let due = world.runtime.deadline(Duration::from_secs(60)).into();
    Box::new(MpiTransport::with_shared_memory(world, &due).unwrap())
}

/// A fabric with messages and shared memory.
struct WithMemory;

impl Fabric for WithMemory {
    fn run(&self, _: u64, world_size: usize, program: TransportProgram) {
        run(&vec![0; world_size], &program, with_memory);
    }

    fn run_on(&self, _: u64, hosts: &[u64], program: TransportProgram) {
        run(hosts, &program, with_memory);
    }

    fn shared_memory(&self) -> Option<Reach> {
        Some(Reach::Write)
    }
}

mod messages {
    dist_transport::conformance!(super::Messages);
}

mod with_memory {
    dist_transport::conformance!(super::WithMemory);
}
