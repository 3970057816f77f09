//! A client's host: a session, devices, and a program that works with them and checks what it gets.

use std::collections::BTreeMap;

use rnbd::{
    block::{BlockOp, Completion},
    client::{
        Client as Rnbd, OnLoss, Opener, Request, Unmap,
        output::{DeviceKey, Output},
        state::DeviceState,
    },
    proto::AccessMode,
};
use roce_verbs::{Instant, WcStatus};
use rtrs::{
    Cx, PathError,
    addr::PathAddr,
    client::{Buffer, Output as RtrsOutput, PathCommand, PathId, SessionConfig, SessionId},
};

use roce_sim::{Check, Coverage, MS, Notes, Rng, SEC};

use crate::{
    disk::SimDisk,
    ledger::{Ledger, Life},
    losses::{Known, Unflushed},
};

/// Networks and hosts that fail don't end a path like this: somebody has broken the rules.
pub(crate) fn honest(why: &PathError) -> Check {
    let broken = match why {
        PathError::Protocol(_) | PathError::Unexpected(_) | PathError::AccessError => true,
        PathError::Completion { status, .. } => matches!(
            status,
            WcStatus::LocalLengthError | WcStatus::LocalProtectionError | WcStatus::LocalQpOperationError
        ),
        _ => false,
    };
    match broken {
        true => Err(format!("a path is lost: {why}")),
        false => Ok(()),
    }
}

/// Bytes of a buffer that must not be touched.
const UNTOUCHED: u8 = 0x5c;
/// Buffers that are watched after their operation, at most.
const WATCHED: usize = 3;
/// Rounds of a turn, at most.
const ROUNDS: u32 = 10_000;

/// Plan of a client.
#[derive(Clone, Debug)]
pub(crate) struct ClientPlan {
    pub(crate) config: SessionConfig,
    /// Which devices, and how it opens them.
    pub(crate) devices: Vec<(usize, AccessMode)>,
    /// Operations in flight at most.
    pub(crate) depth: usize,
    /// Operations of all its sessions.
    pub(crate) operations: u32,
    /// Pause of the program, at most, nanoseconds.
    pub(crate) think: u64,
    /// Probability at each operation that it ends its session.
    pub(crate) leaves: f64,
    /// Probability at each operation that it unmaps the device.
    pub(crate) unmaps: f64,
    /// How long it waits for a session that is lost, nanoseconds.
    pub(crate) timeout: u64,
    /// Paths that there may be.
    pub(crate) ways: Vec<PathAddr>,
    /// Probability at each operation that it gives a command for its paths.
    pub(crate) commands: f64,
    /// Fate of operations while the session is lost.
    pub(crate) on_loss: OnLoss,
}

impl ClientPlan {
    /// Whether operations outlive the loss of the session.
    pub(crate) fn holds(&self) -> bool {
        self.on_loss != OnLoss::Error
    }
}

/// State of the world that a client works with.
pub(crate) struct ClientEnv<'a> {
    pub(crate) ledger: &'a mut Ledger,
    pub(crate) disks: &'a [SimDisk],
    pub(crate) rng: &'a mut Rng,
    pub(crate) coverage: &'a mut Coverage,
    /// The server does not say whether it has lost writes.
    pub(crate) silent: bool,
}

/// Stage of its program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum App {
    /// Between two sessions.
    Idle,
    Opening,
    Open,
    Closing,
    Done,
}

/// Stage of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    Closed,
    Mapping(DeviceKey),
    Up(DeviceKey),
    /// Its session was lost while it was up.
    Lost(DeviceKey),
    Unmapping(DeviceKey),
}

impl Place {
    fn key(self) -> Option<DeviceKey> {
        match self {
            Self::Closed => None,
            Self::Mapping(key) | Self::Up(key) | Self::Lost(key) | Self::Unmapping(key) => Some(key),
        }
    }
}

/// A device of a client's.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) device: usize,
    pub(crate) mode: AccessMode,
    pub(crate) place: Place,
    /// Time of its next opening.
    again_at: u64,
    /// A flush has failed since the device was opened.
    pub(crate) flush_failed: bool,
    /// Its user, since it was mapped.
    pub(crate) opener: Option<Opener>,
    /// Writes that the device has not flushed.
    pub(crate) unflushed: Unflushed,
    /// The blocks up to here have been read at the end; `None` before that.
    pub(crate) read_back: Option<u64>,
    /// All has been read.
    pub(crate) finished: bool,
}

