//! The language: errors with their positions, and text of any kind.

use proptest::prelude::*;
use roce_script::Script;

/// Each text is wrong at a line and column, where something else is expected.
#[test]
fn errors_say_where_they_are_and_what_is_expected() {
    for (text, line, column, expected) in [
        ("what", 1, 1, "qp, >, <"),
        ("# a comment\n\n  what", 3, 3, "qp, >, <"),
        ("qp mtu=1000", 1, 8, "256, 512, 1024"),
        ("qp speed=9", 1, 4, "type, ip, mtu"),
        ("qp mtu", 1, 4, "type, ip, mtu"),
        ("qp region=r0:10", 1, 11, "NAME:LEN:RIGHTS"),
        ("qp region=R:10:r", 1, 11, "lower-case"),
        ("qp region=psn1:10:r", 1, 11, "not psnN"),
        ("qp region=r:0:r", 1, 13, "above 0"),
        ("qp region=r:16777217:r", 1, 13, "at most 16777216"),
        ("qp region=r:1:rz", 1, 15, "rwafp"),
        ("qp region=r:1:r region=r:1:r", 1, 24, "a new name"),
        ("qp recv=1025x1", 1, 9, "at most 1024 receives"),
        ("qp recv=1000x1000000", 1, 9, "bytes together"),
        ("qp state=err", 1, 10, "reset, init, rtr or rts"),
        ("state rts\nqp mtu=256", 2, 1, "come before the first"),
        ("> send", 1, 3, "send-first"),
        ("> send-only", 1, 12, "psn=VALUE"),
        ("> send-only psn", 1, 16, "psn=VALUE"),
        ("> send-only psn=16777216", 1, 17, "below 2^24"),
        ("> send-only psn=0x+1", 1, 17, "below 2^24"),
        ("> send-only psn=-1", 1, 17, "below 2^24"),
        ("> send-only psn=*", 1, 17, "below 2^24"),
        ("> send-only psn=0 psn=1", 1, 19, "once"),
        ("> send-only psn=0 va=0", 1, 19, "fields psn"),
        ("> send-only psn=0 ackreq=2", 1, 26, "0 or 1"),
        ("> send-only psn=0 payload=8:r9+1", 1, 29, "a region of the qp lines"),
        ("> send-only psn=0 payload=hex:abc", 1, 31, "pairs of"),
        ("> send-only psn=0 payload=65001", 1, 27, "at most 65000"),
        ("> write-first psn=0 va=0 rkey=0", 1, 32, "len=VALUE"),
        ("> send-only psn=0 corrupt=all", 1, 27, "icrc"),
        ("> ack psn=0 timer=1", 1, 13, "fields psn"),
        ("> *", 1, 3, "opcode=CODE"),
        ("< raw 00", 1, 3, "a packet"),
        ("< ack psn=0 from=192.0.2.1", 1, 13, "fields psn"),
        ("< nak", 1, 6, "sequence, invalid-request"),
        ("silence 5", 1, 9, "50ms"),
        ("silence 5ms 5ms", 1, 13, "the end of the line"),
        ("after 3601s", 1, 7, "3600s"),
        ("post walk", 1, 6, "recv, send"),
        ("post send va=1", 1, 11, "id, len, local"),
        ("post write local=9", 1, 18, "REGION+OFFSET"),
        ("completion send payload=8", 1, 17, "for recv payload"),
        ("completion send status=OK", 1, 24, "SUCCESS"),
        ("completion all", 1, 12, "send, recv or none"),
        ("event GID", 1, 7, "none, CQ_ERR"),
        ("memory 5 payload=8:0", 1, 8, "REGION+OFFSET"),
        ("memory local payload=8", 1, 22, "LEN:psnN"),
        ("memory local", 1, 13, "payload=DATA"),
        ("revoke r7", 1, 8, "a region of the qp lines"),
        ("state on", 1, 7, "reset, init"),
    ] {
        let error = Script::parse(text).expect_err(text);
        let found = (error.line(), error.column());
        assert_eq!(found, (line, column), "{text}: {error}");
        assert!(error.expected().contains(expected), "{text}: {error}");
    }
}

