//! Opcode table (IBTA table 38).

use crate::wire::BTH_LEN;

/// Transport service: the top three bits of an opcode.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum Service {
    /// Reliable connection.
    Rc = 0x00,
    /// Unreliable connection.
    Uc = 0x20,
    /// Unreliable datagram.
    Ud = 0x60,
    /// Congestion notification (IBTA A17.9.3), which belongs to no service.
    Cnp = 0x80,
    /// Extended reliable connection (IBTA Annex A14).
    Xrc = 0xa0,
    /// Manufacturer-defined opcodes (IBTA table 38): ferroce's, between peers that announced them.
    Manufacturer = 0xc0,
}

/// Function of a packet, whatever its place in the message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Class {
    /// SEND, with or without immediate data or invalidation.
    Send,
    /// RDMA WRITE, with or without immediate data.
    Write,
    /// RDMA READ request.
    ReadRequest,
    /// RDMA READ response.
    ReadResponse,
    /// Acknowledgement.
    Acknowledge,
    /// Acknowledgement of an atomic operation, with the original value.
    AtomicAcknowledge,
    /// CmpSwap or FetchAdd request.
    Atomic,
    /// FLUSH request (IBTA Annex A19).
    Flush,
    /// ATOMIC WRITE request (IBTA Annex A19): 8 bytes, written at once.
    AtomicWrite,
    /// Congestion notification packet.
    Cnp,
    /// Packets that arrived beyond a gap. Payload: the expected PSN (32 bits, big-endian), then 64-bit words (little-endian), a bit for
    /// each PSN, the lowest first, from the multiple of 64 before that one on.
    SelectiveAcknowledge,
}

/// Position of a packet in its message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Position {
    /// The first of several.
    First,
    /// Neither first nor last.
    Middle,
    /// The last of several.
    Last,
    /// The only packet of the message.
    Only,
}

impl Position {
    /// First or only.
    pub const fn starts(self) -> bool {
        matches!(self, Self::First | Self::Only)
    }

    /// Last or only.
    pub const fn ends(self) -> bool {
        matches!(self, Self::Last | Self::Only)
    }
}

/// One row of the opcode table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpcodeInfo {
    /// Name in the specification.
    pub name: &'static str,
    /// Transport service.
    pub service: Service,
    /// Function.
    pub class: Class,
    /// Position in its message.
    pub position: Position,
    /// Payload may follow.
    pub payload: bool,
    /// Bytes of BTH and extended headers (a CNP's 16 reserved bytes included).
    pub header_len: usize,
    /// Offset of each extended header; 0: the packet has none.
    offsets: [u8; ExtHeader::COUNT],
}

impl OpcodeInfo {
    /// Returns whether packets have this extended header.
    #[inline]
    pub const fn has(&self, header: ExtHeader) -> bool {
        self.offsets[header as usize] != 0
    }

    const fn with(mut self, headers: &[ExtHeader]) -> Self {
        let mut i = 0;
        while i < headers.len() {
            self.offsets[headers[i] as usize] = self.header_len as u8;
            self.header_len += headers[i].len();
            i += 1;
        }
        self
    }

    /// Returns the offset of an extended header, bytes. `None` if packets have none.
    #[inline]
    pub const fn offset(&self, header: ExtHeader) -> Option<usize> {
        match self.offsets[header as usize] {
            0 => None,
            offset => Some(offset as usize),
        }
    }

    /// Returns whether queue pairs of this service accept such packets.
    pub const fn is_of(&self, service: Service) -> bool {
        let of = match self.service {
            Service::Manufacturer => Service::Rc,
            own => own,
        };
        of as u8 == service as u8
    }
}

macro_rules! prefix {
    (Rc) => {
        "RC "
    };
    (Uc) => {
        "UC "
    };
    (Ud) => {
        "UD "
    };
    (Xrc) => {
        "XRC "
    };
    ($other:ident) => {
        ""
    };
}

