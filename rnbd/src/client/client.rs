//! The client's state machine: devices over sessions, and their operations as requests.

use std::collections::{BTreeMap, VecDeque};

use rtrs::{
    Direction, IoError, PathError,
    client::{
        buffers::Buffer,
        config::{ConType, SessionInfo},
        request::{Output as RtrsOutput, SessionId, Submission},
    },
    cx::Cx,
    table,
};
use smallvec::SmallVec;
use zerocopy::IntoBytes;

use super::{
    device::{Device, DeviceCounters},
    error::MapError,
    flight::{Flight, Message},
    letter::{Letter, Opening, Word},
    memory::{self, SessionBuffers},
    operation::{Operation, Span},
    output::{DeviceKey, Output},
    session::Session,
    state::{DEVICE, DeviceAction, DeviceEvent, DeviceState},
    work::Work,
};
use crate::{
    block::{BlockOp, Geometry},
    errno::Errno,
    proto::{
        AccessMode, MsgClose, MsgOpen, MsgOpenRsp, MsgSessInfo, VERSION_MAJOR, parse_open_rsp, parse_sess_info_rsp,
    },
    slab::Slab,
};

/// The version exchange, for messages of errors.
const SESS_INFO: &str = "the session information";
/// The same of an open.
const OPEN: &str = "the open request";
/// The share that devices are mapped at.
const HOME: u16 = 0;
/// Bytes of the longest answer.
const ANSWER: usize = size_of::<MsgOpenRsp>();

const _: () = assert!(ANSWER >= size_of::<MsgSessInfo>());

/// What an event of a device brings along.
#[derive(Debug)]
enum News {
    Nothing,
    Opened(MsgOpenRsp),
    Failed(MapError),
    Closed(Result<(), IoError>),
}

/// RNBD's client, without I/O: devices of servers, over sessions of RTRS's client.
///
/// Whoever owns both hands over what RTRS says ([`rtrs`](Self::rtrs)) and submits what
/// [`poll_submission`](Self::poll_submission) gives, until there is nothing more of either, and does so again whenever buffers
/// have been given back. Memory stays with the sessions: both calls are lent it as [`SessionBuffers`], and what is taken from
/// there has been given back when a device is unmapped.
///
/// Sessions become known by [`Opened`](RtrsOutput::Opened) and agree on a protocol version at once. One that is lost and
/// comes back opens its devices again.
///
/// Where RTRS's client is one share of several, so is this. Devices are mapped and unmapped at the first share, *home*, which has
/// the service connection; the others come to know them by letters, have names of their own for them, and are told what they are like
/// now. Operations are taken at each share, and stay there.
#[derive(Debug, Default)]
pub struct Client {
    /// Which share it is, and of how many.
    index: u16,
    others: u16,
    letters: VecDeque<(u16, Letter)>,
    sessions: BTreeMap<SessionId, Session>,
    devices: Slab<Device>,
    work: Work,
    flights: Slab<Flight>,
    /// Messages to be sent.
    messages: VecDeque<u64>,
    outputs: VecDeque<Output>,
}

impl Client {
    /// A client without sessions.
    pub fn new() -> Self {
        Self::default()
    }

    /// The part of a client that goes with share number `index` of `count` of [RTRS's](rtrs::client::Client::share).
    pub fn share(index: u16, count: u16) -> Self {
        Self {
            index,
            others: count.saturating_sub(1),
            ..Self::default()
        }
    }

    /// What there is to tell next.
    pub fn poll_output(&mut self) -> Option<Output> {
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

    /// RTRS has something to tell. What it tells of sessions is for others as well: they look at it first.
    pub fn rtrs(&mut self, memory: &mut dyn SessionBuffers, output: RtrsOutput) {
        match output {
            RtrsOutput::Opened(id, info) => {
                self.sessions.insert(id, Session::new(info));
                self.ask_version(id);
            }
            RtrsOutput::Up(id, info) => self.session_up(id, info),
            RtrsOutput::Down(id, why) => self.session_down(id, &why),
            RtrsOutput::Closed(id) => self.session_closed(id),
            // Nothing was mapped over it.
            RtrsOutput::OpenFailed(..) => {}
            RtrsOutput::Done {
                session,
                tag,
                result,
                data,
            } => match self.flights.remove(tag) {
                Some(Flight::Part { operation, op, bytes }) => {
                    let result = result.map_err(|e| Errno::from_wire(e.errno()));
                    let part = (operation, op, bytes);
                    self.work.part_done(memory, &mut self.devices, part, result, data);
                    self.finish();
                }
                Some(Flight::Message { message, .. }) => {
                    self.message_done(memory, session, tag, message, result, data);
                }
                None => {
                    if let Some(buffer) = data {
                        memory::give(memory, session, buffer);
                    }
                }
            },
        }
    }
}

/// Sessions.
impl Client {
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
    fn devices_lost(&mut self, id: SessionId, why: &PathError, event: DeviceEvent) {
        for key in self.devices_of(id, |_| true) {
            if let Some(device) = self.devices.get_mut(key.0) {
                device.id = None;
                device.lost = Some(why.clone());
                if event == DeviceEvent::SessionGone {
                    // RTRS ends a session at home when it has ended everywhere.
                    device.holders.clear();
                }
                if let Some(tag) = device.message.take() {
                    self.cancel(tag);
                }
            }
            self.step(key, event, News::Failed(down(why)));
        }
    }

