//! Model of a stock node (`ko2iblnd`) that connects: what it asks for, accepts, refuses and tries again.
//!
//! It is written from what live kernels did and shares nothing with the crate. Its tests hold it against their captures.

use core::time::Duration;

use crate::capture::{Cm, Item, read_of};

const MAGIC: u32 = 0x0be9_1b91;
pub(crate) const VERSION_1: u16 = 0x11;
pub(crate) const VERSION_2: u16 = 0x12;
pub(crate) const CONNREQ: u8 = 0xc0;
pub(crate) const CONNACK: u8 = 0xc1;
/// Bytes of a CONNREQ or CONNACK, and of a reject.
pub(crate) const HELLO_LEN: usize = 56;
const REJECT_LEN: usize = 24;
const MAX_SIZE: u32 = 4096;

fn put(out: &mut Vec<u8>, big: bool, value: u64, len: usize) {
    match big {
        true => out.extend(&value.to_be_bytes()[8 - len..]),
        false => out.extend(&value.to_le_bytes()[..len]),
    }
}

/// A field; 0 where nothing is.
fn get(bytes: &[u8], big: bool, at: usize, len: usize) -> u64 {
    let byte = |i: usize| u64::from(bytes.get(at + i).copied().unwrap_or(0));
    let shift = |i: usize| 8 * if big { len - 1 - i } else { i };
    (0..len).map(|i| byte(i) << shift(i)).sum()
}

fn order(bytes: &[u8]) -> Option<bool> {
    [false, true]
        .into_iter()
        .find(|big| get(bytes, *big, 0, 4) == u64::from(MAGIC))
}

/// Checksum as of x86 before Linux 6.2: bytes are signed.
pub(crate) fn checksum(bytes: &[u8]) -> u32 {
    let byte = |(at, byte): (usize, &u8)| if (12..16).contains(&at) { 0 } else { *byte as i8 };
    let add = |sum: u32, byte: i8| sum.rotate_left(1).wrapping_add(i32::from(byte) as u32);
    bytes.iter().enumerate().map(byte).fold(0, add).max(1)
}

/// CONNREQ or CONNACK.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Hello {
    pub(crate) big: bool,
    pub(crate) version: u16,
    pub(crate) kind: u8,
    pub(crate) nob: u32,
    pub(crate) checksum: u32,
    pub(crate) src: u64,
    pub(crate) src_stamp: u64,
    pub(crate) dst: u64,
    pub(crate) dst_stamp: u64,
    pub(crate) depth: u16,
    pub(crate) frags: u16,
    pub(crate) size: u32,
}

impl Hello {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for (value, len) in [
            (u64::from(MAGIC), 4),
            (self.version.into(), 2),
            (self.kind.into(), 1),
            (0, 1),
            (self.nob.into(), 4),
            (self.checksum.into(), 4),
            (self.src, 8),
            (self.src_stamp, 8),
            (self.dst, 8),
            (self.dst_stamp, 8),
            (self.depth.into(), 2),
            (self.frags.into(), 2),
            (self.size.into(), 4),
        ] {
            put(&mut out, self.big, value, len);
        }
        out
    }

    /// Reads one that a node understands (`kiblnd_unpack_msg`).
    fn read(bytes: &[u8]) -> Option<Self> {
        let big = order(bytes)?;
        let field = |at, len| get(bytes, big, at, len);
        let hello = Self {
            big,
            version: field(4, 2) as u16,
            kind: field(6, 1) as u8,
            nob: field(8, 4) as u32,
            checksum: field(12, 4) as u32,
            src: field(16, 8),
            src_stamp: field(24, 8),
            dst: field(32, 8),
            dst_stamp: field(40, 8),
            depth: field(48, 2) as u16,
            frags: field(50, 2) as u16,
            size: field(52, 4) as u32,
        };
        let is_known = [VERSION_1, VERSION_2].contains(&hello.version) && [CONNREQ, CONNACK].contains(&hello.kind);
        let nob = hello.nob as usize;
        let is_whole = (HELLO_LEN..=bytes.len()).contains(&nob);
        let is_right = is_known && is_whole && [0, checksum(&bytes[..nob])].contains(&hello.checksum);
        is_right.then_some(hello)
    }
}

