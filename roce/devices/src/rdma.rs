//! RDMA devices of the host beside software ones.

use std::{fmt, io, net::IpAddr, os::fd::BorrowedFd};

use roce::{
    LocalDevice, Mtu, Usage,
    verbs::provider::{DeviceIx, Provider, VerbsError},
};

use crate::{
    joint::{Half, Joint},
    opener::Hardware,
};

/// RDMA devices that are wanted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceName {
    /// As `rdma link` has it without the port (`mlx5_0`, `rxe0`).
    pub name: String,
    /// Only the addresses of this port; `None`: those of all.
    pub port: Option<u8>,
}

/// RDMA devices of the host as a loop drives them: `roce_hw::HwDevice`.
///
/// Completions come without a packet that is received. A loop asks for them, and when there are none for a while it
/// [arms](Self::arm) the devices, asks once more, and waits for the [descriptors](Self::descriptors).
pub trait Rdma: Half + fmt::Debug + Send {
    /// Returns the descriptors to watch, for reading: [`poll`](Self::poll) takes their events.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>>;

    /// Takes what the descriptors have. Then completions are to be asked for, and then events. True: there was something.
    ///
    /// # Errors
    /// When the system fails.
    fn poll(&mut self) -> Result<bool, VerbsError>;

    /// Has the descriptors tell of the next completion. What completed before is not told.
    ///
    /// # Errors
    /// When a completion queue has failed.
    fn arm(&mut self) -> Result<(), VerbsError>;

    /// The device that has an address now.
    fn owner(&self, addr: IpAddr) -> Option<DeviceIx>;

    /// The addresses of all devices.
    fn addrs(&self) -> Vec<IpAddr>;

    /// Path MTU at most of connections from an address now.
    ///
    /// # Errors
    /// When it is no device's, or the device does not say.
    fn mtu(&self, addr: IpAddr) -> io::Result<Mtu>;

    /// How many objects there are.
    fn usage(&self) -> Usage;
}

impl Half for Box<dyn Rdma> {
    fn provider(&self) -> &dyn Provider {
        (**self).provider()
    }

    fn provider_mut(&mut self) -> &mut dyn Provider {
        (**self).provider_mut()
    }
}

/// Both.
#[derive(Debug)]
pub(crate) struct Both {
    pub(crate) joint: Joint<LocalDevice, Box<dyn Rdma>>,
    /// The addresses of the RDMA devices.
    pub(crate) known: Hardware,
}

impl Both {
    pub(crate) fn new(soft: LocalDevice, rdma: Box<dyn Rdma>) -> Self {
        let this = Self {
            joint: Joint::new(soft, rdma, roce::iface::route_to),
            known: Hardware::default(),
        };
        this.known.tell(this.joint.b().addrs());
        this
    }

    /// Takes what the RDMA devices have to tell. True: there was something.
    pub(crate) fn take_news(&mut self) -> Result<bool, VerbsError> {
        let any = self.joint.b_mut().poll()?;
        if any {
            self.joint.refresh();
            self.known.tell(self.joint.b().addrs());
        }
        Ok(any)
    }
}
