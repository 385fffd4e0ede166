/* A guest that is cloned and snapshotted again and again. On request it writes blocks and pages and
 * remembers which, and checks that each has the content of its last write. See ../src/lib.rs,
 * `Growth`. */
#include "guest.h"

enum { SLOTS = 8192, FEW_SLOTS = 256, KEPT_WRITES = 1024, READ_AT_ONCE = 16 };

/* Which seed wrote a slot's block and page last; 0: none. In RAM, so every snapshot has its own. */
static volatile u32 owners[SLOTS];
static volatile u64 buffer[READ_AT_ONCE][PAGE / 8] __attribute__((aligned(PAGE)));
/* Churn writes every KEPT_WRITES-th block from this page, which equals its block until the next
 * such write. So a page map that is made meanwhile has something to name. */
static volatile u64 kept[PAGE / 8] __attribute__((aligned(PAGE)));

static int owned(const volatile u64 *at, u64 seed, u64 slot) {
    return seed ? at[0] == word(seed, slot) && at[511] == ~word(seed, slot) : !at[0] && !at[511];
}

static void own(volatile u64 *at, u64 seed, u64 slot) {
    at[0] = word(seed, slot);
    at[511] = ~word(seed, slot);
}

static u64 next(u64 *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return (*state >> 32) % SLOTS;
}

/* Between any two of these steps the VM may be snapshotted: a clone does the rest, to its own disk
 * and memory. */
static const char *write_slot(volatile u64 *from, u64 seed, u64 slot, u64 stride) {
    own(from, seed, slot);
    const char *failed = disk_move(slot * stride, (void *)from, 1, 1);
    if (failed) return failed;
    own(page(slot), seed, slot);
    owners[slot] = (u32)seed;
    return 0;
}

static const char *write(u64 seed, u64 count, u64 stride) {
    u64 state = seed * 2 + 1;
    for (u64 n = 0; n < count; n++) {
        const char *failed = write_slot(buffer[0], seed, next(&state), stride);
        if (failed) return failed;
    }
    return 0;
}

/* Writes the first slots, each with another seed, until the generation changes. */
static const char *churn(u64 seed, u64 slots, u64 stride, u64 generation) {
    volatile u64 *id = (volatile u64 *)generation;
    u64 low = id[0], high = id[1], state = seed * 2 + 1;
    put("churning\n");
    for (u64 n = 0; id[0] == low && id[1] == high; seed++, n++) {
        volatile u64 *from = n % KEPT_WRITES ? buffer[0] : kept;
        const char *failed = write_slot(from, seed, next(&state) % slots, stride);
        if (failed) return failed;
    }
    return 0;
}

/* Neighbouring blocks are read at once: a request takes hundreds of instructions, and KVM may
 * emulate each of them. */
static const char *look(u64 stride, u64 *slot, u64 *found) {
    u32 blocks = stride == 1 ? READ_AT_ONCE : 1;
    for (*slot = 0; *slot < SLOTS; (*slot)++) {
        u64 at = *slot % blocks;
        const char *failed = at ? 0 : disk_move(*slot * stride, (void *)buffer, blocks, 0);
        if (failed) return failed;
        if (!owned(buffer[at], owners[*slot], *slot)) return "another block";
        if (!owned(page(*slot), owners[*slot], *slot)) return "another page";
        *found += owners[*slot] != 0;
    }
    return 0;
}

static const char *obey(u64 seed, char what, u64 count, u64 generation) {
    u64 blocks = 0, slot = 0, found = 0;
    const char *failed = disk_open(&blocks);
    if (!failed && blocks < SLOTS) failed = "the disk is too small";
    if (!failed && what == 'g') failed = write(seed, count, blocks / SLOTS);
    if (!failed && what == 'c') failed = churn(seed, SLOTS, blocks / SLOTS, generation);
    if (!failed && what == 's') failed = churn(seed, FEW_SLOTS, blocks / SLOTS, generation);
    if (!failed && what == 'l') failed = look(blocks / SLOTS, &slot, &found);
    if (failed) {
        put("failed: ");
        put(failed);
        put(", slot ");
        put_hex(slot);
    } else {
        put(what == 'l' ? "found " : "grown ");
        put_hex(what == 'l' ? found : seed);
    }
    put("\n");
    return failed;
}

enum { LOOKED = 1 }; /* THEN was `h`, and the guest churned */

void grow(u64 generation, u64 count, u64 seed, u64 end, char then) {
    volatile u32 *id = (volatile u32 *)generation;
    for (; seed < end; seed++)
        if (obey(seed, 'g', count, generation)) halt();
    for (char what = 0;;) {
        if (what != 'c' && what != 's') until(generation);
        what = (char)id[1];
        if (id[2] == 0x68434644 && id[3] == 0x0a6e6961) { /* "DFChain\n" */
            if (obey(id[0], what, count, generation)) halt();
            continue;
        }
        what = then == 'h' ? 'c' : then;
        if (!then || obey(0, 'l', count, generation) || then == LOOKED) halt();
        if (then == 'h') then = LOOKED;
        if (what != 'l' && obey(seed++, what, count, generation)) halt();
    }
}
