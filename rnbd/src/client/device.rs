//! A mapped device.

use rtrs::{
    IoError, PathError,
    client::{buffers::Buffer, config::SessionInfo, request::SessionId},
};
use zerocopy::little_endian::U32;

use super::{
    loss_policy::{LossPolicy, Timer},
    losses::Losses,
    operation::{Operation, Sent},
    output::LossCause,
    state::DeviceState,
};
use crate::{
    block::{BlockOp, BlockRequest, Geometry},
    errno::Errno,
    proto::{AccessMode, CACHE_FUA, CACHE_WRITEBACK, IoOp, MsgOpenRsp, Rw, SECTOR, instance::Instance, status},
};

/// Most bytes that one request without data can cover: its length field has 32 bits, sectors have 512 bytes.
const MAX_LENGTH: u64 = (u32::MAX as u64) / SECTOR * SECTOR;

/// Whether an operation may go on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Admission {
    /// On the server's device of this number.
    Now(u32),
    /// It waits for the device.
    Later,
    /// It fails.
    Never(Errno),
}

/// Next step of a part that has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fate {
    Over(Result<(), Errno>),
    /// It was too long, and is done in smaller parts.
    Smaller,
    /// It was lost, and waits for its device.
    Again,
    /// The same, because the server has closed the device.
    Closed,
}

/// Requests of a device, counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DeviceCounters {
    /// Requests answered, whatever the answer.
    pub completed: u64,
    /// Requests answered with an error.
    pub failed: u64,
    /// Reads that were done.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes that were done.
    pub writes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Requests that had to be sent again. They are counted above when they are answered.
    pub repeated: u64,
    /// Writes that the server may have [lost](super::output::Output::WritesLost).
    pub lost: u64,
}

impl DeviceCounters {
    /// A request of `bytes` on the device has ended.
    pub(super) fn count(&mut self, op: IoOp, bytes: u32, result: Result<(), Errno>) {
        self.completed += 1;
        match (result, op) {
            (Err(_), _) => self.failed += 1,
            (Ok(()), IoOp::Read) => {
                self.reads += 1;
                self.read_bytes += u64::from(bytes);
            }
            (Ok(()), IoOp::Write) => {
                self.writes += 1;
                self.written_bytes += u64::from(bytes);
            }
            _ => {}
        }
    }

    /// Adds those of another device.
    pub fn add(&mut self, other: &Self) {
        self.completed += other.completed;
        self.failed += other.failed;
        self.reads += other.reads;
        self.read_bytes += other.read_bytes;
        self.writes += other.writes;
        self.written_bytes += other.written_bytes;
        self.repeated += other.repeated;
        self.lost += other.lost;
    }

    /// A request could not be sent.
    pub(super) fn count_unsent(&mut self) {
        self.completed += 1;
        self.failed += 1;
    }
}

/// A device, mapped or to be mapped.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) session: SessionId,
    pub(super) name: String,
    pub(super) mode: AccessMode,
    pub(super) state: DeviceState,
    /// The server's number for it, while the server has it open.
    pub(super) id: Option<u32>,
    /// Size and limits as of the last open.
    pub(super) geometry: Option<Geometry>,
    /// The server that has it open answers block status, as far as is known.
    pub(super) answers_status: bool,
    /// Instance of the server's unflushed data; `None` if the server names none.
    pub(super) instance: Option<Instance>,
    /// Acknowledged writes that no flush has covered, and losses among them.
    pub(super) losses: Losses,
    /// How often it has been opened.
    pub(super) opened: u32,
    /// Operations under way.
    pub(super) operations: u32,
    /// Requests that RTRS has of them.
    pub(super) in_flight: u32,
    /// The message about it that is under way.
    pub(super) message: Option<u64>,
    /// Why its session was lost, since it was opened last.
    pub(super) lost: Option<PathError>,
    /// How long operations wait while it is lost.
    pub(super) loss_policy: LossPolicy,
    /// Time of the next attempt to open it, after the server refused one.
    pub(super) again: Timer,
    /// The attempt in progress was not requested.
    pub(super) unasked: bool,
    /// A requested remap waits for its end.
    pub(super) remapping: bool,
    /// In-flight operations end as soon as they can.
    pub(super) forced: bool,
    pub(super) counters: DeviceCounters,
}

