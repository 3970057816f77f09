//! Work requests that must fail.

use ferroce_pages::PAGE;
use roce_verbs::mem::Region;
use roce_verbs::{RKey, RemoteAddr, SendOp, Sge, WcOpcode, WcStatus};

use crate::{
    model::{Expect, FastKey, Message, TARGET},
    ops::Draft,
    world::World,
};

/// Fault of a work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    RemoteKey,
    /// A key of memory whose pages the peer has unmapped, protected or truncated.
    RemotePage,
    RemoteRange,
    RemoteRight,
    LocalKey,
    /// Into own memory whose pages are missing.
    LocalPage,
    Misaligned,
    TooLong,
    /// A fast key or window that was invalidated.
    ClosedKey,
    /// A SEND that wants to invalidate a key that can't be.
    Invalidate,
}

const FAULTS: [Fault; 8] = [
    Fault::RemoteKey,
    Fault::RemoteRange,
    Fault::RemoteRight,
    Fault::LocalKey,
    Fault::Misaligned,
    Fault::TooLong,
    Fault::ClosedKey,
    Fault::Invalidate,
];

impl Fault {
    /// Returns the status of the work request.
    fn status(self) -> WcStatus {
        match self {
            Self::Misaligned => WcStatus::RemoteInvalidRequestError,
            Self::LocalKey | Self::LocalPage => WcStatus::LocalProtectionError,
            _ => WcStatus::RemoteAccessError,
        }
    }

    /// Turns half of the bad keys into keys of missing pages, by the work request's number: so runs draw as many random numbers as they
    /// did before.
    fn of_pages(self, wr_id: u64) -> Self {
        match self {
            Self::RemoteKey if wr_id & 1 == 1 => Self::RemotePage,
            Self::LocalKey if wr_id & 1 == 1 => Self::LocalPage,
            other => other,
        }
    }
}

/// Offset of a message of so many bytes in a region of missing pages: some of it is on the page that is there.
fn before_hole(len: usize) -> u64 {
    let there = (len / 2).min(PAGE) & !7;
    (PAGE - there) as u64
}

impl World {
    /// Drafts a work request that must fail.
    pub(crate) fn draft_fault(&mut self, conn: usize, end: usize) -> Option<Draft> {
        let fault = self.rng.pick(&FAULTS);
        let mut draft = match fault {
            Fault::TooLong => {
                let most = *self.conns[conn].ends[1 - end].session.promised.front()?;
                return self.draft_too_long(conn, end, most);
            }
            Fault::Invalidate => return self.draft_bad_invalidation(conn, end),
            Fault::Misaligned if self.scenario.extended && self.rng.chance(0.3) => {
                self.draft_atomic_write(conn, end)?
            }
            Fault::Misaligned => self.draft_atomic(conn, end)?,
            Fault::LocalKey => self.draft_read(conn, end)?,
            _ if self.scenario.extended && self.rng.chance(0.1) => self.draft_atomic_write(conn, end)?,
            _ if self.rng.chance(0.4) => self.draft_atomic(conn, end)?,
            _ if self.rng.chance(0.5) => self.draft_read(conn, end)?,
            _ => self.draft_write(conn, end)?,
        };
        let peer = &self.conns[conn].ends[1 - end];
        let len = match &draft.sent.effect {
            Some(effect) => effect.new.len(),
            None => draft.sent.byte_len as usize,
        };
        // Nothing is checked for nothing (IBA C9-88).
        let is_possible = fault != Fault::ClosedKey
            || peer.session.fast.is_some() && peer.session.fast_key == FastKey::Closed && len <= peer.fast_view.1;
        if len == 0 || !is_possible {
            return Some(draft);
        }
        let fault = fault.of_pages(draft.sent.wr_id);
        self.spoil_remote(conn, end, &mut draft.op, fault, len);
        self.spoil_local(conn, end, &mut draft.sges, fault, len);
        self.stats.missing_pages += u64::from(matches!(fault, Fault::RemotePage | Fault::LocalPage));
        let status = fault.status();
        draft.sent.expect = Expect::Fails(status);
        draft.sent.effect = None;
        if let Some(message) = &mut draft.message {
            // A receive is only taken by a WRITE with immediate data (IBA 11.6.2).
            message.fails = Some(match status {
                WcStatus::RemoteAccessError => WcStatus::LocalAccessError,
                other => other,
            });
        }
        Some(draft)
    }

