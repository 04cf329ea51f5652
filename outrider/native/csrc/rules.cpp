// Laws and verification on the CPU, in one call each: what sampling.py and verify.py say, whose equations these are.
#include "sampling.h"

namespace outrider {
namespace {

constexpr int64_t kOneHot = 0, kWithoutReplacement = 2;                        // of Law
constexpr uint64_t kTarget = 1, kRace = 2, kAccept = 3;  // of Stream
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ULL;      // noise.py's constant

uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

double to_uniform(uint64_t bits) { return double((bits >> 16) & 0xFFFFFFFFFFFFULL) * 0x1p-48; }

}  // namespace

extern "C" struct Laws {
  float* law;         // [T, V]: logits, and then what is made of them
  const Taste* want;  // [T / each]: for so many laws after each other
  int32_t count, vocab, each;
};

extern "C" struct Trial {
  const int64_t *token, *parent, *law;  // [B, N]
  const int64_t* count;                 // [B]
  const float* p;                       // [T, V]
  const int64_t* p_at;                  // [B, 1 + N]: where in p a node's law lies
  const float* q;                       // [Q, V]
  const int64_t* q_at;                  // [B, N]: where in q the law of a guess lies; below 0, or null: nowhere
  const int64_t *seed, *first;          // [B]
  int64_t *path, *accepted, *bonus;     // [B, N], [B], [B]: what is found
  float* logprob;                       // [B, 1 + N]
  int32_t rows, nodes, vocab, rule;
};

namespace {

// One row of a trial.
class Judge {
 public:
  Judge(const Trial& t, int row)
      : token_(t.token + size_t(row) * t.nodes), parent_(t.parent + size_t(row) * t.nodes),
        law_(t.law + size_t(row) * t.nodes), count_(int(t.count[row])), nodes_(t.nodes), vocab_(t.vocab),
        p_(t.p), p_at_(t.p_at + size_t(row) * (1 + t.nodes)), q_(t.q), q_at_(t.q_at ? t.q_at + size_t(row) * t.nodes : nullptr),
        seed_(uint64_t(t.seed[row])), first_(uint64_t(t.first[row])), path_(t.path + size_t(row) * t.nodes),
        accepted_(t.accepted[row]), bonus_(t.bonus[row]), logprob_(t.logprob + size_t(row) * (1 + t.nodes)) {}

  void walk() {
    follow([&](const float* law, int ahead) { return draw(law, ahead); });
  }

  void coupled() {
    follow([&](const float* law, int ahead) { return race(law, ahead); });
  }

  // Down the guesses that are what `said` says of p there.
  template <class Said>
  void follow(Said said) {
    std::vector<int> path;
    for (int at = -1;;) {
      const int64_t sample = said(p(at), int(path.size()));
      const int child = find(at, sample);
      if (child < 0) return settle(path, sample);
      path.push_back(at = child);
    }
  }

  // P_i, S_i and the chances of Sun et al. 2024, algorithm 2.
  void block() {
    int length = 0;
    while (length < count_ && alive(length)) length++;
    std::vector<double> share(length + 1, 1.0);
    int kept = 0;
    for (int i = 1; i <= length; i++) {
      const double ratio = law_at(p(i - 2), i - 1) / own_chance(i - 1);
      share[i] = std::isnan(ratio) ? 0.0 : std::min(1.0, share[i - 1] * ratio);
    }
    for (int i = 1; i <= length; i++) {
      const double chance = i == length ? share[i] : share_of(excess(share[i], p(i - 1), i), share[i]);
      if (flip(i - 1) < gate(chance)) kept = i;
    }
    std::vector<int> path(kept);
    for (int i = 0; i < kept; i++) path[i] = i;
    const float* law = p(kept - 1);
    if (kept == length) return settle(path, draw(law, kept));
    const double left = excess(share[kept], law, kept);
    settle(path, draw(left > 0 ? rest_.data() : law, kept));
  }

