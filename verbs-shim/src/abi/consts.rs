//! Numbers of `verbs.h` that are used here.

use libc::{c_int, c_uint};

use roce::verbs::wr::WrOpcode;

use super::c_enum;

c_consts! {
    {
        IBV_GID_TYPE_ROCE_V2: u32 = 2,
        IBV_NODE_CA: c_enum = 1,
        IBV_TRANSPORT_IB: c_enum = 0,
        IBV_ATOMIC_HCA: c_enum = 1,
        IBV_PORT_DOWN: c_enum = 1,
        IBV_PORT_ACTIVE: c_enum = 4,
        IBV_LINK_LAYER_ETHERNET: u8 = 2,
        /// Flag of `ibv_port_attr.flags`.
        IBV_QPF_GRH_REQUIRED: u8 = 1,
        IBV_QPT_RC: c_enum = 2,
        IBV_QPT_UC: c_enum = 3,
        IBV_QPT_UD: c_enum = 4,
        IBV_QPT_XRC_SEND: c_enum = 9,
        IBV_QPT_XRC_RECV: c_enum = 10,
        IBV_SRQT_BASIC: c_enum = 0,
        IBV_SRQT_XRC: c_enum = 1,
        IBV_SRQ_MAX_WR: c_int = 1,
        IBV_SRQ_LIMIT: c_int = 2,
        IBV_SEND_INLINE: c_uint = 1 << 3,
        IBV_SEND_IP_CSUM: c_uint = 1 << 4,
        IBV_MW_TYPE_1: c_enum = 1,
        IBV_MW_TYPE_2: c_enum = 2,
        IBV_WC_GRH: c_uint = 1,
        IBV_CREATE_CQ_ATTR_SINGLE_THREADED: u32 = 1,
    }

    /// `ibv_device_cap_flags`.
    mod cap: u32 = "IBV_DEVICE_" {
        BAD_PKEY_CNTR = 1 << 1,
        BAD_QKEY_CNTR = 1 << 2,
        CHANGE_PHY_PORT = 1 << 5,
        UD_AV_PORT_ENFORCE = 1 << 6,
        CURR_QP_STATE_MOD = 1 << 7,
        PORT_ACTIVE_EVENT = 1 << 10,
        SYS_IMAGE_GUID = 1 << 11,
        RC_RNR_NAK_GEN = 1 << 12,
        SRQ_RESIZE = 1 << 13,
        MEM_WINDOW = 1 << 17,
        MEM_MGT_EXTENSIONS = 1 << 21,
        MEM_WINDOW_TYPE_2B = 1 << 24,
        XRC = 1 << 20,
    }

    /// `ibv_event_type`.
    mod event: i32 = "IBV_EVENT_" {
        CQ_ERR = 0,
        QP_FATAL = 1,
        PATH_MIG_ERR = 7,
        DEVICE_FATAL = 8,
        PORT_ACTIVE = 9,
        PORT_ERR = 10,
        SRQ_ERR = 14,
        SRQ_LIMIT_REACHED = 15,
        QP_LAST_WQE_REACHED = 16,
        GID_CHANGE = 18,
    }

    /// `ibv_access_flags`.
    mod access: u32 = "IBV_ACCESS_" {
        ON_DEMAND = 1 << 6,
        HUGETLB = 1 << 7,
        /// Flags that a device may ignore, such as relaxed ordering.
        OPTIONAL_RANGE = 0x3ff0_0000,
    }

    /// `ibv_qp_init_attr_mask`.
    mod qp_init: u32 = "IBV_QP_INIT_ATTR_" {
        PD = 1,
        XRCD = 1 << 1,
        CREATE_FLAGS = 1 << 2,
        SEND_OPS_FLAGS = 1 << 6,
    }

    /// `ibv_qp_open_attr_mask`.
    mod qp_open: u32 = "IBV_QP_OPEN_ATTR_" {
        NUM = 1,
        XRCD = 1 << 1,
        CONTEXT = 1 << 2,
        TYPE = 1 << 3,
    }

    /// `ibv_srq_init_attr_mask`.
    mod srq_init: u32 = "IBV_SRQ_INIT_ATTR_" {
        TYPE = 1,
        PD = 1 << 1,
        XRCD = 1 << 2,
        CQ = 1 << 3,
    }

    /// `ibv_wr_opcode`.
    mod op: i32 = "IBV_WR_" {
        RDMA_WRITE = 0,
        RDMA_WRITE_WITH_IMM = 1,
        SEND = 2,
        SEND_WITH_IMM = 3,
        RDMA_READ = 4,
        ATOMIC_CMP_AND_SWP = 5,
        ATOMIC_FETCH_AND_ADD = 6,
        LOCAL_INV = 7,
        BIND_MW = 8,
        SEND_WITH_INV = 9,
        ATOMIC_WRITE = 15,
    }

    /// `ibv_rereg_mr_flags` and `ibv_rereg_mr_err_code`. The region is as it was after each of these errors; the others are about
    /// memory that libibverbs keeps from forked children, which is not done here.
    mod rereg: i32 = "IBV_REREG_MR_" {
        CHANGE_TRANSLATION = 1,
        CHANGE_PD = 1 << 1,
        CHANGE_ACCESS = 1 << 2,
        /// Reported by libibverbs: the arguments make no sense.
        ERR_INPUT = -1,
        /// Reported by the kernel, for any reason.
        ERR_CMD = -4,
    }

    /// `ibv_qp_create_send_ops_flags`.
    mod qp_ex: u64 = "IBV_QP_EX_WITH_" {
        RDMA_WRITE = 1,
        RDMA_WRITE_WITH_IMM = 1 << 1,
        SEND = 1 << 2,
        SEND_WITH_IMM = 1 << 3,
        RDMA_READ = 1 << 4,
        ATOMIC_CMP_AND_SWP = 1 << 5,
        ATOMIC_FETCH_AND_ADD = 1 << 6,
        LOCAL_INV = 1 << 7,
        BIND_MW = 1 << 8,
        SEND_WITH_INV = 1 << 9,
        ATOMIC_WRITE = 1 << 12,
    }

    /// `ibv_cq_init_attr_mask`.
    mod cq_init: u32 = "IBV_CQ_INIT_ATTR_MASK_" {
        FLAGS = 1,
        PD = 1 << 1,
    }

    /// `ibv_create_cq_wc_flags` that can be had.
    mod cq_wc: u64 = "IBV_WC_" {
        STANDARD_FLAGS = 0x7f,
        EX_WITH_COMPLETION_TIMESTAMP = 1 << 7,
        EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK = 1 << 11,
    }

    /// `ibv_parent_domain_init_attr_mask`.
    mod parent_domain: u32 = "IBV_PARENT_DOMAIN_INIT_ATTR_" {
        ALLOCATORS = 1,
        PD_CONTEXT = 1 << 1,
    }

    /// `ibv_xrcd_init_attr_mask`.
    mod xrcd_init: u32 = "IBV_XRCD_INIT_ATTR_" {
        FD = 1,
        OFLAGS = 1 << 1,
    }
}

