//! The run: trouble, and calm moments in which everything has to be well.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    path::PathBuf,
    process::Stdio,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use ferroce_tests::usage::Usage;
use rand::{Rng, SeedableRng as _, seq::IteratorRandom as _};
use rand_chacha::ChaCha8Rng;

use crate::{
    daemon::Daemon,
    limits::{BASE, BEYOND, LIMIT},
    load::Failed,
    steer::{Order, Steering, Who},
    trouble::{self, NETWORKS, Outage, Weather},
    world::World,
};

/// What an error says when the user wants to stop.
pub(crate) const INTERRUPTED: &str = "interrupted";

/// How often the driver looks.
const LOOK: Duration = Duration::from_millis(20);
/// Calm after an outage, at most; half of it at least after one that may take all paths.
const CALM: Duration = Duration::from_secs(20);
/// Without trouble for so long, no path may go down.
const AFTERMATH: Duration = Duration::from_secs(60);
/// So long after all trouble with a network its paths are up.
const SETTLED: Duration = Duration::from_secs(15);
/// No request may take longer while there is a path that is well: far more than what it takes to find the other one dead, also on a
/// busy machine.
const FAILOVER: Duration = Duration::from_secs(20);
/// How long processes are watched in a calm moment.
const WATCH: Duration = Duration::from_secs(10);
/// When there was trouble last.
struct Troubles {
    /// An outage of a network alone.
    networks: [Instant; NETWORKS as usize],
    /// Bad weather, in which networks work.
    weather: Instant,
    /// With both, or a process.
    everything: Instant,
}

impl Troubles {
    fn last(&self) -> Instant {
        self.networks
            .into_iter()
            .fold(self.everything.max(self.weather), Instant::max)
    }

    /// Whether a network was whole all the time from a while before then, and every process well.
    fn spare(&self, begun: Instant) -> bool {
        let before = |then: Instant| then + SETTLED < begun;
        before(self.everything) && self.networks.into_iter().any(before)
    }
}

/// Counts for the summary.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) trouble: BTreeMap<&'static str, u64>,
    pub(crate) commands: BTreeMap<&'static str, u64>,
    pub(crate) allowed_errors: u64,
    /// Longest request while one of two paths was well.
    pub(crate) failover: Duration,
    pub(crate) long: Vec<(f64, Duration, String)>,
    pub(crate) compared: (u64, u64),
    pub(crate) usage: BTreeMap<String, (Usage, Usage)>,
    /// Bytes of the chunks of servers' sessions: they exist from the beginning, and count once they have been used.
    pub(crate) chunks: BTreeMap<String, u64>,
    pub(crate) moments: u32,
}

/// The driver.
pub(crate) struct Run<'a> {
    pub(crate) world: World,
    rng: ChaCha8Rng,
    stop: &'a AtomicBool,
    end: Instant,
    next_report: Instant,
    pub(crate) begun: Instant,
    outage: Option<(Outage, Instant)>,
    next_outage: Instant,
    weather: Vec<(Weather, Instant)>,
    next_weather: Instant,
    next_resize: Instant,
    steering: Steering,
    next_command: Instant,
    /// Whether everything is to come back.
    calm: bool,
    troubles: Troubles,
    downs: u64,
    failed: Vec<(usize, Failed)>,
    pub(crate) tally: Tally,
}

fn text(e: io::Error) -> String {
    e.to_string()
}

impl<'a> Run<'a> {
    pub(crate) fn new(world: World, seed: u64, length: Duration, stop: &'a AtomicBool) -> Self {
        let now = Instant::now();
        Self {
            world,
            rng: ChaCha8Rng::seed_from_u64(seed),
            stop,
            end: now + length,
            next_report: now + Duration::from_secs(60),
            begun: now,
            outage: None,
            next_outage: now,
            weather: Vec::new(),
            next_weather: now,
            next_resize: now,
            steering: Steering::default(),
            next_command: now,
            calm: true,
            troubles: Troubles {
                networks: [now; NETWORKS as usize],
                weather: now,
                everything: now,
            },
            downs: 0,
            failed: Vec::new(),
            tally: Tally::default(),
        }
    }

    /// All of it; an error is a violation, or that the user wants to stop.
    pub(crate) fn all(&mut self) -> Result<(), String> {
        let length = self.end - Instant::now();
        self.be_calm(true);
        self.calm_moment()?;
        // A server lives from one calm moment to another in every second act.
        let act = (length / 6).clamp(Duration::from_secs(60), Duration::from_secs(600));
        let mut kills = false;
        while Instant::now() + act / 2 < self.end {
            kills = !kills;
            let until = (Instant::now() + act).min(self.end);
            self.be_calm(false);
            while Instant::now() < until {
                self.trouble(kills)?;
                self.look()?;
            }
            self.lift()?;
            self.calm_moment()?;
        }
        self.compare()
    }

