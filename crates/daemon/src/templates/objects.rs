//! Images and kernels of the store in the API's form.

use dayfly_api::types;
use dayfly_store::{ImageManifest, KernelManifest};

/// An image.
pub(super) fn shown_image(manifest: ImageManifest) -> types::Image {
    types::Image {
        name: manifest.name,
        digest: manifest.disk.digest.to_string(),
        size_bytes: manifest.disk.bytes,
        stored_bytes: manifest.disk.data_bytes,
        created_unix_ms: manifest.created_unix_ms,
        source: manifest.source,
        config: manifest.config,
    }
}

/// A kernel.
pub(super) fn shown_kernel(manifest: KernelManifest) -> types::Kernel {
    types::Kernel {
        name: manifest.name,
        release: manifest.release,
        digest: manifest.digest.to_string(),
        created_unix_ms: manifest.created_unix_ms,
        modules: manifest.modules.map(|image| image.name),
    }
}
