// Sampling parameters and exact verification rules on the CPU. Each function computes what the Python function of the
// same name in verify/sampling.py or verify/rules.py does, in one call.
#include "adjust.h"
#include "parallel.h"
#include "sampling.h"

namespace outrider {
namespace {

constexpr int64_t kOneHot = 0, kWithoutReplacement = 2;     // of DraftKind in core/types.py
constexpr uint64_t kTarget = 1, kRace = 2, kAccept = 3;     // of NoiseStream in core/noise.py

}  // namespace

extern "C" struct Distributions {
  const float* logits;           // [count, vocab]
  float* probs;                  // [count, vocab]
  const SamplingParams* params;  // [count / nodes] one for each sequence
  int32_t count, vocab, nodes;   // each sequence has `nodes` distributions, one after another
};

// Log-probabilities of tokens, each at a row of logits.
extern "C" struct Logprobs {
  const float* logits;         // [rows, vocab]
  const int32_t *row, *token;  // [count]
  float* logprob;              // [count] result
  int32_t* top_id;             // [count, top] result: the likeliest ids, best first
  float* top_logprob;          // [count, top] result
  int32_t count, vocab, top;
};

// Copies of logits to change. Each row has a path of draft tokens after the text of its sequence.
extern "C" struct Adjustments {
  const Adjustment* sequence;     // [sequences]
  const float* logits;            // [count, vocab]
  float* adjusted;                // [count, vocab] result
  const int32_t *row, *of;        // [nodes] the row of a node, and its sequence
  const int32_t *begin, *depth;   // [nodes] where its path begins in `path`, and how long it is
  const int32_t* path;
  int32_t count, vocab, nodes;
};

extern "C" struct Verification {
  const int64_t *token, *parent, *kind;  // [B, N]
  const int64_t* count;                  // [B]
  const float* p;                        // [T, V]
  const int64_t* p_index;                // [B, 1 + N] index of each node in p
  const float* q;                        // [Q, V]
  const int64_t* q_index;                // [B, N] index of each draft token in q; negative, or null: it has none
  const int64_t *seed, *first;           // [B] see core/noise.py
  int64_t *path, *accepted, *bonus;      // [B, N], [B], [B] results
  float* logprob;                        // [B, 1 + N] result
  int32_t batch_size, nodes, vocab, rule;
};

namespace {

// Verifies the draft of one sequence. Node -1 is the root.
class SequenceVerifier {
 public:
  SequenceVerifier(const Verification& v, int b)
      : token_(v.token + size_t(b) * v.nodes),
        parent_(v.parent + size_t(b) * v.nodes),
        kind_(v.kind + size_t(b) * v.nodes),
        count_(int(v.count[b])),
        nodes_(v.nodes),
        vocab_(v.vocab),
        p_(v.p),
        p_index_(v.p_index + size_t(b) * (1 + v.nodes)),
        q_(v.q),
        q_index_(v.q_index ? v.q_index + size_t(b) * v.nodes : nullptr),
        seed_(uint64_t(v.seed[b])),
        first_(uint64_t(v.first[b])),
        path_(v.path + size_t(b) * v.nodes),
        accepted_(v.accepted[b]),
        bonus_(v.bonus[b]),
        logprob_(v.logprob + size_t(b) * (1 + v.nodes)) {}

  void walk() {
    follow_samples([&](const float* probs, int ahead) { return sample(probs, ahead); });
  }

  void coupled() {
    follow_samples([&](const float* probs, int ahead) { return sample_race(probs, ahead); });
  }

  // Sample a token from p at each node and descend while it is a child of the node.
  template <class Sampler>
  void follow_samples(Sampler sampler) {
    std::vector<int> path;
    for (int at = -1;;) {
      const int64_t token = sampler(p(at), int(path.size()));
      const int child = find_child(at, token);
      if (child < 0) return write_verdict(path, token);
      path.push_back(at = child);
    }
  }

  // P_i, S_i and the acceptance probabilities of Sun et al. 2024, algorithm 2.
  void block() {
    int length = 0;
    while (length < count_ && acceptable(length)) length++;
    std::vector<double> share(length + 1, 1.0);
    int accepted = 0;
    for (int i = 1; i <= length; i++) {
      const double ratio = prob_of(p(i - 2), i - 1) / draft_prob(i - 1);
      share[i] = std::isnan(ratio) ? 0.0 : std::min(1.0, share[i - 1] * ratio);
    }
    for (int i = 1; i <= length; i++) {
      const double prob = i == length ? share[i] : continue_prob(excess(share[i], p(i - 1), i), share[i]);
      if (accept_uniform(i - 1) < clamp_prob(prob)) accepted = i;
    }
    std::vector<int> path(accepted);
    for (int i = 0; i < accepted; i++) path[i] = i;
    const float* probs = p(accepted - 1);
    if (accepted == length) return write_verdict(path, sample(probs, accepted));
    const double residual_mass = excess(share[accepted], probs, accepted);
    write_verdict(path, sample(residual_mass > 0 ? residual_.data() : probs, accepted));
  }

