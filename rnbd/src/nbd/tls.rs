//! When TLS begins: the option STARTTLS, and what is asked for without it. Encryption is the driver's.

use crate::nbd::proto::{opt, rep};

/// Whether clients may or must use TLS.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum TlsMode {
    /// They may not (NOTLS in the protocol's words).
    #[default]
    Off,
    /// They may (SELECTIVETLS, with no export for TLS alone). Somebody in between can talk a client out of it.
    On,
    /// They must: without TLS nothing is told or done (FORCEDTLS).
    Require,
}

/// Verdict on an option.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// It is answered as usual.
    Answer,
    /// It is refused with this type of reply.
    Refuse(u32, &'static str),
    /// TLS begins.
    Start,
    /// It has no reply that could refuse it: the connection ends.
    End,
}

/// TLS state of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Security {
    /// Nothing is encrypted.
    Clear(TlsMode),
    /// All is.
    Tls,
}

impl Default for Security {
    fn default() -> Self {
        Self::Clear(TlsMode::Off)
    }
}

impl Security {
    /// Decides on an option with so many bytes of data.
    pub(crate) fn judge(self, option: u32, len: u32) -> Verdict {
        match (self, option) {
            (Self::Tls, opt::STARTTLS) => Verdict::Refuse(rep::ERR_INVALID, "TLS has begun already"),
            (Self::Clear(TlsMode::Off), opt::STARTTLS) => Verdict::Refuse(rep::ERR_POLICY, "TLS is off"),
            (Self::Clear(_), opt::STARTTLS) if len > 0 => Verdict::Refuse(rep::ERR_INVALID, "STARTTLS has no data"),
            (Self::Clear(_), opt::STARTTLS) => Verdict::Start,
            (Self::Clear(TlsMode::Require), opt::EXPORT_NAME) => Verdict::End,
            (Self::Clear(TlsMode::Require), option) if option != opt::ABORT => {
                Verdict::Refuse(rep::ERR_TLS_REQD, "TLS is required")
            }
            _ => Verdict::Answer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_without_tls_is_what_the_mode_says() {
        let (off, on, require) = (
            Security::Clear(TlsMode::Off),
            Security::Clear(TlsMode::On),
            Security::Clear(TlsMode::Require),
        );
        let kind = |security: Security, option, len| match security.judge(option, len) {
            Verdict::Refuse(kind, _) => Some(kind),
            Verdict::Answer => None,
            other => panic!("{other:?}"),
        };
        for option in [
            opt::LIST,
            opt::INFO,
            opt::GO,
            opt::STRUCTURED_REPLY,
            opt::SET_META_CONTEXT,
            4711,
        ] {
            assert_eq!(kind(require, option, 0), Some(rep::ERR_TLS_REQD), "{option}");
            for other in [off, on, Security::Tls] {
                assert_eq!(kind(other, option, 0), None, "{option} in {other:?}");
            }
        }
        for any in [off, on, require, Security::Tls] {
            assert_eq!(kind(any, opt::ABORT, 0), None, "leaving goes always: {any:?}");
        }
        assert_eq!(require.judge(opt::EXPORT_NAME, 4), Verdict::End);
        assert_eq!(on.judge(opt::EXPORT_NAME, 4), Verdict::Answer);
        assert_eq!(kind(off, opt::STARTTLS, 0), Some(rep::ERR_POLICY));
        assert_eq!(kind(Security::Tls, opt::STARTTLS, 0), Some(rep::ERR_INVALID));
        for may in [on, require] {
            assert_eq!(may.judge(opt::STARTTLS, 0), Verdict::Start);
            assert_eq!(kind(may, opt::STARTTLS, 1), Some(rep::ERR_INVALID));
        }
    }
}
