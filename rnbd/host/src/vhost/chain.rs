//! A request of the guest's driver: a chain of descriptors. All of it is the guest's, and may be anything.

use rnbd::virtio_blk::{HEADER, SEG_MAX};
use virtio_queue::DescriptorChain;
use vm_memory::{Address as _, Bytes as _, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap};

/// Descriptors of a request at most: its data's, header and status, and some for a driver that cuts the header up.
const MAX_DESCRIPTORS: usize = SEG_MAX as usize + 8;

/// Bytes of a guest.
pub(crate) type Segment = (GuestAddress, u32);

/// Data of a chain, without its header and status.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Chain {
    pub(crate) head: u16,
    /// Address of its status in the guest's memory.
    pub(crate) status: GuestAddress,
    /// `None`: it has no header, or none in the guest's memory.
    pub(crate) header: Option<[u8; HEADER]>,
    /// Data of the driver's behind the header,
    pub(crate) output: Vec<Segment>,
    /// and room for ours before the status.
    pub(crate) input: Vec<Segment>,
}

impl Chain {
    /// Reads a chain. `None`: it has no place for a status, so that nothing can be said of it.
    pub(crate) fn read(descriptors: DescriptorChain<&GuestMemoryMmap>) -> Option<Self> {
        let (head, memory) = (descriptors.head_index(), descriptors.memory());
        let (mut output, mut input): (Vec<Segment>, Vec<Segment>) = (Vec::new(), Vec::new());
        for (count, descriptor) in descriptors.clone().enumerate() {
            if count >= MAX_DESCRIPTORS {
                return None;
            }
            let segment = (descriptor.addr(), descriptor.len());
            match descriptor.is_write_only() {
                _ if segment.1 == 0 => {}
                true => input.push(segment),
                // What is to be read comes first (VIRTIO 1.2, 2.7.4.2).
                false if !input.is_empty() => return None,
                false => output.push(segment),
            }
        }
        let (at, len) = input.pop()?;
        let status = at.checked_add(u64::from(len - 1))?;
        if !memory.address_in_range(status) {
            return None;
        }
        if len > 1 {
            input.push((at, len - 1));
        }
        let header = take_header(memory, &mut output);
        Some(Self {
            head,
            status,
            header,
            output,
            input,
        })
    }

    /// Bytes of its data: the driver's, and room for ours.
    pub(crate) fn lengths(&self) -> (u64, u64) {
        let sum = |segments: &[Segment]| segments.iter().map(|(_, len)| u64::from(*len)).sum();
        (sum(&self.output), sum(&self.input))
    }
}

/// Takes the header off what the driver has written.
fn take_header(memory: &GuestMemoryMmap, output: &mut Vec<Segment>) -> Option<[u8; HEADER]> {
    let mut header = [0; HEADER];
    let (mut got, mut used) = (0, 0);
    while got < HEADER {
        let (at, len) = output.get_mut(used)?;
        let n = (*len as usize).min(HEADER - got);
        memory.read_slice(&mut header[got..got + n], *at).ok()?;
        *at = at.checked_add(n as u64)?;
        (*len, got) = (*len - n as u32, got + n);
        used += usize::from(*len == 0);
    }
    output.drain(..used);
    Some(header)
}

/// Copies bytes of the driver's from the beginning of segments; `false` when there are not so many in the guest's memory.
pub(crate) fn copy_from(memory: &GuestMemoryMmap, segments: &[Segment], out: &mut [u8]) -> bool {
    let mut got = 0;
    for (at, len) in segments {
        let n = (*len as usize).min(out.len() - got);
        if memory.read_slice(&mut out[got..got + n], *at).is_err() {
            return false;
        }
        got += n;
    }
    got == out.len()
}

