/* The network device and vsock: a guest that sends datagrams back, and one that floods what serves
 * it. Polled, as the disk is. See ../src/lib.rs, `serve` and `flood=`. */
#include "virtio.h"

enum { SIZE = 32, BUFFER = 2048, NET = 1, VSOCK = 19, MOST_DEVICES = 8, DEVICE_BYTES = 0x1000 };
/* Where parts of a packet begin: struct virtio_net_hdr, Ethernet, IPv4 without options, UDP. */
enum { FRAME = 12, IP = FRAME + 14, UDP = IP + 20, DATA = UDP + 8, MOST_DATA = 512 };
enum { DNS = 53, IS_UDP = 17, OWN = SIZE - 1 /* no packet is received into this buffer */ };

struct queue {
    struct {
        u64 addr;
        u32 len;
        u16 flags, next;
    } table[SIZE];
    struct {
        u16 flags, index, ring[SIZE];
    } avail;
    struct {
        u16 flags, index;
        struct {
            u32 id, len;
        } ring[SIZE];
    } used;
    u64 device;
    u32 number;
    u16 seen;
} __attribute__((aligned(16)));

/* An answer is sent from the buffer in which the question came; that has the same number in both
 * queues. */
static volatile struct queue in, out, vsock_in, vsock_out;
static volatile u8 buffers[SIZE][BUFFER], vsock_buffers[SIZE][BUFFER];

/* struct virtio_vsock_hdr */
static volatile struct __attribute__((packed)) {
    u64 from, to;
    u32 from_port, to_port, length;
    u16 type, op;
    u32 flags, room, taken;
} request;

static u64 gateway, asked_bytes, asked, is_free, request_is_free;

static u16 be16(const volatile u8 *at) { return (u16)(at[0] << 8 | at[1]); }

static void put_be16(volatile u8 *at, u64 n) {
    at[0] = (u8)(n >> 8);
    at[1] = (u8)n;
}

static void swap(volatile u8 *one, volatile u8 *other, int bytes) {
    for (int n = 0; n < bytes; n++) {
        u8 kept = one[n];
        one[n] = other[n];
        other[n] = kept;
    }
}

static void kick(volatile struct queue *q) { *reg(q->device, QUEUE_NOTIFY) = q->number; }

static void give(volatile struct queue *q, u32 id, volatile void *at, u32 len, u16 flags) {
    q->table[id].addr = (u64)at;
    q->table[id].len = len;
    q->table[id].flags = flags;
    q->avail.ring[q->avail.index % SIZE] = (u16)id;
    q->avail.index++;
    /* The index must be visible before the flag is read. */
    __asm__ volatile("lock; addl $0, (%%rsp)" : : : "memory");
    if (!(q->used.flags & NO_KICK)) kick(q);
}

static int take(volatile struct queue *q, u32 *id, u32 *len) {
    if (q->used.index == q->seen) return 0;
    *id = q->used.ring[q->seen % SIZE].id % SIZE;
    *len = q->used.ring[q->seen % SIZE].len;
    q->seen++;
    return 1;
}

static void receive_into(u32 id) { give(&in, id, buffers[id], BUFFER, DEVICE_WRITES); }

static void open_queue(volatile struct queue *q, u64 device, u32 number) {
    q->device = device;
    q->number = number;
    q->seen = q->avail.index = q->used.index = 0;
    q->avail.flags = NO_INTERRUPT;
    device_queue(device, number, SIZE, q->table, &q->avail, &q->used);
}

/* The first two queues of the device of this kind: that which it fills, and that which it reads. */
static void open(u32 kind, volatile struct queue *filled, volatile struct queue *read) {
    for (u64 n = 0; n < MOST_DEVICES; n++) {
        u64 device = FIRST_DEVICE + n * DEVICE_BYTES;
        if (*reg(device, DEVICE_ID) != kind) continue;
        device_reset(device);
        open_queue(filled, device, 0);
        open_queue(read, device, 1);
        if (device_start(device)) return;
    }
    put("failed: there is no device ");
    put_hex(kind);
    put("\n");
    halt();
}

/* Whether the frame is a datagram that is no answer of the name service. */
static int is_asked(const volatile u8 *at, u32 len) {
    return len >= DATA && be16(at + FRAME + 12) == 0x0800 && at[IP] == 0x45 &&
           at[IP + 9] == IS_UDP && be16(at + UDP) != DNS;
}

