//! Hosts: ports with their memory, and the sockets' buffers.

use std::{collections::VecDeque, sync::Arc};

use roce_port::cm::{CmConfig, RateLimit};
use roce_port::{ListenArgs, Port, PortConfig, PortSpace, QpInit, RxMeta, TxBatch};
use roce_qp::CompletionQueue;
use roce_verbs::mem::{MemoryTable, PdHandle};
use roce_verbs::{Instant, QpCaps, QpType, Qpn};

use crate::{net::Frame, rng::Rng, scenario::HostPlan};

/// Number in the TCP port space that hosts listen on.
pub const LISTEN_PORT: u16 = 7471;
/// Completion queues of a host.
pub(crate) const CQS: usize = 3;

/// One host.
pub(crate) struct Host {
    pub(crate) plan: HostPlan,
    /// The connection manager's settings.
    pub(crate) cm: CmConfig,
    pub(crate) port: Port,
    pub(crate) mem: Arc<MemoryTable>,
    pub(crate) pd: PdHandle,
    pub(crate) cqs: Vec<Arc<CompletionQueue>>,
    /// Counts restarts.
    pub(crate) boot: u32,
    pub(crate) alive: bool,
    /// None while it is being filled.
    pub(crate) batch: Option<TxBatch>,
    pub(crate) rx: VecDeque<Frame>,
    pub(crate) rx_bytes: usize,
    pub(crate) run_scheduled: bool,
    pub(crate) wake_at: Option<u64>,
    pub(crate) next_identification: u16,
    /// It answers questions for queue pairs, too.
    takes_questions: bool,
}

/// The GUID of a host's adapter in one of its lives.
pub(crate) fn guid_of(host: usize, boot: u32, keeps: bool) -> u64 {
    let guid = 0x0200_0000_0000_0000 | (host as u64) << 24 | u64::from(boot);
    if keeps {
        roce_port::cm::guid::keeping(guid)
    } else {
        guid
    }
}

/// Limits that an adversary reaches soon.
fn narrow(cm: &mut CmConfig) {
    cm.max_half_open = 24;
    cm.max_half_open_per_peer = 12;
    cm.max_lingering = 32;
    cm.max_rated_peers = 16;
    cm.mad_rate = RateLimit {
        per_second: 1000,
        burst: 200,
    };
}

impl Host {
    /// Boots a host for the `boot`th time, without any memory of the past.
    pub(crate) fn new(plan: HostPlan, index: usize, boot: u32, rng: &mut Rng) -> Self {
        let mut config = PortConfig::new(vec![plan.addr], plan.mtu, guid_of(index, boot, plan.keeps));
        config.window = plan.window;
        config.turn_packets = plan.turn_packets;
        // Of those that don't tell some keep packets all the same.
        config.reorder = plan.keeps || index % 2 == 1;
        if plan.tight {
            narrow(&mut config.cm);
        }
        let mem = Arc::new(MemoryTable::new(rng.seed(), &config.limits));
        let cm = config.cm.clone();
        let mut port = Port::new(config, mem.clone(), rng.seed());
        // Of a tight host, less than a peer's half-open connections.
        let backlog = if plan.tight { 6 } else { 64 };
        let args = ListenArgs::new(None, LISTEN_PORT, backlog);
        port.cm_listen(&args).expect("a listener");
        Self {
            cm,
            batch: Some(TxBatch::new(plan.tx.clone())),
            port,
            pd: mem.alloc_pd().expect("a protection domain"),
            mem,
            cqs: (0..CQS as u32).map(|i| CompletionQueue::new(i, 8192, None)).collect(),
            boot,
            alive: true,
            rx: VecDeque::new(),
            rx_bytes: 0,
            run_scheduled: false,
            wake_at: None,
            next_identification: 0,
            takes_questions: false,
            plan,
        }
    }

    /// Gives a frame to the port, with what the socket tells of it.
    pub(crate) fn take(&mut self, now: Instant, frame: &Frame) {
        let meta = RxMeta {
            local: frame.dst,
            remote: frame.src,
            identification: self.plan.sees_headers.then_some(frame.identification),
            segment_len: frame.segment_len,
            tos: frame.tos,
            hop_limit: 0,
        };
        self.port.handle_datagram(now, &meta, &frame.bytes);
    }

    /// Listens for questions for queue pairs (SIDR).
    pub(crate) fn take_questions(&mut self) {
        self.takes_questions = true;
        let args = ListenArgs {
            space: PortSpace::Udp,
            ..ListenArgs::new(None, LISTEN_PORT, 64)
        };
        self.port.cm_listen(&args).expect("a listener");
    }

    /// Boots it again. Its network stack counts Identifications on.
    pub(crate) fn restart(&mut self, index: usize, rng: &mut Rng) {
        let (next_identification, takes_questions) = (self.next_identification, self.takes_questions);
        *self = Self::new(self.plan.clone(), index, self.boot + 1, rng);
        self.next_identification = next_identification;
        if takes_questions {
            self.take_questions();
        }
    }

    /// Creates a queue pair of a reliable connection.
    pub(crate) fn create_qp(&mut self, pd: PdHandle, cq: usize, caps: QpCaps, signal_all: bool) -> Result<Qpn, String> {
        let cq = self.cqs[cq].clone();
        let qpn = self.port.create_qp(QpInit {
            pd,
            qp_type: QpType::Rc,
            send_cq: cq.clone(),
            recv_cq: cq,
            caps,
            signal_all,
            srq: None,
            xrcd: None,
        });
        qpn.map_err(|e| format!("no queue pair: {e}"))
    }
}
