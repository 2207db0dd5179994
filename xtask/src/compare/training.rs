//! Compares steps of training with PyTorch: the time that the exchange of gradients adds, and the memory that it needs.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use super::peers::{Peer, Programs, limited};
use super::plan::Plan;
use super::results::{median, number};
use super::sources;
use crate::command::{Failure, cargo, line, output};

/// The modes: one process alone, all processes without communication, and three strategies.
const MODES: [&str; 5] = ["alone", "local", "ddp", "zero2", "fsdp"];

/// Makes glibc keep freed memory, in all programs. Otherwise it returns pieces of more than 32 MiB to the system each time,
/// and allocating them again can take half of a step.
const KEPT_MEMORY: [(&str, &str); 2] =
    [("MALLOC_MMAP_THRESHOLD_", "2000000000"), ("MALLOC_TRIM_THRESHOLD_", "8000000000")];

/// Measures every model with every library and mode, in turns.
pub(super) fn measure(plan: &Plan, programs: &Programs<'_>, out: &Path) -> Result<(), Failure> {
    let what = "--package dist-cli --bin distctl --package dist-candle --example step_time";
    output(&mut cargo(&format!("build --quiet --release {what}")))?;
    let torch = plan.wants("torch").then(|| programs.prepare(Peer::Gloo));
    if let Some(Err(reason)) = &torch {
        eprintln!("     torch: skipped, {reason}");
    }
    let with_torch = matches!(torch, Some(Ok(())));
    let mut lines = OpenOptions::new().create(true).append(true).open(out)?;
    for round in 1..=plan.rounds {
        for (model, &ranks) in
            plan.models.iter().flat_map(|model| plan.ranks.iter().map(move |ranks| (model, ranks)))
        {
            for mut command in commands(plan, programs, model, ranks, with_torch) {
                eprintln!("     round {round}: {}", line(&command));
                let ran = command.stdin(Stdio::null()).output()?;
                if !ran.status.success() {
                    eprintln!("     this failed: {}", line(&command));
                }
                lines.write_all(&ran.stdout)?;
            }
        }
    }
    Ok(())
}

/// Returns the commands for this library in every mode, over the transports that matter for the mode, and for PyTorch. All of
/// them have a time limit.
fn commands(
    plan: &Plan,
    programs: &Programs<'_>,
    model: &str,
    ranks: usize,
    with_torch: bool,
) -> Vec<Command> {
    let mut commands = Vec::new();
    for mode in MODES.into_iter().filter(|_| plan.wants("dist")) {
        let (ranks, mode) = if mode == "alone" { (1, "local") } else { (ranks, mode) };
        let transports = if mode == "local" { &plan.transports[..1] } else { &plan.transports };
        let program = programs.ours.with_file_name("examples").join("step_time");
        commands.extend(transports.iter().filter_map(|transport| {
            let mut command = programs.start(Peer::Ours, transport, ranks, &program)?;
            command.args([model, mode]).env("RAYON_NUM_THREADS", "1");
            Some(command)
        }));
    }
    for mode in MODES.into_iter().filter(|_| with_torch) {
        let mut command = limited();
        command.arg(programs.python()).arg(sources().join("train.py"));
        command.args([&ranks.to_string(), model, mode]).env("OMP_NUM_THREADS", "1");
        commands.push(command);
    }
    for command in &mut commands {
        command.envs(KEPT_MEMORY);
    }
    commands
}

/// The measurements of all rounds: times of a step in microseconds, and memory in MiB.
#[derive(Debug, Default)]
struct Cell {
    times: Vec<f64>,
    peaks: Vec<f64>,
}

/// The measurements by number of ranks and model, by library and transport, and by mode.
type Cells = BTreeMap<(usize, String), BTreeMap<String, BTreeMap<String, Cell>>>;

