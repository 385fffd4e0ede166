/* Starting the other vCPUs, by INIT and SIPI. See ../src/lib.rs, `cpus=`. */
#include "guest.h"

enum { STACK = 4096 };

static u8 stacks[MOST_CPUS][STACK] __attribute__((aligned(16)));
/* How many vCPUs have started; the number of the next one. */
static volatile u64 up = 1;
static volatile u64 turns[MOST_CPUS];

void (*ap_work)(u64 cpu);

/* start.S */
extern u8 ap_start[], ap_end[];
extern volatile u32 ap_cr3;
extern volatile u64 ap_stack;

static const u64 TRAMPOLINE = 0x10000, LAPIC = 0xfee00000;

__attribute__((noreturn)) void ap_main(void) {
    u64 cpu = up++;
    ap_work(cpu);
    halt();
}

static void command(u64 cpu, u32 command) {
    volatile u32 *icr = (volatile u32 *)(LAPIC + 0x300), *to = (volatile u32 *)(LAPIC + 0x310);
    *to = (u32)cpu << 24;
    *icr = command;
}

static void init(u64 cpu) { command(cpu, 0x4500); }
static void sipi(u64 cpu) { command(cpu, 0x4600 | (u32)(TRAMPOLINE >> 12)); }

/* Starts a vCPU and waits until it runs `ap_work`. The vCPUs before it have been started. */
void start_cpu(u64 cpu) {
    u64 cr3, bytes = (u64)(ap_end - ap_start);
    __asm__ volatile("mov %%cr3, %0" : "=r"(cr3));
    ap_cr3 = (u32)cr3;
    ap_stack = (u64)(stacks[cpu] + STACK);
    for (u64 n = 0; n < bytes; n++) ((volatile u8 *)TRAMPOLINE)[n] = ap_start[n];
    init(cpu);
    for (u64 n = 0; up == cpu; n++)
        if (n % 0x10000 == 0) sipi(cpu);
}

static void count_turns(u64 cpu) {
    for (;;) turns[cpu]++;
}

void start_cpus(u64 generation, u64 fixed) {
    u64 running = 1;
    ap_work = count_turns;
    for (;;) {
        until(generation);
        volatile u32 *id = (volatile u32 *)generation;
        u64 wanted = fixed ? fixed : id[0], tried = fixed ? 0 : id[1];
        for (; running < wanted && running < MOST_CPUS; running++) start_cpu(running);
        for (u64 cpu = running; cpu < tried; cpu++) init(cpu), sipi(cpu), sipi(cpu);
        for (u64 cpu = 1; cpu < running; cpu++)
            for (u64 was = turns[cpu]; turns[cpu] == was;) {}
        put("cpus ");
        put_hex(running);
        put(" up ");
        put_hex(up);
        put("\n");
    }
}
