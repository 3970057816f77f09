//! The work requests of a server's connection.
//!
//! What a turn of the loop brings forth is posted by kind: the data of all reads, the ends of all destinations' keys, the new
//! keys of the chunks, all answers. Packets of one kind and length leave in one train, so that is much cheaper than one answer
//! after the other. The data of a request and the end of its key still come before its answer.

use core::slice;
use std::sync::Arc;

use roce_verbs::mem::Pages;
use roce_verbs::{
    AccessFlags, Payload, QpState, RKey, RemoteAddr, SendFlags, SendOp, SendWr, Sge,
    provider::{DeviceCaps, GrantOf, Granted, KeyId, KeyStrategy, MrInfo, QpId, Revoked},
    wr::PostError,
};
use smallvec::SmallVec;
use zerocopy::IntoBytes;

use crate::{
    cx::Cx,
    mark::{Mark, MarkKind},
    proto::{ChunkLayout, Imm, InfoReq, InfoRsp, IoReply, RkeyRsp, SgDesc},
    sendq::{SendQueue, Work},
};

/// Slots that the renewal of a key may take: a provider may have to end the former key first.
const GRANT_SLOTS: u32 = 2;

/// Access of a client to a chunk.
const CHUNK_ACCESS: AccessFlags = AccessFlags::LOCAL_WRITE.union(AccessFlags::REMOTE_WRITE);

/// How the keys of a path's chunks are renewed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Renewal {
    /// Not at all: one key opens all chunks as long as the path lives.
    Never,
    /// At once.
    Instant,
    /// By work requests.
    Queued,
}

impl Renewal {
    /// On a device that can do this much.
    pub(crate) fn of(strategy: KeyStrategy, caps: &DeviceCaps) -> Self {
        match strategy {
            KeyStrategy::Static => Self::Never,
            _ if caps.instant_keys => Self::Instant,
            _ => Self::Queued,
        }
    }

    /// Slots of the send queue that an answer takes at most.
    pub(crate) const fn answer_slots(self) -> u32 {
        // Data, end of the destination's key, answer.
        3 + self.grant_slots()
    }

    const fn grant_slots(self) -> u32 {
        match self {
            Self::Queued => GRANT_SLOTS,
            Self::Never | Self::Instant => 0,
        }
    }
}

/// Answer to a request that is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Answer {
    /// The chunk.
    pub(crate) chunk: u16,
    /// 0, or a positive error number of 9 bits.
    pub(crate) errno: u16,
    /// Destination of the data of a read, also when it failed: its key may have to be revoked.
    pub(crate) dest: Option<SgDesc>,
    /// The client wants that.
    pub(crate) need_inval: bool,
}

impl Answer {
    fn data(&self) -> Option<SgDesc> {
        self.dest.filter(|_| self.errno == 0)
    }

    fn ended_key(&self) -> Option<RKey> {
        let dest = self.dest.filter(|_| self.need_inval)?;
        Some(RKey(dest.key.get()))
    }

    fn imm(&self) -> u32 {
        let reply = IoReply {
            msg_id: self.chunk.into(),
            errno: self.errno,
            invalidated: self.need_inval,
        };
        Imm::IoRsp(reply).encode()
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum What {
    /// Takes the key of a chunk back, to work on its request.
    Revoke(u16),
    /// The answer to a request.
    Answer(Answer),
    /// A heartbeat message.
    Imm(Imm),
    /// Opens all chunks and tells the client where they are.
    Info,
}

/// Work that a server posts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ServerWork {
    what: What,
    cost: u32,
}

impl ServerWork {
    /// Takes the key of a chunk back by a work request.
    pub(crate) const fn revoke(chunk: u16) -> Self {
        let what = What::Revoke(chunk);
        Self { what, cost: 1 }
    }

    /// The answer to a request.
    pub(crate) fn answer(answer: Answer, renewal: Renewal) -> Self {
        let parts = 1 + u32::from(answer.data().is_some()) + u32::from(answer.ended_key().is_some());
        Self {
            what: What::Answer(answer),
            cost: parts + renewal.grant_slots(),
        }
    }

    /// A heartbeat message.
    pub(crate) const fn imm(imm: Imm) -> Self {
        let what = What::Imm(imm);
        Self { what, cost: 1 }
    }

