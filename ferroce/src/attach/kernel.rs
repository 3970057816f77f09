//! The kernel's NBD client, by its netlink interface (`linux/nbd-netlink.h`).

use std::{fs, io, os::fd::AsRawFd, os::unix::net::UnixStream, process::Command};

use super::{
    genl::{Attributes, Netlink, number},
    handshake::Export,
};

const NBD_CMD_CONNECT: u8 = 1;
const NBD_CMD_DISCONNECT: u8 = 2;
const NBD_CMD_RECONFIGURE: u8 = 3;
const NBD_ATTR_INDEX: u16 = 1;
const NBD_ATTR_SIZE_BYTES: u16 = 2;
const NBD_ATTR_BLOCK_SIZE_BYTES: u16 = 3;
const NBD_ATTR_SERVER_FLAGS: u16 = 5;
const NBD_ATTR_SOCKETS: u16 = 7;
const NBD_SOCK_ITEM: u16 = 1;
const NBD_SOCK_FD: u16 = 1;

/// The kernel's NBD client.
#[derive(Debug)]
pub(super) struct Kernel {
    netlink: Netlink,
    family: u16,
}

/// Attributes of the request to connect a device: at this node, or at one that is free.
fn connection(node: Option<u32>, socket: &UnixStream, export: Export, block_size: u32) -> Attributes {
    let fd = Attributes::default().u32(NBD_SOCK_FD, socket.as_raw_fd() as u32);
    let list = Attributes::default().nested(NBD_SOCK_ITEM, &fd);
    let named = match node {
        Some(node) => Attributes::default().u32(NBD_ATTR_INDEX, node),
        None => Attributes::default(),
    };
    named
        .u64(NBD_ATTR_SIZE_BYTES, export.bytes)
        .u64(NBD_ATTR_BLOCK_SIZE_BYTES, block_size.into())
        .u64(NBD_ATTR_SERVER_FLAGS, export.flags.into())
        .nested(NBD_ATTR_SOCKETS, &list)
}

impl Kernel {
    /// Finds it; loads its module if need be.
    ///
    /// # Errors
    /// Says what is missing.
    pub(super) fn find() -> Result<Self, String> {
        let mut netlink = Netlink::open().map_err(|e| format!("generic netlink: {e}"))?;
        let family = match netlink.family("nbd") {
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => {
                let loaded = load();
                netlink.family("nbd").map_err(|e| missing(&e, &loaded))?
            }
            found => found.map_err(|e| format!("generic netlink: {e}"))?,
        };
        Ok(Self { netlink, family })
    }

    /// Connects a device, and returns the number of its node.
    ///
    /// # Errors
    /// Says what was refused, and what to do.
    pub(super) fn connect(
        &mut self,
        node: Option<u32>,
        socket: &UnixStream,
        export: Export,
        block_size: u32,
    ) -> Result<u32, String> {
        let attributes = connection(node, socket, export, block_size);
        let reply = self.netlink.ask(self.family, NBD_CMD_CONNECT, &attributes);
        let reply = reply.map_err(|e| refused(&e, node))?;
        let connected = number(&reply, NBD_ATTR_INDEX).or(node);
        connected.ok_or_else(|| "the kernel does not say which device it has connected".to_owned())
    }

    /// Disconnects a device: its requests end, and its sockets are closed.
    ///
    /// # Errors
    /// The kernel's: EINVAL for a device that is not connected.
    pub(super) fn disconnect(&mut self, node: u32) -> io::Result<()> {
        let attributes = Attributes::default().u32(NBD_ATTR_INDEX, node);
        self.netlink.ask(self.family, NBD_CMD_DISCONNECT, &attributes).map(drop)
    }

    /// Gives a device another size.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn resize(&mut self, node: u32, bytes: u64) -> io::Result<()> {
        let attributes = Attributes::default()
            .u32(NBD_ATTR_INDEX, node)
            .u64(NBD_ATTR_SIZE_BYTES, bytes);
        self.netlink
            .ask(self.family, NBD_CMD_RECONFIGURE, &attributes)
            .map(drop)
    }
}

/// Loads the module.
fn load() -> Result<(), String> {
    let ran = Command::new("modprobe").arg("nbd").output();
    match ran {
        Ok(out) if out.status.success() => Ok(()),
        Ok(out) => Err(String::from_utf8_lossy(&out.stderr).trim().to_owned()),
        Err(e) => Err(format!("modprobe: {e}")),
    }
}

/// Why there is no NBD.
fn missing(e: &io::Error, loaded: &Result<(), String>) -> String {
    let hint = "without it, use nbdfuse or a virtual machine (docs/block/disk.md)";
    match loaded {
        Err(why) => format!("this kernel has no NBD, and its module can't be loaded ({why}); {hint}"),
        // Its netlink family is there in the first network namespace only.
        Ok(()) if fs::exists("/sys/module/nbd").unwrap_or(false) => {
            format!("the kernel's NBD can only be reached from the host's network namespace ({e}); {hint}")
        }
        Ok(()) => format!("this kernel has no NBD ({e}); {hint}"),
    }
}

/// Why a device could not be connected.
fn refused(e: &io::Error, node: Option<u32>) -> String {
    let which = node.map_or_else(|| "a device".to_owned(), |node| format!("/dev/nbd{node}"));
    match (e.raw_os_error(), node) {
        (Some(libc::EPERM | libc::EACCES), _) => format!(
            "no right to connect {which}: the kernel wants CAP_SYS_ADMIN (root); without it, use nbdfuse (docs/block/disk.md)"
        ),
        (Some(libc::EBUSY), Some(node)) => format!(
            "{which} is in use: `nbd-client -c /dev/nbd{node}` names its process, --attach without a node takes a free one"
        ),
        (Some(libc::EBUSY), None) => "no NBD device is free: `modprobe nbd nbds_max=N` has more".to_owned(),
        _ => format!("the kernel does not connect {which}: {e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPORT: Export = Export {
        bytes: 1 << 20,
        flags: 0x10d,
    };

    #[test]
    fn a_device_has_its_socket_in_a_list() {
        let (socket, _) = UnixStream::pair().unwrap();
        let fd = Attributes::default().u32(1, socket.as_raw_fd() as u32);
        let list = Attributes::default().nested(1, &fd);
        let of = |named: Attributes, block| {
            let sizes = named.u64(2, 1 << 20).u64(3, block);
            sizes.u64(5, 0x10d).nested(7, &list)
        };
        let any = of(Attributes::default(), 512);
        assert_eq!(connection(None, &socket, EXPORT, 512), any);
        let third = of(Attributes::default().u32(1, 3), 4096);
        assert_eq!(connection(Some(3), &socket, EXPORT, 4096), third);
    }

    #[test]
    fn refusals_say_what_to_do() {
        let error = io::Error::from_raw_os_error;
        for (errno, node, words) in [
            (libc::EPERM, None, &["CAP_SYS_ADMIN", "nbdfuse"][..]),
            (
                libc::EBUSY,
                Some(3),
                &["/dev/nbd3 is in use", "nbd-client -c /dev/nbd3"],
            ),
            (libc::EBUSY, None, &["no NBD device is free", "nbds_max"]),
            (libc::EINVAL, Some(1), &["/dev/nbd1", "Invalid argument"]),
        ] {
            let text = refused(&error(errno), node);
            assert!(words.iter().all(|word| text.contains(word)), "{text}");
        }
        let none = missing(&error(libc::ENOENT), &Err("Module nbd not found".into()));
        assert!(
            none.contains("Module nbd not found") && none.contains("docs/block/disk.md"),
            "{none}"
        );
    }
}
