//! Work on the devices that knows what each block may hold.

use std::{
    fs::File,
    io,
    ops::Range,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use ferroce_tests::nbd::{Client, Command, Error};
use rand::{Rng, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::{
    limits::BASE,
    model::{BLOCK, Model},
};

/// Writers of a device, each with a connection and blocks of its own.
pub(crate) const WRITERS: u64 = 4;
/// Blocks of a request, at most.
const MOST: u64 = 64;
/// Time between two requests of a writer, at most.
const THINK: Duration = Duration::from_millis(40);
/// Pauses that are reported one by one.
const LONG: Duration = Duration::from_secs(1);

/// Numbers of blocks.
type Blocks = Range<u64>;

/// A request that failed.
#[derive(Clone, Debug)]
pub(crate) struct Failed {
    pub(crate) begun: Instant,
    pub(crate) ended: Instant,
    pub(crate) what: String,
}

/// What the writers of a device tell.
#[derive(Default)]
pub(crate) struct Told {
    stop: AtomicBool,
    /// There may be nobody behind the socket: clients lose their connections, and requests fail.
    broken: AtomicBool,
    /// Requests and their bytes.
    pub(crate) requests: AtomicU64,
    pub(crate) bytes: AtomicU64,
    /// Clients that left, politely or not.
    pub(crate) left: AtomicU64,
    /// Requests that ended with the mapping.
    pub(crate) cut_off: AtomicU64,
    notes: Mutex<Notes>,
}

#[derive(Default)]
struct Notes {
    failed: Vec<Failed>,
    violations: Vec<String>,
    long: Vec<(Instant, Duration, String)>,
    longest: Duration,
}

impl Told {
    fn notes(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether clients may meet nobody behind the socket.
    pub(crate) fn broken(&self, broken: bool) {
        self.broken.store(broken, Relaxed);
    }

    /// Requests that failed since the last call.
    pub(crate) fn take_failed(&self) -> Vec<Failed> {
        std::mem::take(&mut self.notes().failed)
    }

    /// What must not be, since the last call.
    pub(crate) fn take_violations(&self) -> Vec<String> {
        std::mem::take(&mut self.notes().violations)
    }

    /// Requests that took long, since the last call: when they ended, how long, and which.
    pub(crate) fn take_long(&self) -> Vec<(Instant, Duration, String)> {
        std::mem::take(&mut self.notes().long)
    }

    /// The longest request so far.
    pub(crate) fn longest(&self) -> Duration {
        self.notes().longest
    }
}

/// The writers of a device.
pub(crate) struct Load {
    pub(crate) told: Arc<Told>,
    threads: Vec<JoinHandle<Model>>,
    socket: PathBuf,
    /// The device.
    pub(crate) device: &'static str,
    /// The file behind it.
    pub(crate) image: PathBuf,
}

impl Load {
    /// Starts them on a device behind an NBD socket, of which they use all blocks that it always has. Every request is to end within `limit`.
    pub(crate) fn start(socket: &Path, device: &'static str, image: PathBuf, seed: u64, limit: Duration) -> Self {
        let told = Arc::<Told>::default();
        let each = BASE / BLOCK as u64 / WRITERS;
        let threads = (0..WRITERS).map(|n| {
            let writer = Writer {
                socket: socket.to_owned(),
                device,
                limit,
                told: told.clone(),
                model: Model::new(seed.wrapping_add(n), n * each..(n + 1) * each),
                rng: ChaCha8Rng::seed_from_u64(seed.wrapping_add(n)),
                client: None,
            };
            thread::spawn(move || writer.run())
        });
        let threads = threads.collect();
        Self {
            told,
            threads,
            socket: socket.to_owned(),
            device,
            image,
        }
    }

    /// Ends them.
    pub(crate) fn stop(&mut self) -> Vec<Model> {
        self.told.stop.store(true, Relaxed);
        self.threads.drain(..).filter_map(|thread| thread.join().ok()).collect()
    }

    /// Ends them, and compares every block with what it may hold: as a new client reads it after a flush, and in the image file. How many
    /// blocks were certain, and how many in doubt.
    pub(crate) fn finish(&mut self, limit: Duration) -> Result<(u64, u64), String> {
        let models = self.stop();
        if models.len() as u64 != WRITERS {
            return Err("a writer panicked".into());
        }
        if let Some(violation) = self.told.take_violations().into_iter().next() {
            return Err(violation);
        }
        let mut client =
            Client::connect_to(&self.socket, self.device, limit).map_err(|e| format!("at the end: {e}"))?;
        client.flush().map_err(|e| format!("flush at the end: {e:?}"))?;
        let image = &self.image;
        let file = File::open(image).map_err(|e| format!("{}: {e}", image.display()))?;
        let (mut certain, mut doubtful) = (0, 0);
        for model in models {
            let blocks = model.blocks();
            doubtful += model.in_doubt() as u64;
            certain += blocks.end - blocks.start - model.in_doubt() as u64;
            for first in blocks.clone().step_by(MOST as usize) {
                let some = first..(first + MOST).min(blocks.end);
                let (at, len) = (some.start * BLOCK as u64, (some.end - some.start) as usize * BLOCK);
                let read = client
                    .read(at, len)
                    .map_err(|e| format!("read at {at} at the end: {e:?}"))?;
                model
                    .check(some.clone(), &read)
                    .map_err(|e| format!("at the end: {e}"))?;
                let mut stored = vec![0; len];
                file.read_exact_at(&mut stored, at)
                    .map_err(|e| format!("{}: {e}", image.display()))?;
                model.check(some, &stored).map_err(|e| format!("in the image: {e}"))?;
            }
        }
        client.disconnect().map_err(|e| format!("at the end: {e}"))?;
        Ok((certain, doubtful))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop();
    }
}

struct Writer {
    socket: PathBuf,
    device: &'static str,
    limit: Duration,
    told: Arc<Told>,
    model: Model,
    rng: ChaCha8Rng,
    client: Option<Client>,
}

impl Writer {
    fn run(mut self) -> Model {
        while !self.told.stop.load(Relaxed) {
            if let Err(violation) = self.step() {
                self.told.notes().violations.push(violation);
                break;
            }
            thread::sleep(THINK.mul_f64(self.rng.random::<f64>().powi(2)));
        }
        self.model
    }

    /// The client, a new one if the last one has left; `None` if there is nobody behind the socket.
    fn client(&mut self) -> Result<Option<Client>, String> {
        if let Some(client) = self.client.take() {
            return Ok(Some(client));
        }
        // It may be that the way is mended meanwhile.
        let broken = self.told.broken.load(Relaxed);
        match Client::connect_to(&self.socket, self.device, self.limit) {
            Ok(client) => Ok(Some(client)),
            Err(_) if broken || self.told.broken.load(Relaxed) => {
                thread::sleep(Duration::from_millis(100));
                Ok(None)
            }
            Err(e) => Err(format!("an NBD client can't connect: {e}")),
        }
    }

    /// One request, or a client that leaves.
    fn step(&mut self) -> Result<(), String> {
        let Some(mut client) = self.client()? else {
            return Ok(());
        };
        let blocks = self.model.blocks();
        let count = match self.rng.random_range(0..4) {
            0 => self.rng.random_range(1..=MOST),
            _ => self.rng.random_range(1..=4),
        };
        let first = self.rng.random_range(blocks.start..=blocks.end - count);
        let some = first..first + count;
        let begun = Instant::now();
        let quiet = self.model.is_quiet(some.clone(), begun);
        let (what, result) = match self.rng.random_range(0..2000) {
            // To a block that a client has left in the middle of a write, that write may still come.
            900..1880 if !quiet => self.read(&mut client, some.clone()),
            0..900 => self.read(&mut client, some.clone()),
            900..1800 => self.write(&mut client, some.clone(), None),
            1800..1880 => self.write(&mut client, some.clone(), Some(0)),
            1880..1980 => ("flush", client.flush()),
            1980..1999 => return self.leave(client, None),
            _ => return self.leave(client, quiet.then_some(some)),
        };
        let what = format!("{what} of blocks {} to {}", some.start, some.end - 1);
        if self.judge(&what, begun, &some, result)? {
            self.client = Some(client);
        }
        Ok(())
    }

    /// Takes note of a request's end; whether its client goes on.
    fn judge(&mut self, what: &str, begun: Instant, some: &Blocks, result: Result<(), Error>) -> Result<bool, String> {
        let (ended, took) = (Instant::now(), begun.elapsed());
        self.told.requests.fetch_add(1, Relaxed);
        let broken = self.told.broken.load(Relaxed);
        if !broken {
            let mut notes = self.told.notes();
            notes.longest = notes.longest.max(took);
            if took >= LONG {
                notes.long.push((ended, took, what.to_owned()));
            }
        }
        match result {
            Ok(()) => Ok(true),
            Err(Error::Connection(e)) if e.kind() == io::ErrorKind::InvalidData => Err(format!("{what}: {e}")),
            Err(Error::Refused(_) | Error::Connection(_)) if broken && took < self.limit => {
                // Even a write that has failed may be on its way to the server.
                self.told.cut_off.fetch_add(1, Relaxed);
                self.model.wait_for(some.clone(), ended + self.limit);
                Ok(false)
            }
            Err(Error::Refused(errno)) => {
                let what = format!("{what}: error {errno}");
                self.told.notes().failed.push(Failed { begun, ended, what });
                // Not every request fails as fast as it can.
                thread::sleep(Duration::from_millis(50));
                Ok(true)
            }
            Err(Error::Connection(e)) => Err(format!("{what}: after {:.1} s: {e}", took.as_secs_f64())),
        }
    }

    fn read(&mut self, client: &mut Client, some: Blocks) -> (&'static str, Result<(), Error>) {
        let len = (some.end - some.start) as usize * BLOCK;
        let result = client.read(some.start * BLOCK as u64, len).and_then(|bytes| {
            self.told.bytes.fetch_add(len as u64, Relaxed);
            let wrong = |e| Error::Connection(io::Error::new(io::ErrorKind::InvalidData, e));
            self.model.check(some, &bytes).map_err(wrong)
        });
        ("read", result)
    }

    /// Writes, or clears.
    fn write(&mut self, client: &mut Client, some: Blocks, clear: Option<u32>) -> (&'static str, Result<(), Error>) {
        let at = some.start * BLOCK as u64;
        let (what, version, result) = match clear {
            Some(zeroes) => {
                let len = (some.end - some.start) as u32 * BLOCK as u32;
                ("clearing", zeroes, client.clear(Command::WriteZeroes, at, len))
            }
            None => {
                let (bytes, version) = self.model.compose(some.clone());
                let result = match self.rng.random_range(0..16) {
                    0 => client.write_fua(at, &bytes),
                    _ => client.write(at, &bytes),
                };
                ("write", version, result)
            }
        };
        match &result {
            Ok(()) => {
                self.told
                    .bytes
                    .fetch_add((some.end - some.start) * BLOCK as u64, Relaxed);
                self.model.written(some, version);
            }
            Err(_) => self.model.doubt(some, version),
        }
        (what, result)
    }

    /// The client leaves: politely, or in the middle of a write.
    fn leave(&mut self, mut client: Client, write: Option<Blocks>) -> Result<(), String> {
        self.told.left.fetch_add(1, Relaxed);
        let left = match write {
            None => client.disconnect(),
            Some(some) => {
                let (bytes, version) = self.model.compose(some.clone());
                self.model.doubt(some.clone(), version);
                self.model.wait_for(some.clone(), Instant::now() + self.limit);
                let len = bytes.len() as u32;
                let at = some.start * BLOCK as u64;
                client.send(Command::Write, 0, at, len, &bytes).map(|_| ())
            }
        };
        match left {
            Err(e) if !self.told.broken.load(Relaxed) => Err(format!("a client that leaves: {e}")),
            _ => Ok(()),
        }
    }
}