macro_rules! opcodes {
    ($( [$($name:ident: $service:ident),*] = $operation:literal, $text:literal, $class:ident, $pos:ident, $headers:tt, $payload:literal; )*) => {
        /// A defined opcode: an operation in a transport service.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
        #[repr(u8)]
        pub enum Opcode {
            $($(
                #[doc = concat!(prefix!($service), $text, ".")]
                $name = Service::$service as u8 | $operation,
            )*)*
        }

        impl Opcode {
            /// Every opcode, ascending.
            pub const ALL: &'static [Self] = &{
                let mut all = [$($(Self::$name),*),*];
                let (mut count, mut byte) = (0, 0);
                while count < all.len() {
                    if let Some(opcode) = BY_BYTE[byte] {
                        all[count] = opcode;
                        count += 1;
                    }
                    byte += 1;
                }
                all
            };
        }

        /// The opcodes by their codes.
        static BY_BYTE: [Option<Opcode>; 256] = {
            let mut all = [None; 256];
            $($( all[Opcode::$name as usize] = Some(Opcode::$name); )*)*
            all
        };

        /// The rows by their opcodes' codes; those of no opcode are never looked at.
        static ROWS: [OpcodeInfo; 256] = {
            use ExtHeader::*;
            let mut all = [row("", Service::Manufacturer, Class::Cnp, Position::Only, &[], false); 256];
            $($(
                let name = concat!(prefix!($service), $text);
                all[Opcode::$name as usize] = row(name, Service::$service, Class::$class, Position::$pos, &$headers, $payload);
            )*)*
            all
        };
    };
}

/// Extended header behind the BTH.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExtHeader {
    /// Datagram header.
    Deth,
    /// Extended reliable connection header.
    Xrceth,
    /// FLUSH header.
    Feth,
    /// RDMA header.
    Reth,
    /// Atomic header.
    AtomicEth,
    /// ACK header.
    Aeth,
    /// Original value of an atomic operation.
    AtomicAckEth,
    /// Immediate data.
    Imm,
    /// Key to invalidate.
    Ieth,
    /// Reserved bytes of a CNP.
    CnpReserved,
}

impl ExtHeader {
    const COUNT: usize = Self::CnpReserved as usize + 1;

    /// All.
    pub const ALL: [Self; Self::COUNT] = [
        Self::Deth,
        Self::Xrceth,
        Self::Feth,
        Self::Reth,
        Self::AtomicEth,
        Self::Aeth,
        Self::AtomicAckEth,
        Self::Imm,
        Self::Ieth,
        Self::CnpReserved,
    ];

    /// Returns the bytes on the wire.
    #[allow(clippy::len_without_is_empty)]
    pub const fn len(self) -> usize {
        match self {
            Self::Xrceth | Self::Feth | Self::Aeth | Self::Imm | Self::Ieth => 4,
            Self::Deth | Self::AtomicAckEth => 8,
            Self::Reth | Self::CnpReserved => 16,
            Self::AtomicEth => 28,
        }
    }
}

const fn row(
    name: &'static str,
    service: Service,
    class: Class,
    position: Position,
    headers: &[ExtHeader],
    payload: bool,
) -> OpcodeInfo {
    let info = OpcodeInfo {
        name,
        service,
        class,
        position,
        payload,
        header_len: BTH_LEN,
        offsets: [0; ExtHeader::COUNT],
    };
    let of_service: &[ExtHeader] = match (service, class) {
        (Service::Ud, _) => &[ExtHeader::Deth],
        // Responses concern no shared receive queue.
        (Service::Xrc, Class::ReadResponse | Class::Acknowledge | Class::AtomicAcknowledge) => &[],
        (Service::Xrc, _) => &[ExtHeader::Xrceth],
        _ => &[],
    };
    info.with(of_service).with(headers)
}

