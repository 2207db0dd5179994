//! The configuration by which a process finds its job.

use std::env;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use crate::bookkeeping::{LIVENESS_BETWEEN_HOSTS, LIVENESS_ON_HOST};
use crate::bootstrap::address;
use crate::bootstrap::auth::Secret;
use crate::link::striped_socket::SOCKETS_MAX;
use crate::shm_group::Reach;
use crate::{Error, Rank, Result};

pub(crate) const TIMEOUT_DEFAULT: Duration = Duration::from_secs(60);

/// The rank of this process, the address of the coordinator, and the settings of the job.
#[derive(Debug, Clone)]
pub struct Config {
    pub(crate) rank: Rank,
    pub(crate) coordinator: String,
    pub(crate) host: CoordinatorHost,
    pub(crate) secret: Option<Secret>,
    pub(crate) job: String,
    pub(crate) epoch: u32,
    pub(crate) timeout: Duration,
    /// The longest time without a heartbeat of a process, if the job sets a limit.
    pub(crate) liveness: Option<Duration>,
    /// The name of this machine, if the user gives one.
    pub(crate) host_id: Option<String>,
    pub(crate) medium: Medium,
    pub(crate) reach: Reach,
    pub(crate) sockets_per_peer: u16,
    pub(crate) warns_of_threads: bool,
}

/// The medium that carries messages between the processes of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Medium {
    /// Shared memory between two ranks that can share it, TCP between others.
    #[default]
    Auto,
    /// TCP only.
    Tcp,
    /// Shared memory only. A pair of ranks that cannot share memory fails.
    Shm,
}

impl Medium {
    /// Returns `auto`, `tcp` or `shm`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Tcp => "tcp",
            Self::Shm => "shm",
        }
    }

    fn parse(name: &str) -> Option<Self> {
        [Self::Auto, Self::Tcp, Self::Shm].into_iter().find(|medium| medium.name() == name)
    }
}

/// The process that hosts the coordinator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CoordinatorHost {
    /// Rank 0, in its own process.
    RankZero,
    /// The launcher.
    Launcher,
}

impl Config {
    /// Creates the configuration of rank `rank` of `world_size` processes. Rank 0 hosts the coordinator at
    /// `coordinator` (`host:port`).
    ///
    /// # Errors
    /// If `rank` is not below `world_size`, or if the address is malformed and there are several ranks.
    pub fn new(rank: usize, world_size: usize, coordinator: &str) -> Result<Self> {
        let rank = Rank::new(rank, world_size).ok_or(Error::RankOutOfRange { rank, world_size })?;
        if world_size > 1 && address::split(coordinator).is_none_or(|(_, port)| port == 0) {
            return Err(Error::InvalidAddress { address: coordinator.to_owned() });
        }
        Ok(Self {
            rank,
            coordinator: coordinator.to_owned(),
            host: CoordinatorHost::RankZero,
            secret: None,
            job: "dist".to_owned(),
            epoch: 0,
            timeout: TIMEOUT_DEFAULT,
            liveness: None,
            host_id: None,
            medium: Medium::Auto,
            reach: Reach::Write,
            sockets_per_peer: 1,
            warns_of_threads: true,
        })
    }

