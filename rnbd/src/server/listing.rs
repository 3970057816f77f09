//! Listing of open devices, and closing them by order.

use core::net::SocketAddr;

use roce_verbs::Instant;
use rtrs::server::request::SessionKey;

use super::{
    disk::{Disks, StoreId},
    server::Server,
    session::Session,
};
use crate::proto::AccessMode;

/// A device that a session has open.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceListing {
    /// The session,
    pub session: SessionKey,
    /// its name,
    pub session_name: String,
    /// and its client.
    pub peer: SocketAddr,
    /// The client's number for the device.
    pub id: u32,
    /// The name that the client has asked for (`mapping_path`).
    pub name: String,
    /// How it has (`access_mode`).
    pub mode: AccessMode,
    /// Writes are refused (`read_only`).
    pub read_only: bool,
    /// Location of its bytes.
    pub label: String,
    /// As the loop's disks know it.
    pub store: StoreId,
    /// Bytes, as it was known last.
    pub size: u64,
}

impl<D: Disks> Server<D> {
    /// Devices that are open.
    pub fn listing(&self) -> Vec<DeviceListing> {
        let listed = self.sessions.iter().flat_map(|(key, session)| {
            let open = session.devices();
            open.filter_map(|(id, device)| self.listed(*key, session, id, device))
        });
        listed.collect()
    }

    fn listed(&self, key: SessionKey, session: &Session, id: u32, device: u64) -> Option<DeviceListing> {
        let d = self.devices.get(device)?;
        Some(DeviceListing {
            session: key,
            session_name: session.name.clone(),
            peer: session.peer,
            id,
            name: String::from_utf8_lossy(&d.name).into_owned(),
            mode: d.mode,
            read_only: d.geometry.read_only,
            label: d.label.clone(),
            store: d.store,
            size: d.geometry.size,
        })
    }

    /// Closes a device for a session, whatever its client does, as the kernel's `force_close`: requests that are under way are answered,
    /// and for later ones the device is not connected (ENOTCONN). Its number is not used again. False when the session has no such
    /// device.
    pub fn force_close(&mut self, now: Instant, session: SessionKey, id: u32) -> bool {
        let Some(device) = self.sessions.get_mut(&session).and_then(|s| s.leave(id)) else {
            return false;
        };
        self.log_close(now, session, device);
        self.finish_device(device, None);
        true
    }
}
