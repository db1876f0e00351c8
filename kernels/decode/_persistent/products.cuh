// The ring of weights, and the products: each warp multiplies its tiles of every row, and the warps' sums are added.

DEVICE int bytes_of_piece(int i) {  // of the pieces of a token
  if (i >= LAYERS * LAYER_PIECES) return 64 * Head::ROWS * Head::tiles(i - LAYERS * LAYER_PIECES);
  i %= LAYER_PIECES;
  if (i < Qkv::PIECES) return 64 * Qkv::ROWS * Qkv::tiles(i);
  i -= Qkv::PIECES;
  if (i < Proj::PIECES) return 64 * Proj::ROWS * Proj::tiles(i);
  i -= Proj::PIECES;
  if (i < Fc::PIECES) return 64 * Fc::ROWS * Fc::tiles(i);
  return 64 * FcProj::ROWS * FcProj::tiles(i - Fc::PIECES);
}

DEVICE void wait_for_piece(Thread& my, int piece) {  // needs no timeout: a copy does not depend on other blocks
  while (!passed(&my.s.full[piece % MOST_PIECES], piece / MOST_PIECES & 1)) {}
}

// Copy the block's weights into the ring, for all steps: a thread of the last warp does nothing else.
DEVICE void feed_ring(Thread& my) {
  const volatile int* finished = &my.s.finished;
  const char* source = nullptr;
  Places filled, read;  // by all warps
  int produced = 0, released = 0;
  for (; produced < my.a.steps * TOKEN_PIECES; ++produced) {
    const int piece = produced % TOKEN_PIECES, size = bytes_of_piece(piece), place = filled.next(size);
    for (; filled.bytes - read.bytes > RING_BYTES || produced - released == MOST_PIECES; ++released) {
      Barrier* empty = &my.s.empty[released % MOST_PIECES];
      while (!*finished && !passed(empty, released / MOST_PIECES & 1)) {}
      if (*finished) break;
      read.next(bytes_of_piece(released % TOKEN_PIECES));
    }
    if (*finished) break;
    if (produced >= FLYING && piece < LAYERS * LAYER_PIECES) wait_for_piece(my, produced - FLYING);
    if (piece == 0) source = my.a.weights + my.block * TOKEN_BYTES;
    copy_to_shared(my.ring + place, source, size, &my.s.full[produced % MOST_PIECES]);
    source += size;
  }
  // A block must not exit while copies write to its shared memory
  for (; released < produced; ++released) wait_for_piece(my, released);
}

// The sums of a lane. With tensor cores: two rows of one sequence in each group, in independent chains.
template <class P> struct Sums {
  static constexpr int CHAINS = TENSOR_CORES ? larger(1, 4 / P::ROW_GROUPS) : 1;
  float of[CHAINS][P::ROW_GROUPS][TENSOR_CORES ? 2 : BATCH];
};

// Add a warp's tile i. Lane l has 16 bytes of row l / 4 of each group of 8 rows. x begins at the tile's first column.
template <class P> DEVICE void accumulate(Sums<P>& sums, int i, const char* tile, const X* x, int lane) {
  Vector<T, CHUNK> w[P::ROW_GROUPS];
#pragma unroll
  for (int g = 0; g < P::ROW_GROUPS; ++g) {
    const int row = smaller(8 * g + lane / 4, P::ROWS - 1);  // no branch, so that the loads of all tiles overlap
    memcpy(w[g].bits, __builtin_assume_aligned(tile + row * 64 + lane % 4 * 16, 16), 16);
  }
  x += lane % 4 * CHUNK;
  if constexpr (TENSOR_CORES) {
    Vector<T, CHUNK> v;
    memcpy(v.bits, __builtin_assume_aligned(x + smaller(lane / 4, BATCH - 1) * P::STRIDE, 16), 16);
    constexpr int CHAINS = Sums<P>::CHAINS;  // a product waits 33 cycles for the one before it in its chain
#pragma unroll
    for (int g = 0; g < P::ROW_GROUPS; ++g) {  // the columns may be in any order that x and w share
      multiply_tile(sums.of[2 * i % CHAINS][g], v.bits[0], v.bits[1], w[g].bits[0], w[g].bits[1]);
      multiply_tile(sums.of[(2 * i + 1) % CHAINS][g], v.bits[2], v.bits[3], w[g].bits[2], w[g].bits[3]);
    }
  } else {
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      float v[CHUNK];
      memcpy(v, __builtin_assume_aligned(x + b * P::STRIDE, 16), sizeof(v));
#pragma unroll
      for (int g = 0; g < P::ROW_GROUPS; ++g)
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) sums.of[0][g][b] += w[g][i] * v[i];
    }
  }
}

