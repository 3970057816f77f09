//! A loop of a mapping. The first, *home*, maps the device, lets NBD clients in and decides when it ends; each has its share of the
//! session and its NBD clients.

use std::{
    collections::VecDeque,
    io,
    os::unix::net::UnixStream,
    sync::{Arc, mpsc::Sender},
};

use mio::Token;
use rnbd::{
    Errno,
    block::{BlockOp, Geometry},
    client::{
        Client as Rnbd, OnLoss, Unmap,
        device::DeviceCounters,
        letter::Letter as RnbdLetter,
        output::{DeviceKey, Output as DeviceOutput},
        state::DeviceState,
    },
    nbd::PendingKey,
};
use roce::{Completion, LocalDevice};
use roce_reactor::{Handle, Reactor, Readiness, Service as Loop, TurnCx};
use roce_verbs::{
    Instant,
    provider::{Event, QpId},
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

use crate::{
    control::{
        Refused, Reply,
        map::{MapAnswer, MapRequest},
    },
    dice::Dice,
    entrance::{Comer, Entrance},
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
mod steer;

use steer::Orders;

/// The loop that decides.
pub(crate) const HOME: usize = 0;

/// The listener's.
const LISTENER: Token = Token(0);
/// Clients' are their number and this.
const FIRST_CLIENT: usize = 1;
/// Bytes that a turn reads from clients, and writes to one of them, about. What is larger leaves the processor's cache
/// before it is sent, and keeps packets waiting.
const TURN: usize = 256 << 10;
/// Bytes of replies to one client that are written before packets are sent.
const AT_ONCE: usize = 32 << 10;

/// What other threads ask for.
pub(crate) enum Command {
    Stats(Sender<MapStats>),
    /// Of home, but for what every loop has something of.
    Steer(MapRequest, Reply<MapAnswer>),
    /// Of home: to end in good order.
    Stop,
    /// To end at once: another loop has failed.
    Quit,
    /// From another loop, and which.
    Letter(usize, Letter),
    #[cfg(test)]
    Panic,
}

/// What the loops of a mapping tell one another.
pub(crate) enum Letter {
    Rtrs(RtrsLetter),
    Rnbd(RnbdLetter),
    /// Home: an NBD client for this loop.
    Client(UnixStream),
    /// Home: no more requests are taken.
    Drain,
    /// To home: there are no clients here any more, and none will be taken.
    Drained,
    /// To home: a client is gone, or was not taken.
    Left,
}

/// Which loop it is, and those of the same mapping.
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

/// Where a mapping is. At other loops than home it goes by what home says: from `Draining` they go to `Unmapping`, and are there until
/// the session is closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// The session is being opened.
    Opening,
    /// The device is being opened.
    Mapping,
    /// NBD clients are served.
    Serving,
    /// No more requests are taken; those that came are answered.
    Draining,
    /// What was written is made durable.
    Flushing,
    /// The device is being closed.
    Unmapping,
    /// The session is being closed.
    Closing,
    /// It is over.
    Ended,
}

/// Whose an operation is.
#[derive(Clone, Copy, Debug)]
enum Whose {
    Client(usize, PendingKey),
    /// The flush at the end.
    Ours,
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
    device: Option<DeviceKey>,
    geometry: Option<Geometry>,
    /// Home's.
    entrance: Entrance,
    /// At home: other loops that have clients, while it drains.
    undrained: usize,
    clients: Slab<NbdSocket>,
    /// Clients that wait for a buffer, in the order in which they found none.
    starved: VecDeque<usize>,
    operations: Slab<Whose>,
    orders: Orders,
    drained_by: Option<Instant>,
    turned_away: u64,
    /// The client that comes first in this turn.
    first: usize,
    /// Bytes that may still be read in this turn.
    unread: usize,
    /// Replies that went in this turn leave more to do.
    more: bool,
    /// What the device had done when it was given up.
    counted: Option<DeviceCounters>,
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
            let _ = ended.send(MapEvent::Ended(Err(MapFailure::Loop(e))));
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
                let _ = ended.send(MapEvent::Ended(failure.map_or(Ok(()), Err)));
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
            config,
            place,
            rtrs,
            dice,
            tell,
            phase: Phase::Opening,
            failure: None,
            session: None,
            info: None,
            device: None,
            geometry: None,
            clients: Slab::new(),
            starved: VecDeque::new(),
            operations: Slab::new(),
            orders: Orders::default(),
            drained_by: None,
            turned_away: 0,
            first: 0,
            unread: TURN,
            more: false,
            counted: None,
            log: Throttle::new(INTERVAL),
            last: MapStats::default(),
        }
    }

    fn open(&mut self, turn: &mut TurnCx<'_, ()>) {
        match self.rtrs.open(cx!(turn, self.dice), self.config.session.clone()) {
            Ok(session) => self.session = Some(session),
            Err(e) => self.end_with(turn, MapFailure::Session(e)),
        }
    }

    /// It is over, for this reason, unless there was one before.
    fn end_with(&mut self, turn: &mut TurnCx<'_, ()>, why: MapFailure) {
        self.failure.get_or_insert(why);
        self.finish(turn);
    }

    /// The loop ends with this turn.
    fn finish(&mut self, turn: &mut TurnCx<'_, ()>) {
        self.phase = Phase::Ended;
        self.unmapped();
        turn.stop();
    }

    /// What RTRS tells of the session.
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
            let (device, mode) = (&self.config.device, self.config.mode);
            let device = self.rnbd.map(session, device, mode);
            self.device = Some(device);
            if let Err(e) = self.rnbd.set_on_loss(device, self.config.on_loss) {
                // It is told why it could not be mapped.
                tracing::debug!("on loss: {e}");
            }
        }
    }

    /// Home tells its user.
    fn tell(&self, news: MapNews) {
        if self.place.is_home() && self.phase != Phase::Ended {
            let _ = self.tell.send(MapEvent::News(news));
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
                let _ = self.tell.send(MapEvent::News(MapNews::TookOver { path, requests }));
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

    fn device_told(&mut self, turn: &mut TurnCx<'_, ()>, output: DeviceOutput) {
        match output {
            DeviceOutput::Mapped(device, geometry) => {
                (self.device, self.geometry) = (Some(device), Some(geometry));
                self.mapped(turn, geometry);
            }
            DeviceOutput::MapFailed(device, error) if self.rnbd.state(device).is_some() => {
                self.orders
                    .remapped(&Err(Refused::new(error.errno(), error.to_string())));
                self.tell(MapNews::NotRemapped(error));
            }
            DeviceOutput::MapFailed(_, error) => {
                self.failure.get_or_insert(MapFailure::Map(error));
                self.close_session(turn);
            }
            DeviceOutput::Done { user, result, data, .. } => self.done(turn, user, result, data),
            DeviceOutput::Geometry(_, geometry) => {
                self.geometry = Some(geometry);
                self.tell(MapNews::Changed(geometry));
                for (_, client) in &mut self.clients {
                    client.connection.set_geometry(0, geometry);
                }
            }
            DeviceOutput::State(_, DeviceState::Mapped) => {
                self.orders.remapped(&Ok(()));
                self.tell(MapNews::Remapped);
            }
            DeviceOutput::State(..) => {}
            // Home closes the session then.
            DeviceOutput::Unmapped(..) if !self.place.is_home() => {}
            DeviceOutput::Unmapped(_, result) => {
                if let Err(e) = result
                    && !self.orders.forced
                {
                    self.failure.get_or_insert(MapFailure::Close(e));
                }
                self.unmapped();
                self.close_session(turn);
            }
        }
    }

    /// The device is there: home makes the socket. The others are told of the device before they are given clients.
    fn mapped(&mut self, turn: &mut TurnCx<'_, ()>, geometry: Geometry) {
        let Some(info) = self.info.filter(|_| self.phase == Phase::Mapping) else {
            return;
        };
        match self.entrance.open(&self.config.socket, &turn.sockets, LISTENER) {
            Ok(()) => {
                self.phase = Phase::Serving;
                let _ = self.tell.send(MapEvent::Mapped { geometry, info });
            }
            Err(e) => {
                self.failure.get_or_insert(MapFailure::Socket(e));
                self.unmap(turn);
            }
        }
    }

    fn done(&mut self, turn: &mut TurnCx<'_, ()>, user: u64, result: Result<(), Errno>, data: Option<Buffer>) {
        let whose = self.operations.try_remove(user as usize);
        match whose {
            Some(Whose::Client(client, key)) => {
                let free = match self.clients.get_mut(client) {
                    Some(client) => {
                        client.connection.done(turn.now, key, result, data);
                        None
                    }
                    None => data,
                };
                self.give(free);
            }
            Some(Whose::Ours) => {
                self.give(data);
                if let Err(e) = result {
                    self.failure.get_or_insert(MapFailure::Flush(e));
                }
                self.unmap(turn);
            }
            None => self.give(data),
        }
    }

    fn give(&mut self, buffer: Option<Buffer>) {
        if let (Some(buffer), Some(session)) = (buffer, self.session) {
            self.rtrs.give_buffer(session, buffer);
        }
    }

    /// No new clients, and no new requests of those that are there, at any loop.
    fn drain(&mut self, turn: &mut TurnCx<'_, ()>) {
        self.phase = Phase::Draining;
        self.drained_by = Some(turn.now + self.config.grace);
        self.entrance.close(&turn.sockets);
        // Nobody waits for a lost device then.
        if let Some(device) = self.device.filter(|_| self.place.is_home())
            && let Err(e) = self.rnbd.set_on_loss(device, OnLoss::Error)
        {
            tracing::debug!("on loss: {e}");
        }
        self.drain_others();
        for (_, client) in &mut self.clients {
            client.stop();
        }
    }

    /// Goes on when the clients are gone.
    fn look_drained(&mut self, turn: &mut TurnCx<'_, ()>) {
        if self.phase != Phase::Draining {
            return;
        }
        if self.drained_by.is_some_and(|at| at <= turn.now) && !self.clients.is_empty() {
            tracing::warn!(
                clients = self.clients.len(),
                "NBD clients did not take their replies in time; cut off"
            );
            self.drained_by = None;
            for (_, client) in &mut self.clients {
                client.connection.cut(turn.now);
            }
        }
        if !self.clients.is_empty() || self.undrained > 0 {
            return;
        }
        if !self.place.is_home() {
            (self.phase, self.drained_by) = (Phase::Unmapping, None);
            return self.place.tell(HOME, Letter::Drained);
        }
        let writable = self.geometry.is_some_and(|g| !g.read_only);
        match self.device {
            Some(device) if writable && self.failure.is_none() => {
                self.phase = Phase::Flushing;
                let user = self.operations.insert(Whose::Ours) as u64;
                self.rnbd.submit(device, user, BlockOp::Flush, 0, 0, None, 0);
            }
            _ => self.unmap(turn),
        }
    }

    fn unmap(&mut self, turn: &mut TurnCx<'_, ()>) {
        self.count();
        match self.device {
            Some(device) if self.session_is_up() => {
                self.phase = Phase::Unmapping;
                if let Err(e) = self.rnbd.unmap(device, Unmap::Normal { in_use: false }) {
                    tracing::debug!("unmap: {e}");
                }
            }
            _ => self.close_session(turn),
        }
    }

    /// Keeps what the device has done: it may be gone soon.
    fn count(&mut self) {
        let counters = self.device.and_then(|device| self.rnbd.counters(device));
        self.counted = counters.or(self.counted);
    }

    fn session_is_up(&self) -> bool {
        self.session.is_some_and(|session| self.rtrs.state(session).is_ok())
    }

    fn close_session(&mut self, turn: &mut TurnCx<'_, ()>) {
        if matches!(self.phase, Phase::Closing | Phase::Ended) {
            return;
        }
        self.phase = Phase::Closing;
        match self.session {
            Some(session) => self.rtrs.close(cx!(turn, self.dice), session),
            None => turn.stop(),
        }
    }

    /// Another loop has failed, and what waits for it would wait for ever. The server is told to go.
    fn quit(&mut self, turn: &mut TurnCx<'_, ()>) {
        if let Some(session) = self.session.filter(|_| self.place.is_home()) {
            self.rtrs.close(cx!(turn, self.dice), session);
        }
        self.finish(turn);
    }

    fn stop(&mut self, turn: &mut TurnCx<'_, ()>) {
        match self.phase {
            Phase::Opening | Phase::Mapping => self.close_session(turn),
            Phase::Serving => self.drain(turn),
            _ => {}
        }
    }

    /// Lets clients in.
    fn accept(&mut self, turn: &mut TurnCx<'_, ()>) -> bool {
        let mut worked = false;
        while let Some(comer) = self.entrance.next(turn.now) {
            worked = true;
            match comer {
                Comer::For(HOME, stream) => self.admit(turn, stream),
                Comer::For(other, stream) => self.place.tell(other, Letter::Client(stream)),
                Comer::TurnedAway(why) => self.turn_away(turn.now, &why),
            }
        }
        worked
    }

    fn turn_away(&mut self, now: Instant, why: &io::Error) {
        self.turned_away += 1;
        let more = self.log.due(now).unwrap_or_default();
        if self.log.hit(now) {
            tracing::warn!(more, "an NBD client is turned away: {why}");
        }
    }

    /// A client of this loop is gone, or was not taken.
    fn left(&mut self) {
        match self.place.is_home() {
            true => self.entrance.left(HOME),
            false => self.place.tell(HOME, Letter::Left),
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
            Letter::Client(stream) => {
                self.pass_on(turn);
                self.admit(turn, stream);
            }
            Letter::Drain if self.phase != Phase::Ended => self.drain(turn),
            Letter::Drain => {}
            Letter::Drained => self.undrained = self.undrained.saturating_sub(1),
            Letter::Left => self.entrance.left(from),
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
        while let Some(output) = self.rnbd.poll_output() {
            worked = true;
            self.device_told(turn, output);
        }
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
        if self.place.has_others() {
            self.post_letters();
        }
        worked
    }

    /// The system may have moved the thread.
    fn note_cpu(&mut self) {
        let cpu = nix::sched::sched_getcpu().unwrap_or_default();
        self.rtrs.set_cpu(cpu as u16);
    }

    fn stats(&self, turn: &mut TurnCx<'_, ()>) -> MapStats {
        let device = self.device.and_then(|device| self.rnbd.counters(device));
        let device = device.or(self.counted).unwrap_or_default();
        MapStats {
            turns: LoopStats::of(turn),
            device,
            clients: vec![self.clients.len()],
            requests: vec![device.completed],
            turned_away: self.turned_away,
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
            Command::Stop => self.stop(turn),
            Command::Quit => self.quit(turn),
            Command::Letter(from, letter) => self.letter(turn, from, letter),
            #[cfg(test)]
            Command::Panic => panic!("as it is to be"),
        }
    }

    fn ready(&mut self, _: &mut TurnCx<'_, ()>, token: Token, readiness: Readiness) {
        if token == LISTENER {
            self.entrance.ready();
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
        for (_, client) in &mut self.clients {
            client.connection.timeout(turn.now);
        }
        self.look_drained(turn);
    }

    fn work(&mut self, turn: &mut TurnCx<'_, ()>) -> bool {
        self.note_cpu();
        let mut worked = self.pass_on(turn);
        worked |= self.accept(turn);
        worked |= self.feed(turn);
        let clients: SmallVec<[usize; 8]> = self.clients.iter().map(|(index, _)| index).collect();
        // Each is the first in its turn.
        let first = self.first % clients.len().max(1);
        for index in clients[first..].iter().chain(&clients[..first]) {
            worked |= self.serve(turn, *index);
        }
        worked |= self.pass_on(turn);
        worked
    }

    fn end(&mut self, turn: &mut TurnCx<'_, ()>) {
        self.rtrs.end_batch(cx!(turn, self.dice));
        // Short replies are not kept waiting by packets, and packets not by long replies.
        self.more = self.reply(turn, AT_ONCE);
        self.look_drained(turn);
        self.pass_on(turn);
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
        more || (unread && self.clients.iter_mut().any(|(_, client)| client.has_work()))
    }

    fn next_timeout(&self) -> Option<Instant> {
        let clients = self
            .clients
            .iter()
            .filter_map(|(_, c)| c.connection.next_timeout())
            .min();
        [
            self.rtrs.next_timeout(),
            self.rnbd.next_timeout(),
            clients,
            self.entrance.next_timeout(),
            self.drained_by,
        ]
        .into_iter()
        .flatten()
        .min()
    }
}
