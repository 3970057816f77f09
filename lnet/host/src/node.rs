//! Node with a thread of its own.

use std::{
    fmt,
    future::poll_fn,
    io,
    sync::Arc,
    task::Poll,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use lnet::{
    Buffer, Config, ConnectionInfo, Counters, Entry, Failure, Get, JobId, Node, Output, Put,
    proto::Nid,
    selftest::{Target, TargetConfig, proto::RpcCounters},
};
use roce::{DeviceConfig, Hardware, reactor::LoopStats};
use roce_host::Hosted;
use roce_verbs::{
    Instant,
    provider::{Cx, VerbsError},
};

use crate::{
    entry::Attached,
    error::Error,
    machine::{Key, LnetMachine},
    pending::{Pending, PendingPing},
};

/// Room for an answer to a ping. Kernels lose the end of longer ones.
const PING_LEN: usize = 3960;

/// Options of a node.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// NID, of a network of o2iblnd.
    pub nid: Nid,
    /// Device at the NID's address, in software.
    pub device: DeviceConfig,
    /// Settings of the protocol.
    pub config: Config,
    /// Answers the requests of lnet_selftest. `None`: there are no such services.
    pub target: Option<TargetConfig>,
}

impl NodeOptions {
    /// Returns the usual options of a NID whose address is one of this host's.
    pub fn new(nid: Nid) -> Self {
        Self {
            nid,
            device: DeviceConfig::new(nid.address().into()),
            config: Config::default(),
            target: None,
        }
    }
}

/// Numbers of a node at one moment.
#[derive(Clone, Debug, Default)]
pub struct NodeStats {
    /// Counters of the protocol.
    pub counters: Counters,
    /// Requests of lnet_selftest that this node has answered and made for tests of others; `None`: it takes no part in these.
    pub selftest: Option<RpcCounters>,
    /// Connections.
    pub connections: Vec<ConnectionInfo>,
    /// Reports that were lost because nobody has read them.
    pub events_lost: u64,
    /// The loop, with its device.
    pub turns: LoopStats,
}

/// NID of this host: the connections to all peers, operations and portals. Clones are handles of the same node, which ends with the last
/// handle, entry and operation.
///
/// A second node at an address is refused, as is one at an address that has an LNet of the kernel.
#[derive(Clone)]
pub struct LnetNode {
    hosted: Arc<Hosted<LnetMachine>>,
    nid: Nid,
}

impl fmt::Debug for LnetNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LnetNode")
            .field("nid", &self.nid)
            .finish_non_exhaustive()
    }
}

impl LnetNode {
    /// Opens a node, and waits until it listens.
    ///
    /// # Errors
    /// `InvalidInput` if the NID is not one of o2iblnd or a setting is not possible. When the address is not one of this host's, or has a node
    /// or another owner of UDP port 4791 already.
    pub fn open(options: NodeOptions) -> io::Result<Self> {
        Self::open_on(options, None)
    }

    /// Opens a node on the RDMA device that has its address; without one in software, as [`open`](Self::open) does.
    ///
    /// # Errors
    /// Those of [`open`](Self::open); when the device refuses.
    pub fn open_on(options: NodeOptions, rdma: Option<Box<dyn Hardware>>) -> io::Result<Self> {
        let nid = options.nid;
        if !nid.is_o2ib() {
            let text = format!("{nid} is not a NID of o2iblnd, as 192.0.2.1@o2ib is");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let device = options.device.clone();
        let hosted = Hosted::start("lnet-node", (device, rdma), move |cx| listen(cx, options))?;
        Ok(Self {
            hosted: Arc::new(hosted),
            nid,
        })
    }

    pub(crate) fn hosted(&self) -> &Arc<Hosted<LnetMachine>> {
        &self.hosted
    }

    /// Its NID.
    pub fn nid(&self) -> Nid {
        self.nid
    }

    /// Begins to ask a node for its interfaces.
    ///
    /// # Errors
    /// When there are too many peers, or too much waits for this one.
    pub fn ping(&self, peer: Nid) -> Result<PendingPing, Error> {
        let sink = Buffer::allocate(PING_LEN).ok_or_else(|| Failure::Local("no memory".into()))?;
        let job = self.begin(|node, now| node.ping(now, peer, sink.clone()))?;
        Ok(PendingPing::new(job, sink))
    }

    /// Begins a PUT.
    ///
    /// # Errors
    /// As [`ping`](Self::ping), and of more than 1 MiB.
    pub fn put(&self, put: &Put) -> Result<Pending, Error> {
        self.begin(|node, now| node.put(now, put))
    }

    /// Begins a GET.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub fn get(&self, get: &Get) -> Result<Pending, Error> {
        self.begin(|node, now| node.get(now, get))
    }

