//! `cargo xtask matrix`: every operation in real processes, and a table of what held.

use crate::command::{Failure, cargo, show};

pub(crate) const HELP: &str = "\
cargo xtask matrix [--filter TEXT]

Runs transport x ranks x algorithm x dtype x operation in real processes: worlds of 1 to 9, lengths 0, 1,
world-1, world, world+1, a prime and 1 MiB, each result compared with an oracle to the last bit. A table at
the end.
A case is called OPERATION/ALGORITHM/ORDER/DTYPE/REDUCTION, as in all_reduce/ring/any/f32/sum; --filter takes
parts of that name, separated by blanks.";

pub(crate) fn run(filter: &str) -> Result<(), Failure> {
    show(&mut cargo("build --package dist-cli"))?;
    let mut command = cargo("run --quiet --package dist-cli -- matrix");
    command.args(["--filter", filter]);
    show(&mut command)
}
