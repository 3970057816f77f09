//! A loop of a mapping. The first, *home*, maps the devices, lets NBD clients in and decides when it ends; each has its share of the
//! session and its NBD clients.

use std::{
    collections::VecDeque,
    net::IpAddr,
    os::unix::net::UnixStream,
    sync::{Arc, mpsc::Sender},
};

use mio::Token;
use rnbd::{
    Errno,
    block::Extent,
    client::{Client as Rnbd, OnLoss, device::DeviceCounters, letter::Letter as RnbdLetter, output::DeviceKey},
    nbd::PendingKey,
};
use roce::{Completion, LocalDevice, NewDevice};
use roce_reactor::{Handle, Reactor, Readiness, Service as Loop, TurnCx};
use roce_verbs::{
    AsyncEvent, Instant,
    provider::{DeviceIx, Event, QpId},
};
use rtrs::{
    PathError,
    client::{
        Buffer, Client as Rtrs, Letter as RtrsLetter, Output, PathId, PathNews, SessionId, SessionInfo,
        state::PathState,
    },
    cx::Cx,
    throttle::{INTERVAL, Throttle},
};
use slab::Slab;
use smallvec::SmallVec;
use socket2::Socket;

use crate::{
    addresses::Taken,
    control::{
        Reply,
        map::{MapAnswer, MapRequest},
    },
    dice::Dice,
    entrance::{Accepted, Entrance},
    map::{MapConfig, MapEvent, MapFailure, MapNews, MapStats, Tell},
    nbd::NbdSocket,
    stats::LoopStats,
};

macro_rules! cx {
    ($turn:expr, $dice:expr) => {
        &mut Cx {
            now: $turn.now,
            provider: $turn.device.provider(),
            random: &mut |out: &mut [u8]| $dice.fill(out),
        }
    };
}

mod clients;
mod devices;
mod ending;
mod fronts;
mod handshakes;
mod steer;

use clients::READS;
use devices::{Device, Stage};
use fronts::Fronts;
use handshakes::Handshakes;
use steer::Orders;

/// The loop that decides.
pub(crate) const HOME: usize = 0;

/// The listeners'.
const LISTENER: Token = Token(0);
/// Clients' are their number and this.
const FIRST_CLIENT: usize = 1;
/// Tokens of front ends, and of their sockets, at home.
const FIRST_FRONT: usize = 1 << 32;
const FIRST_DOOR: usize = 1 << 48;
/// Bytes that a turn reads from clients, and writes to one of them, about. What is larger leaves the processor's cache
/// before it is sent, and keeps packets waiting.
const TURN: usize = 256 << 10;
/// Bytes of replies to one client that are written before packets are sent.
const AT_ONCE: usize = 32 << 10;

/// Command of another thread.
pub(crate) enum Command {
    Stats(Sender<MapStats>),
    /// Request to home, or to every loop if each has a part of what it is about.
    Steer(MapRequest, Reply<MapAnswer>),
    /// Connects an NBD client of this process. Sent to home.
    Connect(UnixStream),
    /// Ends in good order. Sent to home.
    Stop,
    /// To end at once: another loop has failed.
    Quit,
    /// From another loop, and which.
    Letter(usize, Letter),
    /// An address of ours has no link any more. Sent to home.
    LinkDown(IpAddr),
    /// There is one more of our addresses.
    Attach(Box<NewDevice>, Sender<Taken>),
    #[cfg(test)]
    Panic,
}

/// Message between the loops of a mapping.
pub(crate) enum Letter {
    Rtrs(RtrsLetter),
    Rnbd(RnbdLetter),
    /// Home: an NBD client for this loop, its number, and the devices that it can choose, in their order.
    Client(Socket, u64, Vec<String>),
    /// Home: this client is closed, and why.
    Evict(u64, String),
    /// Home: no more requests are taken.
    Drain,
    /// To home: there are no clients here any more, and none will be taken.
    Drained,
    /// To home: a client is gone, or was not taken; and the device that it had chosen.
    Left(u64, Option<String>),
    /// To home: a client has chosen this device.
    Chosen(u64, String),
    /// Home: nobody may choose this device any more, and those who have are let go.
    Withdraw(String),
    /// To home: nobody uses a device any more that was withdrawn.
    Vacated(String),
    /// Home: a front end for this loop, the socket that it came by, and its device.
    Front(UnixStream, usize, String),
    /// To home: it is gone, or was not taken.
    FrontLeft(usize, String),
}

