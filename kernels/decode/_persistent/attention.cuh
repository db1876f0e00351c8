// Attention: a block takes a head of a sequence and a split of its keys (flash decoding, Dao et al. 2023).

constexpr int KEY_LANES = power_of_two(D / 8), STEP_KEYS = THREADS / KEY_LANES;  // a lane has 8 channels of a key
constexpr bool ALL_LANES = KEY_LANES * 8 == D;                                    // have channels
// Keys that a lane loads together. The first load comes before the wait for q. It takes a whole split of SPLIT_KEYS
// keys, if 4 a lane suffice. A token of 8 sequences, whose heads are not split, takes 237.5 us with 3, 244.0 with 2, and
// 239.7 with 4 (124M, H200)
constexpr int DEPTH = KV_BITS == 32 ? 1 : HAS_SPLITS ? smaller(4, ceil_div(SPLIT_KEYS, STEP_KEYS)) : 3;

DEVICE Vector<KV, 8> load_row(const KV* from, bool exists) {
  Vector<KV, 8> row = {};
  if (exists) load_l2(row.bits, from);
  return row;
}

// Rotate channel d of q or k of sequence b. `other` is the channel that it rotates with, d - D / 2 or d + D / 2.
DEVICE float rotate(const Thread& my, int b, int d, float x, float other) {
  const int angle = b * (D / 2) + d % (D / 2);
  return rounded<T>(x * my.s.cosine[angle] + other * (d < D / 2 ? -1 : 1) * my.s.sine[angle]);
}

// Receive q, k and v of a head, and call store(kind, d, x) for each channel: kind 0 is q, 1 is k and 2 is v.
template <class First, class Store> DEVICE void receive_channels(Thread& my, int b, First first_row, Store store) {
  for (int start = 32 * my.warp(); start < 3 * D; start += THREADS) {
    const int i = smaller(start + my.lane(), 3 * D - 1), kind = i / D, d = i % D, first = first_row(kind);
    const int partner = d < D / 2 ? d + D / 2 : d - D / 2;
    const bool rotates = ROPE && kind < 2;
    Word word[2];
    receive(my, word, [&](int j) { return my.a.qkv + word_index<Qkv>(b, first + (j == 0 ? d : partner)); },
            [&](int j) { return j == 0 || rotates; });
    const float x = result_in<Qkv>(word[0], first + d);
    store(kind, d, rotates ? rotate(my, b, d, x, result_in<Qkv>(word[1], first + partner)) : x);
  }
}

// The same with RMSNorm of q and k. One warp receives all of q, k or v, so the mean square needs no other warp.
// Both channels of a rotated pair are in one lane.
template <class First, class Store>
DEVICE void receive_and_normalise(Thread& my, int layer, int b, First first_row, Store store) {
  constexpr int CHANNELS = 2 * ceil_div(D, 64);  // of a lane
  const int kind = my.warp(), first = first_row(kind);
  if (kind > 2) return;
  auto exists = [&](int i) { return D % 64 == 0 || my.lane() + i / 2 * 32 < D / 2; };
  auto channel = [&](int i) { return my.lane() + i / 2 * 32 + i % 2 * (D / 2); };
  float x[CHANNELS], gain[CHANNELS], squares = 0;
  Word word[CHANNELS];
#pragma unroll
  for (int i = 0; i < CHANNELS; ++i)  // before the wait
    gain[i] = kind < 2 && exists(i) ? to_float(my.a.qk_norms[(2 * layer + kind) * D + channel(i)]) : 1;
  receive(my, word, [&](int i) { return my.a.qkv + word_index<Qkv>(b, first + channel(i)); }, exists);
#pragma unroll
  for (int i = 0; i < CHANNELS; ++i) {
    x[i] = result_in<Qkv>(word[i], first + channel(i));
    squares += x[i] * x[i];
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) squares += exchange(squares, my.lane() ^ mask);
  const float rstd = kind < 2 ? rsqrtf(squares * (1.0f / D) + NORM_EPS) : 1;
#pragma unroll
  for (int i = 0; i < CHANNELS; ++i) x[i] *= rstd * gain[i];
#pragma unroll
  for (int i = 0; i < CHANNELS; ++i)
    if (exists(i)) store(kind, channel(i), kind < 2 ? rotate(my, b, channel(i), x[i], x[i ^ 1]) : x[i]);
}

