//! Posting of a connection at the end of a turn: the receives that came back, then everything that waits and fits, with one
//! call each.

use roce_verbs::{
    AccessFlags, RKey, RemoteAddr, SendFlags, SendOp, SendWr, Sge,
    provider::{DeviceIx, GrantOf, KeyId, KeyStrategy, MrInfo, QpId},
    wr::{Payload, PostError, RecvWr},
};
use smallvec::SmallVec;
use zerocopy::IntoBytes;

use crate::{
    Direction,
    client::{
        buffers::MAX_PIECES,
        conn::{GRANT_SLOTS, Post, key_sge},
        flight::{Flight, Waits},
        lane::Lane,
        path::Path,
    },
    cx::Cx,
    mark::{Mark, MarkKind},
    proto::{Imm, MsgFlags, RdmaRead, RdmaWrite, SgDesc},
    sendq::Work as _,
};

/// A work request with what it points to.
struct Built {
    mark: Mark,
    op: SendOp,
    signalled: bool,
    sges: SmallVec<[Sge; 2]>,
}

/// Slots that a request takes at most.
pub(super) fn slots<U>(lane: &Lane<U>, device: Option<DeviceIx>, direction: Direction) -> u32 {
    let domain = device.and_then(|device| lane.domain(device));
    match domain {
        Some(d) if direction == Direction::Read && d.strategy != KeyStrategy::Static && !d.instant => GRANT_SLOTS + 1,
        _ => 1,
    }
}

