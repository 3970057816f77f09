//! The processes and networks under test.

use std::{fs::File, io, path::PathBuf};

use ferroce_tests::{process::Running, usage::Usage};
use ferroce_wire::{
    direction::{Conditions, Counters},
    wire::{End, Wire, WireConfig},
};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::{
    client::{Device, PLANS},
    daemon::{self, Daemon},
    limits::BASE,
    load::Load,
    logs::Logs,
    steer::{Command, Who},
    trouble::{NETWORKS, Outage, ServeOptions, Weather},
};

/// All of it.
pub(crate) struct World {
    // Processes before the namespaces they are in.
    pub(crate) devices: Vec<Device>,
    /// Until the end.
    pub(crate) daemon: Option<Daemon>,
    serve: Option<Running>,
    /// Those of the last server.
    options: ServeOptions,
    /// How many servers there were.
    pub(crate) generation: u32,
    exports: Vec<String>,
    ferroce: PathBuf,
    answers: Vec<(Who, Value)>,
    pub(crate) wire: Wire,
    weather: Vec<Weather>,
    cuts: Vec<(u8, End)>,
    pub(crate) logs: Logs,
}

impl World {
    /// Starts everything; the devices are mapped.
    pub(crate) fn start(seed: u64) -> io::Result<Self> {
        let wire = Wire::start(&WireConfig {
            networks: NETWORKS,
            mtu: 4200,
            seed,
        })?;
        let logs = Logs::new()?;
        let mut exports = Vec::new();
        for device in PLANS.iter().flat_map(|plan| plan.devices).chain(&daemon::DEVICES) {
            let image = logs.path().join(format!("{device}.img"));
            File::create(&image)?.set_len(BASE)?;
            exports.push(format!("{device}={}", image.display()));
        }
        let mut world = Self {
            devices: Vec::new(),
            daemon: None,
            serve: None,
            options: ServeOptions::USUAL,
            generation: 0,
            exports,
            ferroce: ferroce_tests::ferroce().to_owned(),
            answers: Vec::new(),
            wire,
            weather: Vec::new(),
            cuts: Vec::new(),
            logs,
        };
        world.start_server(ServeOptions::USUAL);
        for (n, plan) in PLANS.iter().enumerate() {
            let dir = world.logs.path();
            let device = Device::start(plan, n as u8, &world.wire, &world.ferroce, dir, seed)?;
            world.devices.push(device);
        }
        let dir = world.logs.path();
        world.daemon = Some(Daemon::start(&world.wire, &world.ferroce, dir, seed)?);
        Ok(world)
    }

    pub(crate) fn start_server(&mut self, options: ServeOptions) {
        let mut args = vec!["serve".to_owned(), "--json".to_owned()];
        for export in &self.exports {
            args.extend(["--export".to_owned(), export.clone()]);
        }
        args.extend(options.args());
        let mut command = self.wire.namespace(End::A).command(&self.ferroce);
        command.args(&args);
        let mut serve = Running::steered_by(command, format!("ferroce {args:?}"));
        serve.event("listening");
        self.generation += 1;
        self.logs
            .say(&format!("server {} listens, {options:?}", self.generation));
        (self.serve, self.options) = (Some(serve), options);
    }

    /// kill -9.
    fn kill_server(&mut self) {
        if let Some(serve) = self.serve.take() {
            serve.signal(Signal::SIGKILL);
            let left = serve.end();
            self.logs.keep(
                &format!("serve-{}.log", self.generation),
                &format!("{}\n{}", left.stdout, left.stderr),
            );
        }
    }

    /// Applies what weather and cuts there are.
    fn set_networks(&self) {
        for network in 0..NETWORKS {
            for from in End::BOTH {
                let mut conditions = Conditions::default();
                for weather in self.weather.iter().filter(|w| w.network == network && w.ways.has(from)) {
                    conditions = weather.conditions;
                }
                conditions.cut = self.cuts.contains(&(network, from));
                self.wire.set(network, from, conditions);
            }
        }
    }

    pub(crate) fn begin_weather(&mut self, weather: &Weather) {
        self.weather.push(weather.clone());
        self.set_networks();
    }