    fn begin(&self, begin: impl FnOnce(&mut Node, Instant) -> Result<JobId, Failure>) -> Result<Pending, Error> {
        let job = self.hosted.call(|machine| machine.begin(begin))??;
        Ok(Pending::new(self.hosted.clone(), job))
    }

    /// Lets operations of peers use memory, until what it returns is dropped.
    ///
    /// # Errors
    /// Why the node has ended.
    pub fn attach(&self, entry: Entry) -> Result<Attached, Error> {
        let id = self.hosted.call(|machine| machine.attach(entry))?;
        Ok(Attached::new(self.hosted.clone(), id))
    }

    /// Returns the connections.
    ///
    /// # Errors
    /// Why the node has ended.
    pub fn connections(&self) -> Result<Vec<ConnectionInfo>, Error> {
        Ok(self.hosted.call(|machine| machine.node.connections().collect())?)
    }

    /// Returns its numbers since its start.
    ///
    /// # Errors
    /// Why the node has ended.
    pub fn stats(&self) -> Result<NodeStats, Error> {
        let turns = self.hosted.stats()?;
        Ok(self.hosted.call(|machine| NodeStats {
            counters: machine.node.counters(),
            selftest: machine.selftest(),
            connections: machine.node.connections().collect(),
            events_lost: machine.events.lost(),
            turns,
        })?)
    }

    /// Waits for the next report about connections, pings and operations of peers, so long at most; `None`: until there is one. Never
    /// [`Output::Done`] and [`Output::Unlinked`].
    ///
    /// The last 1024 are kept; [`NodeStats::events_lost`] counts those before.
    ///
    /// # Errors
    /// Why the node has ended, and `TimedOut`.
    pub fn next_event(&self, timeout: Option<Duration>) -> Result<Output, Error> {
        Ok(self.hosted.wait(timeout, next_event)?)
    }

    /// Waits for the next report, in a task of any runtime.
    ///
    /// # Errors
    /// Why the node has ended.
    pub async fn next_event_async(&self) -> Result<Output, Error> {
        poll_fn(|cx| {
            // First, so that no event between is missed.
            self.hosted.wake(Key::Events, cx.waker());
            match self.hosted.call(next_event) {
                Ok(event) => event.map(Ok),
                Err(e) => Poll::Ready(Err(e.into())),
            }
        })
        .await
    }
}

fn next_event(machine: &mut LnetMachine) -> Poll<Output> {
    machine.events.pop().map_or(Poll::Pending, Poll::Ready)
}

fn listen(cx: &mut Cx<'_>, options: NodeOptions) -> Result<LnetMachine, VerbsError> {
    // Greater than those of the nodes that were there before.
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let incarnation = since.as_micros() as u64;
    let mut node = Node::listen(cx, options.config, options.nid, incarnation)?;
    let attach = |config| {
        let target = Target::attach(&mut node, config, incarnation);
        target.ok_or_else(|| VerbsError::Invalid("no memory for lnet_selftest".into()))
    };
    let target = options.target.map(attach).transpose()?;
    Ok(LnetMachine::new(node, target))
}
