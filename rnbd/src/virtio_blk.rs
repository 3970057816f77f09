//! The virtio block device (VIRTIO 1.2, 5.2) in front of a [block device](crate::block): its features, its configuration space, and
//! what a driver's requests mean. Where the bytes lie is no matter of this module.

use crate::{
    block::{BlockOp, Geometry},
    errno::Errno,
    proto::SECTOR,
};

/// Segments of data in a request at most (`seg_max`): with header and status they fill a queue of 128 descriptors.
pub const SEG_MAX: u32 = 126;
/// Ranges in a discard, or in a request for zeroes, at most.
pub const MAX_RANGES: usize = 16;
/// Bytes of a request's header.
pub const HEADER: usize = 16;
/// Bytes of a range in a discard or a request for zeroes.
pub const RANGE: usize = 16;
/// Bytes of the identification.
pub const ID: usize = 20;
/// Bytes of the configuration space that mean something to us.
pub const CONFIG: usize = 60;
/// Offset in the configuration space at which the driver chooses write-back (1) or write-through (0).
pub const WRITEBACK: usize = 32;

/// Sectors of a request for zeroes where the server has none, and data is written instead.
const ZEROES_AS_DATA: u32 = (32 << 20) / 512;

/// Feature bits (5.2.3, and 6 of the specification).
pub mod feature {
    /// `seg_max` in the configuration space holds.
    pub const SEG_MAX: u64 = 1 << 2;
    /// The device is read-only.
    pub const RO: u64 = 1 << 5;
    /// `blk_size` holds.
    pub const BLK_SIZE: u64 = 1 << 6;
    /// There is a cache, and a command to flush it.
    pub const FLUSH: u64 = 1 << 9;
    /// Physical block size and the like hold.
    pub const TOPOLOGY: u64 = 1 << 10;
    /// The driver may choose between write-back and write-through.
    pub const CONFIG_WCE: u64 = 1 << 11;
    /// Several queues.
    pub const MQ: u64 = 1 << 12;
    /// Discards.
    pub const DISCARD: u64 = 1 << 13;
    /// Ranges of zeroes.
    pub const WRITE_ZEROES: u64 = 1 << 14;
    /// Descriptors may name tables of descriptors.
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// Either side says from which index on it wants to be notified.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// VIRTIO 1.
    pub const VERSION_1: u64 = 1 << 32;
}

/// The features of a device.
pub fn features(geometry: &Geometry) -> u64 {
    use feature::{
        BLK_SIZE, CONFIG_WCE, DISCARD, EVENT_IDX, FLUSH, INDIRECT_DESC, MQ, RO, SEG_MAX, TOPOLOGY, VERSION_1,
        WRITE_ZEROES,
    };
    let mut features = SEG_MAX | BLK_SIZE | TOPOLOGY | MQ | INDIRECT_DESC | EVENT_IDX | VERSION_1;
    if geometry.write_cache {
        features |= FLUSH | CONFIG_WCE;
    }
    if geometry.read_only {
        features |= RO;
    } else {
        features |= WRITE_ZEROES;
        if geometry.max_discard > 0 {
            features |= DISCARD;
        }
    }
    features
}

/// The configuration space of a device with so many queues.
pub fn config(geometry: &Geometry, queues: u16, writeback: bool) -> [u8; CONFIG] {
    let sectors = |bytes: u64| u32::try_from(bytes / SECTOR).unwrap_or(u32::MAX);
    let block = geometry.logical_block_size.max(SECTOR as u32);
    let physical = geometry.physical_block_size.max(block);
    let unit = sectors(block.into());
    let discard = sectors(geometry.max_discard);
    let zeroes = match geometry.max_write_zeroes {
        0 => ZEROES_AS_DATA,
        bytes => sectors(bytes),
    };
    let ranges = MAX_RANGES as u32;
    let mut out = [0; CONFIG];
    let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &(geometry.size / SECTOR).to_le_bytes());
    put(12, &SEG_MAX.to_le_bytes());
    put(20, &block.to_le_bytes());
    put(24, &[(physical / block).ilog2() as u8]);
    put(26, &((physical / block).min(u16::MAX.into()) as u16).to_le_bytes());
    put(28, &(geometry.max_transfer / block).to_le_bytes());
    put(WRITEBACK, &[writeback.into()]);
    put(34, &queues.to_le_bytes());
    put(36, &discard.to_le_bytes());
    put(40, &ranges.to_le_bytes());
    put(
        44,
        &sectors(geometry.discard_granularity.into()).max(unit).to_le_bytes(),
    );
    put(48, &(zeroes / unit * unit).to_le_bytes());
    put(52, &ranges.to_le_bytes());
    // A range of zeroes may become a hole.
    put(56, &[1]);
    out
}

/// How a request ends (`VIRTIO_BLK_S_…`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// Failed.
    IoErr = 1,
    /// No such request.
    Unsupported = 2,
}

impl From<Result<(), Errno>> for Status {
    fn from(result: Result<(), Errno>) -> Self {
        match result {
            Ok(()) => Self::Ok,
            Err(Errno::EOPNOTSUPP) => Self::Unsupported,
            Err(_) => Self::IoErr,
        }
    }
}

