//! A host.

use core::fmt;
use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{
        Arc,
        mpsc::{Sender, channel},
    },
    thread::{Builder, JoinHandle},
};

use rand::{RngCore, SeedableRng, rngs::StdRng};
use roce::reactor::{Handle, JobResult, JobTicket, Reactor, ReactorConfig, Service, TurnCx};
use roce::{Completion, DeviceConfig, LocalDevice};
use roce_verbs::mem::Pages;
use roce_verbs::{
    Instant,
    provider::{Event, QpId},
};
use rtrs::{
    Cx, Error, IoError,
    client::{Buffer, Client, Output, SessionId, SessionInfo},
    server::{Server, request},
};

/// Call on the loop.
type Task = Box<dyn FnOnce(&mut Machines, &mut TurnCx<'_, Memory>) + Send>;

/// Work of the helper.
type Job = Box<dyn FnOnce() + Send>;

/// Result of a job: memory that a server has requested.
type Memory = (request::Ticket, Result<Arc<Pages>, roce_verbs::mem::MemError>);

/// Called with the result of an open.
pub(crate) type Opening = Box<dyn FnOnce(Result<SessionInfo, Error>) + Send>;

/// Called with the result of a request.
pub(crate) type Pending = Box<dyn FnOnce(&Client, Result<(), IoError>, Option<Buffer>) + Send>;

/// Called with what a server reports, and the server's number.
pub(crate) type Reports = Box<dyn FnMut(&Host, usize, &Server, request::Output) + Send>;

/// State of a session's user on the loop.
#[derive(Default)]
pub(crate) struct Seat {
    pub(crate) opening: Option<Opening>,
    pub(crate) requests: BTreeMap<u64, Pending>,
    pub(crate) next_tag: u64,
    pub(crate) on_closed: Vec<Box<dyn FnOnce() + Send>>,
}

/// A server with its user.
pub(crate) struct Shop {
    pub(crate) machine: Server,
    pub(crate) reports: Reports,
    pub(crate) stopping: Vec<Box<dyn FnOnce() + Send>>,
}

/// The machines of a host.
pub(crate) struct Machines {
    pub(crate) client: Client,
    pub(crate) seats: BTreeMap<SessionId, Seat>,
    pub(crate) shops: Vec<Option<Shop>>,
    rng: StdRng,
    jobs: u64,
    helper: Sender<Job>,
    myself: Handle<Task, Memory>,
}

impl Machines {
    /// Lets the machines at the devices.
    pub(crate) fn with<T>(
        &mut self,
        turn: &mut TurnCx<'_, Memory>,
        f: impl FnOnce(&mut Client, &mut Vec<Option<Shop>>, &mut Cx<'_>) -> T,
    ) -> T {
        let rng = &mut self.rng;
        let mut cx = Cx {
            now: turn.now,
            provider: turn.device.provider(),
            random: &mut |out: &mut [u8]| rng.fill_bytes(out),
        };
        f(&mut self.client, &mut self.shops, &mut cx)
    }

    fn client_told(&mut self, turn: &mut TurnCx<'_, Memory>, output: Output) {
        match output {
            Output::Opened(id, info) => {
                let pages = self.client.buffers(id).is_some();
                debug_assert!(pages);
                if let Some(opening) = self.seats.get_mut(&id).and_then(|s| s.opening.take()) {
                    opening(Ok(info));
                }
            }
            Output::OpenFailed(id, error) => {
                if let Some(opening) = self.seats.remove(&id).and_then(|s| s.opening) {
                    opening(Err(error));
                }
            }
            Output::Done {
                session,
                tag,
                result,
                data,
            } => {
                let pending = self.seats.get_mut(&session).and_then(|s| s.requests.remove(&tag));
                if let Some(pending) = pending {
                    pending(&self.client, result, data);
                } else if let Some(data) = data {
                    self.client.give_buffer(session, data);
                }
            }
            Output::Up(..) | Output::Down(..) | Output::Path { .. } => {}
            Output::Closed(id) => {
                for hook in self.seats.remove(&id).into_iter().flat_map(|s| s.on_closed) {
                    hook();
                }
            }
        }
        let _ = turn;
    }

    fn server_told(&mut self, turn: &mut TurnCx<'_, Memory>, shop: usize, output: request::Output) {
        if let request::Output::Allocate { ticket, bytes } = output {
            self.jobs += 1;
            // The shop is in the number, for when the memory comes.
            let number = JobTicket(self.jobs << 16 | shop as u64);
            let started = turn.jobs.begin(number);
            let job = move || started.finish((ticket, Pages::allocate(bytes)));
            self.helper.send(Box::new(job)).expect("the helper ends after the loop");
            return;
        }
        let myself = Host::of(self.myself.clone());
        if let Some(Some(Shop { machine, reports, .. })) = self.shops.get_mut(shop) {
            reports(&myself, shop, machine, output);
        }
    }

    fn memory(
        &mut self,
        turn: &mut TurnCx<'_, Memory>,
        shop: usize,
        ticket: request::Ticket,
        memory: Result<Arc<Pages>, roce_verbs::mem::MemError>,
    ) {
        self.with(turn, |_, shops, cx| {
            if let Some(Some(shop)) = shops.get_mut(shop) {
                shop.machine.ready(cx, ticket, memory);
            }
        });
    }
}

impl Service for Machines {
    type Command = Task;
    type Output = Memory;

    fn command(&mut self, turn: &mut TurnCx<'_, Memory>, task: Task) {
        task(self, turn);
    }

    fn completions(&mut self, turn: &mut TurnCx<'_, Memory>, completions: &[(QpId, Completion)]) {
        self.with(turn, |client, shops, cx| {
            for (qp, wc) in completions {
                let mut taken = client.completion(cx, *qp, wc);
                for shop in shops.iter_mut().flatten() {
                    taken = taken || shop.machine.completion(cx, *qp, wc);
                }
            }
        });
    }

    fn event(&mut self, turn: &mut TurnCx<'_, Memory>, event: Event) {
        self.with(turn, |client, shops, cx| {
            let mut taken = client.event(cx, &event);
            for shop in shops.iter_mut().flatten() {
                taken = taken || shop.machine.event(cx, &event);
            }
        });
    }

    fn job_done(&mut self, turn: &mut TurnCx<'_, Memory>, done: JobResult<Memory>) {
        if let Ok((ticket, memory)) = done.result {
            self.memory(turn, (done.ticket.0 & 0xffff) as usize, ticket, memory);
        }
    }

    fn timeout(&mut self, turn: &mut TurnCx<'_, Memory>) {
        self.with(turn, |client, shops, cx| {
            client.timeout(cx);
            for shop in shops.iter_mut().flatten() {
                shop.machine.timeout(cx);
            }
        });
    }

    fn work(&mut self, turn: &mut TurnCx<'_, Memory>) -> bool {
        let mut worked = false;
        while let Some(output) = self.client.poll_output() {
            worked = true;
            self.client_told(turn, output);
        }
        for index in 0..self.shops.len() {
            while let Some(output) = self.shops[index].as_mut().and_then(|s| s.machine.poll_output()) {
                worked = true;
                self.server_told(turn, index, output);
            }
        }
        worked
    }

    fn end(&mut self, turn: &mut TurnCx<'_, Memory>) {
        self.with(turn, |client, shops, cx| {
            client.end_batch(cx);
            for shop in shops.iter_mut().flatten() {
                shop.machine.end_batch(cx);
            }
        });
        for place in &mut self.shops {
            if let Some(mut shop) = place.take_if(|s| !s.stopping.is_empty() && s.machine.is_idle()) {
                for hook in shop.stopping.drain(..) {
                    hook();
                }
            }
        }
    }

    fn next_timeout(&self) -> Option<Instant> {
        let shops = self.shops.iter().flatten().filter_map(|s| s.machine.next_timeout());
        shops.chain(self.client.next_timeout()).min()
    }
}

struct Life {
    handle: Handle<Task, Memory>,
    threads: Vec<JoinHandle<()>>,
}

impl Drop for Life {
    fn drop(&mut self) {
        self.handle.command(Box::new(|_, turn| turn.stop()));
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// A host with one address: its loop runs until the last clone goes. To be dropped by a test's thread, not by a callback.
#[derive(Clone)]
pub struct Host {
    handle: Handle<Task, Memory>,
    life: Option<Arc<Life>>,
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host").finish_non_exhaustive()
    }
}

impl Host {
    /// A host at an address.
    ///
    /// # Panics
    /// When the system refuses.
    pub fn open(addr: IpAddr) -> Self {
        let device = LocalDevice::open(&[DeviceConfig::new(addr)]).expect("a device");
        let reactor = Reactor::<Machines>::new(ReactorConfig::default()).expect("a loop");
        let handle = reactor.handle();
        let myself = handle.clone();
        let (helper, work) = channel::<Job>();
        let turns = Builder::new().name("rig".into()).spawn(move || {
            let mut seed = [0; 32];
            getrandom::fill(&mut seed).expect("random bytes");
            let machines = Machines {
                client: Client::new(),
                seats: BTreeMap::new(),
                shops: Vec::new(),
                rng: StdRng::from_seed(seed),
                jobs: 0,
                helper,
                myself,
            };
            let ended = reactor.run(device, |_| machines);
            ended.expect("the loop goes on");
        });
        let jobs = Builder::new()
            .name("rig-helper".into())
            .spawn(move || work.into_iter().for_each(|job| job()));
        let threads = [turns, jobs].map(|t| t.expect("a thread")).into();
        let life = Some(Arc::new(Life {
            handle: handle.clone(),
            threads,
        }));
        Self { handle, life }
    }

    /// As callbacks have it: it does not keep the loop alive.
    fn of(handle: Handle<Task, Memory>) -> Self {
        Self { handle, life: None }
    }

    /// For objects that may be dropped by callbacks.
    pub(crate) fn weak(&self) -> Self {
        Self::of(self.handle.clone())
    }

    /// Whether it keeps the loop alive.
    pub(crate) fn is_strong(&self) -> bool {
        self.life.is_some()
    }

    /// Has something done on the loop.
    pub(crate) fn run(&self, task: impl FnOnce(&mut Machines, &mut TurnCx<'_, Memory>) + Send + 'static) {
        self.handle.command(Box::new(task));
    }

    /// Has something done on the loop, and waits for what it gives.
    pub(crate) fn ask<T: Send + 'static>(
        &self,
        task: impl FnOnce(&mut Machines, &mut TurnCx<'_, Memory>) -> T + Send + 'static,
    ) -> T {
        let (tell, answer) = channel();
        self.run(move |machines, turn| {
            let _ = tell.send(task(machines, turn));
        });
        answer.recv().expect("the loop runs")
    }
}
