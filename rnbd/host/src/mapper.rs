//! The loop of a mapping: its session, its devices, NBD clients and virtual machines.

use std::{collections::VecDeque, net::IpAddr};

use mio::Token;
use rnbd::{
    block::Completion,
    client::{Client as RnbdClient, OnLoss, Request, output::Output},
};
use roce::reactor::{Reactor, Readiness, Service as Loop, TurnCx};
use roce::{Completion as WorkCompletion, LocalDevice};
use roce_verbs::{
    AsyncEvent, Instant,
    provider::{DeviceIx, Event, QpId},
};
use rtrs::{
    PathError,
    client::{Client as RtrsClient, Output as RtrsOutput, PathId, PathNews, SessionId, SessionInfo, state::PathState},
    throttle::{INTERVAL, Throttle},
};
use slab::Slab;
use smallvec::SmallVec;

use crate::{
    accept::AcceptPath,
    front::{FrontEnd as _, Part},
    map::types::{MapConfig, MapEvent, MapFailure, MapNews, Tell},
    nbd::NbdSocket,
    rng::Rng,
    stats::MapStats,
};

type Rnbd = RnbdClient<Part>;
type Rtrs = RtrsClient<Request<Part>>;

mod clients;
pub(crate) mod command;
mod control;
mod devices;
mod ending;
mod fronts;
mod handshakes;

use clients::READS;
use command::Command;
use control::PendingCommands;
use devices::Device;
use fronts::Fronts;
use handshakes::Handshakes;

/// The listeners'.
const LISTENER: Token = Token(0);
/// Clients' are their number and this.
const FIRST_CLIENT: usize = 1;
/// Tokens of front ends, and of their listeners.
const FIRST_FRONT: usize = 1 << 32;
const FIRST_LISTENER: usize = 1 << 48;
/// Bytes that a turn reads from clients, and writes to one of them, about. What is larger leaves the processor's cache
/// before it is sent, and keeps packets waiting.
const TURN: usize = 256 << 10;
/// Bytes of replies to one client that are written before packets are sent.
const AT_ONCE: usize = 32 << 10;

/// Phase of a mapping.
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

