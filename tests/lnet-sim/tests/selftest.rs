//! A console has a node test another one.

use core::time::Duration;

use ferroce_lnet_sim::nid;
use lnet::{
    Config, Node, Output,
    selftest::{
        CallError, CallId, Client, Console, Data, Target, TargetConfig, TestPlan,
        proto::{Body, Features, FrameworkCounters, Message, PING_MAGIC, Parameters, Pattern, Sid},
    },
};
use roce_sim::{Check, MS, SEC, lab::Lab, lan::Machines};
use roce_verbs::{
    Completion, Instant,
    provider::{Cx, Event, QpId},
};

const CONSOLE: usize = 0;
const CLIENT: usize = 1;
const SERVER: usize = 2;

type Reply = (CallId, Result<Message, CallError>);

/// Host that is a target, and a console.
struct Host {
    node: Node,
    target: Target,
    console: Console,
    replies: Vec<Reply>,
}

impl Host {
    fn start(index: usize, cx: &mut Cx<'_>, name: &str) -> Self {
        let mut node = Node::listen(cx, Config::default(), nid(index), 7).unwrap();
        let target = Target::attach(&mut node, TargetConfig::default(), 1).unwrap();
        let client = Client::new(Duration::from_secs(5), 2);
        Self {
            console: Console::new(client, nid(index), 99, name),
            node,
            target,
            replies: Vec::new(),
        }
    }

    fn outputs(&mut self, now: Instant) {
        while let Some(output) = self.node.poll_output() {
            let is_taken = self.console.output(&mut self.node, &output)
                || self.target.output(&mut self.node, now, &output)
                || matches!(output, Output::Up(..) | Output::Down(..));
            assert!(is_taken, "{output:?}");
        }
        self.replies.extend(core::iter::from_fn(|| self.console.poll()));
    }
}

impl Machines for Host {
    fn completion(&mut self, cx: &mut Cx<'_>, qp: QpId, wc: &Completion) {
        self.node.completion(cx, qp, wc);
    }

    fn event(&mut self, cx: &mut Cx<'_>, event: &Event) {
        self.node.event(cx, event);
    }

    fn timeout(&mut self, cx: &mut Cx<'_>) {
        self.node.timeout(cx);
        self.console.timeout(&mut self.node, cx.now);
        self.target.timeout(&mut self.node, cx.now);
    }

    fn work(&mut self, cx: &mut Cx<'_>) -> Check {
        self.outputs(cx.now);
        Ok(())
    }

    fn end_batch(&mut self, cx: &mut Cx<'_>) {
        self.node.end_batch(cx);
    }

    fn next_timeout(&self) -> Option<Instant> {
        let all = [
            self.node.next_timeout(),
            self.console.next_timeout(),
            self.target.next_timeout(),
        ];
        all.into_iter().flatten().min()
    }
}

fn lab() -> Lab<Host> {
    Lab::start(3, |index, cx| Host::start(index, cx, "mine"))
}

/// The reply to a request of a host.
fn reply_to(
    lab: &mut Lab<Host>,
    from: usize,
    ask: impl FnOnce(&mut Console, &mut Node, Instant) -> CallId,
) -> Result<Body, CallError> {
    let id = lab.at(from, |host, cx| ask(&mut host.console, &mut host.node, cx.now));
    let is_it = |(of, _): &&Reply| *of == id;
    let found = |hosts: &[Host]| hosts[from].replies.iter().find(is_it).cloned();
    let mut reply = None;
    lab.run_until(20 * SEC, |hosts| {
        reply = found(hosts);
        reply.is_some()
    })
    .unwrap();
    let (_, reply) = reply.unwrap();
    reply.map(|message| message.body)
}

fn status(reply: Result<Body, CallError>) -> u32 {
    reply.unwrap().status().unwrap()
}

fn bulk(operation: u32, len: u32) -> Parameters {
    Parameters::Bulk {
        operation,
        pattern: Pattern::Full as u32,
        len,
        offset: 0,
    }
}

fn plan(parameters: Parameters, loops: Option<u32>) -> TestPlan {
    TestPlan {
        batch: 1,
        parameters,
        loops,
        concurrency: 3,
        stop_on_error: false,
        nodes: vec![nid(SERVER), nid(CONSOLE)],
    }
}

fn stat(lab: &mut Lab<Host>, of: usize) -> Body {
    reply_to(lab, CONSOLE, |c, n, now| c.stat(n, now, nid(of)).unwrap()).unwrap()
}