impl Device {
    pub(super) fn new(session: SessionId, name: String, mode: AccessMode) -> Self {
        Self {
            session,
            name,
            mode,
            state: DeviceState::Init,
            id: None,
            geometry: None,
            answers_status: false,
            instance: None,
            losses: Losses::default(),
            opened: 0,
            operations: 0,
            in_flight: 0,
            message: None,
            lost: None,
            loss_policy: LossPolicy::default(),
            again: Timer::Off,
            unasked: false,
            remapping: false,
            forced: false,
            counters: DeviceCounters::default(),
        }
    }

    /// The server has opened it. Returns the geometry if it was open before with another one.
    pub(super) fn take_open(&mut self, rsp: &MsgOpenRsp, session: &SessionInfo) -> Option<Geometry> {
        let geometry = geometry_of(rsp, self.mode, session);
        let before = self.geometry.replace(geometry);
        self.answers_status = rsp.offers_block_status();
        self.id = Some(rsp.device_id.get());
        self.opened = self.opened.wrapping_add(1);
        self.lost = None;
        before.filter(|b| *b != geometry).map(|_| geometry)
    }

    /// The server is about to [have opened](Self::take_open) it: what it had acknowledged before may be lost. Returns how many writes.
    pub(super) fn lose_unflushed(&mut self, rsp: &MsgOpenRsp) -> Option<(u64, LossCause)> {
        let before = core::mem::replace(&mut self.instance, rsp.instance());
        let cause = match (before, self.instance) {
            (Some(before), Some(now)) if before == now => return None,
            (Some(_), Some(_)) => LossCause::AnotherInstance,
            _ => LossCause::Unknown,
        };
        let writes = self.losses.lose();
        self.counters.lost += writes;
        (writes > 0).then_some((writes, cause))
    }

    /// A part of an operation has succeeded.
    pub(super) fn part_succeeded<F>(&mut self, sent: &Sent, operation: &mut Operation<F>) {
        match operation.request.op {
            BlockOp::Flush => self.losses.flush_ends(sent.covers),
            op if self.leaves_volatile(op) => operation.stake.acknowledged(&mut self.losses),
            _ => {}
        }
    }

    /// Whether only a flush makes durable what an operation does. What a discard leaves is nothing to be lost.
    fn leaves_volatile(&self, op: BlockOp) -> bool {
        let cached = self.geometry.is_some_and(|g| g.write_cache);
        cached && op.writes() && op != BlockOp::Discard && !op.makes_durable()
    }

    /// Another size, in bytes. Returns the geometry if that is a change.
    pub(super) fn resize(&mut self, size: u64) -> Option<Geometry> {
        self.change(|g| g.size = size / u64::from(g.logical_block_size) * u64::from(g.logical_block_size))
    }

    /// The session can do more or less than before. Returns the geometry if that is a change.
    pub(super) fn limit(&mut self, session: &SessionInfo) -> Option<Geometry> {
        self.change(|g| {
            g.max_transfer = max_transfer(session.max_io_size, g.logical_block_size);
            g.queue_depth = depth(session.queue_depth);
        })
    }

    fn change(&mut self, f: impl FnOnce(&mut Geometry)) -> Option<Geometry> {
        let geometry = self.geometry.as_mut()?;
        let before = *geometry;
        f(geometry);
        (before != *geometry).then_some(*geometry)
    }

    /// Whether operations wait when it is lost.
    pub(super) fn waits(&self) -> bool {
        let there = matches!(self.state, DeviceState::Mapped | DeviceState::MappedDisconnected);
        there && self.loss_policy.lasts()
    }

    /// Whether it is there, and has been opened again since.
    pub(super) fn is_other_than(&self, opened: u32) -> bool {
        self.id.is_some() && self.opened != opened
    }

