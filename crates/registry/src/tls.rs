//! TLS: the roots of the host, those that the configuration names, or none for a registry that is
//! insecure by name.

use crate::error::RegistryError;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// Whom a connection trusts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Trust {
    /// The roots of the host.
    Host,
    /// The roots of the host, and those in this PEM file.
    File(PathBuf),
    /// Any certificate.
    Anyone,
}

/// Configurations of TLS, made at their first use.
#[derive(Debug, Default)]
pub(crate) struct Tls {
    host: OnceLock<Result<Arc<ClientConfig>, String>>,
    anyone: OnceLock<Result<Arc<ClientConfig>, String>>,
}

impl Tls {
    /// The configuration for a connection to `host`.
    pub fn config(&self, trust: &Trust, host: &str) -> Result<Arc<ClientConfig>, RegistryError> {
        let made = match trust {
            Trust::Host => self.host.get_or_init(|| verifying(None)).clone(),
            Trust::File(path) => verifying(Some(path)),
            Trust::Anyone => self.anyone.get_or_init(unverifying).clone(),
        };
        made.map_err(|why| RegistryError::Tls {
            host: host.to_owned(),
            why,
            next: "install ca-certificates, or set SSL_CERT_FILE".to_owned(),
        })
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn verifying(extra: Option<&Path>) -> Result<Arc<ClientConfig>, String> {
    let mut roots = RootCertStore::empty();
    let found = rustls_native_certs::load_native_certs();
    roots.add_parsable_certificates(found.certs);
    if let Some(path) = extra {
        let failed = |why: &dyn std::fmt::Display| format!("{}: {why}", path.display());
        for certificate in CertificateDer::pem_file_iter(path).map_err(|e| failed(&e))? {
            let certificate = certificate.map_err(|e| failed(&e))?;
            roots.add(certificate).map_err(|e| failed(&e))?;
        }
    }
    if roots.is_empty() {
        let errors: Vec<String> = found.errors.iter().map(ToString::to_string).collect();
        return Err(format!("this host has no root certificates {}", errors.join(", ")));
    }
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|e| e.to_string())?;
    Ok(Arc::new(builder.with_root_certificates(roots).with_no_client_auth()))
}

fn unverifying() -> Result<Arc<ClientConfig>, String> {
    let provider = provider();
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|e| e.to_string())?;
    let anyone = Arc::new(Anyone(provider));
    let builder = builder.dangerous().with_custom_certificate_verifier(anyone);
    Ok(Arc::new(builder.with_no_client_auth()))
}

/// Accepts any certificate, for registries that are insecure by name.
#[derive(Debug)]
struct Anyone(Arc<CryptoProvider>);

impl ServerCertVerifier for Anyone {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.0.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, known)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.0.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, known)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