    fn devices_of(&self, id: SessionId, which: impl Fn(&Device) -> bool) -> Vec<DeviceKey> {
        let mine = self.devices.iter().filter(|(_, d)| d.session == id && which(d));
        mine.map(|(key, _)| DeviceKey(key)).collect()
    }

    /// Devices that can't be opened before there is a protocol version.
    fn waiting_devices(&self, id: SessionId) -> Vec<DeviceKey> {
        let states = [DeviceState::Init, DeviceState::MappedDisconnected];
        self.devices_of(id, |d| states.contains(&d.state) && d.message.is_none())
    }

    fn ask_version(&mut self, id: SessionId) {
        if !self.is_home() {
            return;
        }
        if let Some(session) = self.sessions.get_mut(&id).filter(|s| s.is_to_ask()) {
            let message = Message::Version(id);
            let tag = self.flights.insert(Flight::Message { message, sent: false });
            session.asking = Some(tag);
            self.messages.push_back(tag);
        }
    }

    fn version_answered(&mut self, id: SessionId, tag: u64, answer: Result<&[u8], IoError>) {
        match answer.map(|bytes| parse_sess_info_rsp(bytes).ok()) {
            Ok(Some(m)) => {
                let session = self.sessions.get_mut(&id);
                let Some(session) = session.filter(|s| s.asking == Some(tag)) else {
                    return;
                };
                session.asking = None;
                session.version = Some(m.ver.min(VERSION_MAJOR));
                for key in self.waiting_devices(id) {
                    self.step(key, DeviceEvent::LinkUp, News::Nothing);
                }
            }
            Ok(None) => self.version_failed(id, tag, || MapError::Malformed(SESS_INFO)),
            Err(source) => self.version_failed(id, tag, || MapError::Request {
                what: SESS_INFO,
                source: source.clone(),
            }),
        }
    }

    /// The next device that is to be opened asks again.
    fn version_failed(&mut self, id: SessionId, tag: u64, error: impl Fn() -> MapError) {
        let session = self.sessions.get_mut(&id);
        let Some(session) = session.filter(|s| s.asking == Some(tag)) else {
            return;
        };
        session.asking = None;
        tracing::debug!(session = id.0, "no protocol version: {}", error());
        for key in self.waiting_devices(id) {
            self.step(key, DeviceEvent::Refused, News::Failed(error()));
        }
    }
}

/// There is no path, so there are no devices.
fn down(why: &PathError) -> MapError {
    MapError::Session(rtrs::Error::Down(why.clone()))
}

/// Devices.
impl Client {
    /// Opens a device of the server: ends with [`Output::Mapped`] or [`Output::MapFailed`]. At home only.
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
        if !self.is_home() {
            let text = "devices are mapped at the first share";
            return Some(MapError::Session(rtrs::Error::Config(text.into())));
        }
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

    fn open_when_ready(&mut self, session: SessionId, key: DeviceKey, event: DeviceEvent) {
        if self.sessions.get(&session).is_some_and(Session::is_ready) {
            self.step(key, event, News::Nothing);
        } else {
            self.ask_version(session);
        }
    }

    /// Opens a device again that the server refused to open after its session came back: ends with [`Output::State`] or
    /// [`Output::MapFailed`]. Does nothing for a device that is mapped, and nothing elsewhere than at home.
    pub fn remap(&mut self, key: DeviceKey) {
        let Some(device) = self.devices.get(key.0).filter(|_| self.is_home()) else {
            return;
        };
        if device.state != DeviceState::MappedDisconnected || device.message.is_some() {
            return;
        }
        let session = device.session;
        match self.sessions.get(&session).and_then(|s| s.down.as_ref()) {
            Some(why) => self.outputs.push_back(Output::MapFailed(key, down(why))),
            None => self.open_when_ready(session, key, DeviceEvent::RemapAsked),
        }
    }

