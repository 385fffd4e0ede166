//! What the page store costs for one RAM, on this host: `dayfly-bench-store --ram FILE` measures any raw file.
//!
//! A store in a folder of its own takes it; what is measured cold comes from the folder's disk. Rates are of bytes in pages that are not zero. `cp` and `zstd` do
//! the same RAM in the same run; CPU time is theirs and ours from /proc/self/stat, in ticks of 10 ms.

use anyhow::{Context, Result, ensure};
use dayfly_store::{Digest, Known, MemorySpec, Store};
use rustix::fs::{Advice, MemfdFlags, fadvise, memfd_create};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

const PAGE: usize = 4096;
const FETCHES: usize = 500;

/// Seconds of CPU: this process's own, and its ended children's.
fn cpu() -> io::Result<(f64, f64)> {
    let stat = fs::read_to_string("/proc/self/stat")?;
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let ticks: Vec<f64> = after_name.split_whitespace().filter_map(|f| f.parse().ok()).collect();
    // Fields 14 to 17 of proc(5); the state, field 3, is no number.
    let field = |n: usize| ticks.get(n - 4).copied().unwrap_or(0.0) / 100.0;
    Ok((field(14) + field(15), field(16) + field(17)))
}

/// Runs `work`, and tells seconds, CPU seconds and MB/s of `bytes`.
fn timed<T>(bytes: f64, work: impl FnOnce() -> Result<T>) -> Result<(T, Value)> {
    let (before, started) = (cpu()?, Instant::now());
    let done = work()?;
    let seconds = started.elapsed().as_secs_f64();
    let after = cpu()?;
    let cpu_seconds = (after.0 - before.0) + (after.1 - before.1);
    let per_core = if cpu_seconds > 0.0 { bytes / 1e6 / cpu_seconds } else { 0.0 };
    let figures = json!({
        "seconds": seconds, "cpu_seconds": cpu_seconds,
        "mb_per_s": bytes / 1e6 / seconds, "mb_per_core_s": per_core,
    });
    Ok((done, figures))
}

fn command(program: &str, args: &[&str]) -> Result<()> {
    let status = Command::new(program).args(args).stdout(Stdio::null()).stderr(Stdio::null()).status();
    let status = status.with_context(|| program.to_owned())?;
    ensure!(status.success(), "{program}: {status}");
    Ok(())
}

/// The value below which so many of a hundred lie.
fn percentile(values: &mut [f64], part: usize) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() * part / 100).or(values.last()).copied().unwrap_or(0.0)
}

fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    fs::read_dir(folder)?.map(|entry| entry.map(|e| e.path())).collect()
}

/// Drops what the page cache has of these files.
fn cold(files: &[File]) -> io::Result<()> {
    files.iter().try_for_each(|file| Ok(fadvise(file, 0, None, Advice::DontNeed)?))
}

