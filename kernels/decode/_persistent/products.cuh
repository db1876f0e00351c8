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

DEVICE void wait_for_piece(Block& k, int piece) {  // a copy waits for no other block
  while (!passed(&k.s.full[piece % SLOTS], piece / SLOTS & 1)) {}
}

// Copy the block's weights into the ring, for all steps: a thread of the last warp does nothing else.
DEVICE void feed_ring(Block& k) {
  const volatile int* finished = &k.s.finished;
  const char* source = nullptr;
  int produced = 0;
  for (; produced < k.a.steps * PIECES; ++produced) {
    const int piece = produced % PIECES, slot = produced % SLOTS, bytes = bytes_of_piece(piece);
    while (produced >= SLOTS && !*finished && !passed(&k.s.empty[slot], (produced / SLOTS - 1) & 1)) {}
    if (*finished) break;
    if (produced >= FLYING && piece < LAYERS * LAYER_PIECES) wait_for_piece(k, produced - FLYING);
    if (piece == 0) source = k.a.weights + k.block * TOKEN_BYTES;
    copy_to_shared(k.ring[slot], source, bytes, &k.s.full[slot]);
    source += bytes;
  }
  for (int piece = larger(0, produced - SLOTS); piece < produced; ++piece) wait_for_piece(k, piece);  // before the end
}

template <class P> struct Sums {  // of a lane: for the matrix unit, those of one sequence, in chains
  static constexpr int CHAINS = MATRIX_UNIT ? larger(1, 4 / P::GROUPS) : 1;
  float of[CHAINS][P::GROUPS][MATRIX_UNIT ? 2 : BATCH];
};

// Add a warp's tile i. Lane l has 16 bytes of row l / 4 of each group of 8 rows. x begins at the tile's first column.
template <class P> DEVICE void accumulate(Sums<P>& sums, int i, const char* tile, const X* x, int lane) {
  Vector<T, CHUNK> w[P::GROUPS];
#pragma unroll
  for (int g = 0; g < P::GROUPS; ++g) {
    const int row = smaller(8 * g + lane / 4, P::ROWS - 1);  // no branch, so that the loads of all tiles overlap
    memcpy(w[g].bits, __builtin_assume_aligned(tile + row * 64 + lane % 4 * 16, 16), 16);
  }
  x += lane % 4 * CHUNK;
  if constexpr (MATRIX_UNIT) {
    Vector<T, CHUNK> v;
    memcpy(v.bits, __builtin_assume_aligned(x + smaller(lane / 4, BATCH - 1) * P::STRIDE, 16), 16);
    constexpr int CHAINS = Sums<P>::CHAINS;  // a product waits 33 cycles for the one before it in its chain
#pragma unroll
    for (int g = 0; g < P::GROUPS; ++g) {  // the unit takes the columns in any order, if it is the same for x and w
      multiply_tile(sums.of[2 * i % CHAINS][g], v.bits[0], v.bits[1], w[g].bits[0], w[g].bits[1]);
      multiply_tile(sums.of[(2 * i + 1) % CHAINS][g], v.bits[2], v.bits[3], w[g].bits[2], w[g].bits[3]);
    }
  } else {
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      float v[CHUNK];
      memcpy(v, __builtin_assume_aligned(x + b * P::STRIDE, 16), sizeof(v));
#pragma unroll
      for (int g = 0; g < P::GROUPS; ++g)
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) sums.of[0][g][b] += w[g][i] * v[i];
    }
  }
}

