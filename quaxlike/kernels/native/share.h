// Code shared by all XLA FFI handlers, for dividing rows between threads.
#pragma once
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include "xla/ffi/api/ffi.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif
namespace {
namespace ffi = xla::ffi;
inline int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }
// XLA's threads flush subnormal numbers to zero. Scales can be subnormal, so this disables flushing whilst in scope.
struct KeepsSubnormals {
#if defined(__x86_64__)
  unsigned before = _mm_getcsr();
  KeepsSubnormals() { _mm_setcsr(before & ~0x8040u); }
  ~KeepsSubnormals() { _mm_setcsr(before); }
#endif
};

// Wraps a handler so that it returns an error when out of memory. (An exception escaping to XLA would end the process.)
// The message is short enough not to be heap-allocated.
template <class... Args> auto guarded(ffi::Error (*handler)(Args...)) {
  return [handler](Args... args) {
    try {
      return handler(args...);
    } catch (const std::bad_alloc&) {
      return ffi::Error(ffi::ErrorCode::kResourceExhausted, "out of memory");
    }
  };
}

// Calls `work(begin, end)` on parts of the rows, using this thread and any free threads in the pool. This thread takes
// all parts that have not been started by another one, and so never waits for a thread that isn't running. Parts
// usually finish sooner than a thread could be woken, so it then yields a few times before it sleeps. Throws when out
// of memory, but only once all other threads have finished their parts: `work` refers to the caller's variables.
constexpr int kAwake = 200;  // how many times to yield before sleeping
template <class Work> void share(ffi::ThreadPool& pool, int64_t rows, int64_t columns, Work work) {
  const int64_t threads = std::max<int64_t>(1, pool.num_threads()), least = up(1 << 15, columns + 1);
  const int64_t part = up(std::max(up(rows, 4 * threads), least), 4) * 4, parts = up(rows, part);
  struct State {
    std::atomic<int64_t> next{0}, done{0};
    std::atomic<bool> exhausted{false};
    std::mutex mutex;
    std::condition_variable all;
  };
  auto state = std::make_shared<State>();
  std::function<void()> run = [=] {
    KeepsSubnormals kept;
    int64_t done = 0;
    for (int64_t i; (i = state->next++) < parts; done++) {
      try {
        work(i * part, std::min(rows, (i + 1) * part));
      } catch (const std::bad_alloc&) {
        state->exhausted = true;
      }
    }
    if (state->done.fetch_add(done) + done < parts) return;
    const std::lock_guard<std::mutex> lock(state->mutex);
    state->all.notify_one();
  };
  try {
    for (int64_t i = 1; i < std::min(threads, parts); i++) pool.Schedule(std::function<void()>(run));
  } catch (const std::bad_alloc&) {  // then make do with fewer threads
  }
  run();
  for (int i = 0; i < kAwake && state->done < parts; i++) std::this_thread::yield();
  {
    std::unique_lock<std::mutex> lock(state->mutex);
    state->all.wait(lock, [&] { return state->done == parts; });
  }
  if (state->exhausted) throw std::bad_alloc();
}
}  // namespace
