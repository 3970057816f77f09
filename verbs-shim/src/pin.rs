//! Checks that pinning memory would make: that all of it is there, and may be read or written.

use std::{fs, ops::Range, sync::OnceLock};

use libc::{c_int, c_void};

use crate::ret::{Errno, Result};

/// Faults pages in as pinning them does. Fails with EFAULT, as that would, unless all of the range is mapped memory that
/// may be read, and written if `write` is set. Not pinned: if the program unmaps it, work that needs it fails.
///
/// # Errors
/// EFAULT; or why /proc/self/maps can't be read, which only kernels before 5.14 need.
pub(crate) fn check(start: usize, len: usize, write: bool) -> Result<()> {
    // SAFETY: asks for a number.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let end = start
        .checked_add(len)
        .and_then(|end| end.checked_next_multiple_of(page));
    let missing = || missing(start, len, write);
    let range = start & !(page - 1)..end.ok_or_else(missing)?;
    if len == 0 {
        return Ok(());
    }
    let advice = match write {
        true => libc::MADV_POPULATE_WRITE,
        false => libc::MADV_POPULATE_READ,
    };
    match kernel_populates(advice) {
        true => populate(range, advice),
        false => check_listed(&fs::read_to_string("/proc/self/maps")?, range, write),
    }
    .map_err(|e| if e == Errno::FAULT { missing() } else { e })
}

fn missing(start: usize, len: usize, write: bool) -> Errno {
    let how = if write {
        "mapped and writable"
    } else {
        "mapped and readable"
    };
    Errno::FAULT.because(format_args!("not all of {len} bytes at {start:#x} is {how}"))
}

/// Whether the kernel knows the advice: of no memory at all it takes every one that it knows.
fn kernel_populates(advice: c_int) -> bool {
    static KNOWN: OnceLock<bool> = OnceLock::new();
    // SAFETY: nothing is advised on.
    *KNOWN.get_or_init(|| unsafe { libc::madvise(std::ptr::null_mut(), 0, advice) } == 0)
}

fn populate(range: Range<usize>, advice: c_int) -> Result<()> {
    loop {
        // SAFETY: the advice changes no contents: it does what touching each page would, without signals.
        if unsafe { libc::madvise(range.start as *mut c_void, range.len(), advice) } == 0 {
            return Ok(());
        }
        match Errno::last().0 {
            libc::EINTR | libc::EAGAIN => {}
            _ => return Err(Errno::FAULT),
        }
    }
}

/// Looks a range up in the text of /proc/self/maps, which is in the order of addresses.
fn check_listed(maps: &str, range: Range<usize>, write: bool) -> Result<()> {
    let mut at = range.start;
    for (mapped, rights) in maps.lines().filter_map(mapping) {
        if mapped.end <= at {
            continue;
        }
        let allowed = rights.starts_with('r') && (!write || rights[1..].starts_with('w'));
        if mapped.start > at || !allowed {
            break;
        }
        at = mapped.end;
        if at >= range.end {
            return Ok(());
        }
    }
    Err(Errno::FAULT)
}

/// Addresses and rights of a line.
fn mapping(line: &str) -> Option<(Range<usize>, &str)> {
    let mut words = line.split(' ');
    let (start, end) = words.next()?.split_once('-')?;
    let rights = words.next().filter(|r| r.is_ascii() && r.len() == 4)?;
    let number = |text| usize::from_str_radix(text, 16).ok();
    Some((number(start)?..number(end)?, rights))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
00001000-00003000 rw-p 00000000 00:00 0          [heap]
00003000-00004000 r--p 00000000 08:01 42         /lib/with a name
00004000-00005000 ---p 00000000 00:00 0 
00006000-00008000 rw-s 00000000 00:00 0 
";

    #[test]
    fn old_kernels_lists_are_read() {
        let cases = [
            (0x1000..0x3000, true, true),
            (0x2000..0x3000, true, true),
            (0x2000..0x4000, false, true),
            (0x2000..0x4000, true, false),
            (0x3000..0x5000, false, false),
            (0x4000..0x5000, false, false),
            (0x5000..0x6000, false, false),
            (0x5000..0x7000, false, false),
            (0x6000..0x8000, true, true),
            (0x7000..0x9000, false, false),
            (0x0..0x1000, false, false),
        ];
        for (range, write, fine) in cases {
            let found = check_listed(MAPS, range.clone(), write);
            assert_eq!(found.is_ok(), fine, "{range:x?} write {write}");
        }
    }

    /// Either way: as the kernel populates, and by the list.
    #[test]
    fn what_is_there_may_be_used_as_it_is_mapped() {
        let page = 1 << 16;
        // SAFETY: new memory, of which the second half may then not be written.
        let at = unsafe {
            let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let at = libc::mmap(
                std::ptr::null_mut(),
                2 * page,
                libc::PROT_READ | libc::PROT_WRITE,
                kind,
                -1,
                0,
            );
            assert_ne!(at, libc::MAP_FAILED);
            assert_eq!(libc::mprotect(at.byte_add(page), page, libc::PROT_READ), 0);
            at as usize
        };
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        for (len, write, fine) in [(page, true, true), (2 * page, false, true), (2 * page, true, false)] {
            assert_eq!(check(at, len, write).is_ok(), fine, "{len} {write}");
            assert_eq!(check_listed(&maps, at..at + len, write).is_ok(), fine, "{len} {write}");
        }
        // SAFETY: the memory from above, which nobody uses.
        unsafe { libc::munmap(at as *mut c_void, 2 * page) };
        assert_eq!(check(usize::MAX - 10, 100, false), Err(Errno::FAULT));
        assert_eq!(check(usize::MAX - 10, 5, false), Err(Errno::FAULT));
    }
}