    /// The addresses of so many chunks. Posted once, into an empty queue that is made large enough; the chunks have no
    /// former key.
    pub(crate) fn info(chunks: u32, renewal: Renewal) -> Self {
        let grants = if renewal == Renewal::Queued { chunks } else { 0 };
        Self {
            what: What::Info,
            cost: grants + 1,
        }
    }
}

impl Work for ServerWork {
    fn cost(&self) -> u32 {
        self.cost
    }

    fn heartbeat(&self) -> Option<Imm> {
        match self.what {
            What::Imm(imm) => Some(imm),
            _ => None,
        }
    }
}

/// The memory of a path's information request, and behind it that of the response.
#[derive(Debug)]
pub(crate) struct InfoMemory {
    pub(crate) pages: Arc<Pages>,
    pub(crate) mr: MrInfo,
}

/// State of a path that posting needs.
#[derive(Debug)]
pub(crate) struct Ground<'a> {
    pub(crate) qp: QpId,
    /// All chunks, one after the other.
    pub(crate) chunks: &'a MrInfo,
    pub(crate) layout: &'a ChunkLayout,
    /// By chunk; none if they are never renewed.
    pub(crate) keys: &'a [KeyId],
    pub(crate) renewal: Renewal,
    pub(crate) info: Option<&'a InfoMemory>,
}

const NO_KEY: PostError = PostError::Invalid("the chunk has no revocable key");

impl Ground<'_> {
    fn chunk_addr(&self, chunk: u16) -> u64 {
        let offset = u64::from(chunk) * u64::from(self.layout.chunk_size());
        self.chunks.addr.wrapping_add(offset)
    }

    fn key(&self, chunk: u16) -> Result<KeyId, PostError> {
        self.keys.get(usize::from(chunk)).copied().ok_or(NO_KEY)
    }

    /// Gives a chunk a new key.
    fn grant(&self, cx: &mut Cx<'_>, chunk: u16) -> Result<Granted, PostError> {
        let size = self.layout.chunk_size() as usize;
        let grant = GrantOf {
            mr: self.chunks.id,
            offset: usize::from(chunk) * size,
            len: size,
            iova: None,
            access: CHUNK_ACCESS,
        };
        cx.provider.grant(self.qp, self.key(chunk)?, &grant, send_mark(0))
    }

    /// Opens the chunks and writes down where they are: a piece per chunk, or one piece for all when the key never changes.
    /// Returns the bytes to send.
    fn describe(&self, cx: &mut Cx<'_>) -> Result<Sge, PostError> {
        let (size, depth) = (self.layout.chunk_size(), self.layout.queue_depth());
        let mut desc = Vec::with_capacity(self.keys.len().max(1));
        if self.renewal == Renewal::Never {
            desc.push(SgDesc::new(self.chunks.addr, self.chunks.rkey.0, size * depth));
        } else {
            for chunk in 0..depth as u16 {
                let key = self.grant(cx, chunk)?.rkey();
                desc.push(SgDesc::new(self.chunk_addr(chunk), key.0, size));
            }
        }
        let bytes = InfoRsp::new(desc).to_bytes();
        let info = self
            .info
            .ok_or(PostError::Invalid("a path without memory for the information response"))?;
        let written = info.pages.write(InfoReq::LEN, &bytes);
        written.map_err(|_| PostError::Invalid("the information response does not fit"))?;
        Ok(Sge {
            addr: info.mr.addr.wrapping_add(InfoReq::LEN as u64),
            length: bytes.len() as u32,
            lkey: info.mr.lkey,
        })
    }
}

/// The mark of a send that accounts for so many batches of slots; 0: of one that completes only when it fails, or for whose
/// completion nobody waits.
const fn send_mark(signals: u32) -> u64 {
    Mark::new(MarkKind::Send, signals).encode()
}

/// The mark of the end of a chunk's key.
const fn revoke_mark(chunk: u16, signals: u16) -> u64 {
    Mark::new(MarkKind::Revoke, (signals as u32) << 16 | chunk as u32).encode()
}

/// Chunk and accounted batches of a revocation's mark.
pub(crate) const fn revoked(index: u32) -> (u16, u32) {
    (index as u16, index >> 16)
}

/// Takes the key of a chunk back outside of the queue: for devices that do it at once.
///
/// # Errors
/// When the provider refuses.
pub(crate) fn revoke_now(cx: &mut Cx<'_>, qp: QpId, key: Option<&KeyId>, chunk: u16) -> Result<Revoked, PostError> {
    let key = key.copied().ok_or(NO_KEY)?;
    cx.provider.revoke(qp, key, revoke_mark(chunk, 0))
}

