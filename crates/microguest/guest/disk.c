/* The first disk: a virtio-blk device over MMIO (virtio 1.2, sections 4.2 and 5.2), one request at
 * a time, polled. */
#include "guest.h"

static const u64 DEVICE = 0xd0000000; /* vmm::virtio::MMIO_BASE */

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
enum { SIZE = 4, NEXT = 1, DEVICE_WRITES = 2, NO_INTERRUPT = 1, BLOCK_DEVICE = 2 };

static volatile struct {
    u64 addr;
    u32 len;
    u16 flags, next;
} table[SIZE] __attribute__((aligned(16)));
static volatile struct {
    u16 flags, index, ring[SIZE];
} avail __attribute__((aligned(4)));
static volatile struct {
    u16 flags, index;
    struct {
        u32 id, len;
    } ring[SIZE];
    u8 alone[PAGE - 4 - SIZE * 8]; /* only the device writes to its page */
} used __attribute__((aligned(PAGE)));
static volatile struct {
    u32 type, reserved;
    u64 sector;
} header;
static volatile u8 status;

static volatile u32 *reg(u64 offset) { return (volatile u32 *)(DEVICE + offset); }

static void address(u64 offset, volatile void *at) {
    *reg(offset) = (u32)(u64)at;
    *reg(offset + 4) = (u32)((u64)at >> 32);
}

/* Resets the device and sets it up with no feature but VERSION_1. Stores the number of its blocks
 * of 4096 bytes in `blocks`. */
const char *disk_open(u64 *blocks) {
    if (*reg(DEVICE_ID) != BLOCK_DEVICE) return "there is no disk";
    *reg(STATUS) = 0;
    while (*reg(STATUS)) {}
    *reg(STATUS) = 1;
    *reg(STATUS) = 3;
    *reg(DRIVER_FEATURES_SEL) = 0;
    *reg(DRIVER_FEATURES) = 0;
    *reg(DRIVER_FEATURES_SEL) = 1;
    *reg(DRIVER_FEATURES) = 1;
    *reg(STATUS) = 11;
    avail.flags = NO_INTERRUPT;
    avail.index = 0;
    used.index = 0;
    *reg(QUEUE_SEL) = 0;
    *reg(QUEUE_NUM) = SIZE;
    address(QUEUE_DESC, table);
    address(QUEUE_DRIVER, &avail);
    address(QUEUE_DEVICE, &used);
    *reg(QUEUE_READY) = 1;
    *reg(STATUS) = 15;
    if (*reg(STATUS) != 15) return "the disk does not start";
    *blocks = ((u64)*reg(CONFIG) | (u64)*reg(CONFIG + 4) << 32) / (PAGE / 512);
    return 0;
}

static void describe(int n, volatile void *at, u32 len, u16 flags) {
    table[n].addr = (u64)at;
    table[n].len = len;
    table[n].flags = flags;
    table[n].next = (u16)(n + 1);
}

/* Reads `blocks` blocks from `block` on into the buffer, or writes them. */
const char *disk_move(u64 block, void *buffer, u32 blocks, int write) {
    header.type = write ? 1 : 0;
    header.reserved = 0;
    header.sector = block * (PAGE / 512);
    status = 0xff;
    describe(0, &header, sizeof header, NEXT);
    describe(1, buffer, blocks * PAGE, write ? NEXT : NEXT | DEVICE_WRITES);
    describe(2, &status, 1, DEVICE_WRITES);
    avail.ring[avail.index % SIZE] = 0;
    avail.index++;
    *reg(QUEUE_NOTIFY) = 0;
    while (used.index != avail.index) {}
    return status ? "the disk refused" : 0;
}
