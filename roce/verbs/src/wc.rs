//! Work completions.

use core::{
    ffi::CStr,
    fmt::{self, Display, Formatter},
};

use bitflags::bitflags;
use roce_bth::{Qpn, RKey};

use crate::{numbered::numbered, time::Instant};

macro_rules! statuses {
    ($( $name:ident = $number:literal, $short:literal, $text:literal; )*) => {
        /// How a work request ended (`ibv_wc_status`; same numbers).
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
        #[repr(u32)]
        #[allow(missing_docs)]
        pub enum WcStatus {
            #[default]
            $( $name = $number, )*
        }

        impl WcStatus {
            /// All by number, with their names in `ibv_wc_status` behind `IBV_WC_`.
            pub const NAMED: &[(&str, Self)] = &[$( ($short, Self::$name), )*];
        }

        /// Texts of `ibv_wc_status_str`, by number.
        pub static WC_STATUS_TEXTS: [&CStr; 24] = [$( $text, )* c"TM error", c"TM software rendezvous"];
    };
}

statuses! {
    Success = 0, "SUCCESS", c"success";
    LocalLengthError = 1, "LOC_LEN_ERR", c"local length error";
    LocalQpOperationError = 2, "LOC_QP_OP_ERR", c"local QP operation error";
    LocalEecOperationError = 3, "LOC_EEC_OP_ERR", c"local EE context operation error";
    LocalProtectionError = 4, "LOC_PROT_ERR", c"local protection error";
    FlushError = 5, "WR_FLUSH_ERR", c"Work Request Flushed Error";
    MwBindError = 6, "MW_BIND_ERR", c"memory management operation error";
    BadResponseError = 7, "BAD_RESP_ERR", c"bad response error";
    LocalAccessError = 8, "LOC_ACCESS_ERR", c"local access error";
    RemoteInvalidRequestError = 9, "REM_INV_REQ_ERR", c"remote invalid request error";
    RemoteAccessError = 10, "REM_ACCESS_ERR", c"remote access error";
    RemoteOperationError = 11, "REM_OP_ERR", c"remote operation error";
    RetryExceeded = 12, "RETRY_EXC_ERR", c"transport retry counter exceeded";
    RnrRetryExceeded = 13, "RNR_RETRY_EXC_ERR", c"RNR retry counter exceeded";
    LocalRddViolation = 14, "LOC_RDD_VIOL_ERR", c"local RDD violation error";
    RemoteInvalidRdRequest = 15, "REM_INV_RD_REQ_ERR", c"remote invalid RD request";
    RemoteAborted = 16, "REM_ABORT_ERR", c"aborted error";
    InvalidEecn = 17, "INV_EECN_ERR", c"invalid EE context number";
    InvalidEecState = 18, "INV_EEC_STATE_ERR", c"invalid EE context state";
    FatalError = 19, "FATAL_ERR", c"fatal error";
    ResponseTimeout = 20, "RESP_TIMEOUT_ERR", c"response timeout error";
    GeneralError = 21, "GENERAL_ERR", c"general error";
}

impl Display for WcStatus {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(&WC_STATUS_TEXTS[*self as usize].to_string_lossy())
    }
}

numbered! {
    /// Operation that completed (`ibv_wc_opcode`; same numbers).
    #[derive(Default)]
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
