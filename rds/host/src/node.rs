//! Node with a thread of its own.

use std::{
    fmt, io,
    net::IpAddr,
    sync::{Arc, mpsc::channel},
    thread::Builder,
    time::{SystemTime, UNIX_EPOCH},
};

use rand::{SeedableRng, rngs::StdRng};
use rds::{Config, ConnectionInfo, Node};
use roce::{
    DeviceConfig, LocalDevice,
    reactor::{Reactor, ReactorConfig, TurnCx},
};
use roce_verbs::provider::{Cx, VerbsError};

use crate::{service::NodeService, shared::Shared, socket::Socket, thread::Thread};

/// Options of a node.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// Device at the node's address.
    pub device: DeviceConfig,
    /// Settings of the protocol. [`Config::first_sequence`] is the time, unless it is set.
    pub config: Config,
}

impl NodeOptions {
    /// Returns the usual options at an address of this host.
    pub fn new(addr: IpAddr) -> Self {
        Self {
            device: DeviceConfig::new(addr),
            config: Config {
                first_sequence: first_sequence(),
                ..Config::default()
            },
        }
    }
}

/// Sequence numbers grow over restarts: a peer drops what seems to have come before.
fn first_sequence() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (since.as_millis() as u64) << 20
}

/// RDS at an address of this host: the connections to all peers, and sockets. Clones are handles of the same node, which ends with the
/// last handle and socket.
///
/// One process has the connections of an address, since peers know a connection by its addresses. A second node at an address is refused.
#[derive(Clone)]
pub struct RdsNode(Arc<Thread>);

impl fmt::Debug for RdsNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RdsNode").field("addr", &self.0.addr()).finish()
    }
}

impl RdsNode {
    /// Opens a node, and waits until it listens.
    ///
    /// # Errors
    /// When the address is not one of this host's, or has a node or another owner of UDP port 4791 already.
    pub fn open(options: NodeOptions) -> io::Result<Self> {
        let mut seed = [0; 32];
        getrandom::fill(&mut seed).map_err(|e| io::Error::other(e.to_string()))?;
        let rng = StdRng::from_seed(seed);
        let addr = options.device.addr;
        let reactor = Reactor::<NodeService>::new(ReactorConfig::default())?;
        let shared = Arc::new(Shared::new(reactor.handle()));
        let (send, opened) = channel();
        let of_thread = shared.clone();
        let run = move || {
            let device = match LocalDevice::open(&[options.device]) {
                Ok(device) => device,
                Err(e) => return drop(send.send(Err(io_error(e)))),
            };
            let (shared, ended) = (of_thread.clone(), of_thread);
            let ran = reactor.run(device, |turn| {
                let mut service = NodeService {
                    shared,
                    rng,
                    next_timeout: None,
                    stopping: false,
                };
                let listening = listen(&mut service, turn, options.config, addr);
                if listening.is_err() {
                    turn.stop();
                }
                // It is waited for below.
                let _ = send.send(listening);
                service
            });
            ended.end(
                &ran.err()
                    .map_or_else(|| io::ErrorKind::NotConnected.into(), io::Error::other),
            );
        };
        let thread = Builder::new().name("rds-node".into()).spawn(run)?;
        let node = Thread::new(shared, addr, thread);
        opened
            .recv()
            .unwrap_or_else(|_| Err(io::ErrorKind::NotConnected.into()))?;
        Ok(Self(Arc::new(node)))
    }

    /// Address of the node.
    pub fn addr(&self) -> IpAddr {
        self.0.addr()
    }

    /// Creates a socket.
    ///
    /// # Errors
    /// When the node has ended, or has as many sockets as it may have.
    pub fn socket(&self) -> io::Result<Socket> {
        let id = self.0.shared.call(Node::socket)?;
        Ok(Socket::new(self.0.clone(), id))
    }

    /// Returns the node's connections.
    ///
    /// # Errors
    /// When the node has ended.
    pub fn connections(&self) -> io::Result<Vec<ConnectionInfo>> {
        self.0.shared.call(|node| Ok(node.connections().collect()))
    }
}

fn listen(service: &mut NodeService, turn: &mut TurnCx<'_, ()>, config: Config, addr: IpAddr) -> io::Result<()> {
    use rand::RngCore as _;
    let rng = &mut service.rng;
    let mut cx = Cx {
        now: turn.now,
        provider: turn.device.provider(),
        random: &mut |out: &mut [u8]| rng.fill_bytes(out),
    };
    let node = Node::listen(&mut cx, config, &[addr], []).map_err(io_error)?;
    service.shared.in_turn(|state| state.node = Some(node));
    Ok(())
}

fn io_error(error: VerbsError) -> io::Error {
    match error {
        VerbsError::Io { source, context } => io::Error::new(source.kind(), format!("{context}: {source}")),
        VerbsError::Address(text) => io::Error::new(io::ErrorKind::AddrInUse, text),
        VerbsError::Invalid(text) => io::Error::new(io::ErrorKind::InvalidInput, text),
        other => io::Error::other(other),
    }
}
