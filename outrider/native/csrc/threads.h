// The threads that run a pass together.
#pragma once

#include <atomic>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace outrider {

// Waiting is short, a hundred times a pass, and so it spins. OpenMP's own barriers fall asleep after a while, and on a
// busy machine each of them is then woken a scheduler's tick too late.
class Barrier {
 public:
  // Called by each of so many threads. The team says how many: OpenMP may grant fewer than were asked for.
  void wait(int threads) {
    const unsigned round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++) {
      if (spins < kPatience)
        pause();
      else
        std::this_thread::yield();
    }
  }

 private:
  static constexpr int kPatience = 2000;

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> round_{0};  // starts again at 0 after a day or so, which changes nothing
};

// One thread's view of the team.
struct Team {
  Barrier& barrier;
  int thread, threads;

  // Call work(i) for this thread's share of 0 .. count - 1; all have finished when it returns.
  template <class Work>
  void share(int count, Work work) const {
    for (int i = int(int64_t(count) * thread / threads), end = int(int64_t(count) * (thread + 1) / threads); i < end; i++)
      work(i);
    barrier.wait(threads);
  }

  // The same where neighbours are as much work as each other, and others are not.
  template <class Work>
  void deal(int count, Work work) const {
    for (int i = thread; i < count; i += threads) work(i);
    barrier.wait(threads);
  }
};

}  // namespace outrider
