//! A device that its owner's loop drives.

use std::{io, net::IpAddr, os::fd::BorrowedFd, sync::Arc, time::Duration};

use roce_local::{Fabric, FabricConfig, Ports, Usage};
use roce_mem::MemoryTable;
use roce_net::{Flush, LocalConfig, LocalDriver, Own, Tap, iface};
use roce_port::{Port, QpnSlot, RxMeta, Steering};
use roce_verbs::{
    DeviceLimits, Instant, Mtu,
    provider::{Provider, VerbsError},
};

use crate::{
    device::{DeviceConfig, DeviceStats},
    open::{self, Parts},
    shards::{Placement, Shard},
    tap::SharedTap,
};

/// One address.
struct Member {
    driver: LocalDriver,
    mem: Arc<MemoryTable>,
    addr: IpAddr,
    mtu: Mtu,
}

impl Member {
    /// It, and what state machines are told of it.
    fn new(config: &DeviceConfig, parts: Parts, own: Option<Own>) -> (Self, (DeviceLimits, Vec<IpAddr>)) {
        let local = LocalConfig {
            tap: parts.tap,
            own,
            ..LocalConfig::default()
        };
        let addr = config.addr.to_canonical();
        let member = Self {
            driver: LocalDriver::new(parts.port, Box::new(parts.path), local),
            mem: parts.mem,
            addr,
            mtu: parts.mtu,
        };
        (member, (parts.limits, addresses(addr)))
    }
}

/// All addresses of a loop.
struct Members(Vec<Member>);

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
        let no_way = |e: io::Error| VerbsError::Address(format!("no way to {dst}: {e}"));
        let has = |addr: IpAddr| self.0.iter().position(|m| m.addr == addr);
        let any = || {
            self.0
                .iter()
                .position(|m| m.addr.is_unspecified() && serves(m.addr, dst))
        };
        if let Some(src) = src {
            let found = has(src).or_else(any);
            return found
                .map(|index| (index, src))
                .ok_or_else(|| VerbsError::Address(format!("{src} is not an address of this device")));
        }
        // A single device needs no routing table.
        let one = self.0.first().filter(|m| self.0.len() == 1 && !m.addr.is_unspecified());
        if let Some(one) = one {
            return Ok((0, one.addr));
        }
        let local = iface::route_to(dst).map_err(no_way)?;
        let found = has(local).or_else(any);
        found
            .map(|index| (index, local))
            .ok_or_else(|| VerbsError::Address(format!("the way to {dst} leads from {local}, which is no device's")))
    }
}

/// Whether a device on all addresses has those of the peer's IP version; `::` has both.
fn serves(any: IpAddr, dst: IpAddr) -> bool {
    any.is_ipv6() || dst.to_canonical().is_ipv4()
}

/// Devices without a thread or a lock: the caller's loop receives, runs timers and sends, and between that uses them as a
/// [`Provider`]. Nothing is sent but by [`flush`](Self::flush), so that what a turn of the loop posts leaves together.
///
/// The turns of such a loop (`examples/own_loop.rs` is a whole one):
///
/// ```no_run
/// # use roce::{DeviceConfig, Flush, LocalDevice, VerbsError, verbs::provider::Provider};
/// /// Takes what there is; true if there was something.
/// fn hand_on(provider: &mut dyn Provider) -> Result<bool, VerbsError> {
///     let (mut any, mut completions) = (false, Vec::new());
///     while provider.poll_completions(&mut completions, 1024)? > 0 {
///         for (_qp, _completion) in completions.drain(..) {
///             // Post what follows of it.
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
///     let mut busy = hand_on(device.provider())?;
///     let flushed = device.flush(roce::now());
///     // Sending can complete work requests, with an error for example.
///     busy |= hand_on(device.provider())?;
///     if !more && !busy && flushed != Flush::More {
///         let _wait = device.next_timeout(roce::now());
///         // Wait for device.descriptors(), to write too if it is Flush::Blocked, and no longer than that.
///     }
/// }
/// # }
/// ```
pub struct LocalDevice {
    fabric: Fabric<Members>,
    /// Who forwards what reaches this process for another of the same address.
    stray: Vec<Option<Arc<dyn crate::Services>>>,
    /// Other loops of this process have the same address.
    shard: Option<Shard>,
}

