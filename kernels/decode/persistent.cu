// A decoder in one launch: many tokens of up to 8 sequences, with no return to the host in between.
//
// A step of GPT-2 124M multiplies 247 MB of weights with one vector a sequence. An H200 reads them in 59 us. A first
// version had a block on each multiprocessor, and a barrier across all blocks after each of a layer's 5 phases. It took
// 220 us: 67 us for 61 barriers, and the rest because a block waits for weights, then for activations, then for weights
// again. Here the copies of weights do not wait for activations, and no barrier spans the blocks. A token takes 133 us
// in a loop of launches.
//
// 1. The ring. A block owns the same rows of every matrix for all tokens. plan.py lays them out as one stream, in
//    the order of use: 111 KB a layer for each of 128 blocks. A warp that does nothing else lets TMA, Hopper's copy
//    engine, fill a ring, 200 KB of shared memory, from this stream, piece after piece. It runs ahead over phases,
//    layers and tokens, so HBM works while the blocks wait. Gain and shift of the norms are pieces, too.
// 2. Words. A block publishes results in words of 16 bytes: 12 bytes of data, such as 6 results in bf16, and the epoch,
//    which counts layers. One store writes a word and one load reads it, so a block that finds the right epoch has the
//    data as well (NCCL's LL protocol does the same). A barrier takes a store, a fence, an atomic addition, a poll and
//    a load, one after the other. A word takes a store and a poll. In a loop of nothing else an exchange takes 1.07 us,
//    and 0.82 us if the blocks poll different copies of the words.
// 3. The residual stream. Every block has its own copy in shared memory, adds every branch to it and normalises it. The
//    same 768 numbers in 128 blocks are cheaper than one more exchange.
//
// A layer has five phases, each with one exchange:
//
//     stream += fc_proj, LayerNorm, 18 rows of QKV
//     attention: a head and a split of its keys (64 keys, or more if 10 splits are too few), the first 64 before q
//     adds the splits of the keys, 6 rows of the projection
//     stream += proj, LayerNorm, 24 rows of fc, GELU
//     6 rows of fc_proj
//
// Other models have the same phases and exchanges. With swiglu, a block's rows of fc are gate and up of the same units.
// So the block itself multiplies silu(gate) by up, and publishes one result for two rows. If q and k are normalised,
// the blocks that attend do it where they rotate: one warp receives a whole head, so the mean square needs no barrier.
// A wide fc has several passes, because a thread keeps the sums of a pass in registers.
//
// 12 layers take some 109 us, the head 15 us, and a greedy draw 5 us. A layer takes 15,600 cycles. Five exchanges of
// 0.82 us are 7,000 of them. Instructions count too: a warp has some 2,600 in a layer, and two warps share a scheduler.
// Four measures paid. Few threads poll, and share the words through shared memory. A warp leaves a poll together,
// because lanes that went on alone ran the code after it up to four times. No branch stands between the loads of two
// tiles. A warp releases a piece soon after it has read it: 170 us a token instead of 178.
//
// All layers use the same words, so a block overwrites a word one layer later. By then every block has read it. To get
// there the block waited for fc_proj, whose blocks waited for fc. Every block has rows of fc, and publishes them only
// after its own reads of qkv, of the splits, of proj, and of fc_proj of the layer before. Only blocks with rows of
// fc_proj read the words of fc, and they publish fc_proj after that.
//
// All sums have a fixed order, so two runs give the same bits. The bits of a sequence depend on the number of
// sequences, which chooses instructions and splits, but not on the tokens and lengths of the other sequences.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned u32;
typedef unsigned long long u64;
typedef long long i64;

// plan.py defines the sizes: BLOCKS, WARPS, BATCH, LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB, GROUP and
// FLYING; BF16, INT8, STREAM_BF16, ROPE, QK_NORM, RMS_NORM, RELU2 and SWIGLU (0 or 1), NORM_EPS, KV_BITS (8, 16 or 32);
// and for each of QKV, PROJ, FC, FC_PROJ and HEAD its Plan: NAME_ROWS, NAME_PASSES, NAME_TILES. persistent.py defines
// its CONSTANTS.
constexpr int THREADS = 32 * WARPS, C = WIDTH, D = HEAD_DIM, Q_WIDTH = HEADS * D, KV_WIDTH = KV_HEADS * D;
constexpr float LOWEST = -1e30f, LOG2E = 1.44269504f;
#define INF __uint_as_float(0x7F800000)

