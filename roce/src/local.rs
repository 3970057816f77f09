//! Devices driven by the caller's event loop, without a thread or lock.

use std::{io, net::IpAddr, os::fd::BorrowedFd, sync::Arc, time::Duration};

use roce_net::{Flush, iface};
use roce_port::fabric::{Fabric, FabricConfig, Hardware, Ports, Usage};
use roce_port::{Placement, Port, PortChange};
use roce_verbs::mem::MemoryTable;
use roce_verbs::{
    DeviceLimits, Instant, Mtu,
    provider::{DeviceIx, Provider, VerbsError},
};

use crate::{
    broker::{JoinConfig, Membership},
    cm::service_id,
    config::{DeviceConfig, Services},
    joined::{self, Joined, Sharing},
    open,
    opener::{NewDevice, Opener},
    shards::{Endpoints, Member},
    stats::DeviceStats,
    tap::SharedTap,
};

/// Sorts members, one for each loop at each address, by loop.
fn by_loop(loops: usize, addresses: Vec<Vec<Member>>) -> impl Iterator<Item = Vec<Member>> {
    let mut addresses: Vec<_> = addresses.into_iter().map(Vec::into_iter).collect();
    (0..loops).map(move |_| addresses.iter_mut().filter_map(Iterator::next).collect())
}

fn check_apart(configs: &[DeviceConfig]) -> Result<(), VerbsError> {
    open::check_apart(configs.iter().map(|config| config.addr))
}

/// Addresses of a loop.
struct Members(Vec<Member>);

impl Members {
    /// Returns the registry of services at an address, if other processes share it.
    fn registry(&self, index: usize) -> Option<&dyn Services> {
        self.0[index].shard.as_ref()?.registry()
    }

    fn stats(&self) -> DeviceStats {
        DeviceStats::sum(self.0.iter().map(|m| m.driver.counters()))
    }

    /// Publishes counters to other processes.
    fn publish(&mut self, now: Instant, joined: &mut Joined) {
        let queue_pairs = self.0.iter_mut().map(|m| m.driver.port().queue_pairs()).sum();
        let all = self.stats();
        let mtu = self.0.iter().map(|m| m.mtu).max().unwrap_or(Mtu::B256);
        // A loop does not watch its interfaces.
        joined.publish(now, &all.snapshot(mtu, queue_pairs, 0));
    }
}

impl Ports for Members {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn port(&mut self, index: usize) -> &mut Port {
        self.0[index].driver.port()
    }

    fn memory(&self, index: usize) -> &Arc<MemoryTable> {
        &self.0[index].mem
    }

    fn route(&self, src: Option<IpAddr>, dst: IpAddr) -> Result<(usize, IpAddr), VerbsError> {
        let any = |m: &Member| m.addr.is_unspecified() && open::serves(m.addr, dst);
        let with = |local: IpAddr| {
            let has = self.0.iter().position(|m| m.addr == local);
            Some((has.or_else(|| self.0.iter().position(any))?, local))
        };
        if let Some(src) = src {
            let none = || VerbsError::Address(format!("{src} is not an address of this device"));
            return with(src).ok_or_else(none);
        }
        // A single device needs no routing table.
        if let [one] = &self.0[..]
            && !one.addr.is_unspecified()
        {
            return Ok((0, one.addr));
        }
        let no_route = |e| VerbsError::Address(format!("no route to {dst}: {e}"));
        let local = iface::route_to(dst).map_err(no_route)?;
        with(local).ok_or_else(|| {
            VerbsError::Address(format!(
                "the route to {dst} has source address {local}, which is no device's: open a device at it"
            ))
        })
    }

    fn claim(&mut self, index: usize, addr: Option<IpAddr>, port: u16) -> Result<(), VerbsError> {
        match self.registry(index) {
            Some(registry) => registry.claim(service_id(port), addr),
            None => Ok(()),
        }
    }

    fn release(&mut self, index: usize, addr: Option<IpAddr>, port: u16) {
        if let Some(registry) = self.registry(index) {
            registry.release(service_id(port), addr);
        }
    }

    fn port_change(&mut self, index: usize, change: PortChange) {
        if let Some(shard) = &self.0[index].shard {
            shard.port_change(change);
        }
    }
}

