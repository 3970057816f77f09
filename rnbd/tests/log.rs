//! Log lines that clients can cause.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use rnbd::{
    Errno,
    block::Geometry,
    proto::{AccessMode, MsgClose, MsgOpen, MsgOpenRsp, parse_open_rsp},
    server::{
        Limits,
        action::{Identity, Opened},
        disk::StoreId,
    },
};
use roce_verbs::Instant;
use rtrs::{
    Direction::{self, Read, Write},
    PathError,
    server::request::{Output, Request, RequestKey, SessionKey, SessionOpened},
};
use tracing::{
    Event, Metadata, Subscriber,
    span::{Attributes, Id, Record},
};
use zerocopy::IntoBytes;

#[path = "support/served.rs"]
mod served;

use served::{Action, Served};

/// Counts the lines of the server.
struct Lines;

static LINES: AtomicU64 = AtomicU64::new(0);

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("rnbd::server") && *metadata.level() <= tracing::Level::INFO
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        LINES.fetch_add(1, Relaxed);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

const GEOMETRY: Geometry = Geometry {
    size: 4096,
    logical_block_size: 512,
    physical_block_size: 4096,
    max_transfer: 4096,
    max_discard: 0,
    discard_granularity: 0,
    read_only: true,
    write_cache: false,
    fua: false,
    max_write_zeroes: 0,
    queue_depth: 1,
};

/// A server with one device, "disk".
struct Bench {
    server: Served,
    now: Instant,
    serial: u32,
}

impl Bench {
    /// Sends a request, and does what the server asks for until it is answered: the answer to an open.
    fn ask(&mut self, session: SessionKey, direction: Direction, header: &[u8]) -> Option<MsgOpenRsp> {
        self.serial += 1;
        let request = Request {
            key: RequestKey {
                session,
                chunk: 0,
                serial: self.serial,
            },
            direction,
            connection: 1,
            header: header.into(),
            data_len: if direction == Read { 56 } else { 0 },
            data_offset: 0,
        };
        self.server.rtrs(self.now, Output::Request(request));
        loop {
            match self.server.poll_action().expect("an answer") {
                Action::Answer(..) => return None,
                Action::AnswerWith { message, .. } => return Some(parse_open_rsp(&message).unwrap()),
                Action::Open { ticket, name, .. } => {
                    let found = Opened {
                        store: StoreId(1),
                        geometry: GEOMETRY,
                        identity: Identity(name.clone()),
                        label: "/images/disk".into(),
                        instance: None,
                    };
                    let result = if name == b"disk" {
                        Ok(found)
                    } else {
                        Err(Errno::ENOENT.into())
                    };
                    self.server.opened(self.now, ticket, result);
                }
                Action::Close { ticket, .. } => self.server.closed(self.now, ticket),
                other => panic!("{other:?}"),
            }
        }
    }

    fn open(&mut self, session: SessionKey, name: &str) -> Option<MsgOpenRsp> {
        let message = MsgOpen::new(name.as_bytes(), AccessMode::ReadOnly).unwrap();
        self.ask(session, Read, message.as_bytes())
    }

    /// All that a client can cause, many times.
    fn session(&mut self, number: u64) {
        let session = SessionKey(number);
        let opened = SessionOpened {
            session,
            name: format!("s{number}"),
            peer: ([192, 0, 2, 1], 1000).into(),
            connections: 2,
        };
        self.server.rtrs(self.now, Output::SessionOpened(opened));
        for _ in 0..OPENS {
            assert!(self.open(session, "none").is_none());
            let id = self.open(session, "disk").unwrap().device_id.get();
            self.ask(session, Write, MsgClose::new(id).as_bytes());
            self.ask(session, Write, b"nonsense");
        }
        let why = PathError::PeerDisconnected;
        self.server.rtrs(self.now, Output::SessionClosed { session, why });
    }
}

const SESSIONS: u64 = 12;
const OPENS: u64 = 50;

/// A throttle of each session would let a line of each kind through per session.
#[test]
fn clients_do_not_fill_the_log() {
    tracing::subscriber::set_global_default(Lines).unwrap();
    let mut bench = Bench {
        server: Served::new(Limits::default()),
        now: Instant::ZERO,
        serial: 0,
    };
    // Sessions, devices, refused opens, malformed messages: a line of each per second.
    for second in 1..=3 {
        for n in 0..SESSIONS {
            bench.session(second * SESSIONS + n);
        }
        assert_eq!(LINES.load(Relaxed), 4 * second);
        bench.now = bench.now + Duration::from_secs(1);
    }
    let counters = bench.server.counters();
    assert_eq!(
        (counters.refused, counters.malformed),
        (3 * SESSIONS * OPENS, 3 * SESSIONS * OPENS)
    );
    assert!(bench.server.is_idle());
}
