// The next token of each sequence, as kernels/sampling.py draws it.
//
// Every block summarises its logits in groups of 16: the largest logit, the best score = logit / temperature -
// log(noise), and the sum of probabilities. Block b reads the summaries of sequence b, and draws. The best score is the
// proposal. top_k rejects it if k or more logits are larger, and top_p if the larger logits have the probability top_p.
// Then only larger logits can be drawn, and the best of them is the next proposal (rejection, as in FlashInfer).

struct Candidate {
  float score = -INF, logit = -INF;
  int id = 0x7FFFFFFF;
};

struct Scan {  // of the logits above a threshold: the best one, how many, and the sum of their probabilities
  Candidate best;
  int count = 0;
  float mass = 0;
};

DEVICE u32 scramble(u32 x) {
  x = (x ^ x >> 16) * 0x21F0AAADu;
  x = (x ^ x >> 15) * 0x735A2D97u;
  return x ^ x >> 15;
}

DEVICE float score_of(const Arguments& a, float logit, int id, u32 counter) {
  if (a.temperature == 0) return logit;
  float uniform = ((float)(scramble(id * 0x1E3779B1u + counter) >> 9) + 0.5f) * 0x1p-23f;
  return logit / a.temperature - logf(-logf(uniform));
}

DEVICE float probability(const Arguments& a, float logit, float top) {  // up to a factor
  return a.temperature > 0 ? exp2f((logit - top) * (LOG2E / a.temperature)) : 0;
}

// Reduce a value of each thread, in a fixed order, to the same result in all threads.
template <class V, class Operator> DEVICE V reduce(Block& k, V value, Operator join) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value = join(value, exchange(value, k.lane() ^ mask));
  V* values = (V*)k.s.reduction;
  if (k.lane() == 0) values[k.warp()] = value;
  synchronize_block();
  value = values[0];
  for (int warp = 1; warp < WARPS; ++warp) value = join(value, values[warp]);
  synchronize_block();
  return value;
}

DEVICE Candidate better(const Candidate& a, const Candidate& b) {
  return a.score > b.score || (a.score == b.score && a.id < b.id) ? a : b;
}

DEVICE void scan_group(Block& k, const float2* scores, int group, float threshold, float highest, Scan& scan) {
  const int id = group / GROUPS * Head::SHARE + group % GROUPS * GROUP;
  u32 pairs[2 * GROUP];
  load_l2(pairs, scores + group * GROUP);
#pragma unroll
  for (int i = 0; i < GROUP; ++i) {
    const float logit = __uint_as_float(pairs[2 * i]), score = __uint_as_float(pairs[2 * i + 1]);
    if (!(logit > threshold)) continue;
    scan.best = better(scan.best, {score, logit, id + i});
    scan.count += 1;
    scan.mass += probability(k.a, logit, highest);
  }
}

DEVICE Scan scan_above(Block& k, const float2* scores, float threshold, float highest) {
  Scan scan;
#pragma unroll 1
  for (int group = k.thread; group < BLOCKS * GROUPS; group += THREADS)
    if (k.s.head.tops[group] > threshold) scan_group(k, scores, group, threshold, highest, scan);
  return reduce(k, scan, [](const Scan& x, const Scan& y) {
    return Scan{better(x.best, y.best), x.count + y.count, x.mass + y.mass};
  });
}

// Publish a word for each group. Who reads it also sees the scores, and the rows of the cache.
DEVICE void summarize(Block& k) {
  constexpr int PADDED = GROUPS * GROUP;
  const int lane_in_group = k.lane() % GROUP;
  for (int first = 32 * k.warp(); first < BATCH * PADDED; first += THREADS) {
    int i = first + k.lane(), b = i / PADDED, row = i % PADDED, id = k.block * Head::SHARE + row;
    float logit = -INF, score = -INF;
    if (b < BATCH && row < Head::SHARE && id < k.a.n_vocab) logit = k.s.head.logits[b * Head::SHARE + row];
    logit = logit > -INF ? fminf(logit, 3.4e38f) : -INF;  // never a NaN
    if (logit > -INF) score = score_of(k.a, logit, id, (u32)(k.s.position[b] + 1) * 0x5BD1E995u + k.s.seed[b]);
    if (b < BATCH) k.a.scores[((i64)b * BLOCKS + k.block) * PADDED + row] = make_float2(logit, score);
    float top = logit, best = score;
#pragma unroll
    for (int mask = GROUP / 2; mask > 0; mask /= 2) {
      top = fmaxf(top, exchange(top, k.lane() ^ mask));
      best = fmaxf(best, exchange(best, k.lane() ^ mask));
    }
    float mass = logit > -INF ? probability(k.a, logit, top) : 0;
#pragma unroll
    for (int mask = GROUP / 2; mask > 0; mask /= 2) mass += exchange(mass, k.lane() ^ mask);
    if (b < BATCH && lane_in_group == 0)
      k.s.head.words[i / GROUP] = make_word(top, best, mass, k.epoch);
  }
  synchronize_block();
  fence();
  for (int i = k.thread; i < BATCH * GROUPS; i += THREADS)
    store_word(k.a.summary + (i / GROUPS * BLOCKS + k.block) * GROUPS + i % GROUPS, k.s.head.words[i]);
}

