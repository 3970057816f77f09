//! TAP devices: an interface of a namespace whose frames go through a descriptor.

use std::{
    fs::File,
    io::{self, Read as _, Write as _},
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd},
        unix::fs::OpenOptionsExt as _,
    },
};

use crate::namespace::Namespace;

/// One, gone with this.
pub struct Tap {
    file: File,
}

impl Tap {
    /// Makes it in a namespace, as an interface of this name that is down. Reading and writing does not wait.
    ///
    /// # Errors
    /// When that is not allowed, the name is too long, or the kernel has no TAP devices.
    pub fn new(namespace: &Namespace, name: &str) -> io::Result<Self> {
        let file = namespace.within(|| {
            let file = File::options()
                .read(true)
                .write(true)
                .custom_flags(libc::O_NONBLOCK)
                .open("/dev/net/tun")?;
            attach(&file, name)?;
            Ok(file)
        })?;
        Ok(Self { file })
    }

    /// Takes the next frame that the interface has sent; its length.
    ///
    /// # Errors
    /// `WouldBlock` when there is none.
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        (&self.file).read(buffer)
    }

    /// The interface receives a frame.
    ///
    /// # Errors
    /// When it is down.
    pub fn write(&self, frame: &[u8]) -> io::Result<()> {
        (&self.file).write(frame).map(|_| ())
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn attach(file: &File, name: &str) -> io::Result<()> {
    // SAFETY: ifreq is a plain C structure, valid when zero.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays the zero at the end.
    if name.len() >= request.ifr_name.len() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{name}: too long a name"),
        ));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: the request is a whole ifreq that outlives the call, and the kernel writes no more than that.
    match unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
