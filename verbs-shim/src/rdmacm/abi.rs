//! Messages that librdmacm writes to `/dev/infiniband/rdma_cm` and reads from it: ABI version 4, the structures of
//! `uapi/rdma/rdma_user_cm.h` and those that it takes from `ib_user_verbs.h` and `ib_user_sa.h`. Integers are the
//! host's unless a comment gives another byte order.

#[cfg(test)]
use std::fmt::Debug;

use libc::c_int;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, TryFromBytes};

use crate::abi::{c_enum, c_types};

/// Private data of a command or event, bytes (`RDMA_MAX_PRIVATE_DATA`).
pub(crate) const MAX_PRIVATE_DATA: usize = 256;
/// `struct sockaddr_storage`.
pub(crate) const STORAGE: usize = 128;
/// `struct sockaddr_in6`, which the older commands have.
pub(crate) const SOCKADDR_IN6: usize = 28;

/// Commands (`RDMA_USER_CM_CMD_*`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, TryFromBytes, Immutable)]
#[allow(dead_code, reason = "constructed by TryFromBytes")]
#[repr(u32)]
pub(crate) enum Cmd {
    CreateId,
    DestroyId,
    BindIp,
    ResolveIp,
    ResolveRoute,
    QueryRoute,
    Connect,
    Listen,
    Accept,
    Reject,
    Disconnect,
    InitQpAttr,
    GetEvent,
    GetOption,
    SetOption,
    Notify,
    JoinIpMcast,
    LeaveMcast,
    MigrateId,
    Query,
    Bind,
    ResolveAddr,
    JoinMcast,
}

impl Cmd {
    /// Function of librdmacm that the command is for.
    pub(crate) fn function(self) -> &'static str {
        match self {
            Self::CreateId => "rdma_create_id",
            Self::DestroyId => "rdma_destroy_id",
            Self::BindIp | Self::Bind => "rdma_bind_addr",
            Self::ResolveIp | Self::ResolveAddr => "rdma_resolve_addr",
            Self::ResolveRoute => "rdma_resolve_route",
            Self::QueryRoute | Self::Query => "librdmacm's query of a route",
            Self::Connect => "rdma_connect",
            Self::Listen => "rdma_listen",
            Self::Accept => "rdma_accept",
            Self::Reject => "rdma_reject",
            Self::Disconnect => "rdma_disconnect",
            Self::InitQpAttr => "rdma_init_qp_attr",
            Self::GetEvent => "rdma_get_cm_event",
            Self::GetOption => "rdma_get_option",
            Self::SetOption => "rdma_set_option",
            Self::Notify => "rdma_notify",
            Self::JoinIpMcast | Self::JoinMcast => "rdma_join_multicast",
            Self::LeaveMcast => "rdma_leave_multicast",
            Self::MigrateId => "rdma_migrate_id",
        }
    }

    /// Whether it may open the transport, and so start a broker.
    pub(crate) fn may_open(self) -> bool {
        matches!(
            self,
            Self::BindIp
                | Self::Bind
                | Self::ResolveIp
                | Self::ResolveAddr
                | Self::Listen
                | Self::Connect
                | Self::JoinIpMcast
                | Self::JoinMcast
        )
    }

    pub(crate) fn from_code(code: u32) -> Option<Self> {
        Self::try_read_from_bytes(&code.to_ne_bytes()).ok()
    }
}

/// Events (`enum rdma_cm_event_type`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(test, derive(TryFromBytes, Immutable))]
#[repr(u32)]
pub(crate) enum EventType {
    AddrResolved,
    AddrError,
    RouteResolved,
    ConnectRequest = 4,
    ConnectResponse,
    Unreachable = 7,
    Rejected,
    Established,
    Disconnected,
    DeviceRemoval,
    MulticastJoin,
    TimewaitExit = 15,
}

mod names {
    use crate::abi::c_consts;

