//! Queue pair of a connection, with its memory and what is posted.

use std::sync::Arc;

use roce_verbs::mem::Pages;
use roce_verbs::{
    AccessFlags, Completion, Payload, QpCaps, RecvWr, SendFlags, SendOp, SendWr, Sge,
    provider::{CmRef, CqId, DeviceIx, MrInfo, PdId, Provider, QpId, QpSpec, Registration, VerbsError},
};

use super::broken::Broken;
use crate::{
    config::Rings,
    key::PairKey,
    proto::{Header, MAX_SEND},
};

/// Number of a link.
pub(crate) type LinkId = usize;

/// Bytes between the starts of two buffers.
const STRIDE: usize = MAX_SEND.next_multiple_of(64);
/// Marks the work requests that are receives; the other bits are the buffer's number.
const RECV: u64 = 1 << 63;
/// Work requests after which one is signaled.
const SIGNAL_EACH: u64 = 16;

/// Verbs objects of a link.
#[derive(Debug)]
struct Objects {
    qp: QpId,
    cq: CqId,
    mr: MrInfo,
    memory: Arc<Pages>,
}

/// Connection of the connection manager, with its queue pair once the device is known.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) key: PairKey,
    pub(crate) cm: CmRef,
    rings: Rings,
    objects: Option<Objects>,
    /// Fragments that were posted, and of these completed, since the beginning.
    posted: u64,
    completed: u64,
    /// Receive buffers to post again.
    used: Vec<u32>,
    /// Nothing of it counts any more; it goes once it is drained.
    pub(crate) is_closing: bool,
}

/// Work request that has completed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Done {
    /// Sends.
    Sent,
    /// SEND of so many bytes in a buffer.
    Received {
        /// The buffer, for [`Link::read`] and [`Link::give_back`].
        buffer: u32,
        /// Bytes.
        len: usize,
    },
}

impl Link {
    /// Returns a link without a queue pair.
    pub(crate) fn new(key: PairKey, cm: CmRef, rings: Rings) -> Self {
        Self {
            key,
            cm,
            rings,
            objects: None,
            posted: 0,
            completed: 0,
            used: Vec::new(),
            is_closing: false,
        }
    }

    /// Creates the queue pair and posts the receives.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn create(
        &mut self,
        provider: &mut dyn Provider,
        (device, pd): (DeviceIx, PdId),
    ) -> Result<QpId, VerbsError> {
        let most = provider.devices()[usize::from(device.0)].limits.max_qp_wr;
        (self.rings.send, self.rings.recv) = (self.rings.send.min(most), self.rings.recv.min(most));
        let Rings { send, recv } = self.rings;
        let memory =
            Pages::allocate((send + recv) as usize * STRIDE).map_err(|e| VerbsError::Invalid(e.to_string()))?;
        let what = Registration {
            memory: memory.clone(),
            offset: 0,
            len: memory.len(),
            iova: None,
            access: AccessFlags::LOCAL_WRITE,
        };
        let mr = provider.register(pd, &what)?;
        let cq = match provider.create_cq(device, send + recv) {
            Ok(cq) => cq,
            Err(e) => {
                provider.deregister(mr.id);
                return Err(e);
            }
        };
        let spec = QpSpec {
            pd,
            cq,
            caps: caps(self.rings),
            signal_all: false,
        };
        let qp = match provider.create_qp(&spec) {
            Ok(qp) => qp,
            Err(e) => {
                provider.destroy_cq(cq);
                provider.deregister(mr.id);
                return Err(e);
            }
        };
        self.objects = Some(Objects { qp, cq, mr, memory });
        self.used = (0..recv).collect();
        self.post_receives(provider)?;
        Ok(qp)
    }

    /// Destroys all that it has.
    pub(crate) fn destroy(self, provider: &mut dyn Provider) {
        if let Some(Objects { qp, cq, mr, .. }) = self.objects {
            provider.destroy_qp(qp);
            provider.destroy_cq(cq);
            provider.deregister(mr.id);
        }
        provider.cm_destroy(self.cm);
    }

    /// Queue pair, once there is one.
    pub(crate) fn qp(&self) -> Option<QpId> {
        self.objects.as_ref().map(|objects| objects.qp)
    }

    /// Fragments that may be posted now.
    pub(crate) fn room(&self) -> usize {
        (u64::from(self.rings.send) - (self.posted - self.completed)) as usize
    }

    /// Understands a completion.
    ///
    /// # Errors
    /// The work request failed, and with it the link.
    pub(crate) fn completed(&mut self, wc: &Completion) -> Result<Done, Broken> {
        if !wc.is_ok() {
            return Err(Broken::Completion(wc.status));
        }
        if wc.wr_id & RECV != 0 {
            return Ok(Done::Received {
                buffer: wc.wr_id as u32,
                len: wc.byte_len as usize,
            });
        }
        self.completed = wc.wr_id;
        Ok(Done::Sent)
    }

    /// Copies what has come out of its buffer.
    pub(crate) fn read(&self, buffer: u32, out: &mut [u8]) -> bool {
        let at = (self.rings.send + buffer) as usize * STRIDE;
        self.objects
            .as_ref()
            .is_some_and(|objects| objects.memory.read(at, out).is_ok())
    }

    /// A receive buffer is free again.
    pub(crate) fn give_back(&mut self, buffer: u32) {
        self.used.push(buffer);
    }

    /// Posts the receive buffers that are free.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn post_receives(&mut self, provider: &mut dyn Provider) -> Result<(), VerbsError> {
        let Some(objects) = self.objects.as_ref().filter(|_| !self.used.is_empty()) else {
            return Ok(());
        };
        let sge = |buffer: &u32| Sge {
            addr: objects.mr.addr + u64::from(self.rings.send + buffer) * STRIDE as u64,
            length: MAX_SEND as u32,
            lkey: objects.mr.lkey,
        };
        let sges: Vec<Sge> = self.used.iter().map(sge).collect();
        let wr = |(buffer, sge): (&u32, _)| RecvWr {
            wr_id: RECV | u64::from(*buffer),
            sges: core::slice::from_ref(sge),
        };
        let wrs: Vec<RecvWr<'_>> = self.used.iter().zip(&sges).map(wr).collect();
        provider.post_recv(objects.qp, &wrs).map_err(|(_, e)| e)?;
        self.used.clear();
        Ok(())
    }
}

