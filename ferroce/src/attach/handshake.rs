//! NBD's handshake as a client, up to where the kernel takes over.

use std::io::{self, Read, Write};

use rnbd::nbd::proto::{FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, INIT_MAGIC, OPT_MAGIC, OPT_REPLY_MAGIC, info, opt, rep};
use roce_verbs::shown;

/// Longest reply to an option in bytes: information, or a text.
const ROOM: u32 = 4096;

/// Export as the server describes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Export {
    pub(super) bytes: u64,
    /// Transmission flags.
    pub(super) flags: u16,
}

fn read<const N: usize>(from: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn read_u64(from: &mut impl Read) -> io::Result<u64> {
    read(from).map(u64::from_be_bytes)
}

fn read_u32(from: &mut impl Read) -> io::Result<u32> {
    read(from).map(u32::from_be_bytes)
}

fn wrong(text: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text.into())
}

/// Chooses an export. The next byte on the connection is a request's.
///
/// # Errors
/// The connection's, and what the server refuses.
pub(super) fn choose(socket: &mut (impl Read + Write), name: &str) -> io::Result<Export> {
    if read_u64(socket)? != INIT_MAGIC || read_u64(socket)? != OPT_MAGIC {
        return Err(wrong("no NBD server is there"));
    }
    let offered = u16::from_be_bytes(read(socket)?);
    let flags = offered & (FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES);
    socket.write_all(&u32::from(flags).to_be_bytes())?;
    let mut go = Vec::new();
    go.extend(OPT_MAGIC.to_be_bytes());
    go.extend(opt::GO.to_be_bytes());
    go.extend((4 + name.len() as u32 + 2).to_be_bytes());
    go.extend((name.len() as u32).to_be_bytes());
    go.extend(name.as_bytes());
    // No information is asked for beside the export's own.
    go.extend([0; 2]);
    socket.write_all(&go)?;
    let mut export = None;
    loop {
        let (kind, data) = reply(socket)?;
        match (kind, data.split_first_chunk()) {
            (rep::ACK, _) => return export.ok_or_else(|| wrong("the server does not say what the export is like")),
            (rep::INFO, Some((kind, rest))) if u16::from_be_bytes(*kind) == info::EXPORT => {
                let (bytes, flags) = rest.split_first_chunk().ok_or_else(|| wrong("a reply is too short"))?;
                let flags = flags.first_chunk().ok_or_else(|| wrong("a reply is too short"))?;
                export = Some(Export {
                    bytes: u64::from_be_bytes(*bytes),
                    flags: u16::from_be_bytes(*flags),
                });
            }
            (rep::INFO, _) => {}
            (rep::ERR_TLS_REQD, _) => return Err(wrong("it wants TLS, which the kernel's NBD can't do")),
            (kind, _) => {
                let text = String::from_utf8_lossy(&data);
                let text = shown(&text);
                return Err(wrong(format!("it refuses the export {name:?} ({kind:#x}): {text}")));
            }
        }
    }
}

/// Receives a reply to the option: its type, and its data.
fn reply(socket: &mut impl Read) -> io::Result<(u32, Vec<u8>)> {
    let magic = read_u64(socket)?;
    let (option, kind, len) = (read_u32(socket)?, read_u32(socket)?, read_u32(socket)?);
    if magic != OPT_REPLY_MAGIC || option != opt::GO || len > ROOM {
        return Err(wrong("a reply is out of step"));
    }
    let mut data = vec![0; len as usize];
    socket.read_exact(&mut data)?;
    Ok((kind, data))
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixStream, thread};

    use super::*;

    fn reply_bytes(kind: u32, data: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(OPT_REPLY_MAGIC.to_be_bytes());
        bytes.extend(opt::GO.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        bytes
    }

    /// Runs the client against a server with these replies. Returns its result and the bytes that it sent.
    fn against(replies: &[Vec<u8>]) -> (io::Result<Export>, Vec<u8>) {
        let (mut here, mut there) = UnixStream::pair().unwrap();
        let greeting = [
            INIT_MAGIC.to_be_bytes().to_vec(),
            OPT_MAGIC.to_be_bytes().to_vec(),
            3u16.to_be_bytes().to_vec(),
        ];
        there.write_all(&greeting.concat()).unwrap();
        there.write_all(&replies.concat()).unwrap();
        let result = choose(&mut here, "disk");
        drop(here);
        let mut sent = Vec::new();
        there.read_to_end(&mut sent).unwrap();
        (result, sent)
    }

    #[test]
    fn an_export_is_chosen_by_its_name() {
        let size = [&[0, 0][..], &8192u64.to_be_bytes(), &0x10du16.to_be_bytes()].concat();
        let (export, sent) = against(&[
            reply_bytes(rep::INFO, &[0, 3, 0, 0, 2, 0]),
            reply_bytes(rep::INFO, &size),
            reply_bytes(rep::ACK, &[]),
        ]);
        let want = Export {
            bytes: 8192,
            flags: 0x10d,
        };
        assert_eq!(export.unwrap(), want);
        let option = [
            &[0, 0, 0, 3][..],
            b"IHAVEOPT",
            &[0, 0, 0, 7, 0, 0, 0, 10, 0, 0, 0, 4],
            b"disk",
            &[0, 0],
        ];
        assert_eq!(sent, option.concat());
    }

    #[test]
    fn refusals_say_why() {
        let why = |replies: &[Vec<u8>]| against(replies).0.unwrap_err().to_string();
        let tls = why(&[reply_bytes(rep::ERR_TLS_REQD, &[])]);
        assert!(tls.contains("TLS"), "{tls}");
        let unknown = why(&[reply_bytes(rep::ERR_UNKNOWN, b"no such export")]);
        assert!(
            unknown.contains("\"disk\"") && unknown.contains("no such export"),
            "{unknown}"
        );
        for broken in [
            vec![reply_bytes(rep::ACK, &[])],
            vec![reply_bytes(rep::INFO, &[0, 0, 1])],
            vec![vec![7; 20]],
        ] {
            assert!(against(&broken).0.is_err(), "{broken:?}");
        }
        // A server that is gone.
        let (mut here, there) = UnixStream::pair().unwrap();
        let gone = thread::spawn(move || drop(there));
        assert!(choose(&mut here, "disk").is_err());
        gone.join().unwrap();
    }
}
