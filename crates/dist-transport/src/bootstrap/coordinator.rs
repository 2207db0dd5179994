//! The coordinator, at which the ranks of a job join, and which tells all ranks if one of them dies.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::bootstrap::abort_state::Waker;
use crate::bootstrap::acceptor::{Acceptor, ListenerKind};
use crate::bootstrap::auth::{Key, Secret};
use crate::bootstrap::config::{Config, TIMEOUT_DEFAULT};
use crate::bootstrap::rendezvous_server::{EndedRanks, Present, RendezvousServer, Worlds};
use crate::bootstrap::session::lock;
use crate::bootstrap::{files, rendezvous};
use crate::link::socket;
use crate::runtime::Task;
use crate::{Abort, Error, Result, Runtime};

/// The number of the coordinator in handshakes.
pub(crate) const COORDINATOR: u32 = u32::MAX;

/// The time for which the coordinator of an aborted job outlives the rank that hosts it.
pub(crate) const LATE_RANKS_LIMIT: Duration = Duration::from_secs(1);

/// A coordinator for one job, on its own thread. It ends when it is dropped.
///
/// Once all ranks of a world have left in order, the next world of the job, of the same size, can join at the
/// same address. After an abort there is no next world; ranks that join are told why.
#[derive(Debug)]
pub struct Coordinator {
    address: SocketAddr,
    stop: Arc<Waker>,
    abort_state: Arc<Mutex<Option<Abort>>>,
    present: Arc<Present>,
    ended: Arc<EndedRanks>,
    task: Option<Task<()>>,
}

impl Coordinator {
    /// Starts the coordinator of `job` at `address` (`host:port`; port 0 for any free port). A name is looked
    /// up for at most 60 seconds.
    ///
    /// # Errors
    /// If the address cannot be listened on, or lies beyond loopback and there is no secret.
    pub fn start(address: &str, world_size: usize, job: &str, secret: Option<Secret>) -> Result<Self> {
        let runtime = Runtime::system();
        let wanted = socket::resolve(address, &runtime, runtime.deadline(TIMEOUT_DEFAULT))?;
        let key = Key::new(secret.as_ref(), job);
        // Rank 0 checks its own limit once it has a coordinator that tells the others.
        files::check_limit(world_size, world_size)?;
        Self::start_epoch(&runtime, Worlds::InTurn, &wanted, world_size, &key, 0, secret)
    }

    /// Starts the coordinator at the first of these addresses that this machine has.
    pub(crate) fn start_epoch(
        runtime: &Runtime,
        worlds: Worlds,
        wanted: &[SocketAddr],
        world_size: usize,
        key: &Key,
        epoch: u32,
        secret: Option<Secret>,
    ) -> Result<Self> {
        if world_size == 0 || u32::try_from(world_size).is_err() {
            return Err(Error::RankOutOfRange { rank: 0, world_size });
        }
        let (listener, address) = socket::listen_on_any(wanted, secret.as_ref())?;
        let (stop, abort_state, present) = (Arc::new(Waker::new()?), Arc::default(), Arc::default());
        let ended = Arc::new(EndedRanks::new()?);
        let acceptor =
            Acceptor::new(ListenerKind::Network, listener.into(), key.clone(), epoch, runtime.clone());
        let mut rendezvous_server = RendezvousServer::new(
            acceptor,
            worlds,
            world_size,
            Arc::clone(&abort_state),
            Arc::clone(&present),
            runtime,
        )
        .with_ended(Arc::clone(&ended));
        let stopped = stop.clone();
        let task = runtime
            .spawn("dist-coordinator", move || while !rendezvous_server.run_once(&stopped) {})
            .map_err(|source| Error::Resources { what: "thread", source })?;
        Ok(Self { address, stop, abort_state, present, ended, task: Some(task) })
    }

    /// Returns the address that ranks connect to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns why the job was aborted, if it was: the record that every rank gets.
    pub fn aborted(&self) -> Option<Abort> {
        lock(&self.abort_state).clone()
    }

    /// Returns the number of ranks that still need the coordinator. Before all ranks have joined it is 0.
    /// Afterwards it counts the ranks that have not left or failed.
    pub fn present(&self) -> usize {
        self.present.all.load(Ordering::Acquire)
    }

    /// Records that a launcher has seen the process of a rank end, so that the rank cannot join any more. Ranks
    /// that wait for it, or join later, get an error at once.
    pub fn record_ended(&self, rank: usize) {
        if let Ok(rank) = u32::try_from(rank) {
            self.ended.push(rank);
        }
    }

    /// Reports ended ranks like [`record_ended`](Self::record_ended) to a coordinator on another machine. A
    /// launcher calls it for the ranks that it started. The config of one of them contains the address and the
    /// time limit.
    ///
    /// # Errors
    /// If the coordinator cannot be reached.
    pub fn tell_ended(config: &Config, ranks: &[usize]) -> Result<()> {
        rendezvous::tell_ended(config, ranks)
    }

    /// Serves for [`LATE_RANKS_LIMIT`] after the hosting rank has given up, so that ranks which join late get
    /// the reason.
    pub(crate) fn serve_late_ranks(mut self, runtime: &Runtime) {
        if let Some(task) = self.task.take() {
            self.task = task.join_by(runtime.deadline(LATE_RANKS_LIMIT)).err();
        }
    }

    /// Serves until every rank has left or failed. After an abort it serves only until the ranks should have
    /// received the record.
    ///
    /// If all remaining ranks are threads of this process, the limit is the same, because the thread that drops
    /// rank 0 may own them. The coordinator's thread then serves on until they have left, or the process ends.
    /// `is_aborted` tells of aborts that the coordinator does not decide about.
    pub(crate) fn serve_until_left(mut self, runtime: &Runtime, is_aborted: impl Fn() -> bool) {
        let mut limit = runtime.deadline(LATE_RANKS_LIMIT);
        while let Some(task) = self.task.take() {
            let is_needed_elsewhere = self.present.elsewhere.load(Ordering::Acquire) > 0;
            self.task = task.join_by(runtime.deadline(LATE_RANKS_LIMIT / 10)).err();
            match self.aborted().is_some() || is_aborted() {
                false if is_needed_elsewhere => limit = runtime.deadline(LATE_RANKS_LIMIT),
                false if runtime.expired(limit) => {
                    // Its thread is not stopped.
                    self.task = None;
                }
                true if runtime.expired(limit) => return,
                _ => {}
            }
        }
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            self.stop.notify();
            let _ = task.join();
        }
    }
}
