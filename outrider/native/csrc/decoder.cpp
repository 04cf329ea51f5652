// One pass of a Llama-like decoder over rows at different lengths, from tokens to logits in one call.
//
// The residual stream is float32; what a layer reads is rounded to bfloat16, or to bytes where its weights are bytes, and
// not at all where its weights are float32. Keys, values and queries are bfloat16, and float32 in a model that is.
// A column's result does not depend, in any bit, on which other columns share the pass.
#include <omp.h>

#include "attention.h"
#include "sampling.h"
#include "linear.h"
#include "threads.h"

using namespace outrider;

extern "C" {

struct Layer {
  Linear qkv, out, gate_up, down;
  const float *attention_norm, *mlp_norm;  // [hidden]
  const float *query_norm, *key_norm;      // [dim] or null
  int32_t window;
};

// Keys and values of all layers, in blocks that rows may share.
struct Pool {
  void* entries;         // [blocks][layers][key heads][keys, values][kBlock * dim], as in attention.h
  const int32_t* table;  // [slots][reach] of blocks
  int32_t layers, reach;
  int32_t bits;          // of an element: 16 is bfloat16, 32 float
};

// How a token's embedding meets the state before it, in a draft that was trained on another model's states.
struct Entry {
  Linear fuse;                // [hidden][tapped]; no outputs: what is tapped is the state
  Linear project;             // [hidden][2 hidden]; no outputs: they meet at the first attention's input
  const float *last_norm, *tap_norm;         // [tap]: of the last tap; [tapped]: of `normed` numbers at a time; or null
  const float *embedding_norm, *state_norm;  // [hidden] or null
  int32_t tapped, tap, normed;
  int32_t embedding_first, zero_first, residual_normed, recycle_normed;
};

struct Model {
  const Layer* layer;
  const void* embedding;      // [vocab][hidden], of the pool's elements
  const float* norm;          // [hidden], or null: the head reads the last layer's output as it is
  const float* frequency;     // [dim / 2]
  const Entry* entry;         // null: embeddings alone enter
  const int32_t* id;          // [head.out]: what the head's outputs are called; null: their own numbers
  const Pool* pool;
  Linear head;
  int32_t layers, hidden, heads, key_heads, dim, ffn, threads;
  float epsilon, scale, rotary_scale;
};

// One pass. A column is a token to read, at a position, written at a place of its slot.
struct Pass {
  const int32_t *token, *position, *slot, *place, *seen, *tail_begin, *tail;  // [columns]
  const int32_t* keep;       // [kept]: the columns whose logits are wanted
  float* logits;             // [kept][vocab]
  int32_t* best;             // [kept]: the likeliest id, -1 where logits are not numbers
  const int32_t* exported;   // [exports]: layers, counted from 0, whose output is wanted
  float* features;           // [exports][columns][hidden]
  const float* state;        // [columns][hidden]: what stood before each column, where the model has an entry
  int32_t tapped;            // whether it is [columns][Entry::tapped], as it was tapped
  int32_t columns, kept, exports;
};

// Rows that go on by themselves after a pass that keeps one column of each.
struct Chain {
  const int32_t *slot, *position, *place;  // [rows]: of the next token
  const int32_t* budget;                   // [rows]: tokens wanted, at least one
  const float *weight, *bias;              // [kinds]: of a guess's chance by its margin; the last kind goes on
  const int32_t* end;                      // [ends]: ids after which nothing comes
  int32_t *token, *count, *looked;         // [rows][depth]; [rows]: guesses worth their place; guesses looked at
  float *margin, *chance;                  // [rows][depth]: how far the guess lay before the next one; of the path
  const float* worth;                      // [rows]: a row stops after a chance below, where 1, 2, ... rows go on
  const Taste* want;                       // [rows]: how guesses are drawn; no pointer: the likeliest are taken
  const double* uniform;                   // [rows][depth]: what each one is drawn with
  float* law;                              // [guesses drawn][vocab]: what they were drawn from
  int32_t* law_at;                         // [rows][depth]: where it lies; below 0 for what was not drawn
  float keep;                              // a guess with a chance below is not counted
  int32_t rows, depth, vocab, kinds, ends;  // ids below vocab are chosen from
};
}

namespace {

struct Runner {
  virtual ~Runner() = default;
  virtual void run(const Pass& pass) = 0;
  virtual void grow(Pass pass, const Chain& chain) = 0;
};

template <class Element>
class Decoder final : public Runner {
 public:
  explicit Decoder(const Model& model) : m_(model), choice_(model.head.out) {
    for (int i = 0; i < m_.threads; i++) scratch_.emplace_back(m_.dim);
  }

