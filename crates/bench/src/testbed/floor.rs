//! The floor: compiles `floor/birth.c` and drives it.

use super::daemon::Testbed;
use super::host::settled_available;
use super::snapshots::Guest;
use crate::prelude::*;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

const SOURCE: &str = include_str!("../../floor/birth.c");

/// How the floor is linked.
#[derive(Debug, Clone, Copy)]
pub enum Linked {
    /// As the VMM is. Figures are compared with this one.
    Statically,
    /// Shows what the dynamic loader adds.
    Dynamically,
}

/// A running floor. A drop ends its processes.
#[derive(Debug)]
pub struct Floor {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Floor {
    /// Compiles and starts a floor whose VMs have the memory of `guest`, which the testbed has
    /// baked. Its daemon may not run.
    pub fn start(testbed: &Testbed, guest: &Guest, linked: Linked) -> Result<Self> {
        let (name, option) = match linked {
            Linked::Statically => ("floor", "-static"),
            Linked::Dynamically => ("floor-dynamic", "-pie"),
        };
        let program = testbed.folder().join(name);
        let mut cc = Command::new("cc")
            .args(["-O2", "-Wall", option, "-x", "c", "-", "-o"])
            .arg(&program)
            .stdin(Stdio::piped())
            .spawn()
            .context("starting cc (Debian package gcc)")?;
        cc.stdin.take().context("cc's stdin")?.write_all(SOURCE.as_bytes())?;
        ensure!(cc.wait()?.success(), "cc could not compile floor/birth.c");
        let mut child = Command::new(&program)
            .arg(testbed.memory_of(&guest.name)?)
            .arg(guest.memory_bytes.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {}", program.display()))?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().context("the floor's stdout")?);
        Ok(Self { child, input, output })
    }

    /// Gives a command; returns the microseconds that it took by the floor's clock.
    fn took_us(&mut self, command: &str) -> Result<u64> {
        let input = self.input.as_mut().context("the floor's stdin")?;
        writeln!(input, "{command}").context("writing to the floor")?;
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        let times: Vec<u64> =
            line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        match times[..] {
            [before, after] if after > before => Ok((after - before) / 1000),
            _ => bail!("the floor, asked {command:?}: expected two times, got {line:?}"),
        }
    }

    /// One VM in another process, to its first port write.
    pub fn one_us(&mut self) -> Result<u64> {
        self.took_us("one")
    }

    /// `count` VMs at once, which stay.
    pub fn many_us(&mut self, count: usize) -> Result<u64> {
        self.took_us(&format!("many {count}"))
    }

    /// Kills and reaps all VMs.
    pub fn end_us(&mut self) -> Result<u64> {
        self.took_us("end")
    }

    /// munmap(2) of touched `bytes` in 4 KiB pages, by one thread.
    pub fn munmap_us(&mut self, bytes: u64) -> Result<u64> {
        self.took_us(&format!("munmap {bytes}"))
    }

    /// The memory of each of `count` VMs.
    pub fn each_bytes(&mut self, count: usize) -> Result<u64> {
        let before = settled_available()?;
        self.many_us(count)?;
        let taken = before.saturating_sub(settled_available()?);
        self.end_us()?;
        Ok(taken / count.max(1) as u64)
    }
}

impl Drop for Floor {
    fn drop(&mut self) {
        // At the end of its input the program ends its processes and itself.
        drop(self.input.take());
        let _ = self.child.wait();
    }
}
