//! System tools that the demo and some tests need.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use crate::{Result, process};

/// A program and the Debian package that brings it.
#[derive(Clone, Copy)]
pub(crate) struct Tool {
    pub(crate) program: &'static str,
    pub(crate) package: &'static str,
}

/// Makes and checks ext4 images, changes them without mounting.
pub(crate) const EXT4: [Tool; 3] = [
    Tool::new("mke2fs", "e2fsprogs"),
    Tool::new("e2fsck", "e2fsprogs"),
    Tool::new("debugfs", "e2fsprogs"),
];
/// NBD clients of others.
pub(crate) const NBD_CLIENTS: [Tool; 4] = [
    Tool::new("qemu-img", "qemu-utils"),
    Tool::new("nbdcopy", "libnbd-bin"),
    Tool::new("nbdsh", "python3-libnbd"),
    Tool::new("fio", "fio"),
];

/// Programs for libibverbs.
pub(crate) const PERFTEST: Tool = Tool::new("ib_write_bw", "perftest");

/// Examples of rdma-core.
pub(crate) const IBVERBS: Tool = Tool::new("ibv_devinfo", "ibverbs-utils");

/// Makes the certificates of the book's example.
pub(crate) const OPENSSL: Tool = Tool::new("openssl", "openssl");

/// Reads captures.
pub(crate) const TSHARK: Tool = Tool::new("tshark", "tshark");

/// Connects by RDMA_CM.
pub(crate) const RPING: Tool = Tool::new("rping", "rdmacm-utils");

/// Masquerades, as docker does for its containers.
pub(crate) const IPTABLES: Tool = Tool::new("iptables", "iptables");

/// Finds what a program uses of memory that it should not.
pub(crate) const VALGRIND: Tool = Tool::new("valgrind", "valgrind");

/// Build dependencies of our crates over libibverbs and librdmacm.
const HARDWARE: [Tool; 4] = [
    Tool::new("pkg-config", "pkg-config"),
    Tool::new("/usr/include/infiniband/verbs.h", "libibverbs-dev"),
    Tool::new("/usr/include/rdma/rdma_cma.h", "librdmacm-dev"),
    // Headers of the library itself have the version in their path.
    Tool::new("/usr/share/doc/libclang-dev/copyright", "libclang-dev"),
];

/// C compiler and headers that declarations of verbs-shim are compared with.
pub(crate) fn of_unit() -> Vec<Tool> {
    let [_, verbs, rdmacm, _] = HARDWARE;
    vec![Tool::new("cc", "gcc"), verbs, rdmacm]
}

/// The same, and what their tests need.
pub(crate) fn of_hardware() -> Vec<Tool> {
    HARDWARE.into_iter().chain([VALGRIND]).collect()
}

/// Build dependencies of the conformance kit.
pub(crate) fn of_kit() -> Vec<Tool> {
    let more = [
        Tool::new("gcc", "gcc"),
        Tool::new("readelf", "binutils"),
        Tool::new("tar", "tar"),
    ];
    HARDWARE.into_iter().chain(more).collect()
}

/// Build dependencies of packages.
pub(crate) const OF_PACKAGES: [Tool; 4] = [
    Tool::new("strip", "binutils"),
    Tool::new("tar", "tar"),
    Tool::new("dpkg-deb", "dpkg"),
    Tool::new("/usr/lib/python3/dist-packages/wheel/__main__.py", "python3-wheel"),
];
/// Tools that boot a root in a container.
pub(crate) const OF_BOOTED_ROOTS: [Tool; 1] = [Tool::new("systemd-nspawn", "systemd-container")];
/// Programs that try packages in a fresh Debian.
pub(crate) const OF_FRESH_ROOTS: [Tool; 6] = [
    Tool::new("mmdebstrap", "mmdebstrap"),
    Tool::new("unshare", "util-linux"),
    Tool::new("/usr/share/doc/python3-venv/copyright", "python3-venv"),
    IBVERBS,
    PERFTEST,
    Tool::new("curl", "curl"),
];

/// Whether crates over libibverbs and librdmacm can be built.
pub(crate) fn may_build_hardware() -> Result<()> {
    match missing(&HARDWARE)[..] {
        [] => Ok(()),
        ref packages => Err(format!("not built without the packages {}", packages.join(", "))),
    }
}

