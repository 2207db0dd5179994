//! The workspace as the rules see it: files with their text, packages with their dependencies.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::command::Failure;

#[derive(Debug, Default)]
pub(super) struct Tree {
    pub(super) files: Vec<File>,
    pub(super) packages: Vec<Package>,
}

#[derive(Clone, Debug)]
pub(super) struct File {
    /// The path from the root of the workspace, with `/`.
    pub(super) path: String,
    pub(super) text: String,
}

#[derive(Clone, Debug)]
pub(super) struct Package {
    pub(super) name: String,
    pub(super) is_default_member: bool,
    pub(super) dependencies: Vec<Dependency>,
}

#[derive(Clone, Debug)]
pub(super) struct Dependency {
    pub(super) name: String,
    pub(super) dev: bool,
}

impl Tree {
    /// Reads the workspace in the current folder. `metadata` is the output of `cargo metadata`.
    pub(super) fn read(metadata: &str) -> Result<Self, Failure> {
        let mut tree = Self { files: Vec::new(), packages: packages(metadata)? };
        tree.read_folder(Path::new("."))?;
        tree.files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(tree)
    }

    fn read_folder(&mut self, folder: &Path) -> Result<(), Failure> {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let path = entry.path();
            let kind = entry.file_type()?;
            if kind.is_dir() {
                if !NOT_OURS.contains(&entry.file_name().to_string_lossy().as_ref()) {
                    self.read_folder(&path)?;
                }
            } else if kind.is_file() {
                let text = String::from_utf8_lossy(&fs::read(&path)?).into_owned();
                let path = path.strip_prefix(".").unwrap_or(&path).to_string_lossy().replace('\\', "/");
                self.files.push(File { path, text });
            }
        }
        Ok(())
    }

    /// Returns all Rust files.
    pub(super) fn rust_files(&self) -> impl Iterator<Item = &File> {
        self.files.iter().filter(|file| file.path.ends_with(".rs"))
    }

    /// Returns the file at a path.
    pub(super) fn file(&self, path: &str) -> Option<&File> {
        self.files.iter().find(|file| file.path == path)
    }
}

/// Folders of generated files.
const NOT_OURS: &[&str] = &[".git", "target", "out"];

fn packages(metadata: &str) -> Result<Vec<Package>, Failure> {
    let metadata: Value = serde_json::from_str(metadata).map_err(std::io::Error::from)?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let dependency =
        |value: &Value| Dependency { name: text(&value["name"]), dev: value["kind"].as_str() == Some("dev") };
    let defaults = list(&metadata["workspace_default_members"]);
    let package = |value: &Value| Package {
        name: text(&value["name"]),
        is_default_member: defaults.contains(&value["id"]),
        dependencies: list(&value["dependencies"]).iter().map(dependency).collect(),
    };
    Ok(list(&metadata["packages"]).iter().map(package).collect())
}
