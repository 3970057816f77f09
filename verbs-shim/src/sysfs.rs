//! The files under /sys/class/infiniband that programs read, made in a private directory.
//!
//! The directory's name is a hash of what is in it: all processes with the same devices share one, it is never changed,
//! and a process that finds it has nothing to write.

use std::{
    collections::BTreeMap,
    ffi::{CStr, CString},
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    io::{self, Write},
    net::IpAddr,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::symlink,
    },
    path::{Path, PathBuf},
    sync::{Mutex, atomic::Ordering},
    time::{Duration, Instant},
};

use libc::{c_char, c_int, size_t};
use roce::{JoinConfig, LinkState, broker};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::{
    attributes,
    device::{self, VerbsDevice},
    engine,
    fork::Own,
    gids, ret,
};

/// Paths that are answered from the private directory: these, and everything below them.
const OURS: [&str; 5] = [
    "/sys/class/infiniband",
    "/sys/class/infiniband_verbs",
    "/sys/class/misc/rdma_cm",
    "/dev/infiniband",
    "/proc/sys/net/rds",
];

/// Changed when the same tree is written otherwise.
const FORMAT: u32 = 4;
/// Settings of RDS, as Linux has them by default; nothing depends on what is written there.
const RDS_SETTINGS: [(&str, &str); 10] = [
    ("reconnect_min_delay_ms", "4\n"),
    ("reconnect_max_delay_ms", "1000\n"),
    ("max_unacked_packets", "8\n"),
    ("max_unacked_bytes", "16777216\n"),
    ("ping_enable", "1\n"),
    ("ib/max_send_wr", "256\n"),
    ("ib/max_recv_wr", "1024\n"),
    ("ib/max_unsignaled_wr", "16\n"),
    ("ib/max_recv_allocation", "81920\n"),
    ("ib/flow_control", "0\n"),
];
/// Directory of a device's counters.
const HW_COUNTERS: &str = "ports/1/hw_counters";
/// Counters that rdma_rxe has (`rxe_hw_counters.c`): the first of those that processes share.
const COUNTERS: &[&str] = broker::COUNTERS.split_at(15).0;
const LINK_DOWNED: &str = "link_downed";
/// How long the directory is believed to be right.
const FRESH: Duration = Duration::from_millis(500);

/// Whether a path is answered from the private directory. Cheap, since it runs for every file that a program opens.
fn is_ours(path: &[u8]) -> bool {
    OURS.iter().any(|root| attributes::is_below(path, root))
}

/// Files by path, relative to the private directory. An empty content with a trailing slash is a directory; below `dev`
/// are devices, which programs look up (UCX expects a writable character device) and never use.
type Tree = BTreeMap<String, String>;

/// A GID or GUID.
fn gid_text(raw: &[u8]) -> String {
    let words: Vec<String> = raw.chunks(2).map(|w| format!("{:02x}{:02x}", w[0], w[1])).collect();
    words.join(":") + "\n"
}

/// `phys_state_show` of the kernel's `core/sysfs.c`.
fn phys_state_text(link: LinkState) -> &'static str {
    match link.phys_state {
        5 => "5: LinkUp\n",
        2 => "2: Polling\n",
        _ => "3: Disabled\n",
    }
}

/// `rate_show` of the kernel's `core/sysfs.c`: the rate of a lane times their number.
fn rate_text(link: LinkState) -> String {
    let lanes = if link.active_width == 2 { 4 } else { 1 };
    // Tenths of Gbit/s.
    let (lane, name) = match link.active_speed {
        2 => (50, "DDR"),
        8 => (100, "FDR10"),
        32 => (250, "EDR"),
        _ => (25, "SDR"),
    };
    let rate = lane * lanes;
    let half = if rate % 10 == 0 { "" } else { ".5" };
    format!("{}{half} Gb/sec ({lanes}X {name})\n", rate / 10)
}

