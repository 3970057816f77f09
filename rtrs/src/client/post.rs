//! Posts the work of a connection at the end of a turn: the receives that were used, then all that fits, with one call each.

use roce_verbs::{
    AccessFlags, RKey, RemoteAddr, SendFlags, SendOp, SendWr, Sge,
    provider::{GrantOf, KeyId, KeyStrategy, MrInfo, QpId},
    wr::{Payload, PostError, RecvWr},
};
use smallvec::SmallVec;
use zerocopy::IntoBytes;

use crate::{
    Cx, Direction, PathError,
    client::{
        buffers::MAX_PIECES,
        conn::{Post, key_sge},
        env::Env,
        inflight::{InFlightTable, Waits},
        path::Path,
        session::Session,
    },
    mark::{Mark, MarkKind},
    proto::{Imm, MsgFlags, RdmaRead, RdmaWrite, SgDesc},
};

/// A work request and its scatter list.
struct Built {
    op: SendOp,
    signalled: bool,
    sges: SmallVec<[Sge; 2]>,
}

impl<U> Session<U> {
    /// Posts the work of a connection.
    pub(super) fn post(&mut self, env: &mut Env<'_, '_, U>, path: u16, cid: u16) {
        let index = usize::from(path);
        let Some(path) = self.paths.get_mut(index) else { return };
        if let Err(e) = post(env.cx, path, &mut self.inflight, cid) {
            path.fail_path(PathError::Post(e));
            self.settle(env, index);
        }
    }
}

fn post<U>(cx: &mut Cx<'_>, path: &mut Path, inflight: &mut InFlightTable<U>, cid: u16) -> Result<(), PostError> {
    let Some(conn) = path.conns.get_mut(usize::from(cid)) else {
        return Ok(());
    };
    conn.dirty = false;
    let Some(qp) = conn.qp else { return Ok(()) };
    let used = core::mem::take(&mut conn.used);
    let fitting = conn.queue.take();
    if !used.is_empty() {
        post_receives(cx, path, qp, &used)?;
    }
    let mut built: SmallVec<[Built; 32]> = SmallVec::new();
    for (work, signalled) in fitting {
        let (op, sges) = match &work {
            Post::Request { permit, .. } => request(cx, path, inflight, qp, *permit)?,
            Post::Revoke(permit) => {
                // The provider posts it itself: in its turn.
                send(cx, qp, &built)?;
                built.clear();
                let key = inflight.key_of(path.device, *permit)?;
                let mark = Mark::new(MarkKind::Revoke, u32::from(*permit));
                // A provider that does it at once is not asked this way.
                cx.provider.revoke(qp, key, mark.encode())?;
                continue;
            }
            Post::Imm(imm) => {
                let op = SendOp::WriteWithImm(RemoteAddr::default(), imm.encode());
                (op, SmallVec::new())
            }
            Post::Info(sge) => (SendOp::Send, SmallVec::from_slice(&[*sge])),
        };
        built.push(Built { op, signalled, sges });
    }
    send(cx, qp, &built)
}

