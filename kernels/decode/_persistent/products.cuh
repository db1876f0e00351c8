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

// Start a copy into each free slot, up to the end of the last step. A thread of the last warp does this, because the
// first warp has results to publish.
DEVICE void fill_ring(Block& k) {
  if (k.thread != THREADS - 32) return;
  for (; k.produced < k.consumed + SLOTS && k.produced < k.a.steps * PIECES; ++k.produced) {
    const int piece = k.produced % PIECES, slot = k.produced % SLOTS, bytes = bytes_of_piece(piece);
    if (piece == 0) k.source = k.a.weights + k.block * TOKEN_BYTES;
    copy_to_shared(k.ring[slot], k.source, bytes, &k.s.full[slot]);
    k.source += bytes;
  }
}

DEVICE void wait_for_piece(Block& k, int piece) {  // a copy waits for no other block
  while (!passed(&k.s.full[piece % SLOTS], piece / SLOTS & 1)) {}
}

DEVICE void start_ring(Block& k) {
  if (k.thread == THREADS - 32)
    for (int slot = 0; slot < SLOTS; ++slot) initialize(&k.s.full[slot]);
  fill_ring(k);
}

DEVICE void end_ring(Block& k) {  // no copy may outlive the block
  if (k.thread == THREADS - 32)
    for (int piece = k.consumed; piece < k.produced; ++piece) wait_for_piece(k, piece);
}

template <class P> struct Sums {  // of a lane: for the matrix unit, those of one sequence
  float of[P::GROUPS][MATRIX_UNIT ? 2 : BATCH];
};

// Add a tile. Lane l has 16 bytes of row l / 4 of each group of 8 rows. x begins at the tile's first column.
template <class P> DEVICE void accumulate(Sums<P>& sums, const char* tile, const X* x, int lane) {
  Vector<T, CHUNK> w[P::GROUPS];
#pragma unroll
  for (int g = 0; g < P::GROUPS; ++g) {
    const int row = smaller(8 * g + lane / 4, P::ROWS - 1);
    memcpy(w[g].bits, __builtin_assume_aligned(tile + row * 64 + lane % 4 * 16, 16), 16);
  }
  x += lane % 4 * CHUNK;
  if constexpr (MATRIX_UNIT) {
    Vector<T, CHUNK> v = {};
    if (lane / 4 < BATCH) memcpy(v.bits, __builtin_assume_aligned(x + lane / 4 * P::STRIDE, 16), 16);
#pragma unroll
    for (int g = 0; g < P::GROUPS; ++g) {  // the unit takes the columns in any order, if it is the same for x and w
      multiply_tile(sums.of[g], v.bits[0], v.bits[1], w[g].bits[0], w[g].bits[1]);
      multiply_tile(sums.of[g], v.bits[2], v.bits[3], w[g].bits[2], w[g].bits[3]);
    }
  } else {
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      float v[CHUNK];
      memcpy(v, __builtin_assume_aligned(x + b * P::STRIDE, 16), sizeof(v));
#pragma unroll
      for (int g = 0; g < P::GROUPS; ++g)
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) sums.of[g][b] += w[g][i] * v[i];
    }
  }
}

// Write a warp's sums, (BATCH, PADDED).
template <class P> DEVICE void store_sums(Sums<P>& sums, float* part, int lane) {
#pragma unroll
  for (int g = 0; g < P::GROUPS; ++g) {
    if constexpr (MATRIX_UNIT) {
      float* to = part + lane / 4 * P::PADDED + 8 * g + lane % 4 * 2;
      if (lane / 4 < BATCH) to[0] = sums.of[g][0], to[1] = sums.of[g][1];
    } else {
#pragma unroll
      for (int b = 0; b < BATCH; ++b) {
        float sum = sums.of[g][b];
        sum += exchange(sum, lane ^ 1);
        sum += exchange(sum, lane ^ 2);
        if (lane % 4 == 0) part[b * P::PADDED + 8 * g + lane / 4] = sum;
      }
    }
  }
}

