// Products of several rows of x with integer codes, as in llama.cpp. product.cc includes this file.
//
// Each 32 columns of x are rounded to 8 bits, i.e. written as scale * a, with byte digits a up to 127. Alternatively,
// they are written as scale * (a * 2^s + b), where s is `kShift`. The error is then similar to that of bfloat16 itself.
//
// A tile has one row of the weight per lane of a vector. It is unpacked to bytes once for all rows of x. Each lane has
// four columns of its row, to be multiplied by the same four digits. So no sum is reduced across lanes, and 32 columns
// of all these rows take eight byte products and a scale. Values from tables that no byte holds (NF4) are two bytes, as
// in integers.h.
//
// As in product.cc, everything below `#else` is compiled once for each instruction set.
#ifndef QL_NAME
namespace {
namespace rounded {
using integers::Codes, integers::kUnit;
constexpr int64_t kChunk = 64;  // columns to unpack at a time
struct Digits {  // of rows of x
  int count;                    // one or two
  int64_t rows, stride;         // rows are padded with zeros
  int64_t part, parts;          // columns with one scale of x and one of the weight, and how many such parts a row has
  int64_t of_run;               // parts per run
  std::vector<int8_t> of;       // a for all rows, then b, in the order in which codes are unpacked
  std::vector<float> scale;     // for each unit
  std::vector<int32_t> bias;    // for each part, for a and then b: what the bias of codes adds
  std::vector<float> sum;       // for each run of the weight: the sum of x, as represented by its digits
  std::atomic<bool> special{false};  // whether any unit has NaNs, infinities, or only values that are too small
  Digits(const Weight& w, int64_t rows, int count) : count(count), rows(rows), stride(up(w.columns, kChunk) * kChunk) {
    part = w.runs > 1 && w.run % kUnit ? 16 : kUnit, parts = up(w.columns, part), of_run = up(w.run, part);
    of.resize(count * rows * stride), bias.resize(count * rows * parts);
    scale.resize(rows * units()), sum.resize(rows * w.runs);
  }
  int64_t units() const { return stride / kUnit; }
};
struct Functions {  // for an instruction set
  const char* name;
  int shift;  // its `kShift`
  void (*round)(const float* x, const uint16_t* narrow, const Weight&, const Codes&, Digits&, int64_t begin, int64_t end);
  void (*product)(const Weight&, const Codes&, const Digits&, Result, int64_t begin, int64_t end);
};
}  // namespace rounded
#define QL_NAME plain
#define QL_SET PLAIN
#define QL_BYTES
#include "rounded.h"
#if defined(__x86_64__)
#define QL_NAME avx2
#define QL_SET AVX2
#define QL_BYTES __attribute__((target("avx2,fma,f16c")))
#include "rounded.h"
#ifdef QL_MORE
#define QL_NAME avx512
#define QL_SET AVX512
#define QL_BYTES __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx2,fma,f16c")))
#include "rounded.h"
#endif
#endif
}  // namespace
#else  // one instruction set
namespace QL_NAME {
namespace rounded {
using namespace ::rounded;
constexpr int kTile = 4 * kLanes;  // bytes: four columns of a tile
constexpr int kMost = QL_SET == AVX512 ? 8 : 4;  // rows of x to multiply at a time, such that all sums fit in registers
constexpr int kShift = QL_SET == AVX2 ? 7 : 8;   // bits of the second byte of a value
// Whether to use signed bytes. AVX2 adds pairs of products in 16 bits, which would overflow for larger unsigned bytes.
static bool has_signed(const Weight& w, const Codes& codes) {
  return QL_SET == AVX2 && (w.format.bits == 8 || codes.looked_up);
}

#if QL_SET == PLAIN
QL_BYTES_INLINE I nearest(F v) {
  I out;
  for (int i = 0; i < kLanes; i++) out[i] = std::nearbyint(v[i]);
  return out;
}
QL_BYTES_INLINE float most_of(F v) {
  float most = 0;
  for (int i = 0; i < kLanes; i++) most = std::max<float>(most, v[i]);
  return most;
}
QL_BYTES_INLINE void put_bytes(const I* unit, const uint8_t* columns, int8_t* at) {
  for (int k = 0; k < kUnit; k++) at[k] = unit[(k / 16 * 16 + columns[k % 16]) / kLanes][columns[k % 16] % kLanes];
}
template <int G, int Q, int M>
QL_BYTES_INLINE void dots(const uint8_t* codes, const int8_t* const* digits, I (*sums)[2], int d) {
  for (int q = 0; q < Q; q++) {
    const U word = load<U>(codes + q * kTile);
    QL_UNROLL for (int i = 0; i < M; i++)
      for (int j = 0; j < 4; j++) sums[i][d] += I(word >> 8 * j & 255u) * int32_t(digits[i][4 * q + j]);
  }
}
#else
using integers::Bytes, integers::everywhere, integers::most_of, integers::nearest, integers::read;
QL_BYTES_INLINE __m128i some(const void* at) { return _mm_loadu_si128(static_cast<const __m128i*>(at)); }
QL_BYTES_INLINE void put_bytes(const I* unit, const uint8_t* columns, int8_t* at) {
  const __m256i bytes = _mm256_shuffle_epi8(integers::narrowed(unit), _mm256_broadcastsi128_si256(some(columns)));
  _mm256_storeu_si256((__m256i*)at, bytes);
}
#if QL_SET == AVX512
QL_BYTES_INLINE Bytes in_lanes(__m128i bytes) { return _mm512_broadcast_i32x4(bytes); }
QL_BYTES_INLINE Bytes every_fourth(const uint8_t* const* rows, int64_t at) {
  const __m256i low = _mm256_set_m128i(some(rows[4] + at), some(rows[0] + at));
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), _mm256_set_m128i(some(rows[12] + at), some(rows[8] + at)), 1);
}
QL_BYTES_INLINE Bytes shuffled(Bytes table, Bytes codes) { return _mm512_shuffle_epi8(table, codes); }
QL_BYTES_INLINE Bytes halved(Bytes v) { return _mm512_srli_epi16(v, 4); }
QL_BYTES_INLINE Bytes low_words(Bytes a, Bytes b) { return _mm512_unpacklo_epi32(a, b); }
QL_BYTES_INLINE Bytes high_words(Bytes a, Bytes b) { return _mm512_unpackhi_epi32(a, b); }
QL_BYTES_INLINE Bytes low_pairs(Bytes a, Bytes b) { return _mm512_unpacklo_epi64(a, b); }
QL_BYTES_INLINE Bytes high_pairs(Bytes a, Bytes b) { return _mm512_unpackhi_epi64(a, b); }
#else
QL_BYTES_INLINE Bytes in_lanes(__m128i bytes) { return _mm256_broadcastsi128_si256(bytes); }
QL_BYTES_INLINE Bytes every_fourth(const uint8_t* const* rows, int64_t at) {
  return _mm256_set_m128i(some(rows[4] + at), some(rows[0] + at));
}
QL_BYTES_INLINE Bytes shuffled(Bytes table, Bytes codes) { return _mm256_shuffle_epi8(table, codes); }
QL_BYTES_INLINE Bytes halved(Bytes v) { return _mm256_srli_epi16(v, 4); }
QL_BYTES_INLINE Bytes low_words(Bytes a, Bytes b) { return _mm256_unpacklo_epi32(a, b); }
QL_BYTES_INLINE Bytes high_words(Bytes a, Bytes b) { return _mm256_unpackhi_epi32(a, b); }
QL_BYTES_INLINE Bytes low_pairs(Bytes a, Bytes b) { return _mm256_unpacklo_epi64(a, b); }
QL_BYTES_INLINE Bytes high_pairs(Bytes a, Bytes b) { return _mm256_unpackhi_epi64(a, b); }
#endif
// Adds the products of 4 * Q columns of a tile with M rows of x. AVX2 adds G of these in 16 bits. If G is 1, bytes are
// signed.
template <int G, int Q, int M>
QL_BYTES_INLINE void dots(const uint8_t* codes, const int8_t* const* digits, I (*sums)[2], int d) {
#if QL_SET == AVX512
  QL_UNROLL for (int q = 0; q < Q; q++) {
    const Bytes word = read(codes + q * kTile);
    QL_UNROLL for (int i = 0; i < M; i++)
      sums[i][d] = integers::dot(sums[i][d], word, _mm512_set1_epi32(load<int32_t>(digits[i] + 4 * q)));
  }
#else
  const __m256i ones = _mm256_set1_epi16(1);
  if constexpr (G == 1) {
    QL_UNROLL for (int q = 0; q < Q; q++) {
      const Bytes word = read(codes + q * kTile), size = _mm256_abs_epi8(word);
      QL_UNROLL for (int i = 0; i < M; i++) {
        const Bytes turned = _mm256_sign_epi8(_mm256_set1_epi32(load<int32_t>(digits[i] + 4 * q)), word);
        sums[i][d] += (I)_mm256_madd_epi16(_mm256_maddubs_epi16(size, turned), ones);
      }
    }
  } else QL_UNROLL for (int first = 0; first < Q; first += G) {
    __m256i narrow[M];
    QL_UNROLL for (int q = first; q < std::min(first + G, Q); q++) {
      const Bytes word = read(codes + q * kTile);
      QL_UNROLL for (int i = 0; i < M; i++) {
        const __m256i two = _mm256_maddubs_epi16(word, _mm256_set1_epi32(load<int32_t>(digits[i] + 4 * q)));
        narrow[i] = q == first ? two : _mm256_add_epi16(narrow[i], two);
      }
    }
    QL_UNROLL for (int i = 0; i < M; i++) sums[i][d] += (I)_mm256_madd_epi16(narrow[i], ones);
  }
#endif
}
#endif

