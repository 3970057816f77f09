//! Work on a mapped device that checks what it reads: what an attack must not disturb.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use ferroce_tests::{nbd::Client, pattern};

/// Bytes of a request.
const BLOCK: usize = 256 << 10;

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    moved: AtomicU64,
    error: Mutex<Option<String>>,
}

/// Threads that write, read back and compare, each with a connection and a part of the device of its own.
pub struct Load {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Load {
    /// Starts it on the device behind an NBD socket.
    ///
    /// # Errors
    /// When the device can't be opened, or is too small.
    pub fn start(socket: &Path, threads: u64) -> io::Result<Self> {
        let shared = Arc::<Shared>::default();
        let mut load = Self {
            shared,
            threads: Vec::new(),
        };
        for n in 0..threads {
            let client = Client::connect(socket)?;
            let blocks = client.size / BLOCK as u64 / threads;
            if blocks == 0 {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "the device is too small"));
            }
            let shared = load.shared.clone();
            let socket = socket.to_owned();
            load.threads.push(thread::spawn(move || {
                if let Err(e) = work(&shared, client, n * blocks, blocks) {
                    let text = format!("{}: {e}", name(&socket));
                    shared
                        .error
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .get_or_insert(text);
                }
            }));
        }
        Ok(load)
    }

    /// Bytes written and read so far.
    pub fn moved(&self) -> u64 {
        self.shared.moved.load(Ordering::Relaxed)
    }

    /// Returns the first error.
    pub fn error(&self) -> Option<String> {
        self.shared.error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Bytes a second over some time; less time if something goes wrong.
    pub fn rate(&self, over: Duration) -> f64 {
        let (started, before) = (Instant::now(), self.moved());
        while started.elapsed() < over && self.error().is_none() {
            thread::sleep(Duration::from_millis(20).min(over));
        }
        (self.moved() - before) as f64 / started.elapsed().as_secs_f64()
    }

    /// Ends it.
    ///
    /// # Errors
    /// What went wrong first.
    pub fn finish(mut self) -> Result<u64, String> {
        self.end();
        self.error().map_or(Ok(self.moved()), Err)
    }

    fn end(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.end();
    }
}

fn name(socket: &Path) -> String {
    socket
        .file_name()
        .map_or_else(|| PathBuf::from("device"), PathBuf::from)
        .display()
        .to_string()
}

fn work(shared: &Shared, mut client: Client, first: u64, blocks: u64) -> Result<(), String> {
    let mut data = pattern(first + 1, BLOCK);
    let mut round = 0_u64;
    loop {
        for block in first..first + blocks {
            if shared.stop.load(Ordering::Relaxed) {
                return client.disconnect().map_err(|e| e.to_string());
            }
            round += 1;
            // A block that comes back from another place or time is not taken for this one.
            data[..8].copy_from_slice(&block.to_le_bytes());
            data[8..16].copy_from_slice(&round.to_le_bytes());
            let at = block * BLOCK as u64;
            client.write(at, &data).map_err(|e| format!("write at {at}: {e:?}"))?;
            shared.moved.fetch_add(BLOCK as u64, Ordering::Relaxed);
            let read = client.read(at, BLOCK).map_err(|e| format!("read at {at}: {e:?}"))?;
            shared.moved.fetch_add(BLOCK as u64, Ordering::Relaxed);
            if read != data {
                return Err(format!("at {at} was read what was not written there"));
            }
        }
    }
}
