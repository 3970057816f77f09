//! Several loops at one address, each with a shard of the device.

use std::{
    io::ErrorKind,
    net::{IpAddr, SocketAddr, UdpSocket},
    os::fd::AsRawFd,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use crate::common::{
    ALL, TIMEOUT, address,
    own_loop::{Loop, SERVICE},
};
use roce::{
    Arrival, ConnParams, DeviceConfig, LocalDevice, OpenSockets, Pages, Placement, PortCounters, QpCaps, QpnSlot,
    RejectReason, RemoteAddr, SendOp, VerbsError,
    verbs::provider::{CmKind, CmRef, CqId, DeviceIx, Event, MrInfo, PdId, QpSpec, Registration},
};
use roce_bth::{Bth, Deth, Header, MAX_HEADER_LEN, Opcode, Psn, QKey, Qpn};
use roce_icrc::Flow;
use roce_port::cm::mad::{Mad, Message, Req};

const RC_SEND_ONLY: u8 = 0x04;
const UD_SEND_ONLY: u8 = 0x64;
const PORT: u16 = 4791;
const PIECE: usize = 300_000;

/// The first byte of the private data names the shard.
struct ByData;

impl Placement for ByData {
    fn place(&self, arrival: &Arrival<'_>) -> usize {
        arrival.private_data[0].into()
    }
}

fn shards(addr: IpAddr, count: usize) -> Vec<Loop> {
    let opened = LocalDevice::open_shards(&[DeviceConfig::new(addr)], count, Arc::new(ByData));
    let loops = opened.unwrap().into_iter().map(|device| Loop::of(device, addr));
    loops.collect()
}

fn turn(loops: &mut [&mut [Loop]]) {
    let mut more = false;
    for l in loops.iter_mut().flat_map(|some| some.iter_mut()) {
        more |= l.step();
    }
    if !more {
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn until(loops: &mut [&mut [Loop]], what: &str, mut done: impl FnMut(&[&mut [Loop]]) -> bool) {
    let end = Instant::now() + TIMEOUT;
    while !done(loops) {
        assert!(Instant::now() < end, "{what}");
        turn(loops);
    }
}

fn request(l: &Loop) -> Option<CmRef> {
    l.events.iter().find_map(|e| match e {
        Event::Cm {
            id,
            kind: CmKind::ConnectRequest { .. },
        } => Some(*id),
        _ => None,
    })
}

fn counters(l: &mut Loop) -> PortCounters {
    l.device.stats(0).unwrap().port
}

fn params(shard: u8) -> ConnParams {
    ConnParams {
        private_data: vec![shard],
        ..ConnParams::default()
    }
}

#[test]
fn shards_of_two_devices_connect_move_data_and_part() {
    let (here, there) = (address(), address());
    let (mut a, mut b) = (shards(here, 3), shards(there, 2));
    let to = SocketAddr::new(there, SERVICE);
    for l in &mut b {
        l.device.provider().cm_listen(to, 4).unwrap();
    }
    for (from, at) in [(0, 1), (1, 0), (2, 1)] {
        let (id, qp) = a[from].connect_with(to, &params(at as u8));
        until(&mut [&mut a, &mut b], "a request", |l| request(&l[1][at]).is_some());
        assert!(request(&b[1 - at]).is_none(), "it is for another loop");
        let theirs = request(&b[at]).unwrap();
        let their_qp = b[at].qp();
        let accepted = b[at]
            .device
            .provider()
            .cm_accept(theirs, their_qp, &ConnParams::default());
        accepted.unwrap();
        until(&mut [&mut a, &mut b], "established", |l| {
            l[0][from].is_up(id) && l[1][at].is_up(theirs)
        });
        let data: Vec<u8> = (0..PIECE).map(|i| (i / 3 + from) as u8).collect();
        a[from].pages.write(0, &data).unwrap();
        let (addr, rkey) = (b[at].mr.addr, b[at].mr.rkey);
        a[from].send(qp, SendOp::Write(RemoteAddr { addr, rkey }), PIECE);
        until(&mut [&mut a, &mut b], "written", |l| l[0][from].done() == 1);
        let mut arrived = vec![0; PIECE];
        b[at].pages.read(0, &mut arrived).unwrap();
        assert!(arrived == data);
        a[from].pages.write(0, &vec![0; PIECE]).unwrap();
        a[from].send(qp, SendOp::Read(RemoteAddr { addr, rkey }), PIECE);
        until(&mut [&mut a, &mut b], "read", |l| l[0][from].done() == 2);
        a[from].pages.read(0, &mut arrived).unwrap();
        assert!(arrived == data);
        // The memory of a loop is no other loop's.
        let other = RemoteAddr {
            addr: b[1 - at].mr.addr,
            rkey: b[1 - at].mr.rkey,
        };
        match from {
            2 => {
                a[from].send(qp, SendOp::Write(other), 64);
                until(&mut [&mut a, &mut b], "refused", |l| l[0][from].completions.len() == 3);
                assert_eq!(a[from].done(), 2);
                b[at].device.provider().cm_disconnect(theirs);
            }
            1 => b[at].device.provider().cm_disconnect(theirs),
            _ => a[from].device.provider().cm_disconnect(id),
        }
        until(&mut [&mut a, &mut b], "disconnected", |l| {
            l[0][from].is_over(id) && l[1][at].is_over(theirs)
        });
        b[at].events.clear();
    }
    for l in a.iter_mut().chain(&mut b) {
        let c = counters(l);
        assert_eq!((c.icrc_errors, c.drop_no_qp, c.drop_handed_over), (0, 0, 0), "{c:?}");
    }
}

/// Objects of a loop on one of its devices.
struct On {
    pd: PdId,
    cq: CqId,
    mr: MrInfo,
    pages: Arc<Pages>,
}

fn made(l: &mut Loop, device: DeviceIx) -> On {
    let provider = l.device.provider();
    let pd = provider.alloc_pd(device).unwrap();
    let pages = Pages::allocate(PIECE).unwrap();
    let what = Registration {
        memory: pages.clone(),
        offset: 0,
        len: PIECE,
        iova: None,
        access: ALL,
    };
    On {
        pd,
        cq: provider.create_cq(device, 100).unwrap(),
        mr: provider.register(pd, &what).unwrap(),
        pages,
    }
}

/// Accepts what has come to a loop, on the device that it came to, which is this.
fn accept(l: &mut Loop, device: DeviceIx, on: &On) -> CmRef {
    let at = l.events.iter().position(|e| {
        let kind = match e {
            Event::Cm { kind, .. } => kind,
            _ => return false,
        };
        matches!(kind, CmKind::ConnectRequest { device: of, .. } if *of == device)
    });
    let at = at.unwrap_or_else(|| panic!("no request at device {device:?}: {:?}", l.events));
    let Event::Cm { id, .. } = l.events.remove(at) else {
        unreachable!()
    };
    let spec = QpSpec {
        pd: on.pd,
        cq: on.cq,
        caps: QpCaps::default(),
        signal_all: false,
    };
    let provider = l.device.provider();
    let qp = provider.create_qp(&spec).unwrap();
    provider.cm_accept(id, qp, &ConnParams::default()).unwrap();
    id
}

/// Objects of a loop on its first device.
fn on_first(l: &Loop) -> On {
    On {
        pd: l.pd,
        cq: l.cq,
        mr: l.mr,
        pages: l.pages.clone(),
    }
}

/// A loop's address from here on, and what it has there.
fn switch(l: &mut Loop, addr: IpAddr, on: On) {
    (l.addr, l.pd, l.cq, l.mr, l.pages) = (addr, on.pd, on.cq, on.mr, on.pages);
}

/// Accepts what has come to a loop's first device.
fn accept_any(l: &mut Loop) -> CmRef {
    let on = on_first(l);
    accept(l, DeviceIx(0), &on)
}

#[test]
fn loops_have_a_shard_of_each_of_their_addresses() {
    let addrs = [address(), address()];
    let configs = addrs.map(DeviceConfig::new);
    let opened = LocalDevice::open_shards(&configs, 2, Arc::new(ByData)).unwrap();
    let mut b: Vec<Loop> = opened.into_iter().map(|device| Loop::of(device, addrs[0])).collect();
    let everywhere = SocketAddr::new(IpAddr::from([0; 4]), SERVICE);
    for l in &mut b {
        assert_eq!(l.device.provider().devices().len(), 2);
        l.device.provider().cm_listen(everywhere, 4).unwrap();
    }
    let devices = [DeviceIx(0), DeviceIx(1)];
    let all = b.iter_mut().map(|l| devices.map(|device| made(l, device)));
    let all: Vec<[On; 2]> = all.collect();
    let mut peer = [Loop::new()];
    for (at, shard) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let to = SocketAddr::new(addrs[at], SERVICE);
        let (id, qp) = peer[0].connect_with(to, &params(shard as u8));
        until(&mut [&mut peer, &mut b], "a request", |l| {
            request(&l[1][shard]).is_some()
        });
        let on = &all[shard][at];
        let theirs = accept(&mut b[shard], devices[at], on);
        until(&mut [&mut peer, &mut b], "established", |l| {
            l[0][0].is_up(id) && l[1][shard].is_up(theirs)
        });
        let data = vec![(at * 2 + shard + 1) as u8; PIECE];
        peer[0].pages.write(0, &data).unwrap();
        let MrInfo { addr, rkey, .. } = on.mr;
        peer[0].completions.clear();
        peer[0].send(qp, SendOp::Write(RemoteAddr { addr, rkey }), PIECE);
        until(&mut [&mut peer, &mut b], "written", |l| l[0][0].done() == 1);
        let mut there = vec![0; PIECE];
        on.pages.read(0, &mut there).unwrap();
        assert!(there == data, "device {at}, loop {shard}");
        // The other device's key opens nothing here.
        let MrInfo { addr, rkey, .. } = all[shard][1 - at].mr;
        peer[0].send(qp, SendOp::Write(RemoteAddr { addr, rkey }), 64);
        until(&mut [&mut peer, &mut b], "refused", |l| l[0][0].completions.len() == 2);
        assert_eq!(peer[0].done(), 1);
        b[shard].device.provider().cm_disconnect(theirs);
        until(&mut [&mut peer, &mut b], "disconnected", |l| l[0][0].is_over(id));
    }
    for l in &mut b {
        let counted = l.device.all_stats();
        assert_eq!(counted.iter().map(|(addr, _)| *addr).collect::<Vec<_>>(), addrs);
        for (addr, stats) in counted {
            let c = stats.port;
            assert!(c.rx_packets > 0 && c.tx_packets > 0, "{addr}: {c:?}");
            assert_eq!(
                (c.icrc_errors, c.drop_no_qp, c.drop_handed_over),
                (0, 0, 0),
                "{addr}: {c:?}"
            );
        }
    }
}

#[test]
fn shards_of_both_ip_versions() {
    let _only = ferroce_loopback::only_one();
    let (v4, second) = (address(), IpAddr::from(std::net::Ipv6Addr::LOCALHOST));
    let configs = [v4, second].map(DeviceConfig::new);
    let opened = LocalDevice::open_shards(&configs, 2, Arc::new(ByData)).unwrap();
    let mut b: Vec<Loop> = opened.into_iter().map(|device| Loop::of(device, v4)).collect();
    // One loop's shard of an address connects to another's.
    let to = SocketAddr::new(second, SERVICE);
    for l in &mut b {
        l.device.provider().cm_listen(to, 4).unwrap();
    }
    let on: Vec<On> = b.iter_mut().map(|l| made(l, DeviceIx(1))).collect();
    let id = b[0].device.provider().cm_resolve(Some(second), to).unwrap();
    let spec = QpSpec {
        pd: on[0].pd,
        cq: on[0].cq,
        caps: QpCaps::default(),
        signal_all: false,
    };
    let provider = b[0].device.provider();
    let qp = provider.create_qp(&spec).unwrap();
    provider.cm_connect(id, qp, &params(1)).unwrap();
    until(&mut [&mut b], "a request", |l| request(&l[0][1]).is_some());
    let theirs = accept(&mut b[1], DeviceIx(1), &on[1]);
    until(&mut [&mut b], "established", |l| {
        l[0][0].is_up(id) && l[0][1].is_up(theirs)
    });
    b[0].device.provider().cm_disconnect(id);
    until(&mut [&mut b], "disconnected", |l| {
        l[0][0].is_over(id) && l[0][1].is_over(theirs)
    });
}

#[test]
fn an_address_is_one_device() {
    let [a, b] = [(); 2].map(|()| address());
    for (addrs, word) in [
        (vec![a, b, a], "can't be two devices"),
        (vec![a, IpAddr::from([0; 4])], "includes the other"),
        (vec![IpAddr::from([0; 16]), a], "includes the other"),
        (vec![IpAddr::from([0; 4]), IpAddr::from([0; 16])], "includes the other"),
    ] {
        let configs: Vec<_> = addrs.iter().copied().map(DeviceConfig::new).collect();
        for shards in [1, 2] {
            let refused = LocalDevice::open_shards(&configs, shards, Arc::new(ByData));
            match refused {
                Err(VerbsError::Address(text)) => assert!(text.contains(word), "{text}"),
                other => panic!("{addrs:?} at {shards} loops: {other:?}"),
            }
        }
    }
}

#[test]
fn a_refusal_reaches_the_loop_that_asked() {
    let (here, there) = (address(), address());
    let (mut a, mut b) = (shards(here, 2), shards(there, 2));
    // Only the second listens.
    let to = SocketAddr::new(there, SERVICE);
    b[1].device.provider().cm_listen(to, 4).unwrap();
    let (id, _) = a[1].connect_with(to, &params(0));
    let rejected = |l: &Loop| {
        l.events.iter().find_map(|e| match e {
            Event::Cm {
                id: of,
                kind: CmKind::Rejected { reason, .. },
            } if *of == id => Some(*reason),
            _ => None,
        })
    };
    until(&mut [&mut a, &mut b], "rejected", |l| rejected(&l[0][1]).is_some());
    assert_eq!(rejected(&a[1]), Some(RejectReason::INVALID_SERVICE_ID));
    // A shard that does not exist stands for the first.
    let (id, _) = a[0].connect_with(to, &params(9));
    let rejected = |l: &Loop| {
        let of = |e: &Event| matches!(e, Event::Cm { id: of, kind: CmKind::Rejected { .. } } if *of == id);
        l.events.iter().any(of)
    };
    until(&mut [&mut a, &mut b], "rejected", |l| rejected(&l[0][0]));
}

/// Packets that the kernel carries as one: all go where the first one goes.
fn send_merged(socket: &UdpSocket, to: IpAddr, packets: &[[u8; 64]]) {
    let size: libc::c_int = 64;
    // SAFETY: the call reads an integer.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_UDP,
            libc::UDP_SEGMENT,
            (&raw const size).cast(),
            size_of_val(&size) as libc::socklen_t,
        )
    };
    assert_eq!(set, 0);
    socket.send_to(&packets.concat(), (to, PORT)).unwrap();
}

