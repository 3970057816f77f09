//! A server on several loops: who gets in, by limits that hold for all loops together, and which loop is which session's home.
//!
//! Home decides about a session, whose connections are spread over the loops from there on. The first loop, to which all connect
//! requests come, asks [`Gate`] whose each of them is; the RTRS server of a session's home asks its door, which leads to the same
//! gate, whether to let it in.

use core::{net::IpAddr, time::Duration};
use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};

use parking_lot::Mutex;
use rnbd::server::Places;
use roce::{Arrival, Placement};
use roce_verbs::Instant;
use rtrs::{
    admission::{Admission, Admitted, ConnectRequest, Opened, PathKey, Refusal},
    door::Doorkeeper,
    proto::{ConnReq, Uuid},
    server::{ServerConfig, Share},
};

/// Sessions that are expected at their homes: their first request is on its way there.
const MAX_EXPECTED: usize = 1024;
/// Time within which a connection is expected.
const EXPECTED: Duration = Duration::from_secs(30);

/// How a loop is told that one of its half-open paths has given way to another loop's.
type Tell = Box<dyn Fn(usize, PathKey) + Send + Sync>;

/// See the module.
pub struct Gate {
    hall: Mutex<Hall>,
    loops: usize,
    /// Devices that all sessions have open.
    open: Arc<AtomicUsize>,
    tell: OnceLock<Tell>,
}

/// A session that a path is of, half-open ones included.
struct Owner {
    index: usize,
    paths: usize,
}

/// Below this lock none is taken.
struct Hall {
    admission: Admission,
    /// Owner of each path of the admission.
    paths: BTreeMap<PathKey, (usize, Uuid)>,
    sessions: BTreeMap<Uuid, Owner>,
    expected: BTreeMap<Uuid, usize>,
    order: VecDeque<(Instant, Uuid)>,
    /// Sessions whose home each loop is, or is to be.
    loads: Vec<usize>,
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate")
            .field("admission", &self.hall.lock().admission)
            .finish_non_exhaustive()
    }
}

impl Gate {
    /// Creates the gate of a server with so many loops.
    pub fn new(config: &ServerConfig, loops: usize) -> Arc<Self> {
        let hall = Hall {
            admission: Admission::new(config.limits(), config.allow.clone()),
            paths: BTreeMap::new(),
            sessions: BTreeMap::new(),
            expected: BTreeMap::new(),
            order: VecDeque::new(),
            loads: vec![0; loops.max(1)],
        };
        Arc::new(Self {
            hall: Mutex::new(hall),
            loops: loops.max(1),
            open: Arc::default(),
            tell: OnceLock::new(),
        })
    }

    /// How many loops it is for.
    pub fn loops(&self) -> usize {
        self.loops
    }

    /// Sessions whose home each loop is, half-open and expected ones included.
    pub fn loads(&self) -> Vec<usize> {
        self.hall.lock().loads.clone()
    }

    /// `tell` is called under no lock.
    pub(crate) fn tell_by(&self, tell: impl Fn(usize, PathKey) + Send + Sync + 'static) {
        let _ = self.tell.set(Box::new(tell));
    }

    pub(crate) fn door(self: &Arc<Self>, index: usize) -> Door {
        Door {
            handshake: self.hall.lock().admission.limits().handshake,
            gate: self.clone(),
            index,
            deadlines: BTreeMap::new(),
        }
    }

    /// The loop of a session's connection.
    fn place_at(&self, now: Instant, session: Uuid, cid: u16) -> usize {
        let home = self.hall.lock().home(now, session, cid == 0);
        Share::new(home, self.loops).map_or(home, |share| share.of_connection(cid))
    }

    pub(crate) fn places(&self, most: usize) -> SharedPlaces {
        SharedPlaces {
            taken: self.open.clone(),
            most,
        }
    }
}