    /// Takes no more operations at any share, waits for those under way and closes the device on the server: ends with
    /// [`Output::Unmapped`], at each share. A second call does nothing, and elsewhere than at home nor does the first.
    pub fn unmap(&mut self, key: DeviceKey) {
        if self.is_home() {
            self.step(key, DeviceEvent::UnmapAsked, News::Nothing);
        }
    }

    fn step(&mut self, key: DeviceKey, event: DeviceEvent, mut news: News) {
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
        self.settle(key);
    }

    /// Goes on with a device that is being unmapped, when nothing of it is under way.
    fn settle(&mut self, key: DeviceKey) {
        let Some(device) = self.devices.get(key.0) else { return };
        let busy = device.operations > 0 || device.message.is_some() || !device.holders.is_empty();
        if device.state != DeviceState::Unmapped || busy {
            return;
        }
        if device.id.is_some() && device.home.is_none() {
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
                if let (News::Opened(rsp), Some(session)) = (news, session)
                    && let Some(geometry) = device.take_open(rsp, &session.info)
                {
                    self.outputs.push_back(Output::Geometry(key, geometry));
                }
            }
            DeviceAction::Share => {
                if let News::Opened(answer) = news {
                    self.tell_opened(key, *answer);
                }
            }
            DeviceAction::Release => {
                let holders: Vec<u16> = device.holders.iter().copied().collect();
                let letters = holders.into_iter().map(|to| (to, Letter(Word::Release(key))));
                self.letters.extend(letters);
            }
            DeviceAction::TellMapped => {
                let mapped = device.geometry.map(|g| Output::Mapped(key, g));
                self.outputs.extend(mapped);
            }
            DeviceAction::TellState => self.outputs.push_back(Output::State(key, device.state)),
            DeviceAction::TellFailed => {
                if let News::Failed(e) = core::mem::replace(news, News::Nothing) {
                    self.outputs.push_back(Output::MapFailed(key, e));
                }
            }
            DeviceAction::TellUnmapped => {
                if let News::Closed(result) = core::mem::replace(news, News::Nothing) {
                    self.outputs.push_back(Output::Unmapped(key, result));
                }
            }
            DeviceAction::Forget => {
                let gone = self.devices.remove(key.0);
                if let Some(home) = gone.and_then(|device| device.home) {
                    self.letters.push_back((HOME, Letter(Word::Released(home))));
                }
            }
        }
    }
}

/// Shares.
impl Client {
    fn is_home(&self) -> bool {
        self.index == HOME
    }

    /// The next letter to another share, and to which.
    pub fn poll_letter(&mut self) -> Option<(u16, Letter)> {
        self.letters.pop_front()
    }

    /// A letter of share `from` to this one. What RTRS had to tell here when it came has been [handed over](Self::rtrs).
    pub fn letter(&mut self, from: u16, letter: Letter) {
        match letter.0 {
            Word::Opened(opening) => self.opened_at_home(*opening),
            Word::Release(device) => {
                // Or it went with its session, and home has been told.
                if let Some(key) = self.here(device) {
                    self.step(key, DeviceEvent::UnmapAsked, News::Nothing);
                }
            }
            Word::Released(key) => {
                if let Some(device) = self.devices.get_mut(key.0) {
                    device.holders.remove(&from);
                    self.settle(key);
                }
            }
        }
    }

    /// The server has opened it: the other shares may use it.
    fn tell_opened(&mut self, key: DeviceKey, answer: MsgOpenRsp) {
        let Some(device) = self.devices.get_mut(key.0).filter(|_| self.index == HOME) else {
            return;
        };
        let opening = Opening {
            device: key,
            session: device.session,
            name: device.name.clone(),
            mode: device.mode,
            answer,
        };
        for share in 1..=self.others {
            device.holders.insert(share);
            let word = Word::Opened(Box::new(opening.clone()));
            self.letters.push_back((share, Letter(word)));
        }
    }

    /// What a device of home's is called here.
    fn here(&self, home: DeviceKey) -> Option<DeviceKey> {
        let mut known = self.devices.iter();
        known.find_map(|(key, d)| (d.home == Some(home)).then_some(DeviceKey(key)))
    }

