//! Rules: which packets or calls, and what happens to them.

use std::{fmt, net::IpAddr, str::FromStr, time::Duration};

use roce_bth::{Class, Opcode};
use roce_verbs::{WcOpcode, WcStatus, wr::PostError};

use crate::{
    impairment::{Burst, Conditions, Line},
    value,
};

/// Time for which `reorder` holds a packet back unless the rule says otherwise.
const REORDER_BY: Duration = Duration::from_millis(1);
/// Bytes that wait for a line of limited rate unless the rule says otherwise.
const QUEUE: u64 = 1 << 20;
/// Largest number of rules at a time.
pub const MAX_RULES: usize = 64;

/// Every key with its values, for error messages and help.
pub const SYNTAX: &str = "\
packets: loss=P dup=P reorder=P[:TIME] delay=TIME jitter=TIME corrupt=P ecn=P rnr=P burst=P:PACKETS rate=BYTES queue=BYTES \
ecn_above=BYTES
verbs:   post_send=ENOMEM|EINVAL post_recv=ENOMEM|EINVAL wc=STATUS qp_error=MESSAGES reg_mr=ERRNO
which:   dir=tx|rx peer=IP[/BITS] qp=NUMBER|#K nth=N[-M][+...] kind=send|write|read|atomic|recv|response|ack|cm p=P seed=NUMBER
P is 1% or 0.01, TIME is 20us, 5ms or 1s, BYTES is 64K or 8M";

/// Why a rule is refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct RuleError(String);

/// Direction of a packet, as the program's host sees it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Direction {
    /// Sent.
    Tx,
    /// Received.
    Rx,
}

/// Kind of a packet, or of a completed work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// SEND.
    Send,
    /// RDMA WRITE, ATOMIC WRITE and FLUSH.
    Write,
    /// RDMA READ request.
    Read,
    /// Atomic request.
    Atomic,
    /// Receive work request; no packet.
    Recv,
    /// Response of an RDMA READ or an atomic.
    Response,
    /// Acknowledgement, NAKs included.
    Ack,
    /// Management datagram: connection management.
    Cm,
}

impl Kind {
    const ALL: [(&'static str, Self); 8] = [
        ("send", Self::Send),
        ("write", Self::Write),
        ("read", Self::Read),
        ("atomic", Self::Atomic),
        ("recv", Self::Recv),
        ("response", Self::Response),
        ("ack", Self::Ack),
        ("cm", Self::Cm),
    ];

    /// Returns the kind of a packet. `None`: a notification of congestion, or no valid opcode.
    pub(crate) fn of_packet(opcode: Opcode, management: bool) -> Option<Self> {
        Some(match opcode.info().class {
            _ if management => Self::Cm,
            Class::Send => Self::Send,
            Class::Write | Class::AtomicWrite | Class::Flush => Self::Write,
            Class::ReadRequest => Self::Read,
            Class::Atomic => Self::Atomic,
            Class::ReadResponse | Class::AtomicAcknowledge => Self::Response,
            Class::Acknowledge | Class::SelectiveAcknowledge => Self::Ack,
            Class::Cnp => return None,
        })
    }

    /// Returns the kind of a completed work request. `None`: an operation on keys.
    pub(crate) fn of_completion(opcode: WcOpcode) -> Option<Self> {
        Some(match opcode {
            WcOpcode::Send => Self::Send,
            WcOpcode::RdmaWrite | WcOpcode::AtomicWrite | WcOpcode::Flush => Self::Write,
            WcOpcode::RdmaRead => Self::Read,
            WcOpcode::CompareSwap | WcOpcode::FetchAdd => Self::Atomic,
            WcOpcode::Recv | WcOpcode::RecvRdmaWithImm => Self::Recv,
            WcOpcode::BindWindow | WcOpcode::LocalInvalidate | WcOpcode::FastRegister => return None,
        })
    }

    const fn is_of_packets_only(self) -> bool {
        matches!(self, Self::Response | Self::Ack | Self::Cm)
    }
}

/// Queue pair of a rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum QpFilter {
    Number(u32),
    /// The k-th one that was created.
    Created(u32),
}

/// Queue pair of a packet or call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct QpRef {
    /// Number.
    pub qpn: u32,
    /// How many queue pairs had been created before at its port, plus 1; 0 for a queue pair that does not exist.
    pub serial: u32,
}

/// Ranges of ordinal numbers, both ends included.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Ordinals(Vec<(u64, u64)>);

