// Test equipment: persistent.cu on a CPU, with the functions of hopper.cuh. Each thread of the launch is a fiber, and
// the fibers run in a random order, each up to its next wait. So a barrier that is missing gives a wrong result, or the
// NaN with which shared memory begins. Memory is coherent here, so a missing fence() goes unnoticed.
#include <math.h>
#include <setjmp.h>
#include <string.h>
#include <ucontext.h>

#include <utility>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct float2 { float x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __uint_as_float(u32 bits) { float x; memcpy(&x, &bits, 4); return x; }
inline u32 __float_as_uint(float x) { u32 bits; memcpy(&bits, &x, 4); return bits; }

namespace emulator {

constexpr int STACK = 64 << 10, MOST_TICKS = 1 << 15;  // a tick is a turn of every thread

struct Meeting {  // of `count` fibers, again and again
  int count, arrived = 0;
  u32 rounds = 0;
};

struct Mbarrier {  // of some arrivals, and the bytes that they announce
  int arrivals, pending, bytes;
  u32 phases;
  void update() {
    if (pending == 0 && bytes == 0) pending = arrivals, ++phases;
  }
};

struct Copy { char* to; const char* from; int bytes; Mbarrier* barrier; long due; };

struct Warp {
  Meeting meeting{32};
  u32 values[2][32][6];
  long asleep = 0;  // until this tick
};

struct BlockState {
  Meeting meeting{THREADS}, all{THREADS + 32};
  Warp warps[WARPS + 1];
  std::vector<char> memory;
  long asleep = 0;
};

struct Fiber {
  int block, thread, parity = 0;
  bool started = false, finished = false;
  const u32* rounds = nullptr;  // the meeting's counter; the fiber waits while it equals `round`
  u32 round;
  ucontext_t context;
  jmp_buf state;
  char* stack = new char[STACK];
  ~Fiber() { delete[] stack; }
};

static std::vector<BlockState> blocks;
static std::vector<Copy> copies;  // that are under way
static void (*kernel)(const void*);
static const void* arguments;
static u32 state;  // of the random numbers
static bool uneven;
static int slow;
static Fiber* current;
static jmp_buf scheduler;
static long ticks;

inline u32 random(u32 below) {
  state = state * 1664525 + 1013904223;
  return (state >> 8) % below;
}

inline void yield() {
  if (_setjmp(current->state) == 0) _longjmp(scheduler, 1);
}

inline bool waits(const Fiber& fiber) { return fiber.rounds && *fiber.rounds == fiber.round; }

inline void meet(Meeting& meeting) {
  current->rounds = &meeting.rounds, current->round = meeting.rounds;
  if (++meeting.arrived == meeting.count) meeting.arrived = 0, ++meeting.rounds;
  if (waits(*current)) yield();
}

inline BlockState& block() { return blocks[current->block]; }
inline Warp& warp() { return block().warps[current->thread / 32]; }

inline void start() {
  kernel(arguments);
  current->finished = true;
  _longjmp(scheduler, 1);
}

inline void resume(Fiber& fiber) {
  current = &fiber;
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.state, 1);
  fiber.started = true;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = STACK;
  makecontext(&fiber.context, start, 0);
  setcontext(&fiber.context);
}

inline void finish_copies() {
  for (size_t i = 0; i < copies.size();) {
    Copy copy = copies[i];
    if (copy.due > ticks) { ++i; continue; }
    memcpy(copy.to, copy.from, copy.bytes);
    copy.barrier->bytes -= copy.bytes;
    copy.barrier->update();
    copies.erase(copies.begin() + i);
  }
}

// Now and then a warp falls behind the others, if the seed is not 0, and the block `slow` far behind.
inline bool is_awake(const Fiber& fiber) {
  BlockState& block = blocks[fiber.block];
  Warp& warp = block.warps[fiber.thread / 32];
  if (ticks < block.asleep || ticks < warp.asleep) return false;
  if (uneven && random(5000) == 0) warp.asleep = ticks + random(100);
  if (fiber.block == slow && random(40000) == 0) block.asleep = ticks + 2500;
  return true;
}

// Run `body` in every thread, but not in the block `absent`. Returns false if it hangs.
inline bool run(void (*body)(const void*), const void* a, int shared_bytes, int seed, int absent, int slow_block) {
  kernel = body, arguments = a, state = seed, uneven = seed > 0, slow = slow_block;
  ticks = 0;
  copies.clear();
  blocks = std::vector<BlockState>(BLOCKS);
  constexpr int LAUNCHED = THREADS + 32;
  std::vector<Fiber> fibers(BLOCKS * LAUNCHED);
  std::vector<int> order;
  for (int i = 0; i < BLOCKS * LAUNCHED; ++i) {
    fibers[i].block = i / LAUNCHED;
    fibers[i].thread = i % LAUNCHED;
    if (fibers[i].block != absent) order.push_back(i);
  }
  for (BlockState& state : blocks) state.memory.assign(shared_bytes + 128, (char)0xFF);  // NaN
  for (; !order.empty(); ++ticks) {
    if (ticks == MOST_TICKS) return false;
    finish_copies();
    for (u32 i = 0; i < order.size();) {
      std::swap(order[i], order[i + random(order.size() - i)]);
      if (is_awake(fibers[order[i]]) && !waits(fibers[order[i]])) resume(fibers[order[i]]);
      if (fibers[order[i]].finished) {
        order[i] = order.back();
        order.pop_back();
      } else {
        ++i;
      }
    }
  }
  return true;
}

}  // namespace emulator

