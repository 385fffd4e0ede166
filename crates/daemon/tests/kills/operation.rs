//! The operations, and at which failpoints each is ended.

use crate::guest;
use crate::living::Living;
use crate::testbed::Testbed;
use anyhow::{Result, bail};
use dayfly_api::types::{BakeRequest, CollectRequest, ForkRequest, Lifetime};
use dayfly_units::CpuModel;
use std::fmt;
use std::time::Duration;

/// An operation on VM `b`, or beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    /// A VM `new` is created.
    Create,
    /// Two clones of `b` are forked.
    Fork,
    /// `b` is forked as snapshot `made`, with one clone.
    ForkAs,
    /// `b` is forked for the fifth time, after which its layers are merged.
    Merge,
    /// A snapshot `made` of `b` is taken.
    Snapshot,
    /// `b` is paused.
    Pause,
    /// `b`, which is paused, is resumed.
    Unpause,
    /// `b`, which was killed, is started again.
    Start,
    /// The time to live of `b` ends.
    Expire,
    /// `b` is removed.
    Remove,
    /// The snapshot `made` of a clone of `b` is removed.
    RemoveSnapshot,
    /// A snapshot `made` is baked.
    Bake,
    /// Layers and pages without a user are removed.
    Gc,
}

impl Operation {
    pub const ALL: [Self; 13] = [
        Self::Create,
        Self::Fork,
        Self::ForkAs,
        Self::Merge,
        Self::Snapshot,
        Self::Pause,
        Self::Unpause,
        Self::Start,
        Self::Expire,
        Self::Remove,
        Self::RemoveSnapshot,
        Self::Bake,
        Self::Gc,
    ];
}

/// One kill.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub point: &'static str,
    /// The pass of the failpoint that is the last, counted from when it is armed.
    pub pass: u32,
    pub operation: Operation,
}

impl Case {
    /// What arms the failpoint.
    pub fn armed(&self) -> String {
        format!("{}:{}", self.point, self.pass)
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {:?}", self.armed(), self.operation)
    }
}

/// Failpoints that no operation of this test passes, each with its reason.
pub const ELSEWHERE: [(&str, &str); 4] = [
    ("daemon.open_snapshot.loaded", "an opening changes nothing that the next daemon finds"),
    ("store.copy_layer.copied", "only if a VMM keeps a writable descriptor of a frozen layer"),
    ("store.copy_layer.map_exchanged", "likewise"),
    ("store.replace.renamed", "only in uploads of images and kernels"),
];

/// All kills.
pub fn cases() -> Vec<Case> {
    let of = |point: &'static str| {
        let all = passes(point).into_iter();
        all.map(move |(pass, operation)| Case { point, pass, operation })
    };
    dayfly_daemon::failpoints::all().into_iter().flat_map(of).collect()
}

/// The passes of a failpoint to kill at.
fn passes(point: &str) -> Vec<(u32, Operation)> {
    use Operation::{
        Bake, Create, Expire, Fork, ForkAs, Gc, Merge, Pause, Remove, RemoveSnapshot, Snapshot,
        Start, Unpause,
    };
    let first = |operations: &[Operation]| operations.iter().map(|of| (1, *of)).collect();
    match point {
        "daemon.create.recorded" => vec![(1, Create), (1, Fork), (2, Fork)],
        "daemon.fork.child" => vec![(1, Fork), (2, Fork)],
        "daemon.save.frozen" | "daemon.publish.prepared" => first(&[Snapshot, Bake]),
        "daemon.publish.committed" | "store.commit.published" => first(&[Snapshot, Bake, ForkAs]),
        "store.freeze.next_made" | "store.freeze.map_made" => first(&[Fork, Snapshot]),
        "store.release_layer.map_removed" | "store.release_layer.data_removed" => {
            first(&[Snapshot, Remove])
        }
        _ if ELSEWHERE.iter().any(|(elsewhere, _)| *elsewhere == point) => Vec::new(),
        _ => first(&[match point.rsplit_once('.').unwrap_or_default().0 {
            "daemon.create" => Create,
            "daemon.power" => return first(&[Pause, Unpause]),
            "daemon.expire" => Expire,
            "daemon.start" => Start,
            "daemon.fork" => Fork,
            "daemon.pending" => ForkAs,
            "daemon.merge" | "store.merge" => Merge,
            "daemon.snapshot" | "daemon.save" | "daemon.publish" => Snapshot,
            "daemon.packer" | "store.prepare" | "store.put_pages" | "store.commit" => Snapshot,
            "daemon.remove" | "store.remove_vm" => Remove,
            "daemon.remove_snapshot" | "store.remove" | "store.gc" => RemoveSnapshot,
            "store.gc_pages" => RemoveSnapshot,
            "daemon.bake" => Bake,
            "daemon.gc" => Gc,
            _ => return Vec::new(),
        }]),
    }
}