fn packet(opcode: u8, qpn: u32) -> [u8; 64] {
    let mut bytes = [0; 64];
    bytes[0] = opcode;
    bytes[2..4].copy_from_slice(&[0xff, 0xff]);
    bytes[5..8].copy_from_slice(&qpn.to_be_bytes()[1..]);
    bytes
}

/// Places everything on the second loop and counts how often it is asked.
#[derive(Default)]
struct Counting(AtomicUsize);

impl Placement for Counting {
    fn place(&self, _: &Arrival<'_>) -> usize {
        self.0.fetch_add(1, Relaxed);
        1
    }
}

/// Sends a REQ with this communication ID. `flip`: bits to change in its ICRC.
fn send_request(from: &UdpSocket, to: IpAddr, id: u32, flip: u8) {
    let req = Req {
        local_comm_id: id,
        ..Req::default()
    };
    let mut header = Header::new(Bth::new(Opcode::UdSendOnly, Qpn::GSI, Psn::new(id)));
    header.deth = Some(Deth {
        qkey: QKey::GSI,
        reserved: 0,
        src_qp: Qpn::GSI,
    });
    let mut bytes = vec![0; MAX_HEADER_LEN];
    let at = header.emit(&mut bytes);
    bytes.truncate(at);
    bytes.extend(Mad::new(id.into(), Message::from(req)).emit());
    bytes.extend([0; 4]);
    let to = SocketAddr::new(to, PORT);
    Flow::try_from((from.local_addr().unwrap(), to))
        .unwrap()
        .seal(0, &mut bytes);
    *bytes.last_mut().unwrap() ^= flip;
    from.send_to(&bytes, to).unwrap();
}

