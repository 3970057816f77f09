//! A client's session over several loops: threads with sockets, steered by the kernel.

mod support;

use std::{
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use roce::{Arrival, DeviceConfig, LocalDevice, Placement};
use rtrs::{
    Direction,
    client::{Client, ConType, Letter, Output, SessionConfig, SessionId, SessionInfo, Submission},
    cx::Cx,
};
use support::{Ask, Bed, PATIENCE, addresses, config};

const LEN: usize = 4096;
/// Requests of each share.
const REQUESTS: u64 = 400;

/// Nobody connects to a client.
struct Nowhere;

impl Placement for Nowhere {
    fn place(&self, _: &Arrival<'_>) -> usize {
        0
    }
}

/// What the loops of a test have in common.
struct Common {
    mail: Vec<mpsc::Sender<(u16, Letter)>>,
    /// Shares whose requests have ended.
    finished: AtomicUsize,
}

/// A loop with its share.
struct Share {
    index: u16,
    device: LocalDevice,
    client: Client,
    mail: mpsc::Receiver<(u16, Letter)>,
    common: Arc<Common>,
    session: Option<SessionId>,
    info: Option<SessionInfo>,
    begun: u64,
    ended: u64,
    closed: bool,
}

impl Share {
    fn with<T>(&mut self, f: impl FnOnce(&mut Client, &mut Cx<'_>) -> T) -> T {
        let mut cx = Cx {
            now: roce::now(),
            provider: self.device.provider(),
            random: &mut |bytes| rand::fill(bytes),
        };
        f(&mut self.client, &mut cx)
    }

    fn turn(&mut self) {
        let more = self.device.receive(roce::now(), 128);
        self.device.run_timers(roce::now(), more);
        let mut busy = more;
        while let Ok((from, letter)) = self.mail.try_recv() {
            self.with(|client, cx| client.letter(cx, from, letter));
            busy = true;
        }
        busy |= self.with(|client, cx| {
            let mut busy = false;
            let mut wcs = Vec::new();
            while cx.provider.poll_completions(&mut wcs, 64).unwrap() > 0 {
                busy = true;
                for (qp, wc) in wcs.drain(..) {
                    assert!(client.completion(cx, qp, &wc));
                }
            }
            while let Some(event) = cx.provider.poll_event() {
                client.event(cx, &event);
            }
            client.timeout(cx);
            busy
        });
        while let Some(output) = self.client.poll_output() {
            self.told(output);
        }
        self.submit();
        self.with(|client, cx| client.end_batch(cx));
        while let Some((to, letter)) = self.client.poll_letter() {
            // A loop that has ended needs none.
            let _ = self.common.mail[usize::from(to)].send((self.index, letter));
        }
        let _ = self.device.flush(roce::now());
        if !busy {
            thread::sleep(Duration::from_micros(100));
        }
    }

    /// Where a request's bytes are: each share has a part of the disk, in which a write is followed by a read of the same place.
    fn place(&self, tag: u64) -> (u64, Vec<u8>) {
        let at = u64::from(self.index) * 128 * 1024 + tag / 2 % 8 * LEN as u64;
        let fill = (tag / 2) as u8 ^ (self.index as u8) << 6;
        (at, vec![fill; LEN])
    }

    fn told(&mut self, output: Output) {
        match output {
            Output::Opened(session, info) => (self.session, self.info) = (Some(session), Some(info)),
            Output::Done {
                session,
                tag,
                result,
                data: Some(buffer),
            } => {
                result.unwrap();
                let mut bytes = vec![0; LEN];
                let buffers = self.client.buffers(session).unwrap();
                buffers.read(&buffer, 0, &mut bytes).unwrap();
                assert!(bytes == self.place(tag).1, "share {}, request {tag}", self.index);
                self.client.give_buffer(session, buffer);
                self.ended += 1;
                if self.ended == REQUESTS {
                    self.common.finished.fetch_add(1, Ordering::SeqCst);
                }
            }
            Output::Path { .. } => {}
            Output::Closed(_) => self.closed = true,
            // The server may take leave before the letter comes.
            Output::Down(..) if self.index > 0 && self.ended == REQUESTS => {}
            output => panic!("share {}: {output:?}", self.index),
        }
    }

    /// Up to eight at a time; a read only behind its write.
    fn submit(&mut self) {
        let Some(session) = self.session.filter(|_| !self.closed) else {
            return;
        };
        while self.begun < REQUESTS && self.begun < self.ended + 8 {
            let tag = self.begun;
            if tag % 2 == 1 && self.ended < tag {
                return;
            }
            let (at, bytes) = self.place(tag);
            let direction = [Direction::Write, Direction::Read][tag as usize % 2];
            self.with(|client, cx| {
                let data = client.take_buffer(cx, session, LEN).unwrap();
                let bytes = if tag.is_multiple_of(2) { bytes } else { vec![0; LEN] };
                client.buffers(session).unwrap().write(&data, 0, &bytes).unwrap();
                let request = Submission {
                    tag,
                    con: ConType::Io(tag as usize),
                    direction,
                    header: Ask::Transfer(at).header(0).into_iter().collect(),
                    data: Some(data),
                };
                client.submit(cx, session, request).unwrap();
            });
            self.begun += 1;
        }
    }

    fn run(mut self, config: Option<SessionConfig>) -> SessionInfo {
        if let Some(config) = config {
            self.with(|client, cx| client.open(cx, config)).unwrap();
        }
        let (end, mut asked) = (Instant::now() + PATIENCE, false);
        while !self.closed {
            assert!(Instant::now() < end, "share {}: {} ended", self.index, self.ended);
            self.turn();
            let all = self.common.finished.load(Ordering::SeqCst) == self.common.mail.len();
            if let Some(session) = self.session.filter(|_| all && self.index == 0 && !asked) {
                asked = true;
                self.with(|client, cx| client.close(cx, session));
            }
        }
        assert_eq!(self.client.sessions().count(), 0);
        self.info.unwrap()
    }
}

/// Runs a session over so many loops at `addr`; what each share was told.
fn run(addr: IpAddr, shares: u16, config: &SessionConfig) -> Vec<SessionInfo> {
    let devices = LocalDevice::open_shards(&[DeviceConfig::new(addr)], shares.into(), Arc::new(Nowhere)).unwrap();
    let (mail, inboxes): (Vec<_>, Vec<_>) = (0..shares).map(|_| mpsc::channel()).unzip();
    let common = Arc::new(Common {
        mail,
        finished: AtomicUsize::new(0),
    });
    let loops = devices
        .into_iter()
        .zip(inboxes)
        .zip(0..)
        .map(|((device, mail), index)| {
            let share = Share {
                index,
                device,
                client: Client::share(index, shares).unwrap(),
                mail,
                common: common.clone(),
                session: None,
                info: None,
                begun: 0,
                ended: 0,
                closed: false,
            };
            let config = (index == 0).then(|| config.clone());
            thread::spawn(move || share.run(config))
        });
    let loops: Vec<_> = loops.collect();
    loops.into_iter().map(|one| one.join().unwrap()).collect()
}

#[test]
fn a_session_over_three_loops_reads_and_writes_at_each() {
    for always_invalidate in [true, false] {
        let bed = Bed::new(rtrs::server::ServerConfig {
            always_invalidate,
            ..config()
        });
        let (addr, _) = addresses();
        let mut args = bed.args("shares", 4);
        args.paths[0].src = Some(addr);
        let infos = run(addr, 3, &args);
        let depths: Vec<u32> = infos.iter().map(|info| info.queue_depth).collect();
        assert_eq!(depths, [10, 11, 11]);
        let requests = bed.disk.requests.load(Ordering::Relaxed) as u64;
        assert_eq!(requests, 3 * REQUESTS);
    }
}
