//! Membership of devices in multicast groups.

use std::{net::IpAddr, sync::Arc};

use roce_verbs::provider::VerbsError;

use crate::{
    device::{Device, DeviceInner},
    error::io_error,
};

/// Membership of the device in a multicast group; it ends with the drop. Queue pairs that are attached have their own.
#[derive(Debug)]
pub struct Membership {
    group: IpAddr,
    local: IpAddr,
    device: Arc<DeviceInner>,
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.device.engines.first().leave(self.group, self.local);
    }
}

impl Membership {
    /// Joins on the interface that has `local`; unspecified: the device's address.
    pub(crate) fn new(device: &Arc<DeviceInner>, group: IpAddr, local: IpAddr) -> Result<Self, VerbsError> {
        let group = group.to_canonical();
        let local = match local.to_canonical() {
            any if any.is_unspecified() => device.local_for(group)?,
            given => given,
        };
        if !group.is_multicast() || group.is_ipv4() != local.is_ipv4() {
            return Err(VerbsError::Address(format!(
                "no way from {local} to a multicast group {group}"
            )));
        }
        let joined = device.engines.first().join(group, local);
        joined.map_err(io_error(&format!(
            "joining multicast group {group} on the interface of {local}"
        )))?;
        Ok(Self {
            group,
            local,
            device: device.clone(),
        })
    }

    /// The group.
    pub fn group(&self) -> IpAddr {
        self.group
    }
}

impl Device {
    /// Receives what is sent to a multicast group on the interface that has `local` (unspecified: the device's address),
    /// as long as the returned membership lives. Queue pairs get nothing of it unless they are attached.
    ///
    /// # Errors
    /// When the address is no group's, or the system refuses.
    pub fn join_group(&self, group: IpAddr, local: IpAddr) -> Result<Membership, VerbsError> {
        Membership::new(&self.0, group, local)
    }
}