#[test]
fn forged_requests_are_not_placed_and_push_out_no_others() {
    let (addr, placement) = (address(), Arc::<Counting>::default());
    let opened = LocalDevice::open_shards(&[DeviceConfig::new(addr)], 2, placement.clone()).unwrap();
    let mut l: Vec<Loop> = opened.into_iter().map(|device| Loop::of(device, addr)).collect();
    let [peer, flooding] = [address(), address()].map(|at| UdpSocket::bind((at, 0)).unwrap());
    let placed = || placement.0.load(Relaxed);
    for id in 0..50 {
        send_request(&peer, addr, id, 0x81);
    }
    let end = Instant::now() + TIMEOUT;
    while counters(&mut l[0]).icrc_errors + counters(&mut l[1]).icrc_errors < 50 {
        assert!(Instant::now() < end, "packets with a wrong ICRC are not counted");
        turn(&mut [&mut l]);
    }
    assert_eq!(placed(), 0, "a request with a wrong ICRC was placed");
    send_request(&peer, addr, 1, 0);
    until(&mut [&mut l], "a request", |_| placed() == 1);
    for id in 0..6000 {
        send_request(&flooding, addr, id, 0);
        if id % 32 == 0 {
            turn(&mut [&mut l]);
        }
    }
    let calm = Instant::now() + Duration::from_millis(200);
    until(&mut [&mut l], "the flood", |_| Instant::now() > calm);
    let before = placed();
    send_request(&peer, addr, 1, 0);
    let calm = Instant::now() + Duration::from_millis(200);
    until(&mut [&mut l], "its repetition", |_| Instant::now() > calm);
    println!("{} of 6000 requests of one host were placed", before - 1);
    assert_eq!(placed(), before, "the peer's request was forgotten for another host's");
    assert!(before > 100);
}