/// Request of the driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request {
    /// One operation on the device, with as much data as the request has.
    Io {
        /// Reads and writes only.
        op: BlockOp,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Everything that was written becomes durable.
    Flush,
    /// The device's identification.
    Id,
    /// Ranges are [discarded or zeroed](Ranges).
    Ranges(Ranges),
}

/// Ranges that follow in the request's data, [`RANGE`] bytes each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ranges {
    /// How many: at least one, at most [`MAX_RANGES`].
    pub count: usize,
    /// They become zero; else they are discarded.
    pub zeroes: bool,
}

impl Request {
    /// Parses a header that has `output` bytes of data behind it to read, and room for `input` bytes, both without the status.
    ///
    /// # Errors
    /// Status to answer with at once.
    pub fn parse(header: &[u8; HEADER], output: u64, input: u64) -> Result<Self, Status> {
        let [kind, _, low, high] = words(header);
        let offset = (u64::from(high) << 32 | u64::from(low)).checked_mul(SECTOR);
        let io = |op, len: u64| {
            let fit = len > 0 && len.is_multiple_of(SECTOR);
            let offset = offset.filter(|_| fit).ok_or(Status::IoErr)?;
            Ok(Self::Io { op, offset, len })
        };
        match kind {
            0 if output == 0 => io(BlockOp::Read, input),
            1 if input == 0 => io(BlockOp::Write { fua: false }, output),
            4 => Ok(Self::Flush),
            8 if output == 0 && input >= ID as u64 => Ok(Self::Id),
            11 | 13 if input == 0 => {
                let count = (output / RANGE as u64) as usize;
                let fit = output.is_multiple_of(RANGE as u64) && (1..=MAX_RANGES).contains(&count);
                let ranges = Ranges {
                    count,
                    zeroes: kind == 13,
                };
                fit.then_some(Self::Ranges(ranges)).ok_or(Status::IoErr)
            }
            0 | 1 | 8 | 11 | 13 => Err(Status::IoErr),
            _ => Err(Status::Unsupported),
        }
    }
}

impl Ranges {
    /// Parses one of the ranges: operation, first byte, and bytes.
    ///
    /// # Errors
    /// Status to answer with at once.
    pub fn range(self, bytes: &[u8; RANGE]) -> Result<(BlockOp, u64, u64), Status> {
        let [low, high, sectors, flags] = words(bytes);
        let unmap = flags & 1 != 0;
        // Reserved flags; and that a discard unmaps goes without saying (5.2.6.2).
        if flags & !1 != 0 || (unmap && !self.zeroes) {
            return Err(Status::Unsupported);
        }
        let offset = (u64::from(high) << 32 | u64::from(low)).checked_mul(SECTOR);
        let op = match self.zeroes {
            true => BlockOp::WriteZeroes {
                fua: false,
                may_unmap: unmap,
            },
            false => BlockOp::Discard,
        };
        Ok((op, offset.ok_or(Status::IoErr)?, u64::from(sectors) * SECTOR))
    }
}

fn words(bytes: &[u8; 16]) -> [u32; 4] {
    core::array::from_fn(|i| u32::from_le_bytes([0, 1, 2, 3].map(|n| bytes[4 * i + n])))
}