struct alignas(16) Word {
  u32 data[3], epoch;
};

#ifdef EMULATOR
#include "_persistent/emulator.h"
#else
#include "_persistent/hopper.cuh"
#endif
#define DEVICE __device__ __forceinline__

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int balanced(int n, int most) { return ceil_div(n, ceil_div(n, most)); }  // 24, 16: 12
__host__ __device__ constexpr int power_of_two(int n, int p = 1) { return p >= n ? p : power_of_two(n, 2 * p); }

#include "_persistent/numbers.cuh"

typedef Choice<BF16, bf16, float>::Type T;               // embeddings, norms, biases, results, logits
typedef Choice<INT8, i8, T>::Type W;                     // weights of products
typedef Choice<STREAM_BF16, bf16, float>::Type Stream;   // residual stream
typedef Choice<KV_BITS == 8, e4m3, Choice<KV_BITS == 16, bf16, float>::Type>::Type KV;  // cache

// ---- Sizes of the products, and what lies in memory

// A tile is TILE columns of each row of a pass, as many as 64 bytes of x. Each of four lanes has CHUNK columns of a row
constexpr int TILE = 64 / sizeof(T), CHUNK = TILE / 4, TILE_ROW_BYTES = TILE * sizeof(W);  // bytes of a row
constexpr int PER_WORD = 12 / sizeof(T);                                                   // results in a word

// N results of a W with K columns. A block multiplies ROWS rows in each of PASSES passes. A pass comes in pieces of up
// to TILES tiles. A result takes one row, or two with swiglu. AFTER_RMS_NORM: x lacks 1 / rms, see normalise().
template <int N_, int K_, int ROWS_, int PASSES_, int TILES_, int WORD_COPIES_, int AFTER_RMS_NORM_ = 0,
          int RESULT_ROWS_ = 1>
struct Product {
  static constexpr int N = N_, K = K_, ROWS = ROWS_, PASSES = PASSES_, AFTER_RMS_NORM = AFTER_RMS_NORM_;
  static constexpr int RESULT_ROWS = RESULT_ROWS_, RESULTS = ROWS / RESULT_ROWS;  // of a pass
  static constexpr int WORD_COPIES = WORD_COPIES_;    // of the results
  static constexpr int SHARE = ROWS * PASSES, ROW_GROUPS = ceil_div(ROWS, 8), PADDED = 8 * ROW_GROUPS;
  static constexpr int ALL_TILES = ceil_div(K, TILE), TILES = smaller(TILES_, ALL_TILES);
  static constexpr int PIECES = ceil_div(ALL_TILES, TILES);  // in a pass
  static constexpr int WARP_TILES = ceil_div(TILES, WARPS);  // in a piece
  static constexpr int STRIDE = (ALL_TILES | 1) * TILE;      // from one sequence of x to the next: no bank conflicts
  static constexpr int PARTS = BLOCKS * PASSES;              // of the results of a sequence
  static constexpr int WORDS = ceil_div(RESULTS, PER_WORD);  // per part
  static constexpr int COPY = BATCH * PARTS * WORDS;         // words per copy
  static constexpr int SUMS = smaller(PASSES, 2) * PADDED;   // per warp and sequence, in shared memory
  static constexpr i64 BYTES = (i64)SHARE * ALL_TILES * TILE_ROW_BYTES;  // of weights per block
  static DEVICE int piece_bytes(int piece) { return ROWS * tiles(piece) * TILE_ROW_BYTES; }
  static DEVICE int tiles(int piece) { return smaller(TILES, ALL_TILES - piece % PIECES * TILES); }
};
typedef Product<Q_WIDTH + 2 * KV_WIDTH, C, QKV_ROWS, QKV_PASSES, QKV_TILES, 1, RMS_NORM> Qkv;
typedef Product<C, Q_WIDTH, PROJ_ROWS, PROJ_PASSES, PROJ_TILES, COPIES> Proj;
typedef Product<HIDDEN, C, FC_ROWS, FC_PASSES, FC_TILES, COPIES, RMS_NORM, SWIGLU ? 2 : 1> Fc;
typedef Product<C, HIDDEN, FC_PROJ_ROWS, FC_PROJ_PASSES, FC_PROJ_TILES, COPIES> FcProj;
typedef Product<VOCAB, C, HEAD_ROWS, HEAD_PASSES, HEAD_TILES, 1, RMS_NORM> Head;

