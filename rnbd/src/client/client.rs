//! The client's state machine: devices over sessions, and their operations as requests.

use std::collections::{BTreeMap, VecDeque};

use rtrs::{
    Cx, IoError, PathError,
    client::{
        buffers::Buffer,
        config::SessionInfo,
        request::{Output as RtrsOutput, SessionId},
    },
    table,
};

use super::{
    device::{Device, DeviceCounters},
    error::MapError,
    loss_policy::Timer,
    losses::{Opener, Stake},
    operation::{Kind, Message, Operation, Request, Span},
    operations::Operations,
    output::Output,
    session::Session,
    state::{DEVICE, DeviceAction, DeviceEvent, DeviceKey, DeviceState},
    transport::Transport,
};
use crate::{
    block::{BlockRequest, Completion, Geometry},
    errno::Errno,
    proto::{AccessMode, MsgOpen, MsgOpenRsp},
    slab::Slab,
};

/// Data of a device's event.
#[derive(Debug)]
pub(super) enum EventData {
    Nothing,
    Opened(MsgOpenRsp),
    Failed(MapError),
    Closed(Result<(), IoError>),
}

/// How a device is unmapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unmap {
    /// When what is under way has ended. Only who lets users in knows whether somebody has it in use: then it stays.
    Normal {
        /// Somebody has.
        in_use: bool,
    },
    /// Force: do not wait for users. Unsent requests end with an error at once, the rest as soon as nothing touches their buffers any
    /// more: with the answer, or the end of its path.
    Force,
}

/// RNBD's client, without I/O: devices of servers, over sessions of RTRS's client.
///
/// It owns RTRS's client ([`rtrs`](Self::rtrs)), which is driven as it says, and sends requests by it. `F` is a front end's part of an
/// operation, which comes back with the end. In each turn of a loop [`turn`](Self::turn) is called until it returns false, with
/// [`poll_output`](Self::poll_output) until there is nothing more, and again whenever operations were submitted or buffers given back;
/// and [`timeout`](Self::timeout) in time.
///
/// Sessions agree on a protocol version as soon as they are open. One that is lost and comes back opens its devices again, each for
/// itself. The fate of operations meanwhile is each device's [`OnLoss`](super::OnLoss).
#[derive(Debug)]
pub struct Client<F = u64, T = rtrs::client::Client<Request<F>>> {
    pub(super) rtrs: T,
    pub(super) sessions: BTreeMap<SessionId, Session>,
    pub(super) devices: Slab<Device>,
    /// Counters of devices that are unmapped.
    unmapped: DeviceCounters,
    pub(super) operations: Operations<F>,
    /// Messages to be sent, by their numbers.
    pub(super) messages: VecDeque<(u64, Message)>,
    pub(super) messages_begun: u64,
    /// Messages that RTRS has.
    pub(super) messages_in_flight: usize,
    /// There are timers to be started, or reserves to be looked after.
    pub(super) needs_upkeep: bool,
    pub(super) outputs: VecDeque<Output<F>>,
}

impl<F> Default for Client<F> {
    fn default() -> Self {
        Self::over(rtrs::client::Client::new())
    }
}

impl<F> Client<F> {
    /// A client without sessions.
    pub fn new() -> Self {
        Self::default()
    }
}

impl<F, T: Transport<F>> Client<F, T> {
    /// A client over this one of RTRS, without sessions.
    pub fn over(rtrs: T) -> Self {
        Self {
            rtrs,
            sessions: BTreeMap::new(),
            devices: Slab::default(),
            unmapped: DeviceCounters::default(),
            operations: Operations::default(),
            messages: VecDeque::new(),
            messages_begun: 0,
            messages_in_flight: 0,
            needs_upkeep: false,
            outputs: VecDeque::new(),
        }
    }

    /// RTRS's client.
    pub fn rtrs(&self) -> &T {
        &self.rtrs
    }

    /// RTRS's client, to drive it, and to open, change and close sessions.
    pub fn rtrs_mut(&mut self) -> &mut T {
        &mut self.rtrs
    }

