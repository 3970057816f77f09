//! Memory of programs.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::fs::FileExt as _,
    },
    sync::Arc,
};

use roce_verbs::provider::{Foreign, ForeignMemory, Memory};
use rustix::{
    fs::{OFlags, fcntl_getfl, fstatfs},
    io::Errno,
};

/// Addresses above the last one of a process's own memory.
const ADDRESSES: usize = 1 << 47;
/// Kind of the file system of processes (`PROC_SUPER_MAGIC`).
const PROC: u64 = 0x9fa0;

/// Opened `/proc/PID/mem`. It is of an address space, and not of whoever has the number: once the process has ended or executes another
/// program all accesses fail.
#[derive(Debug)]
struct Mem(File);

impl ForeignMemory for Mem {
    fn read(&self, at: u64, out: &mut [u8]) -> bool {
        self.0.read_exact_at(out, at).is_ok()
    }

    fn write(&self, at: u64, data: &[u8]) -> bool {
        self.0.write_all_at(data, at).is_ok()
    }
}

/// Returns the memory of a process, which has opened its `/proc/self/mem` for that: an offset of it is an address there.
///
/// # Errors
/// `EBADF` of any other file: an access to it could wait.
pub(crate) fn of(file: OwnedFd) -> Result<Arc<dyn Memory>, Errno> {
    let is_proc = fstatfs(&file)?.f_type as u64 == PROC;
    let is_writable = fcntl_getfl(&file)?.contains(OFlags::RDWR);
    let path = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).map_err(|e| errno(&e))?;
    let process = path
        .parent()
        .and_then(|folder| folder.file_name())
        .and_then(|name| name.to_str());
    let is_number = process.is_some_and(|name| name.bytes().all(|byte| byte.is_ascii_digit()));
    match is_proc && is_writable && is_number && path.file_name().is_some_and(|name| name == "mem") {
        true => Ok(Arc::new(Foreign::new(Mem(file.into()), ADDRESSES))),
        false => Err(Errno::BADF),
    }
}

/// Returns memory that is gone.
pub(crate) fn none() -> Arc<dyn Memory> {
    #[derive(Debug)]
    struct Gone;
    impl ForeignMemory for Gone {
        fn read(&self, _: u64, _: &mut [u8]) -> bool {
            false
        }

        fn write(&self, _: u64, _: &[u8]) -> bool {
            false
        }
    }
    Arc::new(Foreign::new(Gone, ADDRESSES))
}

fn errno(e: &io::Error) -> Errno {
    Errno::from_io_error(e).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use std::{
        fs::OpenOptions,
        io::{BufRead as _, BufReader, Write as _},
        process::{Child, Command, Stdio},
    };

    use roce_verbs::mem::Pages;

    use super::*;

    const CHILD: &str = "FERROCE_TEST_PROCESS_MEMORY";
    const LEN: usize = 3 * 4096;

    /// The other process: tells the address of its bytes, and by and by which they are. Runs as the program `cat` in the end.
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
        address: usize,
        lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    }

    impl Other {
        fn spawn() -> Self {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "memory::tests::child", "--nocapture"])
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
            other.address = usize::from_str_radix(&other.line("address "), 16).unwrap();
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

    fn open(path: &str) -> OwnedFd {
        OpenOptions::new().read(true).write(true).open(path).unwrap().into()
    }

    #[test]
    fn bytes_of_another_process_are_read_and_written_until_it_executes_another_program() {
        let mut other = Other::spawn();
        let memory = of(open(&format!("/proc/{}/mem", other.child.id()))).unwrap();
        let pages = Pages::part_of(&memory, other.address..other.address + LEN).unwrap();
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
    }

    #[test]
    fn files_that_are_no_process_s_memory_are_refused() {
        let named_so = tempfile::tempdir().unwrap();
        std::fs::create_dir(named_so.path().join("1")).unwrap();
        let path = named_so.path().join("1/mem");
        std::fs::write(&path, [0; 8192]).unwrap();
        let files = [
            path.to_str().unwrap(),
            "/dev/null",
            "/proc/self/comm",
            "/proc/self/oom_score_adj",
        ];
        for file in files {
            assert_eq!(of(open(file)).unwrap_err(), Errno::BADF, "{file}");
        }
        let to_read: OwnedFd = File::open("/proc/self/mem").unwrap().into();
        assert_eq!(of(to_read).unwrap_err(), Errno::BADF);
        assert!(of(open("/proc/self/mem")).is_ok());
    }

    #[test]
    fn memory_that_is_not_mapped_is_missing() {
        let mapped = Box::new(7u8);
        let at = std::ptr::from_ref(&*mapped) as usize;
        let own = of(open("/proc/self/mem")).unwrap();
        for (memory, at, is_there) in [(&own, at, true), (&own, 8192, false), (&none(), at, false)] {
            let pages = Pages::part_of(memory, at..at + 1).unwrap();
            assert_eq!(pages.read(0, &mut [0]).is_ok(), is_there);
        }
    }
}