    /// Begins and ends what is due.
    fn trouble(&mut self, kills: bool) -> Result<(), String> {
        let now = Instant::now();
        if let Some((outage, _)) = self.outage.take_if(|(_, until)| *until <= now) {
            self.end_outage(&outage)?;
        } else if self.outage.is_none() && now >= self.next_outage {
            let (outage, lasts) = trouble::outage(&mut self.rng, kills);
            self.world
                .logs
                .say(&format!("TROUBLE for {:.1} s: {outage}", lasts.as_secs_f64()));
            *self.tally.trouble.entry(outage.kind()).or_default() += 1;
            self.world.begin_outage(&outage).map_err(text)?;
            match outage {
                Outage::Kill(_) => self.steering.gone(Who::Server),
                Outage::EndClient(number, _) => self.steering.gone(Who::Client(self.world.index(number))),
                _ => {}
            }
            self.outage = Some((outage, now + lasts));
        }
        while let Some(at) = self.weather.iter().position(|(_, until)| *until <= now) {
            let (weather, _) = self.weather.remove(at);
            self.world.logs.say(&format!("OVER: {weather}"));
            self.world.end_weather(&weather);
        }
        if now >= self.next_weather {
            let (weather, lasts) = trouble::weather(&mut self.rng);
            self.world
                .logs
                .say(&format!("TROUBLE for {:.1} s: {weather}", lasts.as_secs_f64()));
            for kind in &weather.kinds {
                *self.tally.trouble.entry(kind).or_default() += 1;
            }
            self.world.begin_weather(&weather);
            self.weather.push((weather, now + lasts));
            self.next_weather = now + Duration::from_secs_f64(self.rng.random_range(1.0..20.0));
        }
        if now >= self.next_resize {
            let image = self.world.loads().map(|load| &load.image).choose(&mut self.rng);
            let image = image.ok_or("no image")?.clone();
            let len = BASE + self.rng.random_range(0..=BEYOND / 4096) * 4096;
            self.world.logs.say(&format!("{}: {len} bytes", image.display()));
            *self.tally.trouble.entry("image resized").or_default() += 1;
            let file = File::options().write(true).open(image).map_err(text)?;
            file.set_len(len).map_err(text)?;
            self.next_resize = now + Duration::from_secs_f64(self.rng.random_range(1.0..20.0));
        }
        if now >= self.next_command {
            // One that is not mapped has none.
            let paths = self.world.devices.iter().map(|device| match device.is_mapped() {
                true => device.seen.paths().to_owned(),
                false => Vec::new(),
            });
            let paths: Vec<_> = paths.collect();
            if let Some(order) = self.steering.draw(&mut self.rng, &paths) {
                self.order(order);
            }
            self.next_command = now + Duration::from_secs_f64(self.rng.random_range(0.2..6.0));
        }
        self.note_trouble(now);
        Ok(())
    }

    /// Takes note of what there is at this moment.
    fn note_trouble(&mut self, now: Instant) {
        if let Some((outage, _)) = &self.outage {
            match outage.network() {
                Some(network) => self.troubles.networks[usize::from(network)] = now,
                None => self.troubles.everything = now,
            }
        }
        if !self.weather.is_empty() {
            self.troubles.weather = now;
        }
    }

    /// Sends a command.
    fn order(&mut self, (who, command): Order) {
        let now = Instant::now();
        if let Some(id) = self.world.ask(who, &command) {
            *self.tally.commands.entry(command.kind()).or_default() += 1;
            self.steering.sent(now, (who, command), id);
        }
    }

    /// Takes answers, and has paths that were taken away come back.
    fn steer(&mut self) -> Result<(), String> {
        let now = Instant::now();
        for (who, answer) in self.world.take_answers() {
            let devices = &self.world.devices;
            let out = |device: usize, begun| devices[device].seen.was_out(begun, now);
            if let Some(order) = self.steering.answered(&mut self.rng, who, &answer, out)? {
                self.order(order);
            }
        }
        for order in self.steering.due(now, self.calm) {
            self.order(order);
        }
        if self.steering.hurts() {
            self.troubles.everything = now;
        }
        match self.steering.waits_since() {
            Some((begun, what)) if begun.elapsed() > LIMIT => Err(format!("no answer within {LIMIT:?} to {what}")),
            _ => Ok(()),
        }
    }

