/* virtio over MMIO (virtio 1.2, section 4.2): what the drivers share. */
#include "guest.h"

static const u64 FIRST_DEVICE = 0xd0000000; /* vmm::virtio::MMIO_BASE */

enum {
    DEVICE_ID = 0x08,
    DRIVER_FEATURES = 0x20,
    DRIVER_FEATURES_SEL = 0x24,
    QUEUE_SEL = 0x30,
    QUEUE_NUM = 0x38,
    QUEUE_READY = 0x44,
    QUEUE_NOTIFY = 0x50,
    STATUS = 0x70,
    QUEUE_DESC = 0x80,
    QUEUE_DRIVER = 0x90,
    QUEUE_DEVICE = 0xa0,
    CONFIG = 0x100,
};
/* Flags of a descriptor, of the driver's ring, and of the device's ring. */
enum { NEXT = 1, DEVICE_WRITES = 2, NO_INTERRUPT = 1, NO_KICK = 1 };

static inline volatile u32 *reg(u64 device, u64 offset) {
    return (volatile u32 *)(device + offset);
}

static inline void address(u64 device, u64 offset, volatile void *at) {
    *reg(device, offset) = (u32)(u64)at;
    *reg(device, offset + 4) = (u32)((u64)at >> 32);
}

/* Resets the device, and agrees on VERSION_1 and these features below bit 32. */
static inline void device_reset_with(u64 device, u32 features) {
    *reg(device, STATUS) = 0;
    while (*reg(device, STATUS)) {}
    *reg(device, STATUS) = 1;
    *reg(device, STATUS) = 3;
    *reg(device, DRIVER_FEATURES_SEL) = 0;
    *reg(device, DRIVER_FEATURES) = features;
    *reg(device, DRIVER_FEATURES_SEL) = 1;
    *reg(device, DRIVER_FEATURES) = 1;
    *reg(device, STATUS) = 11;
}

/* Resets the device, and agrees on no feature but VERSION_1. */
static inline void device_reset(u64 device) { device_reset_with(device, 0); }

/* Makes a queue of `size` descriptors ready. */
static inline void device_queue(u64 device, u32 number, u32 size, volatile void *table,
                                volatile void *avail, volatile void *used) {
    *reg(device, QUEUE_SEL) = number;
    *reg(device, QUEUE_NUM) = size;
    address(device, QUEUE_DESC, table);
    address(device, QUEUE_DRIVER, avail);
    address(device, QUEUE_DEVICE, used);
    *reg(device, QUEUE_READY) = 1;
}

/* Returns 0 if the device does not start. */
static inline int device_start(u64 device) {
    *reg(device, STATUS) = 15;
    return *reg(device, STATUS) == 15;
}
