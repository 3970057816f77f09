//! Nodes on loopback addresses.

mod examples;
mod selftest;

use std::{net::Ipv4Addr, time::Duration};

use ferroce_loopback::address;
use lnet_host::{
    Buffer, Config, Entry, EntryOptions, Error, Failure, Get, LnetNode, Nid, NodeOptions, Output, Put, STATUS_UP,
};

const PORTAL: u32 = 60;
const BITS: u64 = 0x0123_4567_89ab_cdef;

fn options() -> NodeOptions {
    NodeOptions::new(Nid::o2ib(address()))
}

fn node() -> LnetNode {
    LnetNode::open(options()).unwrap()
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 256) as u8).collect()
}

fn buffer(data: &[u8]) -> Buffer {
    let buffer = Buffer::allocate(data.len()).unwrap();
    buffer.write(data);
    buffer
}

fn entry(memory: &Buffer) -> Entry {
    Entry {
        portal: PORTAL,
        from: None,
        match_bits: BITS,
        ignore_bits: 0xff,
        options: EntryOptions::PUT | EntryOptions::GET | EntryOptions::MANAGE_REMOTE,
        memory: memory.clone(),
        uses: None,
    }
}

fn put(to: &LnetNode, source: Buffer) -> Put {
    Put {
        peer: to.nid(),
        portal: PORTAL,
        match_bits: BITS ^ 5,
        hdr_data: 77,
        offset: 3,
        source,
        ack: true,
    }
}

fn get(from: &LnetNode, sink: &Buffer) -> Get {
    Get {
        peer: from.nid(),
        portal: PORTAL,
        match_bits: BITS,
        offset: 3,
        sink: sink.clone(),
    }
}

#[test]
fn nodes_ping_each_other() {
    let [near, far] = [node(), node()];
    for (from, to) in [(&near, &far), (&far, &near)] {
        let reply = from.ping(to.nid()).unwrap().wait().unwrap();
        assert_eq!((reply.count, reply.interfaces.len()), (2, 2));
        let interface = reply.interfaces[1];
        assert_eq!((interface.nid, interface.status), (to.nid(), STATUS_UP));
    }
    let connections = near.connections().unwrap();
    let [connection] = connections[..] else {
        panic!("{connections:?}")
    };
    assert!(connection.is_established && connection.peer == far.nid());
    assert_eq!((connection.negotiated.depth, connection.negotiated.frags), (8, 257));
    let up = far.next_event(None).unwrap();
    assert!(
        matches!(up, Output::Up(peer, negotiated) if peer == near.nid() && negotiated.depth == 8),
        "{up:?}"
    );
    let pinged = far.next_event(None).unwrap();
    assert!(
        matches!(pinged, Output::Pinged(peer) if peer == near.nid()),
        "{pinged:?}"
    );
    let stats = far.stats().unwrap();
    let counters = stats.counters;
    assert_eq!(
        (
            counters.pings,
            counters.connected,
            stats.connections.len(),
            stats.events_lost
        ),
        (1, 1, 1, 0)
    );
    assert!(stats.turns.devices.len() == 1 && stats.turns.device().port.tx_packets > 0);
    assert!(stats.selftest.is_none());
}

#[test]
fn data_of_all_lengths_goes_there_and_back() {
    let [near, far] = [node(), node()];
    let memory = Buffer::allocate((1 << 20) + 3).unwrap();
    let attached = far.attach(entry(&memory)).unwrap();
    for len in [1, 3976, 3977, 4096, 1 << 20] {
        let data = bytes(len);
        let taken = near.put(&put(&far, buffer(&data))).unwrap().wait().unwrap();
        assert_eq!(taken as usize, len);
        let event = attached.next().unwrap().unwrap();
        assert_eq!(event.result.unwrap() as usize, len);
        let served = event.served;
        assert!(served.is_put && served.from == near.nid() && served.offset == 3);
        assert_eq!((served.match_bits, served.hdr_data), (BITS ^ 5, 77));
        assert!(memory.part(3, len).unwrap().to_vec() == data, "{len} bytes");
        let sink = Buffer::allocate(len).unwrap();
        assert_eq!(near.get(&get(&far, &sink)).unwrap().wait().unwrap() as usize, len);
        assert!(sink.to_vec() == data, "{len} bytes back");
        assert!(!attached.next().unwrap().unwrap().served.is_put);
    }
    let long = Buffer::allocate((1 << 20) + 1).unwrap();
    let refused = near.put(&put(&far, long)).unwrap_err();
    assert!(matches!(refused, Error::Failed(Failure::TooLong)), "{refused}");
}

