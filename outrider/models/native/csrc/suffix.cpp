// The suffix automaton of a sequence, and draft trees from it. Computes exactly what suffix_automaton.py and
// suffix_tree.py of drafting/propose/lookup/ compute, about a hundred times faster.
#include <algorithm>
#include <cstdint>
#include <queue>
#include <vector>

namespace outrider {

// Inputs and outputs of `outrider_suffix_draft`. A continuation is how some finished outputs continued after a match.
extern "C" struct SuffixDraft {
  const double* calibration;        // by kind: acceptance probability divided by the share of the token
  const uint32_t* continuation;     // tokens of all continuations, one after another
  const int32_t *lengths, *outputs;  // [num_continuations] tokens, and finished outputs that continued so
  int32_t *token, *parent, *kind, *continuations;  // [budget]; `continuations` is a bit mask
  double* prob;                     // [budget] acceptance probability of the path
  int32_t num_continuations, matched_outputs, budget, count;  // matched_outputs: tokens that outputs have in common
};

namespace {

constexpr int kMaxCounted = 16;       // matches whose count a new token increases
constexpr int kBranches = 16;         // children of a node that are considered
constexpr int kMaxMatchBits = 6;      // bits of a match length that kinds distinguish
constexpr int kShareLevels = 4;       // levels of a token's share that kinds distinguish, besides all of it
constexpr int kKinds = (kMaxMatchBits + 1) * (kShareLevels + 1);
constexpr double kMinPathProb = 0.02;

struct State {
  int32_t first = -1, next = -1;  // the first transition: its token, and the state it leads to
  int32_t head = -1, tail = -1;   // first and last of the other transitions, in `edges_`
  int32_t link = 0, length = 0, count = 0;
};

struct Edge {
  int32_t state, token, next, sibling;
};

class SuffixAutomaton {
 public:
  SuffixAutomaton() : states_(1), table_(16, -1) { states_[0].link = -1; }

  void extend(const uint32_t* tokens, int32_t count) {
    for (int32_t i = 0; i < count; ++i) {
      last_ = append(last_, int32_t(tokens[i]));
      for (int32_t state = last_, counted = 0; state > 0 && counted < kMaxCounted; ++counted) {
        ++states_[state].count;
        state = states_[state].link;
      }
    }
  }

  const State& at(int32_t state) const { return states_[state]; }
  const Edge& edge(int32_t i) const { return edges_[i]; }

  // Return the state of the longest suffix that occurred before.
  int32_t longest() const { return std::max(states_[last_].link, 0); }

  int64_t bytes() const {
    return int64_t(states_.capacity() * sizeof(State) + edges_.capacity() * sizeof(Edge) + table_.capacity() * 4);
  }

 private:
  // Append a token to the sequence that ends in `state`. Return the state of the longer sequence.
  int32_t append(int32_t state, int32_t token) {
    const int32_t created = add_state(State());
    states_[created].length = states_[state].length + 1;
    for (; state >= 0; state = states_[state].link) {
      if (int32_t* next = find_transition(state, token)) {
        const int32_t link = split(state, token, *next);
        states_[created].link = link;
        break;
      }
      add_transition(state, token, created);
    }
    return created;
  }

  // Return the state of the longest string of `state` followed by `token`. Split it from `old` if `old` has longer
  // strings.
  int32_t split(int32_t state, int32_t token, int32_t old) {
    const int32_t length = states_[state].length + 1;
    if (states_[old].length == length) return old;
    State copy = states_[old];
    copy.length = length;
    int32_t from = copy.head;
    copy.head = copy.tail = -1;
    const int32_t shorter = add_state(copy);
    for (; from >= 0; from = edges_[from].sibling) add_transition(shorter, edges_[from].token, edges_[from].next);
    states_[old].link = shorter;
    for (; state >= 0; state = states_[state].link) {
      int32_t* next = find_transition(state, token);
      if (next == nullptr || *next != old) break;
      *next = shorter;
    }
    return shorter;
  }

  int32_t add_state(const State& state) {
    states_.push_back(state);
    return int32_t(states_.size()) - 1;
  }