fn add_device(tree: &mut Tree, device: &VerbsDevice) {
    let name = &device.name;
    let base = format!("sys/class/infiniband/{name}");
    let link = device.link();
    let mut put = |path: &str, text: &str| {
        tree.insert(format!("{base}/{path}"), text.to_owned());
    };
    put("node_type", "1: CA\n");
    put("node_guid", &gid_text(&device.guid()));
    put("sys_image_guid", &gid_text(&device.guid()));
    put("node_desc", &format!("{name}\n"));
    put("fw_ver", "\n");
    put(&format!("device/net/{}/", device.interface), "");
    put("device/numa_node", "-1\n");
    put("ports/1/state", if link.active { "4: ACTIVE\n" } else { "1: DOWN\n" });
    put("ports/1/phys_state", phys_state_text(link));
    put("ports/1/link_layer", "Ethernet\n");
    put("ports/1/rate", &rate_text(link));
    put("ports/1/lid", "0x0\n");
    put("ports/1/sm_lid", "0x0\n");
    put("ports/1/sm_sl", "0\n");
    put("ports/1/lid_mask_count", "0\n");
    put("ports/1/cap_mask", "0x04010000\n");
    put("ports/1/pkeys/0", "0xffff\n");
    put("parent", &format!("{}\n", device.interface));
    // Their values are read when they are opened.
    for name in COUNTERS {
        put(&format!("{HW_COUNTERS}/{name}"), "0\n");
    }
    put(&format!("{HW_COUNTERS}/lifespan"), "10\n");
    for index in 0..gids::TABLE_LEN {
        put(&format!("ports/1/gids/{index}"), &gid_text(&[0; 16]));
    }
    for (index, ip) in device.gids.entries() {
        put(&format!("ports/1/gids/{index}"), &gid_text(&gids::gid_of(ip).raw));
        put(&format!("ports/1/gid_attrs/types/{index}"), "RoCE v2\n");
        put(
            &format!("ports/1/gid_attrs/ndevs/{index}"),
            &format!("{}\n", device.interface),
        );
    }
    let uverbs = format!("uverbs{}", device.index);
    let verbs = format!("sys/class/infiniband_verbs/{uverbs}");
    tree.insert(format!("{verbs}/ibdev"), format!("{name}\n"));
    tree.insert(format!("{verbs}/abi_version"), "1\n".into());
    tree.insert(format!("dev/infiniband/{uverbs}"), String::new());
}

fn tree() -> Tree {
    let mut tree = Tree::new();
    tree.insert("sys/class/infiniband/".into(), String::new());
    tree.insert("sys/class/infiniband_verbs/abi_version".into(), "6\n".into());
    tree.insert("sys/class/misc/rdma_cm/abi_version".into(), "4\n".into());
    tree.insert("dev/infiniband/rdma_cm".into(), String::new());
    for (name, value) in RDS_SETTINGS {
        tree.insert(format!("proc/sys/net/rds/{name}"), value.into());
    }
    for device in device::list().unwrap_or_default() {
        add_device(&mut tree, device);
    }
    tree
}

fn write_tree(root: &Path, tree: &Tree) -> io::Result<()> {
    for (path, text) in tree {
        let full = root.join(path);
        if path.ends_with('/') {
            fs::create_dir_all(full)?;
            continue;
        }
        if let Some(parent) = full.parent() {
            fs::create_dir_all(parent)?;
        }
        match path.starts_with("dev/") {
            true => symlink("/dev/null", full)?,
            false => fs::write(full, text)?,
        }
    }
    Ok(())
}

/// The directory for the devices as they are now.
fn build() -> io::Result<PathBuf> {
    let tree = tree();
    let mut hasher = DefaultHasher::new();
    (FORMAT, &tree).hash(&mut hasher);
    let home = broker::make_home().map_err(io::Error::other)?;
    let dir = home.join(format!("sysfs-{:016x}", hasher.finish()));
    if !dir.is_dir() {
        let made = home.join(format!("new-{}-{:x}", std::process::id(), hasher.finish()));
        let _ = fs::remove_dir_all(&made);
        write_tree(&made, &tree)?;
        // Another process may have been faster; what it made is the same.
        if fs::rename(&made, &dir).is_err() {
            let _ = fs::remove_dir_all(&made);
        }
    }
    Ok(dir)
}

static ROOT: Own<Mutex<Option<(Instant, PathBuf)>>> = Own::new(Mutex::default);

fn root() -> Option<PathBuf> {
    // A call while it is made (from the file calls that make it) gets no answer rather than a deadlock.
    let mut root = ROOT.get().try_lock().ok()?;
    if let Some((at, dir)) = &*root
        && at.elapsed() < FRESH
    {
        return Some(dir.clone());
    }
    let dir = build().ok()?;
    *root = Some((Instant::now(), dir.clone()));
    Some(dir)
}

/// Returns the replacement of a path, if it is one of ours.
pub(crate) fn redirect(path: &CStr) -> Option<CString> {
    let bytes = path.to_bytes();
    if !is_ours(bytes) {
        return None;
    }
    let text = std::str::from_utf8(bytes).ok()?;
    let root = ret::value(None, root)?;
    CString::new(format!("{}{text}", root.display())).ok()
}

/// File that a path leads to.
pub(crate) struct Target {
    pub(crate) path: CString,
    /// The tree of attributes, if that is where it leads.
    pub(crate) tree: Option<&'static Path>,
    /// Descriptor of the file that `path` names, if it was made for this call.
    _file: Option<OwnedFd>,
}

/// The same for calls that are not about the content.
pub(crate) fn resolve(path: &CStr) -> Option<Target> {
    let of_tree = || ret::value(None, || attributes::resolve(path)).map(|(path, tree)| (path, Some(tree)));
    let (path, tree) = redirect(path).map(|path| (path, None)).or_else(of_tree)?;
    Some(Target {
        path,
        tree,
        _file: None,
    })
}