fn good(text: &str) {
    let script = Script::parse(text).expect(text);
    assert_eq!(script.play().mismatches, [], "{text}");
}

fn bad(text: &str, line: usize, found: &str) {
    let script = Script::parse(text).expect(text);
    let mismatches = script.play().mismatches;
    let mismatch = mismatches.first().expect(text);
    assert_eq!(mismatch.line, line, "{}", mismatch.text);
    assert!(mismatch.text.contains(found), "{}", mismatch.text);
}

#[test]
fn a_step_that_fails_ends_the_run_and_says_what_was_found() {
    let send = "qp recv=64\n> send-only psn=0 payload=8 ackreq\n";
    good(&format!("{send}< ack psn=0 msn=1"));
    good(&format!("{send}< * psn=0"));
    for (step, found) in [
        ("< ack psn=1", "psn is 0, not 1"),
        ("< ack psn=0 msn=2", "msn is 1, not 2"),
        ("< ack qp=7", "qp is 0x51, not 0x7"),
        ("< nak sequence psn=0", "it is an acknowledgement"),
        ("< send-only psn=0", "it is RC Acknowledge"),
        ("silence 1s", "the host sent ack psn=0 msn=1"),
        ("state rtr", "the state is rts"),
        ("completion recv id=2", "id is 1, not 2"),
        ("completion recv len=9", "len is 8, not 9"),
        ("completion recv imm=9", "imm is missing"),
        ("completion recv payload=8:psn1", "its memory differs from byte 0 on"),
        (
            "completion recv status=LOC_LEN_ERR",
            "status is SUCCESS, not LOC_LEN_ERR",
        ),
        ("completion send", "no completion within 1000 ms"),
        ("completion none", "completion recv id=1"),
        ("event QP_FATAL", "no event within"),
        ("memory local payload=8:0", "it differs from byte 0 on"),
        ("memory local+65530 payload=8:0", "memory local+65530"),
        ("at 0ms\nafter 2ms\nat 1ms", "2 ms have gone by"),
        ("restart", "after the last step the host sent ack"),
        ("modify sqe", "modify sqe"),
    ] {
        let line = 2 + step.lines().count();
        bad(&format!("{send}{step}"), line, found);
    }
    bad(send, 2, "after the last step the host sent ack");
    bad("< ack", 1, "the host sent nothing within 1000 ms");
    bad(
        "qp retry=7 rnr-retry=7 timeout=1\npost send len=1\nignore send-only\nsilence 3600s\nevent QP_FATAL",
        5,
        "no event",
    );
}

#[test]
fn after_a_failed_step_the_script_goes_on_at_its_next_restart() {
    let text = "qp recv=64
> send-only psn=0 payload=8 ackreq
< ack psn=1
state err
restart
> send-only psn=0 payload=8 ackreq
< ack psn=0
restart
state err";
    let outcome = Script::parse(text).expect("a script").play();
    let lines: Vec<usize> = outcome.mismatches.iter().map(|m| m.line).collect();
    assert_eq!((lines, outcome.runs, outcome.not_run), (vec![3, 9], 3, None));
}

#[test]
fn ignored_packets_are_passed_over_until_none_are() {
    let acks =
        "qp recv=4x64\n> send-only psn=0 payload=8 ackreq\n< ack psn=0\nignore ack psn=1\n> send-only psn=1 ackreq\n";
    good(&format!("{acks}silence 1ms\n> send-only psn=2 ackreq\n< ack psn=2"));
    bad(
        &format!("{acks}ignore none\n> send-only psn=2 ackreq\n< ack psn=2"),
        8,
        "psn is 1, not 2",
    );
}

