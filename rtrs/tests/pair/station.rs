//! A host that is moved by hand, at one address.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use roce_verbs::mem::Pages;
use roce_verbs::{
    AccessFlags, Completion, Instant, Payload, QpCaps, RecvWr, SendFlags, SendOp, SendWr, Sge, WcOpcode,
    provider::{
        CmKind, CmRef, ConnParams, CqId, DeviceIx, Event, GrantOf, KeyKind, MrInfo, PdId, Provider, QpId, QpSpec,
        Registration,
    },
};
use rtrs::proto::SgDesc;

use crate::host::{Host, KeyMode};

/// Receives of the service connection, and of others; and their bytes.
const SERVICE: (usize, usize) = (128, 16 << 10);
const IO: (usize, usize) = (2048, 64);
/// Longest message of a connection, in bytes.
const SEND_BYTES: usize = 16 << 10;
/// Bytes that peers may write to.
const DATA: usize = 64 << 10;
/// Marks of receives begin here.
const RECV: u64 = 1 << 32;

/// Memory that is registered.
pub(crate) struct Registered {
    pages: Arc<Pages>,
    pub(crate) mr: MrInfo,
}

impl Registered {
    fn sge(&self, at: usize, len: usize) -> Sge {
        Sge {
            addr: self.mr.addr + at as u64,
            length: len as u32,
            lkey: self.mr.lkey,
        }
    }
}

/// A connection's memory: what it sends, then what it receives.
struct Conn {
    memory: Registered,
    recv_bytes: usize,
}

/// A connection of a client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Con {
    pub(crate) cm: CmRef,
    pub(crate) qp: QpId,
}

/// Host with connections by hand.
pub(crate) struct Station {
    pub(crate) host: Host,
    pd: PdId,
    cq: CqId,
    /// Memory that peers write to: reads go here.
    pub(crate) data: Registered,
    conns: BTreeMap<QpId, Conn>,
    pub(crate) events: Vec<(CmRef, CmKind)>,
    /// Connections that are over.
    pub(crate) ended: BTreeSet<CmRef>,
    wcs: Vec<(QpId, Completion)>,
}

fn register(host: &mut Host, pd: PdId, len: usize) -> Registered {
    let pages = Pages::allocate(len).unwrap();
    let what = Registration {
        memory: pages.clone(),
        offset: 0,
        len,
        iova: None,
        access: AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE,
    };
    let mr = host.fabric.register(pd, &what).unwrap();
    Registered { pages, mr }
}

impl Station {
    pub(crate) fn new(addr: IpAddr) -> Self {
        let IpAddr::V4(v4) = addr else { unreachable!() };
        let mut host = Host::new(KeyMode::Instant, &[vec![addr]], v4.to_bits().into());
        let pd = host.fabric.alloc_pd(DeviceIx(0)).unwrap();
        Self {
            data: register(&mut host, pd, DATA),
            pd,
            cq: host.fabric.create_cq(DeviceIx(0), 8000).unwrap(),
            host,
            conns: BTreeMap::new(),
            events: Vec::new(),
            ended: BTreeSet::new(),
            wcs: Vec::new(),
        }
    }

    /// Takes what its device reports. Returns whether there was something.
    pub(crate) fn poll(&mut self, now: Instant) -> bool {
        self.host.fabric.set_now(now);
        let before = self.wcs.len();
        self.host.fabric.poll_completions(&mut self.wcs, usize::MAX).unwrap();
        let mut moved = self.wcs.len() > before;
        while let Some(event) = self.host.fabric.poll_event() {
            moved = true;
            let Event::Cm { id, kind } = event else { continue };
            if matches!(
                kind,
                CmKind::Rejected { .. } | CmKind::Unreachable(_) | CmKind::ConnectError(_) | CmKind::Disconnected
            ) {
                self.ended.insert(id);
            }
            self.events.push((id, kind));
        }
        moved
    }

    /// A queue pair for a connection of this number, with its receives.
    fn qp(&mut self, cid: u16) -> QpId {
        let (count, recv_bytes) = if cid == 0 { SERVICE } else { IO };
        let spec = QpSpec {
            pd: self.pd,
            cq: self.cq,
            caps: QpCaps {
                max_recv_wr: count as u32,
                ..QpCaps::default()
            },
            signal_all: true,
        };
        let memory = register(&mut self.host, self.pd, SEND_BYTES + count * recv_bytes);
        let qp = self.host.fabric.create_qp(&spec).unwrap();
        self.conns.insert(qp, Conn { memory, recv_bytes });
        (0..count).for_each(|i| self.post_recv(qp, i));
        qp
    }