// q is scaled for scores in base 2. One block for each head of k and v writes them into the cache. All read them as the
// cache rounds them.
DEVICE void receive_head(Thread& my, int layer, int b, int head, int row, bool writes) {
  const int kv_head = head / (HEADS / KV_HEADS);
  auto first_row = [&](int kind) { return kind == 0 ? head * D : Q_WIDTH + (kind - 1) * KV_WIDTH + kv_head * D; };
  auto store = [&](int kind, int d, float x) {
    if (kind == 0) {
      my.s.query[d] = x * (LOG2E * rsqrtf(D));
    } else {
      const KV stored = convert<KV>(x);
      (kind == 1 ? my.s.key : my.s.value)[d] = stored;
      KV* cache = (kind == 1 ? my.a.keys : my.a.values)[layer];
      if (writes) cache[(((i64)b * my.a.rows + row) * KV_HEADS + kv_head) * D + d] = stored;
    }
  };
  if constexpr (QK_NORM)
    receive_and_normalise(my, layer, b, first_row, store);
  else
    receive_channels(my, b, first_row, store);
  synchronize_compute_warps();
}

struct Merged { float first, second, lse; };

// Merge the warps' softmaxes: two channels of the output, and the log-sum-exp of the scores in base 2.
DEVICE Merged merge_warps(Thread& my, int pair) {
  float top = LOWEST, sum = 0, first = 0, second = 0;
  float2 tops[WARPS], acc[WARPS];
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) tops[warp] = my.s.tops[warp], acc[warp] = my.s.merge[pair][warp];
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) top = fmaxf(top, tops[warp].x);
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) {
    const float scale = exp2f(tops[warp].x - top);
    sum += tops[warp].y * scale;
    first += acc[warp].x * scale;
    second += acc[warp].y * scale;
  }
  const float inverse = sum > 0 ? __fdividef(1, sum) : 0;
  return {first * inverse, second * inverse, sum > 0 ? top + log2f(sum) : LOWEST};
}

// A word holds SPLIT_CHANNELS channels of a split, and its log-sum-exp: four in bf16, or two in fp32. All blocks read
// all of these words. With two channels in a word combine() took 4,494 cycles of a layer of Qwen3-0.6B on an H200, and
// with four 2,634. Each copy of a word has a thread, which merges anew: then no thread stores more than one.
DEVICE void publish_split(Thread& my, Word* words) {
  for (int i = my.thread; i < COPIES * SPLIT_WORDS; i += THREADS) {
    const int copy = i / SPLIT_WORDS, place = i % SPLIT_WORDS;
    T channels[SPLIT_CHANNELS];
    float lse;
#pragma unroll
    for (int j = 0; j < SPLIT_CHANNELS; j += 2) {
      const Merged merged = merge_warps(my, (place * SPLIT_CHANNELS + j) / 2);
      channels[j] = convert<T>(merged.first), channels[j + 1] = convert<T>(merged.second);
      lse = merged.lse;
    }
    Word word = make_word(0, 0, lse, my.epoch);
    memcpy(word.data, channels, sizeof(channels));
    store_word(words + copy * PARTIAL_WORDS + place, word);
  }
}

// For a head that is not split: the words hold its outputs, as those of publish().
DEVICE void publish_output(Thread& my, Word* words) {
#pragma unroll 1
  for (int start = LANES * my.warp(); start < D; start += LANES * WARPS) {
    const int lane = my.lane(), channel = start + lane;
    const Merged merged = merge_warps(my, smaller(channel, D - 1) / 2);
    const Word word = pack_numbers(channel % 2 ? merged.second : merged.first, lane, my.epoch);
    if (lane >= LANES || lane % PER_WORD || channel >= D) continue;
#pragma unroll
    for (int copy = 0; copy < COPIES; ++copy) store_word(words + copy * PARTIAL_WORDS + channel / PER_WORD, word);
  }
}

