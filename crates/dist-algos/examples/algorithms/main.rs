//! Writes docs/algorithms.md to standard output: `cargo xtask docs` puts it in its place.
#![allow(clippy::print_stdout, reason = "a program prints")]

mod document;

fn main() {
    print!("{}", document::algorithms(dist_algos::ALGORITHMS));
}
