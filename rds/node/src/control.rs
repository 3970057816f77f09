//! Requests of programs.

use std::{
    io,
    net::SocketAddr,
    os::fd::{AsFd, OwnedFd},
};

use rand::RngCore;
use rds::MessageInfo;
use rds_local::{Answer, Record, Request, SocketFlags, SocketKey, SocketOption, info as raw};
use roce::reactor::TurnCx;
use rustix::{
    io::Errno,
    net::{RecvFlags, SendFlags},
};

use crate::{
    errno,
    info::{self, SocketInfo, Source},
    opening::{self, Opened},
    program::Program,
    server::{Client, Entry, Pending, Server, Waiting},
};

/// Requests of a client in one turn.
const REQUESTS: usize = 16;
/// Largest buffer that a socket may have.
const MAX_BUFFER: u64 = 1 << 30;
/// `RDS_TRANS_IB`, and how many numbers of transports there are.
const TRANSPORT_IB: u64 = 0;
const TRANSPORTS: u64 = 3;

/// Answer and its descriptors, or an error number; `None`: it comes later.
pub(crate) type Outcome = Result<Option<(Answer, Vec<OwnedFd>)>, Errno>;

pub(crate) fn done(answer: Answer) -> Outcome {
    Ok(Some((answer, Vec::new())))
}

/// IPv4 addresses have one form.
fn canonical(addr: SocketAddr) -> SocketAddr {
    match addr.ip().to_canonical() {
        ip if ip == addr.ip() => addr,
        ip => SocketAddr::new(ip, addr.port()),
    }
}

/// The same with the interface of another.
fn with_interface(mut addr: SocketAddr, of: SocketAddr) -> SocketAddr {
    if let (SocketAddr::V6(addr), SocketAddr::V6(of)) = (&mut addr, of) {
        addr.set_scope_id(of.scope_id());
    }
    addr
}

/// Returns the error number of a system call that failed.
fn refused(e: &io::Error) -> Errno {
    Errno::from_io_error(e).unwrap_or(Errno::NOMEM)
}

impl Server {
    /// Reads requests of a client, and answers.
    pub(crate) fn serve(&mut self, turn: &mut TurnCx<'_, Opened>, index: usize) {
        for _ in 0..REQUESTS {
            let Some(Entry::Client(client)) = self.entries.get_mut(index) else {
                return;
            };
            match client.pending {
                Pending::Nothing => {}
                Pending::Bind => return self.notice_end(turn, index),
                Pending::Port { socket, to } => match self.port(socket, to) {
                    Err(Errno::NOBUFS) => return self.notice_end(turn, index),
                    result => {
                        self.answer(turn, index, result.map(|()| (Answer::default(), Vec::new())));
                        continue;
                    }
                },
            }
            if !client.readable {
                return;
            }
            let mut bytes = [0; Request::LEN + 1];
            let (request, record) = match rds_local::receive(&client.socket, &mut bytes, RecvFlags::DONTWAIT) {
                Ok(Some(record)) => (Request::parse(bytes.get(..record.len).unwrap_or_default()), record),
                Err(Errno::AGAIN) => {
                    client.readable = false;
                    return;
                }
                Ok(None) | Err(_) => return self.close(turn, index),
            };
            let outcome = match request {
                Ok(request) => self.handle(turn, index, request, record),
                Err(e) => {
                    tracing::info!("a request of process {} is none: {e}", client.process);
                    self.answer(turn, index, Err(Errno::PROTO));
                    return self.close(turn, index);
                }
            };
            match outcome {
                Ok(None) => {}
                Ok(Some(answer)) => self.answer(turn, index, Ok(answer)),
                Err(e) => self.answer(turn, index, Err(e)),
            }
        }
        self.ready.insert(index);
    }

