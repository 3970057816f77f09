//! Numbers of `verbs.h` that are used here.

use libc::{c_int, c_uint};

use roce::verbs::wr::WrOpcode;

use super::c_enum;

pub(crate) const IBV_GID_TYPE_ROCE_V2: u32 = 2;
pub(crate) const IBV_NODE_CA: c_enum = 1;
pub(crate) const IBV_TRANSPORT_IB: c_enum = 0;
pub(crate) const IBV_ATOMIC_HCA: c_enum = 1;
pub(crate) const IBV_PORT_DOWN: c_enum = 1;
pub(crate) const IBV_PORT_ACTIVE: c_enum = 4;
pub(crate) const IBV_LINK_LAYER_ETHERNET: u8 = 2;
/// `IBV_QPF_GRH_REQUIRED` of `ibv_port_attr.flags`.
pub(crate) const IBV_QPF_GRH_REQUIRED: u8 = 1;

pub(crate) mod cap {
    //! `ibv_device_cap_flags`.
    use super::c_uint;
    pub(crate) const BAD_PKEY_CNTR: c_uint = 1 << 1;
    pub(crate) const BAD_QKEY_CNTR: c_uint = 1 << 2;
    pub(crate) const CHANGE_PHY_PORT: c_uint = 1 << 5;
    pub(crate) const UD_AV_PORT_ENFORCE: c_uint = 1 << 6;
    pub(crate) const CURR_QP_STATE_MOD: c_uint = 1 << 7;
    pub(crate) const PORT_ACTIVE_EVENT: c_uint = 1 << 10;
    pub(crate) const SYS_IMAGE_GUID: c_uint = 1 << 11;
    pub(crate) const RC_RNR_NAK_GEN: c_uint = 1 << 12;
    pub(crate) const SRQ_RESIZE: c_uint = 1 << 13;
    pub(crate) const MEM_WINDOW: c_uint = 1 << 17;
    pub(crate) const MEM_MGT_EXTENSIONS: c_uint = 1 << 21;
    pub(crate) const MEM_WINDOW_TYPE_2B: c_uint = 1 << 24;
    pub(crate) const XRC: c_uint = 1 << 20;
    /// `IB_UVERBS_DEVICE_ATOMIC_WRITE` of the kernel's header, for which libibverbs has no name: of `device_cap_flags_ex` alone.
    pub(crate) const EX_ATOMIC_WRITE: u64 = 1 << 40;
}

pub(crate) mod event {
    //! `ibv_event_type`.
    use super::c_enum;
    pub(crate) const CQ_ERR: c_enum = 0;
    pub(crate) const QP_FATAL: c_enum = 1;
    pub(crate) const QP_REQ_ERR: c_enum = 2;
    pub(crate) const QP_ACCESS_ERR: c_enum = 3;
    pub(crate) const COMM_EST: c_enum = 4;
    pub(crate) const SQ_DRAINED: c_enum = 5;
    pub(crate) const PATH_MIG: c_enum = 6;
    pub(crate) const PATH_MIG_ERR: c_enum = 7;
    pub(crate) const DEVICE_FATAL: c_enum = 8;
    pub(crate) const PORT_ACTIVE: c_enum = 9;
    pub(crate) const PORT_ERR: c_enum = 10;
    pub(crate) const SRQ_ERR: c_enum = 14;
    pub(crate) const SRQ_LIMIT_REACHED: c_enum = 15;
    pub(crate) const QP_LAST_WQE_REACHED: c_enum = 16;
    pub(crate) const GID_CHANGE: c_enum = 18;
}

pub(crate) mod access {
    //! `ibv_access_flags`.
    pub(crate) const ON_DEMAND: u32 = 1 << 6;
    pub(crate) const HUGETLB: u32 = 1 << 7;
    /// Flags that a device may ignore, such as relaxed ordering.
    pub(crate) const OPTIONAL_RANGE: u32 = 0x3ff0_0000;
}

