//! Images and kernels.

use super::wire::wire;
use dayfly_units::{ImageConfig, Name};

wire! {
    /// A stored root disk.
    pub struct Image {
        /// Name in this daemon's store.
        pub name: Name,
        /// BLAKE3 over the non-zero pages, hexadecimal.
        pub digest: String,
        /// Size in bytes of the disk in the guest.
        pub size_bytes: u64,
        /// Bytes that the image takes on the host's disk.
        pub stored_bytes: u64,
        /// Time of the upload.
        pub created_unix_ms: u64,
        /// The source that the image was built from.
        pub source: String,
        /// How to start the image's program.
        pub config: ImageConfig,
    }

    /// The head of an image's upload, `PUT /v1/images/{name}`.
    ///
    /// The body of the request is a 4-byte little-endian length, this head as JSON of that length,
    /// and one zstd frame of the raw disk.
    pub struct ImageUpload {
        /// Length of the raw disk in bytes.
        pub size_bytes: u64,
        /// The digest that the daemon must compute, hexadecimal.
        pub digest: String,
        /// The source that the image was built from.
        pub source: String,
        /// How to start the image's program.
        pub config: ImageConfig,
    }

    /// A guest kernel with its initramfs.
    pub struct Kernel {
        /// Name in this daemon's store, such as `6.12`.
        pub name: Name,
        /// Release, as `uname -r` prints it in the guest.
        pub release: String,
        /// BLAKE3 of vmlinux followed by initrd, hexadecimal.
        pub digest: String,
        /// The image with the kernel's modules, which is a read-only disk of each VM that boots the
        /// kernel.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub modules: Option<Name>,
        /// Time of the upload.
        pub created_unix_ms: u64,
    }

    /// The head of a kernel's upload. The body is as for [`ImageUpload`], with one zstd frame of
    /// vmlinux followed by initrd.
    pub struct KernelUpload {
        /// Release, as `uname -r` prints it in the guest.
        pub release: String,
        /// Length of vmlinux in bytes.
        pub vmlinux_bytes: u64,
        /// Length of the initramfs in bytes.
        pub initrd_bytes: u64,
        /// BLAKE3 of vmlinux followed by initrd, hexadecimal.
        pub digest: String,
        /// The name of a stored image with the kernel's modules. Its source begins with `modules of
        /// kernel `, and the root of its file system is `/lib/modules/RELEASE`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub modules: Option<Name>,
    }
}
