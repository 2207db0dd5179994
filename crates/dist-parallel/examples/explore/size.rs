//! The size limit of simulated worlds.

use std::time::Duration;

use dist_collectives::{Communicator, ReduceOp};
use dist_transport::Runtime;
use dist_transport::sim::{Network, SimTransport};

use crate::programs::train;

/// Runs large worlds and prints their times. Returns `false` if one exceeded its limit of time or memory.
pub(crate) fn measure() -> bool {
    let training = timed("64 ranks, 20 steps of data-parallel training of 20,000 numbers", 64, |transport| {
        drop(train(transport, 10_000, 20).expect("nothing goes wrong"));
    });
    let all_reduce = timed("1000 ranks, one all_reduce of 1 MiB", 1000, |transport| {
        let mut comm = Communicator::new(transport);
        let mut values = vec![1.0_f32; 1 << 18];
        comm.all_reduce(&mut values, ReduceOp::Sum).expect("nothing goes wrong");
        assert!(values.iter().all(|value| *value == 1000.0));
    });
    let memory = memory_max();
    println!(
        "at most {} MiB of memory",
        memory.map_or("unknown".to_owned(), |bytes| (bytes >> 20).to_string())
    );
    training && all_reduce && memory.is_none_or(|bytes| bytes < MEMORY_MAX)
}

const TIME_MAX: Duration = Duration::from_secs(10);
const MEMORY_MAX: u64 = 4 << 30;

fn timed(what: &str, world_size: usize, program: fn(SimTransport)) -> bool {
    let clock = Runtime::system();
    let outcome = Network::new(world_size).run(program);
    let time = clock.now();
    println!("{what}: {:.2} s, {} switches", time.as_secs_f64(), outcome.switches);
    time < TIME_MAX
}

/// Returns the peak memory of this process, if the system reports it.
fn memory_max() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib << 10)
}
