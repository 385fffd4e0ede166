//! Six workloads in the spirit of table 1 of "Efficiently Restoring Virtual Machines", and one of which every byte is known.
//!
//! Of each: a VM boots the image of the workloads and begins; late in it all programs are stopped, looked at, and a snapshot is taken. It is
//! the only one in its store, so what the packs grow by is its own. Then its disk is read whole in the VM, which still lives, and in a clone.

use crate::exact::{Exact, parse};
use crate::guests::Guests;
use crate::place::Place;
use crate::split::{Split, percent};
use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use dayfly_cli::progress::Steps;
use dayfly_units::{Bytes, Name};
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// A workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Workload {
    /// Windows that nobody touches
    Desktop,
    /// A media file is played
    Media,
    /// A file of 512 MiB is compressed
    Gzip,
    /// A C project is compiled
    Make,
    /// A file of 512 MiB is copied
    Copy,
    /// Postmark, of the paper's size
    Postmark,
    /// Memory and a file of which every byte is known: for exactness; not in the averages
    Pattern,
}

/// What is run, and when it is late.
struct Script {
    what: &'static str,
    run: &'static str,
    /// True when it is late.
    late: &'static str,
    /// Late in any case after so many seconds.
    bound_s: u32,
    /// Says how far it is.
    done: &'static str,
}

impl Workload {
    const fn script(self) -> Script {
        match self {
            Self::Desktop => Script {
                what: "Xvfb, openbox, four xterm, four dillo with documents of 600 KB, abiword with another; idle for 30 s",
                run: "export DISPLAY=:1 HOME=/root
                    Xvfb :1 -screen 0 1280x1024x24 &
                    until [ -S /tmp/.X11-unix/X1 ]; do sleep 1; done
                    openbox &
                    for n in 1 2 3 4; do
                        xterm -e sh -c \"cat /srv/documents/$n.html; exec sleep 100000\" &
                        dillo /srv/documents/$n.html &
                    done
                    abiword /srv/documents/1.html &
                    sleep 90; echo idle; wait",
                late: "grep -q idle /run/log",
                bound_s: 300,
                done: "cat /proc/[0-9]*/comm | grep -E 'Xvfb|openbox|xterm|dillo|abiword' | sort | uniq -c | tr -s ' \\n' ' '",
            },
            Self::Media => Script {
                what: "flac decodes a file of 257 MiB (noise, 8 bit, stereo); after 80 % of it",
                run: "flac -d -s -c --force-raw-format --endian=little --sign=signed /srv/media.flac >/dev/null; echo ended",
                late: "grep -q ended /run/log || [ $(sed -n 's/^rchar: //p' /proc/$(pidof flac)/io) -ge 215000000 ]",
                bound_s: 300,
                done: "p=$(pidof flac) && sed -n 's/^rchar: //p' /proc/$p/io || cat /run/log",
            },
            Self::Gzip => Script {
                what: "gzip of 512 MiB of noise; after 80 % of it, or when time was up (see `progress`: bytes read)",
                run: "gzip -c /srv/random >/root/random.gz; echo ended",
                late: "grep -q ended /run/log || [ $(sed -n 's/^rchar: //p' /proc/$(pidof gzip)/io) -ge 429000000 ]",
                bound_s: 300,
                done: "p=$(pidof gzip) && sed -n 's/^rchar: //p' /proc/$p/io || cat /run/log",
            },
            Self::Make => Script {
                what: "make of Lua 5.4 with gcc -O2; after 28 of 35 objects, or when time was up (see `progress`: objects)",
                run: "cd /usr/src/lua5.4/src && make -s linux-noreadline CC='gcc -std=gnu99'; echo ended",
                late: "grep -q ended /run/log || [ $(ls /usr/src/lua5.4/src | grep -c '[.]o$') -ge 28 ]",
                bound_s: 400,
                done: "ls /usr/src/lua5.4/src | grep -c '[.]o$'; tail -n 3 /run/log",
            },
            Self::Copy => Script {
                what: "cp of 512 MiB of noise; after 90 % of it",
                run: "cp /srv/random /root/copy; echo ended",
                late: "grep -q ended /run/log || [ $(stat -c %s /root/copy) -ge 483000000 ]",
                bound_s: 300,
                done: "stat -c %s /root/copy",
            },
            Self::Postmark => Script {
                what: "postmark: 128 files of 4 KiB to 10 MiB, 400 transactions; when it has read and written 2.6 GB of 3.2, or time was up",
                run: "mkdir /root/pm
                    printf 'set location /root/pm\\nset number 128\\nset transactions 400\\nset size 4096 10485760\\nset seed 42\\nset bias read 5\\nrun\\nquit\\n' | postmark
                    echo ended",
                late: "grep -q ended /run/log || [ $(sed -n 's/^[rw]char: //p' /proc/$(pidof postmark)/io | tr '\\n' '+' | sed 's/+$/\\n/;s/.*/echo $((&))/' | sh) -ge 2600000000 ]",
                bound_s: 300,
                done: "p=$(pidof postmark) && grep char /proc/$p/io || tail -n 12 /run/log; du -sm /root/pm",
            },
            Self::Pattern => Script {
                what: "64 MiB of memory and 32 MiB of tmpfs: pages of noise, of a word repeated, of zeroes",
                run: "exec dayfly-witness hold 64 7 /run/pattern",
                late: "[ -e /run/pattern ]",
                bound_s: 120,
                done: "sha256sum /run/pattern",
            },
        }
    }
}

