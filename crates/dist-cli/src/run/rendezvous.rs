//! The rendezvous of a job, on this machine or on several, and the environment variables that describe it to
//! the ranks.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use dist_transport::process::{Config, Coordinator};
use dist_transport::runtime::Task;
use dist_transport::{Abort, Runtime};

use super::secret::{SecretFile, own_name};
use crate::Error;
use crate::address::Address;

/// Variables of a surrounding launcher's job, which would mislead the ranks of this job.
const FOREIGN_VARIABLES: [&str; 4] =
    ["DIST_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"];

/// The machines of a job. Each of them starts the same program with the same number of ranks.
#[derive(Debug)]
pub(crate) struct Nodes {
    pub(crate) count: usize,
    /// The index of this machine.
    pub(crate) index: usize,
    /// The address of the coordinator, on the first machine.
    pub(crate) rendezvous: Address,
    /// Common prefix of the names of all starts.
    pub(crate) job: String,
    /// The secret of the job, which the user has copied to each machine.
    pub(super) secret: Arc<SecretFile>,
}

impl Nodes {
    /// Returns the port of a start, given the number of restarts before it.
    pub(super) fn port(&self, restart: u16) -> u16 {
        self.rendezvous.port.checked_add(restart).expect("the last one is a port too")
    }
}

/// Time limit of reporting ended ranks to the coordinator on another machine.
const REPORT_LIMIT: Duration = Duration::from_secs(60);

/// The rendezvous of one start of a job.
#[derive(Debug)]
pub(super) struct Rendezvous {
    job: String,
    /// Number of restarts before this start.
    restart: u16,
    world_size: usize,
    address: Address,
    secret: Arc<SecretFile>,
    /// `None` if another machine hosts the coordinator.
    coordinator: Option<Coordinator>,
}

impl Rendezvous {
    /// Creates the rendezvous of a job on this machine only. No other process can join it.
    pub(super) fn here(world_size: usize, restart: u16) -> Result<Self, Error> {
        let job = own_name();
        let secret = Arc::new(SecretFile::create(&job)?);
        Self::hosted(&Address { host: "127.0.0.1".to_owned(), port: 0 }, world_size, restart, &job, secret)
    }

    /// Creates a rendezvous whose coordinator is in this process. Port 0 selects a free port.
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

    /// Creates a rendezvous whose coordinator is on another machine.
    pub(super) fn joined(
        at: &Address,
        world_size: usize,
        restart: u16,
        job: &str,
        secret: Arc<SecretFile>,
    ) -> Self {
        Self { job: job.to_owned(), restart, world_size, address: at.clone(), secret, coordinator: None }
    }

    /// Returns the address of the coordinator.
    pub(super) const fn address(&self) -> &Address {
        &self.address
    }

    /// Creates the rendezvous of a job on several machines. Each start has a port of its own, because a start
    /// may begin on one machine before the previous start has ended on another.
    pub(super) fn across(nodes: &Nodes, world_size: usize, restart: u16) -> Result<Self, Error> {
        let job = format!("{}-{restart}", nodes.job);
        let secret = nodes.secret.clone();
        let address = Address { host: nodes.rendezvous.host.clone(), port: nodes.port(restart) };
        if nodes.index > 0 {
            return Ok(Self::joined(&address, world_size, restart, &job, secret));
        }
        let rendezvous = Self::hosted(&address, world_size, restart, &job, secret)?;
        if let Some(at) = rendezvous.coordinator.as_ref().map(Coordinator::address)
            && at.ip().is_loopback()
        {
            tracing::warn!(%address, %at, "the job's address is a loopback address, which no other machine can reach");
        }
        Ok(rendezvous)
    }

    /// Sets the variables that describe the job to a rank, and removes those of a surrounding launcher's job.
    pub(super) fn set_env(&self, command: &mut Command) {
        for variable in FOREIGN_VARIABLES {
            command.env_remove(variable);
        }
        command.env("WORLD_SIZE", self.world_size.to_string());
        command.env("MASTER_ADDR", &self.address.host).env("MASTER_PORT", self.address.port.to_string());
        command.env("DIST_JOB_ID", &self.job).env("DIST_SECRET_FILE", self.secret.path());
        command.env("DIST_COORDINATOR", "external").env("DIST_RESTART", self.restart.to_string());
    }

    /// Returns the cause of an abort if the coordinator is in this process and knows it.
    pub(super) fn aborted(&self) -> Option<Abort> {
        self.coordinator.as_ref()?.aborted()
    }

    /// Reports to the coordinator that the processes of these ranks have ended. If the coordinator is on
    /// another machine, a thread sends the report. The thread is returned.
    pub(super) fn report_ended(
        &self,
        ranks: Vec<usize>,
        runtime: &Runtime,
    ) -> Result<Option<Task<()>>, Error> {
        if let Some(coordinator) = &self.coordinator {
            ranks.into_iter().for_each(|rank| coordinator.record_ended(rank));
            return Ok(None);
        }
        let Some(&first) = ranks.first() else { return Ok(None) };
        let config = Config::new(first, self.world_size, &self.address.to_string())?;
        let config = config.with_external_coordinator().with_job(&self.job).with_timeout(REPORT_LIMIT);
        let config = config.with_secret(self.secret.secret().clone());
        let report = move || {
            if let Err(error) = Coordinator::tell_ended(&config, &ranks) {
                // This is also the case if the job on the first machine is over.
                tracing::debug!(%error, ?ranks, "cannot report to the coordinator that these ranks have ended");
            }
        };
        runtime.spawn("ended", report).map(Some).map_err(Error::Thread)
    }

    /// Returns `true` if the coordinator is in this process.
    pub(super) const fn is_hosted(&self) -> bool {
        self.coordinator.is_some()
    }

    /// Returns the number of ranks that still need the coordinator in this process.
    pub(super) fn present(&self) -> usize {
        self.coordinator.as_ref().map_or(0, Coordinator::present)
    }

    pub(super) const fn world_size(&self) -> usize {
        self.world_size
    }
}
