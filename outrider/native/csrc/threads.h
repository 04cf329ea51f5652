// The team of threads that runs a forward pass.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace outrider {

// The processor that each thread of a team ran on when it was last seen.
//
// The scheduler may put two threads of a team on one processor, where each delays the other at every barrier. It does
// so when another process keeps a processor busy, and may leave them there for seconds. Then one of them moves.
class Places {
 public:
  explicit Places(int threads) : processor_(threads) {
    for (auto& processor : processor_) processor = -1;
  }

  void note(int thread) { processor_[thread].store(current(), std::memory_order_relaxed); }

  // Move the calling thread to another processor if a thread of the team was last seen on the same one.
  void move_apart(int thread) {
#if defined(__linux__)
    const int here = current();
    processor_[thread].store(here, std::memory_order_relaxed);
    if (here < 0 || !is_shared(thread, here)) return;
    cpu_set_t allowed, others;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return;  // a large machine needs a larger set
    others = allowed;
    CPU_CLR(here, &others);
    for (const auto& processor : processor_) {
      const int taken = processor.load(std::memory_order_relaxed);
      if (taken >= 0 && CPU_COUNT(&others) > 1) CPU_CLR(taken, &others);
    }
    if (!CPU_COUNT(&others) || sched_setaffinity(0, sizeof others, &others)) return;
    sched_setaffinity(0, sizeof allowed, &allowed);
    note(thread);
#endif
  }

 private:
  static int current() {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
  }

  bool is_shared(int thread, int processor) const {
    for (int i = 0; i < int(processor_.size()); i++)
      if (i != thread && processor_[i].load(std::memory_order_relaxed) == processor) return true;
    return false;
  }

  std::vector<std::atomic<int>> processor_;
};

// A barrier that spins briefly and then sleeps. A pass waits at about a hundred barriers, each for a short time. If
// another process has taken the processor of a thread, the other threads must not keep theirs busy while they wait.
class Barrier {
 public:
  explicit Barrier(int threads) : places_(threads) {}

  // Call this when a thread joins the team.
  void enter(int thread) { places_.note(thread); }

  // Wait until `threads` threads have called. Pass the size of the team, since OpenMP may grant fewer threads than
  // requested.
  void wait(int thread, int threads) {
    if (threads == 1) return;
    const uint32_t generation = generation_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived_.store(0, std::memory_order_relaxed);
      generation_.store(generation + 1, std::memory_order_seq_cst);
      if (sleeping_.load(std::memory_order_seq_cst)) wake_all();
      return;
    }
    if (spin(generation)) return;
    places_.move_apart(thread);
    if (spin(generation)) return;
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    sleeps_.fetch_add(1, std::memory_order_relaxed);
    while (generation_.load(std::memory_order_seq_cst) == generation) sleep(generation);
    sleeping_.fetch_sub(1, std::memory_order_relaxed);
    places_.note(thread);
  }

  // Return how often threads have slept since the last call.
  int take_sleeps() { return sleeps_.exchange(0, std::memory_order_relaxed); }

 private:
  static constexpr int kMaxSpins = 1000;  // longer than the parts of a team differ on a quiet machine

  // Return whether the barrier opened while the thread was spinning.
  bool spin(uint32_t generation) const {
    for (int spins = 0; spins < kMaxSpins; spins++) {
      if (generation_.load(std::memory_order_acquire) != generation) return true;
      pause();
    }
    return false;
  }

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
  std::atomic<int> sleeps_{0};
  Places places_;
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
    barrier.wait(thread, threads);
  }

  // Do the same with every `threads`-th item, for items whose cost changes slowly with the index.
  template <class Work>
  void share_interleaved(int count, Work work) const {
    for (int i = thread; i < count; i += threads) work(i);
    barrier.wait(thread, threads);
  }
};

// Chooses how many threads run the next pass.
//
// All threads run it as long as they seldom sleep at barriers. If they sleep, other processes take processors away, and
// a smaller team may be faster. Then passes of a smaller and of a larger team are timed in turn, and the faster size
// stays. A comparison that changes nothing is repeated after twice the time.
class TeamSize {
 public:
  explicit TeamSize(int threads) : threads_(threads), size_(threads) {}

  int threads() const { return trial_ ? trial_ : size_; }

  // Record a pass over `columns` columns. `sleeps` is how often its threads have slept.
  void record(int columns, double seconds, int sleeps) {
    if (threads_ == 1) return;
    double& usual = usual_[bucket(columns)];
    if (!usual) usual = seconds;
    if (size_ == threads_ && !trial_ && !sleeps) usual += (seconds - usual) / kMemory;
    spent_ += seconds;
    expected_ += usual;
    disturbed_ += (double(sleeps > 0) - disturbed_) / kMemory;
    if (spent_ < kWindow) return;
    const double slowdown = spent_ / expected_;
    spent_ = expected_ = 0;
    trial_ ? end_trial(slowdown) : begin_trial(slowdown);
  }

 private:
  static constexpr double kWindow = 0.03;      // seconds of passes that are compared
  static constexpr double kMemory = 32;        // passes
  static constexpr double kDisturbed = 0.1;    // share of passes with sleeping threads
  static constexpr double kFaster = 0.9;       // a size must be so much faster to be chosen
  static constexpr int kMinPause = 4, kMaxPause = 64;  // windows between two trials

  static int bucket(int columns) {
    int number = 0;
    while (columns >>= 1) number++;
    return number;
  }

  void begin_trial(double slowdown) {
    slowdown_ = slowdown;
    if (pause_ && --pause_) return;
    const bool may_shrink = size_ > 1 && disturbed_ > kDisturbed;
    if (!may_shrink && size_ == threads_) return;
    // Try a quarter less, half, and a third more in turn, so that the search does not end at a poor size.
    for (int tries = 0; tries < 3 && !trial_; tries++) {
      turn_ = (turn_ + 1) % 3;
      if (turn_ == 2 && size_ < threads_) trial_ = std::min(threads_, size_ + std::max(1, size_ / 3));
      if (turn_ != 2 && may_shrink) trial_ = size_ - std::max(1, size_ / (turn_ ? 2 : 4));
    }
  }

  void end_trial(double slowdown) {
    if (slowdown < kFaster * slowdown_) {
      size_ = trial_;
      wait_ = kMinPause;
    } else {
      wait_ = std::min(2 * wait_, kMaxPause);
    }
    pause_ = wait_;
    trial_ = 0;
  }

  const int threads_;
  int size_;
  int trial_ = 0;  // size that is tried in this window, or 0
  int pause_ = 0, wait_ = kMinPause;  // windows until the next trial, and after a trial
  int turn_ = -1;
  double slowdown_ = 1, spent_ = 0, expected_ = 0, disturbed_ = 0;
  std::array<double, 32> usual_{};  // seconds of an undisturbed pass, by the logarithm of its columns
};

}  // namespace outrider
