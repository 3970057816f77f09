//! Player: the steps of a script, one after the other.

use core::{net::SocketAddr, time::Duration};

use roce_bth::{Packet, ROCE_UDP_PORT};
use roce_icrc::Flow;
use roce_qp::{Counters, Failure};
use roce_verbs::{QpState, WcFlags};

use crate::{
    build,
    expect::{compare, differs},
    host::{Datagram, Host, addresses},
    names,
    script::{Action, CompletionSpec, PacketSpec, SCRIPT_PORT, Script, Setup},
    show,
    value::{Data, Place},
};

/// Time that a step waits for the host unless the script sets another.
const TIMEOUT: Duration = Duration::from_secs(1);

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
    /// Step that failed, which ends the run.
    pub mismatch: Option<Mismatch>,
    /// Steps that succeeded.
    pub steps: usize,
    /// Hosts that were started.
    pub runs: u32,
    /// Counts of all hosts.
    pub counters: Counters,
    /// Reasons for which queue pairs failed.
    pub failures: Vec<Failure>,
}

/// Run of a script.
struct Player<'a> {
    setup: &'a Setup,
    host: Host,
    records: Vec<Record>,
    timeout: Duration,
    identification: u16,
    ignored: Vec<PacketSpec>,
    run: u32,
    counters: Counters,
    failures: Vec<Failure>,
}

impl Script {
    /// Plays the script on the engine, in virtual time.
    pub fn play(&self) -> Outcome {
        self.play_from(0)
    }

    /// Plays the script with queue pair numbers that differ from those of other runs: `first` counts the hosts that were started before.
    pub fn play_from(&self, first: u32) -> Outcome {
        let host = match Host::new(&self.setup, Duration::ZERO, first) {
            Ok(host) => host,
            Err(text) => {
                return Outcome {
                    mismatch: Some(Mismatch { line: 1, text }),
                    ..Outcome::default()
                };
            }
        };
        let mut player = Player {
            setup: &self.setup,
            host,
            records: Vec::new(),
            timeout: TIMEOUT,
            identification: 0,
            ignored: Vec::new(),
            run: first,
            counters: Counters::default(),
            failures: Vec::new(),
        };
        let mut mismatch = None;
        let mut steps = 0;
        for step in &self.steps {
            if let Err(text) = player.step(&step.action) {
                let text = format!("{}: {text}", step.text);
                mismatch = Some(Mismatch { line: step.line, text });
                break;
            }
            steps += 1;
        }
        if mismatch.is_none()
            && let Err(text) = player.nothing_left()
        {
            let line = self.steps.last().map_or(1, |step| step.line);
            mismatch = Some(Mismatch { line, text });
        }
        player.collect();
        Outcome {
            records: player.records,
            mismatch,
            steps,
            runs: player.run.wrapping_sub(first).wrapping_add(1),
            counters: player.counters,
            failures: player.failures,
        }
    }
}