/// Reject.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Reject {
    pub(crate) big: bool,
    pub(crate) version: u16,
    pub(crate) why: u8,
    pub(crate) stamp: u64,
    pub(crate) depth: u16,
    pub(crate) frags: u16,
    pub(crate) size: u32,
}

impl Reject {
    /// The reject of a node that does not know yet which of its interfaces is meant.
    pub(crate) const EARLY: Self = Self {
        big: false,
        version: VERSION_2,
        why: 3,
        stamp: 0,
        depth: 0,
        frags: 0,
        size: MAX_SIZE,
    };

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for (value, len) in [
            (u64::from(MAGIC), 4),
            (self.version.into(), 2),
            (self.why.into(), 1),
            (0, 1),
            (self.stamp, 8),
            (self.depth.into(), 2),
            (self.frags.into(), 2),
            (self.size.into(), 4),
        ] {
            put(&mut out, self.big, value, len);
        }
        assert_eq!(out.len(), REJECT_LEN);
        out
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let big = order(bytes)?;
        let field = |at, len| get(bytes, big, at, len);
        Some(Self {
            big,
            version: field(4, 2) as u16,
            why: field(6, 1) as u8,
            stamp: field(8, 8),
            depth: field(16, 2) as u16,
            frags: field(18, 2) as u16,
            size: field(20, 4) as u32,
        })
    }
}

/// Answer to a request, with its private data.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    Accept(Vec<u8>),
    Reject(Vec<u8>),
}

impl core::fmt::Debug for Answer {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let (name, bytes) = match self {
            Self::Accept(bytes) => ("accept", bytes),
            Self::Reject(bytes) => ("reject", bytes),
        };
        write!(f, "{name} {bytes:02x?}")
    }
}

/// Decision after a reject.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// Asks again after this time.
    Again(Duration),
    GivesUp,
}

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    pub(crate) nid: u64,
    pub(crate) peer: u64,
    pub(crate) stamp: u64,
    pub(crate) depth: u16,
    pub(crate) frags: u16,
    /// Byte order of its messages.
    pub(crate) big: bool,
    /// Incarnation of the peer whose connections stand.
    pub(crate) connected: Option<u64>,
    /// Parameters of the next request.
    asks: (u16, u64, u16, u16),
    refused: u32,
}

impl Kernel {
    pub(crate) const fn new((nid, stamp): (u64, u64), peer: u64, (depth, frags): (u16, u16), big: bool) -> Self {
        Self {
            nid,
            peer,
            stamp,
            depth,
            frags,
            big,
            connected: None,
            asks: (VERSION_2, 0, depth, frags),
            refused: 0,
        }
    }

    /// It knows this incarnation of the peer.
    pub(crate) const fn asks_for(&mut self, stamp: u64) {
        self.asks.1 = stamp;
    }

    /// It asks with this version.
    pub(crate) const fn speaks(&mut self, version: u16) {
        self.asks.0 = version;
    }

    const fn hello(&self, kind: u8) -> Hello {
        Hello {
            big: self.big,
            version: VERSION_2,
            kind,
            nob: HELLO_LEN as u32,
            checksum: 0,
            src: self.nid,
            src_stamp: self.stamp,
            dst: self.peer,
            dst_stamp: 0,
            depth: self.depth,
            frags: self.frags,
            size: MAX_SIZE,
        }
    }

    /// Returns its request to connect.
    pub(crate) const fn request(&self) -> Hello {
        let (version, dst_stamp, depth, frags) = self.asks;
        Hello {
            version,
            dst_stamp,
            depth,
            frags,
            ..self.hello(CONNREQ)
        }
    }