impl Ordinals {
    fn parse(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse::<u64>().ok().filter(|n| *n > 0);
        let range = |part: &str| match part.split_once('-') {
            None => number(part).map(|n| (n, n)),
            Some((first, "")) => number(first).map(|n| (n, u64::MAX)),
            Some((first, last)) => number(first).zip(number(last)).filter(|(a, b)| a <= b),
        };
        let ranges: Option<Vec<_>> = text.split('+').map(range).collect();
        ranges
            .map(Self)
            .ok_or_else(|| format!("nth={text}: numbers from 1, like 5, 5-9, 5- or 3+7+20-29"))
    }

    pub(crate) fn contains(&self, n: u64) -> bool {
        self.0.iter().any(|(first, last)| (*first..=*last).contains(&n))
    }
}

/// Which packets or calls a rule applies to.
#[derive(Clone, PartialEq, Default, Debug)]
pub(crate) struct Which {
    pub(crate) direction: Option<Direction>,
    /// Network of the peer: address and prefix length.
    pub(crate) peer: Option<(IpAddr, u8)>,
    pub(crate) qp: Option<QpFilter>,
    pub(crate) nth: Option<Ordinals>,
    pub(crate) kind: Option<Kind>,
    /// Probability of a verb's fault.
    pub(crate) probability: Option<f64>,
}

impl Which {
    pub(crate) fn has_qp(&self, qp: QpRef) -> bool {
        match self.qp {
            None => true,
            Some(QpFilter::Number(number)) => number == qp.qpn,
            Some(QpFilter::Created(serial)) => serial == qp.serial,
        }
    }
}

/// A verb that posts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Posting {
    /// `ibv_post_send`.
    Send,
    /// `ibv_post_recv`, `ibv_post_srq_recv`.
    Recv,
}

/// Fault of a verb.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum VerbFault {
    Post(Posting, PostError),
    Completion(WcStatus),
    /// The queue pair moves to the error state after this number of messages.
    QpError(u64),
    /// Registration of memory fails with this error number.
    Register(i32),
}

#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Action {
    Packets {
        conditions: Conditions,
        /// Probability that a message finds no receive work request.
        rnr: f64,
    },
    Verb(VerbFault),
}

/// A rule. It is written as `key=value,…`; [`SYNTAX`] lists the keys.
#[derive(Clone, PartialEq, Debug)]
pub struct Rule {
    text: String,
    pub(crate) which: Which,
    pub(crate) action: Action,
    pub(crate) seed: u64,
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Rule that is being parsed.
#[derive(Default)]
struct Draft {
    which: Which,
    conditions: Conditions,
    rnr: f64,
    /// The first key about packets.
    packets: Option<String>,
    verb: Option<(String, VerbFault)>,
    queue: Option<u64>,
    mark_above: Option<u64>,
    rate: Option<u64>,
    seed: Option<u64>,
}

/// Keys that choose packets or calls.
const WHICH: [&str; 7] = ["dir", "peer", "qp", "nth", "kind", "p", "seed"];
/// Keys of verbs' faults.
const VERBS: [&str; 5] = ["post_send", "post_recv", "wc", "qp_error", "reg_mr"];

const INVALID: PostError = PostError::Invalid("refused by a fault rule");
const POST_ERRORS: [(&str, PostError); 2] = [("ENOMEM", PostError::QueueFull), ("EINVAL", INVALID)];

const ERRNOS: [(&str, i32); 7] = [
    ("EPERM", 1),
    ("EAGAIN", 11),
    ("ENOMEM", 12),
    ("EACCES", 13),
    ("EFAULT", 14),
    ("EINVAL", 22),
    ("EOPNOTSUPP", 95),
];

/// Finds a name, whatever its case.
fn named<T: Copy>(key: &str, value: &str, names: &[(&str, T)]) -> Result<T, String> {
    let found = names.iter().find(|(name, _)| name.eq_ignore_ascii_case(value));
    found.map(|(_, value)| *value).ok_or_else(|| {
        let all: Vec<&str> = names.iter().map(|(name, _)| *name).collect();
        format!("{key}={value}: there are {}", all.join(", "))
    })
}

fn peer(value: &str) -> Result<(IpAddr, u8), String> {
    let wrong = || format!("peer={value}: an address, or a network like 192.0.2.0/24");
    let (addr, bits) = value.split_once('/').map_or((value, None), |(a, b)| (a, Some(b)));
    let addr: IpAddr = addr.parse().map_err(|_| wrong())?;
    let most = if addr.is_ipv4() { 32 } else { 128 };
    let bits = bits.map_or(Ok(most), |b| b.parse().map_err(|_| wrong()))?;
    if bits > most {
        Err(wrong())
    } else {
        Ok((addr.to_canonical(), bits))
    }
}

fn queue_pair(value: &str) -> Result<QpFilter, String> {
    let number = |text: &str| match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    };
    let found = match value.strip_prefix('#') {
        Some(k) => number(k).filter(|k| *k > 0).map(QpFilter::Created),
        None => number(value).filter(|n| *n < 1 << 24).map(QpFilter::Number),
    };
    found.ok_or_else(|| format!("qp={value}: a queue pair number like 0x12, or #2 for the second one that was created"))
}

