//! Restarts on a machine other than the first: they follow the restarts of the first machine.
//!
//! If a rank fails before all ranks have joined, the other machines notice it only when their join times out.
//! If each machine counted its own restarts, they would wait for each other at different ports.

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

use dist_transport::runtime::Receiver;
use dist_transport::{Deadline, Runtime};
use signal_hook::consts::{SIGTSTP, SIGUSR1, SIGUSR2};
use signal_hook::low_level::emulate_default_handler;

use super::child;
use super::job::NextStart;
use super::rendezvous::Nodes;
use super::watch::Event;

/// Maximum time between two starts of the first machine.
const BETWEEN_STARTS: Duration = Duration::from_secs(60);
/// Interval between two checks for the first machine.
const LOOK_AGAIN: Duration = Duration::from_millis(250);
/// Time limit of a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(1);

/// Waits until the first machine has begun a later start than the failed one. Gives up if it has left the
/// failed start for longer than [`BETWEEN_STARTS`].
pub(super) fn follow_first_machine(
    nodes: &Nodes,
    failed: u16,
    last: u16,
    runtime: &Runtime,
    inbox: &mut Receiver<Event>,
    say: impl Fn(String),
) -> NextStart {
    let mut patience = runtime.deadline(BETWEEN_STARTS);
    let mut has_waited = false;
    loop {
        let hosts = (nodes.rendezvous.host.as_str(), 0).to_socket_addrs();
        let hosts: Vec<SocketAddr> = hosts.map_or_else(|_| Vec::new(), Iterator::collect);
        // The first machine is in one start at a time. While the port of the failed start is open, a listener
        // at a later port belongs to another program.
        let still_there = is_listening(&hosts, nodes.port(failed));
        if still_there {
            patience = runtime.deadline(BETWEEN_STARTS);
        }
        let later = if still_there { 0..0 } else { failed + 1..last.saturating_add(1) };
        for start in later {
            if is_listening(&hosts, nodes.port(start)) {
                return NextStart::Number(start);
            }
            if runtime.expired(patience) {
                let (host, first) = (&nodes.rendezvous.host, nodes.port(failed));
                let last = nodes.port(last);
                say(format!(
                    "machine 0 did not restart the job: no coordinator listens at {host}, ports {first} to {last}"
                ));
                return NextStart::Never;
            }
            if let Some(signal) = wait_for_signal(inbox, runtime.deadline(Duration::ZERO), &say) {
                return NextStart::Stopped(signal);
            }
        }
        if !std::mem::replace(&mut has_waited, true) {
            say("waiting until machine 0 restarts the job".to_owned());
        }
        if let Some(signal) = wait_for_signal(inbox, runtime.deadline(LOOK_AGAIN), &say) {
            return NextStart::Stopped(signal);
        }
    }
}

/// Returns `true` if a coordinator accepts connections. Sends nothing to it.
fn is_listening(hosts: &[SocketAddr], port: u16) -> bool {
    hosts.iter().any(|&host| {
        let connect = |at: SocketAddr| -> io::Result<bool> {
            let stream = TcpStream::connect_timeout(&at, CONNECT_LIMIT)?;
            // On this machine the kernel can choose the target port as the source port, and the socket then
            // connects to itself.
            Ok(stream.local_addr()? != at)
        };
        connect(SocketAddr::new(host.ip(), port)).unwrap_or(false)
    })
}

/// Handles events until the deadline. Returns the signal that ends the job, if one arrives. There are no
/// ranks to forward it to.
fn wait_for_signal(inbox: &mut Receiver<Event>, deadline: Deadline, say: impl Fn(String)) -> Option<i32> {
    while let Ok(event) = inbox.receive(Some(deadline)) {
        match event {
            Event::Signalled(SIGTSTP) => {
                if let Err(error) = emulate_default_handler(SIGTSTP) {
                    say(format!("cannot stop: {error}"));
                }
            }
            Event::Signalled(SIGUSR1 | SIGUSR2) | Event::Ended(_) | Event::Unwritable(_) => {}
            Event::Signalled(signal) => {
                say(format!("{}: the job is not restarted", child::signal_name(signal)));
                return Some(signal);
            }
        }
    }
    None
}
