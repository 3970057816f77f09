//! The line protocol of `lab/verbs-agent.c`, and the byte pattern that both sides check.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use crate::Error;

/// Byte `i` of the pattern `seed` is byte `i % 8` of word `i / 8`.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let word = |i: u64| {
        let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(i);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)).to_le_bytes()
    };
    let mut bytes: Vec<u8> = (0..len.div_ceil(8) as u64).flat_map(word).collect();
    bytes.truncate(len);
    bytes
}

/// How long an agent is waited for: its guest may still boot.
const BOOT: Duration = Duration::from_secs(60);

/// A completion that the agent saw.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct AgentWc {
    pub(crate) wr_id: u64,
    pub(crate) status: u32,
    pub(crate) opcode: u32,
    pub(crate) byte_len: u32,
    pub(crate) imm: u32,
    pub(crate) invalidated: u32,
}

/// A buffer of the agent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AgentMem {
    pub(crate) id: u32,
    pub(crate) addr: u64,
    pub(crate) rkey: u32,
}

// Numbers of ibv_wr_opcode.
pub(crate) const WRITE: u32 = 0;
pub(crate) const WRITE_IMM: u32 = 1;
pub(crate) const SEND: u32 = 2;
pub(crate) const SEND_IMM: u32 = 3;
pub(crate) const READ: u32 = 4;
pub(crate) const CMP_SWAP: u32 = 5;
pub(crate) const FETCH_ADD: u32 = 6;
pub(crate) const SEND_INV: u32 = 9;
pub(crate) const ATOMIC_WRITE: u32 = 15;

/// The number of `IBV_QPS_ERR`.
pub(crate) const IN_ERROR: &str = "6";

/// Every right (`ibv_access_flags`).
pub(crate) const ALL_ACCESS: u32 = 0x1f;

/// A send work request of the agent; numbers as in `ibv_wr_opcode` and `ibv_send_flags`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AgentPost {
    pub(crate) wr_id: u64,
    pub(crate) op: u32,
    pub(crate) mem: u32,
    pub(crate) off: u64,
    pub(crate) len: u32,
    pub(crate) raddr: u64,
    pub(crate) rkey: u32,
    pub(crate) imm: u32,
    pub(crate) compare: u64,
    pub(crate) swap: u64,
    /// Added to the local key.
    pub(crate) spoil_lkey: u32,
}

/// A FLUSH of the agent; numbers as in the FETH (IBTA Annex A19).
#[derive(Clone, Copy, Debug)]
pub(crate) struct AgentFlush {
    pub(crate) placement: u8,
    pub(crate) selectivity: u8,
    pub(crate) addr: u64,
    pub(crate) len: u32,
    pub(crate) rkey: u32,
}

/// Arguments of what is done between two agents.
#[derive(clap::Args, Debug)]
pub(crate) struct Ends {
    /// The agent that posts the requests (TCP).
    #[arg(long)]
    requester: SocketAddr,
    /// The agent that answers them (TCP).
    #[arg(long)]
    responder: SocketAddr,
    /// Path MTU in bytes.
    #[arg(long, default_value_t = 1024)]
    pub(crate) mtu: u32,
}

impl Ends {
    /// Connects to the requester and to the responder.
    pub(crate) fn connect(&self) -> Result<[Agent; 2], Error> {
        Ok([Agent::connect(self.requester)?, Agent::connect(self.responder)?])
    }
}

/// A connection to a `verbs-agent`.
pub(crate) struct Agent {
    lines: BufReader<TcpStream>,
}