fn burst(value: &str) -> Result<Burst, String> {
    let wrong = || format!("burst={value}: a probability and an average length, like 0.1%:5");
    let (begins, length) = value.split_once(':').ok_or_else(wrong)?;
    let length = length
        .parse()
        .ok()
        .filter(|n| (1.0..1e6).contains(n))
        .ok_or_else(wrong)?;
    Ok(Burst {
        begins: value::probability(begins)?,
        length,
    })
}

fn reorder(value: Option<&str>) -> Result<(f64, Duration), String> {
    let (p, by) = match value.and_then(|v| v.split_once(':')) {
        Some((p, by)) => (Some(p), Some(by)),
        None => (value, None),
    };
    let p = p.map_or(Ok(1.0), value::probability)?;
    Ok((p, by.map_or(Ok(REORDER_BY), value::time)?))
}

impl Draft {
    /// Reads one `key=value`.
    fn read(&mut self, key: &str, value: Option<&str>) -> Result<(), String> {
        let given = || value.ok_or_else(|| format!("{key} has no value"));
        // Without a probability it happens always.
        let chance = || value.map_or(Ok(1.0), value::probability);
        let (which, c) = (&mut self.which, &mut self.conditions);
        match key {
            "dir" => which.direction = Some(named(key, given()?, &[("tx", Direction::Tx), ("rx", Direction::Rx)])?),
            "peer" => which.peer = Some(peer(given()?)?),
            "qp" => which.qp = Some(queue_pair(given()?)?),
            "nth" => which.nth = Some(Ordinals::parse(given()?)?),
            "kind" => which.kind = Some(named(key, given()?, &Kind::ALL)?),
            "p" => which.probability = Some(value::probability(given()?)?),
            "seed" => {
                let seed = given()?;
                self.seed = Some(seed.parse().map_err(|_| format!("seed={seed}: a number"))?);
            }
            "post_send" => self.verb(key, VerbFault::Post(Posting::Send, named(key, given()?, &POST_ERRORS)?))?,
            "post_recv" => self.verb(key, VerbFault::Post(Posting::Recv, named(key, given()?, &POST_ERRORS)?))?,
            "wc" => {
                let status = given()?;
                let status = status.strip_prefix("IBV_WC_").unwrap_or(status);
                self.verb(key, VerbFault::Completion(named(key, status, &WcStatus::NAMED[1..])?))?;
            }
            "qp_error" => {
                let number = given()?.parse().ok().filter(|n| *n > 0);
                let number = number.ok_or("qp_error: a number of messages, from 1")?;
                self.verb(key, VerbFault::QpError(number))?;
            }
            "reg_mr" => self.verb(key, VerbFault::Register(named(key, given()?, &ERRNOS)?))?,
            "loss" => c.loss = chance()?,
            "dup" => c.duplicate = chance()?,
            "corrupt" => c.corrupt = chance()?,
            "ecn" => c.mark = chance()?,
            "rnr" => self.rnr = chance()?,
            "reorder" => (c.reorder, c.reorder_by) = reorder(value)?,
            "delay" => c.delay = value::time(given()?)?,
            "jitter" => c.jitter = value::time(given()?)?,
            "burst" => c.burst = Some(burst(given()?)?),
            "rate" => match value::bytes(given()?)? {
                0 => return Err("rate=0 would send nothing: that is loss=100%".into()),
                rate => self.rate = Some(rate),
            },
            "queue" => self.queue = Some(value::bytes(given()?)?),
            "ecn_above" => self.mark_above = Some(value::bytes(given()?)?),
            _ => return Err(format!("unknown key {key:?}; known are\n{SYNTAX}")),
        }
        let about_packets = !WHICH.contains(&key) && !VERBS.contains(&key);
        if about_packets && self.packets.is_none() {
            self.packets = Some(key.to_owned());
        }
        Ok(())
    }

    fn verb(&mut self, key: &str, fault: VerbFault) -> Result<(), String> {
        match self.verb.replace((key.to_owned(), fault)) {
            None => Ok(()),
            Some((other, _)) => Err(format!(
                "a rule has one fault of verbs, not {other} and {key}: write two rules"
            )),
        }
    }

