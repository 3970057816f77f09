//! A session with two paths, of which one is lost.

use core::{ops::Range, time::Duration};
use std::{collections::VecDeque, net::SocketAddr};

use roce_verbs::{
    QpCaps, SendOp, WcFlags, WcOpcode,
    provider::{Provider, QpId, QpSpec},
};

use super::*;
use crate::{
    Cx, Direction, PACKET_LIFETIME,
    addr::PathAddr,
    client::{
        conn::Conn,
        env::{ConnKey, Names},
        policy::Policy,
        stage::{Attempt, State, Up},
        status::PathCommand,
        terms::Terms,
    },
    proto::{ChunkLayout, Imm, IoReply, MsgFlags, info::ChunkAddr},
    provider::{Keys, Scripted},
    sendq::SendQueue,
};

const DEPTH: u32 = 4;
const CHUNK: u32 = 8192;
const ID: SessionId = SessionId(3);
/// The connection that the requests take.
const CID: u16 = 1;

struct Bed {
    provider: Scripted,
    session: Session<u64>,
    names: Names,
    out: VecDeque<Output>,
    dirty: Vec<ConnKey>,
    now: Instant,
    /// All bytes of what is drawn.
    random: u8,
    /// Queue pairs of each path, by connection.
    qps: Vec<Vec<QpId>>,
}

/// Message that a path has posted: request number, offset in the chunk, where to, and the bytes.
type Sent = (u32, u64, Vec<u8>);

/// A path is up, without heartbeats.
fn connected(now: Instant, config: &SessionConfig) -> State {
    let mut up = Up::new(now, config, None);
    up.next_beat = now + Duration::from_secs(1 << 30);
    State::Connected(up)
}

impl Bed {
    /// Both paths are up.
    fn new() -> Self {
        let now = Instant::from_nanos(1_000_000);
        let mut provider = Scripted::new(&[Keys::INSTANT]);
        provider.auto_drain = false;
        let dst: SocketAddr = ([192, 0, 2, 9], 1234).into();
        // The first is chosen as long as it is up.
        let config = SessionConfig {
            policy: Policy::MinLatency,
            ..SessionConfig::new("two", PathAddr::to(dst))
        };
        let terms = Terms {
            layout: ChunkLayout::new(DEPTH, CHUNK).unwrap(),
            max_io_size: 4096,
            max_hdr_size: 1024,
            flags: MsgFlags::empty(),
        };
        let mut inflight = InFlightTable::new(ID);
        let mut cx = Cx {
            now,
            provider: &mut provider,
            random: &mut |_| (),
        };
        let pd = inflight.pd_on(&mut cx, DeviceIx(0), true).unwrap();
        inflight.prepare_device(&mut cx, DeviceIx(0), DEPTH, 320).unwrap();
        inflight.buffers.set_limit(1 << 20);
        let (mut paths, mut qps) = (Vec::new(), Vec::new());
        for index in 0..2 {
            let cq = provider.create_cq(DeviceIx(0), 1000).unwrap();
            let what = (PathId::of_opening(index), config.paths[0], Uuid::draw(&mut |_| ()));
            let mut path = Path::new(ID, index, what);
            path.state = connected(now, &config);
            path.latency = Some(Duration::from_micros(index.into()));
            path.terms = Some(terms);
            (path.device, path.pd, path.cq) = (Some(DeviceIx(0)), Some(pd), Some(cq));
            for _ in 0..2 {
                let mut conn = Conn::new(provider.cm_resolve(None, dst).unwrap());
                let spec = QpSpec {
                    pd,
                    cq,
                    caps: QpCaps::default(),
                    signal_all: false,
                };
                conn.qp = Some(provider.create_qp(&spec).unwrap());
                conn.queue = SendQueue::new(64);
                conn.established = true;
                path.conns.push(conn);
            }
            path.chunks = (0..DEPTH)
                .map(|chunk| ChunkAddr {
                    addr: chunk_addr(index, chunk),
                    rkey: 7,
                })
                .collect();
            qps.push(path.conns.iter().filter_map(|conn| conn.qp).collect());
            paths.push(path);
        }
        let session = Session {
            id: ID,
            uuid: Uuid::draw(&mut |_| ()),
            info: Some(terms.info(config.max_user_header)),
            turn: 0,
            next_path: 2,
            given_up: false,
            config,
            state: SessionState::Open,
            paths,
            inflight,
            failure: None,
            why: PathError::Closed,
            lost_at: None,
            look_at: None,
        };
        Self {
            provider,
            session,
            names: Names::default(),
            out: VecDeque::new(),
            dirty: Vec::new(),
            now,
            random: 0,
            qps,
        }
    }

