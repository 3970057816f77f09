//! Paths of RTRS sessions: what their connections share.

use std::collections::BTreeMap;

use rtrs::proto::{ChunkLayout, ConnRsp, SgDesc, Uuid};

/// Path.
#[derive(Debug, Default)]
pub(crate) struct Path {
    /// Division of an immediate into chunk and offset.
    pub(crate) layout: Option<ChunkLayout>,
    /// Room for headers in a chunk, bytes.
    pub(crate) max_hdr_size: u32,
    /// Memory of the chunks.
    pub(crate) memory: Vec<SgDesc>,
    /// The connection response was not seen.
    pub(crate) recognized: bool,
    /// Bits of an immediate below the chunk, once they are found out.
    pub(crate) shift: Option<u32>,
    /// Connections of the path.
    connections: usize,
}

impl Path {
    /// Learns from a server's answer.
    pub(crate) fn accept(&mut self, rsp: &ConnRsp) {
        self.layout = rsp.layout().ok().or(self.layout);
        self.max_hdr_size = rsp.max_hdr_size.get();
    }

    /// Returns the address of a chunk.
    pub(crate) fn chunk_addr(&self, chunk: u32) -> Option<u64> {
        let size = self.layout?.chunk_size();
        let mut left = chunk;
        for piece in &self.memory {
            let chunks = piece.len.get() / size;
            if left < chunks {
                return piece.addr.get().checked_add(u64::from(left) * u64::from(size));
            }
            left -= chunks;
        }
        None
    }

    /// Returns the chunk of an address.
    pub(crate) fn chunk_at(&self, addr: u64) -> Option<u32> {
        let size = self.layout?.chunk_size();
        let mut before = 0u32;
        for piece in &self.memory {
            let offset = addr.checked_sub(piece.addr.get());
            if let Some(offset) = offset.filter(|o| *o < piece.len.get().into()) {
                let chunk = u32::try_from(offset / u64::from(size)).ok()?;
                return before.checked_add(chunk);
            }
            before = before.checked_add(piece.len.get() / size)?;
        }
        None
    }
}

/// Table of paths. A path is in it as long as one of its connections is known.
#[derive(Debug, Default)]
pub(crate) struct Paths {
    all: BTreeMap<Uuid, Path>,
}

impl Paths {
    /// Adds a connection to a path.
    pub(crate) fn join(&mut self, path: Uuid) {
        self.all.entry(path).or_default().connections += 1;
    }

    /// Adds the path of a connection that was recognized by a message.
    pub(crate) fn recognize(&mut self, path: Uuid) {
        self.join(path);
        if let Some(path) = self.all.get_mut(&path) {
            path.recognized = true;
            path.max_hdr_size = rtrs::proto::MAX_HDR_SIZE;
        }
    }

    /// Takes a connection from a path.
    pub(crate) fn leave(&mut self, path: Option<Uuid>) {
        let Some(id) = path else { return };
        if let Some(path) = self.all.get_mut(&id) {
            path.connections -= 1;
            if path.connections == 0 {
                self.all.remove(&id);
            }
        }
    }

    pub(crate) fn get(&self, path: Option<Uuid>) -> Option<&Path> {
        self.all.get(&path?)
    }

    pub(crate) fn get_mut(&mut self, path: Option<Uuid>) -> Option<&mut Path> {
        self.all.get_mut(&path?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_and_addresses_belong_together() {
        let path = Path {
            layout: ChunkLayout::new(6, 8192).ok(),
            memory: vec![SgDesc::new(0x10_0000, 1, 2 * 8192), SgDesc::new(0x1000, 2, 4 * 8192)],
            ..Path::default()
        };
        for (chunk, addr) in [(0, 0x10_0000), (1, 0x10_2000), (2, 0x1000), (5, 0x7000)] {
            assert_eq!(path.chunk_addr(chunk), Some(addr));
            assert_eq!(path.chunk_at(addr), Some(chunk));
            assert_eq!(path.chunk_at(addr + 8191), Some(chunk));
        }
        assert_eq!(
            (path.chunk_addr(6), path.chunk_at(0xfff), path.chunk_at(0x9000)),
            (None, None, None)
        );
    }

    #[test]
    fn a_path_goes_with_its_last_connection() {
        let mut paths = Paths::default();
        let id = Uuid([7; 16]);
        paths.join(id);
        paths.join(id);
        paths.leave(Some(id));
        assert!(paths.get(Some(id)).is_some());
        paths.leave(Some(id));
        paths.leave(Some(id));
        assert!(paths.get(Some(id)).is_none());
    }
}
