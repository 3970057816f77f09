//! A fabric with software and RDMA devices: what it does between the two backends.

use std::net::SocketAddr;

use ferroce_contract::{
    End, Pair as _, Side,
    halves::{Half, Halves, Host},
    wire::Station,
};
use roce_port::fabric::FabricConfig;
use roce_verbs::{
    AccessFlags, Completion, Payload, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, WcStatus,
    provider::{CmKind, CmRef, ConnParams, Event, GrantOf, KeyKind, QpId, QpSpec, RejectReason, VerbsError},
    wr::PostError,
};

const HALVES: [Half; 2] = Half::ALL;
const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED), 0);
const RIGHTS: AccessFlags = AccessFlags::LOCAL_WRITE.union(AccessFlags::REMOTE_WRITE);
/// Turns in which anything comes to its end; time jumps to the next timer.
const TURNS: usize = 10_000;

/// Two hosts, what each half of them has, and what the hosts have told.
struct Hosts {
    pair: Halves,
    ends: [[End; 2]; 2],
    completions: [Vec<(QpId, Completion)>; 2],
    events: [Vec<Event>; 2],
}

impl Hosts {
    fn new() -> Self {
        let mut pair = Halves::new(FabricConfig::default(), Half::Soft);
        let ends = Side::ALL.map(|side| {
            HALVES.map(|half| {
                let addr = pair.addr_of(side, half);
                End::new(pair.host(side), addr)
            })
        });
        Self {
            pair,
            ends,
            completions: Default::default(),
            events: Default::default(),
        }
    }

    fn end(&self, side: Side, half: Half) -> &End {
        &self.ends[side as usize][half as usize]
    }

    fn turn(&mut self) {
        self.pair.turn();
        for side in Side::ALL {
            let host = self.pair.host(side);
            let completions = &mut self.completions[side as usize];
            while host.poll_completions(completions, 8).expect("completions") > 0 {}
            self.events[side as usize].extend(std::iter::from_fn(|| host.poll_event()));
        }
    }

    fn wait<T>(&mut self, what: &str, mut look: impl FnMut(&mut Self) -> Option<T>) -> T {
        for _ in 0..TURNS {
            if let Some(found) = look(self) {
                return found;
            }
            self.turn();
        }
        panic!("waited in vain for {what}: {:?} {:?}", self.events, self.completions);
    }

    fn event<T>(&mut self, side: Side, what: &str, is: impl Fn(&Event) -> Option<T>) -> T {
        self.wait(what, |hosts| {
            let all = &mut hosts.events[side as usize];
            let at = all.iter().position(|event| is(event).is_some())?;
            is(&all.remove(at))
        })
    }

    fn cm_event<T>(&mut self, side: Side, id: CmRef, what: &str, is: impl Fn(&CmKind) -> Option<T>) -> T {
        self.event(side, what, |event| match event {
            Event::Cm { id: of, kind } if *of == id => is(kind),
            _ => None,
        })
    }

    fn status(&mut self, side: Side, qp: QpId, wr_id: u64) -> WcStatus {
        self.wait("a completion", |hosts| {
            let all = &mut hosts.completions[side as usize];
            let at = all.iter().position(|(of, wc)| *of == qp && wc.wr_id == wr_id)?;
            Some(all.remove(at).1.status)
        })
    }

    fn spec(&self, side: Side, half: Half) -> QpSpec {
        let end = self.end(side, half);
        QpSpec {
            pd: end.pd,
            cq: end.cq,
            caps: roce_verbs::QpCaps {
                max_send_wr: 8,
                max_recv_wr: 8,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 32,
            },
            signal_all: true,
        }
    }

    fn qp(&mut self, side: Side, half: Half) -> QpId {
        let spec = self.spec(side, half);
        self.pair.host(side).create_qp(&spec).expect("a queue pair")
    }

