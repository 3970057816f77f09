//! Engines of a device: ports at one address, each with its own queue pairs, lock and thread.
//!
//! The first engine owns the connections, and all queue pairs other than RC and XRC initiators. It reaches the queue pairs of
//! other engines by messages, and they reach it so: no thread holds the locks of two engines.

use std::{
    net::SocketAddr,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
    },
};

use roce_bth::Qpn;
use roce_net::{
    Closed, DatapathCounters, Driver, DriverConfig, EventSink, LocalConfig, Waiter,
    links::{LinkChange, LinkWatch},
};
use roce_port::{
    CmEventKind, ConnId, Forwarded, FromShard, HandedOver, Numbers, Port, PortChange, QpCommand, Recipient, Recipients,
    RxMeta, ToShard, dest_qpn,
};
use roce_verbs::{
    AsyncEvent, Mtu, PathMtus, QpType,
    provider::{ConnParams, VerbsError},
};

use crate::{
    config::Services,
    error::io_error,
    open::{self, Parts},
    router::Router,
    shards::{Inbox, inboxes},
    stats::DeviceStats,
};

/// State shared by the engines of a device.
struct EngineGroup {
    /// Set when all engines are started.
    engines: OnceLock<Weak<Engines>>,
    /// Inbox of each engine. Empty if there is only one engine.
    inboxes: Arc<[Arc<Inbox>]>,
    numbers: Option<Numbers>,
    /// [`Engines::close`] is closing the engines one after the other.
    closing: AtomicBool,
}

impl EngineGroup {
    /// Returns the engine that has a queue pair number.
    fn engine_of(&self, qpn: Qpn) -> Option<usize> {
        self.numbers.as_ref()?.of_qpn(qpn)
    }

    fn engines(&self) -> Option<Arc<Engines>> {
        self.engines.get()?.upgrade()
    }
}

/// Event sink of an engine.
struct Sink {
    index: usize,
    mtu: Mtu,
    router: Arc<Router>,
    services: Option<Arc<dyn Services>>,
    group: Arc<EngineGroup>,
}

impl EventSink for Sink {
    fn cm_event(&self, event: CmEventKind) -> bool {
        self.router.cm_event(event)
    }

    fn async_event(&self, event: AsyncEvent) {
        self.router.async_event(event);
    }

    /// Stops all engines when one has failed, because the device can't work with only some of them.
    fn closed(&self) {
        self.router.closed();
        if self.group.closing.load(Relaxed) {
            return;
        }
        if let Some(engines) = self.group.engines() {
            engines.drivers.iter().for_each(Driver::stop);
        }
    }

    fn port_change(&self, change: PortChange) {
        if let Some(services) = &self.services {
            services.port_change(change);
        }
    }

    fn publish(&self, port: &Port, path: &DatapathCounters) {
        let Some(services) = &self.services else { return };
        let stats = DeviceStats::from((port.counters(), *path));
        let link_downed = if self.index == 0 {
            self.router.port.link_downed()
        } else {
            0
        };
        services.publish(&stats.snapshot(self.mtu, port.queue_pairs(), link_downed));
    }

    fn forward(&self, to: Recipient, meta: &RxMeta, bytes: &[u8]) -> Forwarded {
        match to {
            // The first engine has the GSI.
            Recipient::This | Recipient::Gsi => Forwarded::Back,
            Recipient::Shard(index) => {
                let inbox = self.group.inboxes.get(index);
                match inbox.is_some_and(|inbox| inbox.send(ToShard::Packet(HandedOver::new(meta, bytes, true)))) {
                    true => Forwarded::Shard,
                    false => Forwarded::Lost,
                }
            }
            Recipient::Process => {
                if let Some(services) = &self.services {
                    services.hand_over(meta, bytes);
                }
                Forwarded::Process
            }
        }
    }

    fn command(&self, command: QpCommand) {
        let index = self.group.engine_of(command.qp().qpn());
        if let Some(inbox) = index.and_then(|index| self.group.inboxes.get(index)) {
            inbox.push(ToShard::Command(command));
        }
    }

    fn report(&self, report: FromShard) {
        if let Some(first) = self.group.inboxes.first() {
            first.push(ToShard::Report(report));
        }
    }

    fn links(&self, changes: Vec<(String, LinkChange)>) -> Option<PathMtus> {
        let mtus = self.router.links(&changes)?;
        let engines = self.group.engines();
        for driver in engines.iter().flat_map(|engines| &engines.drivers[1..]) {
            // A closed engine has no connections.
            let _ = driver.with_quiet(|port, _| port.set_path_mtus(mtus.clone()));
        }
        Some(mtus)
    }
}

