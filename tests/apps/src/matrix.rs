//! The matrix: every program with the options that it must do.

use crate::cases::{Case, IBVERBS, PERFTEST, RDMACM, Ready, one_pingpong};

const QPERF: &str = "qperf";
const FIO: &str = "fio";
const UCX: &str = "ucx-utils";
const FABRIC: &str = "libfabric-bin";

/// Path MTUs.
const MTUS: [u32; 5] = [256, 512, 1024, 2048, 4096];

/// All cases, in the order of the table in README.
pub(crate) fn all() -> Vec<Case> {
    let mut out = devices();
    for kind in ["rc", "uc", "ud", "srq", "xsrq"] {
        out.extend(pingpong(kind));
    }
    out.extend(perftest());
    out.extend(rdmacm());
    out.extend(qperf());
    out.extend(fio());
    out.extend(ucx());
    out.extend(fabric());
    out.extend(crate::everywhere::all());
    out.extend(crate::collectives::all());
    out.push(crate::python::case());
    out.extend(crate::wheels::all());
    out.extend(crate::crates::all());
    out.extend(crate::lifetime::all());
    out.extend(crate::migration::all());
    out.extend(crate::storage::all());
    out.extend(crate::dapl::all());
    out.extend(crate::rsocket::all());
    out.extend(crate::rds::all());
    out.extend(crate::scripts::all());
    out.extend(crate::engines::all(&out));
    out.extend(crate::directory::all(&out));
    out
}

fn devices() -> Vec<Case> {
    vec![
        Case::alone("ibv_devices", IBVERBS, "ibv_devices").says("ferroce0").ci(),
        Case::alone("ibv_devinfo -v", IBVERBS, "ibv_devinfo -v")
            .says("RoCE v2")
            .ci(),
        Case::pair("ibv_asyncwatch", IBVERBS, "ibv_asyncwatch", "ibv_devinfo -l")
            .ready(Ready::AtOnce)
            .stopped(),
    ]
}

/// Has the two sides find each other over IPv4, the only family in which ibverbs-utils and perftest do, whatever their GIDs.
fn by_ipv4(mut case: Case) -> Case {
    for word in case.client.iter_mut().filter(|word| *word == "{addr}") {
        *word = "127.0.0.1".into();
    }
    case
}

fn pingpong(kind: &str) -> Vec<Case> {
    // Options: path MTUs can't be chosen for datagrams, nor with shared queues of extended connections.
    let mut out = vec![one_pingpong(kind, "").ci(), one_pingpong(kind, "-e")];
    let sizes: &[u32] = match kind {
        "ud" => &[1, 1024, 2048],
        _ => &[1, 4096, 65536, 1 << 20],
    };
    // A datagram or an unreliable message that is lost is not sent again, and the program waits for it for ever: at most
    // two are under way here, which no queue drops.
    for size in sizes {
        out.push(one_pingpong(kind, &format!("-s {size} -n 200")));
    }
    if matches!(kind, "rc" | "uc" | "srq") {
        for mtu in MTUS {
            out.push(one_pingpong(kind, &format!("-m {mtu} -s 20000 -n 200")));
        }
    }
    out.push(by_ipv4(one_pingpong(kind, "").v6()));
    out.push(by_ipv4(one_pingpong(kind, "-e -s 2000").v6()));
    out.push(by_ipv4(one_pingpong(kind, "").link_local()));
    out
}

fn one_perftest(program: &str, options: &str) -> Case {
    let command = format!("{program} -F -p {{port}} {options}");
    let name = format!("{program} {options}");
    Case::pair(name.trim(), PERFTEST, &command, &format!("{command} {{addr}}"))
}

/// What perftest lets one operation do, of the options that its programs have in common.
struct Operation {
    name: &'static str,
    /// Waits for events (`-e`): a WRITE has none at the receiver, and perftest refuses it.
    events: bool,
    /// Sizes (`-a`): an atomic operation has one.
    sizes: bool,
    /// Data in work requests (`-I`).
    inline: bool,
    /// Services besides RC.
    services: &'static [&'static str],
    /// Shared receive queues.
    srq: bool,
}

const OPERATIONS: [Operation; 4] = [
    Operation {
        name: "send",
        events: true,
        sizes: true,
        inline: true,
        services: &["UC", "UD", "XRC"],
        srq: true,
    },
    Operation {
        name: "write",
        events: false,
        sizes: true,
        inline: true,
        services: &["UC", "XRC"],
        srq: false,
    },
    Operation {
        name: "read",
        events: true,
        sizes: true,
        inline: false,
        services: &["XRC"],
        srq: false,
    },
    Operation {
        name: "atomic",
        events: true,
        sizes: false,
        inline: false,
        services: &["XRC"],
        srq: false,
    },
];

