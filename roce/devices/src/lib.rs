//! Devices of a loop: software devices ([`LocalDevice`]), and perhaps RDMA devices of the host ([`Rdma`]) beside them, as one
//! [`Provider`] ([`Joint`]).
//!
//! Software devices alone are used as they are: no call goes through anything of this crate's but [`Devices`] itself.

mod joint;
mod opener;
mod rdma;

use std::{io, net::IpAddr, os::fd::BorrowedFd, time::Duration};

use roce::{
    DeviceStats, Flush, LocalDevice, Mtu, NewDevice, RxMeta, Usage,
    verbs::{
        Instant,
        provider::{DeviceIx, Provider, VerbsError},
    },
};

pub use joint::{Half, Joint, Side};
pub use opener::Opener;
pub use roce;

use opener::Hardware;
pub use rdma::{DeviceName, Rdma};

/// All devices of a loop, which receives, runs timers and sends, and between that uses them as a [`Provider`].
#[derive(Debug)]
pub struct Devices(Inner);

#[derive(Debug)]
enum Inner {
    Soft(LocalDevice),
    Both(rdma::Both),
}

impl From<LocalDevice> for Devices {
    fn from(soft: LocalDevice) -> Self {
        Self(Inner::Soft(soft))
    }
}

impl Half for LocalDevice {
    fn provider(&self) -> &dyn Provider {
        self.shared_provider()
    }

    fn provider_mut(&mut self) -> &mut dyn Provider {
        Self::provider(self)
    }
}

impl Devices {
    /// RDMA devices beside software ones, of which there may be none ([`LocalDevice::open`] of no addresses). An address that both
    /// have is the software's.
    pub fn with_rdma(soft: LocalDevice, rdma: Box<dyn Rdma>) -> Self {
        Self(Inner::Both(rdma::Both::new(soft, rdma)))
    }

    /// Returns the provider for a loop's state machines.
    pub fn provider(&mut self) -> &mut dyn Provider {
        match &mut self.0 {
            Inner::Soft(soft) => soft.provider(),
            Inner::Both(both) => &mut both.joint,
        }
    }

    fn soft(&mut self) -> &mut LocalDevice {
        match &mut self.0 {
            Inner::Soft(soft) => soft,
            Inner::Both(both) => both.joint.a_mut(),
        }
    }

    fn soft_ref(&self) -> &LocalDevice {
        match &self.0 {
            Inner::Soft(soft) => soft,
            Inner::Both(both) => both.joint.a(),
        }
    }

    /// Opens further addresses for this loop and the others that it was opened with.
    pub fn opener(&self) -> Opener {
        let hardware = match &self.0 {
            Inner::Soft(_) => Hardware::default(),
            Inner::Both(both) => both.known.clone(),
        };
        Opener {
            soft: self.soft_ref().opener(),
            hardware,
        }
    }

    /// The loop gets one more software device, which has been [opened](Opener::open) for it; the next turn has its
    /// [descriptors](Self::descriptors) too.
    pub fn attach(&mut self, new: NewDevice) -> DeviceIx {
        let device = self.soft().attach(new);
        match &mut self.0 {
            Inner::Soft(_) => device,
            Inner::Both(both) => {
                both.joint.refresh();
                both.joint.device(Side::A, device).unwrap_or(device)
            }
        }
    }

    /// Receives about `budget` packets of each software device. True: more is waiting.
    pub fn receive(&mut self, now: Instant, budget: usize) -> bool {
        self.soft().receive(now, budget)
    }

    /// Takes what RDMA devices have to tell. True: there was something.
    ///
    /// # Errors
    /// When the system fails.
    pub fn take_news(&mut self) -> Result<bool, VerbsError> {
        match &mut self.0 {
            Inner::Soft(_) => Ok(false),
            Inner::Both(both) => both.take_news(),
        }
    }

    /// Takes a datagram that reached the host by another socket as if the network had brought it to a software device. All checks are
    /// made.
    pub fn inject(&mut self, now: Instant, index: usize, datagram: &[u8], meta: &RxMeta) {
        self.soft().inject(now, index, datagram, meta);
    }

    /// Runs timers that are due, unless packets wait (`more`) that could be what they wait for.
    pub fn run_timers(&mut self, now: Instant, more: bool) {
        self.soft().run_timers(now, more);
    }

    /// Sends what there is to send. After [`Flush::Blocked`], call it again when a descriptor is readable. RDMA devices have
    /// sent already.
    pub fn flush(&mut self, now: Instant) -> Flush {
        self.soft().flush(now)
    }

    /// How long the loop may wait; `None`: for ever.
    pub fn next_timeout(&mut self, now: Instant) -> Option<Duration> {
        self.soft().next_timeout(now)
    }

    /// Whether completions come without a packet that is received: they are to be asked for by a loop that spins.
    pub fn complete_by_themselves(&self) -> bool {
        match &self.0 {
            Inner::Soft(_) => false,
            Inner::Both(_) => true,
        }
    }

    /// Has the [descriptors](Self::descriptors) tell of the next completion. What completed before is not told: look once more before
    /// you wait. Of software devices they always do.
    ///
    /// # Errors
    /// When a completion queue has failed.
    pub fn arm(&mut self) -> Result<(), VerbsError> {
        match &mut self.0 {
            Inner::Soft(_) => Ok(()),
            Inner::Both(both) => both.joint.b_mut().arm(),
        }
    }

    /// Returns the descriptors to watch for input: packets, or room to send after [`Flush::Blocked`].
    pub fn descriptors(&mut self) -> Vec<BorrowedFd<'_>> {
        self.soft().descriptors()
    }

    /// Returns the descriptors to watch for events of RDMA devices, for reading.
    pub fn news(&self) -> Vec<BorrowedFd<'_>> {
        match &self.0 {
            Inner::Soft(_) => Vec::new(),
            Inner::Both(both) => both.joint.b().descriptors(),
        }
    }

    /// Path MTU at most of connections from an address.
    ///
    /// # Errors
    /// When it is no address of a device.
    pub fn mtu(&mut self, addr: IpAddr) -> io::Result<Mtu> {
        let addr = addr.to_canonical();
        if let Some(mtu) = self.soft().mtu_of(addr) {
            return Ok(mtu);
        }
        match &self.0 {
            Inner::Soft(_) => Err(io::ErrorKind::AddrNotAvailable.into()),
            Inner::Both(both) => both.joint.b().mtu(addr),
        }
    }

    /// Returns the counters of each software device, with its address as it was given.
    pub fn all_stats(&mut self) -> Vec<(IpAddr, DeviceStats)> {
        self.soft().all_stats()
    }

    /// All software devices' counts together.
    pub fn stats(&mut self) -> DeviceStats {
        let mut sum = DeviceStats::default();
        self.all_stats().iter().for_each(|(_, stats)| sum.add(stats));
        sum
    }

    /// How many objects there are.
    pub fn usage(&self) -> Usage {
        let mut usage = self.soft_ref().usage();
        if let Inner::Both(both) = &self.0 {
            usage.add(&both.joint.b().usage());
        }
        usage
    }
}
