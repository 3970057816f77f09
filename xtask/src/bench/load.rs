//! Loads of a chain: fio's jobs and whole copies.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    time::Instant,
};

use serde_json::Value;

use crate::{Result, process, tools};

/// A load.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Load {
    /// fio's nbd engine, one connection.
    Fio {
        name: &'static str,
        /// `--rw`.
        pattern: &'static str,
        /// Bytes of a request.
        block: u32,
        depth: u32,
    },
    /// nbdcopy of the whole image into a file, or of a file into it, and a flush.
    Copy { name: &'static str, out: bool },
}

/// 4 KiB at each depth in both directions, 128 KiB, and copies.
pub(super) const LOADS: [Load; 10] = [
    fio("4K randread, depth 1", "randread", 4 << 10, 1),
    fio("4K randread, depth 32", "randread", 4 << 10, 32),
    fio("4K randread, depth 128", "randread", 4 << 10, 128),
    fio("4K randwrite, depth 1", "randwrite", 4 << 10, 1),
    fio("4K randwrite, depth 32", "randwrite", 4 << 10, 32),
    fio("4K randwrite, depth 128", "randwrite", 4 << 10, 128),
    fio("128K read, depth 16", "read", 128 << 10, 16),
    fio("128K write, depth 16", "write", 128 << 10, 16),
    Load::Copy {
        name: "nbdcopy out",
        out: true,
    },
    Load::Copy {
        name: "nbdcopy in",
        out: false,
    },
];

const fn fio(name: &'static str, pattern: &'static str, block: u32, depth: u32) -> Load {
    Load::Fio {
        name,
        pattern,
        block,
        depth,
    }
}

/// Result of a load.
#[derive(Clone, Copy, Default, Debug, PartialEq)]
pub(super) struct Figures {
    pub(super) requests: f64,
    pub(super) bytes: f64,
    pub(super) seconds: f64,
    /// Of fio's completion latencies, microseconds.
    pub(super) p50: Option<f64>,
    pub(super) p99: Option<f64>,
}

impl Load {
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Fio { name, .. } | Self::Copy { name, .. } => name,
        }
    }

    /// Bytes of a request; 0 if the program chooses.
    pub(super) const fn block(&self) -> u32 {
        match self {
            Self::Fio { block, .. } => *block,
            Self::Copy { .. } => 0,
        }
    }

    /// Small requests are counted, large ones are weighed.
    pub(super) const fn counts(&self) -> bool {
        matches!(self, Self::Fio { block, .. } if *block < 64 << 10)
    }

    /// Runs it on this NBD address. `file` is as large as the image.
    pub(super) fn run(&self, uri: &str, file: &Path, seconds: f64) -> Result<Figures> {
        match *self {
            Self::Fio {
                pattern, block, depth, ..
            } => run_fio(&[uri], pattern, block, depth, seconds),
            Self::Copy { out, .. } => copy(uri, file, out),
        }
    }
}

fn program(name: &str) -> Command {
    let mut command = Command::new(tools::find(name).unwrap_or_else(|| name.into()));
    command.stdin(Stdio::null());
    command
}

/// A job for each of these addresses, and what they came to together.
pub(super) fn run_fio(uris: &[&str], pattern: &str, block: u32, depth: u32, seconds: f64) -> Result<Figures> {
    let mut fio = program("fio");
    fio.args([
        "--group_reporting",
        "--ioengine=nbd",
        "--time_based",
        "--norandommap",
        "--randrepeat=0",
    ])
    .arg("--output-format=json")
    .arg(format!("--rw={pattern}"))
    .arg(format!("--bs={block}"))
    .arg(format!("--iodepth={depth}"))
    .arg(format!("--runtime={seconds}"));
    for uri in uris {
        fio.args(["--name=load".to_owned(), format!("--uri={uri}")]);
    }
    let output = process::capture("fio", &mut fio)?;
    parse_fio(&String::from_utf8_lossy(&output.stdout))
}

/// fio says other things too before its JSON.
pub(super) fn parse_fio(text: &str) -> Result<Figures> {
    let fail = || format!("fio printed no figures\n{text}");
    let json = text.find("\n{").map_or(text, |at| &text[at..]);
    let json: Value = serde_json::from_str(json.trim()).map_err(|e| format!("{}{e}", fail()))?;
    let job = &json["jobs"][0];
    let direction = match job["read"]["total_ios"].as_u64() {
        Some(0) | None => &job["write"],
        Some(_) => &job["read"],
    };
    let number = |v: &Value| v.as_f64().filter(|n| *n > 0.0).ok_or_else(fail);
    let percentile = |p: &str| direction["clat_ns"]["percentile"][p].as_f64().map(|ns| ns / 1e3);
    Ok(Figures {
        requests: number(&direction["total_ios"])?,
        bytes: number(&direction["io_bytes"])?,
        seconds: number(&direction["runtime"])? / 1e3,
        p50: percentile("50.000000"),
        p99: percentile("99.000000"),
    })
}

fn copy(uri: &str, file: &Path, out: bool) -> Result<Figures> {
    let path = file.display().to_string();
    let (from, to) = match out {
        true => (uri, &*path),
        false => (&*path, uri),
    };
    let bytes = fs::metadata(file).map_err(|e| format!("{path}: {e}"))?.len();
    let started = Instant::now();
    process::capture("nbdcopy", program("nbdcopy").args(["--flush", from, to]))?;
    Ok(Figures {
        requests: 0.0,
        bytes: bytes as f64,
        seconds: started.elapsed().as_secs_f64(),
        ..Figures::default()
    })
}

#[cfg(test)]
mod tests {
    use super::{Figures, parse_fio};

    #[test]
    fn figures_are_read_from_what_fio_prints() {
        let said = "note: something\n{\n \"jobs\": [{\"read\": {\"total_ios\": 0}, \"write\": {\"total_ios\": 3000, \"io_bytes\": \
                    12288000, \"runtime\": 3001, \"clat_ns\": {\"percentile\": {\"50.000000\": 40500, \"99.000000\": 90000}}}}]}";
        let figures = Figures {
            requests: 3000.0,
            bytes: 12_288_000.0,
            seconds: 3.001,
            p50: Some(40.5),
            p99: Some(90.0),
        };
        assert_eq!(parse_fio(said), Ok(figures));
        assert!(parse_fio("{\"jobs\": []}").is_err());
        assert!(parse_fio("no such engine").is_err());
    }
}
