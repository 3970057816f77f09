//! Messages that librdmacm writes to `/dev/infiniband/rdma_cm` and reads from it: ABI version 4, the structures of
//! `uapi/rdma/rdma_user_cm.h` and those that it takes from `ib_user_verbs.h` and `ib_user_sa.h`. Integers are the
//! host's unless the comment says otherwise.

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Private data of a command or event, bytes (`RDMA_MAX_PRIVATE_DATA`).
pub(crate) const MAX_PRIVATE_DATA: usize = 256;
/// `struct sockaddr_storage`.
pub(crate) const STORAGE: usize = 128;
/// `struct sockaddr_in6`, which the older commands have.
pub(crate) const SOCKADDR_IN6: usize = 28;

/// Commands (`RDMA_USER_CM_CMD_*`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
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

    const ALL: [Self; 23] = [
        Self::CreateId,
        Self::DestroyId,
        Self::BindIp,
        Self::ResolveIp,
        Self::ResolveRoute,
        Self::QueryRoute,
        Self::Connect,
        Self::Listen,
        Self::Accept,
        Self::Reject,
        Self::Disconnect,
        Self::InitQpAttr,
        Self::GetEvent,
        Self::GetOption,
        Self::SetOption,
        Self::Notify,
        Self::JoinIpMcast,
        Self::LeaveMcast,
        Self::MigrateId,
        Self::Query,
        Self::Bind,
        Self::ResolveAddr,
        Self::JoinMcast,
    ];

    pub(crate) fn from_code(code: u32) -> Option<Self> {
        Self::ALL.get(code as usize).copied()
    }
}

/// Events (`enum rdma_cm_event_type`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
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

/// Options of [`Query`].
pub(crate) mod query {
    pub(crate) const ADDR: u32 = 0;
    pub(crate) const PATH: u32 = 1;
    pub(crate) const GID: u32 = 2;
}

/// Levels and names of [`SetOption`].
pub(crate) mod option {
    pub(crate) const LEVEL_ID: u32 = 0;
    pub(crate) const LEVEL_IB: u32 = 1;
    pub(crate) const ID_TOS: u32 = 0;
    pub(crate) const ID_REUSEADDR: u32 = 1;
    pub(crate) const ID_AFONLY: u32 = 2;
    pub(crate) const ID_ACK_TIMEOUT: u32 = 3;
    pub(crate) const IB_PATH: u32 = 1;
}

/// Flags of [`PathRecData`] for the one path that there is: `GMP | PRIMARY | BIDIRECTIONAL`.
pub(crate) const PATH_FLAGS: u32 = 1 | 1 << 1 | 1 << 3 | 1 << 5;

/// Header of every command.
#[derive(Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Header {
    pub(crate) cmd: u32,
    /// Bytes of the command behind this header.
    pub(crate) len: u16,
    /// Bytes that the response may have.
    pub(crate) out: u16,
}

#[derive(Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct CreateId {
    pub(crate) uid: u64,
    pub(crate) response: u64,
    pub(crate) ps: u16,
    pub(crate) qp_type: u8,
    pub(crate) reserved: [u8; 5],
}

/// The response of CREATE_ID, JOIN_MCAST (an id), DESTROY_ID, LEAVE_MCAST and MIGRATE_ID (events reported).
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Number(pub(crate) u32);

/// DESTROY_ID and LEAVE_MCAST.
#[derive(Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct DestroyId {
    pub(crate) response: u64,
    pub(crate) id: u32,
    pub(crate) reserved: u32,
}

#[derive(Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct BindIp {
    pub(crate) response: u64,
    pub(crate) addr: [u8; SOCKADDR_IN6],
    pub(crate) id: u32,
}

#[derive(Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Bind {
    pub(crate) id: u32,
    pub(crate) addr_size: u16,
    pub(crate) reserved: u16,
    pub(crate) addr: [u8; STORAGE],
}

#[derive(Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct ResolveIp {
    pub(crate) src: [u8; SOCKADDR_IN6],
    pub(crate) dst: [u8; SOCKADDR_IN6],
    pub(crate) id: u32,
    pub(crate) timeout_ms: u32,
}

#[derive(Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct ResolveAddr {
    pub(crate) id: u32,
    pub(crate) timeout_ms: u32,
    pub(crate) src_size: u16,
    pub(crate) dst_size: u16,
    pub(crate) reserved: u32,
    pub(crate) src: [u8; STORAGE],
    pub(crate) dst: [u8; STORAGE],
}

/// RESOLVE_ROUTE, LISTEN (`value` is the backlog) and NOTIFY (an asynchronous event).
#[derive(Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct IdValue {
    pub(crate) id: u32,
    pub(crate) value: u32,
}

