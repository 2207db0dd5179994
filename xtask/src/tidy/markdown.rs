//! A Markdown page as the rules see it: its anchors, links, sentences and code blocks.

use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};

/// The contents of a page, with the line of every part.
#[derive(Debug, Default)]
pub(super) struct Page {
    /// The headings that a link can name, without `#`.
    pub(super) anchors: Vec<String>,
    pub(super) links: Vec<Link>,
    pub(super) sentences: Vec<Sentence>,
    pub(super) blocks: Vec<Block>,
}

/// A link or a picture.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) line: usize,
    pub(super) target: String,
}

/// A sentence of a paragraph or of an item of a list. Code in a sentence is one word.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Sentence {
    pub(super) line: usize,
    pub(super) text: String,
    /// `true` if it ends like a sentence. A short item of a list does not.
    pub(super) complete: bool,
}

/// A fenced block of code.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) line: usize,
    /// The text after the fence, such as `rust,no_run`.
    pub(super) info: String,
    pub(super) text: String,
}

impl Sentence {
    /// Returns the number of words.
    pub(super) fn words(&self) -> usize {
        self.text.split_whitespace().filter(|word| word.contains(char::is_alphanumeric)).count()
    }
}

impl Block {
    /// Returns the language, the first word after the fence.
    pub(super) fn language(&self) -> &str {
        self.info.split([',', ' ']).next().unwrap_or_default()
    }

    /// Returns the commands of a console block with their lines, without the prompt. A command that `\`
    /// continues is returned whole.
    pub(super) fn commands(&self) -> Vec<(usize, String)> {
        let mut commands: Vec<(usize, String)> = Vec::new();
        let mut goes_on = false;
        for (number, line) in self.text.lines().enumerate() {
            let piece = line.trim_end_matches('\\');
            if goes_on {
                commands.last_mut().expect("a line before goes on").1.push_str(piece);
            } else if let Some(command) = without_prompt(piece) {
                commands.push((self.line + 1 + number, command.to_owned()));
            } else {
                continue;
            }
            goes_on = line.ends_with('\\');
        }
        commands
    }
}

/// Returns the text after `$ ` or after the prompt of a named host, such as `node0$ `.
fn without_prompt(line: &str) -> Option<&str> {
    let (host, command) = line.split_once("$ ")?;
    host.chars().all(char::is_alphanumeric).then_some(command)
}

impl Page {
    /// Reads a page.
    pub(super) fn read(text: &str) -> Self {
        let options = Options::ENABLE_TABLES | Options::ENABLE_FOOTNOTES | Options::ENABLE_HEADING_ATTRIBUTES;
        let mut reader = Reader { text, page: Self::default(), place: Place::Prose, prose: Prose::default() };
        for (event, range) in Parser::new_ext(text, options).into_offset_iter() {
            reader.take(event, range.start);
        }
        reader.page
    }

    fn add_anchor(&mut self, name: String) {
        let is_taken = |name: &str| self.anchors.iter().any(|anchor| anchor == name);
        let numbered = (1..).map(|number| format!("{name}-{number}"));
        let free = std::iter::once(name.clone()).chain(numbered).find(|name| !is_taken(name));
        self.anchors.extend(free);
    }
}

/// A page and how far it has been read.
#[derive(Debug)]
struct Reader<'a> {
    text: &'a str,
    page: Page,
    place: Place,
    prose: Prose,
}

/// A buffer of text until its paragraph or item ends.
#[derive(Debug, Default)]
struct Prose {
    start: usize,
    text: String,
}

/// The place of the text that comes next.
#[derive(Debug)]
enum Place {
    Prose,
    Heading { id: Option<String>, text: String },
    Code,
    Table,
}

