// A program of the CUDA C++ that TileLang writes for attention in bf16, on a CPU: emulate_tilelang.py includes this.
// Each thread is a fiber. A wait lets the others run. TMA arrives at once or, by a coin, only when a thread waits for
// it. wgmma reads shared memory by its descriptor, with the swizzle of 32, 64 or 128 bytes, and shared memory begins
// as NaN. A race between a wgmma and what follows it is not seen: wgmma ends at once, and fences do nothing.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <vector>

#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__
#define CUDART_INF_F INFINITY
#define threadIdx (emulator::Index{emulator::current, 0, 0})
#define blockIdx (emulator::block)

using std::max;
using std::min;
typedef unsigned char uchar;

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() {}
  bfloat16_t(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    bits = x != x ? 0x7fff : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  }
  operator float() const {
    uint32_t u = uint32_t(bits) << 16;
    float x;
    memcpy(&x, &u, 4);
    return x;
  }
};
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct uint1 { uint32_t x; };
struct uint2 { uint32_t x, y; };
struct __nv_bfloat162 { bfloat16_t x, y; };
float2 make_float2(float x, float y) { return {x, y}; }
float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
uint1 make_uint1(uint32_t x) { return {x}; }
uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
__nv_bfloat162 __float22bfloat162_rn(float2 a) { return {bfloat16_t(a.x), bfloat16_t(a.y)}; }
float2 __bfloat1622float2(__nv_bfloat162 a) { return {float(a.x), float(a.y)}; }
uint32_t __pack_half2(bfloat16_t a, bfloat16_t b) { return a.bits | uint32_t(b.bits) << 16; }
uint32_t __pack_nv_bfloat162(bfloat16_t a, bfloat16_t b) { return __pack_half2(a, b); }

struct CUtensorMap {
  char* base;
  int64_t rank, element, swizzle;  // bytes of an element; the swizzle is 1, 2, 3 for 32, 64, 128 bytes
  int64_t sizes[5], strides[5], box[5];  // the innermost first; strides in bytes
};

