//! Names and rates, and the calls about forks.

use std::ffi::CStr;

use libc::{c_char, c_int, c_void};
use roce::verbs::wc::WC_STATUS_TEXTS;

use crate::abi::c_enum;

fn pick(table: &'static [&'static CStr], index: c_enum, otherwise: &'static CStr) -> *const c_char {
    let text = usize::try_from(index).ok().and_then(|i| table.get(i)).copied();
    text.unwrap_or(otherwise).as_ptr()
}

const EVENT: &[&CStr] = &[
    c"CQ error",
    c"local work queue catastrophic error",
    c"invalid request local work queue error",
    c"local access violation work queue error",
    c"communication established",
    c"send queue drained",
    c"path migrated",
    c"path migration request error",
    c"local catastrophic error",
    c"port active",
    c"port error",
    c"LID change",
    c"P_Key change",
    c"SM change",
    c"SRQ catastrophic error",
    c"SRQ limit reached",
    c"last WQE reached",
    c"client reregistration",
    c"GID table change",
    c"WQ fatal",
];

const OPCODE: &[&CStr] = &[
    c"rdma-write",
    c"rdma-write-with-imm",
    c"send",
    c"send-with-imm",
    c"rdma-read",
    c"atomic-cmp-and-swp",
    c"atomic-fetch-and-add",
    c"local-inv",
    c"bind-mw",
    c"send-with-inv",
    c"tso",
    c"driver1",
    c"",
    c"",
    c"flush",
    c"atomic-write",
];

const PORT_STATE: &[&CStr] = &[
    c"no state change (NOP)",
    c"down",
    c"init",
    c"armed",
    c"active",
    c"active defer",
];

const NODE: &[&CStr] = &[
    c"unknown",
    c"InfiniBand channel adapter",
    c"InfiniBand switch",
    c"InfiniBand router",
    c"iWARP NIC",
    c"usNIC",
    c"usNIC UDP",
    c"unspecified",
];

#[unsafe(no_mangle)]
extern "C" fn ibv_wc_status_str(status: c_enum) -> *const c_char {
    pick(&WC_STATUS_TEXTS, status, c"unknown")
}

#[unsafe(no_mangle)]
extern "C" fn ibv_event_type_str(event: c_enum) -> *const c_char {
    pick(EVENT, event, c"unknown")
}

#[unsafe(no_mangle)]
extern "C" fn ibv_port_state_str(state: c_enum) -> *const c_char {
    pick(PORT_STATE, state, c"unknown")
}

/// Of later libibverbs, for programs of rdma-core's own (`enum ibv_wr_opcode`).
#[unsafe(no_mangle)]
extern "C" fn ibv_wr_opcode_str(opcode: c_enum) -> *const c_char {
    pick(OPCODE, opcode, c"unknown")
}

#[unsafe(no_mangle)]
extern "C" fn ibv_node_type_str(kind: c_enum) -> *const c_char {
    pick(NODE, kind, c"unknown")
}

/// `ibv_rate`: code, multiple of 2.5 Gbit/s if libibverbs has one for it, Mbit/s.
const RATES: &[(c_enum, Option<c_int>, c_int)] = &[
    (2, Some(1), 2500),
    (5, Some(2), 5000),
    (3, Some(4), 10000),
    (6, Some(8), 20000),
    (4, Some(12), 30000),
    (7, Some(16), 40000),
    (8, Some(24), 60000),
    (9, Some(32), 80000),
    (10, Some(48), 120_000),
    (11, None, 14062),
    (12, None, 56250),
    (13, None, 112_500),
    (14, None, 168_750),
    (15, None, 25781),
    (16, None, 103_125),
    (17, None, 206_250),
    (18, None, 309_375),
    (19, Some(11), 28125),
    (20, Some(20), 53125),
    (21, Some(160), 425_000),
    (22, Some(240), 637_500),
    (23, Some(320), 850_000),
    (24, Some(480), 1_275_000),
];

/// `IBV_RATE_MAX`.
const RATE_MAX: c_enum = 0;

#[unsafe(no_mangle)]
extern "C" fn ibv_rate_to_mult(rate: c_enum) -> c_int {
    RATES.iter().find(|r| r.0 == rate).and_then(|r| r.1).unwrap_or(-1)
}

#[unsafe(no_mangle)]
extern "C" fn mult_to_ibv_rate(mult: c_int) -> c_enum {
    RATES.iter().find(|r| r.1 == Some(mult)).map_or(RATE_MAX, |r| r.0)
}

#[unsafe(no_mangle)]
extern "C" fn ibv_rate_to_mbps(rate: c_enum) -> c_int {
    RATES.iter().find(|r| r.0 == rate).map_or(-1, |r| r.2)
}

#[unsafe(no_mangle)]
extern "C" fn mbps_to_ibv_rate(mbps: c_int) -> c_enum {
    RATES.iter().find(|r| r.2 == mbps).map_or(RATE_MAX, |r| r.0)
}

/// Does nothing: registered memory is accessed through the process's own mappings, not by DMA, so that copy-on-write is harmless.
#[unsafe(no_mangle)]
extern "C" fn ibv_fork_init() -> c_int {
    0
}

/// `IBV_FORK_UNNEEDED`.
#[unsafe(no_mangle)]
extern "C" fn ibv_is_fork_initialized() -> c_enum {
    2
}

#[unsafe(no_mangle)]
extern "C" fn ibv_dontfork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn ibv_dofork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}
