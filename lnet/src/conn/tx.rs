//! Messages to send, and what waits for their answers.

use roce_verbs::{
    Instant, RKey, RemoteAddr, Sge,
    provider::{MrId, MrInfo},
};

use super::link::Write;
use crate::{
    buffer::Buffer,
    event::Of,
    proto::{Fragment, LnetHdr, MsgType},
};

/// Number of a transfer, which its answer names.
pub(crate) type Cookie = u64;

/// Memory of a peer that is to be written, and the number that it knows it by.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) cookie: Cookie,
    pub(crate) key: u32,
    pub(crate) frags: Vec<Fragment>,
}

/// Content of a message.
#[derive(Debug)]
pub(crate) enum Content {
    /// Keeps the connection, or gives credits back.
    Noop,
    /// An LNet message with all its data.
    Immediate { hdr: LnetHdr, payload: Vec<u8>, of: Of },
    /// An LNet message whose data is to be asked for.
    PutReq {
        hdr: LnetHdr,
        cookie: Cookie,
        source: Buffer,
        of: Of,
    },
    /// Nobody wants the data that was announced.
    PutNak { cookie: Cookie, status: i32 },
    /// Memory for the data that was announced.
    PutAck {
        src_cookie: Cookie,
        cookie: Cookie,
        sink: Buffer,
        of: Of,
    },
    /// The data, and word that it is there: PUT_DONE or GET_DONE.
    Data {
        kind: MsgType,
        target: Target,
        source: Buffer,
        of: Of,
    },
    /// GET_DONE without data.
    Nothing { cookie: Cookie, status: i32 },
    /// An LNet GET, with memory for the data.
    GetReq {
        hdr: LnetHdr,
        cookie: Cookie,
        sink: Buffer,
        of: Of,
    },
}

impl Content {
    /// Bytes of data of the LNet message that it begins, or is; `None`: it goes on with one.
    pub(crate) fn lnet_len(&self) -> Option<usize> {
        match self {
            Self::Immediate { payload, .. } => Some(payload.len()),
            Self::PutReq { source, .. } => Some(source.len()),
            Self::GetReq { .. } => Some(0),
            Self::Data {
                kind: MsgType::GetDone,
                source,
                ..
            } => Some(source.len()),
            Self::Noop | Self::PutNak { .. } | Self::PutAck { .. } | Self::Data { .. } | Self::Nothing { .. } => None,
        }
    }
}

/// Message to send.
#[derive(Debug)]
pub(crate) struct Tx {
    pub(crate) content: Content,
    /// When its connection is given up for it.
    pub(crate) deadline: Instant,
}

impl Tx {
    /// Owner of the transfer that ends if it can't be sent.
    pub(crate) fn of(self) -> Of {
        match self.content {
            Content::Immediate { of, .. }
            | Content::PutReq { of, .. }
            | Content::PutAck { of, .. }
            | Content::Data { of, .. }
            | Content::GetReq { of, .. } => of,
            Content::Noop | Content::PutNak { .. } | Content::Nothing { .. } => Of::Nobody,
        }
    }

    /// Returns whether a receive buffer of ours has to be kept for the answer.
    pub(crate) const fn asks(&self) -> bool {
        matches!(self.content, Content::PutReq { .. } | Content::GetReq { .. })
    }

    /// Returns whether it costs a credit.
    pub(crate) const fn costs(&self) -> bool {
        self.asks() || matches!(self.content, Content::Immediate { .. })
    }

    /// WRITEs before it, at most.
    pub(crate) const fn writes(&self) -> usize {
        match &self.content {
            Content::Data { target, .. } => target.frags.len(),
            _ => 0,
        }
    }
}

/// Message on its way.
#[derive(Debug)]
pub(crate) struct InFlight {
    pub(crate) is_noop: bool,
    /// Memory that it needs until it has gone.
    pub(crate) mr: Option<MrId>,
    /// Transfer that ends with it, and its bytes.
    pub(crate) ends: Option<(Of, u32)>,
    pub(crate) deadline: Instant,
}

/// Transfer that waits for a message of the peer.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) state: Awaited,
    pub(crate) of: Of,
    pub(crate) deadline: Instant,
}

/// Message of the peer that a transfer waits for.
#[derive(Debug)]
pub(crate) enum Awaited {
    /// PUT_ACK or PUT_NAK.
    Sink(Buffer),
    /// PUT_DONE, for so many bytes in this memory.
    PutDone(MrId, u32),
    /// GET_DONE, likewise.
    GetDone(MrId, u32),
}

/// The WRITEs that put all of a buffer into a peer's memory. `None`: there is not so much of it.
pub(crate) fn writes(source: &MrInfo, target: &Target) -> Option<Vec<Write>> {
    let mut writes = Vec::new();
    let mut at = 0;
    for fragment in &target.frags {
        let len = (fragment.nob as usize).min(source.len - at);
        if len > 0 {
            writes.push(Write {
                local: Sge {
                    addr: source.addr + at as u64,
                    length: len as u32,
                    lkey: source.lkey,
                },
                remote: RemoteAddr {
                    addr: fragment.addr,
                    rkey: RKey(target.key),
                },
            });
            at += len;
        }
    }
    (at == source.len).then_some(writes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use roce_verbs::LKey;

    fn lens(len: usize, frags: &[u32]) -> Option<Vec<(u64, u32, u64)>> {
        let source = MrInfo {
            id: MrId(0),
            addr: 1000,
            len,
            lkey: LKey(1),
            rkey: RKey(0),
        };
        let frags = frags.iter().enumerate().map(|(index, nob)| Fragment {
            nob: *nob,
            addr: 0x1_0000 * index as u64,
        });
        let target = Target {
            cookie: 7,
            key: 9,
            frags: frags.collect(),
        };
        let writes = writes(&source, &target)?;
        let place = |w: Write| (w.local.addr - 1000, w.local.length, w.remote.addr);
        Some(writes.into_iter().map(place).collect())
    }

    #[test]
    fn each_byte_is_written_also_where_the_sink_is_longer() {
        assert_eq!(lens(48, &[4096]), Some(vec![(0, 48, 0)]));
        let expected = vec![(0, 7, 0), (7, 21, 0x1_0000), (28, 20, 0x3_0000)];
        assert_eq!(lens(48, &[7, 21, 0, 32, 99]), Some(expected));
        assert_eq!(lens(48, &[7, 21]), None);
        assert_eq!(lens(0, &[7]), Some(Vec::new()));
    }
}
