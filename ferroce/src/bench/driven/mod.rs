//! The operations on an RDMA device of the host: the same messages to the same passive side, by a loop's [`Provider`].

mod active;
mod passive;

use std::{net::IpAddr, sync::Arc, time::Duration};

use roce::{
    AccessFlags, Completion, LocalDevice, Payload, QpCaps, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, VerbsError,
    verbs::provider::{CmRef, ConnParams, CqId, DeviceIx, Event, MrInfo, PdId, QpId, QpSpec, Registration},
};
use roce_mem::Pages;
use roce_verbs::Sge;

pub(crate) use active::Active;
pub(crate) use passive::Passive;

use super::failed;
use crate::output::Failure;

/// Completions taken with one poll.
const POLL: usize = 64;
/// Completions that a queue has room for.
const COMPLETIONS: u32 = 4096;
/// Packets of a turn in software.
const PACKETS: usize = 128;
/// Inline data: a [`Role::Sink`](super::wire::Role::Sink) tells its credit by it.
const INLINE: u32 = 8;
/// Marks of work requests: receives have [`RECEIVE`], all else is a send's.
const RECEIVE: u64 = 0;

/// Devices, polled without a pause.
struct Driven {
    devices: LocalDevice,
    completions: Vec<(QpId, Completion)>,
    events: Vec<Event>,
    more: bool,
}

/// Memory of a connection.
struct Memory {
    pages: Arc<Pages>,
    info: MrInfo,
}

/// Objects shared by the connections on a device.
#[derive(Clone, Copy)]
struct Objects {
    device: DeviceIx,
    pd: PdId,
    cq: CqId,
}

impl Driven {
    fn new(devices: LocalDevice) -> Self {
        Self {
            devices,
            completions: Vec::with_capacity(POLL),
            events: Vec::new(),
            more: false,
        }
    }

    /// One turn: `completions` and `events` are those of this one.
    fn turn(&mut self) -> Result<(), Failure> {
        let now = roce::now();
        self.completions.clear();
        self.events.clear();
        self.more = self.devices.receive(now, PACKETS);
        self.devices.poll_hardware().map_err(failed("polling"))?;
        self.devices.run_timers(now, self.more);
        let provider = self.devices.provider();
        let polled = provider.poll_completions(&mut self.completions, POLL);
        polled.map_err(failed("polling"))?;
        while let Some(event) = provider.poll_event() {
            self.events.push(event);
        }
        Ok(())
    }

    /// Sends what was posted.
    fn flush(&mut self) {
        self.devices.flush(roce::now());
    }

    fn objects(&mut self, device: DeviceIx) -> Result<Objects, Failure> {
        let provider = self.devices.provider();
        Ok(Objects {
            device,
            pd: provider
                .alloc_pd(device)
                .map_err(failed("making a protection domain"))?,
            cq: provider
                .create_cq(device, COMPLETIONS)
                .map_err(failed("making a completion queue"))?,
        })
    }

    fn memory(&mut self, objects: Objects, len: usize) -> Result<Memory, Failure> {
        let pages = Pages::allocate(len.max(1)).map_err(|e| Failure::failed(e.to_string()))?;
        let what = Registration {
            memory: pages.clone(),
            offset: 0,
            len: len.max(1),
            iova: None,
            access: AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ,
        };
        let registered = self.devices.provider().register(objects.pd, &what);
        let info = registered.map_err(failed("registering memory"))?;
        Ok(Memory { pages, info })
    }

    fn queue_pair(&mut self, objects: Objects, sends: u32, receives: u32) -> Result<QpId, Failure> {
        let spec = QpSpec {
            pd: objects.pd,
            cq: objects.cq,
            caps: QpCaps {
                max_send_wr: sends,
                max_recv_wr: receives,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: INLINE,
            },
            signal_all: false,
        };
        let made = self.devices.provider().create_qp(&spec);
        made.map_err(failed("making a queue pair"))
    }

    fn post_recv(&mut self, qp: QpId, memory: &Memory, count: usize) -> Result<(), Failure> {
        let sges = [memory.sge(memory.info.len)];
        let wr = RecvWr {
            wr_id: RECEIVE,
            sges: &sges,
        };
        let posted = self.devices.provider().post_recv(qp, &vec![wr; count]);
        posted.map_err(|(_, e)| failed("posting a receive")(VerbsError::Post(e)))
    }

    fn post(&mut self, qp: QpId, wr_id: u64, op: SendOp, payload: Payload<'_>) -> Result<(), Failure> {
        let wr = SendWr {
            wr_id,
            op,
            flags: SendFlags::SIGNALED,
            payload,
        };
        let posted = self.devices.provider().post_send(qp, &[wr]);
        posted.map_err(|(_, e)| failed("posting")(VerbsError::Post(e)))
    }

    /// The name of the device that has an address.
    fn name(&mut self, addr: IpAddr) -> Option<String> {
        let devices = self.devices.provider().devices();
        let owner = devices.iter().find(|caps| caps.addrs.contains(&addr))?;
        owner.name.as_deref().map(str::to_owned)
    }

    /// Ends connections, and gives their peers a moment to be told.
    fn end(&mut self, connections: impl Iterator<Item = CmRef>) {
        connections.for_each(|id| self.devices.provider().cm_disconnect(id));
        let begun = std::time::Instant::now();
        while begun.elapsed() < LEAVE && self.turn().is_ok() {
            self.flush();
        }
    }
}

/// Time to tell peers that connections end.
const LEAVE: Duration = Duration::from_millis(100);

impl Memory {
    fn sge(&self, len: usize) -> Sge {
        Sge {
            addr: self.info.addr,
            length: len as u32,
            lkey: self.info.lkey,
        }
    }

    fn remote(&self) -> RemoteAddr {
        RemoteAddr {
            addr: self.info.addr,
            rkey: self.info.rkey,
        }
    }

    fn read<const N: usize>(&self, at: usize) -> Result<[u8; N], Failure> {
        let mut bytes = [0; N];
        self.pages
            .read(at, &mut bytes)
            .map_err(|e| Failure::failed(e.to_string()))?;
        Ok(bytes)
    }

    fn write(&self, at: usize, bytes: &[u8]) -> Result<(), Failure> {
        self.pages.write(at, bytes).map_err(|e| Failure::failed(e.to_string()))
    }
}

/// How many READs a connection does at a time: what devices of any kind can do.
fn params(private_data: Vec<u8>) -> ConnParams {
    ConnParams {
        private_data,
        ..ConnParams::default()
    }
}
