//! The other half of `rping`: connected by RDMA_CM, then READ and WRITE of text.

use std::{
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use roce::{CmEvent, CmEventKind, ConnParams, Device, EventChannel, Id, Mr};
use roce_verbs::{
    AccessFlags, Completion, Payload, QpCaps, RKey, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge, WcStatus,
};

use crate::{Error, link::Link};

/// Arguments, with the defaults of `rping`.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Connect to the server on this host instead of waiting for a client.
    #[arg(long)]
    connect: Option<IpAddr>,
    /// RDMA_CM port.
    #[arg(long, default_value_t = 7174)]
    port: u16,
    /// Bytes of the text.
    #[arg(long, default_value_t = 64)]
    size: usize,
    /// Rounds (as client).
    #[arg(long, default_value_t = 10)]
    iters: u32,
    /// As server: a client that is silent for 5 s after so many rounds has gone. Linux gives up a disconnect when
    /// the program ends, and it may be lost.
    #[arg(long)]
    last_round: Option<u32>,
}

/// How long the peer may take for anything.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Bytes of `struct rping_rdma_info`: address, rkey, size, all big-endian.
const INFO: usize = 16;

struct Side {
    link: Link,
    messages: Mr,
    text: Mr,
    sink: Mr,
}

fn sge(region: &Mr, offset: usize, len: usize) -> Result<Sge, Error> {
    Ok(Sge {
        addr: region.addr() + offset as u64,
        length: u32::try_from(len)?,
        lkey: region.lkey(),
    })
}

impl Side {
    fn new(provider: &Device, size: usize) -> Result<Self, Error> {
        let link = Link::unconnected(
            provider,
            QpCaps {
                max_send_wr: 16,
                max_recv_wr: 4,
                ..QpCaps::default()
            },
        )?;
        let remote = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
        let messages = provider.alloc_mr(&link.pd, 2 * INFO, AccessFlags::LOCAL_WRITE)?;
        let text = provider.alloc_mr(&link.pd, size, remote)?;
        let sink = provider.alloc_mr(&link.pd, size, remote)?;
        let side = Self {
            link,
            messages,
            text,
            sink,
        };
        side.post_recv()?;
        Ok(side)
    }

    fn post_recv(&self) -> Result<(), Error> {
        let sges = [sge(&self.messages, 0, INFO)?];
        self.link
            .qp
            .post_recv(&[RecvWr { wr_id: 1, sges: &sges }])
            .map_err(|(_, e)| e.into())
    }

    /// Sends the place of `region` (as `rping_format_send` does). False: the peer has disconnected.
    fn advertise(&self, region: &Mr) -> Result<bool, Error> {
        let mut info = [0; INFO];
        info[..8].copy_from_slice(&region.addr().to_be_bytes());
        info[8..12].copy_from_slice(&region.rkey().0.to_be_bytes());
        info[12..].copy_from_slice(&u32::try_from(region.len())?.to_be_bytes());
        self.messages.write(INFO, &info)?;
        let sges = [sge(&self.messages, INFO, INFO)?];
        self.post(SendOp::Send, &sges)
    }

    /// Posts and waits for the completion. False: it was flushed, for the peer has disconnected.
    fn post(&self, op: SendOp, sges: &[Sge]) -> Result<bool, Error> {
        let wr = SendWr {
            wr_id: 2,
            op,
            flags: SendFlags::SIGNALED,
            payload: Payload::Sges(sges),
        };
        self.link.qp.post_send(&[wr]).map_err(|(_, e)| e)?;
        match Link::wait_one(&self.link.send_cq, TIMEOUT)?.status {
            WcStatus::Success => Ok(true),
            WcStatus::FlushError => Ok(false),
            other => Err(format!("send queue: {other:?}").into()),
        }
    }

    /// Takes one message; `None` when the peer has disconnected.
    fn take(&self) -> Result<Option<(RemoteAddr, usize)>, Error> {
        self.took(Link::wait_one(&self.link.recv_cq, TIMEOUT)?)
    }

    fn took(&self, wc: Completion) -> Result<Option<(RemoteAddr, usize)>, Error> {
        if wc.status == WcStatus::FlushError {
            return Ok(None);
        }
        if !wc.is_ok() || wc.byte_len as usize != INFO {
            return Err(format!("message: {:?}, {} bytes", wc.status, wc.byte_len).into());
        }
        let mut b = [0; INFO];
        self.messages.read(0, &mut b)?;
        self.post_recv()?;
        let addr = u64::from_be_bytes(b[..8].try_into()?);
        let rkey = RKey(u32::from_be_bytes(b[8..12].try_into()?));
        let size = u32::from_be_bytes(b[12..].try_into()?);
        Ok(Some((RemoteAddr { addr, rkey }, size as usize)))
    }

