//! ICMP errors, which quote the beginning of our MADs.
//!
//! Anybody can forge an ICMP error. One counts only if it quotes numbers that are known only to those who have seen the request: its
//! transaction ID (64 bits) and communication ID (32 bits, 21 of them random behind a broker). ICMP errors change nothing about a
//! connection that is established, or whose request has been answered once.

use core::net::IpAddr;

use roce_verbs::{Instant, provider::NoAnswer};

use super::{Manager, conn::Key, state::Input};

/// Bytes of a MAD up to the end of the communication ID (REQ) or request ID (SIDR_REQ), which follows the header (IBA 13.4.3).
const NAMED: usize = 28;

impl Manager {
    /// Returns whether a request of ours waits for an answer, so that an ICMP error could end the wait.
    pub fn awaits_answer(&self) -> bool {
        self.table.requests() > 0
    }

    /// Takes an ICMP error about a MAD sent to `remote`, of which the error quotes the beginning. Ends the wait of the request that it
    /// quotes, with [`Event::Unreachable`](crate::cm::Event::Unreachable). Returns false, and changes nothing, if it quotes none.
    pub fn handle_undeliverable(&mut self, now: Instant, remote: IpAddr, quoted: &[u8], why: NoAnswer) -> bool {
        let Some(quoted) = quoted.first_chunk::<NAMED>() else {
            return false;
        };
        let [.., a, b, c, d] = *quoted;
        let found = self.table.find(Key::LocalId(u32::from_be_bytes([a, b, c, d])));
        let quoted = found.filter(|id| {
            self.table.get(*id).is_some_and(|c| {
                let exchange = c.exchange.as_ref();
                c.remote.ip() == remote.to_canonical() && exchange.is_some_and(|e| e.mad.starts_with(quoted))
            })
        });
        quoted.is_some_and(|id| self.step(now, id, Input::Undeliverable(why)).is_ok())
    }
}
