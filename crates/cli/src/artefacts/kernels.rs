//! Fetches Debian's kernels, adds dayfly's agent, and uploads the result to the daemon.

use super::images::OutFolder;
use super::upload;
use crate::home::program;
use crate::progress::Steps;
use anyhow::{Context, Result, bail};
use dayfly_api::client::Client;
use dayfly_api::types::{ErrorCode, ImageUpload, Kernel, KernelUpload};
use dayfly_image::BuiltImage;
use dayfly_image::kernel::{
    KernelArtefact, KernelError, KernelSource, build, build_modules, fetch_debian,
};
use dayfly_units::Name;
use std::io::{self, Read};
use std::path::PathBuf;

/// The newest kernel of Debian 12. The machine uses it, and guests use it if no kernel is stored.
pub const DEFAULT: &str = "6.12";

/// Selects the kernel to boot: `wanted`, or the daemon's choice (`None`). A missing `wanted` is
/// fetched. If the daemon has no kernel at all, [`DEFAULT`] is fetched.
///
/// # Errors
/// If the kernel is neither stored nor can be fetched.
pub async fn ensure_kernel(
    client: &Client,
    wanted: Option<&Name>,
    steps: &Steps,
) -> Result<Option<Name>> {
    match wanted {
        Some(name) => match client.kernel(name).await {
            Ok(_) => Ok(Some(name.clone())),
            Err(e) if e.code() == Some(ErrorCode::NotFound) => {
                fetch_kernel(client, name.as_str(), name, steps)
                    .await
                    .map(|kernel| Some(kernel.name))
            }
            Err(e) => Err(e.into()),
        },
        None if client.kernels().await?.is_empty() => {
            let name: Name = DEFAULT.parse()?;
            fetch_kernel(client, DEFAULT, &name, steps).await.map(|kernel| Some(kernel.name))
        }
        None => Ok(None),
    }
}

/// Fetches Debian's cloud kernel of `version` and stores it as `name`.
///
/// # Errors
/// If apt has no such kernel, or if it cannot be stored.
pub async fn fetch_kernel(
    client: &Client,
    version: &str,
    name: &Name,
    steps: &Steps,
) -> Result<Kernel> {
    let source = debian(version, steps).await?;
    store(client, source, name, steps).await
}

/// Stores the kernel of an unpacked package, or a single kernel file with everything built in, as
/// `name`. An identical stored kernel is kept.
///
/// # Errors
/// If the path is no kernel, or if the kernel cannot be stored.
pub async fn add_kernel(
    client: &Client,
    path: PathBuf,
    name: &Name,
    steps: &Steps,
) -> Result<Kernel> {
    let source = if path.is_dir() {
        KernelSource::in_tree(&path)?
    } else {
        KernelSource { kernel: path, modules: None }
    };
    store(client, source, name, steps).await
}

/// Like [`fetch_kernel`], but replaces a stored kernel of this name if its content differs (for
/// instance an older agent).
///
/// # Errors
/// As for [`fetch_kernel`].
pub async fn refresh_kernel(
    client: &Client,
    version: &str,
    name: &Name,
    steps: &Steps,
) -> Result<Kernel> {
    let made = make(debian(version, steps).await?, steps).await?;
    let head = head(&made)?;
    match client.kernel(name).await {
        Ok(there) if there.digest == head.digest && there.modules == head.modules => {
            steps.end();
            return Ok(there);
        }
        Err(e) if e.code() != Some(ErrorCode::NotFound) => return Err(e.into()),
        // The upload replaces a stored kernel atomically. Removing that kernel first would remove
        // its modules too.
        Ok(_) | Err(_) => {}
    }
    send(client, made, head, name, steps).await
}

/// The unpacked kernel package that the machine boots. This function blocks.
///
/// # Errors
/// If apt does not have the package.
pub fn machine_kernel(steps: &Steps) -> Result<PathBuf> {
    steps.begin(format!("fetching Debian's kernel {DEFAULT}"));
    let tree = fetch_debian(DEFAULT, None)?;
    steps.end();
    Ok(tree.folder)
}

