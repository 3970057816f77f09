//! The messages of communication management (IBA volume 1, 12.6 to 12.11, tables 106 to 120).

use core::net::IpAddr;

use roce_bth::{PKey, Psn, QKey, Qpn};

use super::bits::{Field, FieldSpec, HEADER_LEN, MAD_LEN, Subject, Transport, message};

message! {
    /// REQ, request for communication (IBA 12.6.5, table 106).
    pub struct Req {
        /// The sender's communication ID.
        local_comm_id: u32 = (0, 0, 32),
        /// Vendor of the options in the attribute modifier (enhanced connection establishment).
        vendor_id: u32 = (5, 0, 24),
        /// Service ID.
        service_id: u64 = (8, 0, 64),
        /// The sender's channel adapter.
        local_ca_guid: u64 = (16, 0, 64),
        /// The sender's Q_Key (datagram services).
        local_qkey: QKey = (28, 0, 32),
        /// The sender's queue pair.
        local_qpn: Qpn = (32, 0, 24),
        /// READs and atomics that the sender answers at a time.
        responder_resources: u8 = (35, 0, 8),
        /// The sender's end-to-end context (reliable datagrams).
        local_eecn: u32 = (36, 0, 24),
        /// READs and atomics that the sender has outstanding at most.
        initiator_depth: u8 = (39, 0, 8),
        /// The receiver's end-to-end context (reliable datagrams).
        remote_eecn: u32 = (40, 0, 24),
        /// Code of the time within which the receiver shall answer, 4.096 us * 2^code.
        remote_cm_response_timeout: u8 = (43, 0, 5),
        /// Transport.
        transport: Transport = (43, 5, 2),
        /// The sender's queue pair honours end-to-end credits.
        flow_control: bool = (43, 7, 1),
        /// The PSN that the receiver shall start to send with.
        starting_psn: Psn = (44, 0, 24),
        /// Code of the time within which the sender will answer.
        local_cm_response_timeout: u8 = (47, 0, 5),
        /// Retries of the receiver's queue pair.
        retry_count: u8 = (47, 5, 3),
        /// Partition.
        pkey: PKey = (48, 0, 16),
        /// Path MTU code, 1 = 256 to 5 = 4096.
        path_mtu: u8 = (50, 0, 4),
        /// The reliable domain exists already (reliable datagrams).
        rdc_exists: bool = (50, 4, 1),
        /// RNR retries of the receiver's queue pair.
        rnr_retry_count: u8 = (50, 5, 3),
        /// Retransmissions of CM messages.
        max_cm_retries: u8 = (51, 0, 4),
        /// The sender's queue pair uses a shared receive queue.
        srq: bool = (51, 4, 1),
        /// Transport if `transport` is extended.
        extended_transport: u8 = (51, 5, 3),
        /// Primary path: the sender's LID; 0xffff on RoCE.
        primary_local_lid: u16 = (52, 0, 16),
        /// Primary path: the receiver's LID.
        primary_remote_lid: u16 = (54, 0, 16),
        /// Primary path: the sender's GID.
        primary_local_gid: IpAddr = (56, 0, 128),
        /// Primary path: the receiver's GID.
        primary_remote_gid: IpAddr = (72, 0, 128),
        /// Primary path: flow label.
        primary_flow_label: u32 = (88, 0, 20),
        /// Primary path: packet rate code.
        primary_packet_rate: u8 = (91, 2, 6),
        /// Primary path: traffic class.
        primary_traffic_class: u8 = (92, 0, 8),
        /// Primary path: hop limit.
        primary_hop_limit: u8 = (93, 0, 8),
        /// Primary path: service level.
        primary_sl: u8 = (94, 0, 4),
        /// Primary path: both ends are in one subnet.
        primary_subnet_local: bool = (94, 4, 1),
        /// Primary path: local ACK timeout code.
        primary_ack_timeout: u8 = (95, 0, 5),
        /// Alternate path: the sender's LID.
        alternate_local_lid: u16 = (96, 0, 16),
        /// Alternate path: the receiver's LID.
        alternate_remote_lid: u16 = (98, 0, 16),
        /// Alternate path: the sender's GID.
        alternate_local_gid: IpAddr = (100, 0, 128),
        /// Alternate path: the receiver's GID.
        alternate_remote_gid: IpAddr = (116, 0, 128),
        /// Alternate path: flow label.
        alternate_flow_label: u32 = (132, 0, 20),
        /// Alternate path: packet rate code.
        alternate_packet_rate: u8 = (135, 2, 6),
        /// Alternate path: traffic class.
        alternate_traffic_class: u8 = (136, 0, 8),
        /// Alternate path: hop limit.
        alternate_hop_limit: u8 = (137, 0, 8),
        /// Alternate path: service level.
        alternate_sl: u8 = (138, 0, 4),
        /// Alternate path: both ends are in one subnet.
        alternate_subnet_local: bool = (138, 4, 1),
        /// Alternate path: local ACK timeout code.
        alternate_ack_timeout: u8 = (139, 0, 5),
        /// The sender can do suggested alternate paths.
        sap_supported: bool = (139, 5, 1),
        /// Private data; with RDMA_CM it starts with the [`CmaHeader`](crate::cm::cma::CmaHeader).
        private_data: [u8; 92] = (140, 0, 736),
    }
}

message! {
    /// MRA, message receipt acknowledgment: the answer will take longer (IBA 12.6.6, table 107).
    pub struct Mra {
        /// The sender's communication ID.
        local_comm_id: u32 = (0, 0, 32),
        /// The receiver's communication ID.
        remote_comm_id: u32 = (4, 0, 32),
        /// Message that is acknowledged.
        subject: Subject = (8, 0, 2),
        /// Code of the time that the sender needs, 4.096 us * 2^code.
        service_timeout: u8 = (9, 0, 5),
        /// Private data.
        private_data: [u8; 222] = (10, 0, 1776),
    }
}

