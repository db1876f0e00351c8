// The next token of each sequence, as kernels/sampling.py draws it.
//
// If top_k and top_p are off, or the temperature is 0, the token is the id with the best score. The score is logit /
// temperature - log(noise), or the logit itself at temperature 0. Every block publishes its best candidate for each
// sequence. Then every block finds the best of all candidates.
//
// With top_k or top_p, every block publishes its logits in groups of 16 or 32, and a summary of each group: the largest
// logit, the sum of probabilities and, without top_k, the best score. Block b draws for sequence b. With top_k it reads
// only the groups with the k largest maxima, or a few more, because they hold the k largest logits, and scores their
// logits. The id with the best score is the proposal. It is rejected if k or more logits are larger, or if the larger
// logits together have at least the probability top_p. Then the best of the larger logits is the next proposal
// (rejection, as in FlashInfer).

struct Scan {  // of the logits above a threshold: the best one, how many, and the sum of their probabilities
  Candidate best;
  int count = 0;
  float mass = 0;
};

DEVICE u32 scramble(u32 x) {
  x = (x ^ x >> 16) * FIRST_FACTOR;
  x = (x ^ x >> 15) * SECOND_FACTOR;
  return x ^ x >> 15;
}

DEVICE float score_of(const Arguments& a, float logit, int id, u32 counter) {
  if (a.temperature == 0) return logit;
  float uniform = ((float)(scramble((u32)id * ID_FACTOR + counter) >> 9) + 0.5f) * 0x1p-23f;
  return logit / a.temperature - logf(-logf(uniform));
}

DEVICE u32 counter_of(const Thread& my, int b) { return (u32)(my.s.position[b] + 1) * POSITION_FACTOR + my.s.seed[b]; }

DEVICE float probability(const Arguments& a, float logit, float top) {  // up to a factor
  return exp2f((logit - top) * (LOG2E / a.temperature));
}

// Reduce a value of each thread, in a fixed order, to the same result in all threads.
template <class V, class Operator> DEVICE V reduce(Thread& my, V value, Operator join) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value = join(value, exchange(value, my.lane() ^ mask));
  V* values = (V*)my.s.reduction;
  if (my.lane() == 0) values[my.warp()] = value;
  synchronize_compute_warps();
  value = values[0];
  for (int warp = 1; warp < WARPS; ++warp) value = join(value, values[warp]);
  synchronize_compute_warps();
  return value;
}

DEVICE Candidate better(const Candidate& a, const Candidate& b) {
  return a.score > b.score || (a.score == b.score && a.id < b.id) ? a : b;
}

DEVICE int first_id(int group) { return group / GROUPS * Head::SHARE + group % GROUPS * GROUP; }

DEVICE Word* words_of(Thread& my, int b, int group) {  // a summary, then the logits
  return my.a.groups + ((i64)b * BLOCKS * GROUPS + group) * GROUP_WORDS;
}

// Load a group of logits of sequence b.
DEVICE void load_group(Thread& my, int b, int group, float (&logit)[GROUP]) {
  Word word[GROUP_WORDS - 1];
  const Word* words = words_of(my, b, group) + 1;
  receive(my, word, [&](int i) { return words + i; }, [](int) { return true; });
#pragma unroll
  for (int i = 0; i < GROUP; ++i) logit[i] = number_in(word[i / PER_WORD], i % PER_WORD);
}

// Scan the logits above `threshold`: head.candidates if that list is complete, otherwise all logits of the listed
// groups.
DEVICE Scan scan_above(Thread& my, int b, int group_count, int candidate_count, float threshold, float highest) {
  Scan scan;
  auto add = [&](const Candidate& candidate) {
    scan.best = better(scan.best, candidate);
    scan.count += 1;
    scan.mass += probability(my.a, candidate.logit, highest);
  };
#pragma unroll 1
  for (int i = my.thread; candidate_count <= MAX_CANDIDATES && i < candidate_count; i += THREADS)
    if (my.s.head.candidates[i].logit > threshold) add(my.s.head.candidates[i]);
  const int words = candidate_count > MAX_CANDIDATES ? group_count * (GROUP_WORDS - 1) : 0;
#pragma unroll 1
  for (int start = 32 * my.warp(); start < words; start += THREADS) {
    const int i = start + my.lane(), group = my.s.head.listed_groups[smaller(i, words - 1) / (GROUP_WORDS - 1)];
    const int part = i % (GROUP_WORDS - 1), id = first_id(group) + part * PER_WORD;
    Word word[1];
    receive(my, word, [&](int) { return words_of(my, b, group) + 1 + part; }, [&](int) { return i < words; });
#pragma unroll
    for (int j = 0; j < PER_WORD; ++j) {
      const float logit = number_in(word[0], j);
      if (i < words && part * PER_WORD + j < GROUP && logit > threshold)
        add({score_of(my.a, logit, id + j, counter_of(my, b)), logit, id + j});
    }
  }
  return reduce(my, scan, [](const Scan& x, const Scan& y) {
    return Scan{better(x.best, y.best), x.count + y.count, x.mass + y.mass};
  });
}