impl Agent {
    /// Connects, trying for [`BOOT`].
    pub(crate) fn connect(addr: SocketAddr) -> Result<Self, Error> {
        let until = Instant::now() + BOOT;
        loop {
            match TcpStream::connect_timeout(&addr, Duration::from_secs(2)) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    stream.set_read_timeout(Some(Duration::from_secs(120)))?;
                    return Ok(Self {
                        lines: BufReader::new(stream),
                    });
                }
                Err(e) if Instant::now() > until => return Err(format!("verbs-agent at {addr}: {e}").into()),
                Err(_) => std::thread::sleep(Duration::from_millis(300)),
            }
        }
    }

    fn line(&mut self) -> Result<String, Error> {
        let mut line = String::new();
        if self.lines.read_line(&mut line)? == 0 {
            return Err("verbs-agent closed the connection".into());
        }
        Ok(line.trim_end().to_owned())
    }

    fn send(&mut self, command: &str) -> Result<(), Error> {
        self.lines.get_mut().write_all(format!("{command}\n").as_bytes())?;
        Ok(())
    }

    /// Sends a command whose answer is one line; returns what follows "ok".
    pub(crate) fn call(&mut self, command: &str) -> Result<Vec<String>, Error> {
        self.send(command)?;
        let line = self.line()?;
        match line.strip_prefix("ok") {
            Some(rest) => Ok(rest.split_whitespace().map(str::to_owned).collect()),
            None => Err(format!("verbs-agent: {command}: {line}").into()),
        }
    }

    fn number<T: std::str::FromStr>(words: &[String], at: usize) -> Result<T, Error> {
        let word = words.get(at).ok_or("verbs-agent: answer too short")?;
        word.parse()
            .map_err(|_| format!("verbs-agent: {word} is not a number").into())
    }

    pub(crate) fn create(&mut self, send: u32, recv: u32, sges: u32, inline: u32) -> Result<(u32, String), Error> {
        let words = self.call(&format!("create {send} {recv} {sges} {inline}"))?;
        Ok((Self::number(&words, 0)?, words.get(1).cloned().unwrap_or_default()))
    }

    /// A queue pair whose peer has these rights.
    pub(crate) fn create_with(&mut self, send: u32, recv: u32, access: u32) -> Result<(u32, String), Error> {
        let words = self.call(&format!("create {send} {recv} 2 0 {access}"))?;
        Ok((Self::number(&words, 0)?, words.get(1).cloned().unwrap_or_default()))
    }

    pub(crate) fn mem(&mut self, len: usize, access: u32) -> Result<AgentMem, Error> {
        let words = self.call(&format!("mem {len} {access}"))?;
        Ok(AgentMem {
            id: Self::number(&words, 0)?,
            addr: Self::number(&words, 1)?,
            rkey: Self::number(&words, 2)?,
        })
    }

    /// What its device says it can do.
    pub(crate) fn caps(&mut self) -> Result<Caps, Error> {
        Caps::of(&self.call("caps")?)
    }

    /// A type-2 window; none where the device has no such thing.
    pub(crate) fn window(&mut self, mem: u32, off: u64, len: u64, access: u32) -> Result<Option<u32>, Error> {
        match self.call(&format!("mw {mem} {off} {len} {access}")) {
            Ok(words) => Self::number(&words, 0).map(Some),
            Err(e) if e.to_string().contains("alloc_mw: Operation not supported") => Ok(None),
            Err(e) => Err(e),
        }
    }

    pub(crate) fn word(&mut self, mem: u32, off: u64, set: Option<u64>) -> Result<u64, Error> {
        let set = set.map(|v| v.to_string()).unwrap_or_default();
        let words = self.call(&format!("word {mem} {off} {set}"))?;
        Self::number(&words, 0)
    }

    /// The next PSN that its queue pair sends, and that it takes.
    pub(crate) fn psns(&mut self) -> Result<(u32, u32), Error> {
        let words = self.call("psn")?;
        Ok((Self::number(&words, 0)?, Self::number(&words, 1)?))
    }

    pub(crate) fn post(&mut self, p: AgentPost) -> Result<(), Error> {
        const SIGNALED: u32 = 2;
        let AgentPost {
            wr_id,
            op,
            mem,
            off,
            len,
            raddr,
            rkey,
            imm,
            compare,
            swap,
            spoil_lkey,
        } = p;
        let text = format!(
            "post {wr_id} {op} {SIGNALED} {mem} {off} {len} {raddr} {rkey} {imm} {compare} {swap} {spoil_lkey}"
        );
        self.call(&text).map(drop)
    }

    pub(crate) fn flush(&mut self, wr_id: u64, f: AgentFlush) -> Result<(), Error> {
        let AgentFlush {
            placement,
            selectivity,
            addr,
            len,
            rkey,
        } = f;
        self.call(&format!("flush {wr_id} {placement} {selectivity} {addr} {len} {rkey}"))
            .map(drop)
    }

    /// The state of its queue pair, a number of `ibv_qp_state`, once it is the right one or has had time to become so.
    pub(crate) fn settled_state(&mut self, is_right: impl Fn(&str) -> bool) -> Result<String, Error> {
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            let state = self.call("state")?.into_iter().next().unwrap_or_default();
            if is_right(&state) || Instant::now() > until {
                return Ok(state);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    pub(crate) fn recv(&mut self, wr_id: u64, mem: u32, off: u64, len: u32) -> Result<(), Error> {
        self.call(&format!("recv {wr_id} {mem} {off} {len}")).map(drop)
    }

    /// Waits for `count` completions of the send (`'s'`) or receive (`'r'`) queue.
    pub(crate) fn poll(&mut self, which: char, count: usize, ms: u32) -> Result<Vec<AgentWc>, Error> {
        self.send(&format!("poll {which} {count} {ms}"))?;
        let mut all = Vec::new();
        loop {
            let line = self.line()?;
            if line == "end" {
                return Ok(all);
            }
            let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
            if words.first().map(String::as_str) != Some("wc") {
                return Err(format!("verbs-agent: poll: {line}").into());
            }
            all.push(AgentWc {
                wr_id: Self::number(&words, 1)?,
                status: Self::number(&words, 2)?,
                opcode: Self::number(&words, 3)?,
                byte_len: Self::number(&words, 4)?,
                imm: Self::number(&words, 5)?,
                invalidated: Self::number(&words, 7)?,
            });
        }
    }
}

/// What an agent's device says it can do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Caps {
    pub(crate) atomics: bool,
    /// Windows of type 2.
    pub(crate) windows: bool,
    /// READs and atomics in flight, either way.
    pub(crate) reads: u8,
}

impl Caps {
    /// With no more than so many READs.
    pub(crate) fn at_most(self, reads: u8) -> Self {
        Self {
            reads: self.reads.min(reads),
            ..self
        }
    }

    fn of(words: &[String]) -> Result<Self, Error> {
        let number = |name: &str| -> Result<u32, Error> {
            let value = words.iter().find_map(|w| w.strip_prefix(name)?.strip_prefix('='));
            let number = value.and_then(|v| v.parse().ok());
            number.ok_or_else(|| format!("verbs-agent: no {name} in {}", words.join(" ")).into())
        };
        Ok(Self {
            atomics: number("atomics")? > 0,
            windows: number("windows2")? > 0,
            reads: u8::try_from(number("reads")?.min(255))?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::Caps;

    #[test]
    fn capabilities_are_read() {
        let of = |text: &str| Caps::of(&text.split(' ').map(str::to_owned).collect::<Vec<_>>()).ok();
        let caps = |atomics, windows, reads| {
            Some(Caps {
                atomics,
                windows,
                reads,
            })
        };
        assert_eq!(
            of("fw=1.2 atomics=1 windows1=0 windows2=1 reads=128"),
            caps(true, true, 128)
        );
        assert_eq!(of("reads=1000 windows2=0 atomics=0"), caps(false, false, 255));
        assert_eq!(of("reads=8 windows2=0"), None);
    }
}
