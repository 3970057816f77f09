//! Objects that other loops' fabrics use: of those whose ports have the same memory table.

use std::sync::Arc;

use roce_mem::{PostedKey, Region};
use roce_verbs::provider::{DeviceIx, KeyId, Lent, MrId, MrInfo, PdId, VerbsError};

use crate::{
    fabric::{FULL, Fabric, Mr, Pd, Ports, gone},
    objects::{Key, LentKey, LentMr, LentPd, Shared},
};

fn foreign(what: &str) -> VerbsError {
    VerbsError::Invalid(format!("{what} of another device or domain"))
}

impl<P: Ports> Fabric<P> {
    pub(crate) fn number_mr(&mut self, pd: PdId, region: Arc<Region>, borrowed: bool) -> Result<MrInfo, VerbsError> {
        let (addr, len, lkey, rkey) = (region.addr(), region.len(), region.lkey(), region.rkey());
        let id = self.mrs.insert(Mr { pd, region, borrowed }).ok_or(FULL)?;
        Ok(MrInfo {
            id,
            addr,
            len,
            lkey,
            rkey,
        })
    }

    pub(crate) fn lent_pd(&self, pd: PdId) -> Result<Lent, VerbsError> {
        let (device, handle) = self.pd(pd)?;
        let mem = self.ports.memory(device).clone();
        Ok(Lent::new(LentPd { mem, handle }))
    }

    pub(crate) fn borrowed_pd(&mut self, device: DeviceIx, pd: &Lent) -> Result<PdId, VerbsError> {
        let device = usize::from(device.0);
        if device >= self.ports.count() {
            return Err(gone("device"));
        }
        let mine = |pd: &&LentPd| Arc::ptr_eq(&pd.mem, self.ports.memory(device));
        let lent = pd.get::<LentPd>().filter(mine);
        let handle = lent.ok_or_else(|| foreign("a protection domain"))?.handle;
        let pd = Pd {
            device,
            handle,
            borrowed: true,
        };
        self.pds.insert(pd).ok_or(FULL)
    }

    pub(crate) fn lent_mr(&self, mr: MrId) -> Result<Lent, VerbsError> {
        let mr = self.mrs.get(mr).ok_or_else(|| gone("registration"))?;
        let (device, _) = self.pd(mr.pd)?;
        let (mem, region) = (self.ports.memory(device).clone(), mr.region.clone());
        Ok(Lent::new(LentMr { mem, region }))
    }

    pub(crate) fn borrowed_mr(&mut self, pd: PdId, mr: &Lent) -> Result<MrInfo, VerbsError> {
        let (device, handle) = self.pd(pd)?;
        let mine = |mr: &&LentMr| Arc::ptr_eq(&mr.mem, self.ports.memory(device)) && mr.region.pd() == handle;
        let lent = mr.get::<LentMr>().filter(mine);
        let region = lent.ok_or_else(|| foreign("a registration"))?.region.clone();
        self.number_mr(pd, region, true)
    }

    pub(crate) fn lent_key(&mut self, id: KeyId) -> Result<Lent, VerbsError> {
        let pd = self.keys.get(id).ok_or_else(|| gone("key"))?.pd;
        let (device, handle) = self.pd(pd)?;
        let mem = self.ports.memory(device).clone();
        let key = self.keys.get_mut(id).ok_or_else(|| gone("key"))?;
        let posted = &key.posted;
        let shared = key.shared.get_or_insert_with(|| Arc::new(Shared::new(posted))).clone();
        let object = key.object.clone();
        Ok(Lent::new(LentKey {
            mem,
            handle,
            object,
            shared,
        }))
    }

    pub(crate) fn borrowed_key(&mut self, pd: PdId, key: &Lent) -> Result<KeyId, VerbsError> {
        let (device, handle) = self.pd(pd)?;
        let mine = |key: &&LentKey| Arc::ptr_eq(&key.mem, self.ports.memory(device)) && key.handle == handle;
        let lent = key.get::<LentKey>().filter(mine).ok_or_else(|| foreign("a key"))?;
        let key = Key {
            pd,
            object: lent.object.clone(),
            // The key itself is read from what is shared.
            posted: PostedKey::new(roce_verbs::RKey::default()),
            through: None,
            shared: Some(lent.shared.clone()),
            borrowed: true,
        };
        self.keys.insert(key).ok_or(FULL)
    }
}
