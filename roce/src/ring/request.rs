//! Requests for the ring of a running process, and the protocol.
//!
//! A request is one line: `write LAST` or `send LAST`, with `on-bad ` in front to wait for trouble; LAST is in bytes. The answer is `ok` or
//! `error` and a line of text. To `write` the text is the number of packets and the path. After `ok` of `send` comes a pcap file in chunks,
//! each behind its length (32 bits, little-endian); the last has length 0, and the number of packets follows (64 bits).

use std::{
    io::{self, BufRead, BufReader, ErrorKind, Read, Write},
    os::unix::net::UnixStream,
    path::PathBuf,
};

use roce_net::process_socket::{ProcessName, ProcessSockets};

/// Sockets of processes that keep a ring.
pub(super) const SOCKETS: ProcessSockets = ProcessSockets::new("ferroce-ring");
/// Longest line, bytes: a path has 4096.
const MAX_LINE: u64 = 8 << 10;
/// Longest chunk, bytes.
const MAX_CHUNK: usize = 1 << 20;
const ON_BAD: &str = "on-bad ";

/// Destination of a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum To {
    /// File of the process that has it.
    File,
    /// The process that asks.
    Peer,
}

/// Request to a process that keeps a [`Ring`](super::Ring).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RingRequest {
    /// Wait until something goes wrong there.
    pub on_bad: bool,
    /// The last bytes of the ring alone.
    pub last: u64,
}

impl Default for RingRequest {
    fn default() -> Self {
        Self {
            on_bad: false,
            last: u64::MAX,
        }
    }
}

/// Capture that a process has written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Sent {
    /// Number of packets.
    pub packets: u64,
    /// File that the process has made; `None`: it was sent here.
    pub path: Option<PathBuf>,
}

fn invalid() -> io::Error {
    io::Error::new(ErrorKind::InvalidData, "the answer can't be understood")
}

/// Reads a line of at most 8 KiB.
fn line(from: &mut impl BufRead) -> io::Result<String> {
    let mut line = String::new();
    from.take(MAX_LINE).read_line(&mut line)?;
    match line.pop() {
        Some('\n') => Ok(line),
        _ => Err(ErrorKind::UnexpectedEof.into()),
    }
}

impl RingRequest {
    /// Lists the processes of this network namespace that keep a ring, of all users.
    ///
    /// # Errors
    /// When the system's list of sockets can't be read.
    pub fn processes() -> io::Result<Vec<ProcessName>> {
        SOCKETS.all()
    }

    /// Has a process write its ring to a new file, which it names.
    ///
    /// # Errors
    /// `PermissionDenied` when the process is another user's, [`ErrorKind::Other`] with the text of a refusal, and those of the connection.
    pub fn write(&self, process: &ProcessName) -> io::Result<Sent> {
        let (_, text) = self.ask(process, To::File)?;
        let (packets, path) = text.split_once(' ').ok_or_else(invalid)?;
        Ok(Sent {
            packets: packets.parse().map_err(|_| invalid())?,
            path: Some(path.into()),
        })
    }

    /// Has a process send its ring, and writes it to `out` as a pcap file.
    ///
    /// # Errors
    /// As [`write`](Self::write), and those of `out`. What came before is in `out` then.
    pub fn read(&self, process: &ProcessName, out: &mut dyn Write) -> io::Result<Sent> {
        let (mut from, _) = self.ask(process, To::Peer)?;
        let mut chunk = Vec::new();
        loop {
            let mut len = [0; 4];
            from.read_exact(&mut len)?;
            match u32::from_le_bytes(len) as usize {
                0 => break,
                len if len <= MAX_CHUNK => chunk.resize(len, 0),
                _ => return Err(invalid()),
            }
            from.read_exact(&mut chunk)?;
            out.write_all(&chunk)?;
        }
        out.flush()?;
        let mut packets = [0; 8];
        from.read_exact(&mut packets)?;
        Ok(Sent {
            packets: u64::from_le_bytes(packets),
            path: None,
        })
    }

    /// Makes a request. Returns the connection and the text of the answer.
    fn ask(&self, process: &ProcessName, to: To) -> io::Result<(BufReader<UnixStream>, String)> {
        let mut stream = SOCKETS.connect(process)?;
        // A capture on trouble comes when it comes; others when the process has written what was asked for before.
        stream.set_read_timeout(None)?;
        stream.write_all(self.line(to).as_bytes())?;
        let mut from = BufReader::new(stream);
        let verdict = line(&mut from)?;
        let text = line(&mut from)?;
        match &*verdict {
            "ok" => Ok((from, text)),
            "error" => Err(io::Error::other(text)),
            _ => Err(invalid()),
        }
    }

    fn line(&self, to: To) -> String {
        let on_bad = if self.on_bad { ON_BAD } else { "" };
        let verb = match to {
            To::File => "write",
            To::Peer => "send",
        };
        format!("{on_bad}{verb} {}\n", self.last)
    }

    fn parse(line: &str) -> Option<(Self, To)> {
        let (on_bad, rest) = match line.strip_prefix(ON_BAD) {
            Some(rest) => (true, rest),
            None => (false, line),
        };
        let (verb, last) = rest.split_once(' ')?;
        let to = match verb {
            "write" => To::File,
            "send" => To::Peer,
            _ => return None,
        };
        let last = last.parse().ok()?;
        Some((Self { on_bad, last }, to))
    }

    /// Takes a request from a connection.
    ///
    /// # Errors
    /// When it is another user's, sends nothing within 2 s, or something else.
    pub(super) fn receive(stream: &UnixStream) -> io::Result<(Self, To)> {
        SOCKETS.admit(stream)?;
        let line = line(&mut BufReader::new(stream))?;
        Self::parse(&line).ok_or_else(|| io::Error::new(ErrorKind::InvalidData, format!("unknown request {line:?}")))
    }
}

/// Answers a request.
///
/// # Errors
/// When the peer takes nothing for 2 s.
pub(super) fn answer(mut stream: &UnixStream, verdict: &str, text: &str) -> io::Result<()> {
    let text = text.replace('\n', " ");
    stream.write_all(format!("{verdict}\n{text}\n").as_bytes())
}

/// Writes what is sent, in chunks.
pub(super) struct Chunks<W: Write>(pub(super) W);

impl<W: Write> Write for Chunks<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let part = &bytes[..bytes.len().min(MAX_CHUNK)];
        if !part.is_empty() {
            self.0.write_all(&(part.len() as u32).to_le_bytes())?;
            self.0.write_all(part)?;
        }
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl<W: Write> Chunks<W> {
    /// Writes the end.
    ///
    /// # Errors
    /// The underlying writer's.
    pub(super) fn finish(&mut self, packets: u64) -> io::Result<()> {
        self.0.write_all(&0u32.to_le_bytes())?;
        self.0.write_all(&packets.to_le_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_as_they_are_written() {
        for (on_bad, last, to) in [(false, u64::MAX, To::File), (true, 5, To::Peer)] {
            let request = RingRequest { on_bad, last };
            let line = request.line(to);
            assert_eq!(RingRequest::parse(line.trim_end()), Some((request, to)));
        }
        for bad in [
            "",
            "write",
            "write x",
            "on-bad",
            "on-bad on-bad write 1",
            "erase 1",
            "write -1",
        ] {
            assert_eq!(RingRequest::parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn lines_are_bounded() {
        assert_eq!(line(&mut &b"ok\nmore"[..]).unwrap(), "ok");
        assert!(line(&mut &b"cut off"[..]).is_err());
        assert!(line(&mut &vec![b'x'; 1 << 20][..]).is_err());
    }
}
