//! What the page store costs for one RAM, on this host: `dayfly-bench store --ram FILE` measures
//! any raw file.
//!
//! A store in a new folder takes it; what is measured cold comes from the folder's disk.
//! Rates are of bytes in pages that are not zero. `cp` and `zstd` do the same RAM in the same run;
//! CPU time is theirs and ours from /proc/self/stat, in ticks of 10 ms.

use crate::prelude::*;
use crate::proc::Stat;
use dayfly_store::{Digest, Known, MemorySpec, Store, Tenant};
use rustix::fs::{Advice, MemfdFlags, fadvise, memfd_create};
use std::fs::{self, File};
use std::io;
use std::process::{Command, Stdio};

const FETCHES: usize = 500;

/// Seconds of CPU of this process and of its ended children.
fn cpu() -> Result<f64> {
    let ticks = Stat::of("self").and_then(|stat| stat.ticks(14)?.checked_add(stat.ticks(16)?));
    Ok(f64::from(ticks.context("/proc/self/stat")?) / 100.0)
}

/// Runs `work`, and returns seconds, CPU seconds and MB/s of `bytes`.
fn timed<T>(bytes: f64, work: impl FnOnce() -> Result<T>) -> Result<(T, Value)> {
    let (before, started) = (cpu()?, Instant::now());
    let done = work()?;
    let seconds = started.elapsed().as_secs_f64();
    let cpu_seconds = cpu()? - before;
    let per_core = if cpu_seconds > 0.0 { bytes / 1e6 / cpu_seconds } else { 0.0 };
    let figures = json!({
        "seconds": seconds, "cpu_seconds": cpu_seconds,
        "mb_per_s": bytes / 1e6 / seconds, "mb_per_core_s": per_core,
    });
    Ok((done, figures))
}

fn command(program: &str, args: &[&str]) -> Result<()> {
    let status =
        Command::new(program).args(args).stdout(Stdio::null()).stderr(Stdio::null()).status();
    let status = status.with_context(|| program.to_owned())?;
    ensure!(status.success(), "{program}: {status}");
    Ok(())
}

/// Drops what the page cache has of these files.
fn cold(files: &[File]) -> io::Result<()> {
    files.iter().try_for_each(|file| Ok(fadvise(file, 0, None, Advice::DontNeed)?))
}

/// Fetches pages one by one; with `packs` each of them comes from the disk.
fn fetch(tenant: &Tenant, hashes: &[Digest], packs: Option<&[File]>) -> Result<Value> {
    let hash = |n: usize| &hashes[n * 7919 % hashes.len()];
    if packs.is_none() {
        // The cold fetches left nothing in the page cache.
        (0..FETCHES).try_for_each(|n| tenant.fetch(hash(n)).map(drop))?;
    }
    let mut times = Vec::with_capacity(FETCHES);
    for n in 0..FETCHES {
        packs.map(cold).transpose()?;
        let started = Instant::now();
        let page = tenant.fetch(hash(n))?;
        times.push(u64::try_from(started.elapsed().as_nanos())?);
        ensure!(page.len() as u64 == PAGE_SIZE, "a page of {} bytes", page.len());
    }
    Ok(json!(Spread::of(&times).unit(Unit::UsOfNs)))
}