// Add the warps' sums of a row, in a fixed order.
template <class P> DEVICE float total(const float* part, int b, int row) {
  float sums[4] = {};
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) sums[warp % 4] += part[(warp * BATCH + b) * P::PADDED + row];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Multiply the W that is next in the ring with x. Call finish(pass, part) with the warps' sums of each pass.
template <class P, class Finish> DEVICE void multiply(Block& k, Finish finish) {
  for (int pass = 0; pass < P::PASSES; ++pass) {
    Sums<P> sums = {};
    for (int piece = 0; piece < P::PIECES; ++piece) {
      wait_for_piece(k, k.consumed + piece);
      const char* slot = k.ring[(k.consumed + piece) % SLOTS];
#pragma unroll
      for (int i = 0; i < ceil_div(P::TILES, WARPS); ++i) {
        const int tile = k.warp() + i * WARPS;
        if (tile < P::tiles(piece))
          accumulate<P>(sums, slot + tile * P::ROWS * 64, k.s.x + (piece * P::TILES + tile) * TILE, k.lane());
      }
    }
    float* part = k.s.part + pass % 2 * WARPS * BATCH * P::PADDED;  // the last pass's sums may still be in use
    store_sums<P>(sums, part + k.warp() * BATCH * P::PADDED, k.lane());
    synchronize_block();
    k.consumed += P::PIECES;
    fill_ring(k);
    finish(pass, part);
  }
}

// Publish epilogue(sum of the warps' sums + bias), rounded, for the block's rows. 30 lanes make 5 or 10 whole words.
template <class P, class Epilogue>
DEVICE void publish(Block& k, const float* part, const T* bias, Word* words, Epilogue epilogue) {
  constexpr int RESULTS = P::WORDS * PER_WORD;  // of a sequence, with padding
  const int lane = k.lane();
  for (int first = 30 * k.warp(); first < BATCH * RESULTS; first += 30 * WARPS) {
    const int b = (first + lane) / RESULTS, i = (first + lane) % RESULTS, row = k.block * P::SHARE + i;
    const bool exists = lane < 30 && b < BATCH && i < P::SHARE && row < P::N;
    const float result = exists ? epilogue(total<P>(part, b, i) + to_float(bias[i])) : 0;
    Word word;
    word.epoch = k.epoch;
    if (sizeof(T) == 4) {
      word.data[0] = __float_as_uint(result);
      word.data[1] = exchange(word.data[0], lane + 1);
      word.data[2] = exchange(word.data[0], lane + 2);
    } else {
      const u32 bits = convert<bf16>(result).bits;
      word.data[0] = bits | exchange(bits, lane + 1) << 16;
      word.data[1] = exchange(word.data[0], lane + 2);
      word.data[2] = exchange(word.data[0], lane + 4);
    }
    if (exists && lane % PER_WORD == 0) store_word(words + word_index<P>(b, row), word);
  }
}

// x = the hidden units. A block without rows of fc_proj needs none, and might come so late that it finds newer words.
DEVICE void receive_hidden(Block& k) {
  constexpr int ALL = BATCH * BLOCKS * Fc::WORDS, AT_ONCE = balanced(ceil_div(ALL, THREADS), 6);
  const int end = k.block * FcProj::SHARE < FcProj::N ? ALL : 0;
  for (int start = k.thread; start < end; start += AT_ONCE * THREADS) {
    Word word[AT_ONCE];
    auto row_of = [&](int i) { return i / Fc::WORDS % BLOCKS * Fc::SHARE + i % Fc::WORDS * PER_WORD; };
    auto index = [&](int i) {
      const int place = start + i * THREADS;
      return place < ALL && row_of(place) < HIDDEN ? place : -1;
    };
    receive(k, word, k.a.fc, index);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (index(i) < 0) continue;
      const int row = row_of(index(i)), end_of_block = (row / Fc::SHARE + 1) * Fc::SHARE;
      X* x = k.s.x + index(i) / (BLOCKS * Fc::WORDS) * FcProj::STRIDE;
#pragma unroll
      for (int j = 0; j < PER_WORD; ++j)
        if (row + j < smaller(end_of_block, HIDDEN)) x[row + j] = convert<X>(result_in<Fc>(word[i], row + j));
    }
  }
  synchronize_block();
}
