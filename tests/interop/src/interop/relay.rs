//! The wire between two guests: forwards frames between their taps, loses, repeats and delays the RoCE packets that it
//! is told to, and writes what each guest sends and gets, in its order, to a capture.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    mem::size_of,
    os::fd::{AsRawFd as _, FromRawFd as _},
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, SystemTime},
};

use crate::Error;

/// What happens to a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fate {
    /// Lost.
    Drop,
    /// Delivered twice.
    Repeat,
    /// Delivered after the next RoCE packet of the same direction.
    Swap,
}

/// Which packet, and what happens to it: the `nth` (from 1) with one of these opcodes that guest `from` sends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) from: u8,
    pub(crate) opcodes: &'static [u8],
    pub(crate) nth: u32,
    pub(crate) fate: Fate,
}

/// `struct virtio_net_hdr`, which the packet sockets put before every frame (checksums that the guest left to others).
const VNET_LEN: usize = 10;
const ETH_LEN: usize = 14;
const ROCE_PORT: [u8; 2] = 4791u16.to_be_bytes();

/// A capture being written; nothing is written before it is started.
type View = Arc<Mutex<Option<File>>>;

struct Fork {
    from: u8,
    input: File,
    output: File,
    mine: View,
    theirs: View,
    faults: Arc<Mutex<Vec<(Fault, u32)>>>,
    held: Option<Vec<u8>>,
}

/// The running relay.
pub(crate) struct Relay {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    views: [View; 2],
    faults: Arc<Mutex<Vec<(Fault, u32)>>>,
}

fn packet_socket(interface: &str) -> Result<File, Error> {
    let name = std::ffi::CString::new(interface)?;
    // SAFETY: `name` is a string that ends with 0 and outlives the call.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    let index = i32::try_from(index)
        .ok()
        .filter(|i| *i > 0)
        .ok_or("no such interface")?;
    let protocol = (libc::ETH_P_ALL as u16).to_be();
    // SAFETY: no memory is passed.
    let fd = unsafe {
        libc::socket(
            libc::AF_PACKET,
            libc::SOCK_RAW | libc::SOCK_CLOEXEC,
            i32::from(protocol),
        )
    };
    if fd < 0 {
        return Err(format!("packet socket: {}", std::io::Error::last_os_error()).into());
    }
    // SAFETY: the descriptor is new and nobody else's.
    let file = unsafe { File::from_raw_fd(fd) };
    let timeout = libc::timeval {
        tv_sec: 0,
        tv_usec: 100_000,
    };
    set(&file, libc::SOL_PACKET, libc::PACKET_VNET_HDR, &1i32)?;
    set(&file, libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, &1i32)?;
    set(&file, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, &(32i32 << 20))?;
    set(&file, libc::SOL_SOCKET, libc::SO_RCVTIMEO, &timeout)?;
    let address = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: protocol,
        sll_ifindex: index,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: `address` is a sockaddr_ll of `len` bytes and outlives the call.
    if unsafe { libc::bind(fd, (&raw const address).cast(), len) } != 0 {
        return Err(format!("bind to {interface}: {}", std::io::Error::last_os_error()).into());
    }
    Ok(file)
}

