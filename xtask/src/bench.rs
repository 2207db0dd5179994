//! `cargo xtask bench`: the criterion benches.

use crate::command::{Failure, cargo, show};

pub(crate) const HELP: &str = "\
cargo xtask bench [--filter TEXT]

Runs the criterion benches in benches/, one file per algorithm, over sizes and transports. A bench is
called ALGORITHM/OPERATION/TRANSPORT/RANKS/BYTES, as in ring/all_reduce/tcp/2/65536; --filter takes a part
of that name or a regular expression. Reports go to target/criterion. Between processes: distctl bench.";

pub(crate) fn run(filter: &str) -> Result<(), Failure> {
    let mut command = cargo("bench --package benches");
    if !filter.is_empty() {
        command.args(["--", filter]);
    }
    show(&mut command)
}
