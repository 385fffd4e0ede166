//! Streams of programs and archives: their bytes are the work of the VM and not of the daemon, and
//! they go on without it. The microguest has no agent, so this test serves the VM's socket.

use crate::guest::{self, create};
use crate::living::Living;
use crate::testbed::{Testbed, until};
use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use dayfly_api::agent::{
    ExecSpec, Exit, FrameKind, HEADER_BYTES, Reply, Request, decode_header, encode,
};
use dayfly_api::client::{ExecEvent, stream_body};
use dayfly_host::process::{ProcessId, scan_below};
use dayfly_units::VmId;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::Command;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

const NAME: &str = "dayfly-streams";
/// Bytes of an archive.
const BYTES: usize = 1 << 30;
/// Bytes of an archive that is handed over too.
const FEW_BYTES: usize = 1 << 20;
/// The path of an archive of [`FEW_BYTES`].
const FEW: &str = "/few";
const PIECE: usize = 64 << 10;

fn processes(bed: &Testbed) -> Result<Vec<ProcessId>> {
    let found = scan_below(&bed.run().join("vms"), NAME)?;
    Ok(found.iter().map(|found| found.process).collect())
}

/// Whether a process has a stream: its control socket, and the three of the stream.
fn has_stream(bed: &Testbed) -> Result<bool> {
    let Some(process) = processes(bed)?.first().copied() else { return Ok(false) };
    let fds = std::fs::read_dir(format!("/proc/{}/fd", process.pid))?;
    let links = fds.flatten().filter_map(|fd| std::fs::read_link(fd.path()).ok());
    Ok(links.filter(|link| link.to_string_lossy().starts_with("socket:")).count() >= 4)
}

fn frame(stream: &mut UnixStream) -> Result<(FrameKind, Vec<u8>)> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header)?;
    let (kind, length) = decode_header(header)?;
    let mut body = vec![0; length];
    stream.read_exact(&mut body)?;
    Ok((kind, body))
}

fn reply(stream: &mut UnixStream, reply: &Reply) -> Result<()> {
    Ok(stream.write_all(&encode(FrameKind::Reply, &serde_json::to_vec(reply)?))?)
}

fn bytes(path: &str) -> usize {
    if path == FEW { FEW_BYTES } else { BYTES }
}

/// Serves one connection as an agent. A program writes a line for each message of `lines`, and then
/// ends.
fn answer(mut stream: UnixStream, lines: &Receiver<Vec<u8>>) -> Result<()> {
    let mut line = [0; 13];
    stream.read_exact(&mut line)?;
    ensure!(&line == b"CONNECT 1024\n");
    stream.write_all(b"OK 7\n")?;
    let (_, request) = frame(&mut stream)?;
    match serde_json::from_slice(&request)? {
        Request::WriteArchive { path } => {
            reply(&mut stream, &Reply::Ok)?;
            let mut count = 0;
            loop {
                match frame(&mut stream)? {
                    (FrameKind::Data, body) => count += body.len(),
                    (FrameKind::End, _) => break,
                    (kind, _) => bail!("{kind:?} in an archive"),
                }
            }
            ensure!(count == bytes(&path), "{count} bytes of an archive");
            reply(&mut stream, &Reply::Ok)
        }
        Request::ReadArchive { path } => {
            reply(&mut stream, &Reply::Ok)?;
            let piece = encode(FrameKind::Data, &vec![5; PIECE]);
            (0..bytes(&path) / PIECE).try_for_each(|_| stream.write_all(&piece))?;
            Ok(stream.write_all(&encode(FrameKind::End, &[]))?)
        }
        Request::Exec(_) => {
            reply(&mut stream, &Reply::Started { pid: 5, id: None })?;
            for line in lines {
                stream.write_all(&encode(FrameKind::Stdout, &line))?;
            }
            let exit = Exit { code: Some(3), signal: None, timed_out: false };
            Ok(stream.write_all(&encode(FrameKind::Exit, &serde_json::to_vec(&exit)?))?)
        }
        other => bail!("an agent was asked for {other:?}"),
    }
}

