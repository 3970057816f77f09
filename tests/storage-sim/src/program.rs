//! Program of a client: its operations, and the results that they may have.

use rnbd::{
    Errno,
    block::{BlockOp, BlockRequest, Extent, Geometry},
    client::Unmap,
};
use rtrs::{
    Cx,
    client::{Buffer, SessionId},
};

use roce_sim::{Check, MS, Rng};

use crate::{
    client::{App, ClientEnv, ClientSide, Op, Place},
    disk::{BLOCK, bytes, contents},
    ledger::Change,
    losses::is_forced,
};

/// Bytes of a buffer before it is read into.
const UNREAD: u8 = 0xa5;
/// Blocks of a read or write at most.
const LONGEST: u64 = 16;

fn name(op: BlockOp) -> &'static str {
    match op {
        BlockOp::Read => "read",
        BlockOp::Write { fua: false } => "write",
        BlockOp::Write { fua: true } => "write with FUA",
        BlockOp::Flush => "flush",
        BlockOp::Discard => "discard",
        BlockOp::WriteZeroes { fua: false, .. } => "write zeroes",
        BlockOp::WriteZeroes { fua: true, .. } => "write zeroes with FUA",
        BlockOp::BlockStatus { .. } => "block status",
    }
}

impl ClientSide {
    /// Sends operations as far as the depth allows.
    pub(crate) fn operate(&mut self, cx: &mut Cx<'_>, session: SessionId, env: &mut ClientEnv<'_>) -> Check {
        while self.in_flight.len() < self.plan.depth {
            let Some((slot, op, lba, count)) = self.next_op(env.rng) else {
                return Ok(());
            };
            if !self.send(cx, session, slot, op, lba, count, env) {
                self.wake_at(cx.now.as_nanos() + MS);
                return Ok(());
            }
            if self.quiet || self.left == 0 {
                continue;
            }
            if env.rng.chance(self.plan.leaves) {
                env.coverage.note("session closed by its user");
                self.close(cx, session);
                return Ok(());
            }
            if env.rng.chance(self.plan.unmaps)
                && let Place::Up(key) = self.slots[slot].place
            {
                self.slots[slot].place = Place::Unmapping(key);
                let how = match env.rng.chance(0.5) && !self.plan.ways.is_empty() {
                    true => Unmap::Force,
                    false => Unmap::Normal { in_use: false },
                };
                env.coverage.note_if("unmapped by force", how == Unmap::Force);
                let _ = self.rnbd.unmap(key, how);
            }
            if env.rng.chance(self.plan.commands) {
                self.administer(cx, session, env);
            }
        }
        Ok(())
    }

    /// Draws the program's next operation; `None` when it has to wait, or is done.
    fn next_op(&mut self, rng: &mut Rng) -> Option<(usize, BlockOp, u64, u64)> {
        let up: Vec<(usize, Geometry)> = (0..self.slots.len())
            .filter_map(|i| match self.slots[i].place {
                Place::Up(key) if !self.slots[i].finished => Some((i, self.rnbd.geometry(key)?)),
                Place::Lost(key) if self.plan.holds() && !self.quiet => Some((i, self.rnbd.geometry(key)?)),
                _ => None,
            })
            .collect();
        if self.left == 0 {
            return up.iter().find_map(|(i, geometry)| self.read_back(*i, geometry));
        }
        if up.is_empty() {
            return None;
        }
        let (slot, geometry) = up[rng.index(up.len())];
        let (blocks, most) = (geometry.size / BLOCK as u64, most(&geometry));
        let count = rng.range(1, most.min(blocks));
        let lba = rng.range(0, blocks - count);
        let long = rng.range(1, blocks - lba);
        let fua = rng.chance(0.2);
        let may_unmap = rng.chance(0.5);
        let (op, count) = match rng.index(20) {
            0 => (
                BlockOp::BlockStatus {
                    most: 1 + (lba % 4) as u32,
                },
                long,
            ),
            _ if !self.slots[slot].mode.writable() => (BlockOp::Read, count),
            1..8 => (BlockOp::Read, count),
            8..16 => (BlockOp::Write { fua }, count),
            16..18 => return Some((slot, BlockOp::Flush, 0, 0)),
            18 => (BlockOp::Discard, long),
            _ => (BlockOp::WriteZeroes { fua, may_unmap }, long),
        };
        Some((slot, op, lba, count))
    }

