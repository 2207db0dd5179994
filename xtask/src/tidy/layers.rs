//! Rules about crates: their allowed dependencies and required properties.

use super::Finding;
use super::tree::{Dependency, Package, Tree};

/// The crates from the bottom up. Each depends only on those before it.
const LAYERS: &[&str] = &[
    "dist-transport",
    "dist-algos",
    "dist-collectives",
    "dist-mpi",
    "dist-torch",
    "dist-groups",
    "dist-parallel",
    "dist-candle",
    "dist-burn",
    "dist",
    "dist-predict",
    "dist-cli",
    "dist-testkit",
];

pub(super) fn order(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for package in tree.packages.iter().filter(|package| is_crate(&package.name)) {
        let manifest = manifest(&package.name);
        let Some(own) = layer(&package.name) else {
            findings.push(Finding::error(&manifest, "this crate has no place in the layer order"));
            continue;
        };
        for dependency in package.dependencies.iter().filter(|dependency| !dependency.dev) {
            if layer(&dependency.name).is_some_and(|below| below >= own) {
                let text = format!("depends on {}, which is not below it", dependency.name);
                findings.push(Finding::error(&manifest, text));
            }
        }
    }
    findings
}

/// Members that a plain build leaves out, because they need more than Rust and a C compiler or take minutes
/// to build. Each has its own step in `cargo xtask`.
const OUTSIDE_PLAIN_BUILDS: &[&str] = &["dist-burn", "dist-mpi", "dist-torch"];

pub(super) fn default_members(tree: &Tree) -> Vec<Finding> {
    let left_out = tree.packages.iter().filter(|package| !package.is_default_member);
    let forgotten = left_out.filter(|package| !OUTSIDE_PLAIN_BUILDS.contains(&package.name.as_str()));
    let text = "is not in default-members, so that `cargo xtask ci` does not check it";
    forgotten.map(|package| Finding::error(&manifest(&package.name), text)).collect()
}

/// The crates of a framework, by the beginning of their names, and the members that may depend on them: its own crate and
/// the guide.
const FRAMEWORKS: &[(&str, &[&str])] = &[("candle", &["dist-candle", "book"]), ("burn", &["dist-burn"])];

pub(super) fn frameworks_stay_home(tree: &Tree) -> Vec<Finding> {
    let of_framework = |&(framework, homes): &(&str, &[&str])| {
        let others = tree.packages.iter().filter(|package| !homes.contains(&package.name.as_str()));
        // The examples of the facade train models of frameworks.
        let is_of_examples =
            |package: &Package, dependency: &Dependency| package.name == "dist" && dependency.dev;
        let with_it = others.filter(|package| {
            package.dependencies.iter().any(|dependency| {
                dependency.name.starts_with(framework) && !is_of_examples(package, dependency)
            })
        });
        let text = format!("only {} may depend on {framework}", homes.join(" and "));
        with_it.map(|package| Finding::error(&manifest(&package.name), text.clone())).collect::<Vec<_>>()
    };
    FRAMEWORKS.iter().flat_map(of_framework).collect()
}

pub(super) fn workspace_lints(tree: &Tree) -> Vec<Finding> {
    let without =
        tree.packages.iter().map(|package| manifest(&package.name)).filter(|path| {
            !tree.file(path).is_some_and(|file| file.text.contains("[lints]\nworkspace = true"))
        });
    without.map(|path| Finding::error(&path, "does not take the workspace's lints")).collect()
}

pub(super) fn readmes(tree: &Tree) -> Vec<Finding> {
    let crates = tree.packages.iter().filter(|package| is_crate(&package.name));
    let paths = crates.map(|package| format!("crates/{}/README.md", package.name));
    let missing = paths.filter(|path| tree.file(path).is_none());
    missing.map(|path| Finding::error(&path, "every crate has a README, which is its front page")).collect()
}

/// The contents of the root folder, except dot files and dot folders.
const TOP_LEVEL: &[&str] = &[
    "CHANGELOG.md",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE-APACHE",
    "LICENSE-MIT",
    "README.md",
    "benches",
    "clippy.toml",
    "crates",
    "deny.toml",
    "docs",
    "rust-toolchain.toml",
    "rustfmt.toml",
    "xtask",
];

pub(super) fn top_level(tree: &Tree) -> Vec<Finding> {
    let mut names: Vec<_> = tree.files.iter().filter_map(|file| file.path.split('/').next()).collect();
    names.dedup();
    let strangers = names.into_iter().filter(|name| !name.starts_with('.') && !TOP_LEVEL.contains(name));
    strangers.map(|name| Finding::error(name, "does not belong into the root folder")).collect()
}

fn layer(name: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| *layer == name)
}

fn is_crate(name: &str) -> bool {
    !matches!(name, "xtask" | "benches" | "book")
}

fn manifest(name: &str) -> String {
    match name {
        "book" => "docs/book/Cargo.toml".to_owned(),
        name if is_crate(name) => format!("crates/{name}/Cargo.toml"),
        name => format!("{name}/Cargo.toml"),
    }
}
