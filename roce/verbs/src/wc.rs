//! Work completions.

use core::{
    ffi::CStr,
    fmt::{self, Display, Formatter},
};

use bitflags::bitflags;
use roce_bth::{Qpn, RKey};

use crate::time::Instant;

/// How a work request ended (`ibv_wc_status`; same numbers).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum WcStatus {
    #[default]
    Success = 0,
    LocalLengthError = 1,
    LocalQpOperationError = 2,
    LocalEecOperationError = 3,
    LocalProtectionError = 4,
    FlushError = 5,
    MwBindError = 6,
    BadResponseError = 7,
    LocalAccessError = 8,
    RemoteInvalidRequestError = 9,
    RemoteAccessError = 10,
    RemoteOperationError = 11,
    RetryExceeded = 12,
    RnrRetryExceeded = 13,
    LocalRddViolation = 14,
    RemoteInvalidRdRequest = 15,
    RemoteAborted = 16,
    InvalidEecn = 17,
    InvalidEecState = 18,
    FatalError = 19,
    ResponseTimeout = 20,
    GeneralError = 21,
}

/// Texts of `ibv_wc_status_str`, by number.
pub static WC_STATUS_TEXTS: [&CStr; 24] = [
    c"success",
    c"local length error",
    c"local QP operation error",
    c"local EE context operation error",
    c"local protection error",
    c"Work Request Flushed Error",
    c"memory management operation error",
    c"bad response error",
    c"local access error",
    c"remote invalid request error",
    c"remote access error",
    c"remote operation error",
    c"transport retry counter exceeded",
    c"RNR retry counter exceeded",
    c"local RDD violation error",
    c"remote invalid RD request",
    c"aborted error",
    c"invalid EE context number",
    c"invalid EE context state",
    c"fatal error",
    c"response timeout error",
    c"general error",
    c"TM error",
    c"TM software rendezvous",
];

impl Display for WcStatus {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(&WC_STATUS_TEXTS[*self as usize].to_string_lossy())
    }
}

/// Operation that completed (`ibv_wc_opcode`; same numbers).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum WcOpcode {
    #[default]
    Send = 0,
    RdmaWrite = 1,
    RdmaRead = 2,
    CompareSwap = 3,
    FetchAdd = 4,
    BindWindow = 5,
    LocalInvalidate = 6,
    Flush = 8,
    AtomicWrite = 9,
    /// Fast registration (`IB_WC_REG_MR` has no number in userspace verbs).
    FastRegister = 16,
    Recv = 128,
    RecvRdmaWithImm = 129,
}

bitflags! {
    /// Flags of a completion (`ibv_wc_flags`; same bits).
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct WcFlags: u32 {
        /// A GRH (or IPv4 header) precedes the data.
        const GRH = 1;
        /// `imm` is valid.
        const WITH_IMM = 1 << 1;
        /// `invalidated` is valid.
        const WITH_INV = 1 << 3;
    }
}

/// A work completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Completion {
    /// The work request's mark.
    pub wr_id: u64,
    /// How it ended. Unless it is success only `wr_id`, `status`, `vendor_err` and `qpn` mean something.
    pub status: WcStatus,
    /// Operation that completed.
    pub opcode: WcOpcode,
    /// Cause, as the device's vendor numbers it; 0 of software devices, where `roce::Qp::take_failure` has it in words.
    pub vendor_err: u32,
    /// Bytes received, read, or returned by an atomic.
    pub byte_len: u32,
    /// Immediate data as a big-endian number.
    pub imm: u32,
    /// The rkey that a SEND with invalidate revoked.
    pub invalidated: RKey,
    /// The local queue pair.
    pub qpn: Qpn,
    /// The sender's queue pair (datagrams).
    pub src_qp: Qpn,
    /// The sender's path was on this entry of the partition table: 0, there is one.
    pub pkey_index: u16,
    /// The service level that the message came with. RoCE has none: with datagrams it is the kind of network header as
    /// ConnectX tells it, 1 for IPv6 and 2 for IPv4; else 0.
    pub sl: u8,
    /// When it was made, on the driver's clock (`ibv_wc_read_completion_ts`).
    pub timestamp: Instant,
    /// Which fields are valid.
    pub flags: WcFlags,
    /// The message asked for a solicited event.
    pub solicited: bool,
}

impl Completion {
    /// Whether the work request succeeded.
    pub fn is_ok(&self) -> bool {
        self.status == WcStatus::Success
    }
}
