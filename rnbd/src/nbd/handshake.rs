//! Fixed newstyle negotiation.

use std::{
    io::{self, Write},
    os::unix::net::UnixStream,
    sync::Arc,
};

use super::{
    NbdExport,
    input::{Input, Wait},
    proto::{self, info, opt, rep, tx},
};
use crate::block::{BlockDevice, Geometry};

/// Longest option that is read; longer ones are skipped and refused.
const MAX_OPTION: u32 = 16 << 10;
/// Options longer than this end the connection.
const ABSURD_OPTION: u32 = 1 << 20;

/// What the export can do, as transmission flags.
pub(crate) fn transmission_flags(g: &Geometry) -> u16 {
    let mut f = tx::HAS_FLAGS | tx::SEND_FLUSH | tx::CAN_MULTI_CONN;
    if g.read_only {
        return f | tx::READ_ONLY;
    }
    f |= tx::SEND_WRITE_ZEROES;
    // Without a write cache every write is as good as forced.
    if g.fua || !g.write_cache {
        f |= tx::SEND_FUA;
    }
    if g.max_discard > 0 {
        f |= tx::SEND_TRIM;
    }
    f
}

/// Negotiates; `None` when the client only asked questions, or left.
pub(crate) fn negotiate<D: BlockDevice>(
    stream: &UnixStream,
    input: &mut Input<'_>,
    exports: &[NbdExport<D>],
    wait: Wait,
) -> io::Result<Option<Arc<D>>> {
    let mut hello = Vec::with_capacity(18);
    hello.extend(proto::INIT_MAGIC.to_be_bytes());
    hello.extend(proto::OPT_MAGIC.to_be_bytes());
    hello.extend((proto::FLAG_FIXED_NEWSTYLE | proto::FLAG_NO_ZEROES).to_be_bytes());
    send(stream, &hello)?;

    let mut flags = [0; 4];
    input.read_exact(&mut flags, wait)?;
    let flags = u32::from_be_bytes(flags);
    let known = u32::from(proto::FLAG_FIXED_NEWSTYLE | proto::FLAG_NO_ZEROES);
    if flags & !known != 0 {
        return Err(bad(format!("unknown client flags {flags:#x}")));
    }
    let mut session = Session {
        stream,
        exports,
        zeroes: flags & u32::from(proto::FLAG_NO_ZEROES) == 0,
    };
    loop {
        let mut head = [0; 16];
        if !input.read_exact_or_end(&mut head, wait)? {
            return Ok(None);
        }
        let [m0, m1, m2, m3, m4, m5, m6, m7, o0, o1, o2, o3, l0, l1, l2, l3] = head;
        if u64::from_be_bytes([m0, m1, m2, m3, m4, m5, m6, m7]) != proto::OPT_MAGIC {
            return Err(bad("option without its magic number"));
        }
        let option = u32::from_be_bytes([o0, o1, o2, o3]);
        let len = u32::from_be_bytes([l0, l1, l2, l3]);
        if len > ABSURD_OPTION || (option == opt::EXPORT_NAME && len > MAX_OPTION) {
            return Err(bad(format!("option {option} of {len} bytes")));
        }
        if len > MAX_OPTION {
            input.skip(u64::from(len), wait)?;
            session.reply(option, rep::ERR_TOO_BIG, b"")?;
            continue;
        }
        let mut data = vec![0; len as usize];
        input.read_exact(&mut data, wait)?;
        match session.option(option, &data)? {
            Next::Option => {}
            Next::Transmit(d) => return Ok(Some(d)),
            Next::End => return Ok(None),
        }
    }
}

fn bad(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

fn send(mut stream: &UnixStream, data: &[u8]) -> io::Result<()> {
    stream.write_all(data)
}

enum Next<D> {
    Option,
    Transmit(Arc<D>),
    End,
}

struct Session<'a, D> {
    stream: &'a UnixStream,
    exports: &'a [NbdExport<D>],
    /// The client wants 124 zeroes after an EXPORT_NAME.
    zeroes: bool,
}