    pub(crate) fn end_weather(&mut self, weather: &Weather) {
        if let Some(at) = self.weather.iter().position(|w| w == weather) {
            self.weather.remove(at);
        }
        self.set_networks();
    }

    pub(crate) fn begin_outage(&mut self, outage: &Outage) -> io::Result<()> {
        match outage {
            Outage::Cut(network, ways) => self.cuts.extend(
                End::BOTH
                    .into_iter()
                    .filter(|from| ways.has(*from))
                    .map(|from| (*network, from)),
            ),
            Outage::CutAll(ways) => {
                let all = (0..NETWORKS).flat_map(|network| End::BOTH.map(|from| (network, from)));
                self.cuts.extend(all.filter(|(_, from)| ways.has(*from)));
            }
            Outage::Carrier(network, end) => self.carrier(*network, *end, "off")?,
            Outage::Kill(_) => self.kill_server(),
            Outage::StopServer => self.signal_server(Signal::SIGSTOP),
            Outage::StopClient(number) => self.signal_client(*number, Signal::SIGSTOP),
            Outage::EndClient(number, how) => self.client(*number).end(*how),
        }
        self.set_networks();
        Ok(())
    }

    pub(crate) fn end_outage(&mut self, outage: &Outage) -> io::Result<()> {
        match outage {
            Outage::Cut(..) | Outage::CutAll(_) => self.cuts.clear(),
            Outage::Carrier(network, end) => self.carrier(*network, *end, "on")?,
            Outage::Kill(options) => self.start_server(*options),
            Outage::StopServer => self.signal_server(Signal::SIGCONT),
            Outage::StopClient(number) => self.signal_client(*number, Signal::SIGCONT),
            Outage::EndClient(number, _) => self.client(*number).revive(),
        }
        self.set_networks();
        Ok(())
    }

    fn carrier(&self, network: u8, end: End, on: &str) -> io::Result<()> {
        self.wire
            .namespace(end)
            .ip(&format!("link set wire{network} carrier {on}"))
    }

    fn signal_server(&self, signal: Signal) {
        if let Some(serve) = &self.serve {
            serve.signal(signal);
        }
    }

    fn signal_client(&mut self, number: u32, signal: Signal) {
        self.client(number).signal(signal);
    }

    fn client(&mut self, number: u32) -> &mut Device {
        let index = self.index(number);
        &mut self.devices[index]
    }

    /// Which device an outage's number means.
    pub(crate) fn index(&self, number: u32) -> usize {
        number as usize % self.devices.len()
    }

    /// The load on all devices of all sessions.
    pub(crate) fn loads(&self) -> impl Iterator<Item = &Load> {
        let daemon = self.daemon.iter().map(|daemon| &daemon.load);
        self.devices.iter().flat_map(|device| &device.loads).chain(daemon)
    }

    /// Reads what the processes tell; an error if one has ended or tells what it must not.
    pub(crate) fn listen(&mut self) -> Result<(), String> {
        for (n, device) in self.devices.iter_mut().enumerate() {
            let answers = device.listen(&mut self.logs)?;
            self.answers
                .extend(answers.into_iter().map(|answer| (Who::Client(n), answer)));
        }
        if let Some(daemon) = &mut self.daemon {
            daemon.listen(&mut self.logs)?;
        }
        if let Some(serve) = &mut self.serve {
            while let Some(line) = serve.new_line() {
                self.logs.say(&format!("serve: {line}"));
                let event: Value = serde_json::from_str(&line).map_err(|e| format!("serve: {line}: {e}"))?;
                if event["event"] == "answer" {
                    self.answers.push((Who::Server, event));
                }
            }
            if serve.has_ended() {
                return Err("ferroce serve has ended".into());
            }
        }
        match self.wire.works() {
            true => Ok(()),
            false => Err("the wire has ended".into()),
        }
    }