    /// Returns the next output.
    pub fn poll_output(&mut self) -> Option<Output<F>> {
        self.outputs.pop_front()
    }

    /// Major protocol version in use with a session; `None` when none is agreed on (yet).
    pub fn version(&self, session: SessionId) -> Option<u8> {
        self.sessions.get(&session)?.version
    }

    /// The state of a device; `None` when it is gone.
    pub fn state(&self, device: DeviceKey) -> Option<DeviceState> {
        self.devices.get(device.0).map(|d| d.state)
    }

    /// Size, limits, abilities; `None` before the device has been mapped.
    pub fn geometry(&self, device: DeviceKey) -> Option<Geometry> {
        self.devices.get(device.0)?.geometry
    }

    /// The name that the device was mapped by.
    pub fn name(&self, device: DeviceKey) -> Option<&str> {
        self.devices.get(device.0).map(|d| d.name.as_str())
    }

    /// How the device was opened.
    pub fn mode(&self, device: DeviceKey) -> Option<AccessMode> {
        self.devices.get(device.0).map(|d| d.mode)
    }

    /// Requests of a device so far.
    pub fn counters(&self, device: DeviceKey) -> Option<DeviceCounters> {
        self.devices.get(device.0).map(|d| d.counters)
    }

    /// Requests of all devices so far, those included that are unmapped.
    pub fn all_counters(&self) -> DeviceCounters {
        let mut sum = self.unmapped;
        self.devices.iter().for_each(|(_, device)| sum.add(&device.counters));
        sum
    }

    /// Requests that RTRS has.
    pub fn in_flight(&self) -> usize {
        let parts = self.devices.iter().map(|(_, device)| device.in_flight as usize);
        parts.sum::<usize>() + self.messages_in_flight
    }

    /// Takes what RTRS has, and sends what can be sent: messages and operations for whose buffers there is memory. Returns whether
    /// there was something to do.
    pub fn turn(&mut self, cx: &mut Cx<'_>) -> bool {
        let mut worked = false;
        while let Some(output) = self.rtrs.poll_output() {
            worked = true;
            self.receive(output);
        }
        if self.needs_upkeep {
            self.upkeep(cx);
        }
        worked |= self.send_messages(cx);
        worked |= self.operations.send(cx, &mut self.rtrs, &mut self.devices);
        self.finish();
        worked
    }

    fn receive(&mut self, output: RtrsOutput<Request<F>>) {
        match output {
            RtrsOutput::Done {
                session,
                tag: Request(kind),
                result,
                data,
            } => return self.ended(session, kind, result, data),
            RtrsOutput::Opened(id, info) => {
                self.sessions.insert(id, Session::new(info));
                self.ask_version(id);
            }
            RtrsOutput::Up(id, info) => self.session_up(id, info),
            RtrsOutput::Down(id, ref why) => self.session_down(id, why),
            RtrsOutput::Closed(id) => {
                self.drop_reserve(id);
                self.session_closed(id);
            }
            // Nothing was mapped over the session.
            RtrsOutput::OpenFailed(..) | RtrsOutput::Path { .. } => {}
        }
        self.outputs.push_back(Output::Rtrs(output));
    }

    /// A request has ended.
    fn ended(&mut self, session: SessionId, kind: Kind<F>, result: Result<(), IoError>, data: Option<Buffer>) {
        let (operation, sent) = match kind {
            Kind::Message(number, message) => return self.message_done(session, number, message, result, data),
            Kind::Whole(operation, sent) => (Some(operation), sent),
            Kind::Part(number, sent) => (self.operations.of_part(number), sent),
        };
        if let Err(IoError::TooLong { max, .. }) = result {
            self.shrink(session, max);
        }
        self.needs_upkeep |= result.is_err();
        // Both are there as long as there are parts.
        let Some(operation) = operation else { return };
        let Some(device) = self.devices.get_mut(operation.device.0) else {
            return;
        };
        if self
            .operations
            .part_done(&mut self.rtrs, device, operation, sent, (result, data))
        {
            self.session_stale(session);
        }
        self.finish();
    }
}