// Write a warp's sums, (BATCH, PADDED).
template <class P> DEVICE void store_sums(Sums<P>& sums, float* out, int lane) {
#pragma unroll
  for (int g = 0; g < P::ROW_GROUPS; ++g) {
    if constexpr (TENSOR_CORES) {
      float sum[2] = {};
#pragma unroll
      for (int chain = 0; chain < Sums<P>::CHAINS; ++chain)
        for (int i = 0; i < 2; ++i) sum[i] += sums.of[chain][g][i];
      float* to = out + lane / 4 * P::PADDED + 8 * g + lane % 4 * 2;
      if (lane / 4 < BATCH) to[0] = sum[0], to[1] = sum[1];
    } else {
#pragma unroll
      for (int b = 0; b < BATCH; ++b) {
        float sum = sums.of[0][g][b];
        sum += exchange(sum, lane ^ 1);
        sum += exchange(sum, lane ^ 2);
        if (lane % 4 == 0) out[b * P::PADDED + 8 * g + lane / 4] = sum;
      }
    }
  }
}

// Add the warps' sums of a row, in a fixed order.
template <class P> DEVICE float total(const float* warp_sums, int b, int row) {
  float sums[4] = {};
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) sums[warp % 4] += warp_sums[(warp * BATCH + b) * P::PADDED + row];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Multiply the W that is next in the ring with x. Call finish(pass, warp_sums) after each pass.
template <class P, class Finish> DEVICE void multiply(Thread& my, Finish finish) {
  for (int pass = 0; pass < P::PASSES; ++pass) {
    Sums<P> sums = {};
    for (int piece = 0; piece < P::PIECES; ++piece, ++my.consumed) {
      const char* weights = my.ring + my.places.next(64 * P::ROWS * P::tiles(piece));
      wait_for_piece(my, my.consumed);
#pragma unroll
      for (int i = 0; i < ceil_div(P::TILES, WARPS); ++i) {
        const int tile = my.warp() + i * WARPS;
        // All warps have the same number of tiles
        constexpr bool EVEN = P::TILES % WARPS == 0 && P::ALL_TILES % P::TILES == 0;
        if (EVEN || tile < P::tiles(piece))
          accumulate<P>(sums, i, weights + tile * P::ROWS * 64, my.s.x + (piece * P::TILES + tile) * TILE, my.lane());
      }
      synchronize_warp();
      if (my.lane() == 0) arrive(&my.s.empty[my.consumed % MOST_PIECES]);
    }
    // The last pass's sums may still be in use
    float* warp_sums = my.s.warp_sums + pass % 2 * WARPS * BATCH * P::PADDED;
    store_sums<P>(sums, warp_sums + my.warp() * BATCH * P::PADDED, my.lane());
    synchronize_compute_warps();
    finish(pass, warp_sums);
  }
}

// Publish epilogue(total + bias) for the block's rows. A warp takes 30 results of one copy at a time, because these
// fill whole words: 5 in bf16, 10 in fp32.
template <class P, class Epilogue>
DEVICE void publish(Thread& my, const float* warp_sums, const T* bias, Word* words, Epilogue epilogue) {
  constexpr int RESULTS = P::WORDS * PER_WORD, PARTS = ceil_div(BATCH * RESULTS, 30);  // results: of a sequence, padded
  const int lane = my.lane();
  for (int item = my.warp(); item < P::WORD_COPIES * PARTS; item += WARPS) {
    const int place = item % PARTS * 30 + lane, b = place / RESULTS, i = place % RESULTS, row = my.block * P::SHARE + i;
    const bool exists = lane < 30 && b < BATCH && i < P::SHARE && row < P::N;
    const float result = exists ? epilogue(total<P>(warp_sums, b, i) + to_float(bias[i])) : 0;
    const Word word = pack_numbers(result, lane, my.epoch);
    if (exists && lane % PER_WORD == 0) store_word(words + item / PARTS * P::COPY + word_index<P>(b, row), word);
  }
}

template <class P, class Epilogue>
DEVICE void multiply_and_publish(Thread& my, const T* bias, Word* words, Epilogue epilogue) {
  multiply<P>(my, [&](int, const float* warp_sums) { publish<P>(my, warp_sums, bias, words, epilogue); });
}

// x = the hidden units. A block without rows of fc_proj needs none, and might come so late that it finds newer words.
DEVICE void receive_hidden(Thread& my) {
  constexpr int ALL = BATCH * BLOCKS * Fc::WORDS, AT_ONCE = balanced(ceil_div(ALL, THREADS), 6);
  const int end = my.block * FcProj::SHARE < FcProj::N ? ALL : 0;
  for (int start = 32 * my.warp(); start < end; start += AT_ONCE * THREADS) {
    Word word[AT_ONCE];
    auto row_of = [&](int i) { return i / Fc::WORDS % BLOCKS * Fc::SHARE + i % Fc::WORDS * PER_WORD; };
    auto index = [&](int i) {
      const int place = start + my.lane() + i * THREADS;
      return place < ALL && row_of(place) < HIDDEN ? place : -1;
    };
    receive(my, word, my.a.fc + my.block % COPIES * Fc::COPY, index);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (index(i) < 0) continue;
      const int row = row_of(index(i)), end_of_block = (row / Fc::SHARE + 1) * Fc::SHARE;
      X* x = my.s.x + index(i) / (BLOCKS * Fc::WORDS) * FcProj::STRIDE;
#pragma unroll
      for (int j = 0; j < PER_WORD; ++j)
        if (row + j < smaller(end_of_block, HIDDEN)) x[row + j] = convert<X>(number_in(word[i], j));
    }
  }
  synchronize_compute_warps();
}
