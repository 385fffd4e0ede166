//! Many images in one store: each baked with its service running, which has answered once.
//!
//! In the moment of the snapshot its programs are stopped (SIGSTOP), so that their memory can be
//! compared with a clone's; there they go on, and the service must answer again.

use super::exact::{Exact, Memory, compared};
use super::split::Split;
use crate::prelude::*;
use crate::stock::{Set, Stock, reported};
use dayfly_e2e::guest::script;
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// The images: package sets of Debian over one base, each with the service that its snapshot has
/// running.
pub static SETS: LazyLock<Vec<Set>> = LazyLock::new(|| {
    let mut fleet: BTreeMap<String, Vec<Set>> =
        toml::from_str(include_str!("fleet.toml")).expect("a test reads fleet.toml");
    fleet.remove("set").expect("a test reads fleet.toml")
});

/// Size of an image's disk.
const DISK: &str = "2G";

/// One image's snapshot.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Figure {
    /// Its set.
    pub name: String,
    /// Its packages.
    pub packages: String,
    /// Bytes of its root disk.
    pub image_bytes: u64,
    /// RAM, and what it took to store it.
    pub split: Split,
    /// Bytes of the layer that the bake wrote to disk.
    pub layers_bytes: u64,
    /// Seconds that the bake took.
    pub bake_s: f64,
    /// What was compared with a clone.
    pub exact: Exact,
}

/// All of them.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Fleet {
    /// RAM of each.
    pub memory_bytes: u64,
    /// In the order in which they were stored.
    pub images: Vec<Figure>,
    /// Bytes of pages that are not zero, by what the store has for memory.
    pub combined_ratio: f64,
    /// RAM by what the store has for memory.
    pub ram_ratio: f64,
    /// Frames that are pages, by what the store has for memory: what hashing and compression alone
    /// come to.
    pub pages_ratio: f64,
    /// What the second half of them added, on average.
    pub bytes_per_additional_image: u64,
    /// What the store has for memory.
    pub stored_bytes: u64,
}

impl Fleet {
    /// Whether an image of this name is among them.
    pub fn has(&self, name: &str) -> bool {
        self.images.iter().any(|image| image.name == name)
    }

    /// Adds one.
    pub fn add(&mut self, figure: Figure) {
        self.images.push(figure);
        let sum =
            |of: fn(&Split) -> u64| self.images.iter().map(|image| of(&image.split)).sum::<u64>();
        let stored = sum(Split::stored_bytes);
        self.stored_bytes = stored;
        self.combined_ratio = ratio(sum(Split::data_bytes), stored);
        self.ram_ratio = ratio(sum(|s| s.ram_bytes), stored);
        self.pages_ratio = ratio(sum(|s| s.page_bytes), stored);
        let second_half = &self.images[self.images.len() / 2..];
        let added: u64 = second_half.iter().map(|image| image.split.stored_bytes()).sum();
        self.bytes_per_additional_image = added / second_half.len() as u64;
    }
}

/// The name of a set's snapshot.
///
/// # Errors
/// It is none.
pub fn name(set: &Set) -> Result<Name> {
    Ok(format!("bench-{}", set.name).parse()?)
}

/// Asks `$1` on localhost with `$2` until it says anything; gives up after a minute or so.
const ASK: &str = r#"
ask() {
    n=0
    until bash -c 'exec 3<>/dev/tcp/127.0.0.1/$1 && printf "$2" >&3 &&
            timeout 20 head -c 1 <&3 | wc -c' sh "$1" "$2" 2>/dev/null | grep -q 1; do
        n=$((n + 1)); [ $n -lt 60 ] || { echo "nothing from port $1"; cat /run/log; exit 1; }
        sleep 1
    done
}
ask "$1" "$2"
"#;

/// Bakes the image of `set`, and looks at a clone.
pub async fn bake(stock: &Stock, set: &Set, memory: Bytes) -> Result<Figure> {
    let name = name(set)?;
    let image = stock.image(set, DISK).await?;
    stock.remove_vms().await?;
    stock.remove_snapshot(&name).await?;
    let before = stock.client.store_stats().await?;
    stock.steps.begin(format!("baking {name}, {memory}"));
    let port = set.port.to_string();
    let words = [port.as_str(), &set.ask, &set.start];
    // What the service says goes to a file: the warm-up ends when its output does. Some want the
    // folder that systemd would make.
    let text = format!(
        "mkdir -p /run/lock; (eval \"$3\") >/run/log 2>&1 </dev/null || \
         {{ cat /run/log; exit 1; }}\n\
         {ASK}\nsleep 2; DAYFLY_GUEST=1 dayfly-witness stop && dayfly-witness memory"
    );
    let began = Instant::now();
    let warmup = script(&text, &words);
    let (snapshot, said) = stock.bake(&image.name, &name, memory.0, warmup, None).await?;
    let bake_s = began.elapsed().as_secs_f64();
    let stopped: Memory = reported(&said).context("memory before the snapshot")?;
    ensure!(stopped.programs > 0, "{name}: no program of the service was running: {said}");
    let split = Split::since(&stock.client, &before, &name).await?;
    let (clone, exact) = compared(stock, &name, &stopped, None).await?;
    let text = format!("dayfly-witness go >/dev/null\n{ASK}");
    stock.sh(clone, &text, &words).await.context("asking the clone")?;
    stock.remove_vms().await?;
    stock.steps.end();
    Ok(Figure {
        name: set.name.clone(),
        packages: set.packages.clone(),
        image_bytes: image.stored_bytes,
        split,
        layers_bytes: snapshot.layers_stored_bytes,
        bake_s,
        exact,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_of_the_sums() {
        let mut fleet = Fleet::default();
        for (disk, page, packs) in [(50, 50, 40), (100, 100, 10), (0, 50, 10)] {
            let split = Split {
                ram_bytes: 600,
                disk_bytes: disk,
                page_bytes: page,
                packs_bytes: packs,
                files_bytes: 5,
                ..Split::default()
            };
            let exact = serde_json::json!({
                "from_store": true, "programs": 1, "memory_bytes": 1, "memory_same": true,
                "files": 1, "files_bytes": 1, "cached_bytes": 1, "disk_same": null,
                "cache_same": true,
            });
            fleet.add(Figure {
                name: format!("{disk}"),
                packages: String::new(),
                image_bytes: 1,
                split,
                layers_bytes: 0,
                bake_s: 1.0,
                exact: serde_json::from_value(exact).expect("an Exact"),
            });
        }
        assert_eq!(fleet.stored_bytes, 75);
        assert_eq!(
            (fleet.combined_ratio, fleet.ram_ratio, fleet.pages_ratio),
            (4.667, 24.0, 2.667)
        );
        assert_eq!(fleet.bytes_per_additional_image, 15);
        assert!(fleet.has("100") && !fleet.has("7"));
    }

    #[test]
    fn names_are_names_and_each_is_there_once() {
        let all = SETS.iter().chain([crate::stock::scripts::image()]);
        let names: std::collections::BTreeSet<&str> = all.map(|set| set.name.as_str()).collect();
        assert_eq!((names.len(), SETS.len()), (29, 28));
        names.iter().for_each(|name| drop(name.parse::<Name>().expect("a name")));
        assert!(SETS.iter().all(|set| set.port > 0 && !set.start.is_empty()));
    }
}