impl Placement for Gate {
    fn place(&self, arrival: &Arrival<'_>) -> usize {
        match ConnReq::parse(arrival.private_data) {
            Ok(req) => self.place_at(roce::now(), req.session_uuid, req.cid.get()),
            // It is refused, wherever that is.
            Err(_) => 0,
        }
    }
}

impl Hall {
    /// The home of a session, or else the loop that is the fewest's.
    fn home(&mut self, now: Instant, session: Uuid, may_be_new: bool) -> usize {
        let known = self.sessions.get(&session).map(|owner| owner.index);
        if let Some(index) = known.or_else(|| self.expected.get(&session).copied()) {
            return index;
        }
        if may_be_new {
            self.forget(now);
        }
        let fewest = self.loads.iter().enumerate().min_by_key(|(_, load)| **load);
        let index = fewest.map_or(0, |(index, _)| index);
        if may_be_new {
            self.expected.insert(session, index);
            self.order.push_back((now, session));
            self.loads[index] += 1;
        }
        index
    }

    /// Makes room for one more that is expected.
    fn forget(&mut self, now: Instant) {
        while let Some((since, session)) = self.order.front().copied() {
            if self.order.len() < MAX_EXPECTED && now.saturating_since(since) < EXPECTED {
                return;
            }
            self.order.pop_front();
            self.arrived(session);
        }
    }

    /// A session is not expected any more.
    fn arrived(&mut self, session: Uuid) {
        if let Some(index) = self.expected.remove(&session) {
            self.loads[index] -= 1;
        }
    }

    fn request(&mut self, now: Instant, index: usize, request: &ConnectRequest) -> Result<Admitted, Refusal> {
        self.arrived(request.session);
        // So many others came meanwhile that it was forgotten whose the session is.
        if self
            .sessions
            .get(&request.session)
            .is_some_and(|owner| owner.index != index)
        {
            return Err(Refusal::Unexpected);
        }
        let admitted = self.admission.request(now, request)?;
        if let Admitted::HalfOpen { path, .. } = admitted {
            self.paths.insert(path, (index, request.session));
            let loads = &mut self.loads;
            let owner = self.sessions.entry(request.session).or_insert_with(|| {
                loads[index] += 1;
                Owner { index, paths: 0 }
            });
            owner.paths += 1;
        }
        Ok(admitted)
    }

    /// Returns the owner of a path that the admission does not know any more.
    fn settle(&mut self, path: PathKey) -> Option<usize> {
        if self.admission.has_path(path) {
            return None;
        }
        let (index, session) = self.paths.remove(&path)?;
        if let Some(owner) = self.sessions.get_mut(&session) {
            owner.paths -= 1;
            if owner.paths == 0 {
                self.sessions.remove(&session);
                self.loads[index] -= 1;
            }
        }
        Some(index)
    }
}

/// The way of one loop's server to the gate.
pub(crate) struct Door {
    gate: Arc<Gate>,
    index: usize,
    handshake: Duration,
    /// Deadlines of the loop's paths whose handshake has not ended. Later paths have higher keys, and later deadlines.
    deadlines: BTreeMap<PathKey, Instant>,
}

impl Door {
    /// Does something to a path after which the admission may have forgotten it.
    fn change<R>(&mut self, path: PathKey, change: impl FnOnce(&mut Admission) -> R) -> R {
        let mut hall = self.gate.hall.lock();
        let changed = change(&mut hall.admission);
        if hall.settle(path).is_some() {
            self.deadlines.remove(&path);
        }
        changed
    }
}

impl Doorkeeper for Door {
    fn request(&mut self, now: Instant, request: &ConnectRequest) -> Result<Admitted, Refusal> {
        let mut hall = self.gate.hall.lock();
        let admitted = hall.request(now, self.index, request)?;
        let Admitted::HalfOpen { path, gives_way } = admitted else {
            return Ok(admitted);
        };
        self.deadlines.insert(path, now + self.handshake);
        let Some((old, whose)) = gives_way.and_then(|old| Some((old, hall.settle(old)?))) else {
            return Ok(admitted);
        };
        drop(hall);
        if whose == self.index {
            self.deadlines.remove(&old);
            return Ok(admitted);
        }
        if let Some(tell) = self.gate.tell.get() {
            tell(whose, old);
        }
        Ok(Admitted::HalfOpen { path, gives_way: None })
    }