  // Weng et al. 2025, algorithm 1.
  void traversal() {
    std::vector<double> share(1 + nodes_, 1.0);
    std::vector<std::vector<float>> residuals(1 + nodes_);   // replaces p at a node after a child is rejected
    std::vector<std::vector<int64_t>> rejected(1 + nodes_);  // rejected children that were sampled without replacement
    std::vector<char> unvisited(nodes_, 0);
    for (int node = 0; node < count_; node++) unvisited[node] = acceptable(node);
    auto probs_at = [&](int at) { return residuals[at + 1].empty() ? p(at) : residuals[at + 1].data(); };
    int at = -1;
    for (;;) {
      int child = 0;
      while (child < count_ && !(unvisited[child] && parent_[child] == at)) child++;
      if (child < count_) {
        const double offer = draft_prob(child, rejected[at + 1]);
        share[child + 1] = clamp_prob(share[at + 1] * prob_of(probs_at(at), child) / offer);
        unvisited[child] = 0;
        at = child;
      } else if (at < 0 || accept_uniform(at) < clamp_prob(share[at + 1])) {
        break;
      } else {
        const int above = int(parent_[at]);
        std::vector<float> residual(vocab_);
        subtract_draft(share[above + 1], probs_at(above), at, rejected[above + 1], residual.data());
        const double mass = total(residual.data());
        share[above + 1] = continue_prob(mass, share[above + 1]);
        if (mass > 0) {
          for (float& value : residual) value = float(value / mass);
          residuals[above + 1] = std::move(residual);
        }
        if (kind_[at] == kWithoutReplacement) rejected[above + 1].push_back(token_[at]);
        at = above;
      }
    }
    std::vector<int> path;
    for (int node = at; node >= 0; node = int(parent_[node])) path.insert(path.begin(), node);
    const int64_t token = sample(probs_at(at), int(path.size()));
    write_verdict(path, token);
  }

 private:
  // The target distribution after a node.
  const float* p(int node) const { return p_ + size_t(p_index_[node + 1]) * vocab_; }

  // The distribution that a draft token was sampled from; zeros if it has none.
  const float* q(int node) {
    if (q_index_ && q_index_[node] >= 0) return q_ + size_t(q_index_[node]) * vocab_;
    zeros_.resize(vocab_);
    return zeros_.data();
  }

  bool acceptable(int node) const { return token_[node] >= 0 && token_[node] < vocab_; }

  int find_child(int at, int64_t token) const {
    for (int node = 0; node < count_; node++)
      if (parent_[node] == at && token_[node] == token) return node;
    return -1;
  }

  static double clamp_prob(double prob) { return std::isnan(prob) ? 0.0 : std::clamp(prob, 0.0, 1.0); }

  // S / (S + 1 - P), where S is the excess and P the share.
  static double continue_prob(double excess, double share) {
    const double denominator = excess + 1 - share;
    return denominator > 0 ? excess / denominator : 1.0;
  }

  double prob_of(const float* probs, int node) const { return probs[token_[node]]; }

  // Return q(token) of a node. If it was sampled without replacement, q excludes the rejected siblings.
  double draft_prob(int node, const std::vector<int64_t>& rejected = {}) {
    if (kind_[node] == kOneHot) return 1.0;
    const float* q = this->q(node);
    const double scale = kind_[node] == kWithoutReplacement ? scale_without(q, rejected) : 1.0;
    const bool excluded = scale > 0 && kind_[node] == kWithoutReplacement &&
                          std::find(rejected.begin(), rejected.end(), token_[node]) != rejected.end();
    return excluded ? 0.0 : q[token_[node]] * (scale > 0 ? scale : 1.0);
  }

  // Return the factor that normalizes q without the rejected siblings. Return 0 if they have all the mass; q is then
  // used unchanged.
  double scale_without(const float* q, const std::vector<int64_t>& rejected) const {
    if (rejected.empty()) return 1.0;
    thread_local std::vector<float> remaining;
    remaining.assign(q, q + vocab_);
    for (int64_t token : rejected) remaining[token] = 0;
    const double sum = total(remaining.data());
    return sum > 0 ? 1 / sum : 0.0;
  }

