//! Threads that wait for completions, which bring the packets themselves, and what goes on when they don't.

use crate::common::*;
use roce::{Channel, Cq, DeviceConfig, Mr, Payload, Qp, QpCaps, QpInit, SendOp, SpinMode};
use std::time::Duration;

/// One end that sleeps for its completions.
struct Sleeper {
    cq: Cq,
    channel: Channel,
    qp: Qp,
    mr: Mr,
}

impl Sleeper {
    fn new(side: &Side) -> Self {
        let channel = side.device.create_channel().unwrap();
        let cq = side.device.create_cq(64, Some(&channel), 1).unwrap();
        let init = QpInit {
            send_cq: &cq,
            recv_cq: &cq,
            caps: QpCaps::default(),
            signal_all: false,
        };
        let qp = side.device.create_qp(&side.pd, &init).unwrap();
        Self {
            mr: side.mr(64),
            cq,
            channel,
            qp,
        }
    }

    fn pair(a: &Side, b: &Side) -> [Self; 2] {
        let [near, far] = [Self::new(a), Self::new(b)];
        raise(&near.qp, a.addr(), &far.qp, b.addr(), [1, 2]);
        raise(&far.qp, b.addr(), &near.qp, a.addr(), [2, 1]);
        [near, far]
    }

    /// Waits for so many completions, asleep.
    fn wait(&self, count: usize) {
        let mut out = vec![];
        while out.len() < count {
            self.cq.arm(false).unwrap();
            let left = count - out.len();
            if self.cq.poll(&mut out, left).unwrap() == 0 {
                assert!(self.channel.wait(Some(TIMEOUT)).unwrap().is_some(), "nothing has come");
                self.cq.poll(&mut out, left).unwrap();
            }
        }
        assert!(out.iter().all(|c| c.status == roce::WcStatus::Success), "{out:?}");
    }

    fn send(&self) {
        post(&self.qp, 2, SendOp::Send, Payload::Sges(&[self.mr.sge(0, 64)]));
    }

    fn receive(&self) {
        recv(&self.qp, 1, &[self.mr.sge(0, 64)]);
    }
}

/// The two ends send each other messages in turns, each with its completion.
fn talk([near, far]: &[Sleeper; 2], rounds: usize) {
    far.receive();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..rounds {
                far.wait(1);
                far.receive();
                far.send();
                far.wait(1);
            }
        });
        for _ in 0..rounds {
            near.receive();
            near.send();
            near.wait(2);
        }
    });
}

fn sides(spin: SpinMode) -> [Side; 2] {
    [(); 2].map(|()| {
        let config = DeviceConfig { spin, ..config() };
        Side::new(roce::Device::open(config).unwrap())
    })
}

const SPINS: [SpinMode; 3] = [SpinMode::Off, SpinMode::Auto, SpinMode::For(Duration::from_micros(200))];

#[test]
fn messages_go_to_and_fro_between_threads_that_wait() {
    for spin in SPINS {
        let [a, b] = sides(spin);
        talk(&Sleeper::pair(&a, &b), 300);
    }
}

#[test]
fn several_threads_of_a_device_wait_each_for_its_own() {
    for spin in SPINS {
        let [a, b] = sides(spin);
        let pairs: Vec<_> = (0..4).map(|_| Sleeper::pair(&a, &b)).collect();
        std::thread::scope(|scope| {
            for pair in &pairs {
                scope.spawn(|| talk(pair, 100));
            }
        });
    }
}

#[test]
fn one_that_waited_may_stay_away_or_poll() {
    for spin in SPINS {
        let [a, b] = sides(spin);
        let pair = Sleeper::pair(&a, &b);
        let (qa, qb) = (a.qp(), b.qp());
        raise(&qa, a.addr(), &qb, b.addr(), [1, 2]);
        raise(&qb, b.addr(), &qa, a.addr(), [2, 1]);
        let (ma, mb) = (a.mr(64), b.mr(64));
        for round in 0..3u64 {
            talk(&pair, 200);
            // The target makes no call at all.
            for i in 0..20u64 {
                ma.write(0, &(round << 32 | i).to_ne_bytes()).unwrap();
                post(&qa, i, SendOp::Write(remote(&mb, 0)), Payload::Sges(&[ma.sge(0, 64)]));
                a.good(1);
                assert_eq!(contents(&mb, 0, 8), (round << 32 | i).to_ne_bytes());
            }
        }
    }
}

#[test]
fn a_wait_ends_when_its_time_is_over_and_packets_are_answered_meanwhile() {
    let [a, b] = sides(SpinMode::Auto);
    let [near, far] = Sleeper::pair(&a, &b);
    std::thread::scope(|scope| {
        let far = &far;
        let waits = scope.spawn(move || far.channel.wait(Some(Duration::from_millis(300))));
        // Nothing here makes an event there.
        near.receive();
        for _ in 0..50 {
            post(
                &near.qp,
                3,
                SendOp::Write(remote(&far.mr, 0)),
                Payload::Sges(&[near.mr.sge(0, 64)]),
            );
            near.wait(1);
        }
        assert_eq!(waits.join().unwrap().unwrap(), None);
    });
}
