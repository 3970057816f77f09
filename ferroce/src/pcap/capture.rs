//! `ferroce pcap capture`.

use std::{
    fs::{self, File},
    io::{self, ErrorKind, Write},
    os::unix::{fs::FileTypeExt, net::UnixStream},
    path::{Path, PathBuf},
};

use clap::Args;
use nix::{
    sys::socket::{getsockopt, sockopt::PeerCredentials},
    unistd::{AccessFlags, access},
};
use roce::{
    ProcessName,
    ring::{RingRequest, Sent},
};
use roce_verbs::shown;

use super::source::note;
use crate::{
    output::{self, Failure},
    ring::Occasion,
    units,
};

/// Write the last packets of running processes, which were started with --pcap-ring
///
/// Each process writes a file of its own, whose path is printed; with -o one process's packets are written here. A user captures its own
/// processes in this network namespace, root all of them. The ring stays as it is, so that a later capture may have the same packets.
#[derive(Args)]
#[command(after_help = "\
Examples:
  ferroce serve --addr 192.0.2.7 --export disk=disk.img --pcap-ring 64M &
  ferroce pcap capture
  ferroce pcap capture --of 4711 --last 1M -o - | ferroce pcap check -
  ferroce pcap capture --of ib_write_bw --on bad -o trace.pcap

Exit status: 0 when each process has written its packets, 1 if not, 2 for wrong usage")]
pub(super) struct CaptureArgs {
    /// Only processes of this name or process ID, the process behind this control socket, or those that share addresses by the broker of
    /// this directory. The name is the program under `run`, the session of a mapping, the first address of a server, or `bench`
    #[arg(long, value_name = "NAME|PID|PATH")]
    of: Option<String>,
    /// Write the packets of the only process that was chosen to this file, which only its owner may read; `-` is standard output
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Wait until something goes wrong (see --pcap-on), then write
    #[arg(long, value_name = "bad")]
    on: Option<Occasion>,
    /// Only the last SIZE bytes of the ring; each packet takes 48 bytes more than its UDP payload [default: all]
    #[arg(long, value_name = "SIZE", value_parser = units::size)]
    last: Option<u64>,
}

/// Runs the command.
pub(super) fn run(args: &CaptureArgs) -> Result<(), Failure> {
    let processes = find(args.of.as_deref())?;
    let request = RingRequest {
        on_bad: args.on.is_some(),
        last: args.last.unwrap_or(u64::MAX),
    };
    let Some(file) = &args.output else {
        return write_there(&request, processes);
    };
    let [process] = &processes[..] else {
        let all: Vec<String> = processes.iter().map(named).collect();
        let text = format!("-o is for one process: choose one with --of, of {}", all.join(", "));
        return Err(Failure::usage(text));
    };
    let mut out: Box<dyn Write> = match file.as_os_str() == "-" {
        true => Box::new(io::stdout().lock()),
        false => Box::new(OutputFile::new(file).map_err(|e| Failure::failed(named_file(file, &e).to_string()))?),
    };
    let sent = request.read(process, &mut out).map_err(|e| why(process, &e))?;
    note(&format!("{}: {} packets", named(process), sent.packets));
    Ok(())
}

/// File that is made with its first bytes: who waits with `--on bad` and gives up has left no empty one, and has emptied none.
struct OutputFile<'a> {
    path: &'a Path,
    file: Option<File>,
}

impl<'a> OutputFile<'a> {
    /// Checks that the file can be written.
    fn new(path: &'a Path) -> io::Result<Self> {
        match fs::symlink_metadata(path) {
            Ok(_) => drop(roce_pcap::append_private(path)?),
            Err(_) => {
                let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
                access(folder.unwrap_or(Path::new(".")), AccessFlags::W_OK | AccessFlags::X_OK)?;
            }
        }
        Ok(Self { path, file: None })
    }
}

impl Write for OutputFile<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(roce_pcap::create_private(self.path).map_err(|e| named_file(self.path, &e))?),
        };
        file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn named_file(path: &Path, e: &io::Error) -> io::Error {
    io::Error::new(e.kind(), format!("{}: {e}", path.display()))
}

/// Has each process write its ring, all at the same time: with `--on bad` the first may be any of them.
fn write_there(request: &RingRequest, processes: Vec<ProcessName>) -> Result<(), Failure> {
    let (sender, done) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        for process in processes {
            let sender = sender.clone();
            scope.spawn(move || sender.send((request.write(&process), process)));
        }
        drop(sender);
        let (mut any, mut last) = (false, None);
        for (result, process) in done {
            match result {
                Ok(Sent { packets, path }) => {
                    any = true;
                    note(&format!("{}: {packets} packets", named(&process)));
                    let path = path.unwrap_or_default();
                    output::line(&shown(&path.display().to_string()).to_string())?;
                }
                Err(e) => last = Some((why(&process, &e), e.kind())),
            }
        }
        match last {
            // Another user's, beside those that have written.
            Some((_, ErrorKind::PermissionDenied)) if any => Ok(()),
            Some((failure, _)) => Err(failure),
            None => Ok(()),
        }
    })
}

fn named(process: &ProcessName) -> String {
    format!("process {} {}", process.pid, process.name)
}

fn why(process: &ProcessName, e: &io::Error) -> Failure {
    let name = named(process);
    match e.kind() {
        ErrorKind::UnexpectedEof => Failure::failed(format!("{name} has ended")),
        _ => Failure::failed(format!("{name}: {}", shown(&e.to_string()))),
    }
}

/// Returns the chosen processes, at least one.
fn find(of: Option<&str>) -> Result<Vec<ProcessName>, Failure> {
    let mut all = RingRequest::processes().map_err(|e| Failure::failed(format!("/proc/net/unix: {e}")))?;
    let Some(of) = of else {
        return some(all, "no process in this network namespace keeps a ring of packets");
    };
    let text = format!("no ring of packets is kept by {}", shown(of));
    if of.contains('/') {
        let pids = behind(Path::new(of))?;
        all.retain(|process| pids.contains(&process.pid));
    } else if let Ok(pid) = of.parse::<u32>() {
        all.retain(|process| process.pid == pid);
    } else {
        all.retain(|process| process.name == of);
    }
    some(all, &text)
}

fn some(found: Vec<ProcessName>, otherwise: &str) -> Result<Vec<ProcessName>, Failure> {
    match found.is_empty() {
        false => Ok(found),
        true => Err(Failure::failed(format!(
            "{otherwise}: start it with --pcap-ring SIZE (`ferroce run`, `serve`, `map`, `bench`), or the key `pcap-ring` of a daemon's task"
        ))),
    }
}

/// Returns the processes behind a control socket, or of a broker in a directory.
fn behind(path: &Path) -> Result<Vec<u32>, Failure> {
    let failed = |e: &dyn std::fmt::Display| Failure::failed(format!("{}: {e}", path.display()));
    let kind = fs::metadata(path).map_err(|e| failed(&e))?.file_type();
    if kind.is_dir() {
        let broker = roce::broker::statistics(path).map_err(|e| failed(&e))?;
        let broker = broker.ok_or_else(|| failed(&"no broker runs there"))?;
        return Ok(broker.processes.iter().map(|process| process.pid).collect());
    }
    if !kind.is_socket() {
        return Err(failed(&"neither a control socket nor the directory of a broker"));
    }
    let stream = UnixStream::connect(path).map_err(|e| failed(&e))?;
    let pid = getsockopt(&stream, PeerCredentials).map_err(|e| failed(&e))?.pid();
    Ok(u32::try_from(pid).into_iter().collect())
}
