/* The floor: the least that a VM in a separate process costs. No jail, no devices, no daemon: open
 * /dev/kvm, VM, interrupt controllers, one vCPU, one memory slot on a MAP_PRIVATE mapping of a
 * snapshot's memory file, registers, KVM_RUN to the first port write.
 *
 * The guest runs the template's code: the reset vector that dayfly's VMM writes to 0xffff0 of every
 * VM (real mode, `mov dx, 0x602; mov al, 6; out dx, al`), so no page is copied.
 *
 * usage: birth MEMORY-FILE BYTES
 * The driver reads commands from stdin and answers on stdout with times in ns (CLOCK_MONOTONIC):
 *   one      one process, ended and reaped before the answer:
 *            "BEFORE-THE-FORK FIRST-PORT-WRITE"
 *   many N   N processes at once, which stay:
 *            "BEFORE-THE-FIRST-FORK LAST-FIRST-PORT-WRITE"
 *   end      SIGKILL for all of them, then reap all:
 *            "BEFORE ALL-REAPED"
 *   munmap B touches B bytes of private anonymous memory in 4 KiB pages, then unmaps them on one
 *            thread: "BEFORE AFTER"
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { REPORT_FD = 3, MOST = 4096 };

extern char **environ;

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void fail(const char *what) {
    fprintf(stderr, "floor: %s: %s\n", what, strerror(errno));
    _exit(1);
}

/* The process of one VM: reports when its guest wrote to a port, then ends, or with `hold` waits
 * for SIGKILL. */
static int child(const char *memory, size_t bytes, int hold) {
    int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);
    int vm = ioctl(kvm, KVM_CREATE_VM, 0);
    if (vm < 0) fail("KVM_CREATE_VM");
    int file = open(memory, O_RDONLY | O_CLOEXEC);
    if (file < 0) fail(memory);
    void *ram = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file, 0);
    if (ram == MAP_FAILED) fail("mmap of the memory file");
    struct kvm_userspace_memory_region slot = {
        .guest_phys_addr = 0, .memory_size = bytes, .userspace_addr = (uint64_t)ram,
    };
    if (ioctl(vm, KVM_SET_USER_MEMORY_REGION, &slot)) fail("KVM_SET_USER_MEMORY_REGION");
    /* After the slot, because KVM_CREATE_IRQCHIP starts a grace period of the VM's SRCU
     * (kvm_io_bus_register_dev's call_srcu, Linux 6.18). KVM_SET_USER_MEMORY_REGION would wait for
     * its end: 5 to 8 ms instead of 0.7. */
    if (ioctl(vm, KVM_CREATE_IRQCHIP, 0)) fail("KVM_CREATE_IRQCHIP");
    int vcpu = ioctl(vm, KVM_CREATE_VCPU, 0);
    if (vcpu < 0) fail("KVM_CREATE_VCPU");
    struct kvm_sregs sregs;
    if (ioctl(vcpu, KVM_GET_SREGS, &sregs)) fail("KVM_GET_SREGS");
    sregs.cs.selector = 0xf000;
    sregs.cs.base = 0xf0000;
    if (ioctl(vcpu, KVM_SET_SREGS, &sregs)) fail("KVM_SET_SREGS");
    struct kvm_regs regs = {.rip = 0xfff0, .rflags = 2};
    if (ioctl(vcpu, KVM_SET_REGS, &regs)) fail("KVM_SET_REGS");
    int size = ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0);
    struct kvm_run *run = mmap(0, (size_t)size, PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
    if (run == MAP_FAILED) fail("mmap of the vCPU");
    if (ioctl(vcpu, KVM_RUN, 0)) fail("KVM_RUN");
    uint64_t written = now();
    if (run->exit_reason != KVM_EXIT_IO || run->io.direction != KVM_EXIT_IO_OUT ||
        run->io.port != 0x602) {
        fprintf(stderr, "floor: expected a write to port 0x602, got exit %u\n", run->exit_reason);
        _exit(1);
    }
    if (write(REPORT_FD, &written, sizeof written) != sizeof written) fail("reporting");
    while (hold) pause();
    return 0;
}

static pid_t pids[MOST];
static unsigned running;

/* Starts `count` processes and waits until each has reported; prints the times. */
static void start(const char *self, const char *memory, const char *bytes, unsigned count,
                  int hold) {
    int report[2];
    if (pipe2(report, O_CLOEXEC)) fail("pipe");
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, report[1], REPORT_FD);
    char *argv[] = {(char *)self, (char *)memory, (char *)bytes, hold ? "hold" : "end", NULL};
    uint64_t before = now(), last = 0, written;
    for (unsigned n = 0; n < count; n++) {
        /* vfork and exec: cheaper than fork. */
        errno = posix_spawn(&pids[running], self, &actions, NULL, argv, environ);
        if (errno) fail("posix_spawn");
        running++;
    }
    close(report[1]);
    for (unsigned n = 0; n < count; n++) {
        if (read(report[0], &written, sizeof written) != sizeof written)
            fail("a process that did not report");
        if (written > last) last = written;
    }
    close(report[0]);
    posix_spawn_file_actions_destroy(&actions);
    for (unsigned n = 0; !hold && n < count; n++) waitpid(pids[--running], NULL, 0);
    printf("%lu %lu\n", before, last);
}

static void end(void) {
    uint64_t before = now();
    for (unsigned n = 0; n < running; n++) kill(pids[n], SIGKILL);
    while (running) waitpid(pids[--running], NULL, 0);
    printf("%lu %lu\n", before, now());
}

static void unmap(size_t bytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *memory = mmap(0, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED) fail("mmap");
    madvise(memory, bytes, MADV_NOHUGEPAGE);
    for (size_t at = 0; at < bytes; at += 4096) memory[at] = 1;
    uint64_t before = now();
    munmap(memory, bytes);
    printf("%lu %lu\n", before, now());
}

int main(int argc, char **argv) {
    if (argc == 4) return child(argv[1], strtoul(argv[2], NULL, 0), !strcmp(argv[3], "hold"));
    if (argc != 3) return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        unsigned long number = 0;
        if (!strcmp(line, "one\n")) start(argv[0], argv[1], argv[2], 1, 0);
        else if (sscanf(line, "many %lu", &number) == 1 && number && number + running <= MOST)
            start(argv[0], argv[1], argv[2], (unsigned)number, 1);
        else if (!strcmp(line, "end\n")) end();
        else if (sscanf(line, "munmap %lu", &number) == 1) unmap(number);
        else { fprintf(stderr, "floor: unknown command: %s", line); break; }
    }
    /* stdin is closed, so the benchmark has ended. */
    for (unsigned n = 0; n < running; n++) kill(pids[n], SIGKILL);
    while (running) waitpid(pids[--running], NULL, 0);
    return 0;
}
