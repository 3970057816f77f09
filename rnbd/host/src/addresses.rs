//! Our addresses that a mapping gets while it runs.

use std::{
    collections::BTreeMap,
    io,
    net::IpAddr,
    sync::{Arc, OnceLock, mpsc::channel},
};

use parking_lot::Mutex;
use rnbd::Errno;
use roce::reactor::Handle;
use roce::{NewDevice, Opener, VerbsError};

use crate::{control::Refused, mapper::command::Command};

/// How an attempt to open an address has ended, once it has.
type Attempt = Arc<OnceLock<Result<(), Refused>>>;

/// How far an address is that the mapping did not begin with.
enum Address {
    /// Somebody opens it; others wait for that.
    Opening(Attempt),
    /// The loop has it.
    Open,
    /// It is open, and the loop has not taken it.
    Left(Box<NewDevice>),
}

/// Opens addresses of ours for the loop of a mapping, in the requesting thread: a broker may take half a minute to answer, and the
/// loop must not wait for it. It keeps nothing of the loop alive.
pub(crate) struct Addresses {
    opener: Opener,
    handle: Handle<Command, ()>,
    /// Addresses that it has opened.
    later: Mutex<BTreeMap<IpAddr, Address>>,
}

impl core::fmt::Debug for Addresses {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Addresses")
            .field("opener", &self.opener)
            .finish_non_exhaustive()
    }
}

impl Addresses {
    pub(crate) fn new(opener: Opener, handle: Handle<Command, ()>) -> Self {
        let later = Mutex::default();
        Self { opener, handle, later }
    }

    /// Sees to it that the loop has an address. Who asks for one that is being opened waits for the same answer. Commands that are sent
    /// afterwards come to the loop after the address.
    ///
    /// # Errors
    /// EADDRNOTAVAIL when it is not ours, EADDRINUSE when somebody has its port, ETIMEDOUT when the broker does not answer, ENODEV when the
    /// mapping has ended.
    pub(crate) fn ensure(&self, addr: IpAddr) -> Result<(), Refused> {
        let addr = addr.to_canonical();
        let mut later = self.later.lock();
        match later.get(&addr) {
            Some(Address::Open) => return Ok(()),
            Some(Address::Opening(attempt)) => {
                let attempt = attempt.clone();
                drop(later);
                return attempt.wait().clone();
            }
            // One that it began with.
            None if self.opener.has(addr) => return Ok(()),
            Some(Address::Left(_)) | None => {}
        }
        let attempt = Attempt::default();
        let before = later.insert(addr, Address::Opening(attempt.clone()));
        drop(later);
        let left = match before {
            Some(Address::Left(device)) => Some(device),
            _ => None,
        };
        let opening = Opening {
            addresses: self,
            addr,
            attempt,
        };
        opening.open(left)
    }

    /// Gives the loop a device. One that is not taken comes back, with the reason.
    fn hand_over(&self, device: Box<NewDevice>) -> Result<(), (Refused, Option<Box<NewDevice>>)> {
        let (taken, answer) = channel();
        self.handle.command(Command::Attach(device, taken));
        match answer.recv() {
            Ok(Ok(())) => Ok(()),
            Ok(Err((e, device))) => {
                let refused = Refused::new(Errno::from(e), "the loop can't watch one more address");
                Err((refused, Some(device)))
            }
            Err(_) => Err((Refused::new(Errno::ENODEV, "the mapping has exited"), None)),
        }
    }
}

/// An attempt that is under way. Those who wait for it have nobody else.
struct Opening<'a> {
    addresses: &'a Addresses,
    addr: IpAddr,
    attempt: Attempt,
}

impl Opening<'_> {
    fn open(&self, left: Option<Box<NewDevice>>) -> Result<(), Refused> {
        let opened = || {
            let opened = self.addresses.opener.open(self.addr).map_err(refused)?;
            let device = opened.into_iter().next();
            device.map(Box::new).ok_or_else(|| Refused::from(Errno::EIO))
        };
        let device = left.map_or_else(opened, Ok);
        let (state, done) = match device.map(|device| self.addresses.hand_over(device)) {
            Err(why) => (None, Err(why)),
            Ok(Ok(())) => (Some(Address::Open), Ok(())),
            Ok(Err((why, left))) => (left.map(Address::Left), Err(why)),
        };
        self.end(state, done.clone());
        done
    }

    /// The attempt is over, unless it was before.
    fn end(&self, state: Option<Address>, done: Result<(), Refused>) {
        let mut later = self.addresses.later.lock();
        if self.attempt.set(done).is_err() {
            return;
        }
        match state {
            Some(state) => later.insert(self.addr, state),
            None => later.remove(&self.addr),
        };
    }
}

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        self.end(None, Err(Errno::EIO.into()));
    }
}

/// Why an address can't be opened, as the kernel says it.
fn refused(e: VerbsError) -> Refused {
    let kind = match &e {
        VerbsError::Io { source, .. } => source.kind(),
        _ => io::ErrorKind::Other,
    };
    match kind {
        io::ErrorKind::AddrNotAvailable => Refused::new(Errno::EADDRNOTAVAIL, e.to_string()),
        io::ErrorKind::AddrInUse => Refused::new(Errno::EADDRINUSE, e.to_string()),
        io::ErrorKind::TimedOut => Refused::new(Errno::ETIMEDOUT, e.to_string()),
        _ => rtrs::Error::Verbs(e).into(),
    }
}