#[test]
fn what_arrives_at_the_wrong_loop_is_handed_over() {
    let addr = address();
    let mut l = shards(addr, 2);
    let socket = UdpSocket::bind((addr, 0)).unwrap();
    let (first, second) = (packet(RC_SEND_ONLY, 0x00_1234), packet(RC_SEND_ONLY, 0x80_1234));
    let management = packet(UD_SEND_ONLY, 1);
    send_merged(&socket, addr, &[second, first, second, management]);
    send_merged(&socket, addr, &[first, second]);
    let end = Instant::now() + TIMEOUT;
    let settled = |l: &mut [Loop]| {
        let (a, b) = (counters(&mut l[0]), counters(&mut l[1]));
        (a.drop_no_qp, b.drop_no_qp, a.drop_qkey) == (2, 3, 1)
    };
    while !settled(&mut l) {
        let seen = [counters(&mut l[0]), counters(&mut l[1])];
        assert!(Instant::now() < end, "{seen:?}");
        turn(&mut [&mut l]);
    }
    let (a, b) = (counters(&mut l[0]), counters(&mut l[1]));
    assert_eq!((a.handed_over, b.handed_over), (1, 2));
    assert_eq!(a.rx_packets + b.rx_packets, 6, "each is counted once");
}

#[test]
fn a_loop_that_does_not_turn_takes_no_more_than_fits() {
    let addr = address();
    let mut l = shards(addr, 2);
    let socket = UdpSocket::bind((addr, 0)).unwrap();
    let mut packets = vec![packet(RC_SEND_ONLY, 0x00_1234); 60];
    packets[0] = packet(RC_SEND_ONLY, 0x80_1234);
    let (sends, strays) = (20, 20 * 59);
    let end = Instant::now() + TIMEOUT;
    for n in 1..=sends {
        send_merged(&socket, addr, &packets);
        while counters(&mut l[1]).drop_no_qp < n {
            assert!(Instant::now() < end);
            turn(&mut [&mut l[1..]]);
        }
    }
    let c = counters(&mut l[1]);
    assert_eq!(c.handed_over + c.drop_handed_over, strays);
    assert_eq!(c.handed_over, 1024);
    // The other is there again.
    while counters(&mut l[0]).drop_no_qp < 1024 {
        assert!(Instant::now() < end);
        turn(&mut [&mut l]);
    }
}

