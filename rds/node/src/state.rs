//! Sequence numbers of an address's connections in a file, which outlives the process.
//!
//! A record is written before the numbers are used: before a message leaves, and before one that has come is handed to a program. Each
//! write is one call of less than a page, which a killed process has made or has not. A checksum tells a file that a system failure, or
//! somebody, has spoilt: it is set aside, and a new one begun.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    net::{IpAddr, Ipv6Addr},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use rds::{PairKey, PairState};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Most records of a file. Beyond them those of connections that this process has not had are overwritten.
const MAX_RECORDS: usize = 8192;
const MAGIC: [u8; 8] = *b"RDSSTAT1";

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Record {
    remote: [u8; 16],
    next_send: u64,
    next_receive: u64,
    tos: u64,
    reserved: [u64; 2],
    checksum: u64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Head {
    magic: [u8; 8],
    reserved: u64,
    local: [u8; 16],
    padding: [u64; 4],
}

const LEN: usize = size_of::<Record>();
const _: () = assert!(size_of::<Head>() == LEN);

/// FNV-1a.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}

fn octets(addr: IpAddr) -> [u8; 16] {
    match addr {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// Reason why a file was not used.
#[derive(Debug)]
pub enum StateError {
    /// The system refuses.
    Io(io::Error),
    /// It was spoilt, or is another's.
    Corrupt(String),
}

impl From<io::Error> for StateError {
    fn from(e: io::Error) -> Self {
        Self::Io(e)
    }
}

/// File of an address.
#[derive(Debug)]
pub struct StateFile {
    file: File,
    slots: BTreeMap<PairKey, usize>,
    /// Of former processes, and not used by this one so far.
    former: BTreeMap<PairKey, usize>,
    recorded: BTreeMap<PairKey, PairState>,
    /// A write has failed, and that was reported.
    failed: bool,
    /// Fault that is to be reported.
    trouble: Option<String>,
}

impl StateFile {
    /// Returns the path of an address's file. `interface`: of an address that others may have at other interfaces.
    pub fn path(dir: &Path, local: IpAddr, interface: Option<&str>) -> PathBuf {
        match interface {
            Some(interface) => dir.join(format!("rds-{local}%{interface}.state")),
            None => dir.join(format!("rds-{local}.state")),
        }
    }

    /// Opens the file of an address, or makes it. Returns what it has of former processes. One that can't be read is renamed to
    /// `….corrupt`, which [`take_trouble`](Self::take_trouble) says.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn open(
        dir: &Path,
        local: IpAddr,
        interface: Option<&str>,
    ) -> io::Result<(Self, BTreeMap<PairKey, PairState>)> {
        let path = Self::path(dir, local, interface);
        match Self::load(&path, local) {
            Ok(loaded) => Ok(loaded),
            Err(StateError::Io(e)) => Err(e),
            Err(StateError::Corrupt(why)) => {
                let aside = path.with_extension("state.corrupt");
                fs::rename(&path, &aside)?;
                let (mut file, former) = Self::load(&path, local).map_err(|e| match e {
                    StateError::Io(e) => e,
                    StateError::Corrupt(why) => io::Error::new(io::ErrorKind::InvalidData, why),
                })?;
                file.trouble = Some(format!(
                    "{} is not usable ({why}): it is renamed to {}, and a new one begun. Messages that peers send again may come twice",
                    path.display(),
                    aside.display()
                ));
                Ok((file, former))
            }
        }
    }

    fn load(path: &Path, local: IpAddr) -> Result<(Self, BTreeMap<PairKey, PairState>), StateError> {
        let file = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .mode(0o600)
            .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
            .open(path)?;
        let corrupt = |why: String| Err(StateError::Corrupt(why));
        let len = file.metadata()?.len() as usize;
        if len > LEN * (MAX_RECORDS + 1) {
            return corrupt(format!("{len} bytes"));
        }
        let mut bytes = vec![0; len];
        file.read_exact_at(&mut bytes, 0)?;
        let head = Head {
            magic: MAGIC,
            reserved: 0,
            local: octets(local),
            padding: [0; 4],
        };
        if bytes.is_empty() {
            file.write_all_at(head.as_bytes(), 0)?;
        }
        let (chunks, rest) = bytes.as_chunks::<LEN>();
        let (first, records) = match chunks.split_first() {
            Some((first, records)) => (first.as_slice(), records),
            None => (head.as_bytes(), &[][..]),
        };
        if first != head.as_bytes() {
            return corrupt("it does not begin as the file of this address".into());
        }
        if !rest.is_empty() {
            return corrupt(format!("{} bytes after the last record", rest.len()));
        }
        let mut former = BTreeMap::new();
        let mut states = BTreeMap::new();
        for (slot, bytes) in records.iter().enumerate() {
            let (key, state) = match parse(bytes, local) {
                Ok(parsed) => parsed,
                Err(why) => return corrupt(format!("record {slot}: {why}")),
            };
            former.insert(key, slot);
            states.insert(key, state);
        }
        let this = Self {
            file,
            slots: BTreeMap::new(),
            former,
            recorded: states.clone(),
            failed: false,
            trouble: None,
        };
        Ok((this, states))
    }

    /// Records the state of a connection, if it has changed.
    pub fn record(&mut self, key: PairKey, state: PairState) {
        if self.recorded.get(&key) == Some(&state) {
            return;
        }
        let Some(slot) = self.slot(key) else { return };
        let mut record = Record {
            remote: octets(key.remote),
            next_send: state.next_send,
            next_receive: state.next_receive,
            tos: key.tos.into(),
            reserved: [0; 2],
            checksum: 0,
        };
        record.checksum = checksum(record.as_bytes());
        match self.file.write_all_at(record.as_bytes(), ((slot + 1) * LEN) as u64) {
            Ok(()) => {
                self.recorded.insert(key, state);
                self.failed = false;
            }
            Err(e) if !self.failed => {
                self.failed = true;
                self.trouble = Some(format!(
                    "sequence numbers can't be recorded ({e}): after a crash messages may come twice or be lost"
                ));
            }
            Err(_) => {}
        }
    }

    /// Takes a fault that was not reported yet.
    pub fn take_trouble(&mut self) -> Option<String> {
        self.trouble.take()
    }

    /// Returns the place of a connection's record.
    fn slot(&mut self, key: PairKey) -> Option<usize> {
        if let Some(slot) = self.slots.get(&key) {
            return Some(*slot);
        }
        let used = self.slots.len() + self.former.len();
        let slot = match self.former.remove(&key) {
            Some(slot) => slot,
            None if used < MAX_RECORDS => used,
            None => {
                let (old, slot) = self.former.pop_first()?;
                self.recorded.remove(&old);
                slot
            }
        };
        self.slots.insert(key, slot);
        Some(slot)
    }
}

fn parse(bytes: &[u8; LEN], local: IpAddr) -> Result<(PairKey, PairState), &'static str> {
    let record: Record = zerocopy::transmute!(*bytes);
    let sum = checksum(Record { checksum: 0, ..record }.as_bytes());
    if sum != record.checksum {
        return Err("its checksum is wrong");
    }
    let remote = Ipv6Addr::from(record.remote);
    let remote = match local {
        IpAddr::V4(_) => IpAddr::V4(remote.to_ipv4_mapped().ok_or("its address is of another family")?),
        IpAddr::V6(_) => IpAddr::V6(remote),
    };
    let tos = u8::try_from(record.tos).map_err(|_| "its type of service is none")?;
    let state = PairState {
        next_send: record.next_send,
        next_receive: record.next_receive,
    };
    Ok((PairKey { local, remote, tos }, state))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addr(n: u8) -> IpAddr {
        [192, 0, 2, n].into()
    }

    fn key(n: u8, tos: u8) -> PairKey {
        PairKey {
            local: addr(1),
            remote: addr(n),
            tos,
        }
    }

    fn state(n: u64) -> PairState {
        PairState {
            next_send: n,
            next_receive: n + 1,
        }
    }

    fn open(dir: &Path, local: IpAddr) -> io::Result<(StateFile, BTreeMap<PairKey, PairState>)> {
        StateFile::open(dir, local, None)
    }

    #[test]
    fn what_was_recorded_is_there_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let (mut file, former) = open(dir.path(), addr(1)).unwrap();
        assert!(former.is_empty());
        file.record(key(2, 0), state(5));
        file.record(key(3, 8), state(7));
        file.record(key(2, 0), state(6));
        // As a killed process leaves it.
        std::mem::forget(file);
        let (mut file, former) = open(dir.path(), addr(1)).unwrap();
        assert_eq!(former, [(key(2, 0), state(6)), (key(3, 8), state(7))].into());
        file.record(key(4, 0), state(9));
        file.record(key(3, 8), state(8));
        drop(file);
        let (_, former) = open(dir.path(), addr(1)).unwrap();
        assert_eq!(
            former,
            [(key(2, 0), state(6)), (key(3, 8), state(8)), (key(4, 0), state(9))].into()
        );
        let six = IpAddr::V6("2001:db8::1".parse().unwrap());
        assert!(open(dir.path(), six).unwrap().1.is_empty());
    }

    #[test]
    fn a_link_local_address_has_a_file_for_each_interface() {
        let dir = tempfile::tempdir().unwrap();
        let local: IpAddr = "fe80::1".parse().unwrap();
        let key = PairKey {
            local,
            remote: "fe80::2".parse().unwrap(),
            tos: 0,
        };
        let open = |interface| StateFile::open(dir.path(), local, Some(interface)).unwrap();
        open("eth0").0.record(key, state(5));
        assert!(open("eth1").1.is_empty());
        assert_eq!(open("eth0").1, [(key, state(5))].into());
    }

    #[test]
    fn a_spoilt_file_is_set_aside() {
        let dir = tempfile::tempdir().unwrap();
        let path = StateFile::path(dir.path(), addr(1), None);
        let (mut file, _) = open(dir.path(), addr(1)).unwrap();
        file.record(key(2, 0), state(5));
        drop(file);
        let good = fs::read(&path).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x40;
            fs::write(&path, &bad).unwrap();
            let (_, former) = open(dir.path(), addr(1)).unwrap();
            assert!(former.is_empty(), "byte {at}");
            assert_eq!(fs::read(path.with_extension("state.corrupt")).unwrap(), bad);
        }
        for len in 1..good.len() {
            fs::write(&path, &good[..len]).unwrap();
            let (_, former) = open(dir.path(), addr(1)).unwrap();
            assert!(former.is_empty(), "{len} bytes");
        }
        fs::write(&path, vec![0; LEN * (MAX_RECORDS + 2)]).unwrap();
        assert!(open(dir.path(), addr(1)).unwrap().1.is_empty());
    }

    #[test]
    fn a_full_file_forgets_connections_that_are_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let many = |n: usize| PairKey {
            local: addr(1),
            remote: [10, 0, (n >> 8) as u8, n as u8].into(),
            tos: 0,
        };
        let (mut file, _) = open(dir.path(), addr(1)).unwrap();
        (0..MAX_RECORDS + 5).for_each(|n| file.record(many(n), state(n as u64)));
        assert_eq!(file.slots.len(), MAX_RECORDS, "those in use stay");
        drop(file);
        let (mut file, former) = open(dir.path(), addr(1)).unwrap();
        assert_eq!(former.len(), MAX_RECORDS);
        file.record(key(9, 0), state(1));
        drop(file);
        let (_, former) = open(dir.path(), addr(1)).unwrap();
        assert!(former.len() == MAX_RECORDS && former.contains_key(&key(9, 0)));
    }
}
