//! The modules that the machine's initramfs holds.

/// Modules that are loaded before the daemon starts, after their dependencies.
pub(crate) const MODULES: &[&str] = &[
    "virtio_net",
    "virtio_blk",
    "virtio_rng",
    "kvm_amd",
    "tun",
    "vhost_vsock",
    "overlay",
    "virtio_balloon",
    "veth",
    "nf_tables",
    "nft_chain_nat",
    "nft_masq",
    "nft_ct",
    "nft_connlimit",
    "nft_limit",
    "nf_conntrack_netlink",
];

/// Modules that are included so that `modprobe` finds them. Modules that a kernel lacks or has
/// built in are left out.
pub(crate) const EXTRA_MODULES: &[&str] = &[
    "bridge",
    "loop",
    "vsock_loopback",
    "dm_mod",
    "dm_snapshot",
    "dm_thin_pool",
    "nbd",
    "ublk_drv",
    "virtio_mmio",
    "macvlan",
    "vhost_net",
    "sch_ingress",
    "act_mirred",
    "cls_u32",
    "msr",
];
