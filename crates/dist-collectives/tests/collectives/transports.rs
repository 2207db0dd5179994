//! Transports that violate their contract: safe code gets an error, and no memory is corrupted.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use dist_collectives::transport::process::Medium;
use dist_collectives::transport::{Fingerprint, Runtime};
use dist_collectives::{Communicator, Config, ReduceOp};
use dist_transport::forwarding::ForwardingTransport;
use dist_transport::process::{Coordinator, ProcessTransport};
use dist_transport::shm_group::ShmGroup;
use dist_transport::{LazyDeadline, Result, Transport};

/// A transport that passes another call to its shared memory than the current one, or returns another group's
/// memory.
#[derive(Debug)]
struct Lying {
    inner: ProcessTransport,
    /// Another group of the same ranks.
    other: Option<Box<dyn Transport>>,
    /// The number of requests for memory.
    asked: usize,
    /// The number of requests after which the other group's memory is returned.
    swaps_at: usize,
}

impl ForwardingTransport for Lying {
    type Inner = ProcessTransport;

    fn inner(&self) -> &Self::Inner {
        &self.inner
    }

    fn inner_mut(&mut self) -> &mut Self::Inner {
        &mut self.inner
    }

    fn begin(&mut self, call: &Fingerprint) {
        // Consecutive calls differ, and no others.
        let mut same = Fingerprint([1; Fingerprint::SIZE]);
        same.0[..8].copy_from_slice(&call.0[..8]);
        self.inner.begin(&same);
        if let Some(other) = &mut self.other {
            (**other).begin(&same);
        }
    }

    fn shm_group(&mut self, due: &LazyDeadline<'_>) -> Result<Option<&mut dyn ShmGroup>> {
        self.asked += 1;
        match &mut self.other {
            Some(other) if self.asked > self.swaps_at => (**other).shm_group(due),
            _ => self.inner.shm_group(due),
        }
    }
}

/// Runs a program on two ranks with this transport; one of them also has another group's memory.
fn run<T: Send + 'static>(
    swaps_at: Option<usize>,
    program: impl Fn(Communicator) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let coordinator = Coordinator::start("127.0.0.1:0", 2, "lies", None).unwrap();
    let address = coordinator.address().to_string();
    let (runtime, program) = (Runtime::system(), Arc::new(program));
    let start = |rank| {
        let config = Config::new(rank, 2, &address).unwrap();
        let config = config.with_job("lies").with_external_coordinator().with_medium(Medium::Shm);
        let program = program.clone();
        let work = move || {
            let mut inner = ProcessTransport::join(&config).unwrap();
            let due = inner.runtime().deadline(Duration::from_secs(60)).into();
            let other = swaps_at.map(|_| inner.fork(&[0, 1]).unwrap().unwrap()).map(|mut other| {
                (*other).begin(&Fingerprint([2; Fingerprint::SIZE]));
                (*other).shm_group(&due).unwrap().unwrap();
                other
            });
            let swaps_at = swaps_at.unwrap_or(usize::MAX);
            let transport = Lying { inner, other, asked: 0, swaps_at };
            let mut comm = Communicator::new(transport);
            comm.set_timeout(Duration::from_secs(10));
            program(comm)
        };
        runtime.spawn("rank", work).unwrap()
    };
    let direct_calls: Vec<_> = (0..2).map(start).collect();
    direct_calls.into_iter().map(|task| task.join().unwrap()).collect()
}

#[test]
fn differing_calls_are_detected_with_any_error_of_the_transport() {
    // The transport sees the same call each time, in the flag line, in slots and in allocated memory.
    for len in [1, 20_000, 1 << 20] {
        let outcomes = run(None, move |mut comm| {
            let mut buffer = comm.alloc::<f32>(len).unwrap();
            comm.all_reduce_buffer(&mut buffer, ReduceOp::Sum).unwrap();
            // The next call is different.
            if comm.rank() == 0 {
                comm.all_reduce_buffer(&mut buffer, ReduceOp::Sum).is_err()
            } else {
                let mut other = comm.alloc::<f32>(len + 1).unwrap();
                comm.all_reduce_buffer(&mut other, ReduceOp::Sum).is_err()
            }
        });
        assert_eq!(outcomes, [true; 2], "{len}");
    }
}

#[test]
fn an_open_window_is_read_and_closed_in_its_own_memory_only() {
    let opened = AtomicUsize::new(0);
    // The program allocates memory in order to determine what is shared, and to open the window.
    let outcomes = run(Some(2), move |mut comm| {
        let mut buffer = comm.alloc::<u32>(1000).unwrap();
        buffer.fill(7);
        let mut window = comm.open(buffer).unwrap();
        // If a rank leaves before the other has opened its window, the other gets an error too.
        opened.fetch_add(1, Ordering::Relaxed);
        while opened.load(Ordering::Relaxed) < 2 {
            std::thread::yield_now();
        }
        let read = window.read(1 - window.rank(), 0, &mut [0; 10]);
        let closed = window.close();
        let kept = closed.as_ref().is_err_and(|failed| *failed.buffer == [7; 1000]);
        (read.is_err(), kept)
    });
    assert_eq!(outcomes, [(true, true); 2]);
}
