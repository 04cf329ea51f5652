// How many threads run a forward pass.
#pragma once

#include <algorithm>
#include <array>

namespace outrider {

// Chooses how many threads run the next pass.
//
// All threads run it as long as they seldom sleep. If they sleep, other processes take processors away, and
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