    /// Checks that the keys go together.
    fn action(&mut self) -> Result<Action, String> {
        let which = &self.which;
        if self.rate.is_none() && (self.queue.is_some() || self.mark_above.is_some()) {
            return Err("queue and ecn_above are those of a rate: add rate=BYTES".into());
        }
        self.conditions.line = self.rate.map(|rate| Line {
            rate,
            queue: self.queue.unwrap_or(QUEUE),
            mark_above: self.mark_above,
        });
        let Some((key, fault)) = &self.verb else {
            if self.packets.is_none() {
                return Err("it says which packets or calls, but not what happens to them".into());
            }
            if which.kind == Some(Kind::Recv) {
                return Err("kind=recv is for wc: there is no such packet".into());
            }
            if which.probability.is_some() {
                return Err("p is for verbs: packets have a probability each, like loss=1%".into());
            }
            if self.rnr > 0.0 && which.direction == Some(Direction::Tx) {
                return Err("rnr is about received messages: dir=rx, or no dir".into());
            }
            return Ok(Action::Packets {
                conditions: self.conditions,
                rnr: self.rnr,
            });
        };
        if let Some(packets) = &self.packets {
            return Err(format!(
                "{key} is about verbs, {packets} about packets: write two rules"
            ));
        }
        if which.direction.is_some() || which.peer.is_some() {
            return Err(format!("dir and peer are for packets, not for {key}"));
        }
        match (fault, which.kind) {
            (VerbFault::Completion(_), Some(kind)) if kind.is_of_packets_only() => {
                return Err("kind of a completion is send, write, read, atomic or recv".into());
            }
            (VerbFault::Completion(_), _) | (_, None) => {}
            (_, Some(_)) => return Err(format!("kind is for packets and wc, not for {key}")),
        }
        match fault {
            VerbFault::QpError(_) if which.nth.is_some() || which.probability.is_some() => {
                Err("qp_error says itself after how many messages: nth and p don't go with it".into())
            }
            VerbFault::Register(_) if which.qp.is_some() => Err("registration is no queue pair's".into()),
            _ => Ok(Action::Verb(*fault)),
        }
    }
}

impl FromStr for Rule {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Self, RuleError> {
        let text = text.trim();
        let error = |why: String| RuleError(format!("fault {text:?}: {why}"));
        if text.contains(char::is_control) {
            return Err(error("it has control characters".into()));
        }
        let mut draft = Draft::default();
        let mut seen: Vec<&str> = Vec::new();
        for part in text.split(',').map(str::trim) {
            let (key, value) = part
                .split_once('=')
                .map_or((part, None), |(key, value)| (key.trim(), Some(value.trim())));
            if seen.contains(&key) {
                return Err(error(format!("{key} is there twice")));
            }
            seen.push(key);
            draft.read(key, value).map_err(error)?;
        }
        let action = draft.action().map_err(error)?;
        Ok(Self {
            text: text.to_owned(),
            which: draft.which,
            action,
            seed: draft.seed.unwrap_or(1),
        })
    }
}

/// Reads rules, one behind the other with `;` between. `none` stands for no rules.
///
/// # Errors
/// The first rule that is wrong, with why and what is known; more than [`MAX_RULES`].
pub fn rules(text: &str) -> Result<Vec<Rule>, RuleError> {
    let parts = text
        .split(';')
        .map(str::trim)
        .filter(|part| !matches!(*part, "" | "none"));
    let rules = parts.map(Rule::from_str).collect::<Result<Vec<_>, _>>()?;
    check_number(&rules)?;
    Ok(rules)
}

