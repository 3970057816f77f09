//! TLS for NBD clients: what a server proves itself with, and the TLS of a client's connection.

mod certificates;
mod session;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use certificates::Files;
pub use certificates::TlsError;
use parking_lot::Mutex;
use rnbd::nbd::TlsMode;
use rustls::ServerConfig;
pub(crate) use session::{ENCRYPTED, Plain, Session};

/// TLS for NBD clients: 1.2 and 1.3 with X.509 certificates. Clones share the certificates, also when they are renewed.
///
/// Pre-shared keys are not supported: rustls has none that come from outside.
#[derive(Clone, Debug)]
pub struct Tls {
    identity: Arc<Identity>,
    required: bool,
}

/// Certificates of a server, and those that it checks its clients against.
struct Identity {
    folder: PathBuf,
    verify_peer: bool,
    /// As it was read last.
    loaded: Mutex<Loaded>,
}

struct Loaded {
    files: Files,
    config: Arc<ServerConfig>,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // A private key is among the rest.
        f.debug_struct("Identity")
            .field("folder", &self.folder)
            .finish_non_exhaustive()
    }
}

impl Tls {
    /// Reads certificates and keys from a folder, in the files that nbdkit has them in: `server-cert.pem`, followed there by those that
    /// it was issued with, and `server-key.pem`. With `verify_peer` clients have to have a certificate that one of `ca-cert.pem` has
    /// issued and that `ca-crl.pem`, if it is there, does not revoke.
    ///
    /// # Errors
    /// Which file is missing, or makes no sense.
    pub fn load(folder: &Path, verify_peer: bool, required: bool) -> Result<Self, TlsError> {
        let files = Files::read(folder, verify_peer)?;
        let config = Arc::new(certificates::config(&files)?);
        let identity = Arc::new(Identity {
            folder: folder.to_owned(),
            verify_peer,
            loaded: Mutex::new(Loaded { files, config }),
        });
        Ok(Self { identity, required })
    }

    /// Returns whether clients must encrypt.
    pub fn is_required(&self) -> bool {
        self.required
    }

    /// Reads the files again. Handshakes that are to come have what is in them; connections that are there stay as they are. Returns
    /// whether there is anything new in them.
    ///
    /// # Errors
    /// As with [`load`](Self::load). What was loaded before holds on.
    pub fn renew(&self) -> Result<bool, TlsError> {
        let identity = &*self.identity;
        let files = Files::read(&identity.folder, identity.verify_peer)?;
        if identity.loaded.lock().files.same(&files) {
            return Ok(false);
        }
        let config = Arc::new(certificates::config(&files)?);
        *identity.loaded.lock() = Loaded { files, config };
        Ok(true)
    }

    /// Returns the mode for a connection.
    pub fn mode(&self) -> TlsMode {
        match self.required {
            true => TlsMode::Require,
            false => TlsMode::On,
        }
    }

    pub(crate) fn session(&self) -> Result<Session, rustls::Error> {
        let config = self.identity.loaded.lock().config.clone();
        Session::new(config)
    }
}
