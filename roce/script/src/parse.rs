//! Parser of scripts, line by line.

use roce_bth::{Class, ExtHeader, Opcode, Position, Service};
use roce_verbs::WcStatus;

use crate::{
    error::ScriptError,
    fields::Fields,
    kind::Kind,
    names,
    script::{Action, CompletionSpec, POSTS, PacketSpec, Post, PostOp, Script, Setup, Step},
    setup,
    value::{self, Place},
    words::{Word, Words},
};

/// Statements that are steps.
const STATEMENTS: &str = "qp, >, <, ignore, silence, after, at, timeout, restart, post, completion, event, memory, revoke, modify, state or #";
/// Largest number of steps.
const MAX_STEPS: usize = 100_000;

impl Script {
    /// Reads a script.
    ///
    /// # Errors
    /// The first error in the text, with its position.
    pub fn parse(text: &str) -> Result<Self, ScriptError> {
        let mut script = Self {
            setup: Setup::default(),
            steps: Vec::new(),
        };
        for (index, line) in text.lines().enumerate() {
            let number = index + 1;
            let mut words = Words::new(number, line);
            let first = words.word();
            let action = match first.text {
                "" => continue,
                "qp" if !script.steps.is_empty() => {
                    return Err(first.error("a step: qp lines come before the first one"));
                }
                "qp" => {
                    setup::parse(&mut script.setup, &mut words)?;
                    continue;
                }
                _ => step(first, &mut words, &script.setup)?,
            };
            words.end()?;
            if script.steps.len() == MAX_STEPS {
                return Err(first.error(format!("at most {MAX_STEPS} steps")));
            }
            script.steps.push(Step {
                line: number,
                text: line.split(" #").next().unwrap_or_default().trim().to_owned(),
                action,
            });
        }
        Ok(script)
    }
}

fn step(first: Word<'_>, words: &mut Words<'_>, setup: &Setup) -> Result<Action, ScriptError> {
    let regions = &setup.names;
    Ok(match first.text {
        ">" => Action::Send(packet(words, setup, true)?),
        "<" => Action::Expect(packet(words, setup, false)?),
        "ignore" if words.clone().word().text == "none" => {
            words.word();
            Action::Ignore(None)
        }
        "ignore" => Action::Ignore(Some(packet(words, setup, false)?)),
        "restart" => Action::Restart,
        "silence" => Action::Silence(value::duration(words.word())?),
        "after" => Action::After(value::duration(words.word())?),
        "at" => Action::At(value::duration(words.word())?),
        "timeout" => Action::Timeout(value::duration(words.word())?),
        "post" => Action::Post(post(words, regions)?),
        "completion" => completion(words, regions)?,
        "event" => {
            let word = words.word();
            let number = names::lookup(&names::EVENTS, word.text);
            match (word.text, number) {
                ("none", _) => Action::Event(None),
                (_, Some(number)) => Action::Event(Some(number)),
                _ => return Err(word.error(format!("none, {}", names::list(&names::EVENTS)))),
            }
        }
        "memory" => {
            let word = words.word();
            let at = value::place(word, regions, 64)?;
            if at.region.is_none() {
                return Err(word.error("REGION+OFFSET"));
            }
            let word = words.word();
            match word.assignment() {
                Some((key, data)) if key.text == "payload" => {
                    let bytes = value::data(data, regions)?;
                    if bytes.source.is_none() {
                        return Err(data.error("LEN:psnN, LEN:REGION+OFFSET, LEN:0xNN or hex:DIGITS"));
                    }
                    Action::Memory(at, bytes)
                }
                _ => return Err(word.error("payload=DATA")),
            }
        }
        "revoke" => Action::Revoke(value::region(words.word(), regions)?),
        "modify" => Action::Modify(value::state(words.word())?),
        "state" => Action::State(value::state(words.word())?),
        _ => return Err(first.error(STATEMENTS)),
    })
}

fn packet(words: &mut Words<'_>, setup: &Setup, sent: bool) -> Result<PacketSpec, ScriptError> {
    let service = setup.qp_type.service();
    let name = words.word();
    let kind = match (name.text, name.assignment()) {
        ("ack", _) if service == Service::Rc => Kind::Ack,
        ("rnr", _) => Kind::Rnr,
        ("nak", _) => {
            let code = words.word();
            let found = names::lookup(&names::NAKS, code.text);
            Kind::Nak(found.ok_or_else(|| code.error(names::list(&names::NAKS)))?)
        }
        ("raw", _) if sent => Kind::Raw(value::hex(words.word())?),
        ("*", _) if !sent => Kind::Any,
        (_, Some((key, code))) if key.text == "opcode" && sent => Kind::Code(value::byte(code, 8)?),
        (text, _) => match names::opcode(text, service) {
            Some(opcode) => Kind::Opcode(opcode),
            None => {
                let other = if sent { "opcode=CODE, raw HEX" } else { "*" };
                return Err(name.error(format!("a packet: {}, {other}", names::packets(service))));
            }
        },
    };
    let fields = Fields::parse(words, &kind, sent, &setup.names)?;
    if sent {
        require(&kind, &fields, words)?;
    }
    Ok(PacketSpec { kind, fields })
}

