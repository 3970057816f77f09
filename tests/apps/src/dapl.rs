//! uDAPL over RDMA_CM (libdaplofa): its own tests, Debian's dapl2-utils.
//!
//! dtest compares what its WRITEs and READs bring, in `-WD` every byte of each ping-pong, which it waits for by looking at the first
//! and the last byte; `dapltest -V` each buffer of each transaction; dtestx immediate data and atomic operations. dapltest ends with 0
//! whatever comes of a test, so its results are looked for.
//!
//! Of the other providers, libdaploscm finds its peer by the host's name, which may be no address of a device of ours, and libdaploucm
//! by LIDs, which RoCE lacks.

use crate::cases::{Case, Ready, shell};

const PACKAGE: &str = "dapl2-utils";

/// A provider by the name of `ferroce`. Each side has a file of its own.
const PROVIDER: &str =
    "echo 'ferroce u2.0 nonthreadsafe default libdaplofa.so.2 dapl.2.0 \"{addr} 0\" \"\"' > {dir}/SIDE.conf
export DAT_OVERRIDE={dir}/SIDE.conf
";

const TEST: &str = "try() { kind=$1; shift; dapltest -T $kind -D ferroce -s {addr} -n {port} \"$@\" > told; }
until try P -i 1 RW 64 1 && grep '^raw: RW' told; do sleep 0.2; done; set -e
try T -i 100 -t 2 -w 3 -V client SR 4096 2 server SR 4096 2 client RW 65536 server RR 8192 3
cat told; grep 'Total Recv' told; grep 'Total RDMA Read' told; grep 'Total RDMA Write' told
grep -i 'error\\|warning' told && exit 1
try P -i 1000 RW 65536 2; grep '^raw: RW' told
try P -i 1000 -m p RR 4096 1; grep '^raw: RR' told
try Q
echo all told";

fn pair(name: &str, server: &str, client: &str) -> Case {
    let side = |side: &str, command: &str| PROVIDER.replace("SIDE", side) + command;
    Case::scripts(name, PACKAGE, &side("server", server), &side("client", client))
        .ready(Ready::Retry)
        .within(180)
        .needs(&[("dtest", PACKAGE)])
}

/// A program that is told its peer with `-h`.
fn program(command: &str, says: &'static str) -> Case {
    let both = format!("exec {command} -P ferroce");
    pair(command, &format!("{both} -s"), &format!("{both} -h {{addr}}")).says(says)
}

pub(crate) fn all() -> Vec<Case> {
    vec![
        program("dtest", "DAPL Test Complete. PASSED"),
        program("dtest -c", "DAPL Test Complete. PASSED"),
        program("dtest -W -D -a -b 65536", "DAPL Test Complete. PASSED"),
        program("dtestx", "immed/atomic test PASSED"),
        program("dtestcm -c 200", "Num=200"),
        program("dtestsrq -c 8 -B 20", "DAPL RC SRQ Test Complete."),
        pair("dapltest", "exec dapltest -T S -D ferroce -n {port}", TEST).says("all told"),
        Case {
            client: shell(&(PROVIDER.replace("SIDE", "client") + "exec dapltest -T L -D ferroce -m 1000")),
            ..Case::alone("dapltest limits", PACKAGE, "sh")
        }
        .says("LMR of 0x40000000 bytes OK")
        .needs(&[("dapltest", PACKAGE)]),
    ]
}