    /// At the end, when nothing is in flight, comes a flush, then everything is read.
    fn read_back(&mut self, index: usize, geometry: &Geometry) -> Option<(usize, BlockOp, u64, u64)> {
        let busy = self.in_flight.values().any(|op| op.slot == index);
        let slot = &mut self.slots[index];
        let blocks = geometry.size / BLOCK as u64;
        match slot.read_back {
            None if busy => None,
            None => {
                slot.read_back = Some(0);
                match slot.mode.writable() {
                    true => Some((index, BlockOp::Flush, 0, 0)),
                    false => self.read_back(index, geometry),
                }
            }
            Some(from) if from < blocks => {
                let count = most(geometry).min(blocks - from);
                slot.read_back = Some(from + count);
                Some((index, BlockOp::Read, from, count))
            }
            Some(_) => {
                slot.finished = !busy;
                None
            }
        }
    }

    /// False when there is no buffer.
    #[expect(clippy::too_many_arguments, reason = "an operation as it is")]
    fn send(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionId,
        slot: usize,
        op: BlockOp,
        lba: u64,
        count: u64,
        env: &mut ClientEnv<'_>,
    ) -> bool {
        let (now, len) = (cx.now.as_nanos(), count as usize * BLOCK);
        let (Place::Up(_) | Place::Lost(_), Some(opener)) = (self.slots[slot].place, self.slots[slot].opener.clone())
        else {
            return false;
        };
        let data = match op {
            BlockOp::Read | BlockOp::Write { .. } => match self.rnbd.rtrs_mut().take_buffer(cx, session, len) {
                Ok(buffer) => Some(buffer),
                Err(_) => {
                    env.coverage.note("no buffer");
                    return false;
                }
            },
            _ => None,
        };
        let change = Change {
            device: self.slots[slot].device,
            lba,
            count,
        };
        let (change, fill) = match op {
            BlockOp::Read => (None, vec![UNREAD; len]),
            BlockOp::Flush | BlockOp::BlockStatus { .. } => (None, Vec::new()),
            BlockOp::Write { .. } => {
                let (id, new) = env.ledger.write(now, self.life, change);
                (Some(id), bytes(&new))
            }
            BlockOp::Discard | BlockOp::WriteZeroes { .. } => {
                (Some(env.ledger.zero(now, self.life, change)), Vec::new())
            }
        };
        if let (Some(data), Some(buffers)) = (&data, self.rnbd.rtrs().buffers(session)) {
            buffers.write(data, 0, &fill).expect("as long as the operation");
        }
        env.coverage.note(name(op));
        self.left = self
            .left
            .saturating_sub(u32::from(self.slots[slot].read_back.is_none()));
        let user = self.next_user;
        self.next_user += 1;
        let after_error = self.slots[slot].flush_failed;
        let (known, covers) = self.slots[slot].unflushed.begin(op);
        self.in_flight.insert(
            user,
            Op {
                slot,
                op,
                lba,
                count,
                begin: now,
                change,
                after_error,
                known,
                covers,
            },
        );
        let (offset, len) = (lba * BLOCK as u64, count * BLOCK as u64);
        let request = BlockRequest {
            hint: user as usize,
            ..BlockRequest::new(user, op, offset, len).with_data(data)
        };
        self.rnbd.submit(&opener, request);
        true
    }

    /// Ends an operation, and checks its result.
    pub(crate) fn done(
        &mut self,
        now: u64,
        user: u64,
        result: Result<(), Errno>,
        data: Option<&Buffer>,
        env: &mut ClientEnv<'_>,
    ) -> Check {
        let client = self.life.client;
        let Some(op) = self.in_flight.remove(&user) else {
            return Err(format!("operation {user} of client {client} ended twice"));
        };
        self.ended[0] += 1;
        self.ended[1] += u64::from(result.is_ok());
        let device = self.slots[op.slot].device;
        // Unmapped by force, the rest of it was not sent.
        let forced = matches!(self.slots[op.slot].place, Place::Unmapping(_)) && result == Err(Errno::ESHUTDOWN);
        let lost = forced || result == Err(Errno::ECONNABORTED);
        if lost {
            env.coverage.note("operation lost");
        } else if let (Err(e), App::Open) = (result, self.app)
            && self.safe_from == Some(0)
        {
            return Err(format!("client {client}: {:?} fails: {e}", op.op));
        }
        if op.after_error && result.is_ok() && (op.op == BlockOp::Flush || is_forced(op.op)) {
            return Err(format!(
                "client {client}: {:?} succeeds after a flush has failed",
                op.op
            ));
        }
        let unflushed = &mut self.slots[op.slot].unflushed;
        let reported = match result {
            Ok(()) => {
                let good = unflushed.succeeded(op.op, op.known, op.covers);
                good.map_err(|e| format!("client {client}: {e}"))?;
                false
            }
            Err(Errno::EIO) => unflushed.failed(op.op, op.known),
            Err(_) => false,
        };
        env.coverage.note_if("lost writes told", reported);
        if op.op.makes_durable() && result == Err(Errno::EIO) && !reported && env.disks[device].is_sound() {
            return Err(format!("client {client}: {:?} fails, and nothing was lost", op.op));
        }
        match (op.op, result) {
            (BlockOp::Read, Ok(())) => self.check_read(now, op, data, env)?,
            (BlockOp::Flush, Ok(())) => {
                env.ledger.devices[device].flushed(op.begin);
                let disk = &env.disks[device];
                env.ledger.check_durable(device, disk, 0, disk.blocks())?;
            }
            (BlockOp::Flush, Err(_)) => {
                env.coverage.note("flush failed");
                self.slots[op.slot].flush_failed |= !lost && !reported;
            }
            // Its sync can have failed, and with it other data.
            (BlockOp::Write { fua: true }, Err(Errno::EIO)) if !reported => {
                env.coverage.note("forced write failed");
                self.slots[op.slot].flush_failed = true;
            }
            _ => {}
        }
        match op.change {
            Some(id) => self.end_change(now, id, op, result, lost, env),
            None => Ok(()),
        }
    }

