//! The work requests of a server's connection.
//!
//! The work of a turn is posted by kind: the data of all reads, the ends of all destinations' keys, the new keys of the chunks, all
//! answers. Packets of one kind and length leave in one train, which is much cheaper than one answer after the other. The data of a
//! request and the end of its key still come before its answer.

use core::slice;
use std::sync::Arc;

use roce_verbs::mem::Pages;
use roce_verbs::{
    AccessFlags, Payload, RKey, RemoteAddr, SendFlags, SendOp, SendWr, Sge,
    provider::{DeviceCaps, GrantOf, Granted, KeyId, KeyStrategy, MrInfo, QpId, Revoked},
    wr::PostError,
};
use smallvec::SmallVec;
use zerocopy::IntoBytes;

use crate::{
    Cx,
    mark::{Mark, MarkKind},
    proto::{ChunkLayout, Imm, InfoReq, InfoRsp, IoReply, RkeyRsp, SgDesc},
    sendq::{Fitting, SendQueue, Work},
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
#[derive(Clone, Copy, Debug)]
pub(crate) struct Answer {
    reply: IoReply,
    /// Destination of the data of a read, also when it failed: its key may have to be revoked.
    dest: Option<SgDesc>,
    /// Its data in the chunk, once it is posted.
    data: Sge,
    /// The chunk's new key, once it is posted.
    key: Option<RkeyRsp>,
}

impl Answer {
    /// The answer to a request in a chunk. `status`: 0, or an error number of either sign.
    pub(crate) fn new(chunk: u16, status: i32, dest: Option<SgDesc>, need_inval: bool) -> Self {
        Self {
            reply: IoReply::new(chunk.into(), status, need_inval),
            dest,
            data: Sge::default(),
            key: None,
        }
    }

    fn chunk(&self) -> u16 {
        self.reply.msg_id as u16
    }

    /// Destination of data that is to be written.
    fn written(&self) -> Option<SgDesc> {
        self.dest.filter(|_| self.reply.errno == 0)
    }

    fn ended_key(&self) -> Option<RKey> {
        let dest = self.dest.filter(|_| self.reply.invalidated)?;
        Some(RKey(dest.key.get()))
    }
}

#[derive(Clone, Copy, Debug)]
enum What {
    /// Takes the key of a chunk back, to work on its request.
    Revoke(u16),
    /// The answer to a request.
    Answer(Answer),
    /// A heartbeat message.
    Imm(Imm),
    /// Opens all chunks and tells the client where they are, by this message once they are open.
    Info(Sge),
}

/// Work that a server posts.
#[derive(Clone, Copy, Debug)]
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
        let parts = 1 + u32::from(answer.written().is_some()) + u32::from(answer.ended_key().is_some());
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
            what: What::Info(Sge::default()),
            cost: grants + 1,
        }
    }

    /// A work request of it. An answer ends with a SEND that brings the chunk's new key, or with an empty RDMA WRITE; both with the
    /// immediate value.
    fn wr(&self, part: Part) -> Option<SendWr<'_>> {
        const EMPTY: Payload<'static> = Payload::Sges(&[]);
        let nowhere = RemoteAddr::default();
        let (op, payload) = match (part, &self.what) {
            (Part::Data, What::Answer(answer)) => {
                let dest = answer.written()?;
                let remote = RemoteAddr {
                    addr: dest.addr.get(),
                    rkey: RKey(dest.key.get()),
                };
                (SendOp::Write(remote), Payload::Sges(slice::from_ref(&answer.data)))
            }
            (Part::EndOfKey, What::Answer(answer)) => (SendOp::SendWithInv(answer.ended_key()?), EMPTY),
            (Part::Last, What::Answer(answer)) => {
                let imm = Imm::IoRsp(answer.reply).encode();
                match &answer.key {
                    Some(key) => (SendOp::SendWithImm(imm), Payload::Inline(key.as_bytes())),
                    None => (SendOp::WriteWithImm(nowhere, imm), EMPTY),
                }
            }
            (Part::Last, What::Imm(imm)) => (SendOp::WriteWithImm(nowhere, imm.encode()), EMPTY),
            (Part::Last, What::Info(message)) => (SendOp::Send, Payload::Sges(slice::from_ref(message))),
            _ => return None,
        };
        Some(SendWr {
            wr_id: send_mark(0),
            op,
            flags: SendFlags::empty(),
            payload,
        })
    }
}

/// Kind of a work request. A batch is posted kind by kind.
#[derive(Clone, Copy, Debug)]
enum Part {
    /// The data of a read.
    Data,
    /// The end of its destination's key.
    EndOfKey,
    /// The answer itself, or a message.
    Last,
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
pub(crate) struct PostContext<'a> {
    pub(crate) qp: QpId,
    /// All chunks, one after the other.
    pub(crate) chunks: &'a MrInfo,
    pub(crate) layout: &'a ChunkLayout,
    /// By chunk; none if they are never renewed.
    pub(crate) keys: &'a [KeyId],
    pub(crate) renewal: Renewal,
    pub(crate) info: Option<&'a InfoMemory>,
}