    /// Closes a client that has gone while it waited.
    fn notice_end(&mut self, turn: &mut TurnCx<'_, Opened>, index: usize) {
        let Some(Entry::Client(client)) = self.entries.get_mut(index) else {
            return;
        };
        if !client.readable {
            return;
        }
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        match rds_local::receive(&client.socket, &mut [0], flags) {
            // A further request stays where it is.
            Ok(Some(_)) => {}
            Err(Errno::AGAIN) => client.readable = false,
            Ok(None) | Err(_) => self.close(turn, index),
        }
    }

    /// Sends an answer. A client that has no room for it has not read those before.
    pub(crate) fn answer(
        &mut self,
        turn: &mut TurnCx<'_, Opened>,
        index: usize,
        result: Result<(Answer, Vec<OwnedFd>), Errno>,
    ) {
        let Some(Entry::Client(client)) = self.entries.get_mut(index) else {
            return;
        };
        client.pending = Pending::Nothing;
        self.waiting.remove(&index);
        let (answer, fds) = result.unwrap_or_else(|e| (Answer::error(e.raw_os_error()), Vec::new()));
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let bytes = answer.to_bytes();
        let parts = [io::IoSlice::new(&bytes)];
        if rds_local::send(&client.socket, &parts, &fds, SendFlags::DONTWAIT).is_err() {
            self.close(turn, index);
        }
    }

    fn handle(&mut self, turn: &mut TurnCx<'_, Opened>, index: usize, request: Request, record: Record) -> Outcome {
        match request {
            Request::Socket => self.new_socket(turn, index),
            Request::Attach(key) => {
                let page = self.program(key)?.1.page_file.try_clone();
                let page = page.map_err(|e| refused(&e))?;
                Ok(Some((Answer::default(), vec![page])))
            }
            Request::Bind(key, addr) => self.begin_bind(turn, index, key, canonical(addr)),
            Request::Connect(key, addr) => self.connect(key, canonical(addr)),
            Request::SetTos(key, tos) => {
                let (node, program) = self.bound(key, Errno::NOTTY)?;
                node.set_tos(program.1, tos).map_err(errno::of_call)?;
                program.0.page.set_tos(tos);
                done(Answer::default())
            }
            Request::SetOption(key, option, value) => self.set_option(turn, key, option, value),
            Request::Cancel(key, to) => self.cancel(key, canonical(to)),
            Request::Congestion { socket, to, wait } => self.congestion(index, socket, to.map(canonical), wait),
            Request::Info(number) => self.info(number),
            Request::Memory => self.set_memory(index, record),
            Request::Region(key, cookie) => self.check_region(key, cookie),
            Request::Map {
                socket,
                addr,
                len,
                flags,
            } => {
                let memory = self.memory_of(index, record.process)?;
                self.map(turn, socket, (memory, addr, len), flags)
            }
            Request::Unmap { socket, cookie, .. } => self.unmap(socket, cookie),
        }
    }

    /// A bind has failed: the socket may be bound again.
    pub(crate) fn bind_failed(&mut self, key: SocketKey) {
        if let Ok((_, program)) = self.program(key) {
            program.is_binding = false;
        }
    }

    /// Finds a socket.
    pub(crate) fn program(&mut self, key: SocketKey) -> Result<(usize, &mut Program), Errno> {
        let index = *self.keys.get(&key).ok_or(Errno::NOTSOCK)?;
        match self.entries.get_mut(index) {
            Some(Entry::Program(program)) => Ok((index, program)),
            _ => Err(Errno::NOTSOCK),
        }
    }

    /// Finds a socket that is bound, with its node and number there.
    pub(crate) fn bound(
        &mut self,
        key: SocketKey,
        otherwise: Errno,
    ) -> Result<(&mut rds::Node, (&mut Program, rds::SocketId)), Errno> {
        let index = *self.keys.get(&key).ok_or(Errno::NOTSOCK)?;
        let Some(Entry::Program(program)) = self.entries.get_mut(index) else {
            return Err(Errno::NOTSOCK);
        };
        let (addr, id) = program.at.ok_or(otherwise)?;
        let address = self.addrs.get_mut(&addr).ok_or(otherwise)?;
        Ok((&mut address.node, (program, id)))
    }

