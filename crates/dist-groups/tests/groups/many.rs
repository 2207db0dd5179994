//! Ten thousand groups are created and dropped: the resources of the process afterwards.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::time::Duration;

use dist_collectives::{Communicator, ReduceOp};
use dist_groups::{Group, Mesh};

use crate::worlds::{Dice, gathered, in_processes};

/// Creates and drops groups of all kinds, and uses one in fifty.
fn make_and_drop(world: &mut Communicator, numbers: std::ops::Range<u64>) {
    let world_size = world.world_size();
    for number in numbers {
        let members = Dice(number).members(world_size);
        let used = number.is_multiple_of(50);
        let Some(mut group) = Group::new(world, &members).unwrap() else { continue };
        assert!(!used || gathered(&mut group).len() == members.len());
        if number.is_multiple_of(500) {
            let mut all = Mesh::new(group.into_communicator(), [("data", members.len())]).unwrap();
            let group = all.axis("data").unwrap();
            let pending = group.start_all_reduce(vec![1_u64; 100], ReduceOp::Sum);
            assert_eq!(pending.wait().unwrap().into_vec(), [members.len() as u64; 100]);
        }
    }
}

/// The resources of a process.
#[derive(Debug)]
struct Held {
    descriptors: usize,
    threads: usize,
    resident_bytes: u64,
}

/// Maximum loss per group. Memory is measured in pages, and the allocator keeps some. A group needs more than ten
/// times this.
const LOST_BYTES_MAX: u64 = 100;

impl Held {
    /// Measures while no rank does anything and at most this many threads exist: a worker thread may still be
    /// ending after it was waited for.
    fn in_peace(world: &mut Communicator, threads_max: usize) -> Self {
        world.barrier().unwrap();
        let runtime = world.runtime().clone();
        let limit = runtime.deadline(Duration::from_secs(10));
        let mut held = Self::now();
        while held.threads > threads_max && !runtime.expired(limit) {
            runtime.yield_now();
            held = Self::now();
        }
        world.barrier().unwrap();
        held
    }

    fn now() -> Self {
        let count = |folder| std::fs::read_dir(folder).expect("Linux has it").count();
        let status = std::fs::read_to_string("/proc/self/status").expect("Linux has it");
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("Linux says it");
        let kib = line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok());
        Self {
            descriptors: count("/proc/self/fd"),
            threads: count("/proc/self/task"),
            resident_bytes: 1024 * kib.expect("a number of KiB"),
        }
    }
}

#[test]
fn ten_thousand_groups_leave_descriptors_threads_and_memory_as_they_were() {
    let name = "many::ten_thousand_groups_leave_descriptors_threads_and_memory_as_they_were";
    in_processes(3, name, |world| {
        // The first groups fill memory that is kept between calls.
        make_and_drop(world, 0..2000);
        let before = Held::in_peace(world, usize::MAX);
        make_and_drop(world, 2000..12_000);
        let after = Held::in_peace(world, before.threads);
        assert_eq!(after.descriptors, before.descriptors);
        assert_eq!(after.threads, before.threads);
        let grown = after.resident_bytes.saturating_sub(before.resident_bytes);
        assert!(grown < 10_000 * LOST_BYTES_MAX, "{before:?}, then {after:?}");
    });
}
