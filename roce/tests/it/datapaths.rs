//! Verbs over each kind of datapath.

use crate::common::*;
use roce::{DatapathKind, Device, DeviceConfig, VerbsError};

const RAW: [DatapathKind; 2] = [DatapathKind::Raw, DatapathKind::Packet { vlan: None }];

fn over(datapath: DatapathKind) -> DeviceConfig {
    DeviceConfig { datapath, ..config() }
}

#[test]
#[ignore = "needs CAP_NET_RAW"]
fn verbs_work_between_all_kinds_of_datapaths() {
    for ours in RAW {
        for theirs in [DatapathKind::Udp, ours] {
            exercise(&connected(over(ours), over(theirs)));
            exercise(&connected(over(theirs), over(ours)));
        }
    }
}

#[test]
#[ignore = "needs CAP_NET_RAW"]
fn a_device_of_several_shards_has_each_kind_of_datapath() {
    for ours in RAW {
        let shards = |config| DeviceConfig { shards: 3, ..config };
        exercise(&connected(shards(over(ours)), shards(over(DatapathKind::Udp))));
        exercise(&connected(shards(over(ours)), shards(over(ours))));
    }
}

/// The Identification is seen, so that it need not be found.
#[test]
#[ignore = "needs CAP_NET_RAW"]
fn damaged_packets_are_dropped_by_all_32_bits() {
    for ours in RAW {
        let rules = "corrupt=5%,seed=7";
        let faults = roce::fault::rules(rules).and_then(roce::Faults::new).unwrap();
        let sender = DeviceConfig {
            faults: Some(faults),
            ..over(ours)
        };
        let pair = connected(sender, over(ours));
        let (ma, mb) = (pair.a.mr(1 << 20), pair.b.mr(1 << 20));
        ma.write(0, &pattern(1 << 20, 3)).unwrap();
        post(
            &pair.qa,
            1,
            roce::SendOp::Write(remote(&mb, 0)),
            roce::Payload::Sges(&[ma.sge(0, 1 << 20)]),
        );
        pair.a.good(1);
        assert!(contents(&mb, 0, 1 << 20) == pattern(1 << 20, 3));
        let stats = pair.b.device.stats();
        assert!(stats.icrc_errors() > 0, "{stats:?}");
    }
}

#[test]
fn an_address_is_shared_by_the_udp_datapath_alone() {
    // No broker runs there, and none is started.
    let how = roce::JoinConfig {
        dir: "/nonexistent".into(),
        program: None,
        name: "datapaths".into(),
    };
    for ours in RAW {
        let refused = Device::open_shared(over(ours), &how).expect_err("not shared");
        assert!(matches!(refused, VerbsError::Invalid(_)), "{refused}");
        assert!(refused.to_string().contains("by the udp datapath alone"), "{refused}");
    }
}
