//! `cargo xtask bench`: runs the criterion benches.

use crate::command::{Failure, cargo, show};

pub(crate) const HELP: &str = "\
cargo xtask bench [--filter TEXT]

Runs the criterion benches in benches/, one file per algorithm, for several sizes and transports. The ranks
are threads; distctl bench measures processes. A bench is called ALGORITHM/OPERATION/TRANSPORT/RANKS/BYTES,
for example ring/all_reduce/tcp/2/65536. --filter takes a part of that name, or a regular expression.
Reports are written to target/criterion.";

pub(crate) fn run(filter: &str) -> Result<(), Failure> {
    let mut command = cargo("bench --package benches");
    if !filter.is_empty() {
        command.args(["--", filter]);
    }
    show(&mut command)
}