    pub(crate) fn connect(&mut self, cid: u16, to: SocketAddr, private_data: Vec<u8>) -> Con {
        let qp = self.qp(cid);
        let from = *self.host.fabric.devices()[0].addrs.first().expect("an address");
        let cm = self.host.fabric.cm_resolve(Some(from), to).unwrap();
        let params = ConnParams {
            private_data,
            ..ConnParams::default()
        };
        self.host.fabric.cm_connect(cm, qp, &params).unwrap();
        Con { cm, qp }
    }

    pub(crate) fn accept(&mut self, cid: u16, cm: CmRef, private_data: Vec<u8>) -> Con {
        let qp = self.qp(cid);
        let params = ConnParams {
            private_data,
            ..ConnParams::default()
        };
        self.host.fabric.cm_accept(cm, qp, &params).unwrap();
        Con { cm, qp }
    }

    fn post_recv(&mut self, qp: QpId, i: usize) {
        let conn = &self.conns[&qp];
        let sges = [conn.memory.sge(SEND_BYTES + i * conn.recv_bytes, conn.recv_bytes)];
        let wr_id = RECV + i as u64;
        // A connection that is over takes none.
        let _ = self.host.fabric.post_recv(qp, &[RecvWr { wr_id, sges: &sges }]);
    }

    /// Posts a send; false if the queue pair does not take it.
    pub(crate) fn send(&mut self, qp: QpId, op: SendOp, bytes: &[u8]) -> bool {
        let memory = &self.conns[&qp].memory;
        memory.pages.write(0, bytes).unwrap();
        let sges = [memory.sge(0, bytes.len())];
        let wr = SendWr {
            wr_id: 1,
            op,
            flags: SendFlags::SIGNALED,
            payload: Payload::Sges(if bytes.is_empty() { &[] } else { &sges }),
        };
        self.wcs.retain(|(of, wc)| *of != qp || wc.wr_id != 1);
        self.host.fabric.post_send(qp, &[wr]).is_ok()
    }

    /// Whether the last send has arrived.
    pub(crate) fn is_sent(&self, qp: QpId) -> bool {
        self.wcs.iter().any(|(of, wc)| *of == qp && wc.wr_id == 1 && wc.is_ok())
    }

    /// Takes the messages that a connection has received.
    pub(crate) fn messages(&mut self, qp: QpId) -> Vec<(Completion, Vec<u8>)> {
        let mine = |of: &QpId, wc: &Completion| *of == qp && wc.wr_id >= RECV && wc.is_ok();
        let mine: Vec<_> = self.wcs.extract_if(.., |(of, wc)| mine(of, wc)).collect();
        let mut messages = Vec::new();
        for (_, wc) in mine {
            let (i, conn) = ((wc.wr_id - RECV) as usize, &self.conns[&qp]);
            let len = if wc.opcode == WcOpcode::Recv {
                wc.byte_len as usize
            } else {
                0
            };
            let mut bytes = vec![0; len];
            let at = SEND_BYTES + i * conn.recv_bytes;
            conn.memory.pages.read(at, &mut bytes).unwrap();
            messages.push((wc, bytes));
            self.post_recv(qp, i);
        }
        messages
    }

    /// The place that reads of so many bytes go to, with a key of its own, or with one that stays.
    pub(crate) fn destination(&mut self, qp: QpId, len: u32, own_key: bool) -> SgDesc {
        let mr = self.data.mr;
        if !own_key {
            return SgDesc::new(mr.addr, mr.rkey.0, len);
        }
        let grant = GrantOf {
            mr: mr.id,
            offset: 0,
            len: len as usize,
            iova: None,
            access: AccessFlags::REMOTE_WRITE,
        };
        let fabric = &mut self.host.fabric;
        let key = fabric.alloc_key(self.pd, KeyKind::FastRegistration).unwrap();
        let granted = fabric.grant(qp, key, &grant, 2).unwrap();
        SgDesc::new(mr.addr, granted.rkey().0, len)
    }

    /// Data that peers have written there.
    pub(crate) fn data(&self, at: usize, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.data.pages.read(at, &mut data).unwrap();
        data
    }
}
