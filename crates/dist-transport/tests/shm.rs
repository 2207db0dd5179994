//! Shared memory between ranks: it is chosen automatically, works together with TCP, and leaves nothing
//! behind.
#![cfg(all(feature = "shm", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![allow(unsafe_code, reason = "shared memory is used without a checked plan")]

use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use dist_transport::conformance::Unchecked;
use dist_transport::process::{Config, Coordinator, Medium, ProcessTransport};
use dist_transport::shm_group::{CALLS_MAX, CHANGED_MAX, ExposedRegion, MemoryArea, Reach, SlotUse};
use dist_transport::{
    Abort, Cause, Deadline, Error, Fingerprint, Incoming, Outgoing, Owned, Runtime, Sink, Traffic, Transport,
};
use rstest::rstest;

const LONG: Duration = Duration::from_secs(30);

/// Runs `program` on one rank for each of these configurations, and returns the results in rank order.
fn run<T: Send + 'static>(
    world_size: usize,
    configure: impl Fn(usize, Config) -> Config,
    program: impl Fn(ProcessTransport) -> T + Send + Sync + 'static,
) -> Vec<T> {
    run_at("127.0.0.1", world_size, configure, program)
}

/// Runs ranks as [`run`] does, with this address of the coordinator.
fn run_at<T: Send + 'static>(
    address: &str,
    world_size: usize,
    configure: impl Fn(usize, Config) -> Config,
    program: impl Fn(ProcessTransport) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let coordinator = Coordinator::start("127.0.0.1:0", world_size, "test", None).unwrap();
    let address = format!("{address}:{}", coordinator.address().port());
    let (runtime, program) = (Runtime::system(), Arc::new(program));
    let start = |rank| {
        let config = Config::new(rank, world_size, &address).unwrap();
        let config = config.with_job("test").with_external_coordinator().with_timeout(LONG);
        let (config, program) = (configure(rank, config), program.clone());
        runtime.spawn("rank", move || program(ProcessTransport::join(&config).unwrap())).unwrap()
    };
    let tasks: Vec<_> = (0..world_size).map(start).collect();
    tasks.into_iter().map(|task| task.join().unwrap()).collect()
}

/// Returns the memory of a group. These tests uphold its contract.
fn shm_group<'a>(transport: &'a mut dyn Transport, deadline: Deadline) -> Unchecked<'a> {
    let shm_group = transport.shm_group(&deadline.into()).unwrap().expect("they share memory");
    // SAFETY: in each test all ranks enter the same calls, and wait for a rank's signal before they read its
    // data.
    unsafe { Unchecked::new(shm_group) }
}

/// Sends bytes to the right while receiving equally many from the left.
fn pass_round(transport: &mut dyn Transport, bytes: &[u8]) -> Result<Vec<u8>, Error> {
    let (rank, deadline) = (transport.rank(), transport.runtime().deadline(LONG));
    let mut received = vec![0; bytes.len()];
    let outgoing = Outgoing { to: rank.right().index(), parts: &[bytes] };
    let incoming = Incoming { from: rank.left().index(), len: bytes.len(), sink: Sink::Into(&mut received) };
    transport.exchange(Some(outgoing), Some(incoming), &deadline.into())?;
    Ok(received)
}

/// A rank's listener and the address that others get are the same.
#[test]
fn ranks_that_reach_the_coordinator_by_ipv4_through_ipv6_share_memory() {
    let configure = |_, config: Config| config.with_medium(Medium::Shm);
    let pass = |mut transport: ProcessTransport| pass_round(&mut transport, &[7]).unwrap();
    let words = run_at("[::ffff:127.0.0.1]", 3, configure, pass);
    assert_eq!(words, [[7]; 3]);
}

