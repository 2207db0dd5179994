//! Where the ranks of a job meet, on this machine or on several, and what they are told of it.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use dist_transport::process::{Config, Coordinator};
use dist_transport::runtime::Task;
use dist_transport::{Abort, Runtime};

use super::secret::{SecretFile, own_name};
use crate::Error;
use crate::address::Address;

/// Variables of a surrounding launcher's job that lead elsewhere if this job's ranks see them.
const FOREIGN: [&str; 4] =
    ["DIST_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"];

/// The machines of a job: the same program is started on each of them, with as many ranks.
#[derive(Debug)]
pub(crate) struct Nodes {
    pub(crate) count: usize,
    /// Which of them this is.
    pub(crate) index: usize,
    /// Where the coordinator listens, on the first of them.
    pub(crate) rendezvous: Address,
    /// What the names of its starts begin with.
    pub(crate) job: String,
    /// The secret of the job, which somebody has put on each of them.
    pub(super) secret: Arc<SecretFile>,
}

impl Nodes {
    /// Where a start of the job meets, if it was started so often before.
    pub(super) fn port(&self, restart: u16) -> u16 {
        self.rendezvous.port.checked_add(restart).expect("the last one is a port too")
    }
}

/// How long the coordinator on another machine is looked for to be told that ranks of this one have ended.
const TELL_LIMIT: Duration = Duration::from_secs(60);

/// What all ranks of a job have in common.
#[derive(Debug)]
pub(super) struct Meeting {
    job: String,
    /// How often the job was started before.
    restart: u16,
    world_size: usize,
    address: Address,
    secret: Arc<SecretFile>,
    /// Unless another machine hosts it.
    coordinator: Option<Coordinator>,
}

impl Meeting {
    /// Of a job on this machine alone, which nobody else can join.
    pub(super) fn here(world_size: usize, restart: u16) -> Result<Self, Error> {
        let job = own_name();
        let secret = Arc::new(SecretFile::create(&job)?);
        Self::hosted(&Address { host: "127.0.0.1".to_owned(), port: 0 }, world_size, restart, &job, secret)
    }

    /// Of a job whose coordinator this process hosts. Port 0 is any that is free.
    pub(super) fn hosted(
        at: &Address,
        world_size: usize,
        restart: u16,
        job: &str,
        secret: Arc<SecretFile>,
    ) -> Result<Self, Error> {
        let coordinator =
            Coordinator::start(&at.to_string(), world_size, job, Some(secret.secret().clone()))?;
        let address = Address { host: at.host.clone(), port: coordinator.address().port() };
        let joined = Self::joined(&address, world_size, restart, job, secret);
        Ok(Self { coordinator: Some(coordinator), ..joined })
    }

    /// Of a job whose coordinator another machine hosts.
    pub(super) fn joined(
        at: &Address,
        world_size: usize,
        restart: u16,
        job: &str,
        secret: Arc<SecretFile>,
    ) -> Self {
        Self { job: job.to_owned(), restart, world_size, address: at.clone(), secret, coordinator: None }
    }

    /// Where the ranks meet.
    pub(super) const fn address(&self) -> &Address {
        &self.address
    }

    /// Of a job on several machines. Each start meets at a port of its own: on another machine it may begin while here
    /// the one before has not ended.
    pub(super) fn across(nodes: &Nodes, world_size: usize, restart: u16) -> Result<Self, Error> {
        let job = format!("{}-{restart}", nodes.job);
        let secret = nodes.secret.clone();
        let address = Address { host: nodes.rendezvous.host.clone(), port: nodes.port(restart) };
        if nodes.index > 0 {
            return Ok(Self::joined(&address, world_size, restart, &job, secret));
        }
        let meeting = Self::hosted(&address, world_size, restart, &job, secret)?;
        if let Some(at) = meeting.coordinator.as_ref().map(Coordinator::address)
            && at.ip().is_loopback()
        {
            tracing::warn!(%address, %at, "the job's address is one that no other machine reaches");
        }
        Ok(meeting)
    }

    /// Tells a rank's process where to go, and hides what a surrounding launcher has said about its own job.
    pub(super) fn tell(&self, command: &mut Command) {
        for variable in FOREIGN {
            command.env_remove(variable);
        }
        command.env("WORLD_SIZE", self.world_size.to_string());
        command.env("MASTER_ADDR", &self.address.host).env("MASTER_PORT", self.address.port.to_string());
        command.env("DIST_JOB_ID", &self.job).env("DIST_SECRET_FILE", self.secret.path());
        command.env("DIST_COORDINATOR", "external").env("DIST_RESTART", self.restart.to_string());
    }

    /// Why the job was aborted, if that is known here.
    pub(super) fn aborted(&self) -> Option<Abort> {
        self.coordinator.as_ref()?.aborted()
    }

    /// Tells the coordinator that the processes of these ranks have ended. If it is on another machine, a thread does that,
    /// which is returned.
    pub(super) fn tell_ended(&self, ranks: Vec<usize>, runtime: &Runtime) -> Result<Option<Task<()>>, Error> {
        if let Some(coordinator) = &self.coordinator {
            ranks.into_iter().for_each(|rank| coordinator.record_ended(rank));
            return Ok(None);
        }
        let Some(&first) = ranks.first() else { return Ok(None) };
        let config = Config::new(first, self.world_size, &self.address.to_string())?;
        let config = config.with_external_coordinator().with_job(&self.job).with_timeout(TELL_LIMIT);
        let config = config.with_secret(self.secret.secret().clone());
        let tell = move || {
            if let Err(error) = Coordinator::tell_ended(&config, &ranks) {
                // As when the job is over there, too.
                tracing::debug!(%error, ?ranks, "the coordinator was not told that these ranks have ended");
            }
        };
        runtime.spawn("ended", tell).map(Some).map_err(Error::Thread)
    }

    /// Whether the coordinator is in this process.
    pub(super) const fn is_hosted(&self) -> bool {
        self.coordinator.is_some()
    }

    /// How many ranks would miss the coordinator that this process hosts.
    pub(super) fn present(&self) -> usize {
        self.coordinator.as_ref().map_or(0, Coordinator::present)
    }

    pub(super) const fn world_size(&self) -> usize {
        self.world_size
    }
}
