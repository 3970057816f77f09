//! The engines of a device: ports with queue pairs of their own at one address, each with a lock and a thread. The first one has the
//! connections, and all queue pairs that are not reliable connected ones.
//!
//! **Lock order.** Whoever has the lock of the first engine may wait for that of another, when a connection's queue pair is there
//! ([`Siblings`]); the other way there are only messages.

use std::sync::{
    Arc, OnceLock, Weak,
    atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
};

use roce_bth::Qpn;
use roce_net::{
    Closed, Driver, DriverConfig, EventSink, Inbox, Message, Own, Waiter,
    links::{LinkChange, LinkWatch},
};
use roce_port::{ConnChange, ConnId, Port, PortCmEvent, QpnSlot, RxMeta, Siblings, Steering};
use roce_verbs::{AsyncEvent, PathMtus, QpType, provider::VerbsError};

use crate::{
    cm::Router,
    device::{DeviceConfig, Services, io_error},
    open::Parts,
    shards::{Numbers, qpn_of},
};

/// What an engine is made of: the device's configuration, with what is this engine's own in it, and its port.
pub(crate) type EngineParts = (DeviceConfig, Parts);

/// What engines know of each other.
struct Between {
    /// Once they are there, and as long as they are.
    engines: OnceLock<Weak<Engines>>,
    /// Of all of them; none if there is one.
    inboxes: Box<[Arc<Inbox<Message>>]>,
    numbers: Numbers,
    /// They are being closed, one after the other.
    closing: AtomicBool,
}

impl Between {
    fn engines(&self) -> Option<Arc<Engines>> {
        self.engines.get()?.upgrade()
    }

    /// The inbox of the engine that has a queue pair number, if it is not this one.
    fn inbox_of(&self, qpn: Qpn, this: usize) -> Option<&Inbox<Message>> {
        let index = self.numbers.of_qpn(qpn).filter(|index| *index != this)?;
        self.inboxes.get(index).map(|inbox| &**inbox)
    }
}

impl Siblings for Between {
    fn call(&self, qpn: Qpn, call: &mut dyn FnMut(&mut Port)) {
        let others = self.numbers.of_qpn(qpn).filter(|index| *index > 0);
        if let (Some(index), Some(engines)) = (others, self.engines()) {
            // Closed: nothing is there any more.
            let _ = engines.drivers[index].with(|port, _| call(port));
        }
    }
}

/// Hears what one of the engines has to tell.
struct Sink {
    index: usize,
    router: Arc<Router>,
    services: Option<Arc<dyn Services>>,
    between: Arc<Between>,
}

impl EventSink for Sink {
    fn cm_event(&self, event: PortCmEvent) -> bool {
        self.router.cm_event(event)
    }

    fn async_event(&self, event: AsyncEvent) {
        self.router.async_event(event);
    }

    /// One that has failed takes the others with it: half a device would be of no use to anybody.
    fn closed(&self) {
        self.router.closed();
        if self.between.closing.load(Relaxed) {
            return;
        }
        if let Some(engines) = self.between.engines() {
            engines.drivers.iter().for_each(Driver::stop);
        }
    }

    fn conn_change(&self, change: ConnChange) {
        if let Some(services) = &self.services {
            services.conn_change(change);
        }
    }

    fn stray(&self, meta: &RxMeta, bytes: &[u8]) {
        match (self.between.inbox_of(qpn_of(bytes), self.index), &self.services) {
            (Some(inbox), _) => inbox.send_or_lose(Message::Packet(*meta, bytes.to_vec())),
            (None, Some(services)) => services.hand_over(meta, bytes),
            (None, None) => {}
        }
    }

    fn first_packet(&self, conn: ConnId) {
        if let Some(first) = self.between.inboxes.first() {
            // If there is no room the RTU tells it.
            first.send(Message::FirstPacket(conn));
        }
    }

    fn links(&self, changes: Vec<(String, LinkChange)>) -> Option<PathMtus> {
        let mtus = self.router.links(&changes)?;
        let engines = self.between.engines();
        for driver in engines.iter().flat_map(|engines| &engines.drivers[1..]) {
            // Closed: nothing is there any more.
            let _ = driver.with_quiet(|port, _| port.set_path_mtus(mtus.clone()));
        }
        Some(mtus)
    }
}

/// See the module.
pub(crate) struct Engines {
    drivers: Vec<Driver>,
    /// Queue pairs of each.
    loads: Vec<AtomicU32>,
    /// Of those that are members of a broker's.
    services: Vec<Option<Arc<dyn Services>>>,
    between: Arc<Between>,
}

