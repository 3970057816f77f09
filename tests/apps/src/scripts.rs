//! The packet scripts of specs/scripts, played by raw sockets on the lab's verbs-agent over ours: the live player without a kernel's RDMA.

use crate::cases::Case;

/// Plays scripts in a network namespace of its own, where raw sockets need no privilege, and compares what is not good with `expected`. `$H` and
/// `$S`: addresses of the host and of the script; `$A`: that of the agent's TCP port.
const PLAY: &str = "ip link set lo up; ip addr add fd00::1/64 dev lo; ip addr add fd00::2/64 dev lo; touch agent
{dir}/verbs-agent -g $H > agent & agent=$!
trap \"kill $agent\" EXIT
until grep -q ready agent; do kill -0 $agent; sleep 0.02; done
cd $SCRIPTS; status=0
env -u LD_PRELOAD $FERROCE_BROKER pcap play --ferroce --to $H --from $S --agent $A $(ls *.play | grep -v -x -F \"$LEFT\") > {dir}/out || status=$?
cat {dir}/out; echo \"status $status\"; test $status = 1
grep -v \": good (\" {dir}/out | diff - {dir}/expected
echo all played";

/// Lines about scripts that can't be played on ours over either IP version, or end otherwise there.
const FLUSH: &str = "flush.play: not run: the host has no FLUSH\n";
const GAP_FIRST: &str = "gap-first.play:5: < nak sequence psn=0 msn=0: the host sent nothing within 1000 ms\n";
const GAP: &str = "gap.play: not run: the host keeps packets beyond a gap\n";
const ANNEX: &str = "opcode-sequence-annex.play: not run: the host has no FLUSH\n";
const PORT: &str =
    "wrong-source-port.play: not run: by verbs alone the UDP source port 50000 can't be announced to the host\n";

pub(crate) fn all() -> Vec<Case> {
    let over_v6 = |script: &str| format!("{script}.play: not run: it is over IPv6, and the host's address is not\n");
    let two_versions = "wrong-ip-version.play: not run: line 3: > send-only psn=0 payload=8 ackreq from=192.0.2.2: \
                        192.0.2.2 and fd00::1 are of two IP versions: no packet has both\n";
    let v4 = [
        FLUSH,
        GAP_FIRST,
        GAP,
        ANNEX,
        &over_v6("requester-v6"),
        &over_v6("wrong-address-v6"),
        &over_v6("wrong-ip-version"),
        PORT,
    ];
    let v6 = [FLUSH, GAP_FIRST, GAP, ANNEX, two_versions, PORT];
    vec![
        // Which takes 100 s.
        played(
            "packet scripts",
            ["127.0.0.1", "127.0.0.2", "127.0.0.1:18600"],
            "timeout-zero.play",
            &v4,
        )
        .ci(),
        played(
            "packet scripts (IPv6)",
            ["fd00::1", "fd00::2", "[fd00::1]:18600"],
            "none",
            &v6,
        ),
    ]
}

/// Creates a case. `left`: a script that is not played; `expected`: lines about those that are not good.
fn played(name: &str, [host, script, agent]: [&str; 3], left: &str, expected: &[&str]) -> Case {
    const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let text = format!(
        "cc -Wall -Werror -O1 -o {{dir}}/verbs-agent {ROOT}/tests/interop/lab/verbs-agent.c -libverbs && \
         printf '{}' > expected && \
         H={host} S={script} A={agent} LEFT={left} SCRIPTS={ROOT}/specs/scripts \
         exec env -u FERROCE_BROKER_DIR -u FERROCE_PCAP FERROCE_ADDR={host} XDG_RUNTIME_DIR={{dir}} unshare -rn sh -ec '{PLAY}'",
        expected.concat().replace('\'', "'\\''").replace('\n', "\\n")
    );
    Case::script(name, "gcc, libibverbs-dev, iproute2", &text)
        .says("all played")
        .within(400)
}
