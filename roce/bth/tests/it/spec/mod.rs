//! The specification's tables typed in a second time, in another form than the crate's, to compare with.

use proptest::prelude::*;
use roce_bth::{
    Aeth, AtomicEth, Bth, Class, Deth, Feth, Header, Msn, Opcode, PKey, Placement, Position, Psn, QKey, Qpn, RKey,
    Reth, Selectivity, Service, Srqn, Syndrome, XrcEth,
};

/// One line of IBTA table 38.
pub(crate) struct Row {
    pub(crate) code: u8,
    pub(crate) class: Class,
    pub(crate) position: Position,
    /// Extended headers in wire order: `x`RCETH, `d`ETH, `f`ETH, `r`ETH, `t` AtomicETH, `a`ETH, `k` AtomicAckETH, `i`mmediate, `v` IETH,
    /// `n` the CNP's reserved bytes.
    pub(crate) headers: &'static str,
    pub(crate) payload: bool,
}

pub(crate) fn table() -> Vec<Row> {
    use Class::{
        Acknowledge, Atomic, AtomicAcknowledge, AtomicWrite, Cnp, Flush, ReadRequest, ReadResponse,
        SelectiveAcknowledge, Send, Write,
    };
    use Position::{First, Last, Middle, Only};
    let connected = [
        (0x00, Send, First, "", true),
        (0x01, Send, Middle, "", true),
        (0x02, Send, Last, "", true),
        (0x03, Send, Last, "i", true),
        (0x04, Send, Only, "", true),
        (0x05, Send, Only, "i", true),
        (0x06, Write, First, "r", true),
        (0x07, Write, Middle, "", true),
        (0x08, Write, Last, "", true),
        (0x09, Write, Last, "i", true),
        (0x0a, Write, Only, "r", true),
        (0x0b, Write, Only, "ri", true),
    ];
    let reliable = [
        (0x0c, ReadRequest, Only, "r", false),
        (0x0d, ReadResponse, First, "a", true),
        (0x0e, ReadResponse, Middle, "", true),
        (0x0f, ReadResponse, Last, "a", true),
        (0x10, ReadResponse, Only, "a", true),
        (0x11, Acknowledge, Only, "a", false),
        (0x12, AtomicAcknowledge, Only, "ak", false),
        (0x13, Atomic, Only, "t", false),
        (0x14, Atomic, Only, "t", false),
        (0x16, Send, Last, "v", true),
        (0x17, Send, Only, "v", true),
        (0x1c, Flush, Only, "fr", false),
        (0x1d, AtomicWrite, Only, "r", true),
    ];
    // XRC has what RC has; its requests name a shared receive queue.
    let extended = [
        (0xa0, Send, First, "x", true),
        (0xa1, Send, Middle, "x", true),
        (0xa2, Send, Last, "x", true),
        (0xa3, Send, Last, "xi", true),
        (0xa4, Send, Only, "x", true),
        (0xa5, Send, Only, "xi", true),
        (0xa6, Write, First, "xr", true),
        (0xa7, Write, Middle, "x", true),
        (0xa8, Write, Last, "x", true),
        (0xa9, Write, Last, "xi", true),
        (0xaa, Write, Only, "xr", true),
        (0xab, Write, Only, "xri", true),
        (0xac, ReadRequest, Only, "xr", false),
        (0xad, ReadResponse, First, "a", true),
        (0xae, ReadResponse, Middle, "", true),
        (0xaf, ReadResponse, Last, "a", true),
        (0xb0, ReadResponse, Only, "a", true),
        (0xb1, Acknowledge, Only, "a", false),
        (0xb2, AtomicAcknowledge, Only, "ak", false),
        (0xb3, Atomic, Only, "xt", false),
        (0xb4, Atomic, Only, "xt", false),
        (0xb6, Send, Last, "xv", true),
        (0xb7, Send, Only, "xv", true),
        (0xbc, Flush, Only, "xfr", false),
        (0xbd, AtomicWrite, Only, "xr", true),
    ];
    let others = [
        (0x64, Send, Only, "d", true),
        (0x65, Send, Only, "di", true),
        (0x81, Cnp, Only, "n", false),
        // Of those that the specification leaves to manufacturers, ours.
        (0xc0, SelectiveAcknowledge, Only, "a", true),
    ];
    let unreliable =
        connected.map(|(code, class, position, headers, payload)| (code | 0x20, class, position, headers, payload));
    connected
        .into_iter()
        .chain(reliable)
        .chain(unreliable)
        .chain(extended)
        .chain(others)
        .map(|(code, class, position, headers, payload)| Row {
            code,
            class,
            position,
            headers,
            payload,
        })
        .collect()
}