    /// Sends a command; its number. None if there is no server to send it to.
    pub(crate) fn ask(&mut self, who: Who, command: &Command) -> Option<u64> {
        let id = match who {
            Who::Client(n) => {
                let device = &mut self.devices[n];
                device.ask(command.request(device.name))
            }
            Who::Server => self.serve.as_mut()?.begin(command.request("")),
        };
        self.logs.say(&format!("COMMAND {id} to {who:?}: {command:?}"));
        Some(id)
    }

    /// Answers that have come.
    pub(crate) fn take_answers(&mut self) -> Vec<(Who, Value)> {
        std::mem::take(&mut self.answers)
    }

    /// The server as [`usage`](Self::usage) calls it, and the bytes of its sessions' chunks.
    pub(crate) fn chunks(&self) -> (String, u64) {
        let of_session = u64::from(self.options.queue_depth) * (u64::from(self.options.chunk_kib) << 10);
        (
            self.server_name(),
            of_session * (self.devices.len() + daemon::SESSIONS) as u64,
        )
    }

    fn server_name(&self) -> String {
        format!("serve {}", self.generation)
    }

    /// What the server and each client take, as far as they are there.
    pub(crate) fn usage(&self) -> io::Result<Vec<(String, Usage)>> {
        let clients = self
            .devices
            .iter()
            .filter(|device| device.is_mapped())
            .map(|device| (format!("map of {} ({})", device.name, device.generation), device.id()));
        let server = self.serve.iter().map(|serve| (self.server_name(), serve.id()));
        let daemon = self.daemon.iter().map(|daemon| ("daemon".to_owned(), daemon.id()));
        clients
            .chain(server)
            .chain(daemon)
            .map(|(name, pid)| Ok((name, Usage::of(pid)?)))
            .collect()
    }

    /// All directions together, and how many frames are under way.
    pub(crate) fn counters(&self) -> (Counters, usize) {
        let directions = (0..NETWORKS).flat_map(|network| End::BOTH.map(|from| self.wire.counters(network, from)));
        directions.fold((Counters::default(), 0), |(mut sum, under_way), (counters, more)| {
            sum.add(&counters);
            (sum, under_way + more)
        })
    }

    /// Ends the processes as ctrl-C does; the summaries they print, by name.
    pub(crate) fn finish(&mut self) -> Result<Vec<(String, Value)>, String> {
        if let Some(daemon) = self.daemon.take() {
            daemon.finish(&self.logs)?;
        }
        let mut ended = Vec::new();
        for device in self.devices.drain(..) {
            ended.push((format!("map-{}", device.name), device.into_process()));
        }
        ended.extend(
            self.serve
                .take()
                .map(|serve| (format!("serve-{}", self.generation), serve)),
        );
        let mut summaries = Vec::new();
        for (name, process) in ended {
            process.signal(Signal::SIGINT);
            let left = process.end();
            self.logs
                .keep(&format!("{name}.log"), &format!("{}\n{}", left.stdout, left.stderr));
            let last = left
                .stdout
                .lines()
                .last()
                .and_then(|line| serde_json::from_str::<Value>(line).ok());
            match (left.code, last) {
                (Some(0), Some(summary)) if summary["event"] == "summary" => summaries.push((name, summary)),
                (code, _) => return Err(format!("{name} did not end well ({code:?})")),
            }
        }
        Ok(summaries)
    }

    /// All ends, but the folder with the logs stays.
    pub(crate) fn give_up(mut self) -> PathBuf {
        let empty = Logs::new();
        match empty {
            Ok(empty) => std::mem::replace(&mut self.logs, empty).stay(),
            Err(_) => PathBuf::from("no folder for logs"),
        }
    }

    /// Writes down what the processes have said so far.
    pub(crate) fn keep_logs(&self) {
        for device in &self.devices {
            self.logs.keep(&format!("map-{}.log", device.name), &device.stderr());
        }
        if let Some(daemon) = &self.daemon {
            self.logs.keep("daemon.log", &daemon.stderr());
        }
        if let Some(serve) = &self.serve {
            self.logs
                .keep(&format!("serve-{}.log", self.generation), &serve.stderr());
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // The load ends when its devices do, and stopped processes can't end.
        for device in &mut self.devices {
            device.kill();
        }
        self.daemon.iter_mut().for_each(Daemon::kill);
    }
}
