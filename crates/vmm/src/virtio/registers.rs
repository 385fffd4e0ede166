//! Status bits and register offsets of a virtio-mmio device (virtio 1.2 sections 2.1 and 4.2.2).

/// Bits of the device status (2.1).
pub mod status {
    /// The driver found the device.
    pub const ACKNOWLEDGE: u8 = 1;
    /// The driver can drive the device.
    pub const DRIVER: u8 = 2;
    /// The driver is ready: the device is live.
    pub const DRIVER_OK: u8 = 4;
    /// The features are agreed.
    pub const FEATURES_OK: u8 = 8;
    /// DEVICE_NEEDS_RESET: the device cannot go on.
    pub const NEEDS_RESET: u8 = 64;
    /// The driver gave up.
    pub const FAILED: u8 = 128;
}

/// Register offsets in bytes (4.2.2, table 4.1).
pub mod register {
    /// MagicValue: "virt".
    pub const MAGIC: u64 = 0x000;
    /// Version: 2.
    pub const VERSION: u64 = 0x004;
    /// DeviceID: the virtio device id.
    pub const DEVICE_ID: u64 = 0x008;
    /// VendorID.
    pub const VENDOR_ID: u64 = 0x00c;
    /// DeviceFeatures: 32 bits of the offered features.
    pub const DEVICE_FEATURES: u64 = 0x010;
    /// DeviceFeaturesSel: which 32 bits.
    pub const DEVICE_FEATURES_SEL: u64 = 0x014;
    /// DriverFeatures: 32 bits of the features that the driver accepts.
    pub const DRIVER_FEATURES: u64 = 0x020;
    /// DriverFeaturesSel: which 32 bits.
    pub const DRIVER_FEATURES_SEL: u64 = 0x024;
    /// QueueSel: the queue that the next registers are about.
    pub const QUEUE_SEL: u64 = 0x030;
    /// QueueNumMax: the queue's largest size, in descriptors; 0 if there is no such queue.
    pub const QUEUE_NUM_MAX: u64 = 0x034;
    /// QueueNum: the queue's size, in descriptors.
    pub const QUEUE_NUM: u64 = 0x038;
    /// QueueReady: whether the queue is in use.
    pub const QUEUE_READY: u64 = 0x044;
    /// QueueNotify: the kick; the value is the queue's index.
    pub const QUEUE_NOTIFY: u64 = 0x050;
    /// InterruptStatus: the reasons of the interrupt.
    pub const INTERRUPT_STATUS: u64 = 0x060;
    /// InterruptACK: the reasons that the driver has handled.
    pub const INTERRUPT_ACK: u64 = 0x064;
    /// Status: the device status.
    pub const STATUS: u64 = 0x070;
    /// QueueDescLow: address of the descriptor table, low half.
    pub const QUEUE_DESC_LOW: u64 = 0x080;
    /// QueueDescHigh: address of the descriptor table, high half.
    pub const QUEUE_DESC_HIGH: u64 = 0x084;
    /// QueueDriverLow: address of the available ring, low half.
    pub const QUEUE_DRIVER_LOW: u64 = 0x090;
    /// QueueDriverHigh: address of the available ring, high half.
    pub const QUEUE_DRIVER_HIGH: u64 = 0x094;
    /// QueueDeviceLow: address of the used ring, low half.
    pub const QUEUE_DEVICE_LOW: u64 = 0x0a0;
    /// QueueDeviceHigh: address of the used ring, high half.
    pub const QUEUE_DEVICE_HIGH: u64 = 0x0a4;
    /// SHMLenLow: length of the selected shared memory region, low half. There are no regions.
    pub const SHM_LEN_LOW: u64 = 0x0b0;
    /// SHMBaseHigh: address of the region, high half. The last of four registers.
    pub const SHM_BASE_HIGH: u64 = 0x0bc;
    /// ConfigGeneration: always 0.
    pub const CONFIG_GENERATION: u64 = 0x0fc;
    /// Start of the device-specific configuration.
    pub const CONFIG: u64 = 0x100;
}
