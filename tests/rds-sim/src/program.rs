//! A host's node and its program: sockets that send to those of all hosts, and read.

use std::net::{IpAddr, SocketAddr};

use rds::{Attachment, Error, Node, OperationFlags, Output, Received, SocketId};
use roce_sim::{Check, Coverage, Rng};
use roce_verbs::{
    Completion, Instant,
    provider::{Cx, Event, QpId},
};

use crate::{
    board::Board,
    draw::ProgramPlan,
    ledger::{Ledger, content},
};

/// First port; a host's sockets have the next ones.
const FIRST_PORT: u16 = 4000;
/// Type of service of some sockets.
const TOS: u8 = 8;
/// Most sockets of a program.
const MOST: usize = 4;

/// Socket of a program.
#[derive(Debug)]
struct Open {
    id: SocketId,
    at: SocketAddr,
    /// When it is read; `None`: when the network is quiet.
    reads_at: Option<u64>,
    /// It has something to read, as it was told.
    readable: bool,
    /// It can't send until it is told that it has changed.
    waits: bool,
    /// It is told of operations that failed.
    reports_errors: bool,
}

/// State of the world that a program works with.
pub(crate) struct Env<'a> {
    pub(crate) ledger: &'a mut Ledger,
    pub(crate) board: &'a mut Board,
    pub(crate) rng: &'a mut Rng,
    pub(crate) coverage: &'a mut Coverage,
    /// Address of each host, and sockets of its program.
    pub(crate) hosts: &'a [(IpAddr, usize)],
    pub(crate) quiet: bool,
}

/// Host's node and program.
pub(crate) struct Side {
    pub(crate) node: Node,
    pub(crate) plan: ProgramPlan,
    addr: IpAddr,
    open: Vec<Open>,
    /// When it sends next.
    sends_at: u64,
}

impl Side {
    /// Starts a program on a node.
    pub(crate) fn start(node: Node, plan: ProgramPlan, now: u64, env: &mut Env<'_>) -> Result<Self, String> {
        let addr = node.addrs()[0];
        let mut side = Self {
            node,
            plan,
            addr,
            open: Vec::new(),
            sends_at: now,
        };
        for index in 0..side.plan.sockets {
            let open = side.open_socket(index, now, env).map_err(|e| e.to_string())?;
            side.open.push(open);
        }
        Ok(side)
    }

    fn open_socket(&mut self, index: usize, now: u64, env: &mut Env<'_>) -> Result<Open, Error> {
        let id = self.node.socket()?;
        let at = self.node.bind(id, (self.addr, FIRST_PORT + index as u16).into(), 0)?;
        // The order holds within a type of service, so a port keeps the one that it has.
        if self.plan.tos && index % 2 == 1 {
            self.node.set_tos(id, TOS)?;
        }
        let monitors = env.rng.chance(self.plan.monitors);
        self.node.set_congestion_monitor(id, monitors)?;
        let reports_errors = index.is_multiple_of(2);
        self.node.set_reports_errors(id, reports_errors)?;
        self.node.poll(id)?;
        let sleeps = env.rng.chance(self.plan.sleepers) && !env.quiet;
        env.coverage.note_if("socket that is not read", sleeps);
        Ok(Open {
            id,
            at,
            reads_at: (!sleeps).then_some(now),
            readable: true,
            waits: false,
            reports_errors,
        })
    }

    /// Returns whether it has sent and read all.
    pub(crate) fn is_done(&self) -> bool {
        self.plan.messages == 0 && self.node.is_idle()
    }

    /// The network is quiet: everything is read.
    pub(crate) fn enter_quiet(&mut self, now: u64) {
        for open in &mut self.open {
            open.reads_at.get_or_insert(now);
        }
        (self.plan.closes, self.plan.cancels) = (0.0, 0.0);
    }

    /// Everything that can be done now.
    pub(crate) fn work(&mut self, cx: &mut Cx<'_>, env: &mut Env<'_>) -> Check {
        let now = cx.now.as_nanos();
        while let Some(output) = self.node.poll_output() {
            match output {
                Output::Changed(id) => self.changed(id)?,
                Output::Up(_) => env.coverage.note("connection"),
                Output::Down(..) => env.coverage.note("connection lost"),
                Output::Restarted(_) => env.coverage.note("peer counts from the beginning"),
                Output::Congested(_) => env.coverage.note("congested port"),
                Output::PeerCongested(_) => env.coverage.note("congested port of a peer"),
                Output::Refused { .. } => env.coverage.note("connect request refused"),
            }
        }
        for index in 0..self.open.len() {
            self.read(index, now, env)?;
        }
        self.offer(cx, env)?;
        while self.plan.messages > 0 && self.sends_at <= now {
            match env.rng.unit() {
                chance if chance < self.plan.closes => self.close(now, env)?,
                chance if chance < self.plan.closes + self.plan.cancels => self.cancel(env)?,
                _ => {
                    if !self.send(env)? {
                        break;
                    }
                }
            }
            self.sends_at = now + env.rng.range(0, self.plan.think);
        }
        Ok(())
    }