impl core::fmt::Debug for LocalDevice {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("LocalDevice")
            .field("usage", &self.fabric.usage())
            .finish_non_exhaustive()
    }
}

impl LocalDevice {
    /// Opens devices, one for each of these; `background` says nothing here.
    ///
    /// # Errors
    /// When a port is taken (the text says by whom), an address is not ours, or the system refuses.
    pub fn open(configs: &[DeviceConfig]) -> Result<Self, VerbsError> {
        let (mut members, mut devices) = (Vec::new(), Vec::new());
        for config in configs {
            let path = open::datapath(config)?.map_err(open::error)?;
            let own = config.qpn_slot.map(QpnSlot::qpns).map(Own::Process);
            let (member, device) = Member::new(config, Parts::new(config, path)?, own);
            members.push(member);
            devices.push(device);
        }
        let fabric = Fabric::new(Members(members), FabricConfig::default(), devices);
        Ok(Self {
            fabric,
            stray: configs.iter().map(|c| c.services.clone()).collect(),
            shard: None,
        })
    }

    /// Opens one device for several loops, each of which has a *shard* of it: the address is theirs together, and so is the table of
    /// memory, by which one's provider can lend to another's ([`Provider::lend_pd`]); each has sockets, queue pairs and connections
    /// of its own. The kernel gives a packet to the shard whose queue pair it is for;
    /// connect requests come to the first, which passes them on as `placement` says, and so it does with what follows. Each loop
    /// has to listen for the services that it is to be given connections of.
    ///
    /// All of them have to be driven: what waits for a shard that is not is lost. With one, this is [`open`](Self::open).
    ///
    /// # Errors
    /// As [`open`](Self::open); for more than 64 shards; when the address is shared with other processes
    /// ([`DeviceConfig::sockets`], [`DeviceConfig::qpn_slot`], [`DeviceConfig::services`]).
    pub fn open_shards(
        config: &DeviceConfig,
        shards: usize,
        placement: Arc<dyn Placement>,
    ) -> Result<Vec<Self>, VerbsError> {
        if shards == 1 {
            return Ok(vec![Self::open(std::slice::from_ref(config))?]);
        }
        let most = Steering::MAX_SHARDS;
        let steering = Steering::new(shards)
            .ok_or_else(|| VerbsError::Invalid(format!("{shards} loops at one address: 1 to {most} are possible")))?;
        if config.sockets.is_some() || config.qpn_slot.is_some() || config.services.is_some() {
            let text = "several loops can't have an address that is shared with other processes";
            return Err(VerbsError::Invalid(text.into()));
        }
        let paths = open::datapaths(config, steering)?;
        let tap = open::tap(config)?.map(SharedTap::from);
        let guid = open::random()?;
        let [a, b, c, d, e, f, g, h, ..] = guid;
        let guid = config.guid.unwrap_or(u64::from_le_bytes([a, b, c, d, e, f, g, h]));
        let parts = Shard::all(steering, placement)?.into_iter().zip(paths).enumerate();
        let mut mem = None;
        let opened = parts.map(|(index, (shard, path))| {
            let config = DeviceConfig {
                guid: Some(guid),
                qpn_slot: steering.slot(index),
                ..config.clone()
            };
            let tap = tap.clone().map(|tap| Box::new(tap) as Box<dyn Tap>);
            let parts = Parts::with_memory(&config, path, tap, mem.clone())?;
            mem.get_or_insert_with(|| parts.mem.clone());
            let (member, device) = Member::new(&config, parts, Some(Own::Shard(steering, index)));
            Ok(Self {
                fabric: Fabric::new(Members(vec![member]), FabricConfig::default(), vec![device]),
                stray: vec![None],
                shard: Some(shard),
            })
        });
        opened.collect()
    }

