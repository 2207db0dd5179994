//! Times calls that are convenient beside the plain calls that do the same work.
//!
//! ```text
//! distctl run -n 2 target/release/examples/conveniences
//! ```
//!
//! Rank 0 prints the least and the median time of each case in microseconds, and the ratio to the plain call before it. A
//! message goes from rank 0 to rank 1 and back.
#![allow(clippy::print_stdout, reason = "it is a program")]

use std::error::Error;
use std::time::Duration;

use dist_collectives::{Communicator, Complex, CustomOp, ReduceOp, Result};

/// Samples of each case. The first ones are not counted.
const SAMPLES: usize = 200;
const WARM_UPS: usize = 20;

/// The number of elements of a message: 8 MB of f64.
const MESSAGE_ELEMENTS: usize = 1_000_000;

/// The number of complex numbers of f64 that are multiplied: 160 kB.
const PRODUCTS: usize = 10_000;

/// The number of calls of one sample of a short case.
const SHORT_CALLS: u32 = 1000;

fn main() -> Result<(), Box<dyn Error>> {
    let mut comm = Communicator::from_env()?;
    let mut numbers = vec![1.0_f64; MESSAGE_ELEMENTS];
    let plain = time(&mut comm, 1, |comm| match comm.rank() {
        0 => comm.send(&numbers, 1).and_then(|()| comm.recv(&mut numbers, 1)),
        1 => comm.recv(&mut numbers, 0).and_then(|()| comm.send(&numbers, 0)),
        _ => Ok(()),
    })?;
    print(&comm, "message of 8 MB", plain, plain);
    let value = time(&mut comm, 1, |comm| {
        match comm.rank() {
            0 => {
                comm.send_value(&numbers, 1)?;
                numbers = comm.recv_value(1)?;
            }
            1 => {
                numbers = comm.recv_value(0)?;
                comm.send_value(&numbers, 0)?;
            }
            _ => {}
        }
        Ok(())
    })?;
    print(&comm, "the same as a value", value, plain);

    let mut factors = vec![Complex::new(0.6_f64, 0.8); PRODUCTS];
    let plain = time(&mut comm, 1, |comm| comm.all_reduce(&mut factors, ReduceOp::Product))?;
    print(&comm, "complex products of 160 kB", plain, plain);
    let product = CustomOp::of_pairs("product", |left: Complex<f64>, right| left * right);
    let own = time(&mut comm, 1, |comm| comm.all_reduce_with(&mut factors, &product))?;
    print(&comm, "the same by an own operation", own, plain);

    let mut short = vec![1.0_f32; 2];
    let plain = time(&mut comm, SHORT_CALLS, |comm| comm.all_reduce(&mut short, ReduceOp::Max))?;
    print(&comm, "all_reduce of 8 B", plain, plain);
    let started = time(&mut comm, SHORT_CALLS, |comm| {
        short = comm.start_all_reduce(std::mem::take(&mut short), ReduceOp::Max).wait()?.into_vec();
        Ok(())
    })?;
    print(&comm, "the same started and awaited", started, plain);
    Ok(())
}

/// Returns the least and the median time of one call.
fn time(
    comm: &mut Communicator,
    calls: u32,
    mut call: impl FnMut(&mut Communicator) -> Result<()>,
) -> Result<[Duration; 2]> {
    let mut samples = Vec::new();
    for _ in 0..SAMPLES {
        comm.barrier()?;
        let start = comm.runtime().now();
        (0..calls).try_for_each(|_| call(comm))?;
        samples.push((comm.runtime().now() - start) / calls);
    }
    samples.drain(..WARM_UPS);
    samples.sort_unstable();
    Ok([samples[0], samples[samples.len() / 2]])
}

fn print(comm: &Communicator, name: &str, [least, median]: [Duration; 2], plain: [Duration; 2]) {
    if comm.rank() == 0 {
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        let ratio = micros(median) / micros(plain[1]);
        println!("{name}: least {:.2}, median {:.2} us, {ratio:.2} times", micros(least), micros(median));
    }
}