/// Devices without a thread or lock, driven by the caller's event loop.
///
/// The loop receives, runs timers and sends; in between it uses the devices as a [`Provider`]. Only
/// [`flush`](Self::flush) sends, so that all requests posted in an iteration are sent together.
///
/// A sketch of the loop; `examples/event_loop.rs` has a complete one:
///
/// ```no_run
/// # use roce::{DeviceConfig, Flush, LocalDevice, VerbsError, verbs::provider::Provider};
/// /// Processes completions and events. Returns whether there were any.
/// fn dispatch(provider: &mut dyn Provider) -> Result<bool, VerbsError> {
///     let (mut any, mut completions) = (false, Vec::new());
///     while provider.poll_completions(&mut completions, 1024)? > 0 {
///         for (_qp, _completion) in completions.drain(..) {
///             // Post the next requests.
///         }
///         any = true;
///     }
///     while let Some(_event) = provider.poll_event() {
///         any = true;
///     }
///     Ok(any)
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut device = LocalDevice::open(&[DeviceConfig::new("192.0.2.1".parse()?)])?;
/// loop {
///     let more = device.receive(roce::now(), 128);
///     device.run_timers(roce::now(), more);
///     let mut busy = dispatch(device.provider())?;
///     let flushed = device.flush(roce::now());
///     // Sending can complete work requests, with an error for example.
///     busy |= dispatch(device.provider())?;
///     if !more && !busy && flushed != Flush::More {
///         let _timeout = device.next_timeout(roce::now());
///         // Poll device.descriptors() for reading with this timeout.
///     }
/// }
/// # }
/// ```
pub struct LocalDevice {
    fabric: Fabric<Members>,
    /// Membership of the broker, if other processes share the addresses.
    joined: Option<Joined>,
    opener: Opener,
}

impl Drop for LocalDevice {
    fn drop(&mut self) {
        self.publish(roce_net::now());
    }
}

debug!(LocalDevice, "LocalDevice", |this| usage: this.fabric.usage());

impl LocalDevice {
    /// Opens a device for each configuration. Ignores `background`. Devices with the same `pcap` file share a capture.
    ///
    /// # Errors
    /// If a UDP port is in use (the text names the process), an address is not local, two devices have the same one, or
    /// a system call fails.
    pub fn open(configs: &[DeviceConfig]) -> Result<Self, VerbsError> {
        Self::several(configs, 1, Sharing::Process(None), None)?
            .pop()
            .ok_or_else(|| VerbsError::Invalid("no loop".into()))
    }

    fn several(
        configs: &[DeviceConfig],
        loops: usize,
        sharing: Sharing,
        placement: Option<Arc<dyn Placement>>,
    ) -> Result<Vec<Self>, VerbsError> {
        check_apart(configs)?;
        let bound = configs.iter().map(|config| sharing.open(config));
        let bound = bound.collect::<Result<Vec<_>, _>>()?;
        let taps = SharedTap::of(configs)?;
        let members = bound.into_iter().zip(&taps);
        let members = members.map(|(bound, tap)| Member::all(bound, placement.as_ref(), tap.as_ref()));
        let loops = by_loop(loops, members.collect::<Result<_, _>>()?);
        let opener = Opener::new(configs, &taps, sharing, placement);
        Ok(loops.map(|members| Self::of(members, opener.clone())).collect())
    }

    /// Opens devices for several loops. Each loop has a *shard* of every device.
    ///
    /// The shards of a device share its address. Each has its own sockets, memory table, queue pairs and connections. A device has
    /// the same index in each loop.
    ///
    /// The kernel delivers a packet to the shard of its queue pair. Connect requests arrive at the first loop. It
    /// forwards them, and the messages that follow, to the shard that `placement` chooses. Each loop must listen for
    /// the services of which it accepts connections.
    ///
    /// Every loop must be driven: packets for a shard whose loop does not run are lost. With one shard this is
    /// [`open`](Self::open).
    ///
    /// # Errors
    /// As [`open`](Self::open). Also for more than 64 shards, or if the configuration shares an address with other
    /// processes ([`DeviceConfig::sockets`], [`DeviceConfig::qpn_slot`], [`DeviceConfig::services`]): use
    /// [`open_shared`](Self::open_shared) then.
    pub fn open_shards(
        configs: &[DeviceConfig],
        shards: usize,
        placement: Arc<dyn Placement>,
    ) -> Result<Vec<Self>, VerbsError> {
        let sharing = Sharing::Process(open::check_shards(shards)?);
        Self::several(configs, shards, sharing, Some(placement))
    }

