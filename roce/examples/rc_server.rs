//! Echo server on reliable connections: accepts clients one after another and sends back what each sends.
//!
//! `cargo run -p roce --example rc_server -- 192.0.2.7`, and on another machine (or with another address of this one)
//! `cargo run -p roce --example rc_client -- 192.0.2.8 192.0.2.7 hello`.

use std::{
    env,
    error::Error,
    net::{IpAddr, SocketAddr},
};

use roce::{
    AccessFlags, CmEventKind, ConnParams, Cq, Device, DeviceConfig, EventChannel, Mr, Payload, Pd, Qp, QpInit, RecvWr,
    SendFlags, SendOp, SendWr, WcOpcode, WcStatus,
};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Port of the RDMA_CM TCP port space at which it listens.
const SERVICE: u16 = 7471;
/// Longest message in bytes.
const LEN: usize = 4096;

/// Objects for any number of connections, one after another.
struct Server {
    device: Device,
    events: EventChannel,
    pd: Pd,
    cq: Cq,
    memory: Mr,
}

impl Server {
    fn new(addr: IpAddr) -> Outcome<Self> {
        let device = Device::open(DeviceConfig::new(addr))?;
        let pd = device.alloc_pd()?;
        Ok(Self {
            events: device.create_cm_channel()?,
            cq: device.create_cq(16, None, 0)?,
            memory: device.alloc_mr(&pd, LEN, AccessFlags::LOCAL_WRITE)?,
            pd,
            device,
        })
    }

    /// Creates a queue pair with a receive, so that the first message of a client finds one.
    fn queue_pair(&self) -> Outcome<Qp> {
        let init = QpInit::new(&self.cq);
        let qp = self.device.create_qp(&self.pd, &init)?;
        self.receive(&qp)?;
        Ok(qp)
    }

    fn receive(&self, qp: &Qp) -> Outcome<()> {
        let sges = [self.memory.sge(0, LEN)];
        qp.post_recv(&[RecvWr { wr_id: 0, sges: &sges }]).map_err(|(_, e)| e)?;
        Ok(())
    }

    /// Echoes messages until the client disconnects, which flushes the receive. Returns how many there were.
    fn echo(&self, qp: &Qp) -> Outcome<u64> {
        let (mut completions, mut messages) = (Vec::new(), 0);
        loop {
            // Polling an empty queue makes progress; a program that waits for long uses a channel, as `events` does.
            self.cq.poll(&mut completions, 16)?;
            for wc in completions.drain(..) {
                match (wc.status, wc.opcode) {
                    (WcStatus::Success, WcOpcode::Recv) => {
                        messages += 1;
                        let sges = [self.memory.sge(0, wc.byte_len as usize)];
                        let send = SendWr {
                            wr_id: 1,
                            op: SendOp::Send,
                            flags: SendFlags::SIGNALED,
                            payload: Payload::Sges(&sges),
                        };
                        qp.post_send(&[send]).map_err(|(_, e)| e)?;
                    }
                    // The echo has arrived: its memory is free for the next message.
                    (WcStatus::Success, _) => self.receive(qp)?,
                    (WcStatus::FlushError, _) => return Ok(messages),
                    (failed, _) => {
                        let why = qp.take_failure().map(|why| why.to_string());
                        return Err(why.unwrap_or_else(|| failed.to_string()).into());
                    }
                }
            }
        }
    }
}

/// Serves `clients` clients at an address, or clients without end.
pub(crate) fn run(addr: IpAddr, clients: Option<u64>) -> Outcome<()> {
    let server = Server::new(addr)?;
    let _listener = server
        .device
        .listen(&server.events, SocketAddr::new(addr, SERVICE), 16)?;
    println!("listening at {addr}, service {SERVICE}");
    let mut served = 0;
    while clients.is_none_or(|most| served < most) {
        let Some(event) = server.events.wait(None)? else {
            continue;
        };
        // The end of a connection shows as a flushed receive.
        if let CmEventKind::Request { remote, .. } = event.kind {
            let qp = server.queue_pair()?;
            // The queue pair keeps the connection: `event.id` may go.
            event.id.accept(&qp, ConnParams::default())?;
            println!("{remote}: {} messages", server.echo(&qp)?);
            served += 1;
        }
    }
    Ok(())
}

#[allow(dead_code, reason = "a test calls `run`")]
fn main() -> Outcome<()> {
    let addr = env::args().nth(1).ok_or("usage: rc_server ADDR")?;
    run(addr.parse()?, None)
}
