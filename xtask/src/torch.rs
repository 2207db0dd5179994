//! `cargo xtask torch`: builds and tests the crate dist-torch, which is not a default member, with PyTorch.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::command::{Failure, Steps, cargo, output, print_help, show, target_folder};
use crate::members;

pub(crate) const HELP: &str = "\
cargo xtask torch [--all | --install]

Builds and tests dist-torch, the backend of torch.distributed, and prints how long that took. It is no default
member, because it needs Python from 3.10 on with its modules venv and pip, a C compiler, and 1.7 GB for
PyTorch, which pip installs into target/torch-venv. Delete that folder to install afresh.
  (no option)  clippy, documents, an unoptimised wheel, the tests of dist-torch, the torchrun command of the
               guide, and those tests of PyTorch which crates/dist-torch/tests/quick.txt lists, on 2 ranks
  --all        an optimised wheel, the tests of dist-torch and torchrun, all distributed tests of PyTorch with
               Gloo and with dist on 2, 3 and 4 ranks, and the table of their outcomes in the crate's README
  --install    only the virtual environment

All libraries for GPUs that the wheel of PyTorch requires take 5.4 GB. Tests on CPUs call none of them, so
most are replaced by empty libraries of the same names.";

/// Packages that pip installs without their requirements: PyTorch, and the libraries for GPUs whose variables or
/// functions are read when PyTorch is loaded.
const WITHOUT_REQUIREMENTS: &[&str] = &[
    "torch==2.15.*",
    "nvidia-cuda-runtime==13.2.*",
    "nvidia-cuda-cupti==13.2.*",
    "nvidia-nvshmem-cu13==3.7.*",
];

/// Packages that pip installs with all that they require. PyTorch's tests need expecttest, its tests of distributed
/// checkpoints need numpy, and PyTorch itself needs the first seven.
const PACKAGES: &[&str] = &[
    "filelock",
    "fsspec",
    "jinja2",
    "networkx",
    "setuptools>=77",
    "sympy",
    "typing-extensions",
    "numpy",
    "expecttest",
    "maturin>=1.9,<2",
    "pytest",
];

/// Libraries for GPUs with which PyTorch is linked, and which no test calls. Empty libraries replace them.
const EMPTY_LIBRARIES: &[&str] = &[
    "libcublas.so.13",
    "libcublasLt.so.13",
    "libcudnn.so.9",
    "libcufft.so.12",
    "libcufile.so.0",
    "libcusparse.so.12",
    "libcusparseLt.so.0",
    "libnccl.so.2",
    "libnvrtc.so.13",
];

/// Packages that the quick wheel compiles without optimisation, which takes a third of the time.
const NOT_OPTIMISED: &[&str] = &["dist-transport", "dist-algos", "dist-collectives", "dist-torch"];

/// Lets Python load libraries although functions that are never called are missing. A line of a `.pth` file that
/// begins with `import` runs at the start of Python.
const LAZY_BINDING: &str = "import os, sys; sys.setdlopenflags(os.RTLD_LAZY)\n";

/// The extent of the build and the tests.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Extent {
    Install,
    Quick,
    All,
}

pub(crate) fn run(mut arguments: lexopt::Parser) -> Result<(), Failure> {
    let mut extent = Extent::Quick;
    while let Some(argument) = arguments.next()? {
        extent = match argument {
            lexopt::Arg::Long("help") | lexopt::Arg::Short('h') => return print_help(HELP),
            lexopt::Arg::Long("all") => Extent::All,
            lexopt::Arg::Long("install") => Extent::Install,
            other => return Err(other.unexpected().into()),
        };
    }
    let mut steps = Steps::default();
    let environment = Environment(target_folder()?.join("torch-venv"));
    steps.step("torch: virtual environment", || environment.install())?;
    if extent == Extent::Install {
        return Ok(());
    }
    steps
        .step("torch: clippy", || show(&mut cargo("clippy --package dist-torch --no-deps -- -D warnings")))?;
    steps.step("torch: docs", || {
        show(cargo("doc --package dist-torch --no-deps").env("RUSTDOCFLAGS", "-D warnings"))
    })?;
    steps.step("torch: wheel", || environment.install_wheel(extent))?;
    steps.step("torch: tests", || {
        show(environment.python("pytest").args(["-q", "crates/dist-torch/tests"]))
    })?;
    // `cargo xtask ci` skips this test if PyTorch is not yet installed.
    steps.step("torch: the command of torchrun", || {
        let features = members::all_features()?;
        let path = std::env::var_os("PATH").unwrap_or_default();
        let folders = [environment.0.join("bin")].into_iter().chain(std::env::split_paths(&path));
        let path = std::env::join_paths(folders).map_err(|error| Failure::Check(error.to_string()))?;
        show(cargo(&format!("test {features} --test run -- torchrun::")).env("PATH", path))
    })?;
    match extent {
        Extent::All => steps.step("torch: all tests of PyTorch", || environment.compare_suites())?,
        _ => steps.step("torch: quick tests of PyTorch", || {
            let mut suite = environment.suite("dist", "2");
            show(suite.args(["--only", "crates/dist-torch/tests/quick.txt"]))
        })?,
    }
    steps.summary();
    Ok(())
}