    fn end_outage(&mut self, outage: &Outage) -> Result<(), String> {
        self.world.logs.say(&format!("OVER: {outage}"));
        self.world.end_outage(outage).map_err(text)?;
        let calm = match outage {
            Outage::Cut(..) | Outage::Carrier(..) | Outage::StopClient(_) => self.rng.random_range(0.05..1.0),
            _ => self.rng.random_range(0.5..1.0),
        };
        self.next_outage = Instant::now() + CALM.mul_f64(calm);
        Ok(())
    }

    fn be_calm(&mut self, calm: bool) {
        self.calm = calm;
        self.world.daemon.iter().for_each(|daemon| daemon.calm(calm));
    }

    fn lift(&mut self) -> Result<(), String> {
        self.note_trouble(Instant::now());
        if let Some((outage, _)) = self.outage.take() {
            self.end_outage(&outage)?;
        }
        for (weather, _) in std::mem::take(&mut self.weather) {
            self.world.end_weather(&weather);
        }
        self.be_calm(true);
        self.world.logs.say("CALM");
        Ok(())
    }

    /// Looks at everything once; false if the user wants to stop.
    fn look(&mut self) -> Result<(), String> {
        if self.stop.load(Relaxed) {
            return Err(INTERRUPTED.into());
        }
        thread::sleep(LOOK);
        self.world.listen()?;
        let downs = self.world.devices.iter().map(|device| device.counts().path_down).sum();
        let since = self.troubles.last().elapsed();
        if downs > std::mem::replace(&mut self.downs, downs) && since > AFTERMATH {
            return Err(format!(
                "a path went down {:.0} s after all trouble",
                since.as_secs_f64()
            ));
        }
        self.steer()?;
        self.judge_load()?;
        if Instant::now() >= self.next_report {
            self.next_report += Duration::from_secs(60);
            self.report();
        }
        Ok(())
    }

    fn judge_load(&mut self) -> Result<(), String> {
        if let Some(daemon) = &self.world.daemon
            && let Some(violation) = daemon.load.told.take_violations().into_iter().next()
        {
            return Err(format!("daemon: {violation}"));
        }
        let logs = &mut self.world.logs;
        let devices = self.world.devices.iter().enumerate();
        for (n, device, load) in devices.flat_map(|(n, device)| device.loads.iter().map(move |load| (n, device, load)))
        {
            if let Some(violation) = load.told.take_violations().into_iter().next() {
                return Err(format!("{}: {violation}", load.device));
            }
            for (ended, took, what) in load.told.take_long() {
                let at = logs.at(ended);
                logs.say(&format!(
                    "{}: {:.2} s until {at:.3}: {what}",
                    load.device,
                    took.as_secs_f64()
                ));
                if device.has_spare && self.troubles.spare(ended - took) {
                    self.tally.failover = self.tally.failover.max(took);
                    if took > FAILOVER {
                        let seconds = took.as_secs_f64();
                        return Err(format!(
                            "{}: {seconds:.1} s until {at:.3}, with a network that was whole: {what}",
                            load.device
                        ));
                    }
                }
                self.tally.long.push((at, took, format!("{}: {what}", load.device)));
            }
            for failed in load.told.take_failed() {
                if device.queues {
                    return Err(format!(
                        "{}: {}, although requests wait for a path",
                        load.device, failed.what
                    ));
                }
                self.failed.push((n, failed));
            }
        }
        // Events may come after what they explain.
        let ripe = Instant::now().checked_sub(Duration::from_secs(3));
        let (judged, rest) = std::mem::take(&mut self.failed)
            .into_iter()
            .partition(|(_, failed)| Some(failed.ended) < ripe);
        self.failed = rest;
        let judged: Vec<(usize, Failed)> = judged;
        for (n, failed) in judged {
            let device = &self.world.devices[n];
            if !device.seen.was_out(failed.begun, failed.ended) {
                let at = self.world.logs.at(failed.ended);
                return Err(format!(
                    "{}: at {at:.3} {}, although a path was up",
                    device.name, failed.what
                ));
            }
            self.tally.allowed_errors += 1;
        }
        Ok(())
    }

    fn look_until(&mut self, until: Instant) -> Result<(), String> {
        while Instant::now() < until {
            self.look()?;
        }
        Ok(())
    }