  void run(const Pass& pass) override {
    reserve(pass.columns);
    cut(pass);
#pragma omp parallel num_threads(m_.threads)
    {
      const Team team{barrier_, omp_get_thread_num(), omp_get_num_threads()};
      if (pass.tapped) fuse(team, pass);
      begin(team, pass);
      if (m_.entry && m_.entry->project.out) {
        pack(team, pass.columns, pair_.data(), 2 * m_.hidden, m_.entry->project.bits);
        apply<Then::kStore>(team, m_.entry->project, rows_, pass.columns, stream_.data(), m_.hidden);
      }
      for (int i = 0; i < m_.layers; i++) {
        attention(team, pass, i, !i && m_.entry && !m_.entry->project.out);
        mlp(team, pass, m_.layer[i]);
        hand_out(team, pass, i);
      }
      head(team, pass);
    }
  }

  // Guess: the first token of each row follows from `pass`, every other one from a pass over the one before.
  void grow(Pass pass, const Chain& chain) override {
    std::vector<int32_t> active(chain.rows), fields[6];
    int laws = 0;
    for (int b = 0; b < chain.rows; b++) active[b] = b;
    logits_.resize(size_t(chain.rows) * m_.head.out);
    best_.resize(chain.rows);
    pass.logits = logits_.data();
    pass.best = best_.data();
    choice_ = std::min(chain.vocab, m_.head.out);
    for (int depth = 0;; depth++) {
      run(pass);
      std::vector<char> over(chain.rows);
      const int going = int(active.size());
      for (int b : active)
        if (chain.want && chain.want[b].temperature > 0) chain.law_at[b * chain.depth + depth] = laws++;
#pragma omp parallel for num_threads(m_.threads) if (chain.want && going > 1)
      for (int i = 0; i < going; i++)
        over[active[i]] =
            guess(chain, active[i], depth, best_[i], &logits_[size_t(i) * m_.head.out], chain.worth[going - 1]);
      const auto done = [&](int b) { return chain.budget[b] <= depth + 1 || over[b]; };
      std::vector<int32_t> kept;  // the columns that rows go on from
      for (size_t i = 0; i < active.size(); i++)
        if (!done(active[i])) kept.push_back(pass.keep[i]);
      active.erase(std::remove_if(active.begin(), active.end(), done), active.end());
      if (active.empty()) break;
      for (auto& field : fields) field.clear();
      for (size_t i = 0; i < active.size(); i++) {
        const int b = active[i];
        const int32_t column[] = {chain.token[b * chain.depth + depth], chain.position[b] + depth, chain.slot[b],
                                  chain.place[b] + depth, chain.place[b] + depth + 1, int32_t(i)};
        for (int f = 0; f < 6; f++) fields[f].push_back(column[f]);
      }
      const int count = int(active.size());
      none_.assign(count + 1, 0);
      if (m_.entry) recycle(kept);
      pass = {fields[0].data(), fields[1].data(), fields[2].data(), fields[3].data(), fields[4].data(), none_.data(),
              nullptr, fields[5].data(), logits_.data(), best_.data(), nullptr, nullptr, states_.data(), 0, count, count, 0};
    }
    choice_ = m_.head.out;
  }

 private:
  // The states behind some columns of a pass, for the pass after it.
  void recycle(const std::vector<int32_t>& kept) {
    states_.resize(kept.size() * m_.hidden);
    for (size_t i = 0; i < kept.size(); i++)
      hand_on(&stream_[size_t(kept[i]) * m_.hidden], m_.entry->recycle_normed ? m_.norm : nullptr, m_.hidden,
              &states_[i * m_.hidden]);
  }

  // Write down one guess, and whether it is worth its place; returns whether its row stops.
  bool guess(const Chain& chain, int b, int depth, int best, const float* logits, float worth) const {
    const size_t at = size_t(b) * chain.depth + depth;
    chain.token[at] = choose(chain, b, at, best, logits);
    chain.margin[at] = best < 0 ? 0.0f : logits[best] - largest_but(logits, std::min(chain.vocab, m_.head.out), best);
    const int kind = std::min(depth, chain.kinds - 1);
    const float odds = chain.weight[kind] * chain.margin[at] + chain.bias[kind];
    chain.chance[at] = (depth ? chain.chance[at - 1] : 1.0f) / (1 + std::exp(-odds));
    chain.count[b] = depth + (chain.chance[at] >= chain.keep);
    chain.looked[b] = depth + 1;
    const auto* end = chain.end + chain.ends;
    return chain.count[b] <= depth || chain.chance[at] < worth || std::find(chain.end, end, chain.token[at]) != end;
  }

