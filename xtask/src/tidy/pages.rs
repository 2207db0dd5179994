//! Rules about Markdown pages: the links of all of them, and the sentences and the code of the guide.

use std::collections::BTreeMap;

use super::Finding;
use super::markdown::{Block, Page};
use super::tree::{File, Tree};

/// The folder of the pages of the guide.
pub(crate) const BOOK: &str = "docs/book/src/";

/// The most words that the sentences of a page may have on average.
const MEAN_WORDS_MAX: usize = 20;
/// The most words that a sentence may have.
const WORDS_MAX: usize = 40;

/// Returns the pages with limited sentence length: the guide and the README.
fn read_by_newcomers(tree: &Tree) -> impl Iterator<Item = &File> {
    pages(tree).filter(|file| file.path.starts_with(BOOK) || file.path == "README.md")
}

fn pages(tree: &Tree) -> impl Iterator<Item = &File> {
    tree.files.iter().filter(|file| file.path.ends_with(".md"))
}

pub(super) fn short_sentences(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in read_by_newcomers(tree) {
        let page = Page::read(&file.text);
        for sentence in page.sentences.iter().filter(|sentence| sentence.words() > WORDS_MAX) {
            let text =
                format!("a sentence of {} words, {WORDS_MAX} at most: {}", sentence.words(), sentence.text);
            findings.push(Finding::error(&format!("{}:{}", file.path, sentence.line), text));
        }
        let complete: Vec<_> = page.sentences.iter().filter(|sentence| sentence.complete).collect();
        let words: usize = complete.iter().map(|sentence| sentence.words()).sum();
        if words > MEAN_WORDS_MAX * complete.len() {
            let mean = words as f64 / complete.len() as f64;
            let text = format!("sentences have {mean:.1} words on average, {MEAN_WORDS_MAX} at most");
            findings.push(Finding::error(&file.path, text));
        }
    }
    findings
}

/// Checks that every link inside the repository leads to an existing file and heading.
pub(super) fn links(tree: &Tree) -> Vec<Finding> {
    let read: BTreeMap<_, _> = pages(tree).map(|file| (file.path.as_str(), Page::read(&file.text))).collect();
    let mut findings = Vec::new();
    for (&path, page) in &read {
        for link in page.links.iter().filter(|link| is_in_repository(&link.target)) {
            if let Err(wrong) = check_link(tree, &read, path, &link.target) {
                findings.push(Finding::error(
                    &format!("{path}:{}", link.line),
                    format!("{}: {wrong}", link.target),
                ));
            }
        }
    }
    findings
}

/// Returns `true` if a link names a file or a heading, not an address or an item of the code.
fn is_in_repository(target: &str) -> bool {
    let has_scheme = target.contains("://") || target.starts_with("mailto:");
    let is_path = target.contains(['/', '#']) || target.ends_with(".md");
    is_path && !has_scheme && !target.contains("::")
}

fn check_link(tree: &Tree, read: &BTreeMap<&str, Page>, from: &str, target: &str) -> Result<(), String> {
    let (path, anchor) = target.split_once('#').map_or((target, None), |(path, anchor)| (path, Some(anchor)));
    let path = if path.is_empty() { from.to_owned() } else { resolve(from, path) };
    if from.starts_with(BOOK) && !path.starts_with(BOOK) {
        return Err("this leads out of the book: name a page of it or an address".to_owned());
    }
    let is_folder = || tree.files.iter().any(|file| file.path.starts_with(&format!("{path}/")));
    if tree.file(&path).is_none() && !is_folder() {
        return Err("there is no such file".to_owned());
    }
    match (anchor, read.get(path.as_str())) {
        (Some(anchor), Some(page)) if !page.anchors.iter().any(|known| known == anchor) => {
            Err(format!("{path} has no such heading"))
        }
        _ => Ok(()),
    }
}

/// Returns the path from the root of the workspace for a link on a page.
fn resolve(from: &str, link: &str) -> String {
    let mut folders: Vec<_> = from.split('/').collect();
    folders.pop();
    for part in link.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(folders.pop()),
            part => folders.push(part),
        }
    }
    folders.join("/")
}

/// Languages of the guide's blocks. Every block of Rust is compiled and every command of a console is checked.
const LANGUAGES: &[&str] = &["rust", "console", "toml", "text", "json", "python", "c", "cpp", "yaml"];