    /// Opens devices whose addresses other processes may use at the same time, for one or several loops.
    ///
    /// Each loop becomes a member of the broker, which is started if none runs. Connect requests to any address and
    /// service of the loops arrive at the first loop, as with [`open_shards`](Self::open_shards).
    ///
    /// # Errors
    /// As [`open_shards`](Self::open_shards). Also if the broker refuses, or none runs and none can be started.
    pub fn open_shared(
        configs: &[DeviceConfig],
        loops: usize,
        placement: Arc<dyn Placement>,
        join: &JoinConfig,
    ) -> Result<Vec<Self>, VerbsError> {
        // Before a broker is started.
        check_apart(configs)?;
        configs.iter().try_for_each(open::check_shareable)?;
        let members = joined::join(join, loops.max(1))?;
        let opened = Self::several(configs, members.len(), Sharing::of(&members), Some(placement))?;
        let opened = opened.into_iter().zip(members);
        Ok(opened.map(|(this, member)| this.joined(member)).collect())
    }

    fn of(members: Vec<Member>, opener: Opener) -> Self {
        let devices = members.iter().map(Member::device).collect();
        let mut fabric = Fabric::new(Members(members), FabricConfig::default(), devices);
        fabric.set_faults(opener.faults());
        // A program may connect before its first iteration.
        fabric.set_now(roce_net::now());
        Self {
            fabric,
            joined: None,
            opener,
        }
    }

    /// Completes joining of a loop that is a member of the broker.
    fn joined(mut self, membership: Arc<Membership>) -> Self {
        let endpoints = Arc::<Endpoints>::default();
        self.members().iter_mut().for_each(|member| member.register(&endpoints));
        self.joined = Some(Joined::new(membership, endpoints));
        self.publish(roce_net::now());
        self
    }

    /// Returns an opener of further addresses for this loop and those opened with it.
    pub fn opener(&self) -> Opener {
        self.opener.clone()
    }

    /// Adds a device that was [opened](Opener::open) for this loop. Returns its index.
    ///
    /// Its [descriptors](Self::descriptors) must be polled from the next iteration on. Existing listeners at all
    /// addresses do not include its address.
    pub fn attach(&mut self, new: NewDevice) -> DeviceIx {
        let mut member = new.0;
        let (limits, addrs) = member.device();
        if let Some(joined) = &self.joined {
            member.register(joined.endpoints());
        }
        self.fabric.ports().0.push(member);
        self.publish(roce_net::now());
        self.fabric.add_device(limits, addrs)
    }

    fn publish(&mut self, now: Instant) {
        if let Some(joined) = &mut self.joined {
            self.fabric.ports().publish(now, joined);
        }
    }

    fn members(&mut self) -> &mut [Member] {
        &mut self.fabric.ports().0
    }

    /// Sets the time for what is asked of the provider before this iteration receives.
    pub(crate) fn set_now(&mut self, now: Instant) {
        self.fabric.set_now(now);
    }

    /// Returns the verbs provider of these devices. To it, the time is that of the last [`receive`](Self::receive) or
    /// [`run_timers`](Self::run_timers).
    pub fn provider(&mut self) -> &mut dyn Provider {
        &mut self.fabric
    }

    /// Adds the RDMA devices of the host. An address that a software device has too is the software device's.
    ///
    /// RDMA devices complete without a packet that is received. The loop polls for completions, and when there are none for a while, it
    /// [arms](Self::arm) them, polls once more, and waits for their [descriptors](Self::hardware_descriptors) too.
    #[must_use]
    pub fn with_hardware(mut self, hardware: Box<dyn Hardware>) -> Self {
        self.fabric.set_hardware(hardware, iface::route_to);
        self.note_hardware();
        self
    }

    /// Updates the addresses that the opener knows of RDMA devices.
    fn note_hardware(&self) {
        let addrs = self.fabric.hardware().map(Hardware::addrs).unwrap_or_default();
        self.opener.set_hardware(addrs);
    }

    /// Returns whether there are RDMA devices.
    pub fn has_hardware(&self) -> bool {
        self.fabric.hardware().is_some()
    }