async fn debian(version: &str, steps: &Steps) -> Result<KernelSource> {
    steps.begin(format!("fetching Debian's kernel {version}"));
    let version = version.to_owned();
    let work = move || {
        let tree = fetch_debian(&version, None)?;
        Ok::<_, KernelError>(KernelSource::in_tree(&tree.folder)?)
    };
    match tokio::task::spawn_blocking(work).await? {
        Err(KernelError::Version(name)) => {
            bail!(
                "kernel {name}: not there (dayfly kernel ls), and no version that could be \
                 fetched, such as {DEFAULT}"
            )
        }
        other => Ok(other?),
    }
}

async fn store(
    client: &Client,
    source: KernelSource,
    name: &Name,
    steps: &Steps,
) -> Result<Kernel> {
    let made = make(source, steps).await?;
    let head = head(&made)?;
    send(client, made, head, name, steps).await
}

/// A kernel that is built.
struct Made {
    kernel: KernelArtefact,
    modules: Option<BuiltImage>,
    /// Holds the files until they are uploaded.
    _folder: OutFolder,
}

/// Builds the kernel and the disk of its modules.
async fn make(source: KernelSource, steps: &Steps) -> Result<Made> {
    steps.begin("unpacking the kernel and its modules");
    let agent = program("dayfly-agent")?;
    let folder = OutFolder::new(&dayfly_image::cache::default_folder())?;
    let out = folder.path().to_owned();
    let work = move || {
        let kernel = build(&source, &agent, None, &out)?;
        Ok::<_, KernelError>((kernel, build_modules(&source, None, &out.join("modules"))?))
    };
    let (kernel, modules) = tokio::task::spawn_blocking(work).await??;
    Ok(Made { kernel, modules, _folder: folder })
}

fn head(made: &Made) -> Result<KernelUpload> {
    let manifest = &made.kernel.manifest;
    Ok(KernelUpload {
        release: manifest.release.clone(),
        vmlinux_bytes: manifest.vmlinux.size_bytes,
        initrd_bytes: manifest.initrd.size_bytes,
        digest: digest(&made.kernel).context("hashing the kernel")?,
        modules: made.modules.as_ref().map(modules_name).transpose()?,
    })
}

/// The name of an image of modules: equal modules are stored once.
fn modules_name(modules: &BuiltImage) -> Result<Name> {
    let digest = modules.manifest.digest.get(..12).unwrap_or_default();
    Ok(format!("modules-{digest}").parse()?)
}

/// BLAKE3 of vmlinux followed by the initramfs.
fn digest(artefact: &KernelArtefact) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    for path in [&artefact.vmlinux, &artefact.initrd] {
        let mut file = std::fs::File::open(path)?;
        loop {
            match file.read(&mut buffer)? {
                0 => break,
                got => hasher.update(&buffer[..got]),
            };
        }
    }
    Ok(hasher.finalize().to_hex().to_string())
}

async fn send(
    client: &Client,
    made: Made,
    head: KernelUpload,
    name: &Name,
    steps: &Steps,
) -> Result<Kernel> {
    if let (Some(modules), Some(name)) = (made.modules, &head.modules) {
        send_modules(client, modules, name, steps).await?;
    }
    steps.begin(format!("storing kernel {name}"));
    let files = vec![made.kernel.vmlinux, made.kernel.initrd];
    let kernel =
        upload::send(files, steps, async |body| client.upload_kernel(name, &head, body).await)
            .await;
    steps.end();
    kernel
}

/// Stores the modules as the image `name`, unless it is there.
async fn send_modules(
    client: &Client,
    modules: BuiltImage,
    name: &Name,
    steps: &Steps,
) -> Result<()> {
    let BuiltImage { root_ext4, manifest, .. } = modules;
    match client.image(name).await {
        Ok(there) if there.digest == manifest.digest => return Ok(()),
        Err(e) if e.code() != Some(ErrorCode::NotFound) => return Err(e.into()),
        Ok(_) | Err(_) => {}
    }
    let head = ImageUpload {
        size_bytes: manifest.size_bytes,
        digest: manifest.digest,
        source: manifest.source,
        config: manifest.run,
    };
    steps.begin("storing the kernel's modules");
    let call = async |body| client.upload_image(name, &head, body).await;
    let stored = upload::send(vec![root_ext4], steps, call).await;
    steps.end();
    stored.map(drop)
}
