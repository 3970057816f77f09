//! The process as a service of a loop.

use roce::{
    Completion,
    reactor::{JobResult, Readiness, Service, Token, TurnCx},
};
use roce_verbs::{
    Instant,
    provider::{Event, QpId, VerbsError},
};
use rustix::io::Errno;

use crate::{
    address::Address,
    errno,
    event::NodeEvent,
    opening::{Command, Opened},
    server::{Server, with_cx},
};

/// Text of why an address can't be opened.
fn taken(errno: Errno, e: &VerbsError) -> String {
    match errno {
        Errno::ADDRINUSE => format!("another RDS node has it, of another user or of a program with rds-host ({e})"),
        _ => e.to_string(),
    }
}

impl Server {
    /// Listens at an address whose device is open. Returns why not.
    fn listen(&mut self, turn: &mut TurnCx<'_, Opened>, opened: Opened) -> Result<(), Errno> {
        let addr = opened.addr;
        let (now, events) = (turn.now, &mut self.events);
        let mut failed = |why: String| events.report(now, NodeEvent::NotOpened { addr, why });
        match opened.device {
            None => {}
            Some(Ok(device)) => {
                turn.attach(device).map_err(|(e, _)| {
                    failed(format!("its device can't be watched: {e}"));
                    Errno::ADDRNOTAVAIL
                })?;
            }
            Some(Err(e)) => {
                let errno = errno::of_open(&e);
                failed(taken(errno, &e));
                return Err(errno);
            }
        }
        let state = opened.state.map_err(|e| {
            failed(format!("its state file can't be opened: {e}"));
            Errno::IO
        })?;
        let rds = self.config.rds.clone();
        let address = with_cx(turn, &mut self.rng, |cx| {
            Address::listen(cx, addr, &rds, state, opened.interface)
        });
        let address = address.map_err(|e| {
            let errno = errno::of_open(&e);
            failed(taken(errno, &e));
            errno
        })?;
        self.report_open(turn, addr);
        self.addrs.insert(addr, address);
        Ok(())
    }

    fn opened(&mut self, turn: &mut TurnCx<'_, Opened>, opened: Opened) {
        let addr = opened.addr;
        let result = self.listen(turn, opened);
        for waiting in self.opening.remove(&addr).unwrap_or_default() {
            let bound = match result {
                Ok(()) => self.bind(waiting.key, waiting.addr),
                Err(e) => {
                    self.bind_failed(waiting.key);
                    Err(e)
                }
            };
            self.answer(turn, waiting.client, bound.map(|answer| (answer, Vec::new())));
            self.ready.insert(waiting.client);
        }
    }
}

impl Service for Server {
    type Command = Command;
    type Output = Opened;

    fn command(&mut self, turn: &mut TurnCx<'_, Opened>, command: Command) {
        match command {
            Command::Open(addr) => self.open(turn, addr),
            Command::SetLimits(limits) => self.config.limits = limits,
            // Perhaps nobody waits any more.
            Command::Stats(to) => drop(to.send(self.stats(turn))),
            Command::Stop => self.stop(turn),
        }
    }

    fn ready(&mut self, _: &mut TurnCx<'_, Opened>, token: Token, now: Readiness) {
        self.note_ready(token, now.readable || now.closed, now.writable);
    }

    fn completions(&mut self, turn: &mut TurnCx<'_, Opened>, completions: &[(QpId, Completion)]) {
        let addrs = &mut self.addrs;
        with_cx(turn, &mut self.rng, |cx| {
            for (qp, wc) in completions {
                // Numbers are those of one node.
                addrs.values_mut().any(|address| address.node.completion(cx, *qp, wc));
            }
        });
    }

    fn event(&mut self, turn: &mut TurnCx<'_, Opened>, event: Event) {
        let addrs = &mut self.addrs;
        with_cx(turn, &mut self.rng, |cx| {
            addrs.values_mut().any(|address| address.node.event(cx, &event));
        });
    }

    fn job_done(&mut self, turn: &mut TurnCx<'_, Opened>, done: JobResult<Opened>) {
        match done.result {
            Ok(opened) => self.opened(turn, opened),
            // Its address is not known: those that wait are refused.
            Err(_) => {
                for (addr, waiting) in std::mem::take(&mut self.opening) {
                    let why = "the thread for that is gone".into();
                    self.events.report(turn.now, NodeEvent::NotOpened { addr, why });
                    for waiting in waiting {
                        self.bind_failed(waiting.key);
                        self.answer(turn, waiting.client, Err(Errno::NOMEM));
                    }
                }
            }
        }
    }

    fn timeout(&mut self, turn: &mut TurnCx<'_, Opened>) {
        Server::timeout(self, turn);
    }

    fn end(&mut self, turn: &mut TurnCx<'_, Opened>) {
        self.end_turn(turn);
    }

    fn sent(&mut self, _: &mut TurnCx<'_, Opened>) -> bool {
        !self.ready.is_empty()
    }

    fn next_timeout(&self) -> Option<Instant> {
        Server::next_timeout(self, roce::now())
    }
}
