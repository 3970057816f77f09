//! Two fabrics, and a wire between them that a test holds in its hands.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use roce_bth::{Packet, Syndrome};
use roce_port::fabric::{Fabric, FabricConfig, Ports, Several, Usage};
use roce_port::{ListenArgs, Port, PortConfig, RxMeta, TxBatch, TxConfig};
use roce_verbs::mem::{MemoryTable, Pages};
use roce_verbs::{
    AccessFlags, Completion, DeviceLimits, Instant, Mtu, Payload, QpCaps, RKey, RecvWr, RemoteAddr, RnrTimer,
    SendFlags, SendOp, SendWr, Sge, WcStatus,
    provider::{
        CmKind, CmRef, ConnParams, CqId, DeviceIx, Event, GrantOf, Granted, KeyId, KeyKind, MrInfo, PdId, Provider,
        QpId, QpSpec, Registration, RejectReason, Revoked, VerbsError,
    },
};

const SERVICE: u16 = 1234;
const RIGHTS: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::MW_BIND);
const WRITE: AccessFlags = AccessFlags::LOCAL_WRITE.union(AccessFlags::REMOTE_WRITE);

fn ip(last: u8) -> IpAddr {
    IpAddr::from([192, 0, 2, last])
}

struct Host {
    fabric: Fabric<Several>,
    batch: TxBatch,
    /// Packets sent, with their type of service.
    sent: Vec<(u8, Vec<u8>)>,
    pages: Arc<Pages>,
    pd: PdId,
    cq: CqId,
    mr: MrInfo,
}

fn table(last: u8) -> Arc<MemoryTable> {
    Arc::new(MemoryTable::new([last; 32], &DeviceLimits::software(0)))
}

impl Host {
    fn new(addrs: &[u8], config: FabricConfig) -> Self {
        let tables = addrs.iter().map(|last| table(*last)).collect();
        Self::on(addrs, config, tables)
    }

    /// With these tables of keys.
    fn on(addrs: &[u8], config: FabricConfig, tables: Vec<Arc<MemoryTable>>) -> Self {
        let port = |(last, mem): (&u8, Arc<MemoryTable>)| {
            let config = PortConfig::new(vec![ip(*last)], Mtu::B1024, u64::from(*last));
            (Port::new(config, mem.clone(), [*last; 32]), mem, vec![ip(*last)])
        };
        let devices = addrs
            .iter()
            .map(|last| (DeviceLimits::software(u64::from(*last)), vec![ip(*last)]));
        let mut fabric = Fabric::new(
            Several::new(addrs.iter().zip(tables).map(port).collect()),
            config,
            devices.collect(),
        );
        fabric.set_now(Instant::from_nanos(1_000_000));
        let pages = Pages::allocate(1 << 16).unwrap();
        let pd = fabric.alloc_pd(DeviceIx(0)).unwrap();
        let cq = fabric.create_cq(DeviceIx(0), 100).unwrap();
        let mr = fabric.register(pd, &whole(&pages)).unwrap();
        Self {
            fabric,
            batch: TxBatch::new(TxConfig::default()),
            sent: Vec::new(),
            pages,
            pd,
            cq,
            mr,
        }
    }

    fn qp(&mut self) -> QpId {
        let spec = QpSpec {
            pd: self.pd,
            cq: self.cq,
            caps: QpCaps::default(),
            signal_all: false,
        };
        self.fabric.create_qp(&spec).unwrap()
    }

    fn events(&mut self) -> Vec<Event> {
        std::iter::from_fn(|| self.fabric.poll_event()).collect()
    }

    fn completions(&mut self) -> Vec<(QpId, Completion)> {
        let mut out = Vec::new();
        self.fabric.poll_completions(&mut out, 100).unwrap();
        out
    }

    fn write(&mut self, qp: QpId, to: RemoteAddr, data: &[u8]) {
        let wr = SendWr {
            wr_id: 7,
            op: SendOp::Write(to),
            flags: SendFlags::SIGNALED,
            payload: Payload::Inline(data),
        };
        self.fabric.post_send(qp, &[wr]).unwrap();
    }

    fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.pages.read(offset, &mut out).unwrap();
        out
    }
}

