//! A rank holds no long message that it does not receive. This test has its own binary, because the counting allocator is
//! global.
#![cfg(all(feature = "sim", feature = "shm", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::sync::Arc;

use dist_collectives::transport::process::Medium;
use dist_collectives::{Communicator, Config, Message};
use dist_transport::process::Coordinator;
use dist_transport::runtime::Runtime;
use dist_transport::sim;

const BYTES: usize = 32 << 20;
const MESSAGES: u32 = 10;

/// Sends ten long messages and a short one, which is received first.
fn exchange(mut comm: Communicator) {
    let mut memory = vec![1_u8; BYTES];
    if comm.rank() == 0 {
        let mut messages: Vec<_> =
            (1..=MESSAGES).map(|tag| Message::send(1, &memory).with_tag(tag)).collect();
        messages.push(Message::send(1, &[7_u8]));
        comm.batch(&mut messages).unwrap();
        return;
    }
    let mut short = [0_u8];
    let counted = allocation_counter::measure(|| comm.recv(&mut short, 0).unwrap());
    assert_eq!(short, [7]);
    assert!(counted.bytes_max < 1 << 20, "{} bytes are held", counted.bytes_max);
    let counted = allocation_counter::measure(|| {
        for tag in (1..=MESSAGES).rev() {
            memory.fill(0);
            comm.with_tag(tag).recv(&mut memory, 0).unwrap();
            assert!(memory.iter().all(|byte| *byte == 1));
        }
    });
    // The simulated network holds a message between its clear and its delivery, on the thread of its sender.
    assert!(counted.bytes_max < 1 << 20, "{} bytes are held", counted.bytes_max);
}

#[test]
fn a_rank_that_waits_for_another_message_holds_no_long_one() {
    for medium in [Medium::Tcp, Medium::Shm] {
        let coordinator = Coordinator::start("127.0.0.1:0", 2, "memory", None).unwrap();
        let address = Arc::new(coordinator.address().to_string());
        let runtime = Runtime::system();
        let start = |rank| {
            let address = address.clone();
            let work = move || {
                let config = Config::new(rank, 2, &address).unwrap().with_job("memory");
                let config = config.with_external_coordinator().with_medium(medium);
                exchange(Communicator::join(&config).unwrap());
            };
            runtime.spawn("rank", work).unwrap()
        };
        let ranks: Vec<_> = (0..2).map(start).collect();
        ranks.into_iter().for_each(|rank| rank.join().unwrap());
    }
    let _ = sim::run(1, 2, |transport| exchange(Communicator::new(transport)));
}
