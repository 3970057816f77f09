//! Client on a reliable connection: sends a message to `rc_server` and prints what comes back.
//!
//! `cargo run -p roce --example rc_client -- 192.0.2.8 192.0.2.7 hello`: own address, server, message.

use std::{
    env,
    error::Error,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use roce::{
    AccessFlags, CmEventKind, ConnParams, Device, DeviceConfig, Payload, QpInit, RecvWr, SendFlags, SendOp, SendWr,
    WcOpcode,
};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Port of the RDMA_CM TCP port space at which the server listens.
const SERVICE: u16 = 7471;
/// Longest message in bytes.
const LEN: usize = 4096;
/// Longest time until the server has accepted.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Sends a message from an address of this host to a server, and returns the answer.
pub(crate) fn run(from: IpAddr, server: IpAddr, message: &[u8]) -> Outcome<Vec<u8>> {
    let device = Device::open(DeviceConfig::new(from))?;
    let pd = device.alloc_pd()?;
    let cq = device.create_cq(16, None, 0)?;
    let init = QpInit::new(&cq);
    let qp = device.create_qp(&pd, &init)?;
    let (outgoing, incoming) = (
        device.alloc_mr(&pd, LEN, AccessFlags::empty())?,
        device.alloc_mr(&pd, LEN, AccessFlags::LOCAL_WRITE)?,
    );
    outgoing.write(0, message)?;
    let sges = [incoming.sge(0, LEN)];
    qp.post_recv(&[RecvWr { wr_id: 0, sges: &sges }]).map_err(|(_, e)| e)?;

    let events = device.create_cm_channel()?;
    let to = SocketAddr::new(server, SERVICE);
    let id = device.connect(&events, Some(from), to, &qp, ConnParams::default())?;
    match events.wait(Some(TIMEOUT))?.ok_or("no answer in time")?.kind {
        CmEventKind::Established { .. } => {}
        refused => return Err(format!("no connection: {refused}").into()),
    }

    let sges = [outgoing.sge(0, message.len())];
    let send = SendWr {
        wr_id: 1,
        op: SendOp::Send,
        flags: SendFlags::SIGNALED,
        payload: Payload::Sges(&sges),
    };
    qp.post_send(&[send]).map_err(|(_, e)| e)?;
    let mut completions = Vec::new();
    loop {
        cq.poll(&mut completions, 16)?;
        for wc in completions.drain(..) {
            if !wc.is_ok() {
                // The first error has a reason, those that are flushed after it have none.
                let why = qp.take_failure().map(|why| why.to_string());
                return Err(why.unwrap_or_else(|| wc.status.to_string()).into());
            }
            if wc.opcode == WcOpcode::Recv {
                let mut answer = vec![0; wc.byte_len as usize];
                incoming.read(0, &mut answer)?;
                id.disconnect()?;
                return Ok(answer);
            }
        }
    }
}

#[allow(dead_code, reason = "a test calls `run`")]
fn main() -> Outcome<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    let [from, server, message] = &args[..] else {
        return Err("usage: rc_client OWN_ADDR SERVER MESSAGE".into());
    };
    let answer = run(from.parse()?, server.parse()?, message.as_bytes())?;
    println!("{}", String::from_utf8_lossy(&answer));
    Ok(())
}
