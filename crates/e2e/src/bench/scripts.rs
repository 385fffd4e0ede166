//! Six workloads in the spirit of table 1 of "Efficiently Restoring Virtual Machines", and one of which every byte is known.

use super::images::Set;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

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
pub struct Script {
    /// In words.
    pub what: &'static str,
    /// A text for /bin/sh.
    pub run: &'static str,
    /// True when it is late.
    pub late: &'static str,
    /// Late in any case after so many seconds.
    pub bound_s: u32,
    /// Says how far it is.
    pub done: &'static str,
}

impl Workload {
    /// What it runs.
    #[must_use]
    pub const fn script(self) -> Script {
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

/// Waits in the guest until it is late; gives the seconds.
pub const LATER: &str = "setsid sh -c \"$1\" >/run/log 2>&1 </dev/null &
n=0; until sh -c \"$2\" 2>/dev/null || [ $n -ge \"$3\" ]; do sleep 1; n=$((n + 1)); done";

/// The image of the workloads.
pub const WORKLOADS: Set = Set {
    name: "workloads",
    packages: "gcc libc6-dev make flac postmark xvfb openbox xterm dillo abiword",
    sources: "lua5.4",
    prepare: r#"head -c 536870912 /dev/urandom >/srv/random
head -c 268435456 /dev/urandom | flac -s -0 --bps=8 --channels=2 --sample-rate=44100 --sign=signed --endian=little --force-raw-format - -o /srv/media.flac
mkdir /srv/documents
for n in 1 2 3 4; do
  { echo "<html><body>"; for m in $(seq 1 4000); do echo "<p>Document $n, paragraph $m: $(head -c 60 /dev/urandom | base64 -w0)</p>"; done; echo "</body></html>"; } >/srv/documents/$n.html
done"#,
    start: "",
    ask: (0, ""),
};