/// Index of a loop, and the loops of the same mapping.
pub(crate) struct Place {
    pub(crate) index: usize,
    pub(crate) loops: Arc<[Handle<Command, ()>]>,
}

impl Place {
    fn is_home(&self) -> bool {
        self.index == HOME
    }

    /// There are others.
    fn has_others(&self) -> bool {
        self.loops.len() > 1
    }

    fn tell(&self, to: usize, letter: Letter) {
        if let Some(handle) = self.loops.get(to) {
            handle.command(Command::Letter(self.index, letter));
        }
    }
}

/// Phase of a mapping. Other loops follow the messages of home: from `Draining` they go to `Unmapping`, and are there until
/// the session is closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// The session is being opened.
    Opening,
    /// The devices are being opened that it begins with.
    Mapping,
    /// NBD clients are served.
    Serving,
    /// No more requests are taken; those that came are answered.
    Draining,
    /// The devices are flushed and closed.
    Unmapping,
    /// The session is being closed.
    Closing,
    /// It is over.
    Ended,
}

/// Source of an operation.
#[derive(Clone, Copy, Debug)]
enum Whose {
    Client(usize, PendingKey),
    /// Front end, and the operation's number there.
    Front(usize, usize),
    /// The flush at the end of a device.
    Flush(DeviceKey),
}

/// A mapping on a loop.
pub(crate) struct Service {
    config: MapConfig,
    place: Place,
    rtrs: Rtrs,
    rnbd: Rnbd,
    dice: Dice,
    tell: Tell,
    phase: Phase,
    /// Why it ends, unless it was asked to.
    failure: Option<MapFailure>,
    session: Option<SessionId>,
    info: Option<SessionInfo>,
    devices: Vec<Device>,
    /// Counters of devices that are unmapped.
    gone: DeviceCounters,
    /// Loss policy: the fate of requests while no path is up.
    on_loss: OnLoss,
    /// Home's.
    entrance: Entrance,
    /// At home: other loops that have clients, while it drains.
    undrained: usize,
    clients: Slab<NbdSocket>,
    handshakes: Handshakes,
    fronts: Fronts,
    /// Clients that wait for a buffer, in the order in which they found none.
    starved: VecDeque<usize>,
    operations: Slab<Whose>,
    orders: Orders,
    turned_away: u64,
    /// The client that comes first in this turn.
    first: usize,
    /// Bytes that may still be read in this turn.
    unread: usize,
    /// Replies that went in this turn leave more to do.
    more: bool,
    log: Throttle,
    /// At the end of the last turn.
    last: MapStats,
}

impl Service {
    /// Runs the loop to its end.
    pub(crate) fn run(
        reactor: Reactor<Self>,
        device: LocalDevice,
        place: Place,
        config: MapConfig,
        tell: Tell,
    ) -> MapStats {
        let ended = tell.clone();
        let fail = |e: String| {
            ended.send(MapEvent::Ended(Err(MapFailure::Loop(e))));
            MapStats::default()
        };
        let dice = match Dice::new() {
            Ok(dice) => dice,
            Err(e) => return fail(e.to_string()),
        };
        let (index, count) = (place.index as u16, place.loops.len() as u16);
        let rtrs = match Rtrs::share(index, count) {
            Ok(rtrs) => rtrs,
            Err(e) => return fail(e.to_string()),
        };
        let run = reactor.run(device, |turn| {
            let mut service = Self::new(config, place, rtrs, dice, tell);
            if service.place.is_home() {
                service.open(turn);
            }
            service
        });
        match run {
            Ok(mut service) => {
                let (failure, last) = (service.failure.take(), core::mem::take(&mut service.last));
                // With it the socket file goes: who is told of the end may make one in its place.
                drop(service);
                ended.send(MapEvent::Ended(failure.map_or(Ok(()), Err)));
                last
            }
            Err(e) => fail(e.to_string()),
        }
    }

