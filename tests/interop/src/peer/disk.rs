//! Work on a device at an NBD socket of which is known, from a number, what it leaves behind: the other end of the session compares its
//! image with that.

use std::{
    collections::VecDeque,
    fs::File,
    ops::Range,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use ferroce_tests::nbd::{
    CMD_FLAG_FUA, Client, Command, FLAG_SEND_FLUSH, FLAG_SEND_FUA, FLAG_SEND_TRIM, FLAG_SEND_WRITE_ZEROES,
};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

use crate::Error;

/// Arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// What is done, and left behind, follows from this.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Work on the first 32 MiB of the device at this NBD socket: write, flush, discard, write zeroes, read all and compare.
    #[arg(
        long,
        value_name = "SOCKET",
        required_unless_present = "image",
        conflicts_with = "image"
    )]
    nbd: Option<PathBuf>,
    /// Compare an image with what that has left behind.
    #[arg(long, value_name = "FILE")]
    image: Option<PathBuf>,
}

/// Bytes that are worked on.
const SIZE: usize = 32 << 20;
/// Offsets and lengths are multiples of it, bytes.
const SECTOR: usize = 512;
/// Of a request, bytes.
const LARGEST: usize = 256 << 10;
/// Requests in flight.
const DEPTH: usize = 16;
const STEPS: usize = 600;
/// How long the device may take for a request.
const TIMEOUT: Duration = Duration::from_secs(60);

/// What a step does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Write,
    /// A write that is on stable storage before its answer.
    WriteFua,
    Zeroes,
    Discard,
}

struct Step {
    kind: Kind,
    range: Range<usize>,
    seed: u64,
}

impl Step {
    fn data(&self) -> Vec<u8> {
        match self.kind {
            Kind::Write | Kind::WriteFua => ferroce_tests::pattern(self.seed, self.range.len()),
            Kind::Zeroes | Kind::Discard => Vec::new(),
        }
    }
}

/// The steps of a seed. The first write everything once, so that all is known.
fn steps(seed: u64) -> Vec<Step> {
    let mut random = StdRng::seed_from_u64(seed);
    let first = (0..SIZE / LARGEST).map(|n| (Kind::Write, n * LARGEST..(n + 1) * LARGEST));
    let mut all: Vec<_> = first.collect();
    for _ in 0..STEPS {
        let kind = match random.random_range(0..12) {
            0 => Kind::WriteFua,
            1 => Kind::Zeroes,
            2 => Kind::Discard,
            _ => Kind::Write,
        };
        // As many short ones as long ones.
        let largest = LARGEST >> random.random_range(0..10);
        let len = random.random_range(1..=largest / SECTOR) * SECTOR;
        let at = random.random_range(0..=(SIZE - len) / SECTOR) * SECTOR;
        all.push((kind, at..at + len));
    }
    let seeded = |(n, (kind, range))| Step {
        kind,
        range,
        seed: seed.wrapping_mul(10_007).wrapping_add(n as u64),
    };
    all.into_iter().enumerate().map(seeded).collect()
}

/// What is on the device afterwards; nothing is said of what was discarded.
struct Left {
    data: Vec<u8>,
    known: Vec<bool>,
}

impl Left {
    fn of(steps: &[Step]) -> Self {
        let mut left = Self {
            data: vec![0; SIZE],
            known: vec![true; SIZE / SECTOR],
        };
        for step in steps {
            let known = step.kind != Kind::Discard;
            left.known[step.range.start / SECTOR..step.range.end / SECTOR].fill(known);
            match step.kind {
                Kind::Write | Kind::WriteFua => left.data[step.range.clone()].copy_from_slice(&step.data()),
                Kind::Zeroes => left.data[step.range.clone()].fill(0),
                Kind::Discard => {}
            }
        }
        left
    }

    /// Compares what is at an offset.
    fn check(&self, at: usize, found: &[u8]) -> Result<(), Error> {
        for (n, sector) in found.chunks(SECTOR).enumerate() {
            let from = at + n * SECTOR;
            if self.known[from / SECTOR] && self.data[from..from + sector.len()] != *sector {
                return Err(format!("other data at offset {from} than was written").into());
            }
        }
        Ok(())
    }
}

/// Does the work, or looks at what it has left.
pub(crate) fn run(args: &Args) -> Result<(), Error> {
    let steps = steps(args.seed);
    let left = Left::of(&steps);
    match (&args.nbd, &args.image) {
        (Some(socket), _) => work(socket, &steps, &left),
        (None, Some(image)) => compare(image, &left),
        (None, None) => Err("--nbd or --image".into()),
    }
}

