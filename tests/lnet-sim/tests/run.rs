//! A node tests others by itself.

use core::time::Duration;

use ferroce_lnet_sim::nid;
use lnet::{
    Config, Node, Output,
    selftest::{
        CallError, Run, RunCounts, RunError, RunEvent, RunPlan, Target, TargetConfig,
        proto::{Body, Parameters, Pattern},
    },
};
use roce_sim::{Check, MS, SEC, lab::Lab, lan::Machines};
use roce_verbs::{
    Completion, Instant,
    provider::{Cx, Event, QpId},
};

/// Host that is a target, and may test others.
struct Host {
    node: Node,
    target: Option<Target>,
    run: Option<Run>,
    events: Vec<RunEvent>,
    /// It does nothing before.
    sleeps_until: u64,
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
        if let Some(run) = &mut self.run {
            run.timeout(&mut self.node, cx.now);
        }
        if let Some(target) = &mut self.target {
            target.timeout(&mut self.node, cx.now);
        }
    }

    fn work(&mut self, cx: &mut Cx<'_>) -> Check {
        if cx.now.as_nanos() < self.sleeps_until {
            return Ok(());
        }
        self.sleeps_until = 0;
        while let Some(output) = self.node.poll_output() {
            let run = self.run.as_mut();
            if run.is_some_and(|run| run.output(&mut self.node, cx.now, &output)) {
                continue;
            }
            let target = self.target.as_mut();
            let is_taken = target.is_some_and(|target| target.output(&mut self.node, cx.now, &output));
            assert!(
                is_taken || matches!(output, Output::Up(..) | Output::Down(..)),
                "{output:?}"
            );
        }
        if let Some(run) = &mut self.run {
            self.events.extend(core::iter::from_fn(|| run.poll()));
        }
        Ok(())
    }

    fn end_batch(&mut self, cx: &mut Cx<'_>) {
        self.node.end_batch(cx);
    }

    fn next_timeout(&self) -> Option<Instant> {
        let run = self.run.as_ref().and_then(Run::next_timeout);
        let target = self.target.as_ref().and_then(Target::next_timeout);
        let wakes = (self.sleeps_until > 0).then(|| Instant::from_nanos(self.sleeps_until));
        [self.node.next_timeout(), run, target, wakes]
            .into_iter()
            .flatten()
            .min()
    }
}

/// Three hosts, of which the first tests, and the others are targets if they have a bit in `targets`.
fn lab(targets: u32) -> Lab<Host> {
    Lab::start(3, |index, cx| {
        let mut node = Node::listen(cx, Config::default(), nid(index), 7).unwrap();
        let target =
            (targets >> index & 1 == 1).then(|| Target::attach(&mut node, TargetConfig::default(), 1).unwrap());
        Host {
            node,
            target,
            run: None,
            events: Vec::new(),
            sleeps_until: 0,
        }
    })
}

fn bulk(operation: u32, len: u32) -> Parameters {
    Parameters::Bulk {
        operation,
        pattern: Pattern::Full as u32,
        len,
        offset: 0,
    }
}

fn plan(parameters: Parameters, loops: Option<u32>) -> RunPlan {
    RunPlan {
        nodes: vec![nid(1), nid(2)],
        parameters,
        concurrency: 3,
        loops,
        name: "mine".into(),
        force: false,
        timeout: Duration::from_secs(5),
    }
}

fn start(lab: &mut Lab<Host>, from: usize, plan: &RunPlan) {
    lab.at(from, |host, cx| {
        let run = Run::start(&mut host.node, cx.now, plan.clone(), 4711).unwrap();
        host.run = Some(run);
    });
}

fn end(lab: &mut Lab<Host>, of: usize) -> Vec<RunEvent> {
    lab.run_until(60 * SEC, |hosts| hosts[of].run.as_ref().unwrap().is_ended())
        .unwrap();
    lab.pass(MS).unwrap();
    lab.at(of, |host, _| core::mem::take(&mut host.events))
}

fn counts(lab: &Lab<Host>, of: usize) -> RunCounts {
    lab.host(of).run.as_ref().unwrap().counts()
}

/// Names of reports.
fn names(events: &[RunEvent]) -> Vec<&'static str> {
    let name = |event: &RunEvent| match event {
        RunEvent::Lost(..) => "lost",
        RunEvent::Begun => "begun",
        RunEvent::Counters(..) => "counters",
        RunEvent::Ended => "ended",
    };
    events.iter().map(name).collect()
}

