//! Session of a node: batches of tests.

use core::time::Duration;
use std::collections::BTreeMap;

use roce_verbs::Instant;

use super::{
    client::{CallError, CallId, Client, Data},
    errno,
    proto::{Body, DATA_WORD, Features, FrameworkCounters, MAX_BULK, Message, PING_MAGIC, Parameters, Pattern, Sid},
    wire::Name,
};
use crate::{buffer::Buffer, node::Node, proto::Nid};

/// Batches of a session at most, and tests of a batch.
const MAX_BATCHES: usize = 64;
const MAX_TESTS: usize = 64;
/// Bytes of a page, which a bulk test's data may not begin in the middle of a word of.
const PAGE: u32 = 4096;

/// Requests, one after the other, of a test to a node.
#[derive(Debug)]
struct Unit {
    peer: Nid,
    data: Data,
    state: UnitState,
}

/// State of a unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum UnitState {
    Idle,
    /// A request is under way, and so many follow; `None`: there is no end.
    Running(Option<u32>),
}

/// Test of a batch.
#[derive(Debug)]
enum Test {
    /// Others test this node, which needs nothing for that.
    Server,
    Client(ClientTest),
}

/// Test of other nodes by this one.
#[derive(Debug)]
struct ClientTest {
    parameters: Parameters,
    loops: Option<u32>,
    stops_on_error: bool,
    is_stopping: bool,
    units: Vec<Unit>,
    active: u32,
    /// Number of the next ping.
    number: u32,
}

impl ClientTest {
    /// Returns the request of a unit.
    fn request(&mut self, now: Instant) -> Body {
        match self.parameters {
            Parameters::Ping { .. } => {
                let number = self.number;
                self.number = number.wrapping_add(1);
                Body::Ping {
                    reply_bits: 0,
                    magic: PING_MAGIC,
                    number,
                    seconds: now.as_nanos() / 1_000_000_000,
                    nanoseconds: now.as_nanos() % 1_000_000_000,
                }
            }
            Parameters::Bulk {
                operation,
                pattern,
                len,
                ..
            } => Body::Bulk {
                reply_bits: 0,
                bulk_bits: 0,
                operation,
                len,
                pattern,
            },
        }
    }
}

/// Place of a unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct UnitRef {
    batch: u64,
    test: usize,
    unit: usize,
    /// Number of its ping.
    number: u32,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) sid: Sid,
    pub(super) name: Name,
    pub(super) features: Features,
    started: Instant,
    pub(super) expires: Instant,
    /// Requests that made or joined it, less those that left it.
    pub(super) references: u32,
    batches: BTreeMap<u64, Vec<Test>>,
    calls: BTreeMap<CallId, UnitRef>,
    units: usize,
    bulk_bytes: usize,
    bulk_errors: u32,
    ping_errors: u32,
    /// Requests whose reply and data were right.
    done: u64,
}

/// Most units, and bytes of their data, that a session may have.
pub(super) type Limits = (usize, usize);

impl Session {
    pub(super) const fn new((sid, name, features): (Sid, Name, Features), now: Instant, expires: Instant) -> Self {
        Self {
            sid,
            name,
            features,
            started: now,
            expires,
            references: 1,
            batches: BTreeMap::new(),
            calls: BTreeMap::new(),
            units: 0,
            bulk_bytes: 0,
            bulk_errors: 0,
            ping_errors: 0,
            done: 0,
        }
    }

    /// Requests that have ended: those with the right reply and data, and others.
    pub(super) const fn requests(&self) -> (u64, u64) {
        (self.done, self.bulk_errors as u64 + self.ping_errors as u64)
    }

    pub(super) fn counters(&self, now: Instant) -> FrameworkCounters {
        let running: Duration = now.saturating_since(self.started);
        let active = |batch: &&Vec<Test>| active(batch) > 0;
        FrameworkCounters {
            running_ms: running.as_millis() as u32,
            active_batches: self.batches.values().filter(active).count() as u32,
            zombie_sessions: 0,
            bulk_errors: self.bulk_errors,
            ping_errors: self.ping_errors,
        }
    }

    /// Makes place for a test of a batch. Returns an error number if there is none.
    pub(super) fn admit(&mut self, batch: u64) -> Result<(), u32> {
        if !self.batches.contains_key(&batch) && self.batches.len() >= MAX_BATCHES {
            return Err(errno::NO_MEMORY);
        }
        let tests = self.batches.entry(batch).or_default();
        match () {
            () if active(tests) > 0 => Err(errno::BUSY),
            () if tests.len() >= MAX_TESTS => Err(errno::NO_MEMORY),
            () => Ok(()),
        }
    }

