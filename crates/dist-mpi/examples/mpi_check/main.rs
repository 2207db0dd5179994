//! The checks of dist-mpi under a real MPI library, as seen from one rank: `mpirun -n 4 mpi_check CASE`.
//!
//! `cargo xtask mpi` starts it once for each case, because MPI can be initialised only once in a process. The case
//! `matrix` compares every operation of a communicator with the oracle. The other cases are promises of a transport;
//! in those about errors, every rank checks its error, and the job then ends in order.
#![allow(clippy::print_stdout, reason = "a program prints")]

#[path = "../../../dist-cli/examples/matrix/cases.rs"]
mod cases;
#[path = "../../../dist-cli/examples/matrix/check.rs"]
mod check;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Duration;

use cases::Case;
use check::Checker;
use dist_collectives::algorithms::ALGORITHMS;
use dist_collectives::{Communicator, ReduceOp, ReductionOrder};
use dist_mpi::{MpiOptions, MpiTransport};
use dist_transport::{
    Abort, Cause, Error, Fingerprint, Incoming, LazyDeadline, Outgoing, Result, Sink, Transport,
};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

const HELP: &str = "mpi_check matrix [WORD…] | native [WORD…] | native_threads | native_stop | messages | threads | timeout | mismatch | length | leaver | panic | memory | death";
const OURS: Fingerprint = Fingerprint([1; Fingerprint::SIZE]);
const THEIRS: Fingerprint = Fingerprint([2; Fingerprint::SIZE]);
const LONG: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let Some((case, words)) = words.split_first() else {
        eprintln!("{HELP}");
        return ExitCode::FAILURE;
    };
    match run(case, words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{case}: {}", dist_transport::Chain(&*error));
            ExitCode::FAILURE
        }
    }
}

fn run(case: &str, words: &[String]) -> Result<(), BoxError> {
    let messages = MpiOptions::new().without_shared_memory();
    match case {
        "matrix" => return matrix(&mut Communicator::new(messages.init_transport()?), words, |_| true),
        "native" => {
            let mut comm = Communicator::new(messages.with_native_collectives(1).init_transport()?);
            matrix(&mut comm, words, |case| !decides_about_nan(case))?;
            return native_traffic(&mut comm);
        }
        "native_threads" => return native_threads(messages.with_native_collectives(1).init()?),
        "native_stop" => return native_stop(messages.with_native_collectives(1).init()?),
        "memory" => return memory(MpiOptions::new().init()?),
        _ => {}
    }
    let mut transport = messages.init_transport()?;
    match case {
        "messages" => long_and_short_messages(&mut transport)?,
        "threads" => threads(&mut transport)?,
        "timeout" => timeout(&mut transport)?,
        "mismatch" => mismatch(&mut transport)?,
        "length" => length(&mut transport)?,
        "leaver" => return leaver(transport),
        "panic" => return panic(transport),
        "death" => return death(&mut transport),
        _ => return Err(HELP.into()),
    }
    Ok(())
}

/// Compares every operation, reduction and element type whose name has all of the words with the oracle.
fn matrix(
    comm: &mut Communicator,
    words: &[String],
    is_checked: impl Fn(&Case) -> bool,
) -> Result<(), BoxError> {
    let world_size = comm.world_size();
    let mut checker = Checker::new(world_size);
    let (mut count, mut calls) = (0, 0);
    for case in Case::all(ALGORITHMS, world_size) {
        let name = case.to_string();
        if !words.iter().all(|word| name.contains(word.as_str())) || !is_checked(&case) {
            continue;
        }
        if !checker.check(comm, case).map_err(|error| format!("{name}: {error}"))? {
            return Err(format!("{name}: a wrong element").into());
        }
        count += 1;
        calls += checker.lengths(case).len();
    }
    if comm.rank() == 0 {
        println!("{count} cases with {calls} calls agree with the oracle on {world_size} ranks");
    }
    if count == 0 { Err("no case has these words".into()) } else { Ok(()) }
}

/// Returns `true` if the library decides about NaN and the sign of zeros in the results.
fn decides_about_nan(case: &Case) -> bool {
    let is_native = case.order == ReductionOrder::Any && case.algorithm.is_none();
    is_native && case.dtype.is_float() && matches!(case.op, ReduceOp::Min | ReduceOp::Max)
}