/// Result of posting.
#[derive(Debug, Default)]
pub(crate) struct Done {
    /// Chunks whose answers have left.
    pub(crate) sent: SmallVec<[u16; 32]>,
    /// Chunks whose keys were taken back at once.
    pub(crate) revoked: SmallVec<[u16; 4]>,
}

/// The sending side of a connection.
#[derive(Debug)]
pub(crate) struct Outgoing {
    queue: SendQueue<ServerWork>,
    /// Batches of slots for which the next work request that can be signalled will account.
    owed: u32,
}

impl Outgoing {
    /// Creates a queue of so many slots.
    pub(crate) fn new(slots: u32) -> Self {
        Self {
            queue: SendQueue::new(slots),
            owed: 0,
        }
    }

    /// Adds work, for the end of the turn.
    ///
    /// # Errors
    /// When the connection is being taken down.
    pub(crate) fn push(&mut self, work: ServerWork) -> Result<(), PostError> {
        self.queue.push(work).map_err(|_| PostError::State(QpState::Err))
    }

    /// Whether a question for a sign of life waits.
    pub(crate) fn asks(&self) -> bool {
        self.queue.beats(Imm::HbMsg) > 0
    }

    /// A work request is done that accounts for so many batches of slots.
    pub(crate) fn reclaim(&mut self, signals: u32) {
        for _ in 0..signals {
            self.queue.reclaim();
        }
    }

    /// Whether something waits that fits.
    pub(crate) fn is_ready(&self) -> bool {
        self.queue.is_ready()
    }

    /// Takes nothing more; what waits is dropped.
    pub(crate) fn close(&mut self) {
        self.queue.close();
    }

    /// Posts what fits.
    ///
    /// # Errors
    /// When the provider refuses something: the path can't go on.
    pub(crate) fn post(&mut self, cx: &mut Cx<'_>, ground: &Ground<'_>, done: &mut Done) -> Result<(), PostError> {
        while self.queue.is_ready() {
            let mut batch = Batch::default();
            for (work, signal) in self.queue.take() {
                self.owed += u32::from(signal);
                batch.add(work, ground);
            }
            batch.post(cx, ground, &mut self.owed, done)?;
            self.queue.unused(batch.unused);
        }
        Ok(())
    }
}

/// An answer of a batch.
#[derive(Debug)]
struct Reply {
    answer: Answer,
    /// Its data in the chunk.
    data: Sge,
    /// The chunk's new key.
    message: Option<RkeyRsp>,
}

/// The last work request of a piece of work.
#[derive(Clone, Copy, Debug)]
enum Last {
    Reply(usize),
    Imm(Imm),
    Info(Sge),
}

/// Work that is posted together.
#[derive(Debug, Default)]
struct Batch {
    revokes: SmallVec<[u16; 32]>,
    replies: SmallVec<[Reply; 32]>,
    /// In the order of the queue.
    lasts: SmallVec<[Last; 32]>,
    /// Slots that were set aside for nothing.
    unused: u32,
}

type Wrs<'a> = SmallVec<[SendWr<'a>; 32]>;

const EMPTY: Payload<'static> = Payload::Sges(&[]);

fn wr(op: SendOp, payload: Payload<'_>) -> SendWr<'_> {
    SendWr {
        wr_id: send_mark(0),
        op,
        flags: SendFlags::empty(),
        payload,
    }
}

fn send(cx: &mut Cx<'_>, qp: QpId, wrs: &[SendWr<'_>]) -> Result<(), PostError> {
    if wrs.is_empty() {
        return Ok(());
    }
    cx.provider.post_send(qp, wrs).map_err(|(_, e)| e)
}

impl Batch {
    fn add(&mut self, work: ServerWork, ground: &Ground<'_>) {
        match work.what {
            What::Revoke(chunk) => self.revokes.push(chunk),
            What::Answer(answer) => {
                self.lasts.push(Last::Reply(self.replies.len()));
                self.replies.push(Reply {
                    answer,
                    data: Sge {
                        addr: ground.chunk_addr(answer.chunk),
                        length: answer.dest.map_or(0, |d| d.len.get()),
                        lkey: ground.chunks.lkey,
                    },
                    message: None,
                });
            }
            What::Imm(imm) => self.lasts.push(Last::Imm(imm)),
            // Where it lies is known when the chunks are open.
            What::Info => self.lasts.push(Last::Info(Sge::default())),
        }
    }