    /// Reads the configuration from the environment that `distctl run` or torchrun sets.
    ///
    /// Required: `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`. Optional:
    ///
    /// - `DIST_SECRET_FILE`: a private file, or `fd:N`.
    /// - `DIST_JOB_ID`, else `TORCHELASTIC_RUN_ID`: the name of the job.
    /// - `DIST_PORT`: the coordinator's port, in place of `MASTER_PORT`.
    /// - `DIST_COORDINATOR=external`: the launcher hosts the coordinator.
    /// - `DIST_HOST_ID`: see [`with_host_id`](Self::with_host_id).
    /// - `DIST_TRANSPORT` (`auto`, `tcp` or `shm`): see [`with_medium`](Self::with_medium).
    /// - `DIST_SHM_CMA` (`on`, `read` or `off`): see [`with_reach`](Self::with_reach).
    /// - `DIST_SOCKETS_PER_PEER` (1 to 64): see [`with_sockets_per_peer`](Self::with_sockets_per_peer).
    /// - `DIST_LIVENESS` (seconds): see [`with_liveness`](Self::with_liveness).
    /// - `TORCHELASTIC_RESTART_COUNT`, if rank 0 hosts the coordinator.
    ///
    /// If neither `RANK` nor `WORLD_SIZE` is set, the world has one rank, unless another launcher started
    /// several processes. The launchers known by their variables are Open MPI's mpirun
    /// (`OMPI_COMM_WORLD_RANK`, `OMPI_COMM_WORLD_SIZE`), MPICH, Intel MPI and relatives (`PMI_RANK`,
    /// `PMI_SIZE`), and srun (`SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`). They give no address, so `MASTER_ADDR`
    /// and `MASTER_PORT` have to be set for all ranks. A program that calls `dist::init` and was built with the feature
    /// `mpi` of `dist` needs none, because its ranks meet through MPI.
    ///
    /// Under torchrun, whose agent holds `MASTER_PORT`, the coordinator's port is 10,000 lower. If
    /// `MASTER_PORT` is below 11,024, it is 10,000 higher.
    ///
    /// # Errors
    /// If a variable is missing or invalid.
    pub fn from_env() -> Result<Self> {
        Self::from_variables(from_process)
    }

    /// Returns `true` if the environment describes a rank of a job. Otherwise [`from_env`](Self::from_env)
    /// returns a world of one rank.
    pub fn is_in_env() -> bool {
        Variables(|name: &str| env::var(name).ok()).names_of_rank().is_some()
    }

    fn from_variables(get: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let variables = Variables(get);
        let Some([rank, world_size]) = variables.names_of_rank() else { return Self::new(0, 1, "") };
        let rank = variables.number(rank)?;
        let world_size = variables.number(world_size)?;
        let coordinator = match world_size {
            1 => String::new(),
            _ => format!("{}:{}", variables.host()?, variables.port()?),
        };
        let mut config = Self::new(rank, world_size, &coordinator)?;
        if let Some(job) = variables.name("DIST_JOB_ID")?.or(variables.name("TORCHELASTIC_RUN_ID")?) {
            config.job = job;
        }
        config.secret = variables.secret()?;
        if let Some(value) = variables.get("DIST_COORDINATOR") {
            config.host = match value.as_str() {
                "external" => CoordinatorHost::Launcher,
                "rank0" => CoordinatorHost::RankZero,
                _ => {
                    let expected = "external or rank0";
                    return Err(Error::InvalidVariable { name: "DIST_COORDINATOR", value, expected });
                }
            };
        }
        let mut config = config.with_settings(&variables)?;
        // A launcher that hosts the coordinator has a new one for each start, and passes no epoch to it.
        if config.host == CoordinatorHost::RankZero && variables.get("TORCHELASTIC_RESTART_COUNT").is_some() {
            config.epoch = variables.number("TORCHELASTIC_RESTART_COUNT")?;
        }
        Ok(config)
    }

    /// Applies the variables that do not tell which rank this is: `DIST_HOST_ID`, `DIST_TRANSPORT`, `DIST_SHM_CMA`,
    /// `DIST_SOCKETS_PER_PEER` and `DIST_LIVENESS`. [`from_env`](Self::from_env) reads them too. A program whose ranks find
    /// each other in its own way calls this after [`new`](Self::new).
    ///
    /// # Errors
    /// If a variable is invalid.
    pub fn with_env_settings(self) -> Result<Self> {
        self.with_settings(&Variables(from_process))
    }