/* Turns a datagram round. The sums of IPv4 and UDP stay right. */
static void answer(u32 id, u32 len) {
    volatile u8 *at = buffers[id];
    for (int n = 0; n < FRAME; n++) at[n] = 0;
    swap(at + FRAME, at + FRAME + 6, 6);
    swap(at + IP + 12, at + IP + 16, 4);
    swap(at + UDP, at + UDP + 2, 2);
    give(&out, id, at, len, 0);
}

static void put_sum(volatile u8 *ip) {
    u64 sum = 0;
    put_be16(ip + 10, 0);
    for (int n = 0; n < 20; n += 2) sum += be16(ip + n);
    while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
    put_be16(ip + 10, ~sum);
}

/* What the datagram holds becomes a question to the name service at the gateway. */
static void learn(const volatile u8 *from, u32 len) {
    volatile u8 *at = buffers[OWN];
    u64 bytes = len - DATA < MOST_DATA ? len - DATA : MOST_DATA;
    for (u64 n = 0; n < DATA + bytes; n++) at[n] = n < FRAME ? 0 : from[n];
    swap(at + FRAME, at + FRAME + 6, 6);
    swap(at + IP + 12, at + IP + 16, 4);
    put_be16(at + IP + 2, DATA - IP + bytes);
    put_be16(at + IP + 16, gateway >> 16);
    put_be16(at + IP + 18, gateway);
    put_sum(at + IP);
    put_be16(at + UDP, 0x3039);
    put_be16(at + UDP + 2, DNS);
    put_be16(at + UDP + 4, DATA - UDP + bytes);
    put_be16(at + UDP + 6, 0); /* no sum */
    asked_bytes = DATA + bytes;
    is_free = 1;
}

/* Answers what has come. */
static void turn(void) {
    u32 id, len;
    while (take(&out, &id, &len)) {
        if (id == OWN) is_free = 1;
        else receive_into(id);
    }
    while (take(&in, &id, &len)) {
        if (!is_asked(buffers[id], len)) {
            receive_into(id);
            continue;
        }
        if (gateway && !asked_bytes) learn(buffers[id], len);
        answer(id, len);
    }
}

static void open_net(void) {
    open(NET, &in, &out);
    for (u32 id = 0; id < OWN; id++) receive_into(id);
    kick(&in);
}

__attribute__((noreturn)) void serve(void) {
    for (open_net();;) turn();
}

/* One more question, if the one before has been sent. */
static int ask(void) {
    if (!is_free) return 0;
    is_free = 0;
    put_be16(buffers[OWN] + DATA, asked++); /* its id */
    give(&out, OWN, buffers[OWN], (u32)asked_bytes, 0);
    return 1;
}

/* One more connection to the host, to a port on which no program listens. */
static void connect(void) {
    u32 id, len;
    while (take(&vsock_in, &id, &len))
        give(&vsock_in, id, vsock_buffers[id], BUFFER, DEVICE_WRITES);
    while (take(&vsock_out, &id, &len)) request_is_free = 1;
    if (!request_is_free) return;
    request_is_free = 0;
    request.from_port++;
    give(&vsock_out, 0, &request, sizeof request, 0);
}

static void open_vsock(void) {
    open(VSOCK, &vsock_in, &vsock_out);
    request.from = *reg(vsock_in.device, CONFIG);
    request.to = 2;
    request.from_port = 0x10000;
    request.to_port = 0x7fff;
    request.type = request.op = 1; /* STREAM, REQUEST */
    request.room = 0x10000;
    for (u32 id = 0; id < SIZE; id++)
        give(&vsock_in, id, vsock_buffers[id], BUFFER, DEVICE_WRITES);
    kick(&vsock_in);
    request_is_free = 1;
}

__attribute__((noreturn)) void flood(u64 name_service, u64 pages) {
    gateway = name_service;
    open_net();
    open_vsock();
    for (u64 touched = 0;;) {
        turn();
        if (!asked_bytes) continue;
        connect();
        if (!ask() || !pages) continue;
        page(touched % pages)[0] = touched;
        touched++;
    }
}