fn batch(lab: &mut Lab<Host>, operation: u32, argument: u32) -> (u32, u32) {
    let reply = reply_to(lab, CONSOLE, |c, n, now| {
        c.batch(n, now, nid(CLIENT), (1, operation, argument)).unwrap()
    });
    match reply {
        Ok(Body::BatchReply { status, active, .. }) => (status, active),
        other => panic!("{other:?}"),
    }
}

/// Makes sessions, and adds a test of two nodes to a client.
fn prepare(lab: &mut Lab<Host>, plan: &TestPlan) {
    for peer in [CLIENT, SERVER] {
        let made = reply_to(lab, CONSOLE, |c, n, now| {
            c.make_session(n, now, nid(peer), false).unwrap()
        });
        assert_eq!(status(made), 0);
        assert_eq!(lab.host(peer).target.session().unwrap().1.to_string(), "mine");
    }
    let added = reply_to(lab, CONSOLE, |c, n, now| {
        c.add_server(n, now, nid(SERVER), (plan, 3)).unwrap()
    });
    assert_eq!(status(added), 0);
    let added = reply_to(lab, CONSOLE, |c, n, now| {
        c.add_client(n, now, nid(CLIENT), plan).unwrap()
    });
    assert_eq!(status(added), 0);
}

fn remove(lab: &mut Lab<Host>) {
    for peer in [CLIENT, SERVER] {
        let removed = reply_to(lab, CONSOLE, |c, n, now| c.remove_session(n, now, nid(peer)).unwrap());
        let expected = Body::SessionRemoved {
            status: 0,
            sid: Sid::NONE,
        };
        assert_eq!(removed, Ok(expected));
        assert!(lab.host(peer).target.session().is_none());
    }
}

#[test]
fn each_test_sends_what_its_console_asks_for() {
    for parameters in [
        Parameters::Ping { size: 0, flags: 0 },
        bulk(Body::READ, 512),
        bulk(Body::WRITE, 512),
        bulk(Body::READ, 1 << 20),
        bulk(Body::WRITE, 1 << 20),
        bulk(Body::WRITE, 3977),
    ] {
        let mut lab = lab();
        let plan = plan(parameters, Some(4));
        prepare(&mut lab, &plan);
        assert_eq!(batch(&mut lab, Body::RUN, 0), (0, 0));
        while batch(&mut lab, Body::QUERY, 0) != (0, 0) {
            lab.pass(MS).unwrap();
        }
        let Body::StatReply { framework, rpc, .. } = stat(&mut lab, CLIENT) else {
            panic!()
        };
        assert_eq!((framework.bulk_errors, framework.ping_errors), (0, 0), "{parameters:?}");
        // Two nodes, three units, four times.
        assert_eq!((rpc.sent, rpc.expired, rpc.errors), (24, 0, 0), "{parameters:?}");
        let Body::StatReply { rpc, lnet, .. } = stat(&mut lab, SERVER) else {
            panic!()
        };
        let (get, put, len) = match parameters {
            Parameters::Bulk {
                operation: Body::READ,
                len,
                ..
            } => (0, 12, len),
            Parameters::Bulk { len, .. } => (12, 0, len),
            Parameters::Ping { .. } => (0, 0, 0),
        };
        let bytes = |times| times * u64::from(len);
        assert_eq!((rpc.bulk_get, rpc.bulk_put), (bytes(get), bytes(put)), "{parameters:?}");
        // Session, test, statistics, and the test's requests; the replies but the last.
        assert_eq!((rpc.received, rpc.dropped), (15, 0));
        assert_eq!(lnet.received_bytes, 15 * 160 + bytes(get), "{parameters:?}");
        assert_eq!(lnet.sent_bytes, 14 * 160 + bytes(put), "{parameters:?}");
        remove(&mut lab);
    }
}

