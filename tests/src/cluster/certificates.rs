//! The certificates and keys of one control plane, in its temporary directory.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::Context as _;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use serde_json::json;

/// A certificate authority and the directory of its files.
#[derive(Debug)]
pub(super) struct Authority {
    directory: PathBuf,
    issuer: Issuer<'static, KeyPair>,
    /// The number of user certificates issued so far. Concurrent tests may request the same user, so each request gets
    /// its own files.
    users: AtomicU32,
}

/// The paths of a certificate and its key.
#[derive(Debug)]
pub(super) struct Identity {
    /// The certificate, in PEM.
    pub(super) certificate: PathBuf,
    /// The private key, in PEM (PKCS#8).
    pub(super) key: PathBuf,
}

impl Authority {
    /// Creates an authority that writes its files to `directory`.
    ///
    /// # Errors
    /// The files cannot be written.
    pub(super) fn new(directory: &Path) -> anyhow::Result<Self> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "test cluster");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let certificate = params.self_signed(&key)?;
        let authority = Self {
            directory: directory.to_owned(),
            issuer: Issuer::new(params, key),
            users: AtomicU32::new(0),
        };
        write(&authority.certificate(), &certificate.pem())?;
        Ok(authority)
    }

    /// The path of the certificate of the authority itself.
    pub(super) fn certificate(&self) -> PathBuf {
        self.directory.join("ca.crt")
    }

    /// Issues a certificate for a server with `names`, which are host names or IP addresses.
    ///
    /// # Errors
    /// The files cannot be written.
    pub(super) fn server(&self, file: &str, names: &[&str]) -> anyhow::Result<Identity> {
        let mut params =
            CertificateParams::new(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>())?;
        params.distinguished_name.push(DnType::CommonName, file);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.issue(file, &params)
    }

    /// Issues a certificate that authenticates `user`, a member of `group` if one is given.
    ///
    /// # Errors
    /// The files cannot be written.
    pub(super) fn user(&self, user: &str, group: Option<&str>) -> anyhow::Result<Identity> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, user);
        if let Some(group) = group {
            params.distinguished_name.push(DnType::OrganizationName, group);
        }
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let number = self.users.fetch_add(1, Ordering::Relaxed);
        self.issue(&format!("user-{number}-{}", user.replace(':', "-")), &params)
    }

    /// Issues a certificate for `user`, like [`Authority::user`], and writes a kubeconfig that uses it for the API
    /// server at `url`. Returns the path of the kubeconfig.
    ///
    /// # Errors
    /// The files cannot be written.
    pub(super) fn kubeconfig(&self, url: &str, user: &str, group: Option<&str>) -> anyhow::Result<PathBuf> {
        let identity = self.user(user, group)?;
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
            "clusters": [{
                "name": "test",
                "cluster": {"server": url, "certificate-authority": self.certificate()},
            }],
            "users": [{
                "name": user,
                "user": {"client-certificate": identity.certificate, "client-key": identity.key},
            }],
        });
        // JSON is valid YAML.
        let path = identity.certificate.with_extension("kubeconfig");
        write(&path, &serde_json::to_string_pretty(&config)?)?;
        Ok(path)
    }

    /// Creates the key pair that signs and verifies service account tokens; the file `certificate` contains the public
    /// key.
    ///
    /// # Errors
    /// The files cannot be written.
    pub(super) fn service_accounts(&self) -> anyhow::Result<Identity> {
        let key = KeyPair::generate()?;
        let identity = self.identity("service-accounts");
        write(&identity.certificate, &key.public_key_pem())?;
        write(&identity.key, &key.serialize_pem())?;
        Ok(identity)
    }

    fn issue(&self, file: &str, params: &CertificateParams) -> anyhow::Result<Identity> {
        let key = KeyPair::generate()?;
        let identity = self.identity(file);
        write(&identity.certificate, &params.signed_by(&key, &self.issuer)?.pem())?;
        write(&identity.key, &key.serialize_pem())?;
        Ok(identity)
    }

    fn identity(&self, file: &str) -> Identity {
        Identity {
            certificate: self.directory.join(format!("{file}.crt")),
            key: self.directory.join(format!("{file}.key")),
        }
    }
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| format!("failed to write {}", path.display()))
}
