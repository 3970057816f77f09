//! Where programs run: as which user, and in which network.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    net::IpAddr,
    os::unix::{
        fs::{PermissionsExt as _, chown, symlink},
        process::CommandExt as _,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use nix::{
    sys::resource::{Resource, getrlimit, setrlimit},
    unistd::{Pid, geteuid},
};

use crate::Result;

/// What an ordinary user may lock (Linux since 5.16); programs check it before they register memory.
const MEMLOCK: u64 = 8 << 20;
/// Makes an interface, waits for its addresses, says so, and keeps the namespace until standard input is closed.
const NAMESPACE: &str = "set -e; export PATH=$PATH:/usr/sbin:/sbin; ip link set lo up
ip link add roce0 type veth peer name roce1 || ip link add roce0 type dummy
ip addr add 10.77.91.1/24 dev roce0; ip addr add fd77:91::1/64 dev roce0 nodad
ip addr add fe80::91/64 dev roce0 nodad
ip link set roce0 up; ip link set roce1 up || true
for i in 1 2 3 4 5 6 7 8 9 10; do ip -6 addr | grep -q tentative && sleep 0.5; done
echo ready; exec cat";
const NAMESPACE_ADDRS: [&str; 2] = ["10.77.91.1", "fd77:91::1"];
const NAMESPACE_LINK_LOCAL: &str = "fe80::91";

/// The network of a case.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Net {
    /// An Ethernet interface in a network namespace, rather than this host's loopback.
    pub(crate) ethernet: bool,
    pub(crate) v6: bool,
    /// A link-local address, which means nothing without its interface.
    pub(crate) link_local: bool,
    /// No address is named, in a namespace of such cases alone: they bind every address.
    pub(crate) everywhere: bool,
}

/// Where processes of one broker run, as an index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    /// This host.
    Here,
    /// A namespace, at an address.
    Namespace,
    /// A namespace, at every address.
    Everywhere,
}

impl Place {
    pub(crate) const ALL: [Self; 3] = [Self::Here, Self::Namespace, Self::Everywhere];

    /// The name of its broker's directory.
    pub(crate) fn broker(self) -> &'static str {
        ["broker", "broker-namespace", "broker-everywhere"][self as usize]
    }
}

impl Net {
    pub(crate) fn place(self) -> Place {
        match (self.everywhere, self.ethernet) {
            (true, _) => Place::Everywhere,
            (false, true) => Place::Namespace,
            (false, false) => Place::Here,
        }
    }
}

/// Somebody else whom programs run as.
#[derive(Clone, Copy)]
pub(crate) struct User {
    uid: u32,
    gid: u32,
}

impl User {
    /// Whom programs shall run as: of root's rights they shall have none, so `nobody` unless another is named. None: as
    /// we are.
    pub(crate) fn choose(name: Option<&str>) -> Result<Option<Self>> {
        if !geteuid().is_root() {
            return match name {
                None => Ok(None),
                Some(_) => Err("--user is for root".into()),
            };
        }
        let name = name.unwrap_or("nobody");
        let found = nix::unistd::User::from_name(name).map_err(|e| format!("looking up user {name}: {e}"))?;
        let found = found.ok_or_else(|| format!("there is no user {name}"))?;
        if found.uid.is_root() {
            return Ok(None);
        }
        // The limits of root are not theirs.
        let (_, most) = getrlimit(Resource::RLIMIT_MEMLOCK).map_err(|e| format!("reading limits: {e}"))?;
        let most = most.min(MEMLOCK);
        setrlimit(Resource::RLIMIT_MEMLOCK, most, most).map_err(|e| format!("setting a limit: {e}"))?;
        let (uid, gid) = (found.uid.as_raw(), found.gid.as_raw());
        Ok(Some(Self { uid, gid }))
    }

    /// Gives them a file or folder.
    pub(crate) fn give(self, path: &Path) -> Result<()> {
        chown(path, Some(self.uid), Some(self.gid)).map_err(|e| format!("{}: {e}", path.display()))
    }

    /// Runs a command as them, and with no other group.
    pub(crate) fn become_it(self, command: &mut Command) {
        command.uid(self.uid).gid(self.gid);
    }
}

/// Beside `ferroce`, in a build tree: the directory where the dynamic linker finds its library as libibverbs and librdmacm.
pub(crate) const DIRECTORY: &str = "lib/ferroce";

/// Copies `ferroce` and its library to where every user can run them.
pub(crate) fn copy_programs(ferroce: &Path, to: &Path) -> Result<PathBuf> {
    fs::create_dir(to).map_err(|e| format!("{}: {e}", to.display()))?;
    let dir = to.join(DIRECTORY);
    fs::create_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let stubs = ["libibverbs.so.1", "librdmacm.so.1"].map(|name| format!("{DIRECTORY}/{name}"));
    for name in ["ferroce", "libferroce_verbs.so"]
        .into_iter()
        .chain(stubs.iter().map(String::as_str))
    {
        let from = ferroce.with_file_name(name);
        fs::copy(&from, to.join(name)).map_err(|e| format!("copying {}: {e}", from.display()))?;
    }
    let link = dir.join("libferroce_verbs.so");
    symlink("../../libferroce_verbs.so", &link).map_err(|e| format!("{}: {e}", link.display()))?;
    Ok(to.join("ferroce"))
}

/// Lets every user look into a folder.
pub(crate) fn open_to_all(dir: &Path) -> Result<()> {
    fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).map_err(|e| format!("{}: {e}", dir.display()))
}

/// A network namespace with an Ethernet interface, made without any right.
pub(crate) struct Namespace {
    holder: Child,
}

impl Namespace {
    pub(crate) fn open(user: Option<User>) -> Result<Self> {
        let fail = |e: std::io::Error| format!("making a network namespace: {e}");
        let mut command = Command::new("unshare");
        command
            .args(["--map-root-user", "--net", "sh", "-c", NAMESPACE])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        if let Some(user) = user {
            user.become_it(&mut command);
        }
        let mut holder = command.spawn().map_err(fail)?;
        let mut line = String::new();
        if let Some(out) = holder.stdout.take() {
            BufReader::new(out).read_line(&mut line).map_err(fail)?;
        }
        let out = Self { holder };
        match line.trim() {
            "ready" => Ok(out),
            _ => Err("this system lets users make no network namespace with an interface".into()),
        }
    }

    /// The process that keeps it.
    pub(crate) fn holder(&self) -> Pid {
        Pid::from_raw(self.holder.id() as i32)
    }

    /// The words before a command that shall run in it.
    pub(crate) fn prefix(&self) -> Vec<String> {
        let target = self.holder.id().to_string();
        let words = [
            "nsenter",
            "--target",
            &target,
            "--user",
            "--net",
            "--preserve-credentials",
            "--",
        ];
        words.map(str::to_owned).into()
    }

    /// Its addresses, of IPv4 and IPv6.
    pub(crate) fn addr(net: Net) -> Result<IpAddr> {
        let text = match net.link_local {
            true => NAMESPACE_LINK_LOCAL,
            false => NAMESPACE_ADDRS[usize::from(net.v6)],
        };
        text.parse().map_err(|e| format!("{text}: {e}"))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}