DEVICE bool limits_count(const Arguments& a) { return a.top_k > 0 && a.top_k < a.n_vocab; }
DEVICE bool limits_draw(const Arguments& a) { return a.temperature > 0 && (limits_count(a) || a.top_p < 1); }

// The better candidate, with the larger logit of both.
DEVICE Candidate better_with_top(const Candidate& a, const Candidate& b) {
  Candidate best = better(a, b);
  best.logit = fmaxf(a.logit, b.logit);
  return best;
}

// Publish the best candidate of this block for each sequence, with the block's largest logit.
DEVICE void publish_best(Thread& my) {
  if (my.thread == 0) fence();  // who reads this thread's words also sees the block's rows of the cache
#pragma unroll 1
  for (int b = 0; b < BATCH; ++b) {
    if (my.s.stopped[b]) continue;
    Candidate best;
    for (int row = my.thread; row < Head::SHARE; row += THREADS) {
      const int id = my.block * Head::SHARE + row;
      float logit = my.s.head.logits[b * Head::SHARE + row];
      logit = logit < INF ? logit : INF;  // NaN becomes inf, and best_token() finds it
      if (id < my.a.n_vocab) best = better_with_top(best, {score_of(my.a, logit, id, counter_of(my, b)), logit, id});
    }
    best = reduce(my, best, better_with_top);
    if (my.thread > 0) continue;
    store_word(words_of(my, b, my.block * GROUPS),
               {{__float_as_uint(best.score), __float_as_uint(best.logit), (u32)best.id}, my.epoch});
  }
}

// Return the best id of all blocks for sequence b, or NO_TOKEN if a logit is NaN or inf, or if all are -inf.
DEVICE int best_token(Thread& my, int b) {
  constexpr int EACH = ceil_div(BLOCKS, 32);
  Word word[EACH];
  const Word* words = words_of(my, b, my.lane() * GROUPS);
  auto exists = [&](int i) { return my.lane() + 32 * i < BLOCKS; };
  receive(my, word, [&](int i) { return words + 32 * i * GROUPS * GROUP_WORDS; }, exists);
  Candidate best;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const Candidate other{__uint_as_float(word[i].data[0]), __uint_as_float(word[i].data[1]), (int)word[i].data[2]};
    if (exists(i)) best = better_with_top(best, other);
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) best = better_with_top(best, exchange(best, my.lane() ^ mask));
  return best.logit > -INF && best.logit < INF ? best.id : NO_TOKEN;
}

// Publish each group of logits, and its summary.
DEVICE void summarize(Thread& my) {
  constexpr int PADDED = GROUPS * GROUP;
  const int place = my.lane() % GROUP;
  for (int first = 32 * my.warp(); first < BATCH * PADDED; first += THREADS) {
    const int i = first + my.lane(), b = i / PADDED, row = i % PADDED, id = my.block * Head::SHARE + row;
    float logit = -INF, best = -INF;
    if (b < BATCH && row < Head::SHARE && id < my.a.n_vocab) logit = my.s.head.logits[b * Head::SHARE + row];
    logit = logit < INF ? logit : INF;  // NaN becomes inf, so draw_row() finds it in the group's largest logit
    if (logit > -INF && !limits_count(my.a)) best = score_of(my.a, logit, id, counter_of(my, b));
    float top = logit;
#pragma unroll
    for (int mask = GROUP / 2; mask > 0; mask /= 2) {
      top = fmaxf(top, exchange(top, my.lane() ^ mask));
      best = fmaxf(best, exchange(best, my.lane() ^ mask));
    }
    float mass = logit > -INF ? probability(my.a, logit, top) : 0;
#pragma unroll
    for (int mask = GROUP / 2; mask > 0; mask /= 2) mass += exchange(mass, my.lane() ^ mask);
    const Word word = pack_numbers(logit, my.lane(), my.epoch);
    Word* words = words_of(my, b, my.block * GROUPS + row / GROUP);
    if (b < BATCH && place == 0) store_word(words, make_word(top, best, mass, my.epoch));
    if (b < BATCH && place % PER_WORD == 0) store_word(words + 1 + place / PER_WORD, word);
  }
}

