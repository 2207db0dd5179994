//! The comments of a Rust file, as blocks of prose.

use crate::tidy::markdown::{Page, Sentence};

/// A block of consecutive comment lines of one kind.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Comment {
    /// The first line, counted from 1.
    pub(super) line: usize,
    /// The lines without their slashes.
    pub(super) text: String,
}

impl Comment {
    /// Returns the comments of a file that fill whole lines.
    pub(super) fn read(text: &str) -> Vec<Self> {
        let mut comments: Vec<Self> = Vec::new();
        let mut open = None;
        for (number, line) in text.lines().enumerate() {
            let comment = parts(line);
            let marker = comment.map(|(marker, _)| marker);
            if let Some((_, prose)) = comment {
                match comments.last_mut() {
                    Some(last) if marker == open => {
                        last.text.push('\n');
                        last.text.push_str(prose);
                    }
                    _ => comments.push(Self { line: number + 1, text: prose.to_owned() }),
                }
            }
            open = marker;
        }
        comments
    }

    /// Returns the sentences with their lines in the file, without code blocks and tables.
    pub(super) fn sentences(&self) -> Vec<Sentence> {
        let mut sentences = Page::read(&self.text).sentences;
        sentences.iter_mut().for_each(|sentence| sentence.line += self.line - 1);
        sentences
    }

    /// Returns the number of words, including words of code.
    pub(super) fn words(&self) -> usize {
        self.text.split_whitespace().filter(|word| word.contains(char::is_alphanumeric)).count()
    }

    /// Returns the number of lines that begin with a question word.
    pub(super) fn question_lines(&self) -> usize {
        let first = |line: &str| line.split(|c: char| !c.is_alphabetic()).next().map(str::to_owned);
        let lines = self.text.lines().filter_map(first);
        lines.filter(|word| QUESTION_WORDS.contains(&word.as_str())).count()
    }
}

/// Words at the start of sentences about "what is …ed" instead of a named thing.
const QUESTION_WORDS: &[&str] = &["What", "Where", "How", "Who", "Which", "Whether"];

/// Returns the marker and the text of a comment line.
fn parts(line: &str) -> Option<(&str, &str)> {
    let line = line.trim_start();
    let marker = ["///", "//!", "//"].into_iter().find(|marker| line.starts_with(marker))?;
    let text = &line[marker.len()..];
    Some((marker, text.strip_prefix(' ').unwrap_or(text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_lines_of_one_kind_are_one_comment() {
        let text = "//! A\n//! b.\n\nfn f() {} // not alone\n/// C.\n// D.\n    // E.\n";
        let found: Vec<_> = Comment::read(text).into_iter().map(|it| (it.line, it.text)).collect();
        let expected = [(1, "A\nb."), (5, "C."), (6, "D.\nE.")].map(|(line, text)| (line, text.to_owned()));
        assert_eq!(found, expected);
    }

    #[test]
    fn lines_that_begin_like_a_question_are_counted_and_others_are_not() {
        let comment = &Comment::read("/// What it is.\n/// Whatever.\n/// See how.\n/// How.\n")[0];
        assert_eq!((comment.question_lines(), comment.words()), (2, 7));
    }

    #[test]
    fn a_sentence_may_go_on_over_lines_and_knows_its_own() {
        let comment = &Comment::read("\n/// One\n/// two. Three.\n///\n/// Four.\n")[0];
        let found: Vec<_> = comment.sentences().into_iter().map(|it| (it.line, it.text)).collect();
        let expected =
            [(2, "One two."), (2, "Three."), (5, "Four.")].map(|(line, text)| (line, text.to_owned()));
        assert_eq!(found, expected);
    }
}