    fn new_socket(&mut self, turn: &mut TurnCx<'_, Opened>, client: usize) -> Outcome {
        let Some(Entry::Client(Client { process, .. })) = self.entries.get(client) else {
            return Err(Errno::BADF);
        };
        let process = *process;
        let key = loop {
            let key = SocketKey(self.rng.next_u64());
            if !self.keys.contains_key(&key) {
                break key;
            }
        };
        let (program, theirs) = Program::new(key, process, self.config.limits.pair).map_err(|e| refused(&e))?;
        let page = program.page_file.try_clone().map_err(|e| refused(&e))?;
        let buffers = program.reserved();
        let limits = self.config.limits;
        let mut fits = self.quotas.add_socket(process, buffers, &limits);
        if !fits && self.close_hung_up(turn, process) {
            fits = self.quotas.add_socket(process, buffers, &limits);
        }
        if !fits {
            self.limit_reached(turn, process, "sockets, or bytes of their buffers");
            return Err(Errno::NOBUFS);
        }
        let Some(index) = self.add(turn, Entry::Program(Box::new(program))) else {
            self.quotas.remove_socket(process, buffers);
            return Err(Errno::NFILE);
        };
        self.keys.insert(key, index);
        let answer = Answer {
            value: key.0,
            ..Answer::default()
        };
        Ok(Some((answer, vec![theirs, page])))
    }

    fn begin_bind(
        &mut self,
        turn: &mut TurnCx<'_, Opened>,
        client: usize,
        key: SocketKey,
        addr: SocketAddr,
    ) -> Outcome {
        let is_over = self.stopping.is_some();
        let is_open = self.addrs.contains_key(&addr.ip());
        let (_, program) = self.program(key)?;
        if program.at.is_some() || program.is_binding || !rds::is_unicast(addr.ip()) || addr.port() == 1 {
            return Err(Errno::INVAL);
        }
        if is_over {
            return Err(Errno::ADDRNOTAVAIL);
        }
        if is_open {
            return self.bind(key, addr).map(|answer| Some((answer, Vec::new())));
        }
        program.is_binding = true;
        let waiting = Waiting { client, key, addr };
        match self.opening.get_mut(&addr.ip()) {
            Some(others) => others.push(waiting),
            None => {
                opening::open(turn, &self.config, addr.ip());
                self.opening.insert(addr.ip(), vec![waiting]);
            }
        }
        if let Some(Entry::Client(client)) = self.entries.get_mut(client) {
            client.pending = Pending::Bind;
        }
        Ok(None)
    }

    /// Binds a socket to an address that is open.
    pub(crate) fn bind(&mut self, key: SocketKey, addr: SocketAddr) -> Result<Answer, Errno> {
        let random = self.rng.next_u32() as u16;
        let index = *self.keys.get(&key).ok_or(Errno::NOTSOCK)?;
        let Some(Entry::Program(program)) = self.entries.get_mut(index) else {
            return Err(Errno::NOTSOCK);
        };
        program.is_binding = false;
        let address = self.addrs.get_mut(&addr.ip()).ok_or(Errno::ADDRNOTAVAIL)?;
        if !address.is_on(addr) {
            tracing::info!("{addr}: its interface is another one");
            return Err(Errno::ADDRNOTAVAIL);
        }
        let node = &mut address.node;
        // The program may have closed another socket there before: the event for that comes later.
        if let Some(holder) = node.bound_to(addr)
            && let Some(Entry::Program(program)) =
                address.sockets.get(&holder).and_then(|index| self.entries.get(*index))
            && program.is_hung_up()
        {
            let _ = node.release_port(holder);
        }
        let id = node.socket().map_err(errno::of_call)?;
        let bound = match node.bind(id, addr, random) {
            Ok(bound) => with_interface(bound, addr),
            Err(e) => {
                let _ = node.close(id);
                return Err(errno::of_call(e));
            }
        };
        let Some(Entry::Program(program)) = self.entries.get_mut(index) else {
            return Err(Errno::NOTSOCK);
        };
        let (send, recv) = program.buffers;
        let _ = node.set_buffers(id, Some(send), Some(recv));
        let _ = node.set_congestion_monitor(id, program.monitors);
        let _ = node.set_reports_errors(id, program.page.flag(SocketFlags::RecvErr));
        if let Some(peer) = program.peer {
            let _ = node.connect(id, peer);
        }
        address.sockets.insert(id, index);
        program.at = Some((addr.ip(), id));
        program.page.set_bound(bound);
        program.page.set_transport(TRANSPORT_IB as u32);
        program.page.set_some_port_is_congested(node.some_port_is_congested());
        self.ready.insert(index);
        Ok(Answer {
            addr: Some(bound),
            ..Answer::default()
        })
    }

