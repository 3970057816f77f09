//! Generic netlink: requests to a family of the kernel's, and its answers.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
};

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send, socket,
};

/// Bytes of `struct nlmsghdr`.
const HEADER: usize = 16;
/// Bytes of `struct genlmsghdr`.
const GENERIC: usize = 4;
/// Longest answer in bytes.
const ROOM: usize = 16 << 10;
/// An error number, or zero for success (`linux/netlink.h`).
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLA_F_NESTED: u16 = 1 << 15;
/// Flags of an attribute's type.
const NLA_FLAGS: u16 = 3 << 14;
/// The family that knows the others (`linux/genetlink.h`).
const CONTROL: u16 = 16;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;

/// Attributes of a message, as they are sent.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Attributes(Vec<u8>);

impl Attributes {
    fn put(mut self, kind: u16, value: &[u8]) -> Self {
        self.0.extend(((4 + value.len()) as u16).to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    /// Adds a number of 32 bits.
    pub(super) fn u32(self, kind: u16, value: u32) -> Self {
        self.put(kind, &value.to_ne_bytes())
    }

    /// Adds a number of 64 bits.
    pub(super) fn u64(self, kind: u16, value: u64) -> Self {
        self.put(kind, &value.to_ne_bytes())
    }

    /// Adds a text, which ends with a zero.
    pub(super) fn text(self, kind: u16, value: &str) -> Self {
        self.put(kind, &[value.as_bytes(), &[0]].concat())
    }

    /// Adds attributes in one.
    pub(super) fn nested(self, kind: u16, value: &Self) -> Self {
        self.put(kind | NLA_F_NESTED, &value.0)
    }
}

/// Finds a number of 16 or 32 bits among attributes.
pub(super) fn number(mut attributes: &[u8], wanted: u16) -> Option<u32> {
    loop {
        let (head, _) = attributes.split_first_chunk::<4>()?;
        let len = usize::from(u16::from_ne_bytes([head[0], head[1]]));
        let value = attributes.get(4..len)?;
        if u16::from_ne_bytes([head[2], head[3]]) & !NLA_FLAGS == wanted {
            return match *value {
                [a, b] => Some(u16::from_ne_bytes([a, b]).into()),
                [a, b, c, d] => Some(u32::from_ne_bytes([a, b, c, d])),
                _ => None,
            };
        }
        attributes = attributes.get(len.next_multiple_of(4)..)?;
    }
}

/// A message with a header, which asks for an acknowledgement.
fn message(family: u16, sequence: u32, command: u8, attributes: &Attributes) -> Vec<u8> {
    let len = HEADER + GENERIC + attributes.0.len();
    let mut bytes = Vec::with_capacity(len);
    bytes.extend((len as u32).to_ne_bytes());
    bytes.extend(family.to_ne_bytes());
    bytes.extend((NLM_F_REQUEST | NLM_F_ACK).to_ne_bytes());
    bytes.extend(sequence.to_ne_bytes());
    // Port: the kernel knows ours.
    bytes.extend([0; 4]);
    // Command, version 1, reserved.
    bytes.extend([command, 1, 0, 0]);
    bytes.extend(&attributes.0);
    bytes
}

/// Part of the kernel's answer to a request: one datagram.
#[derive(PartialEq, Eq, Debug)]
enum Answer {
    /// Attributes; more follows.
    Attributes(Vec<u8>),
    /// The request is done, or refused with an error number.
    End(Result<(), i32>),
}

/// Splits a datagram into its messages. Those that answer another request are left out.
fn answers(mut datagram: &[u8], sequence: u32) -> Vec<Answer> {
    let mut found = Vec::new();
    while let Some((head, _)) = datagram.split_first_chunk::<HEADER>() {
        let word = |at: usize| u32::from_ne_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let len = word(0) as usize;
        let Some(body) = datagram.get(HEADER..len) else { break };
        let kind = u16::from_ne_bytes([head[4], head[5]]);
        match (kind, body.first_chunk()) {
            _ if word(8) != sequence => {}
            (NLMSG_ERROR, Some(error)) => found.push(Answer::End(match i32::from_ne_bytes(*error) {
                0 => Ok(()),
                error => Err(-error),
            })),
            _ => found.push(Answer::Attributes(body.get(GENERIC..).unwrap_or_default().to_vec())),
        }
        datagram = datagram.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    found
}

/// A socket of generic netlink.
#[derive(Debug)]
pub(super) struct Netlink {
    socket: OwnedFd,
    sequence: u32,
}

impl Netlink {
    pub(super) fn open() -> io::Result<Self> {
        let socket = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::NetlinkGeneric,
        )?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
        Ok(Self { socket, sequence: 0 })
    }

    /// Sends a request and waits for the answer, which the kernel gives at once. Returns the attributes of the reply, if there is one.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn ask(&mut self, family: u16, command: u8, attributes: &Attributes) -> io::Result<Vec<u8>> {
        self.sequence += 1;
        let request = message(family, self.sequence, command, attributes);
        send(self.socket.as_raw_fd(), &request, MsgFlags::empty())?;
        let (mut reply, mut buffer) = (Vec::new(), vec![0; ROOM]);
        loop {
            let got = recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
            for answer in answers(&buffer[..got], self.sequence) {
                match answer {
                    Answer::Attributes(attributes) => reply = attributes,
                    Answer::End(Ok(())) => return Ok(reply),
                    Answer::End(Err(errno)) => return Err(io::Error::from_raw_os_error(errno)),
                }
            }
        }
    }

    /// Finds the number of a family; ENOENT if the kernel has none of this name.
    pub(super) fn family(&mut self, name: &str) -> io::Result<u16> {
        let wanted = Attributes::default().text(CTRL_ATTR_FAMILY_NAME, name);
        let found = self.ask(CONTROL, CTRL_CMD_GETFAMILY, &wanted)?;
        let id = number(&found, CTRL_ATTR_FAMILY_ID).and_then(|id| u16::try_from(id).ok());
        id.ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ne32(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn attributes_have_a_length_a_type_and_padding() {
        let inner = Attributes::default().u32(1, 7);
        let attributes = Attributes::default().text(10, "ab").u64(2, 5).nested(7, &inner);
        let head = |len: u16, kind: u16| [len.to_ne_bytes(), kind.to_ne_bytes()].concat();
        let want = [
            head(7, 10),
            b"ab\0\0".to_vec(),
            head(12, 2),
            5u64.to_ne_bytes().to_vec(),
            head(12, 7 | 1 << 15),
            head(8, 1),
            7u32.to_ne_bytes().to_vec(),
        ];
        assert_eq!(attributes.0, want.concat());
        assert_eq!(number(&attributes.0, 7), None, "nested");
        assert_eq!(number(&attributes.0[attributes.0.len() - 8..], 1), Some(7));
        assert_eq!(number(&[6, 0, 1, 0, 0x1c, 0], 1), Some(0x1c));
        for broken in [&[][..], &[8, 0, 1, 0, 1], &[0, 0, 2, 0], &[3, 0, 1, 0]] {
            assert_eq!(number(broken, 1), None, "{broken:?}");
        }
    }

    #[test]
    fn a_message_has_its_length_and_asks_for_an_acknowledgement() {
        let bytes = message(0x1c, 3, 2, &Attributes::default().u32(1, 9));
        let head = [
            28u32.to_ne_bytes().to_vec(),
            0x1cu16.to_ne_bytes().to_vec(),
            5u16.to_ne_bytes().to_vec(),
        ]
        .concat();
        let want = [head, ne32(&[3, 0]), vec![2, 1, 0, 0], vec![8, 0, 1, 0], ne32(&[9])].concat();
        assert_eq!(bytes, want);
    }

    #[test]
    fn answers_are_those_of_the_request() {
        let message = |kind: u16, sequence: u32, body: &[u8]| {
            let mut bytes = ne32(&[(HEADER + body.len()) as u32]);
            bytes.extend(kind.to_ne_bytes());
            bytes.extend([0; 2]);
            bytes.extend(ne32(&[sequence, 0]));
            bytes.extend(body);
            bytes
        };
        let reply = message(0x1c, 4, &[1, 1, 0, 0, 8, 0, 1, 0, 6, 0, 0, 0]);
        let acknowledged = message(NLMSG_ERROR, 4, &ne32(&[0, 28]));
        let stale = message(NLMSG_ERROR, 3, &ne32(&[-1i32 as u32, 0]));
        let all = [stale, reply, acknowledged].concat();
        let found = answers(&all, 4);
        assert_eq!(
            found,
            [Answer::Attributes(vec![8, 0, 1, 0, 6, 0, 0, 0]), Answer::End(Ok(()))]
        );
        let refused = message(NLMSG_ERROR, 5, &ne32(&[-16i32 as u32]));
        assert_eq!(answers(&refused, 5), [Answer::End(Err(16))]);
        assert_eq!(answers(&refused[..18], 5), [], "cut short");
    }

    #[test]
    fn the_kernel_knows_its_own_family() {
        let mut netlink = Netlink::open().unwrap();
        assert_eq!(netlink.family("nlctrl").unwrap(), CONTROL);
        let missing = netlink.family("no-such-family").unwrap_err();
        assert_eq!(missing.raw_os_error(), Some(libc::ENOENT));
    }
}