pub(crate) fn check_number(rules: &[Rule]) -> Result<(), RuleError> {
    match rules.len() {
        0..=MAX_RULES => Ok(()),
        n => Err(RuleError(format!("{n} rules: {MAX_RULES} are possible"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packets(text: &str) -> (Conditions, f64) {
        match text.parse::<Rule>().unwrap().action {
            Action::Packets { conditions, rnr } => (conditions, rnr),
            other => panic!("{other:?}"),
        }
    }

    fn verb(text: &str) -> VerbFault {
        match text.parse::<Rule>().unwrap().action {
            Action::Verb(fault) => fault,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_key_is_read() {
        let text = "loss=1%, dup=0.02, reorder=3%:5ms, delay=1ms, jitter=200us, corrupt=4%, ecn=5%, rnr=6%, burst=0.1%:5, \
                    rate=100M, queue=64K, ecn_above=32K, peer=192.0.2.0/24, qp=0x12, nth=5, kind=write, seed=7";
        let (c, rnr) = packets(text);
        assert_eq!(
            (c.loss, c.duplicate, c.reorder, c.corrupt, c.mark, rnr),
            (0.01, 0.02, 0.03, 0.04, 0.05, 0.06)
        );
        assert_eq!(
            (c.reorder_by, c.delay),
            (Duration::from_millis(5), Duration::from_millis(1))
        );
        assert_eq!(c.jitter, Duration::from_micros(200));
        assert_eq!(c.burst.map(|b| (b.begins, b.length)), Some((0.001, 5.0)));
        let line = Line {
            rate: 100 << 20,
            queue: 64 << 10,
            mark_above: Some(32 << 10),
        };
        assert_eq!(c.line, Some(line));
        let rule: Rule = text.parse().unwrap();
        assert_eq!((rule.seed, rule.to_string()), (7, text.to_owned()));
        let which = rule.which;
        assert_eq!(which.peer, Some(("192.0.2.0".parse().unwrap(), 24)));
        assert_eq!(
            (which.qp, which.kind),
            (Some(QpFilter::Number(0x12)), Some(Kind::Write))
        );
        let rule: Rule = "loss,dir=rx,qp=#2,nth=3+7-9+20-".parse().unwrap();
        assert_eq!(rule.which.direction, Some(Direction::Rx));
        let nth = rule.which.nth.unwrap();
        let hit: Vec<u64> = (1..23).filter(|n| nth.contains(*n)).collect();
        assert_eq!(hit, [3, 7, 8, 9, 20, 21, 22]);
        assert_eq!(
            verb("post_send=enomem,nth=3"),
            VerbFault::Post(Posting::Send, PostError::QueueFull)
        );
        assert_eq!(verb("post_recv=EINVAL,p=1%"), VerbFault::Post(Posting::Recv, INVALID));
        assert_eq!(
            verb("wc=IBV_WC_RETRY_EXC_ERR,kind=recv"),
            VerbFault::Completion(WcStatus::RetryExceeded)
        );
        assert_eq!(
            (verb("qp_error=100"), verb("reg_mr=ENOMEM")),
            (VerbFault::QpError(100), VerbFault::Register(12))
        );
    }

    #[test]
    fn rules_are_separated_by_semicolons() {
        let all = rules("loss=1%; post_send=ENOMEM ;none;").unwrap();
        let all: Vec<String> = all.iter().map(Rule::to_string).collect();
        assert_eq!(all, ["loss=1%", "post_send=ENOMEM"]);
        assert_eq!(rules("none").unwrap(), []);
        assert!(rules(&"loss;".repeat(MAX_RULES + 1)).is_err());
    }

    #[test]
    fn mistakes_are_explained() {
        for (text, words) in [
            ("lose=1%", "unknown key \"lose\"; known are\npackets: loss=P"),
            ("loss=1", "100%"),
            ("loss=200%", "200%"),
            ("loss=x", "x"),
            ("loss=1%,loss=2%", "twice"),
            ("delay=5", "5ms"),
            ("delay", "no value"),
            ("dir=up", "tx, rx"),
            ("kind=syn", "send, write, read"),
            ("dir=tx", "not what happens"),
            ("wc=BAD", "LOC_LEN_ERR, LOC_QP_OP_ERR"),
            ("wc=WR_FLUSH_ERR,kind=ack", "send, write, read, atomic or recv"),
            ("post_send=EPERM", "ENOMEM, EINVAL"),
            ("post_send=ENOMEM,loss=1%", "two rules"),
            ("post_send=ENOMEM,reg_mr=ENOMEM", "two rules"),
            ("post_send=ENOMEM,dir=tx", "for packets"),
            ("loss=1%,p=1%", "p is for verbs"),
            ("rnr=1%,dir=tx", "received"),
            ("qp=0x1000000,loss", "#2"),
            ("nth=0,loss", "from 1"),
            ("nth=9-5,loss", "from 1"),
            ("qp_error=0", "from 1"),
            ("qp_error=5,nth=2", "itself"),
            ("reg_mr=ENOMEM,qp=#1", "no queue pair's"),
            ("queue=1M,loss", "rate"),
            ("rate=0", "loss=100%"),
            ("peer=example", "192.0.2.0/24"),
            ("burst=1%", "0.1%:5"),
            ("loss=1%,\ndup=1%", "control characters"),
            ("loss=1%,", "unknown key \"\""),
        ] {
            let error = text.parse::<Rule>().expect_err(text).to_string();
            assert!(
                error.starts_with(&format!("fault {text:?}: ")) && error.contains(words),
                "{error}"
            );
        }
    }
}