    /// Adds a test by others.
    pub(super) fn add_server(&mut self, batch: u64) -> Result<(), u32> {
        self.admit(batch)?;
        self.batches.entry(batch).or_default().push(Test::Server);
        Ok(())
    }

    /// Adds a test of other nodes. Returns an error number if that is not possible.
    pub(super) fn add_client(&mut self, request: &Message, nodes: &[Nid], limits: Limits) -> Result<(), u32> {
        let Body::Test {
            batch,
            loops,
            concurrency,
            stop_on_error,
            ..
        } = request.body
        else {
            return Err(errno::INVALID);
        };
        let parameters = request.test().map_err(|_| errno::INVALID)?;
        self.admit(batch)?;
        let count = nodes.len().saturating_mul(concurrency as usize);
        let bytes = bulk_len(&parameters)?.saturating_mul(count);
        let (units, bulk_bytes) = (self.units.saturating_add(count), self.bulk_bytes.saturating_add(bytes));
        if units > limits.0 || bulk_bytes > limits.1 {
            return Err(errno::NO_MEMORY);
        }
        let each = nodes
            .iter()
            .flat_map(|peer| core::iter::repeat_n(*peer, concurrency as usize));
        let unit = |peer| {
            let data = data_of(&parameters)?;
            let state = UnitState::Idle;
            Ok(Unit { peer, data, state })
        };
        let test = ClientTest {
            parameters,
            loops: (loops <= i32::MAX as u32).then_some(loops),
            stops_on_error: stop_on_error != 0,
            is_stopping: false,
            units: each.map(unit).collect::<Result<_, u32>>()?,
            active: 0,
            number: 0,
        };
        (self.units, self.bulk_bytes) = (units, bulk_bytes);
        self.batches.entry(batch).or_default().push(Test::Client(test));
        Ok(())
    }

    /// Units of a test that run, or tests of a batch for 0.
    pub(super) fn query(&self, batch: u64, test: u32) -> Result<u32, u32> {
        let tests = self.batches.get(&batch).ok_or(errno::NO_ENTRY)?;
        let Some(index) = (test as usize).checked_sub(1) else {
            return Ok(active(tests));
        };
        match tests.get(index) {
            Some(Test::Client(test)) => Ok(test.active),
            Some(Test::Server) => Ok(0),
            None => Err(errno::NO_ENTRY),
        }
    }

    /// Begins all tests of a batch, unless it runs.
    pub(super) fn run(
        &mut self,
        (node, client): (&mut Node, &mut Client),
        now: Instant,
        batch: u64,
    ) -> Result<(), u32> {
        let tests = self.batches.get_mut(&batch).ok_or(errno::NO_ENTRY)?;
        if active(tests) > 0 {
            return Ok(());
        }
        let mut begin = Vec::new();
        for (index, test) in tests.iter_mut().enumerate() {
            let Test::Client(test) = test else { continue };
            test.active = test.units.len() as u32;
            for (unit, state) in test.units.iter_mut().map(|unit| &mut unit.state).enumerate() {
                *state = UnitState::Running(test.loops);
                begin.push(UnitRef {
                    batch,
                    test: index,
                    unit,
                    number: 0,
                });
            }
        }
        for unit in begin {
            self.begin((node, client), now, unit);
        }
        Ok(())
    }

    /// Ends a batch after the requests that are under way, which it cancels if `force`.
    pub(super) fn stop(
        &mut self,
        (node, client): (&mut Node, &mut Client),
        batch: u64,
        force: bool,
    ) -> Result<(), u32> {
        let tests = self.batches.get_mut(&batch).ok_or(errno::NO_ENTRY)?;
        for test in tests {
            if let Test::Client(test) = test {
                test.is_stopping = test.active > 0;
            }
        }
        let of_it = self.calls.iter().filter(|(_, unit)| force && unit.batch == batch);
        for id in of_it.map(|(id, _)| *id) {
            client.cancel(node, id);
        }
        Ok(())
    }

    /// Ends all that is under way.
    pub(super) fn end(self, node: &mut Node, client: &mut Client) {
        for id in self.calls.into_keys() {
            client.cancel(node, id);
        }
    }