impl Engines {
    /// Sets them in motion.
    pub(crate) fn start(mut all: Vec<EngineParts>, router: &Arc<Router>) -> Result<Arc<Self>, VerbsError> {
        let several = all.len() > 1;
        let inboxes = (0..all.len()).filter(|_| several).map(|_| Inbox::new().map(Arc::new));
        let inboxes = inboxes.collect::<Result<_, _>>();
        let between = Arc::new(Between {
            engines: OnceLock::new(),
            inboxes: inboxes.map_err(io_error("making an event descriptor"))?,
            numbers: numbers(&all),
            closing: AtomicBool::new(false),
        });
        if let [first, others @ ..] = &mut *all
            && several
        {
            first.1.port.set_siblings(between.clone());
            others
                .iter_mut()
                .for_each(|(_, parts)| parts.port.follow(&first.1.port));
        }
        let services = all.iter().map(|(config, _)| config.services.clone()).collect();
        let loads = all.iter().map(|_| AtomicU32::new(0)).collect();
        let drivers = all.into_iter().enumerate();
        let drivers = drivers.map(|(index, one)| drive(index, one, router, &between));
        let engines = Arc::new(Self {
            drivers: drivers.collect::<Result<_, _>>()?,
            loads,
            services,
            between: between.clone(),
        });
        // It was empty.
        let _ = between.engines.set(Arc::downgrade(&engines));
        Ok(engines)
    }

    /// The one that has the connections.
    pub(crate) fn first(&self) -> &Driver {
        &self.drivers[0]
    }

    /// One of them.
    pub(crate) fn get(&self, index: usize) -> &Driver {
        &self.drivers[index]
    }

    pub(crate) fn all(&self) -> &[Driver] {
        &self.drivers
    }

    /// Whom each tells what other processes must know.
    pub(crate) fn services(&self) -> impl Iterator<Item = (usize, &Arc<dyn Services>)> {
        let all = self.services.iter().enumerate();
        all.filter_map(|(index, services)| Some((index, services.as_ref()?)))
    }

    /// Those that have put completions into a queue, or may.
    pub(crate) fn of(&self, served: &Served) -> impl Iterator<Item = &Driver> {
        let set = served.0.load(Relaxed).max(1);
        self.drivers
            .iter()
            .enumerate()
            .filter(move |(index, _)| set >> index & 1 == 1)
            .map(|(_, driver)| driver)
    }

    /// The engine of a new queue pair. Threads that poll a queue advance the engines that it is of, so that its queue pairs are all in
    /// one; those of queues that are waited for are spread.
    pub(crate) fn place(&self, qp_type: QpType, cqs: &[&Served], polled: bool) -> usize {
        if self.drivers.len() == 1 || !matches!(qp_type, QpType::Rc | QpType::XrcIni) {
            return 0;
        }
        let known = cqs.iter().map(|served| served.0.load(Relaxed)).find(|set| *set != 0);
        match known.filter(|_| polled) {
            Some(set) => set.trailing_zeros() as usize,
            None => {
                let least = self.loads.iter().enumerate().min_by_key(|(_, load)| load.load(Relaxed));
                least.map_or(0, |(index, _)| index)
            }
        }
    }

    /// It has one more queue pair, which completes into these.
    pub(crate) fn joined(&self, index: usize, cqs: &[&Served]) {
        self.loads[index].fetch_add(1, Relaxed);
        cqs.iter().for_each(|served| served.by(index));
    }

    /// It has one less.
    pub(crate) fn left(&self, index: usize) {
        self.loads[index].fetch_sub(1, Relaxed);
    }

    /// Queue pairs of all.
    pub(crate) fn queue_pairs(&self) -> u32 {
        self.loads.iter().map(|load| load.load(Relaxed)).sum()
    }

    /// Whether this process was forked from the one that has them.
    pub(crate) fn is_inherited(&self) -> bool {
        self.first().is_inherited()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.drivers.iter().any(Driver::is_closed)
    }

    /// The calling thread advances them.
    pub(crate) fn progress(&self) {
        self.drivers.iter().for_each(Driver::poll);
    }

    /// The application goes to sleep: packets wake the background threads again.
    pub(crate) fn stop_polling(&self) {
        self.drivers.iter().for_each(Driver::stop_polling);
    }