/// An operation in flight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Op {
    pub(crate) slot: usize,
    pub(crate) op: BlockOp,
    pub(crate) lba: u64,
    pub(crate) count: u64,
    pub(crate) begin: u64,
    /// Number of the change that it makes to the device.
    pub(crate) change: Option<u64>,
    /// A flush had failed before it was sent.
    pub(crate) after_error: bool,
    /// The losses that it need not tell.
    pub(crate) known: Known,
    /// The acknowledged writes that it covers.
    pub(crate) covers: u64,
}

/// A buffer of an operation that has ended: nothing may touch it.
struct Watched {
    session: SessionId,
    buffer: Buffer,
    until: u64,
}

/// Host of a client: its state machines, its program, and its devices.
pub(crate) struct ClientSide {
    pub(crate) rnbd: Rnbd,
    pub(crate) life: Life,
    pub(crate) plan: ClientPlan,
    pub(crate) app: App,
    pub(crate) session: Option<SessionId>,
    opened_at: u64,
    down_since: Option<u64>,
    /// Since then it has had a path.
    pub(crate) up_since: u64,
    /// Commands for its paths that have not ended.
    pub(crate) commanded: Vec<(PathId, PathCommand)>,
    /// A network whose paths it is to give up.
    flees: Option<usize>,
    pub(crate) slots: Vec<Slot>,
    pub(crate) left: u32,
    pub(crate) in_flight: BTreeMap<u64, Op>,
    pub(crate) next_user: u64,
    watched: Vec<Watched>,
    /// When the program wants to go on.
    app_at: Option<u64>,
    pub(crate) quiet: bool,
    /// Sessions that are opened from here on are not lost, and operations succeed.
    pub(crate) safe_from: Option<u64>,
    notes: Notes,
    /// Operations that ended, and of these with success.
    pub(crate) ended: [u64; 2],
}

impl ClientSide {
    pub(crate) fn new(client: usize, plan: ClientPlan, notes: Notes) -> Self {
        let slots = plan.devices.iter().map(|(device, mode)| Slot {
            device: *device,
            mode: *mode,
            place: Place::Closed,
            again_at: 0,
            flush_failed: false,
            opener: None,
            unflushed: Unflushed::default(),
            read_back: None,
            finished: false,
        });
        Self {
            slots: slots.collect(),
            notes,
            rnbd: Rnbd::new(),
            life: Life { client, life: 0 },
            app: App::Idle,
            session: None,
            opened_at: 0,
            down_since: None,
            up_since: 0,
            commanded: Vec::new(),
            flees: None,
            left: plan.operations,
            in_flight: BTreeMap::new(),
            next_user: 0,
            watched: Vec::new(),
            app_at: Some(0),
            quiet: false,
            safe_from: None,
            ended: [0; 2],
            plan,
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.app == App::Done
    }

    /// Nothing goes wrong any more; from `safe_from` on nothing must.
    pub(crate) fn enter_quiet(&mut self, safe_from: u64) {
        self.quiet = true;
        self.left = self.left.min(20);
        self.safe_from.get_or_insert(safe_from);
    }

    /// Nothing goes wrong in all of the run.
    pub(crate) fn stay_calm(&mut self) {
        self.safe_from = Some(0);
    }

    pub(crate) fn situation(&self) -> String {
        let places: Vec<Place> = self.slots.iter().map(|slot| slot.place).collect();
        format!(
            "client {} is {:?} with devices {places:?}, {} operations in flight and {} to come",
            self.life.client,
            self.app,
            self.in_flight.len(),
            self.left
        )
    }

    /// Its host has died; it starts again.
    pub(crate) fn crash(&mut self, now: u64, ledger: &mut Ledger) {
        for op in core::mem::take(&mut self.in_flight).into_values() {
            if let Some(id) = op.change {
                ledger.lose(now, id, self.up_since);
            }
        }
        let new = Self::new(self.life.client, self.plan.clone(), self.notes);
        let old = core::mem::replace(self, new);
        (self.life, self.left, self.quiet, self.safe_from) = (old.life, old.left, old.quiet, old.safe_from);
        (self.next_user, self.ended, self.app_at) = (old.next_user, old.ended, None);
        if old.app == App::Done {
            self.app = App::Done;
        }
    }

    /// The server has lost power.
    pub(crate) fn power_fails(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.unflushed.power_fails());
    }