// Write a warp's sums, (BATCH, PADDED).
template <class P> DEVICE void store_sums(Sums<P>& sums, float* part, int lane) {
#pragma unroll
  for (int g = 0; g < P::GROUPS; ++g) {
    if constexpr (MATRIX_UNIT) {
      float sum[2] = {};
#pragma unroll
      for (int chain = 0; chain < Sums<P>::CHAINS; ++chain)
        for (int i = 0; i < 2; ++i) sum[i] += sums.of[chain][g][i];
      float* to = part + lane / 4 * P::PADDED + 8 * g + lane % 4 * 2;
      if (lane / 4 < BATCH) to[0] = sum[0], to[1] = sum[1];
    } else {
#pragma unroll
      for (int b = 0; b < BATCH; ++b) {
        float sum = sums.of[0][g][b];
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
    for (int piece = 0; piece < P::PIECES; ++piece, ++k.consumed) {
      wait_for_piece(k, k.consumed);
      const char* slot = k.ring[k.consumed % SLOTS];
#pragma unroll
      for (int i = 0; i < ceil_div(P::TILES, WARPS); ++i) {
        const int tile = k.warp() + i * WARPS;
        constexpr bool EVEN = P::TILES % WARPS == 0 && P::ALL_TILES % P::TILES == 0;  // each warp has as many tiles
        if (EVEN || tile < P::tiles(piece))
          accumulate<P>(sums, i, slot + tile * P::ROWS * 64, k.s.x + (piece * P::TILES + tile) * TILE, k.lane());
      }
      synchronize_warp();
      if (k.lane() == 0) arrive(&k.s.empty[k.consumed % SLOTS]);
    }
    float* part = k.s.part + pass % 2 * WARPS * BATCH * P::PADDED;  // the last pass's sums may still be in use
    store_sums<P>(sums, part + k.warp() * BATCH * P::PADDED, k.lane());
    synchronize_block();
    finish(pass, part);
  }
}

// Publish epilogue(sum of the warps' sums + bias), rounded, for the block's rows. 30 lanes make 5 or 10 whole words.
// Each warp publishes one copy of them.
template <class P, class Epilogue>
DEVICE void publish(Block& k, const float* part, const T* bias, Word* words, Epilogue epilogue) {
  constexpr int RESULTS = P::WORDS * PER_WORD, PARTS = ceil_div(BATCH * RESULTS, 30);  // results: of a sequence, padded
  const int lane = k.lane();
  for (int item = k.warp(); item < P::TIMES * PARTS; item += WARPS) {
    const int place = item % PARTS * 30 + lane, b = place / RESULTS, i = place % RESULTS, row = k.block * P::SHARE + i;
    const bool exists = lane < 30 && b < BATCH && i < P::SHARE && row < P::N;
    const float result = exists ? epilogue(total<P>(part, b, i) + to_float(bias[i])) : 0;
    const Word word = pack_numbers(result, lane, k.epoch);
    if (exists && lane % PER_WORD == 0) store_word(words + item / PARTS * P::COPY + word_index<P>(b, row), word);
  }
}

// x = the hidden units. A block without rows of fc_proj needs none, and might come so late that it finds newer words.
DEVICE void receive_hidden(Block& k) {
  constexpr int ALL = BATCH * BLOCKS * Fc::WORDS, AT_ONCE = balanced(ceil_div(ALL, THREADS), 6);
  const int end = k.block * FcProj::SHARE < FcProj::N ? ALL : 0;
  for (int start = 32 * k.warp(); start < end; start += AT_ONCE * THREADS) {
    Word word[AT_ONCE];
    auto row_of = [&](int i) { return i / Fc::WORDS % BLOCKS * Fc::SHARE + i % Fc::WORDS * PER_WORD; };
    auto index = [&](int i) {
      const int place = start + k.lane() + i * THREADS;
      return place < ALL && row_of(place) < HIDDEN ? place : -1;
    };
    receive(k, word, k.a.fc + k.block % COPIES * Fc::COPY, index);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (index(i) < 0) continue;
      const int row = row_of(index(i)), end_of_block = (row / Fc::SHARE + 1) * Fc::SHARE;
      X* x = k.s.x + index(i) / (BLOCKS * Fc::WORDS) * FcProj::STRIDE;
#pragma unroll
      for (int j = 0; j < PER_WORD; ++j)
        if (row + j < smaller(end_of_block, HIDDEN)) x[row + j] = convert<X>(number_in(word[i], j));
    }
  }
  synchronize_block();
}