  // out = (share * probs - q of the node)+
  void subtract_draft(double share, const float* probs, int node, const std::vector<int64_t>& rejected, float* out) {
    const float a = float(share);
    if (kind_[node] == kOneHot) {
      for (int v = 0; v < vocab_; v++) out[v] = a * probs[v];
      out[token_[node]] = std::max(out[token_[node]] - 1, 0.0f);
      return;
    }
    const float* q = this->q(node);
    const bool without_replacement = kind_[node] == kWithoutReplacement;
    const double scale = without_replacement ? scale_without(q, rejected) : 1.0;
    const float b = float(scale > 0 ? scale : 1.0);
    for (int v = 0; v < vocab_; v++) out[v] = std::max(a * probs[v] - b * q[v], 0.0f);
    if (without_replacement && scale > 0)
      for (int64_t token : rejected) out[token] = a * probs[token];
  }

  // Write (share * probs - q)+ to `residual_` and return its sum.
  double excess(double share, const float* probs, int node) {
    residual_.resize(vocab_);
    subtract_draft(share, probs, node, {}, residual_.data());
    return total(residual_.data());
  }

  double total(const float* mass) const { return outrider::total(mass, vocab_); }

  // Sample the token that is `ahead` positions after the first one of the round.
  int64_t sample(const float* probs, int ahead) const {
    const uint64_t key = mix(mix(seed_ + kTarget * kGolden) + (first_ + uint64_t(ahead)) * kGolden);
    return outrider::sample(probs, vocab_, to_uniform(key));
  }

  // Sample that token by an exponential race instead.
  int64_t sample_race(const float* probs, int ahead) const {
    const uint64_t key = mix(mix(seed_ + kRace * kGolden) + (first_ + uint64_t(ahead)) * kGolden);
    return outrider::sample_race(probs, vocab_, key);
  }

  // Return the uniform number of acceptance decision `index`.
  double accept_uniform(int index) const {
    const uint64_t key = mix(mix(seed_ + kAccept * kGolden) + first_ * kGolden);
    return to_uniform(mix(key + uint64_t(index + 1) * kGolden));
  }

  void write_verdict(const std::vector<int>& path, int64_t bonus) {
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

  const int64_t *token_, *parent_, *kind_;
  const int count_, nodes_, vocab_;
  const float* p_;
  const int64_t* p_index_;
  const float* q_;
  const int64_t* q_index_;
  const uint64_t seed_, first_;
  int64_t *path_, &accepted_, &bonus_;
  float* logprob_;
  std::vector<float> residual_, zeros_;
};

}  // namespace

// Return on how many threads some sequences or distributions are processed. Few take less time than waking a team.
static int threads_for(int count) { return count > 3 ? max_threads() : 1; }

extern "C" void outrider_adjust(const Adjustments* all) {
  std::copy_n(all->logits, size_t(all->count) * all->vocab, all->adjusted);
  const auto change = [&](int n) {
    adjust(all->adjusted + size_t(all->row[n]) * all->vocab, all->vocab, all->sequence[all->of[n]],
           all->path + all->begin[n], all->depth[n]);
  };
  parallel_for(all->nodes, change, threads_for(all->nodes));
}

extern "C" void outrider_target_probs(const Distributions* d) {
  const auto transform = [&](int i) {
    const size_t begin = size_t(i) * d->vocab;
    std::copy_n(d->logits + begin, d->vocab, d->probs + begin);
    apply_sampling(d->probs + begin, d->vocab, d->params[i / d->nodes]);
  };
  parallel_for(d->count, transform, threads_for(d->count));
}

extern "C" void outrider_logprobs(const Logprobs* l) {
  const auto compute = [&](int i) {
    l->logprob[i] = logprobs(l->logits + size_t(l->row[i]) * l->vocab, l->vocab, l->token[i], l->top,
                             l->top_id + size_t(i) * l->top, l->top_logprob + size_t(i) * l->top);
  };
  parallel_for(l->count, compute, threads_for(l->count));
}

extern "C" void outrider_verify(const Verification* verification) {
  const auto verify = [&](int b) {
    SequenceVerifier verifier(*verification, b);
    if (verification->rule == 0) verifier.walk();
    if (verification->rule == 1) verifier.block();
    if (verification->rule == 2) verifier.traversal();
    if (verification->rule == 3) verifier.coupled();
  };
  parallel_for(verification->batch_size, verify, threads_for(verification->batch_size));
}

}  // namespace outrider