/// Opens one more address for loops, in another thread, and gives it to them.
fn attach(loops: &mut [Loop], addr: IpAddr) {
    let opener = loops[0].device.opener();
    let opened = std::thread::spawn(move || opener.open(addr)).join().unwrap();
    let opened = opened.unwrap();
    assert_eq!(opened.len(), loops.len());
    for (l, new) in loops.iter_mut().zip(opened) {
        let before = l.device.descriptors().len();
        let watched = new.descriptors().len();
        let device = l.device.attach(new);
        assert_eq!(device, DeviceIx(l.device.provider().devices().len() as u16 - 1));
        assert_eq!(l.device.descriptors().len(), before + watched);
    }
}

#[test]
fn loops_that_run_get_further_addresses() {
    for count in [1, 2] {
        let (here, there) = (address(), address());
        let (mut a, mut b) = (shards(here, count), [Loop::at(there)]);
        let to = SocketAddr::new(there, SERVICE);
        b[0].device.provider().cm_listen(to, 4).unwrap();
        let addrs = [here, address(), address()];
        // What is under way goes on.
        let (old, old_qp) = a[0].connect(to);
        until(&mut [&mut a, &mut b], "a request", |l| request(&l[1][0]).is_some());
        let theirs = accept_any(&mut b[0]);
        until(&mut [&mut a, &mut b], "established", |l| {
            l[0][0].is_up(old) && l[1][0].is_up(theirs)
        });
        let first = on_first(&a[0]);
        for addr in &addrs[1..] {
            attach(&mut a, *addr);
        }
        let target = RemoteAddr {
            addr: b[0].mr.addr,
            rkey: b[0].mr.rkey,
        };
        for (device, addr) in addrs.iter().enumerate() {
            for l in 0..count {
                let on = made(&mut a[l], DeviceIx(device as u16));
                switch(&mut a[l], *addr, on);
                let (id, qp) = a[l].connect(to);
                until(&mut [&mut a, &mut b], "a request", |l| request(&l[1][0]).is_some());
                let theirs = accept_any(&mut b[0]);
                until(&mut [&mut a, &mut b], "established", |loops| {
                    loops[0][l].is_up(id) && loops[1][0].is_up(theirs)
                });
                let peer = b[0].device.provider().cm_addrs(theirs).unwrap().1.unwrap();
                assert_eq!(peer.ip(), *addr, "it comes from there");
                let data = vec![(device * 2 + l + 1) as u8; PIECE];
                a[l].pages.write(0, &data).unwrap();
                a[l].completions.clear();
                a[l].send(qp, SendOp::Write(target), PIECE);
                until(&mut [&mut a, &mut b], "written", |loops| loops[0][l].done() == 1);
                let mut arrived = vec![0; PIECE];
                b[0].pages.read(0, &mut arrived).unwrap();
                assert!(arrived == data, "device {device}, loop {l}");
                b[0].device.provider().cm_disconnect(theirs);
                until(&mut [&mut a, &mut b], "disconnected", |loops| loops[0][l].is_over(id));
            }
        }
        // The connection of before is still there.
        switch(&mut a[0], here, first);
        a[0].completions.clear();
        a[0].send(old_qp, SendOp::Write(target), 64);
        until(&mut [&mut a, &mut b], "written", |l| l[0][0].done() == 1);
        for l in &mut a {
            let all = l.device.all_stats();
            assert_eq!(all.iter().map(|(addr, _)| *addr).collect::<Vec<_>>(), addrs);
            for (addr, stats) in all {
                let port = stats.port;
                assert_eq!((port.icrc_errors, port.drop_no_qp), (0, 0), "{addr}: {port:?}");
                assert!(port.rx_packets > 0, "{addr}");
            }
        }
    }
}