    fn with_settings(self, variables: &Variables<impl Fn(&str) -> Option<String>>) -> Result<Self> {
        let mut config = self;
        if let Some(host) = variables.name("DIST_HOST_ID")? {
            config = config.with_host_id(&host);
        }
        if let Some(value) = variables.get("DIST_TRANSPORT") {
            let expected = match value.as_str() {
                "mpi" => {
                    "auto, tcp or shm: mpi is for a program that joins with dist::init and the feature mpi of dist"
                }
                _ => "auto, tcp or shm",
            };
            let invalid = |value| Error::InvalidVariable { name: "DIST_TRANSPORT", value, expected };
            config.medium = Medium::parse(&value).ok_or_else(|| invalid(value))?;
        }
        if let Some(value) = variables.get("DIST_SHM_CMA") {
            config.reach = match &*value {
                "on" => Reach::Write,
                "read" => Reach::Read,
                "off" => Reach::Slots,
                _ => {
                    let expected = "on, read or off";
                    return Err(Error::InvalidVariable { name: "DIST_SHM_CMA", value, expected });
                }
            };
        }
        if let Some(value) = variables.get("DIST_SOCKETS_PER_PEER") {
            let Some(sockets) = value.parse().ok().filter(|sockets| (1..=SOCKETS_MAX).contains(sockets))
            else {
                let expected = "a number from 1 to 64";
                return Err(Error::InvalidVariable { name: "DIST_SOCKETS_PER_PEER", value, expected });
            };
            config = config.with_sockets_per_peer(sockets);
        }
        if let Some(value) = variables.get("DIST_LIVENESS") {
            let seconds = value.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
            let Some(liveness) = seconds.filter(|&liveness| liveness >= LIVENESS_ON_HOST) else {
                let expected = "a number of seconds, at least 2";
                return Err(Error::InvalidVariable { name: "DIST_LIVENESS", value, expected });
            };
            config.liveness = Some(liveness);
        }
        Ok(config)
    }

    /// Sets the secret that all processes of the job share. Without a secret, ranks can listen only on
    /// loopback.
    #[must_use]
    pub fn with_secret(self, secret: Secret) -> Self {
        Self { secret: Some(secret), ..self }
    }

    /// Sets the job's name, which is the same on every rank. Processes of another job are refused.
    #[must_use]
    pub fn with_job(self, job: &str) -> Self {
        Self { job: job.to_owned(), ..self }
    }

    /// Sets how long all ranks may take to join. The default is 60 seconds.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Sets the longest time without a message between this process and the coordinator before the job ends.
    /// The default is 2 seconds if both run on one host, and 10 seconds between hosts. The minimum is 2
    /// seconds.
    ///
    /// The job survives a shorter silence of the network or of a process. Between hosts it is also the time
    /// after which two ranks that cannot reach each other end the job, even if the coordinator reaches both.
    /// A process that dies is normally noticed at once. Set a larger value if a process is stopped for a
    /// while, as by a debugger. Calls still end by their deadlines.
    #[must_use]
    pub fn with_liveness(self, liveness: Duration) -> Self {
        Self { liveness: Some(liveness.max(LIVENESS_ON_HOST)), ..self }
    }

    /// Returns the longest time without a heartbeat from a process on this host, or on another one.
    pub(crate) fn liveness(&self, is_on_host: bool) -> Duration {
        let default = if is_on_host { LIVENESS_ON_HOST } else { LIVENESS_BETWEEN_HOSTS };
        self.liveness.unwrap_or(default)
    }

    /// Lets the launcher host the coordinator, in place of rank 0.
    #[must_use]
    pub fn with_external_coordinator(self) -> Self {
        Self { host: CoordinatorHost::Launcher, ..self }
    }

    /// Sets the name of this host. Processes with the same name share a host. Without a name, a host is known
    /// by the boot id of its system, or else by its node name.
    #[must_use]
    pub fn with_host_id(self, id: &str) -> Self {
        Self { host_id: Some(id.to_owned()), ..self }
    }

    /// Sets the medium of messages. The default is [`Medium::Auto`].
    #[must_use]
    pub fn with_medium(self, medium: Medium) -> Self {
        Self { medium, ..self }
    }

    /// Sets the access that other ranks of this host have to this process's ordinary memory, by the system's
    /// cross-memory attach (`process_vm_readv` and `process_vm_writev`). The default is the access that the
    /// system allows. The ranks of a group probe it and agree on the least.
    #[must_use]
    pub fn with_reach(self, reach: Reach) -> Self {
        Self { reach, ..self }
    }

