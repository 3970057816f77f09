//! Registered memory of another process, which calls access.

use std::sync::{Arc, Mutex};

use roce_verbs::mem::{AccessError, AtomicError, MemoryTable, Pages, SgList, Span, fault::Fault};
use roce_verbs::provider::{Foreign, ForeignMemory, Memory};
use roce_verbs::wr::{BindWindow, FastRegister};
use roce_verbs::{AccessFlags, DeviceLimits, LKey, Qpn, RKey, Sge};

const RIGHTS: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_ATOMIC)
    .union(AccessFlags::MW_BIND);
/// First address of the process that has memory.
const START: usize = 0x7000;
const LEN: usize = 256;

/// A process with a few bytes.
#[derive(Clone, Debug)]
struct Process(Arc<Mutex<Vec<u8>>>);

impl Process {
    fn part(memory: &mut [u8], at: u64, len: usize) -> Option<&mut [u8]> {
        let at = (at as usize).checked_sub(START)?;
        memory.get_mut(at..at + len)
    }
}

impl ForeignMemory for Process {
    fn read(&self, at: u64, out: &mut [u8]) -> bool {
        let mut memory = self.0.lock().unwrap();
        Self::part(&mut memory, at, out.len()).is_some_and(|part| {
            out.copy_from_slice(part);
            true
        })
    }

    fn write(&self, at: u64, data: &[u8]) -> bool {
        let mut memory = self.0.lock().unwrap();
        Self::part(&mut memory, at, data.len()).is_some_and(|part| {
            part.copy_from_slice(data);
            true
        })
    }
}

fn process() -> (Process, Arc<dyn Memory>) {
    let process = Process(Arc::new(Mutex::new((0..=255).collect())));
    (process.clone(), Arc::new(Foreign::new(process, 1 << 47)))
}

/// All accesses that a peer and a work request can make, to memory that is there and that is not.
#[test]
fn accesses_reach_the_process_and_nothing_else() {
    let (process, memory) = process();
    let table = MemoryTable::new([7; 32], &DeviceLimits::software(1));
    let pd = table.alloc_pd().unwrap();
    // The last 16 bytes are not there.
    let region = table
        .register_memory(pd, &memory, START..START + LEN + 16, Some(0), RIGHTS)
        .unwrap();
    assert_eq!(region.addr(), 0);
    let span = |at: usize, len: usize| -> Span {
        let need = AccessFlags::REMOTE_WRITE;
        table
            .resolve_remote(pd, Qpn::new(1), RKey(region.rkey().0), at as u64, len as u32, need)
            .unwrap()
    };
    let mut out = [0; 4];
    span(10, 4).read(0, &mut out).unwrap();
    assert_eq!(out, [10, 11, 12, 13]);
    span(10, 4).write(1, &[99, 98]).unwrap();
    assert_eq!(process.0.lock().unwrap()[10..14], [10, 99, 98, 13]);
    let gone = AccessError::Fault(Fault);
    assert_eq!(span(LEN - 2, 4).read(0, &mut out), Err(gone));
    assert_eq!(span(LEN - 2, 4).write(0, &out), Err(gone));
    // Atomics.
    span(16, 8).store(5u64.to_ne_bytes()).unwrap();
    assert_eq!(span(16, 8).fetch_add(3), Ok(5));
    assert_eq!(span(16, 8).compare_swap(1, 2), Ok(8));
    assert_eq!(span(16, 8).compare_swap(8, u64::MAX), Ok(8));
    assert_eq!(process.0.lock().unwrap()[16..24], [255; 8]);
    assert_eq!(span(17, 8).fetch_add(1), Err(AtomicError::Misaligned));
    assert_eq!(span(LEN, 8).fetch_add(1), Err(AtomicError::Access(gone)));
    // Lists of a work request.
    let sge = |addr, length| Sge {
        addr,
        length,
        lkey: LKey(region.lkey().0),
    };
    let mut list = SgList::new();
    for sge in [sge(200, 2), sge(100, 3)] {
        list.push(table.resolve_local(pd, &sge, AccessFlags::LOCAL_WRITE).unwrap());
    }
    list.write_at(0, &[1, 2, 3, 4, 5]).unwrap();
    assert_eq!(process.0.lock().unwrap()[100..103], [3, 4, 5]);
    assert_eq!(process.0.lock().unwrap()[200..202], [1, 2]);
    let late = span(0, 4);
    table.deregister(&region).unwrap();
    assert_eq!(late.write(0, &[7]), Err(AccessError::Revoked));
    assert_eq!(process.0.lock().unwrap()[0], 0);
}

/// Keys over a registration end with it.
#[test]
fn fast_registrations_and_windows_reach_the_process() {
    let (process, memory) = process();
    let table = MemoryTable::new([7; 32], &DeviceLimits::software(1));
    let pd = table.alloc_pd().unwrap();
    let region = table
        .register_memory(pd, &memory, START..START + LEN, Some(0), RIGHTS)
        .unwrap();
    let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
    let fast = table.alloc_fast(pd).unwrap();
    let fast_key = fast.rkey();
    let register = FastRegister {
        key: fast_key,
        lkey: region.lkey(),
        addr: 32,
        length: 16,
        iova: 0,
        access,
    };
    table.fast_register(pd, &register).unwrap();
    let window = table.alloc_window(pd, roce_verbs::mem::WindowKind::Type1).unwrap();
    let bind = BindWindow {
        key: window.rkey(),
        lkey: region.lkey(),
        addr: 64,
        length: 16,
        access,
    };
    table.bind_window(pd, Qpn::new(1), &bind).unwrap();
    let span = |key, at| table.resolve_remote(pd, Qpn::new(1), key, at, 4, AccessFlags::REMOTE_WRITE);
    let mut out = [0; 4];
    let (by_fast, by_window) = (span(fast_key, 0).unwrap(), span(window.rkey(), 64).unwrap());
    by_fast.read(0, &mut out).unwrap();
    assert_eq!(out, [32, 33, 34, 35]);
    by_window.write(0, &[1; 4]).unwrap();
    assert_eq!(process.0.lock().unwrap()[64..68], [1; 4]);
    table.revoke(&region).unwrap();
    assert_eq!(by_fast.read(0, &mut out), Err(AccessError::Revoked));
    assert_eq!(by_window.write(0, &[2; 4]), Err(AccessError::Revoked));
}

/// Parts of it are as foreign as all of it.
#[test]
fn pages_of_it_stay_foreign() {
    let (process, memory) = process();
    let part = Pages::part_of(&memory, START + 8..START + 12).unwrap();
    assert!(part.foreign().is_some());
    part.write(1, &[0; 2]).unwrap();
    assert!(part.write(3, &[0; 2]).is_err());
    assert_eq!(process.0.lock().unwrap()[7..13], [7, 8, 0, 0, 11, 12]);
    // Registered again, its bytes have the same addresses.
    let table = MemoryTable::new([7; 32], &DeviceLimits::software(1));
    let pd = table.alloc_pd().unwrap();
    let again: Arc<dyn Memory> = part;
    let region = table.register_memory(pd, &again, 0..4, None, RIGHTS).unwrap();
    assert_eq!(region.addr(), (START + 8) as u64);
    let mut out = [0; 4];
    region.read(0, &mut out).unwrap();
    assert_eq!(out, [8, 0, 0, 11]);
}