/// Copies bytes to the driver, to the beginning of segments; `false` when there is no room for all in the guest's memory.
pub(crate) fn copy_to(memory: &GuestMemoryMmap, segments: &[Segment], bytes: &[u8]) -> bool {
    let mut done = 0;
    for (at, len) in segments {
        let n = (*len as usize).min(bytes.len() - done);
        if memory.write_slice(&bytes[done..done + n], *at).is_err() {
            return false;
        }
        done += n;
    }
    done == bytes.len()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use virtio_queue::{
        QueueT as _,
        desc::{RawDescriptor, split::Descriptor},
        mock::MockSplitQueue,
    };

    use super::*;

    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    const INDIRECT: u16 = 4;

    fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x10000), (GuestAddress(0x20000), 0x10000)]).unwrap()
    }

    /// The first chain of a queue of 16 with these descriptors in its table: address, length, flags, next.
    fn read(memory: &GuestMemoryMmap, descriptors: &[(u64, u32, u16, u16)]) -> Option<Chain> {
        let mock = MockSplitQueue::new(memory, 16);
        for (i, (at, len, flags, next)) in descriptors.iter().enumerate() {
            let descriptor = Descriptor::new(*at, *len, *flags, *next);
            mock.desc_table()
                .store(i as u16, RawDescriptor::from(descriptor))
                .unwrap();
        }
        memory.write_obj(1u16, mock.avail_addr().unchecked_add(2)).unwrap();
        let mut queue: virtio_queue::Queue = mock.create_queue().unwrap();
        Chain::read(queue.pop_descriptor_chain(memory)?)
    }

    #[test]
    fn header_data_and_status_are_told_apart() {
        let memory = memory();
        memory.write_slice(&[7; 16], GuestAddress(0x3000)).unwrap();
        let read = |descriptors: &[_]| read(&memory, descriptors);
        let write = read(&[
            (0x3000, 16, NEXT, 1),
            (0x5000, 512, NEXT, 2),
            (0x21000, 512, NEXT, 3),
            (0x6000, 1, WRITE, 0),
        ]);
        let write = write.unwrap();
        assert_eq!((write.status, write.header), (GuestAddress(0x6000), Some([7; 16])));
        assert_eq!(
            write.output,
            [(GuestAddress(0x5000), 512), (GuestAddress(0x21000), 512)]
        );
        assert_eq!((write.input.len(), write.lengths()), (0, (1024, 0)));
        // A driver may lay it out as it likes.
        let odd = read(&[
            (0x3000, 10, NEXT, 1),
            (0x3001, 0, NEXT, 2),
            (0x3000, 9, NEXT, 3),
            (0x6000, 513, WRITE, 0),
        ]);
        let odd = odd.unwrap();
        assert_eq!((odd.status, odd.header), (GuestAddress(0x6200), Some([7; 16])));
        assert_eq!(odd.output, [(GuestAddress(0x3006), 3)]);
        assert_eq!(odd.input, [(GuestAddress(0x6000), 512)]);
    }

    #[test]
    fn tables_of_descriptors_are_read() {
        let memory = memory();
        let table = [
            Descriptor::new(0x3000, 16, NEXT, 1),
            Descriptor::new(0x6000, 1, WRITE, 0),
        ];
        for (i, descriptor) in (0u64..).zip(table) {
            memory
                .write_obj(RawDescriptor::from(descriptor), GuestAddress(0x7000 + 16 * i))
                .unwrap();
        }
        let chain = read(&memory, &[(0x7000, 32, INDIRECT, 0)]).unwrap();
        assert_eq!((chain.status, chain.lengths()), (GuestAddress(0x6000), (0, 0)));
        // One in another is none.
        let inner = Descriptor::new(0x7000, 32, INDIRECT, 0);
        memory
            .write_obj(RawDescriptor::from(inner), GuestAddress(0x7000))
            .unwrap();
        assert_eq!(read(&memory, &[(0x7000, 32, INDIRECT, 0)]), None);
        assert_eq!(read(&memory, &[(0x7000, 33, INDIRECT, 0)]), None);
    }

    #[test]
    fn what_can_t_be_answered_is_no_chain() {
        let memory = memory();
        for descriptors in [
            // Without room for a status.
            vec![(0x3000, 16, 0, 0)],
            vec![(0x3000, 16, NEXT, 1), (0x6000, 0, WRITE, 0)],
            // A status outside the memory, or beyond all addresses.
            vec![(0x3000, 16, NEXT, 1), (0x18000, 1, WRITE, 0)],
            vec![(0x3000, 16, NEXT, 1), (0xfff0, 0x20, WRITE, 0)],
            vec![(0x3000, 16, NEXT, 1), (u64::MAX, 2, WRITE, 0)],
            // In the wrong order.
            vec![(0x6000, 1, WRITE | NEXT, 1), (0x3000, 16, 0, 0)],
            // Round and round, of what is to be read.
            vec![(0x3000, 16, NEXT, 0)],
        ] {
            assert_eq!(read(&memory, &descriptors), None, "{descriptors:?}");
        }
    }

    #[test]
    fn a_header_that_is_not_there_is_told_by_the_status() {
        let memory = memory();
        for descriptors in [
            vec![(0x6000, 1, WRITE, 0)],
            vec![(0x3000, 15, NEXT, 1), (0x6000, 1, WRITE, 0)],
            vec![(0x18000, 16, NEXT, 1), (0x6000, 1, WRITE, 0)],
            vec![(0xfff8, 16, NEXT, 1), (0x6000, 1, WRITE, 0)],
        ] {
            let chain = read(&memory, &descriptors).unwrap();
            assert_eq!(chain.header, None, "{descriptors:?}");
        }
    }

    proptest! {
        #[test]
        fn whatever_the_descriptors_are_status_and_header_are_in_the_memory(
            descriptors in prop::collection::vec(
                (prop_oneof![0u64..0x40000, any::<u64>()], prop_oneof![0u32..0x3000, any::<u32>()], 0u16..8, 0u16..20), 1..16),
        ) {
            let memory = memory();
            if let Some(chain) = read(&memory, &descriptors) {
                prop_assert!(memory.address_in_range(chain.status));
                prop_assert!(chain.input.iter().chain(&chain.output).all(|(_, len)| *len > 0));
                let mut out = [0; 64];
                copy_from(&memory, &chain.output, &mut out);
                copy_to(&memory, &chain.input, &out);
            }
        }
    }
}
