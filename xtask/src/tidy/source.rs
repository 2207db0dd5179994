//! Rules about Rust files.

use super::Finding;
use super::tree::{File, Tree};

pub(super) fn headers(tree: &Tree) -> Vec<Finding> {
    let first_line = |file: &File| file.text.lines().next().unwrap_or_default().to_owned();
    let begins_well = |line: &str| line.starts_with("//! ") || line.starts_with("#![doc = include_str!");
    let without = tree.rust_files().filter(|file| !begins_well(&first_line(file)));
    without
        .map(|file| Finding::error(&file.path, "line 1 must be `//!` with the contents of the file"))
        .collect()
}

/// The files that may say `unsafe`.
const UNSAFE_ALLOWED: &[&str] = &[
    // Instructions of the processor.
    "crates/dist-collectives/src/kernel/native.rs",
    // Checked plans on shared memory.
    "crates/dist-collectives/src/engine/direct_access.rs",
    // Requests of an MPI library.
    "crates/dist-mpi/src/library.rs",
    // Tensors of PyTorch, which Python owns.
    "crates/dist-torch/src/memory.rs",
    // Memory that processes have mapped together.
    "crates/dist-transport/src/shm_group.rs",
    "crates/dist-transport/src/host_memory/group_memory.rs",
    "crates/dist-transport/src/host_memory/group_pool.rs",
    "crates/dist-transport/src/host_memory/heap.rs",
    "crates/dist-transport/src/host_memory/mapping.rs",
    "crates/dist-transport/src/host_memory/mapping_tests.rs",
    "crates/dist-transport/src/host_memory/remote_process.rs",
    "crates/dist-transport/src/host_memory/mapped_group.rs",
    "crates/dist-transport/src/link/shm/segment.rs",
    "crates/dist-transport/src/process/with_shared_memory.rs",
    "crates/dist-transport/src/sim/sim_shm_group.rs",
    // Tests and measurements of that memory without plans.
    "crates/dist-transport/examples/floor.rs",
    "crates/dist-transport/src/conformance/unchecked.rs",
    "crates/dist-transport/tests/death.rs",
    "crates/dist-transport/tests/shm.rs",
];

pub(super) fn no_unsafe(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.rust_files().filter(|file| !UNSAFE_ALLOWED.contains(&file.path.as_str())) {
        for (number, line) in code_only(&file.text).lines().enumerate() {
            if words(line).any(|word| word == "unsafe") {
                let path = format!("{}:{}", file.path, number + 1);
                findings.push(Finding::error(&path, "unsafe code is not allowed in this file"));
            }
        }
    }
    findings
}

/// File names without information about the contents.
const EMPTY_NAMES: &[&str] =
    &["base", "common", "helper", "helpers", "manager", "misc", "types", "util", "utils"];

pub(super) fn names(tree: &Tree) -> Vec<Finding> {
    let says_nothing = |path: &str| {
        path.split('/').any(|part| EMPTY_NAMES.contains(&part.strip_suffix(".rs").unwrap_or(part)))
    };
    let empty = tree.rust_files().filter(|file| says_nothing(&file.path));
    empty.map(|file| Finding::error(&file.path, "this name says nothing about the contents")).collect()
}

pub(super) fn no_glob_exports(tree: &Tree) -> Vec<Finding> {
    let exports_all = |line: &str| line.trim_start().starts_with("pub use") && line.contains("::*");
    let globs = tree.rust_files().filter(|file| code_only(&file.text).lines().any(exports_all));
    globs.map(|file| Finding::error(&file.path, "a glob re-export hides the public items")).collect()
}

const FILE_LINES_MAX: usize = 500;
const FUNCTION_LINES_MAX: usize = 70;

pub(super) fn lengths(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.rust_files() {
        let lines = file.text.lines().count();
        if lines > FILE_LINES_MAX {
            findings.push(Finding::warning(&file.path, format!("{lines} lines: is this two things?")));
        }
        for (number, lines) in functions(&file.text).filter(|(_, lines)| *lines > FUNCTION_LINES_MAX) {
            let path = format!("{}:{number}", file.path);
            findings.push(Finding::warning(&path, format!("a function of {lines} lines: split it")));
        }
    }
    findings
}

/// Returns the first line number and the number of lines of each function. The file must be formatted by
/// rustfmt.
fn functions(text: &str) -> impl Iterator<Item = (usize, usize)> {
    let lines: Vec<_> = text.lines().collect();
    let starts = (0..lines.len()).filter(|&at| is_function(lines[at])).collect::<Vec<_>>();
    starts.into_iter().filter_map(move |start| {
        let indent = lines[start].len() - lines[start].trim_start().len();
        let end = format!("{}}}", &lines[start][..indent]);
        let length = lines[start..].iter().position(|line| *line == end)? + 1;
        Some((start + 1, length))
    })
}

fn is_function(line: &str) -> bool {
    // One-line functions and declarations in traits have no separate closing line.
    let ends_here = line.ends_with(';') || line.ends_with('}');
    let code = line.trim_start();
    let begins = code.starts_with("fn ")
        || (code.starts_with("pub") || code.starts_with("const fn")) && code.contains(" fn ");
    begins && !ends_here
}

fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !c.is_alphanumeric() && c != '_')
}

/// Returns the text with comments, strings and characters replaced by blanks, line for line.
fn code_only(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let skipped = not_code(rest);
        if skipped == 0 {
            out.push(first);
            rest = &rest[first.len_utf8()..];
        } else {
            out.extend(rest[..skipped].chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
            rest = &rest[skipped..];
        }
    }
    out
}

/// Returns the length in bytes of the comment, string or character at the beginning of the text, or 0.
fn not_code(text: &str) -> usize {
    let up_to = |start: usize, end: &str| {
        text[start..].find(end).map_or(text.len(), |position| start + position + end.len())
    };
    if text.starts_with("//") {
        text.find('\n').unwrap_or(text.len())
    } else if text.starts_with("/*") {
        up_to(2, "*/")
    } else if let Some(hashes) = raw_string(text) {
        up_to(hashes + 2, &format!("\"{}", "#".repeat(hashes)))
    } else if let Some(inside) = text.strip_prefix('"') {
        1 + literal(inside, '"')
    } else if is_character(text) {
        1 + literal(&text[1..], '\'')
    } else {
        0
    }
}

/// Returns the number of `#` of the raw string at the beginning of the text, if there is one.
fn raw_string(text: &str) -> Option<usize> {
    let after = text.strip_prefix('r')?;
    let hashes = after.len() - after.trim_start_matches('#').len();
    after[hashes..].starts_with('"').then_some(hashes)
}

/// Returns `true` for a quote that begins a character and not a lifetime.
fn is_character(text: &str) -> bool {
    let mut characters = text.chars();
    characters.next() == Some('\'')
        && match characters.next() {
            Some('\\') => true,
            Some(_) => characters.next() == Some('\''),
            None => false,
        }
}

/// Returns the number of bytes up to and including the closing quote. Escaped quotes do not close.
fn literal(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (position, c) in text.char_indices() {
        if c == quote && !escaped {
            return position + 1;
        }
        escaped = c == '\\' && !escaped;
    }
    text.len()
}