/// QUERY and QUERY_ROUTE; INIT_QP_ATTR, where `option` is the state.
#[derive(Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Query {
    pub(crate) response: u64,
    pub(crate) id: u32,
    pub(crate) option: u32,
}

/// `struct ib_user_path_rec`.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct UserPathRec {
    pub(crate) dgid: [u8; 16],
    pub(crate) sgid: [u8; 16],
    pub(crate) dlid: u16,
    pub(crate) slid: u16,
    pub(crate) raw_traffic: u32,
    /// Big-endian.
    pub(crate) flow_label: [u8; 4],
    pub(crate) reversible: u32,
    pub(crate) mtu: u32,
    /// Big-endian.
    pub(crate) pkey: [u8; 2],
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
    pub(crate) numb_path: u8,
    pub(crate) sl: u8,
    pub(crate) mtu_selector: u8,
    pub(crate) rate_selector: u8,
    pub(crate) rate: u8,
    pub(crate) packet_life_time_selector: u8,
    pub(crate) packet_life_time: u8,
    pub(crate) preference: u8,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct QueryRouteResp {
    /// Big-endian.
    pub(crate) node_guid: [u8; 8],
    pub(crate) ib_route: [UserPathRec; 2],
    pub(crate) src_addr: [u8; SOCKADDR_IN6],
    pub(crate) dst_addr: [u8; SOCKADDR_IN6],
    pub(crate) num_paths: u32,
    pub(crate) port_num: u8,
    pub(crate) reserved: [u8; 3],
    pub(crate) ibdev_index: u32,
    pub(crate) reserved1: u32,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct QueryAddrResp {
    /// Big-endian.
    pub(crate) node_guid: [u8; 8],
    pub(crate) port_num: u8,
    pub(crate) reserved: u8,
    /// Big-endian.
    pub(crate) pkey: [u8; 2],
    pub(crate) src_size: u16,
    pub(crate) dst_size: u16,
    pub(crate) src_addr: [u8; STORAGE],
    pub(crate) dst_addr: [u8; STORAGE],
    pub(crate) ibdev_index: u32,
    pub(crate) reserved1: u32,
}

/// The least that a caller of QUERY (addresses, GIDs) and QUERY_ROUTE must have room for: all but the device's index.
pub(crate) const QUERY_ADDR_MIN: usize = core::mem::offset_of!(QueryAddrResp, ibdev_index);
/// See [`QUERY_ADDR_MIN`].
pub(crate) const QUERY_ROUTE_MIN: usize = core::mem::offset_of!(QueryRouteResp, ibdev_index);

/// Head of the answer to QUERY (paths); [`PathRecData`] follow.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct QueryPathResp {
    pub(crate) num_paths: u32,
    pub(crate) reserved: u32,
}

/// `struct ib_path_rec_data`: flags and a packed path record (IBA 15.2.5.16), all of it big-endian.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct PathRecData {
    pub(crate) flags: u32,
    pub(crate) reserved: u32,
    pub(crate) path: PackedPath,
}

/// A path record as the subnet administrator sends it (`struct ibv_path_record`).
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct PackedPath {
    pub(crate) service_id: [u8; 8],
    pub(crate) dgid: [u8; 16],
    pub(crate) sgid: [u8; 16],
    pub(crate) dlid: [u8; 2],
    pub(crate) slid: [u8; 2],
    /// 4 reserved bits, flow label, hop limit.
    pub(crate) flow_label_hop_limit: [u8; 4],
    pub(crate) tclass: u8,
    /// Reversible in the top bit, number of paths.
    pub(crate) reversible_numpath: u8,
    pub(crate) pkey: [u8; 2],
    pub(crate) qos_class_sl: [u8; 2],
    /// Selector in the two top bits, as in the next two.
    pub(crate) mtu: u8,
    pub(crate) rate: u8,
    pub(crate) packet_life_time: u8,
    pub(crate) preference: u8,
    pub(crate) reserved: [u8; 6],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct ConnParam {
    pub(crate) qp_num: u32,
    pub(crate) qkey: u32,
    pub(crate) private_data: [u8; MAX_PRIVATE_DATA],
    pub(crate) private_data_len: u8,
    pub(crate) srq: u8,
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
    pub(crate) flow_control: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry_count: u8,
    pub(crate) valid: u8,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct UdParam {
    pub(crate) qp_num: u32,
    pub(crate) qkey: u32,
    pub(crate) ah_attr: AhAttr,
    pub(crate) private_data: [u8; MAX_PRIVATE_DATA],
    pub(crate) private_data_len: u8,
    pub(crate) reserved: [u8; 7],
}

/// `struct ib_uverbs_ah_attr`, its `grh` included.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct AhAttr {
    pub(crate) dgid: [u8; 16],
    pub(crate) flow_label: u32,
    pub(crate) sgid_index: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
    pub(crate) grh_reserved: u8,
    pub(crate) dlid: u16,
    pub(crate) sl: u8,
    pub(crate) src_path_bits: u8,
    pub(crate) static_rate: u8,
    pub(crate) is_global: u8,
    pub(crate) port_num: u8,
    pub(crate) reserved: u8,
}

/// `struct ib_uverbs_qp_attr`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct QpAttrResp {
    pub(crate) mask: u32,
    pub(crate) state: u32,
    pub(crate) cur_state: u32,
    pub(crate) path_mtu: u32,
    pub(crate) path_mig_state: u32,
    pub(crate) qkey: u32,
    pub(crate) rq_psn: u32,
    pub(crate) sq_psn: u32,
    pub(crate) dest_qp_num: u32,
    pub(crate) access: u32,
    pub(crate) ah_attr: AhAttr,
    pub(crate) alt_ah_attr: AhAttr,
    pub(crate) caps: [u32; 5],
    pub(crate) pkey_index: u16,
    pub(crate) alt_pkey_index: u16,
    pub(crate) en_sqd_async_notify: u8,
    pub(crate) sq_draining: u8,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) port_num: u8,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) alt_port_num: u8,
    pub(crate) alt_timeout: u8,
    pub(crate) reserved: [u8; 5],
}