/// Checks that a packet to send has all fields without a usual value.
fn require(kind: &Kind, fields: &Fields, words: &mut Words<'_>) -> Result<(), ScriptError> {
    let info = kind.opcode().map(Opcode::info);
    let has = |header| info.is_some_and(|info| info.has(header));
    let named = has(ExtHeader::Reth) || has(ExtHeader::AtomicEth);
    // A packet that is all of its message is as long as that.
    let whole = info
        .is_some_and(|info| matches!(info.class, Class::Write | Class::AtomicWrite) && info.position == Position::Only);
    let missing = [
        ("psn", fields.psn.is_none() && !matches!(kind, Kind::Raw(_))),
        ("va", named && fields.va.is_none()),
        ("rkey", named && fields.rkey.is_none()),
        ("len", has(ExtHeader::Reth) && !whole && fields.len.is_none()),
        ("imm", has(ExtHeader::Imm) && fields.imm.is_none()),
        ("inv", has(ExtHeader::Ieth) && fields.inv.is_none()),
    ];
    match missing.iter().find(|(_, is_missing)| *is_missing) {
        Some((name, _)) => Err(words.word().error(format!("{name}=VALUE"))),
        None => Ok(()),
    }
}

fn post(words: &mut Words<'_>, regions: &[String]) -> Result<Post, ScriptError> {
    let word = words.word();
    let op = names::lookup(&POSTS, word.text).ok_or_else(|| word.error(names::list(&POSTS)))?;
    let mut post = Post {
        op,
        id: None,
        len: 0,
        local: Place {
            region: Some(0),
            offset: 0,
        },
        va: 0,
        rkey: 0,
        imm: None,
        inv: None,
        swap: 0,
        compare: 0,
        add: 0,
        solicited: false,
        fence: false,
    };
    let is_rdma = matches!(
        op,
        PostOp::Write | PostOp::Read | PostOp::CompareSwap | PostOp::FetchAdd
    );
    let is_send = matches!(op, PostOp::Send | PostOp::Write);
    for word in words.by_ref() {
        let (key, value) = word
            .assignment()
            .unwrap_or((word, word.part("", word.text.chars().count())));
        match key.text {
            "se" if is_send && value.text.is_empty() => post.solicited = true,
            "fence" if op != PostOp::Recv && value.text.is_empty() => post.fence = true,
            "id" => post.id = Some(value::number(value, 64)?),
            "len" => post.len = value::bytes(value)?,
            "local" if op != PostOp::Recv => {
                post.local = value::place(value, regions, 64)?;
                if post.local.region.is_none() {
                    return Err(value.error("REGION+OFFSET"));
                }
            }
            "va" if is_rdma => post.va = value::number(value, 64)?,
            "rkey" if is_rdma => post.rkey = value::small(value, 32)?,
            "imm" if is_send => post.imm = Some(value::small(value, 32)?),
            "inv" if op == PostOp::Send => post.inv = Some(value::small(value, 32)?),
            "swap" if op == PostOp::CompareSwap => post.swap = value::number(value, 64)?,
            "compare" if op == PostOp::CompareSwap => post.compare = value::number(value, 64)?,
            "add" if op == PostOp::FetchAdd => post.add = value::number(value, 64)?,
            _ => return Err(key.error(post_fields(op))),
        }
    }
    if matches!(op, PostOp::CompareSwap | PostOp::FetchAdd) {
        post.len = 8;
    }
    Ok(post)
}

const fn post_fields(op: PostOp) -> &'static str {
    match op {
        PostOp::Recv => "id, len",
        PostOp::Send => "id, len, local, imm, inv, se, fence",
        PostOp::Write => "id, len, local, va, rkey, imm, se, fence",
        PostOp::Read => "id, len, local, va, rkey, fence",
        PostOp::CompareSwap => "id, local, va, rkey, compare, swap, fence",
        PostOp::FetchAdd => "id, local, va, rkey, add, fence",
    }
}

fn completion(words: &mut Words<'_>, regions: &[String]) -> Result<Action, ScriptError> {
    let word = words.word();
    let mut spec = CompletionSpec {
        is_recv: word.text == "recv",
        id: None,
        status: WcStatus::Success,
        len: None,
        imm: None,
        payload: None,
    };
    match word.text {
        "none" => return Ok(Action::NoCompletion),
        "send" | "recv" => {}
        _ => return Err(word.error("send, recv or none")),
    }
    for word in words.by_ref() {
        let Some((key, value)) = word.assignment() else {
            return Err(word.error("id=, status=, len=, imm= or payload="));
        };
        match key.text {
            "id" => spec.id = Some(value::number(value, 64)?),
            "status" => {
                let expected = || names::list(WcStatus::NAMED);
                spec.status = names::status(value.text).ok_or_else(|| value.error(expected()))?;
            }
            "len" => spec.len = Some(value::small(value, 32)?),
            "imm" => spec.imm = Some(value::small(value, 32)?),
            "payload" if spec.is_recv => spec.payload = Some(value::data(value, regions)?),
            _ => return Err(key.error("id, status, len, imm, and for recv payload")),
        }
    }
    Ok(Action::Complete(spec))
}
