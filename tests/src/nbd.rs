//! A small NBD client (fixed newstyle, simple replies; `doc/proto.md` of the NBD project), written apart from the server
//! that it tests. One request at a time unless requests are sent with [`Client::send`].

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
const OPT_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const OPT_LIST: u32 = 3;
const OPT_GO: u32 = 7;
const REP_ACK: u32 = 1;
const REP_SERVER: u32 = 2;
const REP_INFO: u32 = 3;
const REP_ERROR: u32 = 1 << 31;

/// A command (`NBD_CMD_…`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
#[allow(missing_docs)]
pub enum Command {
    Read = 0,
    Write = 1,
    Disconnect = 2,
    Flush = 3,
    Trim = 4,
    WriteZeroes = 6,
}

/// Transmission flag: no writes.
pub const FLAG_READ_ONLY: u16 = 1 << 1;
/// Transmission flag: flush is understood.
pub const FLAG_SEND_FLUSH: u16 = 1 << 2;
/// Transmission flag: FUA is understood.
pub const FLAG_SEND_FUA: u16 = 1 << 3;
/// Transmission flag: trim is understood.
pub const FLAG_SEND_TRIM: u16 = 1 << 5;
/// Transmission flag: writing zeroes is understood.
pub const FLAG_SEND_WRITE_ZEROES: u16 = 1 << 6;
/// Command flag: to stable storage before the reply.
pub const CMD_FLAG_FUA: u16 = 1;
/// Error of a reply: not permitted.
pub const EPERM: u32 = 1;
/// Error of a reply: input or output failed.
pub const EIO: u32 = 5;
/// Error of a reply: no space.
pub const ENOSPC: u32 = 28;
/// Error of a reply: the server shuts down.
pub const ESHUTDOWN: u32 = 108;

/// A connection in the transmission phase.
pub struct Client {
    stream: UnixStream,
    /// Bytes of the export.
    pub size: u64,
    /// Transmission flags.
    pub flags: u16,
    cookie: u64,
}

impl Client {
    /// Connects and negotiates the default export.
    ///
    /// # Errors
    /// When the socket or the negotiation fails.
    pub fn connect(socket: &Path) -> io::Result<Self> {
        Self::connect_to(socket, "", crate::process::TIMEOUT)
    }

    /// Connects and negotiates the export of this name. Every answer may take this long.
    ///
    /// # Errors
    /// When the socket or the negotiation fails.
    pub fn connect_to(socket: &Path, name: &str, timeout: Duration) -> io::Result<Self> {
        let mut stream = open(socket, timeout)?;
        // NBD_OPT_GO without information requests.
        let mut data = (name.len() as u32).to_be_bytes().to_vec();
        data.extend(name.as_bytes());
        data.extend([0; 2]);
        ask(&mut stream, OPT_GO, &data)?;
        let (mut size, mut flags) = (0, 0);
        loop {
            let (kind, data) = option_reply(&mut stream, OPT_GO)?;
            match kind {
                REP_ACK => break,
                REP_INFO if data.len() == 12 && data[..2] == [0, 0] => {
                    size = u64::from_be_bytes(data[2..10].try_into().expect("8 bytes"));
                    flags = u16::from_be_bytes([data[10], data[11]]);
                }
                REP_INFO => {}
                kind => return Err(io::Error::other(format!("unexpected option reply {kind}"))),
            }
        }
        Ok(Self {
            stream,
            size,
            flags,
            cookie: 0,
        })
    }

    /// Sends a request and returns its cookie.
    ///
    /// # Errors
    /// When the connection is gone.
    pub fn send(&mut self, command: Command, flags: u16, offset: u64, len: u32, data: &[u8]) -> io::Result<u64> {
        self.cookie += 1;
        let mut request = REQUEST_MAGIC.to_be_bytes().to_vec();
        request.extend(flags.to_be_bytes());
        request.extend((command as u16).to_be_bytes());
        request.extend(self.cookie.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend(len.to_be_bytes());
        request.extend(data);
        self.stream.write_all(&request)?;
        Ok(self.cookie)
    }

    /// Takes the next reply: its cookie and error.
    ///
    /// # Errors
    /// When the connection is gone or what comes is no reply.
    pub fn reply(&mut self) -> io::Result<(u64, u32)> {
        expect("reply", u64::from(read_u32(&mut self.stream)?), u64::from(REPLY_MAGIC))?;
        let error = read_u32(&mut self.stream)?;
        Ok((read_u64(&mut self.stream)?, error))
    }

    fn simple(&mut self, command: Command, flags: u16, offset: u64, len: u32, data: &[u8]) -> Result<(), Error> {
        let cookie = self.send(command, flags, offset, len, data)?;
        let (answered, error) = self.reply()?;
        expect("cookie", answered, cookie)?;
        if error == 0 { Ok(()) } else { Err(Error::Refused(error)) }
    }

    /// Reads.
    ///
    /// # Errors
    /// The server's or the connection's.
    pub fn read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>, Error> {
        self.simple(Command::Read, 0, offset, u32::try_from(len).expect("a length"), &[])?;
        let mut data = vec![0; len];
        self.stream.read_exact(&mut data)?;
        Ok(data)
    }

    /// Writes.
    ///
    /// # Errors
    /// The server's or the connection's.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), Error> {
        self.simple(
            Command::Write,
            0,
            offset,
            u32::try_from(data.len()).expect("a length"),
            data,
        )
    }

