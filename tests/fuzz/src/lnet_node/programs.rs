//! Operations and portals of programs, and moods of the device.

use lnet::{Entry, EntryOptions, Get, Put};
use roce_verbs::wr::PostError;

use super::{
    names::{PEERS, PORTAL, length, peer},
    run::Run,
};
use crate::input::Input;

impl Run {
    /// A program begins an operation.
    pub(super) fn begin(&mut self, input: &mut Input<'_>) {
        let (to, shape, len) = (peer(input.below(PEERS)), input.byte(), length(input));
        let memory = lnet::Buffer::allocate(len.max(1) as usize).expect("memory");
        let memory = memory.part(0, len as usize).expect("all");
        let now = self.host.now;
        self.host.machine.begin(|node| match shape & 3 {
            0 => node.ping(now, to, memory),
            1 => node.get(
                now,
                &Get {
                    peer: to,
                    portal: PORTAL,
                    match_bits: 1,
                    offset: 0,
                    sink: memory,
                },
            ),
            _ => node.put(
                now,
                &Put {
                    peer: to,
                    portal: PORTAL,
                    match_bits: 1,
                    hdr_data: 2,
                    offset: 0,
                    source: memory,
                    ack: shape & 4 != 0,
                },
            ),
        });
    }

    /// A program attaches an entry, or detaches one.
    pub(super) fn portal(&mut self, input: &mut Input<'_>) {
        let shape = input.byte();
        if shape & 3 == 3 {
            return self.host.machine.detach(usize::from(shape >> 2));
        }
        let len = length(input).max(1) as usize;
        self.host.machine.attach(len, |memory| Entry {
            portal: PORTAL,
            from: (shape & 0x80 != 0).then(|| peer(0)),
            match_bits: u64::from(shape >> 4 & 3),
            ignore_bits: if shape & 0x40 == 0 { 3 } else { 0 },
            options: EntryOptions::from_bits_truncate((1 + (shape & 1)) | (shape & 0xc)),
            memory,
            uses: (shape & 2 != 0).then_some(2),
        });
    }

    /// The device completes sends and drains queue pairs at once or later, and has room or not.
    pub(super) fn device(&mut self, input: &mut Input<'_>) {
        let shape = input.byte();
        let provider = &mut self.host.provider;
        let room = (shape & 8 != 0).then_some(usize::from(shape >> 6));
        match shape & 7 {
            0 => provider.auto_complete = !provider.auto_complete,
            1 => provider.auto_drain = !provider.auto_drain,
            2 => provider.faults.registrations = room,
            3 => provider.faults.qps = room,
            4 => provider.faults.accept = true,
            5 => provider.faults.post = Some(PostError::QueueFull),
            _ => {
                let waiting = provider.draining.clone();
                waiting.into_iter().for_each(|qp| provider.finish_drain(qp));
            }
        }
    }
}
