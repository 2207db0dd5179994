//! The part of a job on one host that `distctl run --hosts` has started over ssh.

use std::ffi::OsStr;
use std::io::{self, BufReader, Stdin, Write};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use dist_transport::Runtime;
use dist_transport::runtime::Mailbox;
use signal_hook::consts::SIGHUP;

use super::super::child::check_program;
use super::super::job::{Job, Launcher};
use super::super::lines::{OutputSink, Stream};
use super::super::rendezvous::Rendezvous;
use super::super::secret::{SecretFile, own_name};
use super::super::watch::{Ended, Event};
use super::wire::{Greeting, HostReport, Order, Part, Place, receive, send};
use crate::Error;
use crate::outcome::Outcome;

/// Runs the part of a job that is described on stdin. All events are sent as reports, and the exit code
/// carries no information.
pub(crate) fn run() -> Result<Outcome, Error> {
    let reports = Arc::new(Reports(Mutex::new(io::stdout())));
    let greeting = Greeting { version: env!("CARGO_PKG_VERSION").to_owned(), address: own_address() };
    reports.write(greeting.line().as_bytes()).map_err(Error::Output)?;
    let mut launcher = Launcher::new()?;
    let mut orders = BufReader::new(io::stdin());
    let Some(part) = receive(&mut orders).map_err(Error::Orders)? else { return Ok(Outcome::Success) };
    let report = match run_part(part, orders, &mut launcher, &reports) {
        Ok(ended) => {
            let code = ended.outcome.code();
            HostReport::Ended { code, failures: ended.failures, culprit: ended.culprit }
        }
        Err(error) => HostReport::Failed { code: error.exit_code(), text: error.with_causes() },
    };
    reports.send(&report, &[]).map_err(Error::Output)?;
    Ok(Outcome::Success)
}

fn run_part(
    part: Part,
    orders: BufReader<Stdin>,
    launcher: &mut Launcher,
    reports: &Arc<Reports>,
) -> Result<Ended, Error> {
    std::env::set_current_dir(&part.folder)
        .map_err(|source| Error::Folder { folder: part.folder.clone().into(), source })?;
    let path = part.environment.iter().find(|(name, _)| name == "PATH");
    check_program(&part.program, path.map_or(OsStr::new(""), |(_, folders)| folders))?;
    let secret = Arc::new(SecretFile::received(&own_name(), &part.secret)?);
    let (world_size, restart) = (part.world_size, part.restart);
    let rendezvous = match &part.coordinator {
        Place::Here(at) => Rendezvous::hosted(at, world_size, restart, &part.job, secret)?,
        Place::There(at) => Rendezvous::joined(at, world_size, restart, &part.job, secret),
    };
    if rendezvous.is_hosted() {
        reports.send(&HostReport::Listening(rendezvous.address().clone()), &[]).map_err(Error::Output)?;
    }
    listen(orders, launcher.runtime(), launcher.events())?;
    let job = Job {
        first: part.first,
        grace: part.grace,
        bind: part.bind,
        environment: part.environment,
        ..Job::of(part.ranks, part.program, part.arguments)
    };
    let sink: Arc<dyn OutputSink> = reports.clone();
    job.run_at(rendezvous, launcher, &sink)
}

/// Starts a thread that receives signals. If the connection is closed, the job ends as on SIGHUP.
fn listen(mut orders: BufReader<Stdin>, runtime: &Runtime, events: &Mailbox<Event>) -> Result<(), Error> {
    let events = events.clone();
    let forward = move || {
        while let Ok(Some(Order::Signal(signal))) = receive(&mut orders) {
            events.send(Event::Signalled(signal));
        }
        events.send(Event::Signalled(SIGHUP));
    };
    runtime.spawn("orders", forward).map(drop).map_err(Error::Thread)
}

/// Returns the address of this host by which ssh reached it: the third word of the variable that sshd sets.
fn own_address() -> Option<IpAddr> {
    std::env::var("SSH_CONNECTION").ok()?.split(' ').nth(2)?.parse().ok()
}

/// The stdout of this process. Threads of several ranks write to it.
struct Reports(Mutex<io::Stdout>);

impl Reports {
    fn send(&self, report: &HostReport, bytes: &[u8]) -> io::Result<()> {
        send(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner), report, bytes)
    }

    fn write(&self, bytes: &[u8]) -> io::Result<()> {
        let mut output = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        output.write_all(bytes)?;
        output.flush()
    }
}

impl OutputSink for Reports {
    fn write_line(&self, rank: usize, stream: Stream, line: &[u8]) -> Result<(), Error> {
        let report = HostReport::Line { rank, stream, bytes: line.len() };
        self.send(&report, line).map_err(|source| Error::Forward { stream, source })
    }

    fn say(&self, text: &str) {
        // If it cannot be written, the connection is lost.
        let _ = self.send(&HostReport::Said(text.to_owned()), &[]);
    }
}