DEVICE i64 order_key(float x) {  // integers in the order of the numbers
  int bits = (int)__float_as_uint(x);
  return bits ^ (bits >> 31 & 0x7FFFFFFF);
}

DEVICE float number_of_key(i64 key) {
  int bits = (int)key;
  return __uint_as_float(bits ^ (bits >> 31 & 0x7FFFFFFF));
}

DEVICE int draw_row(Block& k, int b) {
  constexpr int ALL = BLOCKS * GROUPS, EACH = ceil_div(ALL, THREADS), SHIFT = BF16 ? 16 : 0;  // low bits that are 0
  const Arguments& a = k.a;
  const float2* scores = a.scores + (i64)b * ALL * GROUP;
  float* tops = k.s.head.tops;  // a thread reads only what it writes
  float highest = -INF;
  Candidate candidate;  // a group, at first
  Word word[EACH];
  auto group = [&](int i) { return k.thread + i * THREADS < ALL ? k.thread + i * THREADS : -1; };
  receive(k, word, a.summary + b * ALL, group);
  fence();
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    if (group(i) < 0) continue;
    highest = fmaxf(highest, tops[group(i)] = __uint_as_float(word[i].data[0]));
    candidate = better(candidate, {__uint_as_float(word[i].data[1]), 0, group(i)});
  }
  highest = reduce(k, highest, [](float x, float y) { return fmaxf(x, y); });
  const int best_group = smaller(reduce(k, candidate, better).id, ALL - 1);
  float mass = 0;  // of all logits
#pragma unroll
  for (int i = 0; i < EACH; ++i)
    if (group(i) >= 0) mass += __uint_as_float(word[i].data[2]) * probability(a, tops[group(i)], highest);

  Scan scan;
  if (k.thread == 0) scan_group(k, scores, best_group, -INF, highest, scan);
  candidate = reduce(k, scan.best, better);
  const bool limited = a.top_k > 0 && a.top_k < a.n_vocab;
  if (a.temperature == 0 || (!limited && a.top_p >= 1)) return candidate.id;
  // top_p is a share of what top_k keeps. So with both, a bisection finds the k-th logit first
  bool bisecting = limited && a.top_p < 1;
  i64 low = order_key(-3.4e38f) >> SHIFT, high = (order_key(highest) >> SHIFT) + 1;
  float limit = INF;  // of the mass of larger logits
  if (a.top_p < 1) limit = a.top_p * reduce(k, mass, [](float x, float y) { return x + y; });
  for (;;) {  // the count of larger logits falls, so this ends
    const i64 middle = (low + high) >> 1;
    scan = scan_above(k, scores, bisecting ? number_of_key(middle << SHIFT) : candidate.logit, highest);
    if (bisecting && high - low > 1) {
      (scan.count >= a.top_k ? low : high) = middle;
      continue;
    }
    if (bisecting) {
      bisecting = false;
      limit = a.top_p * scan.mass;
    } else if (scan.count == 0 || ((!limited || scan.count < a.top_k) && scan.mass < limit)) {
      return candidate.id;
    }
    candidate = scan.best;
  }
}

// Draw a token for each sequence, and tell all blocks. A sequence that has stopped stays where it is.
DEVICE void draw_tokens(Block& k, int step) {
  const Arguments& a = k.a;
  summarize(k);
  mark(k);
  for (int b = k.block; b < BATCH; b += BLOCKS) {
    int id = k.s.stopped[b] ? k.s.drawn[b] : smaller(draw_row(k, b), a.n_vocab - 1);
    if (k.thread > 0) continue;
    int stopped = k.s.stopped[b];
    for (int i = 0; i < a.stop_count; ++i) stopped |= id == a.stops[i];
    for (int later = step; later < (stopped ? a.steps : step + 1); ++later) a.drawn[(i64)b * a.steps + later] = id;
    fence();
    store_word(a.token + b, {{(u32)id, (u32)stopped, 0}, k.epoch});
  }
  mark(k);
  for (int b = k.thread; b < BATCH; b += THREADS) {
    Word word[1];
    receive(k, word, a.token, [&](int) { return b; });
    fence();
    k.s.drawn[b] = (int)word[0].data[0];
    k.s.stopped[b] = (int)word[0].data[1];
    if (k.s.stopped[b]) continue;
    k.s.token[b] = k.s.drawn[b];
    k.s.position[b] += 1;
  }
  synchronize_block();
  bool running = false;
  for (int b = 0; b < BATCH; ++b) running |= !k.s.stopped[b];
  if (k.thread == 0) k.s.finished = !running || k.s.abandoned;
  synchronize_block();
}
