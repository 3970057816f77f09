//! Certificates and keys in files that are named as nbdkit's.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    RootCertStore, ServerConfig,
    crypto::{CryptoProvider, ring},
    pki_types::{
        CertificateDer, CertificateRevocationListDer, PrivateKeyDer,
        pem::{self, PemObject},
    },
    server::{NoServerSessionStorage, WebPkiClientVerifier, danger::ClientCertVerifier},
};

/// File of the authority that issues clients' certificates.
const AUTHORITY: &str = "ca-cert.pem";
/// File of revoked certificates.
const REVOKED: &str = "ca-crl.pem";
/// The server's certificate, and those that lead to its issuer.
const CERTIFICATE: &str = "server-cert.pem";
/// File of its private key.
const KEY: &str = "server-key.pem";

/// Why there is no TLS.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file can't be read.
    #[error("{}: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// The content of a file is invalid.
    #[error("{}: {why}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
}

/// A file of the folder, with what is in it.
struct Source {
    path: PathBuf,
    text: Vec<u8>,
}

impl Source {
    fn read(folder: &Path, name: &str) -> Result<Self, TlsError> {
        let path = folder.join(name);
        match fs::read(&path) {
            Ok(text) => Ok(Self { path, text }),
            Err(error) => Err(TlsError::Read { path, error }),
        }
    }

    /// The same of one that need not be there.
    fn read_if_there(folder: &Path, name: &str) -> Result<Option<Self>, TlsError> {
        match Self::read(folder, name) {
            Ok(source) => Ok(Some(source)),
            Err(TlsError::Read { error, .. }) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn wrong(&self, why: impl ToString) -> TlsError {
        TlsError::Content {
            path: self.path.clone(),
            why: why.to_string(),
        }
    }

    /// All pieces of a kind. There has to be one.
    fn all<T: PemObject>(&self, what: &str) -> Result<Vec<T>, TlsError> {
        let all: Result<Vec<T>, pem::Error> = T::pem_slice_iter(&self.text).collect();
        match all {
            Ok(all) if all.is_empty() => Err(self.wrong(format!("no {what} in it"))),
            Ok(all) => Ok(all),
            Err(e) => Err(self.wrong(e)),
        }
    }

    fn key(&self) -> Result<PrivateKeyDer<'static>, TlsError> {
        PrivateKeyDer::from_pem_slice(&self.text).map_err(|e| match e {
            pem::Error::NoItemsFound => self.wrong("no private key in it (one that is encrypted can't be read)"),
            e => self.wrong(e),
        })
    }
}

/// All files of a folder that count, as they are together.
pub(super) struct Files {
    certificate: Source,
    key: Source,
    /// Certificates that clients are checked against, if clients have to prove their identity.
    clients: Option<Clients>,
}

/// Certificates that clients are checked against.
struct Clients {
    authority: Source,
    revoked: Option<Source>,
}

impl Files {
    /// Reads the files of a folder, as they are now.
    pub(super) fn read(folder: &Path, verify_peer: bool) -> Result<Self, TlsError> {
        let clients = || {
            Ok(Clients {
                authority: Source::read(folder, AUTHORITY)?,
                revoked: Source::read_if_there(folder, REVOKED)?,
            })
        };
        Ok(Self {
            certificate: Source::read(folder, CERTIFICATE)?,
            key: Source::read(folder, KEY)?,
            clients: verify_peer.then(clients).transpose()?,
        })
    }

    /// Whether the same is in them.
    pub(super) fn same(&self, other: &Self) -> bool {
        self.sources().eq(other.sources())
    }

    /// Returns the content of each of them, if it is there.
    fn sources(&self) -> impl Iterator<Item = Option<&[u8]>> {
        let clients = self.clients.as_ref();
        let all = [
            Some(&self.certificate),
            Some(&self.key),
            clients.map(|clients| &clients.authority),
            clients.and_then(|clients| clients.revoked.as_ref()),
        ];
        all.into_iter().map(|source| source.map(|source| &*source.text))
    }
}

/// Returns the configuration of a server with these certificates.
pub(super) fn config(files: &Files) -> Result<ServerConfig, TlsError> {
    // Named, as a process may have several.
    let provider = Arc::new(ring::default_provider());
    let (certificate, key) = (&files.certificate, &files.key);
    let chain = certificate.all("certificate")?;
    let versions = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|e| certificate.wrong(e))?;
    let builder = match &files.clients {
        Some(clients) => versions.with_client_cert_verifier(verifier(clients, provider)?),
        None => versions.with_no_client_auth(),
    };
    let config = builder.with_single_cert(chain, key.key()?);
    let mut config = config.map_err(|e| key.wrong(format!("it does not go with {CERTIFICATE}: {e}")))?;
    // Connections are few and last: none is worth being taken up again, with a client that was known once.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

fn verifier(clients: &Clients, provider: Arc<CryptoProvider>) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
    let Clients { authority, revoked } = clients;
    let mut roots = RootCertStore::empty();
    for root in authority.all::<CertificateDer<'_>>("certificate")? {
        roots.add(root).map_err(|e| authority.wrong(e))?;
    }
    let mut builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
    if let Some(revoked) = revoked {
        let lists: Vec<CertificateRevocationListDer<'_>> = revoked.all("revocation list")?;
        // A list that is out of date says nothing of what has been revoked since.
        builder = builder.with_crls(lists).enforce_revocation_expiration();
    }
    builder
        .build()
        .map_err(|e| revoked.as_ref().unwrap_or(authority).wrong(e))
}