    /// Whether an operation may go on. It is looked at again if the device has been opened again.
    pub(super) fn admits<F>(&self, operation: &mut Operation<F>) -> Admission {
        let lost = if self.waits() {
            Admission::Later
        } else {
            Admission::Never(Errno::ECONNABORTED)
        };
        let Some(id) = self.id.filter(|_| !self.forced) else {
            return if self.forced {
                Admission::Never(Errno::ESHUTDOWN)
            } else {
                lost
            };
        };
        if operation.opened == self.opened {
            return Admission::Now(id);
        }
        // Parts that are still on their way back bring its buffer.
        if operation.span.parts() > 0 || lost != Admission::Later {
            return lost;
        }
        let request = &operation.request;
        let data = request.data.as_ref().map(|_| request.len as usize);
        if let Err(e) = self.check(request.op, request.offset, request.len, data) {
            return Admission::Never(e);
        }
        // Else it fails when the rest is done.
        if operation.stake.is_torn(&self.losses) && operation.span.restart() {
            operation.stake.restart();
        }
        operation.opened = self.opened;
        operation.zeroes = self.zeroes_as_data(operation.request.op);
        Admission::Now(id)
    }

    /// Decides how a part of an operation that has come back goes on.
    pub(super) fn fate(&self, sent: &Sent, result: Result<(), IoError>) -> Fate {
        let former = sent.opened != self.opened;
        let (_, len) = sent.part;
        let most = self.geometry.map_or(0, |g| u64::from(g.max_transfer));
        match result {
            Ok(()) => Fate::Over(Ok(())),
            Err(IoError::Path(_)) if self.waits() => Fate::Again,
            Err(IoError::Remote(e)) if self.waits() && Errno::from_wire(e) == Errno::ENOTCONN => {
                match self.id.is_some() && !former {
                    // Where the server says who it is, it closes devices of a session that is up by an operator's order only.
                    true if self.instance.is_some() => Fate::Over(Err(Errno::ENOTCONN)),
                    true => Fate::Closed,
                    // It had the number of before.
                    false => Fate::Again,
                }
            }
            Err(IoError::TooLong { .. }) if len > most => Fate::Smaller,
            Err(e) => Fate::Over(Err(Errno::from_wire(e.errno()))),
        }
    }

    /// Whether it takes this request.
    pub(super) fn takes<F>(&mut self, request: &BlockRequest<F>) -> Result<(), Errno> {
        match self.state {
            DeviceState::Mapped => {}
            DeviceState::Init => return Err(Errno::ENOTCONN),
            DeviceState::Unmapped => return Err(Errno::ESHUTDOWN),
            DeviceState::MappedDisconnected if self.waits() => {}
            DeviceState::MappedDisconnected => {
                self.counters.count_unsent();
                return Err(Errno::ECONNABORTED);
            }
        }
        let data = request.data.as_ref().map(Buffer::len);
        self.check(request.op, request.offset, request.len, data)
    }

    /// Checks `op` without asking the server; its data has `data` bytes, if it has any.
    pub(super) fn check(&self, op: BlockOp, offset: u64, len: u64, data: Option<usize>) -> Result<(), Errno> {
        let Some(g) = &self.geometry else {
            return Err(Errno::ENOTCONN);
        };
        let forced = match op {
            BlockOp::Write { fua } | BlockOp::WriteZeroes { fua, .. } => fua,
            _ => false,
        };
        if forced && g.write_cache && !g.fua {
            return Err(Errno::EOPNOTSUPP);
        }
        let moves = match op {
            BlockOp::Read | BlockOp::Write { .. } => Some(len).filter(|len| *len > 0).ok_or(Errno::EINVAL)?,
            BlockOp::Flush => return data.is_none().then_some(()).ok_or(Errno::EINVAL),
            BlockOp::BlockStatus { .. } if len == 0 => return Err(Errno::EINVAL),
            BlockOp::Discard | BlockOp::WriteZeroes { .. } | BlockOp::BlockStatus { .. } => 0,
        };
        if data.unwrap_or(0) as u64 != moves {
            return Err(Errno::EINVAL);
        }
        if !g.contains(offset, len) {
            return Err(Errno::EIO);
        }
        if !g.aligned(offset, len) {
            return Err(Errno::EINVAL);
        }
        if op.writes() && g.read_only {
            return Err(Errno::EROFS);
        }
        if op == BlockOp::Discard && g.max_discard == 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        Ok(())
    }

