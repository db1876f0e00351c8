// Words: a block publishes results, and every other block waits for just the words that it needs.

// Exchange values of any size between the lanes of a warp.
template <class V> DEVICE V exchange(V value, int lane) {
  u32 bits[sizeof(V) / 4];
  memcpy(bits, &value, sizeof(V));
#pragma unroll
  for (u32& part : bits) part = exchange_bits(part, lane);
  memcpy(&value, bits, sizeof(V));
  return value;
}

// Whether this warp gives up a wait. After TIMEOUT_NS it raises the flag, and then every warp that waits gives up. From
// then on a wait ends after 256 polls, and the launch ends after this token. `since` begins as 0.
DEVICE bool gives_up(Thread& my, u32 polls, u64& since) {
  if (polls % 256) return false;
  if (since == 0) since = nanoseconds();
  const bool late = nanoseconds() - since > TIMEOUT_NS;
  if (late) store_flag(my.a.failed, 1);
  if (!vote(late || load_flag(my.a.failed))) return false;
  my.s.abandoned = 1;
  return true;
}

// Wait until the words at(i) have this epoch, for all i of all lanes. If exists(i) is false, nothing is loaded: the
// data are zeros, and at(i) may be any address. So the addresses differ by constants, which are part of the loads. A
// whole warp calls this, and stays together: lanes that go on alone would run the code after the wait again and again.
// The loads of a poll are all in flight together.
template <int N, class At, class Exists> DEVICE void receive(Thread& my, Word (&word)[N], At at, Exists exists) {
  u64 since = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) word[i] = {{0, 0, 0}, exists(i) ? ~my.epoch : my.epoch};
  for (u32 polls = 1;; ++polls) {
    bool complete = true;
#pragma unroll
    for (int i = 0; i < N; ++i)  // load only the missing words, because polls delay other words
      if (word[i].epoch != my.epoch) word[i] = load_word(at(i));
#pragma unroll
    for (int i = 0; i < N; ++i) complete &= word[i].epoch == my.epoch;
    if (vote(complete) == ~0u || gives_up(my, polls, since)) return;
  }
}

template <class P> DEVICE int word_index(int b, int result) {
  return (b * P::PARTS + result / P::RESULTS) * P::WORDS + result % P::RESULTS / PER_WORD;
}

DEVICE void take_bits(float& to, u32 bits, int) { to = __uint_as_float(bits); }
DEVICE void take_bits(bf16& to, u32 bits, int half) { to = {(u16)(bits >> 16 * half)}; }

DEVICE T value_in(const Word& word, int place) {
  const int part = sizeof(T) == 4 ? place : place / 2;
  T value;
  take_bits(value, part == 0 ? word.data[0] : part == 1 ? word.data[1] : word.data[2], place % 2);
  return value;
}

DEVICE float number_in(const Word& word, int place) { return to_float(value_in(word, place)); }

// Pack the numbers of this lane and of the next PER_WORD - 1 lanes into a word.
DEVICE Word pack_numbers(float number, int lane, u32 epoch) {
  Word word;
  word.epoch = epoch;
  if (sizeof(T) == 4) {
    word.data[0] = __float_as_uint(number);
    word.data[1] = exchange(word.data[0], lane + 1);
    word.data[2] = exchange(word.data[0], lane + 2);
  } else {
    const u32 bits = convert<bf16>(number).bits;
    word.data[0] = bits | exchange(bits, lane + 1) << 16;
    word.data[1] = exchange(word.data[0], lane + 2);
    word.data[2] = exchange(word.data[0], lane + 4);
  }
  return word;
}

template <class P> DEVICE float result_in(const Word& word, int result) {
  return number_in(word, result % P::RESULTS % PER_WORD);
}

DEVICE Word make_word(float a, float b, float c, u32 epoch) {
  return {{__float_as_uint(a), __float_as_uint(b), __float_as_uint(c)}, epoch};
}