  // Weng et al. 2025, algorithm 1.
  void traversal() {
    std::vector<double> share(1 + nodes_, 1.0);
    std::vector<std::vector<float>> left(1 + nodes_);    // what is left of p at a node, once it differs from p
    std::vector<std::vector<int64_t>> gone(1 + nodes_);  // tokens of its children that were drawn and rejected
    std::vector<char> waiting(nodes_, 0);
    for (int node = 0; node < count_; node++) waiting[node] = alive(node);
    auto law = [&](int at) { return left[at + 1].empty() ? p(at) : left[at + 1].data(); };
    int at = -1;
    for (;;) {
      int child = 0;
      while (child < count_ && !(waiting[child] && parent_[child] == at)) child++;
      if (child < count_) {
        const double offer = own_chance(child, gone[at + 1]);
        share[child + 1] = gate(share[at + 1] * law_at(law(at), child) / offer);
        waiting[child] = 0;
        at = child;
      } else if (at < 0 || flip(at) < gate(share[at + 1])) {
        break;
      } else {
        const int above = int(parent_[at]);
        std::vector<float> rest(vocab_);
        subtract(share[above + 1], law(above), at, gone[above + 1], rest.data());
        const double sum = total(rest.data());
        share[above + 1] = share_of(sum, share[above + 1]);
        if (sum > 0) {
          for (float& mass : rest) mass = float(mass / sum);
          left[above + 1] = std::move(rest);
        }
        if (law_[at] == kWithoutReplacement) gone[above + 1].push_back(token_[at]);
        at = above;
      }
    }
    std::vector<int> path;
    for (int node = at; node >= 0; node = int(parent_[node])) path.insert(path.begin(), node);
    const int64_t sample = draw(law(at), int(path.size()));
    settle(path, sample);
  }

 private:
  // p after a node; -1 is the root.
  const float* p(int node) const { return p_ + size_t(p_at_[node + 1]) * vocab_; }

  // What a node was drawn from.
  const float* q(int node) {
    if (q_at_ && q_at_[node] >= 0) return q_ + size_t(q_at_[node]) * vocab_;
    nothing_.resize(vocab_);
    return nothing_.data();
  }

  bool alive(int node) const { return token_[node] >= 0 && token_[node] < vocab_; }

  int find(int at, int64_t token) const {
    for (int node = 0; node < count_; node++)
      if (parent_[node] == at && token_[node] == token) return node;
    return -1;
  }

  static double gate(double chance) { return std::isnan(chance) ? 0.0 : std::clamp(chance, 0.0, 1.0); }

  static double share_of(double excess, double share) {
    const double whole = excess + 1 - share;
    return whole > 0 ? excess / whole : 1.0;
  }

  double law_at(const float* law, int node) const { return law[token_[node]]; }

  // q of a node at its own token, without the siblings that are gone where it was drawn so.
  double own_chance(int node, const std::vector<int64_t>& gone = {}) {
    if (law_[node] == kOneHot) return 1.0;
    const float* q = this->q(node);
    const double scale = law_[node] == kWithoutReplacement ? scale_without(q, gone) : 1.0;
    const bool out = scale > 0 && law_[node] == kWithoutReplacement &&
                     std::find(gone.begin(), gone.end(), token_[node]) != gone.end();
    return out ? 0.0 : q[token_[node]] * (scale > 0 ? scale : 1.0);
  }

  // 1 over what is left of q; 0 where nothing is, and q then stands as it is.
  double scale_without(const float* q, const std::vector<int64_t>& gone) const {
    if (gone.empty()) return 1.0;
    thread_local std::vector<float> left;
    left.assign(q, q + vocab_);
    for (int64_t token : gone) left[token] = 0;
    const double sum = total(left.data());
    return sum > 0 ? 1 / sum : 0.0;
  }