    /// Looks for the way to a half of B from a half of A, or from whichever leads there.
    fn resolve(&mut self, half: Half, to: u16, from: Option<Half>) -> CmRef {
        let to = SocketAddr::new(self.pair.addr_of(Side::B, half), to);
        let src = from.map(|from| self.pair.addr_of(Side::A, from));
        let id = self.pair.host(Side::A).cm_resolve(src, to).expect("a way");
        let device = self.cm_event(Side::A, id, "the way", |kind| match kind {
            CmKind::Resolved { device } => Some(*device),
            _ => None,
        });
        let from = from.unwrap_or(half);
        assert_eq!(device, self.end(Side::A, from).device);
        id
    }

    /// Asks for a connection between halves of one kind; A's part of it.
    fn ask(&mut self, half: Half, to: u16) -> (CmRef, QpId) {
        let id = self.resolve(half, to, Some(half));
        let qp = self.qp(Side::A, half);
        let asked = self.pair.host(Side::A).cm_connect(id, qp, &ConnParams::default());
        asked.expect("a request");
        (id, qp)
    }

    /// A request at a listener of B, which is for this half.
    fn request(&mut self, half: Half, listener: CmRef) -> CmRef {
        let wanted = self.end(Side::B, half).device;
        self.event(Side::B, "a request", |event| match event {
            Event::Cm {
                id,
                kind: CmKind::ConnectRequest {
                    listener: at, device, ..
                },
            } if (*at, *device) == (listener, wanted) => Some(*id),
            _ => None,
        })
    }

    fn refusal(&mut self, id: CmRef) -> RejectReason {
        self.cm_event(Side::A, id, "a refusal", |kind| match kind {
            CmKind::Rejected { reason, .. } => Some(*reason),
            _ => None,
        })
    }

    fn established(&mut self, side: Side, id: CmRef) {
        self.cm_event(side, id, "a connection", |kind| {
            matches!(kind, CmKind::Established { .. }).then_some(())
        });
    }

    /// Connects halves of one kind by a listener of B; queue pairs and connections of A and B.
    fn connect(&mut self, half: Half, listener: CmRef, to: u16) -> [(CmRef, QpId); 2] {
        let (id, qp) = self.ask(half, to);
        let theirs = self.request(half, listener);
        let their_qp = self.qp(Side::B, half);
        let accepted = self
            .pair
            .host(Side::B)
            .cm_accept(theirs, their_qp, &ConnParams::default());
        accepted.expect("an accept");
        self.established(Side::A, id);
        self.established(Side::B, theirs);
        [(id, qp), (theirs, their_qp)]
    }

    /// Listens at all addresses of B.
    fn listen(&mut self) -> (CmRef, u16) {
        let host = self.pair.host(Side::B);
        let listener = host.cm_listen(ANY, 4).expect("a listener");
        let (local, remote) = host.cm_addrs(listener).expect("its address");
        assert_eq!((local.ip(), remote), (ANY.ip(), None));
        assert_ne!(local.port(), 0);
        (listener, local.port())
    }
}

fn write(to: RemoteAddr, wr_id: u64, data: &[u8]) -> SendWr<'_> {
    SendWr {
        wr_id,
        op: SendOp::Write(to),
        flags: SendFlags::SIGNALED,
        payload: Payload::Inline(data),
    }
}

#[test]
fn devices_of_both_are_there_under_numbers_of_their_own() {
    let mut hosts = Hosts::new();
    let (a, b) = (hosts.end(Side::A, Half::Soft), hosts.end(Side::A, Half::Hard));
    assert_eq!((a.device.0, b.device.0), (0, 1));
    assert!(a.pd != b.pd && a.cq != b.cq && a.mr.id != b.mr.id);
    let addrs = HALVES.map(|half| hosts.pair.addr_of(Side::A, half));
    let host = hosts.pair.host(Side::A);
    for (index, addr) in addrs.into_iter().enumerate() {
        assert_eq!(host.devices()[index].addrs, [addr]);
    }
}

