// The team of threads that runs a forward pass.
#pragma once

#include <atomic>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace outrider {

// A barrier that spins. A pass waits at about a hundred barriers, each for a short time. The barriers of OpenMP put a
// thread to sleep after a while, and on a busy machine it wakes up a scheduler tick too late.
class Barrier {
 public:
  // Wait until `threads` threads have called. Pass the size of the team, since OpenMP may grant fewer threads than
  // requested.
  void wait(int threads) {
    const unsigned generation = generation_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived_.store(0, std::memory_order_relaxed);
      generation_.store(generation + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; generation_.load(std::memory_order_acquire) == generation; spins++) {
      if (spins < kMaxSpins)
        pause();
      else
        std::this_thread::yield();
    }
  }

 private:
  static constexpr int kMaxSpins = 2000;

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> generation_{0};  // may overflow to 0
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