/// What one came to.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Figure {
    /// Which.
    pub workload: Workload,
    /// What it did.
    pub what: String,
    /// RAM of the guest.
    pub memory_bytes: u64,
    /// Seconds it ran, by the host's clock.
    pub ran_s: u64,
    /// How far it was.
    pub progress: String,
    /// RAM, and what it takes.
    pub split: Split,
    /// Pages to store, each content once, of a hundred of RAM: before compression.
    pub kept_percent: f64,
    /// What the store has more, of a hundred of RAM: after compression.
    pub stored_percent: f64,
    /// What the disk's own layer holds.
    pub layers_bytes: u64,
    /// Seconds that the snapshot took.
    pub snapshot_s: f64,
    /// What was compared with a clone.
    pub exact: Exact,
}

/// Waits in the guest until it is late; gives the seconds.
const LATER: &str = "setsid sh -c \"$1\" >/run/log 2>&1 </dev/null &
n=0; until sh -c \"$2\" 2>/dev/null || [ $n -ge \"$3\" ]; do sleep 1; n=$((n + 1)); done";

/// Runs `workload` once.
pub async fn run(
    place: &Place,
    guests: &Guests,
    image: &Name,
    workload: Workload,
    memory: Bytes,
    steps: &Steps,
) -> Result<Figure> {
    let Script { what, run, late, bound_s, done } = workload.script();
    let label = |doing: &str| steps.begin(format!("{workload:?}, {memory}: {doing}"));
    let snapshot = "bench-workload".parse()?;
    guests.remove_vms().await?;
    guests.remove_snapshot(&snapshot).await?;
    let empty = guests.client.store_stats().await?;
    let there = empty.pages.unique;
    ensure!(
        there == 0,
        "expected a store without pages, so that a snapshot's bytes are its own; got {there} pages"
    );

    label("booting");
    let vm = guests.boot(image, memory.0).await?;
    label("running");
    let began = Instant::now();
    guests.sh(vm, LATER, &[run, late, &bound_s.to_string()]).await?;
    let before = guests
        .sh(vm, "DAYFLY_GUEST=1 dayfly-witness stop >/dev/null; exec dayfly-witness memory", &[])
        .await?;
    let before = parse(&before).context("memory before the snapshot")?;
    let ran_s = began.elapsed().as_secs();
    let progress = guests.sh(vm, done, &[]).await?.trim().to_owned();

    label("taking a snapshot");
    let began = Instant::now();
    let taken = guests.snapshot(vm, &snapshot).await?;
    let snapshot_s = began.elapsed().as_secs_f64();
    let split = Split::since(&guests.client, &empty, &snapshot).await?;

    label("reading the disk of the original");
    let original =
        parse(&guests.sh(vm, "dayfly-witness disk /", &[]).await?).context("the original's files")?;
    guests.remove_vms().await?;
    let from_store = place.forget().await?;
    label("reading memory and disk of a clone");
    let clone = guests.clone_of(&snapshot).await?;
    let after =
        parse(&guests.sh(clone, "dayfly-witness memory", &[]).await?).context("memory of the clone")?;
    let files =
        parse(&guests.sh(clone, "dayfly-witness files /", &[]).await?).context("the clone's files")?;
    let mut exact = Exact::new(&before, Some(&original), &after, &files, from_store);
    if workload == Workload::Pattern {
        exact.memory_same &= guests.sh(clone, done, &[]).await?.trim() == progress;
    }
    guests.remove_vms().await?;
    guests.remove_snapshot(&snapshot).await?;
    steps.end();
    Ok(Figure {
        workload,
        what: what.to_owned(),
        memory_bytes: memory.0,
        ran_s,
        progress,
        kept_percent: percent(split.new_bytes, split.ram_bytes),
        stored_percent: percent(split.stored_bytes(), split.ram_bytes),
        split,
        layers_bytes: taken.layers_stored_bytes,
        snapshot_s,
        exact,
    })
}
