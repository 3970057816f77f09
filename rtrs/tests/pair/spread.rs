//! A client in shares: several loops of one address, and letters between them that take their time.

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use roce_bth::{Packet, Qpn};
use roce_cm::{
    cma::HEADER_LEN,
    mad::{Mad, Message},
};
use roce_local::Usage;
use roce_port::Steering;
use roce_verbs::{
    QpAttr, QpState,
    provider::{Provider, QpId},
};
use rtrs::{
    Direction, IoError, PathError,
    client::{Buffer, Client, ConType, Letter, Output, SessionConfig, SessionInfo, Submission},
    cx::Cx,
    proto::ConnReq,
    server::ServerConfig,
};

use crate::hosts::{Host, KeyMode, Pair, carry_watched, client_turn};

/// A loop besides the first.
struct Other {
    host: Host,
    client: Client,
    empty: Usage,
    done: Vec<(u64, Result<(), IoError>, Option<Buffer>)>,
    told: Vec<Output>,
}

/// A client over several loops, and a server.
pub(crate) struct Spread {
    /// The server, and the client's first share.
    pub(crate) pair: Pair,
    others: Vec<Other>,
    mail: BTreeMap<(u16, u16), VecDeque<Letter>>,
    /// No letter arrives.
    pub(crate) hold_mail: bool,
    /// Nothing goes from these shares or to them.
    pub(crate) cut: BTreeSet<u16>,
    /// What connection requests have said: attempt, number of the connection, of how many.
    pub(crate) asked: BTreeSet<(u16, u16, u16)>,
    steering: Steering,
    dice: u64,
}

impl Spread {
    pub(crate) fn new(shares: u16, keys: KeyMode, config: ServerConfig, seed: u64) -> Self {
        Self::over(1, shares, keys, config, seed)
    }

    /// The addresses of both hosts are spread over so many devices.
    pub(crate) fn over(devices: usize, shares: u16, keys: KeyMode, config: ServerConfig, seed: u64) -> Self {
        let steering = Steering::new(shares.into()).unwrap();
        let host = |share: u16| Host::shard(1, keys, devices, steering.slot(share.into()).unwrap());
        let client = |share| Client::share(share, shares).unwrap();
        let others = (1..shares).map(|share| {
            let host = host(share);
            Other {
                empty: host.fabric.usage(),
                host,
                client: client(share),
                done: Vec::new(),
                told: Vec::new(),
            }
        });
        Self {
            others: others.collect(),
            pair: Pair::with(host(0), client(0), keys, devices, config),
            mail: BTreeMap::new(),
            hold_mail: false,
            cut: BTreeSet::new(),
            asked: BTreeSet::new(),
            steering,
            dice: seed,
        }
    }

    pub(crate) fn shares(&self) -> std::ops::Range<u16> {
        0..self.others.len() as u16 + 1
    }

