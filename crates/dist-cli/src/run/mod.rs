//! `distctl run`: starts a program once per rank on this machine, on several machines with one `distctl`
//! each, or on hosts over ssh.

mod child;
mod cores;
mod files;
mod front;
mod hosts;
mod job;
mod lines;
mod numa;
mod rendezvous;
mod restart;
mod secret;
mod signals;
mod watch;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub(crate) use child::{EXEC, become_program, own_program};
pub(crate) use cores::{Bind, allowed as allowed_cores};
pub(crate) use files::needed as files_needed;
pub(crate) use front::{in_launcher, is_launcher};
pub(crate) use hosts::PART;
pub(crate) use job::{Job, Launcher, in_a_job};
pub(crate) use lines::{OutputSink, Stream};
pub(crate) use numa::{NumaNode, nodes as numa_nodes};
pub(crate) use rendezvous::Nodes;

use crate::Error;
use crate::address::Address;
use crate::outcome::Outcome;
use child::check_program;
use hosts::{Host, HostsJob, counts, read};
use lines::Forward;
use secret::{SecretFile, own_name};

#[derive(Debug, clap::Args)]
pub(crate) struct RunArguments {
    /// Number of processes to start on each machine
    #[arg(short = 'n', long = "ranks", value_name = "N", value_parser = crate::parse::ranks)]
    #[arg(required_unless_present_any = ["hosts", "hostfile"])]
    ranks: Option<usize>,
    /// Hosts to start processes on over ssh, each with the number of its processes, as in a:4,b:4
    #[arg(long, value_name = "HOST[:N],...", value_delimiter = ',', conflicts_with = "nnodes")]
    hosts: Vec<Host>,
    /// File that lists hosts, one on each line, as in `a:4` or `a slots=4`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["hosts", "nnodes"])]
    hostfile: Option<PathBuf>,
    /// Command that reaches a host, with its first arguments
    #[arg(long, value_name = "COMMAND", default_value = "ssh")]
    ssh: String,
    /// Path of distctl on the hosts [default: the path of this program]
    #[arg(long, value_name = "PATH")]
    remote_distctl: Option<PathBuf>,
    /// Number of machines: start distctl on each of them, with the same DIST_SECRET_FILE
    #[arg(long, value_name = "N", value_parser = crate::parse::nodes, requires_all = ["node_rank", "rdzv"])]
    nnodes: Option<usize>,
    /// Number of this machine, counted from 0
    #[arg(long, value_name = "K", requires = "nnodes")]
    node_rank: Option<usize>,
    /// Address of the coordinator: an address of the first machine and a port that is free there
    #[arg(long, value_name = "HOST:PORT", value_parser = Address::parse)]
    rdzv: Option<Address>,
    /// Maximum number of restarts after a failure; on several machines, each restart uses the next port after HOST:PORT
    #[arg(long, value_name = "R", default_value = "0")]
    max_restarts: u16,
    /// Also write the output of each rank to this folder, as r0.log, r1.log ...
    #[arg(long, value_name = "DIR")]
    log_dir: Option<PathBuf>,
    /// Time that a rank has to end after SIGTERM, before it is killed
    #[arg(long, value_name = "SECONDS", default_value = "5", allow_negative_numbers = true, value_parser = crate::parse::seconds)]
    grace: Duration,
    /// Begin each line of output with its rank, as in `[r3]`; always done on a terminal
    #[arg(long)]
    tag: bool,
    /// Cores that each rank is bound to
    #[arg(long, value_enum, default_value = "cores", value_name = "WHAT")]
    bind: Bind,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

impl RunArguments {
    /// Returns the hosts of the arguments, if there are any.
    fn listed_hosts(&self) -> Result<Option<Vec<Host>>, Error> {
        match &self.hostfile {
            Some(file) => read(file).map(Some),
            None if self.hosts.is_empty() => Ok(None),
            None => Ok(Some(self.hosts.clone())),
        }
    }