/// Sessions.
impl<F, T: Transport<F>> Client<F, T> {
    fn session_up(&mut self, id: SessionId, info: SessionInfo) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.info = info;
            session.down = None;
        }
        self.ask_version(id);
    }

    fn session_down(&mut self, id: SessionId, why: &PathError) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        session.down = Some(why.clone());
        session.version = None;
        session.drain = Timer::Off;
        if let Some(tag) = session.asking.take() {
            self.cancel(tag);
        }
        self.devices_lost(id, why, DeviceEvent::LinkDown);
    }

    fn session_closed(&mut self, id: SessionId) {
        let Some(session) = self.sessions.remove(&id) else {
            return;
        };
        if let Some(tag) = session.asking {
            self.cancel(tag);
        }
        let why = session.down.unwrap_or(PathError::Closed);
        self.devices_lost(id, &why, DeviceEvent::SessionGone);
    }

    /// The server has no device of this session open any more.
    pub(super) fn devices_lost(&mut self, id: SessionId, why: &PathError, event: DeviceEvent) {
        for key in self.devices_of(id, |_| true) {
            if let Some(device) = self.devices.get_mut(key.0) {
                device.id = None;
                device.lost = Some(why.clone());
                (device.again, device.unasked) = (Timer::Off, false);
                if let Some(tag) = device.message.take() {
                    self.cancel(tag);
                }
            }
            self.step(key, event, EventData::Failed(down(why)));
        }
    }

    pub(super) fn devices_of(&self, id: SessionId, which: impl Fn(&Device) -> bool) -> Vec<DeviceKey> {
        let mine = self.devices.iter().filter(|(_, d)| d.session == id && which(d));
        mine.map(|(key, _)| DeviceKey(key)).collect()
    }
}

/// There is no path, so there are no devices.
fn down(why: &PathError) -> MapError {
    MapError::Session(rtrs::Error::Down(why.clone()))
}

/// Devices.
impl<F, T: Transport<F>> Client<F, T> {
    /// Opens a device of the server: ends with [`Output::Mapped`] or [`Output::MapFailed`].
    pub fn map(&mut self, session: SessionId, name: &str, mode: AccessMode) -> DeviceKey {
        let error = self.unmappable(session, name, mode);
        let key = DeviceKey(self.devices.insert(Device::new(session, name.into(), mode)));
        match error {
            Some(e) => self.step(key, DeviceEvent::Refused, EventData::Failed(e)),
            None => self.open_when_ready(session, key, DeviceEvent::LinkUp),
        }
        key
    }

    fn unmappable(&self, id: SessionId, name: &str, mode: AccessMode) -> Option<MapError> {
        match self.sessions.get(&id) {
            None => return Some(down(&PathError::Closed)),
            Some(Session { down: Some(why), .. }) => return Some(down(why)),
            Some(_) => {}
        }
        if MsgOpen::new(name.as_bytes(), mode).is_err() {
            return Some(MapError::Name(name.into()));
        }
        // The server would give us the same device a second time, and close both with the first unmap.
        let mapped = self.devices.iter().any(|(_, d)| d.session == id && d.name == name);
        mapped.then(|| MapError::AlreadyMapped(name.into()))
    }

    pub(super) fn open_when_ready(&mut self, session: SessionId, key: DeviceKey, event: DeviceEvent) {
        if self.sessions.get(&session).is_some_and(Session::is_ready) {
            self.step(key, event, EventData::Nothing);
        } else {
            self.ask_version(session);
        }
    }