// Returns the position of a column in a tile. For 4 bits, each eight columns start with those from low halves of bytes.
QL_BYTES_INLINE int place(const Format& f, int k) {
  return f.bits == 4 ? k / 8 * 8 + (k % 2 != f.high_first) * 4 + k % 8 / 2 : k;
}
// Rounds rows of x, in float32 or bfloat16 (`narrow`). A unit with a NaN or an infinity becomes NaN.
QL_BYTES static void round(const float* x, const uint16_t* narrow, const Weight& w, const Codes& codes, Digits& out, int64_t begin, int64_t end) {
  constexpr int kParts = kUnit / kLanes;
  const int32_t bias = codes.bias - (has_signed(w, codes) ? 128 : 0);
  const int by_digit = out.count == 2 ? kShift : 0;
  const int32_t half_digit = (1 << by_digit) / 2;
  const float largest = 127 << by_digit;
  alignas(16) uint8_t columns[16];  // for each 16 bytes
  for (int k = 0; k < 16; k++) columns[place(w.format, k)] = k;
  for (int64_t m = begin; m < end; m++) {
    float* sum = out.sum.data() + m * w.runs;
    std::fill(sum, sum + w.runs, 0.f);
    int64_t left = w.run;  // columns left in this run
    for (int64_t k = 0; k < w.columns; k += kUnit) {
      const int64_t at = m * w.columns + k, count = std::min(kUnit, w.columns - k);
      float last[kUnit] = {};
      for (int64_t i = 0; i < count && count < kUnit; i++)
        last[i] = narrow ? bits_as<float>(uint32_t(narrow[at + i]) << 16) : x[at + i];
      F parts[kParts], sizes = {}, rest = {};
      QL_UNROLL for (int i = 0; i < kParts; i++) {
        parts[i] = count < kUnit ? widened(last + i * kLanes) : narrow ? widened(narrow + at + i * kLanes) : widened(x + at + i * kLanes);
        const F size = bits_as<F>(bits_as<U>(parts[i]) & 0x7FFFFFFFu);
        sizes = size > sizes ? size : sizes, rest += parts[i] - parts[i];
      }
      const float most = most_of(sizes);
      const bool known = sum_of(rest) == 0, some = known && most >= 1e-30f;
      const float scale = some ? most / largest : known ? 0 : NAN, by = some ? largest / most : 0;
      if (!known || (most != 0 && most < 1e-25f)) out.special = true;
      out.scale[m * out.units() + k / kUnit] = scale * codes.factor;
      I whole[kParts];
      QL_UNROLL for (int i = 0; i < kParts; i++) whole[i] = some ? nearest(parts[i] * all(by)) : I{};
      int32_t of_halves[2] = {};  // sums of both halves
      for (int digit = 0; digit < out.count; digit++) {
        I bytes[kParts];
        F halves_of[2] = {};
        QL_UNROLL for (int i = 0; i < kParts; i++) {
          const I a = (whole[i] + half_digit) >> by_digit;
          bytes[i] = digit ? whole[i] - (a << by_digit) : a;
          halves_of[i * kLanes / 16] += __builtin_convertvector(bytes[i], F);
        }
        const int64_t row = digit * out.rows + m;
        put_bytes(bytes, columns, out.of.data() + row * out.stride + k);
        int32_t* biases = out.bias.data() + row * out.parts;
        for (int half = 0; half * 16 < count; half++) {
          const int32_t of_half = sum_of(halves_of[half]);
          of_halves[half] = digit ? of_halves[half] + of_half : of_half * (1 << by_digit);
          if (out.part == 16) biases[k / 16 + half] = -bias * of_half;
          else biases[k / kUnit] = (half ? biases[k / kUnit] : 0) - bias * of_half;
        }
      }
      for (int half = 0; half * 16 < count; half++) {
        *sum += of_halves[half] * scale;
        if ((left -= 16) <= 0) sum++, left = w.run;
      }
    }
  }
}