    fn new(config: MapConfig, place: Place, rtrs: Rtrs, dice: Dice, tell: Tell) -> Self {
        let count = place.loops.len();
        Self {
            entrance: Entrance::new(count, config.max_clients),
            undrained: 0,
            rnbd: Rnbd::share(place.index as u16, count as u16),
            on_loss: config.on_loss,
            config,
            place,
            rtrs,
            dice,
            tell,
            phase: Phase::Opening,
            failure: None,
            session: None,
            info: None,
            devices: Vec::new(),
            gone: DeviceCounters::default(),
            clients: Slab::new(),
            handshakes: Handshakes::default(),
            fronts: Fronts::default(),
            starved: VecDeque::new(),
            operations: Slab::new(),
            orders: Orders::default(),
            turned_away: 0,
            first: 0,
            unread: TURN,
            more: false,
            log: Throttle::new(INTERVAL),
            last: MapStats::default(),
        }
    }

    /// The device at an address of ours has no link any more.
    fn link_down(&mut self, turn: &mut TurnCx<'_, ()>, addr: IpAddr) {
        let devices = turn.device.provider().devices();
        let Some(index) = devices.iter().position(|caps| caps.addrs.contains(&addr)) else {
            return;
        };
        self.event(turn, Event::Async(DeviceIx(index as u16), AsyncEvent::PortError));
    }

    fn open(&mut self, turn: &mut TurnCx<'_, ()>) {
        match self.rtrs.open(cx!(turn, self.dice), self.config.session.clone()) {
            Ok(session) => self.session = Some(session),
            Err(e) => self.end_with(turn, MapFailure::Session(e)),
        }
    }

    /// Handles an output of RTRS.
    fn told(&mut self, turn: &mut TurnCx<'_, ()>, output: Output) {
        match output {
            Output::Opened(session, info) => {
                self.rnbd.rtrs(&mut self.rtrs, output);
                self.opened(session, info);
            }
            // Home says why.
            Output::OpenFailed(..) if !self.place.is_home() => self.finish(turn),
            Output::OpenFailed(_, error) => self.end_with(turn, MapFailure::Session(error)),
            Output::Down(_, ref why) if self.place.is_home() => {
                let why = why.clone();
                self.rnbd.rtrs(&mut self.rtrs, output);
                self.down(turn, why);
            }
            Output::Up(_, info) => {
                self.info = Some(info);
                self.rnbd.rtrs(&mut self.rtrs, output);
                self.tell(MapNews::Back(info));
            }
            Output::Closed(_) => {
                self.count();
                self.rnbd.rtrs(&mut self.rtrs, output);
                self.finish(turn);
            }
            Output::Path { session, path, news } => self.path_news(turn, session, path, news),
            Output::Down(..) | Output::Done { .. } => self.rnbd.rtrs(&mut self.rtrs, output),
        }
    }

    fn opened(&mut self, session: SessionId, info: SessionInfo) {
        (self.session, self.info) = (Some(session), Some(info));
        self.orders.opened(&self.rtrs.paths(session));
        if self.place.is_home() && self.phase == Phase::Opening {
            self.phase = Phase::Mapping;
            for device in self.config.devices.clone() {
                self.map_device(session, device, None);
            }
        }
    }

    /// Home tells its user.
    fn tell(&self, news: MapNews) {
        if self.place.is_home() && self.phase != Phase::Ended {
            self.tell.report(MapEvent::News(news));
        }
    }