    fn members(&mut self) -> &mut [Member] {
        &mut self.fabric.ports().0
    }

    /// What a loop's state machines are given.
    pub fn provider(&mut self) -> &mut dyn Provider {
        &mut self.fabric
    }

    /// Limits of a device.
    pub fn limits(&self, index: usize) -> Option<&DeviceLimits> {
        self.fabric.devices().get(index).map(|caps| &caps.limits)
    }

    /// Path MTU at most of a device's connections.
    pub fn mtu(&mut self, index: usize) -> Option<Mtu> {
        self.members().get(index).map(|m| m.mtu)
    }

    /// Receives about `budget` packets of each device. True: more is waiting.
    pub fn receive(&mut self, now: Instant, budget: usize) -> bool {
        self.fabric.set_now(now);
        if let (Some(shard), Some(member)) = (&self.shard, self.fabric.ports().0.first_mut()) {
            return shard.receive(&mut member.driver, now, budget);
        }
        let stray = &self.stray;
        let mut more = false;
        for (member, services) in self.fabric.ports().0.iter_mut().zip(stray) {
            let hand_over = |meta: &RxMeta, bytes: &[u8]| {
                if let Some(services) = services {
                    services.hand_over(meta, bytes);
                }
            };
            more |= member.driver.receive(now, budget, &hand_over);
        }
        more
    }

    /// Takes a datagram that reached the host by another socket as if the network had brought it to a device. All checks are
    /// made.
    pub fn inject(&mut self, now: Instant, index: usize, datagram: &[u8], meta: &RxMeta) {
        if let Some(member) = self.members().get_mut(index) {
            member.driver.inject(now, datagram, meta);
        }
    }

    /// Runs timers that are due, unless packets wait (`more`) that could be what they wait for.
    pub fn run_timers(&mut self, now: Instant, more: bool) {
        self.fabric.set_now(now);
        for member in self.members() {
            member.driver.run_timers(now, more);
        }
    }

    /// Sends what there is to send. After [`Flush::Blocked`] it is to be called again when a descriptor is writable.
    pub fn flush(&mut self, now: Instant) -> Flush {
        let mut all = Flush::Done;
        for member in self.members() {
            all = match (all, member.driver.flush(now)) {
                (Flush::Blocked, _) | (_, Flush::Blocked) => Flush::Blocked,
                (Flush::More, _) | (_, Flush::More) => Flush::More,
                (Flush::Done, Flush::Done) => Flush::Done,
            };
        }
        all
    }

    /// How long the loop may wait; `None`: for ever.
    pub fn next_timeout(&mut self, now: Instant) -> Option<Duration> {
        let next = self.members().iter_mut().filter_map(|m| m.driver.next_timeout()).min();
        next.map(|at| at.saturating_since(now))
    }

    /// What to watch for packets, and for room to send after [`Flush::Blocked`].
    pub fn descriptors(&mut self) -> Vec<BorrowedFd<'_>> {
        let shard = self.shard.iter().map(Shard::descriptor);
        let members = &self.fabric.ports().0;
        members
            .iter()
            .flat_map(|m| m.driver.descriptors())
            .chain(shard)
            .collect()
    }

    /// What a device has counted.
    pub fn stats(&mut self, index: usize) -> Option<DeviceStats> {
        let (port, path) = self.members().get(index)?.driver.counters();
        Some(DeviceStats { port, path })
    }

    /// How many objects there are.
    pub fn usage(&self) -> Usage {
        self.fabric.usage()
    }
}

/// The addresses that a device has now.
fn addresses(addr: IpAddr) -> Vec<IpAddr> {
    match addr.is_unspecified() {
        true => Vec::new(),
        false => vec![addr],
    }
}
