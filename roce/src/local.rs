//! A device that its owner's loop drives.

use std::{io, net::IpAddr, os::fd::BorrowedFd, sync::Arc, time::Duration};

use roce_broker::{JoinConfig, Report};
use roce_local::{Fabric, FabricConfig, Ports, Usage};
use roce_mem::MemoryTable;
use roce_net::{Flush, iface};
use roce_port::{ConnChange, Port, RxMeta};
use roce_verbs::{
    DeviceLimits, Instant, Mtu,
    provider::{DeviceIx, Provider, VerbsError},
};

use crate::{
    cm::service_id,
    device::{DeviceConfig, DeviceStats, Services},
    joined::{Joined, Joining},
    member::{Member, Opened},
    open,
    opener::{NewDevice, Opener},
    shards::{Endpoints, Placement},
    shared::{self, join_error},
    tap::SharedTap,
};

/// The members of each of several loops.
struct Loops(Vec<Vec<Opened>>);

impl Loops {
    fn new(loops: usize) -> Self {
        Self((0..loops).map(|_| Vec::new()).collect())
    }

    /// Those at one more address.
    fn add(&mut self, members: Vec<Opened>) {
        for (of_loop, member) in self.0.iter_mut().zip(members) {
            of_loop.push(member);
        }
    }
}

/// All addresses of a loop.
struct Members(Vec<Member>);

impl Members {
    /// Whom to tell of the services that this loop takes requests for at an address.
    fn registry(&self, index: usize) -> Option<&dyn Services> {
        self.0[index].shard.as_ref()?.registry()
    }

    /// What other processes may know.
    fn report(&mut self) -> Report {
        let mut all = DeviceStats::default();
        let mut queue_pairs = 0;
        for member in &mut self.0 {
            all.add(&member.driver.counters().into());
            queue_pairs += member.driver.port().queue_pairs();
        }
        let addrs: Vec<_> = self.0.iter().map(|m| m.addr).collect();
        let mtu = self.0.iter().map(|m| m.mtu).max().unwrap_or(Mtu::B256);
        // A loop does not watch its interfaces.
        shared::report(&addrs, mtu, queue_pairs, all.hw_counters(0))
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
        let no_way = |e: io::Error| VerbsError::Address(format!("no way to {dst}: {e}"));
        let has = |addr: IpAddr| self.0.iter().position(|m| m.addr == addr);
        let any = || {
            self.0
                .iter()
                .position(|m| m.addr.is_unspecified() && open::serves(m.addr, dst))
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

    fn conn_change(&mut self, index: usize, change: ConnChange) {
        if let Some(shard) = &self.0[index].shard {
            shard.conn_change(change);
        }
    }
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
    /// With the broker of its addresses.
    joined: Option<Joined>,
    opener: Opener,
}

impl Drop for LocalDevice {
    fn drop(&mut self) {
        if let Some(joined) = self.joined.take() {
            joined.leave(self.fabric.ports().report());
        }
    }
}

impl core::fmt::Debug for LocalDevice {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("LocalDevice")
            .field("usage", &self.fabric.usage())
            .finish_non_exhaustive()
    }
}

impl LocalDevice {
    /// Opens devices, one for each of these; `background` says nothing here. Those that name the same file have one capture.
    ///
    /// # Errors
    /// When a port is taken (the text says by whom), an address is not ours, two devices would have the same, or the system
    /// refuses.
    pub fn open(configs: &[DeviceConfig]) -> Result<Self, VerbsError> {
        open::check_apart(configs)?;
        let paths = configs
            .iter()
            .map(|config| open::datapath(config)?.map_err(open::error));
        let paths = paths.collect::<Result<Vec<_>, _>>()?;
        let taps = SharedTap::of(configs)?;
        let opener = Opener::of_one(configs, &taps);
        let members = configs.iter().zip(paths).zip(taps);
        let members = members.map(|((config, path), tap)| Member::whole(config, path, tap));
        Ok(Self::of(members.collect::<Result<_, _>>()?, opener))
    }

    /// Opens devices for several loops, each of which has a *shard* of every one: an address is theirs together, and so is its table
    /// of memory, by which one's provider can lend to another's ([`Provider::lend_pd`]); each has sockets, queue pairs and
    /// connections of its own. A device has the same number in each loop.
    ///
    /// The kernel gives a packet to the shard whose queue pair it is for; connect requests come to the first loop, which passes them
    /// on as `placement` says, and so it does with what follows. Each loop has to listen for the services that it is to be given
    /// connections of.
    ///
    /// All of them have to be driven: what waits for a shard that is not is lost. With one, this is [`open`](Self::open).
    ///
    /// # Errors
    /// As [`open`](Self::open); for more than 64 shards; when the configuration says that an address is shared with other processes
    /// ([`DeviceConfig::sockets`], [`DeviceConfig::qpn_slot`], [`DeviceConfig::services`]): see [`open_shared`](Self::open_shared).
    pub fn open_shards(
        configs: &[DeviceConfig],
        shards: usize,
        placement: Arc<dyn Placement>,
    ) -> Result<Vec<Self>, VerbsError> {
        let Some(steering) = open::check_shards(shards)? else {
            return Ok(vec![Self::open(configs)?]);
        };
        open::check_apart(configs)?;
        let paths = configs
            .iter()
            .map(|config| open::shard_datapaths(config, steering)?.map_err(open::error));
        let paths = paths.collect::<Result<Vec<_>, _>>()?;
        let taps = SharedTap::of(configs)?;
        let opener = Opener::of_shards(configs, &taps, steering, &placement);
        let mut loops = Loops::new(shards);
        for ((config, paths), tap) in configs.iter().zip(paths).zip(&taps) {
            loops.add(Member::shards(config, paths, steering, &placement, tap.as_ref())?);
        }
        let loops = loops.0.into_iter();
        Ok(loops.map(|members| Self::of(members, opener.clone())).collect())
    }

