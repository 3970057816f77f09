//! LAP and APR, the messages of alternate paths (IBA 12.8), which RoCE has no use for and `roce_port` does not parse.

use roce_port::cm::mad::{FieldSpec, HEADER_LEN};

/// Attribute ID of LAP, load alternate path.
pub(crate) const LAP: u16 = 0x19;
/// Attribute ID of APR, alternate path response.
pub(crate) const APR: u16 = 0x1a;

/// Makes the list of fields from lines of byte behind the MAD header, bit and width.
macro_rules! fields {
    ($($name:literal = ($byte:literal, $bit:literal, $width:literal),)*) => {
        &[$( FieldSpec { name: $name, byte: HEADER_LEN + $byte, bit: $bit, width: $width }, )*]
    };
}

const LAP_FIELDS: &[FieldSpec] = fields! {
    "local_comm_id" = (0, 0, 32),
    "remote_comm_id" = (4, 0, 32),
    "remote_qpn" = (12, 0, 24),
    "remote_cm_response_timeout" = (15, 0, 5),
    "alternate_local_lid" = (20, 0, 16),
    "alternate_remote_lid" = (22, 0, 16),
    "alternate_local_gid" = (24, 0, 128),
    "alternate_remote_gid" = (40, 0, 128),
    "alternate_flow_label" = (56, 0, 20),
    "alternate_traffic_class" = (59, 0, 8),
    "alternate_hop_limit" = (60, 0, 8),
    "alternate_packet_rate" = (61, 2, 6),
    "alternate_sl" = (62, 0, 4),
    "alternate_subnet_local" = (62, 4, 1),
    "alternate_ack_timeout" = (63, 0, 5),
    "private_data" = (64, 0, 1344),
};

const APR_FIELDS: &[FieldSpec] = fields! {
    "local_comm_id" = (0, 0, 32),
    "remote_comm_id" = (4, 0, 32),
    "info_length" = (8, 0, 8),
    "ap_status" = (9, 0, 8),
    "info" = (12, 0, 576),
    "private_data" = (84, 0, 1184),
};

/// Returns name and fields of a message of alternate paths.
pub(crate) fn fields(attribute: u16) -> Option<(&'static str, &'static [FieldSpec])> {
    match attribute {
        LAP => Some(("LAP", LAP_FIELDS)),
        APR => Some(("APR", APR_FIELDS)),
        _ => None,
    }
}
