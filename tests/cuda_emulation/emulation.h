// CUDA C++ on a CPU, for tests: enough of it to compile the kernels unchanged with g++ and to run
// them.
//
// Included before a kernel's source (g++ -include). Each CUDA thread of a block is a fiber with a
// stack of its own; a fiber runs until it waits at a barrier or for its warp, or ends. Blocks run
// one after the other, and so do fibers, in an order that the caller chooses: what depends on the
// order, because a barrier is missing, shows in one of them.
//
// It reports a barrier that only some threads reach, threads that wait at different barriers, a
// warp function whose mask lacks the caller or differs between lanes, and a stack that overflowed.
// Shared memory holds rubbish when a block starts. Compiled for the thread sanitizer, each fiber is
// a thread to it: accesses by two threads of a block that no barrier orders are a race, in whatever
// order they ran. NOT here: anything about time, races between blocks, inline PTX. x86-64 only.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define EMULATION_WATCHED 1
#define UNWATCHED __attribute__((no_sanitize("thread")))
#else
#define EMULATION_WATCHED 0
#define UNWATCHED
#endif

// --- the language ---

#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("emulated_shared"), used))

struct emulated_index {
    unsigned x, y, z;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) int4 {
    int x, y, z, w;
};

namespace emulation {

typedef uint64_t u64;
constexpr int MAX_THREADS = 1024, WARP = 32;
constexpr size_t STACK = 64 << 10;
constexpr u64 CANARY = 0x5EA15EA15EA15EA1;
constexpr unsigned char RUBBISH = 0xC7;

enum State { READY, IN_BLOCK, IN_WARP, ENDED };

// A copy beside which a thread goes on.
struct Copy {
    void* to;
    const void* from;
    int bytes;
    bool wanted;
    unsigned group;
};
constexpr int MAX_COPIES = 64;  // of a thread

struct Fiber {
    void* stack_pointer;
    emulated_index index;
    State state;
    int line;            // of the barrier or warp function that it waits in
    unsigned mask;       // of the warp function
    int value;           // what it gave to it
    void* watched;       // what the thread sanitizer knows it by
    unsigned barriers;   // that it has come to
    char came, goes_on;  // what orders it at __syncwarp
    int num_copies;      // under way
    unsigned group;      // of copies that begin now
};

struct Warp {
    int values[WARP];  // of the last warp function that all lanes of its mask have reached
};

static Fiber fibers[MAX_THREADS];
static Copy copies[MAX_THREADS][MAX_COPIES];  // of each fiber, in the order in which they began
static Warp warps[MAX_THREADS / WARP];
static unsigned char* stacks;
static Fiber* current;
static void* scheduler;
static bool warp_released;  // by the fiber that ran last
static emulated_index block_index, block_size, grid_size;
static char* error;
static size_t error_size;
constexpr int MAX_WORDS = 6, MAX_FIELDS = 120;
// The single words among a kernel's arguments, and after them the fields of a struct, if any.
static u64 arguments[MAX_WORDS + MAX_FIELDS];
static int argument_words;
static void* kernel;
static u64 random_state;

// --- what the thread sanitizer is told; nothing of the emulation itself is watched ---

static void* watched_scheduler;
static char block_order[2], block_end;  // of barriers by turns

// Goes on as another fiber, which orders nothing.
static inline UNWATCHED void watch(void* other) {
#if EMULATION_WATCHED
    __tsan_switch_to_fiber(other, __tsan_switch_to_fiber_no_sync);
#endif
}

// What came before comes before all that others do once they have come after the same `order`.
static inline UNWATCHED void come_before(char* order) {
#if EMULATION_WATCHED
    __tsan_release(order);
#endif
}

static inline UNWATCHED void come_after(char* order) {
#if EMULATION_WATCHED
    __tsan_acquire(order);
#endif
}

// Saves the registers that a call must keep, and goes on where `to` saved its own.
extern "C" void emulation_switch(void** save, void* to) __attribute__((visibility("hidden")));
asm(R"(
    .text
    .hidden emulation_switch
    .globl emulation_switch
    .type emulation_switch, @function
emulation_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size emulation_switch, .-emulation_switch
)");

UNWATCHED static void yield() {
    watch(watched_scheduler);
    emulation_switch(&current->stack_pointer, scheduler);
}

// The whole launch ends: the fibers are left where they are, having nothing to clean up.
[[noreturn]] UNWATCHED static void end_launch() {
    for (;;) yield();
}

template <class... Values>
static void report(const char* format, Values... values) {
    if (!*error) snprintf(error, error_size, format, values...);
}

UNWATCHED static void fiber_main() {
    // Six words are passed in registers and a large struct on the stack: a kernel that takes fewer
    // words, and a smaller struct or none, finds its own there, too.
    struct Struct {
        u64 fields[MAX_FIELDS];
    };
    static_assert(MAX_WORDS == 6, "registers for arguments");
    const u64* a = arguments;
    auto function = (void (*)(u64, u64, u64, u64, u64, u64, Struct))kernel;
    function(a[0], a[1], a[2], a[3], a[4], a[5], *(const Struct*)(a + argument_words));
    if (current->num_copies)
        report("block %u: thread %u ends while copies are under way", block_index.x,
               current->index.x);
    current->state = ENDED;
    come_before(&block_end);
    end_launch();
}

UNWATCHED static u64 random_below(u64 n) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state % n;
}