/// The signals of one rank and the message of the other never match.
#[test]
fn a_message_against_a_collective_is_an_error_long_before_the_deadline() {
    let outcomes = run(
        2,
        |_, config| config.with_medium(Medium::Shm),
        |mut transport| {
            let (runtime, me) = (transport.runtime().clone(), transport.rank().index());
            let deadline = runtime.deadline(LONG);
            let call = |number: u8| {
                let mut call = [7; Fingerprint::SIZE];
                call[..8].copy_from_slice(&u64::from(number).to_le_bytes());
                Fingerprint(call)
            };
            transport.begin(&call(1));
            transport.shm_group(&deadline.into()).unwrap().expect("they share memory");
            if me == 1 {
                transport.begin(&call(0));
                return pass_round(&mut transport, &[7]).unwrap_err();
            }
            transport.begin(&call(2));
            let mut shm_group = shm_group(&mut transport, deadline);
            shm_group.enter(1, SlotUse::Used, ExposedRegion::Nothing, &deadline.into()).unwrap();
            shm_group.signal();
            shm_group.wait(1, 1, &deadline.into()).unwrap_err()
        },
    );
    for error in outcomes {
        let told = match &error {
            Error::Mismatch { .. } => true,
            Error::Aborted(abort) => matches!(abort.cause, Cause::Mismatch { .. }),
            _ => false,
        };
        assert!(told, "{error:?}");
    }
}

/// Returns how much shared memory of this crate this process has mapped.
fn mapped() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("memfd:dist")).count()
}

#[rstest]
#[case::one_that_uses_tcp_only(&["a"; 5], Some(2))]
#[case::two_hosts(&["a", "b", "b", "a", "a"], None)]
fn ranks_that_share_memory_and_ranks_that_do_not_exchange_with_each_other(
    #[case] hosts: &'static [&'static str],
    #[case] without: Option<usize>,
    #[values(0, 1, 64, 300_000, 3_000_001)] len: usize,
) {
    let configure = |rank, config: Config| {
        let medium = if without == Some(rank) { Medium::Tcp } else { Medium::Auto };
        config.with_host_id(hosts[rank]).with_medium(medium)
    };
    let mapped = run(hosts.len(), configure, move |mut transport| {
        let mut bytes = vec![u8::try_from(transport.rank().index()).unwrap(); len];
        for distance in 0..3 * transport.rank().world_size() {
            let owner = transport.rank().minus(distance).index();
            assert!(bytes.iter().all(|&byte| usize::from(byte) == owner), "after {distance} steps");
            bytes = pass_round(&mut transport, &bytes).unwrap();
        }
        // While all ranks are here.
        let here = mapped();
        pass_round(&mut transport, &[]).unwrap();
        here
    });
    assert!(mapped.iter().any(|&mapped| mapped > 0), "nothing was shared");
}

#[rstest]
#[case::as_far_as_the_system_allows([Reach::Write; 3], Some(Reach::Write))]
#[case::one_may_be_read_only([Reach::Write, Reach::Read, Reach::Write], Some(Reach::Read))]
#[case::one_keeps_to_itself([Reach::Write, Reach::Read, Reach::Slots], Some(Reach::Slots))]
fn ranks_agree_on_the_least_reach_of_all(#[case] reaches: [Reach; 3], #[case] expected: Option<Reach>) {
    let configure = move |rank: usize, config: Config| config.with_reach(reaches[rank]);
    assert_eq!(run(3, configure, shared_reach), [expected; 3]);
}

#[rstest]
#[case::one_that_uses_tcp_only(&["a"; 3], Some(1))]
#[case::two_hosts(&["a", "b", "a"], None)]
fn a_group_with_a_rank_without_shared_memory_shares_none(
    #[case] hosts: &'static [&'static str],
    #[case] without: Option<usize>,
) {
    let configure = |rank, config: Config| {
        let medium = if without == Some(rank) { Medium::Tcp } else { Medium::Auto };
        config.with_host_id(hosts[rank]).with_medium(medium)
    };
    assert_eq!(run(3, configure, shared_reach), [None; 3]);
}

/// Returns the reach of ranks in the memory of the world. Probing does not count as traffic.
fn shared_reach(mut transport: ProcessTransport) -> Option<Reach> {
    let deadline = transport.runtime().deadline(LONG);
    let reach = transport.shm_group(&deadline.into()).unwrap().map(|shm_group| shm_group.shared().reach);
    assert_eq!(transport.traffic(), Traffic::default());
    pass_round(&mut transport, &[]).unwrap();
    reach
}