    fn path_news(&mut self, turn: &mut TurnCx<'_, ()>, session: SessionId, id: PathId, news: PathNews) {
        if let PathNews::Done(command, result) = news {
            return self.orders.path_done(id, command, result);
        }
        let paths = self.rtrs.paths(session);
        let listed = paths.iter().find(|p| p.id == id).map(|p| p.addr);
        let Some(path) = listed.or_else(|| self.orders.addr(id)) else {
            return;
        };
        let all_closed = paths.iter().all(|path| path.state == PathState::Closed);
        match news {
            PathNews::Up { again } => {
                self.orders.pathless = false;
                self.tell(MapNews::PathUp { path, again });
            }
            PathNews::Down(why) => self.tell(MapNews::PathDown { path, why }),
            PathNews::TookOver(requests) => {
                self.tell.report(MapEvent::News(MapNews::TookOver { path, requests }));
            }
            PathNews::AttemptFailed(error) => self.tell(MapNews::AttemptFailed { path, error }),
            PathNews::Closed(why) => {
                let open = !matches!(self.phase, Phase::Opening | Phase::Closing | Phase::Ended);
                if open {
                    self.tell(MapNews::PathClosed { path, why: why.clone() });
                }
                self.orders.pathless |= all_closed && self.orders.wants_closed(id);
                if open && all_closed && !self.orders.pathless {
                    self.lost(turn, why);
                }
            }
            PathNews::Done(..) => {}
        }
    }

    /// No path is up. One that is to be connected again is waited for, but not for the sake of an end.
    fn down(&mut self, turn: &mut TurnCx<'_, ()>, why: PathError) {
        self.tell(MapNews::Lost(why.clone()));
        match self.phase {
            Phase::Serving | Phase::Draining => {}
            _ => {
                self.failure.get_or_insert(MapFailure::Lost(why));
                self.close_session(turn);
            }
        }
    }

    /// The session is gone: what is in flight ends with errors, and that is told to the NBD clients.
    fn lost(&mut self, turn: &mut TurnCx<'_, ()>, why: PathError) {
        self.failure.get_or_insert(MapFailure::Lost(why));
        match self.phase {
            Phase::Serving => self.drain(turn),
            Phase::Draining => {}
            _ => self.close_session(turn),
        }
    }

    /// All devices are there that it begins with: home makes the sockets. The others are told of devices before they are given clients.
    fn all_mapped(&mut self, turn: &mut TurnCx<'_, ()>) {
        self.phase = Phase::Serving;
        let fronts = self.fronts.open(&turn.sockets, &self.config.vhost);
        let opened = fronts.and_then(|()| self.entrance.open(&self.config.listen, &turn.sockets, LISTENER));
        match opened {
            Ok(addresses) => {
                self.tell.send(MapEvent::Listening(addresses));
                self.devices.iter().for_each(|device| self.tell_mapped(device.key));
            }
            Err(e) => {
                self.failure.get_or_insert(MapFailure::Socket(e));
                self.drain(turn);
            }
        }
    }

    fn done(
        &mut self,
        turn: &mut TurnCx<'_, ()>,
        user: u64,
        result: Result<(), Errno>,
        data: Option<Buffer>,
        losses: u64,
    ) {
        let whose = self.operations.try_remove(user as usize);
        match whose {
            Some(Whose::Client(client, key)) => {
                let free = match self.clients.get_mut(client) {
                    Some(client) => {
                        client.connection.done(turn.now, key, result, data, losses);
                        None
                    }
                    None => data,
                };
                self.give(free);
            }
            // Its data is the guest's own.
            Some(Whose::Front(front, slot)) => self.fronts.done(front, slot, result, losses),
            Some(Whose::Flush(device)) => {
                self.give(data);
                self.flushed(turn, device, result);
            }
            None => self.give(data),
        }
    }

    /// A block status has ended, which only NBD clients ask for.
    fn status(&mut self, now: Instant, user: u64, result: Result<Vec<Extent>, Errno>) {
        if let Some(Whose::Client(client, key)) = self.operations.try_remove(user as usize)
            && let Some(client) = self.clients.get_mut(client)
        {
            let extents = result.as_deref().map_err(|e| *e);
            client.connection.status(now, key, extents);
        }
    }

    fn give(&mut self, buffer: Option<Buffer>) {
        if let (Some(buffer), Some(session)) = (buffer, self.session) {
            self.rtrs.give_buffer(session, buffer);
        }
    }