    fn opened_at_home(&mut self, opening: Opening) {
        let (id, home) = (opening.session, opening.device);
        let Some(session) = self.sessions.get(&id) else {
            // It has ended here before it has there.
            return self.letters.push_back((HOME, Letter(Word::Released(home))));
        };
        let down = session.down.clone();
        let key = self.here(home).unwrap_or_else(|| {
            let device = Device {
                home: Some(home),
                ..Device::new(id, opening.name, opening.mode)
            };
            DeviceKey(self.devices.insert(device))
        });
        self.step(key, DeviceEvent::Opened, News::Opened(opening.answer));
        if let Some(why) = down {
            // Here the path was lost sooner than home knew; it will be opened again.
            self.devices_lost(id, &why, DeviceEvent::LinkDown);
        }
    }
}

/// Messages.
impl Client {
    /// A message about a device is sent, unless one is under way.
    fn send(&mut self, key: DeviceKey, message: Message) {
        if let Some(device) = self.devices.get_mut(key.0).filter(|d| d.message.is_none()) {
            let tag = self.flights.insert(Flight::Message { message, sent: false });
            device.message = Some(tag);
            self.messages.push_back(tag);
        }
    }

    /// The answer to a message is of no interest any more, and it need not be sent if it has not been.
    fn cancel(&mut self, tag: u64) {
        if let Some(Flight::Message { sent: false, .. }) = self.flights.get(tag) {
            self.flights.remove(tag);
        }
    }

    /// The next message that can be sent.
    fn poll_message(&mut self, cx: &mut Cx<'_>, memory: &mut dyn SessionBuffers) -> Option<(SessionId, Submission)> {
        for _ in 0..self.messages.len() {
            let tag = self.messages.pop_front()?;
            let Some(&Flight::Message { message, .. }) = self.flights.get(tag) else {
                continue;
            };
            let Some((session, header, answer)) = self.compose(message) else {
                self.flights.remove(tag);
                continue;
            };
            let most = self.sessions.get(&session).map_or(0, |s| s.info.max_io_size as usize);
            let data = match answer {
                0 => Ok(None),
                len => match memory::for_answer(cx, memory, session, len, most) {
                    Ok(None) => {
                        self.messages.push_back(tag);
                        continue;
                    }
                    buffer => buffer,
                },
            };
            match data {
                Ok(data) => {
                    self.flights.get_mut(tag).into_iter().for_each(Flight::mark_sent);
                    let submission = Submission {
                        tag,
                        con: ConType::Admin,
                        direction: if answer > 0 { Direction::Read } else { Direction::Write },
                        header,
                        data,
                    };
                    return Some((session, submission));
                }
                Err(e) => {
                    self.flights.remove(tag);
                    self.no_buffer(tag, message, e);
                }
            }
        }
        None
    }

    /// Session, bytes, and how many bytes the answer has; `None` when the device is gone.
    fn compose(&self, message: Message) -> Option<(SessionId, SmallVec<[u8; 64]>, usize)> {
        match message {
            Message::Version(session) => {
                let m = MsgSessInfo::request(VERSION_MAJOR);
                Some((session, SmallVec::from_slice(m.as_bytes()), size_of::<MsgSessInfo>()))
            }
            Message::Open(key) => {
                let device = self.devices.get(key.0)?;
                let m = MsgOpen::new(device.name.as_bytes(), device.mode).ok()?;
                let header = SmallVec::from_slice(m.as_bytes());
                Some((device.session, header, size_of::<MsgOpenRsp>()))
            }
            Message::Close(key) => {
                let device = self.devices.get(key.0)?;
                let m = MsgClose::new(device.id?);
                Some((device.session, SmallVec::from_slice(m.as_bytes()), 0))
            }
        }
    }

    fn no_buffer(&mut self, tag: u64, message: Message, e: Errno) {
        match message {
            Message::Version(session) => self.version_failed(session, tag, || MapError::Buffer(SESS_INFO, e)),
            Message::Open(key) => self.open_failed(key, tag, |_| MapError::Buffer(OPEN, e)),
            // Needs none.
            Message::Close(_) => {}
        }
    }

    fn message_done(
        &mut self,
        memory: &mut dyn SessionBuffers,
        session: SessionId,
        tag: u64,
        message: Message,
        result: Result<(), IoError>,
        data: Option<Buffer>,
    ) {
        let mut bytes = [0; ANSWER];
        let mut len = 0;
        if let Some(buffer) = data {
            let answer = &mut bytes[..buffer.len().min(ANSWER)];
            let buffers = memory.buffers(session);
            if buffers.is_some_and(|b| b.read(&buffer, 0, answer).is_ok()) {
                len = answer.len();
            }
            memory::give(memory, session, buffer);
        }
        match message {
            Message::Version(id) => self.version_answered(id, tag, result.map(|()| &bytes[..len])),
            Message::Open(key) => self.open_answered(key, tag, result.map(|()| &bytes[..len])),
            Message::Close(key) => {
                if let Some(device) = self.about(key, tag) {
                    device.id = None;
                    self.step(key, DeviceEvent::Closed, News::Closed(result));
                }
            }
        }
    }

