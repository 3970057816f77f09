//! Clients, users and letters that do anything at any time: each request reaches one user alone in its chunk, at one share, and in
//! the end nothing is left anywhere.

use core::time::Duration;
use std::collections::BTreeSet;

use proptest::prelude::*;
use roce_local::FabricConfig;
use rtrs::server::ServerConfig;

use crate::{
    bed::{Bed, config},
    kinds,
};

#[derive(Clone, Copy, Debug)]
enum Op {
    Connect,
    ConnectAll,
    Inform,
    Write,
    Read,
    /// In a chunk whose request may be under way.
    Announce,
    Disconnect,
    Violate,
    Beat,
    Answer(bool),
    Steps(u8),
    Settle,
    Letters(bool),
    Forget,
    Close,
    Wait(u16),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => Just(Op::Connect),
        6 => Just(Op::ConnectAll),
        8 => Just(Op::Inform),
        20 => Just(Op::Write),
        12 => Just(Op::Read),
        1 => Just(Op::Announce),
        2 => Just(Op::Disconnect),
        1 => prop_oneof![Just(Op::Violate), Just(Op::Beat)],
        14 => any::<bool>().prop_map(Op::Answer),
        20 => any::<u8>().prop_map(Op::Steps),
        8 => Just(Op::Settle),
        3 => any::<bool>().prop_map(Op::Letters),
        3 => Just(Op::Forget),
        1 => Just(Op::Close),
        1 => any::<u16>().prop_map(Op::Wait),
    ]
}

/// Two paths of one session, and another session.
const CLIENTS: [(u8, u16); 3] = [(1, 5), (1, 4), (2, 3)];

struct World {
    bed: Bed,
    /// Chunks of each path with a request under way.
    under_way: [BTreeSet<u16>; 3],
    informed: [bool; 3],
    /// How often each has begun anew.
    lives: [u8; 3],
    /// Requests that got to a user.
    begun: usize,
    answered: usize,
}

impl World {
    fn new(shares: usize, keys: FabricConfig, always_invalidate: bool, seed: u64) -> Self {
        let config = ServerConfig {
            always_invalidate,
            ..config()
        };
        let mut bed = Bed::new(shares, &config, keys, seed);
        bed.home(1, shares - 1);
        for (who, (session, connections)) in CLIENTS.into_iter().enumerate() {
            bed.peer_at(who % 2, session, connections);
        }
        Self {
            bed,
            under_way: Default::default(),
            informed: [false; 3],
            lives: [0; 3],
            begun: 0,
            answered: 0,
        }
    }

    fn step(&mut self, who: usize, arg: u16, op: Op) {
        let connections = CLIENTS[who].1;
        let (cid, chunk) = (arg % connections, arg / 16 % 3);
        let is_in = !self.bed.peers[who].chunks.is_empty();
        let header = [who as u8, self.lives[who]];
        let bed = &mut self.bed;
        match op {
            Op::Connect if bed.peers[who].has() < connections => {
                let next = bed.peers[who].has();
                bed.peers[who].connect(next);
            }
            Op::ConnectAll => (bed.peers[who].has()..connections).for_each(|cid| bed.peers[who].connect(cid)),
            Op::Inform if bed.peers[who].is_connected() && !self.informed[who] => {
                self.informed[who] = true;
                bed.peers[who].inform(&format!("s{}", CLIENTS[who].0));
            }
            Op::Write if cid > 0 && is_in && self.under_way[who].insert(chunk) => {
                bed.peers[who].write(cid, chunk, &header, &[who as u8; 100]);
            }
            Op::Read if cid > 0 && is_in && self.under_way[who].insert(chunk) => {
                bed.peers[who].read(cid, chunk, &header, 100);
            }
            Op::Announce if is_in => bed.peers[who].announce(cid, chunk),
            Op::Disconnect => bed.peers[who].disconnect(cid),
            Op::Violate if is_in => bed.peers[who].violate(cid),
            Op::Beat if is_in => bed.peers[who].beat(cid),
            Op::Answer(oldest) => self.answer(arg, oldest),
            Op::Steps(n) => (0..n).for_each(|_| {
                bed.step();
            }),
            Op::Settle => bed.settle(),
            Op::Letters(hold) => bed.hold_letters = hold,
            Op::Forget if bed.peers[who].broken => {
                bed.peers[who].forget();
                self.under_way[who].clear();
                self.informed[who] = false;
                self.lives[who] += 1;
            }
            Op::Close => {
                let index = usize::from(arg) % bed.shares.len();
                if let Some(key) = bed.sessions(index).first().copied() {
                    bed.call(index, |server, cx| server.close_session(cx, key));
                }
            }
            Op::Wait(ms) => bed.pass(Duration::from_millis(ms.into())),
            _ => {}
        }
        self.look();
    }

