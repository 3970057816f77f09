//! Our addresses that a mapping gets while it runs.

use std::{
    collections::BTreeMap,
    io,
    net::IpAddr,
    sync::{Arc, OnceLock, mpsc::channel},
};

use parking_lot::Mutex;
use rnbd::Errno;
use roce::{NewDevice, Opener, VerbsError};
use roce_reactor::Handle;

use crate::{control::Refused, mapper::Command};

/// Whether a loop has taken a device, which else comes back.
pub(crate) type Taken = Result<(), (io::Error, Box<NewDevice>)>;

/// A device for the loop of this number.
type OfLoop = (usize, Box<NewDevice>);

/// How an attempt to open an address has ended, once it has.
type Attempt = Arc<OnceLock<Result<(), Refused>>>;

/// How far an address is that the mapping did not begin with.
enum Address {
    /// Somebody opens it; others wait for that.
    Opening(Attempt),
    /// All loops have it.
    Open,
    /// It is open, and these loops have not taken it.
    Left(Vec<OfLoop>),
}

/// Opens addresses of ours for the loops of a mapping, in the thread of whoever asks: a broker may take half a minute to answer, and no
/// loop waits for it. It keeps nothing of the loops alive.
pub(crate) struct Addresses {
    opener: Opener,
    loops: Arc<[Handle<Command, ()>]>,
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
    pub(crate) fn new(opener: Opener, loops: Arc<[Handle<Command, ()>]>) -> Self {
        let later = Mutex::default();
        Self { opener, loops, later }
    }

    /// Sees to it that all loops have an address. Who asks for one that is being opened waits for the same answer. What is sent to the
    /// loops afterwards comes to them after the address.
    ///
    /// # Errors
    /// EADDRNOTAVAIL when it is not ours, EADDRINUSE when somebody has its port, ETIMEDOUT when the broker does not answer, ENODEV when the
    /// mapping has ended.
    pub(crate) fn ensure(&self, addr: IpAddr) -> Result<(), Refused> {
        let addr = addr.to_canonical();
        let mut later = self.later.lock();
        let left = match later.get_mut(&addr) {
            Some(Address::Open) => return Ok(()),
            Some(Address::Opening(attempt)) => {
                let attempt = attempt.clone();
                drop(later);
                return attempt.wait().clone();
            }
            Some(Address::Left(left)) => core::mem::take(left),
            // One that it began with.
            None if self.opener.has(addr) => return Ok(()),
            None => Vec::new(),
        };
        let attempt = Attempt::default();
        later.insert(addr, Address::Opening(attempt.clone()));
        drop(later);
        let opening = Opening {
            addresses: self,
            addr,
            attempt,
        };
        opening.open(left)
    }

    /// Gives each loop its device, each in the same order. What is not taken comes back, with the reason.
    fn hand_out(&self, devices: Vec<OfLoop>) -> Result<(), (Refused, Vec<OfLoop>)> {
        let order = self.later.lock();
        let give = |(index, device): OfLoop| {
            let (taken, answer) = channel();
            if let Some(handle) = self.loops.get(index) {
                handle.command(Command::Attach(device, taken));
            }
            (index, answer)
        };
        let asked: Vec<_> = devices.into_iter().map(give).collect();
        drop(order);
        let (mut left, mut failure) = (Vec::new(), None);
        for (index, answer) in asked {
            match answer.recv() {
                Ok(Ok(())) => {}
                Ok(Err((e, device))) => {
                    left.push((index, device));
                    failure.get_or_insert(Refused::new(Errno::from(e), "a loop can't watch one more address"));
                }
                Err(_) => {
                    failure.get_or_insert(Refused::new(Errno::ENODEV, "it has ended"));
                }
            }
        }
        failure.map_or(Ok(()), |refused| Err((refused, left)))
    }
}

/// An attempt that is under way. Those who wait for it have nobody else.
struct Opening<'a> {
    addresses: &'a Addresses,
    addr: IpAddr,
    attempt: Attempt,
}

impl Opening<'_> {
    fn open(&self, left: Vec<OfLoop>) -> Result<(), Refused> {
        let devices = match left.is_empty() {
            true => self.addresses.opener.open(self.addr).map_err(refused).map(|opened| {
                let devices = opened.into_iter().map(Box::new);
                devices.enumerate().collect()
            }),
            false => Ok(left),
        };
        let (state, done) = match devices.map(|devices| self.addresses.hand_out(devices)) {
            Err(why) => (None, Err(why)),
            Ok(Ok(())) => (Some(Address::Open), Ok(())),
            // The loops that have not got theirs are gone.
            Ok(Err((why, left))) if left.is_empty() => (Some(Address::Open), Err(why)),
            Ok(Err((why, left))) => (Some(Address::Left(left)), Err(why)),
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