pub(crate) const IBV_QPT_RC: c_enum = 2;
pub(crate) const IBV_QPT_UC: c_enum = 3;
pub(crate) const IBV_QPT_UD: c_enum = 4;
pub(crate) const IBV_QPT_XRC_SEND: c_enum = 9;
pub(crate) const IBV_QPT_XRC_RECV: c_enum = 10;

pub(crate) mod qp_init {
    //! `ibv_qp_init_attr_mask`.
    pub(crate) const PD: u32 = 1;
    pub(crate) const XRCD: u32 = 1 << 1;
    pub(crate) const CREATE_FLAGS: u32 = 1 << 2;
    pub(crate) const SEND_OPS_FLAGS: u32 = 1 << 6;
}

pub(crate) mod qp_open {
    //! `ibv_qp_open_attr_mask`.
    pub(crate) const NUM: u32 = 1;
    pub(crate) const XRCD: u32 = 1 << 1;
    pub(crate) const CONTEXT: u32 = 1 << 2;
    pub(crate) const TYPE: u32 = 1 << 3;
}

pub(crate) mod srq_init {
    //! `ibv_srq_init_attr_mask`.
    pub(crate) const TYPE: u32 = 1;
    pub(crate) const PD: u32 = 1 << 1;
    pub(crate) const XRCD: u32 = 1 << 2;
    pub(crate) const CQ: u32 = 1 << 3;
}

pub(crate) const IBV_SRQT_BASIC: c_enum = 0;
pub(crate) const IBV_SRQT_XRC: c_enum = 1;
pub(crate) const IBV_SRQ_MAX_WR: c_int = 1;
pub(crate) const IBV_SRQ_LIMIT: c_int = 2;

pub(crate) mod op {
    //! `ibv_wr_opcode`.
    use super::c_enum;
    pub(crate) const RDMA_WRITE: c_enum = 0;
    pub(crate) const RDMA_WRITE_WITH_IMM: c_enum = 1;
    pub(crate) const SEND: c_enum = 2;
    pub(crate) const SEND_WITH_IMM: c_enum = 3;
    pub(crate) const RDMA_READ: c_enum = 4;
    pub(crate) const ATOMIC_CMP_AND_SWP: c_enum = 5;
    pub(crate) const ATOMIC_FETCH_AND_ADD: c_enum = 6;
    pub(crate) const LOCAL_INV: c_enum = 7;
    pub(crate) const BIND_MW: c_enum = 8;
    pub(crate) const SEND_WITH_INV: c_enum = 9;
    pub(crate) const ATOMIC_WRITE: c_enum = 15;
}

/// The `ibv_wr_*` operations that a queue pair may be created with (`ibv_qp_create_send_ops_flags`): all but TSO.
pub(crate) const SEND_OPS: [(u64, WrOpcode); 11] = [
    (1, WrOpcode::RdmaWrite),
    (1 << 1, WrOpcode::RdmaWriteWithImm),
    (1 << 2, WrOpcode::Send),
    (1 << 3, WrOpcode::SendWithImm),
    (1 << 4, WrOpcode::RdmaRead),
    (1 << 5, WrOpcode::CompareSwap),
    (1 << 6, WrOpcode::FetchAdd),
    (1 << 7, WrOpcode::LocalInvalidate),
    (1 << 8, WrOpcode::BindWindow),
    (1 << 9, WrOpcode::SendWithInv),
    (1 << 12, WrOpcode::AtomicWrite),
];

pub(crate) const IBV_SEND_INLINE: c_uint = 1 << 3;
pub(crate) const IBV_SEND_IP_CSUM: c_uint = 1 << 4;

pub(crate) const IBV_MW_TYPE_1: c_enum = 1;
pub(crate) const IBV_MW_TYPE_2: c_enum = 2;

/// `ibv_create_cq_wc_flags` that can be had: the standard ones and both timestamps.
pub(crate) const CQ_WC_FLAGS: u64 = 0x7f | 1 << 7 | 1 << 11;
