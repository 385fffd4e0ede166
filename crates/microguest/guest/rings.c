/* Writers on every vCPU: their memory and disk show whether they were copied at one instant. See
 * ../src/lib.rs, `rings=`.
 *
 * Each vCPU numbers its writes and puts them into a ring of pages, each with the numbers that the
 * other vCPUs had reached at that time. If a copy lacks a write, its ring has an older number; if a
 * copy has a later write, its ring has a newer number. If a copy took one vCPU's memory earlier
 * than another's, it has numbers of the first vCPU that this vCPU has not reached. The first
 * vCPU's ring is on the disk too. */
#include "guest.h"

enum { RING = 32, STRIDE = 3 };

/* What a vCPU has reached; all in one page that all of them write. */
static volatile u64 latest[PAGE / 8] __attribute__((aligned(PAGE)));
static volatile u64 buffer[PAGE / 8] __attribute__((aligned(PAGE)));
static u64 next[MOST_CPUS];
static const char *volatile wrong[MOST_CPUS];
/* In which round a vCPU has checked its ring, and in which they may go on. */
static volatile u64 checked[MOST_CPUS], go;
static u64 cpus, generation_at;

static volatile u64 *ring(u64 cpu, u64 n) { return page((cpu * RING + n % RING) * STRIDE); }

struct id {
    u64 low, high;
};

static struct id generation(void) {
    volatile u64 *id = (volatile u64 *)generation_at;
    return (struct id){id[0], id[1]};
}

/* Until the generation is another than `was`. */
static const char *write(u64 cpu, struct id was) {
    volatile u64 *id = (volatile u64 *)generation_at;
    for (; id[0] == was.low && id[1] == was.high; next[cpu]++) {
        u64 n = next[cpu];
        volatile u64 *at = ring(cpu, n);
        at[0] = n;
        for (u64 other = 0; other < cpus; other++) at[1 + other] = latest[other];
        at[511] = ~n;
        if (cpu == 0) {
            const char *failed = disk_move(n % RING, (void *)at, 1, 1);
            if (failed) return failed;
        }
        latest[cpu] = n;
    }
    return 0;
}

static const char *check(u64 cpu) {
    u64 end = next[cpu], n = end > RING ? end - RING : 1, seen[MOST_CPUS] = {0};
    if (latest[cpu] != end - 1) return "the last write and the registers differ";
    for (; n < end; n++) {
        volatile u64 *at = ring(cpu, n);
        if (at[0] != n || at[511] != ~n)
            return at[0] < n ? "a write is missing" : "a write came later";
        for (u64 other = 0; other < cpus; other++) {
            if (at[1 + other] > latest[other]) return "another vCPU's memory is older";
            if (at[1 + other] < seen[other]) return "numbers go back";
            seen[other] = at[1 + other];
        }
        if (cpu == 0) {
            const char *failed = disk_move(n % RING, (void *)buffer, 1, 0);
            if (failed) return failed;
            if (buffer[0] != n || buffer[511] != ~n)
                return buffer[0] < n ? "the disk is older than memory"
                                     : "the disk is newer than memory";
        }
    }
    return 0;
}

/* A round: writes until the generation changes, and checks its ring. Returns the new generation. */
static struct id turn(u64 cpu, struct id was) {
    const char *failed = write(cpu, was);
    struct id is = generation();
    wrong[cpu] = failed ? failed : check(cpu);
    checked[cpu] = go + 1;
    return is;
}

static void write_rounds(u64 cpu) {
    for (struct id id = generation();;) {
        id = turn(cpu, id);
        for (u64 round = checked[cpu]; go < round;) {}
    }
}

static void report(void) {
    u64 all = 0;
    for (u64 cpu = 0; cpu < cpus; cpu++) {
        while (checked[cpu] <= go) {}
        if (wrong[cpu]) {
            put("rings wrong: ");
            put(wrong[cpu]);
            put(", vCPU ");
            put_hex(cpu);
            put(", write ");
            put_hex(next[cpu]);
            put("\n");
            halt();
        }
        all += latest[cpu];
    }
    put("rings ok ");
    put_hex(all);
    put("\n");
}

void rings(u64 generation_address, u64 count) {
    u64 blocks;
    generation_at = generation_address;
    struct id id = generation();
    cpus = count && count <= MOST_CPUS ? count : 1;
    for (u64 cpu = 0; cpu < cpus; cpu++) next[cpu] = 1;
    const char *failed = disk_open(&blocks);
    if (failed || blocks < RING) {
        put("rings wrong: the disk\n");
        halt();
    }
    ap_work = write_rounds;
    for (u64 cpu = 1; cpu < cpus; cpu++) start_cpu(cpu);
    for (;;) {
        put("writing\n");
        id = turn(0, id);
        report();
        if ((char)(id.low >> 32) != 'c') halt();
        go++;
    }
}
