//! Objects that loops share: fabrics whose ports have the same memory table.

use std::sync::Arc;

use roce_mem::{PdHandle, PostedKey, Region};
use roce_verbs::provider::{DeviceIx, KeyId, Lent, MrId, MrInfo, PdId, VerbsError};

use crate::{
    fabric::{Backend, Fabric},
    objects::{LentKey, LentMr, LentPd, Shared, SoftKey},
    ports::Ports,
    tables::{FULL, Key, Mr, Pd, gone},
};

fn foreign(what: &str) -> VerbsError {
    VerbsError::Invalid(format!("{what} of another device or domain"))
}

const NOT_SHARED: VerbsError = VerbsError::Unsupported("sharing objects of an RDMA device between loops");

impl<P: Ports> Fabric<P> {
    pub(crate) fn number_mr(&mut self, port: usize, region: Arc<Region>, borrowed: bool) -> Result<MrInfo, VerbsError> {
        let (addr, len, lkey, rkey) = (region.addr(), region.len(), region.lkey(), region.rkey());
        let mr = Mr::Soft { port, region, borrowed };
        let id = self.tables.mrs.insert(mr).ok_or(FULL)?;
        Ok(MrInfo {
            id,
            addr,
            len,
            lkey,
            rkey,
        })
    }

    /// Returns port and handle of a software device's protection domain.
    fn soft_pd(&self, pd: PdId) -> Result<(usize, PdHandle), VerbsError> {
        match self.tables.pds.get(pd) {
            Some(Pd::Soft { port, handle, .. }) => Ok((*port, *handle)),
            Some(Pd::Hard { .. }) => Err(NOT_SHARED),
            None => Err(gone("protection domain")),
        }
    }

    pub(crate) fn lent_pd(&self, pd: PdId) -> Result<Lent, VerbsError> {
        let (port, handle) = self.soft_pd(pd)?;
        let mem = self.ports.memory(port).clone();
        Ok(Lent::new(LentPd { mem, handle }))
    }

    pub(crate) fn borrowed_pd(&mut self, device: DeviceIx, pd: &Lent) -> Result<PdId, VerbsError> {
        let Backend::Soft(port) = self.backend(device)? else {
            return Err(NOT_SHARED);
        };
        let mine = |pd: &&LentPd| Arc::ptr_eq(&pd.mem, self.ports.memory(port));
        let lent = pd.get::<LentPd>().filter(mine);
        let handle = lent.ok_or_else(|| foreign("a protection domain"))?.handle;
        let pd = Pd::Soft {
            port,
            handle,
            borrowed: true,
        };
        self.tables.pds.insert(pd).ok_or(FULL)
    }

    pub(crate) fn lent_mr(&self, mr: MrId) -> Result<Lent, VerbsError> {
        match self.tables.mrs.get(mr) {
            Some(Mr::Soft { port, region, .. }) => {
                let (mem, region) = (self.ports.memory(*port).clone(), region.clone());
                Ok(Lent::new(LentMr { mem, region }))
            }
            Some(Mr::Hard(_)) => Err(NOT_SHARED),
            None => Err(gone("registration")),
        }
    }

    pub(crate) fn borrowed_mr(&mut self, pd: PdId, mr: &Lent) -> Result<MrInfo, VerbsError> {
        let (port, handle) = self.soft_pd(pd)?;
        let mine = |mr: &&LentMr| Arc::ptr_eq(&mr.mem, self.ports.memory(port)) && mr.region.pd() == handle;
        let lent = mr.get::<LentMr>().filter(mine);
        let region = lent.ok_or_else(|| foreign("a registration"))?.region.clone();
        self.number_mr(port, region, true)
    }

    pub(crate) fn lent_key(&mut self, id: KeyId) -> Result<Lent, VerbsError> {
        let key = match self.tables.keys.get_mut(id) {
            Some(Key::Soft(key)) => key,
            Some(Key::Hard(_)) => return Err(NOT_SHARED),
            None => return Err(gone("key")),
        };
        let mem = self.ports.memory(key.port).clone();
        let posted = &key.posted;
        let shared = key.shared.get_or_insert_with(|| Arc::new(Shared::new(posted))).clone();
        Ok(Lent::new(LentKey {
            mem,
            handle: key.pd,
            object: key.object.clone(),
            shared,
        }))
    }

    pub(crate) fn borrowed_key(&mut self, pd: PdId, key: &Lent) -> Result<KeyId, VerbsError> {
        let (port, handle) = self.soft_pd(pd)?;
        let mine = |key: &&LentKey| Arc::ptr_eq(&key.mem, self.ports.memory(port)) && key.handle == handle;
        let lent = key.get::<LentKey>().filter(mine).ok_or_else(|| foreign("a key"))?;
        let key = SoftKey {
            port,
            pd: handle,
            object: lent.object.clone(),
            // The key itself is read from the shared state.
            posted: PostedKey::new(roce_verbs::RKey::default()),
            through: None,
            shared: Some(lent.shared.clone()),
            borrowed: true,
        };
        self.tables.keys.insert(Key::Soft(key)).ok_or(FULL)
    }
}
