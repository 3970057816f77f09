//! Our own MADs, as ICMP errors quote them.
//!
//! Anybody can forge an ICMP error. One counts only if it quotes numbers that nobody knows who has not seen the request: its
//! transaction ID (64 bits) and communication ID (32 bits, 21 of them random behind a broker). What stands, or has been answered once,
//! no ICMP error changes.

use core::net::IpAddr;

use roce_verbs::{Instant, provider::NoAnswer};

use super::{
    Manager,
    perform::Detail,
    state::{Input, State},
};
use crate::mad::MAD_LEN;

/// Bytes of a MAD up to the end of the communication ID (REQ) or request ID (SIDR_REQ), which follows the header (IBA 13.4.3).
const NAMED: usize = 28;

/// The beginning of a MAD.
pub(super) struct Quote<'a>(&'a [u8; NAMED]);

impl<'a> Quote<'a> {
    fn new(quoted: &'a [u8]) -> Option<Self> {
        quoted.first_chunk().map(Self)
    }

    /// Communication ID or request ID.
    pub(super) fn id(&self) -> u32 {
        let [.., a, b, c, d] = *self.0;
        u32::from_be_bytes([a, b, c, d])
    }

    /// Whether it is of this MAD.
    pub(super) fn is_of(&self, mad: &[u8; MAD_LEN]) -> bool {
        mad.starts_with(self.0)
    }
}

impl Manager {
    /// Whether a request of ours waits for an answer, so that an ICMP error could end the wait.
    pub fn awaits_answer(&self) -> bool {
        self.table.requests() > 0 || self.sidr.is_asking()
    }

    /// Takes an ICMP error about a MAD sent to `remote`, of which the error quotes the beginning. Ends the wait of the request that it
    /// quotes, with [`Event::Unreachable`](crate::Event::Unreachable). Returns false, and changes nothing, if it quotes none.
    pub fn handle_undeliverable(&mut self, now: Instant, remote: IpAddr, quoted: &[u8], why: NoAnswer) -> bool {
        let Some(quote) = Quote::new(quoted) else { return false };
        let remote = remote.to_canonical();
        let Some(id) = self.table.by_local_id(quote.id()) else {
            return self.on_sidr_undeliverable(remote, &quote, why);
        };
        let waits = self.table.get(id).is_some_and(|c| {
            let quoted = c.exchange.as_ref().is_some_and(|e| quote.is_of(&e.mad));
            c.state == State::ReqSent && c.remote.ip() == remote && quoted
        });
        waits && self.step(now, id, Input::Undeliverable, Detail::NoAnswer(why)).is_ok()
    }
}