/// Lines for programs, and the result of each connection.
type Served = (Sender<Vec<u8>>, Receiver<Result<()>>);

/// Serves the socket of a VM in place of its VMM.
fn agent(bed: &Testbed, vm: VmId) -> Result<Served> {
    let path = bed.of_vm(vm, "root/vsock.sock");
    std::fs::remove_file(&path)?;
    let listener = UnixListener::bind(&path)?;
    let ((lines, of_program), (served, results)) = (channel(), channel());
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            if served.send(answer(stream, &of_program)).is_err() {
                return;
            }
        }
    });
    Ok((lines, results))
}

/// CPU time of a process, those of its threads included that have ended.
fn cpu(pid: u32) -> Result<Duration> {
    let (mut clock, mut time) = (0, libc::timespec { tv_sec: 0, tv_nsec: 0 });
    // SAFETY: both write to their last argument.
    let failed = unsafe {
        libc::clock_getcpuclockid(pid.try_into()?, &raw mut clock) != 0
            || libc::clock_gettime(clock, &raw mut time) != 0
    };
    ensure!(!failed, "the CPU time of {pid}");
    Ok(Duration::new(time.tv_sec.try_into()?, time.tv_nsec.try_into()?))
}

/// Ticks of a process in user and kernel mode, as /proc/PID/stat has them.
fn ticks(pid: u32) -> Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields = stat.rsplit_once(')').context("a stat line")?.1.split_whitespace();
    Ok(fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum())
}

/// How often the threads of a process have waited.
fn waits(pid: u32) -> Result<u64> {
    let mut all = 0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let status = std::fs::read_to_string(task?.path().join("status")).unwrap_or_default();
        let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        all += count.and_then(|count| count.trim().parse::<u64>().ok()).unwrap_or(0);
    }
    Ok(all)
}

async fn bill(bed: &Testbed, vm: &Living) -> Result<u64> {
    Ok(bed.client.vm(&vm.word()).await?.usage.map_or(0, |usage| usage.cpu_us))
}

/// An archive of this many bytes, the second half of which waits for a message.
fn archive(
    bytes: usize,
    half: Option<tokio::sync::oneshot::Receiver<()>>,
) -> dayfly_api::client::Body {
    let piece = Bytes::from(vec![9; PIECE]);
    let pieces = (half, 0_usize);
    stream_body(futures::stream::unfold(pieces, move |(half, at)| {
        let piece = piece.clone();
        async move {
            let half = match half {
                Some(half) if at == bytes / PIECE / 2 => {
                    let _ = half.await;
                    None
                }
                half => half,
            };
            (at < bytes / PIECE).then_some((Ok(piece), (half, at + 1)))
        }
    }))
}

/// What one archive has taken.
struct Took {
    daemon: Duration,
    ticks: u64,
    waits: u64,
    process: Duration,
    billed: Duration,
}

