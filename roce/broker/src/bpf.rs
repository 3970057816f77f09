//! Steering by a program that members can't replace: `SK_REUSEPORT`, which takes a packet's socket from an array that only
//! the broker can write (`BPF_MAP_TYPE_REUSEPORT_SOCKARRAY`). Loading it takes CAP_BPF, or root.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    thread,
    time::Duration,
};

use libc::{c_int, c_long};

use crate::proto::SLOTS;

/// Commands of `bpf(2)` (`enum bpf_cmd`).
const MAP_CREATE: c_int = 0;
const MAP_LOOKUP_ELEM: c_int = 1;
const MAP_UPDATE_ELEM: c_int = 2;
const MAP_DELETE_ELEM: c_int = 3;
const PROG_LOAD: c_int = 5;
const MAP_TYPE_REUSEPORT_SOCKARRAY: u32 = 20;
const PROG_TYPE_SK_REUSEPORT: u32 = 21;
/// Helpers (`enum bpf_func_id`).
const SKB_LOAD_BYTES: i32 = 26;
const SK_SELECT_REUSEPORT: i32 = 82;
/// Index of packets without a receiver, behind those of the slots.
pub(crate) const NOBODY: u32 = SLOTS as u32;
/// Offset of the top byte of the destination queue pair number: behind the UDP header, byte 5 of the BTH.
const QPN_BYTE: i32 = 8 + 5;
/// Attempts, and the pause between them, for a socket of another array that is being freed.
const BUSY_TRIES: u32 = 200;
const BUSY_PAUSE: Duration = Duration::from_millis(1);

/// `union bpf_attr` of MAP_CREATE.
#[repr(C)]
#[derive(Default)]
struct MapAttr {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
}

/// `union bpf_attr` of the commands for an element.
#[repr(C)]
#[derive(Default)]
struct ElemAttr {
    map: u32,
    _pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// `union bpf_attr` of PROG_LOAD.
#[repr(C)]
#[derive(Default)]
struct ProgAttr {
    prog_type: u32,
    count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
}

/// An instruction (`struct bpf_insn`).
#[repr(C)]
#[derive(Clone, Copy)]
struct Insn {
    code: u8,
    /// Destination in the low four bits, source in the high ones.
    registers: u8,
    offset: i16,
    value: i32,
}

/// # Safety
/// `attr` must be the attributes that the command has, and what it points at must live, of the length that they say.
unsafe fn bpf<T>(command: c_int, attr: &mut T) -> io::Result<c_long> {
    // SAFETY: `attr` lives for the call and its size is passed; the caller vouches for the rest. The kernel reads it only.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            (&raw mut *attr).cast::<libc::c_void>(),
            size_of::<T>(),
        )
    };
    match rc {
        0.. => Ok(rc),
        _ => Err(io::Error::last_os_error()),
    }
}

