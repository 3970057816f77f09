//! Commands to the running clients and the server, and what they may be answered.

use std::time::{Duration, Instant};

use rand::{Rng, seq::IndexedRandom as _};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use crate::limits::{BASE, BEYOND};

const EPERM: i64 = 1;
const ENOENT: i64 = 2;
const EBUSY: i64 = 16;
const EEXIST: i64 = 17;
const ENOTCONN: i64 = 107;
const EALREADY: i64 = 114;

/// A path that was taken away comes back after this, at most.
const AWAY: Duration = Duration::from_secs(10);
/// Between two attempts to bring it back.
const AGAIN: Duration = Duration::from_secs(1);

/// Who gets a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Who {
    /// The client of a device.
    Client(usize),
    Server,
}

/// A command.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Command {
    Policy(&'static str),
    Disconnect(String),
    Reconnect(String),
    Remove(String),
    Add(String),
    /// One that is there.
    AddAgain(String),
    ResetStats(String),
    /// A device that is open.
    Remap,
    Resize(u64),
    /// A device that is there.
    MapAgain,
    /// With NBD clients.
    Unmap,
    List,
    /// Of the server, to choose among them.
    Sessions(ServerCommand),
    ClosePath(u64, u64),
    CloseSession(u64),
}

/// What is to be closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ServerCommand {
    Path,
    Session,
}

impl Command {
    /// For the summary.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Policy(_) => "policy",
            Self::Disconnect(_) => "disconnect",
            Self::Reconnect(_) => "reconnect",
            Self::Remove(_) => "remove_path",
            Self::Add(_) => "add_path",
            Self::AddAgain(_) => "add_path twice",
            Self::ResetStats(_) => "reset_path_stats",
            Self::Remap => "remap",
            Self::Resize(_) => "resize",
            Self::MapAgain => "map twice",
            Self::Unmap => "unmap",
            Self::List => "list",
            Self::Sessions(_) => "sessions",
            Self::ClosePath(..) => "close_path",
            Self::CloseSession(_) => "close_session",
        }
    }

    /// Whether paths go down by it.
    pub(crate) fn hurts(&self) -> bool {
        matches!(
            self,
            Self::Disconnect(_)
                | Self::Reconnect(_)
                | Self::Remove(_)
                | Self::Add(_)
                | Self::ClosePath(..)
                | Self::CloseSession(_)
        )
    }

    /// As a control socket takes it. `device`: that of the client that gets it.
    pub(crate) fn request(&self, device: &str) -> Value {
        match self {
            Self::Policy(policy) => json!({ "do": "policy", "policy": policy }),
            Self::Disconnect(path) => json!({ "do": "disconnect", "path": path }),
            Self::Reconnect(path) => json!({ "do": "reconnect", "path": path }),
            Self::Remove(path) => json!({ "do": "remove_path", "path": path }),
            Self::Add(path) | Self::AddAgain(path) => json!({ "do": "add_path", "path": path }),
            Self::ResetStats(path) => json!({ "do": "reset_path_stats", "path": path }),
            Self::Remap => json!({ "do": "remap", "device": device }),
            Self::Resize(bytes) => json!({ "do": "resize", "device": device, "sectors": bytes / 512 }),
            Self::MapAgain => json!({ "do": "map", "device": device }),
            Self::Unmap => json!({ "do": "unmap", "device": device }),
            Self::List => json!({ "do": "list" }),
            Self::Sessions(_) => json!({ "do": "sessions" }),
            Self::ClosePath(session, path) => json!({ "do": "close_path", "session": session, "path": path }),
            Self::CloseSession(session) => json!({ "do": "close_session", "session": session }),
        }
    }

    /// Whether it may be answered so. `out`: meanwhile the device was not open, or no path up.
    fn allows(&self, answer: &Value, out: bool) -> bool {
        let errno = answer["errno"].as_i64();
        match (self, errno) {
            (Self::AddAgain(_) | Self::MapAgain, errno) => errno == Some(EEXIST),
            (Self::Unmap, errno) => errno == Some(EBUSY),
            // It may have been opened again meanwhile.
            (Self::Remap, errno) => errno == Some(EALREADY) || out,
            (_, None) => true,
            (Self::Resize(_), Some(_)) => out,
            (Self::Disconnect(_) | Self::Remove(_), Some(EBUSY | ENOTCONN | EALREADY)) => true,
            (Self::Reconnect(_), Some(EBUSY | ENOTCONN)) => true,
            (Self::ClosePath(..) | Self::CloseSession(_), Some(ENOENT)) => true,
            // Connecting fails for many reasons, but not this one.
            (Self::Add(_), Some(errno)) => errno != EPERM,
            _ => false,
        }
    }
}