  int32_t* find_transition(int32_t state, int32_t token) {
    if (states_[state].first == token) return &states_[state].next;
    if (states_[state].head < 0) return nullptr;
    const int32_t edge = table_[table_index(state, token)];
    return edge < 0 ? nullptr : &edges_[edge].next;
  }

  void add_transition(int32_t state, int32_t token, int32_t next) {
    State& from = states_[state];
    if (from.first < 0) {
      from.first = token;
      from.next = next;
      return;
    }
    const int32_t created = int32_t(edges_.size());
    edges_.push_back({state, token, next, -1});
    (from.head < 0 ? from.head : edges_[from.tail].sibling) = created;
    from.tail = created;
    if (2 * edges_.size() > table_.size()) {
      table_.assign(2 * table_.size(), -1);
      for (int32_t i = 0; i < created; ++i) table_[table_index(edges_[i].state, edges_[i].token)] = i;
    }
    table_[table_index(state, token)] = created;
  }

  // Return the index in the hash table of a transition, or a free index if it does not exist.
  size_t table_index(int32_t state, int32_t token) const {
    const size_t mask = table_.size() - 1;
    size_t at = (uint64_t(state) * 0x9E3779B97F4A7C15ULL + uint64_t(token)) * 0xBF58476D1CE4E5B9ULL >> 32 & mask;
    while (table_[at] >= 0 && (edges_[table_[at]].state != state || edges_[table_[at]].token != token))
      at = (at + 1) & mask;
    return at;
  }

  std::vector<State> states_;
  std::vector<Edge> edges_;
  std::vector<int32_t> table_;  // hash table of edges, by state and token
  int32_t last_ = 0;
};

// A token that may follow a node: its kind, the state it leads to and the match length there, the continuations that
// contain it, and its probability given the node.
struct NextToken {
  int32_t token, kind, state, matched, continuations;
  double prob;
};

// A draft token that may be added to the tree.
struct Candidate {
  double path_prob;
  int32_t age, parent, depth;
  NextToken next;

  bool operator<(const Candidate& other) const {
    return path_prob != other.path_prob ? path_prob < other.path_prob : age > other.age;
  }
};

// Return the kind of a token that always followed a match of this length. Kinds of smaller shares precede it.
int32_t full_share_kind(int32_t matched) {
  int32_t bits = 0;
  while (bits < kMaxMatchBits && matched >> bits) ++bits;
  return bits * (kShareLevels + 1) + kShareLevels;
}

// Builds a draft tree by adding the likeliest candidate until the budget is used.
class DraftTreeBuilder {
 public:
  DraftTreeBuilder(const SuffixAutomaton& automaton, SuffixDraft& draft)
      : automaton_(automaton), draft_(draft), begin_(1, 0) {
    for (int32_t i = 0; i < draft_.num_continuations; ++i) begin_.push_back(begin_.back() + draft_.lengths[i]);
  }

  void build() {
    const int32_t state = automaton_.longest();
    const int32_t all_continuations = (1 << draft_.num_continuations) - 1;
    Candidate current{1.0, 0, -1, 0, {0, 0, state, automaton_.at(state).length, all_continuations, 1.0}};
    int32_t node = -1;
    while (draft_.count < draft_.budget) {
      if (current.path_prob >= kMinPathProb) add_children(node, current);
      if (candidates_.empty()) return;
      current = candidates_.top();
      candidates_.pop();
      node = draft_.count++;
      draft_.token[node] = current.next.token;
      draft_.parent[node] = current.parent;
      draft_.kind[node] = current.next.kind;
      draft_.continuations[node] = current.next.continuations;
      draft_.prob[node] = current.path_prob;
    }
  }

 private:
  void add_children(int32_t node, const Candidate& candidate) {
    next_tokens_.clear();
    if (candidate.next.matched) add_from_sequence(candidate.next.state, candidate.next.matched);
    if (candidate.next.continuations) add_from_outputs(candidate.next.continuations, candidate.depth);
    int32_t age = draft_.count * 2 * kBranches;
    for (const NextToken& next : next_tokens_) {
      const double path_prob = candidate.path_prob * next.prob;
      if (path_prob >= kMinPathProb) candidates_.push({path_prob, age++, node, candidate.depth + 1, next});
    }
  }

