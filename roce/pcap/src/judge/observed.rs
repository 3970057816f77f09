//! Packet as the judge sees it: headers as far as the capture kept them.

use std::net::{IpAddr, SocketAddr};

use roce_bth::{BTH_LEN, HeaderView, ICRC_LEN, Packet, ParseError};

/// Place, time and addresses of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Meta {
    /// Frame that holds the packet, from 1.
    pub frame: u64,
    /// Nanoseconds since 1970.
    pub time_ns: u64,
    /// Sender.
    pub src: SocketAddr,
    /// Receiver.
    pub dst: IpAddr,
    /// ECN bits of the IP header: 3 is "congestion experienced" (RFC 3168).
    pub ecn: u8,
}

/// Packet of a capture.
#[derive(Clone, Copy, Debug)]
pub struct Observed<'a> {
    /// Place, time and addresses.
    pub meta: Meta,
    /// Headers; extended headers that the capture cut off are missing.
    pub header: HeaderView<'a>,
    /// Bytes of payload without pad, also of those that the capture cut off.
    pub payload_len: usize,
    /// Payload without pad; `None`: the capture cut the packet.
    pub payload: Option<&'a [u8]>,
}

impl<'a> Observed<'a> {
    /// Creates a packet that the capture has whole.
    pub const fn new(meta: Meta, Packet { header, payload }: Packet<'a>) -> Self {
        Self {
            meta,
            header,
            payload_len: payload.len(),
            payload: Some(payload),
        }
    }

    /// Reads a packet of `len` bytes on the wire (BTH to ICRC), of which the capture has the first ones.
    ///
    /// # Errors
    /// Bytes that are no packet, or too few for a BTH.
    pub fn cut(meta: Meta, bytes: &'a [u8], len: usize) -> Result<Self, ParseError> {
        let header = HeaderView::of_cut(bytes)?;
        let rest = len.saturating_sub(header.bth.opcode.info().header_len.max(BTH_LEN) + ICRC_LEN);
        Ok(Self {
            meta,
            header,
            payload_len: rest.saturating_sub(usize::from(header.bth.pad)),
            payload: None,
        })
    }
}
