//! State behind a context, and contexts as programs know them.

use std::{
    ptr,
    sync::{Arc, OnceLock},
};

use libc::c_int;
use parking_lot::Mutex;

use crate::{
    abi::{ibv_context, verbs_context},
    device::VerbsDevice,
    engine::Engine,
    errno::{Errno, Result},
    events::AsyncEvents,
    fork, live,
    port_events::{self, PortWatch},
};

/// Completion vectors: one thread moves everything, but programs that spread queues want to see some.
pub(crate) const COMP_VECTORS: u32 = 4;

/// State shared by a context's objects.
pub(crate) struct Core {
    pub(crate) device: &'static VerbsDevice,
    pub(crate) events: Arc<AsyncEvents>,
    born: u32,
    engine: OnceLock<Arc<Engine>>,
    /// Brings the events of the port; none where the system has no netlink.
    _watch: Option<Arc<PortWatch>>,
    opening: Mutex<()>,
}

impl Core {
    /// # Errors
    /// When the process can't have another descriptor.
    pub(crate) fn new(device: &'static VerbsDevice) -> Result<Arc<Self>> {
        let events = Arc::new(AsyncEvents::new()?);
        let watch = port_events::get();
        if let Some(watch) = &watch {
            watch.add(device, &events);
        }
        Ok(Arc::new(Self {
            device,
            events,
            born: fork::generation(),
            engine: OnceLock::new(),
            _watch: watch,
            opening: Mutex::new(()),
        }))
    }

    /// Fails in a child of the process that opened it.
    pub(crate) fn alive(&self) -> Result<()> {
        fork::check(self.born)
    }

    /// Checks that an object from which another one is made is in this context's table: the kernel has a table for each.
    ///
    /// # Errors
    /// ENOENT for an object of another context.
    pub(crate) fn finds(&self, other: &Self) -> Result<()> {
        self.check(other, Errno::NOENT)
    }

    /// Checks that an object is of this context, without which it can't be used.
    ///
    /// # Errors
    /// EINVAL for an object of another context.
    pub(crate) fn same(&self, other: &Self) -> Result<()> {
        self.check(other, Errno::INVAL)
    }

    fn check(&self, other: &Self, error: Errno) -> Result<()> {
        match ptr::eq(self, other) {
            true => Ok(()),
            false => Err(error.because("the objects are of different contexts (ibv_open_device)")),
        }
    }

    /// Returns the transport if it is open.
    pub(crate) fn opened(&self) -> Option<&Arc<Engine>> {
        self.engine.get().filter(|_| self.alive().is_ok())
    }

    /// Returns the transport; opens it first if needed.
    ///
    /// # Errors
    /// When the port can't be had, or after a fork.
    pub(crate) fn engine(&self) -> Result<&Arc<Engine>> {
        self.alive()?;
        if let Some(engine) = self.engine.get() {
            return Ok(engine);
        }
        let _one = self.opening.lock();
        if self.engine.get().is_none() {
            let engine = Engine::get()?;
            engine.objects().watch(&self.events);
            let _ = self.engine.set(engine);
        }
        self.engine.get().ok_or(Errno::IO)
    }
}

/// A context as programs see it. The public part is `abi.context`.
#[repr(C)]
pub(crate) struct Context {
    abi: verbs_context,
    core: Arc<Core>,
}

live::object!(
    Context,
    "context",
    ibv_context,
    |context| (*context).device,
    0,
    inherited at std::mem::offset_of!(verbs_context, context)
);

impl Context {
    /// Makes a context of a table of verbs.
    pub(crate) fn new(mut abi: verbs_context, core: Arc<Core>, cmd_fd: c_int) -> Self {
        abi.context.device = core.device.as_abi();
        abi.context.cmd_fd = cmd_fd;
        abi.context.async_fd = core.events.fd();
        Self { abi, core }
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Descriptor in `cmd_fd`.
    pub(crate) fn cmd_fd(&self) -> c_int {
        self.abi.context.cmd_fd
    }
}