    /// Makes the peer's memory that an operation names the wrong one.
    fn spoil_remote(&mut self, conn: usize, end: usize, op: &mut SendOp, fault: Fault, len: usize) {
        let shift = self.rng.range(1, 7);
        let peer = &self.conns[conn].ends[1 - end];
        let Some(remote) = remote_of(op) else { return };
        let at = |region: &Region, offset| RemoteAddr {
            addr: region.addr() + offset,
            rkey: region.rkey(),
        };
        match fault {
            Fault::RemoteKey => remote.rkey = RKey(peer.target.rkey().0 ^ 0x00a5_5a00),
            Fault::RemotePage => *remote = at(&peer.hole, before_hole(len)),
            Fault::RemoteRange => {
                // Whole words, so that an atomic is not refused for another reason.
                let end = TARGET.next_multiple_of(8) as u64 - len as u64 / 8 * 8;
                *remote = at(&peer.target, end + 8);
            }
            Fault::RemoteRight => *remote = at(&peer.local, 0),
            Fault::Misaligned => *remote = at(&peer.target, shift),
            Fault::ClosedKey => {
                if let Some(grant) = &peer.session.fast {
                    *remote = RemoteAddr {
                        addr: (peer.fast_view.2 + 7) & !7,
                        rkey: grant.rkey(),
                    };
                }
            }
            Fault::LocalKey | Fault::LocalPage | Fault::TooLong | Fault::Invalidate => {}
        }
    }

    /// Makes the own memory of a work request the wrong one.
    fn spoil_local(&self, conn: usize, end: usize, sges: &mut Vec<Sge>, fault: Fault, len: usize) {
        match fault {
            Fault::LocalKey => sges.iter_mut().for_each(|sge| sge.lkey.0 ^= 0x0077_0000),
            Fault::LocalPage => {
                let hole = &self.conns[conn].ends[end].hole;
                *sges = vec![Sge {
                    addr: hole.addr() + before_hole(len),
                    length: len as u32,
                    lkey: hole.lkey(),
                }];
            }
            _ => {}
        }
    }

    /// Drafts a SEND that its receive can't take.
    fn draft_too_long(&mut self, conn: usize, end: usize, most: usize) -> Option<Draft> {
        let len = most + self.rng.pick(&[1, 2, 5000]);
        let data = self.rng.bytes(len);
        let sent = self.blank(conn, end, "SEND", WcOpcode::Send);
        let mut draft = Draft::new(sent, SendOp::Send);
        self.payload(conn, end, &data, &mut draft)?;
        draft.sent.expect = Expect::Fails(WcStatus::RemoteInvalidRequestError);
        draft.message = Some(Message {
            data: Some(data),
            len,
            too_long: true,
            ..Message::default()
        });
        Some(draft)
    }

    /// Drafts a SEND that arrives, but names the peer's target to be invalidated, which is not for peers to do: acknowledged,
    /// and then the receiver fails (class J of IBA table 57).
    fn draft_bad_invalidation(&mut self, conn: usize, end: usize) -> Option<Draft> {
        let key = self.conns[conn].ends[1 - end].target.rkey();
        let mut draft = self.draft_send(conn, end, Some(key))?;
        draft.message.as_mut()?.fails = Some(WcStatus::RemoteInvalidRequestError);
        Some(draft)
    }
}

/// Returns the remote address of an operation.
fn remote_of(op: &mut SendOp) -> Option<&mut RemoteAddr> {
    match op {
        SendOp::Write(remote)
        | SendOp::WriteWithImm(remote, _)
        | SendOp::Read(remote)
        | SendOp::AtomicWrite(remote)
        | SendOp::CompareSwap { remote, .. }
        | SendOp::FetchAdd { remote, .. } => Some(remote),
        _ => None,
    }
}