    /// Returns its answer to a request that has these parameters.
    pub(crate) const fn acceptance(&self, request: &Hello) -> Hello {
        Hello {
            version: request.version,
            dst: request.src,
            dst_stamp: request.src_stamp,
            depth: request.depth,
            frags: request.frags,
            ..self.hello(CONNACK)
        }
    }

    /// Returns its reject, once it knows which of its interfaces is meant.
    pub(crate) const fn reject(&self, version: u16, why: u8) -> Reject {
        Reject {
            big: self.big,
            version,
            why,
            stamp: self.stamp,
            depth: self.depth,
            frags: self.frags,
            size: MAX_SIZE,
        }
    }

    /// A peer asks (`kiblnd_passive_connect`). The checks are in this order.
    pub(crate) fn asked(&mut self, private: &[u8]) -> Answer {
        let early = Reject {
            big: self.big,
            ..Reject::EARLY
        };
        let Some(request) = Hello::read(private).filter(|request| request.dst == self.nid) else {
            return Answer::Reject(early.bytes());
        };
        let is_old = request.version == VERSION_1;
        let why = match () {
            () if ![0, self.stamp].contains(&request.dst_stamp) => 5,
            () if request.kind != CONNREQ => 3,
            () if request.depth > self.depth && is_old => 3,
            () if request.depth > self.depth => 7,
            () if request.frags > self.frags => 6,
            () if request.size > MAX_SIZE => 3,
            () if self.connected.is_some_and(|stamp| stamp != request.src_stamp) => {
                self.connected = None;
                5
            }
            () => {
                self.connected = Some(request.src_stamp);
                return Answer::Accept(self.acceptance(&request).bytes());
            }
        };
        Answer::Reject(self.reject(request.version, why).bytes())
    }

    /// The peer has refused (`kiblnd_rejected`).
    pub(crate) fn rejected(&mut self, private: &[u8]) -> Next {
        let (version, _, depth, frags) = self.asks;
        let Some(reject) = Reject::read(private) else {
            return self.gives_up();
        };
        match reject.why {
            1 | 4 => {}
            5 => self.asks.1 = reject.stamp,
            7 if (1..depth).contains(&reject.depth) => self.asks.2 = reject.depth,
            6 if reject.frags < frags => self.asks.3 = reject.frags,
            3 if (version, reject.version) == (VERSION_2, VERSION_1) => (self.asks.0, self.asks.1) = (VERSION_1, !0),
            _ => return self.gives_up(),
        }
        self.refused += 1;
        Next::Again(Duration::from_secs(u64::from(self.refused > 10)))
    }

    fn gives_up(&mut self) -> Next {
        self.forget();
        Next::GivesUp
    }

    /// Nothing of the peer is left.
    fn forget(&mut self) {
        (self.asks, self.refused) = ((VERSION_2, 0, self.depth, self.frags), 0);
    }

    /// The peer has accepted (`kiblnd_check_connreply`). Returns depth and fragments, unless it closes the connection.
    pub(crate) fn accepted(&self, private: &[u8]) -> Option<(u16, u16)> {
        let (version, _, depth, frags) = self.asks;
        let answer = Hello::read(private)?;
        let is_right = (answer.version, answer.kind) == (version, CONNACK)
            && (answer.dst, answer.dst_stamp) == (self.nid, self.stamp)
            && answer.depth <= depth
            && answer.frags <= frags
            && answer.size <= MAX_SIZE;
        is_right.then_some((answer.depth, answer.frags))
    }
}

const HOSTS: [[u8; 4]; 2] = [[10, 77, 0, 1], [10, 77, 0, 2]];

pub(crate) const fn nid(address: [u8; 4]) -> u64 {
    5 << 48 | u32::from_be_bytes(address) as u64
}