/// A command that waits for its answer.
struct Asked {
    who: Who,
    id: u64,
    command: Command,
    begun: Instant,
}

/// A path that a command has taken away.
struct Gone {
    device: usize,
    path: String,
    removed: bool,
    /// When it is asked for again.
    until: Instant,
}

/// What is to be sent.
pub(crate) type Order = (Who, Command);

/// Commands, their answers, and what has to be put right afterwards.
#[derive(Default)]
pub(crate) struct Steering {
    asked: Vec<Asked>,
    gone: Vec<Gone>,
}

impl Steering {
    /// Draws a command. `paths`: those of each device.
    pub(crate) fn draw(&self, rng: &mut ChaCha8Rng, paths: &[Vec<String>]) -> Option<Order> {
        if rng.random_bool(0.2) {
            let what = if rng.random() {
                ServerCommand::Path
            } else {
                ServerCommand::Session
            };
            return Some((Who::Server, Command::Sessions(what)));
        }
        let device = rng.random_range(0..paths.len());
        let path = paths[device].choose(rng)?.clone();
        // One after the other, so that it is known what each should be answered.
        if self.asked.iter().any(|asked| asked.who == Who::Client(device)) {
            return None;
        }
        let is_gone = self.gone.iter().any(|gone| gone.device == device && gone.path == path);
        let command = match rng.random_range(0..11) {
            0 => Command::Policy(["round-robin", "min-inflight", "min-latency"][rng.random_range(0..3)]),
            1 if !is_gone => Command::Disconnect(path),
            2 if !is_gone => Command::Reconnect(path),
            3 if !is_gone => Command::Remove(path),
            4 if !is_gone => Command::AddAgain(path),
            5 if !is_gone => Command::ResetStats(path),
            6 => Command::Remap,
            7 => Command::Resize(BASE + rng.random_range(0..=BEYOND / 4096) * 4096),
            8 => Command::Unmap,
            9 => Command::MapAgain,
            _ => Command::List,
        };
        Some((Who::Client(device), command))
    }

    /// A command was sent.
    pub(crate) fn sent(&mut self, now: Instant, (who, command): Order, id: u64) {
        self.asked.push(Asked {
            who,
            id,
            command,
            begun: now,
        });
    }

    /// A process has gone, and with it what it was asked and what was done to it.
    pub(crate) fn gone(&mut self, who: Who) {
        self.asked.retain(|asked| asked.who != who);
        self.gone.retain(|gone| Who::Client(gone.device) != who);
    }

    /// Whether paths are down because of commands.
    pub(crate) fn hurts(&self) -> bool {
        !self.gone.is_empty() || self.asked.iter().any(|asked| asked.command.hurts())
    }

    /// Paths that are to come back now. `all`: whatever was meant.
    pub(crate) fn due(&mut self, now: Instant, all: bool) -> Vec<Order> {
        let mut due = Vec::new();
        for gone in &mut self.gone {
            let who = Who::Client(gone.device);
            let busy = self.asked.iter().any(|asked| asked.who == who) || due.iter().any(|(other, _)| *other == who);
            if busy || !(all || gone.until <= now) {
                continue;
            }
            gone.until = now + AGAIN;
            let path = gone.path.clone();
            due.push((
                who,
                if gone.removed {
                    Command::Add(path)
                } else {
                    Command::Reconnect(path)
                },
            ));
        }
        due
    }

    /// Whether nothing is to be put right, and nobody waits for an answer.
    pub(crate) fn is_done(&self) -> bool {
        self.asked.is_empty() && self.gone.is_empty()
    }

    /// The oldest command that has no answer yet.
    pub(crate) fn waits_since(&self) -> Option<(Instant, String)> {
        let oldest = self.asked.iter().min_by_key(|asked| asked.begun)?;
        Some((oldest.begun, format!("{:?}: {:?}", oldest.who, oldest.command)))
    }

