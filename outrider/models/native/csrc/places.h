// The processors that the threads of a team run on.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <time.h>
#endif

namespace outrider {

// The processor that each thread of a team ran on when it was last seen.
//
// Another process that keeps a processor busy delays a team in two ways. The scheduler may put two threads of the team on
// one processor and leave them there for seconds: one of them moves apart. It may also stop a thread in the middle of its
// work for milliseconds: a thread that waits for it gives it its own processor.
//
// On systems other than Linux nothing moves.
class Places {
 public:
  explicit Places(int threads) : place_(threads) {}

#if defined(__linux__)
  // A thread joins the team. Until it leaves, others may move it.
  void enter(int thread) {
    place_[thread].id.store(pthread_self(), std::memory_order_relaxed);
    note(thread);
  }

  // A thread leaves the team. It must not end before all others have left.
  void leave(int thread) { place_[thread].id.store({}, std::memory_order_relaxed); }

  // Record where the calling thread runs.
  void note(int thread) {
    place_[thread].processor.store(sched_getcpu(), std::memory_order_relaxed);
  }

  // Move the calling thread to another processor if a thread of the team was last seen on the same one.
  void move_apart(int thread) {
    note(thread);
    const int here = place_[thread].processor.load(std::memory_order_relaxed);
    if (here < 0 || !is_shared(thread, here)) return;
    const Lock lock;
    const pthread_t self = pthread_self();
    cpu_set_t allowed, others;
    if (!lock.held || pthread_getaffinity_np(self, sizeof allowed, &allowed)) return;  // a large machine needs more
    others = allowed;
    CPU_CLR(here, &others);
    for (const Place& place : place_) {
      const int taken = place.processor.load(std::memory_order_relaxed);
      if (taken >= 0 && CPU_COUNT(&others) > 1) CPU_CLR(taken, &others);
    }
    if (!CPU_COUNT(&others) || pthread_setaffinity_np(self, sizeof others, &others)) return;
    pthread_setaffinity_np(self, sizeof allowed, &allowed);
    note(thread);
  }

  // Move a thread of the team to the processor of the calling thread, which is about to sleep.
  void fetch(int thread, int other) {
    note(thread);
    const pthread_t id = place_[other].id.load(std::memory_order_relaxed);
    const int here = place_[thread].processor.load(std::memory_order_relaxed);
    if (!id || here < 0 || place_[other].processor.load(std::memory_order_relaxed) == here) return;
    const Lock lock;
    cpu_set_t allowed, target;
    if (!lock.held || pthread_getaffinity_np(id, sizeof allowed, &allowed) || !CPU_ISSET(here, &allowed)) return;
    CPU_ZERO(&target);
    CPU_SET(here, &target);
    if (pthread_setaffinity_np(id, sizeof target, &target)) return;
    pthread_setaffinity_np(id, sizeof allowed, &allowed);
    place_[other].processor.store(here, std::memory_order_relaxed);
  }

  // Return the processor time of a thread in nanoseconds, or -1 if it is not in the team. It does not advance while the
  // thread is stopped.
  int64_t processor_time(int thread) const {
    const pthread_t id = place_[thread].id.load(std::memory_order_relaxed);
    clockid_t clock;
    timespec time{};
    if (!id || pthread_getcpuclockid(id, &clock) || clock_gettime(clock, &time)) return -1;
    return int64_t(time.tv_sec) * 1000000000 + time.tv_nsec;
  }
#else
  void enter(int) {}
  void leave(int) {}
  void move_apart(int) {}
  void fetch(int, int) {}
  int64_t processor_time(int) const { return -1; }
#endif

 private:
#if defined(__linux__)
  struct alignas(64) Place {
    std::atomic<int> processor{-1};
    std::atomic<pthread_t> id{};
  };

  // Only one thread of the process changes affinities at a time, so that none reads one that is being changed.
  struct Lock {
    const bool held = !taken().exchange(true, std::memory_order_acquire);
    ~Lock() {
      if (held) taken().store(false, std::memory_order_release);
    }
    static std::atomic<bool>& taken() {
      static std::atomic<bool> value{false};
      return value;
    }
  };

  bool is_shared(int thread, int processor) const {
    for (int i = 0; i < int(place_.size()); i++)
      if (i != thread && place_[i].processor.load(std::memory_order_relaxed) == processor) return true;
    return false;
  }
#else
  struct Place {};
#endif

  std::vector<Place> place_;
};

}  // namespace outrider
