//! Captures in a build without them.

use std::{io, net::SocketAddr, path::Path};

use roce_net::Tap;

/// Capture file. There are none in this build.
pub(crate) enum PcapTap {}

impl PcapTap {
    pub(crate) fn create(_: &Path, _: bool) -> io::Result<Self> {
        let text = "this program was built without captures: enable the feature `pcap` of the crate roce";
        Err(io::Error::new(io::ErrorKind::Unsupported, text))
    }
}

impl Tap for PcapTap {
    fn packet(&mut self, _: SocketAddr, _: SocketAddr, _: u16, _: &[u8]) {
        match *self {}
    }
}
