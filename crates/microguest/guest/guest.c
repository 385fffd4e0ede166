/* The microguest: runs the words of its command line, one after another. See ../src/lib.rs for the
 * words. */
#include "guest.h"

enum {
    POST = 0x80, /* where firmware reports its progress; no device answers */
    COM1 = 0x3f8,
    I8042 = 0x64,
    PVPANIC = 0x505,
    ACPI_SLEEP = 0x600,
    ACPI_RESET = 0x602,
};
static const u64 HOLE_START = 0xc0000000, HOLE_END = 0x100000000; /* no RAM between them */

static inline void outb(u16 port, u8 value) {
    __asm__ volatile("outb %0, %1" : : "a"(value), "Nd"(port) : "memory");
}

void put(const char *text) {
    for (; *text; text++) outb(COM1, (u8)*text);
}

void put_hex(u64 n) {
    int shift = 60;
    while (shift > 0 && !(n >> shift)) shift -= 4;
    for (; shift >= 0; shift -= 4) outb(COM1, (u8)"0123456789abcdef"[(n >> shift) & 15]);
}

static u64 hex(const char **at) {
    u64 n = 0;
    for (;; (*at)++) {
        char c = **at;
        if (c >= '0' && c <= '9') n = n << 4 | (u64)(c - '0');
        else if (c >= 'a' && c <= 'f') n = n << 4 | (u64)(c - 'a' + 10);
        else return n;
    }
}

static void fill(u64 seed, u64 pages) {
    for (u64 n = 0; n < pages; n++) {
        page(n)[0] = word(seed, n);
        page(n)[511] = ~word(seed, n);
    }
}

/* 0 when every page holds the seed's pattern, else 1 + the first page that does not. */
static u64 wrong(u64 seed, u64 pages) {
    for (u64 n = 0; n < pages; n++)
        if (page(n)[0] != word(seed, n) || page(n)[511] != ~word(seed, n)) return n + 1;
    return 0;
}

static void verify(u64 seed, u64 pages) {
    u64 bad = wrong(seed, pages);
    put(bad ? "verify bad page " : "verify ok seed ");
    put_hex(bad ? bad - 1 : seed);
    put("\n");
}

void halt(void) {
    for (;;) __asm__ volatile("cli; hlt");
}

static void triple(void) {
    struct __attribute__((packed)) { u16 limit; u64 base; } none = {0, 0};
    __asm__ volatile("lidt %0" : : "m"(none));
    *(volatile u8 *)0x8000000000ul = 0; /* 512 GiB: not mapped */
    halt();
}

static void end(char how) {
    if (how == 'o') outb(ACPI_SLEEP, 5 << 2 | 1 << 5);
    if (how == 'k') outb(I8042, 0xfe);
    if (how == 'a') outb(ACPI_RESET, 6);
    if (how == 't') triple();
    if (how == 'p') outb(PVPANIC, 1);
}

/* Prints a growing count now and then, until the 16 bytes at `generation` are no longer `low` and
 * `high` (0: for ever). */
static void count(u64 generation, u64 low, u64 high) {
    volatile u64 *id = (volatile u64 *)generation;
    for (u64 n = 0;; n++) {
        if ((n & 0x3fff) == 0) {
            put("count ");
            put_hex(n);
            put("\n");
        }
        if (generation && (id[0] != low || id[1] != high)) return;
    }
}

/* Prints `ready` and waits until the 16 bytes at `generation` change. They are read first, because
 * a reader of `ready` may save this VM before its next instruction: the clone would then wait for
 * the id after its own. Prints nothing afterwards, so that a clone's first output is its own. A
 * clone writes to POST at once, before it reads its next word: reading takes hundreds of
 * instructions, and KVM may emulate each of them. */
void until(u64 generation) {
    volatile u64 *id = (volatile u64 *)generation;
    u64 low = id[0], high = id[1];
    put("ready\n");
    while (id[0] == low && id[1] == high) {}
    outb(POST, 1);
}

/* Maps 4 to 12 GiB onto themselves, as the VMM mapped the first 4 GiB: RAM above the hole below
 * 4 GiB. */