/// Items of a capture, and whether they are the first host's.
fn items(name: &str) -> Vec<(bool, Item)> {
    let of = |host: usize| read_of(&format!("lnet/{name}.pcap"), Some(HOSTS[host])).into_iter();
    let mut items: Vec<(bool, Item)> = of(0).map(|item| (true, item)).collect();
    items.extend(of(1).map(|item| (false, item)));
    items.sort_by_key(|(_, item)| match item {
        Item::Private(frame, ..) | Item::Send(frame, _) => *frame,
    });
    items
}

/// The first host, at its defaults.
fn captured(items: &[(bool, Item)]) -> Kernel {
    let stamp = items.iter().find_map(|(is_first, item)| match item {
        Item::Private(_, Cm::Req | Cm::Rep, _, bytes) if *is_first => Some(get(bytes, false, 24, 8)),
        _ => None,
    });
    let nids = HOSTS.map(nid);
    Kernel::new((nids[0], stamp.unwrap()), nids[1], (8, 257), false)
}

#[test]
fn it_answers_requests_as_the_captured_kernel() {
    let items = items("odd-requests");
    let mut kernel = captured(&items);
    let (mut answer, mut count) = (None, 0);
    for (_, item) in &items {
        match item {
            Item::Private(frame, Cm::Req, _, bytes) => {
                // Each connection has ended before the next request, but for the last two.
                if *frame != 134 {
                    kernel.connected = None;
                }
                answer = Some(kernel.asked(bytes));
            }
            Item::Private(frame, cm, _, bytes) => {
                count += 1;
                match (answer.take(), cm) {
                    (Some(Answer::Accept(own)), Cm::Rep) | (Some(Answer::Reject(own)), Cm::Rej) => {
                        assert_eq!(own, bytes[..own.len()], "frame {frame}");
                    }
                    (answer, cm) => panic!("frame {frame}: {cm:?}, not {answer:?}"),
                }
            }
            Item::Send(..) => {}
        }
    }
    assert_eq!(count, 40);
}

#[test]
fn it_asks_again_as_the_captured_kernel() {
    let items = items("odd-rejects");
    let mut kernel = captured(&items);
    let (mut requests, mut slow) = (0, Vec::new());
    for (is_first, item) in &items {
        match item {
            Item::Private(frame, Cm::Req, _, bytes) => {
                requests += 1;
                assert_eq!(kernel.request().bytes(), *bytes, "frame {frame}");
            }
            // Nobody has answered, or a connection has ended.
            Item::Private(_, Cm::Rej, ..) if *is_first => kernel.forget(),
            Item::Private(_, Cm::Rep, ..) => kernel.forget(),
            Item::Private(frame, Cm::Rej, _, bytes) => {
                if kernel.rejected(bytes) == Next::Again(Duration::from_secs(1)) {
                    slow.push(*frame);
                }
            }
            Item::Send(..) => {}
        }
    }
    assert_eq!(requests, 59);
    // The capture's times: 22 and 103 are followed a second later, those before at once.
    assert_eq!(
        (slow.first(), slow.contains(&101), slow.contains(&103)),
        (Some(&22), false, true)
    );
}

#[test]
fn it_judges_answers_as_the_captured_kernel() {
    let items = items("odd-acks");
    let kernel = captured(&items);
    let mut found = Vec::new();
    for (at, (_, item)) in items.iter().enumerate() {
        let Item::Private(frame, Cm::Rep, _, bytes) = item else {
            continue;
        };
        // Its ping is sent over a connection that it takes.
        let until = |item: &&(bool, Item)| !matches!(item, (_, Item::Private(_, Cm::Req, ..)));
        let mut then = items[at + 1..].iter().take_while(until);
        let is_taken = then.any(|item| matches!(item, (true, Item::Send(..))));
        assert_eq!(kernel.accepted(bytes).is_some(), is_taken, "frame {frame}");
        found.push(is_taken);
    }
    assert_eq!(
        (found.len(), found.iter().filter(|is_taken| **is_taken).count()),
        (11, 4)
    );
}