message! {
    /// REJ, reject (IBA 12.6.7, table 108).
    pub struct Rej {
        /// The sender's communication ID, or 0 if it has none.
        local_comm_id: u32 = (0, 0, 32),
        /// The receiver's communication ID.
        remote_comm_id: u32 = (4, 0, 32),
        /// Message that is rejected.
        subject: Subject = (8, 0, 2),
        /// Valid bytes of `info`, up to 72.
        info_length: u8 = (9, 0, 7),
        /// Why (IBA table 109).
        reason: u16 = (10, 0, 16),
        /// Additional reject information, as the reason defines it.
        info: [u8; 72] = (12, 0, 576),
        /// Private data.
        private_data: [u8; 148] = (84, 0, 1184),
    }
}

message! {
    /// REP, reply to a request (IBA 12.6.8, table 110).
    pub struct Rep {
        /// The sender's communication ID.
        local_comm_id: u32 = (0, 0, 32),
        /// The receiver's communication ID.
        remote_comm_id: u32 = (4, 0, 32),
        /// The sender's Q_Key (datagram services).
        local_qkey: QKey = (8, 0, 32),
        /// The sender's queue pair.
        local_qpn: Qpn = (12, 0, 24),
        /// Vendor of the options in the attribute modifier, top byte.
        vendor_id_high: u8 = (15, 0, 8),
        /// The sender's end-to-end context (reliable datagrams).
        local_eecn: u32 = (16, 0, 24),
        /// Vendor, middle byte.
        vendor_id_middle: u8 = (19, 0, 8),
        /// The PSN that the receiver shall start to send with.
        starting_psn: Psn = (20, 0, 24),
        /// Vendor, low byte.
        vendor_id_low: u8 = (23, 0, 8),
        /// READs and atomics that the sender answers at a time.
        responder_resources: u8 = (24, 0, 8),
        /// READs and atomics that the sender has outstanding at most.
        initiator_depth: u8 = (25, 0, 8),
        /// Code of the delay of the sender's ACKs.
        target_ack_delay: u8 = (26, 0, 5),
        /// Status of the alternate path.
        failover_accepted: u8 = (26, 5, 2),
        /// The sender's queue pair honours end-to-end credits.
        flow_control: bool = (26, 7, 1),
        /// RNR retries of the receiver's queue pair.
        rnr_retry_count: u8 = (27, 0, 3),
        /// The sender's queue pair uses a shared receive queue.
        srq: bool = (27, 3, 1),
        /// The sender's channel adapter.
        local_ca_guid: u64 = (28, 0, 64),
        /// Private data.
        private_data: [u8; 196] = (36, 0, 1568),
    }
}

message! {
    /// RTU, ready to use (IBA 12.6.9, table 111).
    pub struct Rtu {
        /// The sender's communication ID.
        local_comm_id: u32 = (0, 0, 32),
        /// The receiver's communication ID.
        remote_comm_id: u32 = (4, 0, 32),
        /// Private data.
        private_data: [u8; 224] = (8, 0, 1792),
    }
}

message! {
    /// DREQ, request for communication release (IBA 12.6.10, table 112).
    pub struct Dreq {
        /// The sender's communication ID.
        local_comm_id: u32 = (0, 0, 32),
        /// The receiver's communication ID.
        remote_comm_id: u32 = (4, 0, 32),
        /// The receiver's queue pair.
        remote_qpn: Qpn = (8, 0, 24),
        /// Private data.
        private_data: [u8; 220] = (12, 0, 1760),
    }
}

message! {
    /// DREP, reply to a request for communication release (IBA 12.6.11, table 113).
    pub struct Drep {
        /// The sender's communication ID.
        local_comm_id: u32 = (0, 0, 32),
        /// The receiver's communication ID.
        remote_comm_id: u32 = (4, 0, 32),
        /// Private data.
        private_data: [u8; 224] = (8, 0, 1792),
    }
}

message! {
    /// SIDR_REQ, service ID resolution request (IBA 12.11.1, table 119): which queue pair serves a service ID by
    /// datagrams?
    pub struct SidrReq {
        /// The sender's mark.
        request_id: u32 = (0, 0, 32),
        /// Partition.
        pkey: PKey = (4, 0, 16),
        /// Service ID.
        service_id: u64 = (8, 0, 64),
        /// Private data; with RDMA_CM it starts with the [`CmaHeader`](crate::cm::cma::CmaHeader).
        private_data: [u8; 216] = (16, 0, 1728),
    }
}

message! {
    /// SIDR_REP, service ID resolution response (IBA 12.11.2, table 120).
    pub struct SidrRep {
        /// The request's mark.
        request_id: u32 = (0, 0, 32),
        /// 0 = found, else why not ([`super::sidr_status`]).
        status: u8 = (4, 0, 8),
        /// Valid bytes of `info`, up to 72.
        info_length: u8 = (5, 0, 8),
        /// Vendor of the options in the attribute modifier, top 16 bits.
        vendor_id_high: u16 = (6, 0, 16),
        /// The queue pair.
        qpn: Qpn = (8, 0, 24),
        /// Vendor, low byte.
        vendor_id_low: u8 = (11, 0, 8),
        /// The service ID asked for.
        service_id: u64 = (12, 0, 64),
        /// The queue pair's Q_Key.
        qkey: QKey = (20, 0, 32),
        /// Additional information, as the status defines it.
        info: [u8; 72] = (24, 0, 576),
        /// Private data.
        private_data: [u8; 136] = (96, 0, 1088),
    }
}