#[test]
fn a_test_without_end_is_stopped() {
    for force in [0, 1] {
        let mut lab = lab();
        prepare(&mut lab, &plan(bulk(Body::READ, 4096), None));
        batch(&mut lab, Body::RUN, 0);
        lab.pass(20 * MS).unwrap();
        assert_eq!(batch(&mut lab, Body::QUERY, 0), (0, 1));
        assert_eq!(batch(&mut lab, Body::QUERY, 1), (0, 6), "units of the first test");
        assert_eq!(batch(&mut lab, Body::QUERY, 2).0, 2, "ENOENT");
        // A test is not added to a batch that runs.
        let busy = plan(bulk(Body::READ, 8), Some(1));
        let added = reply_to(&mut lab, CONSOLE, |c, n, now| {
            c.add_client(n, now, nid(CLIENT), &busy).unwrap()
        });
        assert_eq!(status(added), 16);
        assert_eq!(batch(&mut lab, Body::STOP, force), (0, 0));
        lab.pass(20 * MS).unwrap();
        assert_eq!(batch(&mut lab, Body::QUERY, 0), (0, 0));
        let Body::StatReply { framework, .. } = stat(&mut lab, CLIENT) else {
            panic!()
        };
        let expected = FrameworkCounters {
            running_ms: framework.running_ms,
            ..FrameworkCounters::default()
        };
        assert_eq!(framework, expected);
        remove(&mut lab);
    }
}