#[test]
fn memory_of_the_heap_is_shared_by_forks_and_outlives_them() {
    let sums = run(
        3,
        |_, config| config,
        |mut transport| {
            let deadline = transport.runtime().deadline(LONG);
            let memory = transport.allocate(3 * 4096).unwrap();
            let mut memory = Owned::<u64>::allocated(memory).unwrap();
            let mut sums = Vec::new();
            for round in 1..4 {
                memory.fill(round * (1 + transport.rank().index() as u64));
                let mut fork = transport.fork(&[2, 1, 0]).unwrap().unwrap();
                let (rank, mut shm_group) = (fork.rank(), shm_group(&mut *fork, deadline));
                shm_group
                    .enter(
                        2,
                        SlotUse::Used,
                        ExposedRegion::Read(bytemuck::cast_slice(&memory)),
                        &deadline.into(),
                    )
                    .unwrap();
                shm_group.signal();
                let mut sum = memory[0];
                for peer in (0..3).filter(|&peer| peer != rank.index()) {
                    shm_group.wait(peer, 1, &deadline.into()).unwrap();
                    let mut word = [0; 8];
                    shm_group.read(peer, MemoryArea::Exposed, 3 * 4096 - 8, &mut word).unwrap();
                    sum += u64::from_ne_bytes(word);
                }
                shm_group.signal();
                (0..3).for_each(|peer| shm_group.wait(peer, 2, &deadline.into()).unwrap());
                shm_group.wake_waiters();
                sums.push(sum);
            }
            sums
        },
    );
    assert_eq!(sums, [[6, 12, 18]; 3]);
}

/// Changes a byte of all others at once, in slots and in memory of the heap. Returns whether that was
/// possible.
fn change_others(mut transport: ProcessTransport) -> [bool; 2] {
    let (rank, deadline) = (transport.rank(), transport.runtime().deadline(LONG));
    let mut memory = Owned::<u8>::allocated(transport.allocate(64).unwrap());
    let others: Vec<usize> = (0..rank.world_size()).filter(|&peer| peer != rank.index()).collect();
    let there: Vec<(usize, usize)> = others.iter().map(|&peer| (peer, rank.index())).collect();
    let changed = [(1, MemoryArea::Slot(0)), (2, MemoryArea::Exposed)].map(|(number, place)| {
        let mut call = Fingerprint::NONE;
        call.0[0] = number;
        transport.begin(&call);
        let mut shm_group = shm_group(&mut transport, deadline);
        let exposed = match place {
            MemoryArea::Exposed => ExposedRegion::Write(memory.take().unwrap().lend()),
            _ => ExposedRegion::Nothing,
        };
        shm_group.enter(2, SlotUse::Used, exposed, &deadline.into()).unwrap();
        shm_group.signal();
        others.iter().for_each(|&peer| shm_group.wait(peer, 1, &deadline.into()).unwrap());
        // The last rank has no such range. Nothing may be done to the ranks before it.
        let mut beyond = there.clone();
        let (last, offset) = beyond.last_mut().unwrap();
        *offset = 1 << 40;
        let last = *last;
        match shm_group.change(place, &beyond, 1, &mut |_| panic!("not all are there")) {
            Err(Error::OutOfReach { peer, .. }) => assert_eq!(peer, last),
            refused => assert!(!refused.unwrap() && others.len() > CHANGED_MAX),
        }
        let changed = shm_group.change(place, &there, 1, &mut |all| assert_eq!(all.len(), others.len()));
        shm_group.signal();
        others.iter().for_each(|&peer| shm_group.wait(peer, 2, &deadline.into()).unwrap());
        shm_group.wake_waiters();
        if place == MemoryArea::Exposed {
            memory = shm_group.reclaim().unwrap().into_owned().ok();
            assert!(memory.is_some());
        }
        changed.unwrap()
    });
    pass_round(&mut transport, &[]).unwrap();
    changed
}

#[rstest]
#[case(2, true)]
#[case(CHANGED_MAX + 1, true)]
#[case(CHANGED_MAX + 2, false)]
fn memory_of_the_most_others_is_changed_at_once(#[case] world_size: usize, #[case] expected: bool) {
    assert_eq!(run(world_size, |_, config| config, change_others), vec![[expected; 2]; world_size]);
}