pub(crate) fn service(code: u8) -> Service {
    match code >> 5 {
        0 => Service::Rc,
        1 => Service::Uc,
        3 => Service::Ud,
        5 => Service::Xrc,
        6 => Service::Manufacturer,
        _ => Service::Cnp,
    }
}

pub(crate) fn row(code: u8) -> Option<Row> {
    table().into_iter().find(|r| r.code == code)
}

pub(crate) fn part_len(part: char) -> usize {
    match part {
        'd' | 'k' => 8,
        'r' | 'n' => 16,
        't' => 28,
        'a' | 'i' | 'v' | 'x' | 'f' => 4,
        _ => unreachable!("{part}"),
    }
}

impl Row {
    pub(crate) fn header_len(&self) -> usize {
        12 + self.headers.chars().map(part_len).sum::<usize>()
    }

    /// Returns the offset of an extended header.
    pub(crate) fn offset(&self, part: char) -> Option<usize> {
        let before = self.headers.split_once(part)?.0;
        Some(12 + before.chars().map(part_len).sum::<usize>())
    }
}

/// A field of a header: where it stands and how it is set and read.
pub(crate) struct Field {
    pub(crate) name: &'static str,
    /// `b` for the BTH, else as in [`Row::headers`].
    pub(crate) part: char,
    /// From the part's first bit.
    pub(crate) first_bit: usize,
    pub(crate) bits: usize,
    pub(crate) set: fn(&mut Header, u64),
    pub(crate) get: fn(&Header) -> u64,
}

macro_rules! field {
    ($name:literal, $part:literal, $first:literal, $bits:literal, |$h:ident, $v:ident| $set:expr, $get:expr) => {
        Field {
            name: $name,
            part: $part,
            first_bit: $first,
            bits: $bits,
            set: |$h, $v| $set,
            get: |$h| $get,
        }
    };
}

