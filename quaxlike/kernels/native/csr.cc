// An XLA FFI handler on CPUs, for products of a few rows with a weight stored as compressed sparse rows (CSR).
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>
#include "share.h"
namespace {
struct Csr {
  const float* data;
  const int32_t *column, *row_ptr;
  int64_t rows, columns, elements;
};
// Multiplies rows `begin` to `end` of the weight by `count` <= P rows of x, which are interleaved as `x[k * P + p]`.
// Elements are accumulated into several independent sums, so that no addition has to wait for the previous one.
// x has a zero after its columns, for padding. (Branching on each element would take longer than multiplying it.)
template <int P> void multiply_rows(const Csr& w, const float* x, int64_t count, float* y, int64_t begin, int64_t end) {
  typedef float Vector __attribute__((vector_size(16)));
  using Terms = std::conditional_t<P == 1, float, Vector>;
  static_assert(sizeof(Terms) == P * sizeof(float));
  constexpr int kSums = 4;
  const uint32_t columns = w.columns;
  const int32_t* const column = w.column;
  const float* const data = w.data;
  const auto term = [&](int64_t i) __attribute__((always_inline)) {
    Terms terms;
    memcpy(&terms, x + std::min<uint32_t>(column[i], columns) * int64_t(P), sizeof terms);
    return data[i] * terms;
  };
  for (int64_t n = begin; n < end; n++) {
    const int64_t last = std::clamp<int64_t>(w.row_ptr[n + 1], 0, w.elements);
    const int64_t first = std::clamp<int64_t>(w.row_ptr[n], 0, w.elements);
    int64_t i = first;
    Terms sums[kSums] = {};
    for (; i + kSums <= last; i += kSums)
      for (int to = 0; to < kSums; to++) sums[to] += term(i + to);
    for (; i < last; i++) sums[0] += term(i);
    Terms sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    float found[P];
    memcpy(found, &sum, sizeof sum);
    if (!std::all_of(found, found + P, [](float y) { return std::isfinite(y); })) {  // perhaps due to padding
      sum = Terms{};
      for (i = first; i < last; i++)
        if (uint32_t(column[i]) < columns) sum += term(i);
      memcpy(found, &sum, sizeof sum);
    }
    for (int64_t p = 0; p < count; p++) y[p * w.rows + n] = found[p];
  }
}

using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;
ffi::Error csr_multiply(ffi::ThreadPool pool, F32 x, F32 data, S32 column, S32 row_ptr, ffi::Result<F32> y) {
  const int64_t m = x.dimensions()[0], columns = x.dimensions()[1], rows = y->dimensions()[1], elements = data.element_count();
  if (int64_t(row_ptr.element_count()) != rows + 1 || int64_t(column.element_count()) != elements || y->dimensions()[0] != m)
    return ffi::Error::InvalidArgument("operands do not fit the rows of a sparse weight");
  const Csr w{data.typed_data(), column.typed_data(), row_ptr.typed_data(), rows, columns, elements};
  // If x has several rows, these are interleaved and multiplied four at a time.
  const int64_t together = m > 1 ? 4 : 1, size = (columns + 1) * together;
  std::vector<float> of_x(up(m, together) * size);
  for (int64_t p = 0; p < m; p++)
    for (int64_t k = 0; k < columns; k++) of_x[p / together * size + k * together + p % together] = x.typed_data()[p * columns + k];
  share(pool, rows, up(elements, std::max<int64_t>(1, rows)) * m, [&](int64_t begin, int64_t end) {
    if (m == 1) return multiply_rows<1>(w, of_x.data(), 1, y->typed_data(), begin, end);
    for (int64_t p = 0; p < m; p += 4)
      multiply_rows<4>(w, of_x.data() + p / 4 * size, std::min<int64_t>(4, m - p), y->typed_data() + p * rows, begin, end);
  });
  return ffi::Error::Success();
}
}  // namespace
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    quaxlike_csr_multiply, guarded(csr_multiply),
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Arg<S32>().Arg<S32>().Ret<F32>());
