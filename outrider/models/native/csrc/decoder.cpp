// The forward pass of a Llama-like decoder, from tokens to logits in one call. Sequences may have different lengths.
//
// The residual stream is float32. Inputs of a linear layer are rounded to bfloat16, to bytes if its weights are bytes,
// and not at all if its weights are float32. The result at a column does not depend, in any bit, on the other columns of
// the pass.
#include <chrono>

#include "adjust.h"
#include "experts.h"
#include "sampling.h"
#include "linear.h"
#include "parallel.h"
#include "pool.h"
#include "team_size.h"
#include "threads.h"

using namespace outrider;

// Python reads the fields of the structures that it fills from their declarations: runtime/c_structures.py.
extern "C" {

struct Layer {
  Linear qkv, out, gate_up, down;
  Linear value;                            // the value projection in another format; no outputs: `qkv` has it
  Linear router;                           // [experts][hidden]; no outputs: one MLP. `gate_up` and `down` hold all experts
  const float *attention_norm, *mlp_norm;  // [hidden] of the inputs of attention and MLP; or null: they have no norm
  const float *attention_post_norm, *mlp_post_norm;  // [hidden] of their outputs; or null
  const float *query_norm, *key_norm;      // [dim], or [heads * dim] with `wide_norms`; or null
  int32_t window;                          // 0: full attention
  int32_t wide_norms;                      // whether queries and keys are normalized over all heads of a column
  int32_t rotary;                          // the rotary table; -1: queries and keys are not rotated
  int32_t top, normalized;                 // experts of a column; whether their weights add up to 1
};

// How a draft head combines the embedding of a token with the hidden state of the target at the token before it.
struct Entry {
  Linear fuse;                // [hidden][tapped]; no outputs: the auxiliary hidden states are the state
  Linear project;             // [hidden][2 hidden]; no outputs: the first attention layer reads embedding and state
  const float* last_norm;     // [tap] for the last auxiliary hidden state; or null
  const float* tap_norm;      // [tapped] for all of them, `normed` numbers at a time; or null
  const float *embedding_norm, *state_norm;  // [hidden] or null
  int32_t tapped, tap, normed;               // sizes: all auxiliary hidden states, one of them, one normalized part
  int32_t embedding_first, zero_first, residual_normed, recycle_normed;
};

struct Model {
  const Layer* layer;
  const void* embedding;      // [vocab][hidden] numbers of `bits`; null: `table`
  const float* norm;          // [hidden], or null: the LM head reads the output of the last layer without a norm
  const float* frequency;     // [rotaries][rotary_dim / 2]
  const float* rotary_scale;  // [rotaries]
  const Entry* entry;         // null: the input is the embedding alone
  const int32_t* id;          // [head.outputs], ascending: token ids of the outputs; null: output i is token i
  const Pool* pool;
  Linear head;
  Linear table;               // the embedding in panels, if `embedding` is null
  Linear reduce, rank;        // [r][hidden] and [head.outputs][r]: their product approximates the head; no outputs: unused
  int32_t bits;                  // of a number of the model's type: 16 (bfloat16) or 32 (float)
  int32_t layers, hidden, heads, key_heads, dim, ffn, threads;
  int32_t rotaries, rotary_dim;  // rotary tables; leading dimensions of a head that they rotate
  int32_t gelu;                  // whether gates use GELU, approximated by tanh, instead of SiLU
  int32_t candidates;            // with `rank`: panels of the head that get exact logits, the most promising ones
  int32_t rounds_table;          // whether entries of `table` times `table_scale` are rounded to `bits`
  float epsilon, scale;
  float table_scale, embedding_scale, residual_scale, logit_divisor;  // 1 in most models
  float score_cap, logit_cap;    // limits of attention scores and of logits; 0: none
};

// One forward pass. A column is a token at a position. Its keys and values are written to an entry of its slot.
struct Pass {
  const int32_t *token, *position, *slot, *entry;  // [num_columns]
  const int32_t *prefix, *tail_begin, *tail;       // see `Columns` in attention.h
  const int32_t* output_columns;                   // [num_outputs] columns that need logits
  float* logits;                                   // [num_outputs][vocab]
  int32_t* best;                                   // [num_outputs] likeliest ids; -1 if logits are not finite
  const int32_t* export_layers;                    // [num_exports] layers whose outputs are exported
  float* hidden_states;                            // [num_exports][num_columns][hidden]
  float* moments;          // [layers][2 hidden + heads * dim + ffn] to which the squares of the inputs of qkv, out, gate_up
                           // and down are added; or null
  const float* state;      // [num_columns][hidden] hidden state before each column, for a draft head
  int32_t needs_fusion;    // whether `state` is [num_columns][Entry::tapped], before fusion
  int32_t num_columns, num_outputs, num_exports;
};

// Chains of draft tokens that follow a pass with one output column per sequence.
struct Chain {
  const int32_t *slot, *position, *entry;  // [batch_size] of the first draft token
  const int32_t* budget;                   // [batch_size] draft tokens, at least one
  const float *weight, *bias;              // [num_weights] by position: log-odds of acceptance = weight * margin + bias
  const int32_t* end_ids;                  // [num_end_ids] ids that end the text
  int32_t* token;                          // [batch_size][depth]
  int32_t *count, *scored;                 // [batch_size] draft tokens of the draft; draft tokens with a margin
  float *margin, *accept_prob;             // [batch_size][depth] difference of the two largest logits; of the path
  const float* min_draft_prob;             // [batch_size] a sequence stops below [n - 1] if n sequences still draft
  const SamplingParams* params;            // [batch_size]; null: greedy
  const Adjustment* adjustment;            // [batch_size] of the logits; null: none
  const double* uniform;                   // [batch_size][depth] in [0, 1): samples the draft tokens
  const int64_t* race_keys;                // [batch_size][depth] samples them by a race instead; null: by `uniform`
  float* q;                                // [sampled draft tokens][vocab] distributions they were sampled from
  int32_t* q_index;                        // [batch_size][depth] index in `q`; negative: not sampled
  float min_path_prob;                     // draft tokens with a smaller accept_prob are not in the draft
  int32_t batch_size, depth, vocab, num_weights, num_end_ids;  // only ids below vocab are drafted
};
}