// Unpacks `count` rows of the weight to a tile. If values have two bytes, these go to two planes.
template <int B>
QL_BYTES static void unpack_tile(const Weight& w, const Codes& codes, int64_t first, int64_t count, uint8_t* tile) {
  const int64_t plane = up(w.columns, kChunk) * kChunk * kLanes;
  const uint8_t turned = has_signed(w, codes) ? 128 : 0, flip = B == 8 ? codes.flip ^ turned : 0;
  const bool looked_up = B <= 4 && codes.looked_up;
#if QL_SET == PLAIN
  for (int64_t r = 0; r < kLanes; r++) {
    const uint8_t* at = w.codes + (first + std::min(r, count - 1)) * w.row_bytes;
    for (int64_t k = 0; k < w.columns; k++) {
      const int64_t bit = (B == 4 && w.format.high_first ? k ^ 1 : k) * B;
      const uint32_t word = at[bit / 8] | (bit / 8 + 1 < w.row_bytes ? at[bit / 8 + 1] << 8 : 0);
      const uint8_t code = word >> bit % 8 & ((1 << B) - 1);
      const int64_t of = k / 8 * 8 + place(w.format, k % 8);
      uint8_t* to = tile + of / 4 * kTile + r * 4 + of % 4;
      *to = looked_up ? codes.bytes[code] : code ^ flip;
      if (codes.fine) to[plane] = codes.low[code];
    }
  }
#else
  const Bytes bytes = everywhere(turned) ^ in_lanes(some(codes.bytes)), low = in_lanes(some(codes.low));
  const Bytes flips = everywhere(flip), fifteen = everywhere(15);
  const auto put = [&](Bytes four, uint8_t* at) QL_BYTES_LAMBDA {  // four columns of all rows
    const Bytes values = looked_up ? shuffled(bytes, four) : B == 8 ? four ^ flips : four, fine = shuffled(low, four);
    memcpy(at, &values, sizeof values);
    if (B <= 4 && codes.fine) memcpy(at + plane, &fine, sizeof fine);
  };
  for (int64_t k = 0; k < w.columns; k += kChunk) {
    uint8_t copy[kLanes][kChunk], unpacked[kLanes][kChunk];
    const uint8_t* from[kLanes];
    QL_UNROLL for (int r = 0; r < kLanes; r++) {
      const uint8_t* at = w.codes + (first + std::min<int64_t>(r, count - 1)) * w.row_bytes + k * B / 8;
      if (w.columns - k < kChunk) memset(copy[r], 0, kChunk), at = (uint8_t*)memcpy(copy[r], at, w.row_bytes - k * B / 8);
      from[r] = at;
      if constexpr (B != 4 && B != 8) {
        from[r] = unpacked[r];
        for (int part = 0; part < kChunk; part += kTile) {
          Bytes code;
          integers::unpack<B>(at + part * B / 8, true, &code);
          memcpy(unpacked[r] + part, &code, sizeof code);
        }
      }
    }
    QL_UNROLL for (int j = 0; j < (B == 4 ? kChunk / 2 : kChunk); j += 16) {
      // Each of these has four rows, 128 bits apart. Transposing 32-bit words within 128 bits puts all rows in order.
      const Bytes a = every_fourth(from, j), b = every_fourth(from + 1, j), c = every_fourth(from + 2, j), d = every_fourth(from + 3, j);
      const Bytes ab = low_words(a, b), cd = low_words(c, d), ef = high_words(a, b), gh = high_words(c, d);
      const Bytes words[] = {low_pairs(ab, cd), high_pairs(ab, cd), low_pairs(ef, gh), high_pairs(ef, gh)};
      QL_UNROLL for (int i = 0; i < 4; i++) {
        uint8_t* to = tile + (k + (B == 4 ? 2 * j + 8 * i : j + 4 * i)) * kLanes;
        if constexpr (B == 4) put(words[i] & fifteen, to), put(halved(words[i]) & fifteen, to + kTile);
        else put(words[i], to);
      }
    }
  }
#endif
}

