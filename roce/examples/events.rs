//! Echo server for any number of clients at a time, in one thread that sleeps until something happens: connection events,
//! completion events and asynchronous events of the device have descriptors for `poll`, epoll or mio.
//!
//! `cargo run -p roce --example events -- 192.0.2.7`, with `rc_client` as its client.

use std::{
    collections::HashMap,
    env,
    error::Error,
    net::{IpAddr, SocketAddr},
    os::fd::AsRawFd,
    time::Duration,
};

use mio::{Events, Interest, Poll, Token, unix::SourceFd};
use roce::{
    AccessFlags, Channel, CmEvent, CmEventKind, ConnParams, Cq, Device, DeviceConfig, EventChannel, Mr, Payload, Pd,
    Qp, QpInit, Qpn, RecvWr, SendFlags, SendOp, SendWr, WcOpcode, WcStatus,
};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Port of the RDMA_CM TCP port space at which it listens.
const SERVICE: u16 = 7471;
/// Longest message in bytes.
const LEN: usize = 4096;
const CONNECTIONS: Token = Token(0);
const COMPLETIONS: Token = Token(1);
const DEVICE: Token = Token(2);

/// A client.
struct Client {
    qp: Qp,
    memory: Mr,
    peer: String,
    messages: u64,
}

impl Client {
    fn receive(&self) -> Outcome<()> {
        let sges = [self.memory.sge(0, LEN)];
        self.qp
            .post_recv(&[RecvWr { wr_id: 0, sges: &sges }])
            .map_err(|(_, e)| e)?;
        Ok(())
    }

    /// Sends a message back that was received. Its memory is free for the next one when that has completed.
    fn echo(&self, len: usize) -> Outcome<()> {
        let sges = [self.memory.sge(0, len)];
        let send = SendWr {
            wr_id: 1,
            op: SendOp::Send,
            flags: SendFlags::SIGNALED,
            payload: Payload::Sges(&sges),
        };
        self.qp.post_send(&[send]).map_err(|(_, e)| e)?;
        Ok(())
    }
}

struct Server {
    device: Device,
    connections: EventChannel,
    completions: Channel,
    pd: Pd,
    cq: Cq,
    clients: HashMap<Qpn, Client>,
    /// Clients that are gone.
    served: u64,
}

impl Server {
    fn new(addr: IpAddr) -> Outcome<Self> {
        let device = Device::open(DeviceConfig::new(addr))?;
        let completions = device.create_channel()?;
        let cq = device.create_cq(1024, Some(&completions), 0)?;
        cq.arm(false)?;
        Ok(Self {
            connections: device.create_cm_channel()?,
            pd: device.alloc_pd()?,
            completions,
            cq,
            device,
            clients: HashMap::new(),
            served: 0,
        })
    }

    /// Watches the three descriptors.
    fn watch(&self, poll: &Poll) -> Outcome<()> {
        let all = [
            (CONNECTIONS, self.connections.as_fd()),
            (COMPLETIONS, self.completions.as_fd()),
            (DEVICE, self.device.async_fd()),
        ];
        for (token, fd) in all {
            let fd = fd.as_raw_fd();
            poll.registry()
                .register(&mut SourceFd(&fd), token, Interest::READABLE)?;
        }
        Ok(())
    }

    fn connection(&mut self, event: &CmEvent) -> Outcome<()> {
        let CmEventKind::Request { remote, .. } = event.kind else {
            // The end of a connection shows as a flushed receive.
            return Ok(());
        };
        let init = QpInit::new(&self.cq);
        let client = Client {
            qp: self.device.create_qp(&self.pd, &init)?,
            memory: self.device.alloc_mr(&self.pd, LEN, AccessFlags::LOCAL_WRITE)?,
            peer: remote.to_string(),
            messages: 0,
        };
        client.receive()?;
        event.id.accept(&client.qp, ConnParams::default())?;
        self.clients.insert(client.qp.qpn(), client);
        Ok(())
    }

    /// Takes all completions. Arming comes before the last look: nothing is missed in between.
    fn completed(&mut self) -> Outcome<()> {
        while self.completions.wait(Some(Duration::ZERO))?.is_some() {}
        self.cq.arm(false)?;
        let mut completions = Vec::new();
        while self.cq.poll(&mut completions, 64)? > 0 {
            for wc in completions.drain(..) {
                let Some(client) = self.clients.get_mut(&wc.qpn) else {
                    continue;
                };
                match (wc.status, wc.opcode) {
                    (WcStatus::Success, WcOpcode::Recv) => {
                        client.messages += 1;
                        client.echo(wc.byte_len as usize)?;
                    }
                    (WcStatus::Success, _) => client.receive()?,
                    (failed, _) => {
                        println!("{}: {} messages, then {failed:?}", client.peer, client.messages);
                        self.clients.remove(&wc.qpn);
                        self.served += 1;
                    }
                }
            }
        }
        Ok(())
    }
}

/// Serves until so many clients have come and gone, or without end.
pub(crate) fn run(addr: IpAddr, clients: Option<u64>) -> Outcome<()> {
    let mut server = Server::new(addr)?;
    let _listener = server
        .device
        .listen(&server.connections, SocketAddr::new(addr, SERVICE), 16)?;
    println!("listening at {addr}, service {SERVICE}");
    let (mut poll, mut ready) = (Poll::new()?, Events::with_capacity(8));
    server.watch(&poll)?;
    while clients.is_none_or(|most| server.served < most) {
        poll.poll(&mut ready, None)?;
        for event in &ready {
            match event.token() {
                CONNECTIONS => {
                    // mio reports an edge: take all there is.
                    while let Some(event) = server.connections.wait(Some(Duration::ZERO))? {
                        server.connection(&event)?;
                    }
                }
                COMPLETIONS => server.completed()?,
                _ => {
                    while let Some(event) = server.device.async_event()? {
                        println!("{event:?}");
                    }
                }
            }
        }
    }
    Ok(())
}

#[allow(dead_code, reason = "a test calls `run`")]
fn main() -> Outcome<()> {
    let addr = env::args().nth(1).ok_or("usage: events ADDR")?;
    run(addr.parse()?, None)
}
