// Attention: a block takes a head of a sequence and a split of its keys (flash decoding, Dao et al. 2023).

constexpr int KEY_LANES = power_of_two(D / 8), STEP_KEYS = THREADS / KEY_LANES;  // a lane has 8 channels of a key
constexpr int DEPTH = KV_BITS == 32 ? 1 : 2;                                      // and loads so many keys together

DEVICE Vector<KV, 8> load_row(const KV* from, bool exists) {
  Vector<KV, 8> row = {};
  if (exists) load_l2(row.bits, from);
  return row;
}

// Receive q, k and v of a head, and rotate q and k. q is scaled for scores in base 2. One block for each head of k and
// v writes them into the cache. All read them as the cache rounds them.
DEVICE void receive_head(Block& k, int layer, int b, int head, int row, bool writes) {
  const int kv_head = head / (HEADS / KV_HEADS);
  for (int i = k.thread; i < 3 * D; i += THREADS) {
    const int kind = i / D, d = i % D, partner = d < D / 2 ? d + D / 2 : d - D / 2;  // kind: q, k or v
    const int first = kind == 0 ? head * D : C + (kind - 1) * KV_WIDTH + kv_head * D;
    const bool rotates = ROPE && kind < 2;
    Word word[2];
    receive(k, word, k.a.qkv, [&](int j) {
      return j == 0 ? word_index<Qkv>(b, first + d) : rotates ? word_index<Qkv>(b, first + partner) : -1;
    });
    float x = result_in<Qkv>(word[0], first + d);
    if (rotates) {
      const int angle = b * (D / 2) + d % (D / 2);
      const float other = result_in<Qkv>(word[1], first + partner) * (d < D / 2 ? -1 : 1);
      x = rounded<T>(x * k.s.cosine[angle] + other * k.s.sine[angle]);
    }
    if (kind == 0) {
      k.s.query[d] = x * (LOG2E * rsqrtf(D));
    } else {
      const KV stored = convert<KV>(x);
      (kind == 1 ? k.s.key : k.s.value)[d] = to_float(stored);
      KV* cache = (kind == 1 ? k.a.keys : k.a.values)[layer];
      if (writes) cache[(((i64)b * k.a.rows + row) * KV_HEADS + kv_head) * D + d] = stored;
    }
  }
  synchronize_block();
}

struct Softmax {  // over some keys: the largest score, the sum of weights, and 8 channels of the weighted values
  float top = LOWEST, sum = 0, acc[8] = {};

  DEVICE void raise(float score) {  // let the weights be relative to `score`, if it is larger
    const float before = top;
    top = fmaxf(top, score);
    const float scale = exp2f(before - top);
    sum *= scale;
#pragma unroll
    for (float& value : acc) value *= scale;
  }

  DEVICE void add(const Softmax& other) {
    raise(other.top);
    const float scale = exp2f(other.top - top);
    sum += other.sum * scale;
#pragma unroll
    for (int i = 0; i < 8; ++i) acc[i] += other.acc[i] * scale;
  }
};

// Add the warps' softmaxes, and publish two channels, divided by the sum of weights, and that sum's logarithm in a
// word.
DEVICE void publish_partial(Block& k, Word* words) {
  for (int i = k.thread; i < D / 2; i += THREADS) {
    float top = LOWEST, sum = 0, first = 0, second = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) top = fmaxf(top, k.s.merge[warp][0]);
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
      const float* merge = k.s.merge[warp];
      const float scale = exp2f(merge[0] - top);
      sum += merge[1] * scale;
      first += merge[2 + 2 * i] * scale;
      second += merge[3 + 2 * i] * scale;
    }
    const float inverse = sum > 0 ? __fdividef(1, sum) : 0;
    store_word(words + i, make_word(first * inverse, second * inverse, sum > 0 ? top + log2f(sum) : LOWEST, k.epoch));
  }
}