    c_consts! {
        {}
        /// Options of [`super::Query`], and levels and names of [`super::SetOption`].
        mod option: u32 = "RDMA_" {
            USER_CM_QUERY_ADDR = 0,
            USER_CM_QUERY_PATH = 1,
            USER_CM_QUERY_GID = 2,
            OPTION_ID = 0,
            OPTION_IB = 1,
            OPTION_ID_TOS = 0,
            OPTION_ID_REUSEADDR = 1,
            OPTION_ID_AFONLY = 2,
            OPTION_ID_ACK_TIMEOUT = 3,
            OPTION_IB_PATH = 1,
        }
        /// Flags of [`super::PathRecData`].
        mod path: u32 = "IB_PATH_" {
            GMP = 1,
            PRIMARY = 1 << 1,
            BIDIRECTIONAL = 1 << 3 | 1 << 5,
        }
    }
}
pub(crate) use names::option;
use names::path;

/// Flags of [`PathRecData`] for the one path that there is.
pub(crate) const PATH_FLAGS: u32 = path::GMP | path::PRIMARY | path::BIDIRECTIONAL;

c_types! {
    derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout);

    /// Header of every command.
    struct Header = "struct rdma_ucm_cmd_hdr" {
        cmd: u32,
        /// Bytes of the command behind this header.
        len = "in": u16,
        /// Bytes that the response may have.
        out: u16,
    }

    struct CreateId = "struct rdma_ucm_create_id" {
        uid response: u64,
        ps: u16,
        qp_type: u8,
        reserved: [u8; 5],
    }

    /// The response of CREATE_ID, JOIN_MCAST (an id), DESTROY_ID, LEAVE_MCAST and MIGRATE_ID (events reported).
    #[derive(PartialEq, Eq, Debug)]
    struct Number = "struct rdma_ucm_create_id_resp" {
        id: u32,
    }

    /// DESTROY_ID and LEAVE_MCAST.
    struct DestroyId = "struct rdma_ucm_destroy_id" {
        response: u64,
        id reserved: u32,
    }

    struct BindIp = "struct rdma_ucm_bind_ip" {
        response: u64,
        addr: [u8; SOCKADDR_IN6],
        id: u32,
    }

    struct Bind = "struct rdma_ucm_bind" {
        id: u32,
        addr_size reserved: u16,
        addr: [u8; STORAGE],
    }

    struct ResolveIp = "struct rdma_ucm_resolve_ip" {
        src = "src_addr" dst = "dst_addr": [u8; SOCKADDR_IN6],
        id timeout_ms: u32,
    }

    struct ResolveAddr = "struct rdma_ucm_resolve_addr" {
        id timeout_ms: u32,
        src_size dst_size: u16,
        reserved: u32,
        src = "src_addr" dst = "dst_addr": [u8; STORAGE],
    }

    /// RESOLVE_ROUTE, LISTEN (`value` is the backlog) and NOTIFY (an asynchronous event).
    struct IdValue = "struct rdma_ucm_listen" {
        id value = "backlog": u32,
    }

    /// QUERY and QUERY_ROUTE; INIT_QP_ATTR, where `option` is the state.
    struct Query = "struct rdma_ucm_query" {
        response: u64,
        id option: u32,
    }

    /// `struct ib_user_path_rec`.
    struct UserPathRec = "struct ib_user_path_rec" {
        dgid sgid: [u8; 16],
        dlid slid: u16,
        raw_traffic: c_int,
        /// Big-endian.
        flow_label: [u8; 4],
        reversible: c_int,
        mtu: u32,
        /// Big-endian.
        pkey: u16,
        hop_limit traffic_class numb_path sl mtu_selector rate_selector rate packet_life_time_selector
            packet_life_time preference: u8,
    }

    struct QueryRouteResp = "struct rdma_ucm_query_route_resp" {
        /// Big-endian.
        node_guid: [u8; 8],
        ib_route: [UserPathRec; 2],
        src_addr dst_addr: [u8; SOCKADDR_IN6],
        num_paths: u32,
        port_num: u8,
        reserved: [u8; 3],
        ibdev_index reserved1: u32,
    }

    struct QueryAddrResp = "struct rdma_ucm_query_addr_resp" {
        /// Big-endian.
        node_guid: [u8; 8],
        port_num reserved: u8,
        /// Big-endian.
        pkey: u16,
        src_size dst_size: u16,
        src_addr dst_addr: [u8; STORAGE],
        ibdev_index reserved1: u32,
    }

    /// Head of the answer to QUERY (paths); [`PathRecData`] follow.
    struct QueryPathResp = "struct rdma_ucm_query_path_resp" {
        num_paths reserved: u32,
    }

    /// `struct ib_path_rec_data`: flags and a packed path record (IBA 15.2.5.16), all of it big-endian.
    struct PathRecData = "struct ib_path_rec_data" {
        flags reserved: u32,
        path = "path_rec": PackedPath,
    }

    /// A path record as the subnet administrator sends it (`struct ibv_path_record`).
    struct PackedPath = "struct ibv_path_record" {
        service_id: [u8; 8],
        dgid sgid: [u8; 16],
        dlid slid: [u8; 2],
        /// 4 reserved bits, flow label, hop limit.
        flow_label_hop_limit = "flowlabel_hoplimit": [u8; 4],
        tclass: u8,
        /// Reversible in the top bit, number of paths.
        reversible_numpath: u8,
        pkey: u16,
        qos_class_sl = "qosclass_sl": [u8; 2],
        /// Selector in the two top bits, as in the next two.
        mtu: u8,
        rate packet_life_time = "packetlifetime" preference: u8,
        reserved: [u8; 6],
    }

    struct ConnParam = "struct rdma_ucm_conn_param" {
        qp_num qkey: u32,
        private_data: [u8; MAX_PRIVATE_DATA],
        private_data_len srq responder_resources initiator_depth flow_control retry_count rnr_retry_count valid: u8,
    }

    struct UdParam = "struct rdma_ucm_ud_param" {
        qp_num qkey: u32,
        ah_attr: AhAttr,
        private_data: [u8; MAX_PRIVATE_DATA],
        private_data_len: u8,
        reserved: [u8; 7],
    }

    /// `struct ib_uverbs_ah_attr`, its `grh` included.
    #[derive(Debug, Default)]
    struct AhAttr = "struct ib_uverbs_ah_attr" {
        dgid = "grh.dgid": [u8; 16],
        flow_label = "grh.flow_label": u32,
        sgid_index = "grh.sgid_index" hop_limit = "grh.hop_limit" traffic_class = "grh.traffic_class"
            grh_reserved = "grh.reserved": u8,
        dlid: u16,
        sl src_path_bits static_rate is_global port_num reserved: u8,
    }

    /// `struct ib_uverbs_qp_attr`.
    #[derive(Debug, Default)]
    struct QpAttrResp = "struct ib_uverbs_qp_attr" {
        mask = "qp_attr_mask" state = "qp_state": u32,
        cur_state = "cur_qp_state" path_mtu path_mig_state: c_enum,
        qkey rq_psn sq_psn dest_qp_num access = "qp_access_flags": u32,
        ah_attr alt_ah_attr: AhAttr,
        max_send_wr max_recv_wr max_send_sge max_recv_sge max_inline_data: u32,
        pkey_index alt_pkey_index: u16,
        en_sqd_async_notify sq_draining max_rd_atomic max_dest_rd_atomic min_rnr_timer port_num timeout retry_cnt
            rnr_retry alt_port_num alt_timeout: u8,
        reserved: [u8; 5],
    }

    /// Enhanced connection establishment: what vendors agree on. Our queue pairs have none.
    #[derive(Debug, Default)]
    struct Ece = "struct rdma_ucm_ece" {
        vendor_id attr_mod: u32,
    }

    /// CONNECT without the trailing ECE, which older programs leave out.
    struct Connect = "struct rdma_ucm_connect" until "ece" {
        conn_param: ConnParam,
        id reserved: u32,
    }

    /// ACCEPT without the trailing ECE, which older programs leave out.
    struct Accept = "struct rdma_ucm_accept" until "ece" {
        uid: u64,
        conn_param: ConnParam,
        id reserved: u32,
    }

    struct Reject = "struct rdma_ucm_reject" {
        id: u32,
        private_data_len reason: u8,
        reserved: [u8; 2],
        private_data: [u8; MAX_PRIVATE_DATA],
    }

    struct JoinIpMcast = "struct rdma_ucm_join_ip_mcast" {
        response uid: u64,
        addr: [u8; SOCKADDR_IN6],
        id: u32,
    }

    struct JoinMcast = "struct rdma_ucm_join_mcast" {
        response uid: u64,
        id: u32,
        addr_size join_flags: u16,
        addr: [u8; STORAGE],
    }

    struct GetEvent = "struct rdma_ucm_get_event" {
        response: u64,
    }

    struct EventResp = "struct rdma_ucm_event_resp" {
        uid: u64,
        id event: u32,
        /// A negative errno, a reject reason, or a SIDR status.
        status: u32,
        /// A [`ConnParam`] (with 32 zeros behind it) or a [`UdParam`], by the id's queue pair type.
        param: [u8; size_of::<UdParam>()],
        reserved: u32,
        ece: Ece,
    }

    struct SetOption = "struct rdma_ucm_set_option" {
        optval: u64,
        id level optname optlen: u32,
    }

    struct MigrateId = "struct rdma_ucm_migrate_id" {
        response: u64,
        id fd: u32,
    }
}