    /// When its program, or what it works with, wants to go on.
    pub(crate) fn wakes_at(&self) -> Option<Instant> {
        let app = self.app_at.map(Instant::from_nanos);
        app.into_iter().chain(self.rnbd.next_timeout()).min()
    }

    /// The program goes on at this time, or earlier.
    pub(crate) fn wake_at(&mut self, at: u64) {
        self.app_at = Some(self.app_at.map_or(at, |planned| planned.min(at)));
    }

    /// Everything that can be done now.
    pub(crate) fn work(&mut self, cx: &mut Cx<'_>, env: &mut ClientEnv<'_>) -> Check {
        let now = cx.now.as_nanos();
        if self.rnbd.next_timeout().is_some_and(|at| at <= cx.now) {
            self.rnbd.timeout(cx.now);
        }
        if self.app_at.is_some_and(|at| at <= now) {
            self.app_at = None;
            self.go_on(cx, env)?;
        }
        for _ in 0..ROUNDS {
            let mut moved = false;
            moved |= self.rnbd.turn(cx);
            while let Some(output) = self.rnbd.poll_output() {
                moved = true;
                self.notes
                    .print(now, || format!("client {}: {output:?}", self.life.client));
                self.on_output(now, output, env)?;
            }
            if !moved {
                return self.check_permits();
            }
        }
        Err(format!("a turn without end: {}", self.situation()))
    }

    /// Only requests that have not ended have permits, also of a session whose path is lost.
    fn check_permits(&self) -> Check {
        let held = self.session.map_or(0, |session| self.rnbd.rtrs().permits(session));
        match held.checked_sub(self.rnbd.in_flight()) {
            None | Some(0) => Ok(()),
            Some(lost) => Err(format!(
                "client {}: {lost} permits have not come back",
                self.life.client
            )),
        }
    }

    fn go_on(&mut self, cx: &mut Cx<'_>, env: &mut ClientEnv<'_>) -> Check {
        let now = cx.now.as_nanos();
        self.look_at_watched(now)?;
        let finished = self.slots.iter().all(|slot| slot.finished);
        match (self.app, self.session) {
            (App::Idle, _) => {
                // The report of the session's end had to come with it.
                if !self.in_flight.is_empty() || self.slots.iter().any(|slot| slot.place != Place::Closed) {
                    return Err(format!("something outlives its session: {}", self.situation()));
                }
                match finished {
                    true if self.watched.is_empty() => self.app = App::Done,
                    true => {}
                    false => self.open(cx),
                }
            }
            (App::Open, Some(session)) => self.serve(cx, session, env)?,
            _ => {}
        }
        Ok(())
    }

    fn open(&mut self, cx: &mut Cx<'_>) {
        self.life.life += 1;
        let mut config = self.plan.config.clone();
        config.name = format!("c{}-{}", self.life.client, self.life.life);
        let opened = self.rnbd.rtrs_mut().open(cx, config);
        self.session = Some(opened.expect("a possible configuration"));
        (self.app, self.opened_at, self.down_since) = (App::Opening, cx.now.as_nanos(), None);
    }

    /// Its user has had enough of a network.
    pub(crate) fn give_up_network(&mut self, now: u64, network: usize) {
        self.flees = Some(network);
        self.wake_at(now);
    }

