//! TLS for NBD clients: what a server proves itself with, and the TLS of a client's connection.

mod certificates;
mod session;

use std::{path::Path, sync::Arc};

pub use certificates::TlsError;
use rnbd::nbd::TlsMode;
use rustls::ServerConfig;
pub(crate) use session::{ENCRYPTED, Plain, Session};

/// What NBD clients are offered, or have to use: TLS 1.2 and 1.3 with X.509 certificates.
///
/// Pre-shared keys are not among it: rustls has none that come from outside.
#[derive(Clone, Debug)]
pub struct Tls {
    config: Arc<ServerConfig>,
    required: bool,
}

impl Tls {
    /// Reads certificates and keys from a folder, in the files that nbdkit has them in: `server-cert.pem`, followed there by those that
    /// it was issued with, and `server-key.pem`. With `verify_peer` clients have to have a certificate that one of `ca-cert.pem` has
    /// issued and that `ca-crl.pem`, if it is there, does not revoke. Files are read once.
    ///
    /// # Errors
    /// Which file is missing, or makes no sense.
    pub fn load(folder: &Path, verify_peer: bool, required: bool) -> Result<Self, TlsError> {
        let config = Arc::new(certificates::load(folder, verify_peer)?);
        Ok(Self { config, required })
    }

    /// What a connection is told of it.
    pub fn mode(&self) -> TlsMode {
        match self.required {
            true => TlsMode::Require,
            false => TlsMode::On,
        }
    }

    pub(crate) fn session(&self) -> Result<Session, rustls::Error> {
        Session::new(self.config.clone())
    }
}