__host__ __device__ constexpr int largest(int a, int b, int c, int d, int e) {
  return larger(larger(larger(a, b), larger(c, d)), e);
}
constexpr int MOST_SUMS = largest(Qkv::SUMS, Proj::SUMS, Fc::SUMS, FcProj::SUMS, Head::SUMS);
constexpr int X_STRIDE = larger(larger(Qkv::STRIDE, Proj::STRIDE), FcProj::STRIDE);  // the largest
constexpr int NORM_SIZE = RMS_NORM ? C : 2 * C;  // the gain, and the shift of LayerNorm
constexpr int NORM_BYTES = NORM_SIZE * sizeof(T);
constexpr int LARGEST_TILES = largest(Qkv::ROWS * Qkv::TILES, Proj::ROWS * Proj::TILES, Fc::ROWS * Fc::TILES,
                                      FcProj::ROWS * FcProj::TILES, Head::ROWS * Head::TILES);
constexpr int LARGEST_PIECE = larger(NORM_BYTES, TILE_ROW_BYTES * LARGEST_TILES);
constexpr int LAYER_ROWS = Qkv::SHARE + Proj::SHARE + Fc::SHARE + FcProj::SHARE;  // of a layer, per block
constexpr int ALL_ROWS = LAYERS * LAYER_ROWS + Head::SHARE;                       // per block
constexpr i64 TOKEN_BYTES = LAYERS * (Qkv::BYTES + Proj::BYTES + Fc::BYTES + FcProj::BYTES) + Head::BYTES;  // a block's
static_assert(Qkv::PASSES * Proj::PASSES * FcProj::PASSES == 1, "only fc and the head have several passes");
static_assert(Fc::RESULTS * Fc::PASSES * (BLOCKS - 1) < HIDDEN, "every block has rows of fc");

constexpr int MOST_SPLITS = larger(1, BLOCKS / (BATCH * HEADS));      // of a sequence's keys
constexpr bool HAS_SPLITS = MOST_SPLITS > 1;
constexpr int SPLIT_CHANNELS = 8 / sizeof(T);                         // in a word of a split, beside its log-sum-exp
constexpr int SPLIT_WORDS = HAS_SPLITS ? D / SPLIT_CHANNELS : ceil_div(D, PER_WORD);  // of a split, or of a whole head
constexpr int PARTIAL_WORDS = BATCH * HEADS * MOST_SPLITS * SPLIT_WORDS;  // per copy
constexpr int GROUPS = ceil_div(Head::SHARE, GROUP);                  // of GROUP logits, per block
constexpr int MAX_CANDIDATES = 2 * THREADS;
constexpr int MOST_PIECES = 32;                                       // most pieces in the ring
constexpr int ROUND_TILES = 8;                                        // most tiles of a warp between two waits
constexpr int GROUP_WORDS = 1 + ceil_div(GROUP, PER_WORD);            // a summary, and the logits
constexpr int STREAM_WORDS = ceil_div(C, Proj::SHARE) * Proj::WORDS;  // of the residual stream of a sequence
constexpr int WARPS_PER_SEQUENCE = smaller(WARPS / BATCH, ceil_div(STREAM_WORDS, 32));  // that receive its words
constexpr int WORDS_PER_THREAD = ceil_div(STREAM_WORDS, 32 * WARPS_PER_SEQUENCE);
static_assert(WARPS_PER_SEQUENCE > 0, "a warp or more for each sequence");