    /// The device, if this is the message about it that is under way: it is so no longer.
    fn about(&mut self, key: DeviceKey, tag: u64) -> Option<&mut Device> {
        let device = self.devices.get_mut(key.0).filter(|d| d.message == Some(tag))?;
        device.message = None;
        Some(device)
    }

    fn open_answered(&mut self, key: DeviceKey, tag: u64, answer: Result<&[u8], IoError>) {
        match answer.map(parse_open_rsp) {
            Ok(Ok(rsp)) => {
                if self.about(key, tag).is_some() {
                    self.step(key, DeviceEvent::Opened, News::Opened(rsp));
                }
            }
            Ok(Err(_)) => self.open_failed(key, tag, |_| MapError::Malformed(OPEN)),
            Err(IoError::Remote(e)) => self.open_failed(key, tag, |device| MapError::Refused {
                name: device.name.clone(),
                mode: device.mode,
                errno: Errno::from_wire(e),
            }),
            Err(source) => self.open_failed(key, tag, |_| MapError::Request { what: OPEN, source }),
        }
    }

    fn open_failed(&mut self, key: DeviceKey, tag: u64, error: impl FnOnce(&Device) -> MapError) {
        if let Some(device) = self.about(key, tag) {
            let error = error(device);
            self.step(key, DeviceEvent::Refused, News::Failed(error));
        }
    }
}

/// Operations.
impl Client {
    /// Starts an operation on `len` bytes from `offset`: ends with [`Output::Done`], which brings `data` back. Reads and writes
    /// need a buffer of the device's session with just `len` bytes, at most [`Geometry::max_transfer`]; others have none.
    /// Operations with equal `hint` (a CPU or queue number) take the same connection.
    #[expect(clippy::too_many_arguments, reason = "an operation as it is")]
    pub fn submit(
        &mut self,
        key: DeviceKey,
        user: u64,
        op: BlockOp,
        offset: u64,
        len: u64,
        data: Option<Buffer>,
        hint: usize,
    ) {
        let bytes = data.as_ref().map(Buffer::len);
        let device = match self.admit(key, op, offset, len, bytes) {
            Ok(device) => device,
            Err(e) => {
                return self.outputs.push_back(Output::Done {
                    device: key,
                    user,
                    result: Err(e),
                    data,
                });
            }
        };
        device.operations += 1;
        let span = match op {
            BlockOp::Read | BlockOp::Write { .. } => Span::whole(offset, len),
            BlockOp::Flush => Span::whole(0, 0),
            BlockOp::Discard | BlockOp::WriteZeroes { .. } => Span::split(offset, len),
        };
        let operation = Operation {
            device: key,
            opened: device.opened,
            user,
            hint,
            op,
            span,
            data,
            zeroes: device.zeroes_as_data(op),
            spare: Vec::new(),
            queued: false,
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
            // Where operations would wait for the session to come back, if that were wanted.
            DeviceState::MappedDisconnected => {
                device.counters.count_unsent();
                Err(Errno::ECONNABORTED)
            }
        }
    }

    /// The next request, for RTRS: it is to be submitted at once. `None`: nothing is to be sent, or it waits for buffers; those
    /// for messages come from the session's memory, and those for zeroes too where the server has no other way to make them.
    pub fn poll_submission(
        &mut self,
        cx: &mut Cx<'_>,
        memory: &mut dyn SessionBuffers,
    ) -> Option<(SessionId, Submission)> {
        if let Some(message) = self.poll_message(cx, memory) {
            return Some(message);
        }
        let (devices, flights) = (&mut self.devices, &mut self.flights);
        let submission = self.work.poll(cx, memory, devices, flights);
        self.finish();
        submission
    }

    /// Tells of the operations that have ended.
    fn finish(&mut self) {
        while let Some((operation, result)) = self.work.poll_ended() {
            let device = operation.device;
            self.outputs.push_back(Output::Done {
                device,
                user: operation.user,
                result,
                data: operation.data,
            });
            if let Some(d) = self.devices.get_mut(device.0) {
                d.operations = d.operations.saturating_sub(1);
            }
            self.settle(device);
        }
    }
}
