//! The other processes of the tests: a device that does what standard input says, and tells on standard output.

use std::{
    io::BufRead,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use roce::{
    AccessFlags, CmEventKind, ConnParams, Cq, Device, DeviceConfig, EventChannel, Id, JoinConfig, Mr, Payload, Pd, Qp,
    QpCaps, QpInit, RecvWr, SendFlags, SendOp, SendWr, WcOpcode, WcStatus,
};

/// The address to open.
pub(crate) const ADDR: &str = "TEST_ADDR";
/// Not empty: open the device as if for this process alone.
pub(crate) const ALONE: &str = "TEST_ALONE";
/// Prefix of lines for the test.
pub(crate) const MARK: &str = "@ ";

const SIZE: usize = 64;
/// Between two looks at a completion queue, and between two rounds. 64 processes that do either much more often have two
/// processors to themselves.
const PAUSE: Duration = Duration::from_millis(10);

fn tell(text: impl std::fmt::Display) {
    println!("{MARK}{text}");
}

/// A queue pair with all that it needs.
struct End {
    qp: Qp,
    cq: Cq,
    mr: Mr,
}

impl End {
    fn new(device: &Device, pd: &Pd) -> Arc<Self> {
        let cq = device.create_cq(64, None, 0).unwrap();
        let init = QpInit {
            send_cq: &cq,
            recv_cq: &cq,
            caps: QpCaps::default(),
            signal_all: true,
        };
        let qp = device.create_qp(pd, &init).unwrap();
        let mr = device.alloc_mr(pd, 2 * SIZE, AccessFlags::LOCAL_WRITE).unwrap();
        let end = Self { qp, cq, mr };
        end.receive();
        Arc::new(end)
    }

    fn receive(&self) {
        let wr = RecvWr {
            wr_id: 1,
            sges: &[self.mr.sge(0, SIZE)],
        };
        // In error it is flushed, which the next poll shows.
        let _ = self.qp.post_recv(&[wr]);
    }

    fn send(&self) {
        let wr = SendWr {
            wr_id: 2,
            op: SendOp::Send,
            flags: SendFlags::SIGNALED,
            payload: Payload::Sges(&[self.mr.sge(SIZE, SIZE)]),
        };
        let _ = self.qp.post_send(&[wr]);
    }

    /// Waits for something received. None: the queue pair is in error.
    fn received(&self) -> Option<()> {
        let mut got = vec![];
        loop {
            got.clear();
            self.cq.poll(&mut got, 16).unwrap();
            for c in &got {
                if c.status != WcStatus::Success {
                    tell(format_args!("ended {:?}", c.status));
                    return None;
                }
            }
            if got.iter().any(|c| c.opcode == WcOpcode::Recv) {
                return Some(());
            }
            thread::sleep(PAUSE);
        }
    }

    /// Sends what came back, until the connection ends.
    fn echo(&self) {
        while self.received().is_some() {
            let mut bytes = [0; SIZE];
            self.mr.read(0, &mut bytes).unwrap();
            self.mr.write(SIZE, &bytes).unwrap();
            self.receive();
            self.send();
        }
    }

    /// Sends and waits for the echo, until the connection ends.
    fn rounds(&self, count: &AtomicU64) {
        for n in 0u64.. {
            let bytes: Vec<u8> = n.to_le_bytes().repeat(SIZE / 8);
            self.mr.write(SIZE, &bytes).unwrap();
            self.send();
            if self.received().is_none() {
                return;
            }
            let mut echo = vec![0; SIZE];
            self.mr.read(0, &mut echo).unwrap();
            assert_eq!(echo, bytes, "the echo of another packet");
            self.receive();
            count.fetch_add(1, Ordering::Relaxed);
            thread::sleep(PAUSE);
        }
    }
}

/// Answers events: every request is accepted.
fn events(device: &Device, pd: &Pd, channel: &EventChannel) {
    let mut ids: Vec<(Id, Arc<End>)> = vec![];
    while let Ok(event) = channel.wait(None) {
        let Some(event) = event else { continue };
        match event.kind {
            CmEventKind::Request { .. } => {
                let (id, end) = (event.id, End::new(device, pd));
                id.accept(&end.qp, ConnParams::default()).unwrap();
                ids.push((id, end.clone()));
                thread::spawn(move || end.echo());
            }
            kind => {
                let text = format!("{kind:?}");
                tell(format_args!(
                    "event {}",
                    text.split([' ', '{', '(']).next().unwrap_or_default()
                ));
            }
        }
    }
}

fn open() -> Option<Device> {
    let addr: IpAddr = std::env::var(ADDR).unwrap().parse().unwrap();
    let config = DeviceConfig {
        socket_buffer: 256 << 10,
        ..DeviceConfig::new(addr)
    };
    let device = match std::env::var(ALONE).unwrap().is_empty() {
        true => Device::open_shared(config, &JoinConfig::from_env().unwrap()),
        false => Device::open(config),
    };
    match device {
        Ok(device) => Some(device),
        Err(e) => {
            tell(format_args!("failed {e}"));
            None
        }
    }
}

#[test]
#[ignore = "a process that the other tests start"]
fn member() {
    if std::env::var(ADDR).is_err() {
        return;
    }
    let Some(device) = open() else { return };
    let pd = device.alloc_pd().unwrap();
    let channel = device.create_cm_channel().unwrap();
    let count = Arc::new(AtomicU64::new(0));
    let theirs = (device.clone(), pd.clone(), channel.clone());
    thread::spawn(move || events(&theirs.0, &theirs.1, &theirs.2));
    tell("open");
    let mut kept: Vec<(Id, Option<Arc<End>>)> = vec![];
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["listen", port] => {
                let addr = SocketAddr::new(device.addr(), port.parse().unwrap());
                match device.listen(&channel, addr, 8) {
                    Ok(id) => {
                        kept.push((id, None));
                        tell("listening");
                    }
                    Err(e) => tell(format_args!("refused {e}")),
                }
            }
            ["connect", ip, port] => {
                let addr = SocketAddr::new(ip.parse().unwrap(), port.parse().unwrap());
                let end = End::new(&device, &pd);
                let id = device
                    .connect(&channel, None, addr, &end.qp, ConnParams::default())
                    .unwrap();
                kept.push((id, Some(end.clone())));
                let count = count.clone();
                thread::spawn(move || {
                    // Sends are refused before the connection stands.
                    while end
                        .qp
                        .state()
                        .is_ok_and(|s| s != roce::QpState::Rts && s != roce::QpState::Err)
                    {
                        thread::sleep(PAUSE);
                    }
                    end.rounds(&count);
                });
            }
            ["rounds"] => tell(format_args!("rounds {}", count.load(Ordering::Relaxed))),
            ["sends"] => {
                let all = device.hw_counters();
                let sends = all.iter().find(|(name, _)| *name == "rdma_sends").unwrap().1;
                tell(format_args!("sends {sends}"));
            }
            _ => tell(format_args!("error {line}")),
        }
    }
    // As a program does that calls exit() without a word to anybody: the broker ends its connections.
    std::process::exit(0);
}
