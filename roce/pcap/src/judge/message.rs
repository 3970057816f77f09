//! Order and lengths of the packets of messages: FIRST, MIDDLE, LAST, ONLY.

use roce_bth::{Class, ExtHeader, Position};

use super::{
    context::{Context, PathMtu},
    observed::Observed,
};
use crate::rule::Rule;

/// Longest message, bytes (IBA 9.7.4.1.6).
const MAX_MESSAGE: u32 = 1 << 31;

/// Message that a direction's next packet belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) enum Message {
    /// Packets are missing: the next one may be anything.
    #[default]
    Unknown,
    /// The next packet begins a message.
    Between,
    /// A message goes on.
    Open {
        class: Class,
        /// Frame of its first packet.
        frame: u64,
        /// Bytes so far.
        bytes: u64,
        /// Bytes that its RETH names.
        stated: Option<u32>,
    },
}

impl Message {
    /// Checks a packet of SEND or WRITE that follows the one before it, and goes on with it.
    pub(super) fn step(&mut self, o: &Observed<'_>, cx: &mut Context<'_>) {
        let info = o.header.bth.opcode.info();
        let stated = o.header.reth().map(|reth| reth.dma_len);
        if info.position.starts() {
            if let Self::Open { frame, .. } = self {
                let text = format!(
                    "{} begins a message while that of frame {frame} is not finished",
                    info.name
                );
                cx.find(Rule::OpcodeSequence, o, text);
            }
            *self = Self::Open {
                class: info.class,
                frame: o.meta.frame,
                bytes: 0,
                stated,
            };
        } else if !self.goes_on(info.class) {
            if *self != Self::Unknown {
                cx.find(
                    Rule::OpcodeSequence,
                    o,
                    format!("{} goes on with a message that was not begun", info.name),
                );
            }
            *self = Self::Unknown;
        }
        self.count(o, cx);
        if info.position.ends() {
            *self = Self::Between;
        }
    }

    /// Checks that a request of one packet does not interrupt a message.
    pub(super) fn finish(&mut self, o: &Observed<'_>, cx: &mut Context<'_>) {
        if let Self::Open { frame, .. } = self {
            let name = o.header.bth.opcode.info().name;
            let text = format!("{name} interrupts the message of frame {frame}");
            cx.find(Rule::OpcodeSequence, o, text);
        }
        *self = Self::Between;
    }

    fn goes_on(&self, with: Class) -> bool {
        matches!(self, Self::Open { class, .. } if *class == with)
    }

    fn count(&mut self, o: &Observed<'_>, cx: &mut Context<'_>) {
        let Self::Open {
            bytes,
            stated: Some(stated),
            ..
        } = self
        else {
            return;
        };
        *bytes += o.payload_len as u64;
        let (bytes, stated) = (*bytes, u64::from(*stated));
        let ends = o.header.bth.opcode.info().position.ends();
        if bytes > stated || (ends && bytes != stated) {
            let text = format!(
                "a WRITE of {stated} bytes by its RETH has {bytes}{}",
                if ends { "" } else { " and goes on" }
            );
            cx.find(Rule::WriteLength, o, text);
        }
    }
}

/// Checks a packet's length against the path MTU, or learns it.
pub(super) fn check_length(o: &Observed<'_>, rule: Rule, cx: &mut Context<'_>) {
    let info = o.header.bth.opcode.info();
    let len = o.payload_len as u32;
    let full = matches!(info.position, Position::First | Position::Middle);
    if info.position == Position::Last && len == 0 && matches!(info.class, Class::Send | Class::Write) {
        cx.find(rule, o, format!("{} without payload", info.name));
    }
    match cx.mtu.bytes() {
        Some(mtu) if full && len != mtu => {
            cx.find(rule, o, format!("{} has {len} bytes, the path MTU is {mtu}", info.name));
        }
        Some(mtu) if len > mtu => {
            cx.find(
                rule,
                o,
                format!("{} has {len} bytes, more than the path MTU of {mtu}", info.name),
            );
        }
        None if full && len.is_power_of_two() && (256..=4096).contains(&len) => *cx.mtu = PathMtu::Seen(len),
        None if full || len > 4096 => {
            cx.find(
                rule,
                o,
                format!("{} has {len} bytes, which is no path MTU (256 to 4096)", info.name),
            );
        }
        _ => {}
    }
}

/// Checks a RETH's length.
pub(super) fn check_reth(o: &Observed<'_>, cx: &mut Context<'_>) {
    let info = o.header.bth.opcode.info();
    if let Some(reth) = o.header.reth().filter(|_| info.has(ExtHeader::Reth))
        && reth.dma_len > MAX_MESSAGE
    {
        cx.find(
            Rule::RethLength,
            o,
            format!("{} of {} bytes, more than 2^31", info.name, reth.dma_len),
        );
    }
}