impl Reader<'_> {
    fn take(&mut self, event: Event<'_>, start: usize) {
        match event {
            Event::Start(tag) => self.begin(tag, start),
            Event::End(end) => self.end(end),
            Event::Text(text) => self.write(&text, &text, start),
            Event::Code(code) => self.write("code", &code, start),
            Event::SoftBreak | Event::HardBreak => self.write(" ", " ", start),
            Event::Html(html) | Event::InlineHtml(html) => {
                let id = html.split_once("id=\"").and_then(|(_, rest)| rest.split_once('"'));
                self.page.anchors.extend(id.map(|(id, _)| id.to_owned()));
            }
            _ => {}
        }
    }

    fn begin(&mut self, tag: Tag<'_>, start: usize) {
        match tag {
            Tag::Heading { id, .. } => {
                self.place = Place::Heading { id: id.map(|id| id.to_string()), text: String::new() };
            }
            Tag::CodeBlock(kind) => {
                let info =
                    if let CodeBlockKind::Fenced(info) = kind { info.to_string() } else { String::new() };
                self.end_prose();
                let line = self.line(start);
                self.page.blocks.push(Block { line, info, text: String::new() });
                self.place = Place::Code;
            }
            Tag::Table(_) => self.place = Place::Table,
            Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. } => {
                let line = self.line(start);
                self.page.links.push(Link { line, target: dest_url.to_string() });
            }
            Tag::Item | Tag::List(_) | Tag::Paragraph => self.end_prose(),
            _ => {}
        }
    }

    fn end(&mut self, end: TagEnd) {
        match end {
            TagEnd::Heading(_) => {
                if let Place::Heading { id, text } = std::mem::replace(&mut self.place, Place::Prose) {
                    self.page.add_anchor(id.unwrap_or_else(|| slug(&text)));
                }
            }
            TagEnd::CodeBlock | TagEnd::Table => self.place = Place::Prose,
            TagEnd::Paragraph | TagEnd::Item => self.end_prose(),
            _ => {}
        }
    }

    /// Appends text. In a sentence, inline code counts as one word.
    fn write(&mut self, as_prose: &str, text: &str, start: usize) {
        match &mut self.place {
            Place::Prose => {
                if self.prose.text.is_empty() {
                    self.prose.start = start;
                }
                self.prose.text.push_str(as_prose);
            }
            Place::Heading { text: heading, .. } => heading.push_str(text),
            Place::Code => self.page.blocks.last_mut().expect("a block has begun").text.push_str(text),
            Place::Table => {}
        }
    }

    fn end_prose(&mut self) {
        let Prose { start, text } = std::mem::take(&mut self.prose);
        let line = self.line(start);
        self.page.sentences.extend(sentences(&text).map(|(text, complete)| Sentence {
            line,
            text,
            complete,
        }));
    }

    /// Returns the number of the line with the byte at this offset.
    fn line(&self, offset: usize) -> usize {
        self.text[..offset].matches('\n').count() + 1
    }
}

/// Returns the anchor of a heading, as mdBook and GitHub create it.
fn slug(heading: &str) -> String {
    let kept = heading.trim().chars().filter_map(|c| match c {
        c if c.is_whitespace() => Some('-'),
        c if c.is_alphanumeric() || c == '_' || c == '-' => Some(c),
        _ => None,
    });
    kept.collect::<String>().to_lowercase()
}

/// Words that end with a point inside a sentence.
const ABBREVIATIONS: &[&str] = &["e.g.", "i.e.", "vs.", "etc."];

/// Returns the sentences of a paragraph. The flag is `true` if the sentence has an end.
fn sentences(text: &str) -> impl Iterator<Item = (String, bool)> {
    let mut all: Vec<(String, bool)> = Vec::new();
    let mut goes_on = false;
    for word in text.split_whitespace() {
        let ends = ends_sentence(word);
        match all.last_mut() {
            Some((sentence, complete)) if goes_on => {
                sentence.push(' ');
                sentence.push_str(word);
                *complete = ends || word.ends_with(':');
            }
            _ => all.push((word.to_owned(), ends)),
        }
        goes_on = !ends;
    }
    all.into_iter()
}

fn ends_sentence(word: &str) -> bool {
    let bare = word.trim_end_matches([')', '"', '”', '\'', ']']);
    bare.ends_with(['.', '!', '?']) && !ABBREVIATIONS.contains(&bare.trim_start_matches('('))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_are_those_of_paragraphs_and_lists_without_code_and_tables() {
        let page = Page::read(
            "# A heading. Not a sentence.\n\nOne, e.g. `a b c`, has\nsix words. (Two.)\nAnd then:\n\n- no end\n- an end.\n\n\
             | a. b. | c |\n|---|---|\n| d. | e |\n\n```text\nf. g.\n```\n",
        );
        let found: Vec<_> =
            page.sentences.iter().map(|it| (it.line, it.text.as_str(), it.words(), it.complete)).collect();
        assert_eq!(
            found,
            [
                (3, "One, e.g. code, has six words.", 6, true),
                (3, "(Two.)", 1, true),
                (3, "And then:", 2, true),
                (7, "no end", 2, false),
                (8, "an end.", 2, true),
            ]
        );
    }

    #[test]
    fn anchors_are_those_of_headings_numbered_where_two_are_alike() {
        let page = Page::read("# `distctl run`, on 2 hosts\n## A\n## A\n## B {#own}\n<a id=\"here\"></a>\n");
        assert_eq!(page.anchors, ["distctl-run-on-2-hosts", "a", "a-1", "own", "here"]);
    }

    #[test]
    fn commands_follow_a_prompt_and_may_take_several_lines() {
        let page = Page::read("text\n\n```console\n$ a \\\n  b\noutput $ 5\nnode0$ c\n```\n");
        assert_eq!(page.blocks[0].language(), "console");
        assert_eq!(page.blocks[0].commands(), [(4, "a   b".to_owned()), (7, "c".to_owned())]);
    }
}