#[test]
fn a_session_is_of_one_console_and_ends_when_nobody_asks() {
    let mut lab = lab();
    let make = |lab: &mut Lab<Host>, from, force| {
        let made = reply_to(lab, from, |c, n, now| {
            c.make_session(n, now, nid(CLIENT), force).unwrap()
        });
        match made {
            Ok(Body::SessionMade { status, sid, name, .. }) => (status, sid.nid, name.to_string()),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(make(&mut lab, CONSOLE, false), (0, nid(CONSOLE), String::new()));
    assert_eq!(make(&mut lab, SERVER, false), (16, nid(CONSOLE), "mine".into()));
    assert_eq!(make(&mut lab, SERVER, true), (0, nid(SERVER), String::new()));
    let removed = reply_to(&mut lab, CONSOLE, |c, n, now| {
        c.remove_session(n, now, nid(CLIENT)).unwrap()
    });
    assert_eq!(status(removed), 16);
    let stat = reply_to(&mut lab, CONSOLE, |c, n, now| c.stat(n, now, nid(CLIENT)).unwrap());
    assert_eq!(status(stat), 3);
    lab.pass(60 * SEC).unwrap();
    // Nobody else keeps it.
    let debug = reply_to(&mut lab, CONSOLE, |c, n, now| c.debug(n, now, nid(CLIENT)).unwrap());
    assert_eq!(status(debug), 0);
    lab.pass(39 * SEC).unwrap();
    assert!(lab.host(CLIENT).target.session().is_some());
    lab.pass(2 * SEC).unwrap();
    assert!(lab.host(CLIENT).target.session().is_none());
    let debug = reply_to(&mut lab, CONSOLE, |c, n, now| c.debug(n, now, nid(CLIENT)).unwrap());
    assert_eq!(status(debug), 3);
}

#[test]
fn what_can_not_be_is_refused_and_a_lost_reply_times_out() {
    let mut lab = lab();
    prepare(&mut lab, &plan(bulk(Body::READ, 512), Some(1)));
    for (parameters, expected) in [
        (bulk(3, 512), 22),
        (bulk(Body::READ, 0), 22),
        (bulk(Body::READ, (1 << 20) + 1), 22),
        (Parameters::Ping { size: 1, flags: 1 }, 0),
    ] {
        let plan = plan(parameters, Some(1));
        let added = reply_to(&mut lab, CONSOLE, |c, n, now| {
            c.add_client(n, now, nid(CLIENT), &plan).unwrap()
        });
        assert_eq!(status(added), expected, "{parameters:?}");
    }
    let many = TestPlan {
        concurrency: 1024,
        ..plan(bulk(Body::READ, 1 << 20), Some(1))
    };
    let added = reply_to(&mut lab, CONSOLE, |c, n, now| {
        c.add_client(n, now, nid(CLIENT), &many).unwrap()
    });
    assert_eq!(status(added), 12, "more memory than a session may have");
}

#[test]
fn a_test_of_a_node_in_another_network_ends() {
    let mut lab = lab();
    let elsewhere = TestPlan {
        nodes: vec![lnet::proto::Nid::new(lnet::proto::NET_TCP, 0, nid(SERVER).address())],
        ..plan(bulk(Body::READ, 512), None)
    };
    prepare(&mut lab, &elsewhere);
    assert_eq!(batch(&mut lab, Body::RUN, 0), (0, 0));
    assert_eq!(batch(&mut lab, Body::QUERY, 0), (0, 0));
    let Body::StatReply { framework, .. } = stat(&mut lab, CLIENT) else {
        panic!()
    };
    assert_eq!(framework.bulk_errors, 3, "one of each unit");
    remove(&mut lab);
}

/// A client that sends requests by hand.
struct Hand {
    node: Node,
    client: Client,
    target: Option<Target>,
    replies: Vec<Reply>,
}

impl Machines for Hand {
    fn completion(&mut self, cx: &mut Cx<'_>, qp: QpId, wc: &Completion) {
        self.node.completion(cx, qp, wc);
    }

    fn event(&mut self, cx: &mut Cx<'_>, event: &Event) {
        self.node.event(cx, event);
    }

    fn timeout(&mut self, cx: &mut Cx<'_>) {
        self.node.timeout(cx);
        self.client.timeout(&mut self.node, cx.now);
    }

    fn work(&mut self, cx: &mut Cx<'_>) -> Check {
        while let Some(output) = self.node.poll_output() {
            let is_taken = self.client.output(&mut self.node, &output);
            if let Some(target) = self.target.as_mut().filter(|_| !is_taken) {
                target.output(&mut self.node, cx.now, &output);
            }
        }
        self.replies.extend(core::iter::from_fn(|| self.client.poll()));
        Ok(())
    }

    fn end_batch(&mut self, cx: &mut Cx<'_>) {
        self.node.end_batch(cx);
    }

    fn next_timeout(&self) -> Option<Instant> {
        let all = [self.node.next_timeout(), self.client.next_timeout()];
        all.into_iter().flatten().min()
    }
}

fn by_hand(serves: bool, features: Features, body: Body, data: Data) -> Result<Message, CallError> {
    let mut lab = Lab::start(2, |index, cx| {
        let mut node = Node::listen(cx, Config::default(), nid(index), 7).unwrap();
        let target = (serves && index == 1).then(|| Target::attach(&mut node, TargetConfig::default(), 1).unwrap());
        Hand {
            node,
            client: Client::new(Duration::from_secs(5), 2),
            target,
            replies: Vec::new(),
        }
    });
    lab.at(0, |hand, cx| {
        let call = hand.client.call(&mut hand.node, cx.now, nid(1), (features, body), data);
        call.unwrap();
    });
    lab.run_until(20 * SEC, |hands| !hands[0].replies.is_empty()).unwrap();
    assert!(lab.host(0).client.is_empty());
    let reply = lab.host(0).replies[0].1.clone();
    lab.at(0, |hand, cx| hand.node.stop(cx));
    lab.at(1, |hand, cx| hand.node.stop(cx));
    lab.pass(SEC).unwrap();
    lab.check_empty().unwrap();
    reply
}

#[test]
fn data_that_is_not_the_pattern_is_found() {
    let write = |pattern: Pattern, len| Body::Bulk {
        reply_bits: 0,
        bulk_bits: 0,
        operation: Body::WRITE,
        len,
        pattern: pattern as u32,
    };
    let zeros = || Data::Source(lnet::Buffer::allocate(4096).unwrap());
    let status = |reply: Result<Message, CallError>| reply.unwrap().body.status();
    for (pattern, expected) in [(Pattern::None, 0), (Pattern::Simple, 74), (Pattern::Full, 74)] {
        let reply = by_hand(true, Features::all(), write(pattern, 4096), zeros());
        assert_eq!(status(reply), Some(expected), "{pattern:?}");
    }
    // Without the feature lengths are pages.
    let reply = by_hand(true, Features::empty(), write(Pattern::None, 4095), zeros());
    assert_eq!(status(reply), Some(22));
    let reply = by_hand(true, Features::from_bits_retain(2), write(Pattern::None, 4096), zeros());
    assert_eq!(status(reply), Some(71));
    // Less data than was announced: no reply.
    let reply = by_hand(true, Features::all(), write(Pattern::None, 8192), zeros());
    assert!(
        matches!(reply, Err(CallError::Data { found: 4096, .. } | CallError::Timeout)),
        "{reply:?}"
    );
}

#[test]
fn pings_are_answered_and_without_a_target_time_out() {
    let ping = |magic| Body::Ping {
        reply_bits: 0,
        magic,
        number: 77,
        seconds: 1,
        nanoseconds: 2,
    };
    let reply = by_hand(true, Features::all(), ping(PING_MAGIC), Data::None).unwrap();
    let expected = Body::PingReply {
        status: 0,
        magic: PING_MAGIC,
        number: 77,
    };
    assert_eq!((reply.body, reply.features), (expected, Features::all()));
    for (serves, magic) in [(true, 1), (false, PING_MAGIC)] {
        let reply = by_hand(serves, Features::all(), ping(magic), Data::None);
        assert_eq!(reply, Err(CallError::Timeout));
    }
}
