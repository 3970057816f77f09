//! Hosts on a network without faults, for tests that say what each host does.

use std::net::Ipv4Addr;

use roce_port::fabric::Usage;
use roce_verbs::provider::Cx;

use crate::{
    Check, Faults, Link, Rng, Trace, US,
    lan::{Lan, LanEvent, Machines, Way, of_host, plain_host},
};

/// Events of a run at most.
const MAX_EVENTS: u32 = 1_000_000;

/// Network with hosts, each with its machines.
pub struct Lab<M> {
    lan: Lan<()>,
    machines: Vec<M>,
    empty: Vec<Usage>,
    rng: Rng,
}

/// Address of a host.
pub fn address(index: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 0, index as u8 + 1)
}

impl<M: Machines> Lab<M> {
    /// Starts so many hosts.
    ///
    /// # Panics
    /// When one does not start.
    pub fn start(count: usize, mut start: impl FnMut(usize, &mut Cx<'_>) -> M) -> Self {
        let faults = Faults {
            loss: 0.0,
            duplicate: 0.0,
            reorder: 0.0,
            corrupt: 0.0,
            delay: 100 * US,
            jitter: 0,
            bandwidth: 1_250_000_000,
            queue: 64 << 20,
        };
        let hosts: Vec<_> = (0..count).map(|index| plain_host(address(index).into())).collect();
        let trace = Trace::new(None, false).expect("a trace without a file");
        let mut lan = Lan::new(&hosts, 1, |_| Link::new(faults), Rng::new(1, 71), trace);
        let mut rng = Rng::new(1, 72);
        let empty = lan.nodes.iter().map(|node| node.fabric.usage()).collect();
        let machines = (0..count).map(|index| {
            let now = lan.instant();
            let mut provider = lan.nodes[index].provider(now);
            let mut cx = Cx {
                now,
                provider: &mut provider,
                random: &mut rng.source(),
            };
            start(index, &mut cx)
        });
        let machines = machines.collect();
        Self {
            lan,
            machines,
            empty,
            rng,
        }
    }

    /// Machines of a host.
    pub fn host(&self, index: usize) -> &M {
        &self.machines[index]
    }

    /// Has a host do something.
    pub fn at<T>(&mut self, index: usize, what: impl FnOnce(&mut M, &mut Cx<'_>) -> T) -> T {
        let now = self.lan.instant();
        let mut provider = self.lan.nodes[index].provider(now);
        let mut cx = Cx {
            now,
            provider: &mut provider,
            random: &mut self.rng.source(),
        };
        let result = what(&mut self.machines[index], &mut cx);
        self.lan.want_turn(index, self.lan.now);
        result
    }

    /// Nothing reaches a host any more, and nothing comes from it, as if it were dead.
    pub fn cut_off(&mut self, index: usize) {
        for other in (0..self.machines.len()).filter(|other| *other != index) {
            for (from, to) in [(index, other), (other, index)] {
                let way = Way {
                    from,
                    to,
                    network: None,
                };
                self.lan.set_cut(way, true);
            }
        }
    }

    /// Runs until this is so, for so many nanoseconds at most.
    ///
    /// # Errors
    /// When a rule is broken, or it does not come to that.
    pub fn run_until(&mut self, limit: u64, mut is_done: impl FnMut(&[M]) -> bool) -> Check {
        let end = self.lan.now + limit;
        for _ in 0..MAX_EVENTS {
            if is_done(&self.machines) {
                return Ok(());
            }
            let Some(what) = self.lan.pop() else {
                return Err("nothing is left to happen".into());
            };
            if self.lan.now > end {
                return Err(format!("not done at {} ns", self.lan.now));
            }
            match what {
                LanEvent::Arrive { node, frame } => self.lan.arrive(node, frame),
                LanEvent::Turn { node, boot } => {
                    if self.lan.begin_turn(node, boot) {
                        self.turn(node)?;
                    }
                }
                LanEvent::World(()) => {}
            }
        }
        Err("it spins".into())
    }

    /// Lets time go by, nanoseconds.
    ///
    /// # Errors
    /// When a rule is broken.
    pub fn pass(&mut self, time: u64) -> Check {
        let end = self.lan.now + time;
        self.lan.schedule(time, LanEvent::World(()));
        while self.lan.now < end {
            match self.lan.pop() {
                Some(LanEvent::Arrive { node, frame }) => self.lan.arrive(node, frame),
                Some(LanEvent::Turn { node, boot }) if self.lan.begin_turn(node, boot) => self.turn(node)?,
                Some(_) => {}
                None => break,
            }
        }
        Ok(())
    }

    /// Checks that nothing is left in the providers.
    ///
    /// # Errors
    /// Names what there is.
    pub fn check_empty(&self) -> Check {
        self.lan.check_usage(&self.empty)
    }

    fn turn(&mut self, index: usize) -> Check {
        self.lan.receive(index);
        let now = self.lan.instant();
        let next = of_host(
            &mut self.lan.nodes[index],
            now,
            &mut self.rng.source(),
            &mut self.machines[index],
        )?;
        self.lan.transmit(index);
        let port = self.lan.nodes[index].next_timeout();
        if let Some(at) = next.into_iter().chain(port).min() {
            self.lan.want_turn(index, at.as_nanos().max(now.as_nanos() + 1));
        }
        Ok(())
    }
}
