//! Answers of the control socket, and the listings in them.

use std::{
    collections::BTreeMap,
    fmt::{self, Display, Formatter},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use rnbd::{
    client::{OnLoss, device::DeviceCounters, state::DeviceState},
    proto::AccessMode,
    server::listing::DeviceListing,
};
use roce::reactor::LoopStats;
use rtrs::{
    addr::PathAddr,
    admission::PathKey,
    client::{CpuMigration, PathStats, PathStatus, Policy, state::PathState},
    server::{
        listing::{PathListing, SessionListing},
        request::SessionKey,
        state::PathState as ServerPathState,
    },
    stats::RdmaStats,
};
use serde::{Deserialize, Serialize};

use super::{names::TaskState, request::MapDevice, wire};

/// Answer to a request over the control socket.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum Answer {
    /// The request is done.
    Done {},
    /// To `hello`.
    Greeting(Greeting),
    /// To `read` and `metrics`.
    Text(Text),
    /// To `ls`.
    Entries(Entries),
    /// To `stat`.
    Stat(Stat),
    /// To `mappings`.
    Mappings(Mappings),
    /// To `list`.
    Mapping(Box<MapListing>),
    /// To `sessions`.
    Sessions(Sessions),
    /// To `devices`.
    Devices(OpenDevices),
    /// To `stats` and `server_stats`.
    Totals(LoopTotals),
    /// To `reload`.
    Reloaded(Reloaded),
    /// To `tasks`.
    Tasks(Tasks),
    /// To `lnet`.
    Lnet(LnetNodes),
}

/// Greeting of a process.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Greeting {
    /// [Version](super::VERSION) of the process.
    pub version: u32,
    /// Program and its version.
    pub program: String,
    /// Its process.
    pub pid: u32,
    /// It has mappings.
    pub maps: bool,
    /// It has servers.
    pub serves: bool,
    /// Mount point of its attributes.
    pub sysfs: Option<String>,
}

/// A text.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Text {
    /// The text.
    pub text: String,
}

/// Kind of a node of the attribute tree.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", content = "target", rename_all = "snake_case")]
pub enum Kind {
    /// A directory.
    Dir,
    /// A file with a text.
    File,
    /// A link to another node, relative to its own directory.
    Link(String),
}

/// Status of a node of the attribute tree.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Stat {
    /// Kind.
    #[serde(flatten)]
    pub kind: Kind,
    /// Permissions, as of `chmod`: 0644 of writable files, 0444 of others, 0755 of directories, 0777 of links.
    #[serde(with = "wire::octal")]
    pub mode: u32,
}

/// A name in a directory of the attribute tree.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Entry {
    /// The name.
    pub name: String,
    /// Status.
    #[serde(flatten)]
    pub stat: Stat,
}

/// Entries of a directory.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Entries {
    /// In their order.
    pub entries: Vec<Entry>,
}

/// Result of a reload, by task.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Reloaded {
    /// Tasks that started.
    pub started: Vec<String>,
    /// Tasks that changed while they run.
    pub changed: Vec<String>,
    /// Tasks that are restarted.
    pub restarted: Vec<String>,
    /// Tasks that stopped.
    pub stopped: Vec<String>,
    /// Tasks that stay as they are.
    pub unchanged: Vec<String>,
    /// Tasks that could not be changed, and why.
    pub failed: Vec<String>,
}

impl Reloaded {
    /// The lists with their names.
    pub fn lists(&self) -> [(&'static str, &[String]); 6] {
        [
            ("started", &self.started),
            ("changed", &self.changed),
            ("restarted", &self.restarted),
            ("stopped", &self.stopped),
            ("unchanged", &self.unchanged),
            ("failed", &self.failed),
        ]
    }
}

impl Display for Reloaded {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let lists = self.lists().into_iter().filter(|(_, tasks)| !tasks.is_empty());
        let lists: Vec<_> = lists
            .map(|(what, tasks)| format!("; {what}: {}", tasks.join(", ")))
            .collect();
        match lists.is_empty() {
            true => f.write_str("reloaded: nothing to do"),
            false => write!(f, "reloaded{}", lists.concat()),
        }
    }
}

/// Tasks of a daemon.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Tasks {
    /// By their names.
    pub tasks: Vec<TaskStatus>,
}

/// A task of a daemon.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TaskStatus {
    /// `map.NAME`, `serve.NAME`, `rds.NAME` or `lnet.NAME`.
    pub task: String,
    /// `map`, `serve`, `rds` or `lnet`.
    pub kind: String,
    /// State.
    #[serde(with = "wire")]
    pub state: TaskState,
    /// Error of a failed task.
    pub why: Option<String>,
    /// The configuration file has it.
    pub in_file: bool,
    /// Arguments of its command.
    pub options: Vec<String>,
}

/// LNet nodes of a process.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LnetNodes {
    /// In the order of their starts.
    pub lnet_nodes: Vec<LnetNode>,
}