enum Order { FORWARD, REVERSE, RANDOM };

UNWATCHED static void fill_order(unsigned* order, unsigned n, int how) {
    for (unsigned i = 0; i < n; i++) order[i] = how == REVERSE ? n - 1 - i : i;
    for (unsigned i = n; how == RANDOM && i > 1; i--) {
        unsigned j = (unsigned)random_below(i), held = order[i - 1];
        order[i - 1] = order[j];
        order[j] = held;
    }
}

UNWATCHED static void start_fiber(unsigned thread) {
    Fiber& fiber = fibers[thread];
    fiber = Fiber{};
    fiber.index.x = thread;
    unsigned char* bottom = stacks + thread * STACK;
    memcpy(bottom, &CANARY, sizeof CANARY);
    auto top = (u64*)(bottom + STACK);
    top[-2] = (u64)&fiber_main;  // what `ret` takes; the stack is then as after a call
    fiber.stack_pointer = top - 2 - 6;
#if EMULATION_WATCHED
    fiber.watched = __tsan_create_fiber(0);
#endif
}

// Once no thread is ready: lets all pass the barrier that they wait at, or says why not.
UNWATCHED static bool pass_barrier(unsigned threads) {
    for (unsigned t = 0; t < threads; t++) {
        const Fiber &fiber = fibers[t], &first = fibers[0];
        if (fiber.state == IN_WARP) {
            report(
                "block %u: thread %u waits in the warp function of line %d for lanes that do not "
                "come, mask %08x",
                block_index.x, t, fiber.line, fiber.mask);
        } else if (fiber.state != first.state) {
            const Fiber& waiting = fiber.state == IN_BLOCK ? fiber : first;
            report(
                "block %u: divergent barrier: thread %u waits at __syncthreads of line %d, and "
                "thread %u has ended",
                block_index.x, waiting.index.x, waiting.line, fiber.state == IN_BLOCK ? 0 : t);
        } else if (fiber.line != first.line) {
            report(
                "block %u: divergent barrier: thread 0 waits at __syncthreads of line %d, thread "
                "%u at line %d",
                block_index.x, first.line, t, fiber.line);
        }
    }
    if (*error) return false;
    for (unsigned t = 0; t < threads; t++) fibers[t].state = READY;
    return true;
}