    /// Ends the change that an operation made.
    fn end_change(
        &self,
        now: u64,
        id: u64,
        op: Op,
        result: Result<(), Errno>,
        lost: bool,
        env: &mut ClientEnv<'_>,
    ) -> Check {
        // Of several requests the others may have been lost.
        let single = matches!(op.op, BlockOp::Write { .. });
        match result {
            Ok(()) => {
                // A discard leaves any content.
                env.ledger.end(now, id, op.op != BlockOp::Discard, is_forced(op.op));
                if is_forced(op.op) {
                    let device = self.slots[op.slot].device;
                    env.ledger.check_durable(device, &env.disks[device], op.lba, op.count)?;
                }
            }
            Err(_) if lost || !single => env.ledger.lose(now, id, self.up_since),
            Err(_) => env.ledger.end(now, id, false, false),
        }
        Ok(())
    }

    /// Ends a block status, and checks it: extents reported as zeroes could be read as such.
    pub(crate) fn on_block_status(
        &mut self,
        now: u64,
        user: u64,
        result: Result<Vec<Extent>, Errno>,
        env: &mut ClientEnv<'_>,
    ) -> Check {
        let asked = self.in_flight.get(&user).copied();
        let ended = result.as_ref().map(|_| ()).map_err(|e| *e);
        self.done(now, user, ended, None, env)?;
        let (Some(op), Ok(extents)) = (asked, result) else {
            return Ok(());
        };
        let BlockOp::BlockStatus { most } = op.op else {
            return Err(format!("{:?} reports extents", op.op));
        };
        let reported: u64 = extents.iter().map(|extent| extent.len).sum();
        let range = op.count * BLOCK as u64;
        if extents.is_empty() || extents.len() > most as usize || reported > range {
            return Err(format!(
                "{reported} bytes of {range} in {} extents of {most}",
                extents.len()
            ));
        }
        let (device, mut lba) = (self.slots[op.slot].device, op.lba);
        for extent in extents {
            let count = extent.len / BLOCK as u64;
            if extent.zero {
                env.coverage.note("hole");
                env.ledger.devices[device]
                    .check(op.begin, now, lba, &vec![0; count as usize])
                    .map_err(|e| format!("client {}, device {device}, a hole: {e}", self.life.client))?;
            }
            lba += count;
        }
        Ok(())
    }

    fn check_read(&self, now: u64, op: Op, data: Option<&Buffer>, env: &mut ClientEnv<'_>) -> Check {
        let buffers = self.session.and_then(|session| self.rnbd.rtrs().buffers(session));
        let (Some(data), Some(buffers)) = (data, buffers) else {
            return Err("a read without its buffer".into());
        };
        let mut read = vec![0; data.len()];
        buffers.read(data, 0, &mut read).map_err(|e| e.to_string())?;
        let Some(read) = contents(&read) else {
            return Err(format!("a torn block in a read of {} from {}", op.count, op.lba));
        };
        let device = self.slots[op.slot].device;
        env.ledger.devices[device]
            .check(op.begin, now, op.lba, &read)
            .map_err(|e| format!("client {}, device {device}: {e}", self.life.client))
    }
}

fn most(geometry: &Geometry) -> u64 {
    (u64::from(geometry.max_transfer) / BLOCK as u64).min(LONGEST)
}