    fn changed(&mut self, id: SocketId) -> Check {
        let ready = self.node.poll(id).map_err(|e| e.to_string())?;
        let Some(open) = self.open.iter_mut().find(|open| open.id == id) else {
            return Err(format!("{id:?} has changed, which is not open"));
        };
        open.readable |= ready.readable;
        open.waits = false;
        Ok(())
    }

    fn read(&mut self, index: usize, now: u64, env: &mut Env<'_>) -> Check {
        while let Some(open) = self.open.get_mut(index)
            && open.readable
            && open.reads_at.is_some_and(|at| at <= now)
        {
            let (id, at) = (open.id, open.at);
            open.reads_at = Some(now + env.rng.range(0, self.plan.reads_each));
            let peeked = self.node.peek(id);
            let received = self.node.receive(id);
            if peeked != received {
                return Err(format!("{peeked:?} is next, then {received:?}"));
            }
            match received {
                Ok(Received::Message(message)) => {
                    env.ledger.received((message.from, at), &message.data)?;
                    let used = env.board.received(&message, env.coverage)?;
                    if let Some(used) = used
                        && self.node.free_region(used.id, used.cookie) != Err(Error::Invalid)
                    {
                        return Err(format!("{used:?} was used, and is not freed"));
                    }
                }
                Ok(Received::Rdma(notice)) => env.board.notice(at, notice, env.coverage)?,
                Ok(Received::Uncongested(_)) => env.coverage.note("told of ports that are free again"),
                Err(Error::WouldBlock) => {
                    // From here on it is told.
                    open.readable = self.node.poll(id).map_err(|e| e.to_string())?.readable;
                }
                Err(e) => return Err(format!("receiving: {e}")),
            }
        }
        Ok(())
    }

    /// Offers memory to others, or takes it back.
    fn offer(&mut self, cx: &mut Cx<'_>, env: &mut Env<'_>) -> Check {
        if let Some((memory, rights)) = env.board.wants_offer(self.addr) {
            let open = &self.open[env.board.index(self.open.len())];
            let range = 0..memory.len();
            let cookie = self.node.register(cx, open.id, memory.clone(), range, rights);
            let cookie = cookie.map_err(|e| format!("registering: {e}"))?;
            env.board.offered(open.at, open.id, cookie, (memory, rights));
        }
        if let Some(offer) = env.board.withdraw(self.addr) {
            match self.node.free_region(offer.id, offer.cookie) {
                Ok(()) => env.coverage.note("memory taken back"),
                // The message that says so may be unread.
                Err(Error::Invalid) if offer.rights.use_once => {}
                Err(e) => return Err(format!("taking memory back: {e}")),
            }
        }
        Ok(())
    }

    /// Sends a message. Returns whether there was a socket that can.
    fn send(&mut self, env: &mut Env<'_>) -> Result<bool, String> {
        let ready: Vec<usize> = (0..self.open.len()).filter(|i| !self.open[*i].waits).collect();
        if ready.is_empty() {
            return Ok(false);
        }
        let open = &mut self.open[ready[env.rng.index(ready.len())]];
        let here = env.rng.chance(0.1);
        let hosts: Vec<_> = env
            .hosts
            .iter()
            .filter(|(addr, _)| (*addr == self.addr) == here)
            .collect();
        let (addr, sockets) = *hosts[env.rng.index(hosts.len())];
        let index = env.rng.index(MOST);
        let to = SocketAddr::new(addr, FIRST_PORT + index as u16);
        let (number, len) = (env.ledger.number(), env.rng.pick(&self.plan.lens));
        let (attachment, operates) = env.board.attach(number, (open.at, to), open.reports_errors);
        let is_silent = match &attachment {
            Attachment::Operation(operation) => operation.flags.contains(OperationFlags::SILENT) && len == 0,
            _ => false,
        };
        let sent = self
            .node
            .send_with(open.id, Some(to), &content(number, len), attachment);
        if sent.is_err() {
            env.board.refused(number);
        }
        match sent {
            Ok(()) => {
                self.plan.messages -= 1;
                // Without a socket it is dropped.
                if index < sockets && !is_silent {
                    env.ledger.accepted((open.at, to), number, len, operates);
                }
            }
            Err(Error::TooLong) => self.plan.messages -= 1,
            Err(Error::WouldBlock) => {
                env.coverage.note("socket full");
                open.waits = true;
            }
            Err(Error::Congested) => {
                env.coverage.note("destination congested");
                open.waits = true;
            }
            Err(e) => return Err(format!("sending: {e}")),
        }
        Ok(true)
    }

