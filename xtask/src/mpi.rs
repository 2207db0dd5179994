//! `cargo xtask mpi`: checks the crate dist-mpi, which is not a default member, with each installed MPI
//! library.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::command::{Failure, Steps, cargo, print, print_help, show, target_folder};

pub(crate) const HELP: &str = "\
cargo xtask mpi [--all]

Checks dist-mpi with Open MPI and with MPICH, if they are installed, and prints how long that took. It is no
default member, because it needs an installed MPI. If packages are missing, their names are printed.
With the first library: clippy, documents, the unit tests, which need no mpirun, and the example programs of
the crate dist under the launcher, whose results must be those of one rank. With each: the promises of the
transport, as the conformance suite states
them, in 4 real processes, a part of the matrix in 2 and in 4, collectives that the library executes, a
process that dies, and one that is stopped.
  --all  the whole matrix in 4 processes instead of a part, which takes several times as long
Each library has a target folder of its own, target/mpi and target/mpich.";

/// An MPI library as Debian installs it.
struct Library {
    name: &'static str,
    compiler: &'static str,
    launcher: &'static str,
    /// Options of the launcher that let root start more ranks than there are cores.
    options: &'static [&'static str],
    folder: &'static str,
    packages: &'static str,
}

const LIBRARIES: [Library; 2] = [
    Library {
        name: "Open MPI",
        compiler: "mpicc.openmpi",
        launcher: "mpirun.openmpi",
        options: &["--allow-run-as-root", "--oversubscribe"],
        folder: "mpi",
        packages: "libopenmpi-dev openmpi-bin",
    },
    Library {
        name: "MPICH",
        compiler: "mpicc.mpich",
        launcher: "mpiexec.mpich",
        options: &[],
        folder: "mpich",
        packages: "libmpich-dev mpich",
    },
];

/// The cases of the example `mpi_check`, each a job of its own.
const CASES: &[&[&str]] = &[
    &["messages"],
    &["threads"],
    &["timeout"],
    &["mismatch"],
    &["length"],
    &["leaver"],
    &["panic"],
    &["memory"],
    &["native", "auto/any/f32"],
    &["native", "auto/any/i8/product"],
    &["native", "auto/any/complex_f32"],
    &["native", "auto/any/complex_f64"],
    &["native", "all_to_all_v"],
    &["native_threads"],
];

/// A part of the matrix.
const MATRIX: &[&[&str]] = &[&["matrix", "f32"], &["matrix", "all_to_all"], &["matrix", "bf16/sum"]];

/// The whole matrix, in the larger world.
const WHOLE_MATRIX: &[&str] = &["matrix"];

/// Examples of the crate dist that print the same on any number of ranks, but for the time in their last line.
const PROGRAMS: [&str; 10] = [
    "argmax",
    "dynamic",
    "halo",
    "hash_join",
    "kmeans",
    "sample_sort",
    "summa",
    "table",
    "task_farm",
    "welford",
];

const LARGE_WORLD: &str = "4";
const WORLDS: [&str; 2] = ["2", LARGE_WORLD];

pub(crate) fn run(mut arguments: lexopt::Parser) -> Result<(), Failure> {
    let mut is_whole = false;
    while let Some(argument) = arguments.next()? {
        match argument {
            lexopt::Arg::Long("help") | lexopt::Arg::Short('h') => return print_help(HELP),
            lexopt::Arg::Long("all") => is_whole = true,
            other => return Err(other.unexpected().into()),
        }
    }
    check(is_whole)
}

fn check(is_whole: bool) -> Result<(), Failure> {
    let (installed, missing): (Vec<_>, Vec<_>) =
        LIBRARIES.iter().partition(|library| is_installed(library.compiler));
    for library in &missing {
        print(&format!(
            "{} is not installed: apt-get install {} libclang-dev\n",
            library.name, library.packages
        ))?;
    }
    let Some(first) = installed.first() else {
        return Err(Failure::Check("no MPI library is installed".to_owned()));
    };
    let mut steps = Steps::default();
    steps.step("mpi: clippy", || {
        show(&mut with(first, "clippy --package dist-mpi --all-targets -- -D warnings")?)?;
        show(&mut with(first, "clippy --package dist --features mpi -- -D warnings")?)
    })?;
    steps.step("mpi: docs", || {
        show(with(first, "doc --package dist-mpi --no-deps")?.env("RUSTDOCFLAGS", "-D warnings"))
    })?;
    steps.step("mpi: unit tests", || show(&mut with(first, "test --package dist-mpi")?))?;
    steps.step("mpi: programs of dist", || run_programs(first))?;
    for library in installed {
        let name = if library.folder == "mpi" { "mpi: jobs of Open MPI" } else { "mpi: jobs of MPICH" };
        steps.step(name, || run_jobs(library, is_whole))?;
        let name =
            if library.folder == "mpi" { "mpi: promises of Open MPI" } else { "mpi: promises of MPICH" };
        steps.step(name, || check_promises(library))?;
    }
    steps.summary();
    Ok(())
}