/// The virtual environment of Python.
struct Environment(PathBuf);

impl Environment {
    fn install(&self) -> Result<(), Failure> {
        if self.has_packages() {
            return Ok(());
        }
        show(Command::new("python3").args(["-m", "venv"]).arg(&self.0))?;
        show(self.pip_install().args(PACKAGES))?;
        show(self.pip_install().arg("--no-deps").args(WITHOUT_REQUIREMENTS))?;
        let mut site = Command::new(self.0.join("bin/python"));
        let site = output(site.args(["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]))?;
        let site = Path::new(site.trim_end());
        std::fs::write(site.join("lazy-binding.pth"), LAZY_BINDING)?;
        for name in EMPTY_LIBRARIES {
            let mut compiler = Command::new("cc");
            compiler.args(["-shared", "-x", "c", "/dev/null"]).arg(format!("-Wl,-soname,{name}"));
            show(compiler.arg("-o").arg(site.join("torch/lib").join(name)))?;
        }
        if self.has_packages() {
            return Ok(());
        }
        let folder = self.0.display();
        Err(Failure::Check(format!(
            "{folder}/bin/python cannot import PyTorch: the versions of its libraries differ"
        )))
    }

    /// Returns the command by which pip installs packages. It keeps no copies in its cache, and Python compiles a
    /// module when a test first imports it.
    fn pip_install(&self) -> Command {
        let mut pip = self.python("pip");
        pip.args(["install", "--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-compile"]);
        pip
    }

    fn has_packages(&self) -> bool {
        let mut command = Command::new(self.0.join("bin/python"));
        command.args(["-c", "import torch, numpy, expecttest, pytest"]);
        command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
    }

    /// Returns a command that runs a module of Python.
    fn python(&self, module: &str) -> Command {
        let mut command = Command::new(self.0.join("bin/python"));
        command.args(["-m", module]).env("DIST_COSTS", "off").env("OMP_NUM_THREADS", "1");
        command
    }

    fn install_wheel(&self, extent: Extent) -> Result<(), Failure> {
        let wheels = target_folder()?.join("torch-wheel");
        let profile = if extent == Extent::All { "release" } else { "dev" };
        let _ = std::fs::remove_dir_all(&wheels);
        let mut maturin = self.python("maturin");
        maturin.args(["build", "--manifest-path", "crates/dist-torch/Cargo.toml", "--profile", profile]);
        if extent != Extent::All {
            for package in NOT_OPTIMISED {
                maturin.arg("--config").arg(format!("profile.dev.package.{package}.opt-level=0"));
            }
        }
        show(maturin.arg("--out").arg(&wheels))?;
        let mut pip = self.pip_install();
        pip.args(["--no-deps", "--no-index", "--force-reinstall", "--find-links"]);
        show(pip.arg(&wheels).arg("dist-torch"))
    }

    /// Returns a command that runs distributed tests of PyTorch.
    fn suite(&self, backend: &str, ranks: &str) -> Command {
        let mut command = Command::new(self.0.join("bin/python"));
        command.args(["crates/dist-torch/tests/pytorch_suite.py", backend, ranks]);
        command
    }

    /// Runs all tests of PyTorch with both backends, and writes the table of their outcomes.
    fn compare_suites(&self) -> Result<(), Failure> {
        let folder = target_folder()?.join("torch-outcomes");
        std::fs::create_dir_all(&folder)?;
        for ranks in ["2", "3", "4"] {
            for backend in ["gloo", "dist"] {
                let mut suite = self.suite(backend, ranks);
                suite.arg("--out").arg(folder.join(format!("{backend}-{ranks}.json")));
                // The table lists the failed tests, and the comparison shows whether they pass with Gloo.
                let _ = show(&mut suite);
            }
        }
        let mut table = Command::new(self.0.join("bin/python"));
        show(table.arg("crates/dist-torch/tests/suite_table.py").arg(&folder))
    }
}
