//! Player: the steps of a script, one after the other.

use core::{net::SocketAddr, time::Duration};
use std::collections::HashSet;

use roce_bth::{Class, Header, Packet, ROCE_UDP_PORT};
use roce_icrc::Flow;
use roce_qp::{Counters, Failure};
use roce_verbs::QpState;

use crate::{
    build,
    engine::Engine,
    expect::{compare, differs},
    host::{Datagram, Host, Stop, addresses},
    names,
    script::{Action, CompletionSpec, PacketSpec, SCRIPT_PORT, Script, Setup, Step},
    show,
    value::{Data, Place},
};

/// Time that a step waits for the host unless the script sets another.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Time between two checks of a host that may be late.
const RECHECK: Duration = Duration::from_millis(20);

/// Sender of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// The script.
    Sent,
    /// The host under test.
    Received,
}

/// Packet of a run.
#[derive(Clone, Debug)]
pub struct Record {
    /// Its sender.
    pub direction: Direction,
    /// The packet as a line of a script would name it.
    pub text: String,
    /// The packet.
    pub datagram: Datagram,
}

/// Step that the host did not do as expected.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mismatch {
    /// Line of the script, from 1; the last one for what comes after its end.
    pub line: usize,
    /// Expected and found, in words.
    pub text: String,
}

/// Result of a run.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Packets of both sides, in order.
    pub records: Vec<Record>,
    /// Steps that failed. Each ends its part of the script: the run goes on at the next `restart`.
    pub mismatches: Vec<Mismatch>,
    /// Reason why the script, or its rest, can't be played on this host.
    pub not_run: Option<String>,
    /// Steps that succeeded.
    pub steps: usize,
    /// Hosts that were started.
    pub runs: u32,
    /// Counts of all hosts. A live host tells none.
    pub counters: Counters,
    /// Reasons for which queue pairs failed. A live host tells none.
    pub failures: Vec<Failure>,
}

impl Outcome {
    /// Returns whether the host did all that the script expects.
    pub fn is_good(&self) -> bool {
        self.mismatches.is_empty() && self.not_run.is_none()
    }

    pub(crate) fn not_run(why: String) -> Self {
        Self {
            not_run: Some(why),
            ..Self::default()
        }
    }
}

/// Run of a script.
pub(crate) struct Player<'a> {
    setup: &'a Setup,
    host: &'a mut dyn Host,
    outcome: Outcome,
    timeout: Duration,
    identification: u16,
    ignored: Vec<PacketSpec>,
    /// Requests of the host, by opcode and PSN.
    requests: HashSet<(u8, u32)>,
    /// Time of the script's last packet.
    last_sent: Duration,
}

impl Script {
    /// Plays the script on the engine, in virtual time.
    pub fn play(&self) -> Outcome {
        self.play_from(0)
    }

    /// Plays the script with queue pair numbers that differ from those of other runs: `first` counts the hosts that were started before.
    pub fn play_from(&self, first: u32) -> Outcome {
        match Engine::new(&self.setup, Duration::ZERO, first) {
            Ok(mut engine) => self.play_on(&mut engine),
            Err(why) => Outcome::not_run(why),
        }
    }

    /// Plays the script on a host that has been started.
    pub(crate) fn play_on(&self, host: &mut dyn Host) -> Outcome {
        let mut player = Player {
            setup: &self.setup,
            host,
            outcome: Outcome {
                runs: 1,
                ..Outcome::default()
            },
            timeout: TIMEOUT,
            identification: 0,
            ignored: Vec::new(),
            requests: HashSet::new(),
            last_sent: Duration::ZERO,
        };
        if let Err(why) = player.steps(&self.steps) {
            player.outcome.not_run = Some(why);
        }
        player.collect();
        player.outcome
    }
}