#[test]
fn one_listener_has_the_requests_of_both_and_both_carry_data_at_once() {
    let mut hosts = Hosts::new();
    let (listener, port) = hosts.listen();
    let made = HALVES.map(|half| hosts.connect(half, listener, port));
    assert!(made[0] != made[1]);
    // Both are at work before either is looked at.
    let texts = [b"by the first ", b"by the second"];
    for ((half, link), text) in HALVES.into_iter().zip(&made).zip(texts) {
        let mr = hosts.end(Side::B, half).mr;
        let to = RemoteAddr {
            addr: mr.addr + 8,
            rkey: mr.rkey,
        };
        let posted = hosts.pair.host(Side::A).post_send(link[0].1, &[write(to, 1, text)]);
        posted.expect("a work request");
    }
    for ((half, link), text) in HALVES.into_iter().zip(&made).zip(texts) {
        assert_eq!(hosts.status(Side::A, link[0].1, 1), WcStatus::Success);
        let mut there = [0; 13];
        hosts
            .end(Side::B, half)
            .pages
            .read(8, &mut there)
            .expect("a range of it");
        assert_eq!(&there, text);
    }
    assert!(hosts.completions.iter().all(Vec::is_empty), "{:?}", hosts.completions);
    // Each ends by itself.
    for [(id, qp), (theirs, _)] in made {
        hosts.pair.host(Side::A).cm_disconnect(id);
        hosts.cm_event(Side::B, theirs, "the end", |kind| {
            matches!(kind, CmKind::Disconnected).then_some(())
        });
        hosts.pair.host(Side::A).drain(qp);
        hosts.event(Side::A, "the end of a drain", |event| {
            matches!(event, Event::Drained(of) if *of == qp).then_some(())
        });
    }
    let gone = hosts.events[Side::B as usize].iter().filter(|event| {
        matches!(
            event,
            Event::Cm {
                kind: CmKind::Disconnected,
                ..
            }
        )
    });
    assert_eq!(gone.count(), 0, "each was told once");
}

#[test]
fn a_listener_of_both_ends_at_both() {
    let mut hosts = Hosts::new();
    let (listener, port) = hosts.listen();
    // One waits at each.
    let waiting = HALVES.map(|half| (hosts.ask(half, port).0, hosts.request(half, listener)));
    hosts.pair.host(Side::B).cm_destroy(listener);
    assert_eq!(hosts.pair.host(Side::B).cm_addrs(listener), None);
    for half in HALVES {
        let (id, _) = hosts.ask(half, port);
        assert_eq!(hosts.refusal(id), RejectReason::INVALID_SERVICE_ID, "{half:?}");
    }
    // What was told is its user's, still.
    for (id, theirs) in waiting {
        hosts.pair.host(Side::B).cm_destroy(theirs);
        assert_eq!(hosts.refusal(id), RejectReason::CONSUMER);
    }
    // Destroyed again, it does not harm the next.
    let next = hosts.pair.host(Side::B).cm_listen(SocketAddr::new(ANY.ip(), port), 4);
    let next = next.expect("the port is free at both");
    hosts.pair.host(Side::B).cm_destroy(listener);
    for half in HALVES {
        hosts.connect(half, next, port);
    }
}

#[test]
fn a_listener_of_both_has_one_port() {
    let mut hosts = Hosts::new();
    let at_second = hosts.pair.addr_of(Side::B, Half::Hard);
    let (first, port) = hosts.listen();
    let host = hosts.pair.host(Side::B);
    host.cm_destroy(first);
    // The first half would go on with these, which the second has not.
    let taken: Vec<_> = (port..port + 20)
        .map(|port| host.cm_listen(SocketAddr::new(at_second, port), 1).expect("a port"))
        .collect();
    let (listener, found) = hosts.listen();
    assert!(!(port..port + 20).contains(&found), "{found}");
    for half in HALVES {
        hosts.connect(half, listener, found);
    }
    // A port that is asked for is that one, or none; then the first half does not keep it.
    let host = hosts.pair.host(Side::B);
    let at = SocketAddr::new(ANY.ip(), port + 3);
    assert!(matches!(host.cm_listen(at, 1), Err(VerbsError::Address(_))));
    host.cm_destroy(taken[3]);
    host.cm_listen(at, 1).expect("it is free at both now");
    // Of those that were tried for port 0 none is taken.
    let at_first = hosts.pair.addr_of(Side::B, Half::Soft);
    let host = hosts.pair.host(Side::B);
    for port in (port..port + 20).filter(|p| *p != at.port()) {
        host.cm_listen(SocketAddr::new(at_first, port), 1).expect("free");
    }
}