DEVICE void attend_to_split(Thread& my, int layer, int b, int head, int split, Word* words) {
  const int channel = my.lane() % KEY_LANES * 8, place = my.thread / KEY_LANES, kv_head = head / (HEADS / KV_HEADS);
  const int new_row = my.s.new_row[b], start = my.s.split_keys[b] * split;
  const int end = smaller(my.s.key_count[b], start + my.s.split_keys[b]);
  const i64 offset = ((i64)b * my.a.rows * KV_HEADS + kv_head) * D + channel;
  Vector<KV, 8> next_keys[DEPTH], next_values[DEPTH];
  auto load = [&](int base) {
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      const int row = base + i * STEP_KEYS + place;
      const bool exists = row < end && (ALL_LANES || channel < D);
      next_keys[i] = load_row(my.a.keys[layer] + offset + (i64)row * KV_WIDTH, exists);
      next_values[i] = load_row(my.a.values[layer] + offset + (i64)row * KV_WIDTH, exists);
    }
  };
  load(start);  // before the wait for q
  const bool has_new_row = start <= new_row && new_row < end;
  receive_head(my, layer, b, head, new_row, has_new_row && head % (HEADS / KV_HEADS) == 0 && !my.s.stopped[b]);
  float query[8], top = LOWEST, sum = 0, acc[8] = {};  // the largest score, the sum of weights, and of weighted values
#pragma unroll
  for (int i = 0; i < 8; ++i) query[i] = (ALL_LANES || channel < D) ? my.s.query[channel + i] : 0;
  for (int base = start; base < end; base += DEPTH * STEP_KEYS) {
    Vector<KV, 8> key[DEPTH], value[DEPTH];
    float score[DEPTH], before = top;
    auto row = [&](int i) { return base + i * STEP_KEYS + place; };
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      key[i] = next_keys[i], value[i] = next_values[i];
      if (row(i) == new_row && (ALL_LANES || channel < D)) {  // the cache may not have it yet
        memcpy(key[i].bits, __builtin_assume_aligned(my.s.key + channel, 8), sizeof(key[i].bits));
        memcpy(value[i].bits, __builtin_assume_aligned(my.s.value + channel, 8), sizeof(value[i].bits));
      }
    }
    if (base + DEPTH * STEP_KEYS < end) load(base + DEPTH * STEP_KEYS);
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      score[i] = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) score[i] += query[j] * key[i][j];
    }
#pragma unroll
    for (int mask = 1; mask < KEY_LANES; mask *= 2)
#pragma unroll
      for (int i = 0; i < DEPTH; ++i) score[i] += exchange(score[i], my.lane() ^ mask);
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) top = fmaxf(top, row(i) < end ? score[i] : LOWEST);
#pragma unroll
    for (int mask = KEY_LANES; mask < 32; mask *= 2) top = fmaxf(top, exchange(top, my.lane() ^ mask));
    const float scale = exp2f(before - top);
    sum *= scale;
#pragma unroll
    for (int j = 0; j < 8; ++j) acc[j] *= scale;
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      const float weight = row(i) < end ? exp2f(score[i] - top) : 0;
      sum += weight;
#pragma unroll
      for (int j = 0; j < 8; ++j) acc[j] += weight * value[i][j];
    }
  }
#pragma unroll
  for (int mask = KEY_LANES; mask < 32; mask *= 2) {
    sum += exchange(sum, my.lane() ^ mask);
#pragma unroll
    for (int j = 0; j < 8; ++j) acc[j] += exchange(acc[j], my.lane() ^ mask);
  }
  if (my.lane() == 0) my.s.tops[my.warp()] = make_float2(top, sum);