/// # Safety
/// As [`bpf`]; the command must be one that returns a new descriptor.
unsafe fn bpf_fd<T>(command: c_int, attr: &mut T) -> io::Result<OwnedFd> {
    // SAFETY: as the caller says.
    let fd = unsafe { bpf(command, attr) }?;
    // SAFETY: the descriptor is new (the kernel sets CLOEXEC) and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

fn address<T: ?Sized>(of: &T) -> u64 {
    (&raw const *of).cast::<u8>() as u64
}

/// The sockets by slot.
#[derive(Debug)]
pub(crate) struct SocketArray(pub(crate) OwnedFd);

impl SocketArray {
    pub(crate) fn new() -> io::Result<Self> {
        let mut attr = MapAttr {
            map_type: MAP_TYPE_REUSEPORT_SOCKARRAY,
            key_size: 4,
            value_size: 8,
            max_entries: NOBODY + 1,
            flags: 0,
        };
        // SAFETY: these are the command's attributes, without pointers; it returns a descriptor.
        unsafe { bpf_fd(MAP_CREATE, &mut attr) }.map(Self)
    }

    /// `value`: none for a command that has none, which refuses one.
    fn element(&self, command: c_int, slot: u32, value: Option<&mut u64>) -> io::Result<()> {
        let mut attr = ElemAttr {
            map: self.0.as_raw_fd() as u32,
            key: address(&slot),
            value: value.map_or(0, |value| (&raw mut *value) as u64),
            ..ElemAttr::default()
        };
        // SAFETY: key and value live for the call and are as long as the map's: four bytes and eight.
        unsafe { bpf(command, &mut attr) }.map(drop)
    }

    /// Gives the packets of a slot, or of [`NOBODY`], to a socket.
    ///
    /// # Errors
    /// When that is none of a reuseport group.
    pub(crate) fn set(&self, index: u32, socket: BorrowedFd<'_>) -> io::Result<()> {
        let mut value = socket.as_raw_fd() as u64;
        for _ in 0..BUSY_TRIES {
            match self.element(MAP_UPDATE_ELEM, index, Some(&mut value)) {
                // A socket is of one array at a time, and that of a former broker goes a moment after its program.
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => thread::sleep(BUSY_PAUSE),
                done => return done,
            }
        }
        Err(io::ErrorKind::ResourceBusy.into())
    }

    /// Has the slot's packets dropped from now on.
    pub(crate) fn clear(&self, slot: u8) -> io::Result<()> {
        match self.element(MAP_DELETE_ELEM, slot.into(), None) {
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            done => done,
        }
    }

    /// Returns the cookie of the socket that has a slot's packets.
    pub(crate) fn cookie(&self, slot: u8) -> Option<u64> {
        let mut cookie = 0;
        self.element(MAP_LOOKUP_ELEM, slot.into(), Some(&mut cookie)).ok()?;
        Some(cookie)
    }
}

impl AsFd for SocketArray {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The program: takes the slot from the packet and the slot's socket from the array, or else that of nobody. Without either
/// the packet is dropped.
pub(crate) fn load_program(array: &SocketArray) -> io::Result<OwnedFd> {
    let code = program(array.as_fd().as_raw_fd());
    let license = c"MIT";
    let mut attr = ProgAttr {
        prog_type: PROG_TYPE_SK_REUSEPORT,
        count: code.len() as u32,
        instructions: address(code.as_slice()),
        license: license.as_ptr() as u64,
        ..ProgAttr::default()
    };
    // SAFETY: the instructions (`count` of them) and the license, which ends with a zero, live for the call; it returns a
    // descriptor.
    unsafe { bpf_fd(PROG_LOAD, &mut attr) }
}

fn program(array: RawFd) -> Vec<Insn> {
    let insn = |code: u8, dst: u8, src: u8, offset: i16, value: i32| Insn {
        code,
        registers: dst | src << 4,
        offset,
        value,
    };
    // Codes of `linux/bpf.h`, by what they do.
    let copy = |dst, src| insn(0xbf, dst, src, 0, 0);
    let set = |dst, value| insn(0xb7, dst, 0, 0, value);
    let add = |dst, value| insn(0x07, dst, 0, 0, value);
    let call = |helper| insn(0x85, 0, 0, 0, helper);
    let skip_if_zero = |offset| insn(0x15, 0, 0, offset, 0);
    let skip_if_negative = |offset| insn(0xc5, 0, 0, offset, 0);
    let exit = insn(0x95, 0, 0, 0, 0);
    // bpf_sk_select_reuseport(context, array, stack - 4, 0); seven instructions.
    let select = [
        copy(1, 6),
        insn(0x18, 2, 1, 0, array),
        insn(0, 0, 0, 0, 0),
        copy(3, 10),
        add(3, -4),
        set(4, 0),
        call(SK_SELECT_REUSEPORT),
    ];
    let mut code = vec![
        copy(6, 1),
        // bpf_skb_load_bytes(context, QPN_BYTE, stack - 8, 1)
        set(2, QPN_BYTE),
        copy(3, 10),
        add(3, -8),
        set(4, 1),
        call(SKB_LOAD_BYTES),
        // Too short to be anybody's.
        skip_if_negative(11),
        // The slot: seven bits of eight.
        insn(0x71, 0, 10, -8, 0),
        insn(0x77, 0, 0, 0, 1),
        insn(0x63, 10, 0, -4, 0),
    ];
    code.extend(select);
    code.push(skip_if_zero(11));
    code.push(insn(0x62, 10, 0, -4, NOBODY as i32));
    code.extend(select);
    code.push(skip_if_zero(2));
    // SK_DROP, or SK_PASS with the socket that was selected.
    code.extend([set(0, 0), exit, set(0, 1), exit]);
    code
}

/// Checks that this process may load the program.
///
/// # Errors
/// Reason for which it may not.
pub(crate) fn probe() -> io::Result<()> {
    load_program(&SocketArray::new()?).map(drop)
}
