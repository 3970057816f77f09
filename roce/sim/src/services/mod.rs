//! Traffic of the other services beside the connections of the model: unreliable connections, datagrams, reliable and
//! extended connections into shared receive queues. Each flow goes one way and numbers its messages in their immediate
//! data, so that a receiver knows what must be in them.

mod setup;
mod traffic;

use std::{collections::HashMap, sync::Arc};

use roce_qp::{CompletionQueue, GRH_LEN, SharedReceiveQueue, XrcDomain};
use roce_verbs::mem::Region;
use roce_verbs::{Completion, QKey, QpCaps, QpType, Qpn, Sge, WcFlags, WcOpcode};

use crate::{rng::Rng, runner::Check};

/// Bytes of one receive buffer, network header included, and of one message's place in a target.
const SLOT: usize = 8 << 10;

/// Receive buffers in a host's shared queues.
const SHARED: usize = 24;

/// The shared receive queues of a host: a basic one, and two for extended connections.
const QUEUES: usize = 3;

const QKEY: QKey = QKey(0x1234_5678);

/// Marks receives among work request ids.
const RECV: u64 = 1 << 63;

/// Kind of message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum What {
    Send,
    /// RDMA WRITE with immediate data, into a place of its own.
    Write,
    /// Datagram with a queue key that is not the receiver's.
    WrongKey,
    /// Datagram longer than the sender's MTU, which is never sent.
    TooLong,
}

#[derive(Clone, Debug)]
struct Message {
    what: What,
    len: usize,
    /// Which of the receiver's queues (XRC).
    queue: usize,
}

/// Messages from one host to another.
struct Flow {
    qp_type: QpType,
    from: usize,
    to: usize,
    /// Queue pairs of sender and receiver.
    qpns: [Qpn; 2],
    /// Its receives come from the host's shared queue.
    shared: bool,
    messages: Vec<Message>,
    source: Arc<Region>,
    /// Target of WRITEs: a place per message.
    target: Arc<Region>,
    /// Buffers of its own receives: a place per message.
    buffers: Arc<Region>,
    posted: usize,
    completed: usize,
    arrived: Vec<usize>,
    /// One of its hosts has died.
    dead: bool,
}

impl Flow {
    fn is_reliable(&self) -> bool {
        matches!(self.qp_type, QpType::Rc | QpType::XrcIni)
    }

    /// Returns the number of messages that can arrive.
    fn expected(&self) -> usize {
        let can = |m: &&Message| matches!(m.what, What::Send | What::Write);
        self.messages.iter().filter(can).count()
    }

    fn is_done(&self) -> bool {
        let all = self.messages.len();
        self.dead || (self.completed == all && (!self.is_reliable() || self.arrived.len() == all))
    }
}

/// State shared by the flows to a host.
struct Shared {
    cq: Arc<CompletionQueue>,
    queues: Vec<Arc<SharedReceiveQueue>>,
    domain: Arc<XrcDomain>,
    buffers: Arc<Region>,
    free: Vec<usize>,
    /// Receives in the shared queues or taken from them: work request ids with their buffers.
    outstanding: HashMap<u64, usize>,
    next: u64,
    /// The limit of each queue is armed.
    armed: [bool; QUEUES],
    /// Receives that went with their queue pairs.
    lost: usize,
    scheduled: bool,
}

/// All of it.
pub(crate) struct Services {
    rng: Rng,
    flows: Vec<Flow>,
    hosts: Vec<Shared>,
}

/// The bytes of a message: nobody else's.
fn content(flow: usize, seq: usize, len: usize) -> Vec<u8> {
    Rng::new((flow as u64) << 32 | seq as u64, 9).bytes(len)
}

fn pieces(region: &Region, at: usize, len: usize) -> Sge {
    Sge {
        addr: region.addr() + at as u64,
        length: len as u32,
        lkey: region.lkey(),
    }
}

/// Work requests of a service's queue pairs.
fn caps() -> QpCaps {
    QpCaps {
        max_send_wr: 16,
        max_recv_wr: 64,
        ..QpCaps::default()
    }
}

impl Services {
    /// Returns a summary of the state, for reports.
    pub(crate) fn situation(&self) -> String {
        let mut out = String::new();
        for (h, s) in self.hosts.iter().enumerate() {
            let waiting: Vec<_> = s.queues.iter().map(|q| q.len()).collect();
            out += &format!(
                "\n  host {h}: shared receives {waiting:?}, {} free, {} outstanding, {} lost, to be replenished: {}",
                s.free.len(),
                s.outstanding.len(),
                s.lost,
                s.scheduled,
            );
        }
        for (i, f) in self.flows.iter().enumerate().filter(|(_, f)| !f.is_done()) {
            out += &format!(
                "\n  flow {i} from host {} to {} ({:?}, shared: {}): {} messages, {} posted, {} completed, {} arrived",
                f.from,
                f.to,
                f.qp_type,
                f.shared,
                f.messages.len(),
                f.posted,
                f.completed,
                f.arrived.len(),
            );
        }
        out
    }
}

/// Compares a message with what must have come.
fn check_arrival(
    f: &Flow,
    flow: usize,
    seq: usize,
    m: &Message,
    wc: &Completion,
    buffers: &Region,
    slot: usize,
) -> Check {
    let (head, flags, opcode) = match (f.qp_type, m.what) {
        (_, What::WrongKey | What::TooLong) => return Err(format!("message {seq} of flow {flow} must not arrive")),
        (QpType::Ud, _) => (GRH_LEN, WcFlags::GRH | WcFlags::WITH_IMM, WcOpcode::Recv),
        (_, What::Write) => (0, WcFlags::WITH_IMM, WcOpcode::RecvRdmaWithImm),
        _ => (0, WcFlags::WITH_IMM, WcOpcode::Recv),
    };
    let right = wc.byte_len as usize == head + m.len && wc.flags == flags && wc.opcode == opcode;
    if !right || (f.qp_type == QpType::Ud && wc.src_qp != f.qpns[0]) {
        return Err(format!("message {seq} of flow {flow} ({m:?}) arrived otherwise"));
    }
    let mut actual = vec![0; m.len];
    let read = match m.what {
        What::Write => f.target.read(seq * SLOT, &mut actual),
        _ => buffers.read(slot * SLOT + head, &mut actual),
    };
    read.map_err(|e| e.to_string())?;
    match actual == content(flow, seq, m.len) {
        true => Ok(()),
        false => Err(format!("message {seq} of flow {flow} has wrong bytes")),
    }
}
