// A text's suffix automaton, and trees of guesses from it: suffix_automaton.py and suffix_tree.py of propose/, number for
// number, in a hundredth of the time.
#include <algorithm>
#include <cstdint>
#include <queue>
#include <vector>

namespace outrider {

extern "C" struct Growth {
  const double* worth;           // by kind
  const uint32_t* said;          // what outputs say, one way behind the other
  const int32_t *words, *votes;  // how much each way says, and how many outputs say it
  int32_t *token, *parent, *kind, *ways;
  double* chance;
  int32_t sayings, agreed, budget, count;
};

namespace {

constexpr int kReach = 16, kBranches = 16, kLong = 6, kGrades = 4, kKinds = (kLong + 1) * (kGrades + 1);
constexpr double kLeast = 0.02;

struct State {
  int32_t first = -1, next = -1;  // the first token behind its strings, and where it leads to
  int32_t head = -1, tail = -1;   // the other ones
  int32_t link = 0, length = 0, count = 0;
};

struct Edge {
  int32_t state, token, next, sibling;
};

class Text {
 public:
  Text() : states_(1), table_(16, -1) { states_[0].link = -1; }

  void extend(const uint32_t* tokens, int32_t count) {
    for (int32_t i = 0; i < count; ++i) {
      last_ = append(last_, int32_t(tokens[i]));
      for (int32_t state = last_, reach = 0; state > 0 && reach < kReach; ++reach) {
        ++states_[state].count;
        state = states_[state].link;
      }
    }
  }

  const State& at(int32_t state) const { return states_[state]; }
  const Edge& edge(int32_t i) const { return edges_[i]; }
  int32_t longest() const { return std::max(states_[last_].link, 0); }

  int64_t bytes() const {
    return int64_t(states_.capacity() * sizeof(State) + edges_.capacity() * sizeof(Edge) + table_.capacity() * 4);
  }

 private:
  int32_t append(int32_t state, int32_t token) {
    const int32_t made = add(State());
    states_[made].length = states_[state].length + 1;
    for (; state >= 0; state = states_[state].link) {
      if (int32_t* known = follow(state, token)) {
        const int32_t link = ending(state, token, *known);
        states_[made].link = link;
        break;
      }
      connect(state, token, made);
    }
    return made;
  }

  int32_t ending(int32_t state, int32_t token, int32_t old) {
    const int32_t length = states_[state].length + 1;
    if (states_[old].length == length) return old;
    State copy = states_[old];
    copy.length = length;
    int32_t from = copy.head;
    copy.head = copy.tail = -1;
    const int32_t part = add(copy);
    for (; from >= 0; from = edges_[from].sibling) connect(part, edges_[from].token, edges_[from].next);
    states_[old].link = part;
    for (; state >= 0; state = states_[state].link) {
      int32_t* known = follow(state, token);
      if (known == nullptr || *known != old) break;
      *known = part;
    }
    return part;
  }

  int32_t add(const State& state) {
    states_.push_back(state);
    return int32_t(states_.size()) - 1;
  }

  int32_t* follow(int32_t state, int32_t token) {
    if (states_[state].first == token) return &states_[state].next;
    if (states_[state].head < 0) return nullptr;
    const int32_t found = table_[place(state, token)];
    return found < 0 ? nullptr : &edges_[found].next;
  }

  void connect(int32_t state, int32_t token, int32_t next) {
    State& from = states_[state];
    if (from.first < 0) {
      from.first = token;
      from.next = next;
      return;
    }
    const int32_t made = int32_t(edges_.size());
    edges_.push_back({state, token, next, -1});
    (from.head < 0 ? from.head : edges_[from.tail].sibling) = made;
    from.tail = made;
    if (2 * edges_.size() > table_.size()) {
      table_.assign(2 * table_.size(), -1);
      for (int32_t i = 0; i < made; ++i) table_[place(edges_[i].state, edges_[i].token)] = i;
    }
    table_[place(state, token)] = made;
  }

  size_t place(int32_t state, int32_t token) const {
    const size_t mask = table_.size() - 1;
    size_t at = (uint64_t(state) * 0x9E3779B97F4A7C15ULL + uint64_t(token)) * 0xBF58476D1CE4E5B9ULL >> 32 & mask;
    while (table_[at] >= 0 && (edges_[table_[at]].state != state || edges_[table_[at]].token != token))
      at = (at + 1) & mask;
    return at;
  }

  std::vector<State> states_;
  std::vector<Edge> edges_;
  std::vector<int32_t> table_;  // of edges, by state and token
  int32_t last_ = 0;
};

struct Step {
  int32_t token, kind, state, matched, ways;
  double chance;
};

struct Bud {
  double chance;
  int32_t age, parent, depth;
  Step step;