    /// Opens devices whose addresses other processes may use at the same time, for one loop or several as
    /// [`open_shards`](Self::open_shards) does: each loop becomes a member of the broker's, which is started if none runs. Connect
    /// requests come to the first loop, by whichever address and for whichever service the loops listen.
    ///
    /// # Errors
    /// As [`open_shards`](Self::open_shards), when there is no broker and none can be started, and when it refuses.
    pub fn open_shared(
        configs: &[DeviceConfig],
        loops: usize,
        placement: Arc<dyn Placement>,
        how: &JoinConfig,
    ) -> Result<Vec<Self>, VerbsError> {
        open::check_apart(configs)?;
        let joining = (0..loops.max(1)).map(|_| Joining::join(how));
        let joining = joining.collect::<Result<Vec<_>, _>>()?;
        let taps = SharedTap::of(configs)?;
        let opener = Opener::of_members(configs, &taps, &joining, &placement);
        let mut all = Loops::new(joining.len());
        for (config, tap) in configs.iter().zip(&taps) {
            let sockets = joining
                .iter()
                .map(|joining| joining.sockets(config.addr).map_err(join_error));
            let sockets = sockets.collect::<Result<Vec<_>, _>>()?;
            all.add(Member::joined(config, &joining, sockets, &placement, tap.as_ref())?);
        }
        let opened = all.0.into_iter().zip(joining);
        Ok(opened
            .map(|(members, joining)| Self::of_member(members, joining, opener.clone()))
            .collect())
    }

    fn of(opened: Vec<Opened>, opener: Opener) -> Self {
        let (members, devices) = opened.into_iter().unzip();
        Self {
            fabric: Fabric::new(Members(members), FabricConfig::default(), devices),
            joined: None,
            opener,
        }
    }

    /// That of a loop that joins.
    fn of_member(opened: Vec<Opened>, joining: Joining, opener: Opener) -> Self {
        let mut this = Self::of(opened, opener);
        let endpoints = Arc::<Endpoints>::default();
        this.members().iter_mut().for_each(|member| member.enter(&endpoints));
        this.joined = Some(joining.joined(endpoints));
        this
    }

    /// Opens further addresses for this loop and the others that it was opened with.
    pub fn opener(&self) -> Opener {
        self.opener.clone()
    }

    /// The loop gets one more device, which has been [opened](Opener::open) for it; the next turn has its
    /// [descriptors](Self::descriptors) too. Listeners at all addresses that are there already are not at this one.
    pub fn attach(&mut self, new: NewDevice) -> DeviceIx {
        let (mut member, (limits, addrs)) = new.into_opened();
        if let Some(joined) = &self.joined {
            member.enter(joined.endpoints());
        }
        self.fabric.ports().0.push(member);
        self.fabric.add_device(limits, addrs)
    }

    fn members(&mut self) -> &mut [Member] {
        &mut self.fabric.ports().0
    }

    /// What a loop's state machines are given.
    pub fn provider(&mut self) -> &mut dyn Provider {
        &mut self.fabric
    }

    /// The same, to ask only.
    pub fn shared_provider(&self) -> &dyn Provider {
        &self.fabric
    }

    /// Path MTU at most of connections from an address that is a device's, or of which a device has all.
    pub fn mtu_of(&mut self, addr: IpAddr) -> Option<Mtu> {
        let found = self.members().iter().find(|m| m.addr == addr);
        found.map(|m| m.mtu)
    }

    /// Limits of a device.
    pub fn limits(&self, index: usize) -> Option<&DeviceLimits> {
        self.fabric.devices().get(index).map(|caps| &caps.limits)
    }

    /// Receives about `budget` packets of each device. True: more is waiting.
    pub fn receive(&mut self, now: Instant, budget: usize) -> bool {
        self.fabric.set_now(now);
        let mut more = false;
        for member in self.members() {
            more |= member.receive(now, budget);
        }
        if self.joined.as_ref().is_some_and(Joined::is_asked) {
            let report = self.fabric.ports().report();
            self.joined.iter().for_each(|joined| joined.tell(report.clone()));
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
        self.fabric.ports().0.iter().flat_map(Member::descriptors).collect()
    }

    /// What a device has counted.
    pub fn stats(&mut self, index: usize) -> Option<DeviceStats> {
        Some(self.members().get(index)?.driver.counters().into())
    }

    /// What each device has counted, with its address as it was given.
    pub fn all_stats(&mut self) -> Vec<(IpAddr, DeviceStats)> {
        let of = |member: &mut Member| (member.addr, member.driver.counters().into());
        self.members().iter_mut().map(of).collect()
    }

    /// How many objects there are.
    pub fn usage(&self) -> Usage {
        self.fabric.usage()
    }
}