pub(crate) const NO_KEY: PostError = PostError::Invalid("the chunk has no revocable key");

impl PostContext<'_> {
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

    /// Gives the chunks that are answered new keys, and all chunks their first. Returns the slots that were set aside for nothing.
    fn renew(&self, cx: &mut Cx<'_>, batch: &mut Fitting<ServerWork>) -> Result<u32, PostError> {
        let mut unused = 0;
        for (work, _) in batch {
            match &mut work.what {
                What::Info(message) => *message = self.describe(cx)?,
                What::Answer(answer) if self.renewal != Renewal::Never => {
                    let granted = self.grant(cx, answer.chunk())?;
                    if matches!(granted, Granted::Now(_)) {
                        unused += self.renewal.grant_slots();
                    }
                    answer.key = Some(RkeyRsp::new(answer.chunk(), granted.rkey().0));
                }
                _ => {}
            }
        }
        Ok(unused)
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
pub(crate) const fn revoke_mark(chunk: u16, signals: u16) -> u64 {
    Mark::new(MarkKind::Revoke, (signals as u32) << 16 | chunk as u32).encode()
}

/// Chunk and accounted batches of a revocation's mark.
pub(crate) const fn revoked(index: u32) -> (u16, u32) {
    (index as u16, index >> 16)
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
    pub(crate) queue: SendQueue<ServerWork>,
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

    /// A work request is done that accounts for so many batches of slots.
    pub(crate) fn reclaim(&mut self, signals: u32) {
        for _ in 0..signals {
            self.queue.reclaim();
        }
    }

    /// Posts what fits. The last work request accounts for the slots that are owed.
    ///
    /// # Errors
    /// When the provider refuses something: the path can't go on.
    pub(crate) fn post(&mut self, cx: &mut Cx<'_>, at: &PostContext<'_>, done: &mut Done) -> Result<(), PostError> {
        while self.queue.is_ready() {
            let mut batch = self.queue.take();
            for (work, signal) in &mut batch {
                self.owed += u32::from(*signal);
                if let What::Answer(answer) = &mut work.what {
                    answer.data = Sge {
                        addr: at.chunk_addr(answer.chunk()),
                        length: answer.dest.map_or(0, |dest| dest.len.get()),
                        lkey: at.chunks.lkey,
                    };
                }
            }
            let (mut unused, queued) = (0, at.renewal == Renewal::Queued);
            if queued {
                unused += self.revoke(cx, at, &batch, done)?;
                // New keys hold for what is posted behind them.
                send(cx, at.qp, &wrs(&batch, &[Part::Data, Part::EndOfKey]))?;
            }
            unused += at.renew(cx, &mut batch)?;
            let mut wrs = match queued {
                true => wrs(&batch, &[Part::Last]),
                false => wrs(&batch, &[Part::Data, Part::EndOfKey, Part::Last]),
            };
            if let Some(last) = wrs.last_mut().filter(|_| self.owed > 0) {
                last.wr_id = send_mark(core::mem::take(&mut self.owed));
                last.flags |= SendFlags::SIGNALED;
            }
            send(cx, at.qp, &wrs)?;
            done.sent.extend(batch.iter().filter_map(|(work, _)| match &work.what {
                What::Answer(answer) => Some(answer.chunk()),
                _ => None,
            }));
            self.queue.unused(unused);
        }
        Ok(())
    }

    /// Takes keys back. The last one accounts for the batch if nothing is posted behind it. Returns the slots that were set aside for
    /// nothing.
    fn revoke(
        &mut self,
        cx: &mut Cx<'_>,
        at: &PostContext<'_>,
        batch: &Fitting<ServerWork>,
        done: &mut Done,
    ) -> Result<u32, PostError> {
        let revoked = |(work, _): &(ServerWork, bool)| match work.what {
            What::Revoke(chunk) => Some(chunk),
            _ => None,
        };
        let (mut number, mut unused) = (0, 0);
        for chunk in batch.iter().filter_map(revoked) {
            number += 1;
            // The whole batch are revocations.
            let signals = match number == batch.len() {
                true => u16::try_from(self.owed).unwrap_or(u16::MAX),
                false => 0,
            };
            match cx.provider.revoke(at.qp, at.key(chunk)?, revoke_mark(chunk, signals))? {
                Revoked::Queued => self.owed -= u32::from(signals),
                Revoked::Now => {
                    unused += 1;
                    done.revoked.push(chunk);
                }
            }
        }
        Ok(unused)
    }
}

type Wrs<'a> = SmallVec<[SendWr<'a>; 32]>;

fn wrs<'a>(batch: &'a Fitting<ServerWork>, parts: &[Part]) -> Wrs<'a> {
    let mut wrs = Wrs::new();
    for part in parts {
        wrs.extend(batch.iter().filter_map(|(work, _)| work.wr(*part)));
    }
    wrs
}

fn send(cx: &mut Cx<'_>, qp: QpId, wrs: &[SendWr<'_>]) -> Result<(), PostError> {
    if wrs.is_empty() {
        return Ok(());
    }
    cx.provider.post_send(qp, wrs).map_err(|(_, e)| e)
}

#[cfg(test)]
mod tests;
