//! A mapped device of which is known what must be in it.

use std::{
    fs::File,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use crate::{nbd::Client, pattern, process::TIMEOUT};

/// Bytes that are written at a time.
pub const BLOCK: usize = 16 << 10;

/// No two blocks of a test program get the same bytes, so that one which is another's is seen.
static SEED: AtomicU64 = AtomicU64::new(1);

/// A device, the image behind it at the server, and an NBD client that stays.
pub struct Checked {
    client: Client,
    socket: PathBuf,
    export: String,
    image: File,
    /// Of what was written to each block last; `None`: nothing.
    seeds: Vec<Option<u64>>,
    /// Blocks written so far.
    written: usize,
}

impl Checked {
    /// The device at an NBD socket with this export name, of a fresh image.
    ///
    /// # Panics
    /// When there is none.
    pub fn new(socket: &Path, export: &str, image: &Path) -> Self {
        let client = connect(socket, export);
        let blocks = usize::try_from(client.size).expect("a small device") / BLOCK;
        assert!(blocks > 0, "{export} has {} bytes", client.size);
        Self {
            client,
            socket: socket.to_owned(),
            export: export.to_owned(),
            image: File::open(image).unwrap_or_else(|e| panic!("{}: {e}", image.display())),
            seeds: vec![None; blocks],
            written: 0,
        }
    }

    /// Another block gets to the image, and comes back; so does it for a client that connects now.
    ///
    /// # Panics
    /// When not.
    pub fn works(&mut self) {
        let at = self.written % self.seeds.len();
        let seed = SEED.fetch_add(1, Relaxed);
        let (offset, data) = ((at * BLOCK) as u64, pattern(seed, BLOCK));
        let fail = |what: &str, e: &dyn std::fmt::Debug| -> ! { panic!("{}: {what}: {e:?}", self.export) };
        let written = self.client.write(offset, &data);
        written.unwrap_or_else(|e| fail("writing", &e));
        self.seeds[at] = Some(seed);
        self.written += 1;
        let mut there = vec![0; BLOCK];
        let read = self.image.read_exact_at(&mut there, offset);
        read.unwrap_or_else(|e| fail("reading the image", &e));
        assert!(there == data, "{}: the image has something else", self.export);
        for client in [&mut self.client, &mut connect(&self.socket, &self.export)] {
            let back = client.read(offset, BLOCK).unwrap_or_else(|e| fail("reading", &e));
            assert!(back == data, "{}: something else comes back", self.export);
        }
    }

    /// It is there again: another client finds all that was written.
    ///
    /// # Panics
    /// When not.
    pub fn returns(&mut self) {
        self.client = connect(&self.socket, &self.export);
        for (at, seed) in self.seeds.iter().enumerate() {
            let want = seed.map_or_else(|| vec![0; BLOCK], |seed| pattern(seed, BLOCK));
            let got = self.client.read((at * BLOCK) as u64, BLOCK);
            let got = got.unwrap_or_else(|e| panic!("{}: reading: {e:?}", self.export));
            assert!(got == want, "{}: block {at} is not what was written", self.export);
        }
    }
}

fn connect(socket: &Path, export: &str) -> Client {
    Client::connect_to(socket, export, TIMEOUT).unwrap_or_else(|e| panic!("{export} at {}: {e}", socket.display()))
}
