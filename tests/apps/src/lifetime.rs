//! Cases about object lifetimes and API contracts: memcheck, repeated creation, invalid use, killed peers.

use roce_pcap::Rule;

use crate::{
    cases::{Case, IBVERBS, Kill, Moment, PERFTEST, Plan, RDMACM, Ready, Side, one_pingpong},
    python,
};

pub(crate) fn all() -> Vec<Case> {
    let mut out = memcheck();
    out.push(cycles());
    out.push(edges());
    out.push(contract());
    out.push(limits("limits of the device").ci());
    out.push(limits("limits of a device of several").everywhere());
    out.push(posting());
    out.push(strangers());
    out.push(channels());
    out.push(errno());
    out.push(backlog());
    out.push(resolve());
    out.push(nofile());
    out.push(cancelled(200).ci());
    out.push(cancelled(1000));
    out.push(faults());
    out.push(signals());
    out.extend(progress());
    out.push(answers());
    out.push(unloaded());
    out.push(carrier());
    out.push(linked());
    out.extend(killed());
    out
}

/// Creates a case that compiles and runs a program of `c/`.
fn of_c(name: &str, program: &str, libraries: &str, arguments: &str) -> Case {
    let source = format!(concat!(env!("CARGO_MANIFEST_DIR"), "/c/{}.c"), program);
    let package = match libraries.contains("rdmacm") {
        true => "gcc, librdmacm-dev",
        false => "gcc, libibverbs-dev",
    };
    let run = format!("exec {{dir}}/{program} {arguments}");
    let script = format!("cc -Wall -Werror -O1 -o {{dir}}/{program} {source} {libraries} && {run}");
    Case::script(name, package, &script)
}

/// Creates and destroys every kind of object 1,000 times, and checks for leaks.
///
/// Disables malloc's per-thread cache, whose chunks count as in use.
fn cycles() -> Case {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/c/cycles.c");
    let script = format!(
        "cc -Wall -Werror -O1 -o {{dir}}/cycles {source} -libverbs -lrdmacm && \
         GLIBC_TUNABLES=glibc.malloc.tcache_count=0 exec {{dir}}/cycles {{addr}} 1000"
    );
    Case::script("1000 cycles of every object", "gcc, librdmacm-dev", &script)
        .says("nothing is left")
        .within(1800)
}

/// Edge cases of verbs: NULL objects, shared XRC target queue pairs, headers of datagrams.
fn edges() -> Case {
    of_c("edge cases of verbs", "edges", "-libverbs", "")
        .says("the edges hold")
        .ci()
}

/// Sizes, error numbers, batches and memory access, as documented in the manual pages.
fn contract() -> Case {
    of_c("manual page contract", "contract", "-libverbs", "")
        .says("all contract checks passed")
        .ci()
}

/// Limits that the device reports: usable up to the limit, refused beyond it.
fn limits(name: &str) -> Case {
    of_c(name, "limits", "-libverbs", "").says("the limits hold")
}

/// Which work requests can be posted and how they complete, and memory windows.
fn posting() -> Case {
    of_c("posting of work requests", "posting", "-libverbs", "")
        .says("work requests end as on hardware")
        .breaks(&[Rule::AtomicAlignment])
        .ci()
}

/// Changed handles, objects of another context and destroyed objects, for every kind of object and every call.
fn strangers() -> Case {
    of_c("invalid object pointers", "strangers", "-libverbs", "")
        .says("no stranger gets in")
        .ci()
}

/// Event channel descriptors in poll, select and epoll.
fn channels() -> Case {
    of_c("event channel descriptors", "channels", "-libverbs -lrdmacm", "{addr}")
        .says("events come as they should")
        .ci()
}

/// Calls that succeed and leave errno as it was.
fn errno() -> Case {
    of_c("calls that succeed keep errno", "errno", "-libverbs -lrdmacm", "{addr}")
        .says("errno is kept")
        .ci()
}

/// Connect requests of one host that fill a listener's backlog, or are collected before any is answered.
fn backlog() -> Case {
    of_c("backlogs of listeners", "backlog", "-libverbs -lrdmacm", "{addr}")
        .says("every request has arrived")
        .ci()
}