#pragma unroll
  for (int j = 0; j < 8; j += 2)
    if (my.lane() < KEY_LANES && (ALL_LANES || channel < D))
      my.s.merge[(channel + j) / 2][my.warp()] = make_float2(acc[j], acc[j + 1]);
  synchronize_compute_warps();
  if (HAS_SPLITS)
    publish_split(my, words);
  else
    publish_output(my, words);
}

DEVICE void attend(Thread& my, int layer) {
  for (int item = my.block; item < BATCH * HEADS * MOST_SPLITS; item += BLOCKS) {
    const int split = item % MOST_SPLITS, head = item / MOST_SPLITS % HEADS, b = item / (MOST_SPLITS * HEADS);
    if (split < my.s.splits[b]) attend_to_split(my, layer, b, head, split, my.a.partial + item * SPLIT_WORDS);
  }
}

// A thread has the channels of whole words. x = the outputs of all heads.
DEVICE void merge_splits(Thread& my) {
  constexpr int ROW_WORDS = Q_WIDTH / SPLIT_CHANNELS, ALL = BATCH * ROW_WORDS, S = balanced(MOST_SPLITS, 8);
  constexpr int E = balanced(ceil_div(ALL, THREADS), smaller(16 / S, 8));
  int most = 0;
  for (int b = 0; b < BATCH; ++b) most = larger(most, my.s.splits[b]);
  for (int first = 32 * my.warp(); first < ALL; first += E * THREADS) {
    auto place = [&](int e) { return first + my.lane() + e * THREADS; };  // (sequence, head, word of channels)
    float top[E], sum[E], y[E][SPLIT_CHANNELS] = {};
    int splits[E];
    const Word* words[E];  // the word of each place's first split
#pragma unroll
    for (int e = 0; e < E; ++e) {
      top[e] = LOWEST, sum[e] = 0;
      splits[e] = place(e) < ALL ? my.s.splits[place(e) / ROW_WORDS] : 0;
      words[e] = my.a.partial + my.block % COPIES * PARTIAL_WORDS +
                 place(e) / SPLIT_WORDS * (MOST_SPLITS * SPLIT_WORDS) + place(e) % SPLIT_WORDS;
    }
    for (int start = 0; start < most; start += S) {
      Word word[E * S];
      auto exists = [&](int i) { return start + i % S < splits[i / S]; };
      receive(my, word, [&](int i) { return words[i / S] + (start + i % S) * SPLIT_WORDS; }, exists);
#pragma unroll
      for (int e = 0; e < E; ++e) {
        float lse[S], before = top[e];
#pragma unroll
        for (int i = 0; i < S; ++i) {
          lse[i] = exists(e * S + i) ? __uint_as_float(word[e * S + i].data[2]) : LOWEST;
          top[e] = fmaxf(top[e], lse[i]);
        }
        const float scale = exp2f(before - top[e]);
        sum[e] *= scale;
        for (float& channel : y[e]) channel *= scale;
#pragma unroll
        for (int i = 0; i < S; ++i) {
          const float weight = lse[i] > LOWEST ? exp2f(lse[i] - top[e]) : 0;
          sum[e] += weight;
          for (int j = 0; j < SPLIT_CHANNELS; ++j) y[e][j] += weight * number_in(word[e * S + i], j);
        }
      }
    }
#pragma unroll
    for (int e = 0; e < E; ++e) {
      if (place(e) >= ALL) continue;
      T* x = my.s.x + place(e) / ROW_WORDS * Proj::STRIDE + place(e) % ROW_WORDS * SPLIT_CHANNELS;
      for (int j = 0; j < SPLIT_CHANNELS; ++j) x[j] = convert<T>(__fdividef(y[e][j], sum[e]));
    }
  }
}

DEVICE void combine(Thread& my) {  // x = the outputs of all heads
  if constexpr (HAS_SPLITS)
    merge_splits(my);
  else
    receive_x<D, HEADS, Q_WIDTH, Proj::STRIDE>(my, my.a.partial + my.block % COPIES * PARTIAL_WORDS);
  synchronize_compute_warps();
}