/// Puts the RAM in the file `raw` into a new store in a new folder below `parent`, and takes it out again, in several ways.
#[expect(clippy::cast_precision_loss, reason = "figures for people")]
pub fn measure(raw: &Path, parent: &Path) -> Result<Value> {
    let folder = tempfile::tempdir_in(parent)?;
    let store = Store::open(&folder.path().join("store"))?;
    let tenant = store.tenant(&"bench".parse()?)?;
    let memory = File::open(raw).with_context(|| raw.display().to_string())?;
    memory.sync_all()?;
    let data_bytes = dayfly_store::sparse::digest(&memory)?.data_bytes as f64;

    let spec = MemorySpec { memory: &memory, known: Known::default(), disks: &[] };
    let (put, put_figures) = timed(data_bytes, || Ok(tenant.put_memory(&spec)?))?;
    let (again, again_figures) = timed(data_bytes, || Ok(tenant.put_memory(&spec)?))?;
    let copy = folder.path().join("copy").display().to_string();
    let path = raw.display().to_string();
    let ((), cp) = timed(data_bytes, || {
        command("cp", &["--sparse=always", &path, &copy])?;
        command("sync", &[&copy])
    })?;
    let packed = folder.path().join("ram.zst").display().to_string();
    let zstd = timed(data_bytes, || {
        command("zstd", &["-q", "-3", "-T0", &path, "-o", &packed])?;
        command("sync", &[&packed])
    });
    let zstd_bytes = fs::metadata(&packed).map_or(0, |m| m.len());

    let pages_folder = folder.path().join("store/pages/bench");
    let packs = files(&pages_folder)?.iter().map(File::open).collect::<Result<Vec<_>, _>>()?;
    let hashes = put.table.hashes();
    ensure!(!hashes.is_empty(), "{}: expected a page that is not zero", raw.display());
    let fetch = |is_cold: bool| -> Result<Value> {
        let mut times = Vec::with_capacity(FETCHES);
        if !is_cold {
            // The cold ones left nothing in the page cache.
            (0..FETCHES).try_for_each(|n| tenant.fetch(&hashes[n * 7919 % hashes.len()]).map(drop))?;
        }
        for n in 0..FETCHES {
            if is_cold {
                cold(&packs)?;
            }
            let hash: &Digest = &hashes[n * 7919 % hashes.len()];
            let started = Instant::now();
            let page = tenant.fetch(hash)?;
            times.push(started.elapsed().as_secs_f64() * 1e6);
            ensure!(page.len() == PAGE, "a page: expected {PAGE} bytes, got {}", page.len());
        }
        Ok(json!({ "p50_us": percentile(&mut times, 50), "p99_us": percentile(&mut times, 99) }))
    };
    let (cold_fetch, warm_fetch) = (fetch(true)?, fetch(false)?);

    let materialise = || -> Result<()> {
        let to = File::from(memfd_create("ram", MemfdFlags::CLOEXEC)?);
        tenant.materialise(&put.table, &[], &to)?;
        Ok(())
    };
    cold(&packs)?;
    let ((), cold_ram) = timed(data_bytes, materialise)?;
    let ((), warm_ram) = timed(data_bytes, materialise)?;
    let ((), cp_ram) = timed(data_bytes, || {
        let mut to = File::from(memfd_create("ram", MemfdFlags::CLOEXEC)?);
        io::copy(&mut File::open(raw)?, &mut to)?;
        Ok(())
    })?;

    let stats = tenant.stats()?;
    let table_bytes = put.table.encode().len();
    drop(tenant);
    drop(store);
    let started = Instant::now();
    let store = Store::open(&folder.path().join("store"))?;
    let reopened = store.tenant(&"bench".parse()?)?.stats()?;
    let open_ms = started.elapsed().as_secs_f64() * 1e3;
    let (expected, got) = (stats.unique_pages, reopened.unique_pages);
    ensure!(got == expected, "pages after the store was opened again: expected {expected}, got {got}");
    let report = json!({
        "ram": raw.display().to_string(),
        "cores": std::thread::available_parallelism()?.get(),
        "frames": put.table.frames(),
        "data_bytes": data_bytes,
        "unique_pages": put.stats.pages,
        "stored_bytes": stats.compressed_bytes,
        "ratio": stats.raw_bytes as f64 / stats.compressed_bytes as f64,
        "table_bytes": table_bytes,
        "index_bytes_per_page": stats.index_bytes as f64 / stats.unique_pages as f64,
        "open_namespace_ms": open_ms,
        "put": put_figures,
        "put_again": { "new_pages": again.stats.new_pages, "figures": again_figures },
        "cp_to_disk": cp,
        "zstd_3": zstd.map_or_else(|e| json!(e.to_string()), |(_, f)| json!({ "figures": f, "bytes": zstd_bytes })),
        "fetch_one_page_cold": cold_fetch,
        "fetch_one_page_warm": warm_fetch,
        "materialise_cold": cold_ram,
        "materialise_warm": warm_ram,
        "copy_to_memfd_warm": cp_ram,
    });
    Ok(report)
}
