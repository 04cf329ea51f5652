// The team of threads that runs a forward pass.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace outrider {

// A barrier that spins briefly and then sleeps. A pass waits at about a hundred barriers, each for a short time. If
// another process has taken the processor of a thread, the others must not burn theirs while they wait for it.
class Barrier {
 public:
  // Wait until `threads` threads have called. Pass the size of the team, since OpenMP may grant fewer threads than
  // requested.
  void wait(int threads) {
    const uint32_t generation = generation_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived_.store(0, std::memory_order_relaxed);
      generation_.store(generation + 1, std::memory_order_seq_cst);
      if (sleeping_.load(std::memory_order_seq_cst)) wake_all();
      return;
    }
    for (int spins = 0; spins < kMaxSpins; spins++) {
      if (generation_.load(std::memory_order_acquire) != generation) return;
      pause();
    }
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    while (generation_.load(std::memory_order_seq_cst) == generation) sleep(generation);
    sleeping_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  static constexpr int kMaxSpins = 1000;  // longer than the parts of a team differ on a quiet machine

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  // Return when `generation_` is no longer `generation`, or earlier.
  void sleep(uint32_t generation) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&generation_), FUTEX_WAIT_PRIVATE, generation, nullptr, nullptr, 0);
#else
    std::this_thread::yield();
#endif
  }

  void wake_all() {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&generation_), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#endif
  }

  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};  // may overflow to 0
  alignas(64) std::atomic<int> sleeping_{0};
};

// The team as one thread sees it.
struct Team {
  Barrier& barrier;
  int thread, threads;

  // Call work(i) for this thread's contiguous part of 0 .. count - 1. Return when all threads have finished.
  template <class Work>
  void share(int count, Work work) const {
    const int begin = int(int64_t(count) * thread / threads);
    const int end = int(int64_t(count) * (thread + 1) / threads);
    for (int i = begin; i < end; i++) work(i);
    barrier.wait(threads);
  }

  // Do the same with every `threads`-th item, for items whose cost changes slowly with the index.
  template <class Work>
  void share_interleaved(int count, Work work) const {
    for (int i = thread; i < count; i += threads) work(i);
    barrier.wait(threads);
  }
};

}  // namespace outrider
