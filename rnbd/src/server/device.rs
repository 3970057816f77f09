//! A device that a session has open.

use rtrs::server::request::RequestKey;

use super::{
    action::{Identity, Opened},
    disk::StoreId,
};
use crate::{
    block::Geometry,
    proto::{AccessMode, CACHE_FUA, CACHE_WRITEBACK, MsgOpenRsp, SECTOR, instance::Instance},
};

/// Whether a device takes requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Life {
    /// It does.
    Open,
    /// It is closed after its last request, and then this one answered: none, when the session has ended.
    Closing(Option<RequestKey>),
}

/// Session that has a device open, by its name, since a client that comes back has another one of the same.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Tenancy {
    pub(super) session: String,
    pub(super) device: Vec<u8>,
}

/// An open device.
#[derive(Debug)]
pub(super) struct Device {
    /// As the disk names it.
    pub(super) store: StoreId,
    /// As the client spells it.
    pub(super) name: Vec<u8>,
    /// Identity of that export.
    pub(super) identity: Identity,
    /// Location of its bytes.
    pub(super) label: String,
    /// Size and limits.
    pub(super) geometry: Geometry,
    /// Instance that holds its acknowledged writes.
    instance: Option<Instance>,
    /// How it was opened,
    pub(super) mode: AccessMode,
    /// and by a session of which name.
    pub(super) owner: String,
    requests: u32,
    life: Life,
}

impl Device {
    pub(super) fn new(name: Vec<u8>, mode: AccessMode, owner: String, opened: Opened) -> Self {
        Self {
            mode,
            owner,
            store: opened.store,
            name,
            identity: opened.identity,
            label: opened.label,
            geometry: opened.geometry,
            instance: opened.instance,
            requests: 0,
            life: Life::Open,
        }
    }

    /// Whether it takes no more requests.
    pub(super) fn is_closing(&self) -> bool {
        self.life != Life::Open
    }

    /// A request begins.
    pub(super) fn begin(&mut self) {
        self.requests += 1;
    }

    /// A request has ended.
    pub(super) fn end(&mut self) {
        self.requests = self.requests.saturating_sub(1);
    }

    /// No more requests will come; `request` is to be answered when it is closed.
    pub(super) fn finish(&mut self, request: Option<RequestKey>) {
        self.life = Life::Closing(request);
    }

    /// Whether it is to be closed, and nothing is under way on it.
    pub(super) fn may_close(&self) -> bool {
        self.requests == 0 && self.is_closing()
    }

    /// Returns the store to close, and the request to answer then.
    pub(super) fn into_close(self) -> (StoreId, Option<RequestKey>) {
        match self.life {
            Life::Open => (self.store, None),
            Life::Closing(request) => (self.store, request),
        }
    }

    /// By whom it was opened, and as what.
    pub(super) fn tenancy(&self) -> Tenancy {
        Tenancy {
            session: self.owner.clone(),
            device: self.name.clone(),
        }
    }

    /// The answer to an open request. 16-bit fields hold what fits.
    pub(super) fn response(&self, id: u32) -> MsgOpenRsp {
        let g = &self.geometry;
        let sectors = |bytes: u64| u32::try_from(bytes / SECTOR).unwrap_or(u32::MAX);
        let small = |n: u32| u16::try_from(n).unwrap_or(1 << 15);
        let mut rsp = MsgOpenRsp::new();
        rsp.device_id.set(id);
        rsp.nsectors.set(g.size / SECTOR);
        rsp.logical_block_size.set(small(g.logical_block_size));
        rsp.physical_block_size.set(small(g.physical_block_size));
        rsp.max_hw_sectors.set(sectors(g.max_transfer.into()));
        rsp.max_segments.set(128);
        rsp.max_discard_sectors.set(sectors(g.max_discard));
        rsp.max_write_zeroes_sectors.set(sectors(g.max_write_zeroes));
        if g.max_discard > 0 {
            rsp.discard_granularity.set(g.discard_granularity);
        }
        if g.write_cache {
            rsp.cache_policy |= CACHE_WRITEBACK;
        }
        if g.fua {
            rsp.cache_policy |= CACHE_FUA;
        }
        rsp.offer_block_status();
        rsp.set_instance(self.instance);
        rsp
    }
}