    /// An answer came; what is to be sent next. `out`: whether a device was out of reach since that time.
    pub(crate) fn answered(
        &mut self,
        rng: &mut ChaCha8Rng,
        who: Who,
        answer: &Value,
        out: impl Fn(usize, Instant) -> bool,
    ) -> Result<Option<Order>, String> {
        let now = Instant::now();
        let id = answer["id"].as_u64();
        let Some(at) = self
            .asked
            .iter()
            .position(|asked| asked.who == who && Some(asked.id) == id)
        else {
            return Err(format!("an answer that nobody waits for: {answer}"));
        };
        let Asked { command, begun, .. } = self.asked.swap_remove(at);
        let out = match who {
            Who::Client(device) => out(device, begun),
            Who::Server => false,
        };
        if !command.allows(answer, out) {
            return Err(format!("{who:?}: {command:?} was answered {answer}"));
        }
        let done = answer["ok"] == true;
        match (who, &command) {
            (Who::Client(device), Command::Disconnect(path) | Command::Remove(path)) if done => self.gone.push(Gone {
                device,
                path: path.clone(),
                removed: matches!(command, Command::Remove(_)),
                until: now + AWAY.mul_f64(rng.random()),
            }),
            (Who::Client(device), Command::Reconnect(path) | Command::Add(path)) => {
                let tried = matches!(command, Command::Reconnect(_)) && answer["errno"] == ENOTCONN;
                if done || tried {
                    self.gone.retain(|gone| !(gone.device == device && gone.path == *path));
                }
            }
            (Who::Server, Command::Sessions(what)) => return Ok(close(rng, *what, answer)),
            _ => {}
        }
        Ok(None)
    }
}

/// Closes one of the sessions that the server has, or one of its paths.
fn close(rng: &mut ChaCha8Rng, what: ServerCommand, answer: &Value) -> Option<Order> {
    let session = answer["sessions"].as_array()?.choose(rng)?;
    let number = session["session"].as_u64()?;
    let command = match what {
        ServerCommand::Session => Command::CloseSession(number),
        ServerCommand::Path => {
            let path = session["paths"].as_array()?.choose(rng)?;
            Command::ClosePath(number, path["path"].as_u64()?)
        }
    };
    Some((Who::Server, command))
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng as _;

    use super::*;

    fn answer(id: u64, errno: Option<i64>) -> Value {
        match errno {
            None => json!({ "event": "answer", "id": id, "ok": true }),
            Some(errno) => json!({ "event": "answer", "id": id, "ok": false, "errno": errno }),
        }
    }

    #[test]
    fn a_path_that_was_taken_away_is_asked_for_until_it_is_there() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut steering = Steering::default();
        let (who, now) = (Who::Client(0), Instant::now());
        let never = |_, _| false;
        steering.sent(now, (who, Command::Remove("a".into())), 1);
        assert!(!steering.is_done() && steering.due(now, true).is_empty());
        steering.answered(&mut rng, who, &answer(1, None), never).unwrap();
        let add = (who, Command::Add("a".into()));
        for (id, errno) in [(2, Some(110)), (3, None)] {
            assert!(!steering.is_done());
            assert_eq!(steering.due(now, true), std::slice::from_ref(&add));
            steering.sent(now, add.clone(), id);
            assert!(steering.due(now, true).is_empty());
            steering.answered(&mut rng, who, &answer(id, errno), never).unwrap();
        }
        assert!(steering.is_done());
        assert!(steering.answered(&mut rng, who, &answer(3, None), never).is_err());
    }

    #[test]
    fn wrong_answers_are_told_from_right_ones() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut judged = |command: Command, errno, out: bool| {
            let mut steering = Steering::default();
            steering.sent(Instant::now(), (Who::Client(0), command), 1);
            steering
                .answered(&mut rng, Who::Client(0), &answer(1, errno), |_, _| out)
                .is_ok()
        };
        assert!(judged(Command::Unmap, Some(EBUSY), false) && !judged(Command::Unmap, None, false));
        assert!(judged(Command::AddAgain("a".into()), Some(EEXIST), false));
        assert!(!judged(Command::AddAgain("a".into()), None, false));
        assert!(judged(Command::Remap, Some(ENOENT), true) && !judged(Command::Remap, None, false));
        assert!(!judged(Command::List, Some(EBUSY), true));
    }
}