/// Each operation's bandwidth and latency tests, with each option that they take.
fn perftest() -> Vec<Case> {
    let mut out = Vec::new();
    for (n, op) in OPERATIONS.iter().enumerate() {
        let (bw, lat) = (format!("ib_{}_bw", op.name), format!("ib_{}_lat", op.name));
        // The short set has each operation once, in turns with many and with one outstanding.
        for (program, ci) in [(&bw, n % 2 == 0), (&lat, n % 2 == 1)] {
            let case = one_perftest(program, "");
            out.push(if ci { case.ci() } else { case });
        }
        out.push(one_perftest(&bw, "-q 8"));
        out.push(one_perftest(&bw, "-b"));
        if op.sizes {
            out.push(one_perftest(&bw, "-a").within(600));
            // The program measures the processor's clock after each size, which takes seconds on a virtual machine.
            out.push(one_perftest(&lat, "-a -n 100").within(900));
            for mtu in MTUS {
                out.push(one_perftest(&bw, &format!("-m {mtu} -n 500")));
            }
        }
        if op.srq {
            out.push(one_perftest(&bw, "--use-srq"));
            out.push(one_perftest(&bw, "--use-srq -q 4"));
            out.push(one_perftest(&lat, "--use-srq"));
        }
        for program in [&bw, &lat] {
            out.push(one_perftest(program, "-c RC"));
            out.push(one_perftest(program, "-D 3"));
            out.push(one_perftest_cm(program, "-R"));
            if op.events {
                out.push(one_perftest(program, "-e"));
            }
            if op.inline {
                out.push(one_perftest(program, "-I 64 -s 64"));
            }
            for service in op.services {
                out.push(one_perftest(program, &format!("-c {service}")));
            }
            out.push(by_ipv4(one_perftest(program, "-x 0 --ipv6").v6()));
        }
    }
    out.push(one_perftest("ib_atomic_bw", "-A CMP_AND_SWAP"));
    out.push(one_perftest("ib_send_bw", "-c UD -q 8"));
    out.push(one_perftest("ib_send_lat", "-c UD -e"));
    out.push(by_ipv4(one_perftest("ib_send_bw", "-c UD -x 0 --ipv6").v6()));
    // Queue pairs connected by RDMA_CM; over IPv4 only, since perftest looks names up for nothing else.
    out.push(one_perftest_cm("ib_send_bw", "-R -c UD"));
    out.push(one_perftest_cm("ib_send_lat", "-R -c UD"));
    out
}

fn one_perftest_cm(program: &str, options: &str) -> Case {
    one_perftest(program, options).ready(Ready::Retry)
}

/// Programs of librdmacm: name, server, client, whether both come over IPv6 too.
const RDMACM_PROGRAMS: [(&str, &str, &str, bool); 12] = [
    (
        "rping",
        "rping -s -a {addr} -p {port} -C 100 -V",
        "rping -c -a {addr} -p {port} -C 100 -V",
        true,
    ),
    (
        "rping -S 65535",
        "rping -s -a {addr} -p {port} -C 100 -V -S 65535",
        "rping -c -a {addr} -p {port} -C 100 -V -S 65535",
        false,
    ),
    (
        "ucmatose",
        "ucmatose -b {addr} -p {port}",
        "ucmatose -s {addr} -p {port}",
        true,
    ),
    (
        "ucmatose -c 10",
        "ucmatose -b {addr} -p {port} -c 10 -C 100 -S 4096",
        "ucmatose -s {addr} -p {port} -c 10 -C 100 -S 4096",
        false,
    ),
    ("udaddy", "udaddy -b {addr}", "udaddy -s {addr}", true),
    (
        "rdma_server + rdma_client",
        "rdma_server -s {addr} -p {port}",
        "rdma_client -s {addr} -p {port}",
        true,
    ),
    (
        "rdma_xserver + rdma_xclient -c r",
        "rdma_xserver -p {port} -c r",
        "rdma_xclient -s {addr} -p {port} -c r",
        false,
    ),
    (
        "rdma_xserver + rdma_xclient -c x",
        "rdma_xserver -p {port} -c x",
        "rdma_xclient -s {addr} -p {port} -c x",
        false,
    ),
    (
        "cmtime",
        "cmtime -b {addr} -p {port} -c 20",
        "cmtime -s {addr} -p {port} -c 20",
        true,
    ),
    (
        "mckey",
        "mckey -m 239.77.1.2 -b {addr}",
        "mckey -m 239.77.1.2 -b {addr} -s",
        false,
    ),
    // An IPv6 address is cut at its first colon.
    ("rcopy", "rcopy", "rcopy /bin/ls {addr}:{dir}/copy", false),
    (
        "rstream",
        "rstream -b {addr} -p {port}",
        "rstream -s {addr} -p {port}",
        true,
    ),
];

/// Those that serve for ever.
const FOR_EVER: [&str; 2] = ["cmtime", "rcopy"];