struct Index { int x; };
#define threadIdx Index{emulator::current->thread}
#define blockIdx Index{emulator::current->block}

typedef emulator::Mbarrier Barrier;

inline char* shared_memory() { return (char*)(((size_t)emulator::block().memory.data() + 127) / 128 * 128); }
inline Word load_word(const Word* from) { emulator::yield(); return *from; }
inline void store_word(Word* to, const Word& word) { *to = word; }
inline int load_flag(const int* from) { return *from; }
inline void store_flag(int* to, int flag) { *to = flag; }
template <int N> void load_l2(u32 (&to)[N], const void* from) { memcpy(to, from, 4 * N); }
inline void fence() {}
inline void synchronize_block() { emulator::meet(emulator::block().all); }
inline void forget(int&) {}
inline void synchronize_compute_warps() { emulator::meet(emulator::block().meeting); }
inline void synchronize_warp() { emulator::meet(emulator::warp().meeting); }
inline u64 nanoseconds() { return 1000 * emulator::ticks; }
inline long long cycles() { return emulator::ticks; }

// What the lanes of a warp hand in, in one of two places in turn, so that the next exchange does not overwrite it.
inline u32 (*hand_in(u32 a, u32 b = 0, u32 c = 0, u32 d = 0, u32 e = 0, u32 f = 0))[6] {
  u32(*values)[6] = emulator::warp().values[emulator::current->parity ^= 1];
  u32 mine[6] = {a, b, c, d, e, f};
  memcpy(values[emulator::current->thread % 32], mine, sizeof(mine));
  synchronize_warp();
  return values;
}

inline u32 exchange_bits(u32 bits, int lane) { return hand_in(bits)[lane & 31][0]; }
inline u16 round_to_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  return x != x ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline u32 select_bits(u32 bits, u32 mask, u32 other) { return (bits & mask) | other; }
inline float e4m3_to_float(u8 bits) {
  float magnitude = __uint_as_float((bits & 0x7Fu) << 20) * 0x1p120f;  // the biases of the exponents are 7 and 127
  if ((bits & 0x7F) == 0x7F) magnitude = __uint_as_float(0x7FC00000);
  return bits & 0x80 ? -magnitude : magnitude;
}
inline u32 subtract_pairs(u32 a, u32 b) {
  const float low = __uint_as_float(a << 16) - __uint_as_float(b << 16);
  const float high = __uint_as_float(a & 0xFFFF0000u) - __uint_as_float(b & 0xFFFF0000u);
  return round_to_bf16(low) | (u32)round_to_bf16(high) << 16;
}
inline u32 vote(bool yes) {
  u32(*values)[6] = hand_in(yes), bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= values[lane][0] << lane;
  return bits;
}
inline int warp_sum(int value) {
  u32(*values)[6] = hand_in((u32)value), sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += values[lane][0];
  return (int)sum;
}

inline void multiply_tile(float (&sum)[4], const u32 (&x)[4], u32 w0, u32 w1) {
  u32(*values)[6] = hand_in(x[0], x[1], x[2], x[3], w0, w1);
  int lane = emulator::current->thread % 32;
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 16; ++k) {
      u32 x = values[lane / 4 * 4 + k / 2 % 4][k / 8 * 2 + i / 2];
      u32 w = values[(lane % 4 * 2 + i % 2) * 4 + k / 2 % 4][4 + k / 8];
      sum[i] += __uint_as_float(k % 2 ? x & 0xFFFF0000u : x << 16) * __uint_as_float(k % 2 ? w & 0xFFFF0000u : w << 16);
    }
}

inline void initialize(Barrier* barrier, int arrivals) { *barrier = {arrivals, arrivals, 0, 0}; }
inline bool passed(Barrier* barrier, int parity) { emulator::yield(); return (barrier->phases & 1) != (u32)parity; }
inline void arrive(Barrier* barrier) { --barrier->pending, barrier->update(); }
inline void copy_to_shared(void* to, const void* from, int bytes, Barrier* barrier) {
  memset(to, 0xFF, bytes);  // NaN, until the copy is complete
  --barrier->pending;
  barrier->bytes += bytes;
  emulator::copies.push_back({(char*)to, (const char*)from, bytes, barrier, emulator::ticks + emulator::random(50)});
}
