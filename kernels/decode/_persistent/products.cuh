// The ring of weights, and the products: each warp multiplies its tiles of every row, and the warps' sums are added.

DEVICE void wait_for_piece(Thread& my, int piece) {  // needs no timeout: a copy does not depend on other blocks
  while (!passed(&my.s.full[piece % MOST_PIECES], piece / MOST_PIECES & 1)) {}
}

struct Feeder {  // the state of the thread that fills the ring
  const char* source;
  RingPosition position;  // after the last copy
  u32 read = 0;           // RingPosition::bytes after the last piece that all warps have read
  int produced = 0, released = 0;
};

// Copy a piece into the ring, once there is room, and once fewer than `most_flying` copies are in flight. Returns
// false if the launch ends.
DEVICE bool feed_piece(Thread& my, Feeder& f, const char* source, int size, int most_flying) {
  const volatile int* finished = &my.s.finished;
  const int place = f.position.next(size);
  for (; f.position.bytes - f.read > RING_BYTES || f.produced - f.released == MOST_PIECES; ++f.released) {
    while (!passed(&my.s.empty[f.released % MOST_PIECES], f.released / MOST_PIECES & 1))
      if (*finished) return false;
    f.read = my.s.ends[f.released % MOST_PIECES];
  }
  if (f.produced >= most_flying) wait_for_piece(my, f.produced - most_flying);
  my.s.ends[f.produced % MOST_PIECES] = f.position.bytes;
  copy_to_shared(my.ring + place, source, size, &my.s.full[f.produced++ % MOST_PIECES]);
  return true;
}

// Copy a matrix. Piece sizes are constants, because the head's pieces must follow each other within 0.3 us.
template <class P> DEVICE bool feed(Thread& my, Feeder& f, int most_flying) {
#pragma unroll 1
  for (int pass = 0; pass < P::PASSES; ++pass)
#pragma unroll 1  // unrolled code would evict the other warps' code
    for (int piece = 0; piece < P::PIECES; ++piece) {
      const int size = P::piece_bytes(piece);
      if (!feed_piece(my, f, f.source, size, most_flying)) return false;
      f.source += size;
    }
  return true;
}

DEVICE bool feed_token(Thread& my, Feeder& f) {
  f.source = my.a.weights + my.block * TOKEN_BYTES;
  for (int half = 0; half <= 2 * LAYERS; ++half) {
    // A norm and the head wait for no copy: with 1 for the norm, 12 layers of 1558M took 318 us instead of 309
    const bool fed = feed_piece(my, f, (const char*)(my.a.norms + half * NORM_SIZE), NORM_BYTES, MOST_PIECES) &&
                     (half == 2 * LAYERS ? feed<Head>(my, f, MOST_PIECES)
                      : half % 2         ? feed<Fc>(my, f, FLYING) && feed<FcProj>(my, f, FLYING)
                                         : feed<Qkv>(my, f, FLYING) && feed<Proj>(my, f, FLYING));
    if (!fed) return false;
  }
  return true;
}

// Copy the block's weights into the ring, for all steps: a thread of the last warp does nothing else.
DEVICE void feed_ring(Thread& my) {
  Feeder f;
  for (int step = 0; step < my.a.steps && feed_token(my, f); ++step) {}
  // A block must not exit while copies write to its shared memory
  for (; f.released < f.produced; ++f.released) wait_for_piece(my, f.released);
}

// Wait for the i-th piece after the consumed ones, and return it. Call for 0, 1, ... in turn.
DEVICE const char* next_piece(Thread& my, int i, int size) {
  const char* piece = my.ring + my.position.next(size);
  wait_for_piece(my, my.consumed + i);
  return piece;
}

DEVICE void release_pieces(Thread& my, int count) {  // this warp has read them
  synchronize_warp();
  if (my.lane() < count) arrive(&my.s.empty[(my.consumed + my.lane()) % MOST_PIECES]);
  my.consumed += count;
}

// The sums of a lane. With tensor cores, several chains, because a product waits 33 cycles for the one before it in its
// chain. Even chains use multiply_tile()'s sums 0 and 1, odd chains its sums 2 and 3.
template <class P> struct Sums {
  static constexpr int CHAINS = BF16 ? larger(2, 4 / P::ROW_GROUPS) : 1;
  float of[CHAINS][P::ROW_GROUPS][BF16 ? 4 : BATCH];
};

