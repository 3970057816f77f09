//! Events of `serve`, `map`, `rds node`, `lnet serve` and `daemon`, as JSON and as text.

use std::{
    collections::BTreeMap,
    fmt::{self, Display, Formatter},
    net::{IpAddr, SocketAddr},
};

use lnet_host::{Nid, Refusal};
use rds_node::{Broken, NodeEvent, PairKey};
use rnbd::client::{error::MapError, output::LossCause};
use rnbd_host::{
    control::Reloaded,
    map::MapNews,
    serve::{ServeEvent, ServedPath},
};
use roce::DeviceStats;
use roce_verbs::shown;
use rtrs::{Error, PathError, addr::PathAddr, server::request::SessionOpened};
use serde::{Serialize, Serializer};

use crate::output::{self, Failure, json_text};

/// The events: of each its fields, which are the keys of its JSON, and its text. Fields before the bar are texts in JSON.
///
/// Rust's formatter leaves the table as it is.
macro_rules! events {
    ($(
        $(#[$of_event:meta])*
        $event:ident { $($text:ident: $of:ty),* | $($(#[$meta:meta])* $field:ident: $type:ty),* }
        $form:literal $(, $part:expr)*;
    )*) => {
        /// An event.
        #[derive(Serialize)]
        #[serde(tag = "event", rename_all = "snake_case")]
        pub(crate) enum Event {
            $($(#[$of_event])* $event {
                $(#[serde(serialize_with = "as_text")] $text: $of,)*
                $($(#[$meta])* $field: $type,)*
            },)*
        }

        impl Display for Event {
            #[expect(unused_variables, reason = "a text need not have all fields")]
            fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$event { $($text,)* $($field,)* } => write!(f, $form $(, $part)*),)*
                }
            }
        }
    };
}

events! {
    // Of servers.
    Listening { | #[serde(flatten)] server: Box<Listening> } "{server}";
    SessionOpened { | #[serde(flatten)] of: Session } "{of} opened, {} connections", of.connections;
    SessionClosed { | #[serde(flatten)] of: Session } "{of} closed";
    #[serde(rename = "path_up")]
    ServedPathUp { path: ServedPath | session: String } "path {path} of session {} is up", shown(session);
    #[serde(rename = "path_down")]
    ServedPathDown { path: ServedPath, why: PathError | session: String }
        "path {path} of session {} is down: {why}", shown(session);

    // Of mappings.
    Mapped { | #[serde(flatten)] device: Box<Mapped> } "{device}";
    PathUp { path: PathAddr | again: bool } "path {path} is up{}", if *again { " again" } else { "" };
    PathDown { path: PathAddr, why: PathError | } "path {path} is down: {why}";
    Failover { path: PathAddr | requests: u32 } "path {path} has taken over {requests} requests";
    ReconnectFailed { path: PathAddr, why: Error | } "path {path} could not be connected: {why}";
    PathClosed { path: PathAddr, why: PathError | } "path {path} stays down: {why}";
    SessionLost { why: PathError | } "no path is up: {why}";
    SessionBack { | queue_depth: u32, max_io_bytes: u32 } "the session is back";
    Remapped { | device: String } "the server has opened {device} again";
    NotRemapped { why: MapError | device: String } "the server has not opened {device} again: {why}";
    WritesLost { | device: String, writes: u64, #[serde(rename = "why", serialize_with = "as_name")] cause: LossCause }
        "{writes} writes to {device} may be lost, the next flush fails: {cause}";
    Resized { | device: String, bytes: u64, block_size: u32, read_only: bool } "{device} has {}", output::bytes(*bytes);
    Unmapped { | device: String, why: Option<String> } "unmapped {device}{}", because(why);
    Attached { | device: String, node: String } "attached {device} as {node}";
    Detached { | device: String, node: String } "detached {node}";

    // Of RDS nodes.
    RdsListening { | dir: String } "programs of this user get RDS sockets by {dir}";
    RdsOpened { address: IpAddr | device: Option<String> }
        "RDS at {address}{}", device.as_ref().map_or(String::new(), |device| format!(" on {device}"));
    RdsNotOpened { address: IpAddr | why: String } "no RDS at {address}: {why}";
    RdsUp { | #[serde(flatten)] of: Pair } "RDS connection {of} is up";
    RdsDown { why: Broken | #[serde(flatten)] of: Pair } "RDS connection {of} is down: {why}";
    RdsConnectFailed { why: Broken | #[serde(flatten)] of: Pair } "RDS connection {of} could not be made: {why}";
    RdsRefused { peer: IpAddr, why: rds_node::Refused | } "a connect request of {peer} was refused: {why}";
    RdsPeerRestarted { | #[serde(flatten)] of: Pair }
        "the peer of RDS connection {of} was started again: messages that it has had may come to it twice";
    RdsCongested { address: SocketAddr | } "RDS port {address} is congested: its program does not read";
    RdsPeerCongested { peer: IpAddr | } "{peer} has congested RDS ports: programs that send there wait";
    RdsLimit { | process: u32, what: &'static str } "process {process} gets no more {what}: its limit is reached";
    RdsStateFile { address: IpAddr | why: String } "state file of {address}: {why}";

    // Of LNet nodes.
    LnetListening { nid: Nid | } "listening: {nid}";
    LnetUp { peer: Nid | queue_depth: u16, fragments: u16, incarnation: u64 }
        "{peer} is connected, queue depth {queue_depth}, {fragments} fragments";
    LnetDown { peer: Nid, why: lnet_host::Failure | } "{peer} is disconnected: {why}";
    LnetRefused { address: IpAddr, why: Refusal | } "a connect request of {address} was refused: {why}";
    LnetPinged { peer: Nid | } "{peer} has pinged";
    LnetDiscovered { peer: Nid | } "{peer} has sent its interfaces (discovery)";
    LnetPut { peer: Nid | portal: u32, match_bits: u64, hdr_data: u64, offset: usize, bytes: u32 }
        "{peer} has put {bytes} bytes to portal {portal}, match bits {match_bits:#x}, offset {offset}";
    LnetGot { peer: Nid | portal: u32, match_bits: u64, offset: usize, bytes: u32 }
        "{peer} has got {bytes} bytes from portal {portal}, match bits {match_bits:#x}, offset {offset}";
    LnetFailed { peer: Nid, why: lnet_host::Failure | portal: u32, match_bits: u64 }
        "an operation of {peer} on portal {portal} has failed, match bits {match_bits:#x}: {why}";
    LnetPortal { | portal: u32, kind: &'static str, done: u64, bytes: u64, failed: u64 }
        "{kind} at portal {portal}: {done} operations with {bytes} bytes, {failed} failed";

    // Of the daemon.
    Idle { | config: Option<String>, control: Option<String> }
        "waiting for tasks, as {}: `ferroce serve`, `map`, `rds node` and `lnet serve` with --daemon start them{}; \
         `ferroce daemon --help` has an example of a file",
        config.as_ref().map_or("no --config FILE was given".into(), |file| format!("{file} has no [serve.NAME], [map.NAME], [rds.NAME] or [lnet.NAME]")),
        control.as_ref().map_or(String::new(), |path| format!(" (control socket {path})"));
    TaskStarted { | task: String } "{task} starts";
    TaskFailed { | task: String, why: String, restart_in: f64 } "{task} failed, restart in {restart_in} s: {why}";
    TaskExited { | task: String, why: Option<String> } "{task} has exited{}", because(why);
    Reloaded { | #[serde(flatten)] done: Reloaded } "{done}";
    NotReloaded { | why: String } "not reloaded: {why}";

    // Of all. Events are lost when they are not read.
    EventsLost { | events: u64 } "{events} events were lost";
    Stats { | #[serde(flatten)] so_far: Box<Statistics> } "{}", so_far.text;
    Summary { | #[serde(flatten)] of_run: Box<Statistics> } "{}", of_run.text;
    Error { | message: String } "{message}";
}

fn as_text<S: Serializer>(value: &impl Display, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

fn as_name<S: Serializer>(cause: &LossCause, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(cause.name())
}

fn because(why: &Option<String>) -> String {
    why.as_ref().map_or(String::new(), |why| format!(": {why}"))
}

impl Event {
    /// The event as a line of JSON; `task`: the daemon's task that reports it.
    pub(crate) fn json(&self, task: Option<&str>, with_text: bool) -> String {
        #[derive(Serialize)]
        struct Line<'a> {
            #[serde(skip_serializing_if = "Option::is_none")]
            task: Option<&'a str>,
            #[serde(flatten)]
            event: &'a Event,
            #[serde(skip_serializing_if = "Option::is_none")]
            text: Option<String>,
        }
        json_text(&Line {
            task,
            event: self,
            text: with_text.then(|| self.text(task)),
        })
    }

    /// The event for people.
    pub(crate) fn text(&self, task: Option<&str>) -> String {
        match task {
            Some(task) => format!("{task}: {self}"),
            None => self.to_string(),
        }
    }
}

impl From<MapNews> for Event {
    fn from(news: MapNews) -> Self {
        match news {
            MapNews::PathUp { path, again } => Self::PathUp { path, again },
            MapNews::PathDown { path, why } => Self::PathDown { path, why },
            MapNews::TookOver { path, requests } => Self::Failover { path, requests },
            MapNews::AttemptFailed { path, error: why } => Self::ReconnectFailed { path, why },
            MapNews::PathClosed { path, why } => Self::PathClosed { path, why },
            MapNews::Lost(why) => Self::SessionLost { why },
            MapNews::Back(info) => Self::SessionBack {
                queue_depth: info.queue_depth,
                max_io_bytes: info.max_io_size,
            },
            MapNews::Remapped { device } => Self::Remapped { device },
            MapNews::NotRemapped { device, error: why } => Self::NotRemapped { device, why },
            MapNews::WritesLost { device, writes, cause } => Self::WritesLost { device, writes, cause },
            MapNews::Changed { device, geometry } => Self::Resized {
                device,
                bytes: geometry.size,
                block_size: geometry.logical_block_size,
                read_only: geometry.read_only,
            },
            MapNews::Unmapped { device, why } => Self::Unmapped { device, why },
            MapNews::EventsLost(events) => Self::EventsLost { events },
        }
    }
}

impl From<NodeEvent> for Event {
    fn from(event: NodeEvent) -> Self {
        match event {
            NodeEvent::Opened { addr, device } => Self::RdsOpened { address: addr, device },
            NodeEvent::NotOpened { addr: address, why } => Self::RdsNotOpened { address, why },
            NodeEvent::Up(key) => Self::RdsUp { of: key.into() },
            NodeEvent::Down(key, why) => Self::RdsDown { why, of: key.into() },
            NodeEvent::ConnectFailed(key, why) => Self::RdsConnectFailed { why, of: key.into() },
            NodeEvent::Refused { peer, why } => Self::RdsRefused { peer, why },
            NodeEvent::PeerRestarted(key) => Self::RdsPeerRestarted { of: key.into() },
            NodeEvent::Congested(address) => Self::RdsCongested { address },
            NodeEvent::PeerCongested(peer) => Self::RdsPeerCongested { peer },
            NodeEvent::Limit { process, what } => Self::RdsLimit { process, what },
            NodeEvent::StateFile { addr: address, why } => Self::RdsStateFile { address, why },
            NodeEvent::Lost(events) => Self::EventsLost { events },
        }
    }
}

impl Event {
    /// The event of a server.
    ///
    /// # Errors
    /// When the server has failed.
    pub(crate) fn of_server(event: ServeEvent) -> Result<Option<Self>, Failure> {
        Ok(Some(match event {
            ServeEvent::SessionOpened(of) => Self::SessionOpened { of: of.into() },
            ServeEvent::SessionClosed(of, _) => Self::SessionClosed { of: of.into() },
            ServeEvent::PathUp(path) => Self::ServedPathUp {
                session: path.session.clone(),
                path,
            },
            ServeEvent::PathDown(path, why) => Self::ServedPathDown {
                session: path.session.clone(),
                path,
                why,
            },
            ServeEvent::Lost(events) => Self::EventsLost { events },
            ServeEvent::Stopped(Some(why)) => return Err(Failure::failed(format!("the server has stopped: {why}"))),
            ServeEvent::Stopped(None) => return Ok(None),
        }))
    }
}

/// An RDS connection.
#[derive(Serialize)]
pub(crate) struct Pair {
    local: IpAddr,
    remote: IpAddr,
    tos: u8,
}

impl From<PairKey> for Pair {
    fn from(PairKey { local, remote, tos }: PairKey) -> Self {
        Self { local, remote, tos }
    }
}

impl Display for Pair {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { local, remote, tos } = *self;
        PairKey { local, remote, tos }.fmt(f)
    }
}

/// A session of a server, whose name the client chose.
#[derive(Serialize)]
pub(crate) struct Session {
    session: String,
    peer: SocketAddr,
    connections: u16,
}

impl From<SessionOpened> for Session {
    fn from(opened: SessionOpened) -> Self {
        Self {
            session: opened.name,
            peer: opened.peer,
            connections: opened.connections,
        }
    }
}

impl Display for Session {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "session {} of {}", shown(&self.session), self.peer)
    }
}

/// A listening server.
#[derive(Serialize)]
pub(crate) struct Listening {
    /// The first of them.
    #[serde(flatten)]
    pub(crate) first: Listener,
    pub(crate) addresses: Vec<Listener>,
    pub(crate) exports: Vec<Export>,
    pub(crate) export_dir: Option<String>,
    pub(crate) queue_depth: u32,
    pub(crate) max_chunk_size: u32,
    pub(crate) session_bytes: u64,
    pub(crate) always_invalidate: bool,
    pub(crate) threads: u16,
}

#[derive(Clone, Copy, Serialize)]
pub(crate) struct Listener {
    pub(crate) address: SocketAddr,
    pub(crate) path_mtu: usize,
}

#[derive(Serialize)]
pub(crate) struct Export {
    pub(crate) name: String,
    pub(crate) path: String,
    pub(crate) bytes: u64,
    pub(crate) read_only: bool,
    pub(crate) migrate: bool,
}

impl Display for Listening {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let listening = |l: &Listener| format!("listening on {}, path MTU {}", l.address, l.path_mtu);
        let export = |export: &Export| {
            let Export { name, path, bytes, .. } = export;
            let access = match (export.read_only, export.migrate) {
                (true, _) => "read-only",
                (false, false) => "read-write",
                (false, true) => "read-write, two writers while migrating",
            };
            format!("export {name}: {path} ({}, {access})", output::bytes(*bytes))
        };
        let folder = self.export_dir.iter().map(|folder| format!("export folder: {folder}"));
        let lines = self.addresses.iter().map(listening);
        let lines: Vec<_> = lines.chain(self.exports.iter().map(export)).chain(folder).collect();
        f.write_str(&lines.join("\n"))
    }
}

/// A mapped device.
#[derive(Serialize)]
pub(crate) struct Mapped {
    pub(crate) session: String,
    pub(crate) server: SocketAddr,
    pub(crate) paths: Vec<String>,
    pub(crate) device: String,
    pub(crate) access_mode: String,
    pub(crate) bytes: u64,
    pub(crate) block_size: u32,
    pub(crate) read_only: bool,
    /// The first socket for NBD clients.
    pub(crate) nbd: Option<String>,
    /// The first of `uris`.
    pub(crate) uri: Option<String>,
    pub(crate) uris: Vec<String>,
    /// Sockets for virtual machines.
    pub(crate) vhost_user: Vec<String>,
    pub(crate) queue_depth: u32,
    pub(crate) max_io_bytes: u32,
}

impl Display for Mapped {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let access = if self.read_only { "read-only" } else { "read-write" };
        let (size, disks) = (output::bytes(self.bytes), self.vhost_user.iter());
        write!(f, "mapped {} of {} ({size}, {access})", self.device, self.server)?;
        let ways = self
            .uris
            .iter()
            .cloned()
            .chain(disks.map(|path| format!("vhost-user {path}")));
        let ways: Vec<_> = ways.collect();
        match ways.is_empty() {
            true => Ok(()),
            false => write!(f, ": {}", ways.join(" ")),
        }
    }
}

/// Returns the counters of a device by name.
pub(crate) fn counters(stats: &DeviceStats) -> BTreeMap<String, u64> {
    let own = stats.port.named().chain(stats.port.transport.named());
    let sockets = stats.path.named().map(|(name, n)| (format!("socket_{name}"), n));
    let all = own.map(|(name, n)| (name.to_owned(), n));
    all.chain(stats.port.cm.named()).chain(sockets).collect()
}

/// Bytes and requests of the users of devices.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize)]
pub(crate) struct Moved {
    pub(crate) bytes_read: u64,
    pub(crate) bytes_written: u64,
    /// Requests answered, errors included.
    pub(crate) requests: u64,
    /// Requests answered with an error.
    #[serde(rename = "failed_requests")]
    pub(crate) failed: u64,
    /// Counts of rejected clients and requests, by name.
    #[serde(flatten)]
    pub(crate) refused: BTreeMap<&'static str, u64>,
}

/// Packets of a device.
#[derive(Serialize)]
pub(crate) struct Packets {
    packets_sent: u64,
    packets_received: u64,
    retransmits: u64,
    icrc_errors: u64,
}

impl From<&DeviceStats> for Packets {
    fn from(stats: &DeviceStats) -> Self {
        Self {
            packets_sent: stats.port.tx_packets,
            packets_received: stats.port.rx_packets,
            retransmits: stats.retransmits(),
            icrc_errors: stats.icrc_errors(),
        }
    }
}

impl Display for Packets {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "packets sent {}, received {}, retransmissions {}, ICRC errors {}",
            self.packets_sent, self.packets_received, self.retransmits, self.icrc_errors
        )
    }
}

/// Packets of an address.
#[derive(Serialize)]
pub(crate) struct OfAddress {
    pub(crate) address: IpAddr,
    #[serde(flatten)]
    pub(crate) packets: Packets,
}

/// Statistics of a run so far.
#[derive(Serialize)]
pub(crate) struct Statistics {
    pub(crate) seconds: f64,
    #[serde(flatten)]
    pub(crate) moved: Moved,
    #[serde(flatten)]
    pub(crate) packets: Packets,
    /// All counters, of all addresses.
    pub(crate) counters: BTreeMap<String, u64>,
    pub(crate) addresses: Vec<OfAddress>,
    #[serde(skip)]
    pub(crate) text: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_can_not_write_on_the_terminal() {
        let opened = |session: &str| Event::SessionOpened {
            of: Session {
                session: session.into(),
                peer: "192.0.2.1:1234".parse().unwrap(),
                connections: 2,
            },
        };
        let text = opened("a\u{1b}]0;title\u{7}\nlistening on 0.0.0.0\u{9b}31m\u{202e}").text(None);
        assert!(!text.contains(char::is_control) && !text.contains('\u{202e}'), "{text}");
        let greater = opened("größer");
        assert_eq!(
            greater.text(Some("serve.a")),
            "serve.a: session größer of 192.0.2.1:1234 opened, 2 connections"
        );
        let json: serde_json::Value = serde_json::from_str(&greater.json(Some("serve.a"), false)).unwrap();
        let expected = serde_json::json!({
            "event": "session_opened", "task": "serve.a", "session": "größer", "peer": "192.0.2.1:1234", "connections": 2,
        });
        assert_eq!(json, expected);
    }

    #[test]
    fn statistics_have_the_promised_keys() {
        let statistics = Statistics {
            seconds: 1.5,
            moved: Moved {
                refused: [("opens_refused", 3)].into(),
                ..Moved::default()
            },
            packets: (&DeviceStats::default()).into(),
            counters: counters(&DeviceStats::default()),
            addresses: vec![OfAddress {
                address: [127, 0, 0, 1].into(),
                packets: (&DeviceStats::default()).into(),
            }],
            text: String::new(),
        };
        let event = Event::Summary {
            of_run: Box::new(statistics),
        };
        let json: serde_json::Value = serde_json::from_str(&event.json(None, false)).unwrap();
        assert_eq!((&json["event"], &json["opens_refused"]), (&"summary".into(), &3.into()));
        for key in [
            "failed_requests",
            "packets_sent",
            "packets_received",
            "retransmits",
            "icrc_errors",
        ] {
            assert!(json[key].is_u64(), "{key}");
        }
        assert_eq!(json["addresses"][0]["address"], "127.0.0.1");
        for counter in ["rx_packets", "duplicate_request", "cm_rejects_sent", "socket_tx_calls"] {
            assert!(json["counters"][counter].is_u64(), "{counter}");
        }
    }
}
