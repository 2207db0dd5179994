//! `cargo xtask ci`: runs all checks that must pass before a change lands.

use std::process::Stdio;

use crate::command::{Failure, Steps, cargo, output, show};
use crate::{book, members, test, tidy};

pub(crate) const HELP: &str = "\
cargo xtask ci

Runs these steps and stops at the first that fails:
  fmt       rustfmt with rustfmt.toml
  clippy    all targets of all default members; warnings are errors
  tidy      cargo xtask tidy
  docs      rustdoc; warnings are errors
  book      builds the guide if mdBook is installed; tidy checks its pages, and test runs its code
  crates    clippy for each crate alone, with combinations of its features; checks its dependencies
  packages  cargo package, which needs complete metadata of every crate
  deny      cargo-deny if it is installed: bans, licences, sources; advisories if a database is installed
  test      cargo xtask test
  features  tests of single crates without the features that change what is tested
  demo      two steps of the program that cargo demo runs

It covers the default members. .ci/run installs cargo-deny and mdBook, which are needed besides Rust and a C
compiler, and runs this command, then cargo xtask burn, cargo xtask mpi and cargo xtask torch.";

pub(crate) fn run() -> Result<(), Failure> {
    let mut steps = Steps::default();
    steps.step("fmt", || show(&mut cargo("fmt --all --check")))?;
    let features = members::all_features()?;
    steps.step("clippy", || show(&mut cargo(&format!("clippy --all-targets {features} -- -D warnings"))))?;
    steps.step("tidy", tidy::check_all)?;
    steps.step("docs", || {
        show(cargo(&format!("doc --no-deps {features}")).env("RUSTDOCFLAGS", "-D warnings"))
    })?;
    steps.step("book", book::build_if_possible)?;
    steps.step("dependencies of each crate", dependencies)?;
    steps.step("clippy for each crate alone", each_alone)?;
    // xtask is never published, and depends on the test kit, which is not published either.
    steps.step("packages", || {
        show(&mut cargo("package --workspace --exclude xtask --no-verify --allow-dirty --quiet"))
    })?;
    steps.step("deny", deny)?;
    test::add_steps(&mut steps)?;
    steps.step("tests without features", without_features)?;
    // `cargo demo` builds the same program with optimisation, which takes five minutes more.
    steps.step("demo", || {
        show(&mut cargo(&format!("run {features} --example train_lm -- --steps 2 --out target/demo")))
    })?;
    steps.summary();
    Ok(())
}

/// The combinations of features that each crate is checked with.
const COMBINATIONS: &[(&str, &[&str])] = &[
    ("dist-transport", &["", "tcp", "sim", "tcp,sim", "shm", "shm,sim", "conformance"]),
    ("dist-algos", &["", "conformance"]),
    ("dist-collectives", &["", "tcp", "sim", "tcp,sim", "shm,sim", "serde", "ndarray", "serde,ndarray"]),
    ("dist-groups", &[""]),
    ("dist-parallel", &["", "tcp", "sim", "tcp,sim", "shm"]),
    ("dist-candle", &[""]),
    ("dist-predict", &[""]),
    ("dist", &["", "tcp", "sim", "shm,sim", "serde,ndarray", "candle"]),
    ("dist-cli", &[""]),
    ("dist-testkit", &[""]),
];

/// Tests of a crate that test something else if features are missing: the crate, the features that it has, and the
/// targets and names of the tests. `cargo xtask test` runs all tests with all features.
const WITHOUT_FEATURES: &[(&str, &str, &str)] = &[
    // Without shared memory, processes of one host are connected by TCP.
    ("dist-transport", "tcp,sim,conformance", "--lib --test tcp"),
    ("dist-transport", "tcp,sim,conformance", "--test conformance -- tcp::"),
    // Without sockets, all ranks are threads, and tests of several networks use the others.
    ("dist-collectives", "sim", "--test collectives -- batches:: half_means:: mismatches:: pending::"),
];

