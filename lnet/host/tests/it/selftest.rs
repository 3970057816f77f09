//! A node tests others.

use std::time::Duration;

use lnet_host::{
    LnetNode, Nid, NodeOptions, Parameters, Pattern, RunCounts, RunError, RunEvent, RunPlan, SelfTestBody, TargetConfig,
};

fn target() -> LnetNode {
    let target = Some(TargetConfig::default());
    LnetNode::open(NodeOptions {
        target,
        ..super::options()
    })
    .unwrap()
}

fn plan(nodes: &[Nid], operation: u32, loops: Option<u32>) -> RunPlan {
    RunPlan {
        nodes: nodes.to_vec(),
        parameters: Parameters::Bulk {
            operation,
            pattern: Pattern::Simple as u32,
            len: 1 << 20,
            offset: 0,
        },
        concurrency: 2,
        loops,
        name: "test".into(),
        force: false,
        timeout: Duration::from_secs(20),
    }
}

#[test]
fn data_goes_both_ways_and_a_second_test_waits() {
    let [near, far] = [super::node(), target()];
    // A node's counters are those since its start.
    for (operation, moved) in [(SelfTestBody::READ, 6), (SelfTestBody::WRITE, 12)] {
        let test = near.selftest(plan(&[far.nid()], operation, Some(3))).unwrap();
        assert_eq!(test.next(None).unwrap(), RunEvent::Begun);
        let RunEvent::Counters(of, counters) = test.next(None).unwrap() else {
            panic!("no counters")
        };
        assert_eq!(of, far.nid());
        assert_eq!(counters.rpc.bulk_put + counters.rpc.bulk_get, moved << 20);
        assert_eq!(test.next(None).unwrap(), RunEvent::Ended);
        let expected = RunCounts {
            done: 6,
            failed: 0,
            bytes: 6 << 20,
        };
        assert_eq!(test.counts().unwrap(), expected);
    }
    let endless = near.selftest(plan(&[far.nid()], SelfTestBody::READ, None)).unwrap();
    assert_eq!(endless.next(None).unwrap(), RunEvent::Begun);
    let second = near.selftest(plan(&[far.nid()], SelfTestBody::READ, Some(1)));
    assert_eq!(second.unwrap_err().to_string(), "another test runs");
    endless.stop(false).unwrap();
    let last = std::iter::from_fn(|| endless.next(None).ok()).find(|event| *event == RunEvent::Ended);
    assert!(last.is_some());
}

#[test]
fn a_node_without_selftest_is_named() {
    let [near, far] = [super::node(), super::node()];
    let short = RunPlan {
        timeout: Duration::from_millis(30),
        ..plan(&[far.nid()], SelfTestBody::READ, Some(1))
    };
    let test = near.selftest(short).unwrap();
    let lost = test.next(None).unwrap();
    assert!(
        matches!(lost, RunEvent::Lost(of, RunError::Call(_)) if of == far.nid()),
        "{lost:?}"
    );
    assert_eq!(test.next(None).unwrap(), RunEvent::Ended);
}