#[test]
fn all_requests_are_sent_and_no_session_is_left() {
    for parameters in [
        Parameters::Ping { size: 0, flags: 0 },
        bulk(Body::READ, 1 << 20),
        bulk(Body::WRITE, 1 << 20),
        bulk(Body::WRITE, 3977),
    ] {
        let mut lab = lab(0b110);
        start(&mut lab, 0, &plan(parameters, Some(4)));
        let events = end(&mut lab, 0);
        assert_eq!(
            names(&events),
            ["begun", "counters", "counters", "ended"],
            "{parameters:?}"
        );
        let len = match parameters {
            Parameters::Bulk { len, .. } => u64::from(len),
            Parameters::Ping { .. } => 0,
        };
        // Two nodes, three units, four times.
        let expected = RunCounts {
            done: 24,
            failed: 0,
            bytes: 24 * len,
        };
        assert_eq!(counts(&lab, 0), expected);
        for event in &events[1..3] {
            let RunEvent::Counters(_, counters) = event else {
                panic!()
            };
            assert_eq!(
                counters.rpc.bulk_get + counters.rpc.bulk_put,
                12 * len,
                "{parameters:?}"
            );
        }
        for index in [1, 2] {
            assert!(lab.host(index).target.as_ref().unwrap().session().is_none());
        }
    }
}

#[test]
fn a_test_without_end_is_stopped_and_shows_counters_meanwhile() {
    for force in [false, true] {
        let mut lab = lab(0b110);
        start(&mut lab, 0, &plan(bulk(Body::READ, 4096), None));
        lab.pass(20 * MS).unwrap();
        let act = |lab: &mut Lab<Host>, what: &dyn Fn(&mut Run, &mut Node, Instant)| {
            lab.at(0, |host, cx| what(host.run.as_mut().unwrap(), &mut host.node, cx.now));
        };
        act(&mut lab, &|run, node, now| run.ask(node, now));
        lab.pass(20 * MS).unwrap();
        assert_eq!(names(&lab.host(0).events), ["begun", "counters", "counters"]);
        let before = counts(&lab, 0);
        assert!(before.done > 0 && before.failed == 0, "{before:?}");
        act(&mut lab, &|run, node, now| run.stop(node, now, force));
        assert_eq!(names(&end(&mut lab, 0)[3..]), ["counters", "counters", "ended"]);
        let after = counts(&lab, 0);
        assert!(after.done >= before.done && after.failed == 0, "{after:?}");
    }
}

#[test]
fn nodes_that_take_no_part_are_named_and_the_others_tested() {
    // Nobody answers at the second node, and the first has another's session until it is ended by force.
    let mut lab = lab(0b011);
    let short = RunPlan {
        timeout: Duration::from_millis(50),
        ..plan(bulk(Body::WRITE, 512), Some(1))
    };
    let ones = RunPlan {
        nodes: vec![nid(0)],
        loops: None,
        name: "other".into(),
        ..short.clone()
    };
    start(&mut lab, 2, &ones);
    lab.pass(20 * MS).unwrap();
    let nodes = vec![nid(0)];
    start(&mut lab, 1, &RunPlan { nodes, ..short.clone() });
    let busy = RunEvent::Lost(nid(0), RunError::Busy(nid(2), "other".into()));
    assert_eq!(end(&mut lab, 1), [busy, RunEvent::Ended]);
    let nodes = vec![nid(0), nid(2)];
    start(
        &mut lab,
        1,
        &RunPlan {
            nodes,
            force: true,
            ..short
        },
    );
    let events = end(&mut lab, 1);
    assert_eq!(names(&events), ["lost", "begun", "counters", "ended"]);
    assert!(
        matches!(events[0], RunEvent::Lost(of, RunError::Call(_)) if of == nid(2)),
        "{events:?}"
    );
    assert_eq!(counts(&lab, 1).done, 3);
}

#[test]
fn a_node_that_joins_too_late_is_asked_to_leave() {
    let mut lab = lab(0b110);
    lab.at(1, |host, _| host.sleeps_until = 100 * MS);
    let short = RunPlan {
        timeout: Duration::from_millis(60),
        ..plan(bulk(Body::WRITE, 512), Some(1))
    };
    start(&mut lab, 0, &short);
    let events = end(&mut lab, 0);
    assert_eq!(events[0], RunEvent::Lost(nid(1), RunError::Call(CallError::Timeout)));
    assert_eq!(names(&events), ["lost", "begun", "counters", "ended"]);
    assert_eq!(counts(&lab, 0).done, 3);
    let target = lab.host(1).target.as_ref().unwrap();
    assert_eq!(
        (target.counters().received, target.session()),
        (2, None),
        "joined, and left"
    );
}

#[test]
fn plans_that_are_not_possible_are_refused() {
    let good = plan(bulk(Body::READ, 512), Some(1));
    assert_eq!(good.check(), Ok(()));
    for bad in [
        plan(bulk(3, 512), Some(1)),
        plan(bulk(Body::READ, (1 << 20) + 1), Some(1)),
        plan(bulk(Body::READ, 512), Some(0)),
        RunPlan {
            nodes: Vec::new(),
            ..good.clone()
        },
        RunPlan {
            concurrency: 0,
            ..good.clone()
        },
        RunPlan {
            concurrency: 2049,
            ..good
        },
    ] {
        assert!(bad.check().is_err(), "{bad:?}");
    }
}