    /// Writes to stable storage.
    ///
    /// # Errors
    /// The server's or the connection's.
    pub fn write_fua(&mut self, offset: u64, data: &[u8]) -> Result<(), Error> {
        self.simple(
            Command::Write,
            CMD_FLAG_FUA,
            offset,
            u32::try_from(data.len()).expect("a length"),
            data,
        )
    }

    /// Brings everything acknowledged to stable storage.
    ///
    /// # Errors
    /// The server's or the connection's.
    pub fn flush(&mut self) -> Result<(), Error> {
        self.simple(Command::Flush, 0, 0, 0, &[])
    }

    /// Trims or writes zeroes.
    ///
    /// # Errors
    /// The server's or the connection's.
    pub fn clear(&mut self, command: Command, offset: u64, len: u32) -> Result<(), Error> {
        self.simple(command, 0, offset, len, &[])
    }

    /// Says goodbye.
    ///
    /// # Errors
    /// When the connection is gone.
    pub fn disconnect(mut self) -> io::Result<()> {
        self.send(Command::Disconnect, 0, 0, 0, &[]).map(|_| ())
    }
}

/// Connects, as far as options can be asked for.
fn open(socket: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    expect("NBDMAGIC", read_u64(&mut stream)?, NBDMAGIC)?;
    expect("IHAVEOPT", read_u64(&mut stream)?, IHAVEOPT)?;
    let handshake = read_u16(&mut stream)?;
    expect("fixed newstyle", u64::from(handshake & 1), 1)?;
    stream.write_all(&u32::from(handshake & 3).to_be_bytes())?;
    Ok(stream)
}

fn ask(stream: &mut UnixStream, option: u32, data: &[u8]) -> io::Result<()> {
    let mut bytes = IHAVEOPT.to_be_bytes().to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    stream.write_all(&bytes)
}

/// The next reply to an option, its kind and data, if it is no error.
fn option_reply(stream: &mut UnixStream, option: u32) -> io::Result<(u32, Vec<u8>)> {
    expect("option reply", read_u64(stream)?, OPT_REPLY_MAGIC)?;
    expect("option", u64::from(read_u32(stream)?), u64::from(option))?;
    let kind = read_u32(stream)?;
    let mut data = vec![0; read_u32(stream)? as usize];
    stream.read_exact(&mut data)?;
    if kind & REP_ERROR != 0 {
        let text = String::from_utf8_lossy(&data).into_owned();
        return Err(io::Error::other(format!("option error {kind:#x}: {text}")));
    }
    Ok((kind, data))
}

/// The names of the exports.
///
/// # Errors
/// When the socket or the negotiation fails.
pub fn list(socket: &Path) -> io::Result<Vec<String>> {
    let mut stream = open(socket, crate::process::TIMEOUT)?;
    ask(&mut stream, OPT_LIST, &[])?;
    let mut names = Vec::new();
    loop {
        let (kind, data) = option_reply(&mut stream, OPT_LIST)?;
        let name = match (kind, data.split_first_chunk::<4>()) {
            (REP_ACK, _) => return Ok(names),
            (REP_SERVER, Some((len, rest))) => rest.get(..u32::from_be_bytes(*len) as usize),
            _ => None,
        };
        let name = name.ok_or_else(|| io::Error::other(format!("unexpected option reply {kind}")))?;
        names.push(String::from_utf8_lossy(name).into_owned());
    }
}

/// Why a request failed.
#[derive(Debug)]
pub enum Error {
    /// The server answered with this error number.
    Refused(u32),
    /// The connection is gone.
    Connection(io::Error),
}

impl From<io::Error> for Error {
    fn from(e: io::Error) -> Self {
        Self::Connection(e)
    }
}

fn expect(what: &str, got: u64, want: u64) -> io::Result<()> {
    if got == want {
        Ok(())
    } else {
        Err(io::Error::other(format!("{what}: {got:#x}, expected {want:#x}")))
    }
}

fn read_array<const N: usize>(stream: &mut UnixStream) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn read_u16(stream: &mut UnixStream) -> io::Result<u16> {
    Ok(u16::from_be_bytes(read_array(stream)?))
}

fn read_u32(stream: &mut UnixStream) -> io::Result<u32> {
    Ok(u32::from_be_bytes(read_array(stream)?))
}

fn read_u64(stream: &mut UnixStream) -> io::Result<u64> {
    Ok(u64::from_be_bytes(read_array(stream)?))
}