fn work(socket: &Path, steps: &[Step], left: &Left) -> Result<(), Error> {
    let mut client = Client::connect_to(socket, "", TIMEOUT)?;
    if client.size < SIZE as u64 {
        return Err(format!("the device has {} bytes; it takes {SIZE}", client.size).into());
    }
    let mut under_way: VecDeque<&Range<usize>> = VecDeque::new();
    for step in steps {
        let meets = |other: &&Range<usize>| other.start < step.range.end && step.range.start < other.end;
        // Those in flight are in any order: none is to meet another.
        if under_way.len() == DEPTH || under_way.iter().any(meets) {
            answers(&mut client, &mut under_way)?;
        }
        let can = |flag: u16| client.flags & flag != 0;
        let mut data = step.data();
        let (command, flags) = match step.kind {
            Kind::Discard if !can(FLAG_SEND_TRIM) => continue,
            Kind::Zeroes if !can(FLAG_SEND_WRITE_ZEROES) => {
                data = vec![0; step.range.len()];
                (Command::Write, 0)
            }
            Kind::WriteFua if can(FLAG_SEND_FUA) => (Command::Write, CMD_FLAG_FUA),
            Kind::Write | Kind::WriteFua => (Command::Write, 0),
            Kind::Zeroes => (Command::WriteZeroes, 0),
            Kind::Discard => (Command::Trim, 0),
        };
        let len = u32::try_from(step.range.len())?;
        client.send(command, flags, step.range.start as u64, len, &data)?;
        under_way.push_back(&step.range);
    }
    answers(&mut client, &mut under_way)?;
    if client.flags & FLAG_SEND_FLUSH != 0 {
        client.flush().map_err(|e| format!("flush: {e:?}"))?;
    }
    for at in (0..SIZE).step_by(LARGEST) {
        let found = client.read(at as u64, LARGEST);
        left.check(at, &found.map_err(|e| format!("reading at {at}: {e:?}"))?)?;
    }
    client.disconnect()?;
    println!("disk: {} requests, {SIZE} bytes read and compared: passed", steps.len());
    Ok(())
}

/// Takes the answers of all that are in flight.
fn answers(client: &mut Client, under_way: &mut VecDeque<&Range<usize>>) -> Result<(), Error> {
    while !under_way.is_empty() {
        let (_, error) = client.reply()?;
        if error != 0 {
            return Err(format!("a request was answered with NBD error {error}").into());
        }
        under_way.pop_front();
    }
    Ok(())
}

fn compare(image: &Path, left: &Left) -> Result<(), Error> {
    let file = File::open(image).map_err(|e| format!("{}: {e}", image.display()))?;
    let mut found = vec![0; LARGEST];
    for at in (0..SIZE).step_by(LARGEST) {
        file.read_exact_at(&mut found, at as u64)
            .map_err(|e| format!("{}: {e}", image.display()))?;
        left.check(at, &found)?;
    }
    println!("disk: {SIZE} bytes of the image compared: passed");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{fs, slice::from_ref};

    use super::{Args, Kind, LARGEST, Left, SECTOR, SIZE, Step, run, steps};

    #[test]
    fn what_is_left_is_what_the_steps_did() {
        let steps = steps(7);
        for kind in [Kind::Write, Kind::WriteFua, Kind::Zeroes, Kind::Discard] {
            assert!(steps.iter().any(|step| step.kind == kind), "{kind:?}");
        }
        assert!(
            steps
                .iter()
                .all(|s| s.range.end <= SIZE && s.range.len() <= LARGEST && s.range.len() % SECTOR == 0)
        );
        let left = Left::of(&steps);
        let last = steps.iter().rev().find(|s| s.kind == Kind::Write).expect("a write");
        assert!(left.check(last.range.start, &last.data()).is_ok());
        let mut other = last.data();
        other[0] ^= 1;
        assert!(left.check(last.range.start, &other).is_err());
        let gone = Step {
            kind: Kind::Discard,
            range: 0..SECTOR,
            seed: 0,
        };
        assert!(Left::of(from_ref(&gone)).check(0, &[5; SECTOR]).is_ok());
    }

    #[test]
    fn an_image_of_another_seed_is_another() {
        let image = tempfile::NamedTempFile::new().expect("a file");
        fs::write(image.path(), Left::of(&steps(3)).data).expect("written");
        let args = |seed| Args {
            seed,
            nbd: None,
            image: Some(image.path().to_owned()),
        };
        assert!(run(&args(3)).is_ok());
        assert!(run(&args(4)).is_err());
    }
}