    /// Works with a session that is open.
    fn serve(&mut self, cx: &mut Cx<'_>, session: SessionId, env: &mut ClientEnv<'_>) -> Check {
        let now = cx.now.as_nanos();
        if self.rnbd.rtrs().state(session).is_err() {
            let until = *self.down_since.get_or_insert(now) + self.plan.timeout;
            if self.plan.config.max_reconnects == 0 || now >= until {
                self.close(cx, session);
                return Ok(());
            }
            self.wake_at(until);
            if !self.quiet && env.rng.chance(self.plan.commands) {
                self.administer(cx, session, env);
            }
            // Held operations may end while there is no path.
            return match self.plan.holds() {
                true => self.operate(cx, session, env),
                false => Ok(()),
            };
        }
        self.down_since = None;
        if let Some(network) = self.flees.take().filter(|_| !self.quiet) {
            self.flee(cx, session, network, env);
        }
        for i in 0..self.slots.len() {
            let slot = &mut self.slots[i];
            match slot.place {
                Place::Closed if slot.finished => {}
                Place::Lost(key) if slot.again_at <= now => {
                    slot.again_at = u64::MAX;
                    // Its end is reported later.
                    let _ = self.rnbd.remap(key);
                }
                Place::Closed if slot.again_at <= now => {
                    let name = format!("d{}", slot.device);
                    let key = self.rnbd.map(session, &name, slot.mode);
                    slot.place = Place::Mapping(key);
                    // Unless it was refused at once.
                    let _ = self.rnbd.set_on_loss(key, self.plan.on_loss);
                }
                Place::Closed | Place::Lost(_) => {
                    let at = slot.again_at;
                    self.wake_at(at);
                }
                _ => {}
            }
        }
        self.operate(cx, session, env)?;
        if self.app == App::Open {
            self.leave_finished(cx, session);
        }
        Ok(())
    }

    /// Devices that nothing more is done with are unmapped, then the session is closed.
    fn leave_finished(&mut self, cx: &mut Cx<'_>, session: SessionId) {
        for slot in &mut self.slots {
            if let Place::Up(key) = slot.place
                && slot.finished
            {
                slot.place = Place::Unmapping(key);
                let _ = self.rnbd.unmap(key, Unmap::Normal { in_use: false });
            }
        }
        let finished = |slot: &Slot| slot.finished && slot.place == Place::Closed;
        if self.slots.iter().all(finished) {
            self.close(cx, session);
        }
    }

    fn on_session_output(&mut self, output: &RtrsOutput<Request<u64>>, now: u64, env: &mut ClientEnv<'_>) -> Check {
        match output {
            RtrsOutput::Opened(..) => {
                (self.app, self.up_since) = (App::Open, now);
                self.wake_at(now);
            }
            RtrsOutput::Up(..) => {
                // The server takes no requests of a new path before it is done with those of the old.
                env.ledger.session_over(now, self.life);
                env.coverage.note("reconnected");
                self.up_since = now + 1;
                self.wake_at(now);
            }
            RtrsOutput::Down(_, why) => {
                env.coverage.note("session lost");
                honest(why)?;
                if self.safe_from.is_some_and(|from| self.opened_at >= from) {
                    return Err(format!("client {}: the session is lost: {why}", self.life.client));
                }
                self.wake_at(now);
            }
            RtrsOutput::OpenFailed(..) | RtrsOutput::Closed(_) => {
                env.coverage
                    .note_if("open failed", matches!(output, RtrsOutput::OpenFailed(..)));
                self.app = App::Idle;
                self.commanded.clear();
                let rest = if self.quiet { 20 * MS } else { 500 * MS };
                self.wake_at(now + env.rng.range(MS, rest));
            }
            RtrsOutput::Path { path, news, .. } => self.on_path_event(*path, news, env)?,
            RtrsOutput::Done { .. } => {}
        }
        Ok(())
    }

    pub(crate) fn close(&mut self, cx: &mut Cx<'_>, session: SessionId) {
        self.app = App::Closing;
        self.rnbd.rtrs_mut().close(cx, session);
    }

