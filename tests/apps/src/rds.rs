//! Cases of programs that use RDS sockets, with no RDS in the kernel.

use crate::cases::{Case, Ready};

pub(crate) fn all() -> Vec<Case> {
    let mut out = qperf();
    out.push(python());
    out
}

/// qperf's measurements of RDS sockets. Its server names a port before it listens there: the client may be refused.
fn qperf() -> Vec<Case> {
    let case = |test: &str| {
        let client = format!("qperf -lp {{port}} {{addr}} -t 1 {test}");
        let case = Case::pair(&format!("qperf {test}"), "qperf", "qperf -lp {port}", &client);
        case.ready(Ready::Retry).stopped()
    };
    vec![case("rds_bw").says("bw").ci(), case("rds_lat").says("latency")]
}

/// CPython's own tests of `socket.AF_RDS`: all of them, which are skipped where there is no RDS.
fn python() -> Case {
    const PYTHON: &str = "/usr/bin/python3";
    const TESTS: &str = "/usr/lib/python3.11/test/test_socket.py";
    let tests = format!("{PYTHON} -m test test_socket -v -m '*RDS*' | tee {{dir}}/out");
    let script = format!("{tests} && ! grep -q skipped {{dir}}/out");
    Case::script("CPython's tests of RDS", "libpython3.11-testsuite", &script)
        .needs(&[(PYTHON, "python3"), (TESTS, "libpython3.11-testsuite")])
        .says("Ran 8 tests")
        .ci()
}