  bool operator<(const Bud& other) const { return chance != other.chance ? chance < other.chance : age > other.age; }
};

int32_t whole(int32_t matched) {
  int32_t digits = 0;
  while (digits < kLong && matched >> digits) ++digits;
  return digits * (kGrades + 1) + kGrades;
}

class Tree {
 public:
  Tree(const Text& text, Growth& growth) : text_(text), g_(growth), begin_(1, 0) {
    for (int32_t way = 0; way < g_.sayings; ++way) begin_.push_back(begin_.back() + g_.words[way]);
  }

  void grow() {
    const int32_t state = text_.longest();
    Bud place{1.0, 0, -1, 0, {0, 0, state, text_.at(state).length, (1 << g_.sayings) - 1, 1.0}};
    int32_t node = -1;
    while (g_.count < g_.budget) {
      if (place.chance >= kLeast) sprout(node, place);
      if (buds_.empty()) return;
      place = buds_.top();
      buds_.pop();
      node = g_.count++;
      g_.token[node] = place.step.token;
      g_.parent[node] = place.parent;
      g_.kind[node] = place.step.kind;
      g_.ways[node] = place.step.ways;
      g_.chance[node] = place.chance;
    }
  }

 private:
  void sprout(int32_t node, const Bud& place) {
    steps_.clear();
    if (place.step.matched) in_text(place.step.state, place.step.matched);
    if (place.step.ways) in_outputs(place.step.ways, place.depth);
    int32_t age = g_.count * 2 * kBranches;
    for (const Step& step : steps_) {
      const double chance = place.chance * step.chance;
      if (chance >= kLeast) buds_.push({chance, age++, node, place.depth + 1, step});
    }
  }

  double chance(int32_t kind, int32_t count, int32_t total) const {
    return std::min(g_.worth[kind] * count / total, 1.0);
  }

  void in_text(int32_t state, int32_t matched) {
    for (; text_.at(state).first < 0; matched = text_.at(state).length)
      if ((state = text_.at(state).link) <= 0) return;
    const State& from = text_.at(state);
    int32_t token[kBranches] = {from.first}, next[kBranches] = {from.next}, found = 1, total = 0;
    for (int32_t i = from.head; i >= 0 && found < kBranches; i = text_.edge(i).sibling, ++found)
      token[found] = text_.edge(i).token, next[found] = text_.edge(i).next;
    for (int32_t i = 0; i < found; ++i) total += text_.at(next[i]).count;
    if (found == kBranches) total = std::max(total, from.count);
    for (int32_t i = 0; i < found; ++i) {
      const int32_t count = text_.at(next[i]).count;
      if (count * kBranches < total) continue;
      const int32_t kind = whole(matched) - kGrades + count * kGrades / total;
      steps_.push_back({token[i], kind, next[i], matched + 1, 0, chance(kind, count, total)});
    }
  }

  void in_outputs(int32_t ways, int32_t depth) {
    groups_.clear();
    int32_t total = 0;
    for (int32_t way = 0; way < g_.sayings; ++way) {
      if (!(ways >> way & 1) || depth >= g_.words[way]) continue;
      const int32_t token = int32_t(g_.said[begin_[way] + depth]);
      auto known = std::find_if(groups_.begin(), groups_.end(), [&](const Step& step) { return step.token == token; });
      if (known == groups_.end()) known = groups_.insert(known, Step{token, 0, 0, 0, 0, 0.0});
      known->ways |= 1 << way;
      known->state += g_.votes[way];  // for now, its votes
      total += g_.votes[way];
    }
    for (const Step& group : groups_) {
      const int32_t kind = whole(g_.agreed + depth) + kKinds - kGrades + group.state * kGrades / total;
      join({group.token, kind, 0, 0, group.ways, chance(kind, group.state, total)});
    }
  }

  void join(Step other) {
    for (Step& step : steps_) {
      if (step.token != other.token) continue;
      step.ways = other.ways;
      if (other.chance > step.chance) step.chance = other.chance, step.kind = other.kind;
      return;
    }
    steps_.push_back(other);
  }

  const Text& text_;
  Growth& g_;
  std::vector<int32_t> begin_;  // of each way
  std::vector<Step> steps_, groups_;
  std::priority_queue<Bud> buds_;
};

}  // namespace
}  // namespace outrider

extern "C" {

void* outrider_text_open() { return new outrider::Text(); }

void outrider_text_close(void* text) { delete static_cast<outrider::Text*>(text); }

void outrider_text_extend(void* text, const uint32_t* tokens, int32_t count) {
  static_cast<outrider::Text*>(text)->extend(tokens, count);
}

int64_t outrider_text_bytes(void* text) { return static_cast<outrider::Text*>(text)->bytes(); }

void outrider_text_grow(void* text, outrider::Growth* growth) {
  growth->count = 0;
  outrider::Tree(*static_cast<outrider::Text*>(text), *growth).grow();
}
}
