//! A client that speaks RNBD by hand, over a session with a path from each of two hosts.
//!
//! It sends a write by both, as one that does not know whether the first has arrived; reads less than it has room for;
//! closes devices while requests are on their way; and sends what no client sends. One request by each path at a time, so both
//! take the same chunk. Or it has one path at a time, and moves to the other host while the server still works for it.

use std::collections::BTreeMap;

use rnbd::proto::{AccessMode, IoOp, MsgClose, MsgIo, MsgOpen, MsgSessInfo, Rw, parse_open_rsp, parse_sess_info_rsp};
use roce_verbs::Instant;
use rtrs::{
    Cx, Direction, IoError,
    client::{Buffer, Client as Rtrs, ConType, Output, SessionConfig, SessionId, Submission},
};
use zerocopy::IntoBytes;

use roce_sim::{Check, MS, Notes, Rng, SEC};

use crate::{
    client::{ClientEnv, honest},
    disk::{BLOCK, bytes, contents},
    ledger::{Change, Life},
};

/// Its number among the clients, which name their sessions by it.
const NUMBER: usize = 100;
/// Bytes of a buffer before it is read into.
const UNREAD: u8 = 0xa5;
/// Room for an answer.
const ANSWER: usize = 64;
/// How long a client waits for the server to take leave, nanoseconds.
const UNANSWERED: u64 = SEC;
/// `ENOTCONN`: the device is not open.
const NOT_OPEN: i32 = 107;

/// Plan of the client by hand.
#[derive(Clone, Debug)]
pub(crate) struct RawPlan {
    pub(crate) configs: [SessionConfig; 2],
    /// Its device, which nobody else uses.
    pub(crate) device: usize,
    /// Steps of a session.
    pub(crate) steps: u32,
    /// Use one path at a time.
    pub(crate) moves: bool,
}

/// A path: a whole session to its own host.
struct Path {
    rtrs: Rtrs,
    session: Option<SessionId>,
    is_up: bool,
    wants: Vec<Want>,
}

/// A request that is to be sent.
#[derive(Clone, Debug)]
struct Want {
    tag: u64,
    con: ConType,
    direction: Direction,
    header: Vec<u8>,
    /// Bytes to write, or of the memory that is read into.
    data: Vec<u8>,
}

/// Request that an answer belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Version,
    Open,
    Close,
    Read,
    Write,
    /// For a device that is closed, or is being closed.
    Late,
    /// By a path that is given up.
    Left,
    Nonsense,
}

#[derive(Clone, Copy, Debug)]
struct Asked {
    kind: Kind,
    begin: u64,
    lba: u64,
    count: u64,
}

/// A write under way.
#[derive(Clone, Copy, Debug)]
struct Writing {
    id: u64,
    begin: u64,
    lba: u64,
    count: u64,
    preflush: bool,
    fua: bool,
}

/// Stage of its program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Idle,
    Connecting,
    Asking,
    Working,
    Closing,
    Done,
}

/// Two hosts of the client by hand, and its program.
pub(crate) struct RawSide {
    plan: RawPlan,
    paths: [Path; 2],
    life: Life,
    stage: Stage,
    left: u32,
    blocks: u64,
    device: Option<u32>,
    closed: Option<u32>,
    asked: BTreeMap<u64, Asked>,
    writing: Option<Writing>,
    /// The paths that it has, or is to have.
    active: Vec<usize>,
    /// A path is given up then.
    leaves: Option<(usize, u64)>,
    /// Which was given up last, and when.
    gone: Option<(usize, u64)>,
    /// Write that was under way when the path was left.
    hot: Option<(u64, u64)>,
    next_tag: u64,
    again_at: u64,
    opened_at: u64,
    /// Sessions that are opened from here on are not lost.
    safe_from: Option<u64>,
    notes: Notes,
}

fn path() -> Path {
    Path {
        rtrs: Rtrs::new(),
        session: None,
        is_up: false,
        wants: Vec::new(),
    }
}

impl RawSide {
    pub(crate) fn new(plan: RawPlan, blocks: u64, notes: Notes) -> Self {
        Self {
            left: plan.steps,
            plan,
            paths: [path(), path()],
            life: Life {
                client: NUMBER,
                life: 0,
            },
            stage: Stage::Idle,
            blocks,
            device: None,
            closed: None,
            asked: BTreeMap::new(),
            writing: None,
            active: Vec::new(),
            leaves: None,
            gone: None,
            hot: None,
            next_tag: 0,
            again_at: 0,
            opened_at: 0,
            safe_from: None,
            notes,
        }
    }