static void map_high(void) {
    static u64 directories[8][512] __attribute__((aligned(PAGE)));
    u64 *pml4, *pdpt;
    __asm__ volatile("mov %%cr3, %0" : "=r"(pml4));
    pdpt = (u64 *)(pml4[0] & ~(u64)(PAGE - 1));
    for (u64 gib = 4; gib < 12; gib++) {
        for (u64 n = 0; n < 512; n++) directories[gib - 4][n] = gib << 30 | n << 21 | 1 << 7 | 3;
        pdpt[gib] = (u64)directories[gib - 4] | 3;
    }
}

/* Writes one word to each page of [from, end); the least that makes a page this VM's own. A round
 * of the loop writes eight pages: if KVM emulates each instruction, counting takes longer than
 * writing. */
static void touch(u64 from, u64 end) {
    const u64 words = PAGE / sizeof(u64);
    u64 at = from;
    for (; at + 8 * PAGE <= end; at += 8 * PAGE) {
        volatile u64 *page = (volatile u64 *)at;
        page[0] = page[words] = page[2 * words] = page[3 * words] = at;
        page[4 * words] = page[5 * words] = page[6 * words] = page[7 * words] = at;
    }
    for (; at < end; at += PAGE) *(volatile u64 *)at = at;
}

/* Rewrites pages over and over, and prints a dot whenever it has done so `turns` times. */
static void work(u64 pages, u64 turns) {
    for (;;) {
        for (u64 n = 0; n < turns; n++) touch(PATTERN_BASE, PATTERN_BASE + pages * PAGE);
        put(".");
    }
}

/* One pass of a counting sort, stable, by eight bits of the keys. */
static void sort_pass(const volatile u32 *from, volatile u32 *to, u64 keys, int shift) {
    static volatile u32 places[256];
    for (u64 d = 0; d < 256; d++) places[d] = 0;
    for (u64 n = 0; n < keys; n++) places[from[n] >> shift & 255]++;
    u32 place = 0;
    for (u64 d = 0; d < 256; d++) {
        u32 count = places[d];
        places[d] = place;
        place += count;
    }
    for (u64 n = 0; n < keys; n++) to[places[from[n] >> shift & 255]++] = from[n];
}

/* Makes keys from the seed, sorts them, and prints whether they are in order; the digest shows
 * whether they are the right ones. */
static void sort(u64 seed, u64 keys) {
    volatile u32 *at = (volatile u32 *)PATTERN_BASE, *other = at + keys;
    u64 state = seed * 2 + 1, digest = 0;
    for (u64 n = 0; n < keys; n++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        at[n] = (u32)(state >> 32);
    }
    for (int shift = 0; shift < 32; shift += 16) {
        sort_pass(at, other, keys, shift);
        sort_pass(other, at, keys, shift + 8);
    }
    for (u64 n = 0; n < keys; n++) {
        if (n > 0 && at[n - 1] > at[n]) {
            put("sort wrong at ");
            put_hex(n);
            put("\n");
            return;
        }
        digest = digest * 31 + at[n];
    }
    put("sorted ");
    put_hex(keys);
    put(" digest ");
    put_hex(digest);
    put("\n");
}

/* After a restore: the new generation says what this copy does (see lib.rs, `orders`). All of it is
 * read before anything is printed, because a reader of `obeyed` may save this VM before its next
 * instruction: the clone would then end as its own orders say, without having obeyed. */
static void obey(u64 generation, u64 *seed, u64 pages) {
    volatile u8 *id = (volatile u8 *)generation;
    char how = (char)id[4];
    u64 fresh = (u64)id[0] | (u64)id[1] << 8 | (u64)id[2] << 16 | (u64)id[3] << 24;
    verify(*seed, pages);
    fill(fresh, pages);
    verify(fresh, pages);
    *seed = fresh;
    put("obeyed ");
    put_hex(fresh);
    put("\n");
    end(how);
}

/* Writes a page to each of `blocks` blocks of the disk, from the first one on. */
static void write_blocks(u64 blocks) {
    u64 all = 0;
    const char *failed = disk_open(&all);
    for (u64 n = 0; !failed && n < blocks; n++) {
        page(0)[0] = n + 1;
        failed = disk_move(n, (void *)page(0), 1, 1);
    }
    put(failed ? failed : "written");
    put("\n");
}

