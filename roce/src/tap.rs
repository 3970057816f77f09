//! Captures of what a device sends and receives.

use std::{
    fs::File,
    io::BufWriter,
    net::SocketAddr,
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use roce_icrc::{Flow, Recovery};
use roce_net::Tap;
use roce_pcap::Writer;

/// Writes packets to a file until the first error.
pub(crate) struct PcapTap {
    writer: Option<Writer<BufWriter<File>>>,
    /// The process that writes. A forked child has a copy of what is not written yet, which must not be written twice.
    pid: u32,
}

impl PcapTap {
    pub(crate) fn create(path: &Path) -> std::io::Result<Self> {
        Ok(Self {
            writer: Some(Writer::create(path)?),
            pid: std::process::id(),
        })
    }
}

impl Tap for PcapTap {
    fn packet(&mut self, from: SocketAddr, to: SocketAddr, index: u16, bytes: &[u8]) {
        let Some(writer) = &mut self.writer else { return };
        // The Identification of a received packet is not seen; the ICRC tells it.
        let id = match Flow::try_from((from, to)).map(|flow| flow.recover(bytes, index)) {
            Ok(Recovery::Exact(id)) => id,
            _ => index,
        };
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        if let Err(e) = writer.write(since.as_nanos() as u64, from, to, bytes, id) {
            tracing::error!("writing the capture failed, it ends here: {e}");
            self.writer = None;
        }
    }
}

impl Drop for PcapTap {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            std::mem::forget(self.writer.take());
            return;
        }
        if let Some(writer) = self.writer.take()
            && let Err(e) = writer.finish()
        {
            tracing::error!("writing the end of the capture failed: {e}");
        }
    }
}