  // The likeliest id, or one drawn from the law of all.
  int32_t choose(const Chain& chain, int b, size_t at, int best, const float* logits) const {
    const int32_t sure = m_.id ? m_.id[std::max(0, best)] : std::max(0, best);
    if (!chain.want || chain.law_at[at] < 0) return sure;
    float* law = chain.law + size_t(chain.law_at[at]) * chain.vocab;
    if (best < 0) {  // not numbers: then this is what is guessed for certain
      std::fill(law, law + chain.vocab, 0.0f);
      law[sure] = 1;
      return sure;
    }
    const int said = std::min(chain.vocab, m_.head.out);
    if (!m_.id) {
      std::copy(logits, logits + said, law);
      std::fill(law + said, law + chain.vocab, -INFINITY);
      shape(law, chain.vocab, chain.want[b]);
      return int32_t(draw(law, chain.vocab, chain.uniform[at]));
    }
    thread_local std::vector<float> few;  // what cannot be guessed needs no shaping
    const auto* end = std::lower_bound(m_.id, m_.id + said, chain.vocab);
    few.assign(logits, logits + (end - m_.id));
    shape(few.data(), int(few.size()), chain.want[b]);
    std::fill(law, law + chain.vocab, 0.0f);
    for (size_t i = 0; i < few.size(); i++) law[m_.id[i]] = few[i];
    return m_.id[draw(few.data(), int(few.size()), chain.uniform[at])];
  }

  static float largest_but(const float* logits, int vocab, int best) {
    Floats most = fill(-INFINITY);
    int i = 0;
    for (; i + kLanes <= vocab; i += kLanes) {
      if (best - i >= 0 && best - i < kLanes) {
        float some[kLanes];
        store(some, load(logits + i));
        some[best - i] = -INFINITY;
        most = maximum(most, load(some));
      } else {
        most = maximum(most, load(logits + i));
      }
    }
    float out = largest(most);
    for (; i < vocab; i++) out = i == best ? out : std::max(out, logits[i]);
    return out;
  }

  // What takes a team is called by all its threads.

  void begin(const Team& team, const Pass& pass) {
    const int half = m_.dim / 2;
    team.share(pass.columns, [&](int c) {
      const Element* from = static_cast<const Element*>(m_.embedding) + size_t(pass.token[c]) * m_.hidden;
      for (int i = 0; i < m_.hidden; i++) stream_[size_t(c) * m_.hidden + i] = widen(from[i]);
      if (m_.entry) join(pass, c);
      for (int i = 0; i < half; i++) {
        const float angle = float(pass.position[c]) * m_.frequency[i];
        cosine_[c * half + i] = std::cos(angle) * m_.rotary_scale;
        sine_[c * half + i] = std::sin(angle) * m_.rotary_scale;
      }
    });
  }

  // States of what was tapped.
  void fuse(const Team& team, const Pass& pass) {
    const Entry& entry = *m_.entry;
    const int size = entry.tapped, last = size - entry.tap;
    team.share(pass.columns, [&](int c) {
      float* x = &tapped_[size_t(c) * size];
      std::memcpy(x, pass.state + size_t(c) * size, 4 * size_t(size));
      if (entry.last_norm) root_mean_square(x + last, entry.last_norm, entry.tap, x + last);
      for (int i = 0; entry.tap_norm && i < size; i += entry.normed)
        root_mean_square(x + i, entry.tap_norm + i, entry.normed, x + i);
      if (entry.fuse.out)
        pack_row(rows_, c, x, size, entry.fuse.bits);
      else
        std::memcpy(&fused_[size_t(c) * size], x, 4 * size_t(size));
    });
    if (entry.fuse.out) apply<Then::kStore>(team, entry.fuse, rows_, pass.columns, fused_.data(), m_.hidden);
  }

  // Put a column's embedding, which lies in the stream, beside the state before it; what goes on is the stream.
  void join(const Pass& pass, int c) {
    const Entry& entry = *m_.entry;
    const int size = m_.hidden;
    float *stream = &stream_[size_t(c) * size], *pair = &pair_[size_t(c) * 2 * size];
    float *embedding = pair + (entry.embedding_first ? 0 : size), *state = pair + (entry.embedding_first ? size : 0);
    const float* given = (pass.tapped ? fused_.data() : pass.state) + size_t(c) * size;
    if (entry.zero_first && !pass.position[c])
      std::memset(embedding, 0, 4 * size_t(size));
    else
      hand_on(stream, entry.embedding_norm, size, embedding);
    hand_on(given, entry.state_norm, size, state);
    std::memcpy(stream, entry.residual_normed ? state : given, 4 * size_t(size));
  }