    /// Opens a device again that the server refused to open after its session came back: ends with [`Output::State`] or
    /// [`Output::MapFailed`], of the latter also if the session is lost meanwhile.
    ///
    /// # Errors
    /// As the kernel's `remap_device`: EALREADY when it is mapped, EBUSY when it has not been yet, ENODEV when it is unmapped, or
    /// gone.
    pub fn remap(&mut self, key: DeviceKey) -> Result<(), Errno> {
        let device = self.devices.get_mut(key.0).ok_or(Errno::ENODEV)?;
        match device.state {
            DeviceState::Mapped => return Err(Errno::EALREADY),
            DeviceState::Init => return Err(Errno::EBUSY),
            DeviceState::Unmapped => return Err(Errno::ENODEV),
            DeviceState::MappedDisconnected => {}
        }
        // Somebody wants to know how the attempt ends that is under way, too.
        (device.again, device.unasked) = (Timer::Off, false);
        let (session, under_way) = (device.session, device.message.is_some());
        match self.sessions.get(&session).and_then(|s| s.down.as_ref()) {
            Some(why) => self.outputs.push_back(Output::MapFailed(key, down(why))),
            None if under_way => device.remapping = true,
            None => {
                device.remapping = true;
                self.open_when_ready(session, key, DeviceEvent::RemapAsked);
            }
        }
        Ok(())
    }

    /// Takes no more operations, ends those under way and closes the device on the server: ends with [`Output::Unmapped`]. Operations
    /// that wait for a lost device end at once.
    ///
    /// # Errors
    /// As the kernel's `unmap_device`: EBUSY when it is in use, EALREADY when it is being unmapped. ENODEV when it is gone.
    pub fn unmap(&mut self, key: DeviceKey, how: Unmap) -> Result<(), Errno> {
        let device = self.devices.get_mut(key.0).ok_or(Errno::ENODEV)?;
        match (device.state, how) {
            (DeviceState::Unmapped, _) => return Err(Errno::EALREADY),
            (_, Unmap::Normal { in_use: true }) => return Err(Errno::EBUSY),
            (_, how) => device.forced = how == Unmap::Force,
        }
        self.step(key, DeviceEvent::UnmapAsked, EventData::Nothing);
        Ok(())
    }

    pub(super) fn step(&mut self, key: DeviceKey, event: DeviceEvent, mut data: EventData) {
        let Some(device) = self.devices.get_mut(key.0) else {
            return;
        };
        let Some((next, actions)) = table::step(DEVICE, device.state, event) else {
            return;
        };
        device.state = next;
        for action in actions {
            self.act(key, *action, &mut data);
        }
        self.finish();
        self.settle(key);
    }

    /// Goes on with a device that is being unmapped, when nothing of it is under way.
    pub(super) fn settle(&mut self, key: DeviceKey) {
        let Some(device) = self.devices.get(key.0) else { return };
        let busy = device.operations > 0 || device.message.is_some();
        if device.state != DeviceState::Unmapped || busy {
            return;
        }
        if device.id.is_some() {
            return self.step(key, DeviceEvent::Idle, EventData::Nothing);
        }
        let lost = device.lost.clone();
        let result = lost.map_or(Ok(()), |why| Err(IoError::Path(why)));
        self.step(key, DeviceEvent::Closed, EventData::Closed(result));
    }

    fn act(&mut self, key: DeviceKey, action: DeviceAction, data: &mut EventData) {
        let Some(device) = self.devices.get_mut(key.0) else {
            return;
        };
        match action {
            DeviceAction::SendOpen => self.send(key, Message::Open(key)),
            DeviceAction::SendClose => self.send(key, Message::Close(key)),
            DeviceAction::TakeOpen => {
                let session = self.sessions.get(&device.session);
                if let (EventData::Opened(rsp), Some(session)) = (data, session) {
                    let lost = device.lose_unflushed(rsp);
                    let geometry = device.take_open(rsp, &session.info);
                    self.outputs.extend(lost.map(|(writes, cause)| Output::WritesLost {
                        device: key,
                        writes,
                        cause,
                    }));
                    self.outputs.extend(geometry.map(|g| Output::Geometry(key, g)));
                }
            }
            DeviceAction::TellMapped => {
                let mapped = device.geometry.map(|g| Output::Mapped(key, g));
                self.outputs.extend(mapped);
            }
            DeviceAction::TellState => self.outputs.push_back(Output::State(key, device.state)),
            // The first refusal was told.
            DeviceAction::TellFailed if core::mem::take(&mut device.unasked) => {}
            DeviceAction::TellLost if !device.remapping => {}
            DeviceAction::TellFailed | DeviceAction::TellLost => {
                device.remapping = false;
                if let EventData::Failed(e) = core::mem::replace(data, EventData::Nothing) {
                    self.outputs.push_back(Output::MapFailed(key, e));
                }
            }
            DeviceAction::TellUnmapped => {
                if let EventData::Closed(result) = core::mem::replace(data, EventData::Nothing) {
                    self.outputs.push_back(Output::Unmapped(key, result));
                }
            }
            DeviceAction::Wait => {
                device.loss_policy.lost();
                self.needs_upkeep = true;
            }
            DeviceAction::Resume => {
                device.loss_policy.back();
                (device.again, device.unasked, device.remapping) = (Timer::Off, false, false);
                self.operations.resume(key);
            }
            DeviceAction::GiveUp => {
                let why = if device.lost.is_some() {
                    Errno::ECONNABORTED
                } else {
                    Errno::ESHUTDOWN
                };
                self.operations.fail_held(key, why);
            }
            DeviceAction::TryLater => self.try_later(key),
            DeviceAction::Forget => {
                self.needs_upkeep = true;
                self.unmapped.add(&device.counters);
                self.devices.remove(key.0);
            }
        }
    }
}

