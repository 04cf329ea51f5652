// Runs work on several threads. On Linux they are those of torch, which has the runtime library of OpenMP; two teams of
// threads would compete for the cores. On other systems they are threads of its own.
#pragma once

#include <algorithm>
#include <atomic>

#if defined(__linux__) && !defined(OUTRIDER_OWN_THREADS)
#define OUTRIDER_OPENMP 1
#else
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#endif

namespace outrider {

#if defined(OUTRIDER_OPENMP)

// Compilers call different functions for a parallel region. These are in the libraries of all of them, so any compiler
// builds kernels that run with torch's library.
extern "C" {
void GOMP_parallel(void (*work)(void*), void* argument, unsigned threads, unsigned flags);
int omp_get_max_threads();
int omp_get_num_threads();
int omp_get_thread_num();
}

inline int max_threads() { return omp_get_max_threads(); }

// Call work(thread, size) on each thread of a team, at the same time. The team has `threads` threads, or fewer.
template <class Work>
inline void run_team(int threads, Work work) {
  const auto call = [](void* argument) {
    (*static_cast<Work*>(argument))(omp_get_thread_num(), omp_get_num_threads());
  };
  GOMP_parallel(call, &work, unsigned(threads), 0);
}

#else

inline int max_threads() { return std::max(1, int(std::thread::hardware_concurrency())); }

// Threads that wait for a team. They run one team at a time.
class Workers {
 public:
  // The workers of the process. They are not destroyed, as they still wait when the process ends.
  static Workers& all() {
    static Workers& workers = *new Workers;
    return workers;
  }

  void run(int threads, const std::function<void(int)>& work) {
    const std::lock_guard<std::mutex> only_team(team_);
    std::unique_lock<std::mutex> lock(mutex_);
    for (; count_ < threads; count_++) std::thread(&Workers::serve, this, count_, number_).detach();
    work_ = &work;
    size_ = threads;
    running_ = threads - 1;
    number_++;
    lock.unlock();
    start_.notify_all();
    work(0);
    lock.lock();
    end_.wait(lock, [&] { return !running_; });
  }

 private:
  // Run the work of each team after team `number` that the thread belongs to.
  void serve(int thread, unsigned number) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      start_.wait(lock, [&] { return number_ != number; });
      number = number_;
      if (thread >= size_) continue;
      const auto& work = *work_;
      lock.unlock();
      work(thread);
      lock.lock();
      if (!--running_) end_.notify_one();
    }
  }

  std::mutex team_, mutex_;
  std::condition_variable start_, end_;
  const std::function<void(int)>* work_ = nullptr;
  int count_ = 1;  // threads, with the one that calls
  int size_ = 0, running_ = 0;
  unsigned number_ = 0;  // of the team
};

template <class Work>
inline void run_team(int threads, Work work) {
  if (threads <= 1) return work(0, 1);
  Workers::all().run(threads, [&](int thread) { work(thread, threads); });
}

#endif

// Call work(i) for i in 0 .. count - 1, in any order, on up to `threads` threads.
template <class Work>
inline void parallel_for(int count, Work work, int threads = max_threads()) {
  threads = std::min(threads, count);
  if (threads <= 1) {
    for (int i = 0; i < count; i++) work(i);
    return;
  }
  const int step = std::max(1, count / (16 * threads));  // few, so that all threads end at about the same time
  std::atomic<int> next{0};
  run_team(threads, [&](int, int) {
    for (int begin; (begin = next.fetch_add(step)) < count;)
      for (int i = begin; i < std::min(begin + step, count); i++) work(i);
  });
}

}  // namespace outrider
