//! One program under every launcher: with the variables that each sets, and with the commands
//! on the guide's page "On a cluster" that can run here.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};

use dist_collectives::Communicator;
use rstest::rstest;

use super::hosts::{FAKE_SSH, write_program};
use super::{END, lines};

pub(super) const PAGE: &str = include_str!("../../../../docs/book/src/on-a-cluster.md");

/// Returns an address of this machine that no other job uses, so that all jobs can use the same port.
pub(super) fn own_address() -> String {
    static NEXT: AtomicU16 = AtomicU16::new(1);
    let [high, low] = std::process::id().to_be_bytes()[2..] else { unreachable!() };
    let count = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("127.{}.{high}.{low}", 1 + count % 250)
}

/// If a test has started this process as a rank, joins the job, makes a call and prints the rank. Otherwise
/// returns `None`.
#[allow(clippy::print_stdout, reason = "the test that started it reads what it prints")]
pub(super) fn be_a_rank() -> Option<()> {
    std::env::var(END).ok()?;
    let mut comm = Communicator::from_env().unwrap();
    let mut ranks = vec![0_u64; comm.world_size()];
    comm.all_gather(&[comm.rank() as u64], &mut ranks).unwrap();
    assert_eq!(ranks, (0..comm.world_size() as u64).collect::<Vec<_>>());
    println!("\nrank {} of {}", comm.rank(), comm.world_size());
    Some(())
}

/// Returns the lines that ranks have printed between the output of the test harness.
pub(super) fn places(bytes: &[u8]) -> Vec<String> {
    lines(bytes).into_iter().filter(|line| line.starts_with("rank ")).collect()
}

pub(super) fn all_places(world_size: usize) -> Vec<String> {
    (0..world_size).map(|rank| format!("rank {rank} of {world_size}")).collect()
}

fn this_test() -> String {
    std::thread::current().name().unwrap().to_owned()
}

/// Starts this test as the program of a rank with only these variables.
fn rank(variables: &[(String, String)]) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &this_test(), "--nocapture"]).env_clear();
    command
        .env("DIST_COSTS", "off")
        .env(END, "join")
        .envs(variables.iter().map(|(name, value)| (name, value)));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

pub(super) fn ended(ranks: Vec<Child>) -> Vec<Output> {
    ranks.into_iter().map(|rank| rank.wait_with_output().unwrap()).collect()
}

/// `R` is replaced by the rank, `N` by the number of ranks.
#[rstest]
#[case::by_hand("RANK=R WORLD_SIZE=N ADDRESS")]
#[case::torchrun(
    "RANK=R WORLD_SIZE=N LOCAL_RANK=R LOCAL_WORLD_SIZE=N GROUP_RANK=0 ROLE_RANK=R ROLE_WORLD_SIZE=N ADDRESS \
     TORCHELASTIC_RUN_ID=none TORCHELASTIC_RESTART_COUNT=1 TORCHELASTIC_MAX_RESTARTS=3 TORCHELASTIC_USE_AGENT_STORE=True"
)]
#[case::open_mpi(
    "OMPI_COMM_WORLD_RANK=R OMPI_COMM_WORLD_SIZE=N OMPI_COMM_WORLD_LOCAL_RANK=R OMPI_COMM_WORLD_LOCAL_SIZE=N \
     PMIX_RANK=R PMIX_NAMESPACE=1 ADDRESS"
)]
#[case::mpich("PMI_RANK=R PMI_SIZE=N MPI_LOCALRANKID=R MPI_LOCALNRANKS=N ADDRESS")]
#[case::slurm(
    "SLURM_PROCID=R SLURM_NTASKS=N SLURM_STEP_NUM_TASKS=N SLURM_LOCALID=R SLURM_NODEID=0 SLURM_STEP_ID=0 SLURM_JOB_ID=7 ADDRESS"
)]
#[case::slurm_with_pmi("SLURM_PROCID=R SLURM_STEP_NUM_TASKS=N PMI_RANK=R PMI_SIZE=N ADDRESS")]
#[case::indexed_job("JOB_COMPLETION_INDEX=R RANK=R WORLD_SIZE=N ADDRESS DIST_HOST_ID=train-R")]
#[case::pytorch_job(
    "RANK=R WORLD_SIZE=N PET_NNODES=N PET_NPROC_PER_NODE=1 PET_NODE_RANK=R PYTHONUNBUFFERED=1 ADDRESS"
)]
fn a_program_finds_its_job_by_the_variables_of_a_launcher(#[case] variables: &str) {
    if be_a_rank().is_some() {
        return;
    }
    let address = own_address();
    let of_rank = |rank: usize| -> Vec<(String, String)> {
        let words = variables.split_ascii_whitespace().flat_map(|word| match word {
            "ADDRESS" => vec![format!("MASTER_ADDR={address}"), "MASTER_PORT=29500".to_owned()],
            word => vec![
                word.replace("=R", &format!("={rank}"))
                    .replace("-R", &format!("-{rank}"))
                    .replace("=N", "=2"),
            ],
        });
        words.map(|word| word.split_once('=').map(|(a, b)| (a.to_owned(), b.to_owned())).unwrap()).collect()
    };
    let outputs = ended((0..2).map(|index| rank(&of_rank(index))).collect());
    let found: Vec<String> = outputs.iter().flat_map(|output| places(&output.stdout)).collect();
    assert_eq!(found, all_places(2), "{outputs:?}");
}

#[test]
fn a_program_without_a_launcher_is_a_job_of_one_rank() {
    if be_a_rank().is_some() {
        return;
    }
    for variables in [&[][..], &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8"), ("SLURM_JOB_ID", "7")]] {
        let variables: Vec<_> = variables.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
        let outputs = ended(vec![rank(&variables)]);
        assert_eq!(places(&outputs[0].stdout), all_places(1), "{outputs:?}");
    }
}