    /// Without trouble everything comes back, works, and takes no more than it did.
    fn calm_moment(&mut self) -> Result<(), String> {
        let since = Instant::now();
        let done = |run: &Self| {
            let requests = run.world.loads().map(|load| load.told.requests.load(Relaxed));
            requests.collect::<Vec<_>>()
        };
        let before = done(self);
        loop {
            let devices = self.world.devices.iter().all(|device| device.is_well());
            let well = devices && self.world.daemon.iter().all(Daemon::is_well);
            if well && self.steering.is_done() && done(self).iter().zip(&before).all(|(now, before)| now > before) {
                break;
            }
            if since.elapsed() > LIMIT {
                let ill = self
                    .world
                    .devices
                    .iter()
                    .filter(|device| !device.is_well())
                    .map(|device| device.name);
                return Err(format!(
                    "not everything is back {LIMIT:?} after all trouble: {:?}",
                    ill.collect::<Vec<_>>()
                ));
            }
            self.look()?;
        }
        self.world
            .logs
            .say(&format!("all is well after {:.1} s", since.elapsed().as_secs_f64()));
        self.look_until(Instant::now() + WATCH / 2)?;
        self.second_writer()?;
        let mut worst = BTreeMap::<String, Usage>::new();
        let until = Instant::now() + WATCH;
        while Instant::now() < until {
            self.look()?;
            for (name, usage) in self.world.usage().map_err(text)? {
                let worst = worst.entry(name).or_default();
                *worst = worst.max(usage);
            }
        }
        self.tally.moments += 1;
        let (server, chunks) = self.world.chunks();
        self.tally.chunks.insert(server, chunks);
        for (name, usage) in worst {
            self.world.logs.say(&format!("{name}: {usage:?}"));
            self.tally.usage.entry(name).or_insert((usage, usage)).1 = usage;
        }
        Ok(())
    }

    /// A second writer of a device is refused.
    fn second_writer(&mut self) -> Result<(), String> {
        use ferroce_wire::wire::{End, Wire};
        let device = self.rng.random_range(0..self.world.devices.len());
        let name = self.world.devices[device].name;
        let mut command = self.world.wire.namespace(End::B).command(ferroce_tests::ferroce());
        let socket = self.world.logs.path().join("second.sock");
        let path = format!("{},{}", Wire::address(0, End::B), Wire::address(0, End::A));
        command
            .args(["map", "--session", "second", "--path", &path, "--device", name, "--nbd"])
            .arg(&socket);
        let mut second = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(text)?;
        let until = Instant::now() + LIMIT;
        while second.try_wait().map_err(text)?.is_none() {
            let mapped = socket.exists();
            if mapped || Instant::now() > until {
                let _ = second.kill();
                let _ = second.wait();
                return Err(format!(
                    "{name}: a second writer was {}",
                    if mapped { "let in" } else { "not answered" }
                ));
            }
            self.look()?;
        }
        let out = second.wait_with_output().map_err(text)?;
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        match out.status.code() {
            Some(1) if said.contains("end the other one") => Ok(()),
            code => Err(format!("{name}: a second writer ended with {code:?}: {said}")),
        }
    }

    /// Everything that was written is there; the processes end.
    fn compare(&mut self) -> Result<(), String> {
        self.world.logs.say("comparing");
        let mut compared = (0, 0);
        let daemon = self.world.daemon.iter_mut().map(|daemon| {
            daemon.leave();
            &mut daemon.load
        });
        let devices = self.world.devices.iter_mut().flat_map(|device| &mut device.loads);
        for load in devices.chain(daemon) {
            let finished = load.finish(LIMIT);
            let (certain, doubtful) = finished.map_err(|e| format!("{}: {e}", load.device))?;
            compared = (compared.0 + certain, compared.1 + doubtful);
        }
        self.tally.compared = compared;
        Ok(())
    }

    /// The processes end orderly, and what went over the wire is accounted for.
    pub(crate) fn finish(&mut self) -> Result<(), String> {
        for (name, summary) in self.world.finish()? {
            self.world.logs.say(&format!("{name}: {summary}"));
            let number = |field: &str| summary[field].as_u64().unwrap_or(0);
            println!(
                "{name}: {} packets sent, {} again, {} received, {} with a wrong ICRC",
                number("packets_sent"),
                number("retransmits"),
                number("packets_received"),
                number("icrc_errors")
            );
        }
        let (c, under_way) = self.world.counters();
        let ends = c.cut + c.lost + c.dropped + c.refused + c.delivered + under_way as u64;
        match c.taken + c.repeated == ends {
            true => Ok(()),
            false => Err(format!("the wire's frames do not add up: {c:?}, {under_way} under way")),
        }
    }

    /// Something was wrong: where the logs are.
    pub(crate) fn give_up(self) -> PathBuf {
        self.world.keep_logs();
        self.world.give_up()
    }
}