    /// Another loop has something to say.
    fn letter(&mut self, turn: &mut TurnCx<'_, ()>, from: usize, letter: Letter) {
        match letter {
            Letter::Rtrs(letter) => self.rtrs.letter(cx!(turn, self.dice), from as u16, letter),
            Letter::Rnbd(letter) => {
                // What RTRS was told before comes first.
                self.pass_on(turn);
                self.count();
                self.rnbd.letter(from as u16, letter);
            }
            Letter::Client(stream, id, devices) => {
                self.pass_on(turn);
                self.admit(turn, stream, id, &devices);
            }
            Letter::Evict(id, why) => self.evicted(turn.now, id, &why),
            Letter::Drain if self.phase != Phase::Ended => self.drain(turn),
            Letter::Drain => {}
            Letter::Drained => self.undrained = self.undrained.saturating_sub(1),
            Letter::Left(id, device) => self.client_parted(from, id, device.as_deref()),
            Letter::Chosen(id, device) => self.client_chosen(turn.now, Accepted { id, at: from }, &device),
            Letter::Withdraw(device) => self.leave(turn, &device),
            Letter::Vacated(device) => self.left_elsewhere(turn, &device),
            Letter::Front(stream, door, device) => {
                self.pass_on(turn);
                self.admit_front(turn, stream, door, &device);
            }
            Letter::FrontLeft(door, device) => self.front_parted(turn, from, door, &device),
        }
    }

    /// Sends what the machines here have for those of other loops.
    fn post_letters(&mut self) {
        while let Some((to, letter)) = self.rtrs.poll_letter() {
            self.place.tell(to.into(), Letter::Rtrs(letter));
        }
        while let Some((to, letter)) = self.rnbd.poll_letter() {
            self.place.tell(to.into(), Letter::Rnbd(letter));
        }
    }

    /// Passes on what one machine has for the other.
    fn pass_on(&mut self, turn: &mut TurnCx<'_, ()>) -> bool {
        let mut worked = false;
        while let Some(output) = self.rtrs.poll_output() {
            worked = true;
            self.told(turn, output);
        }
        worked |= self.tell_devices(turn);
        while let Some((session, submission)) = self.rnbd.poll_submission(cx!(turn, self.dice), &mut self.rtrs) {
            worked = true;
            if let Err((back, error)) = self.rtrs.submit(cx!(turn, self.dice), session, submission) {
                let done = Output::Done {
                    session,
                    tag: back.tag,
                    result: Err(error),
                    data: back.data,
                };
                self.rnbd.rtrs(&mut self.rtrs, done);
            }
        }
        // Operations that ended without a request.
        worked |= self.tell_devices(turn);
        if self.place.has_others() {
            self.post_letters();
        }
        worked
    }

    fn tell_devices(&mut self, turn: &mut TurnCx<'_, ()>) -> bool {
        let mut told = false;
        while let Some(output) = self.rnbd.poll_output() {
            told = true;
            self.device_told(turn, output);
        }
        told
    }

    /// The system may have moved the thread.
    fn note_cpu(&mut self) {
        let cpu = nix::sched::sched_getcpu().unwrap_or_default();
        self.rtrs.set_cpu(cpu as u16);
    }

    fn stats(&self, turn: &mut TurnCx<'_, ()>) -> MapStats {
        let device = self.counters();
        MapStats {
            turns: LoopStats::of(turn),
            device,
            clients: vec![self.clients.len()],
            requests: vec![device.completed],
            turned_away: self.turned_away,
            front_ends: vec![self.fronts.len()],
            malformed: self.fronts.malformed(),
        }
    }
}

impl Loop for Service {
    type Command = Command;
    type Output = ();

    fn command(&mut self, turn: &mut TurnCx<'_, ()>, command: Command) {
        match command {
            Command::Stats(to) => {
                let _ = to.send(self.stats(turn));
            }
            Command::Steer(request, reply) => self.steer(turn, request, reply),
            Command::Connect(stream) if self.phase == Phase::Serving => self.entrance.offer(stream.into()),
            // Its end sees that nobody is there.
            Command::Connect(_) => {}
            Command::Stop => self.stop(turn),
            Command::Quit => self.quit(turn),
            Command::Letter(from, letter) => self.letter(turn, from, letter),
            Command::LinkDown(addr) => self.link_down(turn, addr),
            Command::Attach(device, taken) => {
                let _ = taken.send(turn.attach(device).map(drop));
            }
            #[cfg(test)]
            Command::Panic => panic!("as it is to be"),
        }
    }

