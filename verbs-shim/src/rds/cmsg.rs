//! Control messages.

use libc::{c_int, c_void, cmsghdr, msghdr};

/// `SOL_RDS`.
pub(crate) const SOL_RDS: c_int = 276;
pub(crate) const RDMA_ARGS: c_int = 1;
pub(crate) const RDMA_DEST: c_int = 2;
pub(crate) const RDMA_MAP: c_int = 3;
pub(crate) const RDMA_STATUS: c_int = 4;
pub(crate) const CONG_UPDATE: c_int = 5;

const HEADER: usize = size_of::<cmsghdr>();

/// Rounds up as control messages are laid out.
const fn align(len: usize) -> usize {
    len.next_multiple_of(size_of::<usize>())
}

/// Control message of a message to send.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sent<'a> {
    pub(crate) level: c_int,
    pub(crate) kind: c_int,
    pub(crate) data: &'a [u8],
}

/// Reads the control messages of a message; `None`: one has a length that it can't have.
pub(crate) fn read(control: &[u8]) -> Option<Vec<Sent<'_>>> {
    let mut out = Vec::new();
    let mut rest = control;
    while rest.len() >= HEADER {
        let word = |at: usize| Some(c_int::from_ne_bytes(rest.get(at..at + 4)?.try_into().ok()?));
        let len = usize::from_ne_bytes(rest.get(..8)?.try_into().ok()?);
        out.push(Sent {
            level: word(8)?,
            kind: word(12)?,
            data: rest.get(HEADER..len)?,
        });
        rest = rest.get(align(len)..).unwrap_or_default();
    }
    Some(out)
}

/// Room of the program for control messages of a message that it receives.
pub(crate) struct Room {
    at: *mut u8,
    left: usize,
    /// Some did not fit.
    pub(crate) is_cut: bool,
}

impl Room {
    /// # Safety
    /// The program's `msg_control` is null or writable for `msg_controllen` bytes.
    pub(crate) unsafe fn of(message: &msghdr) -> Self {
        let at: *mut u8 = message.msg_control.cast();
        Self {
            at,
            left: if at.is_null() { 0 } else { message.msg_controllen },
            is_cut: false,
        }
    }

    /// Bytes that are left.
    pub(crate) fn left(&self) -> usize {
        self.left
    }

    /// Adds a control message, as much of it as there is room for.
    pub(crate) fn put(&mut self, level: c_int, kind: c_int, data: &[u8]) {
        if self.left < HEADER {
            self.is_cut = true;
            return;
        }
        let whole = HEADER + data.len();
        let len = whole.min(self.left);
        self.is_cut |= len < whole;
        let header = cmsghdr {
            cmsg_len: len,
            cmsg_level: level,
            cmsg_type: kind,
        };
        let used = align(whole).min(self.left);
        // SAFETY: there is room for `len` bytes, by the promise of `of`, and `used` is within it.
        unsafe {
            self.at.cast::<cmsghdr>().write_unaligned(header);
            std::ptr::copy_nonoverlapping(data.as_ptr(), self.at.add(HEADER), len - HEADER);
            self.at = self.at.add(used);
        }
        self.left -= used;
    }
}

/// Descriptors that came with a message of another socket.
///
/// # Safety
/// `message` was received, so that its control messages are readable.
pub(crate) unsafe fn each_descriptor(message: &msghdr, mut visit: impl FnMut(c_int)) {
    let control: *const c_void = message.msg_control;
    if control.is_null() || message.msg_controllen < HEADER {
        return;
    }
    // SAFETY: the caller's promise.
    let bytes = unsafe { std::slice::from_raw_parts(control.cast::<u8>(), message.msg_controllen) };
    for sent in read(bytes).into_iter().flatten() {
        if (sent.level, sent.kind) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            let (numbers, _) = sent.data.as_chunks::<4>();
            numbers.iter().for_each(|number| visit(c_int::from_ne_bytes(*number)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(control: &mut [u8]) -> msghdr {
        // SAFETY: zeroes are one.
        let mut message: msghdr = unsafe { std::mem::zeroed() };
        (message.msg_control, message.msg_controllen) = (control.as_mut_ptr().cast(), control.len());
        message
    }

    #[test]
    fn what_is_put_is_read() {
        let mut bytes = [0; 64];
        // SAFETY: room of this frame.
        let mut room = unsafe { Room::of(&message(&mut bytes)) };
        room.put(SOL_RDS, RDMA_DEST, &7u64.to_ne_bytes());
        room.put(libc::SOL_SOCKET, libc::SCM_RIGHTS, &[1, 0, 0, 0]);
        assert_eq!((room.left(), room.is_cut), (16, false));
        let read = read(&bytes[..48]).unwrap();
        assert_eq!(
            (read[0].level, read[0].kind, read[0].data),
            (SOL_RDS, RDMA_DEST, &7u64.to_ne_bytes()[..])
        );
        assert_eq!(read[1].data, [1, 0, 0, 0]);
        let mut found = Vec::new();
        // SAFETY: as above.
        unsafe { each_descriptor(&message(&mut bytes[..48]), |fd| found.push(fd)) };
        assert_eq!(found, [1]);
    }

    #[test]
    fn what_does_not_fit_is_cut() {
        let mut bytes = [0; 20];
        // SAFETY: room of this frame.
        let mut room = unsafe { Room::of(&message(&mut bytes)) };
        room.put(SOL_RDS, CONG_UPDATE, &[0xff; 8]);
        assert_eq!((room.left(), room.is_cut), (0, true));
        assert_eq!(read(&bytes).unwrap()[0].data, [0xff; 4]);
        room.put(SOL_RDS, CONG_UPDATE, &[0xff; 8]);
        // SAFETY: no room.
        let mut none = unsafe { Room::of(&message(&mut [])) };
        none.put(SOL_RDS, CONG_UPDATE, &[]);
        assert!(none.is_cut);
    }

    #[test]
    fn lengths_that_can_t_be_are_refused() {
        let with = |len: usize| {
            let mut bytes = [0; 32];
            bytes[..8].copy_from_slice(&len.to_ne_bytes());
            read(&bytes).map(|all| all.len())
        };
        assert_eq!(
            (with(15), with(33), with(usize::MAX), with(0)),
            (None, None, None, None)
        );
        assert_eq!((with(16), with(32)), (None, Some(1)));
        assert_eq!(read(&[0; 15]).map(|all| all.len()), Some(0));
    }
}