fn is_installed(program: &str) -> bool {
    Command::new(program).arg("-show").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

/// Starts every case in each world, and the matrix or a part of it.
fn run_jobs(library: &Library, is_whole: bool) -> Result<(), Failure> {
    show(&mut with(library, "build --quiet --package dist-mpi --example mpi_check")?)?;
    let program = folder(library)?.join("debug/examples/mpi_check");
    let matrix = if is_whole { &[][..] } else { MATRIX };
    for world in WORLDS {
        let cases = CASES.iter().chain(matrix);
        cases.into_iter().try_for_each(|case| show(&mut job(library, world, &program, case)))?;
    }
    if is_whole {
        show(&mut job(library, LARGE_WORLD, &program, WHOLE_MATRIX))?;
    }
    // Two ranks have two cores in CI. MPICH's waits do not yield their cores, so with more ranks a rank that runs may seem
    // to be stopped.
    check_stop(&mut job(library, "2", &program, &["native_stop"]))?;
    check_death(&mut job(library, LARGE_WORLD, &program, &["death"]))
}

/// Runs the conformance suite with one process per rank. The launcher starts the test program instead of cargo.
fn check_promises(library: &Library) -> Result<(), Failure> {
    let launcher = [&[library.launcher], library.options, &["-n", LARGE_WORLD]].concat();
    let mut test = with(library, "test --quiet --package dist-mpi --lib")?;
    test.args(["--config", &format!("target.'cfg(all())'.runner = {launcher:?}")]);
    show(test.args(["--", "--ignored", "--test-threads=1"]))
}

/// Starts a job whose last rank is stopped in a collective that the library executes. The others must name it, and end the
/// job, because the collective stays open.
fn check_stop(job: &mut Command) -> Result<(), Failure> {
    let output = job.output().map_err(|error| Failure::Check(format!("cannot start {job:?}: {error}")))?;
    let told = String::from_utf8_lossy(&output.stderr);
    if output.status.success() || !told.contains("rank 1 was waited for until the deadline") {
        return Err(Failure::Check(format!("{job:?} does not name the rank that was stopped: {told}")));
    }
    Ok(())
}

/// Starts a job whose launcher must end all processes and return exit code 9 after one process has exited
/// with that code.
fn check_death(job: &mut Command) -> Result<(), Failure> {
    let output = job.output().map_err(|error| Failure::Check(format!("cannot start {job:?}: {error}")))?;
    if output.status.code() != Some(9) {
        let told = [output.stdout, output.stderr].concat();
        let told = String::from_utf8_lossy(&told);
        return Err(Failure::Check(format!(
            "{job:?} does not return the code of the process that died: {told}"
        )));
    }
    Ok(())
}

/// Starts programs of the crate dist that find MPI by their environment.
fn run_programs(library: &Library) -> Result<(), Failure> {
    let mut build = with(library, "build --quiet --package dist --features mpi --example hello")?;
    show(build.args(PROGRAMS.iter().flat_map(|&name| ["--example", name])))?;
    let hello = run_program(library, "2", "hello")?;
    if !(0..2).all(|rank| hello.contains(&format!("hello from rank {rank} of 2"))) {
        return Err(Failure::Check(format!("hello under {}: {hello}", library.launcher)));
    }
    for name in PROGRAMS {
        let [alone, together] = ["1", LARGE_WORLD].map(|world| run_program(library, world, name));
        let (alone, together) = (alone?, together?);
        let [expected, result] = [&alone, &together].map(|text| result(text));
        if expected.is_none() || result != expected {
            return Err(Failure::Check(format!(
                "{name} prints this on one rank:\n{alone}and this on {LARGE_WORLD} over MPI:\n{together}"
            )));
        }
    }
    Ok(())
}

/// Runs an example of the crate dist over MPI, and returns what it printed.
fn run_program(library: &Library, world: &str, name: &str) -> Result<String, Failure> {
    let program = folder(library)?.join("debug/examples").join(name);
    let mut job = job(library, world, &program, &[]);
    let output = ["DIST_TRANSPORT", "MASTER_ADDR"].into_iter().fold(&mut job, Command::env_remove).output();
    let output =
        output.map_err(|error| Failure::Check(format!("cannot start {}: {error}", program.display())))?;
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        return Err(Failure::Check(format!(
            "{name} on {world} ranks over MPI: {}: {told}{error}",
            output.status
        )));
    }
    Ok(told)
}

/// Returns the lines of an example before its time.
fn result(text: &str) -> Option<&str> {
    let (result, time) = text.trim_end().rsplit_once('\n')?;
    time.ends_with(" ms").then_some(result)
}

fn job(library: &Library, world: &str, program: &Path, case: &[&str]) -> Command {
    let mut command = Command::new(library.launcher);
    command.args(library.options).args(["-n", world]).arg(program).args(case).env("DIST_COSTS", "off");
    command
}

/// Returns a cargo command that builds with this library, without optimisation.
fn with(library: &Library, arguments: &str) -> Result<Command, Failure> {
    let mut command = cargo(arguments);
    command.env("MPICC", library.compiler).env("CARGO_PROFILE_DEV_OPT_LEVEL", "0");
    command.env("CARGO_TARGET_DIR", folder(library)?);
    Ok(command)
}

fn folder(library: &Library) -> Result<PathBuf, Failure> {
    Ok(target_folder()?.join(library.folder))
}