    /// Whether zeroes have to be written as data: a server before RNBD 2.2 has no operation for them.
    pub(super) fn zeroes_as_data(&self, op: BlockOp) -> bool {
        let none = self.geometry.is_none_or(|g| g.max_write_zeroes == 0);
        none && matches!(op, BlockOp::WriteZeroes { .. })
    }

    /// Bytes for the answer to a block status: whole blocks, as a server that takes the request for a read must find it in order.
    pub(super) fn status_room(&self) -> u32 {
        let most = |g: &Geometry| status::ROOM.max(g.logical_block_size).min(g.max_transfer);
        self.geometry.as_ref().map_or(status::ROOM, most)
    }

    /// Most bytes of a request for this.
    pub(super) fn step(&self, op: BlockOp) -> u64 {
        let Some(g) = &self.geometry else { return SECTOR };
        match op {
            BlockOp::Discard => g.max_discard,
            BlockOp::WriteZeroes { .. } if g.max_write_zeroes > 0 => g.max_write_zeroes,
            _ => g.max_transfer.into(),
        }
    }

    /// Operation and flags of the requests for this.
    pub(super) fn rw(&self, op: BlockOp) -> Rw {
        match op {
            BlockOp::Read => Rw {
                sync: true,
                ..Rw::new(IoOp::Read)
            },
            BlockOp::Write { fua } => self.write_flags(fua),
            // As the client of Linux 6.1 marks it.
            BlockOp::Flush => Rw {
                sync: true,
                fua: true,
                ..Rw::new(IoOp::Flush)
            },
            BlockOp::Discard => Rw::new(IoOp::Discard),
            BlockOp::BlockStatus { .. } => Rw::new(IoOp::BlockStatus),
            BlockOp::WriteZeroes { fua, .. } if self.zeroes_as_data(op) => self.write_flags(fua),
            BlockOp::WriteZeroes { fua, may_unmap } => Rw {
                op: IoOp::WriteZeroes,
                no_unmap: !may_unmap,
                ..self.write_flags(fua)
            },
        }
    }

    fn write_flags(&self, fua: bool) -> Rw {
        // Without a write cache every write is as good as forced.
        let fua = fua && self.geometry.is_some_and(|g| g.write_cache);
        Rw {
            sync: fua,
            fua,
            ..Rw::new(IoOp::Write)
        }
    }
}

/// Buffers that may be in use together: slabs are rounded up, and messages need some as well.
fn depth(queue_depth: u32) -> u32 {
    queue_depth.saturating_sub(4).max(1)
}

/// Largest data of a request.
fn max_transfer(max_io: u32, block: u32) -> u32 {
    let unit = if max_io >= 4096 { block.max(4096) } else { block };
    (max_io / unit * unit).max(block)
}

fn geometry_of(rsp: &MsgOpenRsp, mode: AccessMode, session: &SessionInfo) -> Geometry {
    let block = u32::from(rsp.logical_block_size.get());
    // The longest range of an operation without data.
    let range = |sectors: &U32| match mode.writable() {
        true => (u64::from(sectors.get()) * SECTOR).min(MAX_LENGTH) / u64::from(block) * u64::from(block),
        false => 0,
    };
    Geometry {
        size: rsp.nsectors.get() * SECTOR,
        logical_block_size: block,
        physical_block_size: u32::from(rsp.physical_block_size.get()).max(block),
        max_transfer: max_transfer(session.max_io_size, block),
        max_discard: range(&rsp.max_discard_sectors),
        discard_granularity: rsp.discard_granularity.get(),
        read_only: !mode.writable(),
        write_cache: rsp.cache_policy & CACHE_WRITEBACK != 0,
        fua: rsp.cache_policy & CACHE_FUA != 0,
        max_write_zeroes: range(&rsp.max_write_zeroes_sectors),
        queue_depth: depth(session.queue_depth),
    }
}
