//! A [`LocalDevice`]: an RDMA device of the host, polled by this thread.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use roce::{
    AccessFlags, Completion, DeviceStats, LocalDevice, Mtu, QpCaps, RecvWr, RejectReason, RemoteAddr, SendWr, Sge,
    VerbsError,
    verbs::provider::{self, CmKind, CmRef, ConnParams, CqId, DeviceIx, MrInfo, PdId, QpId, QpSpec, Registration},
};
use roce_verbs::mem::Pages;
use slab::Slab;

use super::{
    endpoint::{CONNECT_TIMEOUT, Endpoint, Event, POLL, RECEIVE, Shape, gone, mark, rejected, unreachable},
    failed,
    wire::{Hello, emit_memory, parse_memory},
};
use crate::output::Failure;

/// Capacity of completion queues.
const COMPLETIONS: u32 = 4096;
/// Packets received per turn in software.
const PACKETS: usize = 128;
/// Bytes of inline data: a credit of [`Role::Sink`](super::wire::Role::Sink).
const INLINE: u32 = 8;
/// Longest sleep while waiting for events.
const IDLE: Duration = Duration::from_millis(2);
/// Time in which peers are told that connections end.
const LINGER: Duration = Duration::from_millis(100);

/// Devices of a loop, of which the measurement uses one.
pub(super) struct Loop {
    devices: LocalDevice,
    from: IpAddr,
    mtu: Mtu,
    name: String,
    objects: Vec<Objects>,
    connections: Slab<Connection>,
    request: Option<(CmRef, DeviceIx)>,
    completions: Vec<(QpId, Completion)>,
}

/// Objects shared by the connections on a device.
#[derive(Clone, Copy)]
struct Objects {
    device: DeviceIx,
    pd: PdId,
    cq: CqId,
}

struct Connection {
    id: CmRef,
    qp: QpId,
    pages: Arc<Pages>,
    mr: MrInfo,
}

impl Connection {
    fn sge(&self, len: usize) -> Sge {
        Sge {
            addr: self.mr.addr,
            length: len as u32,
            lkey: self.mr.lkey,
        }
    }

    fn remote(&self) -> RemoteAddr {
        RemoteAddr {
            addr: self.mr.addr,
            rkey: self.mr.rkey,
        }
    }
}

impl Loop {
    /// Uses the device that has an address.
    pub(super) fn new(mut devices: LocalDevice, from: IpAddr) -> Result<Self, Failure> {
        let mtu = devices
            .mtu(from)
            .map_err(|e| Failure::failed(format!("the path MTU of {from}: {e}")))?;
        let all = devices.provider().devices();
        let owner = all.iter().find(|caps| caps.addrs.contains(&from));
        let name = owner.and_then(|caps| caps.name.as_deref()).map(str::to_owned);
        Ok(Self {
            name: name.ok_or_else(|| Failure::failed(format!("no RDMA device has {from}")))?,
            devices,
            from,
            mtu,
            objects: vec![],
            connections: Slab::new(),
            request: None,
            completions: Vec::with_capacity(POLL),
        })
    }

    /// Sends posted requests, receives, and runs timers.
    fn turn(&mut self) -> Result<(), Failure> {
        let now = roce::now();
        self.devices.flush(now);
        let more = self.devices.receive(now, PACKETS);
        self.devices.poll_hardware().map_err(failed("polling"))?;
        self.devices.run_timers(now, more);
        Ok(())
    }

    fn at(&self, number: u32) -> Result<&Connection, Failure> {
        self.connections.get(number as usize).ok_or_else(gone)
    }

    fn objects(&mut self, device: DeviceIx) -> Result<Objects, Failure> {
        if let Some(objects) = self.objects.iter().find(|objects| objects.device == device) {
            return Ok(*objects);
        }
        let provider = self.devices.provider();
        let pd = provider
            .alloc_pd(device)
            .map_err(failed("creating a protection domain"))?;
        let cq = provider.create_cq(device, COMPLETIONS);
        let cq = cq.map_err(failed("creating a completion queue"))?;
        self.objects.push(Objects { device, pd, cq });
        Ok(Objects { device, pd, cq })
    }

