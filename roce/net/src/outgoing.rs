//! Packets that are kept until they can be sent.

use roce_port::Train;

/// Packet on its way out.
pub(crate) struct Outgoing {
    /// All but the bytes.
    head: Train<'static>,
    bytes: Vec<u8>,
}

impl Outgoing {
    /// Keeps a packet of a train.
    pub(crate) fn new(train: &Train<'_>, bytes: Vec<u8>) -> Self {
        Self {
            head: Train {
                local: train.local,
                remote: train.remote,
                src_port: train.src_port,
                tos: train.tos,
                ttl: train.ttl,
                segment_len: bytes.len(),
                bytes: &[],
            },
            bytes,
        }
    }

    /// Returns the packet, as a train of one.
    pub(crate) fn train(&self) -> Train<'_> {
        Train {
            bytes: &self.bytes,
            ..self.head
        }
    }
}