  double prob(int32_t kind, int32_t count, int32_t total) const {
    return std::min(draft_.calibration[kind] * count / total, 1.0);
  }

  // Add the tokens that followed the longest match in the sequence itself that anything followed.
  void add_from_sequence(int32_t state, int32_t matched) {
    for (; automaton_.at(state).first < 0; matched = automaton_.at(state).length)
      if ((state = automaton_.at(state).link) <= 0) return;
    const State& from = automaton_.at(state);
    int32_t tokens[kBranches] = {from.first};
    int32_t states[kBranches] = {from.next};
    int32_t size = 1;
    int32_t total = 0;
    for (int32_t i = from.head; i >= 0 && size < kBranches; i = automaton_.edge(i).sibling, ++size) {
      tokens[size] = automaton_.edge(i).token;
      states[size] = automaton_.edge(i).next;
    }
    for (int32_t i = 0; i < size; ++i) total += automaton_.at(states[i]).count;
    if (size == kBranches) total = std::max(total, from.count);
    for (int32_t i = 0; i < size; ++i) {
      const int32_t count = automaton_.at(states[i]).count;
      if (count * kBranches < total) continue;
      const int32_t kind = full_share_kind(matched) - kShareLevels + count * kShareLevels / total;
      next_tokens_.push_back({tokens[i], kind, states[i], matched + 1, 0, prob(kind, count, total)});
    }
  }

  // Add the tokens at `depth` of the given continuations.
  void add_from_outputs(int32_t continuations, int32_t depth) {
    groups_.clear();
    int32_t total = 0;
    for (int32_t i = 0; i < draft_.num_continuations; ++i) {
      if (!(continuations >> i & 1) || depth >= draft_.lengths[i]) continue;
      const int32_t token = int32_t(draft_.continuation[begin_[i] + depth]);
      const auto has_token = [&](const Group& group) { return group.token == token; };
      auto group = std::find_if(groups_.begin(), groups_.end(), has_token);
      if (group == groups_.end()) group = groups_.insert(group, Group{token, 0, 0});
      group->continuations |= 1 << i;
      group->outputs += draft_.outputs[i];
      total += draft_.outputs[i];
    }
    for (const Group& group : groups_) {
      const int32_t kind = full_share_kind(draft_.matched_outputs + depth) + kKinds - kShareLevels +
                           group.outputs * kShareLevels / total;
      merge({group.token, kind, 0, 0, group.continuations, prob(kind, group.outputs, total)});
    }
  }

  // Add a token. If the sequence itself suggests it as well, keep the larger probability.
  void merge(NextToken other) {
    for (NextToken& next : next_tokens_) {
      if (next.token != other.token) continue;
      next.continuations = other.continuations;
      if (other.prob > next.prob) {
        next.prob = other.prob;
        next.kind = other.kind;
      }
      return;
    }
    next_tokens_.push_back(other);
  }

  // A token that continuations contain at some depth.
  struct Group {
    int32_t token, continuations, outputs;
  };

  const SuffixAutomaton& automaton_;
  SuffixDraft& draft_;
  std::vector<int32_t> begin_;  // of each continuation
  std::vector<NextToken> next_tokens_;
  std::vector<Group> groups_;
  std::priority_queue<Candidate> candidates_;
};

}  // namespace
}  // namespace outrider

extern "C" {

void* outrider_suffix_open() { return new outrider::SuffixAutomaton(); }

void outrider_suffix_close(void* automaton) { delete static_cast<outrider::SuffixAutomaton*>(automaton); }

void outrider_suffix_extend(void* automaton, const uint32_t* tokens, int32_t count) {
  static_cast<outrider::SuffixAutomaton*>(automaton)->extend(tokens, count);
}

int64_t outrider_suffix_bytes(void* automaton) { return static_cast<outrider::SuffixAutomaton*>(automaton)->bytes(); }

void outrider_suffix_draft(void* automaton, outrider::SuffixDraft* draft) {
  draft->count = 0;
  outrider::DraftTreeBuilder(*static_cast<outrider::SuffixAutomaton*>(automaton), *draft).build();
}
}
