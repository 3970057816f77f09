//! Rings of packets: the options `--pcap-ring` and `--pcap-on` of `run`, `serve`, `map` and `bench`.

use std::{io, os::fd::OwnedFd, path::PathBuf};

use clap::{Args, ValueEnum};
use roce::ring::{Cause, Ring, RingConfig, RingControl, Written, usual_file};
use signal_hook::{SigId, consts::SIGUSR2, low_level};

use crate::{
    output::{Failure, bytes},
    units::memory,
};

/// Size of a ring, and the file to write it to.
#[derive(Clone, PartialEq, Eq, Debug)]
struct RingSpec {
    size: usize,
    file: Option<PathBuf>,
}

fn parse(text: &str) -> Result<RingSpec, String> {
    let (size, file) = match text.split_once(',') {
        Some((_, "")) => return Err("a file name is missing behind the comma".into()),
        Some((size, file)) => (size, Some(file.into())),
        None => (text, None),
    };
    match memory(size)? {
        size if size < Ring::MIN_SIZE => Err(format!("the least are {}", bytes(Ring::MIN_SIZE as u64))),
        size => Ok(RingSpec { size, file }),
    }
}

/// Occasion to write a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Occasion {
    /// A queue pair or a path fails, or an ICRC is wrong
    Bad,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct RingArgs {
    /// Keep the last packets in SIZE bytes of memory (64K or more, such as 64M), for `ferroce pcap capture`. Nothing is written before that,
    /// or before `--pcap-on` or (not in `run`) SIGUSR2 asks for it. Then FILE is made, which only its owner may read; FILE-2 and so on if
    /// there is one, up to 16 [default: ferroce-NAME-PID.pcap in $TMPDIR or /tmp]
    #[arg(long, value_name = "SIZE[,FILE]", value_parser = parse, conflicts_with = "pcap")]
    pcap_ring: Option<RingSpec>,
    /// Write the ring when something goes wrong: `bad`: a queue pair fails (retries run out, a request is refused, a memory error), a path
    /// of a session fails, or a packet has a wrong ICRC. At most once in 10 s, 8 times in all, and once for ICRCs
    #[arg(long, value_name = "bad", requires = "pcap_ring")]
    pcap_on: Option<Occasion>,
}

/// A ring, the thread that writes it, and its signal.
#[derive(Debug)]
pub(crate) struct Running {
    ring: Ring,
    _control: RingControl,
    signal: SigId,
}

impl Running {
    pub(crate) fn ring(&self) -> Ring {
        self.ring.clone()
    }

    /// Reports the failure of a path.
    pub(crate) fn path_failed(&self) {
        self.ring.note(Cause::Path);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        low_level::unregister(self.signal);
    }
}

impl RingArgs {
    /// Returns the options as the environment variables of the library have them: FERROCE_PCAP_RING and FERROCE_PCAP_ON.
    ///
    /// # Errors
    /// When there is no working folder.
    pub(crate) fn texts(&self) -> Result<[Option<String>; 2], Failure> {
        let Some(RingSpec { size, file }) = &self.pcap_ring else {
            return Ok([None, None]);
        };
        let mut text = size.to_string();
        if let Some(file) = file {
            // The program may change its folder.
            let file = std::path::absolute(file).map_err(Failure::of)?;
            text += &format!(",{}", file.display());
        }
        Ok([Some(text), self.pcap_on.map(|_| "bad".to_owned())])
    }

    /// Starts what the options ask for; `name` is that of the task. `None`: there is no ring.
    pub(crate) fn start(&self, name: &str) -> Result<Option<Running>, Failure> {
        let Some(RingSpec { size, file }) = &self.pcap_ring else {
            return Ok(None);
        };
        let file = file.clone().unwrap_or_else(|| usual_file(name));
        let file = std::path::absolute(file).map_err(Failure::of)?;
        if let Some(missing) = file.parent().filter(|folder| !folder.is_dir()) {
            return Err(Failure::usage(format!(
                "--pcap-ring: there is no folder {}",
                missing.display()
            )));
        }
        let failed = |e: io::Error| Failure::failed(format!("--pcap-ring: {e}"));
        let ring = Ring::new(*size).map_err(failed)?;
        let (signals, signal) = on_signal().map_err(failed)?;
        let config = RingConfig {
            name: name.to_owned(),
            file,
            on_bad: self.pcap_on.is_some(),
            signals: Some(signals),
            report: Box::new(report),
        };
        Ok(Some(Running {
            _control: RingControl::start(&ring, config).map_err(failed)?,
            ring,
            signal,
        }))
    }
}

/// Returns a pipe from which each SIGUSR2 can be read.
fn on_signal() -> io::Result<(OwnedFd, SigId)> {
    let (reader, writer) = io::pipe()?;
    Ok((
        reader.into(),
        low_level::pipe::register(SIGUSR2, OwnedFd::from(writer))?,
    ))
}

fn report(written: &Written) {
    let Written { cause, result } = written;
    match result {
        Ok((path, packets)) => tracing::warn!("wrote the last {packets} packets to {}: {cause}", path.display()),
        Err(e) => tracing::error!("the last packets can't be written: {e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_with_and_without_a_file() {
        let spec = |size, file: Option<&str>| {
            let file = file.map(PathBuf::from);
            Ok(RingSpec { size, file })
        };
        assert_eq!(parse("64M"), spec(64 << 20, None));
        assert_eq!(parse("64K,a,b.pcap"), spec(64 << 10, Some("a,b.pcap")));
        for bad in ["", "63K", "1M,", ",a", "x", "99999999999G"] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }
}
