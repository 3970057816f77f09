//! Turns of a host: frames arrive, its port processes them, and what it sends goes to the links.

use std::net::SocketAddr;

use roce_bth::ROCE_UDP_PORT;
use roce_icrc::Flow;
use roce_port::CmEventKind;
use roce_verbs::AsyncEvent;

use crate::{
    host::CQS,
    net::Frame,
    runner::Check,
    world::{WAKE, World},
};

/// The rules of a GSO send: sizes, one destination queue pair, and ICRCs that are right as Linux numbers segments.
fn check_train(train: &roce_port::Train<'_>, flow: &Flow) -> Check {
    let (len, segment, n) = (train.bytes.len(), train.segment_len, train.segments());
    if segment == 0 || n > roce_port::MAX_SEGMENTS || len > roce_port::MAX_TRAIN_BYTES {
        return Err(format!("a train of {n} times {segment} bytes that has {len}"));
    }
    let dest = |packet: &[u8]| packet.get(5..8).map(<[u8]>::to_vec);
    let first = dest(train.bytes);
    for (i, packet) in train.packets().enumerate() {
        if dest(packet) != first {
            return Err("a train that mixes queue pairs".into());
        }
        if !flow.verify(i as u16, packet) {
            return Err(format!("packet {i} of {n} leaves with a wrong ICRC"));
        }
    }
    Ok(())
}

impl World {
    pub(crate) fn arrive(&mut self, h: usize, frame: Frame) -> Check {
        let host = &mut self.hosts[h];
        if !host.alive {
            return Ok(());
        }
        if host.rx_bytes + frame.bytes.len() > host.plan.rx_buffer {
            self.net_stats.overflowed += 1;
            return Ok(());
        }
        host.rx_bytes += frame.bytes.len();
        host.rx.push_back(frame);
        if !host.run_scheduled {
            host.run_scheduled = true;
            let (boot, most) = (host.boot, host.plan.latency);
            let after = self.net_rng.range(0, most);
            self.schedule(after, "run", move |w| w.run_host(h, boot));
        }
        Ok(())
    }

    pub(crate) fn run_host(&mut self, h: usize, boot: u32) -> Check {
        let host = &mut self.hosts[h];
        if !host.alive || host.boot != boot {
            return Ok(());
        }
        host.run_scheduled = false;
        while let Some(frame) = self.hosts[h].rx.pop_front() {
            self.hosts[h].rx_bytes -= frame.bytes.len();
            self.trace.received(self.now, h, &frame);
            self.take_after_copy(h, &frame);
        }
        self.service(h)
    }

    pub(crate) fn wake(&mut self, h: usize, boot: u32) -> Check {
        let now = self.instant();
        let host = &mut self.hosts[h];
        if !host.alive || host.boot != boot || host.wake_at != Some(self.now) {
            return Ok(());
        }
        host.wake_at = None;
        self.stats.timer_runs += 1;
        host.port.handle_timeout(now);
        if host.port.poll_timeout().is_some_and(|at| at < now) {
            return Err(format!("host {h}: a timer stays in the past after it has run"));
        }
        self.service(h)
    }

    /// After anything was done to a host: sends what it has to send, and looks at what it has to tell.
    pub(crate) fn service(&mut self, h: usize) -> Check {
        for _ in 0..10_000 {
            self.transmit(h)?;
            // Completions come before the events that tell why the last of them were flushed.
            let now = self.instant();
            let port = &mut self.hosts[h].port;
            let events: Vec<CmEventKind> = std::iter::from_fn(|| port.poll_cm_event(now)).collect();
            for event in &events {
                self.allow_flushes(h, event);
            }
            self.poll_cqs(h)?;
            self.poll_services(h)?;
            let mut busy = !events.is_empty();
            for event in events {
                self.trace.cm(self.now, h, &event);
                self.stats.cm_events += 1;
                self.handle_cm_event(h, event)?;
            }
            while let Some(event) = self.hosts[h].port.poll_async_event() {
                busy = true;
                self.on_async_event(h, event)?;
            }
            if !busy {
                self.arm_timer(h);
                return Ok(());
            }
        }
        Err(format!("host {h} has events without end"))
    }

    fn on_async_event(&mut self, h: usize, event: AsyncEvent) -> Check {
        match event {
            AsyncEvent::SqDrained(qpn) => self.on_drained(h, qpn),
            AsyncEvent::SrqLimitReached(_) | AsyncEvent::SrqError(_) => self.on_srq_event(h, event),
            AsyncEvent::CqError(cq) => Err(format!("host {h}: completion queue {cq} overflowed")),
            // Errors that completions and the states of queue pairs show as well.
            _ => Ok(()),
        }
    }

