/* The balloon: a virtio-balloon device over MMIO (virtio 1.2, sections 4.2 and 5.5), of which only
 * free-page reporting is used, one report at a time, polled. */
#include "virtio.h"

enum { SIZE = 4, BALLOON = 5, DEVICES = 12, REPORTING = 1 << 5 };
enum { INFLATE = 0, REPORT = 2 }; /* between them: deflate */

static volatile struct {
    u64 addr;
    u32 len;
    u16 flags, next;
} table[3][SIZE] __attribute__((aligned(16)));
static volatile struct {
    u16 flags, index, ring[SIZE];
} avail[3] __attribute__((aligned(4)));
static volatile struct {
    u16 flags, index;
    struct {
        u32 id, len;
    } ring[SIZE];
    u8 alone[PAGE - 4 - SIZE * 8]; /* only the device writes to its page */
} used[3] __attribute__((aligned(PAGE)));

/* Reports pages as free, and waits until the device has taken note. Returns 0, or why not. */
const char *balloon_report(u64 first, u64 pages) {
    u64 device = FIRST_DEVICE;
    for (int n = 0; *reg(device, DEVICE_ID) != BALLOON; n++, device += PAGE)
        if (n == DEVICES) return "there is no balloon";
    device_reset_with(device, REPORTING);
    for (u32 n = INFLATE; n <= REPORT; n++) {
        avail[n].flags = NO_INTERRUPT;
        avail[n].index = used[n].index = 0;
        device_queue(device, n, SIZE, table[n], &avail[n], &used[n]);
    }
    if (!device_start(device)) return "the balloon does not start";
    table[REPORT][0].addr = (u64)page(first);
    table[REPORT][0].len = (u32)(pages * PAGE);
    table[REPORT][0].flags = DEVICE_WRITES;
    avail[REPORT].ring[0] = 0;
    avail[REPORT].index = 1;
    *reg(device, QUEUE_NOTIFY) = REPORT;
    while (used[REPORT].index != 1) {}
    return 0;
}
