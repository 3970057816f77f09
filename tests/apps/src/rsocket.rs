//! TCP programs over RDMA: iperf3, and a script, with rdma-core's librspreload, which makes rsockets of a program's sockets.
//!
//! What is checked: iperf3 sends for two seconds in either direction and in both, and ends without an error; 32 MiB that a script
//! writes in odd pieces come back the same. (iperf3's own `-F` loses bytes of a file when a write takes only a part.)
//!
//! Of rdma-core 44, Debian 12's, neither `select` nor a `poll` whose time runs out can be used (`c/select.c` stands in front of them),
//! and with more than three connections of one listener its thread that accepts them uses memory after it is freed (24061f015 mends
//! that), so no `-P` here.

use crate::cases::{Case, Ready};

const PACKAGE: &str = "iperf3";
const PRELOAD: &str = "/usr/lib/x86_64-linux-gnu/rsocket/librspreload.so";

/// Sends, by `write`, and compares what comes back, by `read`.
const ECHO: &str = r#"import os, socket, sys
side, addr, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
size = 32 << 20
def take(fd):
    got = bytearray()
    while len(got) < size and (piece := os.read(fd, 100_003)):
        got += piece
    return bytes(got)
def give(fd, data):
    at = 0
    while at < len(data):
        at += os.write(fd, data[at : at + 70_001])
peer = socket.socket()
if side == "server":
    peer.bind((addr, port))
    peer.listen()
    connection, _ = peer.accept()
    give(connection.fileno(), take(connection.fileno()))
    assert connection.recv(1) == b""
    connection.close()
else:
    peer.connect((addr, port))
    data = os.urandom(size)
    give(peer.fileno(), data)
    assert take(peer.fileno()) == data
    print("all compared")
peer.close()
"#;

/// Sockets of this program, and of no shell, go over RDMA.
fn over(command: &str, first: &str) -> String {
    format!("exec env LD_PRELOAD={first}{PRELOAD}:$LD_PRELOAD {command}")
}

fn pair(name: &str, server: &str, client: &str) -> Case {
    Case::scripts(name, PACKAGE, server, client)
        .ready(Ready::Retry)
        .needs(&[(PRELOAD, "librdmacm1")])
}

fn iperf3(options: &str) -> Case {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/c/select.c");
    let side = |name: &str, options: &str| {
        let library = format!("{{dir}}/{name}.so");
        let build = format!("cc -Wall -Wextra -Werror -O1 -shared -fPIC -o {library} {source}");
        let run = over(&format!("iperf3 -p {{port}} {options}"), &format!("{library}:"));
        format!("{build} && {run}")
    };
    let client = side("client", &format!("-c {{addr}} -t 2{options}"));
    pair(
        &format!("iperf3{options} over rsocket"),
        &side("server", "-s -1 -B {addr}"),
        &client,
    )
    .says("iperf Done.")
    .needs(&[("iperf3", PACKAGE), ("cc", "gcc")])
}

fn echo() -> Case {
    let side = |name: &str| over(&format!("python3 echo.py {name} {{addr}} {{port}}"), "");
    pair("sockets of python over rsocket", &side("server"), &side("client"))
        .file("echo.py", ECHO)
        .says("all compared")
}

pub(crate) fn all() -> Vec<Case> {
    vec![iperf3(""), iperf3(" -R"), iperf3(" --bidir"), echo()]
}