#[test]
fn a_pair_that_must_share_memory_and_cannot_gets_an_error() {
    let hosts = |rank, config: Config| {
        // The dialled rank listens only to the network.
        config.with_medium(if rank == 0 { Medium::Tcp } else { Medium::Shm })
    };
    let errors = run(2, hosts, |mut transport| pass_round(&mut transport, &[1]).unwrap_err());
    let Error::Aborted(Abort { cause, rank: 1, .. }) = &errors[0] else { panic!("{}", errors[0]) };
    assert_eq!(*cause, Cause::gave_up(&errors[1]));
    assert!(matches!(errors[1], Error::NotShared { peer: 0 }), "{}", errors[1]);
}

/// A client that connects to the host's Unix sockets gets nothing and does no harm.
#[test]
fn unauthenticated_clients_of_the_unix_socket_get_nothing() {
    let words = run(
        2,
        |_, config| config,
        |mut transport| {
            // The names of all Unix sockets are public.
            let names = std::fs::read_to_string("/proc/net/unix").unwrap();
            let unix_sockets: Vec<_> = names
                .lines()
                .filter_map(|line| line.split_once("@dist-transport/").map(|(_, address)| address.to_owned()))
                .collect();
            assert!(!unix_sockets.is_empty());
            for unix_socket in &unix_sockets {
                let name = format!("dist-transport/{unix_socket}");
                let address = SocketAddr::from_abstract_name(&name).unwrap();
                // Unix sockets of other tests may be gone by now.
                if let Ok(mut client) = UnixStream::connect_addr(&address) {
                    let _ = client.write_all(&[b'x'; 80]);
                    let mut answer = Vec::new();
                    let _ = client.read_to_end(&mut answer);
                    assert!(answer.is_empty(), "{answer:?}");
                }
            }
            pass_round(&mut transport, &[7; 1000]).unwrap()
        },
    );
    assert_eq!(words, [[7; 1000]; 2]);
}

/// With fewer cores than ranks, a rank that does not wait and uses no slots runs ahead: it has entered three
/// calls before the others have entered the first. On a machine with many cores this would take too many
/// ranks.
#[test]
fn a_rank_that_does_not_wait_runs_ahead_on_shared_cores() {
    const RANKS_MAX: usize = 9;
    let world_size = std::thread::available_parallelism().map_or(1, usize::from) + 1;
    if world_size > RANKS_MAX {
        return;
    }
    fn go_ahead(transport: &mut ProcessTransport) {
        let deadline = transport.runtime().deadline(LONG);
        for number in 1..CALLS_MAX {
            let mut call = Fingerprint::NONE;
            call.0[..8].copy_from_slice(&(number as u64).to_le_bytes());
            transport.begin(&call);
            let mut shm_group = shm_group(transport, deadline);
            shm_group.enter(1, SlotUse::Unused, ExposedRegion::Nothing, &deadline.into()).unwrap();
            shm_group.signal();
            shm_group.wake_waiters();
        }
    }
    run(
        world_size,
        |_, config| config,
        |mut transport| {
            let deadline = transport.runtime().deadline(LONG);
            transport.shm_group(&deadline.into()).unwrap().unwrap();
            // A word goes round from the first rank, which has run ahead by then.
            let rank = transport.rank();
            if rank.index() == 0 {
                go_ahead(&mut transport);
            } else {
                let from = Incoming { from: rank.left().index(), len: 0, sink: Sink::Into(&mut []) };
                transport.begin(&Fingerprint::NONE);
                transport.exchange(None, Some(from), &deadline.into()).unwrap();
            }
            transport.begin(&Fingerprint::NONE);
            let to = Outgoing { to: rank.right().index(), parts: &[] };
            let last = rank.index() + 1 == rank.world_size();
            transport.exchange((!last).then_some(to), None, &deadline.into()).unwrap();
            if rank.index() > 0 {
                go_ahead(&mut transport);
            }
            transport.begin(&Fingerprint::NONE);
            pass_round(&mut transport, &[]).unwrap();
        },
    );
}