/// Checks that the bytes of a call of the library are no messages of the transport.
fn native_traffic(comm: &mut Communicator) -> Result<(), BoxError> {
    let (rank, ranks, len) = (comm.rank(), comm.world_size(), 3_000_001);
    let before = comm.traffic();
    let mut values = vec![rank as f32; len];
    comm.with_order(ReductionOrder::Any).all_reduce(&mut values, ReduceOp::Max)?;
    expect(values.iter().all(|&value| value == (ranks - 1) as f32), "a maximum is wrong")?;
    let sent = comm.traffic().bytes_sent - before.bytes_sent;
    expect(sent < len as u64, &format!("{sent} bytes were sent as messages"))
}

/// Checks calls of the library by several threads at once, in another order on each rank, among all ranks and among
/// groups that have members in common.
fn native_threads(mut comm: Communicator) -> Result<(), BoxError> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let runtime = comm.runtime().clone();
    let mut comms = Vec::new();
    for thread in 0..6 {
        let members: Vec<usize> =
            (0..ranks).filter(|member| thread < 3 || member % 3 != thread - 3).collect();
        let mut group = comm.subgroup(&members)?;
        if let Some(group) = &mut group {
            group.set_order(ReductionOrder::Any);
        }
        comms.extend(group.map(|group| (thread, members.iter().sum::<usize>(), group)));
    }
    if rank % 2 == 1 {
        comms.reverse();
    }
    let work = move |(thread, sum, mut group): (usize, usize, Communicator)| -> Result<bool, BoxError> {
        let mut is_right = true;
        for round in 0..30 {
            let mut values = vec![(rank + round) as u64; 1000 << (thread * round % 7)];
            group.all_reduce(&mut values, ReduceOp::Sum)?;
            let expected = (sum + round * group.world_size()) as u64;
            is_right &= values.iter().all(|&value| value == expected);
        }
        Ok(is_right)
    };
    let spawn = |comm| runtime.spawn("group", move || work(comm));
    let tasks = comms.into_iter().map(spawn).collect::<std::io::Result<Vec<_>>>()?;
    for task in tasks {
        let is_right = task.join().map_err(|_| "a thread has panicked")??;
        expect(is_right, "a thread received the sum of another")?;
    }
    Ok(comm.barrier()?)
}

/// Stops the process of the last rank in the middle of calls of the library. The others must name it.
fn native_stop(mut comm: Communicator) -> Result<(), BoxError> {
    let last = comm.world_size() - 1;
    if comm.rank() == last {
        let script = format!("sleep 1; kill -STOP {0}; sleep 20; kill -CONT {0}", std::process::id());
        std::process::Command::new("sh").args(["-c", &script]).spawn()?;
    }
    comm.set_timeout(Duration::from_secs(10));
    comm.set_order(ReductionOrder::Any);
    let mut values = vec![1.0_f32; 8 << 20];
    let error = loop {
        if let Err(error) = comm.all_reduce(&mut values, ReduceOp::Max) {
            break error;
        }
    };
    expect(
        comm.rank() == last || error.peer() == Some(last),
        &format!("the error names another rank: {error}"),
    )?;
    Err(error.into())
}

/// Checks the communicator that users get: shared memory among the ranks of a host, and forks of it.
fn memory(mut comm: Communicator) -> Result<(), BoxError> {
    let (rank, size) = (comm.rank(), comm.world_size());
    for len in [0, 1, 1000, 1 << 20] {
        let mut values = vec![rank as f32 + 1.0; len];
        comm.all_reduce(&mut values, ReduceOp::Sum)?;
        let sum = (size * (size + 1) / 2) as f32;
        expect(values.iter().all(|&value| value == sum), "a sum is wrong")?;
    }
    let hosts = comm.hosts();
    expect(hosts.iter().all(|&host| host == hosts[0]), "the ranks of one machine have one host")
}

/// Messages of all lengths, up to 64 MiB, round the ring and in place; waits for any peer.
fn long_and_short_messages(transport: &mut dyn Transport) -> Result<(), BoxError> {
    let rank = transport.rank();
    let (right, left) = (rank.right().index(), rank.left().index());
    for (round, len) in
        [0, 1, 63, 64, 1000, 8192, 131_072, 131_073, 1 << 20, 64 << 20].into_iter().enumerate()
    {
        let sent = bytes(rank.index(), round, len);
        let mut received = vec![0; len];
        let due = soon(transport);
        let receive = Incoming { from: left, len, sink: Sink::Into(&mut received) };
        transport.exchange(Some(Outgoing { to: right, parts: &[&sent] }), Some(receive), &due)?;
        expect(received == bytes(left, round, len), "bytes of a message are wrong")?;
    }
    if rank.world_size().is_multiple_of(2) {
        let peer = rank.index() ^ 1;
        let mut buffer = vec![1_u8; 5_000_001];
        let due = soon(transport);
        let add =
            &mut |ours: &mut [u8], theirs: &[u8]| ours.iter_mut().zip(theirs).for_each(|(a, b)| *a += b);
        transport.exchange_in_place(peer, &mut buffer, add, &due)?;
        expect(buffer.iter().all(|&byte| byte == 2), "bytes of an exchange in place are wrong")?;
    }
    let due = soon(transport);
    if rank.index() == 0 {
        let mut silent: Vec<usize> = (1..rank.world_size()).collect();
        while !silent.is_empty() {
            let still = transport.wait_any_peer(&silent, &due)?;
            for &from in silent.iter().filter(|peer| !still.contains(peer)) {
                receive(transport, from, 3, LONG)?;
            }
            silent = still;
        }
    } else {
        send(transport, 0, &[7; 3])?;
    }
    barrier(transport)?;
    Ok(())
}