  void attention(const Team& team, const Pass& pass, int number, bool joined) {
    const Layer& layer = m_.layer[number];
    const int width = m_.heads * m_.dim, all = width + 2 * m_.key_heads * m_.dim;
    if (joined)
      pack(team, pass.columns, pair_.data(), 2 * m_.hidden, layer.qkv.bits);
    else
      normalise(team, pass.columns, nullptr, layer.attention_norm, layer.qkv.bits);
    apply<Then::kStore>(team, layer.qkv, rows_, pass.columns, wide_.data(), all);
    const int lots = m_.heads + 2 * m_.key_heads;
    team.share(pass.columns * lots, [&](int i) { place(pass, number, i / lots, i % lots); });
    const Columns columns{pass.position, pass.seen, pass.tail_begin, pass.tail};
    const Heads heads{m_.heads, m_.key_heads, m_.dim, m_.scale, layer.window};
    team.deal(int(tiles_.size()) * m_.key_heads, [&](int i) {
      const Tile& tile = tiles_[i / m_.key_heads];
      attend(columns, tile, i % m_.key_heads, heads, entries(pass.slot[tile.first], number), query_.data(),
             wide_.data(), scratch_[team.thread]);
    });
    pack(team, pass.columns, wide_.data(), width, layer.out.bits);
    apply<Then::kAdd>(team, layer.out, rows_, pass.columns, stream_.data(), m_.hidden);
  }

  Entries<Element> entries(int slot, int layer) const {
    const Pool& pool = *m_.pool;
    const int64_t one = int64_t(2) * m_.key_heads * kBlock * m_.dim;  // elements that a block has of a layer
    Element* first = static_cast<Element*>(pool.entries) + layer * one;
    return {first, pool.table + int64_t(slot) * pool.reach, pool.layers * one, m_.dim};
  }

  void mlp(const Team& team, const Pass& pass, const Layer& layer) {
    normalise(team, pass.columns, nullptr, layer.mlp_norm, layer.gate_up.bits);
    apply<Then::kGate>(team, layer.gate_up, rows_, pass.columns, wide_.data(), m_.ffn);
    pack(team, pass.columns, wide_.data(), m_.ffn, layer.down.bits);
    apply<Then::kAdd>(team, layer.down, rows_, pass.columns, stream_.data(), m_.hidden);
  }

  void hand_out(const Team& team, const Pass& pass, int layer) {
    for (int e = 0; e < pass.exports; e++) {
      if (pass.exported[e] != layer) continue;
      team.share(pass.columns, [&](int c) {
        const size_t size = m_.hidden;
        std::memcpy(pass.features + (size_t(e) * pass.columns + c) * size, &stream_[c * size], 4 * size);
      });
    }
  }

  void head(const Team& team, const Pass& pass) {
    normalise(team, pass.kept, pass.keep, m_.norm, m_.head.bits);
    apply<Then::kStore>(team, m_.head, rows_, pass.kept, pass.logits, m_.head.out);
    team.share(pass.kept, [&](int k) { pass.best[k] = likeliest(pass.logits + size_t(k) * m_.head.out, choice_); });
  }

  // Rows of the residual stream, x / rms(x) * weight (Zhang and Sennrich 2019), ready for a linear layer. Without
  // weights, rows as they are.
  void normalise(const Team& team, int rows, const int32_t* which, const float* weight, int bits) {
    team.share(rows, [&](int r) {
      float* out = &normed_[size_t(team.thread) * m_.hidden];
      const float* from = &stream_[size_t(which ? which[r] : r) * m_.hidden];
      if (weight) root_mean_square(from, weight, m_.hidden, out);
      pack_row(rows_, r, weight ? out : from, m_.hidden, bits);
    });
  }

  // The same of one row; without weights, the row as it is.
  void hand_on(const float* x, const float* weight, int size, float* out) const {
    if (weight) return root_mean_square(x, weight, size, out);
    std::memcpy(out, x, 4 * size_t(size));
  }

  void root_mean_square(const float* x, const float* weight, int size, float* out) const {
    Floats squares = {};
    for (int i = 0; i < size; i += kLanes) squares += load(x + i) * load(x + i);
    const float scale = 1 / std::sqrt(sum(squares) / size + m_.epsilon);
    for (int i = 0; i < size; i += kLanes) store(out + i, load(x + i) * scale * load(weight + i));
  }