    fn established(&mut self, path: PathKey) -> Option<Result<Opened, Refusal>> {
        self.change(path, |admission| admission.established(path))
    }

    fn name(&mut self, path: PathKey, name: &str) -> Result<(), Refusal> {
        let mut hall = self.gate.hall.lock();
        if hall.admission.has_name(path, name) {
            return Err(Refusal::NameTaken);
        }
        hall.admission.name(path, name)
    }

    fn up(&mut self, path: PathKey) {
        self.deadlines.remove(&path);
        self.gate.hall.lock().admission.up(path);
    }

    fn closing(&mut self, path: PathKey) {
        self.deadlines.remove(&path);
        self.change(path, |admission| admission.closing(path));
    }

    fn ended(&mut self, path: PathKey) {
        self.deadlines.remove(&path);
        self.change(path, |admission| admission.ended(path));
    }

    fn access_error(&mut self, now: Instant, peer: IpAddr) {
        self.gate.hall.lock().admission.access_error(now, peer);
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.values().next().copied()
    }

    fn expired(&mut self, now: Instant) -> Option<PathKey> {
        while let Some((path, _)) = self.deadlines.first_key_value().filter(|(_, at)| **at <= now) {
            let path = *path;
            self.deadlines.remove(&path);
            if self.change(path, |admission| admission.expire(now, path)) {
                return Some(path);
            }
        }
        None
    }
}

/// The devices that all loops' sessions may have open.
#[derive(Debug)]
pub(crate) struct SharedPlaces {
    taken: Arc<AtomicUsize>,
    most: usize,
}

impl Places for SharedPlaces {
    fn take(&mut self) -> bool {
        let one_more = |n| (n < self.most).then_some(n + 1);
        self.taken.fetch_update(SeqCst, SeqCst, one_more).is_ok()
    }

