//! RDMA and atomic operations of programs: memory that they offer, operations on it, and the rules for both.
//!
//! Programs learn of offers here, so that each operation's effect is known; messages carry cookies as well, which are compared. Bytes of
//! an offer are written by one operation at most.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use rds::{
    Attachment, Message, Operation, OperationFlags, OperationKind, RdmaNotice, RdmaStatus, RegionRights, SocketId,
    proto::RdmaCookie,
};
use roce_sim::{Check, Coverage, Rng};
use roce_verbs::mem::Pages;

/// Bytes of an offer's word, of what is there to be read, and of what may be written.
const WORD: usize = 8;
const READ: usize = 20_000;
const WRITE: usize = 20_000;
const LEN: usize = WORD + READ + WRITE;
/// Offers of a program at a time.
const OFFERS: usize = 3;
/// Bytes of operations.
const LENS: [usize; 5] = [1, 8, 100, 4096, 9000];

/// Memory that a socket offers.
#[derive(Debug)]
pub(crate) struct Offer {
    pub(crate) at: SocketAddr,
    pub(crate) id: SocketId,
    pub(crate) cookie: RdmaCookie,
    pub(crate) rights: RegionRights,
    memory: Arc<Pages>,
    /// Bytes that operations were given to write.
    written: usize,
    /// It has had its only operation.
    is_used: bool,
    is_gone: bool,
    /// Additions to its word that were tried, and that succeeded, with the values that they found.
    adds: u64,
    added: BTreeSet<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Target {
    /// Range of an offer.
    Offer(usize, usize),
    /// A key that nobody has, or a right that an offer lacks.
    Bad,
}

/// Operation of a program.
#[derive(Debug)]
struct Op {
    from: SocketAddr,
    kind: OperationKind,
    target: Target,
    local: Arc<Pages>,
    len: usize,
    reports: bool,
    /// It has been reported, or is not going to be: its socket is gone.
    is_over: bool,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Board {
    rng: Rng,
    /// Probability that a message has something with it.
    chance: f64,
    offers: Vec<Offer>,
    ops: Vec<Op>,
    /// Cookies that were sent, by their messages' numbers.
    cookies: BTreeMap<u64, RdmaCookie>,
    operations: BTreeMap<u64, usize>,
}

/// Bytes of a pattern, none of them 0.
fn pattern(number: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| ((i * 7 + number * 31) % 251 + 1) as u8).collect()
}

impl Board {
    /// Returns an empty one. `rng`: of its own, so that the rest of a run is the same without it.
    pub(crate) fn new(mut rng: Rng) -> Self {
        Self {
            chance: rng.pick(&[0.0, 0.3, 0.9]),
            rng,
            offers: Vec::new(),
            ops: Vec::new(),
            cookies: BTreeMap::new(),
            operations: BTreeMap::new(),
        }
    }

    /// Returns memory that a program with these addresses is to offer, if it has too little on offer.
    pub(crate) fn wants_offer(&mut self, addr: IpAddr) -> Option<(Arc<Pages>, RegionRights)> {
        let mine = self
            .offers
            .iter()
            .filter(|offer| offer.at.ip() == addr && !offer.is_gone);
        if self.chance == 0.0 || mine.count() >= OFFERS {
            return None;
        }
        let memory = Pages::allocate(LEN).ok()?;
        memory.write(WORD, &pattern(self.offers.len(), READ)).ok()?;
        let rights = RegionRights {
            writable: self.rng.chance(0.8),
            use_once: self.rng.chance(0.3),
        };
        Some((memory, rights))
    }

    /// Returns a number below `n`.
    pub(crate) fn index(&mut self, n: usize) -> usize {
        self.rng.index(n)
    }

    /// A program offers memory.
    pub(crate) fn offered(
        &mut self,
        at: SocketAddr,
        id: SocketId,
        cookie: RdmaCookie,
        with: (Arc<Pages>, RegionRights),
    ) {
        let (memory, rights) = with;
        self.offers.push(Offer {
            at,
            id,
            cookie,
            rights,
            memory,
            written: 0,
            is_used: false,
            is_gone: false,
            adds: 0,
            added: BTreeSet::new(),
        });
    }

    /// Returns an offer of a program that is to be withdrawn: sometimes one that is in use.
    pub(crate) fn withdraw(&mut self, addr: IpAddr) -> Option<&Offer> {
        let rng = &mut self.rng;
        let offer = self.offers.iter_mut().find(|offer| {
            let is_spent = offer.is_used && offer.rights.use_once || offer.written + 9000 > WRITE;
            offer.at.ip() == addr && !offer.is_gone && rng.chance(if is_spent { 0.1 } else { 0.002 })
        })?;
        offer.is_gone = true;
        Some(offer)
    }