fn set<T>(socket: &File, level: i32, option: i32, value: &T) -> Result<(), Error> {
    let len = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` is `len` bytes long and outlives the call.
    let done = unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, std::ptr::from_ref(value).cast(), len) };
    if done != 0 {
        return Err(format!("setsockopt {option}: {}", std::io::Error::last_os_error()).into());
    }
    Ok(())
}

impl Relay {
    /// Starts forwarding between `tap1` and `tap2`. The bridge must not do it as well.
    pub(crate) fn start() -> Result<Self, Error> {
        let stop = Arc::new(AtomicBool::new(false));
        let faults = Arc::new(Mutex::new(Vec::new()));
        let views = [View::default(), View::default()];
        let taps = [packet_socket("tap1")?, packet_socket("tap2")?];
        let mut threads = Vec::new();
        for (from, to) in [(0, 1), (1, 0)] {
            let mut fork = Fork {
                from: from as u8 + 1,
                input: taps[from].try_clone()?,
                output: taps[to].try_clone()?,
                mine: views[from].clone(),
                theirs: views[to].clone(),
                faults: faults.clone(),
                held: None,
            };
            let stop = stop.clone();
            threads.push(std::thread::spawn(move || {
                let mut buffer = vec![0; 1 << 17];
                while !stop.load(Ordering::Relaxed) {
                    if let Ok(n) = fork.input.read(&mut buffer) {
                        fork.forward(&buffer[..n]);
                    }
                }
            }));
        }
        Ok(Self {
            stop,
            threads,
            views,
            faults,
        })
    }

    /// Begins captures of what guest 1 and guest 2 send and get, with these faults.
    pub(crate) fn record(&self, files: [&Path; 2], faults: &[Fault]) -> Result<(), Error> {
        *lock(&self.faults) = faults.iter().map(|f| (*f, 0)).collect();
        for (view, path) in self.views.iter().zip(files) {
            let mut file = File::create(path)?;
            // Classic pcap, little-endian, nanoseconds, Ethernet.
            let header: [u32; 6] = [0xa1b2_3c4d, 4 << 16 | 2, 0, 0, 262_144, 1];
            file.write_all(&header.map(u32::to_le_bytes).concat())?;
            *lock(view) = Some(file);
        }
        Ok(())
    }

    /// Ends the captures and the faults; an error when one of the faults never happened.
    pub(crate) fn finish(&self) -> Result<(), Error> {
        self.views.iter().for_each(|v| *lock(v) = None);
        let faults = std::mem::take(&mut *lock(&self.faults));
        match faults.iter().find(|(f, seen)| *seen < f.nth) {
            Some((fault, seen)) => Err(format!("{fault:?} did not happen: only {seen} such packets").into()),
            None => Ok(()),
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The RoCEv2 opcode of an Ethernet frame, if it is such a packet.
fn opcode(frame: &[u8]) -> Option<u8> {
    let ip = frame.get(ETH_LEN..)?;
    let udp = match (frame.get(12..14)?, ip.first()? >> 4) {
        ([0x08, 0x00], 4) if *ip.get(9)? == 17 => ip.get(usize::from(ip[0] & 15) * 4..)?,
        ([0x86, 0xdd], 6) if *ip.get(6)? == 17 => ip.get(40..)?,
        _ => return None,
    };
    (udp.get(2..4)? == ROCE_PORT).then(|| udp.get(8).copied())?
}

impl Fork {
    fn forward(&mut self, bytes: &[u8]) {
        let Some(frame) = bytes.get(VNET_LEN..).filter(|f| f.len() >= ETH_LEN) else {
            return;
        };
        // The other guest's address, or a group's: the rest is the bridge's.
        let other = [0x52, 0x54, 0, 0, 0, 3 - self.from];
        if frame[..6] != other && frame[0] & 1 == 0 {
            return;
        }
        let Some(opcode) = opcode(frame) else {
            let _ = self.output.write(bytes);
            return;
        };
        write_frame(&self.mine, frame);
        let copies = match self.fate(opcode) {
            Some(Fate::Drop) => 0,
            Some(Fate::Repeat) => 2,
            Some(Fate::Swap) => {
                self.held = Some(bytes.to_vec());
                return;
            }
            None => 1,
        };
        for _ in 0..copies {
            self.deliver(bytes);
        }
        if let Some(late) = self.held.take() {
            self.deliver(&late);
        }
    }

    fn deliver(&mut self, bytes: &[u8]) {
        // Before it is sent: the answer must stand behind it.
        write_frame(&self.theirs, &bytes[VNET_LEN..]);
        let _ = self.output.write(bytes);
    }

    fn fate(&self, opcode: u8) -> Option<Fate> {
        let mut fate = None;
        for (fault, seen) in lock(&self.faults).iter_mut() {
            if fault.from == self.from && fault.opcodes.contains(&opcode) {
                *seen += 1;
                if *seen == fault.nth {
                    fate = Some(fault.fate);
                }
            }
        }
        fate
    }
}

fn write_frame(view: &View, frame: &[u8]) {
    if let Some(file) = lock(view).as_mut() {
        let now = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or(Duration::ZERO);
        let len = frame.len() as u32;
        let head = [now.as_secs() as u32, now.subsec_nanos(), len, len];
        let _ = file.write_all(&[&head.map(u32::to_le_bytes).concat(), frame].concat());
    }
}