impl Player<'_> {
    /// Plays the steps.
    ///
    /// # Errors
    /// The reason why one can't be played on this host.
    fn steps(&mut self, steps: &[Step]) -> Result<(), String> {
        let mut failed = false;
        for step in steps {
            let restarts = matches!(step.action, Action::Restart);
            if restarts && !failed {
                let left = self.nothing_left();
                self.judge(left, step)?;
            }
            if restarts || !failed {
                let done = self.step(&step.action);
                failed = !self.judge(done, step)?;
                self.outcome.steps += usize::from(!failed);
            }
        }
        match steps.last() {
            Some(last) if !failed => {
                let left = self.nothing_left();
                self.judge(left, last).map(drop)
            }
            _ => Ok(()),
        }
    }

    /// Notes what came of a step. Returns whether it succeeded.
    fn judge(&mut self, done: Result<(), Stop>, step: &Step) -> Result<bool, String> {
        let line = step.line;
        match done {
            Ok(()) => Ok(true),
            Err(Stop::NotRun(why)) => Err(format!("line {line}: {}: {why}", step.text)),
            Err(Stop::Mismatch(text)) => {
                let text = format!("{}: {text}", step.text);
                self.outcome.mismatches.push(Mismatch { line, text });
                Ok(false)
            }
        }
    }

    fn step(&mut self, action: &Action) -> Result<(), Stop> {
        match action {
            Action::Send(spec) => self.send(spec),
            Action::Expect(spec) => self.expect(spec),
            Action::Ignore(None) => {
                self.ignored.clear();
                Ok(())
            }
            Action::Ignore(Some(spec)) => {
                self.ignored.push(spec.clone());
                Ok(())
            }
            Action::Restart => self.restart(),
            Action::Silence(time) => self.silence(*time),
            Action::After(time) => self.host.wait(self.host.elapsed() + *time),
            Action::At(time) if *time < self.host.elapsed() => {
                Err(format!("{} have gone by already", ms(self.host.elapsed())).into())
            }
            Action::At(time) => self.host.wait(*time),
            Action::Timeout(time) => {
                self.timeout = *time;
                Ok(())
            }
            Action::Post(post) => {
                self.host.settle()?;
                self.host.post(post)
            }
            Action::Complete(spec) => self.complete(spec),
            Action::NoCompletion => self.no_completion(),
            Action::Event(number) => self.event(*number),
            Action::Memory(place, data) => self.memory(*place, data),
            Action::Revoke(region) => {
                self.host.settle()?;
                self.host.revoke(*region)
            }
            Action::Modify(state) => {
                self.host.settle()?;
                self.host.modify(*state)
            }
            Action::State(state) => self.state(*state),
        }
    }

    /// Returns the time until which a step waits for the host.
    fn end(&self) -> Duration {
        self.host.elapsed() + self.timeout + self.host.lateness()
    }

    /// Checks that the script has seen all packets of the host.
    fn nothing_left(&mut self) -> Result<(), Stop> {
        self.host.settle()?;
        match self.next_sent(None, self.host.elapsed())? {
            None => Ok(()),
            Some((datagram, _)) => Err(format!("after the last step the host sent {}", self.show(&datagram)).into()),
        }
    }

    /// Takes over what the host counted, and why its queue pair failed.
    fn collect(&mut self) {
        let (counters, failure) = self.host.counts();
        self.outcome.counters.add(&counters);
        self.outcome.failures.extend(failure);
    }

    fn restart(&mut self) -> Result<(), Stop> {
        self.collect();
        self.host.restart()?;
        self.outcome.runs = self.outcome.runs.wrapping_add(1);
        self.ignored.clear();
        self.requests.clear();
        self.timeout = TIMEOUT;
        Ok(())
    }

    fn show(&self, datagram: &Datagram) -> String {
        show::packet(&datagram.bytes, self.host.memory(), self.setup.qp_type.service())
    }

    fn record(&mut self, direction: Direction, datagram: &Datagram) {
        self.outcome.records.push(Record {
            direction,
            text: self.show(datagram),
            datagram: datagram.clone(),
        });
    }

    fn send(&mut self, spec: &PacketSpec) -> Result<(), Stop> {
        let fields = &spec.fields;
        let [host, script] = addresses(self.host.is_v6());
        let port = fields.source_port.or(self.setup.source_port).unwrap_or(SCRIPT_PORT);
        let src = SocketAddr::new(self.host.address(fields.from.unwrap_or(script))?, port);
        let dst = self.host.address(fields.to.unwrap_or(host))?;
        let mut bytes = build::build(spec, self.host.memory(), self.host.qpn());
        build::seal(fields, src, dst, self.identification, &mut bytes);
        let datagram = Datagram {
            at: self.host.elapsed(),
            src,
            dst: SocketAddr::new(dst, ROCE_UDP_PORT),
            identification: self.identification,
            bytes,
        };
        self.identification = self.identification.wrapping_add(1);
        self.record(Direction::Sent, &datagram);
        self.last_sent = datagram.at;
        self.host.receive(&datagram)
    }

    /// Waits until `end` for the next packet of the host that is not ignored, and compares it with a line. All are recorded.
    fn next_sent(&mut self, spec: Option<&PacketSpec>, end: Duration) -> Result<Option<(Datagram, Vec<String>)>, Stop> {
        let start = self.host.elapsed();
        while let Some(datagram) = self.host.wait_sent(end)? {
            self.record(Direction::Received, &datagram);
            let repeated = self.is_repeated(&datagram);
            if self.is_ignored(&datagram)? {
                continue;
            }
            let differences = match spec {
                Some(spec) => self.differences(spec, &datagram)?,
                None => Vec::new(),
            };
            // A live host may repeat a request while a step takes its time, or while what would stop it is under way.
            let crossed = self.host.transit().is_some_and(|time| match spec {
                Some(_) => !differences.is_empty(),
                None => datagram.at <= start.max(self.last_sent + time),
            });
            if !(repeated && crossed) {
                return Ok(Some((datagram, differences)));
            }
        }
        Ok(None)
    }

    /// Notes a packet of the host. Returns whether it repeats a request.
    fn is_repeated(&mut self, datagram: &Datagram) -> bool {
        let Ok(packet) = Packet::parse(&datagram.bytes) else {
            return false;
        };
        let bth = Header::from(packet.header).bth;
        let is_request = matches!(
            bth.opcode.info().class,
            Class::Send | Class::Write | Class::ReadRequest | Class::Atomic | Class::Flush | Class::AtomicWrite
        );
        is_request && !self.requests.insert((bth.opcode as u8, bth.psn.value()))
    }

    fn is_ignored(&self, datagram: &Datagram) -> Result<bool, Stop> {
        for spec in &self.ignored {
            if self.differences(spec, datagram)?.is_empty() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Compares a packet of the host with a line. Returns the differences, in words.
    fn differences(&self, spec: &PacketSpec, datagram: &Datagram) -> Result<Vec<String>, Stop> {
        let packet = match Packet::parse(&datagram.bytes) {
            Ok(packet) => packet,
            Err(e) => return Ok(vec![e.to_string()]),
        };
        let (memory, qpn) = (self.host.memory(), self.host.script_qpn());
        let mut all = compare(spec, &packet, memory, qpn, datagram.src.port());
        let [host, script] = addresses(self.host.is_v6());
        let (host, script) = (self.host.address(host)?, self.host.address(script)?);
        if (datagram.src.ip(), datagram.dst) != (host, SocketAddr::new(script, ROCE_UDP_PORT)) {
            all.push(format!("it goes from {} to {}", datagram.src.ip(), datagram.dst));
        }
        let flow = Flow::try_from((datagram.src, datagram.dst));
        if !flow.is_ok_and(|flow| flow.verify(datagram.identification, &datagram.bytes)) {
            all.push("its ICRC is wrong".to_owned());
        }
        Ok(all)
    }

    fn expect(&mut self, spec: &PacketSpec) -> Result<(), Stop> {
        let Some((datagram, all)) = self.next_sent(Some(spec), self.end())? else {
            return Err(format!("the host sent nothing within {}", ms(self.timeout)).into());
        };
        match all.is_empty() {
            true => Ok(()),
            false => Err(format!("the host sent {}: {}", self.show(&datagram), all.join(", ")).into()),
        }
    }

    fn silence(&mut self, time: Duration) -> Result<(), Stop> {
        let start = self.host.elapsed();
        // What is under way at its end was sent after it.
        let checked = time.saturating_sub(self.host.transit().unwrap_or_default());
        match self.next_sent(None, start + checked)? {
            None => self.host.wait(start + time),
            Some((datagram, _)) => {
                let after = ms(datagram.at.saturating_sub(start));
                Err(format!("the host sent {} after {after}", self.show(&datagram)).into())
            }
        }
    }

    fn complete(&mut self, spec: &CompletionSpec) -> Result<(), Stop> {
        let Some(found) = self.host.wait_completion(spec.is_recv, self.end())? else {
            return Err(format!("no completion within {}", ms(self.timeout)).into());
        };
        let mut all = Vec::new();
        if let Some(id) = spec.id.filter(|id| *id != found.wr_id) {
            all.push(format!("id is {}, not {id}", found.wr_id));
        }
        if found.status != spec.status {
            let (found, expected) = (names::of_status(found.status), names::of_status(spec.status));
            all.push(format!("status is {found}, not {expected}"));
        }
        if let Some(len) = spec.len.filter(|len| *len != found.byte_len) {
            all.push(format!("len is {}, not {len}", found.byte_len));
        }
        if let Some(expected) = spec.imm.filter(|expected| Some(*expected) != found.imm) {
            let found = found.imm.map_or_else(|| "missing".to_owned(), |imm| imm.to_string());
            all.push(format!("imm is {found}, not {expected}"));
        }
        if let Some(data) = &spec.payload {
            let expected = self.host.memory().bytes(data, None);
            match self.host.received(found.wr_id, data.len)? {
                None => all.push(format!("the receive has no {} bytes", data.len)),
                Some(bytes) => all.extend(expected.and_then(|e| differs("its memory", &bytes, &e))),
            }
        }
        match all.is_empty() {
            true => Ok(()),
            false => Err(all.join(", ").into()),
        }
    }

    fn no_completion(&mut self) -> Result<(), Stop> {
        self.host.settle()?;
        for (queue, is_recv) in [("send", false), ("recv", true)] {
            if let Some(found) = self.host.wait_completion(is_recv, self.host.elapsed())? {
                let status = names::of_status(found.status);
                return Err(format!("completion {queue} id={} status={status}", found.wr_id).into());
            }
        }
        Ok(())
    }

    fn event(&mut self, expected: Option<u32>) -> Result<(), Stop> {
        let end = match expected {
            None => {
                self.host.settle()?;
                self.host.elapsed()
            }
            Some(_) => self.end(),
        };
        match self.host.wait_event(end)? {
            found if found == expected => Ok(()),
            None => Err(format!("no event within {}", ms(self.timeout)).into()),
            Some(number) => Err(format!("event {}", names::name_of(&names::EVENTS, number)).into()),
        }
    }

    fn memory(&mut self, place: Place, data: &Data) -> Result<(), Stop> {
        let expected = self.host.memory().bytes(data, None).unwrap_or_default();
        self.becomes(|host| {
            let found = host.read(place, data.len)?;
            Ok(differs("it", &found, &expected))
        })
    }

    fn state(&mut self, expected: QpState) -> Result<(), Stop> {
        self.becomes(|host| {
            Ok(match host.state()? {
                Some(found) if found == expected => None,
                Some(found) => Some(format!("the state is {}", names::name_of(&names::STATES, found))),
                None => Some("the queue pair is gone".to_owned()),
            })
        })
    }

    /// Checks the host once what was sent has had its effect, and until it may be late no more. `check` returns what is wrong.
    fn becomes(&mut self, check: impl Fn(&mut dyn Host) -> Result<Option<String>, Stop>) -> Result<(), Stop> {
        self.host.settle()?;
        let end = self.host.elapsed() + self.host.lateness();
        loop {
            let Some(wrong) = check(self.host)? else {
                return Ok(());
            };
            if self.host.elapsed() >= end {
                return Err(wrong.into());
            }
            self.host.wait(self.host.elapsed() + RECHECK)?;
        }
    }
}

/// Writes a time in milliseconds.
fn ms(time: Duration) -> String {
    format!("{} ms", time.as_nanos() as f64 / 1e6)
}