    /// Creates the memory and the queue pair of a connection.
    fn create(&mut self, id: CmRef, device: DeviceIx, shape: &Shape) -> Result<u32, Failure> {
        let Objects { pd, cq, .. } = self.objects(device)?;
        let provider = self.devices.provider();
        let pages = Pages::allocate(shape.memory).map_err(Failure::of)?;
        let what = Registration {
            memory: pages.clone(),
            offset: 0,
            len: shape.memory,
            iova: None,
            access: AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ,
        };
        let mr = provider.register(pd, &what).map_err(failed("registering memory"))?;
        let spec = QpSpec {
            pd,
            cq,
            caps: QpCaps {
                max_send_wr: shape.sends,
                max_recv_wr: shape.receives,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: INLINE,
            },
            signal_all: false,
        };
        let qp = provider.create_qp(&spec).map_err(failed("creating a queue pair"))?;
        let number = self.connections.insert(Connection { id, qp, pages, mr }) as u32;
        self.post_recv(number, shape.posted as usize)?;
        Ok(number)
    }

    /// Waits for an event of a connection that is being made.
    fn answer(&mut self, id: CmRef, until: Instant) -> Result<CmKind, String> {
        loop {
            let turned = self.turn();
            turned.map_err(|e| e.text().unwrap_or_default().to_owned())?;
            while let Some(event) = self.devices.provider().poll_event() {
                match event {
                    provider::Event::Cm { id: of, kind } if of == id => return Ok(kind),
                    _ => {}
                }
            }
            if Instant::now() > until {
                return Err("no answer: is `ferroce bench --server` running there?".to_owned());
            }
        }
    }

    fn try_connect(&mut self, peer: SocketAddr, hello: Hello) -> Result<RemoteAddr, String> {
        let until = Instant::now() + CONNECT_TIMEOUT;
        let text = |e: Failure| e.text().unwrap_or_default().to_owned();
        let resolved = self.devices.provider().cm_resolve(Some(self.from), peer);
        let id = resolved.map_err(|e| e.to_string())?;
        let device = match self.answer(id, until)? {
            CmKind::Resolved { device } => device,
            CmKind::ConnectError(why) => return Err(why),
            _ => return Err("no route".to_owned()),
        };
        let number = self.create(id, device, &Shape::active(&hello)).map_err(text)?;
        let new = self.at(number).map_err(text)?;
        let (qp, memory) = (new.qp, new.remote());
        let answer = params(Hello { memory, ..hello }.emit());
        let connected = self.devices.provider().cm_connect(id, qp, &answer);
        connected.map_err(|e| e.to_string())?;
        match self.answer(id, until)? {
            CmKind::Established { private_data } => {
                parse_memory(&private_data).ok_or_else(|| "the peer is not a `ferroce bench --server`".to_owned())
            }
            CmKind::Rejected { reason, .. } => Err(rejected(reason)),
            CmKind::ConnectError(why) => Err(why),
            CmKind::Unreachable(why) => Err(unreachable(why)),
            _ => Err("the connection ended".to_owned()),
        }
    }
}

/// Returns connection parameters with the number of READs that devices of any kind can do at a time.
fn params(private_data: Vec<u8>) -> ConnParams {
    ConnParams {
        private_data,
        ..ConnParams::default()
    }
}

impl Endpoint for Loop {
    fn mtu(&self) -> Mtu {
        self.mtu
    }

    fn name(&self) -> Option<&str> {
        Some(&self.name)
    }

    fn stats(&mut self) -> DeviceStats {
        self.devices.total_stats()
    }

    fn can_sleep(&self) -> bool {
        false
    }

    fn listen(&mut self, addr: SocketAddr) -> Result<(), Failure> {
        let listens = self.devices.provider().cm_listen(addr, 128);
        listens.map(drop).map_err(failed(&format!("listening on {addr}")))
    }

    fn connect(&mut self, peer: SocketAddr, hello: Hello) -> Result<RemoteAddr, Failure> {
        let connected = self.try_connect(peer, hello);
        connected.map_err(|why| Failure::failed(format!("connecting to {peer}: {why}")))
    }

