//! Messages of lnet_selftest (`srpc_msg`): 160 bytes, the data of a PUT.
//!
//! A request goes to the portal of its service, whose number is the match bits. It names the match bits for its reply, and for the data
//! that belongs to it, on [`RDMA_PORTAL`]: the server PUTs data that was asked for, GETs what it is to take, and then PUTs the reply.

use bitflags::bitflags;

use super::wire::{Field, Name, fields};
use crate::proto::{
    ByteOrder, Nid, ProtoError,
    order::{Reader, Writer},
};

/// Portal of requests of tests.
pub const REQUEST_PORTAL: u32 = 50;
/// Portal of requests of the framework: sessions, batches, statistics.
pub const FRAMEWORK_PORTAL: u32 = 51;
/// Portal of replies and data.
pub const RDMA_PORTAL: u32 = 52;
/// Bytes of a message.
pub const MESSAGE_LEN: usize = 160;
/// Version of the protocol.
pub const VERSION: u32 = 1;
/// Magic number in pings (`LST_PING_TEST_MAGIC`).
pub const PING_MAGIC: u32 = 0xbabe_face;
/// Word that data is made of (`BRW_MAGIC`), in the byte order of its sender.
pub const DATA_WORD: u64 = 0xeeb0_eeb1_eeb2_eeb3;
/// Bytes of data of a bulk test at most.
pub const MAX_BULK: u32 = 1 << 20;

/// Magic number of all messages.
pub const MAGIC: u32 = 0xeeb0_f00d;
const HEAD_LEN: usize = 24;
const WHAT: &str = "selftest message";

bitflags! {
    /// Features of a session.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct Features: u32 {
        /// Bulk tests have a length in bytes; else in pages of 4096 bytes.
        const BULK_LEN = 1;
    }
}

/// Service of a node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u32)]
pub enum Service {
    /// Shows the session.
    Debug = 0,
    /// Makes a session, or joins it.
    MakeSession = 1,
    /// Ends a session, or leaves it.
    RemoveSession = 2,
    /// Runs, stops and shows batches.
    Batch = 3,
    /// Adds a test to a batch.
    Test = 4,
    /// Shows counters.
    Stat = 5,
    /// Takes or sends data.
    Bulk = 11,
    /// Answers pings.
    Ping = 12,
}

impl Service {
    /// All services.
    pub const ALL: [Self; 8] = [
        Self::Debug,
        Self::MakeSession,
        Self::RemoveSession,
        Self::Batch,
        Self::Test,
        Self::Stat,
        Self::Bulk,
        Self::Ping,
    ];

    /// Portal of its requests.
    pub const fn portal(self) -> u32 {
        match self {
            Self::Bulk | Self::Ping => REQUEST_PORTAL,
            _ => FRAMEWORK_PORTAL,
        }
    }

    /// Match bits of its requests, and its number in tests.
    pub const fn number(self) -> u32 {
        self as u32
    }
}

fields! {
    /// Name of a session (`lst_sid`).
    Sid {
        /// Node of its console.
        nid: Nid,
        /// Time of its start.
        stamp: u64,
    }
    /// Counters of a node's session.
    FrameworkCounters {
        /// Milliseconds since the session's start.
        running_ms: u32,
        /// Batches that run.
        active_batches: u32,
        /// Sessions that are over and have not ended.
        zombie_sessions: u32,
        /// Bulk tests that failed.
        bulk_errors: u32,
        /// Pings that failed.
        ping_errors: u32,
    }
    /// Counters of a node's messages.
    RpcCounters {
        /// Errors.
        errors: u32,
        /// Requests sent.
        sent: u32,
        /// Requests received.
        received: u32,
        /// Requests dropped.
        dropped: u32,
        /// Requests without a reply in time.
        expired: u32,
        /// Bytes of data that were fetched.
        bulk_get: u64,
        /// Bytes of data that were sent.
        bulk_put: u64,
    }
    /// Counters of a node's LNet (`lnet_counters`).
    LnetCounters {
        /// Messages under way.
        messages: u32,
        /// Most messages that were under way.
        messages_max: u32,
        /// Errors.
        errors: u32,
        /// Messages sent.
        sent: u32,
        /// Messages received.
        received: u32,
        /// Messages routed.
        routed: u32,
        /// Messages dropped.
        dropped: u32,
        /// Bytes of data sent.
        sent_bytes: u64,
        /// Bytes of data received.
        received_bytes: u64,
        /// Bytes of data routed.
        routed_bytes: u64,
        /// Bytes of data dropped.
        dropped_bytes: u64,
    }
}

