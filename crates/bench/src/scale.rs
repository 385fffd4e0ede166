//! Many VMs: 512 asked for at once, and the n-th one beside all that were born before it ([`nth`]).
//!
//! `at_once_512_first` is what a daemon does that has never been asked for so many: nearly all of them are made from nothing. It then
//! expects that such a burst comes again (`dayfly_daemon::vm::pool`), and `at_once_512` are those after it.

mod nth;

use crate::birth::{MEMORY_BYTES, words};
use crate::common::{self, median, ratio, shown};
use crate::floor::Floor;
use crate::room::Room;
use anyhow::Result;
use dayfly_api::types::{CreateManyRequest, NetworkRequest, RemoveManyRequest, Source};
use dayfly_bench::plot::{Curve, Plot};
use dayfly_units::{Name, VmId};
use nth::Nth;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;

const AT_ONCE: usize = 512;
const ROUNDS: usize = 3;
/// So many may wait for them, however much memory the host has: by itself a pool takes a twentieth of that, room for 512 from 20 GiB on.
const POOL: usize = 2048;

/// What asking for many at once took, in microseconds.
pub struct AtOnce {
    /// First request to last first port write.
    all_us: u64,
    /// First request to last answer.
    answered_us: u64,
    /// Each from its own request.
    each_us: Vec<u64>,
    pub ids: Vec<VmId>,
}

impl AtOnce {
    /// First request to last answer.
    pub const fn answered_us(&self) -> u64 {
        self.answered_us
    }
}

pub async fn at_once(room: &Room, name: &Name, count: usize) -> Result<AtOnce> {
    let request = CreateManyRequest {
        source: Source::Snapshot(name.clone()),
        count: u32::try_from(count)?,
        labels: BTreeMap::new(),
        network: NetworkRequest::default(),
    };
    let begun = common::now_us();
    let created = room.client.create_many(&request).await?;
    let answered_us = common::now_us() - begun;
    let mut last = begun;
    let mut each_us = Vec::with_capacity(count);
    for vm in &created {
        let written_us = room.first_port_write_us(vm.id)?;
        last = last.max(written_us);
        each_us.push(written_us - begun);
    }
    let ids = created.iter().map(|vm| vm.id).collect();
    Ok(AtOnce { all_us: last - begun, answered_us, each_us, ids })
}

/// Removes VMs, all asked for at once; the microseconds until all were answered.
pub async fn remove_all(room: &Room, ids: &[VmId]) -> Result<u64> {
    let vms = ids.iter().map(ToString::to_string).collect();
    let begun = common::now_us();
    room.client.remove_many(&RemoveManyRequest { vms, force: true }).await?;
    Ok(common::now_us() - begun)
}

/// Runs it.
pub async fn run(programs: &Path, floor: &Path, out: &Path, full: bool) -> Result<()> {
    let last = if full { 2000 } else { AT_ONCE };
    println!("scale: {AT_ONCE} at once, {last} one after another; load {}", common::load());
    let mut room = Room::new(programs)?;
    let name: Name = "scale".parse()?;
    room.bake(&name, MEMORY_BYTES, &words())?;
    let mut floor = Floor::start(floor, &room.memory_of(&name), MEMORY_BYTES)?;
    room.start().await?;
    let first = room.birth(&name).await?;
    room.remove(first.vm.id).await?;

    room.pool_is_full().await?;
    let before = common::settled_available()?;
    floor.many_us(AT_ONCE)?;
    let per_floor = before.saturating_sub(common::settled_available()?) / AT_ONCE as u64;
    floor.end_us()?;

    let nth = Nth::measure(&room, &name, last).await?;

    // A daemon that has seen no such burst has made next to nothing ahead for it.
    room.stop()?;
    room.start_with(&["--pool", &POOL.to_string()]).await?;
    let first = room.birth(&name).await?;
    room.remove(first.vm.id).await?;
    room.pool_is_full().await?;
    let first = at_once(&room, &name, AT_ONCE).await?;
    remove_all(&room, &first.ids).await?;
    room.pool_is_full().await?;
    let first_floor = floor.many_us(AT_ONCE)?;
    floor.end_us()?;
    println!(
        "  {AT_ONCE} at once, for the first time: {}; floor {}",
        shown(first.all_us),
        shown(first_floor)
    );

    let mut counts = vec![AT_ONCE; ROUNDS];
    counts.extend(full.then_some(2000));
    let mut rounds = Vec::new();
    let mut each_us = Vec::new();
    for count in counts {
        room.pool_is_full().await?;
        let ours = at_once(&room, &name, count).await?;
        let removed_us = remove_all(&room, &ours.ids).await?;
        room.pool_is_full().await?;
        let floor_us = floor.many_us(count)?;
        let floor_end_us = floor.end_us()?;
        println!(
            "  {count} at once: {} to the last port write, {} to the last answer; floor {}; removed in {}, floor {}",
            shown(ours.all_us),
            shown(ours.answered_us),
            shown(floor_us),
            shown(removed_us),
            shown(floor_end_us)
        );
        each_us.extend(ours.each_us);
        rounds.push((count, ours.all_us, ours.answered_us, floor_us));
    }
    let at_once = |count: usize| {
        let of = |pick: fn(&(usize, u64, u64, u64)) -> u64| {
            median(&rounds.iter().filter(|r| r.0 == count).map(pick).collect::<Vec<_>>())
        };
        let (all, answered, floor) = (of(|r| r.1), of(|r| r.2), of(|r| r.3));
        json!({
            "all_us": all, "answered_us": answered, "floor_us": floor,
            "per_vm_us": all / count as u64, "ratio_to_floor": ratio(all, floor),
            "rounds": rounds.iter().filter(|r| r.0 == count).count(),
        })
    };

    let leaked = room.end()?;

    nth.print(per_floor);
    println!("  leaked processes: {leaked}");
    let mut value = json!({
        "at_once_512": at_once(AT_ONCE),
        "at_once_512_first": {
            "all_us": first.all_us, "answered_us": first.answered_us, "floor_us": first_floor,
            "ratio_to_floor": ratio(first.all_us, first_floor),
        },
        "load": common::load(),
        "leaked": leaked,
    });
    if full {
        value["at_once_2000"] = at_once(2000);
    }
    if let Some(value) = value.as_object_mut() {
        nth.write(per_floor, value);
    }
    common::write(out, "scale.json", &value)?;
    Plot {
        title: "The n-th birth, beside all that were born before it".into(),
        x: "n",
        y: "milliseconds",
        log_x: false,
        curves: vec![nth.curve()],
    }
    .write(out, "scale.svg")?;
    Plot {
        title: format!("{AT_ONCE} births asked for at once"),
        x: "milliseconds from its own request to its first port write",
        y: "part of the births",
        log_x: false,
        curves: vec![Curve::cdf("dayfly", &each_us)],
    }
    .write(out, "scale-at-once.svg")
}