struct Arguments {  // in the order of persistent.py
  const char* weights;                  // (BLOCKS, TOKEN_BYTES) of W
  const T* biases;                      // (BLOCKS, ALL_ROWS)
  const float* scales;                  // (BLOCKS, ALL_ROWS) with INT8
  const T* norms;                       // (2 LAYERS + 1, NORM_SIZE): ln_1 and ln_2 of each layer, and ln_f
  const T* qk_norms;                    // (LAYERS, 2, D): gains of q and k with QK_NORM
  const T *wte, *wpe;                   // (V, C), (wpe_rows, C)
  const float* frequencies;             // (D / 2,) of rotary positions
  KV *keys[LAYERS], *values[LAYERS];    // (BATCH, rows, KV_HEADS, D) each
  const i64 *tokens, *positions, *seeds, *stops;  // (BATCH,), (BATCH,), (BATCH,), (stop_count,)
  i64* drawn;                           // (BATCH, steps); if it is null, no tokens are drawn
  T* logits;                            // (BATCH, V), or null
  Word *qkv, *partial, *proj, *fc, *fc_proj, *groups, *token;
  int* failed;                          // a wait took longer than TIMEOUT_NS
  i64* timeline;                        // with TIMING: the cycle of each mark() in block 0
  int wpe_rows, rows, steps, epoch, stop_count, n_vocab, top_k;
  float temperature, top_p;
};

struct Candidate {
  float score = -INF, logit = -INF;
  int id = 0x7FFFFFFF;
};

struct Scratch {  // in shared memory, besides the ring
  union {
    alignas(16) T x[BATCH * X_STRIDE];
    struct {
      T inputs[BATCH * Head::STRIDE];
      float logits[BATCH * Head::SHARE];
      u16 listed_groups[BLOCKS * GROUPS];  // groups that may have the token
      Candidate candidates[MAX_CANDIDATES];
    } head;
  };
  alignas(16) float warp_sums[WARPS * BATCH * MOST_SUMS];
  alignas(16) u32 reduction[7 * WARPS];  // Moments, or what sampling reduces
  alignas(16) float query[D];
  alignas(16) KV key[D], value[D];  // of the new token
  alignas(16) float2 tops[WARPS], merge[D / 2][WARPS];
  float cosine[BATCH * D / 2], sine[BATCH * D / 2];
  Stream stream[BATCH * C];
  T bias[ALL_ROWS];
  float scale[INT8 ? ALL_ROWS : 1];
  float inverse_rms[BATCH];  // of the residual stream in the last RMSNorm
  int token[BATCH], drawn[BATCH], position[BATCH], stopped[BATCH];
  int key_count[BATCH], new_row[BATCH], splits[BATCH], split_keys[BATCH];  // of this token's attention
  u32 seed[BATCH];
  int finished, abandoned;  // the launch ends after this token; a wait of this block took too long
  Barrier full[MOST_PIECES], empty[MOST_PIECES];  // of the pieces in the ring: the copy is complete; all warps read it
  u32 ends[MOST_PIECES];                          // RingPosition::bytes after each of them
};
constexpr int RING_BYTES = (SHARED_BYTES - (int)sizeof(Scratch) - 128) / 128 * 128;
static_assert(RING_BYTES >= 2 * LARGEST_PIECE, "too little shared memory");

struct Shared {
  alignas(128) char ring[RING_BYTES];
  Scratch scratch;
};

struct Moments {  // of some channels: sums around a mean
  float sum, squares, mean;
};

// Where the next piece lies in the ring. A piece that does not fit before the end lies at the beginning.
struct RingPosition {
  int offset = 0;  // where the last piece ends
  u32 bytes = 0;   // of all pieces so far, and of the unused ends of the ring; it may overflow
  DEVICE int next(int size) {
    if (offset + size > RING_BYTES) bytes += RING_BYTES - offset, offset = 0;
    offset += size, bytes += size;
    return offset - size;
  }
};