impl Sid {
    /// No session.
    pub const NONE: Self = Self {
        nid: Nid(u64::MAX),
        stamp: u64::MAX,
    };
}

/// Declares messages: each with its number and its fields.
macro_rules! messages {
    ($($(#[$doc:meta])* $name:ident = $number:literal { $($(#[$field_doc:meta])* $field:ident: $kind:ty,)* })*) => {
        /// Body of a message.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum Body {
            $($(#[$doc])* $name { $($(#[$field_doc])* $field: $kind,)* },)*
        }

        impl Body {
            /// Its number on the wire. A reply's is that of its request and one.
            pub const fn number(&self) -> u32 {
                match self { $(Self::$name { .. } => $number,)* }
            }

            fn read(number: u32, at: &mut Reader<'_>) -> Result<Self, ProtoError> {
                Ok(match number {
                    $($number => Self::$name { $($field: Field::read(at)?,)* },)*
                    found => return Err(ProtoError::Type { what: WHAT, found }),
                })
            }

            fn write(&self, out: &mut Writer) {
                match self { $(Self::$name { $($field,)* } => { $($field.write(out);)* })* }
            }
        }
    };
}

messages! {
    /// Request: make a session, or join it.
    MakeSession = 0 {
        /// Match bits for the reply.
        reply_bits: u64,
        /// The session.
        sid: Sid,
        /// End another one that there is.
        force: u32,
        /// Its name.
        name: Name,
    }
    /// Reply.
    SessionMade = 1 {
        /// 0, or an error number.
        status: u32,
        /// The session that there is.
        sid: Sid,
        /// Seconds without a request of the framework after which it ends.
        timeout: u32,
        /// Name of another session that there is.
        name: Name,
    }
    /// Request: end a session.
    RemoveSession = 2 {
        /// Match bits for the reply.
        reply_bits: u64,
        /// The session.
        sid: Sid,
    }
    /// Reply.
    SessionRemoved = 3 {
        /// 0, or an error number.
        status: u32,
        /// The session that there is.
        sid: Sid,
    }
    /// Request: run, stop or show a batch.
    Batch = 4 {
        /// Match bits for the reply.
        reply_bits: u64,
        /// The session.
        sid: Sid,
        /// The batch.
        batch: u64,
        /// [`Body::RUN`], [`Body::STOP`] or [`Body::QUERY`].
        operation: u32,
        /// Test to be shown, from 1 on; 0: the batch.
        test: u32,
        /// Stop: cancel what is under way.
        argument: u32,
    }
    /// Reply.
    BatchReply = 5 {
        /// 0, or an error number.
        status: u32,
        /// The session that there is.
        sid: Sid,
        /// Tests of the batch, or units of the test, that run.
        active: u32,
        /// Not used.
        time: u32,
    }
    /// Request: show counters.
    Stat = 6 {
        /// Match bits for the reply.
        reply_bits: u64,
        /// The session.
        sid: Sid,
        /// Not used.
        kind: u32,
    }
    /// Reply.
    StatReply = 7 {
        /// 0, or an error number.
        status: u32,
        /// The session that there is.
        sid: Sid,
        /// Of the session.
        framework: FrameworkCounters,
        /// Of messages.
        rpc: RpcCounters,
        /// Of LNet.
        lnet: LnetCounters,
    }
    /// Request: add a test to a batch.
    Test = 8 {
        /// Match bits for the reply.
        reply_bits: u64,
        /// Match bits for the nodes that a client tests: data of [`DEST_LEN`] bytes each.
        bulk_bits: u64,
        /// The session.
        sid: Sid,
        /// The batch.
        batch: u64,
        /// Number of the service that is tested.
        service: u32,
        /// Requests of each unit of a client; 2^31 and more: without an end. Of a server: requests at a time.
        loops: u32,
        /// Units for each node.
        concurrency: u32,
        /// This node is a client; else a server.
        is_client: u8,
        /// A unit ends with the first error.
        stop_on_error: u8,
        /// Nodes that a client tests.
        nodes: u32,
        /// Parameters of the service, see [`Message::test`].
        parameters: [u8; 12],
    }
    /// Reply.
    TestReply = 9 {
        /// 0, or an error number.
        status: u32,
        /// The session that there is.
        sid: Sid,
    }
    /// Request: show the session.
    Debug = 10 {
        /// Match bits for the reply.
        reply_bits: u64,
        /// The session.
        sid: Sid,
        /// Not used.
        flags: u32,
    }
    /// Reply.
    DebugReply = 11 {
        /// 0, or an error number.
        status: u32,
        /// The session that there is.
        sid: Sid,
        /// Seconds without a request of the framework after which it ends.
        timeout: u32,
        /// Not used.
        batches: u32,
        /// Its name.
        name: Name,
    }
    /// Request: transfer data.
    Bulk = 12 {
        /// Match bits for the reply.
        reply_bits: u64,
        /// Match bits for the data.
        bulk_bits: u64,
        /// [`Body::READ`] or [`Body::WRITE`].
        operation: u32,
        /// Bytes.
        len: u32,
        /// Number of the [`Pattern`].
        pattern: u32,
    }
    /// Reply.
    BulkReply = 13 {
        /// 0, or an error number.
        status: u32,
    }
    /// Request: answer.
    Ping = 14 {
        /// Match bits for the reply.
        reply_bits: u64,
        /// [`PING_MAGIC`].
        magic: u32,
        /// Number, which the reply repeats.
        number: u32,
        /// Time of the sender.
        seconds: u64,
        /// Nanoseconds of that.
        nanoseconds: u64,
    }
    /// Reply.
    PingReply = 15 {
        /// 0, or an error number.
        status: u32,
        /// [`PING_MAGIC`].
        magic: u32,
        /// Number of the request.
        number: u32,
    }
}

/// Bytes of a node in the data of [`Body::Test`]: NID and process ID.
pub const DEST_LEN: usize = 12;

impl Body {
    /// Operation of a batch: begin.
    pub const RUN: u32 = 1;
    /// Operation of a batch: end.
    pub const STOP: u32 = 2;
    /// Operation of a batch: show.
    pub const QUERY: u32 = 3;
    /// Operation of a bulk test: the server sends.
    pub const READ: u32 = 1;
    /// Operation of a bulk test: the server takes.
    pub const WRITE: u32 = 2;

    /// Service that a request is for; `None`: it is a reply.
    pub const fn service(&self) -> Option<Service> {
        Some(match self {
            Self::MakeSession { .. } => Service::MakeSession,
            Self::RemoveSession { .. } => Service::RemoveSession,
            Self::Batch { .. } => Service::Batch,
            Self::Stat { .. } => Service::Stat,
            Self::Test { .. } => Service::Test,
            Self::Debug { .. } => Service::Debug,
            Self::Bulk { .. } => Service::Bulk,
            Self::Ping { .. } => Service::Ping,
            _ => return None,
        })
    }

    /// Service that a reply is from; `None`: it is a request.
    pub const fn replier(&self) -> Option<Service> {
        Some(match self {
            Self::SessionMade { .. } => Service::MakeSession,
            Self::SessionRemoved { .. } => Service::RemoveSession,
            Self::BatchReply { .. } => Service::Batch,
            Self::StatReply { .. } => Service::Stat,
            Self::TestReply { .. } => Service::Test,
            Self::DebugReply { .. } => Service::Debug,
            Self::BulkReply { .. } => Service::Bulk,
            Self::PingReply { .. } => Service::Ping,
            _ => return None,
        })
    }

    /// Match bits of a request for its reply and its data; `None`: it is a reply.
    pub(super) const fn bits(&mut self) -> Option<(&mut u64, Option<&mut u64>)> {
        Some(match self {
            Self::MakeSession { reply_bits, .. }
            | Self::RemoveSession { reply_bits, .. }
            | Self::Batch { reply_bits, .. }
            | Self::Stat { reply_bits, .. }
            | Self::Debug { reply_bits, .. }
            | Self::Ping { reply_bits, .. } => (reply_bits, None),
            Self::Test {
                reply_bits, bulk_bits, ..
            }
            | Self::Bulk {
                reply_bits, bulk_bits, ..
            } => (reply_bits, Some(bulk_bits)),
            _ => return None,
        })
    }

    /// Session that a request is for; `None`: it is for none, or a reply.
    pub(super) const fn sid(&self) -> Option<Sid> {
        match *self {
            Self::MakeSession { sid, .. }
            | Self::RemoveSession { sid, .. }
            | Self::Batch { sid, .. }
            | Self::Stat { sid, .. }
            | Self::Test { sid, .. }
            | Self::Debug { sid, .. } => Some(sid),
            _ => None,
        }
    }

    /// Status of a reply; `None`: it is a request.
    pub const fn status(&self) -> Option<u32> {
        match *self {
            Self::SessionMade { status, .. }
            | Self::SessionRemoved { status, .. }
            | Self::BatchReply { status, .. }
            | Self::StatReply { status, .. }
            | Self::TestReply { status, .. }
            | Self::DebugReply { status, .. }
            | Self::BulkReply { status }
            | Self::PingReply { status, .. } => Some(status),
            _ => None,
        }
    }
}

/// Words of a bulk test's data that are set by its sender and checked by its receiver.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u32)]
pub enum Pattern {
    /// None.
    #[default]
    None = 1,
    /// The first and the last of each page.
    Simple = 2,
    /// All.
    Full = 3,
}

impl Pattern {
    /// Pattern with this number.
    pub const fn from_wire(number: u32) -> Option<Self> {
        match number {
            1 => Some(Self::None),
            2 => Some(Self::Simple),
            3 => Some(Self::Full),
            _ => None,
        }
    }

    /// Returns whether data has the words that count in any page size: the first and the last, or all.
    pub fn is_kept(self, data: &[u8], order: ByteOrder) -> bool {
        let word = match order {
            ByteOrder::Little => DATA_WORD.to_le_bytes(),
            ByteOrder::Big => DATA_WORD.to_be_bytes(),
        };
        let mut words = data.chunks(word.len());
        let is_right = |part: &[u8]| *part == word[..part.len()];
        match self {
            Self::None => true,
            Self::Simple => {
                let (first, last) = (words.next(), data.last_chunk::<8>());
                first.is_none_or(is_right) && (!data.len().is_multiple_of(8) || last.is_none_or(|last| *last == word))
            }
            Self::Full => words.all(is_right),
        }
    }
}

/// Parameters of a test.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Parameters {
    /// Pings.
    Ping {
        /// Not used.
        size: u32,
        /// Not used.
        flags: u32,
    },
    /// Transfers of data.
    Bulk {
        /// [`Body::READ`] or [`Body::WRITE`].
        operation: u32,
        /// Number of the [`Pattern`].
        pattern: u32,
        /// Bytes.
        len: u32,
        /// Offset of the first byte in its page.
        offset: u32,
    },
}

impl Parameters {
    /// Bytes of a page, in which sessions without [`Features::BULK_LEN`] count.
    const PAGE: u32 = 4096;

    /// Service that they are of.
    pub const fn service(&self) -> Service {
        match self {
            Self::Ping { .. } => Service::Ping,
            Self::Bulk { .. } => Service::Bulk,
        }
    }

    /// Bytes on the wire.
    pub fn to_bytes(&self, order: ByteOrder, features: Features) -> [u8; 12] {
        let mut out = Writer::new(order);
        match *self {
            Self::Ping { size, flags } => {
                out.u32(size);
                out.u32(flags);
                out.u32(0);
            }
            Self::Bulk {
                operation,
                pattern,
                len,
                offset,
            } if features.contains(Features::BULK_LEN) => {
                out.u16(operation as u16);
                out.u16(pattern as u16);
                out.u32(len);
                out.u32(offset);
            }
            Self::Bulk {
                operation,
                pattern,
                len,
                ..
            } => {
                out.u32(operation);
                out.u32(len.div_ceil(Self::PAGE));
                out.u32(pattern);
            }
        }
        let mut bytes = [0; 12];
        bytes.copy_from_slice(&out.out);
        bytes
    }

    fn read(service: u32, features: Features, order: ByteOrder, bytes: &[u8; 12]) -> Result<Self, ProtoError> {
        let mut at = Reader::new("parameters of a test", order, bytes);
        if service == Service::Ping.number() {
            return Ok(Self::Ping {
                size: at.u32()?,
                flags: at.u32()?,
            });
        }
        if service != Service::Bulk.number() {
            return Err(ProtoError::Type {
                what: "test",
                found: service,
            });
        }
        Ok(match features.contains(Features::BULK_LEN) {
            true => Self::Bulk {
                operation: at.u16()?.into(),
                pattern: at.u16()?.into(),
                len: at.u32()?,
                offset: at.u32()?,
            },
            false => {
                let (operation, pages, pattern) = (at.u32()?, at.u32()?, at.u32()?);
                Self::Bulk {
                    operation,
                    pattern,
                    len: pages.saturating_mul(Self::PAGE),
                    offset: 0,
                }
            }
        })
    }
}

/// Message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Message {
    /// Byte order of the sender.
    pub order: ByteOrder,
    /// Version, see [`VERSION`].
    pub version: u32,
    /// Features of the session.
    pub features: Features,
    /// Body.
    pub body: Body,
}

impl Message {
    /// Returns a little-endian message.
    pub const fn new(features: Features, body: Body) -> Self {
        Self {
            order: ByteOrder::Little,
            version: VERSION,
            features,
            body,
        }
    }

    /// Reads a message of any version.
    ///
    /// # Errors
    /// Another length than [`MESSAGE_LEN`], no magic, or an unknown type.
    pub fn parse(bytes: &[u8]) -> Result<Self, ProtoError> {
        let (Some(magic), true) = (bytes.first_chunk::<4>(), bytes.len() == MESSAGE_LEN) else {
            return Err(ProtoError::Short {
                what: WHAT,
                len: bytes.len(),
                need: MESSAGE_LEN,
            });
        };
        let order = ByteOrder::of(MAGIC, *magic).ok_or(ProtoError::Magic {
            what: WHAT,
            found: u32::from_le_bytes(*magic),
        })?;
        let mut at = Reader::new(WHAT, order, bytes);
        at.take(4)?;
        let (version, number) = (at.u32()?, at.u32()?);
        at.take(8)?;
        let features = Features::from_bits_retain(at.u32()?);
        let body = Body::read(number, &mut at)?;
        Ok(Self {
            order,
            version,
            features,
            body,
        })
    }

    /// Bytes to send.
    pub fn to_bytes(&self) -> [u8; MESSAGE_LEN] {
        let mut out = Writer::new(self.order);
        out.u32(MAGIC);
        out.u32(self.version);
        out.u32(self.body.number());
        out.u64(0);
        out.u32(self.features.bits());
        self.body.write(&mut out);
        let mut bytes = [0; MESSAGE_LEN];
        bytes[..out.out.len()].copy_from_slice(&out.out);
        bytes
    }

    /// Parameters of a request for a test.
    ///
    /// # Errors
    /// It is none, or for an unknown service.
    pub fn test(&self) -> Result<Parameters, ProtoError> {
        match &self.body {
            Body::Test {
                service, parameters, ..
            } => Parameters::read(*service, self.features, self.order, parameters),
            other => Err(ProtoError::Type {
                what: WHAT,
                found: other.number(),
            }),
        }
    }

    /// Reads the nodes that are the data of a request for a test, in its byte order.
    pub fn destinations(&self, data: &[u8]) -> Vec<Nid> {
        let nodes = data.chunks_exact(DEST_LEN).map(|node| {
            let mut at = Reader::new("node", self.order, node);
            at.u64().map(Nid)
        });
        nodes.filter_map(Result::ok).collect()
    }
}

/// Bytes of nodes, little-endian, the data of a request for a test.
pub fn destinations_to_bytes(nodes: &[Nid]) -> Vec<u8> {
    let mut out = Writer::new(ByteOrder::Little);
    for node in nodes {
        out.u64(node.0);
        out.u32(crate::proto::PID_LUSTRE);
    }
    out.out
}

// Statistics are the longest.
const _: () = assert!(HEAD_LEN + 4 + 16 + 20 + 36 + 60 == MESSAGE_LEN);