fn whole(pages: &Arc<Pages>) -> Registration {
    Registration {
        memory: pages.clone(),
        offset: 0,
        len: pages.len(),
        iova: None,
        access: RIGHTS,
    }
}

/// Everything goes over until nothing more is sent.
fn settle(a: &mut Host, b: &mut Host) {
    loop {
        let moved = carry(a, b) | carry(b, a);
        a.fabric.take_cm_events();
        b.fabric.take_cm_events();
        if !moved {
            return;
        }
    }
}

fn carry(from: &mut Host, to: &mut Host) -> bool {
    let now = Instant::from_nanos(1_000_000);
    let mut moved = false;
    for i in 0..from.fabric.ports().count() {
        loop {
            let more = from.fabric.ports().port(i).poll_transmit(now, &mut from.batch);
            for train in from.batch.trains() {
                moved = true;
                from.sent
                    .extend(train.packets().map(|packet| (train.tos, packet.to_vec())));
                let meta = RxMeta {
                    segment_len: train.segment_len,
                    ..RxMeta::new(train.remote.ip(), SocketAddr::new(train.local, train.src_port))
                };
                let port = to.fabric.ports().at(train.remote.ip()).unwrap();
                port.handle_datagram(now, &meta, train.bytes);
            }
            from.batch.clear();
            if !more {
                break;
            }
        }
    }
    moved
}

/// A connection, and its ends.
fn connect(a: &mut Host, b: &mut Host, to: u8) -> ((CmRef, QpId), (CmRef, QpId, CmRef)) {
    connect_with(a, b, to, ConnParams::default(), &ConnParams::default())
}

fn connect_with(
    a: &mut Host,
    b: &mut Host,
    to: u8,
    asks: ConnParams,
    accepts: &ConnParams,
) -> ((CmRef, QpId), (CmRef, QpId, CmRef)) {
    let listener = b.fabric.cm_listen(SocketAddr::new(ip(to), SERVICE), 4).unwrap();
    let id = a.fabric.cm_resolve(None, SocketAddr::new(ip(to), SERVICE)).unwrap();
    assert!(
        matches!(a.events()[..], [Event::Cm { id: of, kind: CmKind::Resolved { device: DeviceIx(0) } }] if of == id)
    );
    let qp = a.qp();
    let params = ConnParams {
        private_data: b"who".to_vec(),
        ..asks
    };
    a.fabric.cm_connect(id, qp, &params).unwrap();
    settle(a, b);
    let asked = b.events();
    let [
        Event::Cm {
            id: theirs,
            kind:
                CmKind::ConnectRequest {
                    listener: at,
                    private_data,
                    ..
                },
        },
    ] = &asked[..]
    else {
        panic!("{asked:?}");
    };
    assert_eq!((*at, &private_data[..3]), (listener, &b"who"[..]));
    let their_qp = b.qp();
    b.fabric.cm_accept(*theirs, their_qp, accepts).unwrap();
    settle(a, b);
    for (host, id) in [(&mut *a, id), (&mut *b, *theirs)] {
        let told = host.events();
        let is_up = |e: &Event| matches!(e, Event::Cm { id: of, kind: CmKind::Established { .. } } if *of == id);
        assert!(told.iter().any(is_up), "{told:?}");
    }
    ((id, qp), (*theirs, their_qp, listener))
}

