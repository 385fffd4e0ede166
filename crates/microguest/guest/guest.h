/* What the files of the microguest share. */
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;

enum { PAGE = 4096, MOST_CPUS = 16 };
static const u64 PATTERN_BASE = 0x2000000; /* 32 MiB: above the guest itself */

static inline volatile u64 *page(u64 n) { return (volatile u64 *)(PATTERN_BASE + n * PAGE); }
static inline u64 word(u64 seed, u64 n) { return (seed + n + 1) * 0x9e3779b97f4a7c15ul; }

void put(const char *text);
void put_hex(u64 n);
__attribute__((noreturn)) void halt(void);
void until(u64 generation);

/* grow.c */
__attribute__((noreturn)) void grow(u64 generation, u64 count, u64 seed, u64 end, char then);
/* aps.c */
__attribute__((noreturn)) void start_cpus(u64 generation, u64 fixed);
extern void (*ap_work)(u64 cpu);
void start_cpu(u64 cpu);
/* rings.c */
__attribute__((noreturn)) void rings(u64 generation, u64 cpus);
/* flood.c */
__attribute__((noreturn)) void serve(void);
__attribute__((noreturn)) void flood(u64 name_service, u64 pages);
/* balloon.c: returns 0, or why not. */
const char *balloon_report(u64 first, u64 pages);
/* disk.c: both return 0, or why not. */
const char *disk_open(u64 *blocks);
const char *disk_move(u64 block, void *buffer, u32 blocks, int write);
