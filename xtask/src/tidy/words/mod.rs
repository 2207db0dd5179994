//! Rules about words: names and comments use the terms of the field.

mod comments;
mod definitions;
mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use super::Finding;
use super::tree::{File, Tree};
use comments::Comment;
use definitions::{Definition, Definitions, Kind};
use table::{CRATES, METAPHORS, NAMES, SHARED_TYPE_NAMES, STAND_IN, UNIQUE_TYPES};

/// The most words that a sentence of a comment may have.
const SENTENCE_WORDS_MAX: usize = 40;
/// The most lines of comments that may begin like a question, per 1,000 words. quinn, rustls and ripgrep have 1 to 2.
const QUESTIONS_MAX: f64 = 4.0;
/// The number of comments that a person is shown to judge.
const DRAWN: usize = 10;

/// The words of the crates that are checked.
#[derive(Debug, Default)]
pub(super) struct Words<'a> {
    crates: Vec<CrateWords<'a>>,
}

/// The words of one crate.
#[derive(Debug)]
struct CrateWords<'a> {
    name: &'static str,
    files: Vec<FileWords<'a>>,
}

#[derive(Debug)]
struct FileWords<'a> {
    file: &'a File,
    definitions: Result<Definitions, (usize, String)>,
    comments: Vec<Comment>,
}

/// Checks the words of the crates that [`CRATES`] lists.
pub(super) fn rule(tree: &Tree) -> Vec<Finding> {
    Words::read(tree).findings(tree)
}

impl<'a> Words<'a> {
    /// Reads the crates on as many threads as there are crates.
    pub(super) fn read(tree: &'a Tree) -> Self {
        let read = |name: &&'static str| CrateWords::read(tree, name);
        let crates = std::thread::scope(|scope| {
            let threads: Vec<_> = CRATES.iter().map(|name| scope.spawn(move || read(name))).collect();
            threads.into_iter().map(|thread| thread.join().expect("a reader does not panic")).collect()
        });
        Self { crates }
    }

    pub(super) fn findings(&self, tree: &Tree) -> Vec<Finding> {
        let mut findings: Vec<_> = self.crates.iter().flat_map(CrateWords::findings).collect();
        findings.extend(self.repeated_types(tree));
        findings
    }

    /// Finds type names that are defined twice in a crate, or in two crates of [`UNIQUE_TYPES`] that depend on each
    /// other.
    fn repeated_types(&self, tree: &Tree) -> Vec<Finding> {
        let mut by_name: BTreeMap<&str, Vec<(&str, &File, usize)>> = BTreeMap::new();
        for words in &self.crates {
            for (file, definition) in words.own_types() {
                by_name.entry(&definition.name).or_default().push((words.name, file, definition.line));
            }
        }
        let mut findings = Vec::new();
        for (name, places) in by_name {
            for (index, &(package, file, line)) in places.iter().enumerate() {
                let earlier = places[..index].iter().find(|(other, ..)| may_not_share(tree, package, other));
                if let Some((_, other, other_line)) = earlier {
                    let text = format!("the type {name} is defined in {}:{other_line} as well", other.path);
                    findings.push(Finding::error(&format!("{}:{line}", file.path), text));
                }
            }
        }
        findings
    }

    /// Returns the page that `--words` prints: figures of each crate, and random comments to judge.
    pub(super) fn report(&self, seed: u64) -> String {
        let mut page = String::new();
        let head =
            ["crate", "comments", "words", "questions per 1,000 words", "sentences", "words each", "longest"];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        rows.extend(self.crates.iter().map(CrateWords::figures));
        for row in rows {
            let cells = row
                .iter()
                .zip(&head)
                .map(|(cell, head)| format!("{cell:>width$}", width = head.len().max(16)));
            let _ = writeln!(page, "{}", cells.collect::<Vec<_>>().join("  "));
        }
        let _ = writeln!(page, "\n{DRAWN} comments drawn by --seed {seed}. Is each clear at first reading?");
        for (file, comment) in self.draw(seed) {
            let text = comment.text.replace('\n', "\n    ");
            let _ = writeln!(page, "\n{}:{}\n    {text}", file.path, comment.line);
        }
        page
    }