    fn on_output(&mut self, now: u64, output: Output, env: &mut ClientEnv<'_>) -> Check {
        let again = now + env.rng.range(MS, 200 * MS);
        match output {
            Output::Mapped(device, _) => {
                env.coverage.note("device opened");
                let opener = self.rnbd.opener(device);
                let slot = self.slot(device)?;
                (slot.place, slot.flush_failed) = (Place::Up(device), false);
                (slot.opener, slot.unflushed) = (Some(opener), Unflushed::default());
                self.wake_at(now);
            }
            Output::MapFailed(device, why) => {
                env.coverage.note("open refused");
                self.notes.print(now, || format!("client {}: {why}", self.life.client));
                let slot = self.slot(device)?;
                slot.again_at = again;
                if slot.place == Place::Mapping(device) {
                    slot.place = Place::Closed;
                }
                self.wake_at(again);
            }
            Output::Unmapped(device, result) => {
                let mut ops = self.in_flight.values();
                if ops.any(|op| self.slots[op.slot].place.key() == Some(device)) {
                    let text = self.situation();
                    return Err(format!("a device is unmapped before its operations: {text}"));
                }
                let slot = self.slot(device)?;
                (slot.place, slot.again_at) = (Place::Closed, again);
                if result.is_ok() && !slot.finished {
                    env.coverage.note("device closed and opened again");
                }
                self.wake_at(again);
            }
            Output::Done { user, completion, .. } => {
                let Completion { result, data, .. } = completion;
                match self.in_flight.get(&user).map(|op| op.op) {
                    Some(BlockOp::BlockStatus { .. }) => {
                        self.on_block_status(now, user, result.map(|()| completion.extents), env)?;
                    }
                    _ => self.done(now, user, result, data.as_ref(), env)?,
                }
                if let (Some(session), Some(data)) = (self.session, data) {
                    self.give_back(now, session, data, env.rng)?;
                }
                self.wake_at(now + env.rng.range(0, self.plan.think));
            }
            Output::State(device, DeviceState::Mapped) => {
                env.coverage.note("device opened after reconnecting");
                let slot = self.slot(device)?;
                (slot.place, slot.flush_failed) = (Place::Up(device), false);
                slot.unflushed.reopened();
                let slots = &self.slots;
                let held = self.in_flight.values_mut();
                // An earlier failure proves nothing any more.
                held.filter(|op| slots[op.slot].place == Place::Up(device))
                    .for_each(|op| op.after_error = false);
                self.wake_at(now);
            }
            Output::State(device, DeviceState::MappedDisconnected) => {
                let slot = self.slot(device)?;
                (slot.place, slot.again_at) = (Place::Lost(device), u64::MAX);
            }
            Output::WritesLost { device, .. } => {
                env.coverage.note("writes reported lost");
                let reported = self.slot(device)?.unflushed.reported(env.silent);
                reported.map_err(|e| format!("client {}: {e}", self.life.client))?;
            }
            Output::State(..) | Output::Geometry(..) => {}
            Output::Rtrs(output) => self.on_session_output(&output, now, env)?,
        }
        Ok(())
    }

    fn slot(&mut self, device: DeviceKey) -> Result<&mut Slot, String> {
        let found = self.slots.iter_mut().find(|slot| slot.place.key() == Some(device));
        found.ok_or_else(|| format!("an output for {device:?}, which is no device of the client's"))
    }

    /// A buffer goes back, or is watched for a while.
    fn give_back(&mut self, now: u64, session: SessionId, buffer: Buffer, rng: &mut Rng) -> Check {
        let watch = self.watched.len() < WATCHED && rng.chance(0.5);
        let Some(buffers) = self.rnbd.rtrs().buffers(session).filter(|_| watch) else {
            self.rnbd.rtrs_mut().give_buffer(session, buffer);
            return Ok(());
        };
        let filled = buffers.write(&buffer, 0, &vec![UNTOUCHED; buffer.len()]);
        filled.map_err(|e| e.to_string())?;
        let until = now + rng.pick(&[MS / 10, 5 * MS, SEC]);
        self.watched.push(Watched { session, buffer, until });
        self.wake_at(until);
        Ok(())
    }

    fn look_at_watched(&mut self, now: u64) -> Check {
        let (over, rest): (Vec<_>, Vec<_>) = self.watched.drain(..).partition(|watched| watched.until <= now);
        self.watched = rest;
        for watched in over {
            let mut bytes = vec![0; watched.buffer.len()];
            if let Some(buffers) = self.rnbd.rtrs().buffers(watched.session) {
                buffers
                    .read(&watched.buffer, 0, &mut bytes)
                    .map_err(|e| e.to_string())?;
                if bytes.iter().any(|b| *b != UNTOUCHED) {
                    return Err("a buffer was written after its operation had ended".into());
                }
            }
            self.rnbd.rtrs_mut().give_buffer(watched.session, watched.buffer);
        }
        if let Some(at) = self.watched.iter().map(|watched| watched.until).min() {
            self.wake_at(at);
        }
        Ok(())
    }

    /// Whether nothing is left of its sessions.
    pub(crate) fn check_empty(&self) -> Check {
        let sessions = self.rnbd.rtrs().sessions().count();
        match (self.in_flight.len(), sessions) {
            (0, 0) => Ok(()),
            (operations, sessions) => Err(format!(
                "client {} is left with {operations} operations and {sessions} sessions",
                self.life.client
            )),
        }
    }
}