/// Returns Markdown tables: times, with the difference to processes without communication, and memory.
pub(super) fn tables(text: &str, plan: &Plan) -> String {
    let mut tables = String::new();
    for &ranks in &plan.ranks {
        let cells = read(text, plan, ranks);
        let _ =
            write!(tables, "\n{ranks} ranks, milliseconds per step, and how much longer than side by side\n");
        tables += &table(&cells, |mode, cell, row| {
            let time = median(&cell.times);
            let beside = row.get("local").filter(|_| !matches!(mode, "alone" | "local"));
            let longer =
                beside.map(|beside| format!(" ({:+.0} %)", 100.0 * (time / median(&beside.times) - 1.0)));
            number(time / 1e3) + &longer.unwrap_or_default()
        });
        let _ = write!(tables, "\n{ranks} ranks, the most memory of a rank, MiB\n");
        tables += &table(&cells, |_, cell, _| number(median(&cell.peaks)));
    }
    tables
}

/// Reads the results of this number of ranks, and of one rank alone.
fn read(text: &str, plan: &Plan, ranks: usize) -> Cells {
    let mut cells = Cells::new();
    for value in text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        let word = |name: &str| value[name].as_str().unwrap_or_default().to_owned();
        let operation = word("op");
        let Some((mode, model)) =
            operation.strip_prefix("step-").and_then(|operation| operation.split_once('-'))
        else {
            continue;
        };
        let of_ranks = value["ranks"].as_u64() == Some(if mode == "alone" { 1 } else { ranks as u64 });
        let (Some(time), Some(peak)) = (value["median_us"].as_f64(), value["peak_MiB"].as_f64()) else {
            continue;
        };
        let place = plan.models.iter().position(|wanted| wanted == model);
        let Some(place) = place.filter(|_| of_ranks && plan.wants(&word("peer"))) else { continue };
        let mut libraries = vec![format!("{} {}", word("peer"), word("transport"))];
        if word("peer") == "dist" && matches!(mode, "alone" | "local") {
            // Nothing is sent.
            libraries = plan.transports.iter().map(|transport| format!("dist {transport}")).collect();
        }
        for library in libraries {
            let rows = cells.entry((place, model.to_owned())).or_default();
            let cell = rows.entry(library).or_default().entry(mode.to_owned()).or_default();
            cell.times.push(time);
            cell.peaks.push(peak);
        }
    }
    cells
}

fn table(cells: &Cells, show: impl Fn(&str, &Cell, &BTreeMap<String, Cell>) -> String) -> String {
    let mut text = format!("\n| | | {} |\n|---|---|{}\n", MODES.join(" | "), "---|".repeat(MODES.len()));
    for ((_, model), rows) in cells {
        for (library, row) in rows {
            let shown = MODES.map(|mode| row.get(mode).map_or("-".to_owned(), |cell| show(mode, cell, row)));
            let _ = writeln!(text, "| {model} | {library} | {} |", shown.join(" | "));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::plan;

    fn line(peer: &str, mode: &str, ranks: usize, median_us: f64, peak: f64) -> String {
        format!(
            r#"{{"peer":"{peer}","transport":"shm","op":"step-{mode}-mlp-1M","ranks":{ranks},"median_us":{median_us},"peak_MiB":{peak}}}"#
        )
    }

    #[test]
    fn times_are_put_beside_those_side_by_side() {
        let lines = [
            line("dist", "alone", 1, 1000.0, 10.0),
            line("dist", "local", 2, 2000.0, 11.0),
            line("dist", "ddp", 2, 2500.0, 12.0),
            line("dist", "ddp", 2, 3000.0, 14.0),
            line("dist", "ddp", 4, 9000.0, 14.0),
            "noise".to_owned(),
            line("torch", "ddp", 2, 4000.0, 20.0),
        ];
        let arguments = ["--training", "--ranks", "2", "--transport", "shm"];
        let plan = plan::parse(lexopt::Parser::from_args(arguments)).unwrap().unwrap();
        let expected = "
2 ranks, milliseconds per step, and how much longer than side by side

| | | alone | local | ddp | zero2 | fsdp |
|---|---|---|---|---|---|---|
| mlp-1M | dist shm | 1.00 | 2.00 | 2.50 (+25 %) | - | - |
| mlp-1M | torch shm | - | - | 4.00 | - | - |

2 ranks, the most memory of a rank, MiB

| | | alone | local | ddp | zero2 | fsdp |
|---|---|---|---|---|---|---|
| mlp-1M | dist shm | 10.0 | 11.0 | 12.0 | - | - |
| mlp-1M | torch shm | - | - | 20.0 | - | - |
";
        assert_eq!(tables(&lines.join("\n"), &plan), expected);
    }
}