    /// A random number below `n`.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.dice = self
            .dice
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.dice >> 33) % n
    }

    fn of(&mut self, share: u16) -> (&mut Host, &mut Client) {
        match share {
            0 => (&mut self.pair.near, &mut self.pair.client),
            n => {
                let other = &mut self.others[usize::from(n) - 1];
                (&mut other.host, &mut other.client)
            }
        }
    }

    pub(crate) fn with<T>(&mut self, share: u16, f: impl FnOnce(&mut Client, &mut Cx<'_>) -> T) -> T {
        let now = self.pair.now;
        let (host, client) = self.of(share);
        host.with(now, |cx| f(client, cx))
    }

    /// What a share has ended since it was asked.
    pub(crate) fn done(&mut self, share: u16) -> Vec<(u64, Result<(), IoError>, Option<Buffer>)> {
        match share {
            0 => std::mem::take(&mut self.pair.done),
            n => std::mem::take(&mut self.others[usize::from(n) - 1].done),
        }
    }

    /// What else a share has told since it was asked.
    pub(crate) fn told(&mut self, share: u16) -> Vec<Output> {
        match share {
            0 => std::mem::take(&mut self.pair.told),
            n => std::mem::take(&mut self.others[usize::from(n) - 1].told),
        }
    }

    /// Opens a session; what each share may do.
    pub(crate) fn open(&mut self, change: impl FnOnce(&mut SessionConfig)) -> Vec<SessionInfo> {
        self.pair.ask_open(change);
        self.settle();
        let told = self.shares().map(|share| match self.told(share)[..] {
            [Output::Opened(session, info)] if session == self.pair.session() => info,
            ref told => panic!("share {share}: {told:?}"),
        });
        told.collect()
    }

    pub(crate) fn ask_close(&mut self, share: u16) {
        let session = self.pair.session();
        self.with(share, |client, cx| client.close(cx, session));
    }

    /// Closes the session by way of a share. Every share tells it; the server may take leave of others than the first before they
    /// have heard of it.
    pub(crate) fn close(&mut self, share: u16) {
        self.ask_close(share);
        self.settle();
        for share in self.shares() {
            let told = self.told(share);
            let told = match &told[..] {
                [Output::Down(_, PathError::PeerDisconnected), rest @ ..] if share > 0 => rest,
                all => all,
            };
            assert!(matches!(told[..], [Output::Closed(_)]), "share {share}: {told:?}");
        }
    }

    pub(crate) fn buffer(&mut self, share: u16, len: usize) -> Buffer {
        let session = self.pair.session();
        self.with(share, |client, cx| client.take_buffer(cx, session, len))
            .unwrap()
    }

    pub(crate) fn give(&mut self, share: u16, buffer: Option<Buffer>) {
        let session = self.pair.session();
        if let Some(buffer) = buffer {
            self.of(share).1.give_buffer(session, buffer);
        }
    }

    #[expect(clippy::result_large_err, reason = "as the client has it")]
    pub(crate) fn submit(&mut self, share: u16, request: Submission) -> Result<(), (Submission, IoError)> {
        let session = self.pair.session();
        self.with(share, |client, cx| client.submit(cx, session, request))
    }

    /// A request by I/O connection `hint`, of the file that has the share's number.
    pub(crate) fn begin(&mut self, share: u16, tag: u64, direction: Direction, hint: usize, data: Buffer) {
        let request = Submission {
            tag,
            con: ConType::Io(hint),
            direction,
            header: [share as u8].into_iter().collect(),
            data: Some(data),
        };
        self.submit(share, request).unwrap();
    }

    /// Writes these bytes by a share, and reads them back.
    pub(crate) fn exchange(&mut self, share: u16, bytes: &[u8]) {
        let session = self.pair.session();
        self.pair.store(share.into(), bytes.len());
        let buffer = self.buffer(share, bytes.len());
        let buffers = |spread: &mut Self, f: &mut dyn FnMut(&rtrs::client::Buffers)| {
            f(spread.of(share).1.buffers(session).unwrap());
        };
        buffers(self, &mut |b| b.write(&buffer, 0, bytes).unwrap());
        let mut buffer = Some(buffer);
        for direction in [Direction::Write, Direction::Read] {
            self.begin(share, 1, direction, bytes.len(), buffer.take().unwrap());
            self.settle();
            let mut done = self.done(share);
            assert!(matches!(done[..], [(1, Ok(()), Some(_))]), "share {share}: {done:?}");
            buffer = done.remove(0).2;
            if direction == Direction::Write {
                let zeroes = vec![0; bytes.len()];
                buffers(self, &mut |b| b.write(buffer.as_ref().unwrap(), 0, &zeroes).unwrap());
            }
        }
        let mut back = vec![0; bytes.len()];
        buffers(self, &mut |b| b.read(buffer.as_ref().unwrap(), 0, &mut back).unwrap());
        assert!(back == bytes, "share {share}");
        self.give(share, buffer);
    }

    /// A queue pair of a share fails, if it has one that is connected.
    pub(crate) fn break_one(&mut self, share: u16) -> bool {
        let now = self.pair.now;
        let fabric = &mut self.of(share).0.fabric;
        let ids = (0..16).flat_map(|slot| (0..200).map(move |generation| QpId::new(slot, generation)));
        let mut qpns: Vec<Qpn> = ids.filter_map(|id| fabric.qpn(id)).collect();
        qpns.reverse();
        let failed = QpAttr {
            state: Some(QpState::Err),
            ..QpAttr::default()
        };
        fabric.ports().all().any(|port| {
            let connected = qpns.iter().find(|qpn| port.qp_state(**qpn) == Some(QpState::Rts));
            connected.is_some_and(|qpn| port.modify_qp(now, *qpn, &failed).is_ok())
        })
    }

    /// Of each share.
    pub(crate) fn usage(&mut self) -> Vec<Usage> {
        self.shares().map(|share| self.of(share).0.fabric.usage()).collect()
    }

    /// The server's user answers what it has held.
    pub(crate) fn release(&mut self) {
        self.pair.hold = false;
        for request in std::mem::take(&mut self.pair.held) {
            self.pair.answer(&request);
        }
    }

    pub(crate) fn server_closes(&mut self) {
        let now = self.pair.now;
        let server = &mut self.pair.server;
        for key in server.sessions().iter().map(|s| s.session).collect::<Vec<_>>() {
            self.pair.far.with(now, |cx| server.close_session(cx, key));
        }
    }

    /// All loops are as they were before the session.
    pub(crate) fn assert_empty(&mut self) {
        self.pass(Duration::from_secs(400));
        assert!(self.mail.values().all(VecDeque::is_empty));
        for share in 1..self.shares().end {
            let other = &self.others[usize::from(share) - 1];
            assert_eq!(other.client.sessions().count(), 0, "share {share}");
            assert_eq!(other.host.fabric.usage(), other.empty, "share {share}");
        }
        self.pair.assert_empty();
    }

    /// Time passes, with everything that is due.
    pub(crate) fn pass(&mut self, time: Duration) {
        let end = self.pair.now + time;
        loop {
            self.settle();
            let mut all = vec![
                self.pair.server.next_timeout().filter(|_| !self.pair.deaf),
                self.pair.far.poll_timeout(),
            ];
            for share in self.shares() {
                let (host, client) = self.of(share);
                all.extend([host.poll_timeout(), client.next_timeout()]);
            }
            match all.into_iter().flatten().min().filter(|at| *at <= end) {
                Some(at) => self.pair.now = at.max(self.pair.now + Duration::from_micros(1)),
                None => break,
            }
        }
        self.pair.now = end;
        self.settle();
    }

    /// Turns of all loops until nothing moves.
    pub(crate) fn settle(&mut self) {
        for _ in 0..10_000 {
            if !self.round() {
                return;
            }
        }
        panic!("it does not come to rest");
    }

    /// A turn of each loop, some letters, and what is on the wire.
    pub(crate) fn round(&mut self) -> bool {
        let now = self.pair.now;
        let before = self.pair.told.len();
        let mut moved = self.pair.client_turn();
        let over = |told: &Output| matches!(told, Output::Closed(_) | Output::OpenFailed(..));
        if self.pair.told[before..].iter().any(over) {
            for (other, share) in self.others.iter().zip(1..) {
                assert_eq!(other.host.fabric.usage(), other.empty, "it is over, but not at {share}");
            }
        }
        for other in &mut self.others {
            moved |= client_turn(now, &mut other.host, &mut other.client);
            while let Some(output) = other.client.poll_output() {
                moved = true;
                match output {
                    Output::Done { tag, result, data, .. } => other.done.push((tag, result, data)),
                    // Shares other than home tell of what they have taken over.
                    Output::Path { .. } => {}
                    output => other.told.push(output),
                }
            }
        }
        moved |= self.post();
        moved |= self.pair.server_turn();
        for share in self.shares() {
            let cut = self.cut.contains(&share);
            let (near, far) = match share {
                0 => (&mut self.pair.near, &mut self.pair.far),
                n => (&mut self.others[usize::from(n) - 1].host, &mut self.pair.far),
            };
            let asked = &mut self.asked;
            let cut_off = &self.pair.cut_off;
            let cut = |addr| cut || cut_off.contains(&addr);
            moved |= carry_watched(now, near, far, cut, |packet| asked.extend(request_in(packet)));
        }
        moved | self.carry_back()
    }

    /// Some letters arrive, those from one share to another in their order.
    fn post(&mut self) -> bool {
        for from in self.shares() {
            while let Some((to, letter)) = self.of(from).1.poll_letter() {
                assert!(from != to && self.shares().contains(&to), "{from} to {to}");
                self.mail.entry((from, to)).or_default().push_back(letter);
            }
        }
        if self.hold_mail {
            return false;
        }
        let waits: Vec<_> = self
            .mail
            .iter()
            .filter(|(_, q)| !q.is_empty())
            .map(|(k, _)| *k)
            .collect();
        for (from, to) in &waits {
            if self.below(3) == 0
                && let Some(letter) = self.mail.get_mut(&(*from, *to)).and_then(VecDeque::pop_front)
            {
                self.with(*to, |client, cx| client.letter(cx, *from, letter));
            }
        }
        !waits.is_empty()
    }

    /// What the server sends goes to the loop that its numbers name.
    fn carry_back(&mut self) -> bool {
        let now = self.pair.now;
        let mut packets = Vec::new();
        self.pair
            .far
            .drain(now, |meta, bytes| packets.push((*meta, bytes.to_vec())));
        for (meta, bytes) in &packets {
            // Packets of a train are all for one queue pair.
            let first = bytes.chunks(if meta.segment_len == 0 {
                bytes.len().max(1)
            } else {
                meta.segment_len
            });
            let share = share_of(self.steering, first.into_iter().next().unwrap_or_default());
            if self.cut.contains(&share) || self.pair.cut_off.contains(&meta.local) {
                continue;
            }
            self.of(share).0.receive(now, meta, bytes);
        }
        !packets.is_empty()
    }
}