  // out = (share * law - q of the node)+
  void subtract(double share, const float* law, int node, const std::vector<int64_t>& gone, float* out) {
    const float a = float(share);
    if (law_[node] == kOneHot) {
      for (int v = 0; v < vocab_; v++) out[v] = a * law[v];
      out[token_[node]] = std::max(out[token_[node]] - 1, 0.0f);
      return;
    }
    const float* q = this->q(node);
    const bool without = law_[node] == kWithoutReplacement;
    const double scale = without ? scale_without(q, gone) : 1.0;
    const float b = float(scale > 0 ? scale : 1.0);
    for (int v = 0; v < vocab_; v++) out[v] = std::max(a * law[v] - b * q[v], 0.0f);
    if (without && scale > 0)
      for (int64_t token : gone) out[token] = a * law[token];
  }

  double excess(double share, const float* law, int node) {
    rest_.resize(vocab_);
    subtract(share, law, node, {}, rest_.data());
    return total(rest_.data());
  }

  double total(const float* mass) const { return outrider::total(mass, vocab_); }

  // The token `ahead` places after the round's first.
  int64_t draw(const float* law, int ahead) const {
    const uint64_t key = mix(mix(seed_ + kTarget * kGolden) + (first_ + uint64_t(ahead)) * kGolden);
    return outrider::draw(law, vocab_, to_uniform(key));
  }

  // The same by the exponential race: the first to arrive at -log(1 - u) / p. That is never before u / p, so most who
  // come too late are known without a logarithm.
  int64_t race(const float* law, int ahead) const {
    const uint64_t key = mix(mix(seed_ + kRace * kGolden) + (first_ + uint64_t(ahead)) * kGolden);
    double least = INFINITY;
    int64_t winner = 0;
    for (int v = 0; v < vocab_; v++) {
      const double uniform = to_uniform(mix(key + uint64_t(v) * kGolden)), mass = law[v];
      if (!(mass > 0) || uniform > least * mass * (1 + 1e-9)) continue;
      const double arrival = -std::log1p(-uniform) / mass;
      if (arrival < least) {
        least = arrival;
        winner = v;
      }
    }
    return winner;
  }

  double flip(int index) const {
    const uint64_t key = mix(mix(seed_ + kAccept * kGolden) + first_ * kGolden);
    return to_uniform(mix(key + uint64_t(index + 1) * kGolden));
  }

  void settle(const std::vector<int>& path, int64_t bonus) {
    std::fill(path_, path_ + nodes_, -1);
    std::fill(logprob_, logprob_ + 1 + nodes_, 0.0f);
    accepted_ = int64_t(path.size());
    bonus_ = bonus;
    int at = -1;
    for (size_t i = 0; i <= path.size(); i++) {
      const int64_t token = i < path.size() ? token_[path[i]] : bonus;
      logprob_[i] = std::log(p(at)[token]);
      if (i < path.size()) path_[i] = at = path[i];
    }
  }

  const int64_t *token_, *parent_, *law_;
  const int count_, nodes_, vocab_;
  const float* p_;
  const int64_t* p_at_;
  const float* q_;
  const int64_t* q_at_;
  const uint64_t seed_, first_;
  int64_t *path_, &accepted_, &bonus_;
  float* logprob_;
  std::vector<float> rest_, nothing_;
};

}  // namespace

extern "C" void outrider_shape(const Laws* laws) {
#pragma omp parallel for if (laws->count > 3)
  for (int i = 0; i < laws->count; i++) shape(laws->law + size_t(i) * laws->vocab, laws->vocab, laws->want[i / laws->each]);
}

extern "C" void outrider_judge(const Trial* trial) {
#pragma omp parallel for if (trial->rows > 3)
  for (int row = 0; row < trial->rows; row++) {
    Judge judge(*trial, row);
    if (trial->rule == 0) judge.walk();
    if (trial->rule == 1) judge.block();
    if (trial->rule == 2) judge.traversal();
    if (trial->rule == 3) judge.coupled();
  }
}

}  // namespace outrider
