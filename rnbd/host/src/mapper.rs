//! The loop of a mapping.

use core::time::Duration;
use std::{collections::VecDeque, io, os::fd::AsFd, sync::mpsc::Sender};

use mio::{Interest, Token};
use rnbd::{
    Errno,
    block::{BlockOp, Geometry},
    client::{
        Client as Rnbd,
        device::DeviceCounters,
        output::{DeviceKey, Output as DeviceOutput},
    },
    nbd::{Export, Exports, PendingKey},
};
use roce::{Completion, LocalDevice};
use roce_reactor::{Reactor, Readiness, Service as Loop, TurnCx};
use roce_verbs::{
    Instant,
    provider::{Event, QpId},
};
use rtrs::{
    Error, PathError,
    client::{Buffer, Client as Rtrs, Output, SessionId, SessionInfo},
    cx::Cx,
    throttle::{INTERVAL, Throttle},
};
use slab::Slab;
use smallvec::SmallVec;
use socket2::SockRef;

use crate::{
    dice::Dice,
    map::{MapConfig, MapEvent, MapFailure, MapStats, Tell},
    nbd::NbdSocket,
    socket_file::SocketFile,
    stats::LoopStats,
};

/// The listener's.
const LISTENER: Token = Token(0);
/// Clients' are their number and this.
const FIRST_CLIENT: usize = 1;
/// Reads from one client's socket in a round.
const READS: usize = 16;
/// Bytes that a turn reads from clients, and writes to one of them, about. What is larger leaves the processor's cache
/// before it is sent, and keeps packets waiting.
const TURN: usize = 256 << 10;
/// Bytes of a client's send buffer, as far as the system allows.
const SEND_BUFFER: usize = 1 << 20;
/// Bytes of replies to one client that are written before packets are sent.
const AT_ONCE: usize = 32 << 10;
/// How long accepting rests when the system has no descriptor.
const REST: Duration = Duration::from_millis(100);

/// What other threads ask for.
pub(crate) enum Command {
    Stats(Sender<MapStats>),
    Stop,
}

/// Where a mapping is.
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
    listener: Option<SocketFile>,
    /// The listener has somebody, as far as is known.
    accepts: bool,
    rests_until: Option<Instant>,
    clients: Slab<NbdSocket>,
    /// Clients that wait for a buffer, in the order in which they found none.
    starved: VecDeque<usize>,
    operations: Slab<Whose>,
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

macro_rules! cx {
    ($turn:expr, $dice:expr) => {
        &mut Cx {
            now: $turn.now,
            provider: $turn.device.provider(),
            random: &mut |out: &mut [u8]| $dice.fill(out),
        }
    };
}

impl Service {
    /// Runs the loop to its end.
    pub(crate) fn run(reactor: Reactor<Self>, device: LocalDevice, config: MapConfig, tell: Tell) -> MapStats {
        let ended = tell.clone();
        let fail = |e: String| {
            let _ = ended.send(MapEvent::Ended(Err(MapFailure::Loop(e))));
            MapStats::default()
        };
        let dice = match Dice::new() {
            Ok(dice) => dice,
            Err(e) => return fail(e.to_string()),
        };
        let run = reactor.run(device, |turn| {
            let mut service = Self::new(config, dice, tell);
            service.open(turn);
            service
        });
        match run {
            Ok(mut service) => {
                let failure = service.failure.take();
                let _ = ended.send(MapEvent::Ended(failure.map_or(Ok(()), Err)));
                service.last
            }
            Err(e) => fail(e.to_string()),
        }
    }