/// The least that a caller of QUERY (addresses, GIDs) and QUERY_ROUTE must have room for: all but the device's index.
pub(crate) const QUERY_ADDR_MIN: usize = core::mem::offset_of!(QueryAddrResp, ibdev_index);
/// See [`QUERY_ADDR_MIN`].
pub(crate) const QUERY_ROUTE_MIN: usize = core::mem::offset_of!(QueryRouteResp, ibdev_index);

/// The least that a caller of GET_EVENT must have room for: all but `reserved` and the ECE.
pub(crate) const EVENT_MIN: usize = core::mem::offset_of!(EventResp, reserved);

/// All zeros: most answers start so.
pub(crate) fn zeroed<T: FromZeros>() -> T {
    T::new_zeroed()
}

/// Conditions on the numbers of an enumeration: `CreateId` is `RDMA_USER_CM_CMD_CREATE_ID` in C.
#[cfg(test)]
fn numbers<T: TryFromBytes + Debug>(prefix: &str) -> Vec<String> {
    let all = (0..=u8::MAX).filter_map(|n| Some((n, T::try_read_from_bytes(&u32::from(n).to_ne_bytes()).ok()?)));
    let condition = |(number, value)| {
        let mut name = prefix.to_owned();
        for letter in format!("{value:?}").chars() {
            name.extend(letter.is_uppercase().then_some('_'));
            name.extend(letter.to_uppercase());
        }
        format!("{name} == {number}")
    };
    all.map(condition).collect()
}

/// Constants of `rdma_user_cm.h` and `ib_user_sa.h`, and sizes of addresses.
#[cfg(test)]
pub(crate) fn constants() -> Vec<String> {
    let sizes = vec![
        format!("RDMA_MAX_PRIVATE_DATA == {MAX_PRIVATE_DATA}"),
        format!("sizeof(struct sockaddr_storage) == {STORAGE}"),
        format!("sizeof(struct sockaddr_in6) == {SOCKADDR_IN6}"),
    ];
    [sizes, numbers::<Cmd>("RDMA_USER_CM_CMD"), names::constants()].concat()
}

/// Constants of `rdma_cma.h`.
#[cfg(test)]
pub(crate) fn events() -> Vec<String> {
    numbers::<EventType>("RDMA_CM_EVENT")
}