    fn draw(&self, seed: u64) -> Vec<(&File, &Comment)> {
        let files = self.crates.iter().flat_map(|words| &words.files);
        let all = files.flat_map(|words| words.comments.iter().map(move |comment| (words.file, comment)));
        let all: Vec<_> = all.filter(|(_, comment)| comment.words() > 5).collect();
        fastrand::Rng::with_seed(seed).choose_multiple(all, DRAWN)
    }
}

impl<'a> CrateWords<'a> {
    fn read(tree: &'a Tree, name: &'static str) -> Self {
        let folder = format!("crates/{name}/");
        let files = tree.rust_files().filter(|file| file.path.starts_with(&folder));
        let read = |file: &'a File| FileWords {
            file,
            definitions: Definitions::read(&file.text),
            comments: Comment::read(&file.text),
        };
        Self { name, files: files.map(read).collect() }
    }

    /// Returns the crate's own types, without those of tests and of files that replace another crate.
    fn own_types(&self) -> impl Iterator<Item = (&File, &Definition)> {
        let source = format!("crates/{}/src/", self.name);
        let files = self.files.iter().filter(move |words| {
            words.file.path.starts_with(&source) && !words.file.path.ends_with(STAND_IN)
        });
        let names = files.flat_map(|words| words.names().map(move |definition| (words.file, definition)));
        names.filter(|(_, definition)| {
            definition.kind == Kind::Type && !SHARED_TYPE_NAMES.contains(&definition.name.as_str())
        })
    }

    fn findings(&self) -> Vec<Finding> {
        let mut findings: Vec<_> = self.files.iter().flat_map(|words| words.findings(self.name)).collect();
        let questions = self.questions();
        if questions >= QUESTIONS_MAX {
            let text = format!(
                "{questions:.1} of 1,000 words of comments begin a line as a question does: {QUESTIONS_MAX} at most"
            );
            findings.push(Finding::error(&format!("crates/{}", self.name), text));
        }
        findings
    }

    fn comments(&self) -> impl Iterator<Item = &Comment> {
        self.files.iter().flat_map(|words| &words.comments)
    }

    fn words(&self) -> usize {
        self.comments().map(Comment::words).sum()
    }

    /// Lines that begin like a question, per 1,000 words of comments.
    fn questions(&self) -> f64 {
        let lines: usize = self.comments().map(Comment::question_lines).sum();
        1000.0 * lines as f64 / self.words().max(1000) as f64
    }

    fn figures(&self) -> Vec<String> {
        let lengths: Vec<_> = self.comments().flat_map(Comment::sentences).map(|it| it.words()).collect();
        let mean = lengths.iter().sum::<usize>() as f64 / lengths.len().max(1) as f64;
        vec![
            self.name.to_owned(),
            self.comments().count().to_string(),
            self.words().to_string(),
            format!("{:.1}", self.questions()),
            lengths.len().to_string(),
            format!("{mean:.1}"),
            lengths.iter().max().copied().unwrap_or_default().to_string(),
        ]
    }
}

impl FileWords<'_> {
    fn names(&self) -> impl Iterator<Item = &Definition> {
        self.definitions.iter().flat_map(|definitions| &definitions.names)
    }

    fn findings(&self, package: &str) -> Vec<Finding> {
        let at = |line: usize, text: String| Finding::error(&format!("{}:{line}", self.file.path), text);
        let definitions = match &self.definitions {
            Ok(definitions) => definitions,
            Err((line, error)) => return vec![at(*line, format!("this cannot be parsed: {error}"))],
        };
        let mut findings = Vec::new();
        for definition in &definitions.names {
            findings.extend(private_name(package, definition).map(|text| at(definition.line, text)));
        }
        for literal in &definitions.literals {
            findings.extend(
                metaphor(&literal.text).map(|text| at(literal.line, format!("the text says {text}"))),
            );
        }
        for sentence in self.comments.iter().flat_map(Comment::sentences) {
            findings.extend(
                metaphor(&sentence.text).map(|text| at(sentence.line, format!("the comment says {text}"))),
            );
            if sentence.words() > SENTENCE_WORDS_MAX {
                let text = format!(
                    "a sentence of {} words, {SENTENCE_WORDS_MAX} at most: {}",
                    sentence.words(),
                    sentence.text
                );
                findings.push(at(sentence.line, text));
            }
        }
        findings
    }
}