namespace emulator {
struct Index { int x, y, z; };
const int MOST = 1024;
alignas(1024) uchar shared[232448];
int current;
Index block;
ucontext_t scheduler, contexts[MOST];
bool ended[MOST];
std::mt19937 coin(1);
long waits;

void fail(const char* why) {
  fprintf(stderr, "%s\n", why);
  abort();
}

void let_others_run() {
  if (++waits > 100000000) fail("deadlock");
  swapcontext(&contexts[current], &scheduler);
}

struct Barrier {
  int count = 0, pending = 0, phase = 0;
  long bytes = 0;
  std::vector<std::function<void()>> loads;
  void init(int threads) { *this = Barrier{threads, threads}; }
  void check() {
    if (pending < 0) fail("more threads arrived than a barrier counts");
    if (pending == 0 && bytes == 0) phase ^= 1, pending = count;
  }
  void arrive() { pending--, check(); }
  void arrive_and_expect_tx(long expected) { bytes += expected, arrive(); }
  void wait(int parity) {
    for (;; let_others_run()) {
      auto arriving = std::move(loads);
      loads.clear();
      for (auto& load : arriving) load();
      if (phase != parity) break;
    }
    waits = 0;
  }
};
Barrier barriers[64];

// Threads of a group meet, and the last one computes for all of them
struct Meeting { int arrived = 0; long turn = 0; };
std::map<std::pair<int, int>, Meeting> meetings;
enum Kind { BLOCK, WARPGROUP, REDUCE, REDUCED, NAMED, WARP };
void meet(Kind kind, int group, int size, const std::function<void()>& compute = [] {}) {
  Meeting& meeting = meetings[{kind, group}];
  long turn = meeting.turn;
  if (++meeting.arrived == size) {
    compute();
    meeting.arrived = 0, meeting.turn++, waits = 0;
  } else {
    while (meeting.turn == turn) let_others_run();
  }
}

size_t swizzled(size_t address, int kind) { return address ^ (address >> 7 & ((1 << kind) - 1)) << 4; }

float* sums[MOST];
const uint32_t* factors[MOST];
float values[MOST];
char* rows[MOST];
uint32_t words[MOST][4];

// Element k of row r of a factor in shared memory. The descriptor has the address, two strides and the swizzle
float element(uint64_t descriptor, int r, int k, bool by_columns) {
  auto field = [&](int shift) { return (descriptor >> shift & 0x3fff) << 4; };
  size_t base = field(0), leading = field(16), stride = field(32);
  int kind = 4 - int(descriptor >> 62), width = 16 << kind, per = width / 2;
  if (kind == 4) fail("a factor without a swizzle");
  size_t address = by_columns ? base + r / per * leading + k / 8 * stride + k % 8 * width + r % per * 2
                              : base + r / 8 * stride + r % 8 * width + k * 2;
  bfloat16_t x;
  memcpy(&x, shared + swizzled(address, kind), 2);
  return x;
}

// Thread t of a warpgroup has rows t / 4 and t / 4 + 8 of its warp's 16, and two of every eight columns
void multiply(int N, bool in_registers, uint64_t a, uint64_t b, bool a_columns, bool b_columns, bool add) {
  static float A[64][16], B[256][16];
  int first = current / 128 * 128;
  for (int r = 0; r < 64; r++)
    for (int k = 0; k < 16; k++) {
      uint32_t word = 0;
      if (in_registers) word = factors[first + r / 16 * 32 + r % 8 * 4 + k % 8 / 2][k / 8 * 2 + r % 16 / 8];
      bfloat16_t x;
      x.bits = k % 2 ? word >> 16 : word;
      A[r][k] = in_registers ? float(x) : element(a, r, k, a_columns);
    }
  for (int n = 0; n < N; n++)
    for (int k = 0; k < 16; k++) B[n][k] = element(b, n, k, b_columns);
  for (int t = 0; t < 128; t++)
    for (int i = 0; i < N / 2; i++) {
      float& sum = sums[first + t][i];
      if (!add) sum = 0;
      int r = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8, n = i / 4 * 8 + t % 4 * 2 + i % 2;
      for (int k = 0; k < 16; k++) sum += A[r][k] * B[n][k];
    }
}

long box_bytes(const CUtensorMap& map) {
  long bytes = map.element;
  for (int axis = 0; axis < map.rank; axis++) bytes *= map.box[axis];
  return bytes;
}

void move_box(const CUtensorMap& map, void* tile, std::vector<int> first, bool load) {
  size_t offset = (uchar*)tile - shared;
  if (offset % 128) fail("TMA of a tile that does not begin at a multiple of 128 bytes");
  for (long byte = 0; byte < box_bytes(map); byte += map.element) {
    long rest = byte / map.element;
    char* global = map.base;
    bool inside = true;
    for (int axis = 0; axis < map.rank; axis++) {
      long at = first[axis] + rest % map.box[axis];
      rest /= map.box[axis];
      inside = inside && at >= 0 && at < map.sizes[axis];
      global += at * map.strides[axis];
    }
    uchar* local = shared + swizzled(offset + byte, map.swizzle);
    if (load && !inside) memset(local, 0, map.element);
    if (inside) memcpy(load ? (char*)local : global, load ? global : (char*)local, map.element);
  }
}

std::function<void()> program;
void run_thread() {
  program();
  ended[current] = true;
  swapcontext(&contexts[current], &scheduler);
}

void run_block(int threads) {
  static std::vector<std::vector<char>> stacks(MOST, std::vector<char>(65536));
  memset(shared, 0xff, sizeof shared);
  meetings.clear();
  for (auto& barrier : barriers) barrier = Barrier();
  for (int t = 0; t < threads; t++) {
    ended[t] = false;
    getcontext(&contexts[t]);
    contexts[t].uc_stack.ss_sp = stacks[t].data();
    contexts[t].uc_stack.ss_size = stacks[t].size();
    makecontext(&contexts[t], run_thread, 0);
  }
  for (int left = threads; left;)
    for (current = 0; current < threads; current++)
      if (!ended[current]) swapcontext(&scheduler, &contexts[current]), left -= ended[current];
  for (auto& barrier : barriers)
    if (!barrier.loads.empty()) fail("a program ended before a tile arrived");
}

void run_grid(int threads, int x, int y, int z) {
  for (block = {0, 0, 0}; block.z < z; block.z++)
    for (block.y = 0; block.y < y; block.y++)
      for (block.x = 0; block.x < x; block.x++) run_block(threads);
}
}  // namespace emulator