    fn ready(&mut self, _: &mut TurnCx<'_, ()>, token: Token, readiness: Readiness) {
        if token == LISTENER {
            self.entrance.ready();
        } else if token.0 >= FIRST_FRONT {
            self.fronts.ready(token, readiness);
        } else if let Some(client) = self.clients.get_mut(token.0 - FIRST_CLIENT) {
            client.ready(readiness);
        }
    }

    fn completions(&mut self, turn: &mut TurnCx<'_, ()>, completions: &[(QpId, Completion)]) {
        self.note_cpu();
        let cx = cx!(turn, self.dice);
        for (qp, wc) in completions {
            self.rtrs.completion(cx, *qp, wc);
        }
    }

    fn event(&mut self, turn: &mut TurnCx<'_, ()>, event: Event) {
        self.rtrs.event(cx!(turn, self.dice), &event);
    }

    fn timeout(&mut self, turn: &mut TurnCx<'_, ()>) {
        self.rtrs.timeout(cx!(turn, self.dice));
        self.rnbd.timeout(turn.now);
        self.entrance.timeout(turn.now);
        self.handshakes.timeout(turn.now);
        for (_, client) in &mut self.clients {
            client.connection.timeout(turn.now);
        }
        self.cut_off(turn.now);
        self.look_left(turn);
        self.look_drained(turn);
    }

    fn work(&mut self, turn: &mut TurnCx<'_, ()>) -> bool {
        self.note_cpu();
        let mut worked = self.pass_on(turn);
        worked |= self.shake_hands(turn);
        worked |= self.accept_fronts(turn);
        worked |= self.serve_fronts(turn);
        worked |= self.feed(turn);
        let open = self.clients.iter().filter(|(_, client)| !client.is_half_open());
        let clients: SmallVec<[usize; 8]> = open.map(|(index, _)| index).collect();
        // Each is the first in its turn.
        let first = self.first % clients.len().max(1);
        for index in clients[first..].iter().chain(&clients[..first]) {
            worked |= self.serve(turn, *index, READS);
        }
        worked |= self.pass_on(turn);
        self.look_left(turn);
        self.look_drained(turn);
        worked
    }

    fn end(&mut self, turn: &mut TurnCx<'_, ()>) {
        self.rtrs.end_batch(cx!(turn, self.dice));
        // Short replies are not kept waiting by packets, and packets not by long replies.
        self.fronts.notify();
        self.more = self.reply(turn, AT_ONCE);
        self.look_left(turn);
        self.look_drained(turn);
        self.pass_on(turn);
        self.fronts.notify();
        self.rtrs.end_batch(cx!(turn, self.dice));
        if self.place.has_others() {
            self.post_letters();
        }
        if self.phase == Phase::Ended {
            self.last = self.stats(turn);
        }
    }

    fn sent(&mut self, turn: &mut TurnCx<'_, ()>) -> bool {
        let unread = core::mem::replace(&mut self.unread, TURN) == 0;
        self.first = self.first.wrapping_add(1);
        let more = self.reply(turn, TURN) | core::mem::take(&mut self.more);
        more || self.fronts.has_work()
            || (unread && self.clients.iter_mut().any(|(_, c)| !c.is_half_open() && c.has_work()))
    }

    fn next_timeout(&self) -> Option<Instant> {
        let clients = self
            .clients
            .iter()
            .filter_map(|(_, client)| client.next_timeout())
            .min();
        [
            self.rtrs.next_timeout(),
            self.rnbd.next_timeout(),
            clients,
            self.handshakes
                .next_timeout(self.entrance.is_ready(), self.entrance.next_timeout()),
            self.fronts.next_timeout(),
        ]
        .into_iter()
        .flatten()
        .min()
    }
}
