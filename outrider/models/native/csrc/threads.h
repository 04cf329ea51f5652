// The team of threads that runs a forward pass.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

#include "places.h"

namespace outrider {

// The items first, first + stride, ... of a phase. A thread takes three quarters of the rest at a time, and at least
// `min_step` items.
struct Items {
  int first, stride, size, min_step;
};

// What the threads of a team share: the number of the current phase, and which of its items are taken.
//
// A pass is a sequence of about a hundred short phases. The items of a phase may run in any order, on any thread. Each
// thread owns a part of them. A thread that has finished its own part takes items of other parts, and a phase ends when
// all items are done. So the team does not wait for a thread that the scheduler has stopped, unless that thread has taken
// items. A thread that falls behind finds that its phases are over, and goes on to the current one.
class Phases {
 public:
  explicit Phases(int threads) : part_(threads), places_(threads) {}

  // Call this when a thread joins the team.
  void enter(int thread) { places_.enter(thread); }

  // The number of the current phase. It may overflow to 0.
  uint32_t current() const { return current_.load(std::memory_order_acquire); }

  // Run a phase of `count` items. Return when all of them are done. `part(owner)` are the items of a thread, and `work`
  // runs one of them. `patience` is how long the thread waits for the others before it takes their items; the call
  // updates it.
  //
  // A thread that has fallen behind may call with a wrong `count`, since later phases may have changed what it was
  // computed from. It is right while `phase` is the current phase.
  template <class PartOf, class Work>
  void run(int thread, int threads, uint32_t phase, int& patience, int count, PartOf& part, Work& work) {
    if (current() != phase) return;
    const int own = run_part(thread, thread, phase, part(thread), work);
    if (own || !count) finish(thread, phase, own, count);
    // Threads that all run end a phase at nearly the same time, and taking items of another one delays it a little.
    if (spin(phase, patience)) return;
    patience = run_other_parts(thread, threads, phase, count, part, work) ? 0 : kPatience;
    wait(thread, threads, phase, [&](int other) { return part_[other].busy.load(std::memory_order_relaxed); });
  }

  // Wait until all threads have called this.
  void join(int thread, int threads, uint32_t phase) {
    part_[thread].joined.store(phase, std::memory_order_relaxed);
    places_.leave(thread);
    finish(thread, phase, 1, threads);
    wait(thread, threads, phase,
         [&](int other) { return part_[other].joined.load(std::memory_order_relaxed) != phase; });
  }

  // Return how often threads have slept since the last call.
  int take_sleeps() { return sleeps_.exchange(0, std::memory_order_relaxed); }

  static constexpr int kPatience = 1000;  // spins; longer than the parts of a phase differ on a quiet machine

 private:
  static constexpr size_t kLines = 128;   // bytes of two cache lines, which some processors read together
  static constexpr int kMaxParts = 8;     // parts that a thread looks at; looking at all would cost large teams time
  static constexpr int kMaxSpins = 1000;  // before a thread sleeps
  static constexpr int kSleep = 300'000;  // nanoseconds after which a thread looks again whether another was stopped

  struct alignas(kLines) Part {
    std::atomic<uint64_t> taken{0};      // the phase in the upper half, and how many of its items are taken
    std::atomic<uint32_t> joined{0};     // the last phase of the team that the thread has joined
    std::atomic<uint32_t> fetched{0};    // the last phase in which another thread has fetched it
    std::atomic<bool> busy{false};       // has taken items of the current phase
  };

  // Run the items of a part that are not taken yet. Return how many there were.
  template <class Work>
  inline __attribute__((always_inline)) int run_part(int thread, int owner, uint32_t phase, const Items& items, Work& work) {
    int done = 0, begin, end;
    while (take(owner, phase, items, begin, end)) {
      part_[thread].busy.store(true, std::memory_order_relaxed);
      const int last = items.first + (end - 1) * items.stride;
      for (int item = items.first + begin * items.stride; item <= last; item += items.stride) work(item);
      done += end - begin;
    }
    return done;
  }

  // Run items of other threads. Return whether a thread had taken none of its own.
  template <class PartOf, class Work>
  __attribute__((noinline)) bool run_other_parts(int thread, int threads, uint32_t phase, int count, PartOf& part,
                                                 Work& work) {
    int all = 0;
    bool absent = false;
    for (int i = 1; i < std::min(threads, kMaxParts); i++) {
      const int owner = (thread + i) % threads;
      const Items items = part(owner);
      const int done = run_part(thread, owner, phase, items, work);
      absent |= done && done == items.size;
      all += done;
    }
    if (all) finish(thread, phase, all, count);
    return absent;
  }

  // Take items begin .. end - 1 of a part. Return false if there are none left.
  bool take(int owner, uint32_t phase, const Items& items, int& begin, int& end) {
    std::atomic<uint64_t>& taken = part_[owner].taken;
    uint64_t word = taken.load(std::memory_order_acquire);
    do {
      begin = uint32_t(word >> 32) == phase ? int(uint32_t(word)) : 0;
      if (begin >= items.size) return false;
      // If the phase has ended since the word was read, the word has changed.
      if (current() != phase) return false;
      const int rest = items.size - begin;
      end = begin + std::min(rest, std::max(items.min_step, (3 * rest + 3) / 4));
    } while (!taken.compare_exchange_weak(word, uint64_t(phase) << 32 | uint32_t(end), std::memory_order_acq_rel,
                                          std::memory_order_acquire));
    return true;
  }

