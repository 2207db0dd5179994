//! Other processes by their ids: access to their memory, and their CPU time.
#![allow(unsafe_code, reason = "the system calls have no safe wrapper in a library")]

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, PidfdFlags};

/// A process that this one writes into. Its descriptor tells when it has ended, since its id may then be
/// reused.
#[derive(Debug)]
pub(crate) struct Process {
    number: i32,
    /// `None` for this process itself.
    descriptor: Option<OwnedFd>,
}

/// The open processes; groups share them.
static OPEN: LazyLock<Mutex<HashMap<i32, Weak<Process>>>> = LazyLock::new(Mutex::default);

impl Process {
    /// Opens the process that has this id now. To verify that it is the right process, the caller
    /// reads a secret from its memory and then checks that it has not [ended](Self::has_ended).
    ///
    /// # Errors
    /// If there is no such process, or the system has no process descriptors, as before Linux 5.3.
    pub(crate) fn open(number: i32) -> io::Result<Arc<Self>> {
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(process) = open.get(&number).and_then(Weak::upgrade)
            && !process.has_ended()?
        {
            return Ok(process);
        }
        let pid = Some(number).filter(|&number| number > 0).and_then(Pid::from_raw);
        let pid = pid.ok_or(io::ErrorKind::NotFound)?;
        let is_other = pid != rustix::process::getpid();
        let descriptor =
            is_other.then(|| rustix::process::pidfd_open(pid, PidfdFlags::empty())).transpose()?;
        let process = Arc::new(Self { number, descriptor });
        open.retain(|_, process| process.strong_count() > 0);
        open.insert(number, Arc::downgrade(&process));
        Ok(process)
    }

    /// Returns `true` if the process has ended.
    ///
    /// # Errors
    /// If the system does not say.
    pub(crate) fn has_ended(&self) -> io::Result<bool> {
        let Some(descriptor) = &self.descriptor else { return Ok(false) };
        let mut watched = [PollFd::new(descriptor, PollFlags::IN)];
        let at_once = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let ended = rustix::io::retry_on_intr(|| rustix::event::poll(&mut watched, Some(&at_once)))?;
        Ok(ended > 0)
    }

