//! Comparison of all declarations with the headers of rdma-core and the kernel, by a C compiler.

use std::{
    io::Write as _,
    process::{Command, Stdio},
};

use super::{attr, consts, context, objects, wr};
use crate::{marshall, rdmacm::abi as cm};

/// Fails unless conditions are true in C, with these headers.
fn check(headers: &[&str], conditions: &[String]) {
    let includes = String::from_iter(headers.iter().map(|header| format!("#include <{header}>\n")));
    let asserts = conditions
        .iter()
        .map(|c| format!("_Static_assert({c}, \"is not so\");\n"));
    compile(&includes, "headers not found (libibverbs-dev, librdmacm-dev)");
    let source = includes + &String::from_iter(asserts);
    compile(&source, "the headers (libibverbs-dev, librdmacm-dev) say otherwise");
}

fn compile(source: &str, otherwise: &str) {
    let cc = Command::new("cc")
        .args(["-fsyntax-only", "-x", "c", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut cc = cc.expect("no C compiler found (cc)");
    cc.stdin.take().unwrap().write_all(source.as_bytes()).unwrap();
    let out = cc.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{otherwise}:\n{text}");
}

#[test]
fn declarations_are_those_of_the_installed_headers() {
    let conditions = [
        attr::types(),
        objects::types(),
        context::types(),
        wr::types(),
        marshall::types(),
        cm::types(),
        consts::constants(),
        cm::constants(),
    ];
    let headers = [
        "stddef.h",
        "netinet/in.h",
        "infiniband/verbs.h",
        "infiniband/sa.h",
        "rdma/rdma_user_cm.h",
        "rdma/ib_user_sa.h",
        "rdma/ib_user_verbs.h",
    ];
    check(&headers, &conditions.concat());
    check(&["rdma/rdma_cma.h"], &cm::events());
}
