//! `ferroce map --attach`: devices of a mapping as block devices of the kernel, `/dev/nbdN`.
//!
//! The kernel's NBD client gets one end of a socket pair; the mapping serves the other as it serves any NBD client. So the
//! data goes the way of `--nbd` with `nbd-client`, but for a socket file and a second program.

mod genl;
mod handshake;
mod kernel;

use std::{
    fs::{self, File},
    io,
    os::unix::{fs::OpenOptionsExt, net::UnixStream},
    time::Duration,
};

use clap::Args;
use rnbd::block::Geometry;
use rnbd_host::map::{MapDevice, Mapping};

use crate::{event::Event, output::Failure, report::Reporter};
use handshake::Export;
use kernel::Kernel;

/// How long the mapping may take to answer the handshake.
const TIMEOUT: Duration = Duration::from_secs(10);
/// A node that is free.
const FREE: &str = "auto";

#[derive(Args)]
pub(crate) struct AttachArgs {
    /// Attach devices to this host's kernel as /dev/nbdN (root). Without a value each gets a free node. With several devices name one:
    /// DEVICE=/dev/nbdN. Repeat it for several nodes. They are detached at the end, unless they are mounted
    #[arg(long, value_name = "[DEVICE=]auto|/dev/nbdN", num_args = 0..=1, default_missing_value = FREE)]
    attach: Vec<String>,
}

/// A device that is to be attached.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Wanted {
    device: String,
    /// `None`: one that is free.
    node: Option<u32>,
}

fn node(text: &str) -> Option<Option<u32>> {
    match text.strip_prefix("/dev/nbd") {
        None => (text == FREE).then_some(None),
        Some(number) => number.parse().ok().map(Some),
    }
}

impl AttachArgs {
    /// Whether anything is to be attached.
    pub(crate) fn is_named(&self) -> bool {
        !self.attach.is_empty()
    }

    fn wanted(&self, devices: &[MapDevice]) -> Result<Vec<Wanted>, Failure> {
        let mut wanted: Vec<Wanted> = Vec::new();
        for text in &self.attach {
            match (node(text), devices) {
                (Some(None), _) => wanted.extend(devices.iter().map(|device| Wanted {
                    device: device.name.clone(),
                    node: None,
                })),
                (node @ Some(Some(_)), [one]) => wanted.extend(node.map(|node| Wanted {
                    device: one.name.clone(),
                    node,
                })),
                _ => wanted.push(of_device(text, devices)?),
            }
        }
        // `--attach` alone has those that are not named otherwise.
        let named: Vec<_> = wanted.iter().filter(|w| w.node.is_some()).cloned().collect();
        wanted.retain(|w| w.node.is_some() || named.iter().all(|n| n.device != w.device));
        for (index, one) in wanted.iter().enumerate() {
            if wanted[..index].iter().any(|other| other.device == one.device) {
                return Err(Failure::usage(format!("--attach: {} is there twice", one.device)));
            }
            if one.node.is_some() && wanted[..index].iter().any(|other| other.node == one.node) {
                return Err(Failure::usage("--attach: a node is there twice"));
            }
        }
        Ok(wanted)
    }

    /// Checks that these can be attached as it says.
    pub(crate) fn check(&self, devices: &[MapDevice]) -> Result<(), Failure> {
        self.wanted(devices).map(drop)
    }

    /// Looks whether devices can be attached here, before they are mapped. `tls`: NBD clients must encrypt.
    pub(crate) fn prepare(&self, devices: &[MapDevice], tls: bool) -> Result<Attachments, Failure> {
        let wanted = self.wanted(devices)?;
        if tls && !wanted.is_empty() {
            return Err(Failure::usage(
                "--attach: the kernel's NBD can't do TLS, so not with --tls require",
            ));
        }
        let kernel = match wanted.is_empty() {
            true => None,
            false => Some(Kernel::find().map_err(|e| Failure::failed(format!("--attach: {e}")))?),
        };
        Ok(Attachments {
            wanted,
            kernel,
            attached: Vec::new(),
            warned: false,
        })
    }
}

/// `DEVICE=NODE` of one of the devices: both may have signs of equality in them.
fn of_device(text: &str, devices: &[MapDevice]) -> Result<Wanted, Failure> {
    let named = devices.iter().filter_map(|device| {
        let rest = text.strip_prefix(device.name.as_str())?.strip_prefix('=')?;
        Some((device, node(rest)?))
    });
    match named.max_by_key(|(device, _)| device.name.len()) {
        Some((device, node)) => Ok(Wanted {
            device: device.name.clone(),
            node,
        }),
        None => Err(Failure::usage(format!(
            "--attach {text}: it is {FREE}, /dev/nbdN, or of one of several devices DEVICE={FREE} or DEVICE=/dev/nbdN"
        ))),
    }
}

