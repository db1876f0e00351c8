// bfloat16 and float8_e4m3fn by their bits, rounded to the nearest number, or the even one of two; and int8.

struct bf16 { u16 bits; };
struct e4m3 { u8 bits; };
struct i8 { u8 bits; };

template <bool CONDITION, class A, class B> struct Choice { typedef A Type; };
template <class A, class B> struct Choice<false, A, B> { typedef B Type; };

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
DEVICE float to_float(e4m3 x) { return e4m3_to_float(x.bits); }

template <class V> DEVICE V convert(float x);
template <> DEVICE float convert<float>(float x) { return x; }
template <> DEVICE bf16 convert<bf16>(float x) { return {round_to_bf16(x)}; }
template <> DEVICE e4m3 convert<e4m3>(float x) {  // beyond the range: the largest number, as in kernels/cache.py
  const float magnitude = fminf(fabsf(x), 448.0f);
  const u32 bits = __float_as_uint(magnitude), sign = __float_as_uint(x) >> 24 & 0x80;
  if (x != x) return {0x7F};
  if (magnitude < 0x1p-6f)  // subnormal: a multiple of 2^-9, which is the last place of numbers near 2^14
    return {(u8)(sign | (__float_as_uint(magnitude + 0x1p14f) - __float_as_uint(0x1p14f)))};
  return {(u8)(sign | (((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3)))};
}

template <class V> DEVICE float rounded(float x) { return to_float(convert<V>(x)); }

template <class V, int N> struct Vector {  // N numbers in registers
  u32 bits[N * sizeof(V) / 4];
  DEVICE float operator[](int i) const {
    if (sizeof(V) == 4) return __uint_as_float(bits[i]);
    if (sizeof(V) == 2) return __uint_as_float(i % 2 ? bits[i / 2] & 0xFFFF0000u : bits[i / 2] << 16);
    return to_float(e4m3{(u8)(bits[i / 4] >> 8 * (i % 4))});
  }
};

template <int N> struct Vector<i8, N> {
  u32 bits[N / 4];
  DEVICE float operator[](int i) const { return (signed char)(bits[i / 4] >> 8 * (i % 4)); }
};

// Two numbers in bf16. plan.py stores 8 columns so that these are columns 0 and 1, 4 and 5, 2 and 3, 6 and 7.
DEVICE u32 pair(const Vector<bf16, 8>& v, int i) { return v.bits[i]; }

// A byte is low - 128 top, for its low 7 bits and its top bit. In bf16, 0x4300 is 128, and its last mantissa bit is
// 1. So 0x4300 | low is 128 + low, and 0x4300 | top << 7 is 128 + 128 top. Their difference is the number, and exact.
// The bytes 0 and 2 are one pair, and 1 and 3 the next.
DEVICE u32 pair(const Vector<i8, 8>& v, int i) {
  const u32 bytes = v.bits[i / 2] >> 8 * (i % 2);
  return subtract_pairs(select_bits(bytes, 0x007F007F, 0x43004300), select_bits(bytes, 0x00800080, 0x43004300));
}