#[test]
fn connected_written_drained_and_all_given_back() {
    let (mut a, mut b) = (
        Host::new(&[1], FabricConfig::default()),
        Host::new(&[2], FabricConfig::default()),
    );
    let empty = a.fabric.usage();
    let ((id, qp), (theirs, their_qp, listener)) = connect(&mut a, &mut b, 2);
    let to = RemoteAddr {
        addr: b.mr.addr + 100,
        rkey: b.mr.rkey,
    };
    a.write(qp, to, b"over");
    settle(&mut a, &mut b);
    let done = a.completions();
    assert!(
        matches!(done[..], [(of, wc)] if of == qp && wc.is_ok() && wc.wr_id == 7),
        "{done:?}"
    );
    assert_eq!(b.bytes(100, 4), b"over");

    // Receives that are posted complete before the end is told.
    let sge = [Sge {
        addr: b.mr.addr,
        length: 64,
        lkey: b.mr.lkey,
    }];
    let recv = RecvWr { wr_id: 9, sges: &sge };
    b.fabric.post_recv(their_qp, &[recv, recv]).unwrap();
    b.fabric.drain(their_qp);
    let flushed = b.completions();
    assert_eq!(flushed.len(), 2);
    assert!(
        flushed
            .iter()
            .all(|(_, wc)| wc.status == WcStatus::FlushError && wc.wr_id == 9)
    );
    let told = b.events();
    assert!(matches!(told[..], [Event::Drained(of)] if of == their_qp), "{told:?}");

    a.fabric.cm_disconnect(id);
    settle(&mut a, &mut b);
    let over = |e: &Event| {
        matches!(
            e,
            Event::Cm {
                kind: CmKind::Disconnected,
                ..
            }
        )
    };
    assert!(b.events().iter().any(over));
    assert!(a.events().iter().any(over));
    for (host, ids, qp) in [(&mut a, vec![id], qp), (&mut b, vec![theirs, listener], their_qp)] {
        host.fabric.destroy_qp(qp);
        ids.into_iter().for_each(|id| host.fabric.cm_destroy(id));
        assert_eq!(host.fabric.usage(), empty);
        host.fabric.deregister(host.mr.id);
        host.fabric.destroy_cq(host.cq);
        host.fabric.free_pd(host.pd);
        assert_eq!(host.fabric.usage(), Usage::default());
        assert!(matches!(
            host.fabric.post_recv(qp, &[]),
            Err((0, roce_verbs::wr::PostError::NoQueuePair))
        ));
    }
}

/// Types of service of what a host has sent on a connection since it was asked last, and its RNR NAKs.
fn told(host: &mut Host) -> (Vec<u8>, Vec<RnrTimer>) {
    let (mut tos, mut timers) = (Vec::new(), Vec::new());
    for (of, bytes) in host.sent.drain(..) {
        let header = Packet::parse(&bytes).unwrap().header;
        // The connection manager's own are another queue pair's.
        if header.bth.dest_qp.value() > 1 {
            tos.push(of);
        }
        if let Some(Syndrome::Rnr(timer)) = header.aeth().map(|a| a.syndrome) {
            timers.push(timer);
        }
    }
    (tos, timers)
}

#[test]
fn a_connection_has_its_type_of_service_and_its_rnr_timer() {
    let ask = |tos, timer: Option<u8>| ConnParams {
        tos,
        min_rnr_timer: timer.map(RnrTimer::new),
        ..ConnParams::default()
    };
    let usual = PortConfig::new(vec![ip(1)], Mtu::B1024, 1).min_rnr_timer.code();
    // What A asks for, what B accepts with; the type of service of each one's packets, and the timer of their NAKs.
    for (asks, accepts, tos, timers) in [
        (ask(None, None), ask(None, None), (0, 0), (usual, usual)),
        (ask(Some(0x68), Some(3)), ask(None, Some(9)), (0x68, 0x68), (3, 9)),
        (
            ask(Some(0x68), None),
            ask(Some(0xb8), None),
            (0x68, 0xb8),
            (usual, usual),
        ),
        (ask(None, None), ask(Some(0xb8), Some(1)), (0, 0xb8), (usual, 1)),
    ] {
        let (mut a, mut b) = (
            Host::new(&[1], FabricConfig::default()),
            Host::new(&[2], FabricConfig::default()),
        );
        let what = format!("{asks:?}, {accepts:?}");
        let ((_, qp), (_, their_qp, _)) = connect_with(&mut a, &mut b, 2, asks, &accepts);
        told(&mut a);
        told(&mut b);
        let nobody_receives = SendWr {
            wr_id: 1,
            op: SendOp::Send,
            flags: SendFlags::SIGNALED,
            payload: Payload::Inline(b"hello"),
        };
        a.fabric.post_send(qp, &[nobody_receives]).unwrap();
        settle(&mut a, &mut b);
        let (ours, (theirs, naks)) = (told(&mut a).0, told(&mut b));
        assert_eq!((ours, theirs), (vec![tos.0], vec![tos.1]), "{what}");
        assert_eq!(naks, [RnrTimer::new(timers.1)], "{what}");
        b.fabric.post_send(their_qp, &[nobody_receives]).unwrap();
        settle(&mut a, &mut b);
        assert_eq!(told(&mut a), (vec![tos.0], vec![RnrTimer::new(timers.0)]), "{what}");
    }
}