/// Returns `true` if no type name may be defined in both crates.
fn may_not_share(tree: &Tree, name: &str, other: &str) -> bool {
    let unique = UNIQUE_TYPES.contains(&name) && UNIQUE_TYPES.contains(&other);
    name == other || unique && (below(tree, name).contains(other) || below(tree, other).contains(name))
}

/// Returns the crates that a crate depends on, directly or indirectly, without dev-dependencies.
fn below<'a>(tree: &'a Tree, name: &'a str) -> BTreeSet<&'a str> {
    let mut all = BTreeSet::new();
    let mut open = vec![name];
    while let Some(name) = open.pop() {
        let package = tree.packages.iter().find(|package| package.name == name);
        let names = package.into_iter().flat_map(|package| &package.dependencies).filter(|it| !it.dev);
        open.extend(names.map(|it| it.name.as_str()).filter(|name| all.insert(*name)));
    }
    all
}

/// Returns why a definition may not have its name.
fn private_name(package: &str, definition: &Definition) -> Option<String> {
    let Definition { kind, name, .. } = definition;
    let is_meant = |it: &&table::PrivateName| {
        it.kind == *kind && it.name == name && (it.crates.is_empty() || it.crates.contains(&package))
    };
    let private =
        NAMES.iter().find(is_meant).map(|it| format!("{name} is a private word: say {}", it.standard));
    private.or_else(|| metaphor(&words_of(name)).map(|text| format!("{name} says {text}")))
}

/// Returns the words of a name in snake case or camel case.
fn words_of(name: &str) -> String {
    let spaced =
        name.chars().flat_map(|c| [c.is_uppercase().then_some(' '), Some(if c == '_' { ' ' } else { c })]);
    spaced.flatten().collect()
}

/// Returns the first metaphor of a text, with the term to use instead.
fn metaphor(text: &str) -> Option<String> {
    let words: Vec<_> = text
        .split(|c: char| !c.is_alphabetic())
        .filter(|word| !word.is_empty())
        .map(str::to_lowercase)
        .collect();
    let begins = |words: &[String], phrase: &str| {
        let mut wanted = phrase.split(' ');
        let first = wanted.next().unwrap_or_default();
        let rest: Vec<_> = wanted.collect();
        is_form_of(&words[0], first)
            && words[1..].len() >= rest.len()
            && words[1..].iter().zip(&rest).all(|(word, wanted)| word == wanted)
    };
    let found =
        (0..words.len()).find_map(|at| METAPHORS.iter().find(|(phrase, _)| begins(&words[at..], phrase)))?;
    Some(format!("“{}”: say {}", found.0, found.1))
}

/// Returns `true` for a word, its plural and its verb forms.
fn is_form_of(word: &str, stem: &str) -> bool {
    let ending = word.strip_prefix(stem);
    ending.is_some_and(|ending| matches!(ending, "" | "s" | "es" | "ed" | "ing"))
        || stem.strip_suffix('y').and_then(|stem| word.strip_prefix(stem)) == Some("ies")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metaphor_is_found_in_all_its_forms_and_in_no_other_word() {
        for text in ["a tray", "Trays.", "it knocks", "knocking", "courtesies", "It is laid open."] {
            assert!(metaphor(text).is_some(), "{text}");
        }
        for text in ["pending", "outdoor", "aggregate", "investigate", "open", "laid out", ""] {
            assert_eq!(metaphor(text), None, "{text}");
        }
    }

    #[test]
    fn the_words_of_names_are_those_between_underscores_and_capitals() {
        assert_eq!(words_of("a_bell_rings").trim(), "a bell rings");
        assert_eq!(words_of("BellRope").trim(), "Bell Rope");
    }

    #[test]
    fn every_private_name_is_listed_once_for_a_crate() {
        for (index, name) in NAMES.iter().enumerate() {
            let is_same = |other: &&table::PrivateName| {
                let overlaps =
                    name.crates.is_empty() || other.crates.is_empty() || name.crates == other.crates;
                other.kind == name.kind && other.name == name.name && overlaps
            };
            assert!(NAMES[..index].iter().find(is_same).is_none(), "{name:?}");
        }
    }
}