impl Player<'_> {
    fn step(&mut self, action: &Action) -> Result<(), String> {
        match action {
            Action::Send(spec) => {
                self.send(spec);
                Ok(())
            }
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
            Action::After(time) => self.host.run(self.host.elapsed() + *time, |_| false).map(|_| ()),
            Action::At(time) if *time < self.host.elapsed() => {
                Err(format!("{} have gone by already", ms(self.host.elapsed())))
            }
            Action::At(time) => self.host.run(*time, |_| false).map(|_| ()),
            Action::Timeout(time) => {
                self.timeout = *time;
                Ok(())
            }
            Action::Post(post) => self.host.post(post),
            Action::Complete(spec) => self.complete(spec),
            Action::NoCompletion => self.no_completion(),
            Action::Event(number) => self.event(*number),
            Action::Memory(place, data) => self.memory(*place, data),
            Action::Revoke(region) => self.host.revoke(*region),
            Action::Modify(state) => self.host.modify(*state),
            Action::State(state) => self.state(*state),
        }
    }

    /// Checks that the script has seen all packets of the host.
    fn nothing_left(&mut self) -> Result<(), String> {
        match self.take_sent() {
            None => Ok(()),
            Some(datagram) => Err(format!("after the last step the host sent {}", self.show(&datagram))),
        }
    }

    /// Takes over what the host counted, and why its queue pair failed.
    fn collect(&mut self) {
        self.counters.add(&self.host.counters());
        self.failures.extend(self.host.take_failure());
    }

    fn restart(&mut self) -> Result<(), String> {
        self.nothing_left()?;
        self.collect();
        self.run = self.run.wrapping_add(1);
        self.host = Host::new(self.setup, self.host.elapsed(), self.run)?;
        self.ignored.clear();
        self.timeout = TIMEOUT;
        Ok(())
    }

    fn show(&self, datagram: &Datagram) -> String {
        show::packet(&datagram.bytes, self.host.memory(), self.setup.qp_type.service())
    }

    fn record(&mut self, direction: Direction, datagram: &Datagram) {
        self.records.push(Record {
            direction,
            text: self.show(datagram),
            datagram: datagram.clone(),
        });
    }

    fn send(&mut self, spec: &PacketSpec) {
        let fields = &spec.fields;
        let [host, script] = addresses(self.setup.is_v6);
        let port = fields.source_port.or(self.setup.source_port).unwrap_or(SCRIPT_PORT);
        let src = SocketAddr::new(fields.from.unwrap_or(script), port);
        let dst = fields.to.unwrap_or(host);
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
        self.host.receive(&datagram);
    }

    /// Takes the next packet of the host that is not ignored. All are recorded.
    fn take_sent(&mut self) -> Option<Datagram> {
        loop {
            let datagram = self.host.take_sent()?;
            self.record(Direction::Received, &datagram);
            if !self.is_ignored(&datagram) {
                return Some(datagram);
            }
        }
    }

    fn is_ignored(&self, datagram: &Datagram) -> bool {
        self.ignored
            .iter()
            .any(|spec| self.differences(spec, datagram).is_empty())
    }

    /// Waits until `end` for the next packet of the host that is not ignored.
    fn wait_sent(&mut self, end: Duration) -> Result<Option<Datagram>, String> {
        loop {
            let sent = self.host.run(end, |host| host.has_sent())?;
            if let Some(datagram) = self.take_sent() {
                return Ok(Some(datagram));
            }
            if !sent {
                return Ok(None);
            }
        }
    }

    /// Compares a packet of the host with a line. Returns the differences, in words.
    fn differences(&self, spec: &PacketSpec, datagram: &Datagram) -> Vec<String> {
        let packet = match Packet::parse(&datagram.bytes) {
            Ok(packet) => packet,
            Err(e) => return vec![e.to_string()],
        };
        let mut all = compare(
            spec,
            &packet,
            self.host.memory(),
            self.host.script_qpn(),
            datagram.src.port(),
        );
        let [host, script] = addresses(self.setup.is_v6);
        if (datagram.src.ip(), datagram.dst) != (host, SocketAddr::new(script, ROCE_UDP_PORT)) {
            all.push(format!("it goes from {} to {}", datagram.src.ip(), datagram.dst));
        }
        let flow = Flow::try_from((datagram.src, datagram.dst));
        if !flow.is_ok_and(|flow| flow.verify(datagram.identification, &datagram.bytes)) {
            all.push("its ICRC is wrong".to_owned());
        }
        all
    }

    fn expect(&mut self, spec: &PacketSpec) -> Result<(), String> {
        let end = self.host.elapsed() + self.timeout;
        let Some(datagram) = self.wait_sent(end)? else {
            return Err(format!("the host sent nothing within {}", ms(self.timeout)));
        };
        let all = self.differences(spec, &datagram);
        match all.is_empty() {
            true => Ok(()),
            false => Err(format!("the host sent {}: {}", self.show(&datagram), all.join(", "))),
        }
    }

    fn silence(&mut self, time: Duration) -> Result<(), String> {
        let start = self.host.elapsed();
        match self.wait_sent(start + time)? {
            None => Ok(()),
            Some(datagram) => Err(format!(
                "the host sent {} after {}",
                self.show(&datagram),
                ms(datagram.at.saturating_sub(start))
            )),
        }
    }

    fn complete(&mut self, spec: &CompletionSpec) -> Result<(), String> {
        let end = self.host.elapsed() + self.timeout;
        let mut taken = None;
        self.host.run(end, |host| {
            taken = host.take_completion(spec.is_recv);
            taken.is_some()
        })?;
        let Some(found) = taken else {
            return Err(format!("no completion within {}", ms(self.timeout)));
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
        let imm = found.flags.contains(WcFlags::WITH_IMM).then_some(found.imm);
        if let Some(expected) = spec.imm.filter(|expected| Some(*expected) != imm) {
            let found = imm.map_or_else(|| "missing".to_owned(), |imm| imm.to_string());
            all.push(format!("imm is {found}, not {expected}"));
        }
        if let Some(data) = &spec.payload {
            let expected = self.host.memory().bytes(data, None);
            match self.host.received(found.wr_id, data.len) {
                None => all.push(format!("the receive has no {} bytes", data.len)),
                Some(bytes) => all.extend(expected.and_then(|e| differs("its memory", &bytes, &e))),
            }
        }
        match all.is_empty() {
            true => Ok(()),
            false => Err(all.join(", ")),
        }
    }

    fn no_completion(&mut self) -> Result<(), String> {
        for (queue, is_recv) in [("send", false), ("recv", true)] {
            if let Some(found) = self.host.take_completion(is_recv) {
                let status = names::of_status(found.status);
                return Err(format!("completion {queue} id={} status={status}", found.wr_id));
            }
        }
        Ok(())
    }

    fn event(&mut self, expected: Option<u32>) -> Result<(), String> {
        let end = self.host.elapsed() + self.timeout;
        let mut taken = None;
        match expected {
            None => taken = self.host.take_event(),
            Some(_) => {
                self.host.run(end, |host| {
                    taken = host.take_event();
                    taken.is_some()
                })?;
            }
        }
        match taken.map(|event| event.describe().0) {
            found if found == expected => Ok(()),
            None => Err(format!("no event within {}", ms(self.timeout))),
            Some(number) => Err(format!("event {}", names::name_of(&names::EVENTS, number))),
        }
    }

    fn memory(&self, place: Place, data: &Data) -> Result<(), String> {
        let memory = self.host.memory();
        let found = memory.read(place, data.len)?;
        let expected = memory.bytes(data, None).unwrap_or_default();
        differs("it", &found, &expected).map_or(Ok(()), Err)
    }

    fn state(&self, expected: QpState) -> Result<(), String> {
        match self.host.state() {
            Some(found) if found == expected => Ok(()),
            Some(found) => Err(format!("the state is {}", names::name_of(&names::STATES, found))),
            None => Err("the queue pair is gone".to_owned()),
        }
    }
}

/// Writes a time in milliseconds.
fn ms(time: Duration) -> String {
    format!("{} ms", time.as_nanos() as f64 / 1e6)
}
