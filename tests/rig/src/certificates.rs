//! Certificates for tests of TLS, in folders with the files that nbdkit, libnbd and QEMU look for.

use std::{fs, path::Path};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DnType,
    ExtendedKeyUsagePurpose as Use, IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber,
    date_time_ymd,
};

/// Somebody who issues certificates.
#[derive(Debug)]
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

fn write(folder: &Path, name: &str, text: &str) {
    fs::create_dir_all(folder).expect("a folder");
    fs::write(folder.join(name), text).expect("a file");
}

impl Authority {
    /// A new one of this name.
    ///
    /// # Panics
    /// As all here, when it can't be.
    pub fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().expect("a key");
        Self(CertifiedIssuer::self_signed(params, key).expect("a certificate"))
    }

    fn issue(&self, folder: &Path, kind: &str, usage: Use, serial: u64) {
        let names = ["localhost".to_owned(), "127.0.0.1".to_owned(), "::1".to_owned()];
        let mut params = CertificateParams::new(names).expect("names");
        params
            .distinguished_name
            .push(DnType::CommonName, format!("{kind} {serial}"));
        params.serial_number = Some(serial.into());
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages = vec![usage];
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.0).expect("a certificate");
        write(folder, &format!("{kind}-cert.pem"), &certificate.pem());
        write(folder, &format!("{kind}-key.pem"), &key.serialize_pem());
    }

    /// Makes those whom it has issued certificates for trusted in a folder: `ca-cert.pem`.
    pub fn trust(&self, folder: &Path) {
        write(folder, "ca-cert.pem", &self.0.pem());
    }

    /// `server-cert.pem` and `server-key.pem` of a server at the local host.
    pub fn server(&self, folder: &Path) {
        self.issue(folder, "server", Use::ServerAuth, 1);
    }

    /// `client-cert.pem` and `client-key.pem` of a client; each has a number of its own.
    pub fn client(&self, folder: &Path, number: u64) {
        self.issue(folder, "client", Use::ClientAuth, number);
    }

    /// Revokes the certificates of these clients: `ca-crl.pem`, which holds until this year.
    pub fn revoke(&self, folder: &Path, clients: &[u64], until: i32) {
        let begin = date_time_ymd(2001, 1, 1);
        let revoked = |number: &u64| RevokedCertParams {
            serial_number: SerialNumber::from(*number),
            revocation_time: begin,
            reason_code: None,
            invalidity_date: None,
        };
        let params = CertificateRevocationListParams {
            this_update: begin,
            next_update: date_time_ymd(until, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: clients.iter().map(revoked).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let list = params.signed_by(&self.0).expect("a list");
        write(folder, "ca-crl.pem", &list.pem().expect("text"));
    }
}