/// Checks several threads at once, each with a fork of its own.
fn threads(transport: &mut dyn Transport) -> Result<(), BoxError> {
    let all: Vec<usize> = (0..transport.rank().world_size()).collect();
    let runtime = transport.runtime().clone();
    let mut tasks = Vec::new();
    for thread in 0..4_usize {
        let mut fork = transport.fork(&all)?.ok_or("every rank is a member")?;
        tasks.push(runtime.spawn("fork", move || -> Result<bool> {
            let rank = fork.rank();
            let mut is_right = true;
            for round in 0..50 {
                let len = [8, 3000, 200_000][round % 3] + thread;
                let sent = bytes(rank.index(), round + thread, len);
                let mut received = vec![0; len];
                let due = soon(&*fork);
                let receive = Incoming { from: rank.left().index(), len, sink: Sink::Into(&mut received) };
                fork.exchange(
                    Some(Outgoing { to: rank.right().index(), parts: &[&sent] }),
                    Some(receive),
                    &due,
                )?;
                is_right &= received == bytes(rank.left().index(), round + thread, len);
            }
            Ok(is_right)
        })?);
    }
    for task in tasks {
        let is_right = task.join().map_err(|_| "a thread has panicked")??;
        expect(is_right, "a thread received bytes of another")?;
    }
    barrier(transport)?;
    Ok(())
}

/// Lets rank 0 wait for the last rank, which does not send: all ranks get the same record.
fn timeout(transport: &mut dyn Transport) -> Result<(), BoxError> {
    let last = transport.rank().world_size() - 1;
    let error = if transport.rank().index() == 0 {
        barrier(transport)?;
        let limit = Duration::from_millis(200);
        let begun = transport.runtime().now();
        let error = failed(receive(transport, last, 1, limit))?;
        let waited = transport.runtime().now() - begun;
        expect(waited >= limit && waited < limit * 5, &format!("the wait of {limit:?} took {waited:?}"))?;
        expect(matches!(error, Error::Timeout { peer, .. } if peer == last), &error.to_string())?;
        error
    } else {
        stand_by(transport)?
    };
    expect_record(transport, &error, (Cause::timed_out(), last, 0, Fingerprint::NONE))
}

/// Lets the last rank make another call than rank 0, which receives.
fn mismatch(transport: &mut dyn Transport) -> Result<(), BoxError> {
    disagree(transport, (THEIRS, 10), Cause::Mismatch { theirs: THEIRS })
}

/// Lets the last rank send more bytes than rank 0 expects.
fn length(transport: &mut dyn Transport) -> Result<(), BoxError> {
    disagree(transport, (OURS, 300_000), Cause::Length { expected: 10, got: 300_000 })
}

fn disagree(
    transport: &mut dyn Transport,
    (call, len): (Fingerprint, usize),
    cause: Cause,
) -> Result<(), BoxError> {
    let (rank, last) = (transport.rank().index(), transport.rank().world_size() - 1);
    let error = if rank == 0 || rank == last {
        barrier(transport)?;
        transport.begin(if rank == last { &call } else { &OURS });
        if rank == last {
            send(transport, 0, &vec![7; len])?;
        }
        let (from, len) = if rank == 0 { (last, 10) } else { (0, 1) };
        failed(receive(transport, from, len, LONG))?
    } else {
        stand_by(transport)?
    };
    expect_record(transport, &error, (cause, last, 0, OURS))
}