/// The same for calls that open the file: a counter is what it is now.
pub(crate) fn resolve_content(path: &CStr) -> Option<Target> {
    let live = || -> Option<Target> {
        let (device, name) = counter_of(path.to_str().ok()?)?;
        let device = device::list().ok()?.into_iter().find(|d| d.name == device)?;
        let file = memory_file(&format!("{}\n", count(device, name)?)).ok()?;
        // Opened again by this name, it is read from its beginning.
        let path = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
        Some(Target {
            path,
            tree: None,
            _file: Some(file),
        })
    };
    if !is_ours(path.to_bytes()) {
        return resolve(path);
    }
    ret::value(None, live).or_else(|| resolve(path))
}

/// Device and counter that a path names.
fn counter_of(path: &str) -> Option<(&str, &str)> {
    let (device, rest) = path.strip_prefix("/sys/class/infiniband/")?.split_once('/')?;
    let name = rest.strip_prefix(HW_COUNTERS)?.strip_prefix('/')?;
    COUNTERS.contains(&name).then_some((device, name))
}

/// A counter's value: of all processes that share the device's address, ended ones included, or of this one.
fn count(device: &VerbsDevice, name: &str) -> Option<u64> {
    if name == LINK_DOWNED {
        return Some(device.link_downed.load(Ordering::Relaxed));
    }
    let shared = JoinConfig::from_env().and_then(|how| broker::statistics(&how.dir).ok()?);
    if let Some(statistics) = shared {
        let own: Vec<IpAddr> = device.gids.entries().into_iter().map(|(_, ip)| ip).collect();
        return Some(statistics.sum(&own, name));
    }
    let counters = engine::current()?.device.hw_counters();
    counters.iter().find(|(n, _)| *n == name).map(|(_, value)| *value)
}

/// Makes a file without a name.
fn memory_file(text: &str) -> io::Result<OwnedFd> {
    let mut file = fs::File::from(memfd_create(c"ferroce-counter", MemfdFlags::CLOEXEC)?);
    file.write_all(text.as_bytes())?;
    Ok(file.into())
}

/// Reads a file of sysfs, as libibverbs has it: the trailing newline goes, and there is a zero at the end if it fits.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_read_sysfs_file(
    dir: *const c_char,
    file: *const c_char,
    buffer: *mut c_char,
    size: size_t,
) -> c_int {
    ret::minus_one(|| {
        // SAFETY: the program passes two strings.
        let (dir, file) = unsafe { (CStr::from_ptr(dir), CStr::from_ptr(file)) };
        let path = format!("{}/{}", dir.to_string_lossy(), file.to_string_lossy());
        let path = CString::new(path).map_err(|_| ret::Errno::INVAL)?;
        let target = resolve_content(&path);
        let path = target.as_ref().map_or(&path, |t| &t.path);
        let mut text = fs::read(Path::new(&*path.to_string_lossy()))?;
        if text.last() == Some(&b'\n') {
            text.pop();
        }
        let count = text.len().min(size);
        // SAFETY: the program has room for `size` bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr().cast(), buffer, count);
            if count < size {
                buffer.add(count).write(0);
            }
        }
        Ok(count as c_int)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_written_as_the_kernel_does() {
        let cases = [
            ((1, 1), "2.5 Gb/sec (1X SDR)\n"),
            ((1, 8), "10 Gb/sec (1X FDR10)\n"),
            ((2, 2), "20 Gb/sec (4X DDR)\n"),
            ((1, 32), "25 Gb/sec (1X EDR)\n"),
            ((2, 8), "40 Gb/sec (4X FDR10)\n"),
            ((2, 32), "100 Gb/sec (4X EDR)\n"),
        ];
        for ((active_width, active_speed), text) in cases {
            let link = LinkState {
                active: true,
                phys_state: 5,
                active_width,
                active_speed,
            };
            assert_eq!(rate_text(link), text);
        }
    }

    #[test]
    fn counters_are_told_from_other_files() {
        let at = "/sys/class/infiniband/ferroce0/ports/1/hw_counters/";
        assert_eq!(counter_of(&format!("{at}sent_pkts")), Some(("ferroce0", "sent_pkts")));
        for other in ["lifespan", "", "sent_pkts/x"] {
            assert_eq!(counter_of(&format!("{at}{other}")), None);
        }
        assert_eq!(counter_of("/sys/class/infiniband/ferroce0/ports/1/state"), None);
        assert!(resolve_content(c"/etc/hostname").is_none());
    }

    #[test]
    fn the_names_are_those_of_the_device() {
        let device = roce::Device::open(roce::DeviceConfig::new(ferroce_loopback::address().into())).unwrap();
        assert_eq!(device.hw_counters().map(|(name, _)| name), COUNTERS);
    }
}