static int starts(const char *text, const char *with) {
    for (; *with; text++, with++)
        if (*text != *with) return 0;
    return 1;
}

/* The words: the initramfs, which ends with a zero byte, or without one the command line. The
 * initramfs is copied, because words may write to any page. */
static const char *words(const u8 *boot_params) {
    static char copy[1024];
    const char *initramfs = (const char *)(u64)*(const u32 *)(boot_params + 0x218);
    u32 length = *(const u32 *)(boot_params + 0x21c);
    if (!length) return (const char *)(u64)*(const u32 *)(boot_params + 0x228);
    for (u32 n = 0; n < length && n < sizeof copy - 1; n++) copy[n] = initramfs[n];
    return copy;
}

void guest_main(const u8 *boot_params) {
    const char *at = words(boot_params);
    u64 seed = 0, pages = 0;
    put("microguest\n");
    while (*at) {
        const char *next = at;
        while (*next && *next != ' ') next++;
        if (starts(at, "fill=") || starts(at, "verify=")) {
            int filling = *at == 'f';
            at += filling ? 5 : 7;
            seed = hex(&at);
            if (*at == ':') at++;
            pages = hex(&at);
            if (filling) fill(seed, pages);
            verify(seed, pages);
        } else if (starts(at, "wait=")) {
            at += 5;
            u64 generation = hex(&at);
            volatile u64 *id = (volatile u64 *)generation;
            u64 low = generation ? id[0] : 0, high = generation ? id[1] : 0;
            put("ready\n");
            for (;;) {
                count(generation, low, high);
                low = id[0], high = id[1];
                obey(generation, &seed, pages);
            }
        } else if (starts(at, "until=")) {
            at += 6;
            u64 generation = hex(&at);
            until(generation);
        } else if (starts(at, "born=")) {
            at += 5;
            u64 generation = hex(&at);
            until(generation);
            halt();
        } else if (starts(at, "grow=")) {
            at += 5;
            u64 generation = hex(&at);
            if (*at == ':') at++;
            u64 count = hex(&at);
            if (*at == ':') at++;
            u64 seeds = hex(&at), first = 1;
            if (*at == ':') at++, first = hex(&at);
            grow(generation, count, first, first + seeds, *at == ':' ? at[1] : 0);
        } else if (starts(at, "rings=")) {
            at += 6;
            u64 generation = hex(&at);
            if (*at == ':') at++;
            rings(generation, hex(&at));
        } else if (starts(at, "cpus=")) {
            at += 5;
            u64 generation = hex(&at);
            if (*at == ':') at++;
            start_cpus(generation, hex(&at));
        } else if (starts(at, "write=")) {
            at += 6;
            write_blocks(hex(&at));
        } else if (starts(at, "give=")) {
            at += 5;
            u64 first = hex(&at);
            if (*at == ':') at++;
            const char *failed = balloon_report(first, hex(&at));
            put(failed ? failed : "given");
            put("\n");
        } else if (starts(at, "serve")) {
            serve();
        } else if (starts(at, "flood=")) {
            at += 6;
            u64 name_service = hex(&at);
            if (*at == ':') at++;
            flood(name_service, hex(&at));
        } else if (starts(at, "touch=")) {
            at += 6;
            u64 end = PATTERN_BASE + hex(&at) * PAGE;
            touch(PATTERN_BASE, end < HOLE_START ? end : HOLE_START);
            if (end > HOLE_START) {
                map_high();
                touch(HOLE_END, end - HOLE_START + HOLE_END);
            }
        } else if (starts(at, "work=")) {
            at += 5;
            u64 hot = hex(&at);
            if (*at == ':') at++;
            work(hot, hex(&at));
        } else if (starts(at, "sort=")) {
            at += 5;
            u64 from = hex(&at);
            if (*at == ':') at++;
            sort(from, hex(&at));
        } else if (starts(at, "count")) {
            count(0, 0, 0);
        } else if (starts(at, "end=")) {
            end(at[4]);
        } else if (starts(at, "say=")) {
            for (at += 4; at < next; at++) outb(COM1, (u8)*at);
            put("\n");
        } else if (at != next) {
            put("unknown word\n");
        }
        for (at = next; *at == ' '; at++) {}
    }
    put("done\n");
    halt();
}
