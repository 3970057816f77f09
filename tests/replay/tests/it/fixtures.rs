//! Every capture of `pcap-fixtures`, with our engine in the place of each side that the manifest names.

use ferroce_replay::{locate, replay_all, replay_rds};

#[test]
fn our_engine_does_what_each_captured_side_did() {
    let only = std::env::var("REPLAY_ONLY").unwrap_or_default();
    let verdict = replay_all(&only, |file| Some(locate(file))).unwrap();
    println!("{}", verdict.seen.join("\n"));
    let wrong = &verdict.wrong;
    assert!(!verdict.seen.is_empty(), "no capture is called so");
    assert!(wrong.is_empty(), "{} findings\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn our_rds_node_sends_what_each_captured_kernel_sent() {
    let only = std::env::var("REPLAY_ONLY").unwrap_or_default();
    let verdict = replay_rds(&only).unwrap();
    println!("{}", verdict.seen.join("\n"));
    let wrong = &verdict.wrong;
    assert!(!verdict.seen.is_empty(), "no capture is called so");
    assert!(wrong.is_empty(), "{} findings\n{}", wrong.len(), wrong.join("\n"));
}
