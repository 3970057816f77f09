//! Memory of programs: requests for it, and for regions of it.

use std::sync::Arc;

use rand::RngCore as _;
use rds::{RegionRights, proto::RdmaCookie};
use rds_local::{Answer, Record, SocketKey};
use roce::reactor::TurnCx;
use roce_verbs::provider::Memory;
use rustix::io::Errno;

use crate::{
    control::{Outcome, done},
    errno, memory,
    opening::Opened,
    server::{Entry, Server, with_cx},
};

/// `RDS_RDMA_READWRITE` and `RDS_RDMA_USE_ONCE`. Others say nothing of a region: it is always invalidated when it is freed.
const READWRITE: u32 = 1;
const USE_ONCE: u32 = 8;

impl Server {
    /// A process gives its memory.
    pub(crate) fn set_memory(&mut self, client: usize, record: Record) -> Outcome {
        let Some(Entry::Client(client)) = self.entries.get_mut(client) else {
            return Err(Errno::BADF);
        };
        let process = client.process;
        if process == 0 || record.process != process {
            tracing::warn!(
                "no RDMA of process {process}: the memory comes from process {}",
                record.process
            );
            return Err(Errno::PERM);
        }
        let file = record.fds.into_iter().next().ok_or(Errno::BADF)?;
        let memory = memory::of(file).inspect_err(|e| {
            tracing::warn!("no RDMA of process {process}: what it gives is not its /proc/self/mem: {e}");
        })?;
        let number = self.rng.next_u64();
        if let Some(former) = client.memory.replace(number) {
            self.memories.remove(former);
        }
        self.memories.add(number, process, memory);
        done(Answer {
            value: number,
            ..Answer::default()
        })
    }

    /// Returns the memory of a client, for a request of this process.
    pub(crate) fn memory_of(&self, client: usize, process: u32) -> Result<Arc<dyn Memory>, Errno> {
        let number = match self.entries.get(client) {
            Some(Entry::Client(client)) => client.memory,
            _ => None,
        };
        let memory = number.and_then(|number| self.memories.get(number, process));
        memory.cloned().ok_or(Errno::PERM)
    }

    /// Registers memory for a socket.
    pub(crate) fn map(
        &mut self,
        turn: &mut TurnCx<'_, Opened>,
        key: SocketKey,
        (memory, addr, len): (Arc<dyn Memory>, u64, u64),
        flags: u32,
    ) -> Outcome {
        let (index, program) = self.program(key)?;
        let process = program.process;
        let end = addr.checked_add(len).ok_or(Errno::INVAL)?;
        let range = addr as usize..end as usize;
        if self.has_all_regions(index) {
            self.limit_reached(turn, process, "regions");
            // As the kernel's when its pools are empty.
            return Err(Errno::AGAIN);
        }
        let Some(Entry::Program(program)) = self.entries.get(index) else {
            return Err(Errno::NOTSOCK);
        };
        let (addr, id) = program.at.ok_or(Errno::NOTCONN)?;
        let node = &mut self.addrs.get_mut(&addr).ok_or(Errno::NOTCONN)?.node;
        let rights = RegionRights {
            writable: flags & READWRITE != 0,
            use_once: flags & USE_ONCE != 0,
        };
        let cookie = with_cx(turn, &mut self.rng, |cx| node.register(cx, id, memory, range, rights));
        match cookie {
            Ok(cookie) => done(Answer {
                value: cookie.0,
                ..Answer::default()
            }),
            Err(rds::Error::Limit) => Err(Errno::AGAIN),
            Err(e) => Err(errno::of_call(e)),
        }
    }

    /// Returns whether there are as many regions as there may be, of the process of a socket or of all.
    fn has_all_regions(&self, socket: usize) -> bool {
        let limits = &self.config.limits;
        let all: usize = self.addrs.values().map(|address| address.node.regions(None)).sum();
        let Some(Entry::Program(program)) = self.entries.get(socket) else {
            return true;
        };
        let of = |(addr, id)| {
            self.addrs
                .get(&addr)
                .map_or(0, |address| address.node.regions(Some(id)))
        };
        let its = || -> usize {
            let sockets = self.programs().filter(|other| other.process == program.process);
            sockets.filter_map(|other| other.at).map(of).sum()
        };
        all >= limits.regions || all >= limits.process_regions && its() >= limits.process_regions
    }

    pub(crate) fn unmap(&mut self, key: SocketKey, cookie: u64) -> Outcome {
        let (node, (_, id)) = self.bound(key, Errno::INVAL)?;
        // 0 is for those that were freed and are kept: there are none.
        if cookie != 0 {
            node.free_region(id, RdmaCookie(cookie)).map_err(errno::of_call)?;
        }
        done(Answer::default())
    }

    pub(crate) fn check_region(&mut self, key: SocketKey, cookie: u64) -> Outcome {
        let (node, (_, id)) = self.bound(key, Errno::INVAL)?;
        match node.has_region(id, RdmaCookie(cookie)) {
            true => done(Answer::default()),
            false => Err(Errno::INVAL),
        }
    }
}