/// An LNet node.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LnetNode {
    /// Its NID.
    pub nid: String,
    /// Its connections, those included that are not established.
    pub connections: Vec<LnetConnection>,
    /// Counters by name.
    pub counters: BTreeMap<String, u64>,
    /// Connect requests of peers that it has refused, by reason.
    pub rejects_sent: BTreeMap<String, u64>,
    /// Connect requests that peers have refused, by reason.
    pub rejects_received: BTreeMap<String, u64>,
}

/// A connection of an LNet node.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LnetConnection {
    /// NID of the peer.
    pub peer: String,
    /// Both sides may send.
    pub established: bool,
    /// Messages each way: all credits.
    pub queue_depth: u16,
    /// Fragments of a descriptor.
    pub fragments: u16,
    /// Credits to send messages.
    pub credits: u16,
    /// Credits that the peer has.
    pub peer_credits: u16,
    /// Credits that go back to the peer with the next message.
    pub outstanding: u16,
    /// Messages that wait to be sent.
    pub queued: usize,
    /// Messages on their way.
    pub in_flight: usize,
    /// Transfers that wait for the peer, each way.
    pub transfers: usize,
}

/// All mappings of a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Mappings {
    /// In the order of their starts.
    pub mappings: Vec<MapListing>,
}

/// A mapping: its session, paths and devices.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct MapListing {
    /// Name of the session.
    pub session: String,
    /// The server's port, for paths that are added.
    pub port: u16,
    /// Requests in flight at most; `None` until the session is open.
    pub queue_depth: Option<u32>,
    /// Largest data of a request.
    pub max_io_bytes: Option<u32>,
    /// The server changes the key of a chunk with every request (`always_invalidate`).
    pub new_rkeys: Option<bool>,
    /// Path policy.
    #[serde(with = "wire")]
    pub policy: Policy,
    /// Attempts to reconnect a lost path; -1: no limit.
    pub max_reconnects: i64,
    /// Time before each, in seconds.
    #[serde(with = "wire")]
    pub reconnect_delay: Duration,
    /// Its paths.
    pub paths: Vec<MappedPath>,
    /// Its devices, in the order in which they were mapped.
    pub devices: Vec<MappedDevice>,
}

/// A path of a mapping.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct MappedPath {
    /// Its number.
    pub id: u32,
    /// Its addresses.
    #[serde(flatten, with = "wire::listed_path")]
    pub addr: PathAddr,
    /// Its state.
    #[serde(with = "wire")]
    pub state: PathState,
    /// RDMA device of the host; `None`: in software.
    pub device: Option<String>,
    /// Strategy of the keys that open the buffers of reads to the server.
    pub keys: Option<String>,
    /// Round trip of the last heartbeat.
    #[serde(rename = "latency_us", with = "wire::micros")]
    pub latency: Option<Duration>,
    /// Requests in flight.
    pub in_flight: u32,
    /// Counters.
    #[serde(flatten, with = "PathStatsForm")]
    pub stats: PathStats,
}

impl From<PathStatus> for MappedPath {
    fn from(path: PathStatus) -> Self {
        Self {
            id: path.id.number(),
            addr: path.addr,
            state: path.state,
            device: path.hca.as_deref().map(str::to_owned),
            keys: path.keys.map(|keys| keys.to_string()),
            latency: path.latency,
            in_flight: path.in_flight,
            stats: path.stats,
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "PathStats")]
struct PathStatsForm {
    #[serde(flatten, with = "RdmaStatsForm")]
    rdma: RdmaStats,
    failovers: u64,
    reconnects: i32,
    failed_reconnects: u32,
    #[serde(flatten, with = "CpuMigrationForm")]
    cpu_migration: CpuMigration,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "RdmaStats")]
struct RdmaStatsForm {
    reads: u64,
    read_bytes: u64,
    writes: u64,
    write_bytes: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "CpuMigration")]
struct CpuMigrationForm {
    #[serde(rename = "cpu_migration_from")]
    from: Vec<u64>,
    #[serde(rename = "cpu_migration_to")]
    to: Vec<u64>,
}

/// A device of a mapping.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct MappedDevice {
    /// Name at the server.
    pub name: String,
    /// Name in the attribute tree, `rnbdN`.
    pub block: Option<String>,
    /// Access mode.
    #[serde(with = "wire")]
    pub mode: AccessMode,
    /// State.
    #[serde(with = "wire")]
    pub state: DeviceState,
    /// Size, when it was opened last or has been resized.
    pub bytes: Option<u64>,
    /// Logical block size, bytes.
    pub block_size: Option<u32>,
    /// Writes are refused.
    pub read_only: Option<bool>,
    /// Loss policy: the fate of requests while no path is up.
    #[serde(with = "wire")]
    pub on_loss: OnLoss,
    /// Counters of requests.
    #[serde(flatten, with = "DeviceCountersForm")]
    pub counters: DeviceCounters,
    /// Requests that wait for a path, or for the server to open it again.
    pub waiting: usize,
    /// NBD clients that have chosen it.
    pub clients: usize,
}