    /// Closes a socket, and opens another one at its port.
    fn close(&mut self, now: u64, env: &mut Env<'_>) -> Check {
        let index = env.rng.index(self.open.len());
        let (id, at) = (self.open[index].id, self.open[index].at);
        self.node.close(id).map_err(|e| e.to_string())?;
        env.ledger.may_lose(|(from, to)| *from == at || *to == at);
        env.board.gone(|gone| gone == at);
        env.coverage.note("socket closed");
        // What it was told before it was closed.
        self.drop_news(id);
        self.open[index] = self.open_socket(index, now, env).map_err(|e| e.to_string())?;
        Ok(())
    }

    fn drop_news(&mut self, closed: SocketId) {
        let mut kept = Vec::new();
        while let Some(output) = self.node.poll_output() {
            match output {
                Output::Changed(id) if id == closed => {}
                Output::Changed(id) => kept.push(id),
                _ => {}
            }
        }
        for id in kept {
            let ready = self.node.poll(id).unwrap_or_default();
            if let Some(open) = self.open.iter_mut().find(|open| open.id == id) {
                open.readable |= ready.readable;
                open.waits = false;
            }
        }
    }

    fn cancel(&mut self, env: &mut Env<'_>) -> Check {
        let open = &self.open[env.rng.index(self.open.len())];
        let (addr, _) = env.hosts[env.rng.index(env.hosts.len())];
        let to = SocketAddr::new(addr, FIRST_PORT + env.rng.index(MOST) as u16);
        self.node.cancel_sent_to(open.id, to).map_err(|e| e.to_string())?;
        env.ledger.may_lose(|stream| *stream == (open.at, to));
        env.coverage.note("canceled");
        Ok(())
    }

    /// The host dies. What its sockets had was received in time; all else that its program sent may be lost.
    pub(crate) fn die(&mut self, ledger: &mut Ledger) -> Check {
        for open in &self.open {
            while let Ok(received) = self.node.receive(open.id) {
                if let Received::Message(message) = received {
                    ledger.received((message.from, open.at), &message.data)?;
                }
            }
        }
        let addr = self.addr;
        // Messages for which there was no room have come, and die with it.
        let holds = self.node.connections().any(|connection| connection.is_stalled);
        ledger.may_lose(|(from, to)| from.ip() == addr || holds && to.ip() == addr);
        Ok(())
    }

    /// When it wants to go on by itself.
    pub(crate) fn wakes_at(&self) -> Option<Instant> {
        let sends = (self.plan.messages > 0 && self.open.iter().any(|open| !open.waits)).then_some(self.sends_at);
        let reads = self
            .open
            .iter()
            .filter(|open| open.readable)
            .filter_map(|open| open.reads_at);
        sends.into_iter().chain(reads).min().map(Instant::from_nanos)
    }

    /// Returns what it waits for.
    pub(crate) fn situation(&self) -> String {
        let waits = self.open.iter().filter(|open| open.waits).count();
        format!(
            "{}: {} messages to send, {waits} of {} sockets wait, {:?}",
            self.addr,
            self.plan.messages,
            self.open.len(),
            self.node.connections().collect::<Vec<_>>()
        )
    }
}

/// A host's turn.
pub(crate) struct Turn<'a> {
    pub(crate) side: &'a mut Side,
    pub(crate) env: Env<'a>,
}

impl roce_sim::lan::Machines for Turn<'_> {
    fn completion(&mut self, cx: &mut Cx<'_>, qp: QpId, wc: &Completion) {
        self.side.node.completion(cx, qp, wc);
    }

    fn event(&mut self, cx: &mut Cx<'_>, event: &Event) {
        self.side.node.event(cx, event);
    }

    fn timeout(&mut self, cx: &mut Cx<'_>) {
        self.side.node.timeout(cx);
    }

    fn work(&mut self, cx: &mut Cx<'_>) -> Check {
        self.side.work(cx, &mut self.env)
    }

    fn end_batch(&mut self, cx: &mut Cx<'_>) {
        self.side.node.end_batch(cx);
    }

    fn next_timeout(&self) -> Option<Instant> {
        self.side
            .wakes_at()
            .into_iter()
            .chain(self.side.node.next_timeout())
            .min()
    }
}