    /// From here on its sessions must hold.
    pub(crate) fn be_safe_from(&mut self, at: u64) {
        self.safe_from.get_or_insert(at);
    }

    pub(crate) fn is_done(&self) -> bool {
        self.stage == Stage::Done
    }

    pub(crate) fn situation(&self) -> String {
        format!(
            "the raw client is {:?} with {:?} and {} steps to come",
            self.stage, self.asked, self.left
        )
    }

    pub(crate) fn rtrs(&self, path: usize) -> &Rtrs {
        &self.paths[path].rtrs
    }

    pub(crate) fn rtrs_mut(&mut self, path: usize) -> &mut Rtrs {
        &mut self.paths[path].rtrs
    }

    /// When it wants to go on at a path's host.
    pub(crate) fn app_at(&self, path: usize) -> Option<Instant> {
        let again = (self.stage == Stage::Idle).then_some(self.again_at);
        let leaves = self.leaves.filter(|(of, _)| *of == path).map(|(_, at)| at);
        again.into_iter().chain(leaves).min().map(Instant::from_nanos)
    }

    /// Everything that can be done now on a path's host. True: the other host is to have a turn soon.
    pub(crate) fn work(&mut self, cx: &mut Cx<'_>, path: usize, env: &mut ClientEnv<'_>) -> Result<bool, String> {
        let now = cx.now.as_nanos();
        while let Some(output) = self.paths[path].rtrs.poll_output() {
            self.on_output(cx, path, output, env)?;
        }
        if self.paths[path].session.is_none() && self.stage == Stage::Connecting && self.active.contains(&path) {
            self.open(cx, path, env.rng);
        }
        if self.leaves.take_if(|(of, at)| *of == path && *at <= now).is_some() {
            self.leave(cx, path);
        }
        if self.stage == Stage::Closing
            && let Some(session) = self.paths[path].session
        {
            self.paths[path].rtrs.close(cx, session);
        }
        if self.asked.is_empty() {
            self.go_on(now, env)?;
        }
        for want in core::mem::take(&mut self.paths[path].wants) {
            self.submit(cx, path, want, env)?;
        }
        let other = &self.paths[1 - path];
        let to_open = self.stage == Stage::Connecting && other.session.is_none() && self.active.contains(&(1 - path));
        let to_close = self.stage == Stage::Closing && other.session.is_some();
        Ok(to_open || to_close || !other.wants.is_empty())
    }

    /// Gives a path up for the other.
    fn leave(&mut self, cx: &mut Cx<'_>, path: usize) {
        if self.stage != Stage::Working {
            return;
        }
        if let Some(session) = self.paths[path].session {
            self.paths[path].rtrs.close(cx, session);
        }
        (self.gone, self.active) = (Some((path, cx.now.as_nanos())), Vec::new());
        self.stage = Stage::Connecting;
    }

    fn open(&mut self, cx: &mut Cx<'_>, path: usize, rng: &mut Rng) {
        let mut config = self.plan.configs[path].clone();
        config.name = format!("c{NUMBER}-{}", self.life.life);
        // Both draw the same session, and each a path of its own.
        let mut of_session = Rng::new(self.life.life.into(), 99);
        let mut own = Rng::from_seed(rng.seed());
        let mut first = true;
        let mut random = |out: &mut [u8]| {
            let rng = if core::mem::take(&mut first) {
                &mut of_session
            } else {
                &mut own
            };
            out.copy_from_slice(&rng.bytes(out.len()));
        };
        let mut cx = Cx {
            now: cx.now,
            provider: &mut *cx.provider,
            random: &mut random,
        };
        let opened = self.paths[path].rtrs.open(&mut cx, config);
        self.paths[path].session = Some(opened.expect("a possible configuration"));
    }

