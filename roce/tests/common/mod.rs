//! Two devices of this process on addresses of their own, and connections between them.
#![allow(dead_code, unreachable_pub)]

pub mod own_loop;

use std::{
    net::{IpAddr, SocketAddr},
    process::Command,
    time::{Duration, Instant},
};

use roce::{
    AccessFlags, AddressVector, CmEvent, CmEventKind, Completion, ConnParams, Cq, Device, DeviceConfig, EventChannel,
    Id, Mr, Payload, Pd, Psn, Qp, QpAttr, QpCaps, QpInit, QpState, QpType, RecvWr, RemoteAddr, SendFlags, SendOp,
    SendWr, WcFlags, WcOpcode, WcStatus,
};

pub const ALL: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_ATOMIC);

/// Longest time that anything takes.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// Waits until that is so.
#[track_caller]
pub fn eventually(mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + TIMEOUT;
    while !is_so() {
        assert!(Instant::now() < until, "it does not come");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// An address that no other device uses.
pub fn address() -> IpAddr {
    ferroce_loopback::address().into()
}

pub fn config() -> DeviceConfig {
    DeviceConfig::new(address())
}

pub fn open() -> Device {
    Device::open(config()).unwrap()
}

/// A device with the objects that most tests need.
pub struct Side {
    pub device: Device,
    pub pd: Pd,
    pub cq: Cq,
    pub channel: EventChannel,
}

impl Side {
    pub fn new(device: Device) -> Self {
        Self {
            pd: device.alloc_pd().unwrap(),
            cq: device.create_cq(4096, None, 0).unwrap(),
            channel: device.create_cm_channel().unwrap(),
            device,
        }
    }

    pub fn addr(&self) -> IpAddr {
        self.device.addr()
    }

    pub fn qp(&self) -> Qp {
        let init = QpInit {
            send_cq: &self.cq,
            recv_cq: &self.cq,
            caps: QpCaps::default(),
            signal_all: false,
        };
        self.device.create_qp(&self.pd, &init).unwrap()
    }

    pub fn mr(&self, len: usize) -> Mr {
        self.device.alloc_mr(&self.pd, len, ALL).unwrap()
    }

    /// Waits for `n` completions.
    pub fn completions(&self, n: usize) -> Vec<Completion> {
        let until = Instant::now() + TIMEOUT;
        let mut out = vec![];
        while out.len() < n {
            assert!(Instant::now() < until, "{} of {n} completions: {out:?}", out.len());
            let left = n - out.len();
            self.cq.poll(&mut out, left).unwrap();
        }
        out
    }

    /// Waits for `n` completions, all good.
    pub fn good(&self, n: usize) -> Vec<Completion> {
        let out = self.completions(n);
        for c in &out {
            assert_eq!(c.status, WcStatus::Success, "{c:?}");
        }
        out
    }

    pub fn event(&self) -> CmEvent {
        self.channel.wait(Some(TIMEOUT)).unwrap().expect("an event")
    }

    /// Takes a connect request: the new connection, and the peer's private data.
    pub fn request(&self) -> (Id, Vec<u8>) {
        let CmEvent { id, kind, .. } = self.event();
        let CmEventKind::Request { private_data, .. } = kind else {
            panic!("not a request: {kind:?}");
        };
        (id, private_data)
    }
}

/// Two sides with a connected queue pair each.
pub struct Pair {
    pub a: Side,
    pub b: Side,
    pub qa: Qp,
    pub qb: Qp,
    pub ids: Option<[Id; 2]>,
}

/// Two devices, connected by the connection manager.
pub fn connected(a: DeviceConfig, b: DeviceConfig) -> Pair {
    let (a, b) = (Side::new(Device::open(a).unwrap()), Side::new(Device::open(b).unwrap()));
    let addr = SocketAddr::new(b.addr(), 7000);
    let listener = b.device.listen(&b.channel, addr, 8).unwrap();
    let (qa, qb) = (a.qp(), b.qp());
    let (ia, ib) = connect(&a, &b, &qa, &qb, addr);
    drop(listener);
    Pair {
        a,
        b,
        qa,
        qb,
        ids: Some([ia, ib]),
    }
}

pub fn pair() -> Pair {
    connected(config(), config())
}

/// Connects two queue pairs; `b` listens already.
pub fn connect(a: &Side, b: &Side, qa: &Qp, qb: &Qp, addr: SocketAddr) -> (Id, Id) {
    let params = ConnParams {
        private_data: b"hello".to_vec(),
        ..ConnParams::default()
    };
    let ia = a.device.connect(&a.channel, None, addr, qa, params).unwrap();
    let (ib, private_data) = b.request();
    assert_eq!(&private_data[..5], b"hello");
    let params = ConnParams {
        private_data: b"welcome".to_vec(),
        ..ConnParams::default()
    };
    ib.accept(qb, params).unwrap();
    let event = a.event();
    let CmEventKind::Established { private_data, .. } = event.kind else {
        panic!("not established: {event:?}");
    };
    assert_eq!(&private_data[..7], b"welcome");
    assert_eq!(event.id.handle(), ia.handle());
    let event = b.event();
    assert!(matches!(event.kind, CmEventKind::Established { .. }), "{event:?}");
    assert_eq!(event.id.handle(), ib.handle());
    (ia, ib)
}

/// Brings a queue pair to RTS by hand, as ibv_rc_pingpong does.
pub fn raise(qp: &Qp, local: IpAddr, remote: &Qp, remote_addr: IpAddr, psns: [u32; 2]) {
    let way = QpAttr {
        rq_psn: Some(Psn::new(psns[1])),
        sq_psn: Some(Psn::new(psns[0])),
        retry_cnt: Some(6),
        ..QpAttr::to_rts(AddressVector::new(local, remote_addr), roce::Mtu::B1024, remote.qpn())
    };
    for to in [QpState::Rtr, QpState::Rts] {
        qp.modify(&way.step(QpType::Rc, to)).unwrap();
    }
}

/// Posts one signalled send.
pub fn post(qp: &Qp, wr_id: u64, op: SendOp, payload: Payload<'_>) {
    let wr = SendWr {
        wr_id,
        op,
        flags: SendFlags::SIGNALED,
        payload,
    };
    qp.post_send(&[wr]).unwrap();
}

pub fn recv(qp: &Qp, wr_id: u64, sges: &[roce::Sge]) {
    qp.post_recv(&[RecvWr { wr_id, sges }]).unwrap();
}

/// Bytes that differ from place to place.
pub fn pattern(len: usize, salt: u8) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u32).wrapping_mul(0x9e37_79b9).to_be_bytes()[0] ^ salt ^ i as u8)
        .collect()
}