  void pack(const Team& team, int rows, const float* x, int size, int bits) {
    team.share(rows, [&](int r) { pack_row(rows_, r, x + size_t(r) * size, size, bits); });
  }

  // Take one head's share of a column's queries, keys and values: normalise, rotate, and put it where it is read.
  void place(const Pass& pass, int number, int c, int lot) {
    const Layer& layer = m_.layer[number];
    const int key_heads = m_.key_heads, dim = m_.dim, half = dim / 2;
    const bool query = lot < m_.heads, key = !query && lot < m_.heads + key_heads;
    float* x = &wide_[(size_t(c) * (m_.heads + 2 * key_heads) + lot) * dim];
    const float* norm = query ? layer.query_norm : key ? layer.key_norm : nullptr;
    if (norm) root_mean_square(x, norm, dim, x);
    if (!query && !key) {
      const Entries<Element> slot = entries(pass.slot[c], number);
      Element* to = slot.value(pass.place[c], lot - m_.heads - key_heads);
      for (int i = 0; i < dim; i++) set(to[slot.value_at(i)], x[i]);
      return;
    }
    for (int i = 0; i < half; i++) {
      const float a = x[i], b = x[i + half], cosine = cosine_[c * half + i], sine = sine_[c * half + i];
      x[i] = a * cosine - b * sine;
      x[i + half] = b * cosine + a * sine;
    }
    if (query) {
      Element* to = &query_[(size_t(c) * m_.heads + lot) * dim];
      for (int i = 0; i < dim; i++) set(to[i], x[i]);
    } else {
      const Entries<Element> slot = entries(pass.slot[c], number);
      Element* to = slot.key(pass.place[c], lot - m_.heads);
      for (int i = 0; i < dim; i++) set(to[slot.key_at(i)], x[i]);
    }
  }

  // Cut the pass into tiles of neighbouring columns of the same slot.
  void cut(const Pass& pass) {
    const int most = std::max(1, kQueries / (m_.heads / m_.key_heads));
    tiles_.clear();
    for (int c = 0; c < pass.columns; c++) {
      if (c && pass.slot[c] == pass.slot[c - 1] && c - tiles_.back().first < most)
        tiles_.back().last = c + 1;
      else
        tiles_.push_back({c, c + 1});
    }
  }

  void reserve(int columns) {
    if (columns <= room_) return;
    room_ = columns;
    const int heads = (m_.heads + 2 * m_.key_heads) * m_.dim, tapped = m_.entry ? m_.entry->tapped : 0;
    const int entering = m_.entry ? 2 * m_.hidden : m_.hidden;
    const int widest = padded(std::max({entering, heads, m_.ffn, tapped}));
    const size_t many = columns;
    stream_.resize(many * m_.hidden);
    pair_.resize(many * (m_.entry ? entering : 0));
    fused_.resize(many * (m_.entry ? m_.hidden : 0));
    tapped_.resize(many * tapped);
    normed_.resize(size_t(m_.threads) * m_.hidden);
    wide_.resize(many * widest);
    query_.resize(many * m_.heads * m_.dim);
    cosine_.resize(many * m_.dim / 2);
    sine_.resize(many * m_.dim / 2);
    const int words = widest * int(sizeof(Facing<Element>)) / 4;  // which bytes fit into, too
    words_.resize(many * words);
    scale_.resize(many * widest / kGroup);
    total_.resize(many * widest / kGroup);
    rows_ = {words_.data(), scale_.data(), total_.data(), words, widest / kGroup};
  }

  Model m_;
  Barrier barrier_;
  int choice_;  // ids below it are chosen from
  int room_ = 0;
  std::vector<Tile> tiles_;
  std::vector<Scratch<Element>> scratch_;  // one a thread
  std::vector<float> tapped_, fused_, pair_, states_, stream_, normed_, wide_, cosine_, sine_, scale_, logits_;
  std::vector<Element> query_;
  std::vector<int32_t> words_, total_, none_, best_;
  Rows rows_{};
};

}  // namespace

extern "C" {

void* outrider_open(const Model* model) {
  if (model->pool->bits == 32) return static_cast<Runner*>(new Decoder<float>(*model));
  return static_cast<Runner*>(new Decoder<uint16_t>(*model));
}
void outrider_close(void* decoder) { delete static_cast<Runner*>(decoder); }
void outrider_run(void* decoder, const Pass* pass) { static_cast<Runner*>(decoder)->run(*pass); }
void outrider_grow(void* decoder, const Pass* pass, const Chain* chain) {
  static_cast<Runner*>(decoder)->grow(*pass, *chain);
}
}
