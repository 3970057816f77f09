//! A loop of a test's own.

use std::{
    net::{IpAddr, SocketAddr},
    os::fd::AsRawFd,
    sync::Arc,
    time::{Duration, Instant},
};

use mio::{Events, Interest, Poll, Token, unix::SourceFd};
use roce::{
    Completion, ConnParams, DeviceConfig, Flush, LocalDevice, Pages, Payload, QpCaps, SendFlags, SendOp, SendWr, Sge,
    WcStatus,
    verbs::provider::{CmKind, CmRef, CqId, DeviceIx, Event, MrInfo, PdId, QpId, QpSpec, Registration},
};

use super::{ALL, TIMEOUT, address};

pub const SERVICE: u16 = 7000;
pub const LEN: usize = 4 << 20;

/// A loop with one device, and what most tests need on it.
pub struct Loop {
    pub device: LocalDevice,
    pub addr: IpAddr,
    pub poll: Poll,
    pub pages: Arc<Pages>,
    pub pd: PdId,
    pub cq: CqId,
    pub mr: MrInfo,
    pub completions: Vec<(QpId, Completion)>,
    pub events: Vec<Event>,
}

impl Loop {
    pub fn new() -> Self {
        Self::at(address())
    }

    pub fn at(addr: IpAddr) -> Self {
        let device = LocalDevice::open(&[DeviceConfig::new(addr)]).unwrap();
        Self::of(device, addr)
    }

    pub fn of(mut device: LocalDevice, addr: IpAddr) -> Self {
        let poll = Poll::new().unwrap();
        for (i, fd) in device.descriptors().iter().enumerate() {
            let fd = fd.as_raw_fd();
            let registry = poll.registry();
            registry
                .register(&mut SourceFd(&fd), Token(i), Interest::READABLE)
                .unwrap();
        }
        let pages = Pages::allocate(LEN).unwrap();
        let provider = device.provider();
        let pd = provider.alloc_pd(DeviceIx(0)).unwrap();
        let cq = provider.create_cq(DeviceIx(0), 1000).unwrap();
        let whole = Registration {
            memory: pages.clone(),
            offset: 0,
            len: LEN,
            iova: None,
            access: ALL,
        };
        let mr = provider.register(pd, &whole).unwrap();
        Self {
            device,
            addr,
            poll,
            pages,
            pd,
            cq,
            mr,
            completions: Vec::new(),
            events: Vec::new(),
        }
    }

    pub fn qp(&mut self) -> QpId {
        let spec = QpSpec {
            pd: self.pd,
            cq: self.cq,
            caps: QpCaps::default(),
            signal_all: false,
        };
        self.device.provider().create_qp(&spec).unwrap()
    }

    /// One turn, which waits for a moment if there is nothing to do.
    pub fn turn(&mut self) {
        if !self.step() {
            let wait = self.device.next_timeout(roce::now()).unwrap_or(TIMEOUT);
            let wait = wait.clamp(Duration::from_millis(1), Duration::from_millis(5));
            self.poll.poll(&mut Events::with_capacity(8), Some(wait)).unwrap();
        }
    }

    /// One turn; whether there is more to do.
    pub fn step(&mut self) -> bool {
        let more = self.device.receive(roce::now(), 128);
        self.device.run_timers(roce::now(), more);
        let provider = self.device.provider();
        let polled = provider.poll_completions(&mut self.completions, 1000).unwrap();
        while let Some(event) = provider.poll_event() {
            self.events.push(event);
        }
        let flushed = self.device.flush(roce::now());
        more || polled > 0 || flushed != Flush::Done
    }

    pub fn until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        let end = Instant::now() + TIMEOUT;
        while !done(self) {
            assert!(Instant::now() < end, "{what}: {:?}", self.events);
            self.turn();
        }
    }

    /// Begins a connection.
    pub fn connect(&mut self, to: SocketAddr) -> (CmRef, QpId) {
        self.connect_with(to, &ConnParams::default())
    }

    pub fn connect_with(&mut self, to: SocketAddr, params: &ConnParams) -> (CmRef, QpId) {
        let id = self.device.provider().cm_resolve(Some(self.addr), to).unwrap();
        let qp = self.qp();
        self.until("resolved", |l| {
            l.events
                .iter()
                .any(|e| matches!(e, Event::Cm { id: of, kind: CmKind::Resolved { .. } } if *of == id))
        });
        let done = self.device.provider().cm_connect(id, qp, params);
        done.unwrap();
        (id, qp)
    }

    pub fn is_up(&self, id: CmRef) -> bool {
        let up = |e: &Event| matches!(e, Event::Cm { id: of, kind: CmKind::Established { .. } } if *of == id);
        self.events.iter().any(up)
    }

    pub fn is_over(&self, id: CmRef) -> bool {
        let over = |e: &Event| matches!(e, Event::Cm { id: of, kind: CmKind::Disconnected } if *of == id);
        self.events.iter().any(over)
    }

    pub fn send(&mut self, qp: QpId, op: SendOp, len: usize) {
        let sges = [Sge {
            addr: self.mr.addr,
            length: len as u32,
            lkey: self.mr.lkey,
        }];
        let wr = SendWr {
            wr_id: 5,
            op,
            flags: SendFlags::SIGNALED,
            payload: Payload::Sges(&sges),
        };
        self.device.provider().post_send(qp, &[wr]).unwrap();
    }

    pub fn done(&self) -> usize {
        let good = |(_, wc): &&(QpId, Completion)| wc.status == WcStatus::Success;
        self.completions.iter().filter(good).count()
    }
}