impl<D: BlockDevice> Session<'_, D> {
    /// The export of that name; the empty name is the first one.
    fn find(&self, name: &[u8]) -> Option<&NbdExport<D>> {
        self.exports
            .iter()
            .find(|e| e.name.as_bytes() == name)
            .or_else(|| if name.is_empty() { self.exports.first() } else { None })
    }

    fn reply(&self, option: u32, kind: u32, data: &[u8]) -> io::Result<()> {
        let mut b = Vec::with_capacity(20 + data.len());
        b.extend(proto::OPT_REPLY_MAGIC.to_be_bytes());
        b.extend(option.to_be_bytes());
        b.extend(kind.to_be_bytes());
        b.extend((data.len() as u32).to_be_bytes());
        b.extend(data);
        send(self.stream, &b)
    }

    fn option(&mut self, option: u32, data: &[u8]) -> io::Result<Next<D>> {
        match option {
            opt::EXPORT_NAME => return self.export_name(data),
            opt::ABORT => {
                // The client may be gone already.
                let _ = self.reply(option, rep::ACK, b"");
                return Ok(Next::End);
            }
            opt::LIST if data.is_empty() => {
                for e in self.exports {
                    let mut d = (e.name.len() as u32).to_be_bytes().to_vec();
                    d.extend(e.name.as_bytes());
                    self.reply(option, rep::SERVER, &d)?;
                }
                self.reply(option, rep::ACK, b"")?;
            }
            opt::LIST => self.reply(option, rep::ERR_INVALID, b"LIST has no data")?,
            opt::INFO | opt::GO => return self.info(option, data),
            _ => self.reply(option, rep::ERR_UNSUP, b"option not supported")?,
        }
        Ok(Next::Option)
    }

    fn export_name(&self, name: &[u8]) -> io::Result<Next<D>> {
        let Some(e) = self.find(name) else {
            // This old option has no way to say so.
            return Err(bad(format!("no export {:?}", String::from_utf8_lossy(name))));
        };
        let g = e.device.geometry();
        let mut b = g.size.to_be_bytes().to_vec();
        b.extend(transmission_flags(&g).to_be_bytes());
        if self.zeroes {
            b.resize(b.len() + 124, 0);
        }
        send(self.stream, &b)?;
        Ok(Next::Transmit(e.device.clone()))
    }

    fn info(&self, option: u32, data: &[u8]) -> io::Result<Next<D>> {
        let Some((name, wanted)) = parse_info(data) else {
            self.reply(option, rep::ERR_INVALID, b"malformed request for information")?;
            return Ok(Next::Option);
        };
        let Some(e) = self.find(name) else {
            self.reply(option, rep::ERR_UNKNOWN, b"no such export")?;
            return Ok(Next::Option);
        };
        let g = e.device.geometry();
        let mut d = info::EXPORT.to_be_bytes().to_vec();
        d.extend(g.size.to_be_bytes());
        d.extend(transmission_flags(&g).to_be_bytes());
        self.reply(option, rep::INFO, &d)?;

        let mut d = info::BLOCK_SIZE.to_be_bytes().to_vec();
        d.extend(g.logical_block_size.to_be_bytes());
        d.extend(g.physical_block_size.max(4096).to_be_bytes());
        d.extend(proto::MAX_PAYLOAD.to_be_bytes());
        self.reply(option, rep::INFO, &d)?;

        for (kind, text) in [(info::NAME, &e.name), (info::DESCRIPTION, &e.description)] {
            if wanted.contains(&kind) && !text.is_empty() {
                let mut d = kind.to_be_bytes().to_vec();
                d.extend(text.as_bytes());
                self.reply(option, rep::INFO, &d)?;
            }
        }
        self.reply(option, rep::ACK, b"")?;
        Ok(if option == opt::GO {
            Next::Transmit(e.device.clone())
        } else {
            Next::Option
        })
    }
}

/// Name and numbers asked for in an INFO or GO option.
fn parse_info(data: &[u8]) -> Option<(&[u8], Vec<u16>)> {
    let (len, rest) = data.split_first_chunk::<4>()?;
    let (name, rest) = rest.split_at_checked(u32::from_be_bytes(*len) as usize)?;
    let (count, rest) = rest.split_first_chunk::<2>()?;
    let exact = name.len() <= proto::MAX_NAME && rest.len() == 2 * usize::from(u16::from_be_bytes(*count));
    exact.then(|| {
        (
            name,
            rest.chunks_exact(2).map(|c| u16::from_be_bytes([c[0], c[1]])).collect(),
        )
    })
}
