//! Operations on memory: the control messages of a message to send, as the node gets them.

use libc::{c_int, c_void};
use rds_local::{AtomicKind, AtomicOp, MAX_LOCAL, MAX_MESSAGE, Op, RdmaOp, Request};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{
    cmsg::{RDMA_ARGS, RDMA_DEST, RDMA_MAP, SOL_RDS, Sent},
    control,
    socket::Socket,
    user,
};
use crate::ret::{Errno, Result};

const ATOMIC_FADD: c_int = 6;
const ATOMIC_CSWP: c_int = 7;
const MASKED_ATOMIC_FADD: c_int = 8;
const MASKED_ATOMIC_CSWP: c_int = 9;
const ZCOPY_COOKIE: c_int = 12;

/// `RDS_RDMA_READWRITE`.
const READWRITE: u64 = 1;
const PAGE: u64 = 4096;
/// Pages of a region at most: 1 MiB, and one for its beginning and end.
const MAX_PAGES: u64 = MAX_MESSAGE as u64 / PAGE + 1;

/// `struct rds_rdma_args`.
#[derive(FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct RdmaArgs {
    cookie: u64,
    remote_addr: u64,
    remote_len: u64,
    local: u64,
    local_count: u64,
    flags: u64,
    token: u64,
}

/// `struct rds_get_mr_args`.
#[derive(FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct MapArgs {
    addr: u64,
    len: u64,
    cookie_addr: u64,
    flags: u64,
}

/// `struct rds_atomic_args`.
#[derive(FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct AtomicArgs {
    cookie: u64,
    local_addr: u64,
    remote_addr: u64,
    values: [u64; 4],
    flags: u64,
    token: u64,
}

/// The structure of a control message.
fn args<T: FromBytes>(sent: &Sent<'_>) -> Result<T> {
    T::read_from_prefix(sent.data).map_or(Err(Errno::INVAL), |(args, _)| Ok(args))
}

/// Registers memory, and gives the program its cookie.
pub(crate) fn map(socket: &Socket, args: &MapArgs) -> Result<u64> {
    let end = args.addr.checked_add(args.len).ok_or(Errno::INVAL)?;
    let end = end.checked_next_multiple_of(PAGE).ok_or(Errno::INVAL)?;
    let pages = end / PAGE - args.addr / PAGE;
    match pages {
        _ if args.len == 0 || args.len > u32::MAX.into() => return Err(Errno::INVAL),
        0..=MAX_PAGES => {}
        _ => return Err(Errno(libc::EMSGSIZE)),
    }
    // As if it were written, whatever the peer may do.
    user::populate(args.addr, args.len, true)?;
    let request = Request::Map {
        socket: socket.key,
        addr: args.addr,
        len: args.len,
        // The kernel ignores others.
        flags: args.flags as u32,
    };
    let cookie = control::ask_with_memory(&request)?.value;
    if args.cookie_addr != 0 {
        let to: *mut c_void = std::ptr::with_exposed_provenance_mut(args.cookie_addr as usize);
        // SAFETY: the program wants the cookie there.
        unsafe { user::write_value(to, cookie) }.inspect_err(|_| unmap(socket, cookie))?;
    }
    Ok(cookie)
}

/// Frees a region of a call that fails.
pub(crate) fn unmap(socket: &Socket, cookie: u64) {
    let request = Request::Unmap {
        socket: socket.key,
        cookie,
        flags: 0,
    };
    // Its node or socket may be gone, and the region with it.
    let _ = control::ask(&request, &[]);
}