/// Address resolution of hosts that exist, do not exist and come later, in two network namespaces of its own.
fn resolve() -> Case {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/c/resolve.c");
    let script = format!(
        "cc -Wall -Werror -O1 -o {{dir}}/resolve {source} -libverbs -lrdmacm && \
         exec env -u FERROCE_ADDR -u FERROCE_BROKER_DIR XDG_RUNTIME_DIR={{dir}} unshare -rn sh -ec '\
         unshare -n sleep 300 & peer=$!; trap \"kill $peer\" EXIT; \
         until ! [ /proc/$peer/ns/net -ef /proc/self/ns/net ]; do sleep 0.02; done; \
         ip link add here type veth peer name there netns $peer; \
         ip addr add 198.51.100.1/24 dev here; ip link set here up; \
         there=\"nsenter -t $peer -n ip\"; $there addr add 198.51.100.2/24 dev there; $there link set there up; \
         {{dir}}/resolve 198.51.100.2 198.51.100.77 198.51.100.3 \"$there addr add 198.51.100.3/24 dev there\"'"
    );
    Case::script("address resolution", "gcc, librdmacm-dev, iproute2", &script)
        .says("addresses are resolved in time")
        .ci()
}

/// Errors of a program that has too few file descriptors.
fn nofile() -> Case {
    of_c("too few descriptors", "nofile", "-libverbs -lrdmacm", "{addr}")
        .says("descriptors are enough, and fewer are EMFILE")
        .ci()
}

/// Threads that are cancelled so many times in each kind of call.
fn cancelled(times: u32) -> Case {
    of_c(
        &format!("threads cancelled {times} times"),
        "cancel",
        "-libverbs -lrdmacm -lpthread",
        &format!("{{addr}} {times}"),
    )
    .says("cancelled threads leave a working device")
    .within(600)
}

/// Registered memory that is unmapped, protected or truncated, and handlers of the program's own faults.
fn faults() -> Case {
    of_c("memory that is taken away", "faults", "-libverbs -lpthread", "")
        .says("missing memory is an error of its work request")
        .within(600)
        .ci()
}

/// Signals that a program receives with signalfd.
fn signals() -> Case {
    of_c("signals of a program", "signals", "-libverbs -lrdmacm", "{addr}")
        .says("the signals are the program's")
        .ci()
}

/// Acknowledgements and one-sided operations of a process that polled and then computes or sleeps.
fn progress() -> impl Iterator<Item = Case> {
    ["order", "computing", "timewait", "rnr"].into_iter().map(|check| {
        let arguments = format!("claims {{addr}} {check}");
        of_c(
            &format!("progress without polls: {check}"),
            "progress",
            "-libverbs -lrdmacm",
            &arguments,
        )
        .says("progress is made without polls")
        .within(600)
        .ci()
    })
}

/// Creates a long ping-pong of SENDs (`pingpong`) or UDP datagrams (`udp`) that prints its slowest rounds.
pub(crate) fn long_pingpong(kind: &str, rounds: u32) -> Case {
    let arguments = format!("{kind} {{addr}} {rounds}");
    of_c(kind, "progress", "-libverbs -lrdmacm", &arguments).says("progress is made without polls")
}

/// `ib_send_lat -e` takes an answer as proof that its SEND completed, and sizes its completion queue for that.
fn answers() -> Case {
    let script = "for i in $(seq 20); do \
         ib_send_lat -F -e -n 100 -p {port} >lat-server & \
         until grep -q \"$(printf :%04X {port}) .* 0A \" /proc/net/tcp; do sleep 0.02; done; \
         timeout 30 ib_send_lat -F -e -n 100 -p {port} {addr} >lat-client && wait $! || { cat lat-server lat-client; exit 1; }; done";
    Case {
        plan: Plan::Captured,
        ..Case::script("ib_send_lat -e, 20 times, captured", PERFTEST, script)
    }
    .with("FERROCE_PCAP", "%p.pcap")
    .ci()
}