// Add a warp's tile i. Lane l has CHUNK columns of row l / 4 of each group of 8 rows. x begins at the tile's column 0.
template <class P> DEVICE void accumulate(Sums<P>& sums, int i, const char* tile, const T* x, int lane) {
  Vector<W, CHUNK> w[P::ROW_GROUPS];
  constexpr int BYTES = sizeof(w[0].bits);
#pragma unroll
  for (int g = 0; g < P::ROW_GROUPS; ++g) {
    const int row = smaller(8 * g + lane / 4, P::ROWS - 1);  // no branch, so that the loads of all tiles overlap
    memcpy(w[g].bits, __builtin_assume_aligned(tile + row * TILE_ROW_BYTES + lane % 4 * BYTES, BYTES), BYTES);
  }
  x += lane % 4 * CHUNK;
  if constexpr (BF16) {
    Vector<T, CHUNK> v;
    memcpy(v.bits, __builtin_assume_aligned(x + smaller(lane / 4, BATCH - 1) * P::STRIDE, 16), 16);
    constexpr int CHAINS = Sums<P>::CHAINS;
#pragma unroll
    for (int g = 0; g < P::ROW_GROUPS; ++g) {
      multiply_tile(sums.of[2 * i % CHAINS][g], v.bits, pair(w[g], 0), pair(w[g], 1));
      multiply_tile(sums.of[(2 * i + 1) % CHAINS][g], v.bits, pair(w[g], 2), pair(w[g], 3));
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
    if constexpr (BF16) {
      float sum[2] = {};
#pragma unroll
      for (int chain = 0; chain < Sums<P>::CHAINS; ++chain)
        for (int i = 0; i < 2; ++i) sum[i] += sums.of[chain][g][chain % 2 * 2 + i];
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

// Multiply the next PIECES pieces in the ring with x. `first` is the number of the first one in its pass.
template <class P, int PIECES> DEVICE void multiply_pieces(Thread& my, Sums<P>& sums, int first) {
  const char* weights[PIECES];
#pragma unroll
  for (int j = 0; j < PIECES; ++j) weights[j] = next_piece(my, j, P::piece_bytes(first + j));
#pragma unroll
  for (int j = 0; j < PIECES; ++j)
#pragma unroll
    for (int i = 0; i < P::WARP_TILES; ++i) {
      const int tile = my.warp() + i * WARPS, column = ((first + j) * P::TILES + tile) * TILE;
      // All warps have the same number of tiles
      constexpr bool EVEN = P::TILES % WARPS == 0 && P::ALL_TILES % P::TILES == 0;
      if (EVEN || tile < P::tiles(first + j))
        accumulate<P>(sums, j * P::WARP_TILES + i, weights[j] + tile * P::ROWS * TILE_ROW_BYTES, my.s.x + column,
                      my.lane());
    }
  release_pieces(my, PIECES);
}

// Multiply the W that is next in the ring with x. Call finish(pass, warp_sums) after each pass. A round waits for
// several pieces at once, if they fit into half the ring, because a wait and the product after it take 250 cycles.
template <class P, class Finish> DEVICE void multiply(Thread& my, Finish finish) {
  constexpr int FITTING = larger(1, RING_BYTES / 2 / (P::ROWS * P::TILES * TILE_ROW_BYTES));
  constexpr int ROUND = balanced(P::PIECES, smaller(FITTING, larger(1, ROUND_TILES / P::WARP_TILES)));
  constexpr int REST = P::PIECES % ROUND;
  for (int pass = 0; pass < P::PASSES; ++pass) {
    Sums<P> sums = {};
    for (int first = 0; first + ROUND <= P::PIECES; first += ROUND) multiply_pieces<P, ROUND>(my, sums, first);
    if constexpr (REST > 0) multiply_pieces<P, REST>(my, sums, P::PIECES - REST);
    // The previous pass's sums may still be in use
    float* warp_sums = my.s.warp_sums + pass % 2 * WARPS * BATCH * P::PADDED;
    store_sums<P>(sums, warp_sums + my.warp() * BATCH * P::PADDED, my.lane());
    synchronize_compute_warps();
    finish(pass, warp_sums);
  }
}

// The sum of a row, times the row's scale if the weights are in int8, and the sequence's 1 / rms after an RMSNorm.
template <class P> DEVICE float apply_scales(Thread& my, int b, int row, float sum) {
  if (INT8) sum *= my.s.scale[row];
  return P::AFTER_RMS_NORM ? sum * my.s.inverse_rms[b] : sum;
}

constexpr int LANES = 30;  // of a warp, whose results fill whole words: 5 in bf16, 10 in fp32

// Publish epilogue(sum + bias) for the rows of a pass, whose biases and scales begin at first_row. With two rows
// for a result, it is epilogue(row 0) * row 1. A warp takes LANES results of one copy at a time.
template <class P, class Epilogue>
DEVICE void publish(Thread& my, int pass, const float* warp_sums, int first_row, Word* words, Epilogue epilogue) {
  constexpr int RESULTS = P::WORDS * PER_WORD;  // of a sequence, padded
  constexpr int PARTS = ceil_div(BATCH * RESULTS, LANES);
  constexpr int ITEMS = P::WORD_COPIES * PARTS;
  const int lane = my.lane();
#pragma unroll 1
  for (int round = 0; round < ceil_div(ITEMS, WARPS); ++round) {  // a constant: mostly 1, and then there is no loop
    const int item = my.warp() + round * WARPS;
    if (item >= ITEMS) break;
    const int place = item % PARTS * LANES + lane, b = place / RESULTS, i = place % RESULTS;
    const int result = (my.block * P::PASSES + pass) * P::RESULTS + i;
    const bool exists = lane < LANES && b < BATCH && i < P::RESULTS && result < P::N;
    const int row = i * P::RESULT_ROWS;
    auto sum = [&](int row) {
      return exists ? apply_scales<P>(my, b, first_row + row, total<P>(warp_sums, b, row)) : 0;
    };
    auto bias = [&](int row) { return to_float(my.s.bias[first_row + row]); };
    float number = exists ? epilogue(sum(row) + bias(row)) : 0;
    if (P::RESULT_ROWS == 2 && exists) number *= sum(row + 1) + bias(row + 1);
    const Word word = pack_numbers(number, lane, my.epoch);
    if (exists && lane % PER_WORD == 0) store_word(words + item / PARTS * P::COPY + word_index<P>(b, result), word);
  }
}

template <class P, class Epilogue>
DEVICE void multiply_and_publish(Thread& my, int first_row, Word* words, Epilogue epilogue) {
  multiply<P>(my, [&](int pass, const float* warp_sums) {
    publish<P>(my, pass, warp_sums, first_row + pass * P::ROWS, words, epilogue);
  });
}

// x = RESULTS results of each sequence, in PARTS parts of SHARE. A part begins with a new word.
template <int SHARE, int PARTS, int RESULTS, int STRIDE> DEVICE void receive_x(Thread& my, const Word* from) {
  constexpr int WORDS = ceil_div(SHARE, PER_WORD), ALL = BATCH * PARTS * WORDS;
  constexpr int AT_ONCE = balanced(ceil_div(ALL, THREADS), 6);
  constexpr bool WHOLE = SHARE % PER_WORD == 0 && RESULTS % PER_WORD == 0;  // every word is full
  for (int start = 32 * my.warp(); start < ALL; start += AT_ONCE * THREADS) {
    Word word[AT_ONCE];
    auto row_of = [&](int i) {
      const int word = BATCH == 1 ? i : i % (PARTS * WORDS);  // of its sequence
      return WHOLE ? word * PER_WORD : word / WORDS * SHARE + word % WORDS * PER_WORD;
    };
    auto index = [&](int i) {
      const int place = start + my.lane() + i * THREADS;
      return place < ALL && row_of(place) < RESULTS ? place : -1;
    };
    const Word* words = from + start + my.lane();
    receive(my, word, [&](int i) { return words + i * THREADS; }, [&](int i) { return index(i) >= 0; });
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (index(i) < 0) continue;
      const int row = row_of(index(i)), end_of_part = (row / SHARE + 1) * SHARE;
      T* x = my.s.x + index(i) / (PARTS * WORDS) * STRIDE;
      if (WHOLE) {
        memcpy(__builtin_assume_aligned((char*)(x + row), 4), word[i].data, sizeof(word[i].data));
        continue;
      }
#pragma unroll
      for (int j = 0; j < PER_WORD; ++j)
        if (row + j < smaller(end_of_part, RESULTS)) x[row + j] = value_in(word[i], j);
    }
  }
}

// x = the hidden units. A block without rows of fc_proj needs none, and might come so late that it finds newer words.
DEVICE void receive_hidden(Thread& my) {
  if (my.block * FcProj::SHARE < FcProj::N)
    receive_x<Fc::RESULTS, Fc::PARTS, HIDDEN, FcProj::STRIDE>(my, my.a.fc + my.block % COPIES * Fc::COPY);
  synchronize_compute_warps();
}
