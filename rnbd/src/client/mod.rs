//! The client: devices of a server over an RTRS session.
//!
//! ```no_run
//! # use rnbd::{client::Client, proto::AccessMode};
//! # fn f<P: roce_verbs::provider::Provider>(session: rtrs::client::Session<P>) -> Result<(), rnbd::client::MapError> {
//! let client = Client::new(session)?;
//! let disk = client.map("disk", AccessMode::ReadWrite)?;
//! # Ok(()) }
//! ```

mod buffer;
mod device;

use std::{collections::HashSet, fmt, sync::Arc};

use parking_lot::Mutex;
use roce_verbs::provider::Provider;
use rtrs::{
    Direction, IoError,
    client::{ConType, Session},
};
use zerocopy::IntoBytes;

pub use buffer::DeviceBuffer;
pub use device::Device;

use crate::{
    errno::Errno,
    proto::{
        AccessMode, MsgClose, MsgOpen, MsgOpenRsp, MsgSessInfo, VERSION_MAJOR, parse_open_rsp, parse_sess_info_rsp,
    },
};
use buffer::Buffers;

/// Why a device could not be mapped.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// The session failed.
    #[error(transparent)]
    Session(#[from] rtrs::Error),
    /// A message got no answer.
    #[error("{what}: {source}")]
    Request {
        /// Which message.
        what: &'static str,
        /// What happened.
        source: IoError,
    },
    /// The server refused to open the device.
    #[error("the server refuses device {name} ({mode}): {}", refusal(*.errno, *.mode))]
    Refused {
        /// The device asked for.
        name: String,
        /// How it was to be opened.
        mode: AccessMode,
        /// The server's error.
        errno: Errno,
    },
    /// There is no buffer for the answer.
    #[error("no buffer for {0}: {1}")]
    Buffer(&'static str, Errno),
    /// The server's answer makes no sense.
    #[error("the server's answer to {0} is malformed")]
    Malformed(&'static str),
    /// The name can't be sent.
    #[error("device name {0:?}: must have 1 to 254 bytes and no NUL")]
    Name(String),
    /// This session has mapped the device already.
    #[error("device {0} is mapped already")]
    AlreadyMapped(String),
}

fn refusal(e: Errno, mode: AccessMode) -> String {
    match e {
        Errno::ENOENT => "no such export".into(),
        Errno::EACCES if mode.writable() => "the export is read-only".into(),
        Errno::EPERM => "somebody has it open for writing".into(),
        Errno::EBUSY => "another server process on that host writes to it".into(),
        Errno::EEXIST => "this session has it open under another spelling of its name".into(),
        Errno::EMFILE => "the session has as many devices open as the server allows".into(),
        Errno::ENFILE => "the server has as many devices open as it allows".into(),
        Errno::EINVAL => "the server does not accept this name".into(),
        Errno::ENOTBLK => "neither an image file nor a block device".into(),
        Errno::EXDEV | Errno::ELOOP => "a symbolic link leads out of the server's folder".into(),
        e => e.to_string(),
    }
}

/// What devices of a session share.
struct Shared<P: Provider> {
    session: Session<P>,
    buffers: Arc<Buffers<P>>,
    /// Protocol version agreed on.
    version: u8,
    mapped: Mutex<HashSet<String>>,
}

impl<P: Provider> Shared<P> {
    /// Sends a message on the service connection and returns the `N` bytes of its answer.
    fn ask<const N: usize>(&self, what: &'static str, message: &[u8]) -> Result<Result<[u8; N], Errno>, MapError> {
        let lent = self.buffers.lend(N, true);
        let buffer = lent
            .and_then(|b| b.ok_or(Errno::EAGAIN))
            .map_err(|e| match self.session.state() {
                Err(why) => MapError::Session(rtrs::Error::Down(why)),
                Ok(()) => MapError::Buffer(what, e),
            })?;
        let (buffer, lent) = buffer.take_apart();
        let outcome = self
            .session
            .call(ConType::Admin, Direction::Read, message, Some(buffer));
        let refused = match outcome.result {
            Ok(()) => None,
            Err(IoError::Remote(e)) => Some(Errno::from_wire(e)),
            Err(source) => return Err(MapError::Request { what, source }),
        };
        let mut answer = [0; N];
        let copied = outcome
            .data
            .map(|b| DeviceBuffer::put_together(b, lent).copy_out(&mut answer));
        match (refused, copied) {
            (Some(e), _) => Ok(Err(e)),
            (None, Some(true)) => Ok(Ok(answer)),
            (None, _) => Err(MapError::Malformed(what)),
        }
    }

    fn open(&self, name: &str, mode: AccessMode) -> Result<MsgOpenRsp, MapError> {
        let message = MsgOpen::new(name.as_bytes(), mode).map_err(|_| MapError::Name(name.into()))?;
        match self.ask::<{ size_of::<MsgOpenRsp>() }>("the open request", message.as_bytes())? {
            Ok(answer) => parse_open_rsp(&answer).map_err(|_| MapError::Malformed("the open request")),
            Err(errno) => Err(MapError::Refused {
                name: name.into(),
                mode,
                errno,
            }),
        }
    }

    fn close(&self, device_id: u32) -> Result<(), IoError> {
        let message = MsgClose::new(device_id);
        self.session
            .call(ConType::Admin, Direction::Write, message.as_bytes(), None)
            .result
    }
}

/// RNBD on a session: maps devices. Clones are the same client.
pub struct Client<P: Provider>(Arc<Shared<P>>);

impl<P: Provider> Clone for Client<P> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<P: Provider> fmt::Debug for Client<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("session", &self.0.session.name())
            .finish_non_exhaustive()
    }
}

impl<P: Provider> Client<P> {
    /// Agrees with the server on a protocol version.
    ///
    /// # Errors
    /// When the server does not answer, or with nonsense.
    pub fn new(session: Session<P>) -> Result<Self, MapError> {
        let buffers = Buffers::new(session.clone());
        let mut shared = Shared {
            session,
            buffers,
            version: VERSION_MAJOR,
            mapped: Mutex::default(),
        };
        let what = "the session information";
        let answer =
            shared.ask::<{ size_of::<MsgSessInfo>() }>(what, MsgSessInfo::request(VERSION_MAJOR).as_bytes())?;
        let answer = answer.map_err(|e| MapError::Request {
            what,
            source: IoError::Remote(e.raw()),
        })?;
        let answer = parse_sess_info_rsp(&answer).map_err(|_| MapError::Malformed(what))?;
        shared.version = answer.ver.min(VERSION_MAJOR);
        Ok(Self(Arc::new(shared)))
    }

    /// The session.
    pub fn session(&self) -> &Session<P> {
        &self.0.session
    }

    /// Major protocol version in use.
    pub fn version(&self) -> u8 {
        self.0.version
    }

    /// Opens a device of the server.
    ///
    /// # Errors
    /// Says whether the session or the server refused, and why.
    pub fn map(&self, name: &str, mode: AccessMode) -> Result<Device<P>, MapError> {
        // The server would give us the same device a second time, and close both with the first unmap.
        if !self.0.mapped.lock().insert(name.into()) {
            return Err(MapError::AlreadyMapped(name.into()));
        }
        let opened = self.0.open(name, mode);
        if opened.is_err() {
            self.0.mapped.lock().remove(name);
        }
        Ok(Device::new(self.0.clone(), name.into(), mode, &opened?))
    }
}