/// Library that opens a device when loaded and closes it when unloaded.
fn unloaded() -> Case {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/c/unloaded.c");
    let build = "cc -Wall -Werror -O1 -o {dir}/unloaded";
    let script = format!(
        "{build}.so -shared -fPIC -DLIBRARY {source} -libverbs -lrdmacm && {build} {source} && \
         exec {{dir}}/unloaded {{dir}}/unloaded.so {{addr}}"
    );
    Case::script("loading and unloading a library", "gcc, librdmacm-dev", &script)
        .says("it came and went")
        .ci()
}

/// Port state of an interface without and with a carrier, in its own network namespace.
fn carrier() -> Case {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/c/carrier.c");
    let script = format!(
        "cc -Wall -Werror -O1 -o {{dir}}/carrier {source} -libverbs && exec env -u FERROCE_ADDR XDG_RUNTIME_DIR={{dir}} unshare -rn sh -ec '\
         ip link add here type veth peer name there; ip addr add 198.51.100.1/24 dev here; ip link set here up; \
         {{dir}}/carrier down; ip link set there up; {{dir}}/carrier up'"
    );
    Case::script(
        "port state follows the carrier",
        "gcc, libibverbs-dev, iproute2",
        &script,
    )
    .says("the link is up")
    .ci()
}

/// Program linked with the files that `cargo xtask install` installs (header, library, pkg-config), without LD_PRELOAD.
fn linked() -> Case {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../verbs-shim");
    let script = format!(
        "mkdir -p usr/lib/pkgconfig usr/include && cp {root}/include/ferroce_verbs.h usr/include && \
         cp $(dirname $FERROCE_BROKER)/libferroce_verbs.so usr/lib && \
         sed s,@VERSION@,1, {root}/ferroce-verbs.pc.in >usr/lib/pkgconfig/ferroce-verbs.pc && \
         export PKG_CONFIG_PATH={{dir}}/usr/lib/pkgconfig && \
         cc -Wall -Werror -include ferroce_verbs.h -o linked {root}/../tests/apps/c/edges.c \
         $(pkg-config --cflags --libs ferroce-verbs) && LD_LIBRARY_PATH={{dir}}/usr/lib exec ./linked"
    );
    let words = ["env", "-u", "LD_PRELOAD", "sh", "-c", &script];
    Case {
        client: words.map(str::to_owned).into(),
        ..Case::alone("linked by pkg-config", "gcc, pkg-config, libibverbs-dev", "sh")
    }
    .says("the edges hold")
}

fn memcheck() -> Vec<Case> {
    let pingpong = |kind: &str, options: &str| {
        let few = one_pingpong(kind, &format!("-n 50 {options}"));
        Case {
            name: format!("ibv_{kind}_pingpong {options}"),
            ..few
        }
    };
    let cm = |name: &str, server: &str, client: &str| Case::pair(name, RDMACM, server, client).ready(Ready::Retry);
    let python = python::case().within(3600);
    let part = Case {
        // Tests that are quick under valgrind, at least one for each kind of object.
        plan: Plan::Python(&[
            "test_addr.",
            "test_cq.",
            "test_pd.",
            "test_mr.",
            "test_qpex.QpExTestCase.test_qp_ex_rc_send",
        ]),
        name: "pyverbs, quick tests".into(),
        ..python.clone()
    };
    let all = [
        pingpong("rc", ""),
        pingpong("rc", "-e"),
        pingpong("uc", ""),
        pingpong("ud", ""),
        pingpong("srq", ""),
        pingpong("xsrq", ""),
        cm(
            "rping",
            "rping -s -a {addr} -p {port} -C 20 -V",
            "rping -c -a {addr} -p {port} -C 20 -V",
        )
        // Calls of libibverbs are under memcheck in tests/contract/tests/library.rs.
        .ci(),
        cm(
            "ucmatose",
            "ucmatose -b {addr} -p {port}",
            "ucmatose -s {addr} -p {port}",
        ),
        cm("udaddy", "udaddy -b {addr}", "udaddy -s {addr}"),
        part,
        python,
    ];
    let under = |case: Case| Case {
        name: format!("memcheck {}", case.name).trim().to_owned(),
        memcheck: true,
        seconds: case.seconds.max(600),
        // Python's own allocator hides invalid accesses from valgrind.
        ..case.with("PYTHONMALLOC", "malloc")
    };
    all.into_iter().map(under).collect()
}