    fn on_output(&mut self, cx: &mut Cx<'_>, path: usize, output: Output, env: &mut ClientEnv<'_>) -> Check {
        let now = cx.now.as_nanos();
        if !matches!(output, Output::Done { .. }) {
            self.notes.print(now, || format!("raw client, path {path}: {output:?}"));
        }
        match output {
            Output::Opened(..) => self.paths[path].is_up = true,
            Output::OpenFailed(..) | Output::Closed(_) => {
                (self.paths[path].session, self.paths[path].is_up) = (None, false);
                match self.gone {
                    // The server has taken leave, so it knows that the path is gone.
                    Some((of, at)) if of == path && now < at + UNANSWERED => self.active = vec![1 - path],
                    _ => self.give_up(),
                }
            }
            Output::Down(_, why) => {
                honest(&why)?;
                if self.safe_from.is_some_and(|from| self.opened_at >= from) {
                    return Err(format!("the raw client's path {path} is lost: {why}"));
                }
                self.paths[path].is_up = false;
                self.give_up();
            }
            Output::Up(..) | Output::Path { .. } => {}
            Output::Done {
                session,
                tag,
                result,
                data,
            } => {
                let mut read = vec![0; data.as_ref().map_or(0, Buffer::len)];
                if let Some(buffer) = data {
                    let buffers = self.paths[path].rtrs.buffers(session);
                    let got = buffers.map(|buffers| buffers.read(&buffer, 0, &mut read));
                    got.ok_or("no buffers")?.map_err(|e| e.to_string())?;
                    self.paths[path].rtrs.give_buffer(session, buffer);
                }
                self.done(now, tag, result, &read, env)?;
            }
        }
        Ok(())
    }

    /// The session is to end; another follows.
    fn give_up(&mut self) {
        if !matches!(self.stage, Stage::Idle | Stage::Done) {
            self.stage = Stage::Closing;
        }
    }

    /// Nothing is under way.
    fn go_on(&mut self, now: u64, env: &mut ClientEnv<'_>) -> Check {
        let gone = self.paths.iter().all(|path| path.session.is_none());
        match self.stage {
            Stage::Closing if gone => {
                self.stage = Stage::Idle;
                self.again_at = now + env.rng.range(MS, 50 * MS);
                if let Some(writing) = self.writing.take() {
                    env.ledger.lose(now, writing.id, 0);
                }
                if self.left == 0 {
                    self.stage = Stage::Done;
                }
            }
            Stage::Idle if now >= self.again_at => {
                self.life.life += 1;
                self.opened_at = now;
                (self.device, self.closed, self.leaves, self.gone, self.hot) = (None, None, None, None, None);
                self.paths = [path(), path()];
                self.active = if self.plan.moves { vec![0] } else { vec![0, 1] };
                self.stage = Stage::Connecting;
            }
            Stage::Connecting if !self.active.is_empty() && self.active.iter().all(|path| self.paths[*path].is_up) => {
                if self.gone.take().is_some() {
                    env.coverage.note("moved to another host");
                    // The server takes no requests of a new path before it is done with those of the old.
                    env.ledger.session_over(now, self.life);
                    (self.device, self.closed, self.stage) = (None, None, Stage::Working);
                    self.step(now, env);
                    return Ok(());
                }
                self.stage = Stage::Asking;
                let m = MsgSessInfo::request(2);
                let path = self.active[0];
                self.ask(now, path, Kind::Version, m.as_bytes());
            }
            Stage::Working => self.step(now, env),
            _ => {}
        }
        Ok(())
    }

    fn push(&mut self, path: usize, want: Want, asked: Asked) {
        self.asked.insert(want.tag, asked);
        self.paths[path].wants.push(want);
    }

    fn tag(&mut self) -> u64 {
        self.next_tag += 1;
        self.next_tag
    }

    /// A message with an answer, over the service connection.
    fn ask(&mut self, begin: u64, path: usize, kind: Kind, header: &[u8]) {
        let want = Want {
            tag: self.tag(),
            con: ConType::Admin,
            direction: if kind == Kind::Close {
                Direction::Write
            } else {
                Direction::Read
            },
            header: header.to_vec(),
            data: vec![UNREAD; if kind == Kind::Close { 0 } else { ANSWER }],
        };
        let (lba, count) = (0, 0);
        self.push(
            path,
            want,
            Asked {
                kind,
                begin,
                lba,
                count,
            },
        );
    }