    fn with<T>(&mut self, f: impl FnOnce(&mut Session<u64>, &mut Env<'_, '_, u64>) -> T) -> T {
        let mut cx = Cx {
            now: self.now,
            provider: &mut self.provider,
            random: &mut |bytes| bytes.fill(self.random),
        };
        let mut env = Env {
            cx: &mut cx,
            names: &mut self.names,
            out: &mut self.out,
            dirty: &mut self.dirty,
            cpu: 0,
        };
        f(&mut self.session, &mut env)
    }

    /// A write of four bytes; header and data tell which.
    fn write(&mut self, tag: u8) {
        self.submit(tag, Direction::Write);
    }

    fn submit(&mut self, tag: u8, direction: Direction) {
        self.with(|session, env| {
            let buffer = session.usable_buffers().unwrap().take(env.cx, 4).unwrap();
            session.buffers().write(&buffer, 0, &[tag; 4]).unwrap();
            let request = Submission {
                tag: tag.into(),
                con: ConType::Io(0),
                direction,
                header: [tag, tag].into_iter().collect(),
                data: Some(buffer),
            };
            session.submit(env, request);
        });
    }

    /// The end of a turn: what the path has posted in it.
    fn sent(&mut self, path: usize) -> Vec<Sent> {
        for key in core::mem::take(&mut self.dirty) {
            self.with(|session, env| session.post(env, key.path, key.cid));
        }
        let layout = ChunkLayout::new(DEPTH, CHUNK).unwrap();
        let sends = self.provider.take_sends(self.qps[path][usize::from(CID)]);
        let requests = sends.into_iter().map(|(op, data)| match op {
            SendOp::WriteWithImm(to, imm) => match Imm::decode(imm) {
                Ok(Imm::IoReq(payload)) => (layout.unpack(payload).unwrap().0, to.addr, data),
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        });
        requests.collect()
    }

    /// The path breaks, and is drained.
    fn lose(&mut self, path: u16) {
        self.with(|session, env| {
            let lost = &mut session.paths[usize::from(path)];
            lost.fail_path(PathError::Unexpected("a test"));
            session.settle(env, path.into());
        });
        self.drain(path);
    }

    /// The path is taken down by hand, and drained.
    fn disconnect(&mut self, path: u16) {
        let id = self.session.paths[usize::from(path)].id;
        self.with(|session, env| session.command(env, id, PathCommand::Disconnect))
            .unwrap();
        self.drain(path);
    }

    fn drain(&mut self, path: u16) {
        let ended = self.out.iter().any(|told| matches!(told, Output::Done { .. }));
        assert!(!ended, "nothing ends before the path is drained");
        for (place, qp) in self.qps[usize::from(path)].clone().into_iter().enumerate() {
            self.provider.finish_drain(qp);
            self.with(|session, env| session.drained(env, path, place as u16));
        }
        self.provider.completions.clear();
    }

    /// Writes go out by path 0, which is lost then, and by path 1, which answers them.
    fn write_twice(&mut self, tags: Range<u8>) {
        for tag in tags.clone() {
            self.write(tag);
        }
        self.sent(0);
        self.lose(0);
        self.sent(1);
        for permit in 0..tags.len() as u32 {
            self.answer(1, permit);
        }
    }

    fn answer(&mut self, path: u16, permit: u32) {
        let wc = Completion {
            wr_id: Mark::new(MarkKind::Recv, 0).encode(),
            status: WcStatus::Success,
            opcode: WcOpcode::RecvRdmaWithImm,
            flags: WcFlags::WITH_IMM,
            imm: Imm::IoRsp(IoReply::new(permit, 0, false)).encode(),
            ..Completion::default()
        };
        self.with(|session, env| session.completion(env, path, CID, &wc));
    }

    /// Time passes.
    fn later(&mut self, time: Duration) {
        self.now = self.now + time;
        self.with(|session, env| session.timeout(env));
    }

    /// Requests that have ended, and whether well.
    fn done(&mut self) -> Vec<(u64, bool)> {
        let mut done = Vec::new();
        for output in core::mem::take(&mut self.out) {
            if let Output::Done { tag, result, data, .. } = output {
                self.session.inflight.buffers.give(data.unwrap());
                done.push((tag, result.is_ok()));
            }
        }
        done
    }
}

fn chunk_addr(path: u16, chunk: u32) -> u64 {
    u64::from(path + 1) << 32 | u64::from(chunk * CHUNK)
}

fn permits(sent: &[Sent]) -> Vec<u32> {
    sent.iter().map(|(permit, ..)| *permit).collect()
}

#[test]
fn a_request_that_goes_by_another_path_keeps_its_permit() {
    let mut bed = Bed::new();
    for tag in 0..3 {
        bed.write(tag);
    }
    let first = bed.sent(0);
    assert_eq!(permits(&first), [0, 1, 2]);
    bed.answer(0, 1);
    assert_eq!(bed.done(), [(1, true)]);
    // It takes the permit that came back, and is not posted yet when the path breaks.
    bed.write(3);
    bed.lose(0);
    let again = bed.sent(1);
    assert_eq!(permits(&again), [0, 1, 2]);
    for (permit, to, bytes) in &again {
        assert_eq!(*to, chunk_addr(1, *permit), "the same chunk, as this path reaches it");
        let before = first.iter().find(|(of, ..)| of == permit).unwrap();
        match permit {
            1 => assert_eq!(bytes[..4], [3; 4]),
            _ => assert_eq!(*bytes, before.2),
        }
    }
    assert!(bed.done().is_empty());
    for permit in 0..3 {
        bed.answer(1, permit);
    }
    assert_eq!(bed.done(), [(3, true)], "the lost path has never had it");
    bed.later(PACKET_LIFETIME);
    assert_eq!(bed.done(), [(0, true), (2, true)]);
}

/// A request of a lost path may be executed after one of another path.
#[test]
fn a_write_that_was_sent_twice_is_told_of_when_nothing_is_under_way() {
    let mut bed = Bed::new();
    bed.write_twice(0..2);
    assert_eq!(bed.session.permits(), 2);
    assert_eq!(bed.session.next_timeout(), Some(bed.now + PACKET_LIFETIME));
    bed.later(PACKET_LIFETIME - Duration::from_nanos(1));
    assert_eq!(bed.done(), []);
    // Its disk may be at work on the first copy, whatever becomes of the path.
    bed.session.inflight.path_gone(0);
    bed.later(Duration::ZERO);
    assert_eq!(bed.done(), []);
    bed.later(Duration::from_nanos(1));
    assert_eq!(bed.done(), [(0, true), (1, true)]);
    assert_eq!(bed.session.permits(), 0);
}

/// A server that is closing the path as it was would refuse it.
#[test]
fn a_path_that_was_up_is_connected_anew_a_second_after_its_end() {
    let mut bed = Bed::new();
    let id = bed.session.paths[0].id;
    bed.with(|session, env| session.command(env, id, PathCommand::Reconnect))
        .unwrap();
    bed.drain(0);
    assert_eq!(
        bed.session.paths[0].next_timeout(),
        Some(bed.now + Duration::from_secs(1))
    );
    assert_eq!(bed.session.paths[0].state(), PathState::Reconnecting);
    // Asked once more, it does not wait.
    bed.with(|session, env| session.command(env, id, PathCommand::Reconnect))
        .unwrap();
    assert_eq!(bed.session.paths[0].next_timeout(), Some(bed.now));
}

/// So that clients of a server that was away don't all come at once.
#[test]
fn a_lost_path_is_connected_anew_after_the_delay_and_up_to_half_more() {
    let delay = Bed::new().session.config.reconnect_delay;
    let after = [0, 0x55, 0xff].map(|random| {
        let mut bed = Bed::new();
        (bed.random, bed.session.config.max_reconnects) = (random, SessionConfig::FOREVER);
        bed.lose(0);
        let at = bed.session.paths[0].next_timeout().unwrap();
        at.saturating_since(bed.now)
    });
    assert!(
        after.iter().all(|time| (delay..=delay * 3 / 2).contains(time)),
        "{after:?}"
    );
    assert!(after[0] != after[1] && after[1] != after[2], "{after:?}");
}

/// Packets of the lost path are still under way, whatever becomes of the next attempt to connect it.
#[test]
fn an_attempt_that_is_given_up_says_nothing_of_the_connections_before() {
    let mut bed = Bed::new();
    bed.write_twice(0..1);
    let cm = bed.provider.cm_resolve(None, bed.session.config.paths[0].dst).unwrap();
    bed.with(|session, env| {
        let path = &mut session.paths[0];
        path.conns.push(Conn::new(cm));
        path.state = State::Connecting(Attempt::default());
        path.meet(PathEvent::CloseAsked);
        session.settle(env, 0);
    });
    assert_eq!(bed.session.paths[0].state(), PathState::Closed);
    assert_eq!(bed.done(), []);
    bed.later(PACKET_LIFETIME);
    assert_eq!(bed.done(), [(0, true)]);
}

/// The write may come again after its user has opened another session.
#[test]
fn a_write_that_is_held_when_the_session_ends_is_not_told_of_as_done() {
    let mut bed = Bed::new();
    bed.write_twice(0..1);
    let Bed { session, out, .. } = &mut bed;
    session.inflight.fail_held(out);
    assert_eq!(bed.done(), [(0, false)]);
}

/// Its message names a key of the path. If it came after the one that went by the other path, the server would use the wrong key there.
#[test]
fn a_read_of_a_path_that_is_taken_down_goes_by_another_when_its_message_has_come() {
    let mut bed = Bed::new();
    bed.submit(0, Direction::Read);
    bed.write(1);
    bed.sent(0);
    bed.submit(2, Direction::Read);
    bed.disconnect(0);
    assert_eq!(
        permits(&bed.sent(1)),
        [1, 2],
        "a write's message is the same by any path"
    );
    bed.later(PACKET_LIFETIME - Duration::from_nanos(1));
    assert_eq!(permits(&bed.sent(1)), []);
    bed.later(Duration::from_nanos(1));
    assert_eq!(permits(&bed.sent(1)), [0]);
    assert_eq!(bed.done(), []);
}

#[test]
fn a_read_that_waits_for_another_path_ends_with_the_last_of_them() {
    let mut bed = Bed::new();
    bed.submit(0, Direction::Read);
    bed.sent(0);
    bed.disconnect(0);
    bed.with(|session, env| {
        session.paths[1].fail_path(PathError::Unexpected("a test"));
        session.settle(env, 1);
    });
    assert_eq!(bed.done(), [(0, false)]);
    bed.later(PACKET_LIFETIME);
    assert_eq!(bed.done(), []);
}

/// A packet of the lost path may still be on its way to the chunk.
#[test]
fn a_permit_that_was_on_a_lost_path_rests_after_its_request_has_ended() {
    let mut bed = Bed::new();
    bed.write_twice(0..3);
    let lost = bed.now;
    bed.later(PACKET_LIFETIME);
    assert_eq!(bed.done().len(), 3);
    assert_eq!(bed.session.permits(), 0);
    for tag in 10..12 {
        bed.write(tag);
    }
    assert_eq!(
        permits(&bed.sent(1)),
        [3],
        "the only one that was never on the lost path"
    );
    let rested = lost + Duration::from_secs(2);
    assert_eq!(bed.session.next_timeout(), Some(rested));
    bed.later(rested.saturating_since(bed.now));
    assert_eq!(bed.sent(1).len(), 1);
}

#[test]
fn without_another_path_requests_end_and_their_permits_rest() {
    let mut bed = Bed::new();
    for tag in 0..2 {
        bed.write(tag);
    }
    bed.sent(0);
    bed.lose(0);
    assert_eq!(permits(&bed.sent(1)), [0, 1]);
    bed.lose(1);
    assert_eq!(bed.done(), [(0, false), (1, false)]);
    assert_eq!(bed.session.permits(), 0);
    let free: Vec<_> = std::iter::from_fn(|| bed.session.inflight.permits.take(bed.now)).collect();
    assert_eq!(free, [2, 3]);
}

/// The kernel's server takes leave before its disk is done, and lets another path in meanwhile.
#[test]
fn permits_of_a_path_that_the_server_took_leave_of_rest_as_well() {
    let mut bed = Bed::new();
    bed.lose(1);
    bed.write(0);
    bed.sent(0);
    bed.disconnect(0);
    for place in 0..2 {
        bed.with(|session, env| session.cm_event(env, 0, place, CmKind::Disconnected));
    }
    assert_eq!(bed.session.paths[0].state(), PathState::Closed);
    assert_eq!(bed.done(), [(0, false)]);
    let free: Vec<_> = std::iter::from_fn(|| bed.session.inflight.permits.take(bed.now)).collect();
    assert_eq!(free, [1, 2, 3]);
}

/// With the session the server has closed what was open: to it the request may mean another device.
#[test]
fn what_was_in_flight_when_the_session_was_lost_goes_by_no_path_that_comes_back() {
    let mut bed = Bed::new();
    bed.lose(1);
    bed.write(0);
    bed.sent(0);
    let id = bed.session.paths[0].id;
    bed.with(|session, env| session.command(env, id, PathCommand::Disconnect))
        .unwrap();
    for place in 0..2 {
        bed.with(|session, env| session.cm_event(env, 0, place, CmKind::Disconnected));
    }
    let back = connected(bed.now, &bed.session.config);
    bed.session.paths[1].state = back;
    bed.drain(0);
    assert_eq!(bed.session.paths[0].state(), PathState::Closed);
    assert_eq!((bed.done(), bed.sent(1).len()), (vec![(0, false)], 0));
}

/// A path may be up and have none of this permit's chunk.
#[test]
fn a_request_without_a_way_waits_for_one() {
    let mut bed = Bed::new();
    for path in &mut bed.session.paths {
        path.chunks.clear();
    }
    bed.write(0);
    assert!(bed.done().is_empty() && bed.sent(0).is_empty() && bed.sent(1).is_empty());
    assert_eq!((bed.session.inflight.waiting.len(), bed.session.permits()), (1, 0));
}

#[test]
fn each_policy_chooses_as_it_says() {
    let mut bed = Bed::new();
    let session = &mut bed.session;
    let pick = |session: &mut Session<u64>, policy, loads: &[u32]| {
        session.config.policy = policy;
        session.inflight.loads = loads.to_vec();
        session.pick_path(0)
    };
    for (loads, path) in [([3, 3], 0), ([3, 2], 1), ([0, 1], 0)] {
        assert_eq!(pick(session, Policy::MinInflight, &loads), Some(path));
    }
    session.paths[0].latency = None;
    assert_eq!(pick(session, Policy::MinLatency, &[]), Some(1), "it was measured");
    session.paths[1].latency = None;
    assert_eq!(pick(session, Policy::MinLatency, &[]), Some(0));
    let turns: Vec<_> = (0..4).map(|_| pick(session, Policy::RoundRobin, &[9, 0])).collect();
    assert_eq!(turns, [Some(0), Some(1), Some(0), Some(1)]);
    session.paths[0].state = State::Closed;
    for policy in Policy::ALL {
        assert_eq!(pick(session, policy, &[0, 9]), Some(1), "{policy:?}");
    }
    // A path with fewer chunks than this permit's.
    session.paths[1].chunks.clear();
    assert_eq!(pick(session, Policy::MinInflight, &[]), None);
}