/// Long-running program whose server or client is killed.
struct Victim {
    name: &'static str,
    case: Case,
    /// Text that each side prints when the data transfer starts, if it runs until killed.
    flowing: Option<&'static str>,
    /// Text that both sides print at the end of the transfer, if it ends.
    ending: Option<&'static str>,
    /// Side that, once connected, only waits for its peer's first message, with nothing outstanding.
    ///
    /// Its peer is not killed while connecting, because no hardware would report that to this side.
    passive: Option<Side>,
    /// Texts of which a side prints one when its peer is gone.
    says: &'static [&'static str],
}

/// Events that report the end of a connection.
///
/// Programs may print one and continue waiting, as rping's server does if the client exits before the connection is
/// established.
const DISCONNECT_EVENTS: &[&str] = &["DISCONNECT", "UNREACHABLE", "REJECTED"];

fn victims() -> [Victim; 4] {
    let cm = |name, server, client| Case::pair(name, RDMACM, server, client).ready(Ready::Retry);
    [
        Victim {
            name: "ibv_rc_pingpong",
            case: Case::pair(
                "",
                IBVERBS,
                "ibv_rc_pingpong -g 0 -p {port} -n 100000000",
                "ibv_rc_pingpong -g 0 -p {port} -n 100000000 {addr}",
            ),
            flowing: Some("remote address"),
            ending: None,
            passive: Some(Side::Server),
            says: &["transport retry counter exceeded"],
        },
        Victim {
            name: "ib_write_bw",
            case: Case::pair(
                "",
                PERFTEST,
                "ib_write_bw -F -p {port} -D 600",
                "ib_write_bw -F -p {port} -D 600 {addr}",
            ),
            flowing: Some("#bytes"),
            ending: None,
            passive: None,
            // The server of a write test detects it by the TCP connection.
            says: &[
                "Completion with error",
                "Failed",
                "failed",
                "Couldn't",
                "couldn't",
                "Unable",
            ],
        },
        Victim {
            name: "rping",
            case: cm(
                "",
                "rping -s -a {addr} -p {port} -v -C 100000000",
                "rping -c -a {addr} -p {port} -v -C 100000000",
            ),
            flowing: Some("ping data"),
            ending: None,
            passive: None,
            says: &["DISCONNECT", "disconnect", "cq completion failed"],
        },
        Victim {
            name: "ucmatose",
            case: cm(
                "",
                "ucmatose -b {addr} -p {port} -C 10",
                "ucmatose -s {addr} -p {port} -C 10",
            ),
            flowing: None,
            ending: Some("data transfers complete"),
            passive: Some(Side::Client),
            says: &[],
        },
    ]
}

fn killed() -> Vec<Case> {
    let mut out = Vec::new();
    for v in victims() {
        let mut add = |what: &str, victim, moment, says| {
            let who = if victim == Side::Server { "server" } else { "client" };
            out.push(Case {
                name: format!("kill -9 the {who} of {} {what}", v.name),
                plan: Plan::Kill(Kill { victim, moment, says }),
                ..v.case.clone()
            });
        };
        add("before it connects", Side::Server, Moment::BeforeConnect, &[]);
        for victim in [Side::Server, Side::Client] {
            if v.passive.is_none_or(|passive| passive == victim) {
                add("while it connects", victim, Moment::Connecting, DISCONNECT_EVENTS);
            }
            if let Some(text) = v.flowing {
                add("while data flows", victim, Moment::Says(text), v.says);
            }
            if let Some(text) = v.ending {
                add("at disconnect", victim, Moment::Says(text), &[]);
            }
        }
    }
    if let Some(case) = out.iter_mut().find(|c| c.name.contains("rping while data flows")) {
        case.ci = true;
    }
    out
}