/// Posts what a connection has.
pub(super) fn post<U>(cx: &mut Cx<'_>, path: &mut Path, lane: &mut Lane<U>, cid: u16) -> Result<(), PostError> {
    let Some(conn) = path.conns.get_mut(usize::from(cid)) else {
        return Ok(());
    };
    let Some(qp) = conn.qp else { return Ok(()) };
    let used = core::mem::take(&mut conn.used);
    if !used.is_empty() {
        post_receives(cx, path, qp, &used)?;
    }
    let conn = &mut path.conns[usize::from(cid)];
    let fitting = conn.queue.take();
    if fitting.is_empty() {
        return Ok(());
    }
    let mut built: SmallVec<[Built; 32]> = SmallVec::new();
    for (work, signal) in fitting {
        if work.signalled() {
            // The provider posts it itself: in its turn.
            send(cx, qp, &built)?;
            built.clear();
        }
        built.extend(build(cx, path, lane, qp, &work, signal)?);
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
            wr_id: b.mark.encode(),
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

/// The work request for a piece of work; `None` when it has become pointless, or is done at once.
fn build<U>(
    cx: &mut Cx<'_>,
    path: &Path,
    lane: &mut Lane<U>,
    qp: QpId,
    work: &Post,
    signalled: bool,
) -> Result<Option<Built>, PostError> {
    let send = |op, sges| Built {
        mark: Mark::new(MarkKind::Send, 0),
        op,
        signalled,
        sges,
    };
    match work {
        Post::Request { permit, .. } => {
            let request = request(cx, path, lane, qp, *permit)?;
            Ok(Some(send(request.0, request.1)))
        }
        Post::Revoke(permit) => {
            let key = key_of(path, lane, *permit)?;
            let mark = Mark::new(MarkKind::Revoke, u32::from(*permit));
            // A provider that does it at once is not asked this way.
            cx.provider.revoke(qp, key, mark.encode())?;
            Ok(None)
        }
        Post::Imm(imm) => {
            let op = SendOp::WriteWithImm(RemoteAddr::default(), imm.encode());
            Ok(Some(send(op, SmallVec::new())))
        }
        Post::Info(sge) => Ok(Some(send(SendOp::Send, SmallVec::from_slice(&[*sge])))),
    }
}

/// The key that opens the buffer of a permit's read.
pub(super) fn key_of<U>(path: &Path, lane: &Lane<U>, permit: u16) -> Result<KeyId, PostError> {
    let domain = path.device.and_then(|device| lane.domain(device));
    let key = domain.and_then(|d| d.keys.get(usize::from(permit))).copied();
    key.ok_or(PostError::Invalid("the permit has no key of its own"))
}

/// Writes a request's message and opens its buffer.
fn request<U>(
    cx: &mut Cx<'_>,
    path: &Path,
    lane: &mut Lane<U>,
    qp: QpId,
    permit: u16,
) -> Result<(SendOp, SmallVec<[Sge; 2]>), PostError> {
    let gone = PostError::Invalid("the request's path is gone");
    let (Some(device), Some(terms)) = (path.device, path.terms) else {
        return Err(gone);
    };
    let Some(chunk) = path.chunks.get(usize::from(permit)).copied() else {
        return Err(gone);
    };
    let Some(mut flight) = lane.flights.get_mut(usize::from(permit)).and_then(Option::take) else {
        return Err(gone);
    };
    let made = message(cx, lane, device, qp, permit, &mut flight);
    flight.turn(Waits::Answer);
    let usr_len = flight.request.header.len();
    let direction = flight.request.direction;
    lane.flights[usize::from(permit)] = Some(flight);
    let Message { mut sges, bytes } = made?;
    let headers = lane.headers.as_ref();
    let headers = headers.ok_or(PostError::Invalid("there is no memory for headers"))?;
    let written = headers.write(permit, usr_len, &bytes);
    written.map_err(|_| PostError::Invalid("the request's header does not fit"))?;
    let header = headers.sge(permit, usr_len + bytes.len(), device);
    let data_len: u32 = sges.iter().map(|sge| sge.length).sum();
    let offset = match direction {
        Direction::Write => 0,
        Direction::Read => {
            sges.clear();
            data_len
        }
    };
    sges.extend(header);
    let imm = Imm::IoReq(terms.layout.pack(permit.into(), data_len + usr_len as u32));
    let remote = RemoteAddr {
        addr: chunk.addr.wrapping_add(offset.into()),
        rkey: RKey(chunk.rkey),
    };
    Ok((SendOp::WriteWithImm(remote, imm.encode()), sges))
}

/// RTRS's message of a request.
struct Message {
    /// Memory of the request's data, if it has any.
    sges: SmallVec<[Sge; 2]>,
    bytes: SmallVec<[u8; RdmaRead::LEN_ONE]>,
}

fn message<U>(
    cx: &mut Cx<'_>,
    lane: &Lane<U>,
    device: DeviceIx,
    qp: QpId,
    permit: u16,
    flight: &mut Flight<U>,
) -> Result<Message, PostError> {
    let usr_len = flight.request.header.len() as u16;
    let buffer = flight.request.data.as_ref().filter(|b| !b.is_empty());
    let regions = buffer.map(|buffer| lane.buffers.regions(buffer, device));
    let regions = regions.unwrap_or_else(|| Some(SmallVec::new()));
    let regions = regions.ok_or(PostError::Invalid(
        "the buffer is not registered with the path's device",
    ))?;
    let sge = |(mr, offset, len): &(&MrInfo, usize, u32)| Sge {
        addr: mr.addr + *offset as u64,
        length: *len,
        lkey: mr.lkey,
    };
    let sges: SmallVec<[Sge; 2]> = regions.iter().map(sge).collect();
    if flight.request.direction == Direction::Write {
        let bytes = SmallVec::from_slice(RdmaWrite::new(usr_len).as_bytes());
        return Ok(Message { sges, bytes });
    }
    let domain = lane.domain(device);
    let domain = domain.ok_or(PostError::Invalid("the session has nothing on the path's device"))?;
    let (mut flags, mut desc) = (MsgFlags::empty(), None);
    if let (Some((mr, ..)), Some(first), Some(buffer)) = (regions.first(), sges.first(), buffer) {
        let mut rkey = mr.rkey;
        if domain.strategy != KeyStrategy::Static {
            let key = domain.keys.get(usize::from(permit));
            let key = *key.ok_or(PostError::Invalid("the permit has no key of its own"))?;
            rkey = open(cx, qp, key, &regions)?;
            flight.key = Some(rkey);
            if domain.peer_invalidates {
                flags = MsgFlags::NEED_INVAL;
            }
        }
        desc = Some(SgDesc::new(first.addr, rkey.0, buffer.len() as u32));
    }
    let head = RdmaRead::new(usr_len, flags, u16::from(desc.is_some()));
    let mut bytes = SmallVec::from_slice(head.as_bytes());
    bytes.extend_from_slice(desc.as_slice().as_bytes());
    Ok(Message { sges, bytes })
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