/// Task that has connected a device, as the kernel says; `None` while it is not connected.
fn owner(node: u32) -> Option<String> {
    fs::read_to_string(format!("/sys/block/nbd{node}/pid")).ok()
}

/// A block device of the kernel that is one of the mapping's.
#[derive(Debug)]
struct Attached {
    device: String,
    node: u32,
    /// Task that the kernel names as its owner: the thread that has connected it, by its number on the host.
    owner: Option<String>,
}

impl Attached {
    fn path(&self) -> String {
        format!("/dev/nbd{}", self.node)
    }

    fn new(device: String, node: u32) -> Self {
        let owner = owner(node);
        Self { device, node, owner }
    }

    /// Whether it is still ours: somebody may have disconnected it, and connected another.
    fn is_ours(&self) -> bool {
        owner(self.node) == self.owner
    }

    /// Has the kernel write back what it holds of the device.
    ///
    /// # Errors
    /// EBUSY if it is mounted, or is part of another device; what the writes meet.
    fn sync(&self) -> io::Result<()> {
        // On a block device O_EXCL alone means: unless somebody else claims it.
        let claimed = File::options()
            .read(true)
            .custom_flags(libc::O_EXCL)
            .open(self.path())?;
        claimed.sync_all()
    }

    /// Returns the mount points, for messages.
    fn mounts(&self) -> String {
        let table = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let path = self.path();
        let of = |line: &str| {
            let mut fields = line.split(' ');
            // Its partitions, too.
            let source = fields.next()?.strip_prefix(&path)?;
            let rest = source.strip_prefix('p').unwrap_or(source);
            let matches = rest.bytes().all(|b| b.is_ascii_digit()) && (source.is_empty() || source.starts_with('p'));
            matches.then(|| fields.next())?.map(str::to_owned)
        };
        let points: Vec<String> = table.lines().filter_map(of).collect();
        match points.is_empty() {
            true => "in use".to_owned(),
            false => format!("mounted at {}", points.join(", ")),
        }
    }
}

/// Devices of a mapping that the kernel has, or is to get. They are detached when this is dropped.
#[derive(Debug)]
pub(crate) struct Attachments {
    wanted: Vec<Wanted>,
    kernel: Option<Kernel>,
    attached: Vec<Attached>,
    /// The user knows that a device is in use.
    warned: bool,
}

impl Attachments {
    /// A device is open: attaches it if that is wanted.
    pub(crate) fn mapped(
        &mut self,
        reporter: &Reporter,
        mapping: &Mapping,
        (device, geometry): (&MapDevice, &Geometry),
    ) -> Result<(), Failure> {
        let Some(at) = self.wanted.iter().position(|wanted| wanted.device == device.name) else {
            return Ok(());
        };
        let Wanted { device, node } = self.wanted.remove(at);
        let failed = |e: String| Failure::failed(format!("can't attach {device}: {e}"));
        let Some(kernel) = &mut self.kernel else { return Ok(()) };
        let (socket, export) = connect(mapping, &device).map_err(|e| failed(e.to_string()))?;
        let connected = kernel.connect(node, &socket, export, geometry.logical_block_size);
        // The kernel has the socket now.
        drop(socket);
        let attached = Attached::new(device.clone(), connected.map_err(failed)?);
        let path = attached.path();
        let missing = !fs::exists(&path).unwrap_or(false);
        let number = attached.node;
        self.attached.push(attached);
        if missing {
            return Err(Failure::failed(format!(
                "{device} is attached, but there is no {path} here: `mknod {path} b 43 N` makes it, with N as in /sys/block/nbd{number}/dev"
            )));
        }
        reporter.event(&Event::Attached { device, node: path })
    }

    /// Follows an event of the mapping: a node gets its device's new size.
    pub(crate) fn follow(&mut self, reporter: &Reporter, event: &Event) -> Result<(), Failure> {
        match event {
            Event::Resized { device, bytes, .. } => {
                let found = self.attached.iter().find(|a| a.device == *device && a.is_ours());
                if let (Some(attached), Some(kernel)) = (found, &mut self.kernel)
                    && let Err(e) = kernel.resize(attached.node, *bytes)
                {
                    tracing::warn!("{} keeps its old size: {e}", attached.path());
                }
                Ok(())
            }
            Event::Unmapped { device, .. } => {
                let at = self.attached.iter().position(|attached| attached.device == *device);
                at.map_or(Ok(()), |at| self.detach(reporter, at))
            }
            _ => Ok(()),
        }
    }