    fn step(&mut self, now: u64, env: &mut ClientEnv<'_>) {
        let first = self.active[0];
        let Some(device) = self.device else {
            let name = format!("d{}", self.plan.device);
            let m = MsgOpen::new(name.as_bytes(), AccessMode::ReadWrite);
            return self.ask(now, first, Kind::Open, m.expect("a possible name").as_bytes());
        };
        if self.left == 0 {
            self.stage = Stage::Closing;
            return;
        }
        self.left -= 1;
        let count = env.rng.range(1, 4.min(self.blocks));
        let lba = env.rng.range(0, self.blocks - count);
        if let Some((lba, count)) = self.hot.take() {
            // What comes late of the path that was left must not get into this.
            return self.write(now, device, lba, count, &[first], Kind::Write, env);
        }
        match env.rng.index(10) {
            0..5 if self.plan.moves => {
                self.write(now, device, lba, count, &[first], Kind::Left, env);
                self.hot = Some((lba, count));
                self.leaves = Some((first, now + env.rng.range(0, 3 * MS)));
            }
            0..5 => {
                env.coverage.note("write by two paths");
                self.write(now, device, lba, count, &[0, 1], Kind::Write, env);
            }
            5..7 => {
                env.coverage.note("short read");
                let more = env.rng.range(1, 4);
                self.read(now, device, lba, count, more);
            }
            7 => {
                env.coverage.note("nonsense");
                let mut header = env.rng.bytes(24);
                // A type that RNBD does not have.
                header[1] |= 0x80;
                self.ask(now, first, Kind::Nonsense, &header);
            }
            _ => {
                // A write that the close may overtake, and one that comes too late.
                env.coverage.note("close while a request is on its way");
                self.write(now, device, lba, count, &[first], Kind::Late, env);
                self.ask(now, first, Kind::Close, MsgClose::new(device).as_bytes());
                (self.device, self.closed) = (None, Some(device));
            }
        }
    }

    fn io(&mut self, device: u32, rw: Rw, lba: u64, count: u64, data: Vec<u8>) -> Want {
        let m = MsgIo::new(device, rw, lba, (count as usize * BLOCK) as u32);
        Want {
            tag: self.tag(),
            con: ConType::Io(0),
            direction: if rw.op == IoOp::Read {
                Direction::Read
            } else {
                Direction::Write
            },
            header: m.as_bytes().to_vec(),
            data,
        }
    }

    #[expect(clippy::too_many_arguments, reason = "a request as it is")]
    fn write(
        &mut self,
        begin: u64,
        device: u32,
        lba: u64,
        count: u64,
        paths: &[usize],
        kind: Kind,
        env: &mut ClientEnv<'_>,
    ) {
        let change = Change {
            device: self.plan.device,
            lba,
            count,
        };
        let (id, new) = env.ledger.write(begin, self.life, change);
        let (preflush, fua) = (env.rng.chance(0.3), env.rng.chance(0.3));
        let rw = Rw {
            preflush,
            fua,
            // A flush that brings data is the same.
            ..Rw::new(if preflush && env.rng.chance(0.5) {
                IoOp::Flush
            } else {
                IoOp::Write
            })
        };
        env.coverage.note_if("write with PREFLUSH", preflush);
        self.writing = Some(Writing {
            id,
            begin,
            lba,
            count,
            preflush,
            fua,
        });
        for path in paths {
            let want = self.io(device, rw, lba, count, bytes(&new));
            self.push(
                *path,
                want,
                Asked {
                    kind,
                    begin,
                    lba,
                    count,
                },
            );
        }
    }

    /// With room for some blocks more.
    fn read(&mut self, begin: u64, device: u32, lba: u64, count: u64, more: u64) {
        let room = vec![UNREAD; (count + more) as usize * BLOCK];
        let want = self.io(device, Rw::new(IoOp::Read), lba, count, room);
        let asked = Asked {
            kind: Kind::Read,
            begin,
            lba,
            count,
        };
        self.push(self.active[0], want, asked);
    }