fn without_features() -> Result<(), Failure> {
    WITHOUT_FEATURES.iter().try_for_each(|(package, features, tests)| {
        let only = format!("--package {package} --no-default-features --features={features}");
        show(&mut cargo(&format!("test {only} {tests}")))
    })
}

fn each_alone() -> Result<(), Failure> {
    for (package, combinations) in COMBINATIONS {
        for features in *combinations {
            let only = format!("--package {package} --no-default-features --features={features}");
            show(&mut cargo(&format!("clippy {only} -- -D warnings")))?;
        }
    }
    Ok(())
}

/// A rule that a crate must not depend on certain crates.
struct Absent {
    package: &'static str,
    features: &'static str,
    forbidden: &'static [&'static str],
}

const SOCKETS: &[&str] = &["socket2", "rustix", "hmac", "sha2"];
const FRAMEWORKS: &[&str] = &["candle-core", "candle-nn", "burn", "burn-core"];
const ABSENT: &[Absent] = &[
    Absent { package: "dist-transport", features: "--no-default-features", forbidden: SOCKETS },
    Absent {
        package: "dist-transport",
        features: "--no-default-features --features sim",
        forbidden: SOCKETS,
    },
    Absent { package: "dist-algos", features: "", forbidden: SOCKETS },
    Absent { package: "dist-algos", features: "", forbidden: FRAMEWORKS },
    Absent { package: "dist-collectives", features: "--no-default-features", forbidden: SOCKETS },
    Absent { package: "dist-collectives", features: "", forbidden: FRAMEWORKS },
    Absent { package: "dist-groups", features: "", forbidden: FRAMEWORKS },
    Absent { package: "dist-parallel", features: "", forbidden: FRAMEWORKS },
    Absent { package: "dist-predict", features: "", forbidden: SOCKETS },
    Absent { package: "dist-predict", features: "", forbidden: FRAMEWORKS },
    Absent { package: "dist", features: "", forbidden: FRAMEWORKS },
    Absent { package: "dist-cli", features: "", forbidden: FRAMEWORKS },
];

fn dependencies() -> Result<(), Failure> {
    for Absent { package, features, forbidden } in ABSENT {
        let tree =
            output(&mut cargo(&format!("tree --package {package} {features} --edges normal --prefix none")))?;
        let names = tree.lines().filter_map(|line| line.split(' ').next());
        if let Some(found) = names.into_iter().find(|name| forbidden.contains(name)) {
            let found = format!("{package} {features} pulls in {found}: see cargo tree --package {package}");
            return Err(Failure::Check(found));
        }
        eprintln!("     {package} {features}: nothing of {}", forbidden.join(", "));
    }
    Ok(())
}

fn deny() -> Result<(), Failure> {
    let installed = cargo("deny --version").stdout(Stdio::null()).stderr(Stdio::null()).status()?;
    if !installed.success() {
        eprintln!("     skipped: cargo-deny is not installed (cargo install cargo-deny --locked)");
        return Ok(());
    }
    show(&mut cargo("deny check bans licenses sources --hide-inclusion-graph"))?;
    if has_advisories() {
        show(&mut cargo("deny --offline check advisories"))
    } else {
        eprintln!("     advisories skipped: no database in CARGO_HOME/advisory-dbs (cargo deny fetch db)");
        Ok(())
    }
}

fn has_advisories() -> bool {
    let home = std::env::var_os("CARGO_HOME").map(Into::into);
    let home = home.or_else(|| std::env::home_dir().map(|home| home.join(".cargo")));
    let databases = home.and_then(|home: std::path::PathBuf| home.join("advisory-dbs").read_dir().ok());
    // The folder also contains the lock file that guards the databases. Each database is a repository.
    databases.is_some_and(|entries| entries.flatten().any(|entry| entry.path().join(".git").is_dir()))
}
