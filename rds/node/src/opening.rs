//! Addresses that other threads open, and commands of other threads.

use std::{collections::BTreeMap, io, net::IpAddr, sync::mpsc::Sender, thread};

use rds::{PairKey, PairState};
use roce::{
    NewDevice,
    reactor::{JobTicket, TurnCx},
};
use roce_net::iface;
use roce_verbs::provider::VerbsError;

use crate::{
    config::{Config, Limits},
    state::StateFile,
    stats::NodeStats,
};

/// Command of another thread.
#[derive(Debug)]
pub(crate) enum Command {
    /// Open an address.
    Open(IpAddr),
    /// Set the limits of programs. What they have already stays.
    SetLimits(Limits),
    /// Send the present numbers.
    Stats(Sender<NodeStats>),
    /// End the connections, then the loop.
    Stop,
}

/// Address that a thread has opened.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) addr: IpAddr,
    /// `None`: it was open, or an RDMA device has it.
    pub(crate) device: Option<Result<Box<NewDevice>, VerbsError>>,
    pub(crate) state: io::Result<(StateFile, BTreeMap<PairKey, PairState>)>,
    /// Interface of an address that means nothing without.
    pub(crate) interface: Option<u32>,
}

/// Interface of a link-local address: number and name.
fn interface(addr: IpAddr) -> Option<(u32, String)> {
    match addr {
        IpAddr::V6(v6) if v6.is_unicast_link_local() => {
            Some((iface::index_of(addr).ok()?, iface::interface_of(addr).ok()?.0))
        }
        _ => None,
    }
}

/// Opens an address in another thread: it waits for the broker and for files. Devices stay open.
pub(crate) fn open(turn: &TurnCx<'_, Opened>, config: &Config, addr: IpAddr) {
    let (opener, dir) = (turn.device.opener(), config.dir.clone());
    let job = turn.jobs.begin(JobTicket(0));
    let work = move || {
        let device = (!opener.has(addr)).then(|| {
            let opened = opener.open(addr)?.pop();
            opened.map(Box::new).ok_or(VerbsError::Closed)
        });
        let link = interface(addr);
        let (index, name) = link.unzip();
        let state = StateFile::open(&dir, addr, name.as_deref());
        job.finish(Opened {
            addr,
            device,
            state,
            interface: index,
        });
    };
    if let Err(e) = thread::Builder::new().name("rds-open".into()).spawn(work) {
        // The job is over: that is reported.
        tracing::warn!("no thread to open {addr}: {e}");
    }
}
