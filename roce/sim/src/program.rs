//! Programs of others on the simulator's hosts, in place of the model's connections, and the world as they see it.

use std::net::IpAddr;

use roce_port::Port;
use roce_verbs::Instant;

use crate::{
    adversary::state::{Blind, Effort},
    config::{Class, SimConfig},
    rng::Rng,
    runner::{Check, Failure, RunConfig, simulate},
    stats::Stats,
    world::{ADVERSARY, Program, World},
};

/// Runs programs that `make` creates on a network without faults, under a flood of requests to the first host. A failing
/// run is repeated to write its capture.
///
/// # Errors
/// When a rule is broken or the code under test panics.
pub fn simulate_program(
    config: &RunConfig,
    kind: &str,
    options: &'static str,
    make: impl Fn(&mut World, &mut Rng) -> Box<dyn Program>,
) -> Result<Stats, Failure> {
    let sim = SimConfig::new(config.clone());
    simulate(config, kind, options, |trace| {
        let mut world = World::new(&sim, Class::Flood, trace);
        let mut rng = Rng::new(config.seed, ADVERSARY);
        let program = make(&mut world, &mut rng);
        world.program = Some(program);
        world.start_attack(0);
        let effort = Effort::flood(&mut rng);
        world.blind = Some(Box::new(Blind::new(rng, effort)));
        world
    })
}

impl World {
    /// Returns the virtual time.
    pub fn instant(&self) -> Instant {
        Instant::from_nanos(self.now)
    }

    /// Returns the number of hosts.
    pub fn hosts(&self) -> usize {
        self.hosts.len()
    }

    /// Returns a host's address.
    pub fn addr(&self, host: usize) -> IpAddr {
        self.hosts[host].plan.addr
    }

    /// Returns a host's port.
    pub fn port(&mut self, host: usize) -> &mut Port {
        &mut self.hosts[host].port
    }

    /// Calls [`Program::on_timer`] `after` nanoseconds from now.
    pub fn set_timer(&mut self, after: u64, timer: usize) {
        self.schedule(after, "program", move |w| w.on_program_timer(timer));
    }

    /// Prints a line of the log, if there is one.
    pub fn note(&self, text: impl FnOnce() -> String) {
        self.trace.note(self.now, text);
    }

    /// Counts a client that was accepted after so many nanoseconds.
    pub fn count_admission(&mut self, took: u64) {
        self.stats.admitted += 1;
        self.stats.longest_admission_ns = self.stats.longest_admission_ns.max(took);
    }

    /// Calls the program. It is not there meanwhile.
    pub(crate) fn with_program(&mut self, call: impl FnOnce(&mut dyn Program, &mut Self) -> Check) -> Check {
        let Some(mut program) = self.program.take() else {
            return Ok(());
        };
        let done = call(&mut *program, self);
        self.program = Some(program);
        done
    }

    pub(crate) fn on_program_timer(&mut self, timer: usize) -> Check {
        self.with_program(|program, world| program.on_timer(world, timer))?;
        (0..self.hosts.len()).try_for_each(|host| self.service(host))
    }
}