DEVICE void attend_to_split(Block& k, int layer, int b, int head, int split, Word* words) {
  const int part = k.lane() % KEY_LANES * 8, place = k.thread / KEY_LANES, kv_head = head / (HEADS / KV_HEADS);
  const int keys = smaller(k.s.position[b] + 1, k.a.rows), new_row = k.s.position[b] % k.a.rows;
  const int share = ceil_div(keys, k.s.splits[b]), start = share * split, end = smaller(keys, start + share);
  const i64 offset = ((i64)b * k.a.rows * KV_HEADS + kv_head) * D + part;
  Vector<KV, 8> next_keys[DEPTH], next_values[DEPTH];
  auto load = [&](int base) {
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      const int row = base + i * STEP_KEYS + place;
      next_keys[i] = load_row(k.a.keys[layer] + offset + (i64)row * KV_WIDTH, row < end && part < D);
      next_values[i] = load_row(k.a.values[layer] + offset + (i64)row * KV_WIDTH, row < end && part < D);
    }
  };
  load(start);  // before the wait for q
  const bool has_new_row = start <= new_row && new_row < end;
  receive_head(k, layer, b, head, new_row, has_new_row && head % (HEADS / KV_HEADS) == 0 && !k.s.stopped[b]);
  float query[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) query[i] = part < D ? k.s.query[part + i] : 0;
  Softmax softmax;
  for (int base = start; base < end; base += DEPTH * STEP_KEYS) {
    Vector<KV, 8> key[DEPTH], value[DEPTH];
    float score[DEPTH], best = LOWEST;
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) key[i] = next_keys[i], value[i] = next_values[i];
    load(base + DEPTH * STEP_KEYS);
    auto row = [&](int i) { return base + i * STEP_KEYS + place; };
    auto is_new = [&](int i) { return row(i) == new_row && part < D; };  // then the cache may not have it yet
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      score[i] = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) score[i] += query[j] * (is_new(i) ? k.s.key[part + j] : key[i][j]);
#pragma unroll
      for (int mask = 1; mask < KEY_LANES; mask *= 2) score[i] += exchange(score[i], k.lane() ^ mask);
      best = fmaxf(best, row(i) < end ? score[i] : LOWEST);
    }
    softmax.raise(best);
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      const float weight = row(i) < end ? exp2f(score[i] - softmax.top) : 0;
      softmax.sum += weight;
#pragma unroll
      for (int j = 0; j < 8; ++j) softmax.acc[j] += weight * (is_new(i) ? k.s.value[part + j] : value[i][j]);
    }
  }
#pragma unroll
  for (int mask = KEY_LANES; mask < 32; mask *= 2) softmax.add(exchange(softmax, k.lane() ^ mask));
  float* merge = k.s.merge[k.warp()];
  if (k.lane() == 0) merge[0] = softmax.top, merge[1] = softmax.sum;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (k.lane() < KEY_LANES && part < D) merge[2 + part + i] = softmax.acc[i];
  synchronize_block();
  publish_partial(k, words);
}

DEVICE void attend(Block& k, int layer) {
  for (int item = k.block; item < BATCH * HEADS * MOST_SPLITS; item += BLOCKS) {
    const int split = item % MOST_SPLITS, head = item / MOST_SPLITS % HEADS, b = item / (MOST_SPLITS * HEADS);
    if (split < k.s.splits[b]) attend_to_split(k, layer, b, head, split, k.a.partial + item * (D / 2));
  }
}

// x = the outputs of all heads, from their splits.
DEVICE void combine(Block& k) {
  constexpr int S = balanced(MOST_SPLITS, 8), E = balanced(ceil_div(BATCH * C, THREADS), smaller(16 / S, 8));
  for (int base = k.thread; base < BATCH * C; base += E * THREADS) {
    auto element = [&](int e) { return base + e * THREADS; };  // (sequence, head, channel)
    float top[E], sum[E], y[E];
    int splits[E], most = 0;
#pragma unroll
    for (int e = 0; e < E; ++e) {
      top[e] = LOWEST, sum[e] = 0, y[e] = 0;
      splits[e] = element(e) < BATCH * C ? k.s.splits[element(e) / C] : 0;
      most = larger(most, splits[e]);
    }
    for (int start = 0; start < most; start += S) {
      Word word[E * S];
      auto index = [&](int i) {
        const int from = element(i / S), split = start + i % S;
        return split < splits[i / S] ? (from / D * MOST_SPLITS + split) * (D / 2) + from % D / 2 : -1;
      };
      receive(k, word, k.a.partial, index);
#pragma unroll
      for (int i = 0; i < E * S; ++i) {
        const float lse = index(i) < 0 ? LOWEST : __uint_as_float(word[i].data[2]), before = top[i / S];
        const float value = __uint_as_float(element(i / S) % 2 ? word[i].data[1] : word[i].data[0]);
        top[i / S] = fmaxf(before, lse);
        const float weight = lse > LOWEST ? exp2f(lse - top[i / S]) : 0, scale = exp2f(before - top[i / S]);
        sum[i / S] = sum[i / S] * scale + weight;
        y[i / S] = y[i / S] * scale + weight * value;
      }
    }
#pragma unroll
    for (int e = 0; e < E; ++e) {
      X* x = k.s.x + element(e) / C * Proj::STRIDE + element(e) % C;
      if (element(e) < BATCH * C) *x = convert<X>(rounded<T>(__fdividef(y[e], sum[e])));
    }
  }
  synchronize_block();
}