fn fork_request(count: u32, template: Option<&str>) -> ForkRequest {
    ForkRequest {
        count,
        name: None,
        labels: [].into(),
        forks: 0,
        egress: None,
        publish: Vec::new(),
        publish_exposed: false,
        lifetime: Lifetime::UNLIMITED,
        limits: None,
        template: template.and_then(|name| name.parse().ok()),
    }
}

/// What has to be there before the operation.
pub async fn prepare(bed: &Testbed, b: &Living, operation: Operation) -> Result<()> {
    match operation {
        Operation::Merge => {
            for _ in 0..4 {
                let forked = bed.client.fork(&b.word(), &fork_request(1, None)).await?;
                for clone in forked.items {
                    bed.client.remove_vm(&clone.id.to_string(), true).await?;
                }
            }
        }
        Operation::Unpause => bed.client.pause(&b.word()).await?,
        Operation::Start => bed.client.kill(&b.word()).await?,
        // Of a clone that is gone, because layers that a VM uses are not collected.
        Operation::RemoveSnapshot => {
            let forked = bed.client.fork(&b.word(), &fork_request(1, None)).await?;
            for clone in forked.items {
                guest::snapshot(bed, clone.id, "made").await?;
                bed.client.remove_vm(&clone.id.to_string(), true).await?;
            }
        }
        _ => {}
    }
    Ok(())
}

/// Asks for the operation. The daemon dies meanwhile, or after its answer.
pub async fn run(bed: &Testbed, b: &Living, operation: Operation) -> Result<()> {
    let answered = answer(bed, b, operation).await;
    // A refusal is another error than the end of the connection.
    match answered {
        Err(error) if refused(&error) => bail!("refused: {error:#}"),
        _ => Ok(()),
    }
}

fn refused(error: &anyhow::Error) -> bool {
    let client = error.downcast_ref::<dayfly_api::client::ClientError>();
    client.is_some_and(|error| error.code().is_some()) || error.is::<guest::Refused>()
}

async fn answer(bed: &Testbed, b: &Living, operation: Operation) -> Result<()> {
    let (client, vm) = (&bed.client, b.word());
    match operation {
        Operation::Create => guest::clone(bed, guest::BASE, "new").await.map(drop)?,
        Operation::Fork => client.fork(&vm, &fork_request(2, None)).await.map(drop)?,
        Operation::ForkAs => client.fork(&vm, &fork_request(1, Some("made"))).await.map(drop)?,
        Operation::Merge => client.fork(&vm, &fork_request(1, None)).await.map(drop)?,
        Operation::Snapshot => guest::snapshot(bed, b.id, "made").await?,
        Operation::Pause => client.pause(&vm).await?,
        Operation::Unpause => client.unpause(&vm).await?,
        Operation::Start => guest::start_again(bed, b.id).await?,
        Operation::Expire => {
            client.set_ttl(&vm, Some(Duration::from_millis(1))).await?;
            client.wait(&vm).await.map(drop)?;
        }
        Operation::Remove => client.remove_vm(&vm, true).await?,
        Operation::RemoveSnapshot => client.remove_snapshot(&guest::name("made")?).await?,
        Operation::Bake => bake(bed).await?,
        Operation::Gc => {
            guest::made(client.collect_store(&CollectRequest::default()).await?).await?
        }
    }
    Ok(())
}

async fn bake(bed: &Testbed) -> Result<()> {
    let request = BakeRequest {
        image: guest::name(guest::GUEST)?,
        name: guest::name("made")?,
        kernel: Some(guest::name(guest::GUEST)?),
        memory_bytes: guest::MEMORY_BYTES,
        vcpus: 1,
        cpu_model: CpuModel::Host,
        warmup: None,
        recording: None,
        init: None,
        egress: None,
    };
    let baked = async { guest::made(bed.client.bake(&request).await?).await };
    tokio::try_join!(baked, guest::report_ready(bed, "ready\n")).map(drop)
}
