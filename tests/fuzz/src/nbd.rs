//! What a client of the NBD server sends: negotiation, with TLS as the server wants it, and requests. A second reading of the protocol
//! follows the server's answers, in order, with a copy of the device: no answer that nobody asked for, no data of another place, no
//! effect of what was refused, and nothing that is in order is refused. However the bytes are cut, the answers are the same. TLS itself
//! changes no byte here: what counts is what is said before it, and what is forgotten. Meanwhile exports come and go.

mod reader;
mod server;

use rnbd::{
    block::{self, Extent, Geometry},
    nbd::{End, TlsMode},
};
use roce_verbs::Instant;

use reader::Reader;
use server::{Manner, Server};

const MAX_INPUT: usize = 32 << 10;
const SIZE: usize = 64 << 10;
/// Exports and their devices. The last one is there only when it is offered.
const NAMES: [(&str, &str); 3] = [("disk", "/images/a"), ("other", "b"), ("more", "/images/c")];
/// So many are there at the beginning.
const AT_FIRST: usize = 2;
/// Bytes of the answer to STARTTLS.
const PROMISE: usize = 20;
/// When a negotiation has to be over, its answers taken.
const NEGOTIATION: Instant = Instant::from_nanos(30_000_000_000);

fn geometry(config: u8) -> Geometry {
    let bit = |n: u8| config >> n & 1 != 0;
    Geometry {
        size: SIZE as u64,
        logical_block_size: if bit(0) { 4096 } else { 512 },
        physical_block_size: 4096,
        max_transfer: if bit(1) { 4096 } else { 16 << 10 },
        max_discard: if bit(2) { 8192 } else { 0 },
        discard_granularity: 4096,
        read_only: bit(3),
        write_cache: bit(4),
        fua: bit(5),
        max_write_zeroes: if bit(4) { 1 << 30 } else { 0 },
        queue_depth: if bit(6) { 8 } else { 1 },
    }
}

fn content() -> Vec<u8> {
    (0..SIZE).map(|i| (i / 512) as u8 ^ i as u8).collect()
}

/// What the devices say of a range: every fourth block of 4 KiB is a hole, whatever it holds.
fn extents(offset: u64, len: u64, most: usize) -> Vec<Extent> {
    let mut all = Vec::new();
    let (mut at, end) = (offset, offset + len);
    while at < end {
        let next = (at / 4096 * 4096 + 4096).min(end);
        let hole = at / 4096 % 4 == 3;
        block::append(
            &mut all,
            if hole {
                Extent::hole(next - at)
            } else {
                Extent::data(next - at)
            },
        );
        at = next;
    }
    all.truncate(most);
    all
}

/// What becomes of an export.
#[derive(Clone, Copy, Debug)]
enum Change {
    /// It can't be chosen any more.
    Withdraw(usize),
    /// The last one comes.
    Offer,
}

/// What happens to exports, each when so many bytes have been received and answered.
fn changes(bytes: [u8; 2]) -> Vec<(usize, Change)> {
    let change = |byte: u8| {
        let change = match byte & 3 {
            0 => return None,
            1 => Change::Withdraw(0),
            2 => Change::Withdraw(1),
            _ => Change::Offer,
        };
        Some((4 + usize::from(byte >> 2) * 8, change))
    };
    let mut all: Vec<_> = bytes.into_iter().filter_map(change).collect();
    all.sort_by_key(|(at, _)| *at);
    // It comes once.
    let mut offered = false;
    all.retain(|(_, change)| !matches!(change, Change::Offer) || !core::mem::replace(&mut offered, true));
    all
}

/// What is not in the first bytes is sent to a server; see the module. These are what the device is like, TLS, and two changes of
/// the exports.
pub fn run(data: &[u8]) {
    let Some(([config, tls, first, second], sent)) = data.split_first_chunk::<4>() else {
        return;
    };
    let sent = &sent[..sent.len().min(MAX_INPUT)];
    let geometry = geometry(*config);
    let mode = match tls & 3 {
        0 => TlsMode::Off,
        1 => TlsMode::On,
        _ => TlsMode::Require,
    };
    let changes = changes([*first, *second]);
    // Byte by byte it shows where TLS begins: there a client waits.
    let mut slowly = Server::new(geometry, mode, &changes, sent);
    slowly.serve(Manner {
        options: 1,
        receive: 1 + sent.len() % 97,
        send: 1 + sent.len() % 1009,
        pause: config >> 7 != 0,
    });
    let mut server = Server::new(geometry, mode, &changes, sent);
    server.wait_at = slowly.secured.map(|(at, _)| at);
    server.serve(Manner::AT_ONCE);
    assert!(
        server.secured == slowly.secured,
        "TLS begins elsewhere when the bytes are cut"
    );
    assert!(server.answers == slowly.answers, "other answers when the bytes are cut");
    assert!(
        server.device.content == slowly.device.content,
        "other content when the bytes are cut"
    );
    if let Some((at, answered)) = server.secured.filter(|(at, _)| changes.is_empty() && *at < sent.len()) {
        let mut hasty = Server::new(geometry, mode, &[], sent);
        hasty.serve(Manner::AT_ONCE);
        assert_eq!(hasty.secured, None, "more than STARTTLS has come with it, up to {at}");
        assert!(matches!(hasty.ended(), End::Protocol(_)));
        assert!(
            hasty.answers == server.answers[..answered - PROMISE],
            "it is promised TLS"
        );
    }
    check(&server, sent, mode, &changes);
}

fn check(server: &Server<'_>, sent: &[u8], mode: TlsMode, changes: &[(usize, Change)]) {
    let mut reader = Reader::new(server.device.geometry, mode, changes, sent, &server.answers);
    let chosen = reader.negotiation();
    assert_eq!(reader.secured(), server.secured.map(|(at, _)| at), "where TLS begins");
    let mut models = NAMES.map(|_| content());
    if let Some((index, allowed)) = chosen {
        let whole = reader.transmission(index, allowed, &mut models[index]);
        if !whole {
            models[index].clone_from(&server.device.content[index]);
        }
    }
    assert!(
        server.device.content == models,
        "the devices have other content than was written"
    );
    assert!(reader.is_done(), "answers to nothing");
}