fn rdma(sent: &Sent<'_>) -> Result<RdmaOp> {
    let args: RdmaArgs = args(sent)?;
    if args.remote_len > MAX_MESSAGE as u64 {
        return Err(Errno(libc::EMSGSIZE));
    }
    let count = usize::try_from(args.local_count).unwrap_or(usize::MAX);
    match count {
        0 => return Err(Errno::INVAL),
        1..=MAX_LOCAL => {}
        _ => return Err(Errno(libc::EMSGSIZE)),
    }
    let from: *const c_void = std::ptr::with_exposed_provenance(args.local as usize);
    let piece = |at: usize| user::read::<[u64; 2]>(from.wrapping_byte_add(16 * at)).map(|[addr, len]| (addr, len));
    let local: Vec<_> = (0..count).map(piece).collect::<Result<_>>()?;
    let is_possible =
        |(at, len): &(u64, u64)| at.checked_add(*len).is_some_and(|end| end > *at) && *len <= u32::MAX.into();
    if !local.iter().all(is_possible) {
        return Err(Errno::INVAL);
    }
    Ok(RdmaOp {
        memory: 0,
        cookie: args.cookie,
        remote_addr: args.remote_addr,
        remote_len: args.remote_len,
        flags: args.flags,
        token: args.token,
        local,
    })
}

fn atomic(kind: AtomicKind, sent: &Sent<'_>) -> Result<AtomicOp> {
    let args: AtomicArgs = args(sent)?;
    Ok(AtomicOp {
        kind,
        memory: 0,
        cookie: args.cookie,
        local_addr: args.local_addr,
        remote_addr: args.remote_addr,
        values: args.values,
        flags: args.flags,
        token: args.token,
    })
}

/// Kind of a control message that goes with a message.
#[derive(Clone, Copy)]
enum Kind {
    Rdma,
    Dest,
    Map,
    Atomic(AtomicKind),
}

fn kind(number: c_int) -> Result<Kind> {
    Ok(match number {
        RDMA_ARGS => Kind::Rdma,
        RDMA_DEST => Kind::Dest,
        RDMA_MAP => Kind::Map,
        ATOMIC_FADD => Kind::Atomic(AtomicKind::FetchAdd),
        ATOMIC_CSWP => Kind::Atomic(AtomicKind::CompareSwap),
        MASKED_ATOMIC_FADD => Kind::Atomic(AtomicKind::MaskedFetchAdd),
        MASKED_ATOMIC_CSWP => Kind::Atomic(AtomicKind::MaskedCompareSwap),
        _ => return Err(Errno::INVAL),
    })
}

/// Looks whether an operation is possible, and names this process's memory in it.
///
/// # Errors
/// As the kernel's: `EFAULT` of local memory, `EINVAL` of a cookie that is of no region of the socket or when the peer's memory is too
/// short; `EOPNOTSUPP` of atomics with masks; `EPERM` when the node can't have the memory.
pub(crate) fn check(op: &mut Op, socket: &Socket) -> Result<()> {
    match op {
        Op::None => {}
        Op::Dest(cookie) => {
            control::ask(&Request::Region(socket.key, *cookie), &[])?;
        }
        Op::Rdma(op) => {
            let is_read = op.flags & READWRITE == 0;
            op.local
                .iter()
                .try_for_each(|(at, len)| user::populate(*at, *len, is_read))?;
            // No sum of 1024 lengths that are below 4 GiB is too long.
            if op.local.iter().map(|(_, len)| *len).sum::<u64>() > op.remote_len {
                return Err(Errno::INVAL);
            }
            op.memory = control::memory()?;
        }
        Op::Atomic(op) => {
            if op.local_addr % 8 != 0 {
                return Err(Errno::FAULT);
            }
            user::populate(op.local_addr, 8, true)?;
            match (op.kind, op.values) {
                (AtomicKind::FetchAdd | AtomicKind::CompareSwap, _)
                | (AtomicKind::MaskedFetchAdd, [_, 0, ..])
                | (AtomicKind::MaskedCompareSwap, [_, _, u64::MAX, u64::MAX]) => {}
                _ => return Err(Errno::NOTSUP.because("RoCE has no atomic operations with masks")),
            }
            op.memory = control::memory()?;
        }
    }
    Ok(())
}