  // Add items that a thread has finished. The last of them end the phase.
  void finish(int thread, uint32_t phase, int done, int count) {
    const bool last = finished_.fetch_add(done, std::memory_order_acq_rel) + done == count;
    part_[thread].busy.store(false, std::memory_order_relaxed);
    if (!last) return;
    if (count) finished_.store(0, std::memory_order_relaxed);
    if (current_.compare_exchange_strong(phase, phase + 1, std::memory_order_seq_cst) &&
        sleeping_.load(std::memory_order_seq_cst))
      wake_all();
  }

  // Wait for the end of a phase. `is_late` tells for another thread whether the phase waits for it.
  template <class IsLate>
  void wait(int thread, int threads, uint32_t phase, IsLate is_late) {
    if (spin(phase, kMaxSpins)) return;
    places_.move_apart(thread);
    int late = find_late(thread, threads, is_late);
    int64_t time = late < 0 ? 0 : places_.processor_time(late);
    if (spin(phase, kMaxSpins)) return;
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    sleeps_.fetch_add(1, std::memory_order_relaxed);
    while (current_.load(std::memory_order_seq_cst) == phase) {
      if (late >= 0 && places_.processor_time(late) == time && part_[late].fetched.exchange(phase) != phase)
        places_.fetch(thread, late);
      late = find_late(thread, threads, is_late);
      time = late < 0 ? 0 : places_.processor_time(late);
      sleep(phase);
    }
    sleeping_.fetch_sub(1, std::memory_order_relaxed);
    places_.move_apart(thread);
  }

  // Return the next thread that the phase waits for, or -1.
  template <class IsLate>
  static int find_late(int thread, int threads, IsLate is_late) {
    for (int i = 1; i < threads; i++)
      if (is_late((thread + i) % threads)) return (thread + i) % threads;
    return -1;
  }

  // Return whether the phase ended while the thread was spinning.
  bool spin(uint32_t phase, int spins) const {
    for (; spins > 0; spins--) {
      if (current() != phase) return true;
      pause();
    }
    return current() != phase;
  }

  // Wait for a moment and leave the core to its other thread. On ARM, `yield` does nothing on most cores; `isb` waits.
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
  }

  // Return when the phase has ended, after `kSleep`, or earlier.
  void sleep(uint32_t phase) {
#if defined(__linux__)
    const timespec timeout{0, kSleep};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&current_), FUTEX_WAIT_PRIVATE, phase, &timeout, nullptr, 0);
#else
    std::this_thread::yield();
#endif
  }

  void wake_all() {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&current_), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#endif
  }

  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
  alignas(kLines) std::atomic<uint32_t> current_{0};
  alignas(kLines) std::atomic<int> finished_{0};  // items of the current phase
  alignas(kLines) std::atomic<int> sleeping_{0};
  std::atomic<int> sleeps_{0};
  std::vector<Part> part_;
  Places places_;
};

// The team as one thread sees it. All threads call the same functions in the same order.
class Team {
 public:
  const int thread, threads;

  // `phase` is the current phase before any thread of the team has started.
  Team(Phases& phases, int thread, int threads, uint32_t phase)
      : thread(thread), threads(threads), phases_(phases), phase_(phase) {
    phases_.enter(thread);
  }

  // Call work(i) for i in 0 .. count - 1. Return when all calls have returned. Each thread owns a contiguous part.
  //
  // Other threads take the rest of a part if its thread is slow or stopped. A thread takes at least `min_step` of its
  // items at a time, since each step costs about as much as a cache miss; by default it takes all of them.
  template <class Work>
  void share(int count, Work work, int min_step = INT32_MAX) {
    run(count, work, [&](int owner) {
      const int begin = int(int64_t(count) * owner / threads);
      const int end = int(int64_t(count) * (owner + 1) / threads);
      return Items{begin, 1, end - begin, min_step};
    });
  }

  // Do the same, but each thread owns every `threads`-th item. Use it for items whose cost changes slowly with the index.
  template <class Work>
  void share_interleaved(int count, Work work, int min_step = 1) {
    run(count, work,
        [&](int owner) { return Items{owner, threads, (count - owner + threads - 1) / threads, min_step}; });
  }

  // Wait until all threads have called this, after which none touches the items of the pass.
  void join() {
    if (threads > 1) phases_.join(thread, threads, phase_++);
  }

 private:
  template <class Work, class PartOf>
  void run(int count, Work& work, PartOf part) {
    if (threads > 1) return phases_.run(thread, threads, phase_++, patience_, count, part, work);
    for (int i = 0; i < count; i++) work(i);
  }

  Phases& phases_;
  uint32_t phase_;
  int patience_ = Phases::kPatience;
};

}  // namespace outrider