/// A mapping.
pub(crate) struct Service {
    config: MapConfig,
    rnbd: Rnbd,
    rng: Rng,
    tell: Tell,
    phase: Phase,
    /// Why it ends, unless it was asked to.
    failure: Option<MapFailure>,
    session: Option<SessionId>,
    info: Option<SessionInfo>,
    devices: Vec<Device>,
    /// Loss policy: the fate of requests while no path is up.
    on_loss: OnLoss,
    accept_path: AcceptPath,
    clients: Slab<NbdSocket>,
    handshakes: Handshakes,
    fronts: Fronts,
    /// Clients that wait for a buffer, in the order in which they found none.
    starved: VecDeque<usize>,
    pending: PendingCommands,
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
    pub(crate) fn run(reactor: Reactor<Self>, device: LocalDevice, config: MapConfig, tell: Tell) -> MapStats {
        let ended = tell.clone();
        let fail = |e: String| {
            ended.send(MapEvent::Ended(Err(MapFailure::Loop(e))));
            MapStats::default()
        };
        let rng = match Rng::new() {
            Ok(rng) => rng,
            Err(e) => return fail(e.to_string()),
        };
        let run = reactor.run(device, |turn| {
            let mut service = Self::new(config, rng, tell);
            service.open(turn);
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

    fn new(config: MapConfig, rng: Rng, tell: Tell) -> Self {
        Self {
            accept_path: AcceptPath::new(config.max_clients),
            rnbd: Rnbd::new(),
            on_loss: config.on_loss,
            config,
            rng,
            tell,
            phase: Phase::Opening,
            failure: None,
            session: None,
            info: None,
            devices: Vec::new(),
            clients: Slab::new(),
            handshakes: Handshakes::default(),
            fronts: Fronts::new(),
            starved: VecDeque::new(),
            pending: PendingCommands::default(),
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
        match self
            .rnbd
            .rtrs_mut()
            .open(&mut self.rng.cx(turn), self.config.session.clone())
        {
            Ok(session) => self.session = Some(session),
            Err(e) => self.end_with(turn, MapFailure::Session(e)),
        }
    }

    fn output(&mut self, turn: &mut TurnCx<'_, ()>, output: Output<Part>) {
        match output {
            Output::Done { user, completion, .. } => self.complete(turn, user, completion),
            Output::Rtrs(output) => self.session_output(turn, output),
            output => self.device_told(turn, output),
        }
    }

    fn session_output(&mut self, turn: &mut TurnCx<'_, ()>, output: RtrsOutput<Request<Part>>) {
        match output {
            RtrsOutput::Opened(session, info) => self.opened(session, info),
            RtrsOutput::OpenFailed(_, error) => self.end_with(turn, MapFailure::Session(error)),
            RtrsOutput::Down(_, why) => self.down(turn, why),
            RtrsOutput::Up(_, info) => {
                self.info = Some(info);
                self.tell(MapNews::Back(info));
            }
            RtrsOutput::Closed(_) => self.finish(turn),
            RtrsOutput::Path { session, path, news } => self.path_news(turn, session, path, news),
            // RNBD takes the ends of requests.
            RtrsOutput::Done { .. } => {}
        }
    }

    fn opened(&mut self, session: SessionId, info: SessionInfo) {
        (self.session, self.info) = (Some(session), Some(info));
        self.pending.opened(&self.rnbd.rtrs().paths(session));
        if self.phase == Phase::Opening {
            self.phase = Phase::Mapping;
            for device in self.config.devices.clone() {
                self.map_device(session, device, None);
            }
        }
    }

    /// Reports to the user.
    fn tell(&self, news: MapNews) {
        if self.phase != Phase::Ended {
            self.tell.report(MapEvent::News(news));
        }
    }

    fn path_news(&mut self, turn: &mut TurnCx<'_, ()>, session: SessionId, id: PathId, news: PathNews) {
        if let PathNews::Done(command, result) = news {
            return self.pending.path_done(id, command, result);
        }
        let paths = self.rnbd.rtrs().paths(session);
        let listed = paths.iter().find(|p| p.id == id).map(|p| p.addr);
        let Some(path) = listed.or_else(|| self.pending.addr(id)) else {
            return;
        };
        let all_closed = paths.iter().all(|path| path.state == PathState::Closed);
        match news {
            PathNews::Up { again } => {
                self.pending.pathless = false;
                self.tell(MapNews::PathUp { path, again });
            }
            PathNews::Down(why) => self.tell(MapNews::PathDown { path, why }),
            PathNews::TookOver(requests) => self.tell(MapNews::TookOver { path, requests }),
            PathNews::AttemptFailed(error) => self.tell(MapNews::AttemptFailed { path, error }),
            PathNews::Closed(why) => {
                let open = !matches!(self.phase, Phase::Opening | Phase::Closing | Phase::Ended);
                if open {
                    self.tell(MapNews::PathClosed { path, why: why.clone() });
                }
                self.pending.pathless |= all_closed && self.pending.wants_closed(id);
                if open && all_closed && !self.pending.pathless {
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

    /// All devices are open that it begins with: NBD clients and virtual machines can come.
    fn all_mapped(&mut self, turn: &mut TurnCx<'_, ()>) {
        self.phase = Phase::Serving;
        let fronts = self.fronts.open(&turn.sockets, &self.config.vhost);
        let opened = fronts.and_then(|()| self.accept_path.open(&self.config.listen, &turn.sockets, LISTENER));
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

    /// A request has ended.
    fn complete(&mut self, turn: &mut TurnCx<'_, ()>, part: Part, completion: Completion) {
        match part {
            // The client is gone.
            Part::Nbd(client, _) if !self.clients.contains(client) => {
                if let (Some(session), Some(buffer)) = (self.session, completion.data) {
                    self.rnbd.rtrs_mut().give_buffer(session, buffer);
                }
            }
            Part::Nbd(client, request) => {
                self.with_client(turn, client, |client, now, backend| {
                    client.complete(now, request, completion, backend);
                });
            }
            Part::Vhost(front, request) => {
                if let Some(front) = self.fronts.get_mut(front) {
                    front.complete(turn.now, request, completion, &mut ());
                }
            }
            Part::Flush(device) => self.flushed(turn, device, completion.result),
        }
    }

    /// Runs the machines until they have nothing more to do.
    fn pass_on(&mut self, turn: &mut TurnCx<'_, ()>) -> bool {
        let mut worked = false;
        loop {
            let mut more = self.rnbd.turn(&mut self.rng.cx(turn));
            while let Some(output) = self.rnbd.poll_output() {
                more = true;
                self.output(turn, output);
            }
            if !more {
                return worked;
            }
            worked = true;
        }
    }

    /// The system may have moved the thread.
    fn note_cpu(&mut self) {
        let cpu = nix::sched::sched_getcpu().unwrap_or_default();
        self.rnbd.rtrs_mut().set_cpu(cpu as u16);
    }

    fn stats(&self, turn: &mut TurnCx<'_, ()>) -> MapStats {
        MapStats {
            turns: turn.stats(),
            device: self.rnbd.all_counters(),
            clients: self.clients.len(),
            turned_away: self.turned_away,
            front_ends: self.fronts.len(),
            malformed: self.fronts.malformed(),
        }
    }
}

impl Loop for Service {
    type Command = Command;
    type Output = ();

    fn command(&mut self, turn: &mut TurnCx<'_, ()>, command: Command) {
        match command {
            Command::Control(request, reply) => self.control(turn, request, reply),
            Command::Connect(stream) if self.phase == Phase::Serving => self.accept_path.offer(stream.into()),
            // Its end sees that nobody is there.
            Command::Connect(_) => {}
            Command::Stop => self.stop(turn),
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
            self.accept_path.ready();
        } else if token.0 >= FIRST_FRONT {
            self.fronts.ready(token, readiness);
        } else if let Some(client) = self.clients.get_mut(token.0 - FIRST_CLIENT) {
            client.ready(readiness);
        }
    }

    fn completions(&mut self, turn: &mut TurnCx<'_, ()>, completions: &[(QpId, WorkCompletion)]) {
        self.note_cpu();
        let cx = &mut self.rng.cx(turn);
        for (qp, wc) in completions {
            self.rnbd.rtrs_mut().completion(cx, *qp, wc);
        }
    }

    fn event(&mut self, turn: &mut TurnCx<'_, ()>, event: Event) {
        self.rnbd.rtrs_mut().event(&mut self.rng.cx(turn), &event);
    }

    fn timeout(&mut self, turn: &mut TurnCx<'_, ()>) {
        self.rnbd.rtrs_mut().timeout(&mut self.rng.cx(turn));
        self.rnbd.timeout(turn.now);
        self.accept_path.timeout(turn.now);
        self.handshakes.timeout(turn.now);
        self.client_timeouts(turn);
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
        self.rnbd.rtrs_mut().end_batch(&mut self.rng.cx(turn));
        // Short replies are not kept waiting by packets, and packets not by long replies.
        self.fronts.notify();
        self.more = self.reply(turn, AT_ONCE);
        self.look_left(turn);
        self.look_drained(turn);
        self.pass_on(turn);
        self.fronts.notify();
        self.rnbd.rtrs_mut().end_batch(&mut self.rng.cx(turn));
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
            self.rnbd.rtrs().next_timeout(),
            self.rnbd.next_timeout(),
            clients,
            self.handshakes
                .next_timeout(self.accept_path.is_ready(), self.accept_path.next_timeout()),
            self.fronts.next_timeout(),
        ]
        .into_iter()
        .flatten()
        .min()
    }
}