#[test]
fn a_request_is_refused_with_data_and_one_that_nobody_listens_for_too() {
    let (mut a, mut b) = (
        Host::new(&[1], FabricConfig::default()),
        Host::new(&[2], FabricConfig::default()),
    );
    let dst = SocketAddr::new(ip(2), SERVICE);
    let listener = b.fabric.cm_listen(dst, 4).unwrap();
    let ask = |a: &mut Host| {
        let id = a.fabric.cm_resolve(None, dst).unwrap();
        a.events();
        let qp = a.qp();
        a.fabric.cm_connect(id, qp, &ConnParams::default()).unwrap();
        id
    };
    let id = ask(&mut a);
    settle(&mut a, &mut b);
    let Some(Event::Cm { id: theirs, .. }) = b.events().pop() else {
        panic!("no request");
    };
    b.fabric.cm_reject(theirs, RejectReason::CONSUMER, b"no").unwrap();
    settle(&mut a, &mut b);
    let told = a.events();
    let Some(Event::Cm {
        id: of,
        kind: CmKind::Rejected { reason, private_data },
    }) = told.last()
    else {
        panic!("{told:?}");
    };
    assert_eq!(
        (*of, *reason, &private_data[..2]),
        (id, RejectReason::CONSUMER, &b"no"[..])
    );
    assert!(b.fabric.cm_addrs(theirs).is_none());

    b.fabric.cm_destroy(listener);
    let id = ask(&mut a);
    settle(&mut a, &mut b);
    let told = a.events();
    assert!(
        told.iter().any(|e| matches!(e, Event::Cm { id: of, kind: CmKind::Rejected { reason: RejectReason::INVALID_SERVICE_ID, .. } } if *of == id)),
        "{told:?}"
    );
}

#[test]
fn a_request_that_came_before_its_listener_went_leaves_nothing() {
    let (mut a, mut b) = (
        Host::new(&[1], FabricConfig::default()),
        Host::new(&[2], FabricConfig::default()),
    );
    let empty = b.fabric.usage();
    let dst = SocketAddr::new(ip(2), SERVICE);
    let listener = b.fabric.cm_listen(dst, 4).unwrap();
    let id = a.fabric.cm_resolve(None, dst).unwrap();
    a.events();
    let qp = a.qp();
    a.fabric.cm_connect(id, qp, &ConnParams::default()).unwrap();
    settle(&mut a, &mut b);
    b.fabric.cm_destroy(listener);
    assert_eq!(b.events().len(), 0);
    assert_eq!(b.fabric.usage(), empty);
    settle(&mut a, &mut b);
    let told = a.events();
    let refused = |e: &Event| matches!(e, Event::Cm { id: of, kind: CmKind::Rejected { .. } } if *of == id);
    assert!(told.iter().any(refused), "{told:?}");
}

/// Grants the second KiB, perhaps by a work request.
fn open(host: &mut Host, qp: QpId, key: KeyId) -> RKey {
    let grant = GrantOf {
        mr: host.mr.id,
        offset: 1024,
        len: 1024,
        iova: None,
        access: WRITE,
    };
    host.fabric.grant(qp, key, &grant, 1).unwrap().rkey()
}