    /// Detaches all devices, before the mapping ends. Returns whether it may: not while one is in use, of which the user is told once.
    pub(crate) fn release(&mut self, reporter: &Reporter) -> Result<bool, Failure> {
        for attached in &self.attached {
            match attached.sync() {
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {
                    if !core::mem::replace(&mut self.warned, true) {
                        tracing::warn!(
                            "{} is {}: it exits once that is unmounted; a second signal ends it at once, and the data that is not \
                             written yet is lost",
                            attached.path(),
                            attached.mounts()
                        );
                    }
                    return Ok(false);
                }
                Err(e) if attached.is_ours() => tracing::warn!("{} could not be written back: {e}", attached.path()),
                Ok(()) | Err(_) => {}
            }
        }
        while !self.attached.is_empty() {
            self.detach(reporter, 0)?;
        }
        Ok(true)
    }

    fn detach(&mut self, reporter: &Reporter, at: usize) -> Result<(), Failure> {
        let attached = self.attached.remove(at);
        self.disconnect(&attached);
        let (node, device) = (attached.path(), attached.device);
        reporter.event(&Event::Detached { device, node })
    }

    fn disconnect(&mut self, attached: &Attached) {
        if let Some(kernel) = self.kernel.as_mut().filter(|_| attached.is_ours())
            && let Err(e) = kernel.disconnect(attached.node)
        {
            tracing::warn!("{} could not be detached: {e}", attached.path());
        }
    }
}

impl Drop for Attachments {
    fn drop(&mut self) {
        for attached in core::mem::take(&mut self.attached) {
            self.disconnect(&attached);
        }
    }
}

/// Connects to the mapping, and chooses a device.
fn connect(mapping: &Mapping, device: &str) -> io::Result<(UnixStream, Export)> {
    let (mut ours, theirs) = UnixStream::pair()?;
    ours.set_read_timeout(Some(TIMEOUT))?;
    ours.set_write_timeout(Some(TIMEOUT))?;
    mapping.connect(theirs)?;
    let export = handshake::choose(&mut ours, device)?;
    // The kernel waits for as long as a request takes.
    ours.set_read_timeout(None)?;
    ours.set_write_timeout(None)?;
    Ok((ours, export))
}

#[cfg(test)]
mod tests {
    use rnbd::proto::AccessMode;

    use super::*;

    fn wanted(args: &[&str], devices: &[&str]) -> Option<Vec<(String, Option<u32>)>> {
        let device = |name: &&str| MapDevice {
            name: (*name).to_owned(),
            mode: AccessMode::ReadWrite,
        };
        let devices: Vec<_> = devices.iter().map(device).collect();
        let attach = args.iter().map(|arg| (*arg).to_owned()).collect();
        let wanted = AttachArgs { attach }.wanted(&devices).ok()?;
        Some(wanted.into_iter().map(|w| (w.device, w.node)).collect())
    }

    #[test]
    fn devices_have_a_node_that_is_named_or_free() {
        let want =
            |all: &[(&str, Option<u32>)]| Some(all.iter().map(|(d, n)| ((*d).to_owned(), *n)).collect::<Vec<_>>());
        for (args, devices, expected) in [
            (&["auto"][..], &["disk"][..], want(&[("disk", None)])),
            (&["/dev/nbd7"], &["disk"], want(&[("disk", Some(7))])),
            (&["auto"], &["a", "b"], want(&[("a", None), ("b", None)])),
            (
                &["b=/dev/nbd2", "auto"],
                &["a", "b"],
                want(&[("b", Some(2)), ("a", None)]),
            ),
            (&["a=b=auto"], &["a", "a=b"], want(&[("a=b", None)])),
            (&["/dev/nbd7"], &["a", "b"], None),
            (&["c=auto"], &["a", "b"], None),
            (&["/dev/sda"], &["disk"], None),
            (&["/dev/nbd"], &["disk"], None),
            (&["a=/dev/nbd1", "b=/dev/nbd1"], &["a", "b"], None),
            (&["a=auto", "a=auto"], &["a", "b"], None),
            (&[], &["disk"], want(&[])),
        ] {
            assert_eq!(wanted(args, devices), expected, "{args:?} of {devices:?}");
        }
    }

    #[test]
    fn a_device_that_another_has_connected_is_not_ours() {
        // No kernel has so many.
        let mut attached = Attached::new("disk".into(), 4_000_000);
        assert!(attached.is_ours(), "where nothing can be said");
        assert_eq!(attached.mounts(), "in use");
        attached.owner = Some("1\n".into());
        assert!(!attached.is_ours());
    }
}
