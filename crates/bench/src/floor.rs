//! The floor: compiles `floor/birth.c` and drives it.

use anyhow::{Context, Result, bail};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

const SOURCE: &str = include_str!("../floor/birth.c");

/// The compiled floor.
#[derive(Debug)]
pub struct Programs {
    /// Static, as our VMM is: nothing to load. What we are held against.
    pub fast: PathBuf,
    /// As a plain `cc -O2` makes it, with the dynamic loader's time, for comparison.
    pub plain: PathBuf,
}

/// Compiles the floor into `out`.
pub fn compile(out: &Path) -> Result<Programs> {
    let build = |name: &str, extra: &[&str]| -> Result<PathBuf> {
        let path = out.join(name);
        let mut cc = Command::new("cc")
            .args(["-O2", "-Wall", "-x", "c", "-", "-o"])
            .arg(&path)
            .args(extra)
            .stdin(Stdio::piped())
            .spawn()
            .context("starting cc (Debian package gcc)")?;
        cc.stdin.take().context("cc's stdin")?.write_all(SOURCE.as_bytes())?;
        if !cc.wait()?.success() {
            bail!("cc could not compile floor/birth.c");
        }
        Ok(path)
    };
    Ok(Programs { fast: build("floor", &["-static"])?, plain: build("floor-dynamic", &[])? })
}

/// A running floor. Its processes go with it.
#[derive(Debug)]
pub struct Floor {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Floor {
    /// Starts `program` for VMs whose memory is the file `memory`.
    pub fn start(program: &Path, memory: &Path, bytes: u64) -> Result<Self> {
        let mut child = Command::new(program)
            .arg(memory)
            .arg(bytes.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {}", program.display()))?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().context("the floor's stdout")?);
        Ok(Self { child, input, output })
    }

    /// Gives a command; the microseconds it took, by the floor's own clock.
    fn took_us(&mut self, command: &str) -> Result<u64> {
        let input = self.input.as_mut().context("the floor's stdin")?;
        writeln!(input, "{command}").context("telling the floor")?;
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        let times: Vec<u64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        match times[..] {
            [before, after] if after > before => Ok((after - before) / 1000),
            _ => bail!("the floor, asked {command:?}: expected two times, got {line:?}"),
        }
    }

    /// One VM in a process of its own, to its first port write.
    pub fn one_us(&mut self) -> Result<u64> {
        self.took_us("one")
    }

    /// So many at once; they stay.
    pub fn many_us(&mut self, count: usize) -> Result<u64> {
        self.took_us(&format!("many {count}"))
    }

    /// Kills and reaps all that stay.
    pub fn end_us(&mut self) -> Result<u64> {
        self.took_us("end")
    }

    /// One thread's munmap(2) of so many touched bytes in 4 KiB pages.
    pub fn munmap_us(&mut self, bytes: u64) -> Result<u64> {
        self.took_us(&format!("munmap {bytes}"))
    }
}

impl Drop for Floor {
    fn drop(&mut self) {
        // The end of its input is the end of it and of its processes.
        drop(self.input.take());
        let _ = self.child.wait();
    }
}
