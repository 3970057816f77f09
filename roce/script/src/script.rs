//! Scripts: settings of the host's queue pair, then steps.

use core::time::Duration;

use roce_verbs::{AccessFlags, Mtu, QpState, QpType, WcStatus};

use crate::{
    fields::Fields,
    kind::Kind,
    value::{Data, Place},
};

/// Parsed script.
#[derive(Clone, Debug)]
pub struct Script {
    pub(crate) setup: Setup,
    pub(crate) steps: Vec<Step>,
}

/// Region of the host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RegionSpec {
    pub(crate) len: usize,
    pub(crate) access: AccessFlags,
}

/// IP version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ip {
    V4,
    V6,
}

/// Settings of the host's queue pair.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) qp_type: QpType,
    /// IP version over which the script is played. `None`: either.
    pub(crate) ip: Option<Ip>,
    pub(crate) mtu: Mtu,
    /// First PSN of the host's requests.
    pub(crate) psn: u32,
    /// First PSN of the script's requests.
    pub(crate) peer_psn: u32,
    pub(crate) depth: u8,
    pub(crate) timeout: u8,
    pub(crate) retry: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) rnr_timer: u8,
    pub(crate) access: AccessFlags,
    /// UDP source port that the script's side has announced. `None`: the host learns it.
    pub(crate) source_port: Option<u16>,
    /// Packets beyond a gap are kept.
    pub(crate) reorder: bool,
    pub(crate) state: QpState,
    /// Lengths of the receive work requests that are posted in the beginning.
    pub(crate) receives: Vec<usize>,
    /// Names of regions, in the order of `regions`.
    pub(crate) names: Vec<String>,
    pub(crate) regions: Vec<RegionSpec>,
}

/// UDP source port of the script's packets.
pub(crate) const SCRIPT_PORT: u16 = 0xd00d;
/// Name of the region that every script has.
pub(crate) const LOCAL: &str = "local";

impl Default for Setup {
    fn default() -> Self {
        let remote = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_ATOMIC;
        Self {
            qp_type: QpType::Rc,
            ip: None,
            mtu: Mtu::B1024,
            psn: 0,
            peer_psn: 0,
            depth: 4,
            timeout: 14,
            retry: 7,
            rnr_retry: 7,
            rnr_timer: 12,
            access: remote,
            source_port: Some(SCRIPT_PORT),
            reorder: true,
            state: QpState::Rts,
            receives: Vec::new(),
            names: vec![LOCAL.to_owned()],
            regions: vec![RegionSpec {
                len: 64 << 10,
                access: AccessFlags::LOCAL_WRITE,
            }],
        }
    }
}

impl Setup {
    /// Returns whether the script is played over IPv6 where either will do.
    pub(crate) fn is_v6(&self) -> bool {
        self.ip == Some(Ip::V6)
    }
}

/// Line of a script that does something.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) line: usize,
    /// Text of the line, without its comment.
    pub(crate) text: String,
    pub(crate) action: Action,
}

/// Meaning of a step.
#[derive(Clone, Debug)]
pub(crate) enum Action {
    /// The script sends a packet.
    Send(PacketSpec),
    /// The host sends this packet next.
    Expect(PacketSpec),
    /// Such packets of the host are passed over from now on. `None`: none are.
    Ignore(Option<PacketSpec>),
    /// The host sends nothing for a while.
    Silence(Duration),
    /// The host starts again, as the `qp` lines say.
    Restart,
    /// Time goes by.
    After(Duration),
    /// Time goes by until so long after the start.
    At(Duration),
    /// Sets how long further steps wait.
    Timeout(Duration),
    /// The host posts a work request.
    Post(Post),
    /// The host's next completion of a queue.
    Complete(CompletionSpec),
    /// The host has no completion.
    NoCompletion,
    /// The host's next event, by its number. `None`: there is none.
    Event(Option<u32>),
    /// Bytes of the host's memory.
    Memory(Place, Data),
    /// The host deregisters a region.
    Revoke(usize),
    /// The host changes its queue pair's state.
    Modify(QpState),
    /// The state of the host's queue pair.
    State(QpState),
}

/// Packet to send or to expect.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct PacketSpec {
    pub(crate) kind: Kind,
    pub(crate) fields: Fields,
}

/// Operation of a work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PostOp {
    Recv,
    Send,
    Write,
    Read,
    CompareSwap,
    FetchAdd,
}

/// Names of operations.
pub(crate) const POSTS: [(&str, PostOp); 6] = [
    ("recv", PostOp::Recv),
    ("send", PostOp::Send),
    ("write", PostOp::Write),
    ("read", PostOp::Read),
    ("compare-swap", PostOp::CompareSwap),
    ("fetch-add", PostOp::FetchAdd),
];

/// Work request of the host.
#[derive(Clone, Debug)]
pub(crate) struct Post {
    pub(crate) op: PostOp,
    /// `None`: the next number of its queue.
    pub(crate) id: Option<u64>,
    pub(crate) len: usize,
    /// The host's memory.
    pub(crate) local: Place,
    pub(crate) va: u64,
    pub(crate) rkey: u32,
    pub(crate) imm: Option<u32>,
    pub(crate) inv: Option<u32>,
    pub(crate) swap: u64,
    pub(crate) compare: u64,
    pub(crate) add: u64,
    pub(crate) solicited: bool,
    pub(crate) fence: bool,
}

/// Completion to expect.
#[derive(Clone, Debug)]
pub(crate) struct CompletionSpec {
    pub(crate) is_recv: bool,
    pub(crate) id: Option<u64>,
    pub(crate) status: WcStatus,
    pub(crate) len: Option<u32>,
    pub(crate) imm: Option<u32>,
    pub(crate) payload: Option<Data>,
}
