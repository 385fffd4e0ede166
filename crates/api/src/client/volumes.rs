//! Named volumes.

use super::call::{empty_body, json_body, query};
use super::{Client, ClientError};
use crate::types::{Volume, VolumeCreateRequest};
use dayfly_units::Name;
use http::Method;

type Result<T> = std::result::Result<T, ClientError>;

impl Client {
    /// Lists the named volumes of this user whose name has one of these parts; without parts, all.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn volumes(&self, parts: &[String]) -> Result<Vec<Volume>> {
        let parts: Vec<String> = parts.iter().map(|part| format!("name={}", query(part))).collect();
        let join = if parts.is_empty() { "" } else { "?" };
        self.list(&format!("/v1/volumes{join}{}", parts.join("&"))).await
    }

    /// Makes a named volume, or finds it.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn create_volume(&self, name: &Name) -> Result<Volume> {
        let body = json_body(&VolumeCreateRequest { name: name.clone() })?;
        self.json(Method::POST, "/v1/volumes".into(), body).await
    }

    /// Describes one named volume.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn volume(&self, name: &Name) -> Result<Volume> {
        self.json(Method::GET, format!("/v1/volumes/{name}"), empty_body()).await
    }

    /// Removes a named volume that no VM has, with its files.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn remove_volume(&self, name: &Name) -> Result<()> {
        self.nothing(Method::DELETE, format!("/v1/volumes/{name}"), empty_body()).await
    }
}