    fn new(config: MapConfig, dice: Dice, tell: Tell) -> Self {
        Self {
            config,
            rtrs: Rtrs::new(),
            rnbd: Rnbd::new(),
            dice,
            tell,
            phase: Phase::Opening,
            failure: None,
            session: None,
            info: None,
            device: None,
            geometry: None,
            listener: None,
            accepts: false,
            rests_until: None,
            clients: Slab::new(),
            starved: VecDeque::new(),
            operations: Slab::new(),
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
        self.phase = Phase::Ended;
        turn.stop();
    }

    /// What RTRS tells of the session.
    fn told(&mut self, turn: &mut TurnCx<'_, ()>, output: Output) {
        match output {
            Output::Opened(session, info) => {
                self.rnbd.rtrs(&mut self.rtrs, output);
                self.opened(session, info);
            }
            Output::OpenFailed(_, error) => self.end_with(turn, MapFailure::Session(error)),
            Output::Down(_, ref why) => {
                let why = why.clone();
                self.rnbd.rtrs(&mut self.rtrs, output);
                self.lost(turn, why);
            }
            Output::Closed(_) => {
                self.rnbd.rtrs(&mut self.rtrs, output);
                self.phase = Phase::Ended;
                turn.stop();
            }
            Output::Up(..) | Output::Done { .. } => self.rnbd.rtrs(&mut self.rtrs, output),
        }
    }

    fn opened(&mut self, session: SessionId, info: SessionInfo) {
        self.info = Some(info);
        if self.phase == Phase::Opening {
            self.phase = Phase::Mapping;
            let (device, mode) = (&self.config.device, self.config.mode);
            self.device = Some(self.rnbd.map(session, device, mode));
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
            DeviceOutput::Mapped(_, geometry) => self.mapped(turn, geometry),
            DeviceOutput::MapFailed(_, error) => {
                self.failure.get_or_insert(MapFailure::Map(error));
                self.close_session(turn);
            }
            DeviceOutput::Done { user, result, data, .. } => self.done(turn, user, result, data),
            DeviceOutput::Geometry(_, geometry) => {
                self.geometry = Some(geometry);
                for (_, client) in &mut self.clients {
                    client.connection.set_geometry(0, geometry);
                }
            }
            DeviceOutput::State(..) => {}
            DeviceOutput::Unmapped(_, result) => {
                if let Err(e) = result {
                    self.failure.get_or_insert(MapFailure::Close(e));
                }
                self.close_session(turn);
            }
        }
    }

    /// The device is there: makes the socket.
    fn mapped(&mut self, turn: &mut TurnCx<'_, ()>, geometry: Geometry) {
        let Some(info) = self.info.filter(|_| self.phase == Phase::Mapping) else {
            return;
        };
        self.geometry = Some(geometry);
        let made = SocketFile::bind(&self.config.socket).and_then(|file| {
            file.listener.set_nonblocking(true)?;
            turn.sockets
                .register(file.listener.as_fd(), LISTENER, Interest::READABLE)?;
            Ok(file)
        });
        match made {
            Ok(file) => {
                self.listener = Some(file);
                self.accepts = true;
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

    /// No new clients, and no new requests of those that are there.
    fn drain(&mut self, turn: &mut TurnCx<'_, ()>) {
        self.phase = Phase::Draining;
        self.drained_by = Some(turn.now + self.config.grace);
        if let Some(file) = self.listener.take() {
            let _ = turn.sockets.deregister(file.listener.as_fd());
        }
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
        if !self.clients.is_empty() {
            return;
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
        self.counted = self.device.and_then(|device| self.rnbd.counters(device));
        match self.device {
            Some(device) if self.session_is_up() => {
                self.phase = Phase::Unmapping;
                self.rnbd.unmap(device);
            }
            _ => self.close_session(turn),
        }
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
        while self.accepts && self.rests_until.is_none() {
            let Some(file) = &self.listener else { break };
            match file.listener.accept() {
                Ok((stream, _)) => {
                    worked = true;
                    if let Err(e) = self.admit(turn, stream) {
                        self.turn_away(turn.now, &e);
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.accepts = false,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => {
                    // Out of descriptors, most likely: it does not help to ask again at once.
                    self.turn_away(turn.now, &e);
                    self.rests_until = Some(turn.now + REST);
                }
            }
        }
        worked
    }

    fn admit(&mut self, turn: &mut TurnCx<'_, ()>, stream: std::os::unix::net::UnixStream) -> io::Result<()> {
        let max = self.config.max_clients;
        let Some(geometry) = self.geometry.filter(|_| self.clients.len() < max) else {
            return Err(io::Error::other(format!("there are {max} already")));
        };
        stream.set_nonblocking(true)?;
        // Several long replies fit, so that the client can read one while the next is on its way.
        if let Err(e) = SockRef::from(&stream).set_send_buffer_size(SEND_BUFFER) {
            tracing::debug!("the send buffer of an NBD client stays as it is: {e}");
        }
        let export = Export {
            name: self.config.device.clone(),
            device: self.config.device.clone(),
            description: String::new(),
            geometry,
        };
        let entry = self.clients.vacant_entry();
        let token = Token(FIRST_CLIENT + entry.key());
        let socket = NbdSocket::new(turn.now, stream, Exports::new(vec![export]));
        turn.sockets.register(socket.descriptor(), token, Interest::READABLE)?;
        entry.insert(socket);
        Ok(())
    }

    fn turn_away(&mut self, now: Instant, why: &io::Error) {
        self.turned_away += 1;
        let more = self.log.due(now).unwrap_or_default();
        if self.log.hit(now) {
            tracing::warn!(more, "an NBD client is turned away: {why}");
        }
    }

    /// Everything that a client's socket and its requests need.
    fn serve(&mut self, turn: &mut TurnCx<'_, ()>, index: usize) -> bool {
        let mut worked = false;
        for _ in 0..READS {
            worked |= self.poll_client(turn, index);
            let Some(client) = self.clients.get_mut(index) else {
                return true;
            };
            if self.unread == 0 {
                break;
            }
            let buffers = self.session.and_then(|session| self.rtrs.buffers(session));
            match client.read(turn.now, buffers) {
                Some(bytes) => self.unread = self.unread.saturating_sub(bytes),
                None => break,
            }
            worked = true;
        }
        worked |= self.poll_client(turn, index);
        worked
    }

    /// What a connection asks for: buffers, copies, requests.
    fn poll_client(&mut self, turn: &mut TurnCx<'_, ()>, index: usize) -> bool {
        let (Some(session), Some(device), Some(info)) = (self.session, self.device, self.info) else {
            return false;
        };
        // All of one size: the pool of the session can't be cut into pieces that are too small. And the messages of the
        // service connection need some as well.
        let size = info.max_io_size as usize;
        let most = (info.queue_depth as usize).saturating_sub(4).max(1);
        let mut worked = false;
        loop {
            let Some(client) = self.clients.get_mut(index) else {
                return true;
            };
            let mut moved = false;
            while let Some(buffer) = client.next_free() {
                moved = true;
                self.rtrs.give_buffer(session, buffer);
            }
            if let Some(buffers) = self.rtrs.buffers(session) {
                client.copy(buffers);
            }
            while let Some(len) = client.connection.poll_need() {
                let taken = match self.rtrs.buffers(session) {
                    Some(buffers) if buffers.lent() < most => {
                        self.rtrs.take_buffer(cx!(turn, self.dice), session, size.max(len))
                    }
                    Some(buffers) => Err(Error::NoBuffer {
                        len,
                        limit: buffers.limit(),
                    }),
                    None => Err(Error::Down(PathError::Closed)),
                };
                match taken {
                    Ok(buffer) => {
                        moved = true;
                        client.connection.give(turn.now, buffer);
                    }
                    Err(Error::NoBuffer { .. }) => {
                        client.connection.lack();
                        if !core::mem::replace(&mut client.starved, true) {
                            self.starved.push_back(index);
                        }
                        break;
                    }
                    Err(Error::Down(_)) => client.connection.refuse(turn.now, Errno::ECONNABORTED),
                    Err(e) => {
                        tracing::warn!("no memory for a request: {e}");
                        client.connection.refuse(turn.now, Errno::ENOMEM);
                    }
                }
            }
            while let Some(request) = client.next_request() {
                moved = true;
                let user = self.operations.insert(Whose::Client(index, request.key)) as u64;
                self.rnbd.submit(
                    device,
                    user,
                    request.op,
                    request.offset,
                    request.len,
                    request.data,
                    index,
                );
            }
            if !moved {
                return worked;
            }
            worked = true;
        }
    }

    /// Sends replies, and lets go of clients that are done. Returns whether there is more to do for it: what a client has taken
    /// may let its next requests begin, which have been read already, or those of one that waits for a buffer.
    fn reply(&mut self, turn: &mut TurnCx<'_, ()>, bytes: usize) -> bool {
        let mut taken: SmallVec<[usize; 8]> = SmallVec::new();
        let mut gone = Vec::new();
        for (index, client) in &mut self.clients {
            let buffers = self.session.and_then(|session| self.rtrs.buffers(session));
            if client.write(turn.now, buffers, bytes) {
                taken.push(index);
            }
            if let Some(interest) = client.other_interest() {
                let token = Token(FIRST_CLIENT + index);
                if let Err(e) = turn.sockets.reregister(client.descriptor(), token, interest) {
                    tracing::warn!("an NBD client can't be watched: {e}");
                    client.connection.cut(turn.now);
                }
            }
            while let Some(buffer) = client.next_free() {
                if let Some(session) = self.session {
                    self.rtrs.give_buffer(session, buffer);
                }
            }
            if client.connection.ended().is_some() {
                gone.push(index);
            }
        }
        let mut more = !gone.is_empty() || (!taken.is_empty() && !self.starved.is_empty());
        for index in gone {
            self.part(turn, index);
        }
        for index in taken {
            more |= self.poll_client(turn, index);
            more |= self.clients.get_mut(index).is_some_and(NbdSocket::has_work);
        }
        more
    }

    fn part(&mut self, turn: &mut TurnCx<'_, ()>, index: usize) {
        let Some(mut client) = self.clients.try_remove(index) else {
            return;
        };
        while let Some(buffer) = client.next_free() {
            self.give(Some(buffer));
        }
        if let Some(end) = client.connection.ended().filter(|end| end.is_fault()) {
            tracing::debug!("NBD client: {end}");
        }
        self.starved.retain(|waits| *waits != index);
        let _ = turn.sockets.deregister(client.descriptor());
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
        worked
    }

    /// Clients that found no buffer ask again, in their order.
    fn feed(&mut self, turn: &mut TurnCx<'_, ()>) -> bool {
        let mut worked = false;
        for _ in 0..self.starved.len() {
            let Some(index) = self.starved.pop_front() else { break };
            if let Some(client) = self.clients.get_mut(index) {
                client.starved = false;
                worked |= self.poll_client(turn, index);
            }
        }
        worked
    }

    fn stats(&self, turn: &mut TurnCx<'_, ()>) -> MapStats {
        let device = self.device.and_then(|device| self.rnbd.counters(device));
        MapStats {
            turns: LoopStats {
                device: turn.device.stats(0).unwrap_or_default(),
                turns: *turn.counters,
            },
            device: device.or(self.counted).unwrap_or_default(),
            clients: self.clients.len(),
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
            Command::Stop => self.stop(turn),
        }
    }

    fn ready(&mut self, _: &mut TurnCx<'_, ()>, token: Token, readiness: Readiness) {
        if token == LISTENER {
            self.accepts = true;
        } else if let Some(client) = self.clients.get_mut(token.0 - FIRST_CLIENT) {
            client.ready(readiness);
        }
    }

    fn completions(&mut self, turn: &mut TurnCx<'_, ()>, completions: &[(QpId, Completion)]) {
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
        if self.rests_until.is_some_and(|at| at <= turn.now) {
            self.rests_until = None;
        }
        for (_, client) in &mut self.clients {
            client.connection.timeout(turn.now);
        }
        self.look_drained(turn);
    }

    fn work(&mut self, turn: &mut TurnCx<'_, ()>) -> bool {
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
        [self.rtrs.next_timeout(), clients, self.rests_until, self.drained_by]
            .into_iter()
            .flatten()
            .min()
    }
}
