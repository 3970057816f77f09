//! Front ends of devices: NBD clients and virtual machines.

use rnbd::{block::Completion, client::output::DeviceKey, nbd::RequestPart};
use roce_verbs::Instant;

/// The front end's part of a request, which lies in RTRS's in-flight table until the request has ended.
#[derive(Debug)]
pub(crate) enum Part {
    /// An NBD client, by its index, and its request.
    Nbd(usize, RequestPart),
    /// A virtual machine, by its index, and its request.
    Vhost(usize, usize),
    /// The final flush of a device.
    Flush(DeviceKey),
}

/// User of devices that submits requests, and calls a `Backend` with their results.
pub(crate) trait FrontEnd<Backend: ?Sized> {
    /// Its part of a request.
    type Request;

    /// Completes a request.
    fn complete(&mut self, now: Instant, request: Self::Request, completion: Completion, backend: &mut Backend);
}