    /// Returns the machines of the job, if it runs on several.
    fn nodes(&self) -> Result<Option<Nodes>, Error> {
        let (Some(count), Some(index), Some(rendezvous)) = (self.nnodes, self.node_rank, &self.rdzv) else {
            return Ok(None);
        };
        if index >= count {
            return Err(Error::Usage(format!(
                "--node-rank {index} is not below --nnodes {count}: machines are numbered from 0"
            )));
        }
        let (port, restarts) = (rendezvous.port, self.max_restarts);
        if port.checked_add(restarts).is_none() {
            return Err(Error::Usage(format!(
                "port {port} plus {restarts} restarts exceeds the largest port: each restart uses the next port"
            )));
        }
        let Some(secret) = std::env::var_os("DIST_SECRET_FILE") else {
            return Err(Error::Usage(
                "a job on several machines needs a secret: copy the same file to each machine, \
                 readable by its owner only, and set DIST_SECRET_FILE to its path"
                    .to_owned(),
            ));
        };
        let job = std::env::var("DIST_JOB_ID").ok().filter(|job| !job.is_empty());
        let job = job.unwrap_or_else(|| "dist".to_owned());
        let secret = Arc::new(SecretFile::given(Path::new(&secret), &own_name())?);
        Ok(Some(Nodes { count, index, rendezvous: rendezvous.clone(), job, secret }))
    }
}

/// Runs the part of a job on several hosts that is described on stdin.
pub(crate) fn run_part() -> Result<Outcome, Error> {
    in_launcher(hosts::run_part)
}

/// Runs the job, or its part on this machine, to its end. The exit code is that of the first failed rank.
pub(crate) fn run(arguments: &RunArguments) -> Result<Outcome, Error> {
    in_launcher(|| launch(arguments))
}

fn launch(arguments: &RunArguments) -> Result<Outcome, Error> {
    match arguments.listed_hosts()? {
        Some(hosts) => launch_on(hosts, arguments),
        None if arguments.nnodes.is_none() && arguments.rdzv.is_some() => {
            Err(Error::Usage("--rdzv is for a job with --nnodes or --hosts".to_owned()))
        }
        None => launch_here(arguments),
    }
}

/// Runs the job on hosts over ssh.
fn launch_on(hosts: Vec<Host>, arguments: &RunArguments) -> Result<Outcome, Error> {
    let counts = counts(&hosts, arguments.ranks)?;
    let distctl = arguments.remote_distctl.as_deref();
    let mut job = HostsJob::new(hosts, counts, &arguments.ssh, distctl, &arguments.command)?;
    (job.grace, job.bind, job.restarts) = (arguments.grace, arguments.bind, arguments.max_restarts);
    job.rendezvous = arguments.rdzv.clone();
    let mut forward = Forward::new(arguments.tag);
    if let Some(folder) = &arguments.log_dir {
        forward = forward.with_logs(folder, 0..job.world_size())?;
    }
    job.run(&(Arc::new(forward) as Arc<dyn OutputSink>))
}

fn launch_here(arguments: &RunArguments) -> Result<Outcome, Error> {
    let (program, rest) = arguments.command.split_first().expect("clap asks for a program");
    check_program(program, &std::env::var_os("PATH").unwrap_or_default())?;
    let ranks = arguments.ranks.expect("clap asks for a number of ranks or for hosts");
    let mut launcher = Launcher::new()?;
    let mut forward = Forward::new(arguments.tag);
    let job = Job {
        grace: arguments.grace,
        bind: arguments.bind,
        first: arguments.node_rank.unwrap_or(0) * ranks,
        nodes: arguments.nodes()?,
        restarts: arguments.max_restarts,
        ..Job::of(ranks, program.clone(), rest.to_vec())
    };
    if let Some(folder) = &arguments.log_dir {
        job.check_files(job.ranks)?;
        forward = forward.with_logs(folder, job.local())?;
    }
    job.run_by(&mut launcher, Arc::new(forward))
}