fn rdmacm() -> Vec<Case> {
    let mut out = Vec::new();
    for (name, server, client, v6) in RDMACM_PROGRAMS {
        let mut case = Case::pair(name, RDMACM, server, client).ready(Ready::Retry);
        if FOR_EVER.contains(&name) {
            case = case.stopped();
        }
        if name == "rping" {
            case = case.ci();
        }
        if v6 {
            out.push(case.clone().v6());
        }
        out.push(case);
    }
    let group = "ff1e::77:1";
    let server = format!("mckey -m {group} -b {{addr}}");
    let mckey = Case::pair("mckey", RDMACM, &server, &format!("{server} -s")).ready(Ready::Retry);
    out.push(mckey.v6().on_ethernet());
    let server = "rping -s -a {addr}%roce0 -p {port} -C 20 -V";
    let rping = Case::pair("rping", RDMACM, server, &server.replacen("-s", "-c", 1)).ready(Ready::Retry);
    out.push(rping.link_local());
    out
}

/// Only what goes over RDMA_CM: by itself qperf makes paths without a GRH, which no RoCE device takes: its tests of UC and
/// UD end on rdma_rxe of Linux 6.1 as they do here, with "failed to modify QP to RTR: Invalid argument" and "failed to create
/// address handle: Invalid argument".
fn qperf() -> Vec<Case> {
    let tests = [
        "rc_bw",
        "rc_lat",
        "rc_bi_bw",
        "rc_rdma_read_bw",
        "rc_rdma_read_lat",
        "rc_rdma_write_bw",
        "rc_rdma_write_lat",
        "rc_rdma_write_poll_lat",
        "rc_compare_swap_mr",
        "rc_fetch_add_mr",
        "ver_rc_compare_swap",
        "ver_rc_fetch_add",
    ];
    let case = |test: &str| {
        let client = format!("qperf -lp {{port}} {{addr}} -cm 1 -t 1 {test}");
        Case::pair(&format!("qperf {test}"), QPERF, "qperf -lp {port}", &client).stopped()
    };
    let mut out: Vec<Case> = tests.into_iter().map(case).collect();
    if let Some(first) = out.first_mut() {
        first.ci = true;
    }
    out
}

fn fio() -> Vec<Case> {
    // Which side listens is told by `rw`, whatever the verb. fio connects with no RNR retries, so that its receiver must have
    // enough buffers from the beginning, as it says itself: here for all 256 blocks, within what a user may lock.
    ["write", "read", "send"]
        .map(|verb| {
            let common = "--ioengine=rdma --port={port} --bs=16k --size=4m";
            let (answer, depth) = if verb == "send" { ("recv", 256) } else { (verb, 8) };
            Case::pair(
                &format!("fio rdma {verb}"),
                FIO,
                &format!("fio --name=server --rw=read {common} --verb={answer} --iodepth={depth}"),
                &format!("fio --name=client --rw=write {common} --verb={verb} --iodepth=8 --hostname={{addr}}"),
            )
            .ready(Ready::Retry)
            .says("WRITE: bw=")
        })
        .into()
}

fn ucx() -> Vec<Case> {
    let mut out = Vec::new();
    // The transports of these names, and what they need to find each other.
    for transport in ["rc_v", "ud_v"] {
        for test in ["tag_lat", "tag_bw", "ucp_put_bw", "ucp_get", "stream_bw"] {
            let client = format!("ucx_perftest {{addr}} -p {{port}} -t {test} -n 1000 -w 100 -s 16384");
            let case = Case::pair(
                &format!("ucx_perftest {transport} {test}"),
                UCX,
                "ucx_perftest -p {port}",
                &client,
            );
            out.push(case.over_ucx(transport));
        }
    }
    out
}

/// libfabric leaves `lo` out.
fn fabric() -> Vec<Case> {
    let case = |provider: &str, endpoint: &str| {
        let options = format!("-p {provider} -e {endpoint} -I 100");
        Case::pair(
            &format!("fi_pingpong {provider} {endpoint}"),
            FABRIC,
            &format!("fi_pingpong {options} -B {{port}}"),
            &format!("fi_pingpong {options} -P {{port}} {{addr}}"),
        )
        .with("FI_VERBS_GID_IDX", "0")
        .on_ethernet()
    };
    vec![
        case("verbs", "msg"),
        case("verbs", "dgram"),
        case("verbs;ofi_rxm", "rdm"),
        case("verbs;ofi_rxd", "rdm"),
    ]
}

#[cfg(test)]
mod tests {
    use crate::{directory, engines};

    #[test]
    fn cases_that_run_in_other_ways_are_in_the_matrix() {
        let all = super::all();
        for name in directory::ALSO
            .iter()
            .chain(&directory::PRELOADED)
            .chain(&engines::ALSO)
        {
            assert!(all.iter().any(|case| case.name == *name), "{name}");
        }
        let by_directory = all.iter().filter(|case| case.directory).count();
        assert_eq!(by_directory, directory::ALSO.len() + 2);
        let ours = engines::all(&all);
        assert_eq!(ours.len(), engines::ALSO.len());
        assert_eq!(ours.iter().filter(|case| case.ci).count(), engines::SHORT.len());
    }
}
