//! The training text: its files, its samples, and its entropy per byte.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::random::Random;

/// The bytes of all files, one after the other.
pub(crate) struct Text {
    bytes: Vec<u8>,
    files: usize,
}

/// An error of reading the text.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TextError {
    #[error("cannot read {}", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{} is empty", path.display())]
    Empty { path: PathBuf },
    #[error("{} has no file that ends in .{}", path.display(), EXTENSIONS.join(", ."))]
    NoFiles { path: PathBuf },
    #[error("{paths:?}: {len} bytes in all, where one sample has {sample_len}")]
    Short { paths: Vec<PathBuf>, len: usize, sample_len: usize },
}

impl Text {
    /// Reads these files, and all source and text files below these directories, in the order of their paths. Fails
    /// if the text is too short for one sample.
    pub(crate) fn read(paths: &[PathBuf], sample_len: usize) -> Result<Self, TextError> {
        let mut text = Self { bytes: Vec::new(), files: 0 };
        for path in paths {
            text.add(path)?;
        }
        if text.bytes.len() < sample_len {
            return Err(TextError::Short { paths: paths.to_vec(), len: text.bytes.len(), sample_len });
        }
        Ok(text)
    }

    fn add(&mut self, path: &Path) -> Result<(), TextError> {
        let unreadable = |source| TextError::Unreadable { path: path.to_owned(), source };
        if !fs::metadata(path).map_err(unreadable)?.is_dir() {
            return match self.add_file(path)? {
                0 => Err(TextError::Empty { path: path.to_owned() }),
                _ => Ok(()),
            };
        }
        let mut files = Vec::new();
        find(path, &mut files)?;
        if files.is_empty() {
            return Err(TextError::NoFiles { path: path.to_owned() });
        }
        files.sort();
        files.iter().try_for_each(|file| self.add_file(file).map(drop))
    }

    fn add_file(&mut self, path: &Path) -> Result<usize, TextError> {
        let unreadable = |source| TextError::Unreadable { path: path.to_owned(), source };
        let bytes = fs::read(path).map_err(unreadable)?;
        self.bytes.extend_from_slice(&bytes);
        self.files += 1;
        Ok(bytes.len())
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(crate) fn files(&self) -> usize {
        self.files
    }

    /// Returns a random part of the text.
    pub(crate) fn sample(&self, len: usize, random: &mut Random) -> &[u8] {
        let start = random.below(self.bytes.len() - len + 1);
        &self.bytes[start..start + len]
    }

    /// Returns the entropy of the byte frequencies in nats per byte: the loss of a model that knows only
    /// these frequencies.
    pub(crate) fn byte_entropy(&self) -> f64 {
        let mut counts = [0u64; 256];
        for &byte in &self.bytes {
            counts[usize::from(byte)] += 1;
        }
        let total = self.bytes.len() as f64;
        let share = |&count: &u64| count as f64 / total;
        counts.iter().filter(|&&count| count > 0).map(share).map(|share| -share * share.ln()).sum()
    }
}

/// Returns the directory of the workspace that this program was built from.
pub(crate) fn workspace() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.ancestors().nth(2).expect("the crate lies two levels below the workspace").to_owned()
}

fn find(directory: &Path, files: &mut Vec<PathBuf>) -> Result<(), TextError> {
    let unreadable = |source| TextError::Unreadable { path: directory.to_owned(), source };
    for entry in fs::read_dir(directory).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let path = entry.path();
        let name = entry.file_name();
        let name = name.to_string_lossy();
        // This is the type of a link and not of its target, because links can form cycles.
        let kind = entry.file_type().map_err(unreadable)?;
        if kind.is_dir() && !name.starts_with('.') && !SKIPPED.contains(&&*name) {
            find(&path, files)?;
        } else if kind.is_file()
            && path.extension().is_some_and(|end| EXTENSIONS.iter().any(|&own| end == own))
        {
            files.push(path);
        }
    }
    Ok(())
}

const EXTENSIONS: [&str; 4] = ["md", "rs", "toml", "txt"];
const SKIPPED: [&str; 2] = ["out", "target"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_come_in_the_order_of_their_paths_and_build_products_do_not_come() {
        let directory = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = directory.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for (path, text) in [
            ("b.md", "2"),
            ("a/z.rs", "1"),
            ("c.toml", "3"),
            ("c.lock", "lock"),
            ("target/x.rs", "target"),
            ("out/x.md", "out"),
            (".git/x.md", "git"),
        ] {
            write(path, text);
        }
        let text = Text::read(&[directory.path().to_owned()], 3).unwrap();
        assert_eq!((text.bytes(), text.files()), (b"123".as_slice(), 3));
    }

    #[test]
    fn a_text_that_is_missing_empty_or_too_short_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let message = |path: &Path, text: Option<&str>| {
            if let Some(text) = text {
                fs::write(path, text).unwrap();
            }
            Text::read(&[path.to_owned()], 10).map(drop).unwrap_err().to_string()
        };
        let path = directory.path().join("text");
        let name = path.display();
        assert_eq!(message(&path, None), format!("cannot read {name}"));
        assert_eq!(message(&path, Some("")), format!("{name} is empty"));
        assert_eq!(
            message(&path, Some("short")),
            format!("[{path:?}]: 5 bytes in all, where one sample has 10")
        );
        let nothing = directory.path().display();
        assert_eq!(
            message(directory.path(), None),
            format!("{nothing} has no file that ends in .md, .rs, .toml, .txt")
        );
    }

    #[test]
    fn the_entropy_of_four_equally_frequent_bytes_is_two_bits() {
        let text = Text { bytes: b"abcdabcd".to_vec(), files: 1 };
        assert!((text.byte_entropy() - 2.0 * f64::ln(2.0)).abs() < 1e-12);
        let constant = Text { bytes: b"aaaa".to_vec(), files: 1 };
        assert_eq!(constant.byte_entropy(), 0.0);
    }

    #[test]
    fn every_sample_lies_in_the_text_and_the_last_is_reached() {
        let text = Text { bytes: b"0123456789".to_vec(), files: 1 };
        let mut random = Random::keyed([1]);
        let samples: Vec<_> = (0..100).map(|_| text.sample(8, &mut random).to_vec()).collect();
        assert!(samples.contains(&b"23456789".to_vec()) && samples.contains(&b"01234567".to_vec()));
    }
}