    fn submit(&mut self, cx: &mut Cx<'_>, path: usize, want: Want, env: &mut ClientEnv<'_>) -> Check {
        let entry = &mut self.paths[path];
        let lost = Err(IoError::Path(rtrs::PathError::Closed));
        let Some(session) = entry.session else {
            return self.done(cx.now.as_nanos(), want.tag, lost, &[], env);
        };
        let data = match want.data.len() {
            0 => None,
            len => match entry.rtrs.take_buffer(cx, session, len) {
                Ok(buffer) => Some(buffer),
                Err(_) => return self.done(cx.now.as_nanos(), want.tag, lost, &[], env),
            },
        };
        if let (Some(buffer), Some(buffers)) = (&data, entry.rtrs.buffers(session)) {
            buffers.write(buffer, 0, &want.data).map_err(|e| e.to_string())?;
        }
        let submission = Submission {
            tag: want.tag,
            con: want.con,
            direction: want.direction,
            header: want.header[..].into(),
            data,
        };
        entry.rtrs.submit(cx, session, submission);
        Ok(())
    }

    /// A request has ended.
    fn done(&mut self, now: u64, tag: u64, result: Result<(), IoError>, read: &[u8], env: &mut ClientEnv<'_>) -> Check {
        let Some(asked) = self.asked.remove(&tag) else {
            return Err(format!("request {tag} of the raw client ended twice"));
        };
        self.notes.print(now, || format!("raw client: {asked:?} {result:?}"));
        match (asked.kind, result) {
            (Kind::Left, Err(IoError::Path(_))) => {
                if let Some(writing) = self.writing.take() {
                    env.ledger.lose(now, writing.id, 0);
                }
            }
            (_, Err(IoError::Path(_) | IoError::TooLong { .. })) => self.give_up(),
            (Kind::Version, Ok(())) => {
                let answer = parse_sess_info_rsp(read);
                answer.map_err(|_| "no sense in the version")?;
                self.stage = Stage::Working;
            }
            (Kind::Open, Ok(())) => {
                let id = parse_open_rsp(read).map_err(|_| "no sense in an open")?.device_id.get();
                if self.closed == Some(id) {
                    return Err(format!("device number {id} is used again at once"));
                }
                self.device = Some(id);
            }
            // A session that was lost may still have it open.
            (Kind::Open, Err(_)) if self.plan.moves => {}
            (Kind::Open, Err(_)) => self.give_up(),
            (Kind::Read, Ok(())) => self.check_read(now, asked, read, env)?,
            (Kind::Write, Ok(())) if self.asked.is_empty() => self.written(now, env)?,
            (Kind::Write | Kind::Close, Ok(())) | (Kind::Nonsense, Err(_)) => {}
            (Kind::Late | Kind::Left, Ok(())) => self.written(now, env)?,
            (Kind::Late, Err(IoError::Remote(NOT_OPEN))) => {
                // It has not been begun.
                if let Some(writing) = self.writing.take() {
                    env.ledger.end(now, writing.id, false, false);
                }
            }
            (kind, result) => return Err(format!("the raw client's {kind:?} ends with {result:?}")),
        }
        Ok(())
    }

    fn written(&mut self, now: u64, env: &mut ClientEnv<'_>) -> Check {
        let Some(w) = self.writing.take() else { return Ok(()) };
        let (device, disk) = (self.plan.device, &env.disks[self.plan.device]);
        env.ledger.end(now, w.id, true, w.fua);
        if w.preflush {
            env.ledger.devices[device].flushed(w.begin);
            env.ledger.check_durable(device, disk, 0, disk.blocks())?;
        }
        env.ledger.check_durable(device, disk, w.lba, w.count)
    }

    fn check_read(&self, now: u64, asked: Asked, read: &[u8], env: &mut ClientEnv<'_>) -> Check {
        let (data, rest) = read
            .split_at_checked(asked.count as usize * BLOCK)
            .ok_or("too little was read")?;
        if rest.iter().any(|b| *b != 0) {
            return Err("what is behind the data of a read is not zero".into());
        }
        let data = contents(data).ok_or("a torn block")?;
        env.ledger.devices[self.plan.device]
            .check(asked.begin, now, asked.lba, &data)
            .map_err(|e| format!("raw client: {e}"))
    }

    /// Whether nothing is left of its sessions.
    pub(crate) fn check_empty(&self) -> Check {
        let sessions: usize = self.paths.iter().map(|path| path.rtrs.sessions().count()).sum();
        match sessions + self.asked.len() {
            0 => Ok(()),
            _ => Err(format!("{} and {sessions} sessions", self.situation())),
        }
    }
}