constexpr int KEY_SHIFT = BF16 ? 16 : 0;  // low bits of a logit that are 0
typedef Choice<BF16, int, i64>::Type Key;  // order_key() >> KEY_SHIFT; the sum of two must fit

DEVICE Key order_key(float x) {  // integers in the order of the numbers
  int bits = (int)__float_as_uint(x);
  return bits ^ (bits >> 31 & 0x7FFFFFFF);
}

DEVICE float number_of_key(Key key) {
  int bits = (int)key;
  return __uint_as_float(bits ^ (bits >> 31 & 0x7FFFFFFF));
}

// Return a key in [low, high). The groups' largest logits exceed its number top_k to 9/8 top_k times, or more often if
// some are equal. If fewer than top_k exceed that of `low`, return low. Each round counts at three numbers, which split
// the range into quarters.
template <int EACH> DEVICE Key bisect_tops(Thread& my, const float (&top)[EACH], Key low, Key high) {
  const int enough = my.a.top_k + my.a.top_k / 8;
  int above_low = 0x7FFFFFFF;
  for (int round = 0; high - low > 1 && above_low > enough; ++round) {
    Key key[3];
    float threshold[3];
    int count[3] = {};
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      key[j] = low + ((high - low) * (j + 1) >> 2);
      threshold[j] = number_of_key(key[j] << KEY_SHIFT);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i)  // three chains of additions at a time
#pragma unroll
      for (int j = 0; j < 3; ++j) count[j] += top[i] > threshold[j];
    u32* counts = my.s.reduction + round % 2 * 3 * WARPS;
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      count[j] = warp_sum(count[j]);
      if (my.lane() == 0) counts[j * WARPS + my.warp()] = count[j];
    }
    synchronize_compute_warps();
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      int all = 0;
#pragma unroll
      for (int warp = 0; warp < WARPS; ++warp) all += counts[j * WARPS + warp];
      if (all >= my.a.top_k)
        low = key[j], above_low = all;
      else if (key[j] < high)
        high = key[j];
    }
  }
  return low;
}

// Return the exclusive prefix sum of `count` over the threads, and set `all` to the total. The caller synchronises the
// threads before the next call.
DEVICE int count_before(Thread& my, int count, int& all) {
  int before = count;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = exchange(before, my.lane() - step);
    if (my.lane() >= step) before += other;
  }
  u32* counts = my.s.reduction + 6 * WARPS;  // bisect_tops() may still read the first ones
  if (my.lane() == 31) counts[my.warp()] = before;
  synchronize_compute_warps();
  before -= count, all = 0;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) {
    before += warp < my.warp() ? counts[warp] : 0;
    all += counts[warp];
  }
  return before;
}

// List the groups whose largest logit is above `threshold` in head.listed_groups. Return how many.
template <int EACH> DEVICE int list_groups(Thread& my, const float (&top)[EACH], float threshold) {
  int count = 0, all;
#pragma unroll
  for (int i = 0; i < EACH; ++i) count += top[i] > threshold;
  int place = count_before(my, count, all);
#pragma unroll
  for (int i = 0; i < EACH; ++i)
    if (top[i] > threshold) my.s.head.listed_groups[place++] = (u16)(my.thread + i * THREADS);
  synchronize_compute_warps();
  return all;
}

