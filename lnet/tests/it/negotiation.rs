//! Connections between this crate's node and the model of the kernel's, in both roles: private data byte for byte, and what follows from it.
//! Where a node of this crate differs from the kernel, a row says why.

use core::time::Duration;
use std::net::SocketAddr;

use lnet::{Buffer, Config, ConnectionInfo, Failure, Node, Output, Rejected, Rejects, proto::Nid};
use roce_verbs::{
    Instant,
    provider::{CmKind, CmRef, Cx, DeviceIx, NoAnswer, Provider as _, RejectReason},
};

use crate::{
    kernel::{Answer, CONNACK, CONNREQ, HELLO_LEN, Hello, Kernel, Next, Reject, VERSION_1, VERSION_2, checksum, nid},
    provider::{Keys, Scripted, Usage},
};

const OURS: [u8; 4] = [10, 77, 0, 1];
const THEIRS: [u8; 4] = [10, 77, 0, 2];
const STAMP: u64 = 0x0006_4000_0000_0001;
const THEIR_STAMP: u64 = 0x0006_6168_3d7a_36d3;
/// Depth and fragments of a kernel's defaults.
const DEFAULTS: (u16, u16) = (8, 257);
const PORT: u16 = 987;
/// Bytes of private data of a REP, and of a REJ.
const REP_LEN: usize = 196;
const REJ_LEN: usize = 148;

fn random(out: &mut [u8]) {
    out.fill(7);
}

fn kernel(limits: (u16, u16), big: bool) -> Kernel {
    Kernel::new((nid(THEIRS), THEIR_STAMP), nid(OURS), limits, big)
}

/// This crate's node, as the model of the kernel would be in its place: its requests, answers and rejects are to be the same.
fn as_kernel(limits: (u16, u16)) -> Kernel {
    Kernel::new((nid(OURS), STAMP), nid(THEIRS), limits, false)
}

/// Node of this crate.
struct Ours {
    node: Node,
    provider: Scripted,
    listener: CmRef,
    now: Instant,
    done: Option<Result<u32, Failure>>,
}

impl Ours {
    fn start(limits: (u16, u16)) -> Self {
        let (peer_credits, max_frags) = limits;
        Self::with_config(Config {
            peer_credits,
            max_frags,
            high_water: peer_credits / 2,
            ..Config::default()
        })
    }

    fn with_config(config: Config) -> Self {
        let mut provider = Scripted::new(&[Keys::INSTANT]);
        let now = Instant::ZERO + Duration::from_secs(1);
        let mut cx = Cx {
            now,
            provider: &mut provider,
            random: &mut random,
        };
        let node = Node::listen(&mut cx, config, Nid(nid(OURS)), STAMP).unwrap();
        let listener = *provider.cms.keys().next().unwrap();
        Self {
            node,
            provider,
            listener,
            now,
            done: None,
        }
    }