/// What other programs make of the same RAM: `cp` and `zstd` to the disk, a copy to memory.
fn compared(raw: &Path, folder: &Path, bytes: f64) -> Result<[(&'static str, Value); 2]> {
    let text = |path: PathBuf| path.display().to_string();
    let (from, copy) = (raw.display().to_string(), text(folder.join("copy")));
    let packed = text(folder.join("ram.zst"));
    let ((), cp) = timed(bytes, || {
        command("cp", &["--sparse=always", &from, &copy])?;
        command("sync", &[&copy])
    })?;
    let zstd = timed(bytes, || {
        command("zstd", &["-q", "-3", "-T0", &from, "-o", &packed])?;
        command("sync", &[&packed])
    });
    let bytes = fs::metadata(&packed).map_or(0, |m| m.len());
    let zstd = zstd.map(|((), figures)| json!({ "figures": figures, "bytes": bytes }));
    let zstd = zstd.unwrap_or_else(|e| json!(e.to_string()));
    Ok([("cp_to_disk", cp), ("zstd_3", zstd)])
}

fn memfd() -> Result<File> {
    Ok(memfd_create("ram", MemfdFlags::CLOEXEC)?.into())
}

/// Puts the RAM in the file `raw` into a new store in a new folder below `parent`, and takes it out
/// again, in several ways.
pub fn measure(raw: &Path, parent: &Path) -> Result<Value> {
    let folder = tempfile::tempdir_in(parent)?;
    let store = Store::open(&folder.path().join("store"))?;
    let tenant = store.tenant(&"bench".parse()?)?;
    let memory = File::open(raw).with_context(|| raw.display().to_string())?;
    memory.sync_all()?;
    let data_bytes = float(dayfly_store::sparse::digest(&memory)?.data_bytes);

    let spec = MemorySpec { memory: &memory, known: Known::default(), disks: &[] };
    let (put, put_figures) = timed(data_bytes, || Ok(tenant.put_memory(&spec)?))?;
    let (again, again_figures) = timed(data_bytes, || Ok(tenant.put_memory(&spec)?))?;
    let compared = compared(raw, folder.path(), data_bytes)?;

    let pages_folder = folder.path().join("store/pages/bench");
    let packs = fs::read_dir(pages_folder)?.map(|entry| File::open(entry?.path()));
    let packs = packs.collect::<io::Result<Vec<_>>>()?;
    let hashes = put.table.hashes();
    ensure!(!hashes.is_empty(), "{}: expected a page that is not zero", raw.display());
    let cold_fetch = fetch(&tenant, hashes, Some(&packs))?;
    let warm_fetch = fetch(&tenant, hashes, None)?;
    let materialise = || Ok(tenant.materialise(&put.table, &[], &memfd()?).map(drop)?);
    cold(&packs)?;
    let ((), cold_ram) = timed(data_bytes, materialise)?;
    let ((), warm_ram) = timed(data_bytes, materialise)?;
    let ((), cp_ram) =
        timed(data_bytes, || Ok(io::copy(&mut File::open(raw)?, &mut memfd()?).map(drop)?))?;

    let stats = tenant.stats()?;
    let mut report = json!({
        "ram": raw.display().to_string(),
        "cores": std::thread::available_parallelism()?.get(),
        "frames": put.table.frames(),
        "data_bytes": data_bytes,
        "unique_pages": put.stats.pages,
        "stored_bytes": stats.stored_bytes,
        "ratio": float(stats.raw_bytes) / float(stats.stored_bytes),
        "table_bytes": put.table.encode().len(),
        "index_bytes_per_page": float(stats.index_memory_bytes) / float(stats.unique),
        "put": put_figures,
        "put_again": { "new_pages": again.stats.new_pages, "figures": again_figures },
        "fetch_one_page_cold": cold_fetch,
        "fetch_one_page_warm": warm_fetch,
        "materialise_cold": cold_ram,
        "materialise_warm": warm_ram,
        "copy_to_memfd_warm": cp_ram,
    });
    compared.into_iter().for_each(|(name, value)| report[name] = value);
    drop(tenant);
    drop(store);
    report["open_namespace_ms"] = reopened(folder.path(), stats.unique)?.into();
    Ok(report)
}

/// Milliseconds until the store in `folder` is open again and knows its pages.
fn reopened(folder: &Path, expected: u64) -> Result<f64> {
    let started = Instant::now();
    let store = Store::open(&folder.join("store"))?;
    let got = store.tenant(&"bench".parse()?)?.stats()?.unique;
    let open_ms = started.elapsed().as_secs_f64() * 1e3;
    ensure!(got == expected, "pages of the store opened again: expected {expected}, got {got}");
    Ok(open_ms)
}