    pub(crate) fn poll_cqs(&mut self, h: usize) -> Check {
        for cq in 0..CQS {
            loop {
                let mut out = std::mem::take(&mut self.scratch);
                out.clear();
                let polled = self.hosts[h].cqs[cq].poll(&mut out, 64);
                let polled = polled.map_err(|_| format!("host {h}: completion queue {cq} overflowed"));
                let checked = polled.and_then(|_| {
                    for completion in &out {
                        self.trace.completed(self.now, h, completion);
                        self.on_completion(h, cq, completion)?;
                    }
                    Ok(out.is_empty())
                });
                self.scratch = out;
                if checked? {
                    break;
                }
            }
        }
        Ok(())
    }

    fn arm_timer(&mut self, h: usize) {
        let now = self.now;
        let host = &mut self.hosts[h];
        let Some(at) = host.port.poll_timeout().map(|at| at.as_nanos().max(now)) else {
            return;
        };
        if host.wake_at.is_none_or(|armed| at < armed || armed < now) {
            host.wake_at = Some(at);
            let boot = host.boot;
            self.schedule(at - now, WAKE, move |w| w.wake(h, boot));
        }
    }

    /// Lets the port stage what it has, and gives it to the links.
    fn transmit(&mut self, h: usize) -> Check {
        let now = self.instant();
        loop {
            let Some(mut batch) = self.hosts[h].batch.take() else {
                return Err(format!("host {h} transmits within transmitting"));
            };
            let more = self.hosts[h].port.poll_transmit(now, &mut batch);
            for train in batch.trains() {
                self.stats.packets += train.segments() as u64;
                self.stats.trains += 1;
                self.send_train(h, &train)?;
            }
            batch.clear();
            self.hosts[h].batch = Some(batch);
            if !more {
                return Ok(());
            }
        }
    }

    fn send_train(&mut self, h: usize, train: &roce_port::Train<'_>) -> Check {
        let remote = train.remote.ip();
        let to = self.hosts.iter().position(|host| host.plan.addr == remote);
        let src = SocketAddr::new(train.local, train.src_port);
        let flow = Flow::try_from((src, SocketAddr::new(remote, ROCE_UDP_PORT)));
        let frame = |bytes: &[u8], identification: u16, segment_len: usize| Frame {
            src,
            dst: remote,
            tos: train.tos,
            identification,
            segment_len,
            bytes: bytes.to_vec(),
            damaged: false,
        };
        let Ok(flow) = flow else {
            return Err(format!("host {h} sends from {} to {remote}", train.local));
        };
        check_train(train, &flow).map_err(|text| format!("host {h}: {text}"))?;
        let Some(to) = to else {
            return self.reflect(h, train);
        };
        if self.copies.is_some() || self.blind.is_some() {
            for packet in train.packets() {
                self.note_genuine(to, train.src_port, packet);
            }
        }
        self.trace.leaves(self.now, h, train);
        let whole = self.hosts[to].plan.gro
            && !self.hosts[to].plan.sees_headers
            && !self.hosts[h].plan.counts_up
            && train.segments() > 1
            && self.net_rng.chance(0.7);
        if whole {
            if self.observer.is_some() {
                for (i, packet) in train.packets().enumerate() {
                    self.observe(to, &frame(packet, i as u16, 0));
                }
            }
            let frame = frame(train.bytes, 0, train.segment_len);
            self.trace.sent(self.now, &frame);
            self.carry(h, to, frame);
            return Ok(());
        }
        for (i, packet) in train.packets().enumerate() {
            let mut frame = frame(packet, i as u16, 0);
            if self.hosts[h].plan.counts_up {
                let next = &mut self.hosts[h].next_identification;
                *next = next.wrapping_add(1);
                frame.identification = *next;
                flow.seal(*next, &mut frame.bytes);
            }
            self.trace.sent(self.now, &frame);
            self.observe(to, &frame);
            self.carry(h, to, frame);
        }
        Ok(())
    }

    fn carry(&mut self, from: usize, to: usize, frame: Frame) {
        let (now, link) = (self.now, from * self.hosts.len() + to);
        let sees = self.hosts[to].plan.sees_headers;
        let mut arrivals = Vec::new();
        let arrive = |at, frame| arrivals.push((at, frame));
        self.links[link].send(now, frame, sees, &mut self.net_rng, &mut self.net_stats, arrive);
        for (at, frame) in arrivals {
            self.schedule(at.saturating_sub(now), "arrive", move |w| w.arrive(to, frame));
        }
    }
}
