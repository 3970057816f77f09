//! Programs that nobody tells an address: each interface of the host is a device, here loopback and an Ethernet interface of
//! another MTU.

use crate::cases::{Case, IBVERBS, PERFTEST, RDMACM, Ready};

/// The devices of [`crate::site`]'s namespace: number, address, and the longest datagram. Loopback comes after what leads to
/// other hosts.
const DEVICES: [(&str, &str, u32); 2] = [("ferroce0", "10.77.91.1", 1024), ("ferroce1", "127.0.0.1", 4096)];

/// Takes the link of an interface away and gives it back while `ibv_asyncwatch` watches its device.
const WATCH: &str = "set -e; export PATH=$PATH:/usr/sbin:/sbin
ibv_asyncwatch -d ferroce0 > watch & watcher=$!
trap 'kill $watcher' EXIT
seen() { for i in $(seq 300); do grep -qiE \"$1\" watch && return; sleep 0.1; done; echo \"no $1:\"; cat watch; exit 1; }
seen 'FD'
ip link set roce1 down; seen 'port.err'
ip link set roce1 up; seen 'port.active'
ip addr add 10.77.93.1/24 dev roce0; seen 'gid.(table.)?change'; ip addr del 10.77.93.1/24 dev roce0
cat watch; test $(grep -ciE 'port.err' watch) = 1
echo all told";

/// A server that stays, and what its device has counted while it lives, read by another process: what the server counts, and
/// what clients had counted that have ended. Each of ten pings is two messages of either side. The first client shows that
/// the server is a member: from then on the broker, and with it what it has counted, stays.
const COUNTERS: &str = "set -e
rping -s -P -a 127.0.0.1 -p {port} > server 2>&1 & server=$!
trap 'kill $server' EXIT
for i in $(seq 50); do rping -c -a 127.0.0.1 -p {port} -C 1 && break; sleep 0.3; done
at=/sys/class/infiniband/ferroce1
sends() { cat $at/ports/1/hw_counters/rdma_sends; }
before=$(sends); rping -c -a 127.0.0.1 -p {port} -C 10
# The server may be about to count its last one.
for i in $(seq 100); do after=$(sends); test $((after - before)) -ge 40 && break; sleep 0.1; done
echo \"$before, then $after\"; test $((after - before)) -ge 40; test $(sends) -ge $after
ls $at/ports/1/hw_counters; test $(ls $at/ports/1/hw_counters | wc -l) = 16
test $(cat $at/ports/1/hw_counters/link_downed) = 0
test $(cat $at/parent) = lo
echo all counted";

/// Two hosts of one user, each a network namespace with a broker of its own: by itself, and not by a directory that both are told.
/// The other host's programs are told no device and no address: their first device leads here, though they have loopback too.
const HOSTS: &str = "set -e; export PATH=$PATH:/usr/sbin:/sbin XDG_RUNTIME_DIR={dir}; unset FERROCE_BROKER_DIR FERROCE_ADDR
unshare -n sh -c 'echo up; exec sleep 600' > other & other=$!
trap 'kill $other' EXIT
soon() { for i in $(seq 300); do \"$@\" && return; sleep 0.1; done; echo \"not: $*\"; exit 1; }
soon grep -q up other
ip link add host0 type veth peer name host1 netns $other
ip addr add 198.51.100.1/24 dev host0; ip link set host0 up
here() { env FERROCE_ADDR=198.51.100.1 \"$@\"; }
there() { nsenter -t $other -n env \"$@\"; }
there ip link set lo up; ip link set lo up; ip addr show lo | grep 127.0.0.1
there ip addr add 198.51.100.2/24 dev host1; there ip link set host1 up
here stdbuf -oL ibv_rc_pingpong -g 0 -p {port} > server & server=$!
soon grep -q 'local address' server
first=$(echo {dir}/ferroce/net-*)
if there env FERROCE_BROKER_DIR=$first ibv_rc_pingpong -g 0 -p {port} 198.51.100.1 2> refused; then echo \"not refused\"; exit 1; fi
grep 'another network namespace' refused
there ibv_rc_pingpong -g 0 -p {port} 198.51.100.1
wait $server
here stdbuf -oL ib_write_bw -n 500 -p {port} > server & server=$!
soon grep -q 'Waiting for client' server
there ib_write_bw -n 500 -p {port} 198.51.100.1
wait $server
here stdbuf -oL ibv_rc_pingpong -g 0 -p {port} > server & server=$!
soon grep -q 'local address' server
here FERROCE_DEVICE_NAME=mlx5_0 ibv_rc_pingpong -d mlx5_0 -g 0 -p {port} 198.51.100.1
wait $server
test $(ls -d {dir}/ferroce/net-* | wc -l) = 2
echo both met";

/// Functions of libc that libibumad, libhwloc, UCX and programs built with _FORTIFY_SOURCE read sysfs with.
const FILES: &str = r#"import ctypes, os
libc, at = ctypes.CDLL(None), b"/sys/class/infiniband"
names, text = ctypes.c_void_p(), ctypes.create_string_buffer(4096)
assert libc.scandir(at, ctypes.byref(names), None, None) >= 4
assert os.read(libc.__open_2(at + b"/ferroce0/node_type", 0), 99) == b"1: CA\n"
libc.__realpath_chk.restype = ctypes.c_void_p
assert libc.__realpath_chk(at + b"/ferroce0", text, 4096)
size = libc.readlinkat(-100, b"/dev/infiniband/rdma_cm", text, 4096)
assert text[:size] == b"/dev/null", text[:size]
with open("/sys/class/infiniband/ferroce0/ports/1/gids/127") as gid:
    assert gid.read() == ":".join(["0000"] * 8) + "\n"
print("all read")
"#;

pub(crate) fn all() -> Vec<Case> {
    let mut out = Vec::new();
    for (device, addr, datagram) in DEVICES {
        let both = |name: &str, package, command: &str| {
            let name = format!("{name} on {device} of several");
            Case::pair(&name, package, command, &format!("{command} {addr}")).everywhere()
        };
        let pingpong = |kind: &str, options: &str| {
            let command = format!("ibv_{kind}_pingpong -d {device} -g 0 -p {{port}} {options}");
            both(&format!("ibv_{kind}_pingpong"), IBVERBS, &command)
        };
        out.push(pingpong("rc", ""));
        out.push(pingpong("ud", &format!("-s {datagram} -n 200")));
        let write = format!("ib_write_bw -d {device} -x 0 -F -n 200 -p {{port}}");
        out.push(both("ib_write_bw", PERFTEST, &write).ci());
        let rping = format!("rping -s -a {addr} -p {{port}} -C 20 -V");
        let name = format!("rping on {device} of several");
        let rping = Case::pair(&name, RDMACM, &rping, &rping.replacen("-s", "-c", 1)).ready(Ready::Retry);
        out.push(rping.everywhere());
    }
    let script = |text: &str| vec!["sh".to_owned(), "-c".to_owned(), text.to_owned()];
    let counters = Case {
        client: script(COUNTERS),
        ..Case::alone("hw_counters in sysfs", RDMACM, "sh")
    };
    out.push(counters.says("all counted").everywhere().ci());
    let hosts = Case {
        client: script(HOSTS),
        ..Case::alone("two namespaces of one user", IBVERBS, "sh")
    };
    // Not everywhere: a broker of every address would have theirs.
    out.push(hosts.says("both met").on_ethernet().ci());
    let files = Case::alone("sysfs by other calls", "python3", "python3 files.py").file("files.py", FILES);
    out.push(files.says("all read").everywhere().ci());
    let watch = Case::alone("ibv_asyncwatch of a link", IBVERBS, "sh watch.sh").file("watch.sh", WATCH);
    out.push(watch.says("all told").everywhere().ci());
    out
}