/// Operations.
impl<F, T: Transport<F>> Client<F, T> {
    /// A new user of a device, who is told of losses from here on, and of those of which nobody has been told.
    pub fn opener(&self, key: DeviceKey) -> Opener {
        Opener::new(key, self.devices.get(key.0).map(|device| &device.losses))
    }

    /// Submits a request: ends with [`Output::Done`]. Reads and writes need a buffer of the device's session with just the request's
    /// length; others have none. Data of more than [`Geometry::max_transfer`] is transferred in parts; the content of a buffer of the
    /// session's own after a write is undefined. Pieces of [lent memory](rtrs::client::Buffers::lend) keep their content, and parts of
    /// them may be in flight together.
    ///
    /// Of a server that does not answer [block status](crate::block::BlockOp::BlockStatus), or not as it should, the whole range is data.
    ///
    /// Requests that make writes durable fail with EIO if the server has [lost](Output::WritesLost) writes and the opener was not notified.
    pub fn submit(&mut self, opener: &Opener, request: BlockRequest<F>) {
        let key = opener.device();
        let device = self.devices.get_mut(key.0).ok_or(Errno::ESHUTDOWN);
        let device = match device.and_then(|device| device.takes(&request).map(|()| device)) {
            Ok(device) => device,
            Err(e) => {
                return self.outputs.push_back(Output::Done {
                    device: key,
                    user: request.user,
                    completion: Completion::new(Err(e), request.data),
                });
            }
        };
        device.operations += 1;
        let (op, is_lent) = (request.op, request.data.as_ref().is_some_and(Buffer::is_lent));
        let number = self.operations.next_number();
        self.operations.place(Box::new(Operation {
            number,
            device: key,
            opened: device.opened,
            span: Span::of(op, request.offset, request.len, is_lent),
            zeroes: device.zeroes_as_data(op),
            spare: Vec::new(),
            extents: Vec::new(),
            queued: false,
            waits: false,
            stake: Stake::of(opener, op, request.forces),
            request,
        }));
        self.finish();
    }

    /// Reports the operations that have ended.
    pub(super) fn finish(&mut self) {
        while let Some(operation) = self.operations.poll_ended() {
            let mut result = operation.span.over().unwrap_or(Ok(()));
            let Operation {
                device: key,
                request,
                stake,
                extents,
                ..
            } = *operation;
            let mut losses = 0;
            if let Some(device) = self.devices.get_mut(key.0) {
                losses = device.losses.count();
                result = stake.verdict(result, &mut device.losses);
                device.operations = device.operations.saturating_sub(1);
            }
            self.outputs.push_back(Output::Done {
                device: key,
                user: request.user,
                completion: Completion {
                    result,
                    data: request.data,
                    extents,
                    losses,
                },
            });
            self.settle(key);
        }
    }
}