/// Every field but the opcode (which decides on the others) and the version (which must be 0), IBTA 9.2 and 9.3.
pub(crate) fn fields() -> Vec<Field> {
    fn d(h: &mut Header) -> &mut Deth {
        h.deth.get_or_insert_default()
    }
    fn r(h: &mut Header) -> &mut Reth {
        h.reth.get_or_insert_default()
    }
    fn f(h: &mut Header) -> &mut Feth {
        h.feth.get_or_insert_default()
    }
    fn x(h: &mut Header) -> &mut XrcEth {
        h.xrceth.get_or_insert_default()
    }
    fn t(h: &mut Header) -> &mut AtomicEth {
        h.atomic_eth.get_or_insert_default()
    }
    fn a(h: &mut Header) -> &mut Aeth {
        h.aeth.get_or_insert(Aeth {
            syndrome: Syndrome::from_byte(0),
            msn: Msn::new(0),
        })
    }
    vec![
        field!(
            "solicited",
            'b',
            8,
            1,
            |h, v| h.bth.solicited = v != 0,
            u64::from(h.bth.solicited)
        ),
        field!(
            "migreq",
            'b',
            9,
            1,
            |h, v| h.bth.migreq = v != 0,
            u64::from(h.bth.migreq)
        ),
        field!("pad", 'b', 10, 2, |h, v| h.bth.pad = v as u8, u64::from(h.bth.pad)),
        field!(
            "pkey",
            'b',
            16,
            16,
            |h, v| h.bth.pkey = PKey(v as u16),
            u64::from(h.bth.pkey.0)
        ),
        field!("fecn", 'b', 32, 1, |h, v| h.bth.fecn = v != 0, u64::from(h.bth.fecn)),
        field!("becn", 'b', 33, 1, |h, v| h.bth.becn = v != 0, u64::from(h.bth.becn)),
        field!(
            "reserved6",
            'b',
            34,
            6,
            |h, v| h.bth.reserved6 = v as u8,
            u64::from(h.bth.reserved6)
        ),
        field!(
            "dest_qp",
            'b',
            40,
            24,
            |h, v| h.bth.dest_qp = Qpn::new(v as u32),
            u64::from(h.bth.dest_qp.value())
        ),
        field!(
            "ack_req",
            'b',
            64,
            1,
            |h, v| h.bth.ack_req = v != 0,
            u64::from(h.bth.ack_req)
        ),
        field!(
            "reserved7",
            'b',
            65,
            7,
            |h, v| h.bth.reserved7 = v as u8,
            u64::from(h.bth.reserved7)
        ),
        field!(
            "psn",
            'b',
            72,
            24,
            |h, v| h.bth.psn = Psn::new(v as u32),
            u64::from(h.bth.psn.value())
        ),
        field!(
            "deth.qkey",
            'd',
            0,
            32,
            |h, v| d(h).qkey = QKey(v as u32),
            u64::from(h.deth.unwrap().qkey.0)
        ),
        field!(
            "deth.reserved",
            'd',
            32,
            8,
            |h, v| d(h).reserved = v as u8,
            u64::from(h.deth.unwrap().reserved)
        ),
        field!(
            "deth.src_qp",
            'd',
            40,
            24,
            |h, v| d(h).src_qp = Qpn::new(v as u32),
            u64::from(h.deth.unwrap().src_qp.value())
        ),
        field!(
            "xrceth.reserved",
            'x',
            0,
            8,
            |h, v| x(h).reserved = v as u8,
            u64::from(h.xrceth.unwrap().reserved)
        ),
        field!(
            "xrceth.srqn",
            'x',
            8,
            24,
            |h, v| x(h).srqn = Srqn::new(v as u32),
            u64::from(h.xrceth.unwrap().srqn.value())
        ),
        field!(
            "feth.reserved",
            'f',
            0,
            26,
            |h, v| f(h).reserved = v as u32,
            u64::from(h.feth.unwrap().reserved)
        ),
        field!(
            "feth.selectivity",
            'f',
            26,
            2,
            |h, v| f(h).selectivity = Selectivity::from_bits(v as u8),
            u64::from(h.feth.unwrap().selectivity.bits())
        ),
        field!(
            "feth.placement",
            'f',
            28,
            4,
            |h, v| f(h).placement = Placement::from_bits_retain(v as u8 & 0xf),
            u64::from(h.feth.unwrap().placement.bits())
        ),
        field!("reth.va", 'r', 0, 64, |h, v| r(h).va = v, h.reth.unwrap().va),
        field!(
            "reth.rkey",
            'r',
            64,
            32,
            |h, v| r(h).rkey = RKey(v as u32),
            u64::from(h.reth.unwrap().rkey.0)
        ),
        field!(
            "reth.dma_len",
            'r',
            96,
            32,
            |h, v| r(h).dma_len = v as u32,
            u64::from(h.reth.unwrap().dma_len)
        ),
        field!("atomic.va", 't', 0, 64, |h, v| t(h).va = v, h.atomic_eth.unwrap().va),
        field!(
            "atomic.rkey",
            't',
            64,
            32,
            |h, v| t(h).rkey = RKey(v as u32),
            u64::from(h.atomic_eth.unwrap().rkey.0)
        ),
        field!(
            "atomic.swap_add",
            't',
            96,
            64,
            |h, v| t(h).swap_add = v,
            h.atomic_eth.unwrap().swap_add
        ),
        field!(
            "atomic.compare",
            't',
            160,
            64,
            |h, v| t(h).compare = v,
            h.atomic_eth.unwrap().compare
        ),
        field!(
            "aeth.syndrome",
            'a',
            0,
            8,
            |h, v| a(h).syndrome = Syndrome::from_byte(v as u8),
            u64::from(h.aeth.unwrap().syndrome.to_byte())
        ),
        field!(
            "aeth.msn",
            'a',
            8,
            24,
            |h, v| a(h).msn = Msn::new(v as u32),
            u64::from(h.aeth.unwrap().msn.value())
        ),
        field!(
            "atomic_ack",
            'k',
            0,
            64,
            |h, v| h.atomic_ack = Some(v),
            h.atomic_ack.unwrap()
        ),
        field!(
            "imm",
            'i',
            0,
            32,
            |h, v| h.imm = Some(v as u32),
            u64::from(h.imm.unwrap())
        ),
        field!(
            "ieth",
            'v',
            0,
            32,
            |h, v| h.ieth = Some(RKey(v as u32)),
            u64::from(h.ieth.unwrap().0)
        ),
    ]
}

pub(crate) fn any_opcode() -> impl Strategy<Value = Opcode> {
    proptest::sample::select(Opcode::ALL)
}

/// A header with every field that its opcode has set to something.
pub(crate) fn any_header() -> impl Strategy<Value = Header> {
    (any_opcode(), proptest::collection::vec(any::<u64>(), fields().len())).prop_map(|(opcode, values)| {
        let row = row(opcode as u8).unwrap();
        let mut header = Header::new(Bth::new(opcode, Qpn::new(0), Psn::new(0)));
        for (field, value) in fields().iter().zip(values) {
            if field.part == 'b' || row.headers.contains(field.part) {
                (field.set)(&mut header, value & (u64::MAX >> (64 - field.bits)));
            }
        }
        header
    })
}
