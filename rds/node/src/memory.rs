//! Memory of another process, for RDMA operations on behalf of its program.

use std::{
    fs::{File, OpenOptions},
    io,
    ops::Range,
    os::unix::fs::FileExt as _,
    sync::Arc,
};

use roce_verbs::provider::{Foreign, ForeignMemory, Memory};

/// Addresses above the last one of a process's own memory.
const ADDRESSES: usize = 1 << 47;
/// Pages are not smaller. The first one is never mapped.
const PAGE: u64 = 4096;

/// Memory of another process: its address space as it is now. Once the process ends or executes another program all accesses fail, also
/// if another process gets its number.
///
/// It takes the right to trace the process (`ptrace(2)`): the same user, dumpable, and where Yama restricts it
/// (`/proc/sys/kernel/yama/ptrace_scope` = 1) a descendant, or a process that allows it with `PR_SET_PTRACER`. The right is checked once,
/// by [`open`](Self::open).
#[derive(Clone, Debug)]
pub struct ProcessMemory {
    pid: u32,
    memory: Arc<dyn Memory>,
    file: Arc<File>,
}

/// `/proc/PID/mem`, which belongs to the address space rather than to the number.
#[derive(Debug)]
struct Mem(Arc<File>);

impl ForeignMemory for Mem {
    fn read(&self, at: u64, out: &mut [u8]) -> bool {
        self.0.read_exact_at(out, at).is_ok()
    }

    fn write(&self, at: u64, data: &[u8]) -> bool {
        self.0.write_all_at(data, at).is_ok()
    }
}

impl ProcessMemory {
    /// Opens the memory of a process.
    ///
    /// # Errors
    /// `PermissionDenied` without the right to trace it, `NotFound` if there is no such process.
    pub fn open(pid: u32) -> io::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(format!("/proc/{pid}/mem"))?;
        let file = Arc::new(file);
        Ok(Self {
            pid,
            memory: Arc::new(Foreign::new(Mem(file.clone()), ADDRESSES)),
            file,
        })
    }

    /// The memory to register: an offset of it is an address of the process.
    pub fn memory(&self) -> Arc<dyn Memory> {
        self.memory.clone()
    }

    /// Checks that a range of addresses is mapped, readable, and writable if so wanted. The program may change that at any time.
    ///
    /// # Errors
    /// `EFAULT` if it is not; when the process is gone.
    pub fn check(&self, range: Range<u64>, writable: bool) -> io::Result<()> {
        let fault = || io::Error::from_raw_os_error(14);
        if range.start < PAGE || range.is_empty() {
            return Err(fault());
        }
        // `/proc/PID` may be another process's meanwhile, but not if this address space can still be read.
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.pid))?;
        let mut at = range.start;
        for line in maps.lines() {
            let Some((area, may_write)) = area(line) else { continue };
            if area.contains(&at) && (may_write || !writable) {
                at = area.end;
            }
            if at >= range.end {
                return self.file.read_exact_at(&mut [0], range.start).map_err(|_| fault());
            }
        }
        Err(fault())
    }
}

/// Reads a line of `/proc/PID/maps`: the addresses of memory that can be read, and whether it can be written.
fn area(line: &str) -> Option<(Range<u64>, bool)> {
    let mut fields = line.split(' ');
    let (first, end) = fields.next()?.split_once('-')?;
    let rights = fields.next()?.as_bytes();
    let number = |text| u64::from_str_radix(text, 16).ok();
    match rights {
        [b'r', write, ..] => Some((number(first)?..number(end)?, *write == b'w')),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead as _, BufReader, Write as _},
        process::{Child, Command, Stdio},
    };

    use roce_verbs::mem::Pages;

    use super::*;

    const CHILD: &str = "FERROCE_TEST_PROCESS_MEMORY";
    const LEN: usize = 3 * 4096;

    /// The other process: tells the address of its bytes, and by and by which they are. Runs as the program `true` in the end.
    #[test]
    fn child() {
        if std::env::var_os(CHILD).is_none() {
            return;
        }
        let bytes: Vec<u8> = (0..LEN).map(|i| i as u8).collect();
        println!("\naddress {:x}", bytes.as_ptr() as usize);
        for line in io::stdin().lines() {
            match line.unwrap().as_str() {
                "exec" => {
                    use std::os::unix::process::CommandExt as _;
                    panic!("{}", Command::new("cat").exec());
                }
                _ => println!("\nbytes {:?}", &std::hint::black_box(&bytes)[4090..4100]),
            }
        }
    }

    struct Other {
        child: Child,
        address: u64,
        lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    }

    impl Other {
        fn spawn() -> Self {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "process::tests::child", "--nocapture"])
                .env(CHILD, "1")
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let lines = BufReader::new(child.stdout.take().unwrap()).lines();
            let mut other = Self {
                child,
                address: 0,
                lines,
            };
            other.address = u64::from_str_radix(&other.line("address "), 16).unwrap();
            other
        }

        fn line(&mut self, prefix: &str) -> String {
            let mut lines = self.lines.by_ref().map(Result::unwrap);
            lines
                .find_map(|line| Some(line.strip_prefix(prefix)?.to_owned()))
                .unwrap()
        }

        fn ask(&mut self, what: &str) {
            writeln!(self.child.stdin.as_ref().unwrap(), "{what}").unwrap();
        }
    }

    impl Drop for Other {
        fn drop(&mut self) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }

    #[test]
    fn bytes_of_another_process_are_read_and_written_until_it_executes_another_program() {
        let mut other = Other::spawn();
        let memory = ProcessMemory::open(other.child.id()).unwrap();
        let range = other.address..other.address + LEN as u64;
        memory.check(range.clone(), true).unwrap();
        let pages = Pages::part_of(&memory.memory(), range.start as usize..range.end as usize).unwrap();
        let mut out = vec![0; LEN];
        pages.read(0, &mut out).unwrap();
        assert_eq!(out, (0..LEN).map(|i| i as u8).collect::<Vec<_>>());
        pages.write(4094, &[200, 201, 202, 203]).unwrap();
        other.ask("bytes");
        assert_eq!(other.line("bytes "), "[250, 251, 252, 253, 200, 201, 202, 203, 2, 3]");
        other.ask("exec");
        // The new program has its own memory, perhaps at the same addresses.
        while pages.read(0, &mut out).is_ok() {
            std::thread::yield_now();
        }
        assert!(pages.write(0, &[1]).is_err());
        assert!(memory.check(range, true).is_err());
    }

    #[test]
    fn ranges_that_are_not_mapped_or_not_writable_are_refused() {
        let memory = ProcessMemory::open(std::process::id()).unwrap();
        static TEXT: [u8; 5] = *b"const";
        let (heap, text) = (vec![0u8; 10_000], TEXT.as_ptr() as u64);
        let heap = heap.as_ptr() as u64;
        memory.check(heap..heap + 10_000, true).unwrap();
        memory.check(text..text + 5, false).unwrap();
        for (range, writable) in [
            (text..text + 5, true),
            (0..10, false),
            (heap..heap, false),
            (8192..8193, false),
        ] {
            let refused = memory.check(range.clone(), writable).unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(14), "{range:?}");
        }
        assert!(memory.check(heap..heap + (1 << 46), false).is_err());
    }

    #[test]
    fn a_process_that_is_not_there_has_no_memory() {
        assert_eq!(
            ProcessMemory::open(u32::MAX).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
    }
}
