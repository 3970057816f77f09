//! Opcode table (IBTA table 38).

/// Transport service: the top three bits of an opcode.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Service {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// Congestion notification (IBTA A17.9.3), which belongs to no service.
    Cnp,
    /// Extended reliable connection (IBTA Annex A14).
    Xrc,
    /// Manufacturer-defined opcodes (IBTA table 38): ferroce's, between peers that announced them.
    Manufacturer,
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
    /// Packets that arrived beyond a gap.
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

    /// Returns the offset of an extended header, bytes. `None` if packets have none.
    #[inline]
    pub(crate) const fn offset(&self, header: ExtHeader) -> Option<usize> {
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

macro_rules! opcodes {
    ($( $(#[$doc:meta])* $name:ident = $value:literal, $text:literal, $service:ident, $class:ident, $pos:ident, [$($hdr:ident),*], $payload:literal; )*) => {
        /// A defined opcode.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
        #[repr(u8)]
        pub enum Opcode {
            $( $(#[$doc])* $name = $value, )*
        }

        impl Opcode {
            /// Every opcode of the table.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

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
        }

        /// The opcodes by their codes.
        static BY_BYTE: [Option<Opcode>; 256] = {
            let mut all = [None; 256];
            $( all[$value] = Some(Opcode::$name); )*
            all
        };

        /// The rows by their opcodes' codes; those of no opcode are never looked at.
        static ROWS: [OpcodeInfo; 256] = {
            let mut all = [row("", Service::Manufacturer, Class::Cnp, Position::Only, &[], false); 256];
            $( all[$value] = row($text, Service::$service, Class::$class, Position::$pos, &[$(ExtHeader::$hdr),*], $payload); )*
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

    /// Returns the bytes on the wire.
    const fn len(self) -> usize {
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
    let mut info = OpcodeInfo {
        name,
        service,
        class,
        position,
        payload,
        header_len: crate::BTH_LEN,
        offsets: [0; ExtHeader::COUNT],
    };
    let mut i = 0;
    while i < headers.len() {
        info.offsets[headers[i] as usize] = info.header_len as u8;
        info.header_len += headers[i].len();
        i += 1;
    }
    info
}

opcodes! {
    /// RC SEND First.
    RcSendFirst = 0x00, "RC Send First", Rc, Send, First, [], true;
    /// RC SEND Middle.
    RcSendMiddle = 0x01, "RC Send Middle", Rc, Send, Middle, [], true;
    /// RC SEND Last.
    RcSendLast = 0x02, "RC Send Last", Rc, Send, Last, [], true;
    /// RC SEND Last with immediate.
    RcSendLastImm = 0x03, "RC Send Last with Immediate", Rc, Send, Last, [Imm], true;
    /// RC SEND Only.
    RcSendOnly = 0x04, "RC Send Only", Rc, Send, Only, [], true;
    /// RC SEND Only with immediate.
    RcSendOnlyImm = 0x05, "RC Send Only with Immediate", Rc, Send, Only, [Imm], true;
    /// RC RDMA WRITE First.
    RcWriteFirst = 0x06, "RC RDMA Write First", Rc, Write, First, [Reth], true;
    /// RC RDMA WRITE Middle.
    RcWriteMiddle = 0x07, "RC RDMA Write Middle", Rc, Write, Middle, [], true;
    /// RC RDMA WRITE Last.
    RcWriteLast = 0x08, "RC RDMA Write Last", Rc, Write, Last, [], true;
    /// RC RDMA WRITE Last with immediate.
    RcWriteLastImm = 0x09, "RC RDMA Write Last with Immediate", Rc, Write, Last, [Imm], true;
    /// RC RDMA WRITE Only.
    RcWriteOnly = 0x0a, "RC RDMA Write Only", Rc, Write, Only, [Reth], true;
    /// RC RDMA WRITE Only with immediate.
    RcWriteOnlyImm = 0x0b, "RC RDMA Write Only with Immediate", Rc, Write, Only, [Reth, Imm], true;
    /// RC RDMA READ Request.
    RcReadRequest = 0x0c, "RC RDMA Read Request", Rc, ReadRequest, Only, [Reth], false;
    /// RC RDMA READ Response First.
    RcReadResponseFirst = 0x0d, "RC RDMA Read Response First", Rc, ReadResponse, First, [Aeth], true;
    /// RC RDMA READ Response Middle.
    RcReadResponseMiddle = 0x0e, "RC RDMA Read Response Middle", Rc, ReadResponse, Middle, [], true;
    /// RC RDMA READ Response Last.
    RcReadResponseLast = 0x0f, "RC RDMA Read Response Last", Rc, ReadResponse, Last, [Aeth], true;
    /// RC RDMA READ Response Only.
    RcReadResponseOnly = 0x10, "RC RDMA Read Response Only", Rc, ReadResponse, Only, [Aeth], true;
    /// RC Acknowledge.
    RcAcknowledge = 0x11, "RC Acknowledge", Rc, Acknowledge, Only, [Aeth], false;
    /// RC Atomic Acknowledge.
    RcAtomicAcknowledge = 0x12, "RC Atomic Acknowledge", Rc, AtomicAcknowledge, Only, [Aeth, AtomicAckEth], false;
    /// RC CmpSwap.
    RcCompareSwap = 0x13, "RC Compare and Swap", Rc, Atomic, Only, [AtomicEth], false;
    /// RC FetchAdd.
    RcFetchAdd = 0x14, "RC Fetch and Add", Rc, Atomic, Only, [AtomicEth], false;
    /// RC SEND Last with Invalidate.
    RcSendLastInv = 0x16, "RC Send Last with Invalidate", Rc, Send, Last, [Ieth], true;
    /// RC SEND Only with Invalidate.
    RcSendOnlyInv = 0x17, "RC Send Only with Invalidate", Rc, Send, Only, [Ieth], true;
    /// RC FLUSH.
    RcFlush = 0x1c, "RC Flush", Rc, Flush, Only, [Feth, Reth], false;
    /// RC ATOMIC WRITE.
    RcAtomicWrite = 0x1d, "RC Atomic Write", Rc, AtomicWrite, Only, [Reth], true;
    /// UC SEND First.
    UcSendFirst = 0x20, "UC Send First", Uc, Send, First, [], true;
    /// UC SEND Middle.
    UcSendMiddle = 0x21, "UC Send Middle", Uc, Send, Middle, [], true;
    /// UC SEND Last.
    UcSendLast = 0x22, "UC Send Last", Uc, Send, Last, [], true;
    /// UC SEND Last with immediate.
    UcSendLastImm = 0x23, "UC Send Last with Immediate", Uc, Send, Last, [Imm], true;
    /// UC SEND Only.
    UcSendOnly = 0x24, "UC Send Only", Uc, Send, Only, [], true;
    /// UC SEND Only with immediate.
    UcSendOnlyImm = 0x25, "UC Send Only with Immediate", Uc, Send, Only, [Imm], true;
    /// UC RDMA WRITE First.
    UcWriteFirst = 0x26, "UC RDMA Write First", Uc, Write, First, [Reth], true;
    /// UC RDMA WRITE Middle.
    UcWriteMiddle = 0x27, "UC RDMA Write Middle", Uc, Write, Middle, [], true;
    /// UC RDMA WRITE Last.
    UcWriteLast = 0x28, "UC RDMA Write Last", Uc, Write, Last, [], true;
    /// UC RDMA WRITE Last with immediate.
    UcWriteLastImm = 0x29, "UC RDMA Write Last with Immediate", Uc, Write, Last, [Imm], true;
    /// UC RDMA WRITE Only.
    UcWriteOnly = 0x2a, "UC RDMA Write Only", Uc, Write, Only, [Reth], true;
    /// UC RDMA WRITE Only with immediate.
    UcWriteOnlyImm = 0x2b, "UC RDMA Write Only with Immediate", Uc, Write, Only, [Reth, Imm], true;
    /// UD SEND Only.
    UdSendOnly = 0x64, "UD Send Only", Ud, Send, Only, [Deth], true;
    /// UD SEND Only with immediate.
    UdSendOnlyImm = 0x65, "UD Send Only with Immediate", Ud, Send, Only, [Deth, Imm], true;
    /// Congestion notification.
    Cnp = 0x81, "CNP", Cnp, Cnp, Only, [CnpReserved], false;
    /// XRC SEND First.
    XrcSendFirst = 0xa0, "XRC Send First", Xrc, Send, First, [Xrceth], true;
    /// XRC SEND Middle.
    XrcSendMiddle = 0xa1, "XRC Send Middle", Xrc, Send, Middle, [Xrceth], true;
    /// XRC SEND Last.
    XrcSendLast = 0xa2, "XRC Send Last", Xrc, Send, Last, [Xrceth], true;
    /// XRC SEND Last with immediate.
    XrcSendLastImm = 0xa3, "XRC Send Last with Immediate", Xrc, Send, Last, [Xrceth, Imm], true;
    /// XRC SEND Only.
    XrcSendOnly = 0xa4, "XRC Send Only", Xrc, Send, Only, [Xrceth], true;
    /// XRC SEND Only with immediate.
    XrcSendOnlyImm = 0xa5, "XRC Send Only with Immediate", Xrc, Send, Only, [Xrceth, Imm], true;
    /// XRC RDMA WRITE First.
    XrcWriteFirst = 0xa6, "XRC RDMA Write First", Xrc, Write, First, [Xrceth, Reth], true;
    /// XRC RDMA WRITE Middle.
    XrcWriteMiddle = 0xa7, "XRC RDMA Write Middle", Xrc, Write, Middle, [Xrceth], true;
    /// XRC RDMA WRITE Last.
    XrcWriteLast = 0xa8, "XRC RDMA Write Last", Xrc, Write, Last, [Xrceth], true;
    /// XRC RDMA WRITE Last with immediate.
    XrcWriteLastImm = 0xa9, "XRC RDMA Write Last with Immediate", Xrc, Write, Last, [Xrceth, Imm], true;
    /// XRC RDMA WRITE Only.
    XrcWriteOnly = 0xaa, "XRC RDMA Write Only", Xrc, Write, Only, [Xrceth, Reth], true;
    /// XRC RDMA WRITE Only with immediate.
    XrcWriteOnlyImm = 0xab, "XRC RDMA Write Only with Immediate", Xrc, Write, Only, [Xrceth, Reth, Imm], true;
    /// XRC RDMA READ Request.
    XrcReadRequest = 0xac, "XRC RDMA Read Request", Xrc, ReadRequest, Only, [Xrceth, Reth], false;
    /// XRC RDMA READ Response First.
    XrcReadResponseFirst = 0xad, "XRC RDMA Read Response First", Xrc, ReadResponse, First, [Aeth], true;
    /// XRC RDMA READ Response Middle.
    XrcReadResponseMiddle = 0xae, "XRC RDMA Read Response Middle", Xrc, ReadResponse, Middle, [], true;
    /// XRC RDMA READ Response Last.
    XrcReadResponseLast = 0xaf, "XRC RDMA Read Response Last", Xrc, ReadResponse, Last, [Aeth], true;
    /// XRC RDMA READ Response Only.
    XrcReadResponseOnly = 0xb0, "XRC RDMA Read Response Only", Xrc, ReadResponse, Only, [Aeth], true;
    /// XRC Acknowledge.
    XrcAcknowledge = 0xb1, "XRC Acknowledge", Xrc, Acknowledge, Only, [Aeth], false;
    /// XRC Atomic Acknowledge.
    XrcAtomicAcknowledge = 0xb2, "XRC Atomic Acknowledge", Xrc, AtomicAcknowledge, Only, [Aeth, AtomicAckEth], false;
    /// XRC CmpSwap.
    XrcCompareSwap = 0xb3, "XRC Compare and Swap", Xrc, Atomic, Only, [Xrceth, AtomicEth], false;
    /// XRC FetchAdd.
    XrcFetchAdd = 0xb4, "XRC Fetch and Add", Xrc, Atomic, Only, [Xrceth, AtomicEth], false;
    /// XRC SEND Last with Invalidate.
    XrcSendLastInv = 0xb6, "XRC Send Last with Invalidate", Xrc, Send, Last, [Xrceth, Ieth], true;
    /// XRC SEND Only with Invalidate.
    XrcSendOnlyInv = 0xb7, "XRC Send Only with Invalidate", Xrc, Send, Only, [Xrceth, Ieth], true;
    /// XRC FLUSH.
    XrcFlush = 0xbc, "XRC Flush", Xrc, Flush, Only, [Xrceth, Feth, Reth], false;
    /// XRC ATOMIC WRITE.
    XrcAtomicWrite = 0xbd, "XRC Atomic Write", Xrc, AtomicWrite, Only, [Xrceth, Reth], true;
    /// An acknowledgement of a reliable connection, with what has arrived beyond a gap as its payload: the expected PSN (32 bits,
    /// big-endian), then 64-bit words (little-endian), a bit for each PSN, the lowest first, from the multiple of 64 before that one on.
    SelectiveAck = 0xc0, "Selective Acknowledge (ferroce)", Manufacturer, SelectiveAcknowledge, Only, [Aeth], true;
}

impl Service {
    /// The top three bits of the service's opcodes.
    pub const fn bits(self) -> u8 {
        match self {
            Self::Rc => 0x00,
            Self::Uc => 0x20,
            Self::Ud => 0x60,
            Self::Cnp => 0x80,
            Self::Xrc => 0xa0,
            Self::Manufacturer => 0xc0,
        }
    }
}

impl Opcode {
    /// Returns the same operation in another transport service, or `None` if that does not have it.
    pub const fn in_service(self, service: Service) -> Option<Self> {
        Self::from_byte(service.bits() | (self as u8 & 0x1f))
    }
}

impl core::fmt::Display for Opcode {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.info().name)
    }
}
