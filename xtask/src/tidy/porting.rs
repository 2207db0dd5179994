//! The rule that the names in the tables for those who port a program exist.

use std::collections::BTreeSet;

use super::Finding;
use super::tree::Tree;

/// The page with the tables.
const PAGE: &str = "docs/book/src/porting.md";

/// Names in the tables that other crates define.
const FOREIGN: &[&str] =
    &["Complex", "Duration", "Future", "None", "Pod", "Some", "ndarray", "repr", "serde", "usize"];

/// Every function, type and variant that the tables name on our side exists.
pub(super) fn rule(tree: &Tree) -> Vec<Finding> {
    let Some(page) = tree.file(PAGE) else { return Vec::new() };
    let sources =
        tree.rust_files().filter(|file| file.path.starts_with("crates/") && file.path.contains("/src/"));
    let defined: BTreeSet<&str> = sources.flat_map(|file| file.text.lines().filter_map(defined)).collect();
    let is_known = |name: &&str| defined.contains(*name) || FOREIGN.contains(name);
    let lines = page.text.lines().zip(1..).filter(|(line, _)| line.starts_with('|'));
    let ours = lines.filter_map(|(line, number)| Some((line.split(" | ").nth(1)?, number)));
    let names = ours.flat_map(|(cell, line)| names(cell).into_iter().map(move |name| (name, line)));
    let unknown = names.filter(|(name, _)| !is_known(name));
    unknown
        .map(|(name, line)| Finding::error(&format!("{PAGE}:{line}"), format!("no crate defines `{name}`")))
        .collect()
}

/// Returns the name of the item that a line defines: of a function, type, module, or variant.
fn defined(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let end = |text: &str| text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    let item = ["fn ", "struct ", "enum ", "trait ", "mod ", "type "].into_iter().find_map(|kind| {
        let (before, name) = line.split_once(kind)?;
        (before.is_empty() || before.ends_with(' ')).then(|| &name[..end(name)])
    });
    let is_variant = line.starts_with(char::is_uppercase) && line[end(line)..].starts_with([',', '(', ' ']);
    item.or_else(|| is_variant.then(|| &line[..end(line)]))
}

/// Returns the names that the code of a cell is about: functions that are called, types, and names that stand alone.
fn names(cell: &str) -> Vec<&str> {
    let code =
        cell.split('`').skip(1).step_by(2).filter(|code| !code.contains(' ') || code.contains(['(', ':']));
    code.flat_map(|code| {
        let words = code.split(|c: char| !c.is_alphanumeric() && c != '_');
        words.filter(move |word| is_name(code, word))
    })
    .collect()
}

/// Returns `true` if a word of a piece of code is a name of an item.
fn is_name(code: &str, word: &str) -> bool {
    let (Some(first), Some(at)) = (word.chars().next(), offset(code, word)) else { return false };
    let is_variable_of_the_shell = !word.contains(char::is_lowercase);
    if is_variable_of_the_shell || !first.is_alphabetic() || code.starts_with('_') {
        return false;
    }
    let rest = &code[at + word.len()..];
    let ends_a_path = rest.is_empty() && code.chars().all(|c| c.is_alphanumeric() || c == '_' || c == ':');
    rest.starts_with(['(', '<']) || first.is_uppercase() || ends_a_path
}

/// Returns the position of a part of a text.
fn offset(text: &str, part: &str) -> Option<usize> {
    (part.as_ptr() as usize).checked_sub(text.as_ptr() as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_types_modules_and_variants_are_defined() {
        let lines = [
            "    pub fn send<T>(",
            "pub(crate) const fn f()",
            "pub struct Mesh {",
            "mod sim;",
            "    Sum,",
            "    PreMulSum(f64),",
        ];
        assert_eq!(lines.map(defined), ["send", "f", "Mesh", "sim", "Sum", "PreMulSum"].map(Some));
        assert_eq!(["    let x = send(1);", "    comm.send(&x, 1)?;", "// a fn"].map(defined), [None; 3]);
    }

    #[test]
    fn names_are_calls_types_and_words_that_stand_alone() {
        let cell = "`comm.with_tag(t).send(&x, to)?`, `all_gather`, `dist::collectives::kernel::combine`, `_v`; \
                    `distctl run -n 4 --`, `RUST_LOG`, `Group::new(&mut comm, &ranks)?`, `PreMulSum(factor)`";
        assert_eq!(names(cell), ["with_tag", "send", "all_gather", "combine", "Group", "new", "PreMulSum"]);
    }
}
