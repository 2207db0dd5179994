//! The environment variables that commands read, for `--help`, the reference page and `distctl doctor`.

/// An environment variable that a user may set.
#[derive(Debug)]
pub(crate) struct Variable {
    pub(crate) name: &'static str,
    pub(crate) meaning: &'static str,
    reader: ReadBy,
}

/// The processes that read a variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReadBy {
    /// Every rank that joins a job of `run`, `bench`, `tune`, `doctor` or `chaos`.
    Ranks,
    /// `distctl run`, which sets it for its ranks.
    Run,
    /// Every command.
    Everything,
    /// Only programs, if a launcher has set it.
    Programs,
}

/// All variables that begin with `DIST_`.
pub(crate) const VARIABLES: [Variable; 13] = [
    Variable {
        name: "DIST_COORDINATOR",
        meaning: "Host of the coordinator: external (the launcher) or rank0",
        reader: ReadBy::Programs,
    },
    Variable {
        name: "DIST_COSTS",
        meaning: "File of measured costs, or off; the value of rank 0 counts",
        reader: ReadBy::Ranks,
    },
    Variable {
        name: "DIST_CROSSOVERS",
        meaning: "Sizes in bytes from which each algorithm of shared memory is used",
        reader: ReadBy::Ranks,
    },
    Variable {
        name: "DIST_HOST_ID",
        meaning: "Name of the machine: ranks with the same name share memory [default: the machine's boot id]",
        reader: ReadBy::Ranks,
    },
    Variable {
        name: "DIST_JOB_ID",
        meaning: "Name of the job, the same on all its machines",
        reader: ReadBy::Run,
    },
    Variable {
        name: "DIST_LIVENESS",
        meaning: "Seconds without a heartbeat after which a process or a host counts as failed, at least 2",
        reader: ReadBy::Ranks,
    },
    Variable {
        name: "DIST_LOG",
        meaning: "Log filter of distctl, in the syntax of RUST_LOG",
        reader: ReadBy::Everything,
    },
    Variable {
        name: "DIST_PORT",
        meaning: "Port of the coordinator instead of MASTER_PORT, under other launchers",
        reader: ReadBy::Programs,
    },
    Variable {
        name: "DIST_RESTART",
        meaning: "Number of restarts of the job; distctl run sets it for the program",
        reader: ReadBy::Programs,
    },
    Variable {
        name: "DIST_SECRET_FILE",
        meaning: "File with the secret of the job, readable by its owner only, or fd:N",
        reader: ReadBy::Run,
    },
    Variable {
        name: "DIST_SHM_CMA",
        meaning: "Access of ranks to each other's memory: on, read or off",
        reader: ReadBy::Ranks,
    },
    Variable {
        name: "DIST_SOCKETS_PER_PEER",
        meaning: "TCP connections between two ranks, from 1 to 64, the same on every rank [default: 1]",
        reader: ReadBy::Ranks,
    },
    Variable {
        name: "DIST_TRANSPORT",
        meaning: "Transport of messages: auto, shm or tcp",
        reader: ReadBy::Ranks,
    },
];

/// Commands whose ranks join a job.
const WITH_RANKS: [&str; 5] = ["run", "bench", "tune", "doctor", "chaos"];

/// Returns the variables that a command or its ranks read.
pub(crate) fn read_by(command: &str) -> impl Iterator<Item = &'static Variable> {
    VARIABLES.iter().filter(move |variable| match variable.reader {
        ReadBy::Ranks => WITH_RANKS.contains(&command),
        ReadBy::Run => command == "run",
        ReadBy::Everything => true,
        ReadBy::Programs => false,
    })
}

/// Returns the section of `--help` about the variables that a command reads.
pub(crate) fn help(command: &str) -> String {
    let width = read_by(command).map(|variable| variable.name.len()).max().unwrap_or(0);
    let rows = read_by(command).map(|Variable { name, meaning, .. }| format!("  {name:width$}  {meaning}"));
    format!("Environment variables:\n{}", rows.collect::<Vec<_>>().join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guide_lists_every_variable() {
        let page = include_str!("../../../docs/book/src/variables.md");
        for Variable { name, .. } in &VARIABLES {
            assert!(page.contains(&format!("`{name}`")), "docs/book/src/variables.md does not list {name}");
        }
    }
}