/// Lets the last rank leave while rank 0 waits for it.
fn leaver(mut transport: MpiTransport) -> Result<(), BoxError> {
    let last = transport.rank().world_size() - 1;
    let error = match transport.rank().index() {
        rank if rank == last => return Ok(barrier(&mut transport)?),
        0 => {
            barrier(&mut transport)?;
            failed(receive(&mut transport, last, 1, LONG))?
        }
        _ => stand_by(&mut transport)?,
    };
    expect_record(&mut transport, &error, (Cause::Left, last, 0, Fingerprint::NONE))
}

/// Lets the last rank panic while it has the transport.
fn panic(mut transport: MpiTransport) -> Result<(), BoxError> {
    let last = transport.rank().world_size() - 1;
    if transport.rank().index() == last {
        barrier(&mut transport)?;
        let panics = AssertUnwindSafe(move || {
            let _transport = transport;
            std::panic::resume_unwind(Box::new("planted"));
        });
        return expect(catch_unwind(panics).is_err(), "it did not panic");
    }
    let error = stand_by(&mut transport)?;
    expect_record(&mut transport, &error, (Cause::Panicked, last, last, Fingerprint::NONE))
}

/// Ends the process of the last rank with exit code 9. The launcher ends the others while they wait for it.
fn death(transport: &mut dyn Transport) -> Result<(), BoxError> {
    let last = transport.rank().world_size() - 1;
    barrier(transport)?;
    if transport.rank().index() == last {
        std::process::exit(9);
    }
    let error = failed(receive(transport, last, 1, LONG))?;
    // If the launcher does not end the ranks, their errors name the culprit.
    expect(error.peer() == Some(last), &format!("the error names another rank: {error}"))?;
    // The launcher tells of the process whose end it notices first. That must be the one that died.
    transport.runtime().sleep(LONG);
    Err(error.into())
}

/// Checks that this rank has the record, and that the error is of it.
fn expect_record(
    transport: &mut dyn Transport,
    error: &Error,
    (cause, rank, reporter, call): (Cause, usize, usize, Fingerprint),
) -> Result<(), BoxError> {
    let record = Abort { cause, rank, reporter, call };
    let aborted = transport.aborted();
    expect(aborted.as_ref() == Some(&record), &format!("the record is {aborted:?}, not {record:?}"))?;
    expect(error.peer() == Some(rank), &format!("the error names another rank: {error}"))?;
    let again = failed(receive(transport, 0, 1, LONG))?;
    expect(matches!(&again, Error::Aborted(seen) if *seen == record), "a later call has another result")
}

fn expect(holds: bool, otherwise: &str) -> Result<(), BoxError> {
    if holds { Ok(()) } else { Err(otherwise.into()) }
}

fn failed(result: Result<Vec<u8>>) -> Result<Error, BoxError> {
    result.err().ok_or_else(|| "no rank sends this message".into())
}

/// Exchanges with all ranks and waits for the end of the job, which may come while others are still exchanging.
fn stand_by(transport: &mut dyn Transport) -> Result<Error, BoxError> {
    match barrier(transport) {
        Ok(()) => failed(receive(transport, 0, 1, LONG)),
        Err(error) => Ok(error),
    }
}

fn soon(transport: &dyn Transport) -> LazyDeadline<'static> {
    transport.runtime().deadline(LONG).into()
}

/// Returns the bytes of a message: different for all ranks and rounds.
fn bytes(rank: usize, round: usize, len: usize) -> Vec<u8> {
    let pattern: Vec<u8> =
        (0..4099).map(|index| (rank * 31 + round * 17 + index * 7).to_le_bytes()[0]).collect();
    pattern.iter().copied().cycle().take(len).collect()
}

fn send(transport: &mut dyn Transport, to: usize, bytes: &[u8]) -> Result<()> {
    let due = soon(transport);
    transport.exchange(Some(Outgoing { to, parts: &[bytes] }), None, &due)
}

fn receive(transport: &mut dyn Transport, from: usize, len: usize, limit: Duration) -> Result<Vec<u8>> {
    let due = LazyDeadline::from(transport.runtime().deadline(limit));
    let mut bytes = vec![0; len];
    transport.exchange(None, Some(Incoming { from, len, sink: Sink::Into(&mut bytes) }), &due)?;
    Ok(bytes)
}

/// Exchanges a byte between every pair.
fn barrier(transport: &mut dyn Transport) -> Result<()> {
    let (rank, due) = (transport.rank(), soon(transport));
    for distance in 1..rank.world_size() {
        let mut byte = [0];
        let receive = Incoming { from: rank.minus(distance).index(), len: 1, sink: Sink::Into(&mut byte) };
        let send = Outgoing { to: rank.plus(distance).index(), parts: &[&[0]] };
        transport.exchange(Some(send), Some(receive), &due)?;
    }
    Ok(())
}