fn send(cx: &mut Cx<'_>, qp: QpId, built: &[Built]) -> Result<(), PostError> {
    if built.is_empty() {
        return Ok(());
    }
    let wrs: SmallVec<[SendWr<'_>; 32]> = built
        .iter()
        .map(|b| SendWr {
            wr_id: Mark::new(MarkKind::Send, 0).encode(),
            op: b.op,
            flags: match b.signalled {
                true => SendFlags::SIGNALED,
                false => SendFlags::empty(),
            },
            payload: Payload::Sges(&b.sges),
        })
        .collect();
    cx.provider.post_send(qp, &wrs).map_err(|(_, e)| e)
}

fn post_receives(cx: &mut Cx<'_>, path: &Path, qp: QpId, used: &[u32]) -> Result<(), PostError> {
    let region = path.key_messages.as_ref().map(|region| &region.mr);
    let sges: SmallVec<[Option<Sge>; 32]> = used.iter().map(|i| key_sge(region, *i)).collect();
    let wrs: SmallVec<[RecvWr<'_>; 32]> = used
        .iter()
        .zip(&sges)
        .map(|(i, sge)| RecvWr {
            wr_id: Mark::new(MarkKind::Recv, *i).encode(),
            sges: sge.as_slice(),
        })
        .collect();
    cx.provider.post_recv(qp, &wrs).map_err(|(_, e)| e)
}

/// Writes RTRS's message of a request, and opens the buffer of a read.
fn request<U>(
    cx: &mut Cx<'_>,
    path: &Path,
    inflight: &mut InFlightTable<U>,
    qp: QpId,
    permit: u16,
) -> Result<(SendOp, SmallVec<[Sge; 2]>), PostError> {
    let gone = PostError::Invalid("the request's path is gone");
    let (Some(device), Some(terms)) = (path.device, path.terms) else {
        return Err(gone);
    };
    let chunk = path.chunks.get(usize::from(permit)).copied();
    let (Some(chunk), Some(entry)) = (chunk, inflight.get(permit)) else {
        return Err(gone);
    };
    let (direction, usr_len) = (entry.request.direction, entry.request.header.len());
    let buffer = entry.request.data.as_ref().filter(|b| !b.is_empty());
    let regions = buffer.map_or(Some(SmallVec::new()), |buffer| inflight.buffers.regions(buffer, device));
    let regions = regions.ok_or(PostError::Invalid(
        "the buffer is not registered with the path's device",
    ))?;
    let data_len: u32 = regions.iter().map(|(.., len)| len).sum();
    let (mut key, mut offset) = (None, 0);
    let mut sges: SmallVec<[Sge; 2]> = SmallVec::new();
    let mut message: SmallVec<[u8; RdmaRead::LEN_ONE]> = SmallVec::new();
    match direction {
        Direction::Write => {
            sges.extend(regions.iter().map(|(mr, offset, length)| Sge {
                addr: mr.addr + *offset as u64,
                length: *length,
                lkey: mr.lkey,
            }));
            message.extend_from_slice(RdmaWrite::new(usr_len as u16).as_bytes());
        }
        Direction::Read => {
            offset = data_len;
            let of = inflight.device(device);
            let of = of.ok_or(PostError::Invalid("the session has nothing on the path's device"))?;
            let (mut flags, mut desc) = (MsgFlags::empty(), None);
            if let Some((mr, at, _)) = regions.first() {
                if of.strategy != KeyStrategy::Static {
                    key = Some(open(cx, qp, inflight.key_of(path.device, permit)?, &regions)?);
                    if of.peer_invalidates {
                        flags = MsgFlags::NEED_INVAL;
                    }
                }
                desc = Some(SgDesc::new(mr.addr + *at as u64, key.unwrap_or(mr.rkey).0, data_len));
            }
            let head = RdmaRead::new(usr_len as u16, flags, u16::from(desc.is_some()));
            message.extend_from_slice(head.as_bytes());
            message.extend_from_slice(desc.as_slice().as_bytes());
        }
    }
    drop(regions);
    // Before anything can fail: an open key is closed with the path.
    if let Some(entry) = inflight.get_mut(permit) {
        debug_assert!(matches!(entry.waits, Waits::Room), "it is posted once");
        (entry.key, entry.waits) = (key, Waits::Answer);
    }
    let headers = inflight.headers.as_ref();
    let headers = headers.ok_or(PostError::Invalid("there is no memory for headers"))?;
    let written = headers.write(permit, usr_len, &message);
    written.map_err(|_| PostError::Invalid("the request's header does not fit"))?;
    sges.extend(headers.sge(permit, usr_len + message.len(), device));
    let imm = Imm::IoReq(terms.layout.pack(permit.into(), data_len + usr_len as u32));
    let remote = RemoteAddr {
        addr: chunk.addr.wrapping_add(offset.into()),
        rkey: RKey(chunk.rkey),
    };
    Ok((SendOp::WriteWithImm(remote, imm.encode()), sges))
}

/// Opens the buffer of a read to the server, which sees it as one range from the address of the first piece on.
fn open(cx: &mut Cx<'_>, qp: QpId, key: KeyId, regions: &[(&MrInfo, usize, u32)]) -> Result<RKey, PostError> {
    let grant = |(mr, offset, len): &(&MrInfo, usize, u32)| GrantOf {
        mr: mr.id,
        offset: *offset,
        len: *len as usize,
        iova: None,
        access: AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE,
    };
    let granted = match regions {
        [one] => cx
            .provider
            .grant(qp, key, &grant(one), Mark::new(MarkKind::Send, 0).encode()),
        several => {
            let pieces: SmallVec<[GrantOf; MAX_PIECES]> = several.iter().map(grant).collect();
            cx.provider.grant_list(qp, key, &pieces)
        }
    };
    Ok(granted?.rkey())
}