    /// Returns what goes with a message, and whether it is an operation.
    pub(crate) fn attach(
        &mut self,
        number: u64,
        (from, to): (SocketAddr, SocketAddr),
        reports_errors: bool,
    ) -> (Attachment, bool) {
        if !self.rng.chance(self.chance) {
            return (Attachment::Nothing, false);
        }
        let alive = |offer: &&Offer| !offer.is_gone;
        if self.rng.chance(0.3) {
            let mine = self.offers.iter().filter(alive).find(|offer| offer.at == from);
            let Some(cookie) = mine.map(|offer| offer.cookie) else {
                return (Attachment::Nothing, false);
            };
            self.cookies.insert(number, cookie);
            return (Attachment::Cookie(cookie), false);
        }
        match self.operation(number, (from, to), reports_errors) {
            Some(operation) => (Attachment::Operation(Box::new(operation)), true),
            None => (Attachment::Nothing, false),
        }
    }

    fn operation(
        &mut self,
        number: u64,
        (from, to): (SocketAddr, SocketAddr),
        reports_errors: bool,
    ) -> Option<Operation> {
        let usable = |offer: &Offer| offer.at == to && !offer.is_gone && !(offer.is_used && offer.rights.use_once);
        let index = self.offers.iter().position(usable)?;
        let kind = match self.rng.index(3) {
            0 => OperationKind::Write,
            1 => OperationKind::Read,
            // The node does none on its own memory.
            _ if from.ip() == to.ip() => OperationKind::Read,
            _ => OperationKind::FetchAdd { add: 1 },
        };
        let len = match kind {
            OperationKind::FetchAdd { .. } => WORD,
            _ => self.rng.pick(&LENS),
        };
        let offer = &mut self.offers[index];
        let mut cookie = offer.cookie;
        let at = match kind {
            OperationKind::Write if offer.written + len > WRITE => return None,
            OperationKind::Write => WORD + READ + offer.written,
            OperationKind::Read => WORD + self.rng.index(READ - len),
            _ => 0,
        };
        let mut target = Target::Offer(index, at);
        if self.rng.chance(0.02) {
            cookie = RdmaCookie::new(cookie.rkey() ^ 0x5a00_0000, 0);
            target = Target::Bad;
        } else if kind != OperationKind::Read && !offer.rights.writable {
            target = Target::Bad;
        } else {
            offer.is_used = true;
            match kind {
                OperationKind::Write => offer.written += len,
                OperationKind::FetchAdd { .. } => offer.adds += 1,
                _ => {}
            }
        }
        let token = self.ops.len();
        let memory = Pages::allocate(len).ok()?;
        if kind == OperationKind::Write {
            memory.write(0, &pattern(token, len)).ok()?;
        }
        // Several pieces that are not in the order of the memory would be another pattern.
        let cuts = if len > 64 { self.rng.pick(&[1, 2, 40]) } else { 1 };
        let pieces = (0..cuts).map(|n| n * len / cuts..(n + 1) * len / cuts).collect();
        let flags = OperationFlags::from_bits_truncate(self.rng.number() as u32);
        let reports = flags.contains(OperationFlags::NOTIFY);
        self.ops.push(Op {
            from,
            kind,
            target,
            local: memory.clone(),
            len,
            reports: reports || reports_errors,
            is_over: !reports,
        });
        self.operations.insert(number, token);
        Some(Operation {
            kind,
            cookie,
            remote: at as u64,
            memory,
            pieces,
            flags,
            token: token as u64,
        })
    }

    /// The node did not take a message.
    pub(crate) fn refused(&mut self, number: u64) {
        self.cookies.remove(&number);
        if let Some(op) = self
            .operations
            .remove(&number)
            .and_then(|token| self.ops.get_mut(token))
        {
            op.is_over = true;
            op.reports = false;
        }
    }

    /// Sockets are gone, and what they were to be told.
    pub(crate) fn gone(&mut self, is_meant: impl Fn(SocketAddr) -> bool) {
        for offer in self.offers.iter_mut().filter(|offer| is_meant(offer.at)) {
            offer.is_gone = true;
        }
        for op in self.ops.iter_mut().filter(|op| is_meant(op.from)) {
            (op.is_over, op.reports) = (true, false);
        }
    }

