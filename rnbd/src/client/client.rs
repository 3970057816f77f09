//! The client's state machine: devices over sessions, and their operations as requests.

use std::collections::{BTreeMap, VecDeque};

use rtrs::{
    IoError, PathError,
    client::{
        buffers::Buffer,
        config::SessionInfo,
        request::{Output as RtrsOutput, SessionId},
    },
    cx::Cx,
    table,
};

use super::{
    device::{Device, DeviceCounters},
    error::MapError,
    flight::{Kind, Message, Request},
    losses::{Losses, Opener, Stake},
    operation::{Operation, Span},
    output::{DeviceKey, Output},
    patience::Alarm,
    session::Session,
    state::{DEVICE, DeviceAction, DeviceEvent, DeviceState},
    transport::Transport,
    work::Work,
};
use crate::{
    block::{BlockOp, Geometry},
    errno::Errno,
    proto::{AccessMode, MsgOpen, MsgOpenRsp},
    slab::Slab,
};

/// Data of a device's event.
#[derive(Debug)]
pub(super) enum News {
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
/// itself. The fate of operations meanwhile is each device's [`OnLoss`](super::patience::OnLoss).
#[derive(Debug)]
pub struct Client<F = u64, T = rtrs::client::Client<Request<F>>> {
    pub(super) rtrs: T,
    pub(super) sessions: BTreeMap<SessionId, Session>,
    pub(super) devices: Slab<Device>,
    /// Counters of devices that are unmapped.
    unmapped: DeviceCounters,
    pub(super) work: Work<F>,
    /// Messages to be sent, by their numbers.
    pub(super) messages: VecDeque<(u64, Message)>,
    pub(super) messages_begun: u64,
    /// Messages that RTRS has.
    pub(super) messages_in_flight: usize,
    /// There are alarms to be started, or reserves to be looked after.
    pub(super) stirred: bool,
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
            work: Work::default(),
            messages: VecDeque::new(),
            messages_begun: 0,
            messages_in_flight: 0,
            stirred: false,
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
        if self.stirred {
            self.look_around(cx);
        }
        worked |= self.send_messages(cx);
        worked |= self.work.send(cx, &mut self.rtrs, &mut self.devices);
        self.finish();
        worked
    }

    fn receive(&mut self, output: RtrsOutput<Request<F>>) {
        match output {
            RtrsOutput::Opened(id, info) => {
                self.sessions.insert(id, Session::new(info));
                self.ask_version(id);
                self.outputs.push_back(Output::Opened(id, info));
            }
            RtrsOutput::Up(id, info) => {
                self.session_up(id, info);
                self.outputs.push_back(Output::Up(id, info));
            }
            RtrsOutput::Down(id, why) => {
                self.session_down(id, &why);
                self.outputs.push_back(Output::Down(id, why));
            }
            RtrsOutput::Closed(id) => {
                self.drop_reserve(id);
                self.session_closed(id);
                self.outputs.push_back(Output::Closed(id));
            }
            // Nothing was mapped over it.
            RtrsOutput::OpenFailed(id, error) => self.outputs.push_back(Output::OpenFailed(id, error)),
            RtrsOutput::Path { session, path, news } => self.outputs.push_back(Output::Path { session, path, news }),
            RtrsOutput::Done {
                session,
                tag: Request(kind),
                result,
                data,
            } => self.ended(session, kind, result, data),
        }
    }

