//! Front ends of devices: NBD clients and virtual machines.

use rnbd::{Errno, client::output::DeviceKey, nbd::PendingKey};
use roce_verbs::Instant;
use rtrs::client::Buffer;

/// The front end's part of a request, which lies in RTRS's table of requests in flight until the request has ended.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Part {
    /// An NBD client, by its index, and its request.
    Nbd(usize, PendingKey),
    /// A virtual machine, by its index, and its request.
    Vhost(usize, usize),
    /// The final flush of a device.
    Flush(DeviceKey),
}

/// End of an operation.
#[derive(Debug)]
pub(crate) struct Completed {
    pub(crate) result: Result<(), Errno>,
    /// The operation's buffer.
    pub(crate) data: Option<Buffer>,
    /// How often the device had lost writes by then.
    pub(crate) losses: u64,
}

/// User of devices that submits operations.
pub(crate) trait FrontEnd {
    /// Names its request.
    type Request;

    /// Completes an operation of a request. Returns the buffer if it has no use for it.
    fn complete(&mut self, now: Instant, request: Self::Request, completion: Completed) -> Option<Buffer>;
}
