//! Nodes of which each does what the test says.

use std::net::SocketAddr;

use rds::{Config, Error, Node, Output, PairKey, PairState, SocketId};
use roce_sim::{
    Check, SEC,
    lab::{Lab, address},
    lan::Machines,
};
use roce_verbs::{
    Completion, Instant,
    provider::{Cx, Event, QpId},
};

/// Node with sockets, which nobody reads unless the test does.
struct Host {
    node: Node,
    sockets: Vec<SocketId>,
    /// Sockets that have changed.
    changed: Vec<SocketId>,
    /// Connections that have ended.
    downs: u32,
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
    }

    fn work(&mut self, _: &mut Cx<'_>) -> Check {
        self.take_outputs();
        Ok(())
    }

    fn end_batch(&mut self, cx: &mut Cx<'_>) {
        self.node.end_batch(cx);
    }

    fn next_timeout(&self) -> Option<Instant> {
        self.node.next_timeout()
    }
}

impl Host {
    fn take_outputs(&mut self) {
        while let Some(output) = self.node.poll_output() {
            match output {
                Output::Changed(id) => self.changed.push(id),
                Output::Down(..) => self.downs += 1,
                _ => {}
            }
        }
    }
}

fn at(host: usize, socket: usize) -> SocketAddr {
    (address(host), 4000 + socket as u16).into()
}

fn lab(hosts: usize, config: &Config, former: &[(PairKey, PairState)]) -> Lab<Host> {
    Lab::start(hosts, |index, cx| {
        let former = former.iter().copied().filter(|(key, _)| key.local == address(index));
        let mut node = Node::listen(cx, config.clone(), &[address(index).into()], former).unwrap();
        let sockets = [0, 1].map(|socket| {
            let id = node.socket().unwrap();
            node.bind(id, at(index, socket), 0).unwrap();
            id
        });
        Host {
            node,
            sockets: sockets.into(),
            changed: Vec::new(),
            downs: 0,
        }
    })
}

/// The device of a peer acknowledges what the node has no room for. When it dies then, nothing is under way whose failure would tell.
#[test]
fn the_end_of_a_peer_that_waits_for_its_sockets_is_noticed() {
    let config = Config {
        send_buffer: 4 << 20,
        max_unread: 1 << 20,
        ..Config::default()
    };
    let mut lab = lab(2, &config, &[]);
    lab.at(0, |host, _| {
        // The second one is held, and counts as received.
        for _ in 0..3 {
            host.node.queue(host.sockets[0], Some(at(1, 0)), &[0; 600_000]).unwrap();
        }
    });
    let stalls = |hosts: &[Host]| hosts[1].node.connections().any(|connection| connection.is_stalled);
    lab.run_until(SEC, stalls).unwrap();
    // It is asked what has come meanwhile, and can't say.
    lab.pass(5 * SEC).unwrap();
    assert_eq!((lab.host(0).downs, lab.host(1).downs), (0, 0));
    lab.cut_off(1);
    lab.run_until(60 * SEC, |hosts| hosts[0].downs > 0).unwrap();
}

/// A map that frees another port is not the one that the socket waits for.
#[test]
fn the_end_of_a_peer_with_a_congested_port_is_noticed() {
    let mut lab = lab(2, &Config::default(), &[]);
    lab.at(0, |host, _| {
        host.node.set_congestion_monitor(host.sockets[0], true).unwrap();
        for (from, to) in [(0, 0), (1, 1)] {
            for _ in 0..2 {
                let data = [0; 60_000];
                host.node.queue(host.sockets[from], Some(at(1, to)), &data).unwrap();
            }
        }
    });
    lab.pass(SEC).unwrap();
    let refused = lab.at(0, |host, _| host.node.send(host.sockets[0], Some(at(1, 0)), &[1]));
    assert_eq!(refused, Err(Error::Congested));
    lab.at(1, |host, _| while host.node.receive(host.sockets[1]).is_ok() {});
    lab.pass(SEC).unwrap();
    lab.at(0, |host, _| {
        assert_eq!(host.node.check_congestion(host.sockets[1], at(1, 1)), Ok(()));
        assert!(host.node.is_idle());
    });
    assert_eq!((lab.host(0).downs, lab.host(1).downs), (0, 0));
    lab.cut_off(1);
    lab.run_until(60 * SEC, |hosts| hosts[0].downs > 0).unwrap();
}

#[test]
fn a_socket_hears_that_a_port_of_its_own_node_is_free() {
    let mut lab = lab(1, &Config::default(), &[]);
    lab.at(0, |host, _| {
        let (from, to) = (host.sockets[0], host.sockets[1]);
        let refused = loop {
            match host.node.send(from, Some(at(0, 1)), &[0; 10_000]) {
                Ok(()) => {}
                Err(refused) => break refused,
            }
        };
        assert_eq!(refused, Error::Congested);
        assert!(!host.node.poll(from).unwrap().uncongested);
        host.take_outputs();
        host.changed.clear();
        while host.node.receive(to).is_ok() {}
        host.take_outputs();
        assert_eq!(host.changed, [from]);
        let now = host.node.poll(from).unwrap();
        assert!(now.uncongested && now.was_refused, "{now:?}");
    });
}

#[test]
fn a_node_that_is_started_twice_remembers_peers_that_it_has_not_spoken_to() {
    let key = |remote| PairKey {
        local: address(0).into(),
        remote: address(remote).into(),
        tos: 0,
    };
    let state = PairState {
        next_send: 8,
        next_receive: 5,
    };
    let mut lab = lab(2, &Config::default(), &[(key(1), state), (key(2), state)]);
    let known = |lab: &Lab<Host>| lab.host(0).node.pair_states().collect::<Vec<_>>();
    assert_eq!(known(&lab), [(key(1), state), (key(2), state)]);
    lab.at(0, |host, _| {
        host.node.send(host.sockets[0], Some(at(1, 0)), &[1]).unwrap();
    });
    let sent = PairState { next_send: 9, ..state };
    assert_eq!(known(&lab), [(key(1), sent), (key(2), state)]);
}