/// `IB_UVERBS_DEVICE_ATOMIC_WRITE` of the kernel's header since Linux 6.2, for which libibverbs has no name: of `device_cap_flags_ex`
/// alone. Not compared, because older headers lack it.
pub(crate) const CAP_EX_ATOMIC_WRITE: u64 = 1 << 40;

/// The `ibv_wr_*` operations that a queue pair may be created with: all but TSO.
pub(crate) const SEND_OPS: [(u64, WrOpcode); 11] = [
    (qp_ex::RDMA_WRITE, WrOpcode::RdmaWrite),
    (qp_ex::RDMA_WRITE_WITH_IMM, WrOpcode::RdmaWriteWithImm),
    (qp_ex::SEND, WrOpcode::Send),
    (qp_ex::SEND_WITH_IMM, WrOpcode::SendWithImm),
    (qp_ex::RDMA_READ, WrOpcode::RdmaRead),
    (qp_ex::ATOMIC_CMP_AND_SWP, WrOpcode::CompareSwap),
    (qp_ex::ATOMIC_FETCH_AND_ADD, WrOpcode::FetchAdd),
    (qp_ex::LOCAL_INV, WrOpcode::LocalInvalidate),
    (qp_ex::BIND_MW, WrOpcode::BindWindow),
    (qp_ex::SEND_WITH_INV, WrOpcode::SendWithInv),
    (qp_ex::ATOMIC_WRITE, WrOpcode::AtomicWrite),
];

/// All of [`cq_wc`].
pub(crate) const CQ_WC_FLAGS: u64 =
    cq_wc::STANDARD_FLAGS | cq_wc::EX_WITH_COMPLETION_TIMESTAMP | cq_wc::EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;
