//! `cargo xtask matrix`: runs every operation in real processes and prints a table of the calls that agreed.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::command::{Failure, cargo, line, print, show, target_folder};
use crate::members;

pub(crate) const HELP: &str = "\
cargo xtask matrix [--filter TEXT]

Runs transport x ranks x algorithm x dtype x operation in real processes, with worlds of 1 to 9 ranks and
lengths of 0, 1, world-1, world, world+1, a prime and 1 MiB. The ranks of the simulated network are threads.
Each result is compared with an oracle to the last bit. A table at the end counts the calls that agreed.
A case is called OPERATION/ALGORITHM/ORDER/DTYPE/REDUCTION, for example all_reduce/ring/any/f32/sum.
--filter takes parts of that name, separated by blanks, and tcp, shm or sim. A transport in the filter runs
every world. Without one, each world runs on one transport, and the worlds of 2 and 3 ranks on two.
The rank that finds a wrong element, or fails otherwise, reports it on stderr.";

const WORLDS: std::ops::RangeInclusive<usize> = 1..=9;
/// The transports, and the world sizes of each if the filter names no transport. Schedules do not depend on
/// the transport, so most world sizes run once. World size 2 has the most special cases, and 3 is the
/// smallest that is not a power of two.
const TRANSPORTS: [(&str, &[usize]); 3] =
    [("tcp", &[1, 2, 3, 5, 8]), ("shm", &[2, 4, 7]), (SIMULATED, &[3, 6, 9])];
const SIMULATED: &str = "sim";

pub(crate) fn run(filter: &str) -> Result<(), Failure> {
    // The features are those of the tests, so that most crates are already built.
    let features = members::all_features()?;
    show(&mut cargo(&format!("build --quiet {features} --bin distctl --example matrix")))?;
    let folder = target_folder()?.join("debug");
    let (transports, words): (Vec<_>, Vec<_>) =
        filter.split_whitespace().partition(|word| TRANSPORTS.iter().any(|(name, _)| name == word));
    let (simulated, processes): (Vec<_>, Vec<_>) =
        jobs(&transports).partition(|(transport, _)| *transport == SIMULATED);
    let run_all = |jobs: Vec<(&str, usize)>| {
        let mut table = Table::default();
        jobs.into_iter().try_for_each(|job| run_job(&folder, job, &words, &mut table))?;
        Ok::<_, Failure>(table)
    };
    // A simulated world occupies one core. The processes use the other cores at the same time.
    let table = std::thread::scope(|scope| {
        let simulated = scope.spawn(|| run_all(simulated));
        let mut table = run_all(processes)?;
        table.append(simulated.join().expect("no job panics")?);
        Ok::<_, Failure>(table)
    })?;
    print(&table.to_string())?;
    table.verdict(filter)
}

/// Returns the transport and the world size of each job.
fn jobs(named: &[&str]) -> impl Iterator<Item = (&'static str, usize)> {
    TRANSPORTS.into_iter().flat_map(move |(transport, assigned)| {
        let is_named = named.contains(&transport);
        let none_named = named.is_empty();
        WORLDS
            .filter(move |world| is_named || none_named && assigned.contains(world))
            .map(move |world| (transport, world))
    })
}

/// Runs all cases of one transport and world, and adds the results to the table.
fn run_job(
    folder: &Path,
    (transport, world): (&str, usize),
    words: &[&str],
    table: &mut Table,
) -> Result<(), Failure> {
    let mut command = command(folder, transport, world);
    command.args(words);
    let held = collect(&mut command, table)?;
    eprintln!("     {transport}, {world} ranks: {}", if held { "all held" } else { "NOT ALL HELD" });
    if !held {
        table.broken.insert(format!("{transport}, {world} ranks: {}", line(&command)));
    }
    Ok(())
}

/// Returns the command that runs all cases of a world.
fn command(folder: &Path, transport: &str, world: usize) -> Command {
    let program = folder.join("examples/matrix");
    if transport == SIMULATED {
        let mut command = Command::new(program);
        command.arg(format!("sim:{world}"));
        return command;
    }
    let mut command = Command::new(folder.join("distctl"));
    command.args(["run", "-n", &world.to_string(), "--"]).arg(program).env("DIST_TRANSPORT", transport);
    // Costs that are measured while other tests run must not be cached.
    command.env("DIST_COSTS", "off");
    command
}

/// Adds every line that a job prints to the table. Returns `true` if the job reported that all cases held.
fn collect(command: &mut Command, table: &mut Table) -> Result<bool, Failure> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let lines = BufReader::new(child.stdout.take().expect("the output is a pipe")).lines();
    for line in lines {
        table.add(&line?)?;
    }
    Ok(child.wait()?.success())
}

/// The number of calls that agreed with the oracle, by transport, operation, algorithm, order and world.
#[derive(Debug, Default)]
struct Table {
    rows: BTreeMap<Row, BTreeMap<usize, Cell>>,
    dtypes: BTreeSet<String>,
    reductions: BTreeSet<String>,
    /// Jobs that failed.
    broken: BTreeSet<String>,
}

/// The transport, the operation, the algorithm and the order.
type Row = [String; 4];

#[derive(Debug, Default, Clone, Copy)]
struct Cell {
    calls: u64,
    wrong: u64,
}