namespace {

class Decoder {
 public:
  explicit Decoder(const Model& model)
      : model_(model),
        phases_(model.threads),
        team_size_(model.threads),
        num_candidates_(model.head.outputs),
        attention_(make_attention(*model.pool, heads(0), model.threads)) {
    for (int i = 0; i < model_.layers; i++) {
      const Layer& layer = model_.layer[i];
      if (!layer.router.outputs) continue;
      max_experts_ = std::max(max_experts_, layer.router.outputs);
      max_top_ = std::max(max_top_, layer.top);
      max_expert_ffn_ = std::max(max_expert_ffn_, expert_ffn(layer));
    }
  }

  void run(const Pass& pass) {
    reserve(pass.num_columns);
    touched_experts_ = 0;
    choices_.clear();
    make_tiles(pass);
    const auto start = std::chrono::steady_clock::now();
    const uint32_t phase = phases_.current();
    run_team(team_size_.threads(), [&](int thread, int threads) {
      Team team{phases_, thread, threads, phase};
      if (pass.needs_fusion) fuse(team, pass);
      embed(team, pass);
      if (model_.entry && model_.entry->project.outputs) {
        pack_rows(team, pass.num_columns, pair_.data(), 2 * model_.hidden, model_.entry->project);
        apply<Store::kSet>(team, model_.entry->project, packed_, pass.num_columns, residual_.data(), model_.hidden);
      }
      for (int i = 0; i < model_.layers; i++) {
        attention(team, pass, i, !i && model_.entry && !model_.entry->project.outputs);
        model_.layer[i].router.outputs ? experts(team, pass, model_.layer[i]) : mlp(team, pass, i);
        export_layer(team, pass, i);
      }
      lm_head(team, pass);
      team.join();
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    team_size_.record(pass.num_columns, seconds.count(), phases_.take_sleeps());
  }

  // The distinct experts that the last pass used, summed over layers.
  int64_t touched_experts() const { return touched_experts_; }

  // Copy the experts that the columns of the last pass chose, [layers with experts][num_columns][top].
  void copy_choices(int32_t* out) const { std::copy(choices_.begin(), choices_.end(), out); }

  // Draft a chain for each sequence. The first draft token follows from `pass`, each further one from a pass over the
  // one before it.
  void draft_chains(Pass pass, const Chain& chain) {
    std::vector<int32_t> active(chain.batch_size), fields[6];
    int sampled = 0;
    for (int b = 0; b < chain.batch_size; b++) active[b] = b;
    logits_.resize(size_t(chain.batch_size) * model_.head.outputs);
    best_.resize(chain.batch_size);
    pass.logits = logits_.data();
    pass.best = best_.data();
    num_candidates_ = std::min(chain.vocab, model_.head.outputs);
    for (int depth = 0;; depth++) {
      run(pass);
      std::vector<char> stopped(chain.batch_size);
      const int num_active = int(active.size());
      for (int b : active)
        if (chain.params && chain.params[b].temperature > 0) chain.q_index[b * chain.depth + depth] = sampled++;
      const auto extend = [&](int i) {
        const int b = active[i];
        float* logits = &logits_[size_t(i) * model_.head.outputs];
        if (chain.adjustment && best_[i] >= 0) {
          adjust(logits, model_.head.outputs, chain.adjustment[b], chain.token + size_t(b) * chain.depth, depth, model_.id);
          best_[i] = likeliest(logits, num_candidates_);
        }
        stopped[b] = add_draft_token(chain, b, depth, best_[i], logits, chain.min_draft_prob[num_active - 1]);
      };
      parallel_for(num_active, extend, chain.params ? model_.threads : 1);
      const auto done = [&](int b) { return chain.budget[b] <= depth + 1 || stopped[b]; };
      std::vector<int32_t> previous_columns;  // of the sequences that draft further
      for (size_t i = 0; i < active.size(); i++)
        if (!done(active[i])) previous_columns.push_back(pass.output_columns[i]);
      active.erase(std::remove_if(active.begin(), active.end(), done), active.end());
      if (active.empty()) break;
      for (auto& field : fields) field.clear();
      for (size_t i = 0; i < active.size(); i++) {
        const int b = active[i];
        const int32_t column[] = {chain.token[b * chain.depth + depth],
                                  chain.position[b] + depth,
                                  chain.slot[b],
                                  chain.entry[b] + depth,
                                  chain.entry[b] + depth + 1,
                                  int32_t(i)};
        for (int f = 0; f < 6; f++) fields[f].push_back(column[f]);
      }
      const int count = int(active.size());
      empty_tails_.assign(count + 1, 0);
      if (model_.entry) save_states(previous_columns);
      pass = {fields[0].data(), fields[1].data(), fields[2].data(), fields[3].data(), fields[4].data(),
              empty_tails_.data(), nullptr, fields[5].data(), logits_.data(), best_.data(), nullptr, nullptr,
              nullptr, states_.data(), 0, count, count, 0};
    }
    num_candidates_ = model_.head.outputs;
  }

 private:
  // Save the outputs at some columns of a pass as the hidden states of the next pass.
  void save_states(const std::vector<int32_t>& columns) {
    states_.resize(columns.size() * model_.hidden);
    for (size_t i = 0; i < columns.size(); i++)
      normalize_or_copy(&residual_[size_t(columns[i]) * model_.hidden],
                        model_.entry->recycle_normed ? model_.norm : nullptr, model_.hidden,
                        &states_[i * model_.hidden]);
  }

  // Choose and record one draft token. Return whether its sequence stops drafting.
  bool add_draft_token(const Chain& chain, int b, int depth, int best, const float* logits,
                       float min_draft_prob) const {
    const size_t at = size_t(b) * chain.depth + depth;
    chain.token[at] = choose_token(chain, b, at, best, logits);
    chain.margin[at] =
        best < 0 ? 0.0f : logits[best] - max_except(logits, std::min(chain.vocab, model_.head.outputs), best);
    const int i = std::min(depth, chain.num_weights - 1);
    const float log_odds = chain.weight[i] * chain.margin[at] + chain.bias[i];
    chain.accept_prob[at] = (depth ? chain.accept_prob[at - 1] : 1.0f) / (1 + std::exp(-log_odds));
    chain.count[b] = depth + (chain.accept_prob[at] >= chain.min_path_prob);
    chain.scored[b] = depth + 1;
    const auto* end = chain.end_ids + chain.num_end_ids;
    return chain.count[b] <= depth || chain.accept_prob[at] < min_draft_prob ||
           std::find(chain.end_ids, end, chain.token[at]) != end;
  }

  // Return the likeliest id, or sample one and write its distribution to `chain.q`.
  int32_t choose_token(const Chain& chain, int b, size_t at, int best, const float* logits) const {
    const int32_t best_id = model_.id ? model_.id[std::max(0, best)] : std::max(0, best);
    if (!chain.params || chain.q_index[at] < 0) return best_id;
    float* q = chain.q + size_t(chain.q_index[at]) * chain.vocab;
    if (best < 0) {  // the logits are not finite: q is one-hot
      std::fill(q, q + chain.vocab, 0.0f);
      q[best_id] = 1;
      return best_id;
    }
    const int num_logits = std::min(chain.vocab, model_.head.outputs);
    if (!model_.id) {
      std::copy(logits, logits + num_logits, q);
      std::fill(q + num_logits, q + chain.vocab, -INFINITY);
      apply_sampling(q, chain.vocab, chain.params[b]);
      return int32_t(draw(chain, at, q, chain.vocab));
    }
    // A draft vocabulary: compute probabilities only for its ids.
    thread_local std::vector<float> probs;
    const auto* end = std::lower_bound(model_.id, model_.id + num_logits, chain.vocab);
    probs.assign(logits, logits + (end - model_.id));
    apply_sampling(probs.data(), int(probs.size()), chain.params[b]);
    std::fill(q, q + chain.vocab, 0.0f);
    for (size_t i = 0; i < probs.size(); i++) q[model_.id[i]] = probs[i];
    if (chain.race_keys) return int32_t(draw(chain, at, q, chain.vocab));  // its noise belongs to ids of the target
    return model_.id[draw(chain, at, probs.data(), int(probs.size()))];
  }

  static int64_t draw(const Chain& chain, size_t at, const float* mass, int size) {
    return chain.race_keys ? sample_race(mass, size, uint64_t(chain.race_keys[at]))
                           : sample(mass, size, chain.uniform[at]);
  }

  // Return the largest logit of all ids except `best`.
  static float max_except(const float* logits, int vocab, int best) {
    return std::max(peak(logits, best), peak(logits + best + 1, vocab - best - 1));
  }

  // Every thread calls the functions that take a team.

  // Write the embedding of a token [hidden].
  void embed(int token, float* out) const {
    const size_t begin = size_t(token) * model_.hidden;
    if (model_.embedding && model_.bits == 32) {
      std::memcpy(out, static_cast<const float*>(model_.embedding) + begin, 4 * size_t(model_.hidden));
      return;
    }
    if (model_.embedding) {
      const uint16_t* from = static_cast<const uint16_t*>(model_.embedding) + begin;
      for (int i = 0; i < model_.hidden; i++) out[i] = to_float(from[i]);
      return;
    }
    const auto rounded = [&](float value) {
      return model_.rounds_table && model_.bits == 16 ? to_float(to_bfloat16(value)) : value;
    };
    read_row(model_.table, token, model_.hidden, out);
    for (int i = 0; i < model_.hidden; i++) out[i] = rounded(rounded(out[i]) * model_.table_scale);
  }

  // Write the embeddings to the residual stream, and compute rotary angles.
  void embed(Team& team, const Pass& pass) {
    const int half = model_.rotary_dim / 2;
    const int angles = model_.rotaries * half;
    team.share(pass.num_columns, [&](int c) {
      float* out = &residual_[size_t(c) * model_.hidden];
      embed(pass.token[c], out);
      if (model_.embedding_scale != 1)
        for (int i = 0; i < model_.hidden; i++) out[i] *= model_.embedding_scale;
      if (model_.entry) join_state(pass, c);
      for (int i = 0; i < angles; i++) {
        const float angle = float(pass.position[c]) * model_.frequency[i];
        const float scale = model_.rotary_scale[i / half];
        cosine_[size_t(c) * angles + i] = std::cos(angle) * scale;
        sine_[size_t(c) * angles + i] = std::sin(angle) * scale;
      }
    });
  }

  // Fuse the auxiliary hidden states of each column into one state.
  void fuse(Team& team, const Pass& pass) {
    const Entry& entry = *model_.entry;
    const int size = entry.tapped;
    const int last = size - entry.tap;
    team.share(pass.num_columns, [&](int c) {
      float* x = &aux_states_[size_t(c) * size];
      std::memcpy(x, pass.state + size_t(c) * size, 4 * size_t(size));
      if (entry.last_norm) rms_norm(x + last, entry.last_norm, entry.tap, x + last);
      for (int i = 0; entry.tap_norm && i < size; i += entry.normed)
        rms_norm(x + i, entry.tap_norm + i, entry.normed, x + i);
      if (entry.fuse.outputs)
        pack_row(packed_, c, x, size, entry.fuse);
      else
        std::memcpy(&fused_[size_t(c) * size], x, 4 * size_t(size));
    });
    if (entry.fuse.outputs)
      apply<Store::kSet>(team, entry.fuse, packed_, pass.num_columns, fused_.data(), model_.hidden);
  }

  // Concatenate the embedding of a column, which is in the residual stream, with the state before it. Then write the
  // state to the residual stream.
  void join_state(const Pass& pass, int c) {
    const Entry& entry = *model_.entry;
    const int size = model_.hidden;
    float* residual = &residual_[size_t(c) * size];
    float* pair = &pair_[size_t(c) * 2 * size];
    float* embedding = pair + (entry.embedding_first ? 0 : size);
    float* state = pair + (entry.embedding_first ? size : 0);
    const float* input = (pass.needs_fusion ? fused_.data() : pass.state) + size_t(c) * size;
    if (entry.zero_first && !pass.position[c])
      std::memset(embedding, 0, 4 * size_t(size));
    else
      normalize_or_copy(residual, entry.embedding_norm, size, embedding);
    normalize_or_copy(input, entry.state_norm, size, state);
    std::memcpy(residual, entry.residual_normed ? state : input, 4 * size_t(size));
  }

  void attention(Team& team, const Pass& pass, int number, bool reads_pair) {
    const Layer& layer = model_.layer[number];
    const int width = model_.heads * model_.dim;
    const int qkv_width = width + 2 * model_.key_heads * model_.dim;
    if (reads_pair)
      pack_rows(team, pass.num_columns, pair_.data(), 2 * model_.hidden, layer.qkv);
    else
      normalize_rows(team, pass.num_columns, nullptr, layer.attention_norm, layer.qkv);
    add_moments(team, pass, number, 0, residual_.data(), model_.hidden, layer.attention_norm);
    apply<Store::kSet>(team, layer.qkv, packed_, pass.num_columns, wide_.data(), qkv_width);
    if (layer.value.outputs) {
      normalize_rows(team, pass.num_columns, nullptr, layer.attention_norm, layer.value);
      apply<Store::kSet>(team, layer.value, packed_, pass.num_columns, wide_.data() + layer.qkv.outputs, qkv_width);
    }
    if (layer.wide_norms)
      team.share(pass.num_columns, [&](int c) {
        float* x = &wide_[size_t(c) * qkv_width];
        rms_norm(x, layer.query_norm, width, x);
        rms_norm(x + width, layer.key_norm, model_.key_heads * model_.dim, x + width);
      });
    const int all_heads = model_.heads + 2 * model_.key_heads;
    team.share(pass.num_columns * all_heads, [&](int i) { store_head(pass, number, i / all_heads, i % all_heads); });
    const Columns columns{pass.position, pass.prefix, pass.tail_begin, pass.tail};
    const Heads of_layer = heads(layer.window);
    const int size = int(tiles_.size()) * model_.key_heads;
    const auto tile = [&](int i) -> const Tile& { return tiles_[i / model_.key_heads]; };
    const auto slot = [&](int i) { return pass.slot[tile(i).first]; };
    const auto head = [&](int i) { return i % model_.key_heads; };
    if (shares_sections_) {
      int sections = 0;
      for (const Tile& each : tiles_) sections = std::max(sections, reach_of(columns, each, of_layer).sections());
      const auto attend = [&](int i) {
        const int j = i / sections;
        attention_->attend_section(columns, tile(j), slot(j), number, head(j), of_layer, i % sections, i, team.thread);
      };
      team.share(size * sections, attend, 1);
      team.share(size, [&](int i) {
        attention_->add_sections(tile(i), head(i), of_layer, i * sections, sections, wide_.data(), team.thread);
      });
    } else {
      team.share_interleaved(size, [&](int i) {
        attention_->attend(columns, tile(i), slot(i), number, head(i), of_layer, wide_.data(), team.thread);
      });
    }
    pack_rows(team, pass.num_columns, wide_.data(), width, layer.out);
    add_moments(team, pass, number, model_.hidden, wide_.data(), width);
    add_output(team, pass.num_columns, layer.out, layer.attention_post_norm);
  }

  // Multiply the packed rows with the last linear layer of attention or of an MLP, and add the result to the residual
  // stream, after a norm and a factor if the model has them.
  void add_output(Team& team, int rows, const Linear& linear, const float* norm) {
    const int hidden = model_.hidden;
    if (!norm && model_.residual_scale == 1)
      return apply<Store::kAdd>(team, linear, packed_, rows, residual_.data(), hidden);
    apply<Store::kSet>(team, linear, packed_, rows, output_.data(), hidden);
    const Floats scale = broadcast(model_.residual_scale);
    team.share(rows, [&](int r) {
      float* x = &output_[size_t(r) * hidden];
      float* out = &residual_[size_t(r) * hidden];
      if (norm) rms_norm(x, norm, hidden, x);
      for (int i = 0; i < hidden; i += kLanes) store(out + i, load(out + i) + scale * load(x + i));
    });
  }

  Heads heads(int window) const {
    return {model_.heads, model_.key_heads, model_.dim, model_.scale, model_.score_cap, window};
  }

  void mlp(Team& team, const Pass& pass, int number) {
    const Layer& layer = model_.layer[number];
    const int first = model_.hidden + model_.heads * model_.dim;  // moment of the MLP
    normalize_rows(team, pass.num_columns, nullptr, layer.mlp_norm, layer.gate_up);
    add_moments(team, pass, number, first, residual_.data(), model_.hidden, layer.mlp_norm);
    if (model_.gelu)
      apply<Store::kGeluGate>(team, layer.gate_up, packed_, pass.num_columns, wide_.data(), model_.ffn);
    else
      apply<Store::kGate>(team, layer.gate_up, packed_, pass.num_columns, wide_.data(), model_.ffn);
    pack_rows(team, pass.num_columns, wide_.data(), model_.ffn, layer.down);
    add_moments(team, pass, number, first + model_.hidden, wide_.data(), model_.ffn);
    add_output(team, pass.num_columns, layer.down, layer.mlp_post_norm);
  }

  // Add the squares of the inputs of a linear layer, x [num_columns][size] after RMSNorm if it has weights, to the moments
  // of layer `number` from index `first` on. One thread adds them in order. Those of the first token of a text are left
  // out: in many models a few of them are larger than all others by orders of magnitude.
  void add_moments(Team& team, const Pass& pass, int number, int first, const float* x, int size,
                   const float* norm = nullptr) {
    if (!pass.moments) return;
    team.share(1, [&](int) {
      const size_t stride = 2 * model_.hidden + model_.heads * model_.dim + model_.ffn;
      float* moments = pass.moments + number * stride + first;
      std::vector<float> row(size);
      for (int c = 0; c < pass.num_columns; c++) {
        if (!pass.position[c]) continue;
        const float* from = x + size_t(c) * size;
        norm ? rms_norm(from, norm, size, row.data()) : void(std::copy_n(from, size, row.data()));
        for (int i = 0; i < size; i++) moments[i] += row[i] * row[i];
      }
    });
  }

  static int expert_ffn(const Layer& layer) { return layer.gate_up.outputs / layer.router.outputs / 2; }

  // An MLP of routed experts (Shazeer et al. 2017).
  void experts(Team& team, const Pass& pass, const Layer& layer) {
    const int hidden = model_.hidden;
    const int ffn = expert_ffn(layer);
    const int count = layer.router.outputs;
    const int top = layer.top;
    const int rows = pass.num_columns * top;
    team.share(pass.num_columns, [&](int c) {
      float* x = &mlp_input_[size_t(c) * hidden];
      rms_norm(&residual_[size_t(c) * hidden], layer.mlp_norm, hidden, x);
      pack_row(routed_, c, x, hidden, layer.router);
    });
    apply<Store::kSet>(team, layer.router, routed_, pass.num_columns, router_logits_.data(), count);
    team.share(pass.num_columns, [&](int c) {
      choose_experts(&router_logits_[size_t(c) * count], count, top, layer.normalized,
                     &assignment_.expert[size_t(c) * top], &assignment_.weight[size_t(c) * top]);
    });
    team.share(1, [&](int) {
      assignment_.sort(pass.num_columns, top, count);
      touched_experts_ += int64_t(assignment_.groups.size());
      choices_.insert(choices_.end(), assignment_.expert.begin(), assignment_.expert.begin() + rows);
    });
    team.share(rows, [&](int r) {
      pack_row(routed_, r, &mlp_input_[size_t(assignment_.column[r]) * hidden], hidden, layer.gate_up);
    });
    apply_experts<Store::kGate>(team, layer.gate_up, 2 * ffn, assignment_.groups, routed_, expert_wide_.data(), ffn);
    team.share(rows, [&](int r) { pack_row(routed_, r, &expert_wide_[size_t(r) * ffn], ffn, layer.down); });
    apply_experts<Store::kSet>(team, layer.down, hidden, assignment_.groups, routed_, expert_out_.data(), hidden);
    team.share(pass.num_columns, [&](int c) {
      float* out = &residual_[size_t(c) * hidden];
      for (int i = c * top; i < (c + 1) * top; i++) {
        const float* x = &expert_out_[size_t(assignment_.row[i]) * hidden];
        const Floats weight = broadcast(assignment_.weight[i]);
        for (int h = 0; h < hidden; h += kLanes) store(out + h, load(out + h) + weight * load(x + h));
      }
    });
  }

  void export_layer(Team& team, const Pass& pass, int layer) {
    for (int e = 0; e < pass.num_exports; e++) {
      if (pass.export_layers[e] != layer) continue;
      team.share(pass.num_columns, [&](int c) {
        const size_t size = model_.hidden;
        float* to = pass.hidden_states + (size_t(e) * pass.num_columns + c) * size;
        std::memcpy(to, &residual_[c * size], 4 * size);
      });
    }
  }

  // Compute logits with the low-rank factors of the LM head. Then compute those of the most promising panels exactly.
  void candidate_logits(Team& team, const Pass& pass) {
    const int rows = pass.num_outputs;
    const int outputs = model_.head.outputs;
    const int count = model_.candidates;
    normalize_rows(team, rows, pass.output_columns, model_.norm, model_.reduce);
    apply<Store::kSet>(team, model_.reduce, packed_, rows, reduced_.data(), model_.reduce.outputs);
    pack_rows(team, rows, reduced_.data(), model_.reduce.outputs, model_.rank);
    apply<Store::kSet>(team, model_.rank, packed_, rows, pass.logits, outputs);
    normalize_rows(team, rows, pass.output_columns, model_.norm, model_.head);
    const auto choose = [&](int r) {
      choose_panels(pass.logits + size_t(r) * outputs, outputs, count, &panels_[size_t(r) * count]);
    };
    team.share(rows, choose, 1);
    MatrixUnits units;
    const auto work = [&](int i) {
      const int r = i / count;
      compute_panel<Store::kSet>(units, model_.head, panels_[i], packed_, r, r + 1, pass.logits, outputs);
    };
    team.share(rows * count, work, panels_per_step(model_.head, 1));
  }

  // Write the numbers of the `count` panels with the largest logits.
  static void choose_panels(const float* logits, int outputs, int count, int32_t* out) {
    thread_local std::vector<std::pair<float, int32_t>> panels;
    panels.clear();
    for (int begin = 0; begin < outputs; begin += kPanel) {
      float most = -INFINITY;  // NaN is never larger
      for (int i = begin; i < std::min(begin + kPanel, outputs); i++) most = logits[i] > most ? logits[i] : most;
      panels.emplace_back(-most, int32_t(panels.size()));
    }
    std::nth_element(panels.begin(), panels.begin() + (count - 1), panels.end());
    for (int i = 0; i < count; i++) out[i] = panels[i].second;
  }

  void lm_head(Team& team, const Pass& pass) {
    if (model_.rank.outputs) {
      candidate_logits(team, pass);
    } else {
      normalize_rows(team, pass.num_outputs, pass.output_columns, model_.norm, model_.head);
      apply<Store::kSet>(team, model_.head, packed_, pass.num_outputs, pass.logits, model_.head.outputs);
    }
    const auto choose = [&](int k) {
      float* logits = pass.logits + size_t(k) * model_.head.outputs;
      if (model_.logit_divisor != 1)
        for (int i = 0; i < model_.head.outputs; i++) logits[i] /= model_.logit_divisor;
      if (model_.logit_cap) cap(logits, model_.head.outputs, model_.logit_cap);
      pass.best[k] = likeliest(logits, num_candidates_);
    };
    team.share(pass.num_outputs, choose, 1);
  }

  static void cap(float* x, int size, float limit) {
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) store(x + i, capped(load(x + i), limit));
    for (; i < size; i++) x[i] = capped(broadcast(x[i]), limit)[0];
  }

  // Pack rows of the residual stream for a linear layer, after RMSNorm (Zhang and Sennrich 2019) if it has weights.
  // `columns` selects the rows; null: the first `rows` rows.
  void normalize_rows(Team& team, int rows, const int32_t* columns, const float* weight, const Linear& layer) {
    team.share(rows, [&](int r) {
      float* out = &normed_[size_t(team.thread) * model_.hidden];
      const float* from = &residual_[size_t(columns ? columns[r] : r) * model_.hidden];
      if (weight) rms_norm(from, weight, model_.hidden, out);
      pack_row(packed_, r, weight ? out : from, model_.hidden, layer);
    });
  }

  void normalize_or_copy(const float* x, const float* weight, int size, float* out) const {
    if (weight) return rms_norm(x, weight, size, out);
    std::memcpy(out, x, 4 * size_t(size));
  }

  void rms_norm(const float* x, const float* weight, int size, float* out) const {
    Floats squares = {};
    for (int i = 0; i < size; i += kLanes) squares += load(x + i) * load(x + i);
    const float scale = 1 / std::sqrt(sum(squares) / size + model_.epsilon);
    for (int i = 0; i < size; i += kLanes) store(out + i, load(x + i) * scale * load(weight + i));
  }

  void pack_rows(Team& team, int rows, const float* x, int size, const Linear& layer) {
    team.share(rows, [&](int r) { pack_row(packed_, r, x + size_t(r) * size, size, layer); });
  }

  // Take head number `head` of a column's queries, keys and values. Normalize and rotate it, and store it in the query
  // buffer or in the cache.
  void store_head(const Pass& pass, int number, int c, int head) {
    const Layer& layer = model_.layer[number];
    const int key_heads = model_.key_heads;
    const int dim = model_.dim;
    const bool is_query = head < model_.heads;
    const bool is_key = !is_query && head < model_.heads + key_heads;
    float* x = &wide_[(size_t(c) * (model_.heads + 2 * key_heads) + head) * dim];
    const float* norm = is_query ? layer.query_norm : is_key ? layer.key_norm : nullptr;
    if (norm && !layer.wide_norms) rms_norm(x, norm, dim, x);
    if (!is_query && !is_key)
      return attention_->set_value(pass.slot[c], number, pass.entry[c], head - model_.heads - key_heads, x);
    if (layer.rotary >= 0) rotate(c, layer.rotary, x);
    if (is_query)
      attention_->set_query(c, head, x);
    else
      attention_->set_key(pass.slot[c], number, pass.entry[c], head - model_.heads, x);
  }

  // Rotate the leading dimensions of a query or key of a column by the angles of a rotary table.
  void rotate(int c, int table, float* x) const {
    const int half = model_.rotary_dim / 2;
    const size_t first = (size_t(c) * model_.rotaries + table) * half;
    for (int i = 0; i < half; i++) {
      const float a = x[i];
      const float b = x[i + half];
      const float cosine = cosine_[first + i];
      const float sine = sine_[first + i];
      x[i] = a * cosine - b * sine;
      x[i + half] = b * cosine + a * sine;
    }
  }

  // Divide the pass into tiles of adjacent columns of the same slot.
  void make_tiles(const Pass& pass) {
    const int max_columns = std::max(1, kMaxTileRows / (model_.heads / model_.key_heads));
    tiles_.clear();
    for (int c = 0; c < pass.num_columns; c++) {
      if (c && pass.slot[c] == pass.slot[c - 1] && c - tiles_.back().first < max_columns)
        tiles_.back().last = c + 1;
      else
        tiles_.push_back({c, c + 1});
    }
    // The sections of a long text are shared out too if there are few tiles.
    constexpr int kTilesPerThread = 4;
    const int size = int(tiles_.size()) * model_.key_heads;
    int width = 0, sections = 0;
    for (const Tile& tile : tiles_) {
      width = std::max(width, tile.last - tile.first);
      sections = std::max(sections, reach_of({pass.position, pass.prefix, pass.tail_begin, pass.tail}, tile, heads(0)).sections());
    }
    shares_sections_ = sections > 1 && size < kTilesPerThread * model_.threads;
    attention_->reserve(pass.num_columns, shares_sections_ ? size * sections : 0, width);
  }

  // Grow the buffers for a pass of this many columns.
  void reserve(int columns) {
    packed_.count = columns;
    routed_.count = columns * max_top_;
    if (columns <= capacity_) return;
    capacity_ = columns;
    const int heads = (model_.heads + 2 * model_.key_heads) * model_.dim;
    const int aux_size = model_.entry ? model_.entry->tapped : 0;
    const int input_size = model_.entry ? 2 * model_.hidden : model_.hidden;
    const int widest = padded(std::max({input_size, heads, model_.ffn, aux_size, model_.reduce.outputs}));
    const size_t count = columns;
    residual_.resize(count * model_.hidden);
    pair_.resize(count * (model_.entry ? input_size : 0));
    fused_.resize(count * (model_.entry ? model_.hidden : 0));
    aux_states_.resize(count * aux_size);
    normed_.resize(size_t(model_.threads) * model_.hidden);
    wide_.resize(count * widest);
    output_.resize(count * model_.hidden);
    reduced_.resize(count * model_.reduce.outputs);
    panels_.resize(count * model_.candidates);
    cosine_.resize(count * model_.rotaries * model_.rotary_dim / 2);
    sine_.resize(count * model_.rotaries * model_.rotary_dim / 2);
    const int words = row_words(widest);
    words_.resize(count * words);
    packed_ = {words_.data(), words, columns};
    if (max_experts_) reserve_experts(columns);
  }

  // Grow the buffers of routed experts for a pass of this many columns.
  void reserve_experts(int columns) {
    const size_t rows = size_t(columns) * max_top_;
    const int widest = padded(std::max(model_.hidden, max_expert_ffn_));
    const int words = row_words(widest);  // for the inputs of the router, too
    mlp_input_.resize(size_t(columns) * model_.hidden);
    router_logits_.resize(size_t(columns) * max_experts_);
    assignment_.reserve(columns, max_top_, max_experts_);
    expert_wide_.resize(rows * max_expert_ffn_);
    expert_out_.resize(rows * model_.hidden);
    routed_words_.resize(rows * words);
    routed_ = {routed_words_.data(), words, int(rows)};
  }

  Model model_;
  Phases phases_;
  TeamSize team_size_;
  int num_candidates_;  // `best` is the likeliest of the ids below it
  int capacity_ = 0;    // columns that the buffers have space for
  std::unique_ptr<Attention> attention_;
  std::vector<Tile> tiles_;
  bool shares_sections_;  // the threads share the sections of a tile
  // [columns][...]. `pair_` holds embedding and state of a draft head. `wide_` holds the outputs of qkv, attention and
  // gate_up, and `output_` those of attention and MLP before a norm or a factor.
  std::vector<float> aux_states_, fused_, pair_, states_, residual_, normed_, wide_, output_, cosine_, sine_;
  std::vector<float> logits_, reduced_;
  std::vector<int32_t> panels_;  // [columns][candidates] of the head, which get exact logits
  std::vector<int32_t> words_, empty_tails_, best_;
  Rows packed_{};  // inputs of the next linear layer
  // Routed experts. A row is a column with one of its experts.
  int max_experts_ = 0, max_top_ = 0, max_expert_ffn_ = 0;  // of all layers
  Assignment assignment_;
  int64_t touched_experts_ = 0;    // by the last pass
  std::vector<int32_t> choices_;  // of the last pass, [layers with experts][columns][top]
  std::vector<float> mlp_input_, router_logits_;            // [columns][...]
  std::vector<float> expert_wide_, expert_out_;  // [rows][...]
  std::vector<int32_t> routed_words_;               // [rows][...]
  Rows routed_{};  // inputs of the router, with a row for each column, or of the experts
};

}  // namespace

extern "C" {

void* outrider_open(const Model* model) { return new Decoder(*model); }
void outrider_close(void* decoder) { delete static_cast<Decoder*>(decoder); }
void outrider_run(void* decoder, const Pass* pass) { static_cast<Decoder*>(decoder)->run(*pass); }
void outrider_draft_chains(void* decoder, const Pass* pass, const Chain* chain) {
  static_cast<Decoder*>(decoder)->draft_chains(*pass, *chain);
}
int64_t outrider_touched_experts(const void* decoder) { return static_cast<const Decoder*>(decoder)->touched_experts(); }
void outrider_copy_choices(const void* decoder, int32_t* out) { static_cast<const Decoder*>(decoder)->copy_choices(out); }
}
