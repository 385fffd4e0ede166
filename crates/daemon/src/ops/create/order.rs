//! What a VM is created from, and with which properties.

use crate::model::deadline::Deadline;
use crate::model::request_key::RequestKey;
use crate::model::volumes::VolumeFacts;
use crate::templates::fork_point::ForkPoint;
use crate::templates::open::OpenTemplate;
use crate::vm::batch::Batch;
use crate::vmm::source::Purpose;
use dayfly_api::agent::Request;
use dayfly_api::types::{CreateRequest, Lifetime, NetworkRequest, Source, VmLimits};
use dayfly_units::VmName;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The order for a VM.
#[derive(Debug, Clone)]
pub struct Order {
    /// What the VM starts from.
    pub origin: Origin,
    /// Its name; `None`: its id.
    pub name: Option<VmName>,
    /// Labels from the client, unchanged.
    pub labels: BTreeMap<String, String>,
    /// Whether it is removed when the connection or the bake that ordered it ends.
    pub ephemeral: bool,
    /// The most clones of itself that its guest may have at one time.
    pub forks: u32,
    /// When it ends, and what is left of it.
    pub lifetime: Lifetime,
    /// The deadline of the VM whose guest asks for it, which it must not outlive. It counts instead
    /// of the time to live in `lifetime`.
    pub until: Option<Deadline>,
    /// Whether a client uses it, the pool, or a recording.
    pub purpose: Purpose,
    /// Its network; `None`: as its fork point has it, or the default.
    pub network: Option<NetworkRequest>,
    /// Its volumes; `None`: those of the VM that was forked, or none.
    pub volumes: Option<Vec<VolumeFacts>>,
    /// Its limits. One that is absent is that of the VM that was forked, or none.
    pub limits: Option<VmLimits>,
    /// Its number of vCPUs; `None`: that of its source.
    pub vcpus: Option<u8>,
    /// A request to the agent, sent together with the identity.
    /// [`VmGuard::take_next`](super::VmGuard::take_next) returns the link for its reply.
    pub next: Option<Request>,
    /// The entrypoint of the program in `next`, instead of the image's.
    pub entrypoint: Option<Vec<String>>,
    /// The key of the request, if it has one.
    pub request: Option<RequestKey>,
    /// The batch to which it belongs, if the request is for several VMs.
    pub batch: Option<Arc<Batch>>,
}

/// What a VM starts from.
#[derive(Debug, Clone)]
pub enum Origin {
    /// A source that is looked up by its name.
    Source(Source),
    /// An open snapshot, which need not be in the store yet.
    Template(Arc<OpenTemplate>),
    /// A fork point, and the number of this clone, from 1.
    Fork(Arc<ForkPoint>, u32),
}

impl Order {
    /// The order for a VM of `origin` that a client uses until it is removed, with all else as
    /// usual.
    #[must_use]
    pub const fn of(origin: Origin) -> Self {
        Self {
            origin,
            name: None,
            labels: BTreeMap::new(),
            forks: 0,
            lifetime: Lifetime::UNLIMITED,
            until: None,
            ephemeral: false,
            purpose: Purpose::User,
            network: None,
            volumes: None,
            limits: None,
            vcpus: None,
            next: None,
            entrypoint: None,
            request: None,
            batch: None,
        }
    }

    /// The order for a `create` request, whose volumes were checked to be `volumes`.
    #[must_use]
    pub fn create(request: CreateRequest, volumes: Vec<VolumeFacts>) -> Self {
        Self {
            name: request.name,
            labels: request.labels,
            forks: request.forks,
            lifetime: request.lifetime,
            network: Some(request.network),
            volumes: Some(volumes),
            limits: Some(request.limits),
            vcpus: request.vcpus,
            ..Self::of(Origin::Source(request.source))
        }
    }
}