impl Table {
    /// Adds a line of the matrix program's output.
    fn add(&mut self, line: &str) -> Result<(), Failure> {
        let failed = || Failure::Check(format!("this is not a line of the matrix: {line}"));
        let value: Value = serde_json::from_str(line).map_err(|_| failed())?;
        let parse = || {
            let case: Vec<_> = value["case"].as_str()?.split('/').map(str::to_owned).collect();
            let [action, algorithm, order, dtype, reduction] = <[String; 5]>::try_from(case).ok()?;
            let row = [value["transport"].as_str()?.to_owned(), action, algorithm, order];
            let ranks = usize::try_from(value["ranks"].as_u64()?).ok()?;
            Some((row, dtype, reduction, ranks, value["calls"].as_u64()?, value["held"].as_bool()?))
        };
        let (row, dtype, reduction, ranks, calls, held) = parse().ok_or_else(failed)?;
        let cell = self.rows.entry(row).or_default().entry(ranks).or_default();
        cell.calls += calls;
        cell.wrong += u64::from(!held);
        self.dtypes.insert(dtype);
        self.reductions.insert(reduction);
        Ok(())
    }

    /// Adds the results of other jobs.
    fn append(&mut self, other: Self) {
        for (row, cells) in other.rows {
            self.rows.entry(row).or_default().extend(cells);
        }
        self.dtypes.extend(other.dtypes);
        self.reductions.extend(other.reductions);
        self.broken.extend(other.broken);
    }

    fn cells(&self) -> impl Iterator<Item = &Cell> {
        self.rows.values().flat_map(BTreeMap::values)
    }

    fn verdict(&self, filter: &str) -> Result<(), Failure> {
        let wrong: u64 = self.cells().map(|cell| cell.wrong).sum();
        if !self.broken.is_empty() || wrong > 0 {
            let jobs = Vec::from_iter(self.broken.iter().map(String::as_str)).join("\n  ");
            return Err(Failure::Check(format!(
                "matrix: {wrong} cases did not hold; these jobs failed:\n  {jobs}"
            )));
        }
        if self.rows.is_empty() {
            return Err(Failure::Usage(format!("no case has {filter:?} in its name")));
        }
        Ok(())
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let join = |names: &BTreeSet<String>| Vec::from_iter(names.iter().map(String::as_str)).join(" ");
        let calls: u64 = self.cells().map(|cell| cell.calls).sum();
        writeln!(
            f,
            "{calls} calls; elements: {}; reductions: {}",
            join(&self.dtypes),
            join(&self.reductions)
        )?;
        write!(f, "{:5} {:20} {:19} {:9}", "", "operation", "algorithm", "order")?;
        WORLDS.into_iter().try_for_each(|world| write!(f, "{:>6}", format!("n={world}")))?;
        writeln!(f)?;
        for ([transport, action, algorithm, order], cells) in &self.rows {
            write!(f, "{transport:5} {action:20} {algorithm:19} {order:9}")?;
            for world in WORLDS {
                let text = match cells.get(&world) {
                    None => "-".to_owned(),
                    Some(cell) if cell.wrong > 0 => "WRONG".to_owned(),
                    Some(cell) => cell.calls.to_string(),
                };
                write!(f, "{text:>6}")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(lines: &[&str]) -> Table {
        let mut table = Table::default();
        lines.iter().for_each(|line| table.add(line).unwrap());
        table
    }

    const HELD: &str =
        r#"{"case":"all_reduce/ring/any/f32/sum","transport":"tcp","ranks":3,"calls":7,"held":true}"#;
    const WRONG: &str =
        r#"{"case":"all_reduce/ring/any/f32/max","transport":"tcp","ranks":4,"calls":7,"held":false}"#;

    #[test]
    fn calls_are_counted_by_world() {
        let table = with(&[HELD, HELD]);
        assert!(table.verdict("").is_ok());
        let text = table.to_string();
        assert!(text.starts_with("14 calls; elements: f32; reductions: sum\n"), "{text}");
        let row = text.lines().last().unwrap();
        assert_eq!(
            row.split_whitespace().collect::<Vec<_>>()[..7],
            ["tcp", "all_reduce", "ring", "any", "-", "-", "14"]
        );
    }

    #[test]
    fn the_results_of_other_jobs_are_added() {
        let mut table = with(&[HELD]);
        table.append(with(&[WRONG]));
        assert_eq!(table.rows.len(), 1, "both are the same operation, in different worlds");
        assert!(table.verdict("").is_err());
    }

    #[test]
    fn without_a_filter_every_world_runs_on_some_transport() {
        let worlds: BTreeSet<_> = jobs(&[]).map(|(_, world)| world).collect();
        assert!(WORLDS.eq(worlds));
        assert!(jobs(&["shm"]).eq(WORLDS.map(|world| ("shm", world))));
    }

    #[test]
    fn one_wrong_case_fails_its_cell_and_the_whole() {
        let table = with(&[HELD, WRONG]);
        assert!(table.to_string().contains("WRONG"));
        assert!(table.verdict("").is_err());
    }

    #[test]
    fn a_filter_that_matches_nothing_is_an_error() {
        assert!(with(&[]).verdict("nothing").is_err());
        assert!(Table::default().add("all is well").is_err());
    }
}
