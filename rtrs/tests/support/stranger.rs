//! A peer on the wire, without a device: it sends what it likes, from whatever address, and answers only when told to.

use std::{
    io::ErrorKind,
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::Arc,
    time::{Duration, Instant},
};

use roce::{AccessFlags, ConnParams, Payload, QpCaps, Qpn, RecvWr, SendFlags, SendOp, SendWr, Sge};
use roce_port::{CmEventKind, ConnId, Port, PortConfig, QpInit, RxMeta, TxBatch, TxConfig};
use roce_qp::CompletionQueue;
use roce_verbs::mem::{MemoryTable, PdHandle, Region};
use roce_verbs::{Mtu, QpType};

use super::PATIENCE;

/// Attribute of a connection request (IBA table 104).
pub(crate) const REQ: u16 = 0x10;

/// Which management datagram a packet carries, behind BTH and DETH.
pub(crate) fn attribute_of(packet: &[u8]) -> Option<u16> {
    Some(u16::from_be_bytes(packet.get(36..38)?.try_into().ok()?))
}

/// A port that is moved by hand.
pub(crate) struct Stranger {
    socket: UdpSocket,
    local: SocketAddr,
    pub(crate) port: Port,
    mem: Arc<MemoryTable>,
    pd: PdHandle,
    cq: Arc<CompletionQueue>,
    batch: TxBatch,
    started: Instant,
    listens: bool,
    /// What the port wants to send and nobody has released yet.
    pub(crate) kept: Vec<(SocketAddr, Vec<u8>)>,
}

impl Stranger {
    /// One that can get answers: RoCE's port of the address is its own.
    pub(crate) fn new(addr: IpAddr) -> Self {
        Self::at(SocketAddr::new(addr, roce_bth::ROCE_UDP_PORT))
    }

    /// One that only sends, perhaps in another's name.
    pub(crate) fn forger(addr: IpAddr) -> Self {
        Self::at(SocketAddr::new(addr, 0))
    }

    fn at(addr: SocketAddr) -> Self {
        let socket = UdpSocket::bind(addr).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
        let local = socket.local_addr().unwrap();
        let seed: [u8; 32] = rand::random();
        let mut config = PortConfig::new(vec![local.ip()], Mtu::B1024, rand::random());
        config.src_ports = vec![local.port()];
        let mem = Arc::new(MemoryTable::new(seed, &config.limits));
        Self {
            socket,
            local,
            pd: mem.alloc_pd().unwrap(),
            port: Port::new(config, mem.clone(), seed),
            mem,
            cq: CompletionQueue::new(0, 1000, None),
            batch: TxBatch::new(TxConfig {
                gso: false,
                capacity: 0,
                ..TxConfig::default()
            }),
            started: Instant::now(),
            listens: addr.port() != 0,
            kept: Vec::new(),
        }
    }

    fn now(&self) -> roce_verbs::Instant {
        roce_verbs::Instant::ZERO + self.started.elapsed()
    }

    /// Wants to connect; nothing has been sent yet.
    pub(crate) fn connect(&mut self, dst: SocketAddr, private_data: Vec<u8>) -> (ConnId, Qpn) {
        let init = QpInit {
            pd: self.pd,
            qp_type: QpType::Rc,
            send_cq: self.cq.clone(),
            recv_cq: self.cq.clone(),
            caps: QpCaps::default(),
            signal_all: true,
            srq: None,
            xrcd: None,
        };
        let qpn = self.port.create_qp(init).unwrap();
        let params = ConnParams {
            private_data,
            ..ConnParams::default()
        };
        let local = SocketAddr::new(self.local.ip(), 0);
        let conn = self.port.connect_qp(self.now(), local, dst, qpn, params).unwrap();
        (conn, qpn)
    }

    /// Lets the port work and keeps back what it sends.
    pub(crate) fn work(&mut self) {
        let now = self.now();
        self.port.handle_timeout(now);
        let mut bytes = [0; 8192];
        while self.listens {
            match self.socket.recv_from(&mut bytes) {
                Ok((len, from)) => {
                    let meta = RxMeta {
                        segment_len: len,
                        ..RxMeta::new(self.local.ip(), from)
                    };
                    self.port.handle_datagram(now, &meta, &bytes[..len]);
                }
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => break,
                // Nobody is there.
                Err(_) => {}
            }
        }
        loop {
            let more = self.port.poll_transmit(now, &mut self.batch);
            for train in self.batch.trains() {
                self.kept.extend(train.packets().map(|p| (train.remote, p.to_vec())));
            }
            self.batch.clear();
            if !more {
                break;
            }
        }
    }

    /// Sends what was kept back.
    pub(crate) fn release(&mut self) {
        for (to, bytes) in self.kept.drain(..) {
            self.socket.send_to(&bytes, to).unwrap();
        }
    }

    /// Sends what was kept back of one kind of management datagram (its attribute), and forgets the rest.
    pub(crate) fn release_only(&mut self, attribute: u16) {
        self.kept.retain(|(_, bytes)| attribute_of(bytes) == Some(attribute));
        self.release();
    }

    /// Works, and sends all it has to, until this happens.
    pub(crate) fn until<T>(&mut self, what: &str, mut found: impl FnMut(&mut Self) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.work();
            self.release();
            if let Some(found) = found(self) {
                return found;
            }
            assert!(Instant::now() < deadline, "{what}: did not come");
        }
    }

    pub(crate) fn event(&mut self) -> Option<CmEventKind> {
        let now = self.now();
        self.port.poll_cm_event(now)
    }

    pub(crate) fn region(&self, len: usize) -> Arc<Region> {
        self.mem.alloc_region(self.pd, len, AccessFlags::LOCAL_WRITE).unwrap()
    }

    /// Posts a SEND of these bytes.
    pub(crate) fn send(&mut self, qpn: Qpn, region: &Region, bytes: &[u8]) {
        region.write(0, bytes).unwrap();
        let sges = [Sge {
            addr: region.addr(),
            length: bytes.len() as u32,
            lkey: region.lkey(),
        }];
        let wr = SendWr {
            wr_id: 1,
            op: SendOp::Send,
            flags: SendFlags::SIGNALED,
            payload: Payload::Sges(&sges),
        };
        self.port.post_send(self.now(), qpn, &[wr]).unwrap();
    }

    /// Posts a receive into the region.
    pub(crate) fn receive(&mut self, qpn: Qpn, region: &Region) {
        let sges = [Sge {
            addr: region.addr(),
            length: region.len() as u32,
            lkey: region.lkey(),
        }];
        let wr = RecvWr { wr_id: 2, sges: &sges };
        self.port.post_recv(self.now(), qpn, &[wr]).unwrap();
    }
}
