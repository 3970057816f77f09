//! Captures that are read twice, and where the copy goes.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Seek, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use ferroce_dissect::ProtocolJudge;
use roce_pcap::{Capture, PcapNgWriter, Survey, judge::Stated};
use roce_verbs::shown;

use crate::output::Failure;

/// Capture file to read twice. Pipes are copied to a temporary file without a name.
pub(super) struct Source {
    path: PathBuf,
    name: String,
    file: File,
}

impl Source {
    /// Opens a file; `-` is standard input.
    pub(super) fn open(path: &Path) -> Result<Self, Failure> {
        let name = shown(&path.display().to_string()).to_string();
        let failed = |e: io::Error| Failure::with_status(2, format!("{name}: {e}"));
        let file = if path.as_os_str() == "-" {
            spool(&mut io::stdin().lock()).map_err(failed)?
        } else {
            let mut file = File::open(path).map_err(failed)?;
            match file.metadata().map_err(failed)?.is_file() {
                true => file,
                false => spool(&mut file).map_err(failed)?,
            }
        };
        Ok(Self {
            path: path.to_owned(),
            name,
            file,
        })
    }

    /// Begins to read it.
    pub(super) fn capture(&mut self) -> Result<Capture<&File>, Failure> {
        let failed = |e: &dyn std::fmt::Display| Failure::with_status(2, format!("{}: {e}", self.name));
        self.file.rewind().map_err(|e| failed(&e))?;
        Capture::new(&self.file).map_err(|e| failed(&e))
    }

    /// Reads it to its end for the first time.
    pub(super) fn survey(&mut self, stated: &[Stated]) -> Result<Survey, Failure> {
        let name = self.path.display().to_string();
        Ok(Survey::new(name, &ProtocolJudge::setup(stated), &mut self.capture()?))
    }

    /// Makes a file for a copy; `-` is standard output. Refuses to overwrite the capture itself.
    pub(super) fn copy_to(&self, path: &Path) -> Result<PcapNgWriter<Box<dyn Write>>, Failure> {
        self.refuse(path)?;
        let failed = |e: io::Error| Failure::failed(format!("{}: {e}", path.display()));
        let out: Box<dyn Write> = match path.as_os_str() == "-" {
            true => Box::new(BufWriter::new(io::stdout().lock())),
            false => Box::new(BufWriter::new(roce_pcap::create_private(path).map_err(failed)?)),
        };
        PcapNgWriter::new(out).map_err(failed)
    }

    /// Fails if a path is that of the capture.
    pub(super) fn refuse(&self, path: &Path) -> Result<(), Failure> {
        let input = self.file.metadata().map_err(Failure::of)?;
        let same = |other: fs::Metadata| (other.dev(), other.ino()) == (input.dev(), input.ino());
        match fs::metadata(path).is_ok_and(same) {
            true => Err(Failure::usage(format!(
                "{} is the capture that is read: name another file for the copy",
                path.display()
            ))),
            false => Ok(()),
        }
    }

    /// Reports a capture that breaks off, once all that can be read is copied.
    pub(super) fn finish(&self, survey: &Survey) -> Result<(), Failure> {
        if survey.findings_left_out() > 0 {
            tracing::warn!(
                "{}: {} findings of earlier frames were too many, and are missing",
                self.name,
                survey.findings_left_out()
            );
        }
        let report = survey.report();
        if report.complete {
            return Ok(());
        }
        let broken = report.findings.iter().find(|f| f.rule == roce_pcap::Rule::FileBroken);
        let why = broken.map_or("it breaks off", |finding| finding.text.as_str());
        Err(self.broken(why, report.frames))
    }

    /// The failure of a capture that breaks off.
    pub(super) fn broken(&self, why: &str, frames: u64) -> Failure {
        Failure::failed(format!("{}: {why}; the {frames} frames before are copied", self.name))
    }
}

/// Copies a pipe to a temporary file without a name.
fn spool(from: &mut impl io::Read) -> io::Result<File> {
    let mut file = tempfile::tempfile()?;
    io::copy(from, &mut file)?;
    Ok(file)
}

/// Writes a line about what was done to standard error: standard output may be the copy.
pub(super) fn note(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}