/// Engines of a device. The module documentation describes them.
pub(crate) struct Engines {
    drivers: Vec<Driver>,
    /// Number of queue pairs of each engine.
    loads: Vec<AtomicU32>,
    group: Arc<EngineGroup>,
}

impl Engines {
    /// Starts the engines.
    pub(crate) fn start(mut all: Vec<Parts>, router: &Arc<Router>) -> Result<Arc<Self>, VerbsError> {
        let group = Arc::new(EngineGroup {
            engines: OnceLock::new(),
            inboxes: inboxes(if all.len() > 1 { all.len() } else { 0 })?,
            numbers: open::numbers(&all.iter().map(|parts| &parts.config).collect::<Vec<_>>()),
            closing: AtomicBool::new(false),
        });
        all.iter_mut().skip(1).for_each(|parts| parts.port.leave_gsi());
        let loads = all.iter().map(|_| AtomicU32::new(0)).collect();
        let drivers = all.into_iter().enumerate();
        let drivers = drivers.map(|(index, one)| drive(index, one, router, &group));
        let engines = Arc::new(Self {
            drivers: drivers.collect::<Result<_, _>>()?,
            loads,
            group: group.clone(),
        });
        // This is the only call of `set`.
        let _ = group.engines.set(Arc::downgrade(&engines));
        Ok(engines)
    }

    /// Returns the engine that owns the connections.
    pub(crate) fn first(&self) -> &Driver {
        &self.drivers[0]
    }

    /// Returns the engine with an index.
    pub(crate) fn get(&self, index: usize) -> &Driver {
        &self.drivers[index]
    }

    pub(crate) fn all(&self) -> &[Driver] {
        &self.drivers
    }

    /// Iterates over the engines in a set. If it is empty, returns only the first engine.
    pub(crate) fn of(&self, set: &EngineSet) -> impl Iterator<Item = &Driver> {
        let set = set.0.load(Relaxed).max(1);
        self.drivers
            .iter()
            .enumerate()
            .filter(move |(index, _)| set >> index & 1 == 1)
            .map(|(_, driver)| driver)
    }

    /// Chooses the engine of a new queue pair that completes into these queues.
    ///
    /// All queue pairs of a polled queue are on one engine, because a thread that polls it drives every engine in its
    /// set. Others go to the engine with the fewest queue pairs.
    pub(crate) fn place(&self, qp_type: QpType, cqs: &[&EngineSet], polled: bool) -> usize {
        if self.drivers.len() == 1 || !matches!(qp_type, QpType::Rc | QpType::XrcIni) {
            return 0;
        }
        let known = cqs.iter().map(|set| set.0.load(Relaxed)).find(|set| *set != 0);
        match known.filter(|_| polled) {
            Some(set) => set.trailing_zeros() as usize,
            None => {
                let least = self.loads.iter().enumerate().min_by_key(|(_, load)| load.load(Relaxed));
                least.map_or(0, |(index, _)| index)
            }
        }
    }

    /// Starts to connect a queue pair of an engine ([`Port::connect_qp`]). Runs `started` under the lock of the first engine, before any event.
    ///
    /// [`Port::connect_qp`]: roce_port::Port::connect_qp
    pub(crate) fn connect<R>(
        &self,
        (local, remote): (SocketAddr, SocketAddr),
        (engine, qpn): (usize, Qpn),
        params: ConnParams,
        started: impl FnOnce(ConnId) -> R,
    ) -> Result<R, VerbsError> {
        let engine = self.get(engine);
        let offer = engine.with(|port, now| port.offer_qp(now, qpn, &params))??;
        let connected = self.first().with(|port, now| {
            let conn = port.connect_offered(now, local, remote, &offer, params)?;
            Ok(started(conn))
        });
        let connected = connected.map_err(VerbsError::from).flatten();
        if connected.is_err() {
            // A closed engine has no queue pairs.
            let _ = engine.with(|port, now| port.handle_command(now, QpCommand::Release(offer.qp())));
        }
        connected
    }

