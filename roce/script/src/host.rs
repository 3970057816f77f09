//! Host under test: the other end of a script's connection.

use core::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use roce_bth::Qpn;
use roce_qp::{Counters, Failure};
use roce_verbs::{QpState, WcStatus};

use crate::{memory::Memory, script::Post, value::Place};

/// Packet on the wire.
#[derive(Clone, Debug)]
pub struct Datagram {
    /// Time since the start of the script.
    pub at: Duration,
    /// Sender.
    pub src: SocketAddr,
    /// Receiver.
    pub dst: SocketAddr,
    /// IPv4 Identification.
    pub identification: u16,
    /// UDP payload.
    pub bytes: Vec<u8>,
}

/// Completion of the host.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Completed {
    pub(crate) wr_id: u64,
    pub(crate) status: WcStatus,
    pub(crate) byte_len: u32,
    pub(crate) imm: Option<u32>,
}

/// Reason why a step does not succeed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Stop {
    /// The host does something else.
    Mismatch(String),
    /// The step, and so the script, can't be played on this host.
    NotRun(String),
}

impl From<String> for Stop {
    fn from(text: String) -> Self {
        Self::Mismatch(text)
    }
}

/// Host under test. Times count from the start of the script.
pub(crate) trait Host {
    /// Starts again as the `qp` lines say, with another queue pair.
    fn restart(&mut self) -> Result<(), Stop>;
    /// Returns its regions.
    fn memory(&self) -> &Memory;
    /// Returns its queue pair.
    fn qpn(&self) -> Qpn;
    /// Returns the script's queue pair.
    fn script_qpn(&self) -> Qpn;
    /// Returns the address on its network of one that a script names.
    fn address(&self, named: IpAddr) -> Result<IpAddr, Stop>;
    /// Returns whether the addresses that stand for it and for the script are of IPv6.
    fn is_v6(&self) -> bool;
    /// Returns the time.
    fn elapsed(&self) -> Duration;
    /// Returns the time that it may be later than a script says.
    fn lateness(&self) -> Duration;
    /// Returns the time that packets are under way. `None`: none at all, so that nothing is repeated while a step is taken.
    fn transit(&self) -> Option<Duration>;
    /// Lets time go by until what was sent has had its effect.
    fn settle(&mut self) -> Result<(), Stop>;
    /// Takes a packet of the script.
    fn receive(&mut self, datagram: &Datagram) -> Result<(), Stop>;
    /// Lets time go by.
    fn wait(&mut self, end: Duration) -> Result<(), Stop>;
    /// Waits for the oldest packet that the script has not seen.
    fn wait_sent(&mut self, end: Duration) -> Result<Option<Datagram>, Stop>;
    /// Waits for the next completion of a queue.
    fn wait_completion(&mut self, is_recv: bool, end: Duration) -> Result<Option<Completed>, Stop>;
    /// Waits for the next asynchronous event: its number in `ibv_event_type`.
    fn wait_event(&mut self, end: Duration) -> Result<Option<u32>, Stop>;
    /// Returns its queue pair's state. `None`: the queue pair is gone.
    fn state(&mut self) -> Result<Option<QpState>, Stop>;
    /// Returns what it counted since it started, and why its queue pair failed, if it tells.
    fn counts(&mut self) -> (Counters, Option<Failure>) {
        (Counters::default(), None)
    }
    /// Changes its queue pair's state.
    fn modify(&mut self, to: QpState) -> Result<(), Stop>;
    /// Deregisters a region.
    fn revoke(&mut self, index: usize) -> Result<(), Stop>;
    /// Posts a work request.
    fn post(&mut self, post: &Post) -> Result<(), Stop>;
    /// Reads bytes of a region.
    fn read(&mut self, place: Place, len: usize) -> Result<Vec<u8>, Stop>;
    /// Reads the first bytes of a receive's memory. `None`: it has fewer.
    fn received(&mut self, wr_id: u64, len: usize) -> Result<Option<Vec<u8>>, Stop>;
}

/// Returns the addresses that stand for the host and for the script.
pub(crate) fn addresses(is_v6: bool) -> [IpAddr; 2] {
    let v6 = |last| IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last));
    match is_v6 {
        true => [v6(1), v6(2)],
        false => [
            IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
            IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2)),
        ],
    }
}

/// Work requests of the host, by queue: sends and receives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NextIds([u64; 2]);

impl NextIds {
    pub(crate) const fn new() -> Self {
        Self([1; 2])
    }

    /// Returns the wr_id of a work request, the next one if it has no other.
    pub(crate) fn draw(&mut self, id: Option<u64>, is_recv: bool) -> u64 {
        let next = &mut self.0[usize::from(is_recv)];
        let id = id.unwrap_or(*next);
        *next = id.wrapping_add(1);
        id
    }
}
