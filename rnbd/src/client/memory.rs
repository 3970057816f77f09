//! Buffers for answers and for zeroes, from the sessions' memory.

use rtrs::{
    Cx, Error,
    client::{
        Client,
        buffers::{Buffer, Buffers, MIN_BYTES},
        request::SessionId,
    },
};

use crate::errno::Errno;

/// Buffers of sessions.
pub trait SessionBuffers {
    /// The buffers of a session; `None` when it is gone, and they with it.
    fn buffers(&mut self, session: SessionId) -> Option<&mut Buffers>;
}

impl<U> SessionBuffers for Client<U> {
    fn buffers(&mut self, session: SessionId) -> Option<&mut Buffers> {
        self.buffers_mut(session)
    }
}

/// Zeroes to copy from.
static ZEROES: [u8; 16 << 10] = [0; 16 << 10];

/// A buffer of `len` bytes: a larger one, up to one of `most` bytes, when all others are in use. `None`: one has to come
/// back first.
///
/// # Errors
/// ECONNABORTED without the session; ENOMEM when there will never be one.
pub(super) fn for_answer(
    cx: &mut Cx<'_>,
    memory: &mut dyn SessionBuffers,
    session: SessionId,
    len: usize,
    most: usize,
) -> Result<Option<Buffer>, Errno> {
    let buffers = memory.buffers(session).ok_or(Errno::ECONNABORTED)?;
    let mut size = len.max(MIN_BYTES);
    loop {
        match take(cx, buffers, size)? {
            Some(mut buffer) => {
                buffer.set_len(len);
                return Ok(Some(buffer));
            }
            None if size >= most => return exhausted(buffers),
            None => size *= 2,
        }
    }
}

/// A buffer of `want` zeroes, or fewer when all so large are in use, but `least` of them (a power of two). `None`: one has to
/// come back first.
///
/// # Errors
/// ECONNABORTED without the session; ENOMEM when there will never be one.
pub(super) fn of_zeroes(
    cx: &mut Cx<'_>,
    memory: &mut dyn SessionBuffers,
    session: SessionId,
    want: usize,
    least: usize,
) -> Result<Option<Buffer>, Errno> {
    let buffers = memory.buffers(session).ok_or(Errno::ECONNABORTED)?;
    let mut len = want;
    loop {
        if let Some(buffer) = take(cx, buffers, len)? {
            return match clear(buffers, &buffer) {
                true => Ok(Some(buffer)),
                false => {
                    buffers.give(buffer);
                    Err(Errno::EINVAL)
                }
            };
        }
        let class = len.max(MIN_BYTES).next_power_of_two();
        if class / 2 < least.max(MIN_BYTES) {
            return exhausted(buffers);
        }
        len = class / 2;
    }
}

/// Gives a buffer back. Those of a session that is gone went with it.
pub(super) fn give(memory: &mut dyn SessionBuffers, session: SessionId, buffer: Buffer) {
    if let Some(buffers) = memory.buffers(session) {
        buffers.give(buffer);
    }
}

/// Moves `len` bytes within a buffer.
///
/// # Errors
/// ECONNABORTED without the session; EINVAL when they do not lie in the buffer.
pub(super) fn shift(
    memory: &mut dyn SessionBuffers,
    session: SessionId,
    buffer: &Buffer,
    from: usize,
    to: usize,
    len: usize,
) -> Result<(), Errno> {
    if from == to {
        return Ok(());
    }
    let buffers = memory.buffers(session).ok_or(Errno::ECONNABORTED)?;
    let mut bytes = vec![0; len];
    let read = buffers.read(buffer, from, &mut bytes);
    read.and_then(|()| buffers.write(buffer, to, &bytes))
        .map_err(|_| Errno::EINVAL)
}

fn take(cx: &mut Cx<'_>, buffers: &mut Buffers, len: usize) -> Result<Option<Buffer>, Errno> {
    match buffers.take(cx, len) {
        Ok(buffer) => Ok(Some(buffer)),
        Err(Error::NoBuffer { .. }) => Ok(None),
        Err(_) => Err(Errno::ENOMEM),
    }
}

fn exhausted(buffers: &Buffers) -> Result<Option<Buffer>, Errno> {
    match buffers.lent() {
        0 => Err(Errno::ENOMEM),
        _ => Ok(None),
    }
}

fn clear(buffers: &Buffers, buffer: &Buffer) -> bool {
    (0..buffer.len()).step_by(ZEROES.len()).all(|at| {
        let len = ZEROES.len().min(buffer.len() - at);
        buffers.write(buffer, at, &ZEROES[..len]).is_ok()
    })
}
