//! Block status: what a server of ours is asked, and what becomes of it. Of other servers all is data.

use core::fmt::Display;

use rtrs::{
    Cx,
    client::{buffers::Buffer, request::SessionId},
};
use smallvec::SmallVec;
use zerocopy::IntoBytes;

use super::{
    device::{Device, Fate},
    memory::{self, SessionBuffers},
    operation::{Operation, Prepared, Sent},
};
use crate::{
    block::{BlockOp, Extent},
    errno::Errno,
    proto::{IoOp, status},
};

/// Whether an operation is one.
pub(super) fn is_status<F>(operation: &Operation<F>) -> bool {
    matches!(operation.request.op, BlockOp::BlockStatus { .. })
}

/// Extents that are wanted at most.
fn most<F>(operation: &Operation<F>) -> u32 {
    match operation.request.op {
        BlockOp::BlockStatus { most } => most.clamp(1, status::MAX_EXTENTS),
        _ => 0,
    }
}

/// All of the range may have data.
fn all_data<F>(operation: &Operation<F>) -> Vec<Extent> {
    vec![Extent::data(operation.request.len)]
}

/// Nobody is asked.
pub(super) fn answer_unasked<F>(operation: &mut Operation<F>) {
    operation.span.take(0);
    operation.extents = all_data(operation);
    operation.span.ended(Ok(()));
}

/// The request, which moves room for the answer. `None`: a buffer has to come back first.
///
/// # Errors
/// ECONNABORTED without the session; ENOMEM when there will never be a buffer.
pub(super) fn prepare<F>(
    cx: &mut Cx<'_>,
    memory: &mut dyn SessionBuffers,
    operation: &mut Operation<F>,
    device: &Device,
    id: u32,
) -> Result<Option<Prepared>, Errno> {
    let room = device.status_room();
    let largest = device.geometry.map_or(room, |g| g.max_transfer) as usize;
    let Some(buffer) = memory::for_answer(cx, memory, device.session, room as usize, largest)? else {
        return Ok(None);
    };
    let block = device.geometry.map_or(1, |g| u64::from(g.logical_block_size));
    let len = operation.request.len.min(status::MAX_RANGE / block * block);
    let message = status::request(id, operation.request.offset, len, room, most(operation));
    operation.span.take(0);
    let sent = Sent {
        op: IoOp::BlockStatus,
        part: (operation.request.offset, room.into()),
        opened: device.opened,
        covers: 0,
    };
    Ok(Some((sent, SmallVec::from_slice(message.as_bytes()), Some(buffer))))
}

/// A request has ended like this; `refused`: by the server's answer. Its buffer goes back.
pub(super) fn ended<F>(
    memory: &mut dyn SessionBuffers,
    operation: &mut Operation<F>,
    device: &mut Device,
    sent: &Sent,
    fate: Fate,
    refused: bool,
    data: Option<Buffer>,
) -> Fate {
    let session = device.session;
    let fate = match fate {
        Fate::Over(Ok(())) => match read(memory, session, data.as_ref()) {
            Ok(bytes) => {
                let block = device.geometry.map_or(1, |g| u64::from(g.logical_block_size));
                match status::parse(&bytes, operation.request.len, most(operation), block) {
                    Ok(extents) => operation.extents = extents,
                    Err(why) => give_up(operation, device, sent, why),
                }
                Fate::Over(Ok(()))
            }
            Err(e) => Fate::Over(Err(e)),
        },
        Fate::Over(Err(e)) if refused => {
            give_up(operation, device, sent, e);
            Fate::Over(Ok(()))
        }
        other => other,
    };
    if let Some(buffer) = data {
        memory::give(memory, session, buffer);
    }
    fate
}

/// The server can't after all: it is not asked again before it has opened the device again.
fn give_up<F>(operation: &mut Operation<F>, device: &mut Device, sent: &Sent, why: impl Display) {
    operation.extents = all_data(operation);
    if sent.opened == device.opened && core::mem::take(&mut device.answers_status) {
        tracing::warn!(
            device = device.name,
            "holes are told as data: the server answers block status with: {why}"
        );
    }
}

fn read(memory: &mut dyn SessionBuffers, session: SessionId, buffer: Option<&Buffer>) -> Result<Vec<u8>, Errno> {
    let Some(buffer) = buffer else { return Ok(Vec::new()) };
    let buffers = memory.buffers(session).ok_or(Errno::ECONNABORTED)?;
    let mut bytes = vec![0; buffer.len()];
    buffers.read(buffer, 0, &mut bytes).map_err(|_| Errno::EINVAL)?;
    Ok(bytes)
}
