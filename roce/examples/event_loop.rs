//! A program's own event loop with two devices: the second connects to the first, which sends back what it gets.
//!
//! `cargo run -p roce --example event_loop`

use std::{error::Error, net::SocketAddr, os::fd::AsRawFd, sync::Arc};

use mio::{Events, Interest, Poll, Token, unix::SourceFd};
use roce::{
    AccessFlags, Completion, ConnParams, DeviceConfig, Flush, LocalDevice, Pages, Payload, QpCaps, RecvWr, SendFlags,
    SendOp, SendWr, Sge, WcOpcode, WcStatus,
    verbs::provider::{CmKind, CmRef, CqId, DeviceIx, Event, MrInfo, PdId, Provider, QpId, QpSpec, Registration},
};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Bytes that a side sends from, and receives into.
const PART: usize = 4096;
const MESSAGE: &[u8] = b"once there and back";

/// Objects on a device.
struct Side {
    pd: PdId,
    cq: CqId,
    mr: MrInfo,
    /// Its part of the memory.
    at: usize,
}

impl Side {
    /// Creates the objects; the same memory is registered with every device.
    fn new(provider: &mut dyn Provider, device: u16, memory: &Arc<Pages>) -> Outcome<Self> {
        let device = DeviceIx(device);
        let pd = provider.alloc_pd(device)?;
        let whole = Registration {
            memory: memory.clone(),
            offset: 0,
            len: memory.len(),
            iova: None,
            access: AccessFlags::LOCAL_WRITE,
        };
        Ok(Self {
            pd,
            cq: provider.create_cq(device, 16)?,
            mr: provider.register(pd, &whole)?,
            at: usize::from(device.0) * PART,
        })
    }

    fn sge(&self, len: usize) -> Sge {
        Sge {
            addr: self.mr.addr + self.at as u64,
            length: len as u32,
            lkey: self.mr.lkey,
        }
    }

    /// Creates a queue pair that can receive a message, when its device is known.
    fn queue_pair(&self, provider: &mut dyn Provider) -> Outcome<QpId> {
        let spec = QpSpec {
            pd: self.pd,
            cq: self.cq,
            caps: QpCaps::default(),
            signal_all: false,
        };
        let qp = provider.create_qp(&spec)?;
        let sges = [self.sge(PART)];
        provider
            .post_recv(qp, &[RecvWr { wr_id: 0, sges: &sges }])
            .map_err(|(_, e)| e)?;
        Ok(qp)
    }

    /// Sends the beginning of its part of the memory.
    fn send(&self, provider: &mut dyn Provider, qp: QpId, len: usize) -> Outcome<()> {
        let sges = [self.sge(len)];
        let wr = SendWr {
            wr_id: 1,
            op: SendOp::Send,
            flags: SendFlags::SIGNALED,
            payload: Payload::Sges(&sges),
        };
        provider.post_send(qp, &[wr]).map_err(|(_, e)| e)?;
        Ok(())
    }
}

/// State machine that runs on the loop.
struct Echo {
    memory: Arc<Pages>,
    sides: [Side; 2],
    /// The client's connection, and its queue pair once there is a route.
    client: CmRef,
    qp: Option<QpId>,
    over: bool,
}

impl Echo {
    /// Handles completions and events: completions first, as those that come before an event belong before it. False: there are none.
    fn hand_on(&mut self, provider: &mut dyn Provider) -> Outcome<bool> {
        let (mut any, mut completions) = (false, Vec::new());
        loop {
            if provider.poll_completions(&mut completions, 64)? > 0 {
                for (qp, wc) in completions.drain(..) {
                    self.completion(provider, qp, &wc)?;
                }
            } else if let Some(event) = provider.poll_event() {
                self.event(provider, event)?;
            } else {
                return Ok(any);
            }
            any = true;
        }
    }

    fn completion(&mut self, provider: &mut dyn Provider, qp: QpId, wc: &Completion) -> Outcome<()> {
        match wc.status {
            WcStatus::Success if wc.opcode == WcOpcode::Recv => {}
            // A send is done, or a receive was not needed.
            WcStatus::Success | WcStatus::FlushError => return Ok(()),
            failed => return Err(format!("{failed:?}").into()),
        }
        let len = wc.byte_len as usize;
        if self.qp != Some(qp) {
            return self.sides[0].send(provider, qp, len);
        }
        let mut bytes = vec![0; len];
        self.memory.read(self.sides[1].at, &mut bytes)?;
        println!("{}", String::from_utf8_lossy(&bytes));
        provider.cm_disconnect(self.client);
        Ok(())
    }

    fn event(&mut self, provider: &mut dyn Provider, event: Event) -> Outcome<()> {
        let Event::Cm { id, kind } = event else { return Ok(()) };
        match kind {
            CmKind::Resolved { device } => {
                let qp = self.sides[usize::from(device.0)].queue_pair(provider)?;
                self.qp = Some(qp);
                provider.cm_connect(id, qp, &ConnParams::default())?;
            }
            CmKind::ConnectRequest { device, .. } => {
                let qp = self.sides[usize::from(device.0)].queue_pair(provider)?;
                provider.cm_accept(id, qp, &ConnParams::default())?;
            }
            CmKind::Established { .. } if id == self.client => {
                if let Some(qp) = self.qp {
                    self.memory.write(self.sides[1].at, MESSAGE)?;
                    self.sides[1].send(provider, qp, MESSAGE.len())?;
                }
            }
            CmKind::Disconnected if id == self.client => self.over = true,
            CmKind::Rejected { .. } | CmKind::Unreachable(_) | CmKind::ConnectError(_) => {
                return Err(format!("no connection: {kind:?}").into());
            }
            _ => {}
        }
        Ok(())
    }
}

fn main() -> Outcome<()> {
    let addresses = ["127.0.0.1".parse()?, "127.0.0.2".parse()?];
    let mut device = LocalDevice::open(&addresses.map(DeviceConfig::new))?;
    let mut poll = Poll::new()?;
    for fd in device.descriptors() {
        poll.registry()
            .register(&mut SourceFd(&fd.as_raw_fd()), Token(0), Interest::READABLE)?;
    }

    let memory = Pages::allocate(2 * PART)?;
    let provider = device.provider();
    let to = SocketAddr::new(addresses[0], 7000);
    provider.cm_listen(to, 1)?;
    let mut echo = Echo {
        sides: [Side::new(provider, 0, &memory)?, Side::new(provider, 1, &memory)?],
        client: provider.cm_resolve(Some(addresses[1]), to)?,
        memory,
        qp: None,
        over: false,
    };

    let mut events = Events::with_capacity(8);
    while !echo.over {
        let more = device.receive(roce::now(), 128);
        device.run_timers(roce::now(), more);
        let mut busy = echo.hand_on(device.provider())?;
        // Everything leaves here. That can complete work requests, too: with an error, for example.
        let flushed = device.flush(roce::now());
        busy |= echo.hand_on(device.provider())?;
        if !more && !busy && flushed != Flush::More {
            poll.poll(&mut events, device.next_timeout(roce::now()))?;
        }
    }
    Ok(())
}
