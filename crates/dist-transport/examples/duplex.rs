//! Measures one loopback connection: two processes that send to each other at the same time, and nothing
//! else.
//!
//! No message has a header, nothing is reduced, and received bytes go into the same 256 KiB again and again.
//! An all_reduce of two ranks over TCP is compared with this limit. Prints lines like `distctl bench --json`.
//!
//! ```sh
//! cargo run --release --package dist-transport --example duplex -- 65536 1048576
//! ```
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::env;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};

use dist_transport::Runtime;
use socket2::SockRef;

/// The most bytes of one system call.
const SENT_BYTES_MAX: usize = 1 << 20;
const RECEIVED_BYTES_MAX: usize = 256 << 10;
const PAGE: usize = 4 << 10;
const WARMUPS: usize = 3;

fn main() -> io::Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match arguments.split_first() {
        Some((first, rest)) if first == "--to" => {
            let (address, sizes) = rest.split_first().ok_or(io::ErrorKind::InvalidInput)?;
            measure(TcpStream::connect(address)?, &numbers(sizes)?, false)
        }
        _ => {
            let listener = TcpListener::bind("127.0.0.1:0")?;
            // Accepted connections inherit it.
            let _ = SockRef::from(&listener).set_tcp_congestion(b"reno");
            let address = listener.local_addr()?.to_string();
            let mut other = Command::new(env::current_exe()?);
            let mut other = other.args(["--to", &address]).args(&arguments).stdin(Stdio::null()).spawn()?;
            measure(listener.accept()?.0, &numbers(&arguments)?, true)?;
            other.wait().map(drop)
        }
    }
}

fn numbers(sizes: &[String]) -> io::Result<Vec<usize>> {
    let parse = |size: &String| size.parse().map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
    sizes.iter().map(parse).collect()
}

/// Measures round trips. Both processes make the same calls: the number of repetitions depends only on the
/// size.
fn measure(mut stream: TcpStream, sizes: &[usize], prints: bool) -> io::Result<()> {
    let _ = SockRef::from(&stream).set_tcp_congestion(b"reno");
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    let runtime = Runtime::system();
    let mut memory = vec![0; PAGE + RECEIVED_BYTES_MAX];
    // A vector begins 16 bytes behind a page, where AMD processors copy two to three times as slowly.
    let page = memory.as_ptr().align_offset(PAGE);
    let scratch = &mut memory[page..][..RECEIVED_BYTES_MAX];
    for &bytes in sizes {
        // The bytes are not zero: the system maps untouched zero pages to one page.
        let message = vec![1; bytes];
        let calls = ((16 << 20) / bytes.max(1)).clamp(1, 800);
        let samples = if bytes > 64 << 20 { 9 } else { 21 };
        let mut times = Vec::new();
        for sample in 0..WARMUPS + samples {
            let start = runtime.now();
            for _ in 0..calls {
                exchange(&mut stream, &message, scratch)?;
            }
            let time = (runtime.now() - start).as_secs_f64() * 1e6 / calls as f64;
            times.extend((sample >= WARMUPS).then_some(time));
        }
        times.sort_by(f64::total_cmp);
        if prints {
            let (least, median, most) = (times[0], times[samples / 2], times[samples - 1]);
            println!(
                "{{\"peer\":\"duplex-limit\",\"transport\":\"tcp\",\"op\":\"all_reduce\",\"ranks\":2,\"bytes\":{bytes},\
                 \"median_us\":{median:.3},\"min_us\":{least:.3},\"max_us\":{most:.3},\"samples\":{samples}}}"
            );
        }
    }
    Ok(())
}

/// Exchanges one message in each direction at once, without waiting: there is a core for each process.
fn exchange(stream: &mut TcpStream, message: &[u8], scratch: &mut [u8]) -> io::Result<()> {
    let (mut sent, mut received) = (0, 0);
    while sent < message.len() || received < message.len() {
        if sent < message.len() {
            let rest = &message[sent..];
            sent += moved(stream.write(&rest[..rest.len().min(SENT_BYTES_MAX)]))?;
        }
        if received < message.len() {
            let room = scratch.len().min(message.len() - received);
            received += moved(stream.read(&mut scratch[..room]))?;
        }
    }
    Ok(())
}

fn moved(count: io::Result<usize>) -> io::Result<usize> {
    match count {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
            std::hint::spin_loop();
            Ok(0)
        }
        moved => moved,
    }
}