    fn post(&mut self, cx: &mut Cx<'_>, ground: &Ground<'_>, owed: &mut u32, done: &mut Done) -> Result<(), PostError> {
        self.revoke(cx, ground, owed, done)?;
        if ground.renewal == Renewal::Queued {
            // Keys are work requests of the provider's own, and hold for what is posted behind them.
            send(cx, ground.qp, &self.data())?;
            self.grant(cx, ground)?;
            send(cx, ground.qp, &self.answers(owed))?;
        } else {
            self.grant(cx, ground)?;
            let mut wrs = self.data();
            wrs.extend(self.answers(owed));
            send(cx, ground.qp, &wrs)?;
        }
        done.sent.extend(self.replies.iter().map(|reply| reply.answer.chunk));
        Ok(())
    }

    /// Takes keys back. The last one accounts for the batch if nothing is posted behind it.
    fn revoke(
        &mut self,
        cx: &mut Cx<'_>,
        ground: &Ground<'_>,
        owed: &mut u32,
        done: &mut Done,
    ) -> Result<(), PostError> {
        let count = self.revokes.len();
        for (i, chunk) in self.revokes.iter().enumerate() {
            let is_last = i + 1 == count && self.lasts.is_empty();
            let signals = if is_last {
                u16::try_from(*owed).unwrap_or(u16::MAX)
            } else {
                0
            };
            let mark = revoke_mark(*chunk, signals);
            match cx.provider.revoke(ground.qp, ground.key(*chunk)?, mark)? {
                Revoked::Queued => *owed -= u32::from(signals),
                Revoked::Now => {
                    self.unused += 1;
                    done.revoked.push(*chunk);
                }
            }
        }
        Ok(())
    }

    /// Gives the chunks that are answered new keys, and all chunks their first.
    fn grant(&mut self, cx: &mut Cx<'_>, ground: &Ground<'_>) -> Result<(), PostError> {
        for last in &mut self.lasts {
            if let Last::Info(sge) = last {
                *sge = ground.describe(cx)?;
            }
        }
        if ground.renewal == Renewal::Never {
            return Ok(());
        }
        for reply in &mut self.replies {
            let granted = ground.grant(cx, reply.answer.chunk)?;
            if matches!(granted, Granted::Now(_)) {
                self.unused += ground.renewal.grant_slots();
            }
            reply.message = Some(RkeyRsp::new(reply.answer.chunk, granted.rkey().0));
        }
        Ok(())
    }

    /// The data of all reads, then the ends of all destinations' keys.
    fn data(&self) -> Wrs<'_> {
        let data = self.replies.iter().filter_map(|reply| {
            let dest = reply.answer.data()?;
            let remote = RemoteAddr {
                addr: dest.addr.get(),
                rkey: RKey(dest.key.get()),
            };
            Some(wr(SendOp::Write(remote), Payload::Sges(slice::from_ref(&reply.data))))
        });
        let ends = self.replies.iter().filter_map(|reply| {
            let key = reply.answer.ended_key()?;
            Some(wr(SendOp::SendWithInv(key), EMPTY))
        });
        data.chain(ends).collect()
    }

    /// The answers, each as a SEND that brings the chunk's new key, or as an empty RDMA WRITE; both with the immediate value.
    /// The last work request accounts for what is owed.
    fn answers(&self, owed: &mut u32) -> Wrs<'_> {
        let mut wrs: Wrs<'_> = self.lasts.iter().filter_map(|last| self.last(last)).collect();
        if let Some(last) = wrs.last_mut().filter(|_| *owed > 0) {
            last.wr_id = send_mark(*owed);
            last.flags |= SendFlags::SIGNALED;
            *owed = 0;
        }
        wrs
    }

    fn last<'a>(&'a self, last: &'a Last) -> Option<SendWr<'a>> {
        let nowhere = RemoteAddr::default();
        Some(match last {
            Last::Imm(imm) => wr(SendOp::WriteWithImm(nowhere, imm.encode()), EMPTY),
            Last::Info(sge) => wr(SendOp::Send, Payload::Sges(slice::from_ref(sge))),
            Last::Reply(index) => {
                let reply = self.replies.get(*index)?;
                let imm = reply.answer.imm();
                match &reply.message {
                    Some(message) => wr(SendOp::SendWithImm(imm), Payload::Inline(message.as_bytes())),
                    None => wr(SendOp::WriteWithImm(nowhere, imm), EMPTY),
                }
            }
        })
    }
}

#[cfg(test)]
mod tests;
