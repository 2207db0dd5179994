//! The commands of Slurm on the guide's page "On a cluster", in a Slurm of one node that the test starts.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use dist_collectives::transport::Runtime;
use dist_testkit::process::Port;
use rustix::process::Signal;

use super::launchers::{Desk, be_a_rank, commands, is_installed};
use super::signal;

/// A Slurm of one node, `localhost`, with its own authentication. It ends when it is dropped.
struct Slurm {
    folder: tempfile::TempDir,
    daemons: Vec<Child>,
    _ports: [Port; 2],
}

impl Slurm {
    /// Starts the daemons, or says why they do not start.
    fn start() -> Result<Self, String> {
        if !rustix::process::getuid().is_root() {
            return Err("slurmd needs root".to_owned());
        }
        let folder = tempfile::tempdir().unwrap();
        // Slurm refuses a folder that other users may write to, and needs to reach it as any user.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let ports = [Port::reserve(), Port::reserve()];
        fs::write(folder.path().join("slurm.conf"), configuration(folder.path(), &ports)).unwrap();
        for name in ["state", "spool"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        fs::write(folder.path().join("key"), [7; 128]).unwrap();
        fs::set_permissions(folder.path().join("key"), fs::Permissions::from_mode(0o600)).unwrap();
        let mut slurm = Self { folder, daemons: Vec::new(), _ports: ports };
        let munged = "exec munged --foreground --force --key-file=key --socket=$PWD/munge.socket --pid-file=$PWD/munged.pid \
             --log-file=$PWD/munged.log --seed-file=$PWD/seed";
        slurm.daemon(munged);
        slurm.wait_for("the socket of munged", |slurm| slurm.path("munge.socket").exists())?;
        slurm.daemon("exec slurmctld -D -f $PWD/slurm.conf");
        slurm.daemon("exec slurmd -D -N localhost -f $PWD/slurm.conf");
        slurm.wait_for("the node", |slurm| {
            let states = slurm.command("sinfo --noheader --format %T").output();
            states.is_ok_and(|states| String::from_utf8_lossy(&states.stdout).trim() == "idle")
        })?;
        Ok(slurm)
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, command: &str) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", command]).current_dir(self.folder.path()).stdin(Stdio::null());
        shell.env("SLURM_CONF", self.path("slurm.conf")).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        shell
    }

    fn daemon(&mut self, command: &str) {
        let log = || fs::File::options().create(true).append(true).open(self.path("log")).unwrap();
        let started = self.command(command).stdout(log()).stderr(log()).spawn();
        self.daemons.push(started.unwrap());
    }

    /// Waits for half a minute at most. The error has the last lines of the logs.
    fn wait_for(&mut self, what: &str, is_there: impl Fn(&Self) -> bool) -> Result<(), String> {
        let runtime = Runtime::system();
        let limit = runtime.deadline(std::time::Duration::from_secs(30));
        while !is_there(self) {
            let is_gone = |daemon: &mut Child| daemon.try_wait().is_ok_and(|status| status.is_some());
            if self.daemons.iter_mut().any(is_gone) || runtime.expired(limit) {
                let log =
                    ["log", "munged.log"].map(|name| fs::read_to_string(self.path(name)).unwrap_or_default());
                let lines: Vec<&str> = log.iter().flat_map(|log| log.lines()).collect();
                let last = lines[lines.len().saturating_sub(6)..].join("; ");
                return Err(format!("{what} did not appear: {last}"));
            }
            runtime.sleep(std::time::Duration::from_millis(50));
        }
        Ok(())
    }
}

impl Drop for Slurm {
    fn drop(&mut self) {
        for mut daemon in self.daemons.drain(..).rev() {
            signal(&daemon, Signal::TERM);
            let _ = daemon.wait();
        }
    }
}

fn configuration(folder: &Path, ports: &[Port; 2]) -> String {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let (host, folder) = (host.trim().split('.').next().unwrap(), folder.display());
    let [controller, node] = ports.each_ref().map(Port::number);
    format!(
        "ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={controller}\nSlurmdPort={node}\n\
         SlurmUser=root\nSlurmdUser=root\nAuthType=auth/munge\nAuthInfo=socket={folder}/munge.socket\n\
         StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool\nSlurmctldPidFile={folder}/slurmctld.pid\n\
         SlurmdPidFile={folder}/slurmd.pid\nProctrackType=proctrack/pgid\nTaskPlugin=task/none\n\
         SwitchType=switch/none\nMpiDefault=none\nReturnToService=2\nSelectType=select/linear\n\
         NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN\n\
         PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
    )
}

#[test]
fn the_commands_of_slurm_start_a_job_of_four_ranks() {
    if be_a_rank().is_some() {
        return;
    }
    if !["slurmctld", "slurmd", "srun"].iter().all(|program| is_installed(program, "slurm-wlm"))
        || !is_installed("munged", "munge")
    {
        return;
    }
    let slurm = match Slurm::start() {
        Ok(slurm) => slurm,
        Err(reason) => return eprintln!("skipped: Slurm does not start here: {reason}"),
    };
    let port = Port::reserve();
    let script = commands("Slurm").join("\n");
    // The node is this machine, and has a core.
    let script = script.replace("--nodes 2 --ntasks-per-node 2", "--ntasks 4 --overcommit");
    let script = script.replace("29500", &port.number().to_string());
    assert!(script.contains("--overcommit") && script.contains(&port.number().to_string()), "{script}");
    let configuration = slurm.path("slurm.conf").display().to_string();
    let desk = Desk::new();
    fs::write(desk.0.path().join("job"), format!("{script}\n")).unwrap();
    desk.check(&[format!("SLURM_CONF={configuration} salloc --quiet --nodes 1 sh job")], 4);
}
