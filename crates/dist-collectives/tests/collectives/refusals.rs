//! The system has no thread, or the transport no fork, for operations that do not block.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use dist_collectives::error::TransportError;
use dist_collectives::transport::{Runtime, Transport};
use dist_collectives::{Communicator, Error, ReduceOp};
use dist_transport::forwarding::ForwardingTransport;
use dist_transport::runtime::{Executor, Unparker, Wake};
use dist_transport::sim;

/// The system's threads, except the first one that rank 0 asks for.
struct Reluctant {
    system: Runtime,
    refused: AtomicUsize,
}

impl Executor for Reluctant {
    fn name(&self) -> &'static str {
        "reluctant"
    }

    fn now(&self) -> Duration {
        self.system.now()
    }

    fn spawn(&self, name: &str, work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
        if name == "dist-worker-0" && self.refused.fetch_add(1, Ordering::Relaxed) == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.system.spawn(name, work).map(drop)
    }

    fn park(&self, until: Option<Duration>) {
        let now = self.system.now();
        self.system.park(until.map(|until| self.system.deadline(until.saturating_sub(now))));
    }

    fn current(&self) -> Arc<dyn Wake> {
        Arc::new(Waker(self.system.unparker()))
    }

    fn yield_now(&self) {
        self.system.yield_now();
    }
}

struct Waker(Unparker);

impl Wake for Waker {
    fn wake(&self) {
        self.0.unpark();
    }
}

#[test]
fn a_thread_that_cannot_be_started_ends_the_job_and_makes_no_fork() {
    let executor = Reluctant { system: Runtime::system(), refused: AtomicUsize::new(0) };
    let runtime = Runtime::new(Arc::new(executor));
    let [mut left, mut right]: [Communicator; 2] = sim::network(&runtime, 2)
        .into_iter()
        .map(Communicator::new)
        .collect::<Vec<_>>()
        .try_into()
        .expect("a world of two");
    let start =
        |comm: &mut Communicator| *comm.start_all_reduce(vec![1_u8], ReduceOp::Sum).wait().unwrap_err().error;
    let error = start(&mut left);
    assert!(
        matches!(&error, Error::Worker(source) if source.kind() == io::ErrorKind::WouldBlock),
        "{error:?}"
    );
    for comm in [&mut left, &mut right] {
        let error = start(comm);
        assert!(matches!(error, Error::Aborted { rank: 0, .. }), "{error:?}");
    }
    assert_eq!(left.fork().unwrap().channel(), right.fork().unwrap().channel());
}

/// A transport that refuses to be forked and counts the attempts.
struct Single {
    transport: sim::SimTransport,
    asked: Arc<AtomicUsize>,
}

impl fmt::Debug for Single {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Single")
    }
}

impl ForwardingTransport for Single {
    type Inner = sim::SimTransport;

    fn inner(&self) -> &Self::Inner {
        &self.transport
    }

    fn inner_mut(&mut self) -> &mut Self::Inner {
        &mut self.transport
    }

    fn fork(&mut self, members: &[usize]) -> Result<Option<Box<dyn Transport>>, TransportError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        Err(TransportError::Members { members: members.to_vec() })
    }
}

#[test]
fn a_transport_without_a_fork_is_asked_once_and_blocking_collectives_work() {
    let outcome = sim::run(1, 1, |transport| {
        let asked = Arc::new(AtomicUsize::new(0));
        let mut comm = Communicator::new(Single { transport, asked: Arc::clone(&asked) });
        let mut sum = [1_u8];
        comm.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [1]);
        for _ in 0..2 {
            let failed = comm.start_all_reduce(vec![7_u8], ReduceOp::Sum).wait().unwrap_err();
            assert!(matches!(*failed.error, Error::NoWorker(_)), "{failed:?}");
            assert!(std::error::Error::source(&failed).unwrap().to_string().starts_with("[0] is no list"));
            assert_eq!(failed.buffer.into_vec(), [7]);
        }
        assert!(matches!(comm.send(&[1_u8], 0), Err(Error::NoMessages(_))));
        asked.load(Ordering::Relaxed)
    });
    assert_eq!(outcome.results, [1]);
}
