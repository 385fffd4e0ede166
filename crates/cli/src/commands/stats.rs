//! `dayfly stats`: shows what VMs hold in memory, and what they have taken from the host.

use crate::connect;
use crate::output::{self, Format, FormatArgs};
use anyhow::Result;
use dayfly_api::client::ClientError;
use dayfly_api::types::{ColourHeld, DiskTraffic, ErrorCode, Footprint};
use dayfly_units::Bytes;

/// Arguments of `dayfly stats`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A VM by id or name, shown by colour [default: all running VMs]
    vm: Option<String>,
    #[command(flatten)]
    format: FormatArgs,
}

impl Args {
    pub async fn run(self) -> Result<()> {
        let client = connect::client().await?;
        if let Some(vm) = &self.vm {
            let footprint = client.footprint(vm).await?;
            return match self.format.format {
                Format::Json => output::json(&footprint),
                Format::Table => output::emit(&by_colour(&footprint)),
            };
        }
        let mut all = Vec::new();
        for vm in client.vms(false).await? {
            match client.footprint(&vm.id.to_string()).await {
                Ok(footprint) => all.push(footprint),
                // The VM has ended meanwhile.
                Err(e) if ended(&e) => {}
                Err(e) => return Err(e.into()),
            }
        }
        match self.format.format {
            Format::Json => output::json(&all),
            Format::Table => output::emit(&by_vm(&all)),
        }
    }
}

fn ended(error: &ClientError) -> bool {
    matches!(error.code(), Some(ErrorCode::NotFound | ErrorCode::State))
}

fn bytes(n: u64) -> String {
    if n == 0 { "-".to_owned() } else { Bytes(n).to_string() }
}

/// Bytes in at most five characters, such as `12.3M`.
fn short(bytes: u64) -> String {
    let text = Bytes(bytes).to_string();
    let (number, unit) = text.split_once(' ').unwrap_or((&text, ""));
    let whole = number.split('.').next().unwrap_or(number);
    let number = if whole.len() > 2 || number.ends_with(".0") { whole } else { number };
    format!("{number}{}", unit.strip_suffix("iB").unwrap_or(""))
}

/// Bytes in one direction and in the other, such as `4K/12.3M`.
fn both(one: u64, other: u64) -> String {
    format!("{}/{}", short(one), short(other))
}

/// Booked CPUs, such as `2,3`.
fn booked(cpus: &[u32]) -> String {
    let cpus: Vec<String> = cpus.iter().map(u32::to_string).collect();
    if cpus.is_empty() { "-".to_owned() } else { cpus.join(",") }
}

/// Seconds of CPU time.
fn seconds(us: u64) -> String {
    let ms = us / 1000;
    format!("{}.{:03} s", ms / 1000, ms % 1000)
}

fn share(n: u64, of: u64) -> String {
    let tenths = (u128::from(n) * 1000).checked_div(u128::from(of)).unwrap_or(0);
    format!("{}.{} %", tenths / 10, tenths % 10)
}

/// The columns of the table of VMs, the last two as those of `docker stats`: received and sent,
/// read and written.
const HEADS: [&str; 11] = [
    "VM ID",
    "NAME",
    "MEMORY",
    "OWN",
    "OF MEMORY",
    "SHARED",
    "BOOKED",
    "CPU",
    "PEAK",
    "NET I/O",
    "BLOCK I/O",
];

fn by_vm(all: &[Footprint]) -> String {
    output::table(HEADS, all.iter().map(row))
}

fn row(of: &Footprint) -> [String; HEADS.len()] {
    let (total, unknown) = (of.total(), || "-".to_owned());
    let moved = |of_disk: fn(&DiskTraffic) -> u64| {
        of.disk_traffic.iter().map(of_disk).fold(0, u64::saturating_add)
    };
    let disks = || both(moved(|disk| disk.read_bytes), moved(|disk| disk.written_bytes));
    [
        of.id.to_string(),
        of.name.to_string(),
        Bytes(of.memory_bytes).to_string(),
        bytes(total.own_bytes),
        share(total.own_bytes, of.memory_bytes),
        bytes(total.shared_bytes),
        booked(&of.cpus),
        of.usage.map_or_else(unknown, |usage| seconds(usage.cpu_us)),
        bytes(of.usage.and_then(|usage| usage.memory_peak_bytes).unwrap_or(0)),
        of.net_traffic.map_or_else(unknown, |net| both(net.received_bytes, net.sent_bytes)),
        if of.disk_traffic.is_empty() { unknown() } else { disks() },
    ]
}