/// Runs virtual machines.
pub(crate) const QEMU: Tool = Tool::new("qemu-system-x86_64", "qemu-system-x86");

impl Tool {
    pub(crate) const fn new(program: &'static str, package: &'static str) -> Self {
        Self { program, package }
    }
}

/// The full path of a program, also from the administrator's folders.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    if program.contains('/') {
        return Some(PathBuf::from(program)).filter(|p| p.is_file());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin", "/usr/local/sbin"].map(PathBuf::from))
        .map(|dir| dir.join(program))
        .find(|p| p.is_file())
}

/// Why what makes namespaces does not run.
pub(crate) const NO_NAMESPACES: &str = "no right to make namespaces: not root";

/// Whether tests may make network and mount namespaces.
pub(crate) fn may_make_namespaces() -> bool {
    let mut command = Command::new("unshare");
    command.args(["-m", "-n", "true"]);
    process::capture("unshare", &mut command).is_ok()
}

/// Why what mounts a FUSE file system does not run.
pub(crate) const NO_FUSE: &str = "no right to mount a FUSE file system: not root, or no /dev/fuse";

/// Whether tests may mount FUSE file systems.
pub(crate) fn may_mount_fuse() -> bool {
    may_make_namespaces() && Path::new("/dev/fuse").exists()
}

/// Why units of systemd are not looked at.
pub(crate) const NO_SYSTEMD: &str = "no systemd-analyze of systemd 252 or later";

/// Whether systemd can say how exposed a unit is, without running it.
pub(crate) fn may_analyze_units() -> bool {
    let mut command = Command::new("systemd-analyze");
    command.arg("--version");
    let Ok(out) = process::capture("systemd-analyze", &mut command) else {
        return false;
    };
    let said = String::from_utf8_lossy(&out.stdout);
    let version = said.split_whitespace().nth(1).and_then(|word| word.parse::<u32>().ok());
    version.is_some_and(|version| version >= 252)
}

/// The packages of what is missing.
fn missing(tools: &[Tool]) -> Vec<&'static str> {
    let lacking = tools.iter().filter(|t| find(t.program).is_none());
    let mut packages: Vec<_> = lacking.map(|t| t.package).collect();
    packages.sort_unstable();
    packages.dedup();
    packages
}

/// Installs what is missing with apt, or says exactly what is.
pub(crate) fn ensure(tools: &[Tool]) -> Result<()> {
    let packages = missing(tools);
    if packages.is_empty() {
        return Ok(());
    }
    let by_hand = format!("apt-get install {}", packages.join(" "));
    if find("apt-get").is_none() {
        return Err(format!(
            "missing system packages (Debian names): {}",
            packages.join(", ")
        ));
    }
    println!("installing missing system packages: {}", packages.join(", "));
    // The lab may be installing what it needs.
    let install = [
        "apt-get",
        "install",
        "-y",
        "--no-install-recommends",
        "-o",
        "DPkg::Lock::Timeout=300",
    ];
    if apt(&[&install[..], &packages[..]].concat()).is_err() {
        // A fresh machine has no package lists.
        let again = apt(&["apt-get", "update"]).and_then(|()| apt(&[&install[..], &packages[..]].concat()));
        again.map_err(|e| format!("{e}\nplease run as root: {by_hand}"))?;
    }
    match missing(tools)[..] {
        [] => Ok(()),
        ref still => Err(format!("still missing after apt-get install: {}", still.join(", "))),
    }
}

fn apt(command: &[&str]) -> Result<()> {
    let root = nix::unistd::geteuid().is_root();
    let mut full: Vec<&str> = Vec::new();
    if !root {
        if find("sudo").is_none() {
            return Err("not root, and there is no sudo".into());
        }
        full.extend(["sudo", "-n"]);
    }
    full.extend(command);
    let (program, args) = full.split_first().ok_or("empty command")?;
    let mut run = Command::new(program);
    run.args(args).env("DEBIAN_FRONTEND", "noninteractive");
    process::capture(&full.join(" "), &mut run).map(|_| ())
}