    fn client(&self, iters: u32) -> Result<(), Error> {
        let size = self.text.len();
        for round in 0..iters {
            let mut text = format!("rdma-ping-{round}: ").into_bytes();
            text.extend((0..size).map(|i| b'A' + ((round as usize + i) % 58) as u8));
            text.truncate(size);
            text[size - 1] = 0;
            self.text.write(0, &text)?;
            for region in [&self.text, &self.sink] {
                self.advertise(region)?;
                self.take()?.ok_or("server disconnected early")?;
            }
            let mut back = vec![0; size];
            self.sink.read(0, &mut back)?;
            if back != text {
                return Err(format!("round {round}: the text came back changed").into());
            }
        }
        println!("rping client: {iters} rounds of {size} bytes, every text came back: passed");
        Ok(())
    }

    /// The start of a round; `None` when there is no other.
    fn next_round(&self, rounds: u32, last: Option<u32>) -> Result<Option<(RemoteAddr, usize)>, Error> {
        if last.is_none_or(|last| rounds < last) {
            return self.take();
        }
        let wc = Link::wait_one(&self.link.recv_cq, Duration::from_secs(5));
        wc.map_or(Ok(None), |wc| self.took(wc))
    }

    fn server(&self, last: Option<u32>) -> Result<(), Error> {
        let mut rounds = 0;
        while let Some((source, len)) = self.next_round(rounds, last)? {
            if len > self.text.len() {
                return Err(format!("the client offers {len} bytes, more than --size").into());
            }
            let read = self.post(SendOp::Read(source), &[sge(&self.text, 0, len)?])?;
            if !read || !self.advertise(&self.text)? {
                return Err("client disconnected early".into());
            }
            let Some((sink, len)) = self.take()? else { break };
            if !self.post(SendOp::Write(sink), &[sge(&self.text, 0, len.min(self.text.len()))?])? {
                return Err("client disconnected early".into());
            }
            rounds += 1;
            // With the last one the client has all that it wants: its acknowledgement may be lost, and the disconnect faster, or
            // lost as well.
            match self.advertise(&self.text) {
                Ok(true) => {}
                Ok(false) => break,
                Err(_) if last == Some(rounds) => break,
                Err(e) => return Err(e),
            }
        }
        println!("rping server: {rounds} rounds: passed");
        Ok(())
    }
}

fn params() -> ConnParams {
    ConnParams {
        responder_resources: 1,
        initiator_depth: 1,
        ..ConnParams::default()
    }
}

fn next(channel: &EventChannel) -> Result<CmEvent, Error> {
    channel
        .wait(Some(TIMEOUT))?
        .ok_or_else(|| "no event of the connection within 60 s".into())
}

fn expect_established(channel: &EventChannel) -> Result<(), Error> {
    match next(channel)?.kind {
        CmEventKind::Established { .. } => Ok(()),
        other => Err(format!("not connected: {other:?}").into()),
    }
}

/// Connects, trying again while the guest may still boot.
fn connect(
    provider: &Device,
    channel: &EventChannel,
    local: IpAddr,
    far: SocketAddr,
    size: usize,
) -> Result<(Side, Id), Error> {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let side = Side::new(provider, size)?;
        let id = provider.connect(channel, Some(local), far, &side.link.qp, params())?;
        match next(channel)?.kind {
            CmEventKind::Established { .. } => return Ok((side, id)),
            other if Instant::now() > until => return Err(format!("not connected: {other:?}").into()),
            other => println!("rping client: {other:?}, trying again"),
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// Runs one side.
pub(crate) fn run(provider: &Device, local: IpAddr, args: &Args) -> Result<(), Error> {
    let channel = provider.create_cm_channel()?;
    if let Some(host) = args.connect {
        let (side, id) = connect(provider, &channel, local, SocketAddr::new(host, args.port), args.size)?;
        side.client(args.iters)?;
        id.disconnect()?;
    } else {
        let side = Side::new(provider, args.size)?;
        let _listener = provider.listen(&channel, SocketAddr::new(local, args.port), 4)?;
        println!("rping: waiting");
        let CmEvent {
            id,
            kind: CmEventKind::Request { .. },
            ..
        } = next(&channel)?
        else {
            return Err("the listener got something else than a request".into());
        };
        id.accept(&side.link.qp, params())?;
        expect_established(&channel)?;
        side.server(args.last_round)?;
        id.disconnect()?;
    }
    // Both sides take part in the disconnect; leave the port up until it is through.
    while let Some(event) = channel.wait(Some(Duration::from_millis(800)))? {
        println!("rping: {:?}", event.kind);
        if matches!(event.kind, CmEventKind::TimewaitExit { .. }) {
            break;
        }
    }
    Ok(())
}
