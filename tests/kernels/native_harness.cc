// Runs the native products of every instruction set on buffers of exactly their size, which begin at odd addresses,
// and compares them with values that are read bit by bit. For compilers that check addresses and undefined behaviour.
#include PRODUCT
#include CSR

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

namespace {

std::mt19937 random_number(0);

struct Bytes {  // on the heap, from an odd address on
  std::vector<uint8_t> all;
  explicit Bytes(int64_t count) : all(count + 1) {
    for (auto& byte : all) byte = random_number();
  }
  uint8_t* data() { return all.data() + 1; }
};

int failures = 0;

void check(bool good, const char* what, const Format& f, int64_t columns, const char* set) {
  if (good) return;
  failures++;
  printf("%s: %s, %d rows of %d codes of %d bits in blocks of %d, scales %d, zeros %d\n", set, what, int(f.rows),
         int(columns), int(f.bits), int(f.block), int(f.scales), int(f.zeros));
}

int code_at(const uint8_t* row, int64_t i, int bits, bool high_first) {
  if (high_first) i ^= 1;
  int code = 0;
  for (int b = 0; b < bits; b++) code |= (row[(i * bits + b) / 8] >> (i * bits + b) % 8 & 1) << b;
  return code;
}

double e4m3(int byte) {
  const int exponent = byte >> 3 & 15, fraction = byte & 7;
  const double size = exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
  return byte & 128 ? -size : size;
}

void compare(Format f, int64_t columns, int64_t m, bool outer) {
  const int64_t run = f.flat ? std::gcd(columns, f.block) : f.block, runs = up(columns, run);
  const int64_t scales = f.flat ? up(f.rows * columns, f.block) : f.rows * runs;
  f.group = f.scales == kNested ? 256 : outer ? 4 : -1;
  const int64_t groups = f.flat ? up(scales, 256) : f.rows * up(runs, 4), outers = f.group < 0 ? 0 : groups;
  const bool zeros = f.zeros != kNone && f.scales != kNibbles;
  Bytes codes(f.rows * up(columns * f.bits, 8)), bytes(scales), zero(zeros ? scales : 0);
  for (int64_t i = 0; i < scales; i++)  // neither NaN nor far from 1
    if (f.scales == kE8m0Bytes || f.scales == kE8m0HalfBytes) bytes.data()[i] = 127 + bytes.data()[i] % 3;
    else if (f.scales == kE4m3Bytes && (bytes.data()[i] & 127) == 127) bytes.data()[i] = 3;
  std::vector<float> table(1 << f.bits), outer_scales(outers), map(f.scales == kNested ? 256 : 0), x(m * up(columns, 16) * 16);
  const float offset = 0.5;
  for (auto* values : {&table, &outer_scales, &map}) for (auto& v : *values) v = random_number() % 64 / 16.f - 2;
  // Of one row of x, codes that stand for whole numbers, one apart or not: for products of bytes.
  for (size_t i = 0; m == 1 && f.block != 256 && i < table.size(); i++) table[i] = f.block == 16 ? int(i) - 8 : int(random_number() % 32) - 16;
  for (int64_t i = 0; i < m; i++)
    for (int64_t k = 0; k < columns; k++) x[i * up(columns, 16) * 16 + k] = random_number() % 64 / 32.f - 1;

  std::vector<float> mixed(x.size());
  for (size_t i = 0; i < x.size(); i++) mixed[i / 16 * 16 + i % 8 * 2 + i % 16 / 8] = x[i];

  Weight w{};
  w.format = f, w.columns = columns, w.codes = codes.data(), w.bytes = codes.all.size() - 1;
  w.table = {table.data(), int64_t(table.size()), kFloat32};
  w.scale = {bytes.data(), scales, kUint8};
  w.outer = {outer_scales.data(), outers, kFloat32};
  w.zero = {zero.data(), zeros ? scales : 0, kUint8};
  if (f.scales == kNested) w.zero = {&offset, 1, kFloat32};
  w.map = {map.data(), int64_t(map.size()), kFloat32};
  check(complete(w), "does not fit", f, columns, "all");
  Weight wrong = w;
  wrong.bytes++;
  check(!complete(wrong), "takes too many codes", f, columns, "all");

  std::vector<double> dense(f.rows * columns), expected(m * f.rows), sizes(m * f.rows);
  for (int64_t n = 0; n < f.rows; n++)
    for (int64_t k = 0; k < columns; k++) {
      const int64_t block = f.flat ? (n * columns + k) / f.block : n * runs + k / f.block;
      const int64_t group = f.flat ? block / 256 : n * up(runs, 4) + k / f.block / 4;
      const int byte = bytes.data()[block], code = code_at(codes.data() + n * up(columns * f.bits, 8), k, f.bits, f.high_first);
      const double inner[] = {double(byte), e4m3(byte), std::ldexp(1, byte - 127), std::ldexp(1, byte - 128), double(byte & 15),
                              f.scales == kNested ? map[byte] : 0};
      const double scale = inner[f.scales] * (f.group < 0 ? 1 : outer_scales[group]) + (f.scales == kNested ? offset : 0);
      const double value = f.bits <= 4 || f.lookup ? table[code] : f.is_signed ? int8_t(code) : code - f.bias;
      const double shift = f.zeros == kNone ? 0 : f.scales == kNibbles ? byte >> 4 : zero.data()[block];
      dense[n * columns + k] = f.zeros == kPoints ? (value - shift) * scale : value * scale + (f.zeros == kPlus ? shift : -shift);
      for (int64_t i = 0; i < m; i++) {
        const double term = dense[n * columns + k] * x[i * up(columns, 16) * 16 + k];
        expected[i * f.rows + n] += term;
        sizes[i * f.rows + n] += std::abs(term) + 256 * std::abs(scale);
      }
    }
  for (const Set* set : sets())
    for (const bool halves : {false, true}) {
      const double error = halves ? 1.0 / 256 : 1e-6;
      std::vector<uint32_t> y(m * f.rows), decoded(f.rows * columns);
      auto value = [&](std::vector<uint32_t>& of, int64_t i) {
        return halves ? bits_as<float>(uint32_t(reinterpret_cast<uint16_t*>(of.data())[i]) << 16) : bits_as<float>(of[i]);
      };
      const int64_t middle = f.rows / 3;  // parts, as threads take them
      for (auto [begin, end] : {std::pair{int64_t{0}, middle}, std::pair{middle, f.rows}}) {
        const auto& rows = set->mixes_nibbles && f.bits == 4 ? mixed : x;
        set->of(f).product(w, {rows.data(), m, up(columns, 16) * 16}, {y.data(), f.rows, halves}, begin, end);
        set->of(f).decode[halves](w, 0, {decoded.data(), columns, halves}, begin, end);
      }
      for (int64_t i = 0; i < m * f.rows; i++)
        check(std::abs(value(y, i) - expected[i]) <= error * (sizes[i] + 1e-3), "product", f, columns, set->name);
      for (int64_t i = 0; i < f.rows * columns; i++)
        check(std::abs(value(decoded, i) - dense[i]) <= error * (std::abs(dense[i]) + 256), "decoded", f, columns, set->name);
    }
  // Rows of x as products that round them have them.
  std::vector<float> plain(m * columns);
  std::vector<double> of_rounded(m * f.rows);
  for (int64_t i = 0; i < m; i++)
    for (int64_t k = 0; k < columns; k += 32) {
      const float* at = &x[i * up(columns, 16) * 16 + k];
      const int64_t count = std::min<int64_t>(32, columns - k);
      float most = 0;
      for (int64_t j = 0; j < count; j++) most = std::max(most, std::abs(at[j])), plain[i * columns + k + j] = at[j];
      for (int64_t j = 0; j < count && most; j++)
        for (int64_t n = 0; n < f.rows; n++)
          of_rounded[i * f.rows + n] += std::nearbyint(at[j] * (127 / most)) * (most / 127.) * dense[n * columns + k + j];
    }
  const auto compare_rounded = [&](const std::vector<float>& y, double error, const char* name) {
    for (int64_t i = 0; i < m * f.rows; i++) check(std::abs(y[i] - of_rounded[i]) <= error * (sizes[i] + 1e-3), "rounded", f, columns, name);
  };
  for (const rounded::Functions* functions : by_rounding())
    for (const int count : {1, 2}) {
      const integers::Codes bytes = integers::codes_of(w, count == 1, functions->shift);
      if (!bytes.known) continue;
      rounded::Digits digits(w, m, count);
      std::vector<float> y(m * f.rows);
      for (auto [begin, end] : {std::pair{int64_t{0}, m / 3}, std::pair{m / 3, m}})
        functions->round(plain.data(), nullptr, w, bytes, digits, begin, end);
      for (auto [begin, end] : {std::pair{int64_t{0}, f.rows / 3}, std::pair{f.rows / 3, f.rows}})
        functions->product(w, bytes, digits, {y.data(), f.rows, false}, begin, end);
      if (count == 1) compare_rounded(y, bytes.fine ? 1e-4 : 2e-6, functions->name);
      for (int64_t i = 0; i < m * f.rows && count == 2; i++)
        check(std::abs(y[i] - expected[i]) <= 1e-4 * (sizes[i] + 1e-3), "two digits", f, columns, functions->name);
    }
#if defined(__x86_64__)
  for (const integers::Functions* functions : {&avx2::integers::functions, by_bytes()}) {  // one twice, or both
    integers::Digits digits;
    for (const int count : {1, 2, 3}) {
      if (m != 1 || !by_bytes() || !integers::in_steps(w)) continue;
      const integers::Codes whole = integers::codes_of(w, count < 3, functions->shift);
      if (!whole.known || !functions->write(x.data(), nullptr, w, whole, count, digits)) continue;
      std::vector<float> y(f.rows);
      for (auto [begin, end] : {std::pair{int64_t{0}, f.rows / 3}, std::pair{f.rows / 3, f.rows}})
        functions->of(w, whole, digits)(w, whole, digits, {y.data(), f.rows, false}, begin, end);
      const double error = count == 3 ? 2e-6 : functions->shift == 8 ? 3e-5 : 1e-4;
      if (count == 1) compare_rounded(y, whole.fine ? error : 2e-6, "one row");
      for (int64_t i = 0; i < f.rows && count > 1; i++)
        check(std::abs(y[i] - expected[i]) <= error * (sizes[i] + 1e-3), "bytes", f, columns, functions->shift == 8 ? "VNNI" : "AVX2");
    }
  }
#endif
}

template <class T> void compare_dense(int64_t rows, int64_t columns, int64_t m) {
  const int64_t stride = up(columns, 32) * 32;
  std::vector<T> w(rows * columns);
  std::vector<float> x(m * stride), y(m * rows);
  for (auto& v : w) v = sizeof(T) == 4 ? int(random_number() % 64) - 32 : 0x3F80 + random_number() % 256;  // from 1 on
  for (int64_t i = 0; i < m * stride; i++) x[i] = i % stride < columns ? random_number() % 64 / 32.f - 1 : 0;
  for (const Set* set : sets()) {
    for (auto [begin, end] : {std::pair{int64_t{0}, rows / 3}, std::pair{rows / 3, rows}})
      set->dense[sizeof(T) == 2](w.data(), columns, {x.data(), m, stride}, {y.data(), rows, false}, begin, end);
    for (int64_t i = 0; i < m * rows; i++) {
      double sum = 0, size = 0;
      for (int64_t k = 0; k < columns; k++) {
        const T weight = w[i % rows * columns + k];
        const double term = x[i / rows * stride + k] * (sizeof(T) == 4 ? double(weight) : bits_as<float>(uint32_t(weight) << 16));
        sum += term, size += std::abs(term);
      }
      if (std::abs(y[i] - sum) <= 1e-6 * size) continue;
      failures++;
      printf("%s: dense, %d rows of %d in %d bytes, %d of x\n", set->name, int(rows), int(columns), int(sizeof(T)), int(m));
    }
  }
}

template <class T> void compare_stacked(int64_t rows, int64_t columns, int64_t group) {
  const int64_t stride = up(rows, 32) * 32, count = 5, m = count * group;
  std::vector<T> w(count * rows * columns);
  std::vector<float> x(m * stride), y(m * columns);
  for (auto& v : w) v = sizeof(T) == 4 ? int(random_number() % 64) - 32 : 0x3F80 + random_number() % 256;
  for (auto& v : x) v = random_number() % 64 / 32.f - 1;
  for (const Set* set : sets()) {
    for (auto [begin, end] : {std::pair{int64_t{0}, int64_t{2}}, std::pair{int64_t{2}, count}})
      set->stacked[sizeof(T) == 2](w.data(), rows, columns, group, {x.data(), m, stride}, {y.data(), columns, false}, begin, end);
    for (int64_t i = 0; i < m * columns; i++) {
      double sum = 0, size = 0;
      for (int64_t k = 0; k < rows; k++) {
        const T weight = w[(i / columns / group * rows + k) * columns + i % columns];
        const double term = x[i / columns * stride + k] * (sizeof(T) == 4 ? double(weight) : bits_as<float>(uint32_t(weight) << 16));
        sum += term, size += std::abs(term);
      }
      if (std::abs(y[i] - sum) <= 1e-6 * size) continue;
      failures++;
      printf("%s: stacked, %d rows of %d in %d bytes, %d of x\n", set->name, int(rows), int(columns), int(sizeof(T)), int(group));
    }
  }
}

}  // namespace