#[test]
fn who_has_no_address_of_a_family_is_not_asked_to_listen_at_all_of_them() {
    let v6 = std::net::IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1]);
    let nowhere = |_| Err(std::io::ErrorKind::NetworkUnreachable.into());
    for six in HALVES {
        let [soft, hard] = HALVES.map(|half| match half == six {
            true => Station::at(v6, 1, FabricConfig::default()),
            false => Station::new(2, FabricConfig::default()),
        });
        let mut host = Host::new(soft, hard, nowhere);
        let host = host.provider();
        let listener = host.cm_listen(ANY, 1).expect("at those of IPv4");
        let port = host.cm_addrs(listener).expect("its address").0.port();
        // IPv6's unspecified address is all addresses.
        let all = |port| SocketAddr::new([0; 16].into(), port);
        assert!(matches!(host.cm_listen(all(port), 1), Err(VerbsError::Address(_))));
        host.cm_listen(SocketAddr::new(v6, port), 1).expect("that is another");
        host.cm_listen(all(0), 1).expect("a port that both have");
    }
}

#[test]
fn the_way_to_a_peer_says_which_half_connects() {
    let mut hosts = Hosts::new();
    let (listener, port) = hosts.listen();
    for half in HALVES {
        let id = hosts.resolve(half, port, None);
        let qp = hosts.qp(Side::A, half);
        let asked = hosts.pair.host(Side::A).cm_connect(id, qp, &ConnParams::default());
        asked.expect("a request");
        hosts.request(half, listener);
    }
}

#[test]
fn objects_of_different_halves_are_not_used_together() {
    let mut hosts = Hosts::new();
    let (listener, port) = hosts.listen();
    for (half, other) in [(Half::Soft, Half::Hard), (Half::Hard, Half::Soft)] {
        let (own, foreign) = (hosts.spec(Side::A, half), hosts.spec(Side::A, other));
        let mixed = QpSpec { cq: foreign.cq, ..own };
        let refused = hosts.pair.host(Side::A).create_qp(&mixed);
        assert!(matches!(refused, Err(VerbsError::Invalid(_))), "{refused:?}");
        // Connections.
        let id = hosts.resolve(half, port, Some(half));
        let (qp, stranger) = (hosts.qp(Side::A, half), hosts.qp(Side::A, other));
        let host = hosts.pair.host(Side::A);
        let refused = host.cm_connect(id, stranger, &ConnParams::default());
        assert!(matches!(refused, Err(VerbsError::Invalid(_))), "{refused:?}");
        host.cm_connect(id, qp, &ConnParams::default()).expect("its own");
        let theirs = hosts.request(half, listener);
        let (their_qp, stranger) = (hosts.qp(Side::B, half), hosts.qp(Side::B, other));
        let host = hosts.pair.host(Side::B);
        let refused = host.cm_accept(theirs, stranger, &ConnParams::default());
        assert!(matches!(refused, Err(VerbsError::Invalid(_))), "{refused:?}");
        host.cm_accept(theirs, their_qp, &ConnParams::default())
            .expect("its own");
        hosts.established(Side::A, id);
        hosts.established(Side::B, theirs);
        keys(&mut hosts, their_qp, (half, other));
    }
}

