//! The command of torchrun on the guide's page "On a cluster", with the torchrun of an installed PyTorch.

use std::path::{Path, PathBuf};

use super::launchers::{Desk, be_a_rank, commands, own_address};

/// Returns the folder of torchrun: on the path, or where `cargo xtask torch` installs it.
fn folder() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap();
    let installed = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("torch-venv/bin");
    std::env::split_paths(&path).chain([installed]).find(|folder| folder.join("torchrun").is_file())
}

#[test]
fn the_command_of_torchrun_starts_a_job_of_two_machines() {
    if be_a_rank().is_some() {
        return;
    }
    let Some(folder) = folder() else {
        return eprintln!("skipped: there is no torchrun (cargo xtask torch --install)");
    };
    let [export, torchrun] = commands("torchrun")[..] else { panic!("two commands") };
    // Both machines are this one, at an address that no other test uses.
    let here = own_address();
    let torchrun = torchrun.replacen("torchrun", &format!("torchrun --local-addr {here}"), 1);
    let torchrun = torchrun.replace("node0", &here);
    let command = format!("PATH={}:$PATH; {export}; {torchrun}", folder.display());
    Desk::new().check(&[command.clone(), command], 4);
}