    /// Copies bytes into the memory of the process, if it has not ended.
    ///
    /// # Errors
    /// If it has ended, the system does not allow it, or the memory does not exist.
    ///
    /// # Safety
    /// The process has lent these bytes to this one: it neither frees nor accesses them during the call.
    pub(crate) unsafe fn write(&self, address: u64, bytes: &[u8]) -> io::Result<()> {
        if self.has_ended()? {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        // SAFETY: the process is the one that was opened, and the caller has promised the rest.
        unsafe { write_process(self.number, address, bytes) }
    }
}

/// Returns a pointer for an address in this process's own memory. Such a copy needs no system call, so a race
/// detector can see it.
#[cfg(dist_one_mapping)]
fn address_here(pid: i32, address: u64) -> Option<*mut u8> {
    let is_here = pid == std::process::id().cast_signed() && address >= 4096;
    let address = usize::try_from(address).ok().filter(|_| is_here)?;
    Some(std::ptr::with_exposed_provenance_mut(address))
}

/// Copies from another process's memory.
///
/// # Errors
/// If the system does not allow it, or the memory does not exist.
pub(crate) fn read_process(pid: i32, address: u64, into: &mut [u8]) -> io::Result<()> {
    #[cfg(dist_one_mapping)]
    if let Some(address) = address_here(pid, address) {
        // SAFETY: a rank of this process has exposed this address; a race detector watches the access.
        into.copy_from_slice(unsafe { std::slice::from_raw_parts(address, into.len()) });
        return Ok(());
    }
    transfer(address, into.len(), |done, remote| {
        let local = libc::iovec { iov_base: into[done..].as_mut_ptr().cast(), iov_len: into.len() - done };
        // SAFETY: the system writes at most `iov_len` bytes at `iov_base`, which is the rest of `into`, and checks
        // the other process's addresses itself.
        unsafe { libc::process_vm_readv(pid, &raw const local, 1, remote, 1, 0) }
    })
}

/// Copies into another process's memory.
///
/// # Errors
/// If the system does not allow it, or the memory does not exist.
///
/// # Safety
/// The process has lent these bytes to this one: it neither frees nor accesses them during the call.
unsafe fn write_process(pid: i32, address: u64, bytes: &[u8]) -> io::Result<()> {
    #[cfg(dist_one_mapping)]
    if let Some(address) = address_here(pid, address) {
        // SAFETY: as in `read_process`.
        unsafe { std::slice::from_raw_parts_mut(address, bytes.len()) }.copy_from_slice(bytes);
        return Ok(());
    }
    transfer(address, bytes.len(), |done, remote| {
        let rest = &bytes[done..];
        let local = libc::iovec { iov_base: rest.as_ptr().cast_mut().cast(), iov_len: rest.len() };
        // SAFETY: the system reads at most `iov_len` bytes at `iov_base`, which is the rest of `bytes`; what it
        // writes over in the other process is lent to this one, as the caller has promised.
        unsafe { libc::process_vm_writev(pid, &raw const local, 1, remote, 1, 0) }
    })
}

/// Returns the ids of the process at the other end of a Unix socket and of its user. A process in another PID
/// namespace has id 0, for which `rustix` returns `None`.
pub(crate) fn peer_of(socket: &impl AsFd) -> io::Result<(u32, u32)> {
    let mut peer = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = libc::socklen_t::try_from(size_of_val(&peer)).expect("some bytes");
    let (socket, value) = (socket.as_fd().as_raw_fd(), (&raw mut peer).cast());
    // SAFETY: the system writes at most `len` bytes at `value`, which is as long and outlives the call.
    let outcome =
        unsafe { libc::getsockopt(socket, libc::SOL_SOCKET, libc::SO_PEERCRED, value, &raw mut len) };
    match outcome {
        0 => Ok((peer.pid.cast_unsigned(), peer.uid)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns the CPU time of a process, over all of its threads.
///
/// # Errors
/// If no such process is visible.
pub(crate) fn processor_time(pid: i32) -> io::Result<Duration> {
    let mut clock = 0;
    // SAFETY: the system writes the clock's number at the address, where one is that outlives the call.
    match unsafe { libc::clock_getcpuclockid(pid, &raw mut clock) } {
        0 => {}
        error => return Err(io::Error::from_raw_os_error(error)),
    }
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the system writes a time at the address, where one is that outlives the call.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let (seconds, nanoseconds) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec));
    Ok(Duration::new(seconds.expect("since it began"), nanoseconds.expect("less than a second")))
}

/// Calls `step` with the number of transferred bytes and the rest, until all bytes are transferred. A system
/// call may transfer fewer bytes than requested.
fn transfer(
    address: u64,
    len: usize,
    mut step: impl FnMut(usize, *const libc::iovec) -> isize,
) -> io::Result<()> {
    let start = usize::try_from(address).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut done = 0;
    while done < len {
        let base = std::ptr::without_provenance_mut(start + done);
        let remote = libc::iovec { iov_base: base, iov_len: len - done };
        match usize::try_from(step(done, &raw const remote)) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(moved) => done += moved,
            Err(_) => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::Interrupted => {}
                e => return Err(e),
            },
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn own() -> i32 {
        std::process::id().cast_signed()
    }

    #[test]
    fn memory_of_a_process_is_read_and_written_by_its_address() {
        let mut memory = vec![0_u8; 100];
        let address = memory.as_mut_ptr().expose_provenance() as u64;
        let process = Process::open(own()).unwrap();
        assert!(!process.has_ended().unwrap());
        // SAFETY: it is this process, which does nothing else there meanwhile.
        unsafe { process.write(address + 1, b"hello") }.unwrap();
        let mut read = [0; 5];
        read_process(own(), address + 1, &mut read).unwrap();
        assert_eq!((&read, memory[0], memory[6]), (b"hello", 0, 0));
    }

    #[test]
    fn nothing_is_written_by_the_number_of_a_process_that_has_ended() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let process = Process::open(child.id().cast_signed()).unwrap();
        assert!(!process.has_ended().unwrap());
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(process.has_ended().unwrap());
        // SAFETY: nothing is written.
        let written = unsafe { process.write(4096, b"hello") };
        assert_eq!(written.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
        // Linux has no process with such an id.
        assert!(Process::open(1 << 22).is_err() && Process::open(0).is_err());
    }

    #[test]
    fn a_transfer_that_runs_into_nothing_is_an_error() {
        let bytes = [0_u8; 8];
        let address = bytes.as_ptr().expose_provenance() as u64;
        // The bytes behind may be mapped, but not all of this length.
        assert!(read_process(own(), address, &mut vec![0; 1 << 30]).is_err());
        assert!(read_process(own(), 0, &mut [0; 8]).is_err());
    }

    #[test]
    fn the_system_reports_the_process_at_the_other_end_of_a_socket() {
        let (one, other) = std::os::unix::net::UnixStream::pair().unwrap();
        let own = (std::process::id(), rustix::process::geteuid().as_raw());
        assert_eq!((peer_of(&one).unwrap(), peer_of(&other).unwrap()), (own, own));
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(peer_of(&file).is_err(), "no socket");
    }

    #[test]
    fn a_process_has_had_processors_for_some_time() {
        let before = processor_time(own()).unwrap();
        while processor_time(own()).unwrap() == before {}
        // Linux has no process with such a number.
        assert!(processor_time(1 << 22).is_err());
    }
}