    fn give_back(&mut self) {
        self.taken.fetch_sub(1, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    fn uuid(n: u32) -> Uuid {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&n.to_le_bytes());
        Uuid(bytes)
    }

    fn request(session: u32, path: u32, peer: u8, cid: u16) -> ConnectRequest {
        ConnectRequest {
            peer: [10, 0, 0, peer].into(),
            local: [10, 0, 1, path as u8].into(),
            session: uuid(session),
            path: uuid(path),
            cid,
            connections: 3,
            first_conn: true,
            recon_cnt: 1,
        }
    }

    fn at(secs: u64) -> Instant {
        Instant::ZERO + Duration::from_secs(secs)
    }

    fn place(gate: &Gate, session: u32) -> usize {
        gate.place_at(at(1), uuid(session), 0)
    }

    fn enter(door: &mut Door, request: &ConnectRequest) -> PathKey {
        match door.request(at(1), request) {
            Ok(Admitted::HalfOpen { path, .. }) => path,
            other => panic!("{other:?}"),
        }
    }

    fn gate(change: impl FnOnce(&mut ServerConfig), loops: usize) -> (Arc<Gate>, Vec<Door>) {
        let mut config = ServerConfig::default();
        change(&mut config);
        let gate = Gate::new(&config, loops);
        let doors = (0..loops).map(|index| gate.door(index)).collect();
        (gate, doors)
    }

    #[test]
    fn sessions_are_spread_and_stay_where_they_are() {
        let (gate, mut doors) = gate(|_| {}, 3);
        let placed: Vec<usize> = (0..6).map(|n| place(&gate, n)).collect();
        assert_eq!(placed, [0, 1, 2, 0, 1, 2]);
        assert_eq!(place(&gate, 4), 1, "it comes again");
        let first = enter(&mut doors[1], &request(1, 1, 1, 0));
        assert!(doors[1].established(first).unwrap().unwrap().new_session);
        // Another path of it, when the loop has more than others.
        assert_eq!((place(&gate, 1), place(&gate, 1)), (1, 1));
        let second = enter(&mut doors[1], &request(1, 2, 1, 0));
        assert!(!doors[1].established(second).unwrap().unwrap().new_session);
        doors[1].ended(first);
        assert_eq!(place(&gate, 1), 1);
        assert_eq!(gate.loads(), [2; 3]);
        doors[1].ended(second);
        assert_eq!(gate.loads(), [2, 1, 2]);
        assert_eq!(place(&gate, 100), 1);
    }

    #[test]
    fn connections_of_a_session_are_spread_from_its_home_on() {
        let (gate, mut doors) = gate(|_| {}, 3);
        assert_eq!((place(&gate, 0), place(&gate, 1)), (0, 1));
        enter(&mut doors[1], &request(1, 1, 1, 0));
        let spread = |session| [0, 1, 2, 3, 4].map(|cid| gate.place_at(at(1), uuid(session), cid));
        assert_eq!((spread(0), spread(1)), ([0, 0, 1, 2, 0], [1, 1, 2, 0, 1]));
        assert_eq!(gate.loads(), [1, 1, 0]);
    }

    #[test]
    fn a_session_is_not_let_in_at_two_loops() {
        let (_gate, mut doors) = gate(|_| {}, 2);
        let path = enter(&mut doors[0], &request(1, 1, 1, 0));
        let elsewhere = doors[1].request(at(1), &request(1, 2, 1, 0));
        assert_eq!(elsewhere, Err(Refusal::Unexpected));
        doors[0].ended(path);
        enter(&mut doors[1], &request(1, 2, 1, 0));
    }

    #[test]
    fn limits_are_those_of_all_loops_together() {
        let (gate, mut doors) = gate(|c| (c.max_sessions, c.max_sessions_per_client) = (3, 2), 2);
        let mut up = Vec::new();
        for (n, peer) in [(0, 1), (1, 1)] {
            let door = &mut doors[n as usize];
            let path = enter(door, &request(n, n, peer, 0));
            assert!(door.established(path).unwrap().is_ok());
            up.push(path);
        }
        for door in &mut doors {
            let third = door.request(at(1), &request(2, 2, 1, 0));
            assert_eq!(third, Err(Refusal::SessionsOfClient));
        }
        // Two are half-open at two loops, and there is room for one.
        let paths = [(0, 10), (1, 11)].map(|(index, n)| enter(&mut doors[index], &request(n, n, n as u8, 0)));
        assert!(doors[0].established(paths[0]).unwrap().is_ok());
        assert_eq!(doors[1].established(paths[1]).unwrap(), Err(Refusal::Sessions));
        assert_eq!(gate.loads(), [2, 1]);
        doors[0].ended(up[0]);
        assert!(doors[1].request(at(1), &request(3, 3, 3, 0)).is_ok());
    }

    #[test]
    fn an_access_error_slows_the_client_down_everywhere() {
        let (_gate, mut doors) = gate(|_| {}, 2);
        for _ in 0..3 {
            doors[0].access_error(at(1), [10, 0, 0, 1].into());
        }
        let refused = doors[1].request(at(1), &request(1, 1, 1, 0));
        assert_eq!(refused, Err(Refusal::SlowedDown));
    }

    #[test]
    fn names_are_unique_over_all_loops() {
        let (_gate, mut doors) = gate(|_| {}, 2);
        let paths = [0, 1].map(|n| {
            let path = enter(&mut doors[n as usize], &request(n, n, 1, 0));
            assert!(doors[n as usize].established(path).unwrap().is_ok());
            path
        });
        assert_eq!(doors[0].name(paths[0], "db"), Ok(()));
        assert_eq!(doors[1].name(paths[1], "db"), Err(Refusal::NameTaken));
        // One that is only being cleaned up does not count: its client may be back already.
        doors[0].closing(paths[0]);
        assert_eq!(doors[1].name(paths[1], "db"), Ok(()));
    }

    #[test]
    fn the_oldest_of_all_loops_gives_way_and_its_loop_is_told() {
        let (gate, mut doors) = gate(|_| {}, 2);
        let (tell, told) = channel();
        gate.tell_by(move |index, path| tell.send((index, path)).unwrap());
        let most = gate.hall.lock().admission.limits().half_open as u32;
        let oldest = enter(&mut doors[0], &request(0, 0, 0, 0));
        let next = enter(&mut doors[1], &request(1, 1, 1, 0));
        for n in 2..most {
            enter(&mut doors[0], &request(n, n, (n / 20 + 2) as u8, 0));
        }
        assert!(told.try_recv().is_err());
        enter(&mut doors[1], &request(most, most, 99, 0));
        assert_eq!(told.try_iter().collect::<Vec<_>>(), [(0, oldest)]);
        // Its own is the caller's affair.
        let own = doors[1].request(at(1), &request(most + 1, most + 1, 99, 0));
        assert!(
            matches!(own, Ok(Admitted::HalfOpen { gives_way: Some(path), .. }) if path == next),
            "{own:?}"
        );
        assert!(told.try_recv().is_err());
        // Before it was told, the loop hears that the path stands.
        assert!(doors[0].established(oldest).is_none());
        doors[0].ended(oldest);
        assert_eq!(gate.hall.lock().admission.half_open() as u32, most);
    }

    #[test]
    fn each_loop_sees_its_own_handshakes_expire() {
        let (gate, mut doors) = gate(|c| c.handshake_timeout = Duration::from_secs(5), 2);
        let paths = [0, 1].map(|n| enter(&mut doors[n as usize], &request(n, n, 1, 0)));
        let [first, second] = &mut doors[..] else {
            unreachable!()
        };
        assert_eq!([first.next_deadline(), second.next_deadline()], [Some(at(6)); 2]);
        assert_eq!(second.expired(at(5)), None);
        assert_eq!(second.expired(at(6)), Some(paths[1]));
        assert_eq!((second.expired(at(6)), second.next_deadline()), (None, None));
        // One that is up has no deadline.
        assert!(first.established(paths[0]).unwrap().is_ok());
        assert_eq!(first.next_deadline(), Some(at(6)));
        first.up(paths[0]);
        assert_eq!((first.expired(at(60)), first.next_deadline()), (None, None));
        assert_eq!(gate.loads(), [1, 0]);
    }

    #[test]
    fn what_is_expected_and_does_not_come_is_forgotten() {
        let (gate, _doors) = gate(|_| {}, 2);
        let mut hall = gate.hall.lock();
        for n in 0..4 * MAX_EXPECTED as u32 {
            hall.home(at(1), uuid(n), true);
        }
        assert_eq!(hall.loads.iter().sum::<usize>(), MAX_EXPECTED);
        assert!(hall.expected.len() == MAX_EXPECTED && hall.order.len() == MAX_EXPECTED);
        // A further connection of nobody's path makes nothing.
        hall.home(at(1), uuid(u32::MAX), false);
        assert_eq!(hall.expected.len(), MAX_EXPECTED);
        hall.home(at(32), uuid(7), true);
        assert_eq!((hall.expected.len(), hall.loads.iter().sum::<usize>()), (1, 1));
    }

    #[test]
    fn devices_of_all_loops_are_counted_together() {
        let (gate, _doors) = gate(|_| {}, 2);
        let (mut one, mut other) = (gate.places(2), gate.places(2));
        assert!(one.take() && other.take() && !one.take() && !other.take());
        one.give_back();
        assert!(other.take());
    }
}