#[test]
fn what_can_not_be_opened_is_said_and_may_be_tried_again() {
    let kind = |e: VerbsError| match e {
        VerbsError::Io { source, .. } => source.kind(),
        other => panic!("{other}"),
    };
    for count in [1, 2] {
        let mut a = shards(address(), count);
        let opener = a[0].device.opener();
        // A documentation network (RFC 5737).
        let elsewhere = IpAddr::from([192, 0, 2, 1]);
        let e = opener.open(elsewhere).unwrap_err();
        assert!(
            e.to_string().contains("192.0.2.1 is not an address of this host"),
            "{e}"
        );
        assert_eq!(kind(e), ErrorKind::AddrNotAvailable);
        let later = address();
        let holder = UdpSocket::bind((later, PORT)).unwrap();
        let e = opener.open(later).unwrap_err();
        assert!(e.to_string().contains("taken"), "{e}");
        assert_eq!(kind(e), ErrorKind::AddrInUse);
        drop(holder);
        attach(&mut a, later);
        assert!(opener.has(later) && opener.open(later).is_err(), "it is open");
        assert_eq!(opener.addrs().len(), 2);
    }
}

#[test]
fn loops_do_not_share_what_is_shared_with_processes() {
    let open = |config: &DeviceConfig, shards| {
        LocalDevice::open_shards(std::slice::from_ref(config), shards, Arc::new(ByData))
    };
    let addr = address();
    let usual = DeviceConfig::new(addr);
    for config in [
        DeviceConfig {
            qpn_slot: Some(QpnSlot { bits: 7, slot: 3 }),
            ..usual.clone()
        },
        DeviceConfig {
            sockets: Some(OpenSockets::default()),
            ..usual.clone()
        },
    ] {
        let e = open(&config, 2).unwrap_err().to_string();
        assert!(e.contains("shared with other processes"), "{e}");
    }
    for shards in [0, 65] {
        assert!(matches!(open(&usual, shards), Err(VerbsError::Invalid(_))));
    }
    let one = open(&usual, 1).unwrap();
    assert_eq!(one.len(), 1);
    let taken = open(&usual, 2).unwrap_err();
    assert!(matches!(taken, VerbsError::Address(_)), "{taken}");
    drop(one);
    assert_eq!(open(&usual, 2).unwrap().len(), 2);
}