/// What a packet says if it is a connection request.
fn request_in(packet: &[u8]) -> Option<(u16, u16, u16)> {
    let mad = Mad::parse(Packet::parse(packet).ok()?.payload).ok()?;
    let Message::Req(req) = mad.message else { return None };
    let said = ConnReq::parse(req.private_data.get(HEADER_LEN..)?).ok()?;
    Some((said.recon_cnt.get(), said.cid.get(), said.cid_num.get()))
}

/// The loop that a packet of the server's is for: its queue pair number says it, or the communication ID that was ours.
fn share_of(steering: Steering, bytes: &[u8]) -> u16 {
    let packet = Packet::parse(bytes).unwrap();
    let share = match Mad::parse(packet.payload).map(|mad| mad.message) {
        _ if packet.header.bth.dest_qp != Qpn::GSI => steering.of_qpn(packet.header.bth.dest_qp),
        Ok(Message::Rep(m)) => steering.of_comm_id(m.remote_comm_id),
        Ok(Message::Rej(m)) => steering.of_comm_id(m.remote_comm_id),
        Ok(Message::Mra(m)) => steering.of_comm_id(m.remote_comm_id),
        Ok(Message::Dreq(m)) => steering.of_comm_id(m.remote_comm_id),
        Ok(Message::Drep(m)) => steering.of_comm_id(m.remote_comm_id),
        other => panic!("{other:?}"),
    };
    share as u16
}