struct Thread {  // the state of a thread, in registers
  Scratch& s;
  char* ring;
  const Arguments& a;
  int block, thread;
  u32 epoch = 0;
  int consumed = 0;  // pieces of the stream of weights
  RingPosition position;  // after the last consumed piece
  float mean = 0;                  // of the residual stream in the last norm
  int marks = 0;
  DEVICE int warp() const { return thread / 32; }
  DEVICE int lane() const { return thread % 32; }
};

DEVICE void mark(Thread& my) {
#ifdef TIMING
  if (my.block == 0 && my.thread == 0) my.a.timeline[my.marks++] = cycles();
#endif
}

#include "_persistent/words.cuh"
#include "_persistent/products.cuh"
#include "_persistent/attention.cuh"
#include "_persistent/sampling.cuh"

// ---- The residual stream

DEVICE void embed(Thread& my) {
  for (int i = my.thread; i < BATCH * C; i += THREADS) {
    const int b = i / C, c = i % C;
    const int token = larger(0, smaller(my.s.token[b], VOCAB - 1));  // after a failed wait it may be anything
    float x = to_float(my.a.wte[(i64)token * C + c]);
    if (!ROPE) x += to_float(my.a.wpe[(i64)smaller(my.s.position[b], my.a.wpe_rows - 1) * C + c]);
    my.s.stream[i] = convert<Stream>(x);
  }
  if (my.thread < BATCH) {
    const int b = my.thread, keys = smaller(my.s.position[b] + 1, my.a.rows);
    my.s.key_count[b] = keys;
    my.s.new_row[b] = my.s.position[b] % my.a.rows;
    my.s.splits[b] = smaller(MOST_SPLITS, ceil_div(keys, SPLIT_KEYS));
    my.s.split_keys[b] = ceil_div(keys, my.s.splits[b]);
  }
  for (int i = my.thread; ROPE && i < BATCH * D / 2; i += THREADS) {
    const float angle = my.s.position[i / (D / 2)] * my.a.frequencies[i % (D / 2)];
    my.s.cosine[i] = cosf(angle);
    my.s.sine[i] = sinf(angle);
  }
  constexpr bool PADDED = C % TILE || Q_WIDTH % TILE || HIDDEN % TILE;  // the last tile of x
  for (int i = my.thread; PADDED && i < BATCH * X_STRIDE; i += THREADS) my.s.x[i] = convert<T>(0);
  my.mean = 0;
  synchronize_compute_warps();
}

