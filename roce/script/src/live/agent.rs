//! Client of the agent on a live host: `verbs-agent` (tests/interop/lab/verbs-agent.c), which answers lines over TCP.
//!
//! Answers are not trusted: they are bounded, and a wrong one is an error.

use core::{fmt::Display, net::SocketAddr, str::FromStr, time::Duration};
use std::{
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
};

use roce_verbs::WcStatus;

use crate::host::{Completed, Stop};

/// Time for a connection to the agent.
const CONNECT: Duration = Duration::from_secs(10);
/// Longest time that an answer takes. rdma_rxe waits 50 s for memory that is in use.
const ANSWER: Duration = Duration::from_secs(120);
/// Longest line of an answer, bytes: the digits of a region.
const MAX_LINE: u64 = 2 * crate::value::MAX_BYTES + 64;

/// Connection to an agent.
#[derive(Debug)]
pub(crate) struct Agent {
    lines: BufReader<TcpStream>,
}

/// Words of an answer behind `ok`.
#[derive(Debug)]
pub(crate) struct Answer(Vec<String>);

impl Answer {
    /// Returns a word.
    pub(crate) fn word<T: FromStr>(&self, at: usize) -> Result<T, Stop> {
        let word = self.0.get(at).and_then(|word| word.parse().ok());
        word.ok_or_else(|| wrong(self.0.join(" ")))
    }

    /// Returns the number `NAME=` names; 0 without one.
    pub(crate) fn named(&self, name: &str) -> u32 {
        let value = |word: &String| word.strip_prefix(name)?.strip_prefix('=')?.parse().ok();
        self.0.iter().find_map(value).unwrap_or(0)
    }
}

/// Returns the status with a number of `ibv_wc_status`.
fn status(number: u32) -> Option<WcStatus> {
    let known = WcStatus::NAMED.iter().map(|(_, status)| *status);
    known.into_iter().find(|status| *status as u32 == number)
}

/// Returns that the agent's answer is not one of the protocol.
fn wrong(line: impl Display) -> Stop {
    Stop::NotRun(format!("the agent answers {line:.80}, which is not its protocol"))
}

fn broken(e: &io::Error) -> Stop {
    Stop::NotRun(format!("the connection to the agent failed: {e}"))
}

impl Agent {
    /// Connects.
    ///
    /// # Errors
    /// When nobody listens there.
    pub(crate) fn connect(addr: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&addr, CONNECT)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(ANSWER))?;
        Ok(Self {
            lines: BufReader::new(stream),
        })
    }

    fn line(&mut self) -> Result<String, Stop> {
        let mut line = String::new();
        let read = (&mut self.lines).take(MAX_LINE).read_line(&mut line);
        match read {
            Ok(_) if line.ends_with('\n') => Ok(line.trim_end().to_owned()),
            Ok(0) => Err(broken(&io::ErrorKind::UnexpectedEof.into())),
            Ok(_) => Err(wrong(line)),
            Err(e) => Err(broken(&e)),
        }
    }

    fn send(&mut self, command: &str) -> Result<(), Stop> {
        let sent = self.lines.get_mut().write_all(format!("{command}\n").as_bytes());
        sent.map_err(|e| broken(&e))
    }

    /// Gives a command whose answer is a line. A refusal is a mismatch: the host does not do it.
    pub(crate) fn call(&mut self, command: &str) -> Result<Answer, Stop> {
        self.send(command)?;
        let line = self.line()?;
        let mut words = line.split_whitespace().map(str::to_owned);
        match words.next().as_deref() {
            Some("ok") => Ok(Answer(words.collect())),
            Some("err") => Err(Stop::Mismatch(words.collect::<Vec<_>>().join(" "))),
            _ => Err(wrong(line)),
        }
    }

    /// Takes a completion of a queue. `None`: there is none within this time.
    pub(crate) fn poll(&mut self, is_recv: bool, time: Duration) -> Result<Option<Completed>, Stop> {
        const WITH_IMM: u32 = 2;
        let queue = if is_recv { 'r' } else { 's' };
        self.send(&format!("poll {queue} 1 {}", time.as_millis()))?;
        let mut found = None;
        loop {
            let line = self.line()?;
            let mut words = line.split_whitespace().map(str::to_owned);
            match words.next().as_deref() {
                Some("end") => return Ok(found),
                Some("wc") if found.is_none() => {
                    let words = Answer(words.collect());
                    let flags: u32 = words.word(5)?;
                    found = Some(Completed {
                        wr_id: words.word(0)?,
                        status: status(words.word(1)?).ok_or_else(|| wrong(&line))?,
                        byte_len: words.word(3)?,
                        imm: (flags & WITH_IMM != 0).then(|| words.word(4)).transpose()?,
                    });
                }
                _ => return Err(wrong(line)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{net::TcpListener, thread};

    use super::*;

    /// Connects to an agent that answers a command with this text.
    fn answering(text: &'static str) -> Agent {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let addr = listener.local_addr().expect("an address");
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client");
            let mut line = String::new();
            BufReader::new(&stream).read_line(&mut line).expect("a command");
            stream.write_all(text.as_bytes()).expect("an answer is sent");
        });
        Agent::connect(addr).expect("a connection")
    }

    #[test]
    fn answers_are_words_refusals_or_wrong() {
        let answer = answering("ok 17 ::ffff:192.0.2.7 flush=1\n")
            .call("create")
            .expect("an answer");
        assert_eq!(answer.word::<u32>(0), Ok(17));
        assert!(answer.word::<u32>(1).is_err() && answer.word::<u32>(9).is_err());
        assert_eq!((answer.named("flush"), answer.named("atomics")), (1, 0));
        let refused = answering("err reg_mr: Invalid argument\n").call("mem");
        assert!(matches!(refused, Err(Stop::Mismatch(text)) if text == "reg_mr: Invalid argument"));
        for text in ["", "ok", "HTTP/1.1 400 Bad Request\n", "\n"] {
            assert!(
                matches!(answering(text).call("state"), Err(Stop::NotRun(_))),
                "{text:?}"
            );
        }
    }

    #[test]
    fn a_completion_has_a_known_status_and_all_its_numbers() {
        let poll = |text| answering(text).poll(true, Duration::from_millis(1));
        let expected = Completed {
            wr_id: 3,
            status: WcStatus::LocalLengthError,
            byte_len: 8,
            imm: Some(9),
        };
        assert_eq!(poll("wc 3 1 128 8 9 2 0\nend\n"), Ok(Some(expected)));
        assert_eq!(poll("end\n"), Ok(None));
        for text in [
            "wc 3 99 128 8 9 2 0\nend\n",
            "wc 3\nend\n",
            "wc 3 1 128 8 9 2 0\nwc 4 1 128 8 9 2 0\nend\n",
            "ok\n",
        ] {
            assert!(matches!(poll(text), Err(Stop::NotRun(_))), "{text:?}");
        }
    }
}