#[test]
fn keys_open_and_close_however_the_device_does_it() {
    for instant_keys in [true, false] {
        for kind in [KeyKind::FastRegistration, KeyKind::Window1, KeyKind::Window2] {
            let config = FabricConfig {
                instant_keys,
                ..FabricConfig::default()
            };
            let (mut a, mut b) = (Host::new(&[1], FabricConfig::default()), Host::new(&[2], config));
            let ((_, qp), (_, their_qp, _)) = connect(&mut a, &mut b, 2);
            let key = b.fabric.alloc_key(b.pd, kind).unwrap();
            let mut former = None;
            for round in 0..3u8 {
                let rkey = open(&mut b, their_qp, key);
                settle(&mut a, &mut b);
                assert_ne!(former.replace(rkey), Some(rkey), "{kind:?}");
                let addr = b.mr.addr + 1024;
                a.write(qp, RemoteAddr { addr, rkey }, &[round; 8]);
                settle(&mut a, &mut b);
                assert!(a.completions().iter().all(|(_, wc)| wc.is_ok()), "{kind:?}");
                assert_eq!(b.bytes(1024, 8), [round; 8]);
                let revoked = b.fabric.revoke(their_qp, key, 2).unwrap();
                assert_eq!(revoked == Revoked::Now, instant_keys, "{kind:?}");
                settle(&mut a, &mut b);
            }
            let told = b.completions();
            assert!(told.iter().all(|(_, wc)| wc.is_ok()), "{told:?}");
            assert_eq!(told.len(), if instant_keys { 0 } else { 6 }, "{kind:?}");
            // It is closed.
            let to = RemoteAddr {
                addr: b.mr.addr + 1024,
                rkey: former.unwrap(),
            };
            a.write(qp, to, &[9; 8]);
            settle(&mut a, &mut b);
            let failed = a.completions();
            assert!(
                failed.iter().any(|(_, wc)| wc.status == WcStatus::RemoteAccessError),
                "{kind:?}: {failed:?}"
            );
            assert_eq!(b.bytes(1024, 8), [2; 8]);
            b.events();
            assert!(b.fabric.access_violated(their_qp), "{kind:?}");
        }
    }
}

/// Also where the queue pair ends before it executes the work request that takes the key back.
#[test]
fn a_key_of_a_connection_that_is_gone_is_closed() {
    let kinds = [KeyKind::FastRegistration, KeyKind::Window1, KeyKind::Window2];
    let ways = [(true, false), (false, false), (false, true)];
    for (kind, (instant_keys, revoked)) in kinds.into_iter().flat_map(|kind| ways.map(|way| (kind, way))) {
        let case = format!("{kind:?}, instant: {instant_keys}, revoked: {revoked}");
        let config = FabricConfig {
            instant_keys,
            ..FabricConfig::default()
        };
        let (mut a, mut b) = (Host::new(&[1], config), Host::new(&[2], config));
        let (_, (_, first, listener)) = connect(&mut a, &mut b, 2);
        let key = b.fabric.alloc_key(b.pd, kind).unwrap();
        let rkey = open(&mut b, first, key);
        settle(&mut a, &mut b);
        if revoked {
            assert_eq!(b.fabric.revoke(first, key, 2).unwrap(), Revoked::Queued);
        }
        b.fabric.drain(first);
        b.fabric.close_key(key);
        b.fabric.destroy_qp(first);
        b.fabric.cm_destroy(listener);
        let ((_, qp), _) = connect(&mut a, &mut b, 2);
        let addr = b.mr.addr + 1024;
        a.write(qp, RemoteAddr { addr, rkey }, &[9; 8]);
        settle(&mut a, &mut b);
        assert!(a.completions().iter().any(|(_, wc)| !wc.is_ok()), "{case}");
        assert_eq!(b.bytes(1024, 8), [0; 8], "{case}");
    }
}

#[test]
fn a_listener_on_all_addresses_takes_requests_of_each_device() {
    let (mut a, mut b) = (
        Host::new(&[1], FabricConfig::default()),
        Host::new(&[2, 3], FabricConfig::default()),
    );
    let any = SocketAddr::new(IpAddr::from([0, 0, 0, 0]), SERVICE);
    let listener = b.fabric.cm_listen(any, 4).unwrap();
    for (device, last) in [(0, 2), (1, 3)] {
        let id = a.fabric.cm_resolve(None, SocketAddr::new(ip(last), SERVICE)).unwrap();
        a.events();
        let qp = a.qp();
        a.fabric.cm_connect(id, qp, &ConnParams::default()).unwrap();
        settle(&mut a, &mut b);
        let mut told = b.events();
        // The connection before is established only now.
        told.retain(|e| {
            !matches!(
                e,
                Event::Cm {
                    kind: CmKind::Established { .. },
                    ..
                }
            )
        });
        assert!(
            matches!(told[..], [Event::Cm { kind: CmKind::ConnectRequest { listener: at, device: DeviceIx(d), .. }, .. }]
                if at == listener && d == device),
            "{told:?}"
        );
        let Event::Cm { id: theirs, .. } = told[0] else {
            unreachable!()
        };
        assert_eq!(b.fabric.cm_addrs(theirs).map(|(local, _)| local.ip()), Some(ip(last)));
        // A queue pair of the first device is none for a connection of the second.
        let their_qp = b.qp();
        let accepted = b.fabric.cm_accept(theirs, their_qp, &ConnParams::default());
        assert_eq!(accepted.is_ok(), device == 0);
    }
}