/// The identification of a device of this name: as much of it as there is room for.
pub fn id(name: &str) -> [u8; ID] {
    let mut out = [0; ID];
    let bytes = name.as_bytes();
    let len = bytes.len().min(ID);
    out[..len].copy_from_slice(&bytes[..len]);
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn geometry() -> Geometry {
        Geometry {
            size: 10 << 20,
            logical_block_size: 512,
            physical_block_size: 4096,
            max_transfer: 124 << 10,
            max_discard: 1 << 20,
            discard_granularity: 8192,
            read_only: false,
            write_cache: true,
            fua: true,
            max_write_zeroes: 0,
            queue_depth: 508,
        }
    }

    fn header(kind: u32, sector: u64) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        out[..4].copy_from_slice(&kind.to_le_bytes());
        out[8..].copy_from_slice(&sector.to_le_bytes());
        out
    }

    #[test]
    fn the_configuration_space_is_that_of_the_specification() {
        let config = config(&geometry(), 4, true);
        let u32_at = |at: usize| u32::from_le_bytes(config[at..at + 4].try_into().unwrap());
        let u16_at = |at: usize| u16::from_le_bytes(config[at..at + 2].try_into().unwrap());
        assert_eq!(u64::from_le_bytes(config[..8].try_into().unwrap()), 20480, "capacity");
        assert_eq!((u32_at(8), u32_at(12)), (0, 126), "size_max, seg_max");
        assert_eq!(u32_at(20), 512, "blk_size");
        assert_eq!(
            (config[24], config[25], u16_at(26), u32_at(28)),
            (3, 0, 8, 248),
            "topology"
        );
        assert_eq!((config[32], u16_at(34)), (1, 4), "writeback, num_queues");
        assert_eq!((u32_at(36), u32_at(40), u32_at(44)), (2048, 16, 16), "discard");
        assert_eq!((u32_at(48), u32_at(52), config[56]), (65536, 16, 1), "write_zeroes");
    }

    #[test]
    fn features_follow_the_device() {
        let has = |geometry: Geometry, bit| features(&geometry) & bit != 0;
        let plain = geometry();
        for bit in [
            feature::FLUSH,
            feature::CONFIG_WCE,
            feature::DISCARD,
            feature::WRITE_ZEROES,
        ] {
            assert!(has(plain, bit), "{bit:x}");
        }
        assert!(!has(plain, feature::RO));
        let max_discard = 0;
        assert!(!has(Geometry { max_discard, ..plain }, feature::DISCARD));
        let write_cache = false;
        assert!(!has(Geometry { write_cache, ..plain }, feature::FLUSH));
        let ro = Geometry {
            read_only: true,
            ..plain
        };
        assert!(has(ro, feature::RO) && !has(ro, feature::WRITE_ZEROES) && !has(ro, feature::DISCARD));
    }

    #[test]
    fn requests_are_what_their_headers_say() {
        use BlockOp::{Read, Write};
        let io = |op, offset, len| Ok(Request::Io { op, offset, len });
        let parse = |kind, sector, output, input| Request::parse(&header(kind, sector), output, input);
        assert_eq!(parse(0, 3, 0, 1024), io(Read, 1536, 1024));
        assert_eq!(parse(1, 1, 512, 0), io(Write { fua: false }, 512, 512));
        assert_eq!(parse(4, 9, 0, 0), Ok(Request::Flush));
        assert_eq!(parse(8, 0, 0, 20), Ok(Request::Id));
        let ranges = |count, zeroes| Ok(Request::Ranges(Ranges { count, zeroes }));
        assert_eq!(parse(11, 0, 16, 0), ranges(1, false));
        assert_eq!(parse(13, 0, 256, 0), ranges(16, true));
        for (kind, sector, output, input) in [
            (0, 0, 0, 0),
            (0, 0, 0, 511),
            (0, 0, 512, 512),
            (0, u64::MAX, 0, 512),
            (1, 0, 0, 0),
            (1, 0, 512, 1),
            (8, 0, 0, 19),
            (11, 0, 0, 0),
            (11, 0, 17, 0),
            (13, 0, 272, 0),
        ] {
            assert_eq!(
                parse(kind, sector, output, input),
                Err(Status::IoErr),
                "{kind} {output} {input}"
            );
        }
        for kind in [2, 3, 5, 14, u32::MAX] {
            assert_eq!(parse(kind, 0, 0, 512), Err(Status::Unsupported));
        }
    }

    #[test]
    fn ranges_are_read_with_their_flags() {
        let range = |zeroes, sector: u64, sectors: u32, flags: u32| {
            let mut bytes = [0; RANGE];
            bytes[..8].copy_from_slice(&sector.to_le_bytes());
            bytes[8..12].copy_from_slice(&sectors.to_le_bytes());
            bytes[12..].copy_from_slice(&flags.to_le_bytes());
            Ranges { count: 1, zeroes }.range(&bytes)
        };
        let zero = |may_unmap| BlockOp::WriteZeroes { fua: false, may_unmap };
        assert_eq!(range(true, 2, 3, 1), Ok((zero(true), 1024, 1536)));
        assert_eq!(range(true, 2, 3, 0), Ok((zero(false), 1024, 1536)));
        assert_eq!(range(false, 2, 3, 0), Ok((BlockOp::Discard, 1024, 1536)));
        assert_eq!(range(false, 2, 3, 1), Err(Status::Unsupported));
        assert_eq!(range(true, 2, 3, 2), Err(Status::Unsupported));
        assert_eq!(range(true, u64::MAX, 3, 0), Err(Status::IoErr));
    }

    proptest! {
        #[test]
        fn whatever_a_driver_sends_is_an_operation_on_whole_sectors_or_an_error(
            bytes in any::<[u8; HEADER]>(), kind in 0u32..16, output in any::<u64>(), input in any::<u64>(),
        ) {
            let mut bytes = bytes;
            bytes[..4].copy_from_slice(&kind.to_le_bytes());
            if let Ok(Request::Io { offset, len, .. }) = Request::parse(&bytes, output, input) {
                prop_assert!(offset % SECTOR == 0 && len % SECTOR == 0 && len > 0);
                prop_assert!(len == output || len == input);
            }
            let ranges = Ranges { count: 1, zeroes: kind % 2 == 0 };
            if let Ok((op, offset, len)) = ranges.range(&bytes) {
                prop_assert!(offset % SECTOR == 0 && len % SECTOR == 0 && op.writes());
            }
        }
    }

    #[test]
    fn names_are_cut_to_the_room_of_an_identification() {
        assert_eq!(&id("disk")[..6], b"disk\0\0");
        assert_eq!(&id("a name of more than twenty bytes"), b"a name of more than ");
    }
}
