//! Opening a path: connection 0 first, because its answer brings the sizes; then the others; then the session's name
//! for the addresses of the chunks.

use std::time::Instant;

use roce_verbs::{
    AccessFlags, Completion, SendOp, SendWr, Sge, WcStatus,
    provider::{CmChannel, CmEventKind, CmId, ConnParams, MemoryRegion, Provider, QueuePair},
    wr::{Payload, RecvWr, SendFlags},
};
use zerocopy::IntoBytes;

use super::path::{ClientConn, PathConfig};
use crate::{
    Error, PathError,
    conn::{WrId, WrKind},
    poller::Queue,
    proto::{ChunkLayout, ConnReq, ConnRsp, InfoReq, InfoRsp, MsgFlags, Uuid, info::ChunkAddr},
};

/// What the server said in its answer to connection 0.
#[derive(Clone, Copy, Debug)]
pub(super) struct ServerTerms {
    pub(super) layout: ChunkLayout,
    pub(super) max_io_size: u32,
    pub(super) max_hdr_size: u32,
    pub(super) flags: MsgFlags,
}

/// Connection management of one path while it is being opened.
pub(super) struct Connector<'a, P: Provider> {
    pub(super) provider: &'a P,
    pub(super) channel: &'a P::CmChannel,
    pub(super) config: &'a PathConfig,
    pub(super) session: Uuid,
    pub(super) path: Uuid,
}

impl<P: Provider> Connector<'_, P> {
    /// Connects one queue pair and checks the answer.
    pub(super) fn connect(&self, conn: &ClientConn<P>) -> Result<ServerTerms, Error> {
        let cid = conn.cid;
        let req = ConnReq::new(cid, self.config.connections + 1, 1, self.path, self.session, true);
        let params = ConnParams {
            private_data: req.as_bytes().to_vec(),
            responder_resources: 0,
            initiator_depth: 0,
            // A kernel's server registers the memory of all its chunks before it answers, or says that it needs time.
            patience: Some(self.config.connect_timeout),
            ..ConnParams::default()
        };
        let addr = &self.config.addr;
        let id = self
            .provider
            .connect(self.channel, addr.src, addr.dst, &conn.qp, params)?;
        let handle = id.handle();
        conn.set_cm(id);
        let private_data = self.established(cid, handle)?;
        let rsp = ConnRsp::parse(&private_data).map_err(|source| Error::Protocol {
            what: "connection response",
            source,
        })?;
        terms(rsp)
    }

    /// Waits for the connection's event; its private data.
    fn established(&self, cid: u16, handle: u64) -> Result<Vec<u8>, Error> {
        let deadline = Instant::now() + self.config.connect_timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let Some(event) = self.channel.wait(Some(left))? else {
                if left.is_zero() {
                    return Err(Error::Timeout(
                        "answer to the connection request",
                        self.config.connect_timeout,
                    ));
                }
                continue;
            };
            let ours = event.id.handle() == handle;
            match event.kind {
                CmEventKind::Established { private_data } if ours => return Ok(private_data),
                CmEventKind::Rejected { reason, private_data } if ours => {
                    let errno = ConnRsp::parse(&private_data).ok().map(ConnRsp::errno);
                    return Err(Error::Rejected { cid, reason, errno });
                }
                CmEventKind::Unreachable if ours => return Err(Error::Unreachable),
                CmEventKind::ConnectError(text) => return Err(Error::Path(PathError::Cm(text))),
                // Another connection of this path broke while this one was being made.
                CmEventKind::Disconnected => return Err(Error::Path(PathError::PeerDisconnected)),
                _ => {}
            }
        }
    }

    /// Sends the session's name over the service connection and waits for the chunks.
    pub(super) fn information(
        &self,
        conn: &ClientConn<P>,
        queue: &Queue<P>,
        pd: &P::Pd,
        layout: &ChunkLayout,
    ) -> Result<Vec<ChunkAddr>, Error> {
        let req = InfoReq::new(&self.config.name).map_err(|e| Error::Config(e.to_string()))?;
        let room = InfoRsp::len_for(layout.queue_depth() as usize);
        let region = self
            .provider
            .alloc_mr(pd, InfoReq::LEN + room, AccessFlags::LOCAL_WRITE)?;
        region
            .write(0, req.as_bytes())
            .map_err(|e| Error::Config(e.to_string()))?;
        let sge = |offset: usize, len: usize| Sge {
            addr: region.addr() + offset as u64,
            length: len as u32,
            lkey: region.lkey(),
        };
        let lost = |e| Error::Path(PathError::Post(e));
        let recv = RecvWr {
            wr_id: WrId::new(WrKind::InfoRecv, conn.cid, 0).encode(),
            sges: &[sge(InfoReq::LEN, room)],
        };
        conn.qp.post_recv(&[recv]).map_err(|(_, e)| lost(e))?;
        conn.submit_info(sge(0, InfoReq::LEN)).map_err(lost)?;
        let wc = self.await_information(conn, queue)?;
        let mut bytes = vec![0; (wc.byte_len as usize).min(room)];
        region
            .read(InfoReq::LEN, &mut bytes)
            .map_err(|e| Error::Config(e.to_string()))?;
        let chunks = InfoRsp::parse(&bytes).and_then(|rsp| rsp.chunks(layout));
        chunks.map_err(|source| Error::Protocol {
            what: "session information",
            source,
        })
    }

    fn await_information(&self, conn: &ClientConn<P>, queue: &Queue<P>) -> Result<Completion, Error> {
        let deadline = Instant::now() + self.config.connect_timeout;
        let mut wcs = Vec::new();
        loop {
            wcs.clear();
            queue.poll_until(&mut wcs, deadline)?;
            if wcs.is_empty() {
                return Err(Error::Timeout("session information", self.config.connect_timeout));
            }
            let mut information = None;
            for wc in &wcs {
                if wc.status == WcStatus::FlushError {
                    return Err(Error::Path(PathError::PeerDisconnected));
                }
                if !wc.is_ok() {
                    return Err(Error::Path(PathError::Completion {
                        what: WrId::what(wc),
                        status: wc.status,
                    }));
                }
                match WrId::decode(wc.wr_id).map(|id| id.kind) {
                    Some(WrKind::InfoRecv) => information = Some(*wc),
                    Some(WrKind::Send) => conn.reclaim_info().map_err(|e| Error::Path(PathError::Post(e)))?,
                    _ => {}
                }
            }
            if let Some(wc) = information {
                return Ok(wc);
            }
        }
    }
}

fn terms(rsp: &ConnRsp) -> Result<ServerTerms, Error> {
    let protocol = |source| Error::Protocol {
        what: "connection response",
        source,
    };
    if rsp.errno() != 0 {
        return Err(protocol(crate::proto::ProtoError::field(
            "errno",
            rsp.errno() as u64,
            "0 in an accept",
        )));
    }
    Ok(ServerTerms {
        layout: rsp.layout().map_err(protocol)?,
        max_io_size: rsp.max_io_size.get(),
        max_hdr_size: rsp.max_hdr_size.get(),
        flags: rsp.flags(),
    })
}

/// The work request that carries the name.
pub(super) fn info_wr<'a>(sges: &'a [Sge], cid: u16) -> SendWr<'a> {
    SendWr {
        wr_id: WrId::new(WrKind::Send, cid, 0).encode(),
        op: SendOp::Send,
        flags: SendFlags::SIGNALED,
        payload: Payload::Sges(sges),
    }
}