    /// Accepts a connect request with a queue pair of an engine ([`Port::accept_qp`]).
    ///
    /// [`Port::accept_qp`]: roce_port::Port::accept_qp
    pub(crate) fn accept(
        &self,
        conn: ConnId,
        (engine, qpn): (usize, Qpn),
        params: ConnParams,
    ) -> Result<(), VerbsError> {
        let engine = self.get(engine);
        let path = self.first().with_quiet(|port, _| port.accept_path(conn, &params))??;
        let offer = engine.with(|port, now| port.offer_accepted(now, conn, qpn, &path, &params))??;
        let accepted = self
            .first()
            .with(|port, now| port.accept_offered(now, conn, &offer, params));
        let accepted = accepted.map_err(VerbsError::from).flatten();
        if accepted.is_err() {
            // A closed engine has no queue pairs.
            let _ = engine.with(|port, now| port.withdraw(now, &offer));
        }
        accepted
    }

    /// Moves the queue pair of a connection that is about to end to error, so that its last acknowledgement precedes the DREQ. The first
    /// engine does so itself for its own.
    pub(crate) fn fail_qp_of(&self, conn: ConnId) {
        if let Ok(Some(qp)) = self.first().with_quiet(|port, _| port.qp_of(conn))
            && let Some(engine) = self.beyond_first(qp.qpn())
        {
            let fail = QpCommand::Fail { qp, conn };
            // A closed engine has no queue pairs.
            let _ = engine.with(|port, now| port.handle_command(now, fail));
        }
    }

    /// Fixes the UDP source port of a queue pair that a REQ or REP is going to name. `None`: the first engine does so for its own.
    pub(crate) fn promise_source(&self, qpn: Qpn) -> Option<u16> {
        let promised = self.beyond_first(qpn)?.with_quiet(|port, _| port.promise_source(qpn));
        promised.ok()?
    }

    /// Returns the engine of a queue pair, unless that is the first.
    fn beyond_first(&self, qpn: Qpn) -> Option<&Driver> {
        let index = self.group.engine_of(qpn).filter(|index| *index > 0)?;
        self.drivers.get(index)
    }

    /// Applies the terms of a connection to its queue pair, which the program moves, if that is another engine's than the first.
    pub(crate) fn agree(&self, conn: ConnId, qpn: Option<Qpn>) {
        let agreement = self.first().with_quiet(|port, _| port.cm_agreement(conn, qpn));
        // A closed engine has no queue pairs.
        if let Ok(Some((qpn, peer))) = agreement
            && let Some(engine) = self.beyond_first(qpn)
        {
            let _ = engine.with_quiet(|port, _| port.agree(qpn, &peer));
        }
    }

    /// Counts a queue pair of an engine that completes into these queues.
    pub(crate) fn add_queue_pair(&self, index: usize, cqs: &[&EngineSet]) {
        self.loads[index].fetch_add(1, Relaxed);
        cqs.iter().for_each(|set| set.insert(index));
    }

    /// Removes a queue pair of an engine from its count.
    pub(crate) fn remove_queue_pair(&self, index: usize) {
        self.loads[index].fetch_sub(1, Relaxed);
    }

    /// Returns the number of queue pairs of all engines.
    pub(crate) fn queue_pairs(&self) -> u32 {
        self.loads.iter().map(|load| load.load(Relaxed)).sum()
    }

    /// Returns whether this process is a fork of the one that opened the device.
    pub(crate) fn is_inherited(&self) -> bool {
        self.first().is_inherited()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.drivers.iter().any(Driver::is_closed)
    }

    /// Makes progress on all engines in the calling thread.
    pub(crate) fn progress(&self) {
        self.drivers.iter().for_each(Driver::poll);
    }

    /// Hands progress back to the background threads, because the program stops polling.
    pub(crate) fn stop_polling(&self) {
        self.drivers.iter().for_each(Driver::stop_polling);
    }

    /// Starts waiting for completions in the calling thread. Returns a waiter for each engine.
    pub(crate) fn begin_wait(&self) -> Vec<Waiter<'_>> {
        self.drivers.iter().map(Driver::begin_wait).collect()
    }

    /// Waits until no thread uses memory that was deregistered before the call ([`Driver::pass_lock`]).
    pub(crate) fn pass_locks(&self) {
        self.drivers.iter().for_each(Driver::pass_lock);
    }

    /// Processes a datagram at the engine with its destination queue pair.
    pub(crate) fn inject(&self, datagram: &[u8], meta: &RxMeta) -> Result<(), Closed> {
        let index = dest_qpn(datagram)
            .and_then(|qpn| self.group.engine_of(qpn))
            .unwrap_or(0);
        self.drivers[index].inject(datagram, meta)
    }

    /// Closes all engines. Each sends its pending packets first.
    pub(crate) fn close(&self) {
        self.group.closing.store(true, Relaxed);
        self.drivers.iter().for_each(Driver::close);
    }
}