pub fn remote(mr: &roce::Mr, offset: u64) -> RemoteAddr {
    RemoteAddr {
        addr: mr.addr() + offset,
        rkey: mr.rkey(),
    }
}

pub fn contents(mr: &roce::Mr, offset: usize, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    mr.read(offset, &mut out).unwrap();
    out
}

/// SEND, WRITE, READ and atomics of several lengths on one connection.
pub fn exercise(pair: &Pair) {
    let (a, b) = (&pair.a, &pair.b);
    let (ma, mb) = (a.mr(1 << 20), b.mr(1 << 20));
    for (round, len) in [0usize, 1, 3, 255, 1024, 4096, 4097, 100_000, 1 << 20]
        .into_iter()
        .enumerate()
    {
        let data = pattern(len, round as u8);
        ma.write(0, &data).unwrap();
        let sges = [ma.sge(0, len)];

        post(&pair.qa, 1, SendOp::Write(remote(&mb, 0)), Payload::Sges(&sges));
        let c = a.good(1);
        assert_eq!((c[0].wr_id, c[0].opcode), (1, WcOpcode::RdmaWrite));
        assert_eq!(contents(&mb, 0, len), data, "WRITE of {len}");

        ma.write(0, &vec![0xff; len]).unwrap();
        post(&pair.qa, 2, SendOp::Read(remote(&mb, 0)), Payload::Sges(&sges));
        let c = a.good(1);
        assert_eq!((c[0].opcode, c[0].byte_len), (WcOpcode::RdmaRead, len as u32));
        assert_eq!(contents(&ma, 0, len), data, "READ of {len}");

        mb.write(0, &vec![0xee; len]).unwrap();
        recv(&pair.qb, 3, &[mb.sge(0, len)]);
        post(&pair.qa, 4, SendOp::SendWithImm(0x0102_0304), Payload::Sges(&sges));
        a.good(1);
        let c = b.good(1);
        assert_eq!((c[0].wr_id, c[0].byte_len, c[0].imm), (3, len as u32, 0x0102_0304));
        assert!(c[0].flags.contains(WcFlags::WITH_IMM));
        assert_eq!(contents(&mb, 0, len), data, "SEND of {len}");
    }
    mb.write(8, &41u64.to_ne_bytes()).unwrap();
    let result = [ma.sge(0, 8)];
    let add = SendOp::FetchAdd {
        remote: remote(&mb, 8),
        add: 1,
    };
    post(&pair.qa, 5, add, Payload::Sges(&result));
    a.good(1);
    assert_eq!(contents(&ma, 0, 8), 41u64.to_ne_bytes());
    let swap = SendOp::CompareSwap {
        remote: remote(&mb, 8),
        compare: 42,
        swap: 7,
    };
    post(&pair.qa, 6, swap, Payload::Sges(&result));
    a.good(1);
    assert_eq!(contents(&ma, 0, 8), 42u64.to_ne_bytes());
    assert_eq!(contents(&mb, 8, 8), 7u64.to_ne_bytes());
    for stats in [a.device.stats(), b.device.stats()] {
        assert_eq!(stats.icrc_errors(), 0);
        assert_eq!(stats.port.drop_peer_address, 0);
    }
}

/// Set where a program runs again, inside of a namespace.
const INSIDE: &str = "FERROCE_TEST_INSIDE_NAMESPACE";

/// Runs the test `name` of this program again in a network namespace of its own, whose loopback interface is up, and
/// returns true if that went well. False: this is inside already, or no namespace can be made here.
pub fn ran_in_namespace(name: &str) -> bool {
    let unshare = |args: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--net"]).args(args);
        command
    };
    let possible = unshare(&["ip", "link", "set", "lo", "up"]).output();
    if is_inside() || !possible.is_ok_and(|o| o.status.success()) {
        return false;
    }
    let script = "ip link set lo up && exec \"$0\" --include-ignored --exact \"$1\" --nocapture";
    let again = unshare(&["sh", "-c", script])
        .arg(std::env::current_exe().unwrap())
        .arg(name)
        .env(INSIDE, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&again.stdout);
    let errors = String::from_utf8_lossy(&again.stderr);
    assert!(again.status.success(), "{text}{errors}");
    assert!(text.contains("1 passed"), "{text}");
    true
}

/// Returns whether this is inside a network namespace of the test `name`; else it has run there.
///
/// # Panics
/// When no namespace can be made, or the test failed in it.
#[allow(dead_code, reason = "not every program of tests has such a test")]
pub fn is_in_namespace_of(name: &str) -> bool {
    let ran = ran_in_namespace(name);
    assert!(ran || is_inside(), "no right to make a network namespace");
    !ran
}

/// Whether this is a namespace of the test's own.
pub fn is_inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}
