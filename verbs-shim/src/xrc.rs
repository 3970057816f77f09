//! Domains of extended reliable connections.

use std::{collections::hash_map::Entry, os::fd::BorrowedFd, sync::Arc};

use libc::c_int;

use crate::{
    abi::{ibv_context, ibv_xrcd, ibv_xrcd_init_attr, xrcd_init},
    core::{Context, Core},
    engine::Engine,
    live::{self, Object as _},
    pd::Users,
    ret::{self, Errno, Result},
};

/// An XRC domain.
#[repr(C)]
pub(crate) struct Xrcd {
    abi: ibv_xrcd,
    pub(crate) core: Arc<Core>,
    pub(crate) inner: roce::Xrcd,
    pub(crate) users: Users,
    /// The file that it was opened by: device and inode.
    file: Option<(u64, u64)>,
}

live::object!(Xrcd, "XRC domain", ibv_xrcd, |xrcd| (*xrcd).context, 0);

fn inode(fd: c_int) -> Result<(u64, u64)> {
    // SAFETY: the program's descriptor, for the time of this call.
    let stat = rustix::fs::fstat(unsafe { BorrowedFd::borrow_raw(fd) })?;
    Ok((stat.st_dev, stat.st_ino))
}

/// The domain of a file, within this process (`ib_uverbs_open_xrcd`).
fn shared(engine: &Engine, file: (u64, u64), flags: c_int) -> Result<roce::Xrcd> {
    let mut objects = engine.objects();
    if let Some((xrcd, count)) = objects.xrcds.get_mut(&file) {
        if flags & libc::O_EXCL != 0 {
            return Err(Errno::INVAL.because("O_EXCL, and the file has an XRC domain"));
        }
        *count += 1;
        return Ok(xrcd.clone());
    }
    if flags & libc::O_CREAT == 0 {
        return Err(Errno::AGAIN);
    }
    let xrcd = engine.device.open_xrcd()?;
    objects.xrcds.insert(file, (xrcd.clone(), 1));
    Ok(xrcd)
}

/// Both must be given.
const INIT_MASK: u32 = xrcd_init::FD | xrcd_init::OFLAGS;

pub(crate) unsafe extern "C" fn open_xrcd(context: *mut ibv_context, attr: *mut ibv_xrcd_init_attr) -> *mut ibv_xrcd {
    ret::pointer(|| {
        // SAFETY: the program passes an open context and attributes.
        let (core, attr) = unsafe { (Context::of(context)?.core(), attr.read_unaligned()) };
        if attr.comp_mask != INIT_MASK || attr.oflags & !(libc::O_CREAT | libc::O_EXCL) != 0 {
            return Err(Errno::INVAL.because("comp_mask needs fd and oflags, and oflags may be O_CREAT and O_EXCL"));
        }
        let engine = core.engine()?;
        let file = (attr.fd != -1).then(|| inode(attr.fd)).transpose()?;
        let inner = match file {
            Some(file) => shared(engine, file, attr.oflags)?,
            None => engine.device.open_xrcd()?,
        };
        let xrcd = Xrcd {
            abi: ibv_xrcd { context },
            core: core.clone(),
            inner,
            users: Users::default(),
            file,
        };
        xrcd.publish()
    })
}

pub(crate) unsafe extern "C" fn close_xrcd(xrcd: *mut ibv_xrcd) -> c_int {
    let end = |this: &Xrcd| {
        this.users.none("queue pairs or SRQs of the XRC domain exist")?;
        let mut objects = this.core.engine()?.objects();
        if let Some(file) = this.file
            && let Entry::Occupied(mut shared) = objects.xrcds.entry(file)
        {
            shared.get_mut().1 -= 1;
            if shared.get().1 == 0 {
                shared.remove();
            }
        }
        Ok(())
    };
    ret::code(|| Xrcd::destroy(xrcd, end))
}