    fn with<T>(&mut self, call: impl FnOnce(&mut Node, &mut Cx<'_>) -> T) -> T {
        let mut cx = Cx {
            now: self.now,
            provider: &mut self.provider,
            random: &mut random,
        };
        call(&mut self.node, &mut cx)
    }

    /// Until it has nothing left to do now.
    fn settle(&mut self) {
        let mut is_idle = false;
        while !is_idle {
            let mut wcs = Vec::new();
            self.provider.poll_completions(&mut wcs, 64).unwrap();
            let event = self.provider.poll_event();
            is_idle = wcs.is_empty() && event.is_none() && !self.node.wants_turn();
            self.with(|node, cx| {
                for (qp, wc) in &wcs {
                    node.completion(cx, *qp, wc);
                }
                if let Some(event) = &event {
                    node.event(cx, event);
                }
                node.end_batch(cx);
            });
            while let Some(output) = self.node.poll_output() {
                if let Output::Done(_, result) = output {
                    self.done = Some(result);
                }
            }
        }
    }

    /// A peer asks. Returns the answer.
    fn asked(&mut self, private: &[u8]) -> Answer {
        let (local, peer) = (SocketAddr::from((OURS, PORT)), SocketAddr::from((THEIRS, 1023)));
        let cm = self.provider.ask(self.listener, 0, local, peer, private.to_vec());
        self.settle();
        if let Some((_, reject)) = self.provider.rejected.pop() {
            return Answer::Reject(reject);
        }
        let params = self.provider.cms[&cm].params.clone().expect("an answer");
        assert_eq!((params.initiator_depth, params.responder_resources), (0, 0));
        self.tell(cm, CmKind::Established { private_data: vec![] });
        Answer::Accept(params.private_data)
    }

    /// Waits until it asks for a connection. Returns the private data; `None`: it does not.
    fn asks(&mut self) -> Option<(CmRef, Vec<u8>)> {
        self.settle();
        while self.node.jobs() > 0 {
            let asks = |(_, cm): &(&CmRef, &crate::provider::Cm)| {
                cm.qp.is_none() && cm.peer.is_some_and(|peer| peer == SocketAddr::from((THEIRS, PORT)))
            };
            if let Some(cm) = self.provider.cms.iter().find(asks).map(|(id, _)| *id) {
                self.tell(cm, CmKind::Resolved { device: DeviceIx(0) });
                let params = self.provider.cms[&cm].params.clone().expect("a request");
                let retries = (params.retry_count, params.rnr_retry_count);
                let depths = (params.initiator_depth, params.responder_resources);
                assert_eq!((depths, retries), ((0, 0), (5, 6)));
                return Some((cm, params.private_data));
            }
            self.now = self.now.max(self.node.next_timeout()?);
            self.with(|node, cx| node.timeout(cx));
            self.settle();
        }
        None
    }

    fn tell(&mut self, cm: CmRef, kind: CmKind) {
        self.provider.tell(cm, kind);
        self.settle();
    }

    /// Begins to ask the peer what it is.
    fn ping(&mut self) {
        let sink = Buffer::allocate(272).unwrap();
        self.node.ping(self.now, Nid(nid(THEIRS)), sink).unwrap();
    }

    fn told(&mut self, cm: CmRef, answer: &Answer) {
        let padded = |bytes: &[u8], len| {
            let mut bytes = bytes.to_vec();
            bytes.resize(len, 0);
            bytes
        };
        let kind = match answer {
            Answer::Accept(bytes) => CmKind::Established {
                private_data: padded(bytes, REP_LEN),
            },
            Answer::Reject(bytes) => CmKind::Rejected {
                reason: RejectReason::CONSUMER,
                private_data: padded(bytes, REJ_LEN),
            },
        };
        self.tell(cm, kind);
    }

    /// The only connection.
    fn connection(&self) -> Option<ConnectionInfo> {
        let mut conns = self.node.connections();
        let conn = conns.next()?;
        assert!(conn.is_established && conns.next().is_none());
        Some(conn)
    }

    /// Checks that there is one connection, with these parameters.
    fn check_connection(&self, (depth, frags): (u16, u16)) {
        let conn = self.connection().expect("a connection");
        let found = conn.negotiated;
        assert_eq!(
            (found.depth, found.frags, found.incarnation),
            (depth, frags, THEIR_STAMP)
        );
        assert_eq!((conn.credits.depth, conn.credits.theirs), (depth, depth));
        let cm = self.provider.cms.iter().find_map(|(id, cm)| cm.qp.map(|_| *id));
        let receives = self.provider.recvs(self.provider.qp_of(cm.unwrap()));
        // They are posted before the answer, which may be smaller.
        assert!(receives >= 2 * usize::from(depth) + 2, "{receives}");
    }

    /// Checks that nothing is left but the listener, and the domain of its connections.
    fn check_nothing(&self) {
        let Usage { mrs, qps, cms, .. } = self.provider.usage();
        assert_eq!((mrs, qps, cms, self.node.jobs()), (0, 0, 1, 0));
    }
}

/// Checks that for each limit of `takes` that `asks` is over there was a reject, and no other.
fn check_rejects(rejects: Rejects, asks: (u16, u16), takes: (u16, u16)) {
    let over = [
        ("MSG_QUEUE_SIZE", u64::from(asks.0 > takes.0)),
        ("RDMA_FRAGS", u64::from(asks.1 > takes.1)),
    ];
    let counted = rejects.iter().filter(|(_, count)| *count > 0).collect::<Vec<_>>();
    let mut expected = over.to_vec();
    expected.retain(|(_, count)| *count > 0);
    expected.reverse();
    assert_eq!((counted, rejects.sum()), (expected, over[0].1 + over[1].1));
}

/// Requests and their answers.
type Talk = Vec<(Vec<u8>, Answer)>;

/// The talk by which `asks` gets a connection from `takes`: a request, and another one for each limit that it is over.
fn expected(asks: &Kernel, takes: &Kernel) -> Talk {
    let mut offer = asks.request();
    let mut talk = Vec::new();
    if offer.depth > takes.depth {
        talk.push((offer.bytes(), Answer::Reject(takes.reject(VERSION_2, 7).bytes())));
        offer.depth = takes.depth;
    }
    if offer.frags > takes.frags {
        talk.push((offer.bytes(), Answer::Reject(takes.reject(VERSION_2, 6).bytes())));
        offer.frags = takes.frags;
    }
    talk.push((offer.bytes(), Answer::Accept(takes.acceptance(&offer).bytes())));
    talk
}

/// Connects a node to a model.
fn connect(ours: &mut Ours, kernel: &mut Kernel) -> Talk {
    ours.ping();
    talk(ours, kernel)
}

/// Has a node ask a model until it has a connection, or gives up.
fn talk(ours: &mut Ours, kernel: &mut Kernel) -> Talk {
    let mut talk = Vec::new();
    while let Some((cm, request)) = ours.asks() {
        let answer = kernel.asked(&request);
        ours.told(cm, &answer);
        let is_over = matches!(answer, Answer::Accept(_));
        talk.push((request, answer));
        if is_over {
            break;
        }
    }
    talk
}

/// Connects a model to a node.
fn accept(ours: &mut Ours, kernel: &mut Kernel) -> (Talk, Option<(u16, u16)>) {
    let mut talk = Vec::new();
    loop {
        let request = kernel.request().bytes();
        let answer = ours.asked(&request);
        talk.push((request, answer.clone()));
        match answer {
            Answer::Accept(bytes) => return (talk, kernel.accepted(&bytes)),
            Answer::Reject(bytes) if kernel.rejected(&bytes) == Next::GivesUp => return (talk, None),
            Answer::Reject(_) => {}
        }
    }
}

#[test]
fn both_sides_limits_hold_in_both_roles_and_byte_orders() {
    let limits = || {
        [8, 16, 42, 128]
            .into_iter()
            .flat_map(|depth| [256, 257].map(|frags| (depth, frags)))
    };
    for (own, theirs) in limits().flat_map(|own| limits().map(move |theirs| (own, theirs))) {
        let agreed = (own.0.min(theirs.0), own.1.min(theirs.1));
        for big in [false, true] {
            let what = format!("{own:?} to {theirs:?}, big-endian {big}");
            let (mut ours, mut peer) = (Ours::start(own), kernel(theirs, big));
            let talk = connect(&mut ours, &mut peer);
            assert_eq!(talk, expected(&as_kernel(own), &peer), "ours asks: {what}");
            ours.check_connection(agreed);
            check_rejects(ours.node.counters().rejects_received, own, theirs);

            let (mut ours, mut peer) = (Ours::start(own), kernel(theirs, big));
            let before = peer.clone();
            let (talk, taken) = accept(&mut ours, &mut peer);
            assert_eq!(talk, expected(&before, &as_kernel(own)), "ours is asked: {what}");
            assert_eq!(taken, Some(agreed), "{what}");
            ours.check_connection(agreed);
            check_rejects(ours.node.counters().rejects_sent, theirs, own);
        }
    }
}

/// Answer of this crate's node to a request.
#[derive(Clone, Copy)]
enum Want {
    Accept,
    /// With this reason, and who it is.
    Reject(u8),
    /// Of one that does not know that it is meant.
    Early,
}

fn check_answer(name: &str, request: &[u8], good: &Hello, want: &Want) {
    let (own, mut ours) = (as_kernel(DEFAULTS), Ours::start(DEFAULTS));
    let expected = match want {
        Want::Accept => Answer::Accept(own.acceptance(good).bytes()),
        Want::Reject(why) => Answer::Reject(own.reject(VERSION_2, *why).bytes()),
        Want::Early => Answer::Reject(Reject::EARLY.bytes()),
    };
    assert_eq!(ours.asked(request), expected, "{name}");
    match want {
        Want::Accept => ours.check_connection((good.depth, good.frags)),
        _ => ours.check_nothing(),
    }
}

/// Name of a row, how its message differs from a good one, and what follows.
type Row<T, R> = (&'static str, fn(&mut T), R);

/// Requests, and the kernel's answers.
const REQUESTS: [Row<Hello, Want>; 30] = [
    ("good", |_| (), Want::Accept),
    ("depth 1", |r| r.depth = 1, Want::Accept),
    ("depth 7", |r| r.depth = 7, Want::Accept),
    ("depth 9", |r| r.depth = 9, Want::Reject(7)),
    ("depth 255", |r| r.depth = 255, Want::Reject(7)),
    // The kernel accepts it, and can't send then.
    ("depth 0", |r| r.depth = 0, Want::Reject(7)),
    ("fragments 0", |r| r.frags = 0, Want::Accept),
    ("fragments 1", |r| r.frags = 1, Want::Accept),
    ("fragments 258", |r| r.frags = 258, Want::Reject(6)),
    ("fragments 300", |r| r.frags = 300, Want::Reject(6)),
    (
        "depth and fragments",
        |r| (r.depth, r.frags) = (9, 300),
        Want::Reject(7),
    ),
    ("size 2048", |r| r.size = 2048, Want::Accept),
    ("size 8192", |r| r.size = 8192, Want::Reject(3)),
    ("the right incarnation", |r| r.dst_stamp = STAMP, Want::Accept),
    ("another incarnation", |r| r.dst_stamp = STAMP + 1, Want::Reject(5)),
    (
        "incarnation and depth",
        |r| (r.dst_stamp, r.depth) = (7, 9),
        Want::Reject(5),
    ),
    ("another NID", |r| r.dst = nid([10, 77, 0, 9]), Want::Early),
    ("another net", |r| r.dst |= 1 << 32, Want::Early),
    ("NID and incarnation", |r| (r.dst, r.dst_stamp) = (7, 7), Want::Early),
    // The kernel takes any source. With one that is not the packet's, anybody could use up the connections of a peer.
    (
        "a source that is not the packet's",
        |r| r.src = nid([10, 77, 0, 9]),
        Want::Early,
    ),
    // The kernel speaks version 1, too.
    ("version 1", |r| r.version = VERSION_1, Want::Early),
    ("version 0x13", |r| r.version = 0x13, Want::Early),
    ("IMMEDIATE", |r| r.kind = 0xd1, Want::Early),
    ("no type", |r| r.kind = 0xee, Want::Early),
    ("CONNACK", |r| r.kind = CONNACK, Want::Reject(3)),
    ("longer than the private data", |r| r.nob = 100, Want::Early),
    ("too short for a request", |r| r.nob = 50, Want::Early),
    ("a wrong checksum", |r| r.checksum = 0x1234, Want::Early),
    (
        "the right checksum",
        |r| r.checksum = checksum(&r.bytes()),
        Want::Accept,
    ),
    (
        "a wrong checksum and depth",
        |r| (r.checksum, r.depth) = (1, 9),
        Want::Early,
    ),
];

#[test]
fn odd_requests_are_answered_as_by_the_kernel() {
    for big in [false, true] {
        let good = kernel(DEFAULTS, big).request();
        for (name, change, want) in REQUESTS {
            let mut request = good;
            change(&mut request);
            let name = format!("{name}, big-endian {big}");
            check_answer(&name, &request.bytes(), &request, &want);
        }
        let bytes = good.bytes();
        for len in 0..HELLO_LEN {
            check_answer(&format!("{len} bytes"), &bytes[..len], &good, &Want::Early);
        }
        // The connection manager fills up with zeros: up to 35 bytes the NID is another one, and with 48 the depth is 0.
        for (len, want) in (0..36).map(|len| (len, Want::Early)).chain([(48, Want::Reject(7))]) {
            let mut padded = bytes[..len].to_vec();
            padded.resize(HELLO_LEN, 0);
            check_answer(&format!("{len} bytes and zeros"), &padded, &good, &want);
        }
        for magic in [0, 0x4572_6963u32, 0x1234_5678] {
            let other = [&magic.to_le_bytes()[..], &bytes[4..]].concat();
            check_answer(&format!("magic {magic:x}"), &other, &good, &Want::Early);
        }
    }
}

/// A request of the node for this incarnation.
fn for_stamp(dst_stamp: u64) -> Vec<u8> {
    let request = as_kernel(DEFAULTS).request();
    Hello { dst_stamp, ..request }.bytes()
}

#[test]
fn another_incarnation_is_asked_for_after_a_reject() {
    let own = as_kernel(DEFAULTS);
    for big in [false, true] {
        // The kernel knows a former node at this address.
        let (mut ours, mut peer) = (Ours::start(DEFAULTS), kernel(DEFAULTS, big));
        peer.asks_for(STAMP - 1);
        let first = peer.request();
        let second = Hello {
            dst_stamp: STAMP,
            ..first
        };
        let expected = vec![
            (first.bytes(), Answer::Reject(own.reject(VERSION_2, 5).bytes())),
            (second.bytes(), Answer::Accept(own.acceptance(&second).bytes())),
        ];
        assert_eq!(accept(&mut ours, &mut peer), (expected, Some(DEFAULTS)));
        ours.check_connection(DEFAULTS);

        // The kernel has a connection of a former node at this address.
        let (mut ours, mut peer) = (Ours::start(DEFAULTS), kernel(DEFAULTS, big));
        peer.connected = Some(STAMP - 1);
        let stale = Answer::Reject(peer.reject(VERSION_2, 5).bytes());
        let taken = Answer::Accept(peer.acceptance(&own.request()).bytes());
        let expected = vec![(for_stamp(0), stale.clone()), (for_stamp(THEIR_STAMP), taken.clone())];
        assert_eq!(connect(&mut ours, &mut peer), expected);
        ours.check_connection(DEFAULTS);

        // The kernel has started again since it refused.
        let (mut ours, mut peer) = (Ours::start(DEFAULTS), kernel(DEFAULTS, big));
        ours.ping();
        let (cm, _) = ours.asks().unwrap();
        let former = Reject {
            stamp: THEIR_STAMP - 1,
            ..peer.reject(VERSION_2, 5)
        };
        ours.told(cm, &Answer::Reject(former.bytes()));
        let expected = vec![(for_stamp(THEIR_STAMP - 1), stale), (for_stamp(THEIR_STAMP), taken)];
        assert_eq!(talk(&mut ours, &mut peer), expected);
        ours.check_connection(DEFAULTS);
    }
}

/// A kernel would refuse this once, and end the connection that stands: anybody could have it do so.
#[test]
fn a_kernel_that_has_started_again_is_accepted_at_once() {
    let (mut ours, mut former) = (Ours::start(DEFAULTS), kernel(DEFAULTS, false));
    former.stamp -= 1;
    for peer in [&mut former, &mut kernel(DEFAULTS, false)] {
        let expected = expected(peer, &as_kernel(DEFAULTS));
        assert_eq!(accept(&mut ours, peer), (expected, Some(DEFAULTS)));
    }
    ours.check_connection(DEFAULTS);
}

#[test]
fn a_wrong_nid_and_version_1_end_both_sides_attempts() {
    let early = Answer::Reject(Reject::EARLY.bytes());
    for (net, version) in [(1 << 32, VERSION_2), (0, VERSION_1)] {
        let (mut ours, mut peer) = (Ours::start(DEFAULTS), kernel(DEFAULTS, false));
        peer.peer |= net;
        peer.speaks(version);
        let request = peer.request().bytes();
        assert_eq!(accept(&mut ours, &mut peer), (vec![(request, early.clone())], None));
        ours.check_nothing();
    }
    let (mut ours, mut peer) = (Ours::start(DEFAULTS), kernel(DEFAULTS, false));
    peer.nid |= 1 << 32;
    assert_eq!(connect(&mut ours, &mut peer), [(for_stamp(0), early)]);
    ours.check_nothing();
    let why = ours.done.unwrap().unwrap_err().to_string();
    assert!(why.contains("wrong NID or network"), "{why}");
}

#[test]
fn ten_attempts_follow_the_first_at_once_and_then_one_a_second() {
    let config = Config {
        timeout: Duration::from_secs(5),
        ..Config::default()
    };
    let mut ours = Ours::with_config(config);
    let began = ours.now;
    ours.ping();
    let mut at = Vec::new();
    while let Some((cm, request)) = ours.asks() {
        assert_eq!(request, for_stamp(0));
        at.push(ours.now.saturating_since(began).as_millis());
        ours.told(
            cm,
            &Answer::Reject(kernel(DEFAULTS, false).reject(VERSION_2, 1).bytes()),
        );
    }
    assert_eq!(at[..11], [0; 11]);
    assert_eq!(at[11..], [1000, 2000, 3000, 4000, 5000][..at.len() - 11]);
    assert_eq!(ours.done, Some(Err(Failure::Timeout)));
    let counters = ours.node.counters();
    let raced = counters.rejects_received.iter().find(|(why, _)| *why == "CONN_RACE");
    assert_eq!(
        (counters.operation_timeouts, raced),
        (1, Some(("CONN_RACE", at.len() as u64)))
    );
    ours.check_nothing();
}

#[test]
fn an_attempt_without_an_answer_is_given_up_after_a_quarter_of_the_timeout_or_5_seconds() {
    for (timeout, expected) in [(5, 5000), (50, 12_500)] {
        let config = Config {
            timeout: Duration::from_secs(timeout),
            ..Config::default()
        };
        let mut ours = Ours::with_config(config);
        ours.ping();
        let (cm, _) = ours.asks().unwrap();
        let waits = ours.provider.cms[&cm].params.as_ref().and_then(|params| params.timeout);
        assert_eq!(waits, Some(Duration::from_millis(expected)));
        ours.tell(cm, CmKind::Unreachable(NoAnswer::Timeout));
        assert_eq!(ours.done, Some(Err(Failure::Unreachable(NoAnswer::Timeout))));
        assert!(ours.asks().is_none());
        let counters = ours.node.counters();
        assert_eq!((counters.connect_failures, counters.connection_timeouts), (1, 1));
        ours.check_nothing();
    }
}

/// Step of a peer that answers a request.
enum Step {
    Consumer(Vec<u8>),
    Cm(RejectReason),
}

/// Incarnation, depth and fragments of the second request after this reject of the first; `None`: the node gives up.
fn second(step: &Step) -> (Option<Asked>, Option<Failure>) {
    let mut ours = Ours::start(DEFAULTS);
    ours.ping();
    let (cm, first) = ours.asks().unwrap();
    assert_eq!(first, as_kernel(DEFAULTS).request().bytes());
    match step {
        Step::Consumer(bytes) => ours.told(cm, &Answer::Reject(bytes.clone())),
        Step::Cm(reason) => {
            let (reason, private_data) = (*reason, vec![0; REJ_LEN]);
            ours.tell(cm, CmKind::Rejected { reason, private_data });
        }
    }
    let before = ours.now;
    let Some((cm, request)) = ours.asks() else {
        ours.check_nothing();
        return (None, ours.done.unwrap().err());
    };
    assert_eq!(ours.now, before, "at once");
    let again = kernel(DEFAULTS, false).asked(&request);
    let number = |at: usize| u16::from_le_bytes([request[at], request[at + 1]]);
    let stamp = u64::from_le_bytes(*request[40..].first_chunk().unwrap());
    let asked = (stamp, number(48), number(50));
    let expected = Hello {
        dst_stamp: stamp,
        depth: asked.1,
        frags: asked.2,
        ..as_kernel(DEFAULTS).request()
    };
    assert_eq!(request, expected.bytes());
    if let Answer::Accept(_) = again {
        ours.told(cm, &again);
        ours.check_connection((asked.1, asked.2));
    }
    (Some(asked), None)
}

/// Incarnation, depth and fragments that a request asks for.
type Asked = (u64, u16, u16);
/// Values of the first request.
const SAME: Option<Asked> = Some((0, 8, 257));
const OLD: &str = "FATAL of version 1";

/// Rejects: their bytes that come, and what a kernel asks for next, if it does.
const REJECTS: [Row<Reject, (usize, Option<Asked>)>; 20] = [
    ("CONN_RACE", |r| r.why = 1, (24, SAME)),
    ("CONN_RACE, cut off", |r| r.why = 1, (8, SAME)),
    ("NO_RESOURCES", |r| r.why = 2, (24, None)),
    ("FATAL", |r| r.why = 3, (24, None)),
    (
        "wrong NID",
        |r| (r.why, r.stamp, r.depth, r.frags) = (3, 0, 0, 0),
        (24, None),
    ),
    // The kernel asks once more, with version 1.
    (OLD, |r| (r.why, r.version) = (3, VERSION_1), (24, None)),
    ("CONN_UNCOMPAT", |r| r.why = 4, (24, SAME)),
    ("CONN_STALE", |r| r.why = 5, (24, Some((THEIR_STAMP, 8, 257)))),
    ("CONN_STALE, cut off", |r| r.why = 5, (8, SAME)),
    (
        "fragments 128",
        |r| (r.why, r.frags) = (6, 128),
        (24, Some((0, 8, 128))),
    ),
    (
        "fragments 256",
        |r| (r.why, r.frags) = (6, 256),
        (24, Some((0, 8, 256))),
    ),
    ("fragments 257", |r| (r.why, r.frags) = (6, 257), (24, None)),
    ("fragments 300", |r| (r.why, r.frags) = (6, 300), (24, None)),
    ("depth 4", |r| (r.why, r.depth) = (7, 4), (24, Some((0, 4, 257)))),
    ("depth 8", |r| (r.why, r.depth) = (7, 8), (24, None)),
    ("depth 20", |r| (r.why, r.depth) = (7, 20), (24, None)),
    ("depth, cut off", |r| (r.why, r.depth) = (7, 4), (8, None)),
    ("INVALID_SRV_ID", |r| r.why = 8, (24, None)),
    ("EARLY", |r| r.why = 9, (24, None)),
    ("reason 50", |r| r.why = 50, (24, None)),
];

#[test]
fn rejects_are_followed_as_by_the_kernel() {
    let orders = [false, true].into_iter();
    for (big, (name, change, (len, expected))) in orders.flat_map(|big| REJECTS.map(|row| (big, row))) {
        let mut reject = kernel(DEFAULTS, big).reject(VERSION_2, 0);
        change(&mut reject);
        let (found, why) = second(&Step::Consumer(reject.bytes()[..len].to_vec()));
        assert_eq!(found, expected, "{name}, big-endian {big}");
        let is_final = match &why {
            Some(Failure::Rejected(Rejected::Version1)) => name == OLD,
            Some(Failure::Rejected(Rejected::Node { why, incarnation, .. })) => {
                let stamp = if len == 24 { reject.stamp } else { 0 };
                (why.0, *incarnation) == (reject.why, stamp)
            }
            _ => false,
        };
        assert_eq!(is_final, expected.is_none(), "{name}: {why:?}");
    }
    let other = [
        &[0x78, 0x56, 0x34, 0x12][..],
        &kernel(DEFAULTS, false).reject(VERSION_2, 1).bytes()[4..],
    ]
    .concat();
    for bytes in [Vec::new(), other] {
        let why = Failure::Rejected(Rejected::Cm(RejectReason::CONSUMER));
        assert_eq!(second(&Step::Consumer(bytes)), (None, Some(why)));
    }
    let nobody = RejectReason::INVALID_SERVICE_ID;
    let why = Failure::Rejected(Rejected::Cm(nobody));
    assert_eq!(second(&Step::Cm(nobody)), (None, Some(why)));
    assert_eq!(
        second(&Step::Cm(RejectReason::STALE_CONNECTION)),
        (Some((0, 8, 257)), None)
    );
}

/// Answers, and whether a kernel takes them.
const ANSWERS: [Row<Hello, bool>; 15] = [
    ("good", |_| (), true),
    ("depth 4", |a| a.depth = 4, true),
    ("depth 16", |a| a.depth = 16, false),
    // Nothing could be sent. The kernel was not asked.
    ("depth 0", |a| a.depth = 0, false),
    ("fragments 128", |a| a.frags = 128, true),
    ("fragments 300", |a| a.frags = 300, false),
    ("size 2048", |a| a.size = 2048, true),
    ("size 8192", |a| a.size = 8192, false),
    ("version 1", |a| a.version = VERSION_1, false),
    ("another incarnation", |a| a.dst_stamp = STAMP + 1, false),
    ("for another NID", |a| a.dst = nid([10, 77, 0, 9]), false),
    ("of another NID", |a| a.src = nid([10, 77, 0, 9]), false),
    ("CONNREQ", |a| a.kind = CONNREQ, false),
    ("a wrong checksum", |a| a.checksum = 0x1234, false),
    ("the right checksum", |a| a.checksum = checksum(&a.bytes()), true),
];

#[test]
fn answers_are_taken_as_by_the_kernel() {
    let orders = [false, true].into_iter();
    for (big, (name, change, is_taken)) in orders.flat_map(|big| ANSWERS.map(|row| (big, row))) {
        let mut answer = kernel(DEFAULTS, big).acceptance(&as_kernel(DEFAULTS).request());
        change(&mut answer);
        let expected = is_taken.then_some((answer.depth, answer.frags));
        check_taken(&format!("{name}, big-endian {big}"), answer.bytes(), expected);
    }
    check_taken("nothing", Vec::new(), None);
}

fn check_taken(name: &str, answer: Vec<u8>, expected: Option<(u16, u16)>) {
    let mut ours = Ours::start(DEFAULTS);
    ours.ping();
    let (cm, _) = ours.asks().unwrap();
    ours.told(cm, &Answer::Accept(answer));
    match expected {
        Some(agreed) => ours.check_connection(agreed),
        None => {
            assert!(
                matches!(ours.done, Some(Err(Failure::Answer(_)))),
                "{name}: {:?}",
                ours.done
            );
            ours.check_nothing();
        }
    }
}