    fn is_in(&self, who: usize) -> bool {
        !self.bed.peers[who].chunks.is_empty()
    }

    fn answer(&mut self, arg: u16, oldest: bool) {
        let index = usize::from(arg) % self.bed.shares.len();
        let requests = &mut self.bed.shares[index].requests;
        if requests.is_empty() {
            return;
        }
        let at = if oldest { 0 } else { requests.len() - 1 };
        let request = requests.remove(at);
        self.bed.answer(index, &request, i32::from(arg % 3));
        self.answered += 1;
    }

    fn look(&mut self) {
        let all = self.bed.all_requests();
        let mut chunks: Vec<_> = all.iter().map(|(_, key)| (key.session, key.chunk)).collect();
        self.begun = self.begun.max(self.answered + chunks.len());
        let count = chunks.len();
        chunks.sort_unstable();
        chunks.dedup();
        assert_eq!(count, chunks.len(), "two requests in a chunk: {all:?}");
        for who in 0..CLIENTS.len() {
            if self.is_in(who) {
                let requests = self.bed.shares.iter().flat_map(|host| &host.requests);
                let late = |header: &[u8]| usize::from(header[0]) == who && header[1] < self.lives[who];
                assert!(
                    !requests.into_iter().any(|r| late(&r.header)),
                    "{who} may write where a user is at work"
                );
                for (_, reply) in self.bed.peers[who].answers() {
                    self.under_way[who].remove(&(reply.msg_id as u16));
                }
            }
        }
    }
}

fn play(steps: Vec<(usize, u16, Op)>, shares: usize, keys: FabricConfig, always_invalidate: bool, seed: u64) -> World {
    let mut world = World::new(shares, keys, always_invalidate, seed);
    for (who, arg, op) in steps {
        world.step(who, arg, op);
    }
    world.bed.end();
    world
}

#[test]
fn the_steps_get_somewhere() {
    let mut steps = Vec::new();
    for who in 0..3 {
        for op in [Op::ConnectAll, Op::Settle, Op::Inform, Op::Settle] {
            steps.push((who, 0, op));
        }
    }
    for arg in 0..200 {
        let op = [Op::Write, Op::Read, Op::Steps(20), Op::Answer(true)][usize::from(arg % 4)];
        steps.push((usize::from(arg / 4 % 3), arg, op));
    }
    let world = play(steps, 3, FabricConfig::default(), true, 1);
    assert!(world.answered > 20, "{}", world.answered);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_nothing_is_lost(
        steps in proptest::collection::vec((0usize..3, any::<u16>(), op()), 1..250),
        opens in any::<bool>(),
        shares in 2usize..4,
        keys in 0usize..4,
        always_invalidate in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let open = [Op::ConnectAll, Op::Settle, Op::Inform, Op::Settle];
        let first = (0..3).flat_map(|who| open.map(|op| (who, 0, op)));
        let all = first.filter(|_| opens).chain(steps).collect();
        play(all, shares, kinds()[keys], always_invalidate, seed);
    }
}