    fn connect(&mut self, key: SocketKey, to: SocketAddr) -> Outcome {
        let (_, program) = self.program(key)?;
        rds::check_peer(to).map_err(errno::of_call)?;
        program.peer = Some(to);
        program.page.set_peer(to);
        if let Ok((node, (_, id))) = self.bound(key, Errno::NOTCONN) {
            node.connect(id, to).map_err(errno::of_call)?;
        }
        done(Answer::default())
    }

    fn set_option(&mut self, turn: &TurnCx<'_, Opened>, key: SocketKey, option: SocketOption, value: u64) -> Outcome {
        let limits = self.config.limits;
        let index = self.program(key)?.0;
        let Some(Entry::Program(program)) = self.entries.get_mut(index) else {
            return Err(Errno::NOTSOCK);
        };
        match option {
            SocketOption::SendBuffer | SocketOption::RecvBuffer => {
                let value = value.min(MAX_BUFFER) as usize;
                let (send, recv) = program.buffers;
                let new = match option {
                    SocketOption::SendBuffer => (value, recv),
                    _ => (send, value),
                };
                let sizes = (program.reserved(), new.0 + new.1);
                let process = program.process;
                if !self.quotas.resize(process, sizes, &limits) {
                    self.limit_reached(turn, process, "bytes of its sockets' buffers");
                    return Err(Errno::NOBUFS);
                }
                program.buffers = new;
                program.page.set_buffers(new.0, new.1);
            }
            SocketOption::RecvErr => program.page.set_flag(SocketFlags::RecvErr, value != 0),
            SocketOption::CongMonitor => {
                program.monitors = value != 0;
                program.page.set_flag(SocketFlags::CongMonitor, value != 0);
            }
            SocketOption::Transport => {
                if program.transport.is_some() || program.at.is_some() {
                    return Err(Errno::OPNOTSUPP);
                }
                match value {
                    TRANSPORT_IB => {}
                    other if other < TRANSPORTS => return Err(Errno::NOPROTOOPT),
                    _ => return Err(Errno::INVAL),
                }
                program.transport = Some(value as u32);
                program.page.set_transport(value as u32);
            }
        }
        let (buffers, monitors) = (program.buffers, program.monitors);
        if let Ok((node, (_, id))) = self.bound(key, Errno::NOTCONN) {
            let _ = node.set_buffers(id, Some(buffers.0), Some(buffers.1));
            match option {
                SocketOption::CongMonitor => drop(node.set_congestion_monitor(id, monitors)),
                SocketOption::RecvErr => drop(node.set_reports_errors(id, value != 0)),
                _ => {}
            }
            self.ready.insert(index);
        }
        done(Answer::default())
    }

    fn cancel(&mut self, key: SocketKey, to: SocketAddr) -> Outcome {
        let index = self.program(key)?.0;
        let Some(Entry::Program(program)) = self.entries.get_mut(index) else {
            return Err(Errno::NOTSOCK);
        };
        let (addr, id) = program.at.ok_or(Errno::NOTCONN)?;
        let address = self.addrs.get_mut(&addr).ok_or(Errno::NOTCONN)?;
        // What it has sent before may be on its way here.
        program.readable = true;
        program.cancel(
            (&mut address.node, id),
            to,
            &self.memories,
            &mut self.scratch,
            &mut self.counts,
        );
        address.node.cancel_sent_to(id, to).map_err(errno::of_call)?;
        self.ready.insert(index);
        done(Answer::default())
    }