    /// Sets the number of TCP connections between two ranks, from 1 to 64. The default is 1. A smaller or larger number is
    /// replaced by the nearest allowed one. All ranks need the same number, or they fail to join with
    /// [`Error::OtherSocketsPerPeer`].
    ///
    /// Set several if ranks are far apart and the link is fast. The system limits the bytes that one connection may have in
    /// flight, often to less than 4 MiB; with a round trip of 100 ms that is at most 42 MB/s for each connection. Messages
    /// of more than 64 KiB are cut into segments of 64 KiB that go over all connections in turn. Shorter messages go over
    /// the first connection. Each connection is authenticated by its own handshake and uses a descriptor of both
    /// processes, and each group has its own connections. Ranks that share memory are not affected.
    #[must_use]
    pub fn with_sockets_per_peer(self, sockets: usize) -> Self {
        let sockets_per_peer = u16::try_from(sockets.clamp(1, SOCKETS_MAX)).expect("it is at most 64");
        Self { sockets_per_peer, ..self }
    }

    /// Sets whether this process logs a warning if it has more threads of rayon than its share of the cores. The default is
    /// `true`. A program that computes with threads of another library, such as PyTorch, sets `false`.
    #[must_use]
    pub fn with_thread_warning(self, warns: bool) -> Self {
        Self { warns_of_threads: warns, ..self }
    }

    /// Returns the medium of messages.
    pub fn medium(&self) -> Medium {
        self.medium
    }

    /// Returns the number of TCP connections between two ranks.
    pub fn sockets_per_peer(&self) -> usize {
        self.sockets_per_peer.into()
    }

    /// Returns this process's rank and the size of the world.
    pub fn rank(&self) -> Rank {
        self.rank
    }
}

/// Variables of other launchers for a process's rank and the number of ranks: Open MPI, MPICH and its
/// relatives, and a Slurm step. A Slurm batch script runs once and has no number of ranks of the step.
const RANKS_OF_OTHERS: [[&str; 2]; 3] = [
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
    ["PMI_RANK", "PMI_SIZE"],
    ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"],
];

/// Returns the coordinator's port if torchrun's agent holds `MASTER_PORT`. It is far from `MASTER_PORT`,
/// since the ports of several jobs on one machine often are consecutive. It is below it, since the system
/// assigns high ports at any time.
const fn beside_agent(port: u16) -> u16 {
    const DISTANCE: u16 = 10_000;
    const PRIVILEGED_MAX: u16 = 1023;
    if port > PRIVILEGED_MAX + DISTANCE { port - DISTANCE } else { port + DISTANCE }
}

struct Variables<F>(F);