/// Fragments of a turn, to be posted at once.
#[derive(Debug)]
pub(crate) struct Train<'a> {
    link: &'a mut Link,
    /// Length of each, and whether the peer is to be woken.
    fragments: Vec<(u32, bool)>,
}

impl<'a> Train<'a> {
    /// Returns an empty train.
    pub(crate) fn new(link: &'a mut Link) -> Self {
        Self {
            link,
            fragments: Vec::new(),
        }
    }

    /// Fragments for which there is room.
    pub(crate) fn room(&self) -> usize {
        self.link.room() - self.fragments.len()
    }

    /// Returns whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.fragments.is_empty()
    }

    /// Copies a fragment into a free buffer. `is_last`: it ends its message, and the kernel looks at what has come (its receive queue is
    /// armed for solicited events only).
    ///
    /// # Errors
    /// Without a buffer, or without memory.
    pub(crate) fn push(&mut self, header: &Header, data: &[u8], is_last: bool) -> Result<(), Broken> {
        use zerocopy::IntoBytes as _;
        let objects = self
            .link
            .objects
            .as_ref()
            .filter(|_| self.room() > 0)
            .ok_or(Broken::Memory)?;
        let number = self.link.posted + self.fragments.len() as u64;
        let at = (number % u64::from(self.link.rings.send)) as usize * STRIDE;
        let written = objects.memory.write(at, header.as_bytes());
        let written = written.and_then(|()| objects.memory.write(at + Header::LEN, data));
        written.map_err(|_| Broken::Memory)?;
        self.fragments.push(((Header::LEN + data.len()) as u32, is_last));
        Ok(())
    }

    /// Posts them.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn post(self, provider: &mut dyn Provider) -> Result<(), VerbsError> {
        let Self { link, fragments } = self;
        let Some(objects) = &link.objects else { return Ok(()) };
        let (first, ring) = (link.posted, u64::from(link.rings.send));
        let numbers = first..;
        let sges: Vec<Sge> = numbers
            .clone()
            .zip(&fragments)
            .map(|(number, (length, _))| Sge {
                addr: objects.mr.addr + number % ring * STRIDE as u64,
                length: *length,
                lkey: objects.mr.lkey,
            })
            .collect();
        let last = first + fragments.len() as u64;
        let wrs: Vec<SendWr<'_>> = numbers
            .zip(fragments.iter().zip(&sges))
            .map(|(number, ((_, is_last), sge))| {
                // Of the last one the completion says that all before it have gone.
                let mut flags = SendFlags::empty();
                flags.set(SendFlags::SIGNALED, number % SIGNAL_EACH == 0 || number + 1 == last);
                flags.set(SendFlags::SOLICITED, *is_last);
                SendWr {
                    wr_id: number + 1,
                    op: SendOp::Send,
                    flags,
                    payload: Payload::Sges(core::slice::from_ref(sge)),
                }
            })
            .collect();
        link.posted = last;
        provider.post_send(objects.qp, &wrs).map_err(|(_, e)| e.into())
    }
}

/// Returns the queue sizes.
fn caps(rings: Rings) -> QpCaps {
    QpCaps {
        max_send_wr: rings.send,
        max_recv_wr: rings.recv,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_data: 0,
    }
}
