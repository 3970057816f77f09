//! Writes packets to a capture file.

use std::{
    fs::File,
    net::SocketAddr,
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use roce_net::Tap;
use roce_pcap::{Writer, append_private, create_private};

use crate::ring::identification;

/// Writes packets to a file until the first error. Nothing is held back: the capture of a process that is killed is whole.
pub(crate) struct PcapTap(Option<Writer<File>>);

impl PcapTap {
    /// Starts a capture file, or goes on with one if `append`. A lock on the file shows others that it is being written.
    pub(crate) fn create(path: &Path, append: bool) -> std::io::Result<Self> {
        let file = if append {
            append_private(path)
        } else {
            create_private(path)
        }?;
        // Pipes and the like have no locks, nor have some file systems.
        let _ = file.try_lock_shared();
        let begun = append && file.metadata()?.len() > 0;
        Ok(Self(Some(if begun {
            Writer::append(file)
        } else {
            Writer::new(file)?
        })))
    }
}

impl Tap for PcapTap {
    fn packet(&mut self, from: SocketAddr, to: SocketAddr, index: u16, bytes: &[u8]) {
        let Some(writer) = &mut self.0 else { return };
        let id = identification(from, to, index, bytes);
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        if let Err(e) = writer.write(since.as_nanos() as u64, from, to, bytes, id) {
            tracing::error!("capture stopped: {e}");
            self.0 = None;
        }
    }
}