// The first ready thread of the order runs next, so that a warp goes on as far as no barrier stops
// it; in random order all threads take turns.
UNWATCHED static bool run_block(unsigned threads, int how) {
    static unsigned order[MAX_THREADS];
    for (unsigned t = 0; t < threads; t++) start_fiber(t);
    for (;;) {
        bool ran = false, ended = true;
        fill_order(order, threads, how);
        for (unsigned i = 0; i < threads; i++) {
            Fiber& fiber = fibers[order[i]];
            if (fiber.state == READY) {
                current = &fiber;
                watch(fiber.watched);
                emulation_switch(&scheduler, fiber.stack_pointer);
                ran = true;
                if (*error) return false;
                if (warp_released && how != RANDOM) {
                    warp_released = false;
                    i = (unsigned)-1;  // from the beginning
                    ended = true;
                    continue;
                }
            }
            ended &= fiber.state == ENDED;
        }
        if (ended) break;
        if (!ran && !pass_barrier(threads)) return false;
    }
    come_after(&block_end);
    for (unsigned t = 0; t < threads; t++) {
#if EMULATION_WATCHED
        __tsan_destroy_fiber(fibers[t].watched);
#endif
        if (memcmp(stacks + t * STACK, &CANARY, sizeof CANARY)) {
            report("block %u: the stack of thread %u overflowed", block_index.x, t);
        }
    }
    return !*error;
}

// --- what kernels call ---

UNWATCHED static void barrier(int line) {
    current->state = IN_BLOCK;
    current->line = line;
    // A thread may come to the next barrier before another has gone on from this one, and what it
    // did in between comes before nothing that the other does.
    char* order = &block_order[current->barriers++ % 2];
    come_before(order);
    yield();
    come_after(order);
}

// Waits until all lanes of mask have given a value; then they are in the warp's values.
UNWATCHED static const int* exchange(unsigned mask, int value, int line, bool orders = false) {
    unsigned thread = current->index.x, lane = thread % WARP;
    Warp& warp = warps[thread / WARP];
    Fiber* lanes = fibers + thread / WARP * WARP;
    if (!(mask >> lane & 1)) {
        report("block %u: thread %u is not in the mask %08x of its warp function of line %d",
               block_index.x, thread, mask, line);
        end_launch();
    }
    current->state = IN_WARP;
    current->line = line;
    current->mask = mask;
    current->value = value;
    bool all = true;
    for (unsigned i = 0; i < WARP; i++) {
        if (!(mask >> i & 1)) continue;
        unsigned other = thread / WARP * WARP + i;
        if (other >= block_size.x) {
            report("block %u: the mask %08x of line %d names lanes that the block has not",
                   block_index.x, mask, line);
            end_launch();
        }
        all &= lanes[i].state == IN_WARP;
        if (lanes[i].state == IN_WARP && (lanes[i].mask != mask || lanes[i].line != line)) {
            report("block %u: thread %u gives mask %08x in line %d, thread %u mask %08x in line %d",
                   block_index.x, thread, mask, line, other, lanes[i].mask, lanes[i].line);
            end_launch();
        }
    }
    if (all) {
        for (unsigned i = 0; orders && i < WARP; i++)
            if (mask >> i & 1) come_after(&lanes[i].came);
        for (unsigned i = 0; i < WARP; i++) {
            if (!(mask >> i & 1)) continue;
            if (orders) come_before(&lanes[i].goes_on);
            warp.values[i] = lanes[i].value;
            lanes[i].state = READY;
        }
        warp_released = true;
    } else {
        yield();
    }
    return warp.values;
}

// Copies are done when their thread waits for them, and no sooner: until then the target holds
// rubbish, written when they begin, so that it may not be in use any more.
static inline void copy_async(void* to, const void* from, int bytes, bool wanted) {
    memset(to, RUBBISH, bytes);
    if (current->num_copies == MAX_COPIES) {
        report("the emulation takes %d copies of a thread at a time", MAX_COPIES);
        end_launch();
    }
    copies[current - fibers][current->num_copies++] = {to, from, bytes, wanted, current->group};
}

static inline void end_copies() { current->group++; }

static inline void wait_for_copies(int later) {
    Copy* mine = copies[current - fibers];
    int left = 0;
    for (int i = 0; i < current->num_copies; i++) {
        Copy copy = mine[i];
        if (copy.group + later >= current->group)
            mine[left++] = copy;
        else if (copy.wanted)
            memcpy(copy.to, copy.from, copy.bytes);
        else
            memset(copy.to, 0, copy.bytes);
    }
    current->num_copies = left;
}

// Nothing is kept, but what is asked for must be there.
static inline void prefetch(const void* from, size_t bytes) {
    auto first = (const volatile unsigned char*)from;
    (void)first[0];
    (void)first[bytes - 1];
}

}  // namespace emulation

