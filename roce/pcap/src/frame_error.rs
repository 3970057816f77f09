//! Reasons why a frame is not taken apart.

use thiserror::Error;

/// Why a frame is not a whole UDP datagram.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum FrameError {
    /// The link type is one that this crate does not read.
    #[error("link type {0} is not supported")]
    LinkType(u16),
    /// An ERF record of a type that this crate does not read.
    #[error("{}", erf_type(*.0))]
    ErfType(u8),
    /// A record about the capture, which holds no packet.
    #[error("{0} holds no packet")]
    NoPacket(&'static str),
    /// The frame holds no IP packet.
    #[error("ethertype {0:#06x} is not IP")]
    NotIp(u16),
    /// RoCE version 1.
    #[error("RoCE version 1 (ethertype 0x8915), which has no IP header")]
    RoceV1,
    /// The IP packet holds no UDP datagram.
    #[error("IP protocol {0} is not UDP")]
    NotUdp(u8),
    /// A tunnel that this crate does not read.
    #[error("in {0}, which is not read")]
    Tunnel(&'static str),
    /// The frame ends before a header or the payload does.
    #[error("{layer} needs {need} bytes, {have} are there")]
    Truncated {
        /// Which header, or the payload.
        layer: &'static str,
        /// Bytes that it takes.
        need: usize,
        /// Bytes there.
        have: usize,
    },
    /// A header contradicts itself.
    #[error("{0}")]
    Malformed(String),
    /// A part of a datagram.
    #[error("fragment at offset {offset}{}", if *.more { ", more follow" } else { "" })]
    Fragment {
        /// In bytes.
        offset: u16,
        /// Whether it is not the last.
        more: bool,
    },
}

fn erf_type(kind: u8) -> String {
    match kind {
        21 | 25 => format!("an InfiniBand packet (ERF type {kind}), which is not RoCE"),
        _ => format!("ERF type {kind} is not supported"),
    }
}

/// Checks that a layer's bytes are there.
pub(crate) fn need(layer: &'static str, need: usize, bytes: &[u8]) -> Result<(), FrameError> {
    let have = bytes.len();
    if have < need {
        return Err(FrameError::Truncated { layer, need, have });
    }
    Ok(())
}
