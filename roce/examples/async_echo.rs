//! Echo server on tokio, with a task for each client.
//!
//! `cargo run -p roce --features tokio --example async_echo -- 192.0.2.7`, with `rc_client` as its client.

use std::{
    env,
    error::Error,
    net::{IpAddr, SocketAddr},
};

use roce::{
    AccessFlags, CmEventKind, ConnParams, Device, DeviceConfig, Id, Payload, Pd, QpInit, RecvWr, SendFlags, SendOp,
    SendWr, WcOpcode, WcStatus,
    aio::{AsyncCq, AsyncEventChannel},
};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// Port of the RDMA_CM TCP port space at which it listens.
const SERVICE: u16 = 7471;
/// Longest message in bytes.
const LEN: usize = 4096;

/// Accepts a client and echoes its messages until it disconnects. Returns how many there were.
async fn client(device: Device, pd: Pd, id: Id) -> Outcome<u64> {
    let cq = AsyncCq::new(&device, 16)?;
    let init = QpInit::new(cq.cq());
    let qp = device.create_qp(&pd, &init)?;
    let memory = device.alloc_mr(&pd, LEN, AccessFlags::LOCAL_WRITE)?;
    let receive = || {
        let sges = [memory.sge(0, LEN)];
        qp.post_recv(&[RecvWr { wr_id: 0, sges: &sges }]).map_err(|(_, e)| e)
    };
    receive()?;
    id.accept(&qp, ConnParams::default())?;
    let (mut completions, mut messages) = (Vec::new(), 0);
    loop {
        cq.poll(&mut completions, 16).await?;
        for wc in completions.drain(..) {
            match (wc.status, wc.opcode) {
                (WcStatus::Success, WcOpcode::Recv) => {
                    messages += 1;
                    let sges = [memory.sge(0, wc.byte_len as usize)];
                    let send = SendWr {
                        wr_id: 1,
                        op: SendOp::Send,
                        flags: SendFlags::SIGNALED,
                        payload: Payload::Sges(&sges),
                    };
                    qp.post_send(&[send]).map_err(|(_, e)| e)?;
                }
                (WcStatus::Success, _) => receive()?,
                (WcStatus::FlushError, _) => return Ok(messages),
                (failed, _) => {
                    let why = qp.take_failure().map(|why| why.to_string());
                    return Err(why.unwrap_or_else(|| failed.to_string()).into());
                }
            }
        }
    }
}

/// Serves until so many clients have come and gone, or without end.
pub(crate) async fn run(addr: IpAddr, clients: Option<u64>) -> Outcome<()> {
    let device = Device::open(DeviceConfig::new(addr))?;
    let pd = device.alloc_pd()?;
    let events = AsyncEventChannel::new(&device)?;
    let _listener = device.listen(events.channel(), SocketAddr::new(addr, SERVICE), 16)?;
    println!("listening at {addr}, service {SERVICE}");
    let mut tasks = tokio::task::JoinSet::new();
    let mut served = 0;
    while clients.is_none_or(|most| served < most) {
        tokio::select! {
            event = events.next() => {
                let event = event?;
                if let CmEventKind::Request { .. } = event.kind {
                    tasks.spawn(client(device.clone(), pd.clone(), event.id));
                }
            }
            Some(done) = tasks.join_next() => {
                println!("{} messages", done??);
                served += 1;
            }
        }
    }
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
#[allow(dead_code, reason = "a test calls `run`")]
async fn main() -> Outcome<()> {
    let addr = env::args().nth(1).ok_or("usage: async_echo ADDR")?;
    run(addr.parse()?, None).await
}