    fn event(&mut self, timeout: Duration) -> Result<Option<Event>, Failure> {
        self.turn()?;
        while let Some(event) = self.devices.provider().poll_event() {
            match event {
                provider::Event::Cm {
                    id,
                    kind:
                        CmKind::ConnectRequest {
                            device, private_data, ..
                        },
                } => {
                    self.request = Some((id, device));
                    return Ok(Some(Event::Request(private_data)));
                }
                provider::Event::Cm {
                    kind: CmKind::Established { .. },
                    ..
                } => {}
                provider::Event::Cm { id, .. } => {
                    if let Some((number, _)) = self.connections.iter().find(|(_, c)| c.id == id) {
                        return Ok(Some(Event::Ended(number as u32)));
                    }
                }
                _ => {}
            }
        }
        thread::sleep(timeout.min(IDLE));
        Ok(None)
    }

    fn accept(&mut self, shape: &Shape) -> Result<u32, Failure> {
        let (id, device) = self.request.ok_or_else(gone)?;
        let number = self.create(id, device, shape)?;
        let new = self.at(number)?;
        let (qp, answer) = (new.qp, params(emit_memory(new.remote())));
        let accepted = self.devices.provider().cm_accept(id, qp, &answer);
        if let Err(e) = accepted {
            self.close(number);
            return Err(failed("accepting")(e));
        }
        self.request = None;
        Ok(number)
    }

    fn reject(&mut self, private_data: &[u8]) {
        if let Some((id, _)) = self.request.take() {
            let provider = self.devices.provider();
            let _ = provider.cm_reject(id, RejectReason::CONSUMER, private_data);
            provider.cm_destroy(id);
        }
    }

    fn close(&mut self, connection: u32) {
        if let Some(c) = self.connections.try_remove(connection as usize) {
            let provider = self.devices.provider();
            provider.cm_disconnect(c.id);
            provider.destroy_qp(c.qp);
            provider.deregister(c.mr.id);
            provider.cm_destroy(c.id);
        }
    }

    fn close_all(&mut self) {
        let (numbers, ids): (Vec<_>, Vec<_>) = self.connections.iter().map(|(number, c)| (number as u32, c.id)).unzip();
        ids.iter().for_each(|id| self.devices.provider().cm_disconnect(*id));
        let began = Instant::now();
        while !ids.is_empty() && began.elapsed() < LINGER && self.turn().is_ok() {}
        numbers.into_iter().for_each(|number| self.close(number));
    }

    fn poll(&mut self, out: &mut Vec<Completion>, _sleep: Option<Duration>) -> Result<(), Failure> {
        self.turn()?;
        let polled = self.devices.provider().poll_completions(&mut self.completions, POLL);
        polled.map_err(failed("polling"))?;
        out.extend(self.completions.drain(..).map(|(_, completion)| completion));
        Ok(())
    }

    fn post_send(&mut self, connection: u32, wrs: &[SendWr<'_>]) -> Result<(), Failure> {
        let qp = self.at(connection)?.qp;
        let posted = self.devices.provider().post_send(qp, wrs);
        posted.map_err(|(_, e)| failed("posting")(VerbsError::Post(e)))
    }

    fn post_recv(&mut self, connection: u32, count: usize) -> Result<(), Failure> {
        let c = self.at(connection)?;
        let (qp, sges) = (c.qp, [c.sge(c.mr.len)]);
        let wr = RecvWr {
            wr_id: mark(connection, RECEIVE),
            sges: &sges,
        };
        let posted = self.devices.provider().post_recv(qp, &vec![wr; count]);
        posted.map_err(|(_, e)| failed("posting a receive")(VerbsError::Post(e)))
    }

    fn sge(&self, connection: u32, len: u32) -> Sge {
        self.at(connection).map_or(Sge::default(), |c| c.sge(len as usize))
    }

    fn read(&self, connection: u32, at: usize, out: &mut [u8]) -> Result<(), Failure> {
        self.at(connection)?.pages.read(at, out).map_err(Failure::of)
    }

    fn write(&self, connection: u32, at: usize, data: &[u8]) -> Result<(), Failure> {
        self.at(connection)?.pages.write(at, data).map_err(Failure::of)
    }
}