// An operation in each service that has it: opcodes, code without the service's bits, name, function, position, headers behind
// those of the service, and whether payload may follow.
opcodes! {
    [RcSendFirst: Rc, UcSendFirst: Uc, XrcSendFirst: Xrc] = 0x00, "Send First", Send, First, [], true;
    [RcSendMiddle: Rc, UcSendMiddle: Uc, XrcSendMiddle: Xrc] = 0x01, "Send Middle", Send, Middle, [], true;
    [RcSendLast: Rc, UcSendLast: Uc, XrcSendLast: Xrc] = 0x02, "Send Last", Send, Last, [], true;
    [RcSendLastImm: Rc, UcSendLastImm: Uc, XrcSendLastImm: Xrc] = 0x03, "Send Last with Immediate", Send, Last, [Imm], true;
    [RcSendOnly: Rc, UcSendOnly: Uc, UdSendOnly: Ud, XrcSendOnly: Xrc] = 0x04, "Send Only", Send, Only, [], true;
    [RcSendOnlyImm: Rc, UcSendOnlyImm: Uc, UdSendOnlyImm: Ud, XrcSendOnlyImm: Xrc] = 0x05, "Send Only with Immediate", Send, Only, [Imm], true;
    [RcWriteFirst: Rc, UcWriteFirst: Uc, XrcWriteFirst: Xrc] = 0x06, "RDMA Write First", Write, First, [Reth], true;
    [RcWriteMiddle: Rc, UcWriteMiddle: Uc, XrcWriteMiddle: Xrc] = 0x07, "RDMA Write Middle", Write, Middle, [], true;
    [RcWriteLast: Rc, UcWriteLast: Uc, XrcWriteLast: Xrc] = 0x08, "RDMA Write Last", Write, Last, [], true;
    [RcWriteLastImm: Rc, UcWriteLastImm: Uc, XrcWriteLastImm: Xrc] = 0x09, "RDMA Write Last with Immediate", Write, Last, [Imm], true;
    [RcWriteOnly: Rc, UcWriteOnly: Uc, XrcWriteOnly: Xrc] = 0x0a, "RDMA Write Only", Write, Only, [Reth], true;
    [RcWriteOnlyImm: Rc, UcWriteOnlyImm: Uc, XrcWriteOnlyImm: Xrc] = 0x0b, "RDMA Write Only with Immediate", Write, Only, [Reth, Imm], true;
    [RcReadRequest: Rc, XrcReadRequest: Xrc] = 0x0c, "RDMA Read Request", ReadRequest, Only, [Reth], false;
    [RcReadResponseFirst: Rc, XrcReadResponseFirst: Xrc] = 0x0d, "RDMA Read Response First", ReadResponse, First, [Aeth], true;
    [RcReadResponseMiddle: Rc, XrcReadResponseMiddle: Xrc] = 0x0e, "RDMA Read Response Middle", ReadResponse, Middle, [], true;
    [RcReadResponseLast: Rc, XrcReadResponseLast: Xrc] = 0x0f, "RDMA Read Response Last", ReadResponse, Last, [Aeth], true;
    [RcReadResponseOnly: Rc, XrcReadResponseOnly: Xrc] = 0x10, "RDMA Read Response Only", ReadResponse, Only, [Aeth], true;
    [RcAcknowledge: Rc, XrcAcknowledge: Xrc] = 0x11, "Acknowledge", Acknowledge, Only, [Aeth], false;
    [RcAtomicAcknowledge: Rc, XrcAtomicAcknowledge: Xrc] = 0x12, "Atomic Acknowledge", AtomicAcknowledge, Only, [Aeth, AtomicAckEth], false;
    [RcCompareSwap: Rc, XrcCompareSwap: Xrc] = 0x13, "Compare and Swap", Atomic, Only, [AtomicEth], false;
    [RcFetchAdd: Rc, XrcFetchAdd: Xrc] = 0x14, "Fetch and Add", Atomic, Only, [AtomicEth], false;
    [RcSendLastInv: Rc, XrcSendLastInv: Xrc] = 0x16, "Send Last with Invalidate", Send, Last, [Ieth], true;
    [RcSendOnlyInv: Rc, XrcSendOnlyInv: Xrc] = 0x17, "Send Only with Invalidate", Send, Only, [Ieth], true;
    [RcFlush: Rc, XrcFlush: Xrc] = 0x1c, "Flush", Flush, Only, [Feth, Reth], false;
    [RcAtomicWrite: Rc, XrcAtomicWrite: Xrc] = 0x1d, "Atomic Write", AtomicWrite, Only, [Reth], true;
    [Cnp: Cnp] = 0x01, "CNP", Cnp, Only, [CnpReserved], false;
    [SelectiveAck: Manufacturer] = 0x00, "Selective Acknowledge (ferroce)", SelectiveAcknowledge, Only, [Aeth], true;
}

impl Opcode {
    /// The opcode with this code, or `None`.
    #[inline]
    pub const fn from_byte(byte: u8) -> Option<Self> {
        BY_BYTE[byte as usize]
    }

    /// The opcode's row of the table.
    #[inline]
    pub const fn info(self) -> &'static OpcodeInfo {
        &ROWS[self as usize]
    }

    /// Returns the same operation in another transport service, or `None` if that does not have it.
    pub const fn in_service(self, service: Service) -> Option<Self> {
        Self::from_byte(service as u8 | (self as u8 & 0x1f))
    }
}

impl core::fmt::Display for Opcode {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.info().name)
    }
}