/// Which devices listen at an address; afterwards they do not any more. A device without addresses has all.
fn listening(devices: &[&[&str]], at: &str) -> Result<Vec<usize>, VerbsError> {
    let (mut ports, mut said) = (Vec::new(), Vec::new());
    for addrs in devices {
        let addrs: Vec<IpAddr> = addrs.iter().map(|addr| addr.parse().unwrap()).collect();
        let (config, mem) = (PortConfig::new(addrs.clone(), Mtu::B1024, 1), table(1));
        ports.push((Port::new(config, mem.clone(), [1; 32]), mem, vec![ip(1)]));
        said.push((DeviceLimits::software(1), addrs));
    }
    let mut fabric = Fabric::new(Several::new(ports), FabricConfig::default(), said);
    fabric.cm_listen(SocketAddr::new(at.parse().unwrap(), SERVICE), 1)?;
    let args = ListenArgs::new(None, SERVICE, 1);
    let busy = |device: &usize| fabric.ports().port(*device).cm_listen(&args).is_err();
    Ok((0..devices.len()).filter(busy).collect())
}

#[test]
fn the_devices_of_an_address_listen_at_it() {
    let (all, v4, v6): (&[&str], &[&str], &[&str]) = (&[], &["192.0.2.1"], &["fd00::1"]);
    for (devices, at, expected) in [
        (&[v4, v6][..], "192.0.2.1", &[0][..]),
        (&[v4, v6], "::ffff:192.0.2.1", &[0]),
        (&[v4, v6], "fd00::1", &[1]),
        (&[v4, v6], "0.0.0.0", &[0]),
        (&[v4, v6], "::", &[0, 1]),
        // One at all IPv4 addresses, beside one at an IPv6 address.
        (&[v6, all], "fd00::1", &[0]),
        (&[v6, all], "0.0.0.0", &[1]),
        (&[all], "192.0.2.9", &[0]),
    ] {
        assert_eq!(listening(devices, at).unwrap(), expected, "{at} of {devices:?}");
    }
    for (devices, at) in [(&[v4, v6][..], "192.0.2.9"), (&[v6], "0.0.0.0")] {
        let refused = listening(devices, at);
        assert!(matches!(refused, Err(VerbsError::Address(_))), "{at}: {refused:?}");
    }
}

#[test]
fn a_source_address_leads_to_its_port() {
    let mut host = Host::new(&[2, 3], FabricConfig::default());
    let ports = host.fabric.ports();
    for (src, leads) in [(None, (0, ip(2))), (Some(ip(2)), (0, ip(2))), (Some(ip(3)), (1, ip(3)))] {
        assert_eq!(ports.route(src, ip(9)).unwrap(), leads);
    }
    assert!(matches!(ports.route(Some(ip(4)), ip(9)), Err(VerbsError::Address(_))));
}

#[test]
fn pages_are_registered_with_several_devices_and_stay_as_long_as_one_has_them() {
    let mut host = Host::new(&[2, 3], FabricConfig::default());
    let second = host.fabric.alloc_pd(DeviceIx(1)).unwrap();
    let mr = host.fabric.register(second, &whole(&host.pages)).unwrap();
    assert_eq!((mr.addr, mr.len), (host.mr.addr, host.mr.len));
    assert_ne!(mr.rkey, host.mr.rkey);
    let weak = Arc::downgrade(&host.pages);
    host.pages = Pages::allocate(1).unwrap();
    host.fabric.deregister(host.mr.id);
    assert!(weak.upgrade().is_some());
    host.fabric.deregister(mr.id);
    assert!(weak.upgrade().is_none());
    let outside = Registration {
        offset: 1,
        ..whole(&Pages::allocate(4096).unwrap())
    };
    assert!(host.fabric.register(second, &outside).is_err());
    let granted = Granted::Now(RKey(5));
    assert_eq!(granted.rkey(), RKey(5));
}