/// Enhanced connection establishment: what vendors agree on. Our queue pairs have none.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Ece {
    pub(crate) vendor_id: u32,
    pub(crate) attr_mod: u32,
}

/// CONNECT without the trailing ECE, which older programs leave out.
#[derive(Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Connect {
    pub(crate) conn_param: ConnParam,
    pub(crate) id: u32,
    pub(crate) reserved: u32,
}

/// ACCEPT without the trailing ECE, which older programs leave out.
#[derive(Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Accept {
    pub(crate) uid: u64,
    pub(crate) conn_param: ConnParam,
    pub(crate) id: u32,
    pub(crate) reserved: u32,
}

#[derive(Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Reject {
    pub(crate) id: u32,
    pub(crate) private_data_len: u8,
    pub(crate) reason: u8,
    pub(crate) reserved: [u8; 2],
    pub(crate) private_data: [u8; MAX_PRIVATE_DATA],
}

#[derive(Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct JoinIpMcast {
    pub(crate) response: u64,
    pub(crate) uid: u64,
    pub(crate) addr: [u8; SOCKADDR_IN6],
    pub(crate) id: u32,
}

#[derive(Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct JoinMcast {
    pub(crate) response: u64,
    pub(crate) uid: u64,
    pub(crate) id: u32,
    pub(crate) addr_size: u16,
    pub(crate) join_flags: u16,
    pub(crate) addr: [u8; STORAGE],
}

#[derive(Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct GetEvent {
    pub(crate) response: u64,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct EventResp {
    pub(crate) uid: u64,
    pub(crate) id: u32,
    pub(crate) event: u32,
    /// A negative errno, a reject reason, or a SIDR status.
    pub(crate) status: u32,
    /// A [`ConnParam`] (with 32 zeros behind it) or a [`UdParam`], by the id's queue pair type.
    pub(crate) param: [u8; size_of::<UdParam>()],
    pub(crate) reserved: u32,
    pub(crate) ece: Ece,
}

/// The least that a caller of GET_EVENT must have room for: all but `reserved` and the ECE.
pub(crate) const EVENT_MIN: usize = core::mem::offset_of!(EventResp, reserved);

#[derive(Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct SetOption {
    pub(crate) optval: u64,
    pub(crate) id: u32,
    pub(crate) level: u32,
    pub(crate) optname: u32,
    pub(crate) optlen: u32,
}

#[derive(Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct MigrateId {
    pub(crate) response: u64,
    pub(crate) id: u32,
    pub(crate) fd: u32,
}

/// All zeros: most answers start so.
pub(crate) fn zeroed<T: FromZeros>() -> T {
    T::new_zeroed()
}

#[cfg(test)]
mod tests {
    use core::mem::{offset_of, size_of};

    use super::*;

