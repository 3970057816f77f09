//! Programs that nothing is preloaded into: the dynamic linker finds ferroce as libibverbs.so.1 and librdmacm.so.1 in a
//! directory of LD_LIBRARY_PATH.

use crate::cases::Case;

/// Cases of the matrix that are run in this way too: one of each program, and those whose modules come in late.
pub(crate) const ALSO: [&str; 23] = [
    "ibv_devinfo -v",
    "ibv_rc_pingpong -e",
    "ibv_ud_pingpong",
    "ibv_xsrq_pingpong -e",
    "ib_write_bw",
    "ib_send_lat -c UD",
    "ib_read_bw -R",
    "rping",
    "ucmatose",
    "rdma_server + rdma_client",
    "mckey",
    "rstream",
    "qperf rc_bw",
    "fio rdma write",
    "ucx_perftest rc_v tag_bw",
    "fi_pingpong verbs msg",
    "fi_pingpong verbs;ofi_rxm rdm",
    "mpi over ucx, 4 ranks",
    "pyverbs",
    "ibverbs of PyPI",
    "mooncake transfer engine",
    "sideway of crates.io",
    "loading and unloading a library",
];
/// What can be had by preloading alone: sysfs for programs that have nothing to do with verbs (cat, ls, python), and programs with
/// a libibverbs of their own, of another name.
pub(crate) const PRELOADED: [&str; 3] = ["hw_counters in sysfs", "sysfs by other calls", "nixl over ucx"];

/// A program that knows the libraries by name alone, as NCCL, PyPI's ibverbs and others do.
const BY_NAME: &str = r#"import ctypes, os
assert "LD_PRELOAD" not in os.environ
verbs = ctypes.CDLL("libibverbs.so.1")
verbs.ibv_get_device_name.restype = ctypes.c_char_p
verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
count = ctypes.c_int()
devices = verbs.ibv_get_device_list(ctypes.byref(count))
names = [verbs.ibv_get_device_name(ctypes.c_void_p(devices[i])) for i in range(count.value)]
assert b"ferroce0" in names, names
at = "/sys/class/infiniband/ferroce0/"
assert open(at + "node_type").read() == "1: CA\n"
assert os.listdir(at + "ports") == ["1"]

cm = ctypes.CDLL("librdmacm.so.1")
cm.rdma_get_devices.restype = ctypes.POINTER(ctypes.c_void_p)
found = ctypes.c_int()
assert cm.rdma_get_devices(ctypes.byref(found)) and found.value == count.value, found.value
cm.rdma_create_event_channel.restype = ctypes.c_void_p
channel = ctypes.c_void_p(cm.rdma_create_event_channel())
number = ctypes.c_void_p()
assert channel.value
assert cm.rdma_create_id(channel, ctypes.byref(number), None, 0x106) == 0
assert cm.rdma_listen(number, 1) == 0
assert cm.rdma_destroy_id(number) == 0
cm.rdma_destroy_event_channel(channel)
print("found by name")
"#;

/// Every symbol that the system's libraries have, by its version, is in ours, and is ours; and who is bound at once lacks none.
const SYMBOLS: &str = r#"import ctypes, glob, os, subprocess, sys
libc = ctypes.CDLL(None)
libc.dlvsym.restype = ctypes.c_void_p
libc.dlvsym.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
class Info(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("at", ctypes.c_void_p)]
libc.dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(Info)]
ours = os.environ["LD_LIBRARY_PATH"].split(":")[0]
for name in ["libibverbs.so.1", "librdmacm.so.1"]:
    theirs = [f for d in ("/usr/lib/*/", "/usr/lib64/", "/usr/lib/") for f in glob.glob(d + name)][0]
    library, missing, count = ctypes.CDLL(name), [], 0
    for line in subprocess.check_output(["objdump", "-T", theirs], text=True).splitlines():
        words = line.split()
        if len(words) < 6 or "*UND*" in words or "*ABS*" in words:
            continue
        symbol, version = words[-1], words[-2].strip("()")
        if not version.startswith(("IBVERBS", "RDMACM")):
            continue
        found, info = libc.dlvsym(library._handle, symbol.encode(), version.encode()), Info()
        count += 1
        if not found or not libc.dladdr(found, ctypes.byref(info)) or not info.file.startswith(ours.encode()):
            missing.append((symbol, version, info.file))
    print(name, count, "symbols, missing:", missing)
    assert count > 60 and not missing
programs = [p for d in ("/usr/bin/", "/usr/sbin/") for n in ("ibv_devinfo", "rping", "ucmatose", "ib_write_bw")
            for p in glob.glob(d + n)]
for file in programs + glob.glob("/usr/lib/*/libmlx5.so.1") + glob.glob("/usr/lib/*/libefa.so.1"):
    done = subprocess.run(["ldd", "-r", file], capture_output=True, text=True)
    said = [l for l in (done.stdout + done.stderr).splitlines() if "undefined" in l or "version" in l or "not found" in l]
    print(file, said)
    assert done.returncode == 0 and not said
print("all there")
"#;

/// Whether a case makes no sense in this way.
pub(crate) fn needs_preload(case: &Case) -> bool {
    PRELOADED.contains(&case.name.as_str())
}

/// The cases, of which some are those of the matrix.
pub(crate) fn all(matrix: &[Case]) -> Vec<Case> {
    let script = |name: &str, package, text, says| {
        let case = Case::alone(name, package, "python3 script.py");
        case.file("script.py", text).says(says).by_directory().ci()
    };
    let mut out = vec![
        script("libraries by name", "python3", BY_NAME, "found by name"),
        script("symbols of the libraries", "binutils", SYMBOLS, "all there"),
    ];
    let also = |name: &&str| matrix.iter().find(|case| case.name == *name && !case.net.v6).cloned();
    out.extend(
        ALSO.iter()
            .filter_map(also)
            .map(|case| Case { ci: false, ..case }.by_directory()),
    );
    out
}
