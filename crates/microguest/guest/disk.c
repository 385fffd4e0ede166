/* The first disk: a virtio-blk device over MMIO (virtio 1.2, sections 4.2 and 5.2), one request at
 * a time, polled. */
#include "virtio.h"

enum { SIZE = 4, BLOCK_DEVICE = 2 };

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

/* Resets the device and sets it up with no feature but VERSION_1. Stores the number of its blocks
 * of 4096 bytes in `blocks`. */
const char *disk_open(u64 *blocks) {
    const u64 device = FIRST_DEVICE;
    if (*reg(device, DEVICE_ID) != BLOCK_DEVICE) return "there is no disk";
    device_reset(device);
    avail.flags = NO_INTERRUPT;
    avail.index = 0;
    used.index = 0;
    device_queue(device, 0, SIZE, table, &avail, &used);
    if (!device_start(device)) return "the disk does not start";
    u64 sectors = (u64)*reg(device, CONFIG) | (u64)*reg(device, CONFIG + 4) << 32;
    *blocks = sectors / (PAGE / 512);
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
    *reg(FIRST_DEVICE, QUEUE_NOTIFY) = 0;
    while (used.index != avail.index) {}
    return status ? "the disk refused" : 0;
}
