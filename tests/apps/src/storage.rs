//! Storage over RDMA: remote memory by librpma.
//!
//! What is checked: `c/rpma.c`, on both sides, reads the other's memory, writes all of it, flushes, writes atomically, and compares
//! every byte. librpma's examples are in no package of Debian's, and its fio has no engine of librpma.

use crate::cases::{Case, Ready};

fn script(text: String) -> Vec<String> {
    vec!["sh".into(), "-c".into(), text]
}

fn rpma() -> Case {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/c/rpma.c");
    let side = |name: &str| {
        let build = format!("cc -Wall -Werror -O1 -o {{dir}}/rpma-{name} {source} -lrpma -libverbs");
        script(format!("{build} && exec {{dir}}/rpma-{name} {name} {{addr}} {{port}}"))
    };
    let mut case = Case::pair("librpma", "librpma-dev", "sh", "sh").ready(Ready::Retry);
    if let Some(server) = &mut case.server {
        server.command = side("server");
    }
    case.client = side("client");
    case.says("every byte is the same")
        .needs(&[("/usr/include/librpma.h", "librpma-dev"), ("cc", "gcc")])
}

pub(crate) fn all() -> Vec<Case> {
    vec![rpma()]
}