/// Returns a variable of this process. A value that is not text is no valid value, and the error says so.
fn from_process(name: &str) -> Option<String> {
    env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

impl<F: Fn(&str) -> Option<String>> Variables<F> {
    /// Returns the names of the variables for the rank and the number of ranks, if they are set for several
    /// processes, or as `RANK` and `WORLD_SIZE`.
    fn names_of_rank(&self) -> Option<[&'static str; 2]> {
        const NAMES: [&str; 2] = ["RANK", "WORLD_SIZE"];
        // A pod of an Indexed Job of Kubernetes. The number of pods is in no variable, so the user sets WORLD_SIZE.
        const INDEXED: [&str; 2] = ["JOB_COMPLETION_INDEX", "WORLD_SIZE"];
        if self.get("RANK").is_none() && INDEXED.iter().all(|name| self.get(name).is_some()) {
            return Some(INDEXED);
        }
        if NAMES.iter().any(|name| self.get(name).is_some()) {
            return Some(NAMES);
        }
        let several = |[_, size]: &[&str; 2]| self.get(size).is_some_and(|size| size != "1");
        RANKS_OF_OTHERS.into_iter().find(several)
    }

    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.is_empty())
    }

    fn required(&self, name: &'static str) -> Result<String> {
        self.get(name).ok_or(Error::MissingVariable { name })
    }

    fn number<T: FromStr>(&self, name: &'static str) -> Result<T> {
        let value = self.required(name)?;
        value.parse().map_err(|_| Error::InvalidVariable { name, value, expected: "a number" })
    }

    /// Returns the coordinator's host from `MASTER_ADDR`, in the form that precedes a port.
    fn host(&self) -> Result<String> {
        let (name, expected) = ("MASTER_ADDR", address::HOST);
        let value = self.required(name)?;
        address::before_port(&value).ok_or(Error::InvalidVariable { name, value, expected })
    }

    /// Reads a name that is compared between processes. Blanks at its ends and control characters are errors,
    /// because they would be hard to see.
    fn name(&self, name: &'static str) -> Result<Option<String>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        if value.trim() == value && !value.contains(char::is_control) {
            return Ok(Some(value));
        }
        let expected = "a name: it must have no blanks around it and no control characters";
        Err(Error::InvalidVariable { name, value, expected })
    }

    /// Reads the secret from the file that `DIST_SECRET_FILE` names. An empty variable is an error, because the
    /// user intended to set a secret.
    fn secret(&self) -> Result<Option<Secret>> {
        let name = "DIST_SECRET_FILE";
        let Some(value) = (self.0)(name) else { return Ok(None) };
        if value.is_empty() || value.trim() != value || value.contains(char::is_control) {
            let expected = "the path of a file, or fd:N: it must have no blanks around it";
            return Err(Error::InvalidVariable { name, value, expected });
        }
        Secret::from_file(Path::new(&value)).map(Some).map_err(|error| match error {
            Error::Secret { reason, source, .. } => {
                Error::Secret { origin: format!("{name}={value:?}"), reason, source }
            }
            error => error,
        })
    }

    fn port(&self) -> Result<u16> {
        let own = self.get("DIST_PORT").is_some();
        let name = if own { "DIST_PORT" } else { "MASTER_PORT" };
        let text = self.required(name)?;
        let Some(port) = text.parse().ok().filter(|&port: &u16| port > 0) else {
            let expected = "a port from 1 to 65535";
            return Err(Error::InvalidVariable { name, value: text, expected });
        };
        if own {
            return Ok(port);
        }
        let taken = self.get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|used| used == "True");
        Ok(if taken { beside_agent(port) } else { port })
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn parse(variables: &[(&str, &str)]) -> Result<Config> {
        Config::from_variables(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    const JOB: [(&str, &str); 4] =
        [("RANK", "1"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")];

    #[test]
    fn an_empty_environment_is_a_world_of_one() {
        assert_eq!(parse(&[]).unwrap().rank(), Rank::new(0, 1).unwrap());
    }

    #[rstest]
    #[case(&[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2")], 1, 2)]
    #[case(&[("PMI_RANK", "1"), ("PMI_SIZE", "2")], 1, 2)]
    #[case(&[("SLURM_PROCID", "1"), ("SLURM_STEP_NUM_TASKS", "2")], 1, 2)]
    #[case::as_the_user_says(&[("PMI_RANK", "1"), ("PMI_SIZE", "2"), JOB[0], JOB[1]], 1, 4)]
    #[case::a_pod(&[("JOB_COMPLETION_INDEX", "1"), ("WORLD_SIZE", "2")], 1, 2)]
    #[case::a_pod_with_a_rank(&[("JOB_COMPLETION_INDEX", "0"), JOB[0], JOB[1]], 1, 4)]
    #[case::a_step_of_one(&[("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1")], 0, 1)]
    #[case::a_batch_script(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")], 0, 1)]
    fn the_variables_of_other_launchers_are_read(
        #[case] words: &[(&str, &str)],
        #[case] rank: usize,
        #[case] world_size: usize,
    ) {
        let config = parse(&[words, &JOB[2..]].concat()).unwrap();
        assert_eq!(config.rank(), Rank::new(rank, world_size).unwrap());
    }

    #[rstest]
    #[case(&[], "127.0.0.1:29500")]
    #[case(&[("DIST_PORT", "7000")], "127.0.0.1:7000")]
    #[case(&[("TORCHELASTIC_USE_AGENT_STORE", "True")], "127.0.0.1:19500")]
    #[case(&[("TORCHELASTIC_USE_AGENT_STORE", "True"), ("DIST_PORT", "7000")], "127.0.0.1:7000")]
    #[case(&[("TORCHELASTIC_USE_AGENT_STORE", "False")], "127.0.0.1:29500")]
    fn the_place_of_the_coordinator_depends_on_the_launcher(
        #[case] more: &[(&str, &str)],
        #[case] expected: &str,
    ) {
        let config = parse(&[&JOB[..], more].concat()).unwrap();
        assert_eq!(config.coordinator, expected);
        assert_eq!(config.rank(), Rank::new(1, 4).unwrap());
    }

    #[test]
    fn beside_torchruns_agent_jobs_on_consecutive_ports_do_not_meet() {
        for port in 1..u16::MAX {
            let [first, second] = [port, port + 1].map(beside_agent);
            assert!(first != second && first > 1023 && second > 1023, "{port}");
            assert!(![port, port + 1].contains(&first) && ![port, port + 1].contains(&second), "{port}");
        }
    }

    #[rstest]
    #[case("rank0", 3)]
    #[case("external", 0)]
    fn starts_are_counted_where_rank_0_hosts_the_coordinator(#[case] host: &str, #[case] epoch: u32) {
        let more = [("TORCHELASTIC_RESTART_COUNT", "3"), ("DIST_COORDINATOR", host)];
        assert_eq!(parse(&[&JOB[..], &more].concat()).unwrap().epoch, epoch);
    }

    #[test]
    fn settings_of_the_environment_apply_to_a_configuration_of_the_program() {
        let settings = [
            ("DIST_HOST_ID", "left"),
            ("DIST_TRANSPORT", "tcp"),
            ("DIST_SHM_CMA", "read"),
            ("DIST_SOCKETS_PER_PEER", "8"),
            ("DIST_LIVENESS", "30"),
            ("RANK", "1"),
        ];
        let get = |name: &str| {
            let found = settings.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        let of_program = Config::new(0, 4, "127.0.0.1:29500").unwrap();
        let config = of_program.with_settings(&Variables(get)).unwrap();
        assert_eq!(config.host_id.as_deref(), Some("left"));
        assert_eq!((config.medium, config.reach), (Medium::Tcp, Reach::Read));
        assert_eq!((config.sockets_per_peer(), config.liveness), (8, Some(Duration::from_secs(30))));
        assert_eq!(config.rank(), Rank::new(0, 4).unwrap(), "the rank is that of the program");
    }

    #[test]
    fn an_ipv6_coordinator_gets_its_brackets() {
        let config = parse(&[JOB[0], JOB[1], ("MASTER_ADDR", "::1"), JOB[3]]).unwrap();
        assert_eq!(config.coordinator, "[::1]:29500");
    }

    #[rstest]
    #[case(&[("WORLD_SIZE", "2")], "RANK is not set")]
    #[case(&[("RANK", "0")], "WORLD_SIZE is not set")]
    #[case(&[("RANK", "0"), ("WORLD_SIZE", "2")], "MASTER_ADDR is not set")]
    #[case(&[("PMI_RANK", "0"), ("PMI_SIZE", "2")], "MASTER_ADDR is not set")]
    #[case(&[("PMI_SIZE", "2")], "PMI_RANK is not set")]
    #[case(&[("RANK", "one"), ("WORLD_SIZE", "2")], "RANK=\"one\" is not a number")]
    #[case(&[("RANK", "2"), ("WORLD_SIZE", "2"), JOB[2], JOB[3]], "rank 2 is outside a group of 2")]
    #[case(&[("RANK", "0"), ("WORLD_SIZE", "0"), JOB[2], JOB[3]], "rank 0 is outside a group of 0")]
    #[case(&[JOB[0], JOB[1], JOB[2], ("MASTER_PORT", "70000")], "MASTER_PORT=\"70000\" is not a port from")]
    #[case(&[JOB[0], JOB[1], JOB[2], ("MASTER_PORT", "0")], "MASTER_PORT=\"0\" is not a port from 1 to 65535")]
    #[case(&[JOB[0], JOB[1], JOB[2], JOB[3], ("DIST_PORT", "0")], "DIST_PORT=\"0\" is not a port from 1 to 65535")]
    #[case(&[JOB[0], JOB[1], JOB[2], JOB[3], ("DIST_SECRET_FILE", "")], "DIST_SECRET_FILE=\"\" is not the path")]
    #[case(&[JOB[0], JOB[1], JOB[2], JOB[3], ("DIST_SECRET_FILE", "/a\n")], "DIST_SECRET_FILE=\"/a\\n\" is not the")]
    #[case(&[JOB[0], JOB[1], JOB[2], JOB[3], ("DIST_JOB_ID", "a\n")], "DIST_JOB_ID=\"a\\n\" is not a name")]
    #[case(&[JOB[0], JOB[1], JOB[2], JOB[3], ("TORCHELASTIC_RUN_ID", " a")], "TORCHELASTIC_RUN_ID=\" a\" is not a")]
    #[case(&[JOB[0], JOB[1], JOB[2], JOB[3], ("DIST_HOST_ID", "a ")], "DIST_HOST_ID=\"a \" is not a name")]
    #[case(&[JOB[0], ("WORLD_SIZE", "4\n"), JOB[2], JOB[3]], "WORLD_SIZE=\"4\\n\" is not a number")]
    #[case(&[JOB[0], JOB[1], JOB[2], ("MASTER_PORT", "29500 ")], "MASTER_PORT=\"29500 \" is not a port from")]
    #[case(&[JOB[0], JOB[1], JOB[2], ("MASTER_PORT", "tcp://29500")], "MASTER_PORT=\"tcp://29500\" is not a port")]
    #[case(&[JOB[0], JOB[1], ("MASTER_ADDR", "127.0.0.1 "), JOB[3]], "MASTER_ADDR=\"127.0.0.1 \" is not a host name")]
    #[case(&[JOB[0], JOB[1], ("MASTER_ADDR", "node0\n"), JOB[3]], "MASTER_ADDR=\"node0\\n\" is not a host name")]
    #[case(&[JOB[0], JOB[1], ("MASTER_ADDR", "tcp://node0"), JOB[3]], "MASTER_ADDR=\"tcp://node0\" is not a host")]
    #[case(&[JOB[0], JOB[1], ("MASTER_ADDR", "node0:1"), JOB[3]], "MASTER_ADDR=\"node0:1\" is not a host name or")]
    #[case(&[JOB[0], JOB[1], JOB[2], JOB[3], ("DIST_COORDINATOR", "x")], "DIST_COORDINATOR=\"x\" is not external")]
    #[case(&[JOB[0], JOB[1], JOB[2], JOB[3], ("DIST_TRANSPORT", "rdma")], "DIST_TRANSPORT=\"rdma\" is not auto,")]
    #[case(&[JOB[0], JOB[1], JOB[2], JOB[3], ("DIST_TRANSPORT", "mpi")], "DIST_TRANSPORT=\"mpi\" is not auto, tcp or shm: mpi is for a program that joins with dist::init")]
    #[case(&[JOB[0], JOB[1], JOB[2], JOB[3], ("DIST_LIVENESS", "1.9")], "DIST_LIVENESS=\"1.9\" is not a number of")]
    #[case(&[JOB[0], JOB[1], JOB[2], JOB[3], ("DIST_LIVENESS", "inf")], "DIST_LIVENESS=\"inf\" is not a number of")]
    #[case(&[JOB[0], JOB[1], JOB[2], JOB[3], ("DIST_SOCKETS_PER_PEER", "0")], "DIST_SOCKETS_PER_PEER=\"0\" is not a number from 1 to 64")]
    #[case(&[JOB[0], JOB[1], JOB[2], JOB[3], ("DIST_SOCKETS_PER_PEER", "65")], "DIST_SOCKETS_PER_PEER=\"65\" is not a number from 1 to 64")]
    #[case(&[JOB[0], JOB[1], JOB[2], JOB[3], ("DIST_SHM_CMA", "no")], "DIST_SHM_CMA=\"no\" is not on, read or off")]
    #[case(&[JOB[0], JOB[1], JOB[2], JOB[3], ("DIST_SECRET_FILE", "/nowhere")], "the secret in DIST_SECRET_FILE=\"/nowhere\"")]
    fn an_invalid_value_is_named(#[case] variables: &[(&str, &str)], #[case] expected: &str) {
        let message = parse(variables).unwrap_err().to_string();
        assert!(message.starts_with(expected), "{message}");
    }
}