// stream += branch, if there is one, and x = norm(stream), or stream * gain for RMSNorm: apply_scales() multiplies the
// results by 1 / rms. Few threads receive each sequence, because all blocks poll the same words. They sum in one pass:
// LayerNorm sums around the last mean.
DEVICE void normalise(Thread& my, const Word* branch) {
  constexpr int AT_ONCE = balanced(WORDS_PER_THREAD, 8);
  const int sequence = my.warp() / WARPS_PER_SEQUENCE, first = my.thread % (32 * WARPS_PER_SEQUENCE);
  auto first_channel = [](int place) { return place / Proj::WORDS * Proj::SHARE + place % Proj::WORDS * PER_WORD; };
  auto word_place = [&](int i) {  // of this thread's word i in its sequence
    const int place = first + i * 32 * WARPS_PER_SEQUENCE;
    return sequence < BATCH && i < WORDS_PER_THREAD && place < STREAM_WORDS && first_channel(place) < C ? place : -1;
  };
  const Word* words = branch + my.block % COPIES * Proj::COPY + sequence * BLOCKS * Proj::WORDS + first;
  const T* norm = (const T*)next_piece(my, 0, NORM_BYTES);
  float sum = 0, squares = 0;
#pragma unroll 1
  for (int start = 0; start < WORDS_PER_THREAD; start += AT_ONCE) {
    Word word[AT_ONCE];
    if (branch)
      receive(my, word, [&](int i) { return words + (start + i) * 32 * WARPS_PER_SEQUENCE; },
              [&](int i) { return word_place(start + i) >= 0; });
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int place = word_place(start + i), channel = first_channel(place);
      const int end = (place / Proj::WORDS + 1) * Proj::SHARE;
      if (place < 0) continue;
      Stream *stream = my.s.stream + sequence * C + channel, value[PER_WORD];
      auto exists = [&](int j) { return channel + j < smaller(end, C); };
#pragma unroll
      for (int j = 0; j < PER_WORD; ++j) value[j] = exists(j) ? stream[j] : convert<Stream>(my.mean);
#pragma unroll
      for (int j = 0; j < PER_WORD; ++j) {
        if (branch && exists(j)) value[j] = convert<Stream>(to_float(value[j]) + number_in(word[i], j));
        const float x = exists(j) ? to_float(value[j]) - my.mean : 0;
        if (!RMS_NORM) sum += x;
        squares += x * x;
      }
#pragma unroll
      for (int j = 0; j < PER_WORD; ++j)
        if (branch && exists(j)) stream[j] = value[j];
      T* x = my.s.x + sequence * Qkv::STRIDE + channel;
#pragma unroll
      for (int j = 0; j < PER_WORD; ++j)
        if (RMS_NORM && exists(j)) x[j] = convert<T>(to_float(value[j]) * to_float(norm[channel + j]));
    }
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    if (!RMS_NORM) sum += exchange(sum, my.lane() ^ mask);
    squares += exchange(squares, my.lane() ^ mask);
  }
  Moments* warps = (Moments*)my.s.reduction;
  if (my.lane() == 0) warps[my.warp()] = {sum, squares, my.mean};
  synchronize_compute_warps();
  struct Statistics { float mean, rstd; };
  auto statistics = [&](int b) {  // of a sequence
    float sum = 0, squares = 0;
#pragma unroll
    for (int warp = b * WARPS_PER_SEQUENCE; warp < (b + 1) * WARPS_PER_SEQUENCE; ++warp)
      sum += warps[warp].sum, squares += warps[warp].squares;
    if (RMS_NORM) return Statistics{0, rsqrtf(squares * (1.0f / C) + NORM_EPS)};
    const float away = sum * (1.0f / C), variance = fmaxf(squares * (1.0f / C) - away * away, 0);
    return Statistics{warps[b * WARPS_PER_SEQUENCE].mean + away, rsqrtf(variance + NORM_EPS)};
  };
  if constexpr (RMS_NORM) {
    if (my.thread < BATCH) my.s.inverse_rms[my.thread] = statistics(my.thread).rstd;  // read after multiply()'s barrier
    release_pieces(my, 1);
    return;
  }
  constexpr int PAIRS = ceil_div(BATCH * C, 2 * THREADS);  // of channels of a thread, all loaded before any is stored
  float y[PAIRS][2];
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    const int from = smaller(2 * (my.thread + i * THREADS), BATCH * C - 2), c = from % C;
    const Statistics own = statistics(from / C);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float x = (to_float(my.s.stream[from + j]) - own.mean) * own.rstd;
      y[i][j] = x * to_float(norm[c + j]) + to_float(norm[C + c + j]);
    }
  }
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    const int from = 2 * (my.thread + i * THREADS);
    T* x = my.s.x + from / C * Qkv::STRIDE + from % C;
    for (int j = 0; j < 2 && from < BATCH * C; ++j) x[j] = convert<T>(y[i][j]);
  }
  release_pieces(my, 1);
  my.mean = statistics(smaller(sequence, BATCH - 1)).mean;
  synchronize_compute_warps();
}

// ---- The launch

DEVICE float gelu(float x) { return 0.5f * x * (1 + tanhf(0.7978845608f * (x + 0.044715f * x * x * x))); }
DEVICE float relu2(float x) { return x < 0 ? 0 : x * x; }  // keeps NaN
DEVICE float silu(float x) { return __fdividef(x, 1 + exp2f(-LOG2E * x)); }

DEVICE float identity(float x) { return x; }
DEVICE float activate(float x) { return SWIGLU ? silu(x) : RELU2 ? relu2(x) : gelu(x); }