#define threadIdx (emulation::current->index)
#define blockIdx (emulation::block_index)
#define blockDim (emulation::block_size)
#define gridDim (emulation::grid_size)
#define __syncthreads() emulation::barrier(__LINE__)

// The only warp function that orders what threads read and write.
UNWATCHED static inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, int line = __builtin_LINE()) {
    emulation::come_before(&emulation::current->came);
    emulation::exchange(mask, 0, line, true);
    emulation::come_after(&emulation::current->goes_on);
}

UNWATCHED static inline int __reduce_max_sync(unsigned mask, int value,
                                              int line = __builtin_LINE()) {
    const int* values = emulation::exchange(mask, value, line);
    int largest = value;
    for (int i = 0; i < emulation::WARP; i++) {
        if (mask >> i & 1 && values[i] > largest) largest = values[i];
    }
    return largest;
}

UNWATCHED static inline int __shfl_xor_sync(unsigned mask, int value, int lane_mask,
                                            int line = __builtin_LINE()) {
    return emulation::exchange(mask, value, line)[(threadIdx.x % emulation::WARP) ^ lane_mask];
}

UNWATCHED static inline float __shfl_sync(unsigned mask, float value, int lane, int width,
                                          int line = __builtin_LINE()) {
    int bits;
    memcpy(&bits, &value, sizeof bits);
    unsigned first = threadIdx.x % emulation::WARP / width * width;
    bits = emulation::exchange(mask, bits, line)[first + (unsigned)lane % width];
    memcpy(&value, &bits, sizeof value);
    return value;
}

UNWATCHED static inline int __all_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    const int* values = emulation::exchange(mask, predicate != 0, line);
    int all = 1;
    for (int i = 0; i < emulation::WARP; i++) all &= !(mask >> i & 1) | values[i];
    return all;
}

static inline int atomicMax(int* at, int value) {
    int old = __atomic_load_n(at, __ATOMIC_RELAXED);
    if (value > old) __atomic_store_n(at, value, __ATOMIC_RELAXED);
    return old;
}

static inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long value) {
    return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}

static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    uint64_t both = (uint64_t)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++)
        result |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
    return result;
}

// --- how Python starts a kernel ---

extern "C" {
extern unsigned char __start_emulated_shared[] __attribute__((weak, visibility("hidden")));
extern unsigned char __stop_emulated_shared[] __attribute__((weak, visibility("hidden")));

// values: `words` arguments of 64 bits, and after them the `fields` of a struct, or none. Returns
// 0, or 1 with a message in `message`.
UNWATCHED int emulation_launch(void* function, unsigned grid, unsigned threads, const void* values,
                               int words, int fields, int order, unsigned long long seed,
                               char* message, size_t message_size) {
    using namespace emulation;
    static unsigned* blocks;
    error = message;
    error_size = message_size;
    *error = 0;
    if (threads > MAX_THREADS || words > MAX_WORDS || fields > MAX_FIELDS) {
        report("the emulation takes %d threads, %d words and %d fields at most", MAX_THREADS,
               MAX_WORDS, MAX_FIELDS);
        return 1;
    }
    if (!stacks) stacks = (unsigned char*)aligned_alloc(4096, MAX_THREADS * STACK);
    kernel = function;
    argument_words = words;
    memcpy(arguments, values, (words + fields) * sizeof(u64));
    random_state = seed * 2 + 1;
#if EMULATION_WATCHED
    watched_scheduler = __tsan_get_current_fiber();
#endif
    block_size = {threads, 1, 1};
    grid_size = {grid, 1, 1};
    blocks = (unsigned*)realloc(blocks, grid * sizeof *blocks);
    fill_order(blocks, grid, order);
    for (unsigned b = 0; b < grid; b++) {
        block_index = {blocks[b], 0, 0};
        if (__start_emulated_shared) {
            memset(__start_emulated_shared, RUBBISH,
                   __stop_emulated_shared - __start_emulated_shared);
        }
        if (!run_block(threads, order)) return 1;
    }
    return 0;
}
}