    /// Sends the next request of a unit.
    fn begin(&mut self, (node, client): (&mut Node, &mut Client), now: Instant, mut at: UnitRef) {
        let features = self.features;
        let Some(Test::Client(test)) = self.batches.get_mut(&at.batch).and_then(|tests| tests.get_mut(at.test)) else {
            return;
        };
        at.number = test.number;
        let request = test.request(now);
        let Some(unit) = test.units.get_mut(at.unit) else {
            return;
        };
        if let UnitState::Running(Some(left)) = &mut unit.state {
            *left -= 1;
        }
        match client.call(node, now, unit.peer, (features, request), unit.data.clone()) {
            Ok(id) => {
                self.calls.insert(id, at);
            }
            Err(_) => {
                self.failed(at);
                self.idle(at);
            }
        }
    }

    /// A request has ended. Returns whether it was one of a unit.
    pub(super) fn called(
        &mut self,
        (node, client): (&mut Node, &mut Client),
        now: Instant,
        id: CallId,
        result: &Result<Message, CallError>,
    ) {
        let Some(at) = self.calls.remove(&id) else { return };
        let Some(Test::Client(test)) = self.batches.get_mut(&at.batch).and_then(|tests| tests.get_mut(at.test)) else {
            return;
        };
        let Some(unit) = test.units.get(at.unit) else { return };
        let is_right = is_right(&test.parameters, at.number, unit, result);
        let is_over = test.is_stopping
            || unit.state == UnitState::Running(Some(0))
            || !is_right && test.stops_on_error
            || unit.state == UnitState::Idle;
        match is_right {
            true => self.done += 1,
            false if *result == Err(CallError::Canceled) => {}
            false => self.failed(at),
        }
        match is_over {
            true => self.idle(at),
            false => self.begin((node, client), now, at),
        }
    }

    fn failed(&mut self, at: UnitRef) {
        let test = self.batches.get(&at.batch).and_then(|tests| tests.get(at.test));
        match test {
            Some(Test::Client(ClientTest {
                parameters: Parameters::Ping { .. },
                ..
            })) => self.ping_errors += 1,
            _ => self.bulk_errors += 1,
        }
    }

    fn idle(&mut self, at: UnitRef) {
        if let Some(Test::Client(test)) = self.batches.get_mut(&at.batch).and_then(|tests| tests.get_mut(at.test))
            && let Some(unit) = test.units.get_mut(at.unit)
            && unit.state != UnitState::Idle
        {
            unit.state = UnitState::Idle;
            test.active -= 1;
            test.is_stopping &= test.active > 0;
        }
    }
}

/// Tests that run.
fn active(tests: &[Test]) -> u32 {
    let runs = |test: &&Test| matches!(test, Test::Client(test) if test.active > 0);
    tests.iter().filter(runs).count() as u32
}

/// Bytes of a unit's data. Returns an error number for parameters that are not possible.
pub(super) fn bulk_len(parameters: &Parameters) -> Result<usize, u32> {
    match *parameters {
        Parameters::Ping { .. } => Ok(0),
        Parameters::Bulk {
            operation: Body::READ | Body::WRITE,
            pattern,
            len: len @ 1..=MAX_BULK,
            offset,
        } if Pattern::from_wire(pattern).is_some() && offset % 8 == 0 && offset % PAGE + len <= MAX_BULK => {
            Ok(len as usize)
        }
        Parameters::Bulk { .. } => Err(errno::INVALID),
    }
}

fn data_of(parameters: &Parameters) -> Result<Data, u32> {
    match *parameters {
        Parameters::Ping { .. } => Ok(Data::None),
        Parameters::Bulk { operation, len, .. } => {
            let memory = Buffer::allocate(len as usize).ok_or(errno::NO_MEMORY)?;
            Ok(match operation {
                Body::READ => Data::Sink(memory),
                _ => {
                    memory.write(&words(len as usize));
                    Data::Source(memory)
                }
            })
        }
    }
}

/// Data of a bulk test, as a little-endian node has it.
pub(super) fn words(len: usize) -> Vec<u8> {
    let mut words = DATA_WORD.to_le_bytes().repeat(len.div_ceil(8));
    words.truncate(len);
    words
}

/// Returns whether the reply, and data that was read, are as they should be.
fn is_right(parameters: &Parameters, number: u32, unit: &Unit, result: &Result<Message, CallError>) -> bool {
    let Ok(reply) = result else { return false };
    match (reply.body, parameters, &unit.data) {
        (
            Body::PingReply {
                status: 0,
                magic: PING_MAGIC,
                number: found,
            },
            ..,
        ) => found == number,
        (Body::BulkReply { status: 0 }, Parameters::Bulk { pattern, .. }, Data::Sink(sink)) => {
            Pattern::from_wire(*pattern).is_some_and(|pattern| pattern.is_kept(&sink.to_vec(), reply.order))
        }
        (Body::BulkReply { status: 0 }, ..) => true,
        _ => false,
    }
}