    /// The calling thread is about to sleep for completions.
    pub(crate) fn begin_wait(&self) -> Vec<Waiter<'_>> {
        self.drivers.iter().map(Driver::begin_wait).collect()
    }

    /// Memory that was taken back before is used by nobody after it ([`Driver::pass_lock`]).
    pub(crate) fn pass_locks(&self) {
        self.drivers.iter().for_each(Driver::pass_lock);
    }

    /// Brings a packet to the engine that it is for.
    pub(crate) fn inject(&self, datagram: &[u8], meta: &RxMeta) -> Result<(), Closed> {
        let index = self.between.numbers.of_qpn(qpn_of(datagram)).unwrap_or(0);
        self.drivers[index].inject(datagram, meta)
    }

    /// Stops all of them, each when it has sent what it still had to send.
    pub(crate) fn close(&self) {
        self.between.closing.store(true, Relaxed);
        self.drivers.iter().for_each(Driver::close);
    }
}

/// Whose queue pair numbers are whose.
fn numbers(all: &[EngineParts]) -> Numbers {
    match Steering::new(all.len()).filter(|_| all[0].0.services.is_none()) {
        Some(steering) => Numbers::All(steering),
        None => Numbers::Places(all.iter().filter_map(|(config, _)| config.qpn_slot).collect()),
    }
}

fn drive(
    index: usize,
    (config, parts): EngineParts,
    router: &Arc<Router>,
    between: &Arc<Between>,
) -> Result<Driver, VerbsError> {
    let links = match config.background && index == 0 {
        true => LinkWatch::new()
            .map_err(|e| tracing::info!("changes of interfaces are not seen: {e}"))
            .ok(),
        false => None,
    };
    let sink = Arc::new(Sink {
        index,
        router: router.clone(),
        services: config.services.clone(),
        between: between.clone(),
    });
    let own = match &between.numbers {
        Numbers::All(steering) => Some(Own::Engine(*steering, index)),
        Numbers::Places(_) => config.qpn_slot.map(QpnSlot::qpns).map(Own::Process),
    };
    let name = match index {
        0 => format!("roce {}", config.addr),
        n => format!("roce {} {n}", config.addr),
    };
    let driver = DriverConfig {
        own,
        links,
        name,
        background: config.background,
        spin: config.spin,
        tap: parts.tap,
        inbox: between.inboxes.get(index).cloned(),
        ..DriverConfig::default()
    };
    Driver::new(parts.port, Box::new(parts.path), sink, driver).map_err(io_error("starting the device's thread"))
}

/// The engines whose queue pairs complete into a queue: a bit for each.
#[derive(Debug, Default)]
pub(crate) struct Served(AtomicU64);

impl Served {
    /// This one's do.
    pub(crate) fn by(&self, index: usize) {
        self.0.fetch_or(1 << index, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, SocketAddr};

    use parking_lot::Mutex;

    use super::*;
    use crate::{port::PortView, queue::EventQueue};

    /// Another process, which gets what is handed over.
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

    fn taken(between: &Between, index: usize) -> Vec<Vec<u8>> {
        let messages = between.inboxes[index].take().into_iter();
        let bytes = messages.map(|message| match message {
            Message::Packet(_, bytes) => bytes,
            other => panic!("no packet: {other:?}"),
        });
        bytes.collect()
    }

    #[test]
    fn packets_that_came_astray_go_to_the_engine_or_the_process_that_has_their_number() {
        let slots = [3, 9].map(|slot| QpnSlot { bits: 7, slot });
        let between = Arc::new(Between {
            engines: OnceLock::new(),
            inboxes: slots.iter().map(|_| Arc::new(Inbox::new().unwrap())).collect(),
            numbers: Numbers::Places(slots.into()),
            closing: AtomicBool::new(false),
        });
        let broker = Arc::new(Broker::default());
        let addr = IpAddr::from([127, 0, 0, 1]);
        let sink = Sink {
            index: 1,
            router: Arc::new(Router::new(EventQueue::new().unwrap(), PortView::new(addr, None))),
            services: Some(broker.clone()),
            between: between.clone(),
        };
        let meta = RxMeta::new(addr, SocketAddr::new(addr, 4791));
        let [of_first, of_others] = [slots[0].qpns().last, slots[0].qpns().last + 1].map(packet);
        for bytes in [&of_first, &of_others, &vec![0; 3]] {
            sink.stray(&meta, bytes);
        }
        assert_eq!(taken(&between, 0), [of_first]);
        assert!(taken(&between, 1).is_empty());
        assert_eq!(*broker.0.lock(), [of_others, vec![0; 3]]);
        sink.first_packet(ConnId(7));
        let told = between.inboxes[0].take();
        assert!(matches!(told.front(), Some(Message::FirstPacket(ConnId(7)))));
    }
}