struct Tile {
  const uint8_t* bytes;
  const float *scale, *offset;  // for each run (offsets only if there are any), lane by lane
  int64_t first, count;
};
enum Form { kOneDigit, kTwoDigits, kTwoBytes };  // two bytes are values from tables, times one digit
template <int G, int P, Form FORM, int M>
QL_BYTES static void tile(const Weight& w, const Tile& t, const Digits& x, int64_t m, Result y) {
  const int64_t plane = x.stride * kLanes;
  int64_t rows[M];
  F sums[M] = {};
  QL_UNROLL for (int i = 0; i < M; i++) rows[i] = std::min(m + i, x.rows - 1);
  for (int64_t p = 0, run = 0; p < x.parts; run++) {
    const F scale = load<F>(t.scale + run * kLanes);
    if (t.offset) {
      const F offset = load<F>(t.offset + run * kLanes);
      QL_UNROLL for (int i = 0; i < M; i++) sums[i] += offset * all(x.sum[rows[i] * w.runs + run]);
    }
    for (const int64_t stop = std::min(p + x.of_run, x.parts); p < stop; p++) {
      I of[M][2];
      QL_UNROLL for (int d = 0; d <= (FORM != kOneDigit); d++) {
        const int64_t digit = FORM == kTwoDigits ? d : 0, second = FORM == kTwoBytes ? d : 0;
        const int8_t* digits[M];
        QL_UNROLL for (int i = 0; i < M; i++) {
          const int64_t row = digit * x.rows + rows[i];
          of[i][d] = second ? I{} : x.bias[row * x.parts + p] - I{};
          digits[i] = &x.of[row * x.stride + p * P];
        }
        dots<G, P / 4, M>(t.bytes + second * plane + p * P * kLanes, digits, of, d);
      }
      QL_UNROLL for (int i = 0; i < M; i++) {
        if (FORM == kTwoDigits) of[i][0] = (of[i][0] << kShift) + of[i][1];
        F sum = __builtin_convertvector(of[i][0], F);
        if (FORM == kTwoBytes) sum += __builtin_convertvector(of[i][1], F) * (1.f / (1 << kShift));
        sums[i] += sum * (scale * all(x.scale[rows[i] * x.units() + p * P / kUnit]));
      }
    }
  }
  for (int i = 0; i < M && m + i < x.rows; i++) {
    const int64_t at = (m + i) * y.stride + t.first;
    if (t.count < kLanes) for (int64_t r = 0; r < t.count; r++) put(y, m + i, t.first + r, sums[i][r]);
    else if (y.is_bfloat16) store(static_cast<uint16_t*>(y.data) + at, sums[i]);
    else store(static_cast<float*>(y.data) + at, sums[i]);
  }
}
template <int G, int P, Form FORM>
QL_BYTES static void product_of(const Weight& w, const Codes& codes, const Digits& x, Result y, int64_t begin, int64_t end) {
  constexpr decltype(&unpack_tile<8>) unpacks[] = {unpack_tile<2>, unpack_tile<3>, unpack_tile<4>, unpack_tile<5>, unpack_tile<6>, nullptr, unpack_tile<8>};
  const bool offset = w.format.zeros != kNone || w.outer_zero.count;
  // Use as many tiles as fit in L2, so as to read each row of x once for all of them.
  const int64_t size = x.stride * kLanes * (1 + (FORM == kTwoBytes)), tiles = std::clamp<int64_t>((1 << 18) / std::max<int64_t>(size, 1), 1, 8);
  Scratch s(w, kLanes, true);
  uint8_t* bytes = scratch<uint8_t, 3>(tiles * size);
  float* scales = scratch<float, 4>(tiles * 2 * w.runs * kLanes);
  for (int64_t n = begin; n < end;) {
    Tile all[8];
    int count = 0;
    for (; n < end && count < tiles; n += kLanes, count++) {
      float *scale = scales + count * 2 * w.runs * kLanes, *offsets = scale + w.runs * kLanes;
      all[count] = {bytes + count * size, scale, offset ? offsets : nullptr, n, std::min<int64_t>(kLanes, end - n)};
      unpacks[w.format.bits - 2](w, codes, n, all[count].count, bytes + count * size);
      scales_of(w, n, all[count].count, s);
      for (int64_t r = 0; r < kLanes; r++) {
        const int64_t first = std::min(r, all[count].count - 1) * w.runs;
        for (int64_t run = 0; run < w.runs; run++) scale[run * kLanes + r] = s.scale[first + run];
        for (int64_t run = 0; offset && run < w.runs; run++) offsets[run * kLanes + r] = s.offset[first + run];
      }
    }
    for (int64_t m = 0; m < x.rows; m += kMost)
      for (int i = 0; i < count; i++) {
        const int64_t left = x.rows - m;
        (left == 1 ? tile<G, P, FORM, 1> : left <= kMost / 2 ? tile<G, P, FORM, kMost / 2> : tile<G, P, FORM, kMost>)(w, all[i], x, m, y);
      }
  }
}
template <int G, Form FORM>
static void product_in(const Weight& w, const Codes& codes, const Digits& x, Result y, int64_t begin, int64_t end) {
  (x.part == 16 ? product_of<G, 16, FORM> : product_of<G, 32, FORM>)(w, codes, x, y, begin, end);
}
static void product(const Weight& w, const Codes& codes, const Digits& x, Result y, int64_t begin, int64_t end) {
  if (codes.fine) return product_in<1, kTwoBytes>(w, codes, x, y, begin, end);
  // The sum of G products of codes with this many bits stays below 2^15.
  if constexpr (QL_SET == AVX2) {
    if (x.count == 1 && !has_signed(w, codes) && w.format.bits <= 4) return product_in<8, kOneDigit>(w, codes, x, y, begin, end);
    if (x.count == 1 && w.format.bits == 5) return product_in<4, kOneDigit>(w, codes, x, y, begin, end);
    if (x.count == 1 && w.format.bits == 6) return product_in<2, kOneDigit>(w, codes, x, y, begin, end);
  }
  (x.count == 1 ? product_in<1, kOneDigit> : product_in<1, kTwoDigits>)(w, codes, x, y, begin, end);
}
constexpr Functions functions = {QL_SET == AVX512 ? "VNNI" : QL_STRING(QL_NAME), kShift, round, product};
}  // namespace rounded
}  // namespace QL_NAME
#undef QL_NAME
#undef QL_SET
#undef QL_BYTES
#endif