    /// A request has ended.
    fn ended(&mut self, session: SessionId, kind: Kind<F>, result: Result<(), IoError>, data: Option<Buffer>) {
        let (operation, sent) = match kind {
            Kind::Message(number, message) => return self.message_done(session, number, message, result, data),
            Kind::Whole(operation, sent) => (Some(operation), sent),
            Kind::Part(number, sent) => (self.work.of_part(number), sent),
        };
        if let Err(IoError::TooLong { max, .. }) = result {
            self.shrink(session, max);
        }
        self.stirred |= result.is_err();
        // Both are there as long as there are parts.
        let Some(operation) = operation else { return };
        let Some(device) = self.devices.get_mut(operation.device.0) else {
            return;
        };
        if self
            .work
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
        session.drain = Alarm::Off;
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
                (device.again, device.unasked) = (Alarm::Off, false);
                if let Some(tag) = device.message.take() {
                    self.cancel(tag);
                }
            }
            self.step(key, event, News::Failed(down(why)));
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
            Some(e) => self.step(key, DeviceEvent::Refused, News::Failed(e)),
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
            self.step(key, event, News::Nothing);
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
        (device.again, device.unasked) = (Alarm::Off, false);
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
        self.step(key, DeviceEvent::UnmapAsked, News::Nothing);
        Ok(())
    }

    pub(super) fn step(&mut self, key: DeviceKey, event: DeviceEvent, mut news: News) {
        let Some(device) = self.devices.get_mut(key.0) else {
            return;
        };
        let Some((next, actions)) = table::step(DEVICE, device.state, event) else {
            return;
        };
        device.state = next;
        for action in actions {
            self.act(key, *action, &mut news);
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
            return self.step(key, DeviceEvent::Idle, News::Nothing);
        }
        let lost = device.lost.clone();
        let result = lost.map_or(Ok(()), |why| Err(IoError::Path(why)));
        self.step(key, DeviceEvent::Closed, News::Closed(result));
    }

    fn act(&mut self, key: DeviceKey, action: DeviceAction, news: &mut News) {
        let Some(device) = self.devices.get_mut(key.0) else {
            return;
        };
        match action {
            DeviceAction::SendOpen => self.send(key, Message::Open(key)),
            DeviceAction::SendClose => self.send(key, Message::Close(key)),
            DeviceAction::TakeOpen => {
                let session = self.sessions.get(&device.session);
                if let (News::Opened(rsp), Some(session)) = (news, session) {
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
                if let News::Failed(e) = core::mem::replace(news, News::Nothing) {
                    self.outputs.push_back(Output::MapFailed(key, e));
                }
            }
            DeviceAction::TellUnmapped => {
                if let News::Closed(result) = core::mem::replace(news, News::Nothing) {
                    self.outputs.push_back(Output::Unmapped(key, result));
                }
            }
            DeviceAction::Wait => {
                device.patience.lost();
                self.stirred = true;
            }
            DeviceAction::Resume => {
                device.patience.back();
                (device.again, device.unasked, device.remapping) = (Alarm::Off, false, false);
                self.work.resume(key);
            }
            DeviceAction::GiveUp => {
                let why = if device.lost.is_some() {
                    Errno::ECONNABORTED
                } else {
                    Errno::ESHUTDOWN
                };
                self.work.fail_held(key, why);
            }
            DeviceAction::TryLater => self.try_later(key),
            DeviceAction::Forget => {
                self.stirred = true;
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

    /// Starts an operation on `len` bytes from `offset`: ends with [`Output::Done`], which brings `data` back. Reads and writes
    /// need a buffer of the device's session with just `len` bytes; others have none. Data of more than
    /// [`Geometry::max_transfer`] moves part by part; what is in a buffer of the session's own after a write is no matter of interest then. Pieces of
    /// [lent memory](rtrs::client::Buffers::lend) stay as they are, and parts of them may be under way together.
    /// Operations with equal `hint` (a CPU or queue number) take the same connection.
    ///
    /// A [block status](BlockOp::BlockStatus) ends with [`Output::Status`] instead. Of a server that does not answer it, or not as it
    /// should, the whole range is data.
    ///
    /// What makes writes durable fails with EIO if the server has [lost](Output::WritesLost) some of which the opener has not been told.
    #[expect(clippy::too_many_arguments, reason = "an operation as it is")]
    pub fn submit(
        &mut self,
        opener: &Opener,
        user: F,
        op: BlockOp,
        offset: u64,
        len: u64,
        data: Option<Buffer>,
        hint: usize,
    ) {
        let key = opener.device();
        let bytes = data.as_ref().map(Buffer::len);
        let device = match self.admit(key, op, offset, len, bytes) {
            Ok(device) => device,
            Err(e) => {
                return self.outputs.push_back(match (op, data) {
                    (BlockOp::BlockStatus { .. }, None) => Output::Status {
                        device: key,
                        user,
                        result: Err(e),
                    },
                    (_, data) => Output::Done {
                        device: key,
                        user,
                        result: Err(e),
                        data,
                        losses: 0,
                    },
                });
            }
        };
        device.operations += 1;
        let operation = Operation {
            number: 0,
            device: key,
            opened: device.opened,
            user,
            hint,
            op,
            offset,
            len,
            span: Span::of(op, offset, len, data.as_ref().is_some_and(Buffer::is_lent)),
            data,
            zeroes: device.zeroes_as_data(op),
            spare: Vec::new(),
            extents: Vec::new(),
            queued: false,
            waits: false,
            stake: Stake::of(opener, op),
        };
        self.work.add(operation);
        self.finish();
    }

    /// The device, if it takes this operation.
    fn admit(
        &mut self,
        key: DeviceKey,
        op: BlockOp,
        offset: u64,
        len: u64,
        data: Option<usize>,
    ) -> Result<&mut Device, Errno> {
        let device = self.devices.get_mut(key.0).ok_or(Errno::ESHUTDOWN)?;
        match device.state {
            DeviceState::Mapped => device.check(op, offset, len, data).map(|()| device),
            DeviceState::Init => Err(Errno::ENOTCONN),
            DeviceState::Unmapped => Err(Errno::ESHUTDOWN),
            DeviceState::MappedDisconnected if device.waits() => device.check(op, offset, len, data).map(|()| device),
            DeviceState::MappedDisconnected => {
                device.counters.count_unsent();
                Err(Errno::ECONNABORTED)
            }
        }
    }

    /// Tells of the operations that have ended.
    pub(super) fn finish(&mut self) {
        while let Some(operation) = self.work.poll_ended() {
            let result = operation.span.over().unwrap_or(Ok(()));
            let Operation {
                device,
                user,
                op,
                stake,
                extents,
                data,
                ..
            } = *operation;
            let mut losses = self.devices.get_mut(device.0).map(|d| &mut d.losses);
            let count = losses.as_deref().map_or(0, Losses::count);
            let result = losses.as_mut().map_or(result, |losses| stake.verdict(result, losses));
            self.outputs.push_back(match op {
                BlockOp::BlockStatus { .. } => Output::Status {
                    device,
                    user,
                    result: result.map(|()| extents),
                },
                _ => Output::Done {
                    device,
                    user,
                    result,
                    data,
                    losses: count,
                },
            });
            if let Some(d) = self.devices.get_mut(device.0) {
                d.operations = d.operations.saturating_sub(1);
            }
            self.settle(device);
        }
    }
}