#[test]
fn an_entry_is_there_until_it_is_used_up_or_dropped() {
    let [near, far] = [node(), node()];
    let memory = Buffer::allocate(10_000).unwrap();
    let attached = far
        .attach(Entry {
            uses: Some(1),
            ..entry(&memory)
        })
        .unwrap();
    let source = buffer(&bytes(5000));
    assert_eq!(near.put(&put(&far, source.clone())).unwrap().wait().unwrap(), 5000);
    assert!(attached.next().unwrap().is_some() && attached.next().unwrap().is_none());
    let attached = far.attach(entry(&memory)).unwrap();
    let late = attached.next_timeout(Duration::from_millis(1)).unwrap_err();
    assert!(matches!(late, Error::Ended(e) if e.kind() == std::io::ErrorKind::TimedOut));
    drop(attached);
    let sink = Buffer::allocate(5000).unwrap();
    let missed = near.get(&get(&far, &sink)).unwrap().wait().unwrap_err();
    assert!(matches!(missed, Error::Failed(Failure::Status(-61))), "{missed}");
}

#[test]
fn an_address_has_one_node_of_o2iblnd() {
    let first = node();
    let second = LnetNode::open(NodeOptions::new(first.nid())).unwrap_err();
    assert_eq!(second.kind(), std::io::ErrorKind::AddrInUse, "{second}");
    let tcp = Nid::new(2, 0, Ipv4Addr::LOCALHOST);
    let refused = LnetNode::open(NodeOptions::new(tcp)).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::InvalidInput);
    let config = Config {
        peer_credits: 0,
        ..Config::default()
    };
    let refused = LnetNode::open(NodeOptions { config, ..options() }).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::InvalidInput);
}

#[test]
fn a_peer_that_is_not_there_is_reported() {
    let near = node();
    let nobody = Nid::o2ib(address());
    let failed = near.ping(nobody).unwrap().wait().unwrap_err();
    assert!(matches!(failed, Error::Failed(Failure::Unreachable(_))), "{failed}");
    let far = node();
    let other_net = Nid::new(5, 9, far.nid().address());
    let failed = near.ping(other_net).and_then(|ping| ping.wait()).unwrap_err();
    assert!(matches!(failed, Error::Failed(Failure::Local(_))), "{failed}");
}

#[tokio::test]
async fn tasks_await_operations_and_events() {
    let [near, far] = [node(), node()];
    let memory = Buffer::allocate(5003).unwrap();
    let attached = far.attach(entry(&memory)).unwrap();
    let (peer, data) = (near.nid(), put(&far, buffer(&bytes(5000))));
    let events = tokio::spawn(async move {
        for _ in 0..20 {
            let event = attached.next_async().await.unwrap().unwrap();
            assert_eq!(event.served.from, peer);
        }
    });
    let first = near.put(&data).unwrap();
    assert!(matches!(near.next_event_async().await.unwrap(), Output::Up(..)));
    assert_eq!(first.await.unwrap(), 5000);
    for _ in 0..19 {
        assert_eq!(near.put(&data).unwrap().await.unwrap(), 5000);
    }
    events.await.unwrap();
    assert_eq!(near.ping(far.nid()).unwrap().await.unwrap().count, 2);
}