/// Launchers that set a rank but no address: the error names the missing variable.
#[rstest]
#[case("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")]
#[case("PMI_RANK", "PMI_SIZE")]
#[case("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")]
#[case("RANK", "WORLD_SIZE")]
fn a_missing_address_is_named(#[case] of_rank: &str, #[case] of_size: &str) {
    if be_a_rank().is_some() {
        return;
    }
    let variables = [(of_rank.to_owned(), "0".to_owned()), (of_size.to_owned(), "2".to_owned())];
    let outputs = ended(vec![rank(&variables)]);
    let told = String::from_utf8_lossy(&outputs[0].stderr);
    assert!(told.contains("MASTER_ADDR"), "{told}");
}

/// Returns the commands of a section of the page.
pub(super) fn commands(heading: &str) -> Vec<&'static str> {
    let section = PAGE.split("\n## ").find(|section| section.starts_with(&format!("{heading}\n"))).unwrap();
    let block = section.split("```console\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    block.lines().map(|line| line.strip_prefix("$ ").unwrap()).collect()
}

/// A folder with the files that the page's commands use: `./train`, `distctl` and `ssh` on the path, and a
/// secret at home.
pub(super) struct Desk(pub(super) tempfile::TempDir);

impl Desk {
    pub(super) fn new() -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let program = std::env::current_exe().unwrap();
        let train = format!("#!/bin/sh\nexec '{}' --exact {} --nocapture\n", program.display(), this_test());
        write_program(&folder.path().join("train"), &train);
        write_program(&folder.path().join("ssh"), FAKE_SSH);
        let desk = Self(folder);
        let secret = PAGE.lines().find_map(|line| line.strip_prefix("$ (umask")).unwrap();
        let secret = &format!("(umask{secret}");
        assert!(desk.shell(secret).status().unwrap().success());
        desk
    }

    /// Returns a shell that runs this command in this folder.
    pub(super) fn shell(&self, command: &str) -> Command {
        let folder = self.0.path();
        let distctl = Path::new(env!("CARGO_BIN_EXE_distctl")).parent().unwrap().display().to_string();
        let path = std::env::var("PATH").unwrap();
        let mut shell = Command::new("sh");
        shell.args(["-c", command]).current_dir(folder).stdin(Stdio::null());
        shell.env("PATH", format!("{}:{distctl}:{path}", folder.display())).env("HOME", folder);
        shell.env("DIST_COSTS", "off").env("XDG_RUNTIME_DIR", folder).env("FAKE_RUNTIME_DIR", folder);
        shell.env(END, "join").stdout(Stdio::piped()).stderr(Stdio::piped());
        shell
    }

    /// Runs these commands at once and checks that their ranks formed one job.
    pub(super) fn check(&self, commands: &[String], world_size: usize) {
        let outputs = ended(commands.iter().map(|command| self.shell(command).spawn().unwrap()).collect());
        let mut found: Vec<String> = outputs.iter().flat_map(|output| places(&output.stdout)).collect();
        found.sort();
        assert_eq!(found, all_places(world_size), "{commands:?}: {outputs:?}");
    }
}

/// Returns `true` if the program is installed. Otherwise prints that the test is skipped.
pub(super) fn is_installed(program: &str, packages: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    if !found {
        eprintln!("skipped: there is no {program} (apt-get install {packages})");
    }
    found
}

/// Runs all commands of a section at once, after these replacements. The address of `node0` is unique to the
/// test.
fn check_section(heading: &str, world_size: usize, replace: &[(&str, &str)]) {
    let address = own_address();
    let commands = commands(heading).into_iter().map(|command| {
        let command = replace.iter().fold(command.to_owned(), |command, (from, to)| {
            assert!(command.contains(from), "{heading}: {command} has no {from}");
            command.replace(from, to)
        });
        command.replace("node0", &address)
    });
    Desk::new().check(&commands.collect::<Vec<_>>(), world_size);
}

#[test]
fn the_commands_of_distctl_run_start_a_job_of_four_ranks() {
    if be_a_rank().is_some() {
        return;
    }
    check_section("One machine", 4, &[]);
    check_section("Machines that ssh reaches", 4, &[]);
    check_section("A shell on each machine", 4, &[]);
}

#[test]
fn the_command_of_open_mpi_starts_a_job_of_four_ranks() {
    if be_a_rank().is_some() {
        return;
    }
    if is_installed("mpirun.openmpi", "openmpi-bin") {
        let here = "mpirun.openmpi --allow-run-as-root --oversubscribe";
        check_section("Open MPI", 4, &[("mpirun", here), ("-H node0:2,node1:2", "")]);
    }
}

#[test]
fn the_command_of_mpich_starts_a_job_of_four_ranks() {
    if be_a_rank().is_some() {
        return;
    }
    if is_installed("mpiexec.mpich", "mpich") {
        check_section("MPICH", 4, &[("mpiexec", "mpiexec.mpich"), ("-hosts node0:2,node1:2", "")]);
    }
}

#[test]
fn the_variables_by_hand_make_a_job_of_two_ranks() {
    if be_a_rank().is_some() {
        return;
    }
    let address = own_address();
    let [exports, ranks @ ..] = &commands("Variables by hand")[..] else { panic!("no commands") };
    let commands = ranks.iter().map(|rank| format!("{exports}; {rank}").replace("node0", &address));
    Desk::new().check(&commands.collect::<Vec<_>>(), 2);
}