void compare_csr(int64_t rows, int64_t columns, int64_t elements, int64_t m, bool wild) {
  std::vector<float> data(elements), x(m * columns), y(m * rows, -1);
  std::vector<int32_t> column(elements), row_ptr(rows + 1);
  for (auto* values : {&data, &x}) for (auto& v : *values) v = random_number() % 64 / 32.f - 1;
  for (auto& k : column) k = wild ? int32_t(random_number()) : random_number() % (columns + 1);  // `columns`: none
  for (auto& end : row_ptr) end = wild ? int32_t(random_number()) : random_number() % (elements + 1);
  if (!wild) std::sort(row_ptr.begin(), row_ptr.end());
  const Csr w{data.data(), column.data(), row_ptr.data(), rows, columns, elements};
  std::vector<float> fours(up(m, 4) * 4 * (columns + 1)), one(columns + 1);  // with a zero behind
  for (int64_t p = 0; p < m; p++)
    for (int64_t k = 0; k < columns; k++) fours[(p / 4 * (columns + 1) + k) * 4 + p % 4] = x[p * columns + k];
  for (int64_t p = 0; p < m; p += 4)
    multiply_rows<4>(w, fours.data() + p * (columns + 1), std::min<int64_t>(4, m - p), y.data() + p * rows, 0, rows);
  std::vector<float> first(rows);
  if (m) std::copy(x.begin(), x.begin() + columns, one.begin()), multiply_rows<1>(w, one.data(), 1, first.data(), 0, rows);
  for (int64_t p = 0; p < m && !wild; p++)
    for (int64_t n = 0; n < rows; n++) {
      double sum = 0, size = 0;
      for (int64_t i = row_ptr[n]; i < row_ptr[n + 1]; i++)
        if (column[i] < columns) {
          sum += double(data[i]) * x[p * columns + column[i]], size += std::abs(data[i]);
        }
      for (const float found : {y[p * rows + n], p ? y[p * rows + n] : first[n]})
        if (!(std::abs(found - sum) <= 1e-6 * (1 + size))) {
          failures++;
          printf("csr: %d rows, %d columns, %d elements\n", int(rows), int(columns), int(elements));
        }
    }
}

