//! A server on several loops: how sessions are distributed, and which loop a further path goes to.

use std::{fs, thread};

use crate::common::{Lab, MIB, Mapped, TIMEOUT, eventually};
use ferroce_rig::{Host, Session};
use rnbd::nbd::proto::{cmd, cmd_flag};
use roce::LocalDevice;
use roce_verbs::{
    QpCaps,
    provider::{CmKind, ConnParams, DeviceIx, Event, QpSpec},
};
use rtrs::{
    client::SessionConfig,
    proto::{ConnReq, Uuid},
};
use zerocopy::IntoBytes;

fn session(lab: &Lab, name: &str) -> Result<Session, rtrs::Error> {
    let path = lab.path();
    let config = SessionConfig {
        connections: 3,
        connect_timeout: TIMEOUT,
        ..SessionConfig::new(name, path)
    };
    Session::open(&Host::open(path.src.unwrap()), config)
}

fn sessions(lab: &Lab) -> Vec<usize> {
    lab.stats().sessions
}

fn spread(loops: usize, clients: usize) {
    let lab = Lab::on_loops(loops, |c| c.rtrs.max_sessions_per_client = 64);
    let part = (8 * MIB / clients as u64) & !511;
    let writer = lab.map("writer", "second");
    let names: Vec<String> = (0..clients).map(|n| format!("client {n}")).collect();
    let maps: Vec<Mapped> = names.iter().map(|name| lab.map_read_only(name, "disk")).collect();
    let all = fs::read(lab.image("disk")).unwrap();
    thread::scope(|scope| {
        for (n, map) in maps.iter().enumerate() {
            let all = &all;
            let mut client = map.client();
            scope.spawn(move || {
                for turn in 0..3 {
                    let (at, len) = (((n + turn) % all.len().min(8)) << 20, part as usize);
                    let len = len.min(all.len() - at);
                    assert!(client.read(at as u64, len as u32).unwrap() == all[at..at + len], "{n}");
                }
            });
        }
        let mut client = writer.client();
        scope.spawn(move || {
            for n in 0..8u8 {
                assert_eq!(
                    client.write(u64::from(n) << 20, &vec![n ^ 0x5a; 1 << 20], cmd_flag::FUA),
                    0
                );
            }
            assert_eq!(client.call(cmd::FLUSH, 0, 0, 0, &[]), 0);
        });
    });
    let written = fs::read(lab.image("second")).unwrap();
    assert!(
        written
            .chunks(1 << 20)
            .zip(0..)
            .all(|(mib, n)| mib.iter().all(|b| *b == n ^ 0x5a))
    );
    // What one loop's session has written, another's reads.
    for n in 0..loops {
        let other = lab.map_read_only(&format!("reader {n}"), "second");
        assert_eq!(other.client().read(3 << 20, 4096).unwrap(), [3 ^ 0x5a; 4096]);
    }
    let total = clients + 1;
    eventually("sessions on all loops", || {
        let now = sessions(&lab);
        let (most, fewest) = (now.iter().max().unwrap(), now.iter().min().unwrap());
        now.len() == loops && now.iter().sum::<usize>() == total && most - fewest <= 1
    });
    eventually("the numbers of all loops", || {
        let stats = lab.stats();
        let opened = stats
            .rtrs
            .iter()
            .find(|(name, _)| *name == "sessions_opened")
            .unwrap()
            .1;
        let port = stats.turns.device().port;
        assert_eq!((port.icrc_errors, port.drop_handed_over), (0, 0));
        stats.rnbd.written_bytes == 8 << 20 && opened == (total + loops) as u64 && stats.rnbd.opens == opened
    });
    // Nothing is left of who has gone, in good order or not.
    drop((maps, writer));
    let admission = lab.admission.clone().unwrap();
    eventually("nobody is expected or there", || {
        admission.loads().iter().all(|n| *n == 0)
    });
}

#[test]
fn two_loops_serve_four_clients() {
    spread(2, 3);
}

#[test]
fn three_loops_serve_eight_clients() {
    spread(3, 7);
}

/// A client that goes no further than connection 0 of its path.
struct ByHand(LocalDevice);

impl ByHand {
    fn new() -> Self {
        Self(crate::common::device(ferroce_loopback::address().into()))
    }

    fn until<T>(&mut self, what: &str, mut found: impl FnMut(CmKind) -> Option<T>) -> T {
        let mut answer = None;
        eventually(what, || {
            let more = self.0.receive(roce::now(), 128);
            self.0.run_timers(roce::now(), more);
            while let Some(event) = self.0.provider().poll_event() {
                if let Event::Cm { kind, .. } = event {
                    answer = answer.take().or_else(|| found(kind));
                }
            }
            self.0.flush(roce::now());
            answer.is_some()
        });
        answer.unwrap()
    }

    /// Whether it is let in.
    fn path(&mut self, lab: &Lab, path: u8, session: Uuid, first: bool) -> bool {
        let id = self.0.provider().cm_resolve(None, lab.path().dst).unwrap();
        self.until("resolved", |kind| matches!(kind, CmKind::Resolved { .. }).then_some(()));
        let provider = self.0.provider();
        let pd = provider.alloc_pd(DeviceIx(0)).unwrap();
        let spec = QpSpec {
            pd,
            cq: provider.create_cq(DeviceIx(0), 64).unwrap(),
            caps: QpCaps::default(),
            signal_all: false,
        };
        let qp = provider.create_qp(&spec).unwrap();
        let request = ConnReq::new(0, 2, 0, Uuid([path; 16]), session, first);
        let params = ConnParams {
            private_data: request.as_bytes().to_vec(),
            ..ConnParams::default()
        };
        provider.cm_connect(id, qp, &params).unwrap();
        self.until("an answer", |kind| match kind {
            CmKind::Established { .. } => Some(true),
            CmKind::Rejected { .. } => Some(false),
            _ => None,
        })
    }
}

#[test]
fn further_paths_of_a_session_come_to_its_loop() {
    let lab = Lab::on_loops(2, |_| {});
    let admission = lab.admission.clone().unwrap();
    let mut clients: Vec<ByHand> = (0..4).map(|_| ByHand::new()).collect();
    let (one, two) = (Uuid([1; 16]), Uuid([2; 16]));
    assert!(clients[0].path(&lab, 1, one, true));
    eventually("it is at the first loop", || admission.loads() == [1, 0]);
    let other = session(&lab, "other").unwrap();
    let third = session(&lab, "third").unwrap();
    eventually("the first has more", || admission.loads() == [2, 1]);
    for (n, client) in clients.iter_mut().enumerate().skip(1) {
        assert!(client.path(&lab, n as u8 + 1, one, false), "path {n}");
        assert_eq!(admission.loads(), [2, 1], "it is no new session");
    }
    assert!(!ByHand::new().path(&lab, 9, two, false), "there is no such session");
    drop((other, third));
}