/// Starts an engine.
fn drive(index: usize, parts: Parts, router: &Arc<Router>, group: &Arc<EngineGroup>) -> Result<Driver, VerbsError> {
    let config = &parts.config;
    let watch = || {
        LinkWatch::new()
            .map_err(|e| tracing::info!("can't watch interfaces: changes of MTU and carrier are not noticed: {e}"))
            .ok()
    };
    let sink = Sink {
        index,
        mtu: parts.mtu,
        router: router.clone(),
        services: config.services.clone(),
        group: group.clone(),
    };
    let numbers = group.numbers.clone();
    let driver = DriverConfig {
        local: LocalConfig {
            recipients: numbers.map(|numbers| Recipients::new(numbers, index, None)),
            ..parts.local
        },
        links: (config.background && index == 0).then(watch).flatten(),
        name: match index {
            0 => format!("roce {}", config.addr),
            n => format!("roce {} {n}", config.addr),
        },
        background: config.background,
        spin: config.spin,
        inbox: group.inboxes.get(index).cloned(),
        publishes: config.services.is_some(),
    };
    Driver::new(parts.port, parts.path, Arc::new(sink), driver).map_err(io_error("starting the device's thread"))
}

/// Set of engines whose queue pairs complete into a queue: bit *i* stands for engine *i*.
#[derive(Debug, Default)]
pub(crate) struct EngineSet(AtomicU64);

impl EngineSet {
    pub(crate) fn insert(&self, index: usize) {
        self.0.fetch_or(1 << index, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, SocketAddr};

    use parking_lot::Mutex;
    use roce_port::QpnSlot;

    use super::*;
    use crate::{queue::EventQueue, view::PortView};

    /// Records packets handed over to other processes.
    #[derive(Debug, Default)]
    struct Broker(Mutex<Vec<Vec<u8>>>);

    impl Services for Broker {
        fn claim(&self, _: u64, _: Option<IpAddr>) -> Result<(), VerbsError> {
            Ok(())
        }

        fn release(&self, _: u64, _: Option<IpAddr>) {}

        fn hand_over(&self, _: &RxMeta, bytes: &[u8]) {
            self.0.lock().push(bytes.to_vec());
        }
    }

    fn packet(qpn: u32) -> Vec<u8> {
        let [_, a, b, c] = qpn.to_be_bytes();
        vec![0x64, 0, 0xff, 0xff, 0, a, b, c, 0, 0, 0, 0]
    }

    fn received(group: &EngineGroup, index: usize) -> Vec<Vec<u8>> {
        let messages = group.inboxes[index].take().into_iter();
        let bytes = messages.map(|message| match message {
            ToShard::Packet(packet) => packet.bytes,
            other => panic!("expected a packet, found {other:?}"),
        });
        bytes.collect()
    }

    #[test]
    fn stray_packets_go_to_the_engine_or_process_with_their_queue_pair_number() {
        let slots = [3, 9].map(|slot| QpnSlot { bits: 7, slot });
        let group = Arc::new(EngineGroup {
            engines: OnceLock::new(),
            inboxes: slots.iter().map(|_| Arc::new(Inbox::new().unwrap())).collect(),
            numbers: Some(Numbers::Places(slots.into())),
            closing: AtomicBool::new(false),
        });
        let broker = Arc::new(Broker::default());
        let addr = IpAddr::from([127, 0, 0, 1]);
        let sink = Sink {
            index: 1,
            mtu: Mtu::B1024,
            router: Arc::new(Router::new(EventQueue::new().unwrap(), PortView::new(addr, None))),
            services: Some(broker.clone()),
            group: group.clone(),
        };
        let meta = RxMeta::new(addr, SocketAddr::new(addr, 4791));
        let recipients = Recipients::new(group.numbers.clone().unwrap(), 1, None);
        let [of_first, of_others] = [slots[0].qpns().last, slots[0].qpns().last + 1].map(packet);
        for (bytes, forwarded) in [(&of_first, Forwarded::Shard), (&of_others, Forwarded::Process)] {
            let to = recipients.of(addr, bytes);
            assert_eq!(sink.forward(to, &meta, bytes), forwarded);
        }
        assert_eq!(received(&group, 0), [of_first]);
        assert!(received(&group, 1).is_empty());
        assert_eq!(*broker.0.lock(), [of_others]);
        sink.report(FromShard::FirstPacket(ConnId(7)));
        let messages = group.inboxes[0].take();
        assert!(matches!(
            messages.front(),
            Some(ToShard::Report(FromShard::FirstPacket(ConnId(7))))
        ));
    }
}