/// Error of `MSG_ZEROCOPY`: without a cookie it makes no sense, and RDS over RoCE does not have it.
pub(crate) fn zero_copy(all: &[Sent<'_>]) -> Errno {
    match all
        .iter()
        .any(|sent| (sent.level, sent.kind) == (SOL_RDS, ZCOPY_COOKIE))
    {
        true => Errno::NOTSUP,
        false => Errno::INVAL,
    }
}

/// Operation that was asked for. Memory of a `Map` is not registered yet.
pub(crate) enum Wanted {
    Op(Op),
    Map(MapArgs),
}

/// Reads the operation among the control messages of a message; those of other levels are ignored.
///
/// # Errors
/// As the kernel's: `EINVAL` for unknown ones, and for more than one.
pub(crate) fn read(all: &[Sent<'_>]) -> Result<Wanted> {
    let mut wanted = None;
    for sent in all.iter().filter(|sent| sent.level == SOL_RDS) {
        let next = match kind(sent.kind)? {
            Kind::Rdma => Wanted::Op(Op::Rdma(rdma(sent)?)),
            Kind::Dest => Wanted::Op(Op::Dest(args(sent)?)),
            Kind::Map => Wanted::Map(args(sent)?),
            Kind::Atomic(kind) => Wanted::Op(Op::Atomic(atomic(kind, sent)?)),
        };
        if wanted.replace(next).is_some() {
            return Err(Errno::INVAL);
        }
    }
    Ok(wanted.unwrap_or(Wanted::Op(Op::None)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(kind: c_int, data: &[u8]) -> Sent<'_> {
        Sent {
            level: SOL_RDS,
            kind,
            data,
        }
    }

    fn error(all: &[Sent<'_>]) -> Option<c_int> {
        read(all).err().map(|e| e.0)
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let zeroes = [0; 80];
        let other_level = Sent {
            level: libc::SOL_IP,
            ..sent(99, &zeroes)
        };
        assert_eq!(error(&[other_level]), None);
        assert_eq!(error(&[sent(99, &zeroes)]), Some(libc::EINVAL));
        assert_eq!(error(&[sent(RDMA_ARGS, &zeroes[..55])]), Some(libc::EINVAL));
        assert_eq!(
            error(&[sent(RDMA_ARGS, &zeroes)]),
            Some(libc::EINVAL),
            "no local memory"
        );
        assert_eq!(error(&[sent(RDMA_DEST, &zeroes[..7])]), Some(libc::EINVAL));
        assert_eq!(
            error(&[sent(RDMA_DEST, &zeroes), sent(RDMA_DEST, &zeroes)]),
            Some(libc::EINVAL)
        );
        assert!(matches!(
            read(&[sent(RDMA_DEST, &[1; 8])]),
            Ok(Wanted::Op(Op::Dest(0x0101_0101_0101_0101)))
        ));
    }

    #[test]
    fn the_program_s_memory_is_read_once() {
        let pieces = [[0x1000u64, 10], [0x2000, 20]];
        let args = |local: u64, count: u64| {
            let args = RdmaArgs {
                cookie: 1,
                remote_addr: 2,
                remote_len: 30,
                local,
                local_count: count,
                flags: 1,
                token: 9,
            };
            args.as_bytes().to_vec()
        };
        let local = pieces.as_ptr().expose_provenance() as u64;
        let Ok(Wanted::Op(Op::Rdma(op))) = read(&[sent(RDMA_ARGS, &args(local, 2))]) else {
            panic!("an operation")
        };
        assert_eq!(op.local, [(0x1000, 10), (0x2000, 20)]);
        assert_eq!((op.cookie, op.remote_addr, op.remote_len, op.token), (1, 2, 30, 9));
        assert_eq!(error(&[sent(RDMA_ARGS, &args(8, 1))]), Some(libc::EFAULT));
        assert_eq!(error(&[sent(RDMA_ARGS, &args(local, 1025))]), Some(libc::EMSGSIZE));
    }
}