/// Keys of a queue pair's half and of the other.
fn keys(hosts: &mut Hosts, qp: QpId, (half, other): (Half, Half)) {
    let (own, foreign) = (hosts.end(Side::B, half), hosts.end(Side::B, other));
    let (pds, mrs) = ((own.pd, foreign.pd), (own.mr.id, foreign.mr.id));
    let of = |mr| GrantOf {
        mr,
        offset: 0,
        len: 64,
        iova: None,
        access: RIGHTS,
    };
    let host = hosts.pair.host(Side::B);
    let mut key = |pd| host.alloc_key(pd, KeyKind::FastRegistration).expect("a key");
    let (key, stranger) = (key(pds.0), key(pds.1));
    let refused = [
        host.grant(qp, stranger, &of(mrs.0), 1).map(drop),
        host.grant(qp, key, &of(mrs.1), 1).map(drop),
        host.grant_list(qp, stranger, &[of(mrs.0)]).map(drop),
        host.grant_list(qp, key, &[of(mrs.0), of(mrs.1)]).map(drop),
        host.revoke(qp, stranger, 1).map(drop),
    ];
    for refused in refused {
        assert!(matches!(refused, Err(PostError::Invalid(_))), "{half:?}: {refused:?}");
    }
    host.grant(qp, key, &of(mrs.0), 1).expect("its own");
    let listed = host.grant_list(qp, key, &[of(mrs.0)]);
    match half {
        Half::Soft => drop(listed.expect("its own")),
        // Windows open one piece of memory.
        Half::Hard => assert!(matches!(listed, Err(PostError::Invalid(_))), "{listed:?}"),
    }
}

#[test]
fn a_device_that_is_gone_flushes_and_comes_back_under_its_index() {
    let mut hosts = Hosts::new();
    let (listener, port) = hosts.listen();
    let [(id, qp), (theirs, _)] = hosts.connect(Half::Hard, listener, port);
    let device = hosts.end(Side::A, Half::Hard).device;
    let addr = hosts.pair.addr_of(Side::A, Half::Hard);
    let receive = |wr_id| RecvWr { wr_id, sges: &[] };
    let posted = hosts.pair.host(Side::A).post_recv(qp, &[receive(7), receive(8)]);
    posted.expect("receives");
    hosts.pair.of(Side::A).set_removed(true);
    hosts.event(Side::A, "the removal", |event| {
        matches!(event, Event::DeviceRemoved(of) if *of == device).then_some(())
    });
    let host = hosts.pair.host(Side::A);
    assert!(host.devices()[usize::from(device.0)].addrs.is_empty());
    assert!(host.alloc_pd(device).is_err());
    // Nothing completes there any more.
    host.drain(qp);
    for wr_id in [7, 8] {
        assert_eq!(hosts.status(Side::A, qp, wr_id), WcStatus::FlushError);
    }
    hosts.event(Side::A, "the end of a drain", |event| {
        matches!(event, Event::Drained(of) if *of == qp).then_some(())
    });
    // It is closed with the last of its objects, of which the other device has none.
    let (pd, cq, mr) = {
        let end = hosts.end(Side::A, Half::Hard);
        (end.pd, end.cq, end.mr.id)
    };
    let host = hosts.pair.host(Side::A);
    host.destroy_qp(qp);
    host.cm_destroy(id);
    host.deregister(mr);
    host.destroy_cq(cq);
    hosts.turn();
    assert!(!hosts.pair.of(Side::A).is_closed(), "its protection domain is left");
    hosts.pair.host(Side::A).free_pd(pd);
    hosts.turn();
    assert!(hosts.pair.of(Side::A).is_closed());
    hosts.pair.of(Side::A).set_removed(false);
    hosts.turn();
    let host = hosts.pair.host(Side::A);
    assert_eq!(host.devices()[usize::from(device.0)].addrs, [addr]);
    hosts.ends[Side::A as usize][Half::Hard as usize] = End::new(host, addr);
    assert_eq!(hosts.end(Side::A, Half::Hard).device, device);
    hosts.connect(Half::Hard, listener, port);
    hosts.pair.host(Side::B).cm_destroy(theirs);
}