/// Checks that every page of the guide is in its table of contents, and that its code is tested.
pub(super) fn book(tree: &Tree) -> Vec<Finding> {
    let Some(summary) = tree.file(&format!("{BOOK}SUMMARY.md")) else { return Vec::new() };
    let listed = Page::read(&summary.text).links;
    let mut findings = Vec::new();
    for file in pages(tree).filter(|file| file.path != summary.path) {
        let Some(name) = file.path.strip_prefix(BOOK) else { continue };
        if !listed.iter().any(|link| link.target == name) {
            findings.push(Finding::error(&file.path, "SUMMARY.md does not list this page"));
        }
        let blocks = Page::read(&file.text).blocks;
        if blocks.iter().any(|block| block.language() == "rust") && !is_tested(tree, name) {
            let text = format!(
                "its Rust is not tested: add #[doc = include_str!(\"src/{name}\")] to docs/book/pages.rs"
            );
            findings.push(Finding::error(&file.path, text));
        }
        let wrong = blocks.iter().filter_map(|block| Some((block, wrong_with(block)?)));
        findings.extend(
            wrong.map(|(block, text)| Finding::error(&format!("{}:{}", file.path, block.line), text)),
        );
    }
    findings
}

fn wrong_with(block: &Block) -> Option<String> {
    if !LANGUAGES.contains(&block.language()) {
        let known = LANGUAGES.join(", ");
        return Some(format!("this block is of {:?}, not of one of {known}", block.language()));
    }
    let is_ignored = block.language() == "rust" && block.info.contains("ignore");
    is_ignored
        .then(|| "this block is not compiled: write `rust`, or `rust,no_run` if it cannot run".to_owned())
}

/// Returns `true` if some crate includes the page as documentation, so that its code is tested.
fn is_tested(tree: &Tree, name: &str) -> bool {
    let included = |file: &File| {
        let end = if file.path == "docs/book/pages.rs" {
            format!("\"src/{name}\"")
        } else {
            format!("/{BOOK}{name}\"")
        };
        file.text.lines().any(|line| line.contains("include_str!") && line.contains(&end))
    };
    tree.rust_files().any(included)
}

/// Commands of cargo itself and of plugins that the guide may use.
const CARGO: &[&str] = &[
    "add", "bench", "build", "check", "clippy", "doc", "init", "install", "new", "nextest", "run", "test",
    "update",
];

/// Checks that every `cargo` command in the guide exists.
pub(super) fn cargo_commands(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in read_by_newcomers(tree) {
        let blocks = Page::read(&file.text).blocks;
        for (line, command) in
            blocks.iter().filter(|block| block.language() == "console").flat_map(Block::commands)
        {
            let words: Vec<_> = command.split_whitespace().collect();
            for (at, _) in words.iter().enumerate().filter(|(_, word)| **word == "cargo") {
                let until = words[at..].iter().position(|word| matches!(*word, "&&" | "|" | ";" | "--"));
                let words = &words[at + 1..until.map_or(words.len(), |end| at + end)];
                let wrong = wrong_with_cargo(tree, words);
                findings.extend(wrong.map(|text| Finding::error(&format!("{}:{line}", file.path), text)));
            }
        }
    }
    findings
}

fn wrong_with_cargo(tree: &Tree, words: &[&str]) -> Option<String> {
    let command = words.first().copied().unwrap_or_default();
    let aliases = tree.file(".cargo/config.toml").map_or("", |file| &file.text);
    let is_alias = aliases.lines().any(|line| line.starts_with(&format!("{command} = ")));
    if !is_alias && !CARGO.contains(&command) {
        return Some(format!("there is no cargo {command}"));
    }
    let is_known = |name: &&str| *name == "--help" || crate::commands().any(|known| known == *name);
    if command == "xtask" && !words.get(1).is_some_and(is_known) {
        return Some(format!("there is no cargo xtask {}", words.get(1).unwrap_or(&"")));
    }
    words.windows(2).find_map(|pair| match *pair {
        ["-p" | "--package", name]
            if name.starts_with("dist") && !tree.packages.iter().any(|it| it.name == name) =>
        {
            Some(format!("there is no package {name}"))
        }
        ["--example", name] if !has_example(tree, name) => Some(format!("there is no example {name}")),
        ["--path", path] if !is_folder(tree, path) => Some(format!("there is no folder {path}")),
        _ => None,
    })
}

fn has_example(tree: &Tree, name: &str) -> bool {
    let ends = [format!("/examples/{name}.rs"), format!("/examples/{name}/main.rs")];
    tree.rust_files().any(|file| ends.iter().any(|end| file.path.ends_with(end)))
}

/// Returns `true` if this is a folder of the workspace, either by its path in the workspace or from the
/// parent folder of a clone called `dist`.
fn is_folder(tree: &Tree, path: &str) -> bool {
    let path = format!("{}/", path.strip_prefix("../dist/").unwrap_or(path));
    tree.files.iter().any(|file| file.path.starts_with(&path))
}