    /// Reads the events of RDMA devices. Returns whether there were any.
    ///
    /// # Errors
    /// If the system fails.
    pub fn poll_hardware(&mut self) -> Result<bool, VerbsError> {
        let any = self.fabric.poll_hardware()?;
        if any {
            self.note_hardware();
        }
        Ok(any)
    }

    /// Requests that [descriptors](Self::hardware_descriptors) of RDMA devices report the next completion. Completions before that are
    /// not reported: poll once more before waiting. Software devices always report theirs.
    ///
    /// # Errors
    /// If a completion queue has failed.
    pub fn arm(&mut self) -> Result<(), VerbsError> {
        self.fabric.arm_hardware()
    }

    /// Returns the descriptors of RDMA devices, to poll for reading.
    pub fn hardware_descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.fabric.hardware().map(Hardware::descriptors).unwrap_or_default()
    }

    /// Returns the largest path MTU of connections from an address.
    ///
    /// # Errors
    /// If no device has the address.
    pub fn mtu(&mut self, addr: IpAddr) -> io::Result<Mtu> {
        let addr = addr.to_canonical();
        if let Some(member) = self.members().iter().find(|m| m.addr == addr) {
            return Ok(member.mtu);
        }
        let hardware = self.fabric.hardware().ok_or(io::ErrorKind::AddrNotAvailable)?;
        hardware.mtu(addr)
    }

    /// Returns the limits of a device.
    pub fn limits(&self, index: usize) -> Option<&DeviceLimits> {
        self.fabric.devices().get(index).map(|caps| &caps.limits)
    }

    /// Receives about `budget` packets at each device. Returns whether more are waiting.
    pub fn receive(&mut self, now: Instant, budget: usize) -> bool {
        self.fabric.set_now(now);
        let mut more = false;
        for member in self.members() {
            more |= member.receive(now, budget);
        }
        more
    }

    /// Runs timers that are due. With `more`, packets are waiting to be received, which may stop timers: then they are
    /// postponed, a limited number of times.
    pub fn run_timers(&mut self, now: Instant, more: bool) {
        self.fabric.set_now(now);
        for member in self.members() {
            member.driver.run_timers(now, more);
        }
    }

    /// Sends the packets that are due. After [`Flush::Blocked`], call it again when a descriptor is readable.
    pub fn flush(&mut self, now: Instant) -> Flush {
        let mut all = Flush::Done;
        for member in self.members() {
            all = match (all, member.driver.flush(now)) {
                (Flush::Blocked, _) | (_, Flush::Blocked) => Flush::Blocked,
                (Flush::More, _) | (_, Flush::More) => Flush::More,
                (Flush::Done, Flush::Done) => Flush::Done,
            };
        }
        if self.joined.as_mut().is_some_and(|joined| joined.is_publish_due(now)) {
            self.publish(now);
        }
        all
    }

    /// Returns the time until the next timer expires. `None`: no timer is armed.
    pub fn next_timeout(&mut self, now: Instant) -> Option<Duration> {
        let publish_at = self.joined.as_ref().and_then(Joined::publish_at);
        let timeouts = self.members().iter_mut().filter_map(|m| m.driver.next_timeout());
        timeouts.chain(publish_at).min().map(|at| at.saturating_since(now))
    }

    /// Returns the descriptors to poll for reading: packets, or room after [`Flush::Blocked`].
    pub fn descriptors(&mut self) -> Vec<BorrowedFd<'_>> {
        self.fabric.ports().0.iter().flat_map(Member::descriptors).collect()
    }

    /// Returns the counters of a device.
    pub fn stats(&mut self, index: usize) -> Option<DeviceStats> {
        Some(self.members().get(index)?.driver.counters().into())
    }

    /// Returns the sum of the counters of all software devices.
    pub fn total_stats(&mut self) -> DeviceStats {
        self.fabric.ports().stats()
    }

    /// Returns the counters of each software device, with the address it was opened with.
    pub fn all_stats(&mut self) -> Vec<(IpAddr, DeviceStats)> {
        let of = |member: &mut Member| (member.addr, member.driver.counters().into());
        self.members().iter_mut().map(of).collect()
    }

    /// Returns the number of objects.
    pub fn usage(&self) -> Usage {
        self.fabric.usage()
    }
}