    /// A program was told of an operation.
    pub(crate) fn notice(&mut self, at: SocketAddr, notice: RdmaNotice, coverage: &mut Coverage) -> Check {
        let token = notice.token as usize;
        let Some(op) = self.ops.get_mut(token).filter(|op| op.from == at && op.reports) else {
            return Err(format!(
                "{at} was told of an operation that is none, or again: {notice:?}"
            ));
        };
        if op.is_over && notice.status == RdmaStatus::Success {
            return Err(format!("{at} did not ask for {notice:?}"));
        }
        (op.is_over, op.reports) = (true, false);
        coverage.note(match notice.status {
            RdmaStatus::Success => "operation done",
            RdmaStatus::RemoteError => "operation refused",
            RdmaStatus::Canceled => "operation canceled",
            RdmaStatus::Dropped => "operation dropped",
            RdmaStatus::OtherError => "operation failed",
        });
        match (notice.status, op.target) {
            (RdmaStatus::Success, Target::Bad) => Err(format!("{op:?} succeeded")),
            (RdmaStatus::Success, Target::Offer(index, at)) => self.check_done(token, index, at),
            _ => Ok(()),
        }
    }

    fn check_done(&mut self, token: usize, index: usize, at: usize) -> Check {
        let (op, offer) = (&self.ops[token], &mut self.offers[index]);
        let (mut local, mut remote) = (vec![0; op.len], vec![0; op.len]);
        let read = op
            .local
            .read(0, &mut local)
            .and_then(|()| offer.memory.read(at, &mut remote));
        read.map_err(|e| e.to_string())?;
        if op.kind == (OperationKind::FetchAdd { add: 1 }) {
            let found = u64::from_ne_bytes(local.try_into().unwrap_or_default());
            return match offer.added.insert(found) {
                true => Ok(()),
                false => Err(format!("two additions found {found}")),
            };
        }
        match local == remote {
            true => Ok(()),
            false => Err(format!("{op:?} is done, but the bytes are others")),
        }
    }

    /// A message has come. Returns the offer for use once that its operation has used.
    pub(crate) fn received(&self, message: &Message, coverage: &mut Coverage) -> Result<Option<&Offer>, String> {
        // Shorter ones look alike.
        let Some(number) = message.data.first_chunk().map(|number| u64::from_le_bytes(*number)) else {
            return Ok(None);
        };
        if message.cookie != self.cookies.get(&number).copied() {
            return Err(format!("message {number} brought {:?}", message.cookie));
        }
        coverage.note_if("cookie", message.cookie.is_some());
        let Some(op) = self.operations.get(&number).map(|token| &self.ops[*token]) else {
            return Ok(None);
        };
        coverage.note("message behind an operation");
        let Target::Offer(index, at) = op.target else {
            return Err(format!("message {number} came, with a bad {op:?}"));
        };
        let offer = &self.offers[index];
        let (mut local, mut remote) = (vec![0; op.len], vec![0; op.len]);
        let read = op
            .local
            .read(0, &mut local)
            .and_then(|()| offer.memory.read(at, &mut remote));
        read.map_err(|e| e.to_string())?;
        if !op.kind.eq(&OperationKind::FetchAdd { add: 1 }) && local != remote {
            return Err(format!("message {number} came before {op:?} was done"));
        }
        let is_freed = offer.rights.use_once && !offer.is_gone && !matches!(op.kind, OperationKind::FetchAdd { .. });
        Ok(is_freed.then_some(offer))
    }

    /// Programs end: they have been told what is due, and memory has no bytes that nobody wrote.
    pub(crate) fn end(&mut self) -> Check {
        self.chance = 0.0;
        self.offers.iter_mut().for_each(|offer| offer.is_gone = true);
        if let Some(op) = self.ops.iter().find(|op| !op.is_over) {
            return Err(format!("nobody was told the end of {op:?}"));
        }
        for (number, offer) in self.offers.iter().enumerate() {
            let mut bytes = vec![0; LEN];
            offer.memory.read(0, &mut bytes).map_err(|e| e.to_string())?;
            let (word, bytes) = bytes.split_at(WORD);
            let word = u64::from_ne_bytes(word.try_into().unwrap_or_default());
            if word < offer.added.len() as u64
                || word > offer.adds
                || offer.added.last().is_some_and(|last| *last >= word)
            {
                return Err(format!(
                    "{word} after {} additions, {} of which succeeded",
                    offer.adds,
                    offer.added.len()
                ));
            }
            let (read, write) = bytes.split_at(READ);
            if read != pattern(number, READ) || write[offer.written..].iter().any(|byte| *byte != 0) {
                return Err(format!("bytes of offer {number} were written that no operation names"));
            }
        }
        for (token, op) in self.ops.iter().enumerate() {
            let (Target::Offer(index, at), OperationKind::Write) = (op.target, op.kind) else {
                continue;
            };
            let mut bytes = vec![0; op.len];
            let read = self.offers[index].memory.read(at, &mut bytes);
            read.map_err(|e| e.to_string())?;
            let is_its = |(byte, expected): (&u8, u8)| *byte == 0 || *byte == expected;
            if !bytes.iter().zip(pattern(token, op.len)).all(is_its) {
                return Err(format!("{op:?} wrote other bytes"));
            }
        }
        Ok(())
    }
}
