//! Storage over RDMA: remote memory by librpma.
//!
//! What is checked: `c/rpma.c`, on both sides, reads the other's memory, writes all of it, flushes, writes atomically, and compares
//! every byte. librpma's examples are in no package of Debian's, and its fio has no engine of librpma.

use crate::cases::{Case, Ready, find};

/// A case, or what of it is lacking: programs, with Debian's package of each.
fn if_there(case: Case, needs: &[(&str, &'static str)]) -> Case {
    match needs.iter().find(|(program, _)| find(program).is_none()) {
        Some((program, package)) => Case::alone(&case.name, package, program),
        None => case,
    }
}

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
    if_there(
        case.says("every byte is the same"),
        &[("/usr/include/librpma.h", "librpma-dev"), ("cc", "gcc")],
    )
}

pub(crate) fn all() -> Vec<Case> {
    vec![rpma()]
}