/// Sends an archive to the guest, or from it.
async fn passed(bed: &Testbed, vm: &Living, into: bool, path: &str) -> Result<Took> {
    let daemon = bed.pid()?;
    let bytes = bytes(path);
    let of_process = || Ok::<_, anyhow::Error>(processes(bed)?.first().map(|id| id.pid));
    let process = of_process()?.map(cpu).transpose()?.unwrap_or_default();
    let before = (cpu(daemon)?, ticks(daemon)?, waits(daemon)?, bill(bed, vm).await?);
    if into {
        bed.client.write_archive(&vm.word(), path, archive(bytes, None)).await?;
    } else {
        let mut stream = bed.client.read_archive(&vm.word(), path).await?;
        let mut count = 0;
        while let Some(piece) = stream.next().await? {
            count += piece.len();
        }
        ensure!(count == bytes, "{count}");
    }
    Ok(Took {
        daemon: cpu(daemon)?.saturating_sub(before.0),
        ticks: ticks(daemon)?.saturating_sub(before.1),
        // Threads that have ended are not counted.
        waits: waits(daemon)?.saturating_sub(before.2),
        process: cpu(of_process()?.context("no process of streams")?)?.saturating_sub(process),
        billed: Duration::from_micros(bill(bed, vm).await?.saturating_sub(before.3)),
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_of_streams_are_the_work_of_the_vm_and_not_of_the_daemon() -> Result<()> {
    let mut bed = guest::testbed().await?;
    let vm = Living::new(create(&bed, "served").await?, &bed)?;
    let (_lines, results) = agent(&bed, vm.id)?;
    for into in [true, false] {
        let few = passed(&bed, &vm, into, FEW).await?;
        results.recv()??;
        let Took { daemon, ticks, waits, process, billed } =
            passed(&bed, &vm, into, "/all").await?;
        results.recv()??;
        println!(
            "{} MiB {}: dayflyd {daemon:?} ({ticks} ticks; for 1 MiB {:?}), {waits} waits; the \
             process of streams {process:?}; billed to the VM {billed:?}",
            BYTES >> 20,
            if into { "to the guest" } else { "from the guest" },
            few.daemon,
        );
        // It would wait about once for each piece of 64 KiB. Its own clocks are few.
        ensure!(waits < (BYTES / PIECE / 16) as u64, "the daemon has waited {waits} times");
        // What a request costs in a program without optimisation is not the bytes' cost.
        let of_bytes = daemon.saturating_sub(few.daemon);
        ensure!(
            of_bytes * 100 <= billed.max(process),
            "dayflyd has spent {of_bytes:?} on the bytes; the VM {billed:?}, its process \
             {process:?}"
        );
    }
    bed.client.remove_vm(&vm.word(), true).await?;
    until("the process has ended", async || Ok(processes(&bed)?.is_empty())).await?;
    bed.stop()
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_go_on_while_the_daemon_is_killed_and_after() -> Result<()> {
    let mut bed = guest::testbed().await?;
    let vm = Living::new(create(&bed, "served").await?, &bed)?;
    let (lines, results) = agent(&bed, vm.id)?;
    let word = vm.word();
    // A program, which writes a line before, a line without a daemon, and a line with the next.
    let spec = ExecSpec { argv: vec!["p".into()], ..ExecSpec::default() };
    let mut exec = bed.client.exec(&word, &spec).await?;
    let mut line = async |text: &[u8]| {
        lines.send(text.to_vec())?;
        let got = exec.output.next().await?;
        ensure!(got == ExecEvent::Stdout(text.to_vec()), "{got:?}");
        Ok(())
    };
    line(b"before").await?;
    until("it is handed over", async || has_stream(&bed)).await?;
    let process = processes(&bed)?[0];
    // That of a VM that is gone is swept.
    let stray = bed.run().join(format!("vms/{}/{NAME}", VmId::random()));
    let mut stray = Command::new("sleep").arg0(stray).arg("1000").spawn()?;
    bed.kill()?;
    line(b"without").await?;
    bed.start().await?;
    ensure!(stray.wait()?.signal() == Some(9));
    line(b"after").await?;
    ensure!(processes(&bed)? == [process]);
    let leaks = bed.client.leaks().await?;
    ensure!(leaks.is_empty(), "{leaks:?}");
    drop(lines);
    let end = exec.output.next().await?;
    ensure!(matches!(&end, ExecEvent::Exit(exit) if exit.code == Some(3)), "{end:?}");
    results.recv()??;
    until("the process has ended", async || Ok(processes(&bed)?.is_empty())).await?;

    // An archive, half of which was sent when the daemon is killed.
    let (go_on, half) = tokio::sync::oneshot::channel();
    let client = bed.client.clone();
    let sending =
        tokio::spawn(
            async move { client.write_archive(&word, "/x", archive(BYTES, Some(half))).await },
        );
    until("it is handed over", async || has_stream(&bed)).await?;
    // With its daemon's end it must have everything that it needs.
    bed.kill()?;
    go_on.send(()).ok().context("the archive ended")?;
    sending.await??;
    results.recv()??;
    until("the process has ended", async || Ok(processes(&bed)?.is_empty())).await?;
    bed.start().await?;
    bed.client.remove_vm(&vm.word(), true).await?;
    bed.stop()
}