const WORDS: &[&str] = &[
    "qp",
    ">",
    "<",
    "ignore",
    "silence",
    "after",
    "at",
    "timeout",
    "restart",
    "post",
    "completion",
    "event",
    "memory",
    "revoke",
    "modify",
    "state",
    "none",
    "ack",
    "nak",
    "sequence",
    "rnr",
    "raw",
    "*",
    "send-only",
    "write-first",
    "write-last",
    "read-request",
    "fetch-add",
    "psn=0",
    "psn=1",
    "psn=*",
    "va=r0+1",
    "rkey=r0",
    "len=8",
    "len=4294967295",
    "payload=8",
    "payload=8:psn1",
    "payload=8:0xff",
    "payload=hex:00",
    "ackreq",
    "cut=9",
    "icrc=none",
    "corrupt=icrc",
    "mtu=256",
    "recv=2x64",
    "region=r0:4096:rwa",
    "depth=0",
    "r0",
    "10ms",
    "3600s",
    "rts",
    "err",
    "reset",
    "init",
    "rtr",
    "send",
    "recv",
    "write",
    "read",
    "opcode=0x0c",
    "00ff",
    "from=::1",
    "to=192.0.2.9",
    "source-port=1",
    "#",
    "\n",
    "\n",
    "\n",
    "type=uc",
    "ip=6",
    "psn=16777215",
    "id=1",
    "add=1",
    "version=1",
    "pad=3",
    "syndrome=0x61",
    "timer=1",
    "msn=0",
    "timeout=0",
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_text_is_a_script_or_an_error(text in "\\PC*") {
        if let Err(e) = Script::parse(&text) {
            prop_assert!(e.line() <= text.lines().count() && e.column() >= 1);
        }
    }

    /// Scripts that can be read can be played to an end.
    #[test]
    fn any_words_are_a_script_that_can_be_played_or_an_error(words in prop::collection::vec(prop::sample::select(WORDS), 0..40)) {
        let text = words.join(" ");
        if let Ok(script) = Script::parse(&text) {
            script.play();
        }
    }

    /// Most random words are errors: lines that are steps, with words of their own.
    #[test]
    fn any_steps_can_be_played(lines in prop::collection::vec(prop::sample::select(LINES), 0..24)) {
        let text = format!("qp mtu=256 recv=2x300 region=r0:4096:rwa timeout=10 retry=1\n{}", lines.join("\n"));
        let script = Script::parse(&text);
        prop_assert!(script.is_ok(), "{:?}", script);
        let outcome = script.unwrap().play();
        prop_assert!(outcome.steps <= lines.len());
    }
}

const LINES: &[&str] = &[
    "> send-first psn=0 payload=256",
    "> send-last psn=1 payload=44 ackreq",
    "> send-only psn=2 payload=9 ackreq",
    "> write-first psn=0 va=r0 rkey=r0 len=300 payload=256",
    "> write-last psn=1 payload=44 ackreq",
    "> write-only psn=0 va=r0 rkey=r0 ackreq",
    "> read-request psn=0 va=r0 rkey=r0 len=2000",
    "> read-request psn=1 va=r0+256 rkey=r0 len=100",
    "> compare-swap psn=8 va=r0 rkey=r0",
    "> ack psn=0 msn=1",
    "> nak sequence psn=1 msn=0",
    "> rnr psn=0 msn=0 timer=1",
    "> read-response-first psn=0 msn=1 payload=256",
    "> read-response-only psn=1 msn=1 payload=44",
    "> atomic-ack psn=0 msn=1 value=1",
    "> opcode=0xff psn=0",
    "> raw 0011 icrc=none",
    "> ack psn=0 cut=100",
    "ignore *",
    "ignore none",
    "restart",
    "after 20ms",
    "silence 1us",
    "post send len=300",
    "post write len=300 va=0 rkey=1 imm=3",
    "post read len=300 va=0 rkey=1",
    "post fetch-add va=0 rkey=1 add=1",
    "post recv len=8",
    "completion send",
    "modify sqd",
    "modify rts",
    "modify err",
    "modify reset",
    "modify init",
    "modify rtr",
    "revoke r0",
    "event none",
];
