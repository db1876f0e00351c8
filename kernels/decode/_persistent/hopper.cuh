// What persistent.cu needs of the machine, in Hopper's instructions. emulator.h has the same functions for a CPU.

typedef unsigned long long Barrier;  // an mbarrier in shared memory

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return (unsigned)__cvta_generic_to_shared(pointer);
}

// A word moves in one piece: .b128 is one access, and a vector of four .b32 is four (PTX's memory consistency model).
__device__ __forceinline__ Word load_word(const Word* from) {
  Word w;
  asm volatile(
      "{ .reg .b128 w; .reg .b64 low, high;\n"
      "  ld.relaxed.gpu.global.b128 w, [%4];\n"
      "  mov.b128 {low, high}, w; mov.b64 {%0, %1}, low; mov.b64 {%2, %3}, high; }"
      : "=r"(w.data[0]), "=r"(w.data[1]), "=r"(w.data[2]), "=r"(w.epoch) : "l"(from) : "memory");
  return w;
}

__device__ __forceinline__ void store_word(Word* to, const Word& w) {
  asm volatile(
      "{ .reg .b128 w; .reg .b64 low, high;\n"
      "  mov.b64 low, {%1, %2}; mov.b64 high, {%3, %4}; mov.b128 w, {low, high};\n"
      "  st.relaxed.gpu.global.b128 [%0], w; }"
      :: "l"(to), "r"(w.data[0]), "r"(w.data[1]), "r"(w.data[2]), "r"(w.epoch) : "memory");
}

__device__ __forceinline__ int load_flag(const int* from) {
  int flag;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(flag) : "l"(from) : "memory");
  return flag;
}

__device__ __forceinline__ void store_flag(int* to, int flag) {
  asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" :: "l"(to), "r"(flag) : "memory");
}

// Loads from the L2, because another multiprocessor may have written since the L1 got the line.
template <int N> __device__ __forceinline__ void load_l2(unsigned (&to)[N], const void* from) {
  static_assert(N == 2 || N % 4 == 0, "8 bytes or a multiple of 16");
  if (N == 2) asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
#pragma unroll
  for (int i = 0; i + 3 < N; i += 4)
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[i]), "=r"(to[i + 1]), "=r"(to[i + 2]), "=r"(to[i + 3]) : "l"((const char*)from + 4 * i));
}

__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ __forceinline__ void synchronize_block() { __syncthreads(); }
__device__ __forceinline__ void synchronize_compute_warps() {  // all but the warp that fills the ring
  asm volatile("bar.sync 1, %0;" :: "n"(THREADS) : "memory");
}
__device__ __forceinline__ void synchronize_warp() { __syncwarp(); }
__device__ __forceinline__ unsigned exchange_bits(unsigned bits, int lane) { return __shfl_sync(~0u, bits, lane); }

__device__ __forceinline__ unsigned short round_to_bf16(float x) {
  unsigned bits;  // a conversion of two numbers: one alone takes the slow unit of exp2 and log2
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(0.0f), "f"(x));
  return (unsigned short)bits;
}

__device__ __forceinline__ unsigned select_bits(unsigned bits, unsigned mask, unsigned other) {  // bits & mask | other
  unsigned selected;  // one instruction; without this the compiler takes two
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(selected) : "r"(bits), "r"(mask), "r"(other));
  return selected;
}

__device__ __forceinline__ float e4m3_to_float(unsigned char bits) {
  float x;  // through fp16, which has all numbers of e4m3; --ftz would make a subnormal of fp32 zero
  asm("{ .reg .b32 both; .reg .b16 low, high;\n"
      "  cvt.rn.f16x2.e4m3x2 both, %1; mov.b32 {low, high}, both; cvt.f32.f16 %0, low; }"
      : "=f"(x) : "h"((unsigned short)bits));
  return x;
}

__device__ __forceinline__ unsigned subtract_pairs(unsigned a, unsigned b) {  // of two numbers in bf16
  unsigned difference;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
  return difference;
}

// An optimization barrier: the compiler computes addresses from `value` again, instead of keeping those of all phases
// in registers (168 a thread for 124M, now 127). Without it a token of 124M took 3% longer on an H200, with 8 sequences
// 15%, and 12 layers of 1558M 8%.
__device__ __forceinline__ void forget(int& value) { asm volatile("" : "+r"(value)); }

__device__ __forceinline__ unsigned vote(bool yes) { return __ballot_sync(~0u, yes); }
__device__ __forceinline__ int warp_sum(int value) { return __reduce_add_sync(~0u, value); }

__device__ __forceinline__ void initialize(Barrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // TMA sees it too
}

// Whether the barrier's phase of this parity is complete.
__device__ __forceinline__ bool passed(Barrier* barrier, int parity) {
  unsigned done;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
  return done;
}

__device__ __forceinline__ void arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}

// Arrives at the barrier, and starts a copy that completes its phase. The L2 evicts these bytes first.
__device__ __forceinline__ void copy_to_shared(void* to, const void* from, int bytes, Barrier* barrier) {
  unsigned long long policy;
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
      :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy) : "memory");
}

// sum (16, 8) += x (16, 16) w (8, 16)^T in bf16. Lane l holds two columns, and the same plus 8, of three rows:
//     w0, w1      row l / 4 of w
//     x[0], x[2]  row l / 4 of x
//     x[1], x[3]  row 8 + l / 4 of x
// Its sums are of w's rows 2 (l % 4) and the next, with x's row l / 4 in 0 and 1, and with row 8 + l / 4 in 2 and 3.
//
// x has at most 8 sequences, so its rows 8 to 15 repeat them with other columns. Sums 0 and 1 belong to x[0] and x[2],
// sums 2 and 3 to x[1] and x[3]. The caller uses the pair whose columns w has.
__device__ __forceinline__ void multiply_tile(float (&sum)[4], const unsigned (&x)[4], unsigned w0, unsigned w1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32\n"
      "    {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(w0), "r"(w1));
}

__device__ __forceinline__ unsigned long long nanoseconds() {
  unsigned long long time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

__device__ __forceinline__ long long cycles() { return clock64(); }
__device__ __forceinline__ char* shared_memory() {
  extern __shared__ char memory[];
  return memory;
}