// List the logits above `threshold` of the listed groups in head.candidates, with their scores. Return their number. If
// it exceeds MAX_CANDIDATES, the list is incomplete.
DEVICE int list_logits(Thread& my, int b, int group_count, float threshold) {
  int candidate_count = 0;
  for (int start = 0; start < group_count && candidate_count <= MAX_CANDIDATES; start += THREADS) {
    float logit[GROUP];
    int count = 0, all;
    const bool exists = start + my.thread < group_count;
    const int group = exists ? my.s.head.listed_groups[start + my.thread] : 0;
    load_group(my, b, group, logit);
#pragma unroll
    for (int i = 0; i < GROUP; ++i) count += exists && logit[i] > threshold;
    int place = candidate_count + count_before(my, count, all);
#pragma unroll
    for (int i = 0; i < GROUP; ++i)
      if (exists && logit[i] > threshold && place < MAX_CANDIDATES)
        my.s.head.candidates[place++] = {0, logit[i], first_id(group) + i};
    candidate_count += all;
    synchronize_compute_warps();
  }
  for (int i = my.thread; i < smaller(candidate_count, MAX_CANDIDATES); i += THREADS) {
    Candidate& candidate = my.s.head.candidates[i];
    candidate.score = score_of(my.a, candidate.logit, candidate.id, counter_of(my, b));
  }
  return candidate_count;
}

// Return the token of sequence b, or NO_TOKEN if a logit is NaN or inf, or if all are -inf.
DEVICE int draw_row(Thread& my, int b) {
  constexpr int ALL = BLOCKS * GROUPS, EACH = ceil_div(ALL, THREADS);
  const Arguments& a = my.a;
  float top[EACH], mass[EACH];
  float most = -INF;     // the largest logit of this thread's groups
  Candidate best_group;  // a score, and the number of its group
  Candidate candidate;
  constexpr int AT_ONCE = balanced(EACH, 8);
  const Word* summaries = words_of(my, b, my.thread);
  auto group = [&](int i) { return i < EACH && my.thread + i * THREADS < ALL ? my.thread + i * THREADS : -1; };
#pragma unroll
  for (int start = 0; start < EACH; start += AT_ONCE) {
    Word word[AT_ONCE];
    receive(my, word, [&](int i) { return summaries + (start + i) * THREADS * GROUP_WORDS; },
            [&](int i) { return group(start + i) >= 0; });
#pragma unroll
    for (int i = start; i < smaller(start + AT_ONCE, EACH); ++i) {
      top[i] = group(i) < 0 ? -INF : __uint_as_float(word[i - start].data[0]);
      mass[i] = __uint_as_float(word[i - start].data[2]);
      most = fmaxf(most, top[i]);
      if (group(i) >= 0) best_group = better(best_group, {__uint_as_float(word[i - start].data[1]), 0, group(i)});
    }
  }
  fence();
  float2 range = make_float2(most, most);  // THREADS or more groups reach its lower end
  range = reduce(my, range, [](float2 x, float2 y) { return make_float2(fminf(x.x, y.x), fmaxf(x.y, y.y)); });
  const float highest = range.y;
  if (!(highest > -INF && highest < INF)) return NO_TOKEN;
  const Key above = (order_key(highest) >> KEY_SHIFT) + 1;
  const bool limited = limits_count(a);
  Key low = order_key(-3.4e38f) >> KEY_SHIFT, high = above;
  // Around 0 the key below may stand for -0 or a subnormal number. Then range.x is not larger, and no group is listed
  if (a.top_k <= THREADS && range.x > -1e38f && fabsf(range.x) > 1e-37f)
    low = (order_key(range.x) >> KEY_SHIFT) - 1;
  if (limited) {
    low = bisect_tops(my, top, low, high);
  } else {
    const int chosen = smaller(reduce(my, best_group, better).id, ALL - 1);
    float logit[GROUP];
    load_group(my, b, chosen, logit);
    const int place = my.lane() % GROUP, id = first_id(chosen) + place;
#pragma unroll
    for (int i = 0; i < GROUP; ++i) candidate.logit = i == place ? logit[i] : candidate.logit;
    candidate = reduce(my, Candidate{score_of(a, candidate.logit, id, counter_of(my, b)), candidate.logit, id}, better);
  }
  const float list_above = limited ? number_of_key(low << KEY_SHIFT) : -INF;
  const int group_count = list_groups(my, top, list_above);
  const int candidate_count = limited ? list_logits(my, b, group_count, list_above) : MAX_CANDIDATES + 1;
  float limit = INF;  // of the mass of larger logits
  // top_p is a share of what top_k keeps. So with both, a bisection finds the k-th logit first
  bool bisecting = limited && a.top_p < 1;
  high = above;
  if (a.top_p < 1 && !bisecting) {
    float all = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      if (group(i) >= 0) all += mass[i] * probability(a, top[i], highest);
    limit = a.top_p * reduce(my, all, [](float x, float y) { return x + y; });
  }
  if (limited) candidate.logit = list_above;  // the first scan makes the first proposal
  // Ends: a bisection halves the range, and then each proposal leaves fewer larger logits. Only one call of
  // scan_above(), because a second copy of its code, 19 KB, would be loaded again in every token
  for (bool first = limited && !bisecting;; first = false) {
    const Key middle = (low + high) >> 1;
    const float threshold = bisecting ? number_of_key(middle << KEY_SHIFT) : candidate.logit;
    const Scan scan = scan_above(my, b, group_count, candidate_count, threshold, highest);
    if (bisecting && high - low > 1) {
      if (scan.count >= a.top_k) low = middle;
      else high = middle;
      continue;
    }
    if (bisecting) {
      bisecting = false;
      limit = a.top_p * scan.mass;
    } else if (!first && (scan.count == 0 || ((!limited || scan.count < a.top_k) && scan.mass < limit))) {
      return candidate.id;
    }
    candidate = scan.best;
  }
}