fn by_colour(of: &Footprint) -> String {
    let row = |name: &str, held: &ColourHeld| {
        [
            name.to_owned(),
            bytes(held.own_bytes),
            share(held.own_bytes, of.memory_bytes),
            bytes(held.shared_bytes),
            bytes(held.zero_bytes),
        ]
    };
    let any = |held: &&ColourHeld| held.own_bytes + held.shared_bytes + held.zero_bytes > 0;
    let mut rows: Vec<_> =
        of.colours.iter().filter(any).map(|held| row(&held.colour, held)).collect();
    rows.push(row("all", &of.total()));
    output::table(["COLOUR", "OWN", "OF MEMORY", "SHARED", "ZERO"], rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_api::types::{NetTraffic, VmUsage};

    #[test]
    fn tables_show_what_is_held() {
        let held = |colour: &str, own_bytes, shared_bytes, zero_bytes| ColourHeld {
            colour: colour.into(),
            own_bytes,
            shared_bytes,
            zero_bytes,
        };
        let colours = vec![
            held("kernel data", 3 << 20, 1 << 20, 0),
            held("free", 0, 0, 4096),
            held("user", 0, 0, 0),
        ];
        let of = Footprint {
            id: "0123456789ab".parse().unwrap(),
            name: "web".parse().unwrap(),
            memory_bytes: 256 << 20,
            colours,
            usage: Some(VmUsage {
                cpu_us: 1_234_567,
                memory_peak_bytes: Some(5 << 20),
                ..VmUsage::default()
            }),
            cpus: vec![2, 3],
            disk_traffic: vec![
                DiskTraffic { read_bytes: 4096, written_bytes: 1, ..DiskTraffic::default() },
                DiskTraffic { read_bytes: 1 << 20, ..DiskTraffic::default() },
            ],
            net_traffic: Some(NetTraffic {
                received_bytes: (1 << 40) - 1,
                sent_bytes: (123 << 20) + (1 << 19),
                ..NetTraffic::default()
            }),
        };
        let text = by_colour(&of);
        let lines: Vec<Vec<&str>> =
            text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert_eq!(lines[1], ["kernel", "data", "3.0", "MiB", "1.1", "%", "1.0", "MiB", "-"]);
        assert_eq!(lines[2], ["free", "-", "0.0", "%", "-", "4.0", "KiB"]);
        assert_eq!(lines[3][0], "all");
        let text = by_vm(std::slice::from_ref(&of));
        assert!(
            text.contains("web") && text.contains("1.1 %") && text.contains("256.0 MiB"),
            "{text}"
        );
        assert!(text.contains("2,3") && text.contains("1.234 s"), "{text}");
        assert!(text.contains("5.0 MiB"), "{text}");
        let terminal = output::table_within(80, HEADS, [row(&of)]);
        let lines: Vec<&str> = terminal.lines().collect();
        assert!(lines.iter().all(|line| line.chars().count() <= 80), "{terminal}");
        for (head, cell) in [("NET I/O", "1023G/123M"), ("BLOCK I/O", "1M/1"), ("CPU", "1.234 s")] {
            assert!(lines[0].contains(head) && lines[1].contains(cell), "{terminal}");
        }
        let without = Footprint { net_traffic: None, disk_traffic: Vec::new(), ..of };
        assert_eq!(row(&without)[9..], ["-", "-"]);
    }

    #[test]
    fn bytes_are_short_in_narrow_columns() {
        let shown = [0, 1023, 1024, 1536, 10 << 20, (99 << 20) + (1 << 19), 100 << 20, 1 << 40];
        let shown = shown.map(short);
        assert_eq!(shown, ["0", "1023", "1K", "1.5K", "10M", "99.5M", "100M", "1024G"]);
    }
}
