//! The matrix: every program with the options that it must do.

use crate::cases::{Case, Ready, find};

const IBVERBS: &str = "ibverbs-utils";
const PERFTEST: &str = "perftest";
const RDMACM: &str = "rdmacm-utils";
const QPERF: &str = "qperf";
const FIO: &str = "fio";
const UCX: &str = "ucx-utils";
const FABRIC: &str = "libfabric-bin";
const PYVERBS: &str = "python3-pyverbs";

/// All cases, in the order of the table in README.
pub(crate) fn all() -> Vec<Case> {
    let mut out = devices();
    for kind in ["rc", "uc", "ud", "srq", "xsrq"] {
        out.extend(pingpong(kind));
    }
    out.extend(perftest());
    out.extend(perftest_cm());
    out.extend(rdmacm());
    out.extend(qperf());
    out.extend(fio());
    out.extend(ucx());
    out.extend(fabric());
    out.push(mpi());
    out.push(python());
    out
}

/// Open MPI over UCX, four ranks.
fn mpi() -> Case {
    let name = "mpi over ucx, 4 ranks";
    if find("mpicc").is_none() || find("mpirun").is_none() {
        return Case::alone(name, "libopenmpi-dev", "mpicc");
    }
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/ring.c");
    let script = format!(
        "mpicc -O2 -o {{dir}}/ring {source} && exec mpirun --oversubscribe -n 4 --mca pml ucx --mca btl ^openib {{dir}}/ring"
    );
    Case {
        client: vec!["sh".into(), "-c".into(), script],
        ..Case::alone(name, "libopenmpi-dev", "sh")
    }
    .says("ring done")
    .with("UCX_TLS", "rc_v,self")
    .with("UCX_NET_DEVICES", "ferroce0:1")
    .with("UCX_IB_GID_INDEX", "0")
    .with("OMPI_ALLOW_RUN_AS_ROOT", "1")
    .with("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
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

/// One of the pingpongs with one set of options.
fn one_pingpong(kind: &str, options: &str) -> Case {
    let command = format!("ibv_{kind}_pingpong -g 0 -p {{port}} {options}");
    let name = format!("ibv_{kind}_pingpong {options}");
    Case::pair(name.trim(), IBVERBS, &command, &format!("{command} {{addr}}"))
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
        for mtu in [512, 1024, 2048, 4096] {
            out.push(one_pingpong(kind, &format!("-m {mtu} -s 20000 -n 200")));
        }
    }
    out
}

fn one_perftest(program: &str, options: &str) -> Case {
    let command = format!("{program} -F -p {{port}} {options}");
    let name = format!("{program} {options}");
    Case::pair(name.trim(), PERFTEST, &command, &format!("{command} {{addr}}"))
}

/// Options of each operation's bandwidth and latency tests, by service.
fn perftest() -> Vec<Case> {
    let mut out = Vec::new();
    for op in ["send", "write", "read", "atomic"] {
        let (bw, lat) = (format!("ib_{op}_bw"), format!("ib_{op}_lat"));
        out.push(one_perftest(&bw, "").ci());
        out.push(one_perftest(&lat, "").ci());
        out.push(one_perftest(&bw, "-q 8"));
        out.push(one_perftest(&bw, "-D 3"));
        out.push(one_perftest(&lat, "-D 3"));
        out.push(one_perftest(&bw, "-b"));
        if op != "write" {
            // Writes have no events: perftest refuses it.
            out.push(one_perftest(&bw, "-e"));
            out.push(one_perftest(&lat, "-e"));
        }
        if op != "atomic" {
            out.push(one_perftest(&bw, "-a").within(600));
            // The program measures the processor's clock after each size, which takes seconds on a virtual machine.
            out.push(one_perftest(&lat, "-a -n 100").within(900));
        }
        if matches!(op, "send" | "write") {
            out.push(one_perftest(&bw, "-I 64 -s 64"));
            out.push(one_perftest(&lat, "-I 64 -s 64"));
            out.push(one_perftest(&bw, "-c UC"));
            out.push(one_perftest(&lat, "-c UC"));
        }
    }
    out.push(one_perftest("ib_atomic_bw", "-A CMP_AND_SWAP"));
    out.push(one_perftest("ib_send_bw", "-c UD").ci());
    out.push(one_perftest("ib_send_lat", "-c UD"));
    out.push(one_perftest("ib_send_lat", "-c UD -e"));
    out.push(one_perftest("ib_send_bw", "--use-srq"));
    out.push(one_perftest("ib_send_bw", "--use-srq -q 4"));
    out.push(one_perftest("ib_send_lat", "--use-srq"));
    out
}

/// Queue pairs connected by RDMA_CM.
fn perftest_cm() -> Vec<Case> {
    let all = [
        ("ib_send_bw", "-R"),
        ("ib_send_lat", "-R"),
        ("ib_send_bw", "-R -c UD"),
        ("ib_write_bw", "-R"),
        ("ib_write_lat", "-R"),
        ("ib_read_bw", "-R"),
        ("ib_read_lat", "-R"),
        ("ib_atomic_bw", "-R"),
    ];
    let case = |(program, options)| one_perftest(program, options).ready(Ready::Retry);
    all.into_iter().map(case).collect()
}

fn rdmacm() -> Vec<Case> {
    let pair = |name: &str, server: &str, client: &str| Case::pair(name, RDMACM, server, client).ready(Ready::Retry);
    vec![
        pair(
            "rping",
            "rping -s -a {addr} -p {port} -C 100 -V",
            "rping -c -a {addr} -p {port} -C 100 -V",
        )
        .ci(),
        pair(
            "rping -S 65535",
            "rping -s -a {addr} -p {port} -C 100 -V -S 65535",
            "rping -c -a {addr} -p {port} -C 100 -V -S 65535",
        ),
        pair(
            "ucmatose",
            "ucmatose -b {addr} -p {port}",
            "ucmatose -s {addr} -p {port}",
        ),
        pair(
            "ucmatose -c 10",
            "ucmatose -b {addr} -p {port} -c 10 -C 100 -S 4096",
            "ucmatose -s {addr} -p {port} -c 10 -C 100 -S 4096",
        ),
        pair("udaddy", "udaddy -b {addr}", "udaddy -s {addr}"),
        pair(
            "rdma_client",
            "rdma_server -p {port}",
            "rdma_client -s {addr} -p {port}",
        ),
        pair(
            "rdma_xclient",
            "rdma_xserver -p {port} -c r",
            "rdma_xclient -s {addr} -p {port} -c r",
        ),
        pair(
            "cmtime",
            "cmtime -b {addr} -p {port} -c 20",
            "cmtime -s {addr} -p {port} -c 20",
        )
        .stopped(),
        pair(
            "mckey",
            "mckey -m 239.77.1.2 -b {addr}",
            "mckey -m 239.77.1.2 -b {addr} -s",
        ),
        pair("rcopy", "rcopy", "rcopy /bin/ls {addr}:{dir}/copy").stopped(),
        pair("rstream", "rstream -b {addr} -p {port}", "rstream -s {addr} -p {port}"),
    ]
}

/// Only what goes over RDMA_CM: by itself qperf makes paths without a GRH, which no RoCE device takes, so that its tests of
/// UC and UD run on none.
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
    let case = |verb: &str, server: &str, client: &str| {
        let common = "--ioengine=rdma --port={port} --bs=64k --size=32m --iodepth=8";
        let answer = if verb == "send" { "recv" } else { verb };
        Case::pair(
            &format!("fio rdma {verb}"),
            FIO,
            &format!("fio --name=server --rw={server} {common} --verb={answer}"),
            &format!("fio --name=client --rw={client} {common} --verb={verb} --hostname={{addr}}"),
        )
        .ready(Ready::Retry)
    };
    // Which side listens is told by `rw`, whatever the verb.
    ["write", "read", "send"].map(|verb| case(verb, "read", "write")).into()
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
            let case = case
                .with("UCX_TLS", transport)
                .with("UCX_NET_DEVICES", "ferroce0:1")
                .with("UCX_IB_GID_INDEX", "0");
            out.push(case);
        }
    }
    out
}

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
    };
    vec![case("verbs", "msg"), case("verbs;ofi_rxm", "rdm")]
}

/// rdma-core's own tests.
fn python() -> Case {
    Case {
        python: true,
        ..Case::alone("pyverbs", PYVERBS, "/usr/bin/python3").within(1800)
    }
}