DEVICE void take_token(Thread& my, int b, int id, bool stopped) {
  my.s.drawn[b] = id;
  my.s.stopped[b] = stopped;
  if (stopped) return;
  my.s.token[b] = id;
  my.s.position[b] += 1;
}

// Return whether sequence b stops after drawing `id`, or has stopped before.
DEVICE bool stops(const Thread& my, int b, int id) {
  bool stopped = my.s.stopped[b] || id == NO_TOKEN;
  for (int i = 0; i < my.a.stop_count; ++i) stopped |= id == my.a.stops[i];
  return stopped;
}

// Write the token of this step. If the sequence stops, write it for all later steps, too.
DEVICE void write_drawn(const Arguments& a, int b, int id, bool stopped, int step) {
  for (int later = step; later < (stopped ? a.steps : step + 1); ++later) a.drawn[(i64)b * a.steps + later] = id;
}

// Draw from all logits, with one exchange: a warp finds the best token of a sequence in the words of all blocks.
DEVICE void draw_best(Thread& my, int step) {
  const Arguments& a = my.a;
  publish_best(my);
  mark(my);
  const int b = my.warp();  // there are no fewer warps than sequences
  if (b < BATCH) {
    const int id = my.s.stopped[b] ? my.s.drawn[b] : smaller(best_token(my, b), a.n_vocab - 1);
    fence();
    if (my.lane() == 0) {
      const bool stopped = stops(my, b, id);
      take_token(my, b, id, stopped);
      if (my.block == b % BLOCKS) write_drawn(a, b, id, stopped, step);
    }
  }
  mark(my);
}

// Draw with top_k or top_p, with two exchanges: block b draws for sequence b, and tells all blocks.
DEVICE void draw_limited(Thread& my, int step) {
  const Arguments& a = my.a;
  summarize(my);
  mark(my);
  for (int b = my.block; b < BATCH; b += BLOCKS) {
    const int id = my.s.stopped[b] ? my.s.drawn[b] : smaller(draw_row(my, b), a.n_vocab - 1);
    if (my.thread > 0) continue;
    const bool stopped = stops(my, b, id);
    fence();
    store_word(a.token + b, {{(u32)id, (u32)stopped, 0}, my.epoch});
    write_drawn(a, b, id, stopped, step);
  }
  mark(my);
  if (my.warp() == 0) {
    Word word[1];
    const int b = my.lane();
    receive(my, word, [&](int) { return a.token + b; }, [&](int) { return b < BATCH; });
    fence();
    if (b < BATCH) take_token(my, b, (int)word[0].data[0], word[0].data[1]);
  }
}

// Draw a token for each sequence, in all blocks. A stopped sequence keeps its token and position. NO_TOKEN stops.
DEVICE void draw_tokens(Thread& my, int step) {
  if (limits_draw(my.a)) draw_limited(my, step);
  else draw_best(my, step);
  synchronize_compute_warps();
  bool running = false;
  for (int b = 0; b < BATCH; ++b) running |= !my.s.stopped[b];
  if (my.thread == 0) my.s.finished = !running || my.s.abandoned;
  synchronize_compute_warps();
}
