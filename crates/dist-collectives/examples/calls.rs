//! Runs one collective many times, to count instructions or to profile.
//!
//! `distctl run -n 2 -- target/release/examples/calls all_reduce 8 100000` prints microseconds per call on rank 0.
//! For `ping_pong`, between ranks 0 and 1, that is the time of both messages.
//! For `start_all_reduce` it also prints the time until the operation was started. For `poll_all_reduce` that is the time
//! from the start to the end of an operation that no thread waits for, while the worker sleeps before each start.
#![allow(clippy::print_stdout, reason = "it is a program")]

use std::cell::Cell;
use std::error::Error;
use std::time::Duration;

use dist_collectives::{Buffer, Communicator, ReduceOp};

/// The number of calls before the measurement.
const WARM_UPS: usize = 3;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [operation, bytes, calls] = &*arguments else { return Err("calls OPERATION BYTES CALLS".into()) };
    let (elements, calls) = (bytes.parse::<usize>()? / 4, calls.parse::<u32>()?);
    let mut comm = Communicator::from_env()?;
    let (mut part, mut whole) = (vec![1.0_f32; elements], vec![1.0_f32; elements * comm.world_size()]);
    let mut owned = Buffer::from(part.clone());
    let handed_over = Cell::new(Duration::ZERO);
    let mut call = |comm: &mut Communicator| match operation.as_str() {
        "all_reduce" => comm.all_reduce(&mut part, ReduceOp::Max),
        "all_reduce_buffer" => comm.all_reduce_buffer(&mut owned, ReduceOp::Max),
        "all_gather" => comm.all_gather(&part, &mut whole),
        "broadcast" => comm.broadcast(&mut part, 0),
        "barrier" => comm.barrier(),
        "ping_pong" if comm.rank() == 0 => comm.send(&part, 1).and_then(|()| comm.recv(&mut part, 1)),
        "ping_pong" => comm.recv(&mut part, 0).and_then(|()| comm.send(&part, 0)),
        "start_all_reduce" => {
            let before = comm.runtime().now();
            let pending = comm.start_all_reduce(std::mem::take(&mut part), ReduceOp::Max);
            handed_over.set(handed_over.get() + (comm.runtime().now() - before));
            part = pending.wait()?.into_vec();
            Ok(())
        }
        "poll_all_reduce" => {
            comm.runtime().sleep(Duration::from_millis(1));
            let before = comm.runtime().now();
            let mut pending = comm.start_all_reduce(std::mem::take(&mut part), ReduceOp::Max);
            while !pending.is_done() {
                comm.runtime().yield_now();
            }
            handed_over.set(handed_over.get() + (comm.runtime().now() - before));
            part = pending.wait()?.into_vec();
            Ok(())
        }
        other => panic!("no operation is called {other}"),
    };
    (0..WARM_UPS).try_for_each(|_| call(&mut comm))?;
    handed_over.set(Duration::ZERO);
    let start = comm.runtime().now();
    (0..calls).try_for_each(|_| call(&mut comm))?;
    let spent = comm.runtime().now() - start;
    if comm.rank() == 0 {
        let each = |time: Duration| time.as_secs_f64() * 1e6 / f64::from(calls);
        println!("{operation} of {bytes} B: {:.3} us", each(spent));
        if !handed_over.get().is_zero() {
            let event = if operation.starts_with("poll") { "ended" } else { "handed over" };
            println!("{event} after {:.3} us", each(handed_over.get()));
        }
    }
    Ok(())
}