DEVICE void run_attention(Thread& my, int layer) {
  const int qkv = layer * LAYER_ROWS, proj = qkv + Qkv::SHARE;
  multiply_and_publish<Qkv>(my, qkv, my.a.qkv, identity);
  mark(my);
  attend(my, layer);
  mark(my);
  combine(my);
  mark(my);
  multiply_and_publish<Proj>(my, proj, my.a.proj, identity);
  mark(my);
}

DEVICE void run_mlp(Thread& my, int layer) {
  const int fc = layer * LAYER_ROWS + Qkv::SHARE + Proj::SHARE, fc_proj = fc + Fc::SHARE;
  multiply_and_publish<Fc>(my, fc, my.a.fc, activate);
  mark(my);
  receive_hidden(my);
  mark(my);
  multiply_and_publish<FcProj>(my, fc_proj, my.a.fc_proj, identity);
  mark(my);
}

DEVICE void run_head(Thread& my) {
  fence();  // who reads this block's logits also sees its rows of the cache
  multiply<Head>(my, [&](int pass, const float* warp_sums) {
#pragma unroll 1
    for (int round = 0; round < ceil_div(BATCH * Head::ROWS, THREADS); ++round) {
      const int i = my.thread + round * THREADS;
      if (i >= BATCH * Head::ROWS) break;
      const int b = i / Head::ROWS, row = pass * Head::ROWS + i % Head::ROWS, id = my.block * Head::SHARE + row;
      const float sum = total<Head>(warp_sums, b, i % Head::ROWS);
      const T logit = convert<T>(apply_scales<Head>(my, b, LAYERS * LAYER_ROWS + row, sum));
      my.s.head.logits[b * Head::SHARE + row] = to_float(logit);
      if (my.a.logits && id < VOCAB) my.a.logits[(i64)b * VOCAB + id] = logit;
    }
  });
  synchronize_compute_warps();
  mark(my);
}

DEVICE void start(Thread& my) {
  for (int i = 0; i < MOST_PIECES && my.thread == 0; ++i)
    initialize(&my.s.full[i], 1), initialize(&my.s.empty[i], WARPS);
  if (my.thread < BATCH) {
    my.s.token[my.thread] = (int)my.a.tokens[my.thread];
    my.s.position[my.thread] = (int)my.a.positions[my.thread];
    my.s.seed[my.thread] = my.a.drawn ? (u32)my.a.seeds[my.thread] : 0;
    my.s.stopped[my.thread] = 0;
  }
  for (int i = my.thread; i < ALL_ROWS; i += THREADS) {
    my.s.bias[i] = my.a.biases[my.block * ALL_ROWS + i];
    if (INT8) my.s.scale[i] = my.a.scales[my.block * ALL_ROWS + i];
  }
  if (my.thread == 0) my.s.finished = my.s.abandoned = 0;
  my.epoch = my.a.epoch;
  synchronize_block();
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) persistent_decode(const __grid_constant__ Arguments a) {
  Shared& shared = *(Shared*)shared_memory();
  Thread my{shared.scratch, shared.ring, a, (int)blockIdx.x, (int)threadIdx.x};
  start(my);
  if (my.warp() == WARPS) {
    if (my.lane() == 0) feed_ring(my);
    return;
  }
  for (int step = 0; step < a.steps && !my.s.finished; ++step) {
    mark(my);
    embed(my);
    for (int half = 0; half <= 2 * LAYERS; ++half) {  // of a layer; the last one is the head
      forget(my.block), forget(my.thread);
      normalise(my, half == 0 ? nullptr : half % 2 ? a.proj : a.fc_proj);
      mark(my);
      if (half == 2 * LAYERS) {
        run_head(my);
      } else if (half % 2) {
        run_mlp(my, half / 2);
      } else {
        ++my.epoch;
        run_attention(my, half / 2);
      }
    }
    if (a.drawn) draw_tokens(my, step);
  }
}

#ifdef EMULATOR
extern "C" int emulate(const Arguments* a, int seed, int absent, int slow) {
  auto run = [](const void* a) { persistent_decode(*(const Arguments*)a); };
  return emulator::run(run, a, sizeof(Shared), seed, absent, slow);
}
#endif
