//! Asynchronous events (`ibv_event_type`).

use roce_bth::Qpn;

/// Object of an event.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum EventSource {
    /// A completion queue, by handle.
    Cq(u32),
    /// A queue pair.
    Qp(Qpn),
    /// A shared receive queue, by handle.
    Srq(u32),
    /// The port.
    Port,
    /// The device.
    Device,
}

macro_rules! events {
    ($( $(#[$doc:meta])* $name:ident $(($of:ident: $type:ty))? = $number:literal, $source:ident; )*) => {
        /// Asynchronous event of an object, without a work request to report it.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum AsyncEvent {
            $( $(#[$doc])* $name $(($type))?, )*
        }

        impl AsyncEvent {
            /// Returns the number that it has in `ibv_event_type`, and its object.
            pub const fn describe(&self) -> (u32, EventSource) {
                match *self {
                    $( Self::$name $(($of))? => ($number, EventSource::$source $(($of))?), )*
                }
            }

            /// Returns the event with a number of `ibv_event_type`; `None` of one that RoCE does not have, or not for such an object.
            pub const fn new(number: u32, source: EventSource) -> Option<Self> {
                match (number, source) {
                    $( ($number, EventSource::$source $(($of))?) => Some(Self::$name $(($of))?), )*
                    _ => None,
                }
            }
        }
    };
}

events! {
    /// Error on a completion queue (overflow); the number is the queue's handle.
    CqError(cq: u32) = 0, Cq;
    /// The queue pair failed in a way that no completion tells.
    QpFatal(qpn: Qpn) = 1, Qp;
    /// A request that the responder had to refuse as invalid.
    QpRequestError(qpn: Qpn) = 2, Qp;
    /// A request with a local access violation.
    QpAccessError(qpn: Qpn) = 3, Qp;
    /// First packet on a queue pair in RTR.
    CommunicationEstablished(qpn: Qpn) = 4, Qp;
    /// The send queue is drained after SQD was asked for.
    SqDrained(qpn: Qpn) = 5, Qp;
    /// The last receive of a queue pair with a shared receive queue is used up.
    LastWqeReached(qpn: Qpn) = 16, Qp;
    /// The path of the queue pair migrated. RoCE has no path migration; only providers on hardware tell this.
    PathMigrated(qpn: Qpn) = 6, Qp;
    /// A path migration failed.
    PathMigrationError(qpn: Qpn) = 7, Qp;
    /// A shared receive queue failed; the number is the queue's handle.
    SrqError(srq: u32) = 14, Srq;
    /// A shared receive queue fell below its limit; the number is the queue's handle.
    SrqLimitReached(srq: u32) = 15, Srq;
    /// The device can't go on.
    DeviceFatal = 8, Device;
    /// The table of partition keys changed.
    PkeyChange = 12, Port;
    /// The port became usable.
    PortActive = 9, Port;
    /// The port went down.
    PortError = 10, Port;
    /// The table of GIDs changed.
    GidChange = 18, Port;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_known_by_its_number_and_object() {
        let qpn = Qpn::new(7);
        let sources = [
            EventSource::Cq(9),
            EventSource::Qp(qpn),
            EventSource::Srq(9),
            EventSource::Port,
            EventSource::Device,
        ];
        let all = (0..32).flat_map(|number| sources.map(|source| (number, source)));
        let known: Vec<_> = all
            .filter(|(number, source)| {
                let event = AsyncEvent::new(*number, *source);
                event
                    .inspect(|event| assert_eq!(event.describe(), (*number, *source)))
                    .is_some()
            })
            .collect();
        let numbers: Vec<u32> = known.iter().map(|(number, _)| *number).collect();
        assert_eq!(numbers, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 15, 16, 18]);
    }
}
