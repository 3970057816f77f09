//! Messages that are no block requests: the version exchange, opening and closing.

use rtrs::{
    Cx, Direction, IoError,
    client::{
        buffers::Buffer,
        config::ConType,
        request::{SessionId, Submission},
    },
};
use smallvec::SmallVec;
use zerocopy::IntoBytes;

use super::{
    client::{Client, EventData},
    device::Device,
    error::MapError,
    memory,
    operation::{Kind, Message, Request},
    state::{DeviceEvent, DeviceKey, DeviceState},
    transport::Transport,
};
use crate::{
    errno::Errno,
    proto::{MsgClose, MsgOpen, MsgOpenRsp, MsgSessInfo, VERSION_MAJOR, parse_open_rsp, parse_sess_info_rsp},
};

/// The version exchange, for messages of errors.
const SESS_INFO: &str = "the session information";
/// The same of an open.
const OPEN: &str = "the open request";
/// Bytes of the longest answer.
const ANSWER: usize = size_of::<MsgOpenRsp>();

const _: () = assert!(ANSWER >= size_of::<MsgSessInfo>());

/// Protocol versions.
impl<F, T: Transport<F>> Client<F, T> {
    /// Devices that can't be opened before there is a protocol version.
    fn waiting_devices(&self, id: SessionId) -> Vec<DeviceKey> {
        let states = [DeviceState::Init, DeviceState::MappedDisconnected];
        self.devices_of(id, |d| states.contains(&d.state) && d.message.is_none())
    }

    pub(super) fn ask_version(&mut self, id: SessionId) {
        if let Some(session) = self.sessions.get_mut(&id).filter(|s| s.is_to_ask()) {
            self.messages_begun += 1;
            session.asking = Some(self.messages_begun);
            self.messages.push_back((self.messages_begun, Message::Version(id)));
        }
    }

    pub(super) fn version_answered(&mut self, id: SessionId, tag: u64, answer: Result<&[u8], IoError>) {
        match answer.map(|bytes| parse_sess_info_rsp(bytes).ok()) {
            Ok(Some(m)) => {
                let session = self.sessions.get_mut(&id);
                let Some(session) = session.filter(|s| s.asking == Some(tag)) else {
                    return;
                };
                session.asking = None;
                session.version = Some(m.ver.min(VERSION_MAJOR));
                for key in self.waiting_devices(id) {
                    self.step(key, DeviceEvent::LinkUp, EventData::Nothing);
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
    pub(super) fn version_failed(&mut self, id: SessionId, tag: u64, error: impl Fn() -> MapError) {
        let session = self.sessions.get_mut(&id);
        let Some(session) = session.filter(|s| s.asking == Some(tag)) else {
            return;
        };
        session.asking = None;
        tracing::debug!(session = id.0, "no protocol version: {}", error());
        for key in self.waiting_devices(id) {
            self.step(key, DeviceEvent::Refused, EventData::Failed(error()));
        }
    }
}

/// Messages.
impl<F, T: Transport<F>> Client<F, T> {
    /// A message about a device is sent, unless one is under way.
    pub(super) fn send(&mut self, key: DeviceKey, message: Message) {
        if let Some(device) = self.devices.get_mut(key.0).filter(|d| d.message.is_none()) {
            self.messages_begun += 1;
            device.message = Some(self.messages_begun);
            self.messages.push_back((self.messages_begun, message));
        }
    }

    /// The answer to a message is of no interest any more, and it need not be sent if it has not been.
    pub(super) fn cancel(&mut self, tag: u64) {
        self.messages.retain(|(number, _)| *number != tag);
    }

    /// Sends the messages that have buffers for their answers. Returns whether there was one.
    pub(super) fn send_messages(&mut self, cx: &mut Cx<'_>) -> bool {
        let mut worked = false;
        for _ in 0..self.messages.len() {
            let Some((number, message)) = self.messages.pop_front() else {
                break;
            };
            let Some((session, header, answer)) = self.compose(message) else {
                continue;
            };
            let data = match answer {
                0 => None,
                len => match self.answer_buffer(cx, session, len) {
                    Ok(None) => {
                        self.messages.push_back((number, message));
                        continue;
                    }
                    Ok(buffer) => buffer,
                    Err(e) => {
                        self.no_buffer(number, message, e);
                        continue;
                    }
                },
            };
            worked = true;
            self.messages_in_flight += 1;
            let submission = Submission {
                tag: Request(Kind::Message(number, message)),
                con: ConType::Admin,
                direction: if answer > 0 { Direction::Read } else { Direction::Write },
                header,
                data,
            };
            self.rtrs.submit(cx, session, submission);
        }
        worked
    }

    /// A buffer for an answer of `len` bytes. `None`: one has to come back first.
    fn answer_buffer(&mut self, cx: &mut Cx<'_>, session: SessionId, len: usize) -> Result<Option<Buffer>, Errno> {
        let known = self.sessions.get_mut(&session);
        if let Some(mut buffer) = known.and_then(|session| session.reserve.take()) {
            buffer.set_len(len);
            return Ok(Some(buffer));
        }
        let most = self.sessions.get(&session).map_or(0, |s| s.info.max_io_size as usize);
        memory::for_answer(cx, &mut self.rtrs, session, len, most)
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

    pub(super) fn message_done(
        &mut self,
        session: SessionId,
        tag: u64,
        message: Message,
        result: Result<(), IoError>,
        data: Option<Buffer>,
    ) {
        self.messages_in_flight = self.messages_in_flight.saturating_sub(1);
        let mut bytes = [0; ANSWER];
        let mut len = 0;
        if let Some(buffer) = data {
            let answer = &mut bytes[..buffer.len().min(ANSWER)];
            let buffers = self.rtrs.buffers(session);
            if buffers.is_some_and(|b| b.read(&buffer, 0, answer).is_ok()) {
                len = answer.len();
            }
            self.give_answer_buffer(session, buffer);
        }
        match message {
            Message::Version(id) => self.version_answered(id, tag, result.map(|()| &bytes[..len])),
            Message::Open(key) => self.open_answered(key, tag, result.map(|()| &bytes[..len])),
            Message::Close(key) => {
                if let Some(device) = self.about(key, tag) {
                    device.id = None;
                    self.step(key, DeviceEvent::Closed, EventData::Closed(result));
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
                    self.step(key, DeviceEvent::Opened, EventData::Opened(rsp));
                    self.check_number(key);
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
            self.step(key, DeviceEvent::Refused, EventData::Failed(error));
        }
    }
}