    /// Sizes and offsets as a C compiler gives them for the header (x86-64).
    #[test]
    fn layout_is_the_headers() {
        let sizes = [
            ("cmd_hdr", size_of::<Header>(), 8),
            ("create_id", size_of::<CreateId>(), 24),
            ("destroy_id", size_of::<DestroyId>(), 16),
            ("bind_ip", size_of::<BindIp>(), 40),
            ("bind", size_of::<Bind>(), 136),
            ("resolve_ip", size_of::<ResolveIp>(), 64),
            ("resolve_addr", size_of::<ResolveAddr>(), 272),
            ("resolve_route", size_of::<IdValue>(), 8),
            ("query", size_of::<Query>(), 16),
            ("ib_user_path_rec", size_of::<UserPathRec>(), 64),
            ("query_route_resp", size_of::<QueryRouteResp>(), 208),
            ("query_addr_resp", size_of::<QueryAddrResp>(), 280),
            ("query_path_resp", size_of::<QueryPathResp>(), 8),
            ("ib_path_rec_data", size_of::<PathRecData>(), 72),
            ("conn_param", size_of::<ConnParam>(), 272),
            ("ud_param", size_of::<UdParam>(), 304),
            ("ib_uverbs_ah_attr", size_of::<AhAttr>(), 32),
            ("ib_uverbs_qp_attr", size_of::<QpAttrResp>(), 144),
            ("ece", size_of::<Ece>(), 8),
            ("connect", size_of::<Connect>() + size_of::<Ece>(), 288),
            ("accept", size_of::<Accept>() + size_of::<Ece>(), 296),
            ("reject", size_of::<Reject>(), 264),
            ("join_ip_mcast", size_of::<JoinIpMcast>(), 48),
            ("join_mcast", size_of::<JoinMcast>(), 152),
            ("event_resp", size_of::<EventResp>(), 336),
            ("set_option", size_of::<SetOption>(), 24),
            ("migrate_id", size_of::<MigrateId>(), 16),
        ];
        for (name, ours, theirs) in sizes {
            assert_eq!(ours, theirs, "size of {name}");
        }
        let offsets = [
            ("bind_ip.id", offset_of!(BindIp, id), 36),
            ("resolve_addr.dst", offset_of!(ResolveAddr, dst), 144),
            ("path_rec.pkey", offset_of!(UserPathRec, pkey), 52),
            ("query_route.src", offset_of!(QueryRouteResp, src_addr), 136),
            ("query_route.num_paths", offset_of!(QueryRouteResp, num_paths), 192),
            ("query_route.ibdev_index", QUERY_ROUTE_MIN, 200),
            ("query_addr.src", offset_of!(QueryAddrResp, src_addr), 16),
            ("query_addr.dst", offset_of!(QueryAddrResp, dst_addr), 144),
            ("query_addr.ibdev_index", QUERY_ADDR_MIN, 272),
            ("conn_param.len", offset_of!(ConnParam, private_data_len), 264),
            ("conn_param.valid", offset_of!(ConnParam, valid), 271),
            ("ud_param.ah", offset_of!(UdParam, ah_attr), 8),
            ("ud_param.data", offset_of!(UdParam, private_data), 40),
            ("ud_param.len", offset_of!(UdParam, private_data_len), 296),
            ("qp_attr.ah", offset_of!(QpAttrResp, ah_attr), 40),
            ("qp_attr.caps", offset_of!(QpAttrResp, caps), 104),
            ("qp_attr.pkey_index", offset_of!(QpAttrResp, pkey_index), 124),
            ("qp_attr.max_rd_atomic", offset_of!(QpAttrResp, max_rd_atomic), 130),
            ("qp_attr.rnr_retry", offset_of!(QpAttrResp, rnr_retry), 136),
            ("connect.id", offset_of!(Connect, id), 272),
            ("accept.conn_param", offset_of!(Accept, conn_param), 8),
            ("accept.id", offset_of!(Accept, id), 280),
            ("join_mcast.addr", offset_of!(JoinMcast, addr), 24),
            ("event.param", offset_of!(EventResp, param), 20),
            ("event.ece", offset_of!(EventResp, ece), 328),
            ("set_option.optname", offset_of!(SetOption, optname), 16),
            ("migrate.fd", offset_of!(MigrateId, fd), 12),
        ];
        for (name, ours, theirs) in offsets {
            assert_eq!(ours, theirs, "offset of {name}");
        }
    }

    #[test]
    fn commands_have_the_headers_numbers() {
        for (code, cmd) in Cmd::ALL.into_iter().enumerate() {
            assert_eq!(cmd as usize, code);
        }
        assert_eq!(Cmd::from_code(12), Some(Cmd::GetEvent));
        assert_eq!(Cmd::from_code(22), Some(Cmd::JoinMcast));
        assert_eq!(Cmd::from_code(23), None);
        assert_eq!(EventType::Established as u32, 9);
        assert_eq!(EventType::MulticastJoin as u32, 12);
        assert_eq!(EventType::TimewaitExit as u32, 15);
    }
}