#include "native_handlers.h"

// One that the sanitizer of this build has to report.
int plant_a_fault() {
#if defined(__SANITIZE_THREAD__)
  volatile int number = 0;
  std::thread other([&] { number = number + 1; });
  number = number + 1;
  other.join();
  return 0;
#else
  volatile int count = 3;
  volatile int* numbers = new int[count];
  return numbers[count] & 0;
#endif
}

// `fault`; or `handlers` and `all`, with how many weights are drawn and the seed.
int main(int, char** arguments) {
  const std::string what = arguments[1];
  if (what == "fault") return plant_a_fault();
  random_number.seed(atoi(arguments[3]));
  if (handlers::check(atoi(arguments[2]))) return 1;
  if (what == "handlers") return 0;
  for (const int64_t rows : {0, 1, 5, 9})
    for (const int64_t columns : {0, 1, 7, 33})
      for (const int64_t elements : {0, 1, 6, 40, 301})
        for (const int64_t m : {0, 1, 3, 4, 6})
          for (const bool wild : {false, true}) compare_csr(rows, columns, elements, m, wild);
  for (const int64_t rows : {0, 1, 5, 19})
    for (const int64_t columns : {0, 1, 16, 33, 64, 100})
      for (const int64_t m : {0, 1, 2, 6, 8, 17}) compare_dense<float>(rows, columns, m), compare_dense<uint16_t>(rows, columns, m);
  for (const int64_t rows : {0, 1, 5, 19})
    for (const int64_t columns : {0, 1, 16, 33, 100, 256, 300})
      for (const int64_t group : {1, 3}) compare_stacked<float>(rows, columns, group), compare_stacked<uint16_t>(rows, columns, group);
  for (const int64_t rows : {0, 1, 5, 9})
    for (const int64_t columns : {0, 1, 7, 16, 33, 64, 100, 144, 192})
      for (const int64_t m : {0, 1, 3, 6, 17})
        for (const int64_t bits : {2, 3, 4, 5, 6, 8})
          for (const int64_t block : {16, 32, 256}) {
            Format f{rows, bits, block, 1 << (bits - 1), kByType, -1, kNone, false, false, false, false, false};
            compare(f, columns, m, bits % 2);
            f.scales = random_number() % 5;
            f.zeros = random_number() % 4;
            compare(f, columns, m, true);
            f.lookup = bits == 8, f.is_signed = bits != 4 && bits == 8 && m % 2;
            compare(f, columns, m, false);
            if (bits == 4 && columns % 2 == 0) {  // rows without gaps, whose blocks may cross them
              Format g{rows, 4, block, 0, m % 2 ? kByType : kNested, -1, kNone, false, true, false, false, true};
              if (columns && (std::gcd(columns, block) % 16 == 0)) compare(g, columns, m, false);
            }
          }
  printf("%d differences, by", failures);
  for (const Set* set : sets()) printf(" %s", set->name);
  printf("\n");
  return failures != 0;
}
