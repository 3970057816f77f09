//! Queue pair for messages of bounded length, with the memory of those that leave and of those that come.

use std::sync::Arc;

use crate::{
    attr::{AccessFlags, QpCaps},
    mem::Pages,
    provider::{CqId, DeviceIx, MrInfo, PdId, Provider, QpId, QpSpec, Registration, VerbsError},
    wc::Completion,
    wr::{RecvWr, Sge},
};

/// Marks the work requests that are receives; the other bits are the buffer's number.
const RECV: u64 = 1 << 63;

/// Sizes of a [`MessageQp`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MessageSpec {
    /// Protection domain.
    pub pd: PdId,
    /// Its device.
    pub device: DeviceIx,
    /// Bytes of a message at most.
    pub len: usize,
    /// Buffers of messages that leave.
    pub sends: u32,
    /// Buffers of messages that come, each with a receive work request.
    pub recvs: u32,
    /// Send work requests at a time.
    pub max_send_wr: u32,
    /// Local elements of a send work request.
    pub max_send_sge: u32,
}

/// Work request of a [`MessageQp`] that has completed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MessageDone {
    /// Sends, up to that of this number.
    Sent(u64),
    /// Message of so many bytes in a receive buffer.
    Received {
        /// The buffer, for [`MessageQp::read`] and [`MessageQp::give_back`].
        buffer: u32,
        /// Bytes.
        len: usize,
    },
}

/// Queue pair, its completion queue, and registered memory of buffers for messages.
#[derive(Debug)]
pub struct MessageQp {
    qp: QpId,
    cq: CqId,
    mr: MrInfo,
    memory: Arc<Pages>,
    spec: MessageSpec,
    /// Receive buffers to post again.
    used: Vec<u32>,
}

impl MessageQp {
    /// Creates it. No receive is posted.
    ///
    /// # Errors
    /// The device's; nothing is left then.
    pub fn create(provider: &mut dyn Provider, spec: &MessageSpec) -> Result<Self, VerbsError> {
        let buffers = (spec.sends + spec.recvs) as usize;
        let memory = Pages::allocate(buffers * stride(spec.len)).map_err(|e| VerbsError::Invalid(e.to_string()))?;
        let what = Registration {
            memory: memory.clone(),
            offset: 0,
            len: memory.len(),
            iova: None,
            access: AccessFlags::LOCAL_WRITE,
        };
        let mr = provider.register(spec.pd, &what)?;
        match queues(provider, spec) {
            Ok((cq, qp)) => Ok(Self {
                qp,
                cq,
                mr,
                memory,
                spec: *spec,
                used: (0..spec.recvs).collect(),
            }),
            Err(e) => {
                provider.deregister(mr.id);
                Err(e)
            }
        }
    }

    /// Destroys it; nothing of it is under way.
    pub fn destroy(self, provider: &mut dyn Provider) {
        provider.destroy_qp(self.qp);
        provider.destroy_cq(self.cq);
        provider.deregister(self.mr.id);
    }

    /// The queue pair.
    pub const fn qp(&self) -> QpId {
        self.qp
    }

    /// Its protection domain.
    pub const fn pd(&self) -> PdId {
        self.spec.pd
    }

    /// Local elements of a send work request.
    pub const fn max_send_sge(&self) -> u32 {
        self.spec.max_send_sge
    }

    /// Puts a message together in a buffer for messages that leave; returns where it is. `None`: it is longer than any.
    pub fn write(&self, buffer: u32, parts: &[&[u8]]) -> Option<Sge> {
        let start = (buffer % self.spec.sends) as usize * stride(self.spec.len);
        let mut len = 0;
        for part in parts {
            if len + part.len() > self.spec.len || self.memory.write(start + len, part).is_err() {
                return None;
            }
            len += part.len();
        }
        Some(self.sge(start, len))
    }

    /// Copies the beginning of a message out of the buffer that it came into; returns whether it could.
    pub fn read(&self, buffer: u32, out: &mut [u8]) -> bool {
        self.memory.read(self.place(buffer), out).is_ok()
    }

    /// A receive buffer is free again.
    pub fn give_back(&mut self, buffer: u32) {
        self.used.push(buffer);
    }

    /// Receive buffers that are not posted.
    pub const fn unposted(&self) -> usize {
        self.used.len()
    }

    /// Understands a completion that is no error.
    pub const fn done(wc: &Completion) -> MessageDone {
        match wc.wr_id & RECV {
            0 => MessageDone::Sent(wc.wr_id),
            _ => MessageDone::Received {
                buffer: wc.wr_id as u32,
                len: wc.byte_len as usize,
            },
        }
    }

    /// Posts the receive buffers that are free.
    ///
    /// # Errors
    /// The device's.
    pub fn post_receives(&mut self, provider: &mut dyn Provider) -> Result<(), VerbsError> {
        let sges: Vec<Sge> = self
            .used
            .iter()
            .map(|buffer| self.sge(self.place(*buffer), self.spec.len))
            .collect();
        let wr = |(buffer, sge): (&u32, _)| RecvWr {
            wr_id: RECV | u64::from(*buffer),
            sges: core::slice::from_ref(sge),
        };
        let wrs: Vec<RecvWr<'_>> = self.used.iter().zip(&sges).map(wr).collect();
        if !wrs.is_empty() {
            provider.post_recv(self.qp, &wrs).map_err(|(_, e)| e)?;
            self.used.clear();
        }
        Ok(())
    }

    /// First byte of a receive buffer.
    fn place(&self, buffer: u32) -> usize {
        (self.spec.sends + buffer) as usize * stride(self.spec.len)
    }

    fn sge(&self, start: usize, len: usize) -> Sge {
        Sge {
            addr: self.mr.addr + start as u64,
            length: len as u32,
            lkey: self.mr.lkey,
        }
    }
}

/// Bytes between the starts of two buffers.
const fn stride(len: usize) -> usize {
    len.next_multiple_of(64)
}

fn queues(provider: &mut dyn Provider, spec: &MessageSpec) -> Result<(CqId, QpId), VerbsError> {
    let cq = provider.create_cq(spec.device, spec.max_send_wr + spec.recvs)?;
    let caps = QpCaps {
        max_send_wr: spec.max_send_wr,
        max_recv_wr: spec.recvs,
        max_send_sge: spec.max_send_sge,
        max_recv_sge: 1,
        max_inline_data: 0,
    };
    let spec = QpSpec {
        pd: spec.pd,
        cq,
        caps,
        signal_all: false,
    };
    match provider.create_qp(&spec) {
        Ok(qp) => Ok((cq, qp)),
        Err(e) => {
            provider.destroy_cq(cq);
            Err(e)
        }
    }
}