impl MappedDevice {
    /// A device that has not been opened.
    pub(crate) fn new(device: MapDevice, on_loss: OnLoss) -> Self {
        Self {
            name: device.name,
            block: None,
            mode: device.mode,
            state: DeviceState::Init,
            bytes: None,
            block_size: None,
            read_only: None,
            on_loss,
            counters: DeviceCounters::default(),
            waiting: 0,
            clients: 0,
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "DeviceCounters")]
struct DeviceCountersForm {
    completed: u64,
    failed: u64,
    reads: u64,
    read_bytes: u64,
    writes: u64,
    written_bytes: u64,
    repeated: u64,
    lost: u64,
}

/// Sessions of all servers of a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Sessions {
    /// By servers.
    pub sessions: Vec<ClientSession>,
}

/// A session of a server.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ClientSession {
    /// Place of its server.
    pub server: usize,
    /// Its number.
    #[serde(with = "wire")]
    pub session: SessionKey,
    /// Name that the client gave.
    pub name: String,
    /// Its paths.
    pub paths: Vec<ClientPath>,
}

impl ClientSession {
    /// A session of the server at this place.
    pub fn new(server: usize, session: SessionListing) -> Self {
        Self {
            server,
            session: session.session,
            name: session.name,
            paths: session.paths.into_iter().map(ClientPath::from).collect(),
        }
    }
}

/// A path of a server's session.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ClientPath {
    /// Its number.
    #[serde(with = "wire")]
    pub path: PathKey,
    /// Address of the client.
    pub client: SocketAddr,
    /// Address of the server.
    pub server: IpAddr,
    /// State.
    #[serde(with = "wire")]
    pub state: ServerPathState,
    /// RDMA device of the host; `None`: in software.
    pub device: Option<String>,
    /// Strategy of the keys that open the chunks to the client.
    pub keys: String,
    /// Connections of the path, the service connection included.
    pub connections: u16,
    /// Connections that are established.
    pub established: usize,
    /// Requests that the server is executing.
    pub requests: usize,
    /// Counters.
    #[serde(flatten, with = "RdmaStatsForm")]
    pub rdma: RdmaStats,
}

impl From<PathListing> for ClientPath {
    fn from(path: PathListing) -> Self {
        Self {
            path: path.path,
            client: path.client,
            server: path.server,
            state: path.state,
            device: path.hca.as_deref().map(str::to_owned),
            keys: path.keys.to_string(),
            connections: path.connections,
            established: path.made,
            requests: path.requests,
            rdma: path.rdma,
        }
    }
}

/// Open devices of all servers of a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OpenDevices {
    /// By servers.
    pub devices: Vec<OpenDevice>,
}

/// A device that a session has open.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct OpenDevice {
    /// Place of its server.
    pub server: usize,
    /// Number of the session.
    #[serde(with = "wire")]
    pub session: SessionKey,
    /// Name of the session.
    pub session_name: String,
    /// Address of the client.
    pub client: SocketAddr,
    /// The client's number for the device.
    pub device: u32,
    /// Name that the client requested.
    pub name: String,
    /// Access mode.
    #[serde(with = "wire")]
    pub mode: AccessMode,
    /// Writes are refused.
    pub read_only: bool,
    /// Location of its bytes.
    pub image: String,
    /// Size.
    pub bytes: u64,
}

impl OpenDevice {
    /// A device of the server at this place.
    pub fn new(server: usize, device: DeviceListing) -> Self {
        Self {
            server,
            session: device.session,
            session_name: device.session_name,
            client: device.peer,
            device: device.id,
            name: device.name,
            mode: device.mode,
            read_only: device.read_only,
            image: device.label,
            bytes: device.size,
        }
    }
}

/// Objects of all loops, and packets, by name.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LoopTotals(pub BTreeMap<String, u64>);

impl From<&LoopStats> for LoopTotals {
    fn from(stats: &LoopStats) -> Self {
        let (usage, device) = (&stats.usage, stats.device());
        let objects = [
            ("pds", usage.pds),
            ("mrs", usage.mrs),
            ("keys", usage.keys),
            ("cqs", usage.cqs),
            ("qps", usage.qps),
            ("cms", usage.cms),
        ];
        let packets = [
            ("packets_sent", device.port.tx_packets),
            ("packets_received", device.port.rx_packets),
            ("retransmits", device.retransmits()),
        ];
        let objects = objects.map(|(name, number)| (name, number as u64));
        let all = objects.into_iter().chain(packets);
        Self(all.map(|(name, number)| (name.to_owned(), number)).collect())
    }
}