typedef emulator::Barrier Barrier;
void __syncthreads() { emulator::meet(emulator::BLOCK, 0, 384); }

namespace tl {
using namespace emulator;
enum class DataType { kBFloat16, kFloat32 };

template <int threads> bool tl_shuffle_elect() {
  int warp = current / 32;
  return current % 32 == 0 && (threads == 0 ? warp == 0 : warp % (threads / 32) == 0);
}
void prefetch_tma_descriptor(const CUtensorMap&) {}
void fence_barrier_init() {}
void fence_proxy_async() {}
template <int> void warpgroup_reg_alloc() {}
template <int> void warpgroup_reg_dealloc() {}

template <class... Ints> void tma_load(const CUtensorMap& map, Barrier& barrier, void* tile, Ints... first) {
  auto load = [=, &map, &barrier] {
    move_box(map, tile, {int(first)...}, true);
    barrier.bytes -= box_bytes(map), barrier.check();
  };
  if (coin() & 1) load();
  else barrier.loads.push_back(load);
}
template <class... Ints> void tma_store(const CUtensorMap& map, void* tile, Ints... first) {
  move_box(map, tile, {int(first)...}, false);
}
void tma_store_arrive() {}
template <int, bool> void tma_store_wait() {}

struct GmmaDescriptor {
  uint64_t bits;
  GmmaDescriptor operator+(int offset) const { return {bits + offset}; }
  explicit operator uint64_t() const { return bits; }
};
template <int kind, int leading, int stride, class Pointer>
void initialize_wgmma_descriptor(GmmaDescriptor& descriptor, Pointer tile) {
  descriptor.bits = uint64_t(kind) << 62 | uint64_t(stride) << 32 | leading << 16 | ((uchar*)tile - shared) >> 4;
}
template <class Int> void increase_descriptor_offset(GmmaDescriptor& descriptor, Int bytes) {
  descriptor.bits += bytes >> 4;
}
template <class Register> void warpgroup_fence_operand(Register*, int) {}
void warpgroup_arrive() {}
void warpgroup_commit_batch() {}
template <int> void warpgroup_wait() {}
template <DataType, DataType, DataType, int M, int N, int K, bool a_columns, bool b_columns, int, int>
void wgmma_ss(uint64_t a, uint64_t b, uint32_t* total, int add) {
  sums[current] = (float*)total;
  meet(WARPGROUP, current / 128, 128, [&] { multiply(N, false, a, b, a_columns, b_columns, add); });
}
template <DataType, DataType, DataType, int M, int N, int K, bool a_columns, bool b_columns, int, int>
void wgmma_rs(const uint32_t* a, uint64_t b, uint32_t* total, int add) {
  sums[current] = (float*)total, factors[current] = a;
  meet(WARPGROUP, current / 128, 128, [&] { multiply(N, true, 0, b, a_columns, b_columns, add); });
}

struct MaxOp { float operator()(float x, float y) { return max(x, y); } };
struct SumOp { float operator()(float x, float y) { return x + y; } };
template <int> struct NamedBarrier {};
template <class Op, int threads, int scale, int, class> struct AllReduce {
  static float run(float x) {
    static_assert(threads == 4 && scale == 1);
    int group = current / 4;
    values[current] = x;
    meet(REDUCE, group, 4, [&] {
      float* v = values + group * 4;
      v[0] = v[1] = v[2] = v[3] = Op()(Op()(v[0], v[1]), Op()(v[2], v[3]));
    });
    x = values[current];
    meet(REDUCED, group, 4);
    return x;
  }
};
void __sync_thread_partial(int barrier, int threads) { meet(NAMED, barrier, threads); }

void ptx_stmatrix_m8n8_x4(void* row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  int first = current / 32 * 32;
  rows[current] = (char*)row;
  uint32_t given[] = {a, b, c, d};
  memcpy(words[current], given, 16);
  meet(WARP, first, 32, [&] {
    for (int matrix = 0; matrix < 4; matrix++)
      for (int lane = 0; lane < 32; lane++)
        memcpy(rows[first + matrix * 8 + lane / 4] + lane % 4 * 4, &words[first + lane][matrix], 4);
  });
}
}  // namespace tl