    fn congestion(&mut self, client: usize, key: SocketKey, to: Option<SocketAddr>, wait: bool) -> Outcome {
        let (index, program) = self.program(key)?;
        let to = to.or(program.peer).ok_or(Errno::NOTCONN)?;
        let checked = self.port(index, to);
        if let (Err(Errno::NOBUFS), Ok((node, _))) = (&checked, self.bound(key, Errno::NOTCONN)) {
            node.note_congestion(wait);
        }
        match checked {
            Ok(()) => done(Answer::default()),
            Err(Errno::NOBUFS) if wait => {
                if let Some(Entry::Client(waiting)) = self.entries.get_mut(client) {
                    waiting.pending = Pending::Port { socket: index, to };
                    self.waiting.insert(client);
                }
                Ok(None)
            }
            Err(e) => Err(e),
        }
    }

    /// Checks whether a socket may send to a port: `ENOBUFS` while it is congested.
    fn port(&mut self, socket: usize, to: SocketAddr) -> Result<(), Errno> {
        let Some(Entry::Program(program)) = self.entries.get(socket) else {
            return Err(Errno::BADF);
        };
        let (addr, id) = program.at.ok_or(Errno::NOTCONN)?;
        let address = self.addrs.get_mut(&addr).ok_or(Errno::NOTCONN)?;
        address.node.check_congestion(id, to).map_err(errno::of_call)
    }

    fn info(&self, number: u32) -> Outcome {
        let (bytes, size) = info::bytes(number, self).ok_or(Errno::NOPROTOOPT)?;
        let file = rds_local::memory_file(&bytes).map_err(|e| refused(&e))?;
        let answer = Answer {
            value: size as u64,
            len: bytes.len() as u64,
            ..Answer::default()
        };
        Ok(Some((answer, vec![file])))
    }

    pub(crate) fn programs(&self) -> impl Iterator<Item = &Program> {
        self.entries.iter().filter_map(|(_, entry)| match entry {
            Entry::Program(program) => Some(&**program),
            Entry::Client(_) => None,
        })
    }
}

impl Source for Server {
    fn counters(&self) -> rds::Counters {
        let all = self.addrs.values().map(|address| *address.node.counters());
        all.fold(rds::Counters::default(), |sum, more| sum + more)
    }

    fn own_counters(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("local_bad_packet", self.counts.bad_packets),
            ("local_refused", self.refused),
        ]
    }

    fn connections(&self) -> Vec<rds::ConnectionInfo> {
        self.addrs
            .values()
            .flat_map(|address| address.node.connections())
            .collect()
    }

    fn messages(&self, number: u32) -> Vec<MessageInfo> {
        let nodes = self.addrs.values().map(|address| &address.node);
        match number {
            raw::SEND_MESSAGES => nodes.flat_map(|node| node.outgoing(false)).collect(),
            raw::RETRANS_MESSAGES => nodes.flat_map(|node| node.outgoing(true)).collect(),
            _ => {
                let taken = self.programs().flat_map(Program::unread);
                nodes.flat_map(rds::Node::unread).chain(taken).collect()
            }
        }
    }

    fn sockets(&self) -> Vec<SocketInfo> {
        let info = |program: &Program| SocketInfo {
            bound: program
                .at
                .and_then(|(addr, _)| program.bound(&self.addrs.get(&addr)?.node)),
            peer: program.peer,
            buffers: program.buffers,
            inode: program.inode,
        };
        self.programs().map(info).collect()
    }

    fn rings(&self) -> (u32, u32) {
        (self.config.rds.rings.send, self.config.rds.rings.recv)
    }
}
